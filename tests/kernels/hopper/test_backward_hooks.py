"""The hooks of the Hopper backward, on the simulator and on a GPU, against autograd in float64: functions of scores and
masks with their gradients (`device.backward_hooks`). out and LSE come from the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.hopper.hopper_cases import CAUSAL, DTYPES, H200, SCHEDULES, band, key_lengths, prefix, runs
from tests.kernels.score_mod_oracle import Blocks, Mods, exact

pytest.importorskip("triton")

import strobe
from strobe.kernels.device.dialect import gl, gluon
from strobe.kernels.hopper import kernel as hopper
from strobe.kernels.hopper.backward_with_hooks import backward_with_hooks
from strobe.kernels.hopper.launch_backward import BackwardHooks, QueryBlockLists, run_backward
from strobe.kernels.protocol import Backward, Plan
from strobe.kernels.runtime.workspace import allocate
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import Target
from strobe.testing import Case
from tests.kernels.hopper.test_forward_hooks import (
    add_constant,
    alibi,
    blocks_of,
    drawn_kinds,
    each_index,
    every_third,
    hide_odd_rows,
    same_segment,
    slopes_of,
    torch_each_index,
    without_broken_promises,
)
from tools.proof.simulate import on

# ---------------------------------------------------------------- functions and their gradients


@gluon.jit
def identity_bwd(dscore, score, b, h, q_idx, kv_idx, aux):
    return dscore


@gluon.jit
def alibi_bwd(dscore, score, b, h, q_idx, kv_idx, aux):
    """aux: slopes, and the float32 sum of their gradients. Each element is added by itself."""
    gl.atomic_add(aux[1] + h + q_idx * 0 + kv_idx * 0, dscore * (kv_idx - q_idx), sem="relaxed")
    return dscore


@gluon.jit
def squared(score, b, h, q_idx, kv_idx, aux):
    return score * score * aux[0] + 0.5 * b - 0.3 * h + 0.01 * (q_idx % 50) * ((kv_idx % 7) - 3)


@gluon.jit
def squared_bwd(dscore, score, b, h, q_idx, kv_idx, aux):
    return dscore * 2.0 * score * aux[0]


@gluon.jit
def bias(score, b, h, q_idx, kv_idx, aux):
    """aux: bias [H, S_q, S_k], S_q, S_k, and the float32 sum of its gradient."""
    rows, keys = gl.minimum(q_idx, aux[1] - 1), gl.minimum(kv_idx, aux[2] - 1)
    return score + gl.load(aux[0] + (h * aux[1] + rows) * aux[2] + keys)


@gluon.jit
def bias_bwd(dscore, score, b, h, q_idx, kv_idx, aux):
    inside = (q_idx < aux[1]) & (kv_idx < aux[2])
    gl.atomic_add(aux[3] + (h * aux[1] + q_idx) * aux[2] + kv_idx, dscore, mask=inside, sem="relaxed")
    return dscore


@gluon.jit
def beyond_the_end(score, b, h, q_idx, kv_idx, aux):
    """Infinite in the row behind the last, which a tile that sticks out has."""
    return score + 1.0 / (aux[0] - q_idx).to(gl.float32)


@gluon.jit
def second_blocks(b, h, q_idx, kv_idx, aux):
    return (kv_idx // 128) % 2 == 0


@dataclass
class Gradients(Mods):
    """Mods with score_mod_bwd, what it reads, and the tensors that it adds gradients to.

    sizes: of magnitudes of dS [B, H, S_q, S_k], those of the terms of the captured gradient: [rows, keys, *leaf.shape].
    """

    bwd: Any = None
    gradient_aux: tuple = ()
    leaf: Tensor | None = None
    total: Tensor | None = None
    sizes: Callable[[Tensor], Tensor] | None = None


def _made(bwd, aux: tuple | None = None, **fields) -> Gradients:
    mods = Gradients(**fields)
    mods.bwd, mods.gradient_aux = bwd, mods.score_aux if aux is None else aux
    return mods


def alibi_mods(case: Case, device: str) -> Gradients:
    slopes = slopes_of(case.heads[0], device)
    total, leaf = torch.zeros_like(slopes), slopes.double().requires_grad_()
    mods = _made(
        alibi_bwd,
        (slopes, total),
        score_mod=alibi,
        score_aux=(slopes,),
        score=lambda s, b, h, q, k: s + leaf[h] * (k - q),
    )
    mods.leaf, mods.total, mods.sizes = leaf, total, lambda ds: (ds * distances(ds)).permute(0, 2, 3, 1).flatten(0, 1)
    return mods


def distances(ds: Tensor) -> Tensor:
    """|j - i|, the factor of dS in the gradient of a slope."""
    rows, keys = (torch.arange(n, device=ds.device) for n in ds.shape[2:])
    return (keys - rows[:, None]).abs()


def bias_mods(case: Case, device: str) -> Gradients:
    table = torch.randn(case.heads[0], case.seqlen_q, case.keys, generator=torch.Generator().manual_seed(7)).to(device)
    total, leaf = torch.zeros_like(table), table.double().requires_grad_()
    aux = (table, *table.shape[1:])
    mods = _made(bias_bwd, (*aux, total), score_mod=bias, score_aux=aux, score=lambda s, b, h, q, k: s + leaf[h, q, k])
    mods.leaf, mods.total, mods.sizes = leaf, total, lambda ds: ds[:, None]
    return mods


def segment_mods(case: Case, device: str) -> Gradients:
    n = max(case.seqlen_q, case.keys)
    ids = (torch.arange(n, device=device) // 70).int()
    aux = (ids, case.seqlen_q, case.keys)
    return _made(None, mask_mod=same_segment, mask_aux=aux, mask=lambda b, h, q, k: ids[q] == ids[k])


def torch_squared(s, b, h, q, k):
    return s * s * 0.25 + 0.5 * b - 0.3 * h + 0.01 * (q % 50) * ((k % 7) - 3)


def hidden_odd_rows(s, b, h, q, k):
    return torch.where(q % 2 == 1, -torch.inf, s)


SIMPLE = {
    "constant": partial(_made, None, score_mod=add_constant, score_aux=(1.5,), score=lambda s, b, h, q, k: s + 1.5),
    "each_index": partial(_made, identity_bwd, score_mod=each_index, score=torch_each_index),
    "squared": partial(_made, squared_bwd, score_mod=squared, score_aux=(0.25,), score=torch_squared),
    "none": partial(_made, None),
    "hide_odd_rows": partial(_made, None, score_mod=hide_odd_rows, score=hidden_odd_rows),
    "second_blocks": partial(_made, None, mask_mod=second_blocks, mask=lambda b, h, q, k: (k // 128) % 2 == 0),
    "every_third": partial(_made, None, mask_mod=every_third, mask=lambda b, h, q, k: (k + q + h) % 3 == 0),
}


def mods_of(name: str, case: Case, device: str) -> Gradients:
    if "+" in name:
        first, second = (mods_of(part, case, device) for part in name.split("+"))
        first.mask_mod, first.mask_aux, first.mask = second.mask_mod, second.mask_aux, second.mask
        return first
    if name == "beyond_the_end":
        rows = case.seqlen_q
        return _made(
            None, score_mod=beyond_the_end, score_aux=(rows,), score=lambda s, b, h, q, k: s + 1.0 / (rows - q)
        )
    made = {"alibi": alibi_mods, "bias": bias_mods, "segments": segment_mods}
    return made[name](case, device) if name in made else SIMPLE[name]()


# ---------------------------------------------------------------- cases


def _case(name: str, seqlen_q: int = 200, seqlen_k: int | None = 260, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, **{"head_dim": 128, "batch": 1, "heads": (1, 1)} | options)


# name -> (case, functions)
CASES = {
    "constant": (_case("constant"), "constant"),
    "alibi_causal": (_case("alibi_causal", 260, None, heads=(2, 2), mask=CAUSAL), "alibi"),
    "alibi_grouped": (_case("alibi_grouped", 130, 200, heads=(4, 2)), "alibi"),
    "alibi_d64": (_case("alibi_d64", 200, 260, head_dim=64, mask=band(150, 0)), "alibi"),
    "bias_odd": (_case("bias_odd", 129, 257, heads=(2, 1)), "bias"),
    "bias_causal_d64": (_case("bias_causal_d64", 130, 131, head_dim=64, mask=CAUSAL), "bias"),
    "each_index_batch": (_case("each_index_batch", 100, 150, batch=2, heads=(2, 1)), "each_index"),
    "squared": (_case("squared"), "squared"),
    "squared_softcap": (_case("squared_softcap", 130, 200, softcap=2.0, mask=CAUSAL), "squared"),
    "squared_d64": (_case("squared_d64", 200, 200, head_dim=64, heads=(2, 1)), "squared"),
    "squared_negative": (_case("squared_negative", 130, 130, scale=-0.3), "squared"),
    "second_blocks": (_case("second_blocks", 150, 390), "second_blocks"),
    "second_blocks_causal": (_case("second_blocks_causal", 300, None, mask=CAUSAL), "second_blocks"),
    "every_third_sinks": (_case("every_third_sinks", 130, 200, heads=(2, 2), sinks=True), "every_third"),
    "hide_odd_rows": (_case("hide_odd_rows", 130, 200), "hide_odd_rows"),
    "beyond_the_end": (_case("beyond_the_end", 130, 200), "beyond_the_end"),
    "segments": (_case("segments", 260, None), "segments"),
    "segments_causal_d64": (_case("segments_causal_d64", 260, None, head_dim=64, mask=CAUSAL), "segments"),
    "alibi_segments": (_case("alibi_segments", 200, None, mask=CAUSAL), "alibi+segments"),
    "varlen": (
        _case("varlen", lengths_q=(130, 0, 1, 65), lengths_k=(200, 3, 150, 65), mask=CAUSAL, outside=(3, 5)),
        "squared",
    ),
    "documents": (_case("documents", 230, None, batch=2, mask=runs((130, 1, 99), also=CAUSAL)), "alibi"),
    "scattered": (_case("scattered", 200, None, mask=runs((70, 60, 40, 30), (0, 1, 0, 1))), "each_index"),
    "key_lengths": (_case("key_lengths", 130, 260, batch=2, mask=key_lengths(257, 65)), "squared"),
    "prefix": (_case("prefix", 150, 200, batch=2, mask=prefix(130, 10)), "squared"),
    "d96": (_case("d96", 130, 200, head_dim=96, mask=CAUSAL), "alibi"),
    "d256": (_case("d256", 100, 130, head_dim=256, mask=CAUSAL), "squared"),
    "d192_128": (_case("d192_128", 130, 200, head_dim=192, head_dim_v=128), "squared+every_third"),
}


# ---------------------------------------------------------------- running it


def launched(call: Call, mods: Gradients, target: Target, dout: Tensor, blocks: Blocks | None = None) -> Backward:
    """The Hopper backward with functions and block lists, from the oracle's out and LSE."""
    problem = Problem.from_call(call)
    config = hopper.BACKWARD.config(problem, target)
    lists = None if blocks is None else blocks.lists
    per_head = lists is not None and lists.q_num_blocks.shape[1] > 1
    listed = lists is not None, lists is not None and lists.full_q_indices is not None, per_head
    traits = backward_with_hooks(config.traits, mods.score_mod, mods.mask_mod, mods.bwd, *listed)
    config = hopper.BackwardConfig(traits)
    buffers = hopper.BACKWARD.workspace(problem, config)
    plan = Plan(hopper.BACKWARD, problem, target, config, buffers).changed()
    workspace = allocate(buffers, call.q.device)
    for buffer in buffers:
        if buffer.fill is None:
            workspace[buffer.name].fill_(torch.nan if buffer.dtype.is_floating_point else -7)
    with torch.no_grad():
        out, lse, _ = exact(call, mods, blocks)
    out, lse = out.to(call.q.dtype), lse.float()
    nans = [torch.full_like(t, torch.nan) for t in (*call[:3], lse)]
    tensors = Backward(dout, out, lse, None, *nans)
    hooks = BackwardHooks(mods.score_aux, mods.mask_aux, mods.gradient_aux, lists)
    run_backward(plan, call, tensors, workspace, hooks)
    return tensors


