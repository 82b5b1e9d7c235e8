"""Operators of ten projects of the package index whose kernels nobody here had seen, chosen by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.peers.corpus import Pair, case, drawn, get, with_gradients


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


# ---------------------------------------------------------------- AdaSplash: attention by entmax


def entmax15(scores: Tensor) -> Tensor:
    """The 1.5-entmax of each row, by bisection: the weights max(s/2 - t, 0)^2 that sum to one."""
    half = scores.double() / 2
    low, high = half.amax(-1, keepdim=True) - 1, half.amax(-1, keepdim=True)
    for _ in range(60):
        middle = (low + high) / 2
        over = (half - middle).clamp(min=0).square().sum(-1, keepdim=True) >= 1
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return (half - low).clamp(min=0).square()


@case("adasplash/entmax")
def _() -> Pair:
    x = drawn(6, 96)
    return get("adasplash.triton_entmax_v1")(x, alpha=1.5), entmax15(x)


@case("adasplash/entmax_of_histograms")
def _() -> Pair:
    x = drawn(6, 96)
    return get("adasplash.triton_entmax_v2")(x, alpha=1.5), entmax15(x)


@case("adasplash/attention")
def _() -> Pair:
    q, k, v = (drawn(1, 2, 128, 32, seed=seed) for seed in range(3))
    ours = get("adasplash.adasplash_v1")(q, k, v, alpha=1.5, is_causal=False)
    return ours, entmax15(q @ k.mT / 32**0.5) @ v.double()


# ---------------------------------------------------------------- Cut Cross Entropy


@case("cut_cross_entropy/linear_cross_entropy")
def _() -> Pair:
    targets = torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(2)).to("cuda")
    ours = get("cut_cross_entropy.linear_cross_entropy")
    rows, weights = drawn(40, 64, dtype=torch.bfloat16), drawn(200, 64, seed=1, dtype=torch.bfloat16)
    return with_gradients(
        lambda e, c: ours(e, c, targets, impl="cce", filter_eps=None),
        lambda e, c: functional.cross_entropy(e.float() @ c.float().T, targets),
        rows,
        weights,
    )


# ---------------------------------------------------------------- Flash k-means


@case("flash_kmeans/assign")
def _() -> Pair:
    x, centroids = drawn(1, 300, 32), drawn(1, 20, 32, seed=1)
    ours = get("flash_kmeans.assign_euclid_triton.euclid_assign_triton")(x, centroids, (x * x).sum(-1))
    return ours, torch.cdist(x, centroids).argmin(-1)


@case("flash_kmeans/centroids")
def _() -> Pair:
    x, old = drawn(1, 300, 32), drawn(1, 20, 32, seed=1)
    nearest = torch.cdist(x, old).argmin(-1)
    ours = get("flash_kmeans.centroid_update_triton.triton_centroid_update_euclid")(x, nearest, old)
    sums = torch.zeros_like(old).index_add_(1, nearest[0], x)
    counts = torch.bincount(nearest[0], minlength=20)[None, :, None]
    return (ours[0] if isinstance(ours, tuple) else ours), torch.where(counts > 0, sums / counts.clamp(min=1), old)


# ---------------------------------------------------------------- TurboQuant: a random Hadamard transform


@case("fused_turboquant/rht")
def _() -> Pair:
    x = drawn(6, 64)
    signs = get("fused_turboquant.core.hadamard.generate_rht_signs")(64, 0, "cuda")
    ours = get("fused_turboquant.kernels.triton_rht.triton_rht")(x, signs)
    return ours, get("fused_turboquant.core.hadamard.randomized_hadamard")(x, signs)


# ---------------------------------------------------------------- attention with forward-mode derivatives


@case("jvp_flash_attention/attention")
def _() -> Pair:
    ours = get("jvp_flash_attention.jvp_attention.JVPAttn")
    inputs = [drawn(1, 2, 64, 32, seed=seed, dtype=torch.float16) for seed in range(3)]
    options: dict[str, Any] = dict(causal=True, warp_specialize=False, USE_TMA=False)
    return with_gradients(
        lambda q, k, v: ours.fwd(q, k, v, **options), lambda q, k, v: attended(q, k, v, causal=True), *inputs
    )


# ---------------------------------------------------------------- late interaction


@case("late_interaction_kernels/maxsim")
def _() -> Pair:
    reference = lambda q, d: torch.einsum("ash,bth->abst", q, d).amax(-1).sum(-1)
    queries, documents = drawn(3, 16, 64), drawn(4, 40, 64, seed=1)
    return with_gradients(get("late_interaction_kernels.maxsim"), reference, queries, documents)


# ---------------------------------------------------------------- MoE operators


@case("moe_ops/topk_softmax")
def _() -> Pair:
    logits = drawn(12, 16)
    values, indices = logits.topk(4)
    ours = get("moe_ops.fused_topk_softmax_ops.fused_topk_softmax")(logits, 4)
    return list(ours), [values.softmax(-1), indices]


@case("moe_ops/grouped_gemm")
def _() -> Pair:
    ends = torch.tensor([0, 20, 20, 50], dtype=torch.int32, device="cuda")
    a, b = drawn(50, 64, dtype=torch.bfloat16), drawn(3, 48, 64, seed=1, dtype=torch.bfloat16)
    bounds = ends.tolist()

    def reference(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a[i:j] @ b[n].T for n, (i, j) in enumerate(pairwise(bounds))])

    return with_gradients(lambda a, b: get("moe_ops.grouped_gemm_ops.grouped_gemm")(a, b, ends), reference, a, b)


@case("moe_ops/permute_and_back")
def _() -> Pair:
    x, weights = drawn(10, 64), drawn(10, 2, seed=1).softmax(-1)
    chosen = torch.randint(0, 4, (10, 2), generator=torch.Generator().manual_seed(0)).to("cuda", torch.int32)
    permute, unpermute = get("moe_ops.permute"), get("moe_ops.unpermute")

    def ours(x: Tensor) -> Tensor:
        moved, places, *_ = permute(x, chosen, E=4)
        return unpermute(moved, places, weights, 10, 2)

    return with_gradients(ours, lambda x: x * weights.sum(-1, keepdim=True), x)


# ---------------------------------------------------------------- trifast: triangle attention


@case("trifast/triangle_attention")
def _() -> Pair:
    q, k, v = (drawn(1, 2, 20, 20, 32, seed=seed) for seed in range(3))
    bias, mask = drawn(1, 2, 20, 20, seed=3), drawn(1, 20, 20, seed=4) > 1

    def reference(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        scores = torch.einsum("bhijd,bhikd->bhijk", q, k) / 32**0.5 + b[:, :, None]
        return scores.masked_fill(mask[:, None, :, None], -1e9).softmax(-1) @ v

    ours = lambda q, k, v, b: get("trifast.triangle_attention")(q, k, v, b, mask)
    return with_gradients(ours, reference, q, k, v, bias)


# ---------------------------------------------------------------- triton-augment: images


def image() -> Tensor:
    return (drawn(2, 3, 20, 28).sigmoid()).contiguous()


@case("triton_augment/normalize")
def _() -> Pair:
    mean, spread = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    column = lambda numbers: torch.tensor(numbers, device="cuda").view(3, 1, 1)
    x = image()
    return get("triton_augment.functional.normalize")(x, mean, spread), (x - column(mean)) / column(spread)


@case("triton_augment/saturation")
def _() -> Pair:
    x = image()
    grey = (x * torch.tensor([0.2989, 0.587, 0.114], device="cuda").view(3, 1, 1)).sum(1, keepdim=True)
    return get("triton_augment.functional.adjust_saturation")(x, 1.4), (1.4 * x - 0.4 * grey).clamp(0, 1)


@case("triton_augment/crop_and_flip")
def _() -> Pair:
    x, module = image(), "triton_augment.functional"
    ours = get(f"{module}.horizontal_flip")(get(f"{module}.crop")(x, 3, 5, 12, 16))
    return ours, x[..., 3:15, 5:21].flip(-1)


# ---------------------------------------------------------------- mLSTM


def mlstm(name: str) -> None:
    @case(f"mlstm_kernels/{name}")
    def _() -> Pair:
        q, k, v = (drawn(1, 2, 64, 32, seed=seed) for seed in range(3))
        gates = [drawn(1, 2, 64, seed=3), drawn(1, 2, 64, seed=4) + 3]
        options: dict[str, Any] = dict(chunk_size=32, autocast_kernel_dtype=torch.float32)
        ours = lambda *x: get(f"mlstm_kernels.torch.chunkwise.{name}")(*x, **options)
        # the backward leaves out the gradient of the normaliser, as that of the kernels does
        native = get("mlstm_kernels.torch.chunkwise.mlstm_chunkwise__native_custbw")
        theirs = lambda *x: native(*x, chunk_size=32)
        return with_gradients(ours, theirs, q, k, v, *gates)


mlstm("mlstm_chunkwise__limit_chunk")
mlstm("mlstm_chunkwise__xl_chunk")
