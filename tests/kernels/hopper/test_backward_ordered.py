"""The Hopper backward that adds to dq in order: the simulator reports any two float adds that nothing
orders."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.hopper.backward_cases import BACKWARD, CASES, SPANS, _case
from tests.kernels.hopper.hopper_cases import CAUSAL, H200, NIGHTLY, SCHEDULES

pytest.importorskip("triton")

from strobe.kernels.hopper import kernel as hopper
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES, Target
from strobe.selection.select import select
from strobe.sim import Checks
from tools.proof.simulate import on

ORDER = Checks(read_fences=True, atomic_order=True)
WIDER = replace(H200, sm_count=4)
NAMES = (
    "dense", "causal", "causal_more_keys", "causal_more_rows_sinks", "window_left", "window_right", "window_both",
    "window_before_the_keys",
    "grouped", "batch_of_three", "head_dim_96", "d64_causal", "d64_grouped_gaps", "d256_causal",
    "head_dims_192_128_window",
    "head_dims_160_96_causal", "packed_causal_other_keys", "packed_window_softcap", "packed_d256",
    "packed_nothing_but_empty", "one_row_causal",
    "one_key",
)  # fmt: skip
LONG = ("d64_grouped_gaps",)  # 5 s
WITH_SCHEDULE = [
    pytest.param(
        name,
        SCHEDULES[n % 3],
        id=f"{name}-{SCHEDULES[n % 3][0]}",
        marks=pytest.mark.nightly if n % 2 or name in LONG else (),
    )
    for n, name in enumerate(NAMES)
]


def ordered(name: str) -> Call:
    return (
        CASES[name]
        .build("cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="hopper")
        ._replace(deterministic=True)
    )


def traits_of(call: Call) -> hopper.BackwardTraits:
    return hopper.BACKWARD.config(Problem.from_call(call), H200).traits


@pytest.mark.nightly_cases("causal_more_keys-*", "dense-*", "grouped-*", "head_dims_192_128_window-*")
@pytest.mark.parametrize("name, schedule", WITH_SCHEDULE)
def test_adds_are_in_order(name, schedule, judge):
    call = ordered(name)
    with on(H200, *schedule, checks=ORDER) as run:
        judge(call, "normal", 5)
    assert run.reports == [] and run.launches[-3:] == BACKWARD and traits_of(call).deterministic


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in {case.name for case in SPANS}]
)  # which have no turns
def test_adds_are_in_order_under_every_schedule(name, judge):
    for schedule in NIGHTLY:
        call = ordered(name)
        with on(H200, *schedule, checks=ORDER) as run:
            judge(call, "normal", 5)
        assert run.reports == [] and run.launches[-3:] == BACKWARD and traits_of(call).deterministic


def gradients(call: Call, target: Target, schedule: tuple[str, int], **options) -> tuple[torch.Tensor, ...]:
    with on(target, *schedule, checks=ORDER, **options):
        out, _ = ops.run(call)
        return torch.autograd.grad(out, call[:3], torch.ones_like(out))


@pytest.mark.nightly_cases("grouped", "packed_causal_other_keys")
@pytest.mark.parametrize("name", ("causal", "grouped", "packed_causal_other_keys"))
def test_the_bits_are_those_of_any_schedule(name):
    """On two SMs, four or one, in any order of programs. One is enough, since programs wait for those that began before
    them alone.
    """
    first = gradients(ordered(name), H200, ("eager", 0))
    for target, schedule, options in (
        (H200, ("lazy", 0), {}),
        (WIDER, ("pct", 3), {}),
        (H200, ("eager", 0), {"sms": 1}),
    ):
        assert all(map(torch.equal, first, gradients(ordered(name), target, schedule, **options)))


SECTIONS = {  # heads that each make a section on two SMs: the last, or of groups the last two, go from the first keys
    "heads": _case("heads", 330, 330, heads=(3, 3), mask=CAUSAL),
    "more_keys": _case("more_keys", 200, 410, batch=2, mask=CAUSAL),
    "more_rows": _case("more_rows", 410, 200, heads=(3, 3), mask=CAUSAL),
    "d64": _case("d64", 390, 390, head_dim=64, heads=(2, 2), mask=CAUSAL),
    "d256": _case("d256", 150, 150, head_dim=256, heads=(2, 2), mask=CAUSAL),
    "groups": _case("groups", 140, 300, heads=(6, 3), mask=CAUSAL),
}


@pytest.mark.nightly_cases("0-heads", "1-more_keys", "2-more_rows", "3-d64", "5-groups")
@pytest.mark.parametrize("n, name", list(enumerate(SECTIONS)))
def test_the_last_sections_go_from_the_first_keys(n, name, judge):
    case = SECTIONS[name]
    build = lambda: case.build("cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="hopper")._replace(
        deterministic=True
    )
    assert traits_of(build()).reversed_sections == (2 if name == "groups" else 1)
    with on(H200, *SCHEDULES[n % 3], checks=ORDER) as run:
        judge(build(), "normal", 5)
    assert run.reports == [] and run.launches[-3:] == BACKWARD
    alone = gradients(build(), H200, ("eager", 0), sms=1)
    assert all(map(torch.equal, alone, gradients(build(), H200, ("pct", 3))))


def test_batch_invariant_gradients_have_no_last_sections():
    """A head in them has another order of adds than elsewhere: what two tiles of keys add here is large and cancels,
    and the third's share is lost where it is added before.
    """
    q, v = torch.zeros(1, 300, 1, 64), torch.randn(1, 128, 1, 64, generator=torch.Generator().manual_seed(0))
    v = v.repeat(1, 3, 1, 1)[:, :300]
    k = v * torch.tensor([2.0**20, -(2.0**20), 1.0]).repeat_interleave(128)[:300, None, None]

    def of_the_first(batch: int) -> tuple[torch.Tensor, ...]:
        leaves = [t.bfloat16().expand(batch, -1, -1, -1).contiguous().requires_grad_() for t in (q, k, v)]
        call = Call(*leaves, right=0, kernel="hopper", batch_invariant=True, needs_grad=True)
        assert traits_of(call).deterministic and traits_of(call).reversed_sections == 0
        return tuple(t[0] for t in gradients(call, H200, ("eager", 0)))

    assert all(map(torch.equal, of_the_first(1), of_the_first(2)))


@pytest.mark.parametrize("name", ("dense", "window_both", "packed_causal_other_keys"))
def test_tiles_that_cost_the_same_have_no_last_sections(name):
    assert traits_of(ordered(name)).deterministic and traits_of(ordered(name)).reversed_sections == 0


def test_without_turns_the_check_objects():
    """Of causal rows that see three tiles of keys or fewer it would not: the first stores, and the last waits for the
    one between.
    """
    call = CASES["dense"].build("cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="hopper")
    with on(H200, checks=ORDER, check=False) as run:
        out, _ = ops.run(call)
        torch.autograd.grad(out, call[:3], torch.ones_like(out))
    assert {report.kind for report in run.reports} == {"order"}


def test_deterministic_gradients_are_added_in_order():
    problem = replace(Problem.from_call(ordered("causal")), kernel="")
    assert "dq added by TMA in order" in str(select(problem, FAKES["H200"]))
    plain = replace(problem, deterministic=False)
    assert "in order" not in str(select(plain, FAKES["H200"]))
    invariant = replace(plain, batch_invariant=True)
    assert "dq added by TMA in order" in str(select(invariant, FAKES["H200"]))
