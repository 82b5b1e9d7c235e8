"""8-bit keys that are copied in q's dtype before the Hopper forward reads them, in the simulator. Here a sequence of
few tokens counts as one of many.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import strobe
from strobe.kernels.hopper import copy_config, launch_paged
from strobe.kernels.hopper.copied_keys import CopyTensors
from strobe.kernels.hopper.copy_config import COPIED_TILE
from strobe.kernels.hopper.launch_paged import copy_tensors
from strobe.problem.paged import PagedCall, PagedProblem
from strobe.selection.select import select
from strobe.sim import simulate
from strobe.testing import FAMILIES
from strobe.testing.paged import PagedCase, assert_paged_as_good_as
from tests.kernels.hopper.hopper_cases import H200, NIGHTLY, SCHEDULES
from tests.kernels.hopper.prefill_cases import COPY_CASES as CASES
from tests.kernels.hopper.test_prefill_float8_simulated import call_of
from tests.kernels.hopper.test_prefill_simulated import _counters
from tests.kernels.portable.test_paged_interpreted import run_on
from tools.proof.simulate import READ_FENCES, on

__all__ = ["_counters"]  # a fixture
COPIES = ["copy_keys_kernel", "forward_kernel", "forward_kernel"]
FAST = ("window, pages lost", "rows left padded, window")  # the others run at night


@pytest.fixture(name="from_17_tokens", autouse=True)
def _from_17_tokens(monkeypatch):
    monkeypatch.setattr(copy_config, "LEAST_ROWS", 17)
    monkeypatch.setattr(copy_config, "LEAST_CAPACITY", 0)


def simulated(call: PagedCall, schedule: tuple[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, held to the oracle's. The simulator reports nothing."""
    with simulate("sm_90", *schedule, sms=2, check=False, checks=READ_FENCES) as run:
        out, lse, choice = run_on(H200, call)
    assert choice.forward.config.copy is not None
    assert run.launches[:3] == COPIES
    assert run.reports == []
    assert_paged_as_good_as((out, lse), call)
    return out, lse


@pytest.mark.parametrize(
    "n, name",
    [pytest.param(n, name, marks=[pytest.mark.nightly] * (name not in FAST), id=name) for n, name in enumerate(CASES)],
)
def test_no_report_and_as_good_as_the_oracle(n, name):
    call = CASES[name].build("cpu", (torch.bfloat16, torch.float16)[n % 2], FAMILIES[n % 5], n, "hopper")
    simulated(call, SCHEDULES[n % 3])
    errors = strobe.last_errors()
    assert bool(errors) == bool(CASES[name].lost)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mixed", "window, pages lost", "d96", "d256"])
def test_under_every_schedule(name):
    for n, schedule in enumerate(NIGHTLY):
        simulated(CASES[name].build("cpu", torch.bfloat16, FAMILIES[n % 5], n, "hopper"), schedule)


@pytest.mark.parametrize("page_size", [16, pytest.param(0, marks=pytest.mark.nightly)])
def test_copied_keys_have_the_bits_of_converted_ones(page_size, monkeypatch):
    """Keys, scales and signs are the same numbers in both forwards."""
    call, _ = call_of(page_size, torch.bfloat16)
    copied = simulated(call, SCHEDULES[0])
    monkeypatch.undo()
    with simulate("sm_90", *SCHEDULES[0], sms=2, check=False) as run:
        *converted, choice = run_on(H200, call)
    assert choice.forward.config.copy is None and run.reports == []
    assert all(map(torch.equal, copied, converted))


LENGTHS, NEWS = (150, 20, 70, 64, 0, 200), (40, 3, 17, 30, 0, 100)


def sequences_of_six_lengths() -> PagedCall:
    case = PagedCase("six", LENGTHS, 0, (4, 2), 64, page_size=16, news=NEWS, fp8=True, padding=3)
    return case.build("cpu", torch.bfloat16, "normal", 1, "hopper")


