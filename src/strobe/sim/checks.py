"""What a simulated run looks for: one value, so that a detector of mutants, a test and the command line say it
alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Checks:
    """Which faults are looked for beyond those that a schedule makes visible.

    happens_before: races, missing fences and the like, told even where this schedule was lucky.
    read_fences: also a fence where an asynchronous copy overwrites what generic code has read.
    atomic_order: also an order between floating-point adds to one place, without which the sum differs from run to run;
        a kernel that must give the same bits every time needs it. It is judged by happens-before too.
    """

    happens_before: bool = True
    read_fences: bool = False
    atomic_order: bool = False


USUAL = Checks()
