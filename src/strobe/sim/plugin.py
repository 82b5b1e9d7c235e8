"""A pytest fixture, `simulate`, that fails a test whose kernels have faults, and an option, `--simulate`, that runs
tests written for a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .launch import Run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simulate",
        metavar="TARGET",
        help='run tests that are written for "cuda" on the CPU: kernels are simulated for this target (such as sm_90), '
        "and their faults fail the test",
    )


def pytest_configure(config: pytest.Config) -> None:
    if target := config.getoption("--simulate"):
        from .on_cuda import cuda_on_cpu

        served = contextlib.ExitStack()
        served.enter_context(cuda_on_cpu(target))
        config.add_cleanup(served.close)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    target = item.config.getoption("--simulate")
    if not target:
        return (yield)
    from . import SimulationFault
    from .launch import simulate as simulated

    result = None
    with simulated(target, check=False) as run:
        result = yield
    if run.reports:
        pytest.fail(str(SimulationFault(run.reports)), pytrace=False)
    return result


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
