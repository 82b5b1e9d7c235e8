"""A stand-in for the driver that notes launches, and launches of each kernel on it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from strobe.kernels.device.persistent_launch import LaunchTensors
from strobe.kernels.hopper import launch_forward
from strobe.kernels.protocol import NUMBERS
from strobe.kernels.runtime import launcher
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import attention as ops
from strobe.problem import torch_private
from strobe.problem.call import Call
from strobe.problem.target import FAKES
from tools.proof.compile import offline
from tools.proof.simulate import posing

STREAM = 77


class _Owner:
    """A plan as the launcher sees it."""

    def __init__(self) -> None:
        self.number = next(NUMBERS)


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
        offsets = call.cu_seqlens_q, call.cu_seqlens_k
        rest = LaunchTensors(lse, call.sinks, offsets, word, counter)
        tensors = (*call[:3], out, lse, call.sinks, *offsets, word, counter)
        return tensors, launch_forward.forward_launch(plan, call, out, rest)

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


def _act(stage: Stage, compiled, monkeypatch) -> None:
    """`compiled` is what the stage's launches compile to."""
    monkeypatch.setattr(compiled, "_run", nvidia.CudaLauncher(compiled.src, compiled.metadata))
    monkeypatch.setattr(compiled, "module", object())
    monkeypatch.setattr(compiled, "function", 1234)
    stage.compiled = compiled


def compiled_kernel():
    """The kernel of one forward, compiled for sm_90 without a GPU."""
    _, described = Stage().described(_call())
    with offline(90):
        return described.kernel.warmup(*described.arguments, grid=(described.programs,), **described.options)


def installed(compiled, monkeypatch) -> Iterator[Stage]:
    """A Stage that takes the driver's place until the test ends; its launches compile to `compiled`."""
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
