"""Launching again: what reaches Triton's C function is what Triton's own launcher would hand it, whichever addresses
come by.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
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
from strobe.kernels.hopper import launch_forward
from strobe.kernels.protocol import NUMBERS, Backward, Forward, Plan
from strobe.kernels.runtime import first_call_overlap, launch_cache, launcher
from strobe.kernels.runtime import workspace as memory
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import attention as ops
from strobe.ops import decode as ops_decode
from strobe.problem import torch_private
from strobe.problem.append import AppendCall, AppendProblem
from strobe.problem.call import Call
from strobe.problem.decode import DecodeProblem
from strobe.problem.target import FAKES
from strobe.selection import replay
from strobe.selection.select import select
from strobe.testing.decode import DECODES
from tools.proof.compile import offline
from tools.proof.simulate import posing

STREAM = 77


class _Owner:
    """A plan as the launcher sees it."""

    def __init__(self) -> None:
        self.number = next(NUMBERS)


def _launches(plan: Plan) -> dict:
    return CACHE.launches.get(plan.number, {})


KEY = "a key"


def _call(offset: int = 0, **options) -> Call:
    """New tensors each time; packed, with sinks, and with a head dimension in two parts: every kind of argument."""
    q, k, v = (torch.randn(100, 2, 96, dtype=torch.bfloat16) for _ in range(3))
    offsets = torch.tensor([0, 40, 100], dtype=torch.int32)
    return Call(
        q,
        k,
        v,
        right=0,
        sinks=torch.zeros(2 + offset)[offset:],
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets.clone(),
        **options,
    )


class Stage:
    """Triton on a machine whose driver notes what it is asked for."""

    def __init__(self) -> None:
        self.launches: list[tuple] = []
        self.encoded: list[tuple] = []
        self.started = 0
        self.compiled = None
        encode = lambda *arguments: self.encoded.append(arguments) or ("map", plain(arguments))
        encoders = dict.fromkeys(
            ("fill_tma_descriptor", "fill_tma_descriptor_tiled"), encode
        )  # by its names to 3.6 and since
        self.utils = SimpleNamespace(launch=self.function, build_signature_metadata=tuple, **encoders)

    def function(self, *arguments) -> None:
        self.launches.append(plain(arguments))

    def described(self, call: Call) -> tuple[tuple, launch_forward.Launch]:
        """The tensors of a call, and its launch."""
        with posing(FAKES["H200"]):
            plan = ops.decide(call).forward
        out, lse = torch.empty_like(call.q), torch.empty(2, 100)
        word, counter = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
        pointers = (lse, call.sinks, call.cu_seqlens_q, call.cu_seqlens_k, word, counter)
        return (*call[:3], out, *pointers), launch_forward.forward_launch(plan, call, out, pointers)

    def by_triton(self, described: launch_forward.Launch) -> tuple:
        """What Triton's launcher hands to the C function."""
        kernel = self.compiled
        kernel.run(
            described.programs,
            1,
            1,
            STREAM,
            kernel.function,
            kernel.packed_metadata,
            None,
            None,
            None,
            *described.arguments,
        )
        return self.launches.pop()

    def start(self, tensors: tuple, described: launch_forward.Launch, owner: object, key: str = KEY) -> tuple | None:
        """What reaches the C function by `relaunch`; None where Triton launches."""
        assert not self.launches
        self.again = launcher.start(owner, key, tensors, lambda: described._replace(kernel=_Kernel(self)))
        assert (self.again is None) == (not self.launches)
        return self.launches.pop() if self.launches else None


class _Kernel:
    """A JITFunction that is compiled already."""

    def __init__(self, stage: Stage):
        self.stage = stage

    def __getitem__(self, grid):
        def started(*arguments, **options):
            self.stage.started += 1
            return self.stage.compiled

        return started

    def warmup(self, *arguments, grid, **options):
        return self.stage.compiled


def plain(argument):
    """Tensors as their addresses, so that arguments can be compared."""
    if isinstance(argument, (tuple, list)):
        return tuple(plain(part) for part in argument)
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


@pytest.fixture(scope="module")
def compiled():
    _, described = Stage().described(_call())
    with offline(90):
        return described.kernel.warmup(*described.arguments, grid=(described.programs,), **described.options)


