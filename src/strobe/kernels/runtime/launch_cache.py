"""The cache behind every call that was made before: `CACHE`, the one LaunchCache of the process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem.call import Call
from ...problem.decode import DecodeCall
from ...problem.mods import Mods
from ...problem.paged import PagedCall
from ...problem.problem import ALIGNMENT
from ...problem.torch_private import PythonGuards, TensorGuards
from ...problem.torch_state import needs_dispatcher, unseen_mode_active
from ..protocol import Backward, Plan

MAX_CALLS = 4096  # keys of `calls`: bounds the memory of a process whose lengths change at each step
MAX_VARIANTS = 16  # entries per key: calls with equal sizes that differ in strides, dtypes, modes or alignment
MAX_LAUNCHES = 1 << 14  # up to 7 KB each, 115 MB together
MAX_KERNELS = 4096

# paths: who looks a call up, and so what an entry permits
KEYWORDS, FUNCTIONS, DIRECT, OP = "keywords", "functions", "direct", "op"

Replay = Callable[[], bool]  # launches again on the current stream; False if it cannot, and Triton must launch


class _Variant(NamedTuple):
    guard: Callable[..., bool]
    alignment: int
    entry: Any


class LaunchCache:
    """What earlier calls leave for later ones. Each level skips the work of the levels below it.

        attention(q, k, v)     key                             finds     skips                         saves
            |
        calls, path KEYWORDS   keywords, tensors' metadata     Choice    the Call                     1.3 us
            |  miss, or functions
        calls, path FUNCTIONS  keywords, captures, metadata    Choice    captures, built-in masks     22   us
            |  miss
        calls, path DIRECT     Call, tensors' metadata         Choice    checks of modes, dispatcher  5.2 us
            |  miss
        calls, path OP         Call, tensors' metadata         Choice    check, Problem, select       341 us
            |  miss: select
            v
        launches               plan, addresses of the call     Replay    the kernel's host code        12 us
            |  miss
        kernel_launches        kernel, addresses of a launch   Replay    Triton's launcher             32 us
            |  miss
        kernels                kernel, alignment of addresses  Recorder  Triton's argument binding    143 us
            |  miss
            v
        Triton compiles and launches

    The lower four rows were measured on an H100's host by `python -m tools.proof.cache_levels`, the first three on a
    CPU with a launch that does nothing (results/host_time.jsonl).

    Keys: metadata is compared by torch's tensor guards, in C++: class, dtype, device, sizes, strides, requires_grad and
    dispatch keys, 0.3 us for three tensors. Python takes 3.9 us (on a CPU). Guards ignore addresses, so a variant also
    compares their alignment. Strides are part of what a plan's recorded launches hold, so calls that differ in strides
    never share a plan. No table keeps a tensor alive.
    Threads, free-threaded Python: tables are dictionaries whose values are never changed in place. A race costs at
    most a second computation of the same entry.
    Streams: a launch goes to the stream that is current when it is replayed. A launch that uses counters of one stream
    refuses other streams, and graph captures, by returning False.
    Devices: a guard compares the device, and a launch is replayed only if its device is the current one.
    Fork: a child inherits the tables. Entries for CPU calls stay valid; CUDA itself cannot be used after a fork.
    Memory: each table is bounded and is emptied when it is full.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple, tuple[_Variant, ...]] = {}
        self.launches: dict[int, dict[tuple, Replay]] = {}  # by Plan.number, then by the addresses of a call
        self.kernel_launches: dict[Hashable, Any] = {}
        self.kernels: dict[Hashable, Any] = {}
        self._inserted = 0  # launches since they were last emptied

    def clear(self) -> None:
        for table in (self.calls, self.launches, self.kernel_launches, self.kernels):
            table.clear()
        self._inserted = 0

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Within it the cache starts empty; afterwards it holds what it held before."""
        held = dict(vars(self))
        LaunchCache.__init__(self)
        try:
            yield
        finally:
            vars(self).update(held)

    # ------------------------------------------------------------ calls

    def lookup(self, path: str, tensors: Sequence[Tensor], rest: tuple) -> Any | None:
        """The entry of a call whose other fields equal `rest` and whose tensors match a guard; None on a miss."""
        q, k, v = tensors[:3]
        try:
            variants = self.calls.get((path, torch.is_grad_enabled(), len(tensors), q.shape, k.shape, rest))
        except (AttributeError, TypeError):  # not a tensor, or `rest` is not hashable: `check` raises the error
            return None
        except RuntimeError:
            if any(tensor.is_nested for tensor in tensors):  # nested tensors have no sizes
                return None
            raise  # an error of torch.jit.trace: if it is swallowed, tracing goes on and crashes the process
        if variants is None or any([tensor.is_nested for tensor in tensors[2:]]):  # a guard crashes on their strides
            return None
        for guard, alignment, entry in variants:
            if (
                guard(*tensors)
                and q.data_ptr() % ALIGNMENT * ALIGNMENT + (k.data_ptr() | v.data_ptr()) % ALIGNMENT == alignment
            ):
                return entry
        return None

    def insert(self, path: str, tensors: Sequence[Tensor], rest: tuple, entry: object) -> None:
        """Insert an entry. The oldest of a key is evicted beyond MAX_VARIANTS."""
        q, k, v = tensors[:3]
        key = path, torch.is_grad_enabled(), len(tensors), q.shape, k.shape, rest  # a guard ignores the grad mode
        alignment = q.data_ptr() % ALIGNMENT * ALIGNMENT + (k.data_ptr() | v.data_ptr()) % ALIGNMENT
        if len(self.calls) >= MAX_CALLS:
            self.calls.clear()
        older = self.calls.get(key, ())
        self.calls[key] = (_Variant(guard_for(tensors), alignment, entry), *older[: MAX_VARIANTS - 1])

    def direct_choice(
        self, call: Any, decide: Callable[[Any], Any], *beside: Tensor, graded: bool = False
    ) -> Any | None:
        """The Choice of a call whose body may run without the dispatcher, else None.

        beside: further tensors that the op reads. graded: the caller handles the gradients of a plain call.
        """
        if unseen_mode_active():  # before the lookup: torch.compile would guard on the contents of the cache
            return None
        tensors, rest = call.tensors_and_rest
        if beside:
            tensors = (*tensors, *beside)
        choice = self.lookup(DIRECT, tensors, rest)
        if choice is None and not needs_dispatcher(tensors, graded and call.plain) and call.whole:
            choice = decide(call)
            self.insert(DIRECT, tensors, rest, choice)
        return choice

    # ------------------------------------------------------------ launches

    def insert_launch(self, plan: Plan, addresses: tuple, replay: Replay | None) -> None:
        """Let the plan's launch at these addresses be replayed without the kernel's host code. None is not inserted."""
        if replay is None or not plan.replays:
            return
        if self._inserted >= MAX_LAUNCHES:
            self.launches.clear()
            self._inserted = 0
        self._inserted += 1
        self.launches.setdefault(plan.number, {})[addresses] = replay

    def insert_kernel_launch(self, key: Hashable, launch: object) -> None:
        if len(self.kernel_launches) >= MAX_KERNELS:
            self.kernel_launches.clear()
        self.kernel_launches[key] = launch

    def insert_kernel(self, key: Hashable, kernel: object) -> None:
        if len(self.kernels) >= MAX_KERNELS:
            self.kernels.clear()
        self.kernels[key] = kernel


CACHE = LaunchCache()


# ---------------------------------------------------------------- keys


def guard_for(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that returns whether tensors have the metadata of these.

    TensorGuards rejects a tensor that appears twice. So it gets each tensor once, and repeated positions are compared
    with `is`.
    """
    first = [next(i for i, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    distinct = sorted(set(first))
    check = _guards([tensors[i] for i in distinct]).check
    if len(distinct) == len(tensors):
        return check
    repeated = [(i, j) for i, j in enumerate(first) if i != j]
    return lambda *others: all([others[i] is others[j] for i, j in repeated]) and check(*[others[i] for i in distinct])


def _guards(tensors: Sequence[Tensor]) -> Any:
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    try:
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (TypeError, SystemError):  # another version of torch, whose guards take other arguments
        return PythonGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def forward_addresses(call: Call, out: Tensor, lse: Tensor) -> tuple[int, ...]:
    """The key of a forward's launch among those of its plan. `selection.replay` builds the same key inline."""
    held = (call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr(), out.data_ptr(), lse.data_ptr())
    if call.plain:
        return held
    return *held, *optional_addresses(call.optionals), *addresses_of_mods(call.mods)


def optional_addresses(optionals: Iterable[Tensor | None]) -> tuple[int, ...]:
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in optionals])


