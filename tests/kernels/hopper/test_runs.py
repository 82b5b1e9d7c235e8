"""The Hopper forward and backward of packed runs over shared keys, on the simulator, held against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.hopper.hopper_cases import H200, alternating_schedules

pytest.importorskip("triton")

from tests.kernels.run_cases import RUN_CASES, assert_runs
from tools.proof.simulate import on


@pytest.mark.nightly_cases("descending-*", "window-*")
@pytest.mark.parametrize("name, schedule", alternating_schedules(RUN_CASES))
def test_hopper_runs(name, schedule):
    call = RUN_CASES[name]._replace(head_dim=128).build("cpu", torch.bfloat16, "hopper")
    with on(replace(H200, sm_count=3), *schedule) as run:
        assert_runs(call)
    assert run.reports == [] and {"forward_kernel", "backward_kernel"} <= set(run.launches)
