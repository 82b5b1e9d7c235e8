"""Loops that Triton's frontend compiles into something else than the source says.

The frontend runs a loop's body once to see which names it changes, and compares the values before and after. A name
that begins as the value of another name, or of a part of it, and takes that again in the body (`before = at.stage`
outside and inside of the loop) looks unchanged, so the compiled loop keeps its first value for ever. Found when a
matmul that was right here waited for ever on an H200 (Triton 3.6.0, `_find_carries`).
"""

from __future__ import annotations

from collections import Counter
from types import FrameType

from triton.language.core import base_value, constexpr

from .machine import Machine
from .report import place_text


class Carried:
    """Watches the names of one running loop: `turn()` after each of its iterations."""

    def __init__(self, machine: Machine, frame: FrameType | None):
        self._machine, self._frame, self._turns = machine, frame, 0
        handles = {} if frame is None else {name: _handles(value) for name, value in frame.f_locals.items()}
        held = Counter(key for own in handles.values() for key in {id(handle) for handle in own})
        # a name with a value of its own that the first turn leaves alone met a branch that was not taken: the frontend
        # sees all branches
        self._entry = {name: own for name, own in handles.items() if any(held[id(handle)] > 1 for handle in own)}
        self._unchanged: set[str] = set()

    def turn(self) -> None:
        self._turns += 1
        if self._frame is None or self._turns > 2:
            return
        names = self._frame.f_locals
        same = {name for name, handles in self._entry.items() if handles and _same(handles, _handles(names.get(name)))}
        if self._turns == 1:
            self._unchanged = same
            return
        for name in sorted(self._unchanged - same):
            place = self._machine.place()
            self._machine.report(
                "compiler",
                f"the loop at {place_text(place)} changes {name} from its second turn on, but Triton's frontend "
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
