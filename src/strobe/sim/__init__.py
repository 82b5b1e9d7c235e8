"""strobe.sim runs the source of Triton and Gluon kernels on a CPU and finds races, deadlocks and missing fences.

>>> from strobe.sim import simulate
>>> with simulate(target="sm_90", mode="pct", seed=0) as run:  # doctest: +SKIP
...     kernel[grid](q, k, v, out)  # CPU tensors
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arrays import Array
    from .checks import Checks
    from .launch import Run, simulate
    from .on_cuda import cuda_on_cpu
    from .report import KINDS, Report, SimulationFault

__version__ = "0.2.0"  # that of strobe

__all__ = ["KINDS", "Array", "Checks", "Report", "Run", "SimulationFault", "cuda_on_cpu", "simulate"]
_HOMES = {
    "Array": "arrays",
    "Checks": "checks",
    "KINDS": "report",
    "Report": "report",
    "Run": "launch",
    "SimulationFault": "report",
    "cuda_on_cpu": "on_cuda",
    "simulate": "launch",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use. pytest imports this package for its plugin in every run, which must load
    neither Triton nor greenlet.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