def judged(tensors: Backward, call: Call, mods: Gradients, blocks: Blocks | None = None) -> None:
    """Raises AssertionError where a gradient differs from the exact one by more than rounding explains.

    dq, dk and dv: rounding of P and dS to 16 bits. A captured gradient: `captured_gradient`.
    """
    leaves = [t.detach().double().requires_grad_() for t in call[:3]]
    exact_call = call._replace(q=leaves[0], k=leaves[1], v=leaves[2])
    out, _, _ = exact(exact_call, mods, blocks)
    wanted = torch.autograd.grad(out, leaves, tensors.dout.double(), materialize_grads=True)
    most = 1.5e-3 if call.q.dtype == torch.float16 else 1.2e-2
    for name, grad, right in zip("qkv", (tensors.dq, tensors.dk, tensors.dv), wanted):
        error = float((grad.double() - right).norm() / right.norm())
        assert error <= most, f"d{name}: {error:.1e} beyond rounding"
    if mods.leaf is not None and mods.total is not None:
        right, allowed = captured_gradient(tensors, exact_call, mods, blocks)
        error = float((mods.total.double() - right).norm() / allowed.norm())
        assert error <= 1, f"captured: {error:.1f} times beyond rounding"


def captured_gradient(tensors: Backward, call: Call, mods: Gradients, blocks: Blocks | None) -> tuple[Tensor, Tensor]:
    """The gradient of mods.leaf that follows from the kernel's own out, and how far float32 may be from it.

    dS = P (dP - delta) is float32 where it is added, and delta = sum(dO * out) is of the out in 16 bits that the kernel
    gets. The difference of delta from the exact one is a gradient of LSE, since d LSE / d s = P. What is left is
    float32, whose roundings are independent, so that n of them count as sqrt(n). Those of S, dP, delta and LSE, and 8
    in P, may be the same for a row: its terms are summed, the rows' sums are added as squares. The sum of all terms
    rounds once for each. All are relative to P (|dP| + |delta|) <= |dS| + 2 P |delta|.
    """
    assert mods.leaf is not None and mods.score is not None and mods.sizes is not None
    score, batch, heads = mods.score, call.q.shape[0], call.q.shape[2]
    probe = call.q.new_zeros(batch, heads, call.q.shape[1], call.k.shape[1]).requires_grad_()
    out, lse, _ = exact(call, replace(mods, score=lambda s, *places: score(s, *places) + probe), blocks)
    dout = tensors.dout.double()
    lse = torch.where(lse.isfinite(), lse, 0.0)
    delta = (dout * tensors.out.double()).sum(-1).mT
    from_out = ((dout * out.detach()).sum(-1).mT - delta).reshape(lse.shape)
    right, ds = torch.autograd.grad((out, lse), (mods.leaf, probe), (dout, from_out), retain_graph=True)
    p = torch.autograd.grad(lse.sum(), probe)[0]
    sizes = mods.sizes(ds.abs() + 2 * p * delta.reshape(lse.shape)[..., None].abs())
    in_rows = (call.q.shape[-1] + call.v.shape[-1]) ** 0.5 + 8
    in_sum = (sizes.shape[0] * sizes.shape[1]) ** 0.5
    return right, 2.0**-24 * (in_rows * sizes.sum(1).norm(dim=0) + in_sum * sizes.flatten(0, 1).norm(dim=0))