def _act(stage: Stage, compiled, monkeypatch) -> None:
    """`compiled` is what the stage's launches compile to."""
    monkeypatch.setattr(compiled, "_run", nvidia.CudaLauncher(compiled.src, compiled.metadata))
    monkeypatch.setattr(compiled, "module", object())
    monkeypatch.setattr(compiled, "function", 1234)
    stage.compiled = compiled


@pytest.fixture
def stage(compiled, monkeypatch):
    stage = Stage()
    monkeypatch.setattr(torch_private, "cuda_current_raw_stream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(
        nvidia, "compile_module_from_src", lambda *_, **__: SimpleNamespace(launch=stage.function), raising=False
    )
    monkeypatch.setattr(nvidia, "library_dirs", list)
    monkeypatch.setattr(
        nvidia, "PyKernelArg", lambda **fields: tuple(fields.values()), raising=False
    )  # of Triton's C module, from 3.7 on
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=stage.utils))
    monkeypatch.setattr(torch_private, "cuda_current_device", lambda: -1, raising=False)
    monkeypatch.setattr(torch_private, "cuda_is_capturing", lambda: False, raising=False)
    _act(stage, compiled, monkeypatch)
    with CACHE.emptied():
        yield stage


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


def test_a_plan_launches_again_at_addresses_it_met(stage, monkeypatch):
    """From the op's side: first through Triton, then noted, then again and again without the kernel's own host code."""
    monkeypatch.setattr(
        launch_forward.Launch, "start", lambda self: setattr(stage, "started", stage.started + 1) or stage.compiled
    )
    met = []
    monkeypatch.setattr(
        launch_forward, "run_forward", lambda *a, real=launch_forward.run_forward: met.append(1) or real(*a)
    )
    with posing(FAKES["H200"]):
        for call in (_call(), _call()):
            choice = ops.decide(call)
            places = [(torch.empty_like(call.q), torch.empty(2, 100)) for _ in range(2)]
            for tensors in places * 3:
                if not replay.replay(choice.forward, call, *tensors):
                    ops.write(choice, call, *tensors)
                assert not stage.launches or (tensors[0].data_ptr() in _flat(stage.launches.pop()))
        assert len(_launches(choice.forward)) == 4
        assert stage.started == 1 and len(met) == 5
        assert replay.replay(choice.forward, call, *tensors) and stage.launches.pop()
        monkeypatch.setattr(torch_private, "cuda_current_device", lambda: 1)
        assert not replay.replay(choice.forward, call, *tensors)  # another device is current: its guard comes first


class _Places:
    """An allocator that gives out the same addresses each time its owner has freed them."""

    def __init__(self) -> None:
        self.held: dict = {}
        self.given = 0

    def fresh(self, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype) -> torch.Tensor:
        assert type(shape) is tuple  # torch's own refuses a torch.Size
        self.given += 1
        made = self.held.setdefault((self.given, *shape, dtype), torch.empty(shape, dtype=dtype))
        assert strides in (None, made.stride())
        return made


@pytest.mark.parametrize("heads, launches", ((2, 2), (4, 5)))
def test_a_backward_is_launched_again_as_one(stage, heads, launches, monkeypatch):
    """Its kernels one behind the other, without their host code; where groups are split, sums are set to 0 first."""
    started, places, filled = [], _Places(), []
    noted = lambda owner, key, tensors, first: (
        started.append(key) or launcher.RecordedLaunch(stage.function, 1, -1, (key, *plain(tensors)))
    )
    monkeypatch.setattr(launcher, "start", noted)
    monkeypatch.setattr(ops, "empty_here", places.fresh)
    monkeypatch.setattr(memory, "empty_here", places.fresh)
    monkeypatch.setattr(
        torch, "full", lambda shape, value, **kind: filled.append(value) or places.fresh(shape, None, kind["dtype"])
    )
    q = torch.randn(1, 100, heads, 64, dtype=torch.bfloat16)
    call = Call(
        q,
        *(torch.randn(1, 100, 2, 64, dtype=torch.bfloat16) for _ in range(2)),
        right=0,
        kernel="hopper",
        needs_grad=True,
    )
    given = torch.empty_like(q), torch.empty_like(q), torch.empty(1, heads, 100)
    made, times = [], []
    lying = given[0].as_strided(q.shape, (6400 * heads, 64, 6400, 1))  # dout otherwise, at the same address
    with posing(FAKES["H200"]):
        for dout in (given[0], given[0], given[0], given[0], lying, lying, given[0]):
            if len(made) == 6:  # a profiler looks on
                monkeypatch.setattr(knobs.runtime.launch_exit_hook, "calls", [print])
            places.given = 0
            made.append(ops._given_gradients(call, ops.decide(call), (dout, *given[1:], None)))
            times.append((len(started), len(stage.launches)))
    # at once torch's memory, then places that come again: noted there, launched there; so where dout lies otherwise
    assert times == [(launches * a, launches * b) for a, b in ((1, 0), (2, 0), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3))]
    first, *rest = map(plain, made)
    assert first != rest[0] == rest[1] == rest[2] and len(filled) == (14 if heads > 2 else 0)
    assert stage.launches[:launches] == stage.launches[launches : 2 * launches]
    assert [one[4] for one in stage.launches[:launches]] == started[launches : 2 * launches]


