"""What only a GPU can show of execution: streams, devices, graphs, determinism, a cold compile cache.

Rows are those of docs/reliability.md; the portable family where nothing else is said.
"""

from __future__ import annotations

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
from strobe.testing import CASES, assert_as_good_as, assert_gradients_as_good_as, inputs
from tests.reliability.gpu_calls import both_ways, qkv, same
from tests.reliability.test_reliability import int32

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("watchdog")]
KERNEL = {"kernel": "portable"}


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
    divided = ops.decide(call).backward.config.traits.group_splits > 1
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
    assert ops.decide(call).backward.config.traits.deterministic
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
        monkeypatch.setattr(config, "DEFERRED_DQ_STEPS", dict.fromkeys(config.DEFERRED_DQ_STEPS, steps))
        CACHE.clear()
        call = Call(*tensors, right=0, kernel="hopper", needs_grad=True, deterministic=True)
        traits = ops.decide(call).backward.config.traits
        assert traits.deterministic and traits.dq_deferred == (steps == 0)
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
    forward, backward = config.forward_tile, config.backward_tiles
    if tma and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no TMA before sm_90")
    deep = lambda tile: replace(tile, stages=stages, tma=tma, block_m=64, block_n=64)
    monkeypatch.setattr(config, "forward_tile", lambda *a: deep(forward(*a)))
    monkeypatch.setattr(config, "backward_tiles", lambda *a: tuple(deep(tile) for tile in backward(*a)))
    CACHE.clear()
    for mask in ({}, {"right": 0}, {"left": 100, "right": 0}):
        call = Call(*qkv(4, 515, heads=(4, 2), width=64, grad=True), needs_grad=True, **KERNEL, **mask)
        assert ops.decide(call).forward.config.traits.tile.stages == stages
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
