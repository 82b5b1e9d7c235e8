"""strobe.sim: runs Triton and Gluon kernels' own source on a CPU, and finds races, deadlocks and missing fences.

>>> from strobe.sim import simulate
>>> with simulate(target="sm_90", mode="pct", seed=0) as run:  # doctest: +SKIP
...     kernel[grid](q, k, v, out)  # CPU tensors
"""

from .launch import Run, simulate
from .report import KINDS, Report, SimulationFault

__all__ = ["KINDS", "Report", "Run", "SimulationFault", "simulate"]