def decode_addresses(call: DecodeCall | PagedCall, *written: int) -> tuple:
    """The key of a launch over a cache among those of its plan. written: addresses of out, lse and the workspace.

    The plan determines which of the call's tensors are present, and the sizes and strides of captured ones.
    """
    held = *[tensor.data_ptr() for tensor in call.about if tensor is not None], *written
    mods = call.mods
    if mods is None:
        return held
    captured = [tensor.data_ptr() for tensor in mods.tensors]
    return *held, *captured, *mods.score_numbers, *mods.mask_numbers


def backward_addresses(call: Call, t: Backward, scratch: Iterable[Tensor]) -> tuple:
    """The key of a backward's launch among those of its plan. dout and out may have any strides, so they are in it."""
    held = (*call[:3], *t[:-1], *scratch, *(() if call.plain else call.optionals))
    return *backward_addresses_of(held, t.delta.data_ptr(), t.dout, t.out), *addresses_of_mods(call.mods)


def addresses_of_mods(mods: Mods | None) -> tuple:
    """The part of a launch's key that stands for a call's functions."""
    if mods is None:
        return ()
    numbers = *mods.score_numbers, *mods.mask_numbers, mods.dropout_p
    return addresses_of_captures(mods.read, mods.mask_tensors, (*mods.gradients, mods.max_scores), numbers)


def addresses_of_captures(
    read: Iterable[Tensor], mask_tensors: Iterable[Tensor], written: Iterable[Tensor | None], numbers: tuple
) -> tuple:
    """`addresses_of_mods` from its parts: addresses of captured tensors, values of captured numbers, and versions of
    the tensors that a mask captures, because lists of blocks are computed from them.
    """
    versions = [0 if tensor.is_inference() else tensor._version for tensor in mask_tensors]
    outputs = [0 if tensor is None else tensor.data_ptr() for tensor in written]
    return *[tensor.data_ptr() for tensor in read], *outputs, *versions, *numbers


def backward_addresses_of(held: Iterable[Tensor | None], delta: int, dout: Tensor, out: Tensor) -> tuple:
    """`backward_addresses` from its parts. held: q, k, v, the fields of Backward except delta, scratch, optional
    tensors; delta: its address.
    """
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in held]
    return *addresses, delta, dout.stride(), dout.dtype, out.stride()
