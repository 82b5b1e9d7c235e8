"""Launching a compiled kernel again without Triton's argument processing, which costs more than a short kernel runs.

Triton binds and specialises every argument of every call, constants included, and encodes a TMA descriptor for each
described tensor. A plan fixes all of that but the addresses. So the first launch goes through Triton, which compiles.
The first with new addresses goes through Triton's launcher, which encodes, and what it hands to its C function is
noted. Where the addresses were met before, as they soon are in any loop because an allocator gives out the same ones
again, the C function is handed what was noted; a plan keeps that as `again` where it is all of a call, or all of it
`in_turn`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from inspect import getclosurevars
from threading import Lock
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs

from ...problem import torch_private
from ...problem.problem import ALIGNMENT
from . import first_call_overlap

MOST = 4096  # kernels kept, and launches of them; calls more varied than this begin anew
READ = (
    "3.6",
    "3.7",
    "3.9",
)  # versions of Triton whose launcher was read, and to which tests hold this file; others launch for themselves


class Address(int):
    """A tensor as Triton's launcher reads it, without the tensor: what is kept must not keep memory from being
    freed."""

    def data_ptr(self) -> int:
        return int(self)


class Known(NamedTuple):
    """What a plan fixes: the compiled kernel, and its arguments with the addresses of its first launch."""

    compiled: Any
    function: Callable[..., None]  # Triton's C function
    noting: Callable[
        ..., None
    ]  # Triton's launcher of this kernel, which notes in `calls` what it would hand to the C function
    calls: list[tuple]
    programs: int
    arguments: tuple
    addresses: Sequence[int | None]
    owner: object  # kept, so that its id in the key stays taken


class Noted(NamedTuple):
    """Triton's C function and what it is given at one set of addresses; before `rest` come the grid and the stream."""

    function: Callable[..., None]
    programs: int
    device: int
    rest: tuple
    stream: int | None = None  # the only one to launch on, where `rest` holds memory that launches of one stream share

    def __call__(self) -> bool:
        """Launch again on the current stream; False where that is not to be, or a profiler wants Triton's own
        launch."""
        stream = torch_private.cuda_current_raw_stream(self.device)
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            return False
        if self.stream is not None and (stream != self.stream or torch_private.cuda_is_capturing()):
            return False
        self.function(self.programs, 1, 1, stream, *self.rest)
        return True

    def here(self) -> Noted | None:
        """The same for the current stream alone; None while that is being captured, as a graph has memory of its
        own."""
        if torch_private.cuda_is_capturing():
            return None
        return self._replace(stream=torch_private.cuda_current_raw_stream(self.device))


def in_turn(launches: Sequence[Noted | None]) -> Callable[[], bool] | None:
    """What launches all of them again on the current stream, or none where a profiler wants Triton's own; None where
    one was not noted.
    """
    if any(one is None or one.stream is not None for one in launches):
        return None
    ready = [(one.function, one.programs, one.rest) for one in launches]  # type: ignore[union-attr]
    device = launches[0].device  # type: ignore[union-attr]

    def again() -> bool:
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            return False
        stream = torch_private.cuda_current_raw_stream(device)
        for function, programs, rest in ready:
            function(programs, 1, 1, stream, *rest)
        return True

    return again


_KNOWN: dict[Hashable, Known] = {}
_NOTED: dict[
    Hashable, tuple[object, Noted]
] = {}  # by what was launched and all addresses, each with its owner, whose id stays taken so
_NOTING = Lock()
_CLUSTERS = Lock()


def start(owner: object, key: Hashable, tensors: Sequence[Tensor | None], first: Callable[[], Any]) -> Noted | None:
    """Launch what `first()` describes: a Launch whose arguments hold no tensor, plain or described, that is not among
    `tensors`.

    The same object `owner` (a plan) and an equal `key` must mean arguments that are equal but for addresses; those are
    looked at here. Returns what launches the same again, or None where Triton was left to launch.
    """
    device = tensors[0].get_device()  # type: ignore[union-attr]
    addresses = tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors])
    met = (id(owner), key, device, addresses)
    _, noted = _NOTED.get(met, (None, None))
    if noted is None:
        kind = (*met[:3], *((addresses.index(a), a is None or a % ALIGNMENT == 0) for a in addresses))
        known = _KNOWN.get(kind)
        if known is None:
            launch = first()
            if device >= 0:  # a GPU's, not a simulated one
                first_call_overlap.beside(launch.kernel, device)
            _first(kind, launch, addresses, owner)
            return None
        noted = note(known, device, addresses)
        if len(_NOTED) >= MOST:
            _NOTED.clear()
        _NOTED[met] = owner, noted
    if noted():
        return noted
    first().start()
    return None


def _first(kind: Hashable, launch: Any, addresses: Sequence[int | None], owner: object) -> None:
    """Launch by Triton, and keep how."""
    compiled = launch.start()
    if compiled is not None and repeatable(compiled.run):  # a simulated launch compiles nothing
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        _KNOWN[kind] = know(compiled, launch, addresses, owner)


def repeatable(launcher: Any) -> bool:
    """Whether Triton's launcher gives its C function the same at each launch: it allocates no scratch, and is one of
    those that were read.
    """
    unlike = launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False)
    return not unlike and triton.__version__.startswith(READ)


def know(compiled: Any, launch: Any, addresses: Sequence[int | None], owner: object) -> Known:
    """A kernel's first launch, without its tensors, and the launcher beside one that only notes."""
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    calls: list[tuple] = []
    wrapped = (
        compiled.run.launch
    )  # by wrap_handle_tensordesc, which leaves the C function of a kernel without descriptors as it is
    function = getclosurevars(wrapped).nonlocals["launcher"] if getattr(wrapped, "__closure__", None) else wrapped
    noting = copy(compiled.run)
    described = getattr(compiled.metadata, "tensordesc_meta", None)
    noting.launch = wrap_handle_tensordesc(
        lambda *arguments: calls.append(arguments), compiled.src.signature, described
    )
    bare = moved(launch.arguments, {a: Address(a) for a in addresses if a is not None})
    return Known(compiled, function, noting, calls, launch.programs, bare, addresses, owner)


def note(known: Known, device: int, addresses: Sequence[int | None]) -> Noted:
    """What Triton's launcher hands to its C function at these addresses."""
    kernel = known.compiled
    arguments = moved(
        known.arguments,
        {old: Address(new) for old, new in zip(known.addresses, addresses) if old is not None and new is not None},
    )
    with _NOTING:
        known.noting(known.programs, 1, 1, 0, kernel.function, kernel.packed_metadata, None, None, None, *arguments)
        handed = known.calls.pop()
    return Noted(known.function, known.programs, device, handed[4:])


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


def moved(argument: Any, addresses: Mapping[int, Address]) -> Any:
    """A launch's argument with other addresses, which stand there without their tensors."""
    kind = type(argument)
    if kind is int or kind is float or argument is None:
        return argument
    if isinstance(argument, tuple):
        return tuple([moved(part, addresses) for part in argument])
    if isinstance(argument, (Tensor, Address)):
        return addresses[argument.data_ptr()]
    if hasattr(argument, "block_shape"):  # a tensor descriptor; copy.copy is slower
        twin = object.__new__(kind)
        twin.__dict__.update(argument.__dict__, base=addresses[argument.base.data_ptr()])
        return twin
    return argument
