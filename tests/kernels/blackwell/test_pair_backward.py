"""The Blackwell backward with a pair of CTAs on the simulator, held against the oracle. It needs Triton 3.9."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests.kernels.blackwell import pair_cases
from tests.kernels.blackwell.blackwell_scenes import B200
from tests.kernels.blackwell.pair_cases import (
    CASES,
    NIGHTLY,
    ON_EACH_COMMIT,
    ORDERED,
    ORDERED_ON_EACH_COMMIT,
    PAIR,
    case,
    pair_documents,
)
from tests.kernels.hopper.hopper_cases import DTYPES, SCHEDULES

pytest.importorskip("triton", minversion="3.9")

from strobe import reference
from strobe.kernels.blackwell import pair_backward
from strobe.kernels.blackwell.traits import TENSOR_COLUMNS
from strobe.ops import attention as ops
from strobe.problem.problem import Problem
from strobe.selection.select import select
from strobe.sim import Checks
from strobe.sim.machine import Machine
from strobe.sim.semantics import Gluon
from strobe.testing import FAMILIES, Case
from tools.proof.simulate import on

ORDER = Checks(read_fences=True, atomic_order=True)
BACKWARD = ["preprocess_kernel", "backward_pair_kernel", "postprocess_kernel"]


def run_and_judge(judge, case: Case, dtype: torch.dtype, family: str, schedule: tuple[str, int]) -> None:
    call = case.build("cpu", dtype, family, seed=5, requires_grad=True, kernel=PAIR)
    with on(B200, *schedule) as run:
        judge(call, family, 5)
    assert run.reports == [] and run.launches[-3:] == BACKWARD


@pytest.mark.parametrize("name", [case.name for case in ON_EACH_COMMIT])
def test_pair(name, judge):
    """Schedules, dtypes and input families take turns."""
    n = list(CASES).index(name)
    run_and_judge(judge, CASES[name], DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], SCHEDULES[n % len(SCHEDULES)])


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_pair_with_every_input(name, family, judge):
    for n, schedule in enumerate(SCHEDULES):
        run_and_judge(judge, CASES[name], DTYPES[(n + FAMILIES.index(family)) % 2], family, schedule)


@pytest.mark.nightly
@pytest.mark.parametrize("scene", ("pair_of_a_group", "pair_unseen", "pair_documents", "pair_d192_128", "pair_d256"))
def test_a_hundred_seeds(scene):
    """Every scene whose synchronisations `test_pair_backward_barriers` takes away; without a fault, and near the first
    schedule's gradients, whose dq may be added in another order.
    """
    first = None
    for seed in range(100):
        with on(B200, "pct", seed) as run:
            found = getattr(pair_cases, scene)()
        assert run.reports == []
        first = first or found
        for gradient, wanted in zip(found[:3], first[:3]):
            torch.testing.assert_close(gradient.float(), wanted.float(), atol=1e-2, rtol=1e-2)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(2))
def test_a_hundred_seeds_give_the_same_bits_in_order(part):
    first = None
    for seed in range(50 * part, 50 * part + 50):
        with on(B200, "pct", seed, checks=ORDER) as run:
            found = pair_cases.pair_ordered()
        assert run.reports == []
        first = first or found
        assert all(map(torch.equal, found[:3], first[:3]))


def test_timed_mode_finds_the_same_bits():
    """One work tile, so that dQ is added in one order."""
    call = case("timed", 200, 256).build("cpu", torch.bfloat16, kernel=PAIR)._replace(needs_grad=True)
    out, lse = reference.forward(call)
    given = (torch.ones_like(out).to(torch.bfloat16), out.to(torch.bfloat16), lse.float(), None)
    found = []
    for mode in ("eager", "timed"):
        with on(B200, mode) as run:
            found.append(ops.BACKWARD(*given, *call.arguments))
        assert run.reports == [] and run.launches == BACKWARD
    for eager, timed in zip(*found):
        torch.testing.assert_close(eager, timed, rtol=0, atol=0)


def test_gradients_of_lse_and_any_strides_of_dout():
    """An expanded dout, whose strides TMA cannot address, is copied."""
    call = case("dlse", 130, 290, heads=(2, 1)).build("cpu", torch.bfloat16)._replace(needs_grad=True)
    out, lse = reference.forward(call)
    generator = torch.Generator().manual_seed(3)
    dlse = torch.randn(lse.shape, generator=generator)
    dout = torch.randn(out.shape, generator=generator).to(torch.bfloat16)[..., :1].expand(out.shape)
    given = (dout, out.to(torch.bfloat16), lse.float(), dlse)
    expected = ops.BACKWARD(*given, *call._replace(kernel="cpu").arguments)
    with on(B200) as run:
        found = ops.BACKWARD(*given, *call._replace(kernel=PAIR).arguments)
    assert run.reports == [] and run.launches == BACKWARD
    for gradient, wanted in zip(found[:3], expected[:3]):
        torch.testing.assert_close(gradient.float(), wanted.float(), atol=3e-2, rtol=3e-2)


def _modelled(kernel: str, tiles: int) -> float:
    """Modelled time of a backward over tiles of 128 queries and the keys of one program."""
    keys = 256 if kernel == PAIR else 128
    call = case("timed", tiles * 128, keys).build("cpu", torch.bfloat16, kernel=kernel)._replace(needs_grad=True)
    out, lse = reference.forward(call)
    with on(B200, "timed") as run:
        ops.BACKWARD(
            torch.ones_like(out).to(torch.bfloat16), out.to(torch.bfloat16), lse.float(), None, *call.arguments
        )
    return max(event.end_ns for event in run.events)


def test_a_step_takes_less_modelled_time_than_with_one_cta():
    """dP waits for no reader of dQ. Arithmetic takes the time of the CTA's own part of a tensor."""
    one, pair = ((_modelled(kernel, 5) - _modelled(kernel, 3)) / 2 for kernel in ("blackwell.backward", PAIR))
    assert 0.85 * one < pair < 0.95 * one