def drawn(call: Call) -> Tensor:
    shape = Problem.from_call(call).out_shapes[0]
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(call.q)


@pytest.mark.parts(8)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_functions(name):
    case, functions = CASES[name]
    n = list(CASES).index(name)
    mods = mods_of(functions, case, "cpu")
    call = case.build("cpu", DTYPES[n % 2], "normal", 5, kernel="hopper")._replace(needs_grad=False)
    with on(H200, *SCHEDULES[n % 3]) as run:
        tensors = launched(call, mods, H200, drawn(call))
    assert run.reports == [] and "backward_kernel" in run.launches
    judged(tensors, call, mods)
    if mods.total is not None:
        mods.total *= 1.001
        with pytest.raises(AssertionError, match="captured"):
            judged(tensors, call, mods)


# name -> (case, functions, whether heads share their lists, kinds of blocks)
LISTS = {
    "every_second": (_case("every_second", 200, 390), "none", True, "every_second"),
    "drawn": (_case("drawn", 300, 390, batch=2, heads=(2, 2)), "none", False, "drawn"),
    "drawn_causal": (_case("drawn_causal", 390, None, heads=(2, 1), mask=CAUSAL), "none", True, "drawn"),
    "drawn_segments": (_case("drawn_segments", 260, 300, mask=band(150, 30)), "segments", True, "drawn"),
    "alibi_grouped": (_case("alibi_grouped", 130, 260, heads=(2, 1)), "alibi+every_third", False, "drawn"),
    "partial_only": (_case("partial_only", 200, 260), "every_third", True, "partial"),
    "d64": (_case("d64", 300, 300, head_dim=64, heads=(2, 1)), "every_third", True, "drawn"),
    "d192_128": (_case("d192_128", 150, 260, head_dim=192, head_dim_v=128, heads=(2, 1)), "every_third", True, "drawn"),
    "d256": (_case("d256", 130, 200, head_dim=256, mask=CAUSAL), "squared", True, "drawn"),
    "empty": (_case("empty", 200, 260), "none", True, "empty"),
}


