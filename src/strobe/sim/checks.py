"""Which faults a simulated run looks for, as one value shared by mutation detectors, tests and the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Checks:
    """Which faults are checked beyond those that a schedule makes visible.

    >>> Checks(happens_before=False)
    Checks(happens_before=False, read_fences=False, atomic_order=False)

    Attributes:
        happens_before: races, missing fences and similar, also where this schedule happened to avoid them.
        read_fences: also require a proxy fence between a generic read and an asynchronous overwrite.
        atomic_order: also require an order between floating-point adds to one address. Without it the sum can differ
            from run to run. It needs happens_before.
    """

    happens_before: bool = True
    read_fences: bool = False
    atomic_order: bool = False


USUAL = Checks()
