"""Launch a compiled kernel again without Triton's argument processing, which takes longer than a short kernel runs.

For each launch, Triton binds and specializes every argument, constants included, and encodes a TMA descriptor for each
described tensor. A plan fixes all arguments except addresses. So `start` takes one of three ways:

    launch                     what runs                                      what is recorded
    first of a kernel          Triton compiles and launches                   Recorder: arguments without tensors
    first at these addresses   Triton's launcher, which encodes descriptors   RecordedLaunch: C function's arguments
    again at these addresses   Triton's C function                            nothing

Records are in the LaunchCache (`kernels`, `kernel_launches`). An allocator returns the same addresses in any loop, so
the third way is the usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from inspect import getclosurevars
from threading import Lock
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs

from ...problem import torch_private
from ...problem.problem import ALIGNMENT
from ..protocol import Plan
from . import first_call_overlap
from .launch_cache import CACHE, Replay

# versions of Triton whose launcher this file was written for, and is tested with; with others Triton launches
KNOWN_TRITON = ("3.6", "3.7", "3.9")


class Address(int):
    """A tensor as Triton's launcher reads it, without the tensor: a record must not keep memory from being freed."""

    def data_ptr(self) -> int:
        return int(self)


class Recorder(NamedTuple):
    """A compiled kernel, and its arguments with the addresses of its first launch."""

    compiled: Any
    function: Callable[..., None]  # Triton's C function
    launcher: Callable[..., None]  # Triton's launcher of this kernel; it appends the C function's arguments to `calls`
    calls: list[tuple]
    programs: int
    arguments: tuple
    addresses: Sequence[int | None]


class RecordedLaunch(NamedTuple):
    """Triton's C function and its arguments at one set of addresses. The grid and the stream precede `arguments`."""

    function: Callable[..., None]
    programs: int
    device: int
    arguments: tuple
    stream: int | None = None  # the only stream to launch on, if `arguments` hold counters of that stream

    def __call__(self) -> bool:
        """Launch on the current stream. Returns False if the launch belongs to another stream, or if a profiler needs
        Triton's own launch.
        """
        stream = torch_private.cuda_current_raw_stream(self.device)
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            return False
        if self.stream is not None and (stream != self.stream or torch_private.cuda_is_capturing()):
            return False
        self.function(self.programs, 1, 1, stream, *self.arguments)
        return True

    def on_this_stream(self) -> RecordedLaunch | None:
        """The same launch for the current stream alone; None during a capture, because a graph has its own memory."""
        if torch_private.cuda_is_capturing():
            return None
        return self._replace(stream=torch_private.cuda_current_raw_stream(self.device))


def in_sequence(launches: Sequence[RecordedLaunch | None]) -> Replay | None:
    """One replay of all on the current stream; None if one was not recorded or belongs to one stream."""
    recorded = [one for one in launches if one is not None and one.stream is None]
    if len(recorded) < len(launches):
        return None
    ready = [(one.function, one.programs, one.arguments) for one in recorded]
    device = recorded[0].device

    def launch() -> bool:
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            return False
        stream = torch_private.cuda_current_raw_stream(device)
        for function, programs, arguments in ready:
            function(programs, 1, 1, stream, *arguments)
        return True

    return launch


_RECORDING = Lock()
_CLUSTERS = Lock()


def start(
    plan: Plan, key: object, tensors: Sequence[Tensor | None], describe: Callable[[], Any]
) -> RecordedLaunch | None:
    """Launch what `describe()` returns: a Launch whose arguments hold no tensor, plain or described, that is not among
    `tensors`.

    The same plan and an equal `key` must mean arguments that are equal except for addresses. Returns what launches the
    same again, or None if Triton launched.
    """
    device = -1 if tensors[0] is None else tensors[0].get_device()
    addresses = tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors])
    place = (plan.number, key, device, addresses)
    recorded = CACHE.kernel_launches.get(place)
    if recorded is None:
        kind = (*place[:3], *[(addresses.index(a), a is None or a % ALIGNMENT == 0) for a in addresses])
        recorder = CACHE.kernels.get(kind)
        if recorder is None:
            launch = describe()
            if device >= 0:  # a GPU's, not a simulated one
                first_call_overlap.beside(launch.kernel, device)
            compiled = launch.start()
            if compiled is not None and is_recordable(compiled.run):  # a simulated launch compiles nothing
                CACHE.insert_kernel(kind, recorder_of(compiled, launch, addresses))
            return None
        recorded = record(recorder, device, addresses)
        CACHE.insert_kernel_launch(place, recorded)
    if recorded():
        return recorded
    describe().start()
    return None


