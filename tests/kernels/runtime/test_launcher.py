"""Launching again: what reaches Triton's C function is what Triton's own launcher would hand it, whichever addresses
come by.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

import strobe
from strobe.kernels.protocol import Backward, Forward
from strobe.kernels.runtime import first_call_overlap, launcher
from strobe.ops import attention as ops
from strobe.problem.append import AppendCall, AppendProblem
from strobe.problem.call import Call
from strobe.problem.decode import DecodeProblem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.testing.decode import DECODES
from tests.kernels.runtime.launches import STREAM, _act, _call, _Owner
from tools.proof.compile import offline
from tools.proof.simulate import posing


def test_the_c_function_gets_what_triton_would_give_it(stage):
    owner = _Owner()
    assert stage.start(*stage.described(_call()), owner) is None  # compiles, and Triton launches
    for _ in range(2):
        tensors, described = stage.described(_call())
        expected = stage.by_triton(described)
        assert len(expected) > 13 and expected[3] == STREAM
        assert stage.start(tensors, described, owner) == expected
        encoded = len(stage.encoded)
        assert stage.again() and stage.launches.pop() == expected
        assert len(stage.encoded) == encoded  # once for a set of addresses
    assert stage.started == 1


def _noted(monkeypatch, plan, call, tensors) -> list[tuple]:
    """(key, tensors, launch) of each kernel that a plan launches."""
    noted: list[tuple] = []
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "start", lambda owner, key, tensors, first: noted.append((key, tensors, first())))
        workspace = {buffer.name: torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in plan.buffers}
        plan.kernel.run(plan, call, tensors, workspace)
    return noted


def _backward_launches(monkeypatch, dlse: torch.Tensor | None = None, **options) -> list[tuple]:
    """Of the backward of new tensors; `heads` of queries over two of keys."""
    call = _call()._replace(needs_grad=True)
    if heads := options.pop("heads", 0):
        call = call._replace(q=torch.randn(100, heads, 96, dtype=torch.bfloat16), sinks=torch.zeros(heads))
    call = call._replace(kernel="hopper", **options)
    with posing(FAKES["H200"]):
        plan = ops.decide(call).backward
    made = [torch.empty_like(t) for t in (call.q, call.q, call.q, call.k, call.v)]
    lse, delta = torch.empty(len(call.q[0]), 100), torch.empty(len(call.q[0]), 100)
    return _noted(monkeypatch, plan, call, Backward(*made[:2], lse, dlse, *made[2:], delta))


def _decode_launches(monkeypatch, name: str) -> list[tuple]:
    call = DECODES[name].build("cpu", torch.bfloat16)
    problem = DecodeProblem.from_call(call)
    plan = select(problem, FAKES["H200"]).forward
    results = (
        torch.empty(shape, dtype=dtype)
        for shape, dtype in zip(problem.out_shapes, (problem.out_dtype, problem.lse_dtype))
    )
    return _noted(monkeypatch, plan, call, Forward(*results))


def _append_launches(monkeypatch) -> list[tuple]:
    pools = [torch.empty(4, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    new = [torch.empty(3, 1, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    angles = [torch.empty(64, 32) for _ in range(2)]
    call = AppendCall(
        *new, *pools, torch.zeros(3, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32), None, None, *angles
    )
    return _noted(monkeypatch, select(AppendProblem.from_call(call), FAKES["H200"]).forward, call, None)


def _spans_launches(monkeypatch, lengths: bool) -> list[tuple]:
    """Of a forward of documents, with key lengths or without."""
    q, k, v = (torch.empty(2, 700, heads, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    mask = strobe.documents(torch.zeros(2, 700, dtype=torch.int32)) & strobe.causal()
    mask = mask & strobe.key_lengths(torch.full((2,), 700, dtype=torch.int32)) if lengths else mask
    call = Call(q, k, v, kernel="hopper").with_mask(mask)
    with posing(FAKES["H200"]):
        plan = ops.decide(call).forward
    return _noted(monkeypatch, plan, call, Forward(torch.empty_like(q), torch.empty(2, 4, 700)))


LAUNCHED = {
    "forward of documents": (_spans_launches, {"lengths": False}, 0),
    "forward of documents and key lengths": (_spans_launches, {"lengths": True}, 0),
    "backward rows": (_backward_launches, {}, 0),
    "backward main": (_backward_launches, {}, 1),
    "backward convert": (_backward_launches, {}, 2),
    "backward in turns, rows": (_backward_launches, {"deterministic": True}, 0),
    "backward in turns, main": (_backward_launches, {"deterministic": True}, 1),
    "backward of split groups, main": (_backward_launches, {"heads": 4}, 1),
    "backward of split groups, convert dv": (_backward_launches, {"heads": 4}, 4),
    "decode from pages": (_decode_launches, {"name": "pages_of_16"}, 0),
    "decode from pages of 8 bits": (_decode_launches, {"name": "pages_fp8"}, 0),
    "decode from rows": (_decode_launches, {"name": "dense_softcap_sinks"}, 0),
    "append": (_append_launches, {}, 0),
}


@pytest.mark.nightly_cases("backward in turns, main", "backward of split groups, *", "decode from pages of 8 bits")
@pytest.mark.parametrize("name", LAUNCHED)
def test_each_kernel_gets_what_triton_would_give_it(name, stage, monkeypatch):
    """The launcher that is compiled beside it, to the letter, so that Triton calls no C compiler of its own; and the C
    function's arguments.
    """
    launched, options, kernel = LAUNCHED[name]
    key, tensors, described = launched(monkeypatch, **options)[kernel]
    with offline(90):
        one = described.kernel.warmup(*described.arguments, grid=(described.programs,), **described.options)
    if triton.__version__.startswith(first_call_overlap.READ):
        written = []
        with monkeypatch.context() as patch:
            patch.setattr(
                nvidia,
                "compile_module_from_src",
                lambda **module: written.append(module) or SimpleNamespace(launch=stage.function),
            )
            first_call_overlap._launcher(one.src)
            nvidia.CudaLauncher(one.src, one.metadata)
        assert len(written) == 2 and written[0] == written[1] and "launch" in written[0]["src"]
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=stage.utils))
    _act(stage, one, monkeypatch)
    owner = _Owner()
    assert stage.start(tensors, described, owner, key) is None
    for _ in range(2):
        again, tensors, described = launched(monkeypatch, **options)[kernel]
        assert again == key
        assert stage.start(tensors, described, owner, key) == stage.by_triton(described)
    assert stage.started == 1


def test_a_compilation_waits_for_its_launcher(monkeypatch):
    """Both have ended when Triton looks for the launcher, be the compilation sooner or a failure."""
    events = []
    monkeypatch.setattr(first_call_overlap, "_hashing", lambda: SimpleNamespace(join=lambda: None))
    monkeypatch.setattr(
        first_call_overlap, "_launcher", lambda source: (time.sleep(0.05), events.append(f"launcher of {source}"))
    )
    assert (
        first_call_overlap._with_launcher(lambda source, target: events.append("kernel") or target, "a", target=7) == 7
    )
    assert events == ["kernel", "launcher of a"]

    def fails(source):
        raise RuntimeError("no such layout")

    with pytest.raises(RuntimeError, match="no such layout"):
        first_call_overlap._with_launcher(fails, "b")
    assert events[2:] == ["launcher of b"]


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_of_garbage_rests_while_a_kernel_compiles(collects, monkeypatch):
    """And then does what it did before."""
    monkeypatch.setattr(first_call_overlap, "_hashing", lambda: SimpleNamespace(join=lambda: None))
    monkeypatch.setattr(first_call_overlap, "_launcher", lambda source: None)
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        assert first_call_overlap._with_launcher(lambda source: gc.isenabled(), "a") is False
        assert gc.isenabled() is collects
        with pytest.raises(ZeroDivisionError):
            first_call_overlap._with_launcher(lambda source: 1 / 0, "b")
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def _said():
    """What Triton is told of a compilation: (no line numbers, no text of each stage), by its own words and by the
    environment's.
    """
    names = "TRITON_DISABLE_LINE_INFO", "TRITON_STORE_BINARY_ONLY"
    return [getattr(knobs.compilation, name) for name in first_call_overlap.LEFT_OUT], [
        os.environ.get(name) for name in names
    ]


def test_a_compilation_leaves_out_what_no_call_needs(monkeypatch):
    """Unless the environment asks for it; also where several threads compile, of which the first ends first."""
    monkeypatch.setattr(first_call_overlap, "_hashing", lambda: SimpleNamespace(join=lambda: None))
    monkeypatch.setattr(first_call_overlap, "_launcher", lambda source: None)
    for name in ("TRITON_DISABLE_LINE_INFO", "TRITON_STORE_BINARY_ONLY"):
        monkeypatch.delenv(name, raising=False)
    before = _said()
    assert before == ([False, False], [None, None])
    assert first_call_overlap._with_launcher(lambda source: _said(), "a") == ([True, True], ["1", "1"])
    assert _said() == before
    with pytest.raises(ZeroDivisionError):
        first_call_overlap._with_launcher(lambda source: 1 / 0, "b")
    assert _said() == before

    first, second, ended = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def compile_first(source):
        first.set()
        assert second.wait(60)

    def compile_second(source):
        second.set()
        assert ended.wait(60)
        seen.append(_said())

    threads = [
        threading.Thread(target=first_call_overlap._with_launcher, args=(work, "c"))
        for work in (compile_first, compile_second)
    ]
    threads[0].start()
    assert first.wait(60)
    threads[1].start()
    threads[0].join()
    ended.set()
    threads[1].join()
    assert seen == [([True, True], ["1", "1"])] and _said() == before and gc.isenabled()

    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    assert first_call_overlap._with_launcher(lambda source: _said(), "d") == ([False, True], ["0", "1"])
    assert _said() == ([False, False], ["0", None])


def test_a_kernel_compiles_beside_its_launcher_on_each_device(monkeypatch):
    """Triton sets `compile` anew for each device that a kernel comes to."""
    current, compiled = [0], []

    @triton.jit
    def kernel(x):
        pass

    def of_a_device():
        kernel.compile = lambda source, **_: compiled.append((current[0], source))
        return ({}, {}, None, None, None)

    monkeypatch.setattr(first_call_overlap.triton, "__version__", "3.6.0")
    monkeypatch.setattr(first_call_overlap, "triton_key", lambda: time.sleep(0.05) or compiled.append("hashed"))
    monkeypatch.setattr(first_call_overlap, "_launcher", lambda source: compiled.append(("launcher", source)))
    kernel.device_caches = defaultdict(of_a_device)
    first_call_overlap._hashing.cache_clear()
    for current[0] in (0, 0, 1):
        first_call_overlap.beside(kernel, current[0])
        kernel.compile("source")
    assert compiled[0] == "hashed" and compiled.count("hashed") == 1  # before anything is looked up by it
    assert Counter(compiled[1:]) == {(0, "source"): 2, (1, "source"): 1, ("launcher", "source"): 3}
    monkeypatch.setattr(first_call_overlap.triton, "__version__", "3.7.0")
    kernel.compile = untouched = object()
    first_call_overlap.beside(kernel, 0)
    assert kernel.compile is untouched
    first_call_overlap._hashing.cache_clear()


def test_splits_of_a_cluster_are_launched_together(stage, monkeypatch):
    """By Triton and again: a grid of clusters, whose size stands where Triton has its own num_ctas."""
    ((key, tensors, described),) = _decode_launches(monkeypatch, "pages_of_16")
    with offline(90):
        one = described.kernel.warmup(*described.arguments, grid=(1,), **described.options)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=stage.utils))
    _act(stage, one, monkeypatch)
    config = described.arguments[-1]
    warps, alone, shared = one.packed_metadata
    assert (warps, alone, described.cluster) == (4, 1, config.cluster) and config.cluster > 1
    owner = _Owner()
    assert stage.start(tensors, described, owner, key) is None
    assert one.packed_metadata == (warps, config.cluster, shared)
    again = stage.start(tensors, described, owner, key)
    assert again[0] == described.programs and (warps, config.cluster, shared) in again
    one.packed_metadata = warps, alone, shared  # Triton keeps what it compiled


def test_what_is_compiled_in_the_background_is_told_of_its_clusters():
    compiled = SimpleNamespace(packed_metadata=(4, 1, 1000))

    class Kernel:
        warmup = staticmethod(lambda *_, **__: SimpleNamespace(result=lambda: compiled))
        __getitem__ = lambda self, grid: lambda *_, **__: (grid, compiled.packed_metadata)

    assert launcher.in_clusters(16, 3, Kernel(), (), {}) == ((3,), (4, 16, 1000))


def test_a_gradient_of_lse_is_another_launch(stage, monkeypatch):
    without, given = _backward_launches(monkeypatch), _backward_launches(monkeypatch, torch.empty(2, 100))
    assert [a[0] == b[0] for a, b in zip(without, given)] == [False, True, True]