def blocks_for(call: Call, size: tuple[int, int], kinds: str, shared: bool) -> Blocks:
    """Lists of blocks of queries, and what they show. A block is full only where the built-in mask hides nothing."""
    (batch, rows, heads), keys, device = call.q.shape[:3], call.k.shape[1], call.q.device
    batch, heads = (1, 1) if shared else (batch, heads)
    found = drawn_kinds(batch, heads, rows, keys, size, device, 1 if kinds == "partial" else 2)
    if kinds == "every_second":
        found = torch.where(torch.arange(found.shape[-1], device=device) % 2 == 0, 2, 0).expand(found.shape)
    if kinds == "empty":
        found = torch.where(torch.arange(found.shape[-1], device=device) == 0, 0, found)
    found = without_broken_promises(found, size, call)
    shown = blocks_of(found, size, rows, keys)
    by_keys = blocks_of(found.mT.contiguous(), size[::-1], keys, rows, kinds != "partial")
    return replace(shown, lists=QueryBlockLists(*by_keys.lists))


@pytest.mark.parts(2)
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_query_blocks(name):
    case, functions, shared, kinds = LISTS[name]
    n = list(LISTS).index(name)
    mods = mods_of(functions, case, "cpu")
    call = case.build("cpu", DTYPES[n % 2], "normal", 5, kernel="hopper")._replace(needs_grad=False)
    traits = hopper.BACKWARD.config(Problem.from_call(call), H200).traits
    blocks = blocks_for(call, (traits.block_m, traits.block_n), kinds, shared)
    with on(H200, *SCHEDULES[n % 3]) as run:
        tensors = launched(call, mods, H200, drawn(call), blocks)
    assert run.reports == [] and "backward_kernel" in run.launches
    judged(tensors, call, mods, blocks)
    with pytest.raises(AssertionError, match="beyond rounding"):
        judged(tensors, call, mods)  # the lists do something


