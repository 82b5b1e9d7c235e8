"""What every test may use: the device under test, memory that is NaN before it is written, and one judge of a call."""

from __future__ import annotations

import gc
from fnmatch import fnmatchcase

import hypothesis
import pytest
import torch

import strobe
from strobe.kernels.hopper import kernel as hopper
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.problem.call import Call
from strobe.testing.poison import fill_with_poison, patched_empty
from tests.case_parts import on_each_commit
from tests.judging import judged_call

KERNELS = {"cpu": "cpu", "cuda": "portable"}  # the family under test on each kind of device

torch.set_num_threads(1)
torch.backends.cuda.matmul.allow_tf32 = False
_EXPECTED = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile(
    "strobe", derandomize=True, deadline=None, print_blob=True, suppress_health_check=_EXPECTED
)
hypothesis.settings.load_profile("strobe")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name):
    """Cases that the marker `nightly_cases` names become nightly; a pattern must name at least one case."""
    items = yield
    if isinstance(items, list) and items:
        for pattern in (pattern for marker in items[0].iter_markers("nightly_cases") for pattern in marker.args):
            named = [item for item in items if fnmatchcase(item.callspec.id, pattern)]
            if not named:
                raise collector.CollectError(f"{collector.nodeid}::{name} has no case {pattern!r}: see nightly_cases")
            for item in named:
                item.add_marker("nightly")
    return items


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates -m
def pytest_collection_modifyitems(config, items):
    """Nightly tests run with `-m nightly` only. Tests that need a GPU are skipped without one."""
    for item in items:
        if _is_left_out(item):
            item.add_marker("nightly")
        if item.get_closest_marker("nightly") and "nightly" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="nightly: run with -m nightly"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU"))


def _is_left_out(item) -> bool:
    """Whether the marker `parts` leaves a case to the nightly run."""
    marker = item.get_closest_marker("parts")
    if marker is None or item.get_closest_marker("gpu"):
        return False
    parts, name = (*marker.args, item.nodeid.partition("::")[2])[:2]
    return not on_each_commit(name, parts, **marker.kwargs)


def pytest_collection_finish():
    """What collecting made lives until the end, so no later collection of garbage looks at it again (3 % of the time of
    all tests).
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture
def kernel(device) -> str:
    """The family that must run on `device`."""
    return KERNELS[device]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    with patched_empty(fill_with_poison):
        yield


@pytest.fixture(autouse=True)
def faults_are_told_to_the_test_that_made_them():
    yield
    strobe.last_errors()


@pytest.fixture
def as_of_many_keys(monkeypatch):
    """The Hopper kernels run as they would if rows saw many keys: the forward with early weights, where it can, in its
    usual tiles, the backward with dq's sum cleared before unless its adds have an order, and with dq of the step
    before, where it can.
    """
    monkeypatch.setattr(hopper, "EARLY_KEYS", 0)
    monkeypatch.setattr(hopper, "FEW_KEYS_TUNINGS", {})
    monkeypatch.setattr(hopper, "STORED_KEYS", {})
    monkeypatch.setattr(hopper, "CLEARED_KEYS", 0)
    monkeypatch.setattr(hopper, "DEFERRED_DQ_STEPS", dict.fromkeys(hopper.DEFERRED_DQ_STEPS, 0))
    CACHE.clear()
    yield
    CACHE.clear()


@pytest.fixture
def judge(record_property):
    """judge(call, family, seed) runs a call forward and backward between guard bands and holds both against the
    oracle."""
    worst: dict[str, float] = {}

    def run(call: Call, family: str = "normal", seed: int = 0) -> dict[str, float]:
        ratios = judged_call(call, family, seed)
        for name, ratio in ratios.items():
            worst[name] = max(worst.get(name, 0.0), ratio)
        record_property("ratios", {"dtype": str(call.q.dtype).removeprefix("torch."), **worst})
        return ratios

    return run


def pytest_terminal_summary(terminalreporter):
    """The worst error over what is allowed (1 is the limit), by dtype, over all judged calls; and the score of the
    seeded faults.
    """
    worst: dict[str, dict[str, float]] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "ratios":
                row = worst.setdefault(value["dtype"], {})
                for tensor, ratio in value.items():
                    if tensor != "dtype":
                        row[tensor] = max(row.get(tensor, 0.0), ratio)
    if worst:
        terminalreporter.write_sep("-", "worst error / allowed error")
    for dtype, row in sorted(worst.items()):
        terminalreporter.write_line(f"{dtype:9} " + "  ".join(f"{name} {ratio:.2f}" for name, ratio in row.items()))
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    scores = [value for report in reports for name, value in report.user_properties if name == "mutants"]
    if scores:
        caught, seeded, alarms = (sum(column) for column in zip(*scores))
        terminalreporter.write_line(f"mutation score {caught} of {seeded} seeded faults noticed, {alarms} false alarms")
