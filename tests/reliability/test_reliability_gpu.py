"""What only a GPU can show: launch limits, tensors that really are that large, streams, graphs, alignment, a cold
cache.

Rows are those of docs/reliability.md; the portable family where nothing else is said, on one GPU (the largest test
needs 60 GiB of its memory).
"""

from __future__ import annotations

import faulthandler
import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch

import strobe
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.testing import CASES, Case, assert_as_good_as, assert_gradients_as_good_as, inputs
from strobe.testing.cases import laid_out
from tests.reliability.test_reliability import draw, int32

pytestmark = pytest.mark.gpu
KERNEL = {"kernel": "portable"}
GIB = 2**30


@pytest.fixture(autouse=True)
def watchdog():
    """Rows 8, 11, 54, 57: a kernel that hangs holds the interpreter's lock, so the process ends itself, with a
    traceback.
    """
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    torch.cuda.synchronize()  # a fault belongs to the test that caused it
    faulthandler.cancel_dump_traceback_later()
    torch.cuda.empty_cache()


def needs_memory(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free / GIB:.0f} are free")


def qkv(batch=2, rows=300, keys=None, heads=(4, 2), width=64, dtype=torch.bfloat16, grad=False, seed=0):
    keys = rows if keys is None else keys
    tensors = draw(
        (batch, rows, heads[0], width), *[(batch, keys, heads[1], width)] * 2, dtype=dtype, device="cuda", seed=seed
    )
    return [t.requires_grad_(grad) for t in tensors]


def both_ways(tensors, dout=None, attend=strobe.attention, **options):
    """out and the gradients of q, k and v."""
    out = attend(*tensors, **KERNEL | options)
    return out, *torch.autograd.grad(out, tensors, torch.ones_like(out) if dout is None else dout)


def same(results, others) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, others))


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


# ---------------------------------------------------------------- races, determinism


@pytest.mark.parametrize(
    "name",
    ["causal", "grouped", "one_kv_head", "packed_causal", "packed_two_sides", "documents_causal", "window_causal"],
)
def test_deterministic_backward_50_times(name):
    """Rows 69, 72, 73, 78: bitwise, many programs at once."""
    case = CASES[name] if CASES[name].packed else replace(CASES[name], batch=30)
    call = case.build("cuda", torch.bfloat16, requires_grad=True, kernel="portable")._replace(deterministic=True)
    first = None
    for _ in range(50):
        out, lse = ops.run(call)
        result = (out, lse, *torch.autograd.grad(out, call[:3], torch.ones_like(out)))
        first = first or result
        assert same(result, first)


REPEATED_ON_HOPPER = [
    "causal",
    "grouped",
    "one_kv_head",
    "packed_causal",
    "packed_two_sides",
    "window_causal",
    "packed_softcap_192_128",
]


@pytest.mark.parametrize("name", [*REPEATED_ON_HOPPER, "head_dim_96", "head_dim_128", "head_dim_192", "head_dim_256"])
def test_hopper_backward_50_times(name):
    """Rows 69, 78: bitwise but for what is summed in any order: dq, and of groups divided among programs dk and dv, all
    to a rounding.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for sm_90")
    case = CASES[name] if CASES[name].packed else replace(CASES[name], batch=30)
    call = case.build("cuda", torch.bfloat16, requires_grad=True, kernel="hopper")
    divided = ops.decide(call).backward.config.form.splits > 1
    first = None
    for _ in range(50):
        out, _lse = ops.run(call)
        dq, dk, dv = torch.autograd.grad(out, call[:3], torch.ones_like(out))
        first = first or (dq, dk, dv)
        assert divided or same((dk, dv), first[1:])
        torch.testing.assert_close((dq, dk, dv), first, rtol=2.0**-7, atol=2.0**-10)


@pytest.mark.parametrize(
    "name", [*REPEATED_ON_HOPPER, "length_257", "head_dim_96", "head_dim_128", "head_dim_192", "head_dim_256"]
)
def test_ordered_hopper_backward_50_times(name):
    """Rows 72, 73: every gradient bitwise, and the plan says that dq is added in order."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for sm_90")
    case = CASES[name] if CASES[name].packed else replace(CASES[name], batch=30)
    call = case.build("cuda", torch.bfloat16, requires_grad=True, kernel="hopper")._replace(deterministic=True)
    assert ops.decide(call).backward.config.form.ordered
    first = None
    for _ in range(50):
        out, _lse = ops.run(call)
        result = torch.autograd.grad(out, call[:3], torch.ones_like(out))
        first = first or result
        assert same(result, first)


