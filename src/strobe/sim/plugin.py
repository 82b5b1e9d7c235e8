"""A pytest fixture: `simulate` fails a test whose kernels have faults, with the reports as the message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def simulate() -> Any:
    """`with simulate("sm_90", mode="pct", seed=1) as run:` as strobe.sim.simulate; faults fail the test."""
    from . import SimulationFault
    from .launch import simulate as simulated

    @contextlib.contextmanager
    def failing(*arguments: Any, **options: Any) -> Iterator[Any]:
        try:
            with simulated(*arguments, **options) as run:
                yield run
        except SimulationFault as fault:
            pytest.fail(str(fault), pytrace=False)

    return failing
