"""Detects loops that Triton's frontend miscompiles.

The frontend runs a loop's body once to find the names it changes, by comparing values before and after. A name that
starts as an alias of another name, or of a field of one, and takes that value again in the body (`before = at.stage`
outside and inside the loop) looks unchanged. The compiled loop then keeps its first value. This hung a matmul on an
H200 that was correct in the simulator (Triton 3.6.0, `_find_carries`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import FrameType

from triton.language.core import base_value, constexpr

from .machine import Machine
from .report import place_text

_running: dict[FrameType, list[Carried]] = {}  # loops that run in a frame, the outermost first


class Branch:
    """An `if` statement of a kernel. `runtime` becomes true when its condition is a tensor."""

    __slots__ = ("runtime",)

    def __init__(self) -> None:
        self.runtime = False


Branches = Mapping[str, Sequence[Branch]]  # name -> the branches of a loop's body that assign it


class Carried:
    """Watches the names of one running loop. Call `end_iteration()` after each iteration and `end()` behind the loop.

    In a loop within a loop, only names that were bound when it was first reached count: the frontend does not see a
    name that an earlier turn of the outer loop has left.
    """

    def __init__(self, machine: Machine, frame: FrameType | None, branches: Branches):
        self._machine, self._frame, self._branches, self._turns = machine, frame, branches, 0
        self._bound_at: dict[int, set[str]] = {}  # names at the first turn of each loop within this one, by line
        bound = set() if frame is None else self._visible(frame)
        handles = {} if frame is None else {name: _handles(frame.f_locals[name]) for name in bound}
        held = Counter(key for own in handles.values() for key in {id(handle) for handle in own})
        # A name with its own value that the first iteration leaves unchanged was in a branch not taken. The frontend
        # sees all branches.
        self._entry = {name: own for name, own in handles.items() if any(held[id(handle)] > 1 for handle in own)}
        self._unchanged: set[str] = set()

    def _visible(self, frame: FrameType) -> set[str]:
        loops = _running.setdefault(frame, [])
        bound = set(frame.f_locals)
        if loops:
            bound &= loops[-1]._bound_at.setdefault(frame.f_lineno, bound)
        loops.append(self)
        return bound

    def end(self) -> None:
        if self._frame is not None:
            loops = _running[self._frame]
            loops.remove(self)
            if not loops:
                del _running[self._frame]

    def end_iteration(self) -> None:
        self._turns += 1
        if self._frame is None or self._turns > 2:
            return
        names = self._frame.f_locals
        same = {name for name, handles in self._entry.items() if handles and _same(handles, _handles(names.get(name)))}
        if self._turns == 1:
            self._unchanged = same
            return
        for name in sorted(self._unchanged - same):
            if any(branch.runtime for branch in self._branches.get(name, ())):
                continue  # the frontend merges both sides of the branch into a value of its own, and carries that
            place = self._machine.place()
            self._machine.report(
                "compiler",
                f"the loop at {place_text(place)} changes {name} from its second iteration on, but Triton's frontend "
                f"takes it for unchanged, since it begins as the value of another name: give {name} a value of its "
                "own before the loop",
                place,
                (name, place),
            )


def _handles(value: object) -> list[object]:
    if not isinstance(value, base_value) or isinstance(value, constexpr):
        return []
    found: list[object] = []
    value._flatten_ir(found)
    return found


def _same(before: list[object], after: list[object]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))
