"""Which faults a simulated run looks for, as one value shared by mutation detectors, tests and the command line."""

from __future__ import annotations

from dataclasses import dataclass

from .options import MAX_ITERATIONS


@dataclass(frozen=True)
class Checks:
    """Which faults are checked beyond those that a schedule makes visible.

    >>> Checks(contraction=True) == Checks()
    False

    Attributes:
        happens_before: races, missing fences and similar, also where this schedule happened to avoid them.
        read_fences: also require a proxy fence between a generic read and an asynchronous overwrite.
        atomic_order: also require an order between floating-point adds to one address. Without it the sum can differ
            from run to run. It needs happens_before.
        contraction: results that change if the compiler fuses a product into the sum that follows it.
        coverage: tensors that a launch writes without reading: elements that it leaves out, or writes more than once.
        overflow: integers that wrap around.
        costs: counts sectors, bank conflicts, bytes and occupancy: `Run.costs`. It reports no fault.
        every_config: each configuration of an autotuned kernel runs; otherwise the first does.
        max_iterations: the most iterations of one loop. A loop that runs for more is reported, and the launch ends.
        threads: a load of what another thread of the program has stored to global memory, without a barrier between.
        hints: `tl.multiple_of` and `tl.max_contiguous` that are false.
    """

    happens_before: bool = True
    read_fences: bool = False
    atomic_order: bool = False
    contraction: bool = False
    coverage: bool = False
    overflow: bool = False
    hints: bool = False
    threads: bool = False
    costs: bool = False
    every_config: bool = False
    max_iterations: int = MAX_ITERATIONS


USUAL = Checks()