@pytest.mark.parametrize("heads, seqlen", [((2, 2), 8192), ((8, 2), 3001)], ids=["multi-head", "grouped"])
def test_ordered_gradients_are_those_of_steps_that_multiply_their_own_dq(heads, seqlen, monkeypatch):
    """Two consumers half a step apart change no bit, in 1,000 runs."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for sm_90")
    config = import_module("strobe.kernels.hopper.kernel")
    tensors, found = qkv(1, seqlen, heads=heads, width=128, grad=True), {}
    for steps in (10**6, 0):
        monkeypatch.setattr(config, "LAGGING_STEPS", dict.fromkeys(config.LAGGING_STEPS, steps))
        CACHE.clear()
        call = Call(*tensors, right=0, kernel="hopper", needs_grad=True, deterministic=True)
        form = ops.decide(call).backward.config.form
        assert form.ordered and form.lags == (steps == 0)
        found[steps] = both_ways(tensors, causal=True, kernel="hopper", deterministic=True)
    assert same(found[0], found[10**6])
    for _ in range(1000):
        assert same(both_ways(tensors, causal=True, kernel="hopper", deterministic=True), found[0])
    CACHE.clear()


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"window": (200, 30)}], ids=["causal", "full", "window"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["multi-head", "grouped"])
def test_ordered_hopper_backward_1000_times(heads, options):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for sm_90")
    tensors = qkv(16, 2051, heads=heads, grad=True)
    first = both_ways(tensors, kernel="hopper", deterministic=True, **options)
    for _ in range(1000):
        assert same(both_ways(tensors, kernel="hopper", deterministic=True, **options), first)


@pytest.mark.nightly
def test_deterministic_backward_1000_times():
    tensors = qkv(60, 515, heads=(4, 1), grad=True)
    first = both_ways(tensors, causal=True)
    for _ in range(1000):
        assert same(both_ways(tensors, causal=True), first)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("tma", [False, True])
def test_every_number_of_stages(stages, tma, monkeypatch):
    """Rows 68, 70, 71: the pipeline's depth changes timing and shared memory, never a result by more than a
    rounding."""
    config = import_module("strobe.kernels.portable.kernel")
    forward, backward = config.forward_tuning, config.backward_tuning
    if tma and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no TMA before sm_90")
    deep = lambda tuning: replace(tuning, stages=stages, tma=tma, block_m=64, block_n=64)
    monkeypatch.setattr(config, "forward_tuning", lambda *a: deep(forward(*a)))
    monkeypatch.setattr(config, "backward_tuning", lambda *a: tuple(deep(t) for t in backward(*a)))
    CACHE.clear()
    for mask in ({}, {"right": 0}, {"left": 100, "right": 0}):
        call = Call(*qkv(4, 515, heads=(4, 2), width=64, grad=True), needs_grad=True, **KERNEL, **mask)
        assert ops.decide(call).forward.config.form.tuning.stages == stages
        out, lse = ops.run(call)
        assert_as_good_as((out, lse), call)
        dout = inputs.upstream("normal", out, 0)
        first = torch.autograd.grad(out, call[:3], dout, retain_graph=True)
        assert_gradients_as_good_as((*first, None), call, dout)
        assert all(same(torch.autograd.grad(out, call[:3], dout, retain_graph=True), first) for _ in range(10))
    CACHE.clear()


UNCACHED = """
import os, torch, strobe
kind = dict(device="cuda", dtype=torch.bfloat16, requires_grad=True)
for n in range(20):
    q, k, v = (torch.randn(2, 100 + n, 2, 64, **kind) for _ in range(3))
    out = strobe.attention(q, k, v, causal=True, kernel="portable")
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    del out
    torch.cuda.synchronize()
    assert all(g.isfinite().all() for g in grads)
