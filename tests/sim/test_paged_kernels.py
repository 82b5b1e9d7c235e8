"""Packed queries over a cache in the simulator: the three launches of the portable kernel on an sm_90."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from strobe.problem.target import FAKES
from strobe.sim import simulate
from strobe.testing import FAMILIES
from strobe.testing.paged import PAGED, assert_paged_as_good_as
from tests.kernels.hopper.hopper_cases import SCHEDULES
from tests.kernels.portable.test_paged_interpreted import run_on
from tests.ops import test_append_slots
from tools.proof.simulate import on

NAMES = ("speculated", "window_softcap_sinks", "pages_of_13", "pages_lost", "rows_left_padded", "fp8_token_scales")


@pytest.mark.parametrize("n, name", list(enumerate(NAMES)), ids=NAMES)
def test_no_report_and_as_good_as_the_oracle(n, name):
    dtype = (torch.bfloat16, torch.float16)[n % 2]
    call = PAGED[name].build("cpu", dtype, FAMILIES[n % 5], n, "portable", batch_invariant=n == 2)
    with simulate("sm_90", *SCHEDULES[n % 3], sms=3, check=False) as run:
        out, lse, _ = run_on(FAKES["H200"], call)
    assert_paged_as_good_as((out, lse), call)
    assert run.launches == ["schedule_kernel", "paged_kernel", "combine_kernel"]
    assert run.reports == []


@pytest.mark.parametrize("where", ["rows", "pages", "slots"])
def test_append_with_a_scale_for_each_key_and_head(where):
    with on(FAKES["H200"], *SCHEDULES[0], check=False) as run:
        test_append_slots.by_token("cpu", "portable", where == "pages", where == "slots")
    assert run.launches == ["append_kernel"] and run.reports == []


@pytest.mark.parametrize("layout", ["NHD", "together"])
def test_append_at_slots(layout):
    with on(FAKES["H200"], *SCHEDULES[1], check=False) as run:
        test_append_slots.written_to_slots("cpu", "portable", torch.int64, False, layout == "together", True)
    assert run.launches == ["append_kernel"] and run.reports == []