def test_what_has_no_lists():
    for options, why in (
        ({"mask": key_lengths(70)}, "documents, prefixes and key lengths"),
        ({"heads": (2, 1), "head_dim": 192, "head_dim_v": 128}, "192/128"),
    ):
        call = _case("none", 130, 260, **options).build("cpu", torch.bfloat16, kernel="hopper")
        with pytest.raises(ValueError, match=why):
            traits = hopper.BACKWARD.config(Problem.from_call(call), H200).traits
            backward_with_hooks(traits, listed=True, per_head=True)


def test_functions_change_every_gradient():
    """The check above sees a backward that leaves functions out."""
    case, functions = CASES["squared"]
    call = case.build("cpu", torch.float16, "normal", 5, kernel="hopper")._replace(needs_grad=False)
    mods = mods_of(functions, case, "cpu")
    with on(H200):
        for without in (replace(mods, bwd=None), replace(mods, score_mod=None, bwd=None)):
            with pytest.raises(AssertionError, match="beyond rounding"):
                judged(launched(call, without, H200, drawn(call)), call, mods)


# ---------------------------------------------------------------- through the public function


def dense_gradients(tensors: list[Tensor], captured: Tensor, dout: Tensor, score, seen) -> list[Tensor]:
    """Of q, k, v and what the score captures, in float64. score(s, captured, h, q, k)."""
    leaves = [t.detach().double().requires_grad_() for t in (*tensors, captured)]
    q, k, v = (t.transpose(1, 2) for t in leaves[:3])
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    h, i, j = torch.arange(q.shape[1])[:, None, None], torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    s = score(q.shape[-1] ** -0.5 * q @ k.mT, leaves[3], h, i, j)
    out = torch.where(seen(i, j), s, -torch.inf).softmax(-1) @ v
    return list(torch.autograd.grad(out.transpose(1, 2), leaves, dout.double()))


