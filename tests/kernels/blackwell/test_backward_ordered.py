"""The Blackwell backward that adds to dq in order. The simulator reports any two float adds whose order is not
fixed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.blackwell.blackwell_scenes import B200
from tests.kernels.blackwell.test_backward import BACKWARD, _case
from tests.kernels.blackwell.test_backward_sequences import SEQUENCES
from tests.kernels.hopper.hopper_cases import CAUSAL, NIGHTLY, SCHEDULES, band

pytest.importorskip("triton")

from strobe.kernels.blackwell import kernel as blackwell
from strobe.kernels.blackwell.backward_traits import BackwardTraits
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import Target
from strobe.selection.select import select
from strobe.sim import Checks
from strobe.testing import Case
from tools.proof.simulate import on

ORDER = Checks(read_fences=True, atomic_order=True)
ON_EACH_COMMIT = (
    _case("causal", 200, 300, mask=CAUSAL),
    _case("window_d192_128", 150, 260, 192, head_dim_v=128, mask=band(100, 20)),
    SEQUENCES["packed_causal_other_keys"],
)
NIGHTLY_CASES = (
    _case("three_tiles_of_keys", 100, 300),  # of a float sum, the order of three matters
    _case("dense_d128", 260, 300, 128),
    _case("grouped", 150, 300, mask=CAUSAL, heads=(4, 2)),
    _case("more_keys", 200, 410, mask=CAUSAL, batch=2),
    _case("more_rows_sinks", 410, 200, mask=CAUSAL, heads=(2, 2), sinks=True),
    _case("window_before_the_keys", 390, 300, mask=band(10, 10)),
    _case("keys_that_no_query_sees", 130, 260, mask=band(60, 0)),
    _case("window_left_d96_softcap", 260, 300, 96, mask=band(70, None), softcap=4.0),
    _case("one_row", 1, 300, mask=CAUSAL),
    SEQUENCES["packed_window_softcap"],
    SEQUENCES["packed_nothing_but_empty"],
)
CASES = {case.name: case for case in (*ON_EACH_COMMIT, *NIGHTLY_CASES)}


def ordered(case: Case) -> Call:
    call = case.build("cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="blackwell.backward")
    return call._replace(deterministic=True)


def traits_of(call: Call) -> BackwardTraits:
    return blackwell.BACKWARD.config(Problem.from_call(call), B200).traits


def run_and_judge(judge, case: Case, schedule: tuple[str, int]) -> None:
    call = ordered(case)
    with on(B200, *schedule, checks=ORDER) as run:
        judge(call, "normal", 5)
    assert run.reports == [] and run.launches[-3:] == BACKWARD and traits_of(call).deterministic


@pytest.mark.parametrize("name", [case.name for case in ON_EACH_COMMIT])
def test_adds_are_in_order(name, judge):
    run_and_judge(judge, CASES[name], SCHEDULES[list(CASES).index(name) % len(SCHEDULES)])


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_adds_are_in_order_under_every_schedule(name, judge):
    for schedule in NIGHTLY:
        run_and_judge(judge, CASES[name], schedule)


def gradients(call: Call, target: Target, schedule: tuple[str, int], **options) -> tuple[torch.Tensor, ...]:
    with on(target, *schedule, checks=ORDER, **options):
        out, _ = ops.run(call)
        return torch.autograd.grad(out, call[:3], torch.ones_like(out))


@pytest.mark.nightly_cases("causal", "grouped", "packed_causal_other_keys")
@pytest.mark.parametrize("name", ("three_tiles_of_keys", "causal", "grouped", "packed_causal_other_keys"))
def test_the_bits_are_those_of_any_schedule(name):
    """On two SMs, four or one, in any order of programs. One is enough, because a program waits only for programs that
    started before it.
    """
    first = gradients(ordered(CASES[name]), B200, ("eager", 0))
    for target, schedule, options in (
        (B200, ("lazy", 0), {}),
        (replace(B200, sm_count=4), ("pct", 3), {}),
        (B200, ("eager", 0), {"sms": 1}),
    ):
        assert all(map(torch.equal, first, gradients(ordered(CASES[name]), target, schedule, **options)))


def test_without_turns_the_check_objects():
    call = ordered(_case("dense", 100, 300))._replace(deterministic=False)
    with on(B200, checks=ORDER, check=False) as run:
        out, _ = ops.run(call)
        torch.autograd.grad(out, call[:3], torch.ones_like(out))
    assert {report.kind for report in run.reports} == {"order"}


@pytest.mark.parametrize("heads, sections", [((2, 2), 1), ((4, 2), 2)])
def test_the_last_sections_go_from_the_first_keys(heads, sections):
    call = ordered(_case("sections", 300, 300, mask=CAUSAL, heads=heads))
    assert traits_of(call).reversed_sections == sections
    assert traits_of(call._replace(batch_invariant=True)).reversed_sections == 0
    for other in (
        _case("dense", 300, 300),
        _case("window", 300, 300, mask=band(100, 20)),
        CASES[ON_EACH_COMMIT[2].name],
    ):
        assert traits_of(ordered(other)).deterministic and traits_of(ordered(other)).reversed_sections == 0


def test_selection_says_that_dq_is_added_in_order():
    call = CASES["causal"].build("cpu", torch.bfloat16, requires_grad=True)
    choose = lambda **options: select(Problem.from_call(call._replace(**options)), B200)
    assert "dq added by vector atomics in order" in str(choose(deterministic=True).backward.config)
    assert "dq added by vector atomics in order" in str(choose(batch_invariant=True).backward.config)
    assert "in order" not in str(choose().backward.config)


def test_documents_have_no_order():
    call = SEQUENCES["documents_causal"].build("cpu", torch.bfloat16, requires_grad=True)._replace(deterministic=True)
    choice = select(Problem.from_call(call), B200)
    assert choice.backward.kernel.name == "portable.backward"
    words = "no deterministic gradients with prefixes, key lengths or documents"
    assert dict(choice.rejections)["blackwell.backward"] == words
