"""The Hopper backward with the query heads of a group divided among programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.hopper.hopper_cases import (
    CAUSAL,
    H200,
    SCHEDULES,
)

pytest.importorskip("triton")

from strobe.kernels.hopper import kernel as hopper
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from tests.kernels.hopper.backward_cases import BACKWARD_OF_SPLIT_GROUPS, CASES, _case, _traits, band
from tools.proof.compile import launches
from tools.proof.simulate import on

SPLIT = {  # on eight SMs, which take more programs than these have heads of keys
    "grouped": 2, "one_key_head": 3, "d64_grouped_gaps": 4, "d256_window_softcap": 2, "packed_heads_first": 2,
    "packed_window_softcap": 2,
    "split_ragged_columns": 3, "split_stored_gaps": 2, "split_clipped_window": 4,
}  # fmt: skip
ROOMY = replace(H200, sm_count=8)
ALSO = {
    case.name: case
    for case in (
        _case("split_ragged_columns", 150, 130, 72, head_dim_v=120, heads=(3, 1), mask=CAUSAL),
        _case("split_stored_gaps", 150, 130, heads=(4, 2), storage="gaps", mask=CAUSAL, sinks=True),
        _case("split_clipped_window", 100, 200, heads=(4, 1), mask=band(100, 0), sinks=True),
    )
}


@pytest.mark.nightly_cases(
    "d64_grouped_gaps-*",
    "grouped-*",
    "one_key_head-*",
    "packed_window_softcap-*",
    "split_ragged_columns-*",
    "packed_heads_first-*",
)
@pytest.mark.parametrize(
    "schedule", [pytest.param(SCHEDULES[0], marks=pytest.mark.nightly), SCHEDULES[1]], ids=["eager", "lazy"]
)
@pytest.mark.parametrize("name", SPLIT)
def test_groups_are_divided(name, schedule, judge):
    case = (CASES | ALSO)[name]
    call = case.build("cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="hopper")
    with on(ROOMY, *schedule) as run:
        judge(call, "normal", 5)
    assert (
        run.reports == []
        and run.launches[-5:] == BACKWARD_OF_SPLIT_GROUPS
        and _traits(case, ROOMY).group_splits == SPLIT[name]
    )


@pytest.mark.parametrize(
    "batch, seqlen, heads, mask, splits",
    [
        (1, 2048, (64, 8), CAUSAL, 4),  # 128 programs of 16 to 256 steps on 132 SMs: the longest would decide
        (1, 2048, (64, 8), None, 1),  # 128 alike
        (1, 2048, (32, 1), None, 8),
        (1, 8192, (64, 8), CAUSAL, 4),  # 512 programs of 8 to 1,024 steps: the last ones would run alone
        (16, 2048, (64, 8), CAUSAL, 1),
        (1, 128, (6, 2), CAUSAL, 3),  # never more than there are heads
        (1, 2048, (64, 64), CAUSAL, 1),
    ],
)
def test_how_many_programs_share_a_group(batch, seqlen, heads, mask, splits):
    q, k = (torch.empty(batch, seqlen, count, 128, dtype=torch.bfloat16, device="meta") for count in heads)
    problem = Problem.from_call(Call(q, k, k, right=0 if mask else -1, needs_grad=True))
    assert hopper.BACKWARD.config(problem, FAKES["H200"]).traits.group_splits == splits
    ordered = hopper.BACKWARD.config(replace(problem, deterministic=True, kernel="hopper"), FAKES["H200"]).traits
    assert ordered.deterministic and ordered.group_splits == 1, "shares would be added in no order"


@pytest.mark.parametrize(
    "rows, keys, left, splits", [(1024, 2048, 1024, 4), (15360, 16384, 1024, 1), (1024, 2048, 900, 1)]
)
def test_programs_of_a_window_that_is_no_shorter_than_the_rows_share_a_group(rows, keys, left, splits):
    """128 programs of 1 to 16 steps a head on 132 SMs: with one program a group the longest would decide."""
    q, k = (
        torch.empty(1, count, heads, 128, dtype=torch.bfloat16, device="meta")
        for count, heads in ((rows, 64), (keys, 8))
    )
    problem = Problem.from_call(Call(q, k, k, left=left, right=0, needs_grad=True))
    assert hopper.BACKWARD.config(problem, FAKES["H200"]).traits.group_splits == splits


@pytest.mark.parametrize(
    "seqlen, heads, width, options, finishes, collects",
    [
        (512, (16, 16), 128, {}, True, True),
        (1024, (16, 16), 128, {}, True, True),
        (1250, (16, 16), 128, {}, False, False),  # 625 keys a row
        (512, (32, 32), 64, {}, True, True),
        (1024, (32, 32), 64, {}, False, False),
        (512, (16, 16), 96, {}, False, False),  # shares of 64 and 32 columns
        (512, (16, 16), 192, {}, False, False),
        (512, (16, 16), 128, {"right": -1}, False, False),
        (128, (16, 16), 128, {"right": -1}, True, True),
        (512, (16, 16), 128, {"left": 127}, False, False),
        (512, (16, 16), 128, {"deterministic": True}, True, False),
        (200, (16, 8), 128, {}, True, False),
        (512, (16, 16), 64, {"softcap": 20.0}, False, False),  # 32 columns
    ],
)
def test_when_dq_is_written_by_who_adds_last(seqlen, heads, width, options, finishes, collects):
    q, k = (torch.empty(32, seqlen, count, width, dtype=torch.bfloat16, device="meta") for count in heads)
    call = Call(q, k, k, **({"right": 0} | options), needs_grad=True)
    traits = hopper.BACKWARD.config(Problem.from_call(call), FAKES["H200"]).traits
    assert (traits.dq_written_directly, traits.dq_last_writer_converts) == (finishes, collects) and not (
        traits.dq_written_directly and traits.dq_zeroed_ahead
    )


@pytest.mark.parametrize(
    "batch, seqlen, heads, section",
    [
        (32, 512, (16, 16), 64),  # two tiles of keys for each SM, since the last of a row waits for those before
        (16, 768, (16, 16), 16),
        (16, 1024, (16, 16), 16),
        (1, 2048, (64, 8), 8),  # of four parts of a group each
        (2, 8192, (16, 16), 2),
        (1, 65536, (4, 4), 1),
    ],
)
def test_a_section_of_causal_heads_fills_the_sms(batch, seqlen, heads, section):
    q, k = (torch.empty(batch, seqlen, count, 128, dtype=torch.bfloat16, device="meta") for count in heads)
    jobs = [job for _, job in launches(Call(q, k, k, right=0, needs_grad=True), FAKES["H200"])]
    (job,) = (job for job in jobs if job.kernel.fn.__name__ == "backward_kernel")
    (_, sizes, *_), _ = job.arguments[-2:]
    assert sizes[6] == section
