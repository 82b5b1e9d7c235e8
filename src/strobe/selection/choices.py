"""Cache of kernel selections, keyed by call metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..problem.problem import ALIGNMENT
from ..problem.torch_private import TensorGuards
from ..problem.torch_state import needs_dispatcher, unseen_mode_active

MOST_CHOICES = 4096  # entries; bounds the memory of a process whose lengths change at each step
MOST_ALIKE = (
    16  # guards per key: calls with equal sizes and settings that differ in strides, dtypes, modes or alignment
)


class Choices(dict):
    """Cache of Choices with two levels: the dictionary itself, keyed by all metadata of a call, and `alike`, matched by
    torch's tensor guards.

    A guard is C++ code. It compares class, dtype, device, sizes, strides, requires_grad and dispatch keys of a tensor.
    `needs_dispatcher` and the key of the dictionary read the same in Python. For three tensors a guard takes 0.3 us,
    Python 3.9 us (on a CPU). In `alike` a plain call has an entry for its scalars and one for its keywords
    (`ops.attention.run_again`).
    """

    def __init__(self, *known: object):
        super().__init__(*known)
        self.alike: dict[tuple, list[tuple[Callable[..., bool], int, Any]]] = {}

    def __setitem__(self, key: object, choice: object) -> None:
        if len(self) >= MOST_CHOICES:
            self.clear()
        super().__setitem__(key, choice)

    def clear(self) -> None:
        super().clear()
        self.alike.clear()

    def like(self, tensors: Sequence[Tensor], rest: tuple) -> Any | None:
        """Look up a call in `alike`: its entry, if `rest` is equal and a guard matches the tensors; else None. rest:
        the call without its tensors.
        """
        q, k, v = tensors[:3]
        try:
            entries = self.alike.get((torch.is_grad_enabled(), len(tensors), q.shape, k.shape, rest), ())  # `_key`
        except TypeError:  # `rest` is not hashable: `check` raises the error
            return None
        except RuntimeError:
            if any(tensor.is_nested for tensor in tensors):  # nested tensors have no sizes
                return None
            raise  # an error of torch.jit.trace: if it is swallowed, tracing goes on and crashes the process
        if entries and any([tensor.is_nested for tensor in tensors[2:]]):  # a guard would read their strides, and crash
            return None
        for guard, alignment, choice in entries:
            if (
                guard(*tensors)
                and q.data_ptr() % ALIGNMENT * ALIGNMENT + (k.data_ptr() | v.data_ptr()) % ALIGNMENT == alignment
            ):  # `_lies`
                return choice
        return None

    def meet(self, tensors: Sequence[Tensor], rest: tuple, choice: object) -> None:
        """Insert an entry into `alike`. The oldest entry of a key is evicted beyond MOST_ALIKE."""
        guard = alike_to(tensors)
        if guard is None:
            return
        if len(self.alike) >= MOST_CHOICES:
            self.alike.clear()
        entries = self.alike.setdefault(_key(tensors, rest), [])
        entries[MOST_ALIKE - 1 :] = []
        entries.insert(0, (guard, _lies(tensors), choice))


def alike_to(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """A guard that matches tensors with the metadata of these; None if torch's private TensorGuards takes other
    arguments.
    """
    try:
        return _guard(tensors)
    except (TypeError, SystemError):
        return None


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """TensorGuards rejects a tensor that appears twice. So it gets each tensor once, and repeated positions are
    compared with `is`.
    """
    first = [next(i for i, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    distinct = sorted(set(first))
    sizes: Any = [list(tensors[i].shape) for i in distinct]
    strides: Any = [list(tensors[i].stride()) for i in distinct]
    check = TensorGuards(*[tensors[i] for i in distinct], dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if len(distinct) == len(tensors):
        return check
    again = [(i, j) for i, j in enumerate(first) if i != j]
    return lambda *others: all([others[i] is others[j] for i, j in again]) and check(*[others[i] for i in distinct])


def direct_choice(
    known: Choices, call: Any, decide: Callable[[Any], Any], *beside: Tensor, graded: bool = False
) -> Any | None:
    """The Choice of a call whose body may run without the dispatcher, else None.

    beside: further tensors that the op reads. graded: the caller handles the gradients of a plain call.
    """
    if unseen_mode_active():  # before the lookup: torch.compile would guard on the contents of `known`
        return None
    tensors, rest = call.parted
    if beside:
        tensors = (*tensors, *beside)
    choice = known.like(tensors, rest)
    if choice is None and not needs_dispatcher(tensors, graded and call.plain) and call.whole:
        choice = decide(call)
        known.meet(tensors, rest, choice)
    return choice


def _key(tensors: Sequence[Tensor], rest: tuple) -> tuple:
    """The key of `alike`. It contains the grad mode, because a guard compares only requires_grad of the tensors."""
    return torch.is_grad_enabled(), len(tensors), tensors[0].shape, tensors[1].shape, rest


def _lies(tensors: Sequence[Tensor]) -> int:
    """Alignment of the addresses: of q, and of k and v together. Problem.alignment and alignment_kv depend on it, but
    guards ignore addresses.
    """
    return tensors[0].data_ptr() % ALIGNMENT * ALIGNMENT + (tensors[1].data_ptr() | tensors[2].data_ptr()) % ALIGNMENT
