"""Cache of kernel selections, keyed by call metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # type: ignore[attr-defined]

from ..problem.problem import ALIGNMENT
from ..problem.torch_state import needs_dispatcher, unseen_mode_active

MOST_CHOICES = 4096  # lengths that change each step would otherwise grow the dictionary for ever
MOST_ALIKE = 16  # calls of the same sizes and settings, unlike in strides, dtypes, modes or where they lie


class Choices(dict):
    """Choices by all of a call's metadata, and once more by torch's own guards of its tensors.

    A guard is C++ code. It compares a tensor's class, dtype, device, sizes, strides, requires_grad and dispatch keys, all that `needs_dispatcher` and
    a key read one by one. Three tensors take 0.3 us by guards and 3.9 us one by one (a CPU). A plain call has two entries: one by its scalars, one by
    its keywords (`ops.attention.run_again`).
    """

    def __init__(self, *known: Any):
        super().__init__(*known)
        self.alike: dict[tuple, list[tuple[Callable[..., bool], int, Any]]] = {}

    def __setitem__(self, key: Any, choice: Any) -> None:
        if len(self) >= MOST_CHOICES:
            self.clear()
        super().__setitem__(key, choice)

    def clear(self) -> None:
        super().clear()
        self.alike.clear()

    def like(self, tensors: Sequence[Tensor], rest: tuple) -> Any | None:
        """The Choice of a call that was met, of the same `rest` and with tensors that the dispatcher would treat alike."""
        q, k, v = tensors[:3]
        try:
            met = self.alike.get((torch.is_grad_enabled(), len(tensors), q.shape, k.shape, rest), ())  # `_key`
        except TypeError:  # no hash: the door says what is wrong with it
            return None
        except RuntimeError:
            if any(tensor.is_nested for tensor in tensors):  # no sizes: so here
                return None
            raise  # torch.jit.trace's, which goes on where it is not heard and ends the process
        if met and any([tensor.is_nested for tensor in tensors[2:]]):  # whose strides a guard asks for, which ends the process
            return None
        for alike, lies, choice in met:
            if alike(*tensors) and q.data_ptr() % ALIGNMENT * ALIGNMENT + (k.data_ptr() | v.data_ptr()) % ALIGNMENT == lies:  # `_lies`
                return choice
        return None

    def meet(self, tensors: Sequence[Tensor], rest: tuple, choice: Any) -> None:
        guard = alike_to(tensors)
        if guard is None:
            return
        if len(self.alike) >= MOST_CHOICES:
            self.alike.clear()
        met = self.alike.setdefault(_key(tensors, rest), [])
        met[MOST_ALIKE - 1 :] = []
        met.insert(0, (guard, _lies(tensors), choice))


def alike_to(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Whether other tensors are like these; None where torch's guards, which are its own affair, take other arguments."""
    try:
        return _guard(tensors)
    except (TypeError, SystemError):
        return None


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A guard refuses to see one tensor twice, so it is given each once, and where each comes again is compared beside it."""
    first = [next(i for i, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    distinct = sorted(set(first))
    sizes: Any = [list(tensors[i].shape) for i in distinct]
    strides: Any = [list(tensors[i].stride()) for i in distinct]
    check = TensorGuards(*[tensors[i] for i in distinct], dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if len(distinct) == len(tensors):
        return check
    again = [(i, j) for i, j in enumerate(first) if i != j]
    return lambda *others: all([others[i] is others[j] for i, j in again]) and check(*[others[i] for i in distinct])


def direct_choice(known: Choices, call: Any, decide: Callable[[Any], Any], *beside: Tensor, graded: bool = False) -> Any | None:
    """The Choice of a call whose body may run without the dispatcher, or None. beside: tensors that the op reads beside the call's own. graded: the
    caller handles the gradients of a plain call itself."""
    if unseen_mode_active():  # before `known` is looked into, whose contents torch.compile would watch
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
    """What tells most calls apart at once, and whether gradients are recorded, as a guard looks at what tensors need alone."""
    return torch.is_grad_enabled(), len(tensors), tensors[0].shape, tensors[1].shape, rest


def _lies(tensors: Sequence[Tensor]) -> int:
    """A Problem knows the least aligned of the first three, and of the second and third."""
    return tensors[0].data_ptr() % ALIGNMENT * ALIGNMENT + (tensors[1].data_ptr() | tensors[2].data_ptr()) % ALIGNMENT