def kind_of(value: object) -> tuple:
    """A value that a hook reads, as part of `start`'s key. 1 is a constant of a compiled kernel, 1.0 is not."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else (type(value), value)


def is_recordable(launcher: Any) -> bool:
    """Whether Triton's launcher gives its C function the same arguments at each launch: it allocates no scratch, and
    its version is known.
    """
    unlike = launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False)
    return not unlike and triton.__version__.startswith(KNOWN_TRITON)


def recorder_of(compiled: Any, launch: Any, addresses: Sequence[int | None]) -> Recorder:
    """A kernel's first launch without its tensors, and a copy of its launcher that records instead of launching."""
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    calls: list[tuple] = []
    wrapped = compiled.run.launch  # wrap_handle_tensordesc returns a kernel's C function itself if it has no descriptor
    function = getclosurevars(wrapped).nonlocals["launcher"] if getattr(wrapped, "__closure__", None) else wrapped
    launcher = copy(compiled.run)
    described = getattr(compiled.metadata, "tensordesc_meta", None)
    launcher.launch = wrap_handle_tensordesc(
        lambda *arguments: calls.append(arguments), compiled.src.signature, described
    )
    bare = with_addresses(launch.arguments, {a: Address(a) for a in addresses if a is not None})
    return Recorder(compiled, function, launcher, calls, launch.programs, bare, addresses)


def record(recorder: Recorder, device: int, addresses: Sequence[int | None]) -> RecordedLaunch:
    """What Triton's launcher gives its C function at these addresses."""
    kernel = recorder.compiled
    arguments = with_addresses(
        recorder.arguments,
        {old: Address(new) for old, new in zip(recorder.addresses, addresses) if old is not None and new is not None},
    )
    with _RECORDING:
        recorder.launcher(
            recorder.programs, 1, 1, 0, kernel.function, kernel.packed_metadata, None, None, None, *arguments
        )
        given = recorder.calls.pop()
    return RecordedLaunch(recorder.function, recorder.programs, device, given[4:])


def in_clusters(size: int, clusters: int, kernel: Any, arguments: tuple, options: dict[str, Any]) -> Any:
    """Have Triton launch so many clusters of `size` programs: what it compiles for these arguments is launched so from
    then on.

    Its own num_ctas, which asks for clusters too, shares out every tensor of a kernel among the programs of one.
    """
    with _CLUSTERS:  # another thread's compilation may take the place of what this one has told
        compiled = kernel.warmup(*arguments, grid=(1,), **options)
        if compiled is not None:  # where launches are only noted
            compiled = compiled.result() if hasattr(compiled, "result") else compiled  # compiled in the background
            warps, _, shared = compiled.packed_metadata
            compiled.packed_metadata = warps, size, shared
        return kernel[(clusters,)](*arguments, **options)


def with_addresses(argument: Any, addresses: Mapping[int, Address]) -> Any:
    """A launch's argument with other addresses, which stand there without their tensors."""
    kind = type(argument)
    if kind is int or kind is float or argument is None:
        return argument
    if isinstance(argument, tuple):
        return tuple([with_addresses(part, addresses) for part in argument])
    if isinstance(argument, (Tensor, Address)):
        return addresses[argument.data_ptr()]
    if hasattr(argument, "block_shape"):  # a tensor descriptor; copy.copy is slower
        twin = object.__new__(kind)
        twin.__dict__.update(argument.__dict__, base=addresses[argument.base.data_ptr()])
        return twin
    return argument
