"""Every named case, input family and dtype against the oracle: forward, backward, guard bands, and which kernel ran."""

from __future__ import annotations

import pytest
import torch

from strobe.errors import UnsupportedProblem
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES, Target
from strobe.selection.select import select
from strobe.testing import CASES, FAMILIES, LARGE, Case

HALF = (torch.bfloat16, torch.float16)
THOROUGH = (torch.float32, torch.bfloat16)  # all families on every run; the other dtypes take turns, one family a case
SEED = 7


def _problems(cases: dict[str, Case], nightly: bool) -> list:
    """(case, dtype, family): on every run, or what is left for the nightly one."""
    problems = []
    for n, case in enumerate(cases.values()):
        for dtype in case.dtypes:
            for m, family in enumerate(FAMILIES):
                often = dtype in THOROUGH or m == n % len(FAMILIES)
                if often is not nightly:
                    problems.append(
                        pytest.param(
                            case, dtype, family, id=f"{case.name}-{str(dtype).removeprefix('torch.')}-{family}"
                        )
                    )
    return problems


@pytest.mark.parts(3, seed=756248089)
@pytest.mark.parametrize("case, dtype, family", _problems(CASES, nightly=False))
def test_case(case, dtype, family, device, kernel, judge):
    judge(case.build(device, dtype, family, SEED, requires_grad=True, kernel=kernel), family, SEED)


@pytest.mark.nightly
@pytest.mark.parametrize("case, dtype, family", _problems(CASES, nightly=True))
def test_case_of_the_rest(case, dtype, family, device, kernel, judge):
    judge(case.build(device, dtype, family, SEED, requires_grad=True, kernel=kernel), family, SEED)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(11, 16))
@pytest.mark.parametrize("name", CASES)
def test_case_on_other_numbers(name, seed, device, kernel, judge):
    for dtype in CASES[name].dtypes:
        family = FAMILIES[seed % len(FAMILIES)]
        judge(CASES[name].build(device, dtype, family, seed, requires_grad=True, kernel=kernel), family, seed)


def _or_skip(call: Call) -> Call:
    """The call, if the kernel it asks for runs it on this GPU."""
    try:
        select(Problem.from_call(call), Target.of(call.q.device))
    except UnsupportedProblem as refused:
        pytest.skip(str(refused))
    return call


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", ("hopper.forward", "hopper.backward"))
@pytest.mark.parametrize("name", CASES)
def test_case_on_hopper(name, kernel, family, dtype, judge, request):
    """The Hopper kernels, where the other direction is whose it may be; skipped where they refuse the case, with their
    reason. In bfloat16 as if rows saw many keys, in float16 as they are.
    """
    if dtype == torch.bfloat16:
        request.getfixturevalue("as_of_many_keys")
    judge(_or_skip(CASES[name].build("cuda", dtype, family, SEED, requires_grad=True, kernel=kernel)), family, SEED)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ("hopper.forward", "portable.forward"))
@pytest.mark.parametrize("n, name", list(enumerate(CASES)), ids=CASES)
def test_case_with_the_bits_of_a_decode(n, name, kernel, judge):
    """batch_invariant=True, with gradients of any backward; skipped where a kernel refuses the case."""
    family, dtype = FAMILIES[n % len(FAMILIES)], HALF[n % 2]
    call = (
        CASES[name].build("cuda", dtype, family, SEED, requires_grad=True, kernel=kernel)._replace(batch_invariant=True)
    )
    judge(_or_skip(call), family, SEED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", ("blackwell.forward", "blackwell.backward"))
@pytest.mark.parametrize("name", CASES)
def test_case_on_blackwell(name, kernel, family, dtype, judge):
    """A Blackwell kernel with the first of the other direction; skipped where it refuses the case, with its reason.
    Neither has run on such a GPU yet.
    """
    judge(
        _or_skip(CASES[name].build("cuda", dtype, family, SEED, requires_grad=True, kernel=kernel)),
        family,
        SEED,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel", ("portable", "hopper.forward", "hopper.backward", "blackwell.forward", "blackwell.backward")
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LARGE)
def test_large_case(name, family, kernel, judge):
    for dtype in LARGE[name].dtypes:
        judge(_or_skip(LARGE[name].build("cuda", dtype, family, SEED, requires_grad=True, kernel=kernel)), family, SEED)


def test_hopper_takes_much_of_the_table():
    """What `test_case_on_hopper` skips elsewhere than on a Hopper GPU is no more than what a list of refusals
    explains."""
    calls = [case.build("cpu", torch.bfloat16) for case in CASES.values()]
    taken = [select(Problem.from_call(call), FAKES["H200"]).forward.kernel.name == "hopper.forward" for call in calls]
    assert sum(taken) >= 50


def test_the_table_covers_what_it_promises():
    """Lengths, layouts and options that the table exists for: a case deleted by accident is noticed."""
    cases = list(CASES.values())
    assert len(cases) >= 100
    assert {1, 16, 21, 40, 64, 96, 128, 192, 256} <= {case.head_dim for case in cases}
    assert {case.storage for case in cases} >= {
        "contiguous",
        "heads_first",
        "odd_offset",
        "gaps",
        "mixed",
        "expanded_heads",
        "expanded_batch",
    }
    assert any(case.lengths_q and case.lengths_q[position] == 0 for case in cases for position in (0, -1))
    for option in ("sinks", "softcap", "partial", "promised"):
        assert any(getattr(case, option) for case in cases), option