def test_gradients_are_launched_again_before_anything_else_is_looked_at(stage, monkeypatch):
    """Of a plain call: not where a graph of them is wanted, where dout lies otherwise, where what autograd kept has
    come back as something else, or while a profiler looks on; then as any other call's.
    """
    started, looked, places = [], [], _Places()
    noted = lambda owner, key, tensors, first: (
        started.append(key) or launcher.RecordedLaunch(stage.function, 1, -1, (key, *plain(tensors)))
    )
    monkeypatch.setattr(launcher, "start", noted)
    for user in (ops, memory, replay):
        monkeypatch.setattr(user, "empty_here", places.fresh)

    def looking(*arguments, real=ops._given_gradients):
        looked.append(1)
        places.given = 0  # what did not come again has been let go
        return real(*arguments)

    monkeypatch.setattr(ops, "_given_gradients", looking)
    q, k, v = (torch.randn(1, 100, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.empty_like(q)
    lying = dout.as_strided(q.shape, (12800, 64, 6400, 1))  # otherwise, at the same address

    def gradients(out, of=dout):
        """(whether the call was looked at, kernels started anew, launches repeated, what came)"""
        before = len(looked), len(started), len(stage.launches)
        places.given = 0
        made = torch.autograd.grad(out, (q, k, v), of, retain_graph=True)
        return *[now - then for now, then in zip((len(looked), len(started), len(stage.launches)), before)], plain(made)

    with posing(FAKES["H200"]):
        out = strobe.attention(q, k, v, causal=True, kernel="hopper")
        assert [gradients(out)[:3] for _ in range(2)] == [(1, 2, 0)] * 2  # torch's memory, then places that come again
        again = gradients(out)
        assert again[:3] == (0, 0, 2) and again == gradients(out)
        assert [gradients(out, lying)[:3] for _ in range(2)] == [(1, 2, 0), (0, 0, 2)]
        assert gradients(out)[:3] == (0, 0, 2)
        places.given, before = 0, len(looked)
        twice = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True, create_graph=True)
        assert all(t.requires_grad for t in twice) and len(looked) == before + 1
        with pytest.raises(strobe.UnsupportedProblem, match="double backward"):
            torch.autograd.grad(twice[0].sum(), q)
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime.launch_exit_hook, "calls", [print])
            assert gradients(out)[:3] == (1, 2, 0)
        out = strobe.attention(q, k, v, causal=True, kernel="hopper")
        out.grad_fn._raw_saved_tensors[4].register_hooks(lambda t: t, lambda t: t.mT.contiguous().mT)
        assert [gradients(out)[0] for _ in range(2)] == [1, 1]
        out = strobe.attention(q, k, v, causal=True, kernel="hopper")
        out.grad_fn._raw_saved_tensors[1].register_hooks(lambda t: t, lambda t: t.as_strided(t.shape, lying.stride()))
        assert gradients(out)[0] == 1


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", ["pages_of_16", "dense"])
@pytest.mark.parametrize("keys", ["one split", "splits", "splits in a cluster"])
def test_a_decode_is_launched_again(stage, alone, name, keys, monkeypatch):
    """Where lse stands behind the scratch or by itself: what the kernel is handed lies in memory that is held, and each
    thing apart.
    """
    started, places = [], _Places()
    noted = lambda owner, key, tensors, first: (
        started.append(plain(tensors)) or launcher.RecordedLaunch(stage.function, 1, -1, plain(tensors))
    )
    monkeypatch.setattr(launcher, "start", noted)
    monkeypatch.setattr(ops_decode, "empty_here", places.fresh)
    call = DECODES[name].build("cpu", torch.bfloat16, "normal", 0, "hopper", False)
    if keys != "splits in a cluster":
        monkeypatch.setattr("strobe.kernels.hopper.decode_config.together", lambda *_: 0)
    if keys == "one split":
        monkeypatch.setattr("strobe.kernels.hopper.decode_config.splits", lambda capacity, *_: (1, capacity))
    with posing(FAKES["H200"]):
        choice = ops_decode.decide(call)
        assert choice.forward.config.form.single == (keys == "one split") and (choice.forward.room > 0) == (
            keys == "splits"
        )
        assert (choice.forward.config.form.cluster > 0) == (keys == "splits in a cluster")
        made = []
        for _ in range(4):
            places.given = 0
            made.append(ops_decode.run(call, alone=alone))
        kept = _launches(choice.forward)
    # at once torch's memory, then places that come again: noted there, then launched there
    assert (len(started), len(stage.launches)) == (2, 2) and len(kept) == 2
    assert stage.launches[0][4:] == stage.launches[1][4:] == started[1]
    out, lse = (place.data_ptr() for place in (made[1][0], made[1][1]))
    assert out == made[3][0].data_ptr() == started[1][6] and lse == started[1][7]
    assert made[3][1] is None if alone else made[3][1].data_ptr() == lse
    held = sorted(
        (place.data_ptr(), place.data_ptr() + place.numel() * place.element_size()) for place in places.held.values()
    )
    lse_end = lse + choice.problem.lse_bytes
    assert any(begin <= lse and lse_end <= end for begin, end in held) and len(held) == 2 + (
        not alone and choice.forward.room > 0
    )
    if choice.forward.room:
        shares = started[1][11]
        shares_end = shares + choice.forward.room
        assert any(begin <= shares and shares_end <= end for begin, end in held) and not shares < lse_end <= shares_end