print("well", flush=True)
# at once: autograd's thread, which may still let go of the last gradients, aborts an interpreter that ends meanwhile
os._exit(0)
"""


def in_a_process_of_its_own(code: str, **environment: str) -> subprocess.Popen:
    inherited = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.Popen(
        [sys.executable, "-c", code], env=inherited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_scratch_outlives_its_kernels():
    """Row 74: without torch's caching allocator, memory freed too early is memory unmapped."""
    done = in_a_process_of_its_own(UNCACHED, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    told, _ = done.communicate(timeout=240)
    assert done.returncode == 0 and "well" in told, told


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


# ---------------------------------------------------------------- streams, devices


def slowly() -> None:
    """Keeps the current stream busy for some 50 ms."""
    torch.cuda._sleep(100_000_000)


@pytest.mark.parametrize("packed", [False, True])
def test_a_side_stream_waits_for_its_slow_producer(packed):
    """Rows 65, 71, 79, 81: inputs and offsets that are still being written on this stream are not read before."""
    tensors = [t[0] if packed else t for t in qkv(1, 515, grad=True)]
    offsets = int32([0, 100, 350, 515], "cuda")
    options = {"attend": strobe.attention_varlen, "cu_seqlens_q": offsets} if packed else {}
    expected = both_ways(tensors, causal=True, **options)
    late = [torch.full_like(t.detach(), torch.nan).requires_grad_() for t in tensors]
    late_offsets, dout = torch.zeros_like(offsets), torch.full_like(expected[0], torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        slowly()
        with torch.no_grad():
            for own, ready in zip(late, tensors):
                own.copy_(ready)
        late_offsets.copy_(offsets)
        out = (strobe.attention_varlen if packed else strobe.attention)(
            *late, **KERNEL, causal=True, **({"cu_seqlens_q": late_offsets} if packed else {})
        )
        slowly()
        dout.fill_(1.0)
        results = (out, *torch.autograd.grad(out, late, dout))
        torch.cuda.current_stream().synchronize()
    assert same(results, expected)


def test_a_stream_made_elsewhere():
    """Row 81: an external stream, by its handle."""
    tensors = qkv(grad=True)
    expected = both_ways(tensors, causal=True)
    own = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(own.cuda_stream)):
        results = both_ways(tensors, causal=True)
        torch.cuda.current_stream().synchronize()
    assert same(results, expected)


def test_two_streams_100_times():
    """Rows 76, 82: the same op at once on two streams, with other contents; nothing is shared between them."""
    problems = [qkv(2, 515, grad=True, seed=seed) for seed in (1, 2)]
    expected = [both_ways(tensors, causal=True) for tensors in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(100):
        results = []
        for stream, tensors in zip(streams, problems):
            with torch.cuda.stream(stream):
                results.append(both_ways(tensors, causal=True))
        torch.cuda.synchronize()
        assert all(same(got, wanted) for got, wanted in zip(results, expected))


def test_no_call_waits_for_the_device():
    """Row 86: nothing is copied to the host to plan with."""
    tensors = qkv(grad=True)
    flat = [t.detach()[0].requires_grad_() for t in tensors]
    offsets, lengths = int32([0, 100, 300], "cuda"), strobe.key_lengths(int32([300, 7], "cuda"))
    calls = (
        lambda: both_ways(tensors, causal=True),
        lambda: both_ways(tensors, mask=lengths),
        lambda: both_ways(flat, attend=strobe.attention_varlen, cu_seqlens_q=offsets, max_seqlen_q=200),
    )
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_the_second_device():
    """Row 80; with one GPU, test_reliability.py has the same with a mock."""
    tensors = qkv(grad=True)
    expected = both_ways(tensors, causal=True)
    others = [t.detach().to("cuda:1").requires_grad_() for t in tensors]
    with torch.cuda.device(0):
        results = both_ways(others, causal=True)
    assert torch.cuda.current_device() == 0 and same([t.to("cuda:0") for t in results], expected)


# ---------------------------------------------------------------- graphs


def captured(run):
    """A graph of `run` and what it writes; run three times before, so that nothing is compiled while it captures."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def test_a_graph_is_replayed_on_other_contents():
    """Row 83: forward and backward, 100 replays."""
    held = qkv(grad=True)
    graph, results = captured(lambda: both_ways(held, causal=True))
    for seed in range(100):
        fresh = qkv(grad=True, seed=seed % 7)
        with torch.no_grad():
            for own, new in zip(held, fresh):
                own.copy_(new)
        graph.replay()
        assert same(results, both_ways(fresh, causal=True))


def test_a_graph_is_replayed_on_other_lengths():
    """Rows 60, 83: offsets live on the device, so the grid may not depend on them; wrong ones are told after a replay
    too.
    """
    held = [t[0].detach().requires_grad_() for t in qkv(1, 600)]
    offsets = int32([0, 100, 350, 600], "cuda")
    graph, results = captured(
        lambda: both_ways(held, attend=strobe.attention_varlen, cu_seqlens_q=offsets, causal=True)
    )
    strobe.last_errors()
    for new in ([0, 600, 600, 600], [0, 1, 2, 3], [5, 133, 133, 590], [0, 0, 0, 0], [0, 100, 350, 600]):
        offsets.copy_(int32(new, "cuda"))
        graph.replay()
        assert same(
            results, both_ways(held, attend=strobe.attention_varlen, cu_seqlens_q=int32(new, "cuda"), causal=True)
        ), new
    assert strobe.last_errors() == []
    offsets.copy_(int32([0, 350, 100, 2**30], "cuda"))
    graph.replay()
    assert any("cu_seqlens_q" in error for error in strobe.last_errors())


def test_a_graph_is_replayed_on_other_key_lengths_and_documents():
    """Row 83: the tensors of a mask are arguments, not constants."""
    held = qkv(2, 130, heads=(2, 2), grad=True)
    lengths = int32([130, 130], "cuda")
    graph, results = captured(lambda: both_ways(held, mask=strobe.key_lengths(lengths)))
    for new in ([0, 130], [64, 65], [1, 2]):
        lengths.copy_(int32(new, "cuda"))
        graph.replay()
        assert same(results, both_ways(held, mask=strobe.key_lengths(int32(new, "cuda"))))
    ids = torch.zeros(2, 130, dtype=torch.int32, device="cuda")
    graph, results = captured(
        lambda: both_ways(held, mask=strobe.documents(ids))
    )  # the mask is made anew by each replay
    for seed in range(3):
        ids.copy_(torch.randint(-1, 3, (2, 130), generator=torch.Generator().manual_seed(seed)).sort(1).values)
        graph.replay()
        assert same(results, both_ways(held, mask=strobe.documents(ids)))


def test_compiled_with_cuda_graphs():
    """Row 84: no workspace of a module is written by one graph and read by another."""
    step = torch.compile(lambda q, k, v: strobe.attention(q * 1.0, k, v, causal=True, **KERNEL), mode="reduce-overhead")
    for seed in range(6):
        tensors = qkv(seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(
            step(*tensors).clone(), strobe.attention(*tensors, causal=True, **KERNEL), rtol=0, atol=0
        )


# ---------------------------------------------------------------- compile cache

COLD = """
import hashlib, torch, strobe
torch.manual_seed(0)
q, k, v = (torch.randn(2, 130, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
out = strobe.attention(q, k, v, causal=True, kernel="portable")
results = (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
bits = b"".join(t.detach().view(torch.int16).cpu().numpy().tobytes() for t in results)
print("bits", hashlib.sha256(bits).hexdigest())
"""


def test_8_processes_meet_a_cold_cache(tmp_path):
    """Rows 89, 90: all compile the same kernels into one empty folder at once, and all get the same bits."""
    running = [in_a_process_of_its_own(COLD, TRITON_CACHE_DIR=str(tmp_path)) for _ in range(8)]
    told = [process.communicate(timeout=240)[0] for process in running]
    failed = [f"exit {process.returncode}:\n{text}" for process, text in zip(running, told) if process.returncode]
    assert failed == [], "\n".join(failed)
    assert len({line for text in told for line in text.splitlines() if line.startswith("bits")}) == 1


def test_steady_state_compiles_nothing():
    """Row 88: lengths that change from call to call meet a compiled kernel."""
    import triton
    from triton import knobs

    run = lambda length: both_ways(qkv(1, length, grad=True), causal=True)
    for length in (512, 513, 528, 1024):  # multiples of 16 or not: what Triton itself tells apart
        run(length)
    compiled: list[str] = []
    hook, knobs.runtime.jit_post_compile_hook = (
        knobs.runtime.jit_post_compile_hook,
        lambda **told: compiled.append(str(told.get("repr"))),
    )
    try:
        for length in (515, 531, 544, 777, 1040):
            run(length)
    finally:
        knobs.runtime.jit_post_compile_hook = hook
    assert compiled == [], f"Triton {triton.__version__} compiled again"


FIRST = """
import torch, strobe
q, k, v = (torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
torch.autograd.grad(strobe.attention(q, k, v, causal=True, kernel="hopper").sum(), (q, k, v))
torch.cuda.synchronize()
"""


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU")
def test_a_first_call_compiles_each_launcher_once(tmp_path):
    """Beside its kernel; Triton then finds it, for which the text must be the same to the letter."""
    process = in_a_process_of_its_own(FIRST, TRITON_CACHE_DIR=str(tmp_path))
    told, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "Traceback" not in told, told
    launchers, drivers, kernels = (
        list(tmp_path.rglob(name)) for name in ("__triton_launcher*.so", "cuda_utils*.so", "*.cubin")
    )
    assert (len(launchers), len(drivers)) == (len(kernels), 1) and len(
        kernels
    ) >= 3  # forward, rows, backward; longer rows have one for dq