@pytest.mark.parametrize(
    "tiles, is_copied",
    [
        pytest.param(2, [0, 0, 1, 0, 0, 0], marks=pytest.mark.nightly),
        (5, [1, 0, 1, 0, 0, 0]),
        pytest.param(10, [1, 0, 1, 1, 0, 1], marks=pytest.mark.nightly),
    ],
)
def test_sequences_are_copied_while_there_is_room(tiles, is_copied, monkeypatch):
    """Others convert their keys. In tiles of 64 keys the sequences need 3, 0, 2, 1, 0 and 4. One that is larger than
    the copy is passed over.
    """
    call, seen = sequences_of_six_lengths(), []

    def noted(call: PagedCall, workspace: dict[str, torch.Tensor]) -> CopyTensors:
        seen.append(copy_tensors(call, workspace))
        return seen[-1]

    monkeypatch.setattr(copy_config, "MOST_COPIED", tiles * COPIED_TILE * 2 * 2 * 64 * 2)
    monkeypatch.setattr(launch_paged, "copy_tensors", noted)
    simulated(call, SCHEDULES[1])
    assert seen[0].is_copied.tolist() == is_copied
    assert seen[0].key_counts.tolist() == list(LENGTHS)


def test_a_window_copies_the_keys_that_it_sees():
    """600 keys, of which the queries of the first sequence see the last 58, in 2 tiles."""
    case = replace(CASES["window, pages lost"], lost=(), heads=(4, 1))
    problem = PagedProblem.from_call(case.build("cpu", torch.bfloat16, "normal", 1, "hopper"))
    assert (case.lengths[0], case.news[0], case.left) == (600, 18, 40)
    copy = select(problem, H200).forward.config.copy
    assert copy.tiles == 2 * ((40 + sum(case.news)) // COPIED_TILE + 2)
    narrow = replace(problem, left=2)
    assert select(narrow, H200).forward.config.copy is None, "3 queries of 4 heads see a key"


@pytest.mark.nightly
def test_functions_run_over_copied_keys():
    call = sequences_of_six_lengths()
    cache = strobe.PagedCache(call.k, call.v, call.page_table, call.seqlens, call.k_scale, call.v_scale)
    options = {"score_mod": strobe.alibi(torch.tensor([0.5, 0.25, 0.1, 0.0])), "cu_seqlens_q": call.cu_seqlens_q}
    exact = strobe.attention_paged(call.q, cache, kernel="cpu", **options)
    with on(H200, *SCHEDULES[0]) as run:
        out = strobe.attention_paged(call.q, cache, kernel="hopper", **options)
    assert run.launches[:3] == COPIES and run.reports == []
    torch.testing.assert_close(out[:-3], exact[:-3], rtol=2e-2, atol=2e-2)


@pytest.mark.nightly
def test_more_sequences_than_a_program_scans_at_once():
    """Those with many tokens lie at the ends of the 128 that are scanned together."""
    many = {3: 40, 127: 20, 128: 17, 133: 64}
    news = tuple(many.get(n, n % 2) for n in range(140))
    case = PagedCase("many", tuple(new + 9 for new in news), 0, (1, 1), 64, page_size=16, news=news, fp8=True)
    simulated(case.build("cpu", torch.bfloat16, "normal", 1, "hopper"), SCHEDULES[2])


def test_lengths_out_of_range_are_reported():
    call = sequences_of_six_lengths()
    wrong, right = (
        call._replace(seqlens=torch.tensor([length, *LENGTHS[1:]], dtype=torch.int32)) for length in (-7, 0)
    )
    clamped = simulated(wrong, SCHEDULES[0])
    assert any("cache.seqlens" in error for error in strobe.last_errors())
    assert all(map(torch.equal, clamped, simulated(right, SCHEDULES[0]))) and strobe.last_errors() == []


def test_short_prompts_are_not_copied(monkeypatch):
    monkeypatch.undo()
    config = select(PagedProblem.from_call(sequences_of_six_lengths()), H200).forward.config
    assert config.copy is None and config.traits.cache.in_copy is None
