"""Functions of scores and masks in prefills over a cache by the Hopper forward: its source in the simulator and the
kernel on a GPU, against attention in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import strobe
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import decode as ops_decode
from strobe.ops import paged as ops_paged
from strobe.problem.paged import PagedCall, PagedProblem
from strobe.problem.target import FAKES
from strobe.selection.select import Choice, select
from strobe.testing.paged import PagedCase
from tests.kernels.hopper.decode_hook_cases import HookCase, judge
from tests.kernels.hopper.hopper_cases import NIGHTLY, SCHEDULES
from tests.kernels.hopper.prefill_cases import CASES as PREFILLS
from tests.kernels.hopper.prefill_cases import FP8_CASES

pytest.importorskip("triton")
H200 = FAKES["H200"]
DTYPES = (torch.bfloat16, torch.float16)
LAUNCHES = ["forward_kernel", "decode_kernel"]

CASES = {
    "mixed": HookCase(PREFILLS["mixed"], "every index"),
    "promised": HookCase(PREFILLS["promised"], "score"),
    "prefill": HookCase(PREFILLS["prefill"], "tree"),
    "more tokens than keys": HookCase(PREFILLS["more tokens than keys"], "every index"),
    "full": HookCase(PREFILLS["full"], "every index"),
    "full, more tokens than keys": HookCase(replace(PREFILLS["full"], news=(60, 19), lengths=(40, 9)), "score"),
    "window": HookCase(PREFILLS["window"], "every index"),
    "window of both sides": HookCase(PREFILLS["window of both sides"], "mask"),
    "window softcap sinks": HookCase(PREFILLS["window softcap sinks"], "every index"),
    "sinks without bound": HookCase(PREFILLS["sinks without bound"], "hidden by score"),
    "pages of 32": HookCase(PREFILLS["pages of 32"], "tree and score"),
    "pages of 128": HookCase(PREFILLS["pages of 128"], "row alone"),
    "pages lost": HookCase(PREFILLS["pages lost"], "every index"),
    "pages lost first": HookCase(PREFILLS["pages lost first"], "key alone"),
    "group of 3": HookCase(PREFILLS["group of 3"], "every index"),
    "37 sequences": HookCase(PREFILLS["37 sequences"], "score"),
    "rows": HookCase(PREFILLS["rows"], "outside"),
    "rows left padded, window": HookCase(PREFILLS["rows left padded, window"], "every index"),
    "d96": HookCase(PREFILLS["d96"], "every index"),
    "d128": HookCase(PREFILLS["d128"], "every index"),
    "d128, score": HookCase(PREFILLS["d128"], "score"),
    "d192/128": HookCase(PREFILLS["d192/128"], "constants"),
    "d256": HookCase(PREFILLS["d256"], "every index"),
    "8 bits": HookCase(FP8_CASES["mixed"], "every index"),
    "8 bits, pages of 13, window": HookCase(FP8_CASES["pages of 13, window"], "score"),
    "8 bits, softcap sinks": HookCase(FP8_CASES["softcap sinks"], "every index"),
    "8 bits, pages lost": HookCase(FP8_CASES["pages lost"], "mask"),
    "8 bits, d128": HookCase(FP8_CASES["d128"], "every index"),
}
EACH_COMMIT = ("mixed", "pages lost", "8 bits")
EACH = [
    pytest.param(n, name, marks=[pytest.mark.nightly] * (name not in EACH_COMMIT), id=name)
    for n, name in enumerate(CASES)
]


@pytest.fixture(name="counters")
def _counters(monkeypatch):
    """Counters of the two launches, which are 0 again behind each."""
    held = {name: torch.zeros(4096, dtype=torch.int32) for name in ("launch_decode", "launch_paged")}
    for name, zeros in held.items():
        monkeypatch.setattr(f"strobe.kernels.hopper.{name}.zeros_on", lambda device, count, zeros=zeros: zeros[:count])
    yield
    assert not any(zeros.any() for zeros in held.values())


def choice_of(call: PagedCall) -> Choice:
    return select(PagedProblem.from_call(call), H200)


def simulated(name: str, call: PagedCall, schedule: tuple[str, int]) -> None:
    """out and lse, held to the oracle's. The simulator reports nothing."""
    from strobe.sim import simulate  # a GPU's machine may lack what it needs
    from tests.kernels.portable.test_paged_interpreted import run_on
    from tools.proof.simulate import READ_FENCES

    with simulate("sm_90", *schedule, sms=2, check=False, checks=READ_FENCES) as run:
        out, lse, choice = run_on(H200, call)
    assert choice.forward.kernel.name == "hopper.paged"
    assert run.launches == (LAUNCHES if choice.forward.config.decode else LAUNCHES[:1])
    assert run.reports == []
    judge((out, lse), call, CASES[name].functions)


@pytest.mark.usefixtures("counters")
@pytest.mark.parametrize("n, name", EACH)
def test_as_good_as_the_oracle(n, name):
    simulated(name, CASES[name].build("cpu", DTYPES[n % 2], n), SCHEDULES[n % 3])
    assert bool(strobe.last_errors()) == bool(CASES[name].case.lost)