def test_attention_runs_forward_and_backward_on_hopper():
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1, 130, heads, 64, generator=draw).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    slopes, ids = torch.linspace(0.1, 0.4, 4, requires_grad=True), torch.arange(130) // 50
    dout = torch.randn(1, 130, 4, 64, generator=draw).bfloat16()
    mask = strobe.causal() & strobe.mask_mod(lambda b, h, q, k: ids[q] == ids[k])
    with on(H200) as run:
        score = lambda s, b, h, q, k: s - slopes[h] * (q - k)
        out = strobe.attention(*tensors, score_mod=score, mask=mask, kernel="hopper")
        found = torch.autograd.grad(out, [*tensors, slopes], dout)
    assert run.reports == [] and run.launches[:3] == ["forward_kernel", "rows_kernel", "backward_kernel"]
    score = lambda s, slopes, h, q, k: s - slopes[h] * (q - k)
    wanted = dense_gradients(tensors, slopes, dout, score, lambda q, k: (q >= k) & (ids[q] == ids[k]))
    for grad, right in zip(found, wanted):
        assert float((grad.double() - right).norm() / right.norm()) <= 1.2e-2


def test_packed_sequences_count_from_their_own_diagonals():
    """ALiBi and the gradient of its slopes, against the CPU kernels in float32."""
    draw = torch.Generator().manual_seed(3)
    offsets_q, offsets_k = (torch.tensor([0, *n]).cumsum(0).int() for n in ((70, 0, 33, 100), (90, 5, 33, 130)))
    sizes = ((203, 4), (258, 2), (258, 2))
    q, k, v = (torch.randn(n, heads, 64, generator=draw).bfloat16().requires_grad_() for n, heads in sizes)
    slopes, dout = torch.tensor([0.1, 0.2, 0.3, 0.4], requires_grad=True), torch.randn(203, 4, 64, generator=draw)

    def gradients(kernel: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        out = strobe.attention_varlen(
            q.to(dtype), k.to(dtype), v.to(dtype), cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, causal=True,
            score_mod=strobe.alibi(slopes), kernel=kernel,
        )  # fmt: skip
        return torch.autograd.grad(out, (q, k, v, slopes), dout.to(dtype))

    with on(H200) as run:
        found = gradients("hopper", torch.bfloat16)
    assert run.reports == [] and "backward_kernel" in run.launches
    for grad, right in zip(found, gradients("cpu", torch.float32)):
        assert float((grad - right).float().norm() / right.float().norm()) <= 1.2e-2


def test_deterministic_gradients_of_functions():
    """In the order of semaphores, and without block lists."""
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1, n, heads, 64, generator=draw).bfloat16() for n, heads in ((200, 2), (260, 1), (260, 1))]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    dout, slopes = torch.randn(1, 200, 2, 64, generator=draw).bfloat16(), torch.tensor([0.1, 0.3])
    mask = strobe.mask_mod(lambda b, h, q, k: (q + k) % 5 > 0)
    with on(H200) as run:
        score = lambda s, b, h, q, k: s * (1 + slopes[h])
        out = strobe.attention(*tensors, score_mod=score, mask=mask, deterministic=True, kernel="hopper")
        found = torch.autograd.grad(out, tensors, dout)
    assert run.reports == [] and "backward_kernel" in run.launches
    score = lambda s, slopes, h, q, k: s * (1 + slopes[h])
    wanted = dense_gradients(tensors, slopes, dout, score, lambda q, k: (q + k) % 5 > 0)
    for grad, right in zip(found, wanted):
        assert float((grad.double() - right).norm() / right.norm()) <= 1.2e-2


