"""Operators of SGLang's serving engine as cases of the corpus: `--path` holds its wheel, and what it imports."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from tests.peers.corpus import Pair, case, drawn, get

OPS = "sglang.kernels.ops"
ROWS, WIDTH, HEADS, DIM = 6, 96, 4, 64


def attended(q: Tensor, k: Tensor, v: Tensor, offset: int | None = None) -> Tensor:
    """Attention of [rows, heads, D] to [keys, kv_heads, D]; row i sees `offset` + i + 1 keys, or all."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) / math.sqrt(q.shape[-1])
    if offset is not None:
        keys, rows = torch.arange(len(k)), torch.arange(len(q))
        scores = scores.masked_fill(keys[None, :] > offset + rows[:, None], -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def numbers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda")


def decode(kv_heads: int) -> Pair:
    """Two sequences of 40 and 21 keys, scattered over the cache, in up to 4 splits."""
    lengths, splits = [40, 21], 4
    q, cache_k, cache_v = drawn(2, HEADS, DIM), drawn(80, kv_heads, DIM, seed=1), drawn(80, kv_heads, DIM, seed=2)
    at = torch.randperm(80, generator=torch.Generator().manual_seed(3))[: sum(lengths)]
    out, logits, lse = torch.empty_like(q), drawn(2, HEADS, splits, DIM), drawn(2, HEADS, splits)
    get(f"{OPS}.attention.decode_attention.decode_attention_fwd")(
        q, cache_k, cache_v, out, numbers(0, 40, 61), at.to("cuda"), logits, lse, numbers(splits, 2), splits,
        1 / math.sqrt(DIM), 1.0, 1.0,
    )  # fmt: skip
    parts = at.split(lengths)
    expected = [attended(q[i : i + 1], cache_k[part], cache_v[part]) for i, part in enumerate(parts)]
    return out, torch.cat(expected)


case("sglang/decode_attention")(lambda: decode(HEADS))
case("sglang/decode_attention_grouped")(lambda: decode(1))


@case("sglang/extend_attention")
def _() -> Pair:
    """New tokens that attend to a cached prefix and, causally, to themselves."""
    new, old = [20, 7], [33, 5]
    q, k, v = drawn(27, HEADS, DIM), drawn(27, 2, DIM, seed=1), drawn(27, 2, DIM, seed=2)
    cache_k, cache_v = drawn(64, 2, DIM, seed=3), drawn(64, 2, DIM, seed=4)
    at = torch.randperm(64, generator=torch.Generator().manual_seed(5))[: sum(old)]
    out = torch.empty_like(q)
    get(f"{OPS}.attention.extend_attention.extend_attention_fwd")(
        q,
        k,
        v,
        out,
        cache_k,
        cache_v,
        numbers(0, 20, 27),
        numbers(0, 33, 38),
        at.to("cuda"),
        None,
        True,
        None,
        20,
        1.0,
        1.0,
    )
    expected = []
    for part, qs, ks, vs in zip(at.split(old), q.split(new), k.split(new), v.split(new), strict=True):
        keys, values = torch.cat([cache_k[part], ks]), torch.cat([cache_v[part], vs])
        expected.append(attended(qs, keys, values, offset=len(part)))
    return out, torch.cat(expected)


@case("sglang/context_attention")
def _() -> Pair:
    lengths = [50, 19]
    q, k, v = drawn(69, HEADS, DIM), drawn(69, 2, DIM, seed=1), drawn(69, 2, DIM, seed=2)
    out = torch.empty_like(q)
    operator = get(f"{OPS}.attention.prefill_attention.context_attention_fwd")
    operator(q, k, v, out, numbers(0, 50), numbers(*lengths), 50, is_causal=True)
    return out, torch.cat([attended(*x, offset=0) for x in zip(q.split(lengths), k.split(lengths), v.split(lengths))])


@case("sglang/merge_state")
def _() -> Pair:
    a, b, lse_a, lse_b = drawn(5, HEADS, DIM), drawn(5, HEADS, DIM, seed=1), drawn(5, HEADS), drawn(5, HEADS, seed=1)
    ours = get(f"{OPS}.attention.merge_state.merge_state_triton")(a, lse_a, b, lse_b)
    lse = torch.logaddexp(lse_a, lse_b)
    return list(ours), [a * (lse_a - lse).exp()[..., None] + b * (lse_b - lse).exp()[..., None], lse]


@case("sglang/compute_position")
def _() -> Pair:
    ours = get(f"{OPS}.attention.position.compute_position_triton")(numbers(3, 0, 700), numbers(5, 2, 600), 607)
    expected = torch.cat([torch.arange(3, 8), torch.arange(2), torch.arange(700, 1300)])
    return list(ours), [expected, numbers(0, 5, 7)]


@case("sglang/l2norm")
def _() -> Pair:
    x = drawn(ROWS, DIM)
    return get(f"{OPS}.attention.fla.l2norm.l2norm_fwd")(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@case("sglang/chunk_local_cumsum")
def _() -> Pair:
    g = drawn(2, 128, HEADS)
    ours = get(f"{OPS}.attention.fla.cumsum.chunk_local_cumsum")(g, chunk_size=64)
    return ours, g.view(2, 2, 64, HEADS).cumsum(2).view_as(g)


@case("sglang/rms_norm_gated")
def _() -> Pair:
    x, g, w = drawn(ROWS, DIM), drawn(ROWS, DIM, seed=1), drawn(DIM, seed=2)
    expected = functional.rms_norm(x, (DIM,), w, 1e-6) * functional.silu(g)
    return get(f"{OPS}.attention.fla.fused_norm_gate.rms_norm_gated")(x, g, w, None), expected  # in the place of x


@case("sglang/fused_recurrent_gated_delta_rule")
def _() -> Pair:
    q, k, v = (drawn(1, 12, 2, 32, seed=seed) for seed in range(3))
    k = functional.normalize(k, dim=-1)
    g, beta = functional.logsigmoid(drawn(1, 12, 2, seed=3)), drawn(1, 12, 2, seed=4).sigmoid()
    ours = get(f"{OPS}.attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule")(q, k, v, g, beta)[0]
    state, rows = torch.zeros(2, 32, 32), []  # [head, key, value]
    for t in range(12):
        state = state * g[0, t].exp()[:, None, None]
        change = (v[0, t] - torch.einsum("hkv,hk->hv", state, k[0, t])) * beta[0, t][:, None]
        state = state + k[0, t][:, :, None] * change[:, None, :]
        rows.append(torch.einsum("hkv,hk->hv", state, q[0, t]) / math.sqrt(32))
    return ours, torch.stack(rows)[None]


@case("sglang/fused_gdn_gating")
def _() -> Pair:
    a, b, log, bias = drawn(3, 8), drawn(3, 8, seed=1), drawn(8, seed=2), drawn(8, seed=3)
    ours = get(f"{OPS}.attention.linear.fused_gdn_gating.fused_gdn_gating")(log, a, b, bias)
    return list(ours), [(-log.exp() * functional.softplus(a + bias))[None], b.sigmoid()[None]]


@case("sglang/linear_decode_forward")
def _() -> Pair:
    q, k, v = (drawn(2, HEADS, 1, DIM, seed=seed) for seed in range(3))
    caches, slopes = drawn(3, HEADS, DIM, DIM, seed=3), drawn(HEADS, seed=4).abs()
    before = caches[numbers(2, 0).long()].clone()
    ours = get(f"{OPS}.attention.linear.lightning_attn.linear_decode_forward_triton")(
        q, k, v, caches, slopes, numbers(2, 0), BLOCK_SIZE=32
    )
    state = before * (-slopes).exp()[None, :, None, None] + k.transpose(-1, -2) @ v
    return [ours.reshape(2, -1), caches[numbers(2, 0).long()]], [(q @ state).reshape(2, -1), state]


@case("sglang/softcap")
def _() -> Pair:
    x, out = drawn(ROWS, 1000), drawn(ROWS, 1000, seed=1)
    get(f"{OPS}.activation.softcap.softcap_to_float32_logits")(x, 3.0, out)
    return out, 3.0 * (x / 3.0).tanh()


@case("sglang/gelu_and_mul")
def _() -> Pair:
    x = drawn(ROWS, 2 * WIDTH)
    ours = get(f"{OPS}.activation.gelu_and_mul_triton.gelu_and_mul_triton")(x)
    return ours[0], functional.gelu(x[:, :WIDTH], approximate="tanh") * x[:, WIDTH:]


@case("sglang/rmsnorm")
def _() -> Pair:
    x, w = drawn(ROWS, WIDTH), drawn(WIDTH, seed=1)
    return get(f"{OPS}.layernorm.fused_rmsnorm.fused_rmsnorm")(x, w, 1e-6), functional.rms_norm(x, (WIDTH,), w, 1e-6)


@case("sglang/dual_residual_rmsnorm")
def _() -> Pair:
    x, residual, w, u = drawn(ROWS, WIDTH), drawn(ROWS, WIDTH, seed=1), drawn(WIDTH, seed=2), drawn(WIDTH, seed=3)
    ours = get(f"{OPS}.layernorm.fused_rmsnorm.fused_dual_residual_rmsnorm")(x, residual, w, u, 1e-6)
    middle = functional.rms_norm(x, (WIDTH,), w, 1e-6) + residual
    return list(ours), [functional.rms_norm(middle, (WIDTH,), u, 1e-6), middle]


@case("sglang/causal_conv1d_update")
def _() -> Pair:
    x, state, w, bias = drawn(3, WIDTH), drawn(3, WIDTH, 3, seed=1), drawn(WIDTH, 4, seed=2), drawn(WIDTH, seed=3)
    window = torch.cat([state, x[:, :, None]], -1)
    ours = get(f"{OPS}.mamba.causal_conv1d_triton.causal_conv1d_update")(x.clone(), state, w, bias, "silu")
    return [ours, state], [functional.silu((window * w).sum(-1) + bias), window[:, :, 1:]]


@case("sglang/bmm_chunk")
def _() -> Pair:
    a, b = drawn(2, 96, DIM), drawn(2, 96, DIM, seed=1)
    ours = get(f"{OPS}.mamba.triton_ops.ssd_bmm._bmm_chunk_fwd")(a, b, 32)
    return ours, a.view(2, 3, 32, DIM) @ b.view(2, 3, 32, DIM).transpose(-1, -2)


@case("sglang/selective_state_update")
def _() -> Pair:
    state, x, dt, a = drawn(2, 64, 16), drawn(2, 64, seed=1), drawn(2, 64, seed=2).abs(), -drawn(64, 16, seed=3).abs()
    b, c, d, out = drawn(2, 16, seed=4), drawn(2, 16, seed=5), drawn(64, seed=6), drawn(2, 64, seed=7)
    bias = drawn(64, seed=8).abs()
    step = dt + bias
    new = state * (step[..., None] * a).exp() + (step * x)[..., None] * b[:, None, :]
    update = get(f"{OPS}.mamba.triton_ops.mamba_ssm.selective_state_update")
    update(state, x, dt, a, b, c, d, dt_bias=bias, out=out)
    return [out, state], [(new * c[:, None, :]).sum(-1) + d * x, new]


@case("sglang/per_token_quant_int8")
def _() -> Pair:
    x = drawn(ROWS, WIDTH)
    ours, scales = get(f"{OPS}.quantization.int8_kernel.per_token_quant_int8")(x)[:2]
    return [ours.float() * scales, scales], [x, x.abs().amax(-1, keepdim=True) / 127]


@case("sglang/awq_dequantize")
def _() -> Pair:
    draw = lambda *shape, seed: torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed))
    values, zeros, scales = draw(128, 64, seed=0), draw(2, 64, seed=1), drawn(2, 64, seed=2)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # AWQ interleaves 8 numbers of 4 bits

    def packed(x: Tensor) -> Tensor:
        parts = x.view(len(x), -1, 8).long() << (4 * order)
        return torch.where((total := parts.sum(-1)) < 2**31, total, total - 2**32).int()

    ours = get(f"{OPS}.quantization.awq_triton.awq_dequantize_triton")(packed(values), scales, packed(zeros))
    return ours, (values - zeros.repeat_interleave(64, 0)) * scales.repeat_interleave(64, 0)


@case("sglang/moe_router")
def _() -> Pair:
    x, w = drawn(ROWS, 256), drawn(8, 256, seed=1) / 16
    weights, chosen = get(f"{OPS}.moe.router.fused_moe_router_cudacore")(x, w, 2, 30.0)
    top = ((x @ w.T / 30).tanh() * 30).softmax(-1).topk(2)
    return [weights, chosen], [top.values, top.indices]


@case("sglang/moe_fused_mul_sum")
def _() -> Pair:
    x, w = drawn(ROWS, 2, 256), drawn(ROWS, 2, seed=1)
    return get(f"{OPS}.moe.moe_fused_mul_sum.moe_fused_mul_sum")(x, w), (x * w[..., None]).sum(1)


@case("sglang/copy_pages")
def _() -> Pair:
    raw = drawn(8, 80).view(torch.uint8).reshape(-1)
    expected = raw.clone().view(8, 320)
    expected[[6, 1]] = expected[[2, 5]]
    pages = dict(dtype=torch.int64)
    get(f"{OPS}.kvcache.copy_pages.copy_pages")(raw, numbers(6, 1, **pages), numbers(2, 5, **pages), 8, 320)
    return raw.view(8, 320), expected