def test_nothing_is_launched_again_in_sequence_where_one_was_not_noted(stage):
    one = launcher.RecordedLaunch(stage.function, 1, -1, ())
    assert launcher.in_sequence([one, None]) is None and launcher.in_sequence([one, one.on_this_stream()]) is None
    assert launcher.in_sequence([one, one])() and len(stage.launches) == 2


@pytest.mark.parametrize("out", ("strided", "odd"))
def test_an_out_laid_out_otherwise_is_not_what_a_plan_keeps(stage, out, monkeypatch):
    monkeypatch.setattr(launch_forward.Launch, "start", lambda self: stage.compiled)
    call = _call()
    wide = torch.empty(100, 2, 104 if out == "strided" else 97, dtype=torch.bfloat16)
    with posing(FAKES["H200"]):
        choice = ops.decide(call)
        for _ in range(4):
            ops.write(choice, call, wide[..., :96], torch.empty(2, 100))
        assert not _launches(choice.forward)


def test_what_all_plans_keep_is_bounded(stage, monkeypatch):
    """Lengths that change with each step bring new plans, and new addresses to each."""
    monkeypatch.setattr(launch_cache, "MAX_LAUNCHES", 6)
    monkeypatch.setattr(launch_forward.Launch, "start", lambda self: stage.compiled)
    plans, most = [], 0
    with posing(FAKES["H200"]):
        for window in range(8):
            call = _call(left=window)
            plans.append(ops.decide(call).forward)
            for lse in [torch.empty(2, 100) for _ in range(4)]:
                ops.write(ops.decide(call), call, torch.empty_like(call.q), lse)
                most = max(most, sum(len(_launches(plan)) for plan in plans))
    assert most == 6


def test_a_kernel_is_recorded_while_another_thread_empties_the_table(stage, monkeypatch):
    recording = launcher.record

    def meanwhile(*arguments):
        CACHE.kernels.clear()  # as a thread does that inserts one kernel too many
        return recording(*arguments)

    monkeypatch.setattr(launcher, "record", meanwhile)
    owner = _Owner()
    for _ in range(2):
        stage.start(*stage.described(_call()), owner)
    assert CACHE.kernel_launches and not CACHE.kernels


