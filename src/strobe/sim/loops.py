"""What is watched while a loop of a kernel runs: that it ends, what it allocates, and the names that it carries."""

from __future__ import annotations

from types import FrameType
from typing import Any

import numpy as np
from triton import language as tl

from .carried import Branches, Carried
from .machine import Machine
from .report import Stop, place_text

_PATIENCE = 1000  # iterations after which the other partitions get a turn


class Loop:
    """One running loop. Call `end_iteration()` after each iteration and `end()` behind the loop."""

    def __init__(self, machine: Machine, frame: FrameType | None, branches: Branches, total: int | None = None):
        self._machine, self._frame, self._total, self._turns = machine, frame, total, 0
        self._before: dict[str, Any] = {}
        self._carried = Carried(machine, frame, branches)
        self._partition = machine.current
        self._partition.allocations.enter_loop()

    def end_iteration(self) -> None:
        self._turns += 1
        self._carried.end_iteration()
        self._partition.allocations.end_iteration()
        self._machine.check_time()
        if self._turns % _PATIENCE == 0:
            self._machine.preempt(always=True)
        if self._turns == self._machine.checks.max_iterations - 1:
            self._before = _scalars(self._frame)
        if self._turns >= self._machine.checks.max_iterations:
            self._endless()

    def end(self) -> None:
        self._carried.end()
        self._partition.allocations.leave_loop(self._partition.cta)

    def _endless(self) -> None:
        """Report the loop, with the scalars that its last iteration changed and those that it did not, and stop."""
        machine, now = self._machine, _scalars(self._frame)
        changed = [f"{name} = {value}" for name, value in now.items() if self._before.get(name, value) != value]
        same = [f"{name} = {value}" for name, value in now.items() if self._before.get(name) == value]
        parts = [
            f"{what}: {', '.join(names[:6])}"
            for what, names in (("changing", changed), ("not changing", same))
            if names
        ]
        of_all = "" if self._total is None else f" of {self._total:,}"
        place = machine.place()
        machine.report(
            "deadlock",
            f"{machine.current.name} is in iteration {self._turns:,}{of_all} of the loop at {place_text(place)}, the "
            f"most that max_iterations allows{'; ' * bool(parts)}{'; '.join(parts)}",
            place,
        )
        raise Stop


def _scalars(frame: FrameType | None) -> dict[str, Any]:
    """The scalar numbers among a frame's variables."""
    found = {}
    for name, value in ({} if frame is None else frame.f_locals).items():
        data = getattr(getattr(value, "handle", None), "_data", None) if isinstance(value, tl.tensor) else None
        if data is not None and np.ndim(data) == 0 and not value.dtype.is_ptr():
            found[name] = np.asarray(data).item()
    return found