@pytest.mark.parametrize("documents", (False, True))
def test_gradient_of_a_bias_by_blocks(documents):
    """Elements of a block are summed before an atomic adds them; not over keys where documents begin anywhere."""
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1, 150, heads, 64, generator=draw).bfloat16().requires_grad_() for heads in (2, 1, 1)]
    table, ids = torch.randn(2, 5, 5, generator=draw, requires_grad=True), torch.arange(150) // 70
    dout = torch.randn(1, 150, 2, 64, generator=draw).bfloat16()
    mask = strobe.causal() & strobe.documents(ids[None].int()) if documents else strobe.causal()
    with on(H200) as run:
        score = lambda s, b, h, q, k: s + table[h, q // 32, k // 32]
        out = strobe.attention(*tensors, score_mod=score, mask=mask, kernel="hopper")
        found = torch.autograd.grad(out, [*tensors, table], dout)
    assert run.reports == [] and "backward_kernel" in run.launches
    seen = lambda q, k: (q >= k) & ((ids[q] == ids[k]) | (not documents))
    wanted = dense_gradients(tensors, table, dout, lambda s, table, h, q, k: s + table[h, q // 32, k // 32], seen)
    for grad, right in zip(found, wanted):
        assert float((grad.double() - right).norm() / right.norm()) <= 1.2e-2


def test_what_the_backward_leaves_to_the_portable_one():
    """Functions and deterministic gradients under key ranges. The table of kernels says why."""
    q = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(1, 128, dtype=torch.int32)
    score = lambda s, b, h, q, k: s * 0.5
    with on(H200):
        choice = strobe.explain(q, q, q, score_mod=score, mask=strobe.documents(ids), deterministic=True)
    assert (choice.forward.kernel.name, choice.backward.kernel.name) == ("hopper.forward", "portable.backward")
    assert "no deterministic gradients with prefixes, key lengths or documents" in str(choice)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_functions_on_a_gpu(name, dtype):
    case, functions = CASES[name]
    mods, call = mods_of(functions, case, "cuda"), case.build("cuda", dtype, "normal", 5)._replace(needs_grad=False)
    judged(launched(call, mods, Target.of(torch.device("cuda")), drawn(call)), call, mods)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_query_blocks_on_a_gpu(name):
    case, functions, shared, kinds = LISTS[name]
    mods = mods_of(functions, case, "cuda")
    call = case.build("cuda", torch.float16, "normal", 5)._replace(needs_grad=False)
    target = Target.of(torch.device("cuda"))
    traits = hopper.BACKWARD.config(Problem.from_call(call), target).traits
    blocks = blocks_for(call, (traits.block_m, traits.block_n), kinds, shared)
    judged(launched(call, mods, target, drawn(call), blocks), call, mods, blocks)
