"""A pytest fixture: `simulate` fails a test whose kernels have faults, and shows the reports."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .launch import Run


@pytest.fixture
def simulate() -> Callable[..., AbstractContextManager[Run]]:
    """`with simulate("sm_90", mode="pct", seed=1) as run:` as in strobe.sim.simulate.

    Faults fail the test before any other error.
    """
    from . import SimulationFault
    from .launch import simulate as simulated

    @contextlib.contextmanager
    def failing(*arguments: Any, check: bool = True, **options: Any) -> Iterator[Run]:
        with simulated(*arguments, check=False, **options) as run:
            try:
                yield run
            finally:
                if check and run.reports:
                    error = sys.exc_info()[1]  # of the test; a race may have caused it, so raise the faults first
                    later = f"\nand then {type(error).__name__}: {error}" if isinstance(error, Exception) else ""
                    pytest.fail(f"{SimulationFault(run.reports)}{later}", pytrace=False)

    return failing
