"""What only a GPU can show of values: launch limits, tensors that really are that large, alignment, wrong metadata.

Rows are those of docs/reliability.md; the portable family where nothing else is said, on one GPU (the largest test
needs 60 GiB of its memory).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import strobe
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.testing import CASES, Case, assert_as_good_as, assert_gradients_as_good_as
from strobe.testing.cases import laid_out
from tests.reliability.gpu_calls import both_ways, qkv, same
from tests.reliability.test_reliability import draw, int32

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("watchdog")]
KERNEL = {"kernel": "portable"}
GIB = 2**30


def needs_memory(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free / GIB:.0f} are free")


# ---------------------------------------------------------------- launch limits


@pytest.mark.parametrize("batch, heads", [(65_535, 1), (65_536, 1), (80_000, 1), (1, 65_536), (40_000, 2)])
def test_more_entries_than_a_grid_dimension(batch, heads):
    """Rows 35, 36, 37: 16 rows each, written over NaN; the first and the last entries against the oracle, all others
    against those.
    """
    q, k, v = qkv(batch, 16, heads=(heads, heads), grad=True)
    dout = draw(q.shape, dtype=q.dtype, device="cuda", seed=4)[0]
    results = both_ways((q, k, v), dout, causal=True)
    assert not any(t.isnan().any() for t in results)
    assert torch.equal(results[0][:, 0], v[:, 0])  # the first row sees one key
    for entries in (slice(0, 2), slice(-2, None)):
        index = (entries,) if batch > 1 else (slice(None), slice(None), entries)
        part = [t[index].detach() for t in (q, k, v)]
        call = Call(*part, right=0, needs_grad=True, **KERNEL)
        assert_gradients_as_good_as((*(t[index] for t in results[1:]), None), call, dout[index])
    step = (slice(None, None, 997),) if batch > 1 else (slice(None), slice(None), slice(None, None, 997))
    few = both_ways(
        [t[step].detach().contiguous().requires_grad_() for t in (q, k, v)], dout[step].contiguous(), causal=True
    )
    for got, wanted in zip(results, few):
        torch.testing.assert_close(got[step], wanted, rtol=2.0**-7, atol=2.0**-7)


def test_many_packed_sequences():
    """Row 35: 100,000 sequences of 0 to 3 rows, most boundaries inside one tile."""
    lengths = torch.arange(100_000) % 4
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to("cuda", torch.int32)
    total = int(lengths.sum())
    q, k, v = (t[0].requires_grad_() for t in qkv(1, total, heads=(1, 1), width=16, dtype=torch.float32))
    results = both_ways((q, k, v), attend=strobe.attention_varlen, cu_seqlens_q=offsets, causal=True)
    starts = offsets[:-1][lengths.cuda() > 0].long()
    assert torch.equal(results[0][starts], v[starts]) and not any(t.isnan().any() for t in results)
    dense = [
        t[: 6 * 10_000].detach().view(10_000, 6, 1, 16) for t in (q, k, v)
    ]  # sequences of 1, 2 and 3 rows follow each other
    for first, length in ((0, 1), (1, 2), (3, 3)):
        alone = strobe.attention(*(t[:, first : first + length] for t in dense), causal=True, **KERNEL)
        torch.testing.assert_close(
            results[0][: 6 * 10_000].view(10_000, 6, 1, 16)[:, first : first + length], alone, rtol=0, atol=1e-5
        )


# ---------------------------------------------------------------- integer width


def test_more_than_2_to_the_31_elements():
    """Rows 24, 30, 32: q, k, v, out and all gradients hold 2^31 + elements; the last entry is what it is alone."""
    needs_memory(60)
    shape = (2**15 + 1, 64, 8, 128)  # 2,147,549,184 elements, 4 GiB each
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator).requires_grad_()
        for _ in range(3)
    )
    assert q.numel() > 2**31
    out, dq, dk, dv = both_ways((q, k, v), causal=True)
    alone = both_ways([t[-1:].detach().clone().requires_grad_() for t in (q, k, v)], causal=True)
    first = both_ways([t[:1].detach().clone().requires_grad_() for t in (q, k, v)], causal=True)
    for got, last, front in zip((out, dq, dk, dv), alone, first):
        torch.testing.assert_close(got[-1:], last, rtol=2.0**-7, atol=2.0**-7)
        torch.testing.assert_close(got[:1], front, rtol=2.0**-7, atol=2.0**-7)
        assert not got.isnan().any()


def test_rows_that_lie_more_than_2_to_the_31_apart():
    """Rows 24, 25, 33: the row stride alone makes the offset overflow; dO too is a slice of something wide."""
    needs_memory(40)
    rows, stride = 130, 2**24 + 64  # 129 rows of it are 2^31 + elements
    room = torch.zeros((rows * stride + 4096) * 4, dtype=torch.bfloat16, device="cuda")
    near = draw(*[(1, rows, 1, 64)] * 4, dtype=torch.bfloat16, device="cuda")
    far = [
        room.as_strided((1, rows, 1, 64), (64, stride, 64, 1), n * (rows * stride + 1024)).copy_(t)
        for n, t in enumerate(near)
    ]
    results = [both_ways([t.detach().requires_grad_() for t in own[:3]], own[3], causal=True) for own in (near, far)]
    for got, wanted in zip(*results):
        torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=2.0**-7)


def test_packed_rows_beyond_2_to_the_31_elements():
    """Row 32: the last sequence of a pack of 2^31 + elements is what it is alone."""
    needs_memory(40)
    total = 2**31 // (64 * 64) + 100
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.empty(total, 64, 64, dtype=torch.bfloat16, device="cuda").normal_(generator=generator) for _ in range(3)
    )
    lengths = [200] * (total // 200) + [total % 200]
    offsets = int32([0, *torch.tensor(lengths).cumsum(0).tolist()], "cuda")
    out = strobe.attention_varlen(q, k, v, cu_seqlens_q=offsets, causal=True, **KERNEL)
    for n in (0, len(lengths) - 2, len(lengths) - 1):
        own = slice(int(offsets[n]), int(offsets[n + 1]))
        alone = strobe.attention(q[None, own], k[None, own], v[None, own], causal=True, **KERNEL)[0]
        torch.testing.assert_close(out[own], alone, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("length", [32_769, 65_537])
def test_lengths_beyond_16_bits_both_ways(length, judge):
    """Row 31: as many rows as keys, in a window that the oracle can afford a block at a time, and the causal tail
    against it.
    """
    q, k, v = qkv(1, length, heads=(1, 1), dtype=torch.bfloat16, grad=True)
    results = both_ways((q, k, v), causal=True)
    assert not any(t.isnan().any() for t in results)
    tail = Call(
        q[:, -65:].detach(), k.detach(), v.detach(), right=0, partial=True, **KERNEL
    )  # bottom-right: the same rows
    out, lse = ops.run(tail)
    assert_as_good_as((out, lse), tail)
    torch.testing.assert_close(results[0][:, -65:].float(), out, rtol=2.0**-7, atol=2.0**-7)
    judge(
        Case("long", 70, length, batch=1, heads=(2, 1), head_dim=64).build(
            "cuda", torch.bfloat16, "needle", 1, True, "portable"
        ),
        "needle",
        1,
    )


def test_2_to_the_22_keys_of_a_wide_head():
    """Row 26: (S_q 2048, S_k 2^22, one key head): 512 Mi elements of K; q = 0 makes out the mean of V and lse a
    logarithm.
    """
    keys = 2**22
    k, v = (
        torch.empty(1, keys, 1, 128, dtype=torch.bfloat16, device="cuda").normal_(),
        torch.ones(1, keys, 1, 128, dtype=torch.bfloat16, device="cuda"),
    )
    v[:, ::2] = 0.0
    part = strobe.partial_attention(torch.zeros(1, 2048, 1, 128, dtype=torch.bfloat16, device="cuda"), k, v, **KERNEL)
    slack = 3 * 2.0**-25 * keys**0.5
    assert (part.out - 0.5).abs().max() <= slack and (
        part.lse - 22 * math.log(2)
    ).abs().max() <= 2e-6 + 4 * 2.0**-19 + slack


def test_documents_in_a_square_of_more_than_2_to_the_31_pairs():
    """Row 29: 50,000 x 50,000 pairs are more than an int32 counts; each document is what it is alone."""
    length = 50_000
    q, k, v = qkv(1, length, heads=(1, 1))
    ids = (torch.arange(length, device="cuda") // 5_000).to(torch.int32)[None]
    out = strobe.attention(q, k, v, mask=strobe.documents(ids) & strobe.causal(), **KERNEL)
    for own in (slice(0, 5_000), slice(45_000, 50_000)):
        alone = strobe.attention(q[:, own], k[:, own], v[:, own], causal=True, **KERNEL)
        torch.testing.assert_close(out[:, own], alone, rtol=2.0**-7, atol=2.0**-7)


# ---------------------------------------------------------------- alignment, layouts


@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "out"])
@pytest.mark.parametrize("offset", range(1, 8))
def test_one_tensor_off_its_alignment(offset, which):
    """Rows 43, 47, 48: each operand alone begins 1 to 7 elements past an aligned address."""
    tensors = dict(zip(("q", "k", "v"), qkv(2, 130)))
    dout = draw((2, 130, 4, 64), dtype=torch.bfloat16, device="cuda", seed=3)[0]
    shift = lambda t: (
        torch.empty(t.numel() + 8, dtype=t.dtype, device="cuda")[offset:][: t.numel()].view(t.shape).copy_(t)
    )
    tensors |= {which: shift(tensors[which])} if which in tensors else {}
    call = Call(*(t.requires_grad_() for t in tensors.values()), right=0, needs_grad=True, **KERNEL)
    out, lse = ops.run(call)
    assert_as_good_as((out, lse), call)
    upstream = shift(dout) if which == "dout" else dout
    assert_gradients_as_good_as((*torch.autograd.grad(out, call[:3], upstream), None), call, upstream)
    if which == "out":
        bare = call._replace(q=call.q.detach(), k=call.k.detach(), v=call.v.detach(), needs_grad=False)
        held = shift(torch.zeros_like(out))
        assert ops.run(bare, held)[0] is held and torch.equal(held, out)


@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_transposed_at_each_width(width, judge):
    """Row 46."""
    for storage in ("heads_first", "mixed", "gaps"):
        case = Case("transposed", 97, 130, heads=(4, 2), head_dim=width, mask=CASES["causal"].mask, storage=storage)
        judge(case.build("cuda", torch.bfloat16, requires_grad=True, kernel="portable"))


def test_layouts_after_one_another():
    """Rows 43, 87: expanded, dense, unaligned, dense again in one process: each is what it is in the oracle, and A is A
    again.
    """
    q, k, v = qkv(2, 130, heads=(2, 2))
    k, v = (t[:, :, :1].expand(-1, -1, 2, -1) for t in (k, v))
    first = None
    for storage in ("expanded", "contiguous", "odd_offset", "heads_first", "contiguous", "expanded"):
        stored = [t if storage == "expanded" else laid_out(t.contiguous(), storage, 0) for t in (q, k, v)]
        call = Call(*stored, right=0, **KERNEL)
        result = ops.run(call)
        assert_as_good_as(result, call)
        if storage == "expanded":
            first = first or result
            assert same(first, result)


def variants(device: str) -> dict[str, tuple[dict, dict]]:
    lengths = lambda *n: strobe.key_lengths(int32(n, device))
    plain = {"causal": True}
    return {
        "scale": (plain, plain | {"scale": 0.3}),
        "sign of the scale": ({"scale": 0.3}, {"scale": -0.3}),
        "softcap": (plain | {"softcap": 2.0}, plain | {"softcap": 7.0}),
        "softcap or none": (plain, plain | {"softcap": 7.0}),
        "causal": ({}, plain),
        "left": ({"window": (5, 0)}, {"window": (40, 0)}),
        "right": ({"window": (None, 3)}, {"window": (None, 30)}),
        "sinks": (plain, plain | {"sinks": torch.ones(4, device=device)}),
        "values of sinks": ({"sinks": torch.zeros(4, device=device)}, {"sinks": torch.ones(4, device=device)}),
        "prefix": ({"mask": strobe.prefix_causal(5)}, {"mask": strobe.prefix_causal(99)}),
        "lengths": ({"mask": lengths(130, 3)}, {"mask": lengths(64, 100)}),
        "deterministic": (plain, plain | {"deterministic": True}),
        "batch_invariant": (plain, plain | {"batch_invariant": True}),
    }


@pytest.mark.parametrize("name", variants("cpu"))
def test_a_b_a(name):
    """Row 87: one argument changed and changed back gives what a process that knows neither gives."""
    tensors = qkv(2, 130)
    a, b = variants("cuda")[name]
    fresh = []
    for options in (a, b):
        CACHE.clear()
        fresh.append(strobe.attention(*tensors, **KERNEL, **options))
    CACHE.clear()
    for options, expected in ((a, fresh[0]), (b, fresh[1]), (a, fresh[0])):
        assert torch.equal(strobe.attention(*tensors, **KERNEL, **options), expected)
    if name not in ("deterministic", "batch_invariant"):
        assert not torch.equal(*fresh)


# ---------------------------------------------------------------- metadata on the device


@pytest.mark.parametrize("offsets", [[0, 5, 3, 9], [0, 4, 2**30], [-7, 4, 9], [0, 9, 2**31 - 1, 9], [9, 0, 9]], ids=str)
@pytest.mark.parametrize("side", ["cu_seqlens_q", "cu_seqlens_k"])
def test_wrong_offsets_are_told_and_harm_nobody(side, offsets):
    """Rows 13, 58, 66: forward and backward; the next call is well."""
    q, k, v = (t[0].requires_grad_() for t in qkv(1, 9))
    good = int32([0, 4, 7, 9] if len(offsets) == 4 else [0, 4, 9], "cuda")
    given = {"cu_seqlens_q": good, "cu_seqlens_k": good} | {side: int32(offsets, "cuda")}
    strobe.last_errors()
    both_ways((q, k, v), attend=strobe.attention_varlen, **given)
    torch.cuda.synchronize()
    assert any(side in error for error in strobe.last_errors("cuda:0"))
    out = strobe.attention_varlen(q, k, v, cu_seqlens_q=good, **KERNEL)
    assert out.isfinite().all() and strobe.last_errors() == []


def test_a_broken_promise_is_told():
    """Row 66: rows beyond max_seqlen_q are NaN, all rows of a sequence with too many keys are; the neighbours keep
    their bits.
    """
    q, k, v = (t[0] for t in qkv(1, 300))
    offsets = int32([0, 100, 250, 300], "cuda")
    attend = lambda **promises: strobe.attention_varlen(
        q, k, v, cu_seqlens_q=offsets, causal=True, **KERNEL, **promises
    )
    whole = attend()
    strobe.last_errors()
    for promises, broken in (({"max_seqlen_q": 120}, slice(220, 250)), ({"max_seqlen_k": 120}, slice(100, 250))):
        out = attend(**promises)
        rows = torch.zeros(300, dtype=torch.bool, device="cuda")
        rows[broken] = True
        assert out[rows].isnan().all() and torch.equal(out[~rows], whole[~rows])
        assert any(next(iter(promises)) in error for error in strobe.last_errors())


def test_gaps_and_sequences_of_nothing(judge):
    """Rows 6, 7, 11, 12: sequences without rows, without keys and without either, tokens of none before and after."""
    case = Case(
        "gaps",
        lengths_q=(0, 70, 0, 3, 129, 0),
        lengths_k=(5, 0, 0, 66, 129, 64),
        outside=(70, 9),
        heads=(4, 2),
        mask=CASES["causal"].mask,
    )
    for sinks in (False, True):
        judge(replace(case, sinks=sinks).build("cuda", torch.bfloat16, requires_grad=True, kernel="portable"))
