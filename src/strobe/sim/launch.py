"""`with simulate(...)`: kernels launched inside run in the simulator on CPU tensors instead of on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.code_generator import str_to_ty
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.language.core import base_value, constexpr
from triton.runtime.jit import JITFunction, KernelParam
from triton.tools.tensor_descriptor import TensorDescriptor

from .arrays import Array, given, is_array
from .builder import Builder
from .checks import USUAL, Checks
from .costs import Costs, Occupancy
from .host import answers, capability_of
from .im2col import Box, Im2Col
from .interpreter import Interpreter
from .layouts import Layouts
from .machine import MODES, Machine
from .memory import Memory
from .names import names_when_asked
from .options import SHARED_KIB
from .report import Report, Reports, SimulationFault, Stop
from .semantics import Gluon, Triton, quiet
from .storages import adopt, register, register_empty
from .timeline import Event, save
from .translate import translated
from .values import STORED, Descriptor, Value, wraps

KIB = 1024
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
TENSOR_COLUMNS = 512  # on sm_100 and sm_103
IM2COL = "TensorDescriptorIm2Col"  # the class of im2col descriptors, in Triton 3.8 and later
_OPTIONS = ("num_warps", "num_ctas", "maxnreg", "num_stages", "launch_cooperative_grid", "launch_pdl")
_CHECKED = dict(debug=True)  # device_assert is active
_DTYPES = {"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5, "bool": tl.int1}


@dataclass
class Run:
    """The result of a simulated run.

    Attributes:
        reports: distinct findings.
        stats: counts of CTAs, scheduler steps, accesses and landed operations.
        events: timeline bars, in mode "timed" only.
        costs: sectors, bank conflicts, bytes and occupancy, with `Checks(costs=True)` only.
    """

    machine: Machine
    _reports: Reports
    launches: list[str] = field(default_factory=list)

    @property
    def reports(self) -> list[Report]:
        return self._reports.list

    @property
    def stats(self) -> dict[str, int]:
        return self.machine.stats

    @property
    def costs(self) -> Costs:
        return self.machine.costs

    @property
    def events(self) -> list[Event]:
        return self.machine.events

    def check(self) -> None:
        """Raise SimulationFault if there are findings."""
        if self.reports:
            raise SimulationFault(self.reports)

    def save(self, path: str, title: str = "simulated run") -> None:
        """Write a Chrome trace (.json, for Perfetto), an image (.svg) or a page (.html). Needs mode="timed"."""
        if self.machine.mode != "timed":
            raise ValueError(
                f"save: the run was in mode {self.machine.mode!r}; a timeline needs simulate(mode='timed')"
            )
        save(self.events, path, title, str(self.costs) if self.machine.checks.costs else "")


@contextlib.contextmanager
def simulate(
    target: str = "sm_90",
    mode: str = "pct",
    seed: int = 0,
    *,
    sms: int = 4,
    check: bool = True,
    max_reports: int = 50,
    fuse: bool = False,
    checks: Checks = USUAL,
) -> Iterator[Run]:
    """Run kernels on a CPU and find races, deadlocks and missing fences.

    >>> import torch
    >>> from triton import jit, language as tl
    >>> with simulate("sm_90") as run:  # doctest: +SKIP
    ...     kernel[grid](torch.randn(128), ...)  # any Triton or Gluon kernel, CPU tensors
    >>> run.reports  # doctest: +SKIP
    []

    Args:
        target: "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103" or "sm_120"; sets capability and memory limits.
        mode: the schedule, which decides when asynchronous work lands and which partition runs next. "eager" lands
            work at once, "lazy" as late as possible, "random" at random. "pct" uses random priorities and finds the
            most faults. "timed" follows modelled time and records a timeline.
        seed: of the schedule. The same seed gives the same run.
        sms: number of CTAs in flight, and the number of SMs that the host code sees.
        check: raise SimulationFault at the end if there are findings. Otherwise they stay in `run.reports`.
        max_reports: stop after this many distinct findings.
        fuse: round a product and the sum that follows it once, as the compiler does with `enable_fp_fusion`.
        checks: which faults are looked for. `Checks(happens_before=False)` reports only what this schedule makes
            visible. The other checks are off by default: see `Checks`.

    Raises ValueError for an unknown target or mode, TypeError for tensors that are not on the CPU, and SimulationFault
    for findings.
    """
    capability = capability_of(target)
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, expected one of {', '.join(MODES)}")
    reports = Reports(max_reports)
    limits = {"shared": SHARED_KIB[capability] * KIB, "tensor": TENSOR_COLUMNS if capability in (100, 103) else 0}
    run = Run(Machine(mode, seed, sms, limits, reports, checks), reports)
    run.machine.fuse, run.machine.compiler_fences = fuse, _VERSION >= (3, 8)

    made: dict[tuple[int, str], _Compiled] = {}

    def launch(fn: JITFunction, *arguments: object, grid: Any, warmup: bool = False, **keywords: object) -> _Compiled:
        """Replaces Triton's launch, and returns what can be launched again. A warm-up returns the kernel that is
        launched from then on for these constants; its metadata give the number of programs per cluster.
        """
        if warmup:
            return made.setdefault(_constants(fn, arguments, keywords), _Compiled(fn, keywords))
        warm = made.get(_constants(fn, arguments, keywords)) if made else None
        cluster_size = 1 if warm is None else warm.packed_metadata[1]
        _Launch(run, capability, fn).run(arguments, keywords, grid, cluster_size)
        return _Compiled(fn, keywords)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", launch))
        patches.enter_context(answers(capability, sms, checks.every_config))
        patches.enter_context(names_when_asked())
        with contextlib.suppress(Stop):
            yield run
    if check:
        run.check()


def _constants(fn: JITFunction, arguments: tuple[object, ...], keywords: dict[str, object]) -> tuple[int, str]:
    """Key of a kernel and the constants it is compiled for."""
    bound = fn.signature.bind(
        *arguments, **{name: value for name, value in keywords.items() if name in fn.arg_names}
    ).arguments
    return id(fn), repr([bound.get(parameter.name) for parameter in fn.params if parameter.is_constexpr])


class _Compiled:
    """A kernel as a launch returns it. Host code may keep it and launch it again: `compiled[grid](*arguments)`."""

    def __init__(self, fn: JITFunction, keywords: dict[str, object]):
        self._fn = fn
        self._options = {name: value for name, value in keywords.items() if name not in fn.arg_names}
        self.metadata = SimpleNamespace(name=fn.__name__, num_warps=keywords.get("num_warps", 4), shared=1024)
        self.name, self.n_regs, self.n_spills = fn.__name__, 64, 0
        self.packed_metadata = self.metadata.num_warps, 1, 0
        # who would replay a launch without Triton's launcher does not where a launch allocates scratch memory
        self.run = SimpleNamespace(global_scratch_size=1, profile_scratch_size=0)

    def _init_handles(self) -> None:
        """What loads the module on a GPU."""

    def __getitem__(self, grid: Any) -> Callable[..., object]:
        return lambda *arguments: self._fn.run(*arguments, grid=grid, warmup=False, **self._options)


_LAYOUTS: dict[tuple[int, int, int], Layouts] = {}


class _Launch:
    """One launch: converts the arguments as the frontend sees them, then runs the grid."""

    def __init__(self, run: Run, capability: int, fn: JITFunction):
        self.machine, self.capability, self.fn = run.machine, capability, fn
        run.launches.append(fn.__name__)
        run.machine.entered[id(fn)] = fn

    def run(self, arguments: tuple[object, ...], keywords: dict[str, object], grid: Any, cluster_size: int) -> None:
        options = {
            name: value for name, value in keywords.items() if name in _OPTIONS and name not in self.fn.arg_names
        }
        parsed: Any = CUDABackend(GPUTarget("cuda", self.capability, 32)).parse_options(
            options | _CHECKED | {"sanitize_overflow": self.machine.checks.overflow}
        )
        named = {name: value for name, value in keywords.items() if name in self.fn.arg_names}
        bound = self.fn.signature.bind(*arguments, **named)
        bound.apply_defaults()
        key = (self.capability, parsed.num_warps, parsed.num_ctas)
        layouts = _LAYOUTS.get(key) or _LAYOUTS.setdefault(key, Layouts(*key))
        self.builder = Builder(self.machine, parsed, layouts, self.capability)
        if self.fn.is_gluon() and parsed.num_ctas > 1:
            self.builder.ctas = cluster_size = parsed.num_ctas
            self.builder.inits_by_hand = _VERSION < (3, 8)
        self.semantic: Any = (Gluon if self.fn.is_gluon() else Triton)(self.builder)
        self.machine.warps = parsed.num_warps
        self.machine.begin_launch()
        self.machine.check_warps(parsed.num_warps, f"{self.fn.__name__} is launched with {parsed.num_warps} warps")
        values = [
            self._argument(parameter.name, bound.arguments[parameter.name], parameter) for parameter in self.fn.params
        ]
        grid = grid(dict(bound.arguments)) if callable(grid) else grid
        grid = (grid[0] * cluster_size, *grid[1:], 1, 1)[:3]
        self.builder.grid = grid
        function, interpreter = translated(self.fn), Interpreter(self.semantic)
        values = [interpreter.static(value) if not isinstance(value, base_value) else value for value in values]

        def body() -> None:
            function(interpreter, *values)
            if self.builder.ctas > 1:  # the compiler ends such a kernel with a barrier of the cluster
                self.builder.meet()

        self.machine.run_grid(grid, quiet(body), cluster_size)
        if self.machine.checks.costs:
            taken = self.machine.most_shared, self.machine.most_warps, parsed.maxnreg or 0
            self.machine.costs.launched(Occupancy.of(self.fn.__name__, self.capability, *taken))

    # ---- arguments

    def _argument(self, name: str, value: object, parameter: KernelParam | None = None) -> Any:
        if parameter is not None and parameter.is_constexpr:
            return value if isinstance(value, constexpr) else constexpr(value)
        if isinstance(value, (GluonDescriptor, TensorDescriptor)) or type(value).__name__ == IM2COL:
            return self._descriptor(name, value)
        if hasattr(value, "data_ptr"):
            return self._pointer(name, value)
        if isinstance(value, np.ndarray):
            return self._pointer(name, Array(value))
        if isinstance(value, bool):
            return self.semantic.to_tensor(value)
        if isinstance(value, (int, float)):
            return self._number(value, parameter)
        if isinstance(value, tuple):
            self._refuse_nested(name, value)
            items = [self._argument(f"{name}.{i}", item) for i, item in enumerate(value)]
            return tl.tuple(items, tl.tuple_type([item.type for item in items], getattr(type(value), "_fields", None)))
        return constexpr(value)

    def _pointer(self, name: str, value: Any) -> base_value:
        """A tensor, or any object with `data_ptr()` and `dtype`, such as what triton.reinterpret returns."""
        elem, address = _dtype(value.dtype), value.data_ptr()
        tensor = value if is_array(value) else getattr(value, "base", None)
        if not is_array(tensor):
            adopt(self.machine, np.asarray(address))
        elif (place := given(name, tensor)).size:
            self.machine.coverage.add(name, register(self.machine, name, place), place)
        else:
            register_empty(self.machine, name, address)
        return tl.tensor(Value(np.int64(address), "*" + elem.to_ir(self.builder).elem), tl.pointer_type(elem))

    def _number(self, value: int | float, parameter: KernelParam | None) -> base_value:
        """A number as the launcher passes it: by the parameter's annotation if there is one, else the first of int32,
        int64 and uint64 that holds it, or float32.
        """
        annotated = getattr(parameter, "annotation_type", "") if parameter is not None else ""
        if annotated:
            return self.semantic.cast(self.semantic.to_tensor(value), str_to_ty(annotated, None))
        if isinstance(value, float):
            return tl.tensor(Value(np.float32(value), "fp32"), tl.float32)
        if value == 1 and not (parameter is not None and parameter.do_not_specialize):
            return constexpr(1)
        elem = "i32" if -(2**31) <= value < 2**31 else "i64"
        kind = tl.int32 if elem == "i32" else tl.int64 if value < 2**63 else tl.uint64
        return tl.tensor(self.builder.integer(value, elem), kind)

    @staticmethod
    def _refuse_nested(name: str, value: tuple[object, ...]) -> None:
        if any(
            isinstance(item, (GluonDescriptor, TensorDescriptor)) or type(item).__name__ == IM2COL for item in value
        ):
            raise TypeError(
                f"{name}: got a tuple that holds a tensor descriptor, expected the descriptor "
                "as an argument of its own: Triton compiles such a kernel, but its launcher refuses the call"
            )

    def _descriptor(self, name: str, host: Any) -> base_value:
        """A tensor descriptor of Triton or Gluon, tiled or im2col."""
        place = given(name, host.base)
        memory = register(self.machine, name, place)
        self.machine.coverage.add(name, memory, place)
        elem = _dtype(host.base.dtype)
        ir_elem = elem.to_ir(self.builder).elem
        address, block = host.base.data_ptr(), list(host.block_shape)
        handle = self._window(
            memory, address, list(host.shape), list(host.strides), block, ir_elem, host.padding == "nan"
        )
        handle.signed = not elem.is_int_unsigned()
        shape = [tl.tensor(Value(np.int32(size), "i32"), tl.int32) for size in host.shape]
        strides = [tl.tensor(Value(np.int64(stride), "i64"), tl.int64) for stride in host.strides]
        if type(host).__name__ == IM2COL:
            steps = host.element_strides or [1] * len(shape)
            handle = Im2Col(handle, Box(host.pixel_box_lower_corner, host.pixel_box_upper_corner, steps[1:-1]))
            made: Any = tma  # in Triton 3.8 and later
            return made.tensor_descriptor_im2col(handle, shape, strides, tl.block_type(elem, block), host.layout)
        if isinstance(host, GluonDescriptor):
            return tma.tensor_descriptor(handle, shape, strides, tl.block_type(elem, block), host.layout)
        return tl.tensor_descriptor(handle, shape, strides, tl.block_type(elem, block))

    def _window(
        self, memory: Memory, address: int, shape: list[int], strides: list[int], block: list[int], elem: str, nan: bool
    ) -> Descriptor:
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        whole = (memory.end - address) // np.dtype(STORED[elem]).itemsize
        if reach > whole and not wraps(strides, np.dtype(STORED[elem]).itemsize):
            raise ValueError(
                f"{memory.name}: a descriptor of shape {shape}, strides {strides} reaches {reach} elements, "
                f"but its storage ends after {whole}; give the tensor's own shape and strides"
            )
        return self.builder.descriptor(address, shape, strides, block, elem, nan)


def _dtype(dtype: Any) -> tl.dtype:
    """Triton's type for that of torch, or Triton's own."""
    if isinstance(dtype, tl.dtype):
        return dtype
    name = str(dtype).removeprefix("torch.")
    found = _DTYPES.get(name) or getattr(tl, name, None)
    if found is None:
        raise TypeError(f"tensor argument of dtype {dtype}: Triton has no such type")
    return found