def test_what_streams_do_not_share_is_launched_again_on_its_own_alone(stage, monkeypatch):
    owner, (tensors, described) = _Owner(), stage.described(_call())
    for _ in range(2):
        stage.start(tensors, described, owner)
    anywhere, here = stage.again, stage.again.on_this_stream()
    assert here() and stage.launches.pop()[3] == STREAM
    monkeypatch.setattr(torch_private, "cuda_current_raw_stream", lambda device: STREAM + 1)
    assert not here() and not stage.launches
    assert anywhere() and stage.launches.pop()[3] == STREAM + 1
    monkeypatch.setattr(torch_private, "cuda_current_raw_stream", lambda device: STREAM)
    monkeypatch.setattr(torch_private, "cuda_is_capturing", lambda: True)
    assert not here() and anywhere.on_this_stream() is None and not stage.launches
    assert anywhere() and stage.launches.pop()


def _flat(arguments: tuple) -> list:
    return [one for part in arguments for one in (_flat(part) if isinstance(part, tuple) else [part])]


def test_a_hook_set_later_has_triton_launch(stage, monkeypatch):
    owner, (tensors, described) = _Owner(), stage.described(_call())
    for _ in range(2):
        stage.start(tensors, described, owner)
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    assert not stage.again() and not stage.launches


def test_addresses_that_were_met_are_not_described_again(stage):
    """Descriptors are encoded once for two sets of addresses that come by turns, as in a loop."""
    owner = _Owner()
    stage.start(*stage.described(_call()), owner)
    turns = [stage.described(_call()) for _ in range(2)]
    first = [stage.start(*one, owner) for one in turns]
    encoded = len(stage.encoded)
    assert (
        encoded
        and first == [stage.start(*one, owner) for one in turns]
        and len(stage.encoded) == encoded
        and stage.started == 1
    )


def test_tensors_that_were_one_may_be_others_later(stage):
    owner, call = _Owner(), _call()
    tensors, described = stage.described(call._replace(k=call.q, v=call.q))
    stage.start(tensors, described, owner)
    assert stage.start(tensors, described, owner) == stage.by_triton(described)
    tensors, described = stage.described(call)
    assert stage.start(tensors, described, owner) is None  # one more kind of launch, through Triton
    assert stage.start(tensors, described, owner) == stage.by_triton(described)


def test_owners_keys_and_alignments_are_told_apart(stage):
    owner = _Owner()
    stage.start(*stage.described(_call()), owner)
    assert stage.start(*stage.described(_call()), _Owner()) is None
    assert stage.start(*stage.described(_call()), owner, "another key") is None
    assert stage.start(*stage.described(_call(offset=1)), owner) is None  # a pointer that is no multiple of 16
    assert stage.start(*stage.described(_call()), owner) is not None


def test_nothing_kept_holds_memory(stage):
    owner, (tensors, described) = _Owner(), stage.described(_call())
    for _ in range(3):
        stage.start(tensors, described, owner)
    watched = [weakref.ref(tensor) for tensor in tensors]
    del tensors, described
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)


@pytest.mark.parametrize("reason", ("scratch", "profile", "version", "hook"))
def test_triton_launches_where_its_launcher_does_more(stage, reason, monkeypatch):
    if reason == "version":
        monkeypatch.setattr(launcher.triton, "__version__", "4.0.0")
    elif reason == "hook":
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    else:
        monkeypatch.setattr(stage.compiled.run, f"{'global' if reason == 'scratch' else reason}_scratch_size", 8)
    owner, (tensors, described) = _Owner(), stage.described(_call())
    for count in range(1, 4):
        assert stage.start(tensors, described, owner) is None
        assert stage.started == count


def test_what_is_kept_is_bounded(stage, monkeypatch):
    monkeypatch.setattr(launch_cache, "MAX_KERNELS", 4)
    owner, kept = _Owner(), []
    for _ in range(12):
        kept.append(stage.described(_call()))  # kept, so that addresses differ
        stage.start(*kept[-1], owner, str(len(kept)))
        assert len(CACHE.kernels) <= 4