# ---------------------------------------------------------------- deterministic


def _ordered(case: Case, kernel: str = PAIR):
    call = case.build("cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel=kernel)
    return call._replace(deterministic=True)


@pytest.mark.parametrize("name", [case.name for case in ORDERED_ON_EACH_COMMIT])
def test_adds_are_in_order(name, judge):
    with on(B200, "lazy", 0, checks=ORDER) as run:
        judge(_ordered(ORDERED[name]), "normal", 5)
    assert run.reports == [] and run.launches[-3:] == BACKWARD


@pytest.mark.nightly
@pytest.mark.parametrize("name", ORDERED)
def test_adds_are_in_order_under_every_schedule(name, judge):
    for schedule in SCHEDULES:
        with on(B200, *schedule, checks=ORDER) as run:
            judge(_ordered(ORDERED[name]), "normal", 5)
        assert run.reports == [] and run.launches[-3:] == BACKWARD


def _gradients(call, target, schedule: tuple[str, int], **options) -> tuple[torch.Tensor, ...]:
    with on(target, *schedule, checks=ORDER, **options) as run:
        out, _ = ops.run(call)
        found = torch.autograd.grad(out, call[:3], torch.ones_like(out))
    assert run.reports == [] and run.launches[-3:] == BACKWARD
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", ("three_tiles_of_keys", "causal", "group_d192_128"))
def test_the_bits_are_those_of_any_schedule(name):
    """On two SMs, four, or with one cluster at a time, in any order of programs."""
    call = _ordered(ORDERED[name])
    first = _gradients(call, B200, ("eager", 0))
    for target, schedule, options in (
        (B200, ("lazy", 0), {}),
        (replace(B200, sm_count=4), ("pct", 3), {}),
        (B200, ("eager", 0), {"sms": 2}),
    ):
        assert all(map(torch.equal, first, _gradients(call, target, schedule, **options)))


def test_selection_says_that_a_pair_adds_in_order():
    config = str(_choice(CASES["causal"], kernel=PAIR, deterministic=True).backward.config)
    assert "a pair of CTAs" in config and "vector atomics in order" in config


# ---------------------------------------------------------------- barriers


def _table() -> dict[str, tuple[str, int]]:
    """{barrier: (where it is, arrivals)} of the table at the top of pair_backward.py."""
    lines = (pair_backward.__doc__ or "").split("Barriers  ")[1].split("\n\n")[0].splitlines()[1:]
    found = [re.match(r"    (\w+)(?:\[\w\])? +(first|each) +(\d)", line) for line in lines]
    return {match[1]: (match[2], int(match[3])) for match in found if match}


def test_the_table_names_each_barrier_its_place_and_its_arrivals():
    """A barrier in the first CTA takes arrivals of two."""
    counts: dict[int, int] = {}
    seen: dict[int, tuple[str, str]] = {}
    init, specialize = Machine.init_barrier, Gluon.warp_specialize

    def noted_init(self, address, name, count):
        counts[address] = count
        init(self, address, name, count)

    def noted(self, functions_and_args, *rest):
        arguments = dict(zip(functions_and_args[0][0].arg_names, functions_and_args[0][1]))
        for pipe, fields in vars(arguments["pipes"]).items():
            for field in ("full", "empty", ""):
                barriers = getattr(fields, field, None) if field else fields
                if getattr(barriers, "handle", None) is None or barriers.dtype.name != "int64":
                    continue
                first, apart = barriers.handle.address, barriers.handle.view.strides[0]
                place = "first" if barriers.shape[1] == 1 else "each"
                for n in range(barriers.shape[0]):
                    seen[first + n * apart] = f"{pipe}_{field}".rstrip("_"), place
        return specialize(self, functions_and_args, *rest)

    with patch.object(Machine, "init_barrier", noted_init), patch.object(Gluon, "warp_specialize", noted), on(B200):
        pair_documents()
    assert set(counts) <= set(seen), "a barrier that no pipeline holds"
    made = {seen[address][0]: (seen[address][1], count) for address, count in counts.items()}
    assert made == {name: (place, n * (2 if place == "first" else 1)) for name, (place, n) in _table().items()}


# ---------------------------------------------------------------- what selection says


def _choice(case: Case, **options):
    call = case.build("cpu", torch.bfloat16, requires_grad=True)._replace(**options)
    return select(Problem.from_call(call), B200)


@pytest.mark.parametrize("name, keys", [("causal", 256), ("causal_d192_128", 256), ("causal_group_d256", 128)])
def test_tiles_fit_the_memories(name, keys):
    traits = _choice(CASES[name], kernel=PAIR).backward.config.traits
    assert (traits.block_m, traits.block_n) == (128, keys)
    assert traits.shared_bytes() <= B200.shared_bytes and traits.tensor_columns() <= TENSOR_COLUMNS


def test_the_pair_is_the_kernel_of_wide_heads():
    """One CTA has no tile for them. It remains the kernel of narrower heads."""
    wide, narrow = _choice(CASES["causal_group_d256"]), _choice(CASES["causal"])
    assert (wide.backward.kernel.name, narrow.backward.kernel.name) == (PAIR, "blackwell.backward")
    assert "head dimensions up to 128" in dict(wide.rejections)["blackwell.backward"]


def test_cases_of_both_parts_are_named_once():
    assert len(CASES) == len(ON_EACH_COMMIT) + len(NIGHTLY)
