"""The Hopper forward's own source, through its own launch code, on the simulator, held against the oracle; and the
library that does it.

Two SMs give a program several tiles, and sizes wrap every ring; which of the table's cases are too small for that is
said by name.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.kernels.hopper.hopper_cases import (
    CAUSAL,
    DTYPES,
    H200,
    PROGRAMS,
    SCHEDULES,
    alternating_schedules,
    in_turn,
)

pytest.importorskip("triton")

from strobe.errors import KernelFault, UnsupportedProblem
from strobe.kernels import kernels
from strobe.kernels.device import tma
from strobe.kernels.device.persistent_launch import work_of
from strobe.kernels.hopper import kernel as hopper
from strobe.kernels.hopper import launch_forward
from strobe.kernels.protocol import Plan
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.kernels.runtime.tma_requirements import rows_per_query
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from strobe.testing import FAMILIES, Case, assert_as_good_as
from strobe.testing.cases import laid_out
from tests.kernels.hopper.forward_cases import CASES, LARGE, SPANS, _case, _packed, _traits
from tools.proof.simulate import on, simulated

pytestmark = pytest.mark.usefixtures("as_of_many_keys")


def run_and_judge(case: Case, dtype: torch.dtype, family: str, schedule: tuple[str, int]) -> None:
    call = case.build("cpu", dtype, family, seed=5, kernel="hopper")
    found, run = simulated(call, H200, *schedule)
    assert run.reports == [] and run.launches == ["forward_kernel"]
    assert_as_good_as(found, call)


LONG = (
    *(case.name for case in SPANS if case.head_dim not in (64, 128)),
    "d64_dense", "d64_window_left_softcap", "head_dims_192_128_window", "one_key_head", "stored_gaps", "window_both",
    "window_zero",
)  # fmt: skip


@pytest.mark.parts(8)
@pytest.mark.nightly_cases(*(f"{name}-*" for name in LONG))
@pytest.mark.parametrize("name, schedule", alternating_schedules(CASES))
def test_hopper_forward(name, schedule):
    """All cases; the kind of schedule, dtypes and input families take turns."""
    n = list(CASES).index(name) + 2 * SCHEDULES.index(schedule)
    run_and_judge(CASES[name], DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], schedule)


def _is_usual_at_64(traits: hopper.ForwardTraits) -> bool:
    return (traits.block_d, traits.block_dv) == (64, 64) and not (
        traits.softcap or traits.packed or traits.mask.left or traits.mask.documents
    )


OF_FOUR = [name for name, case in CASES.items() if _is_usual_at_64(_traits(case))]


@pytest.mark.nightly_cases(
    "d64_causal_more_rows_sinks-*", "d64_dense-*", "d64_grouped_gaps-*", "d64_one_row-*", "head_dim_40-*"
)
@pytest.mark.parametrize("name, schedule", alternating_schedules(OF_FOUR))
def test_hopper_forward_of_four_consumers(name, schedule, monkeypatch):
    """The same of fewer keys a row, though still with early weights."""
    monkeypatch.setattr(hopper, "FEW_KEYS_TUNINGS", {(64, 64): (float("inf"), hopper.SHORT_RANGE_TUNINGS[64, 64])})
    traits = _traits(CASES[name])
    assert traits.tuning.consumers == 4 and traits.early
    n = OF_FOUR.index(name) + 2 * SCHEDULES.index(schedule)
    run_and_judge(CASES[name], DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], schedule)


@pytest.fixture
def as_of_few_keys(monkeypatch):
    """All as `select` has it for these cases: without early weights, d128 in tiles of 64 keys whose consumers change
    places.
    """
    for name, value in AS_IT_IS.items():
        monkeypatch.setattr(hopper, name, value)
    CACHE.clear()


AS_IT_IS = {name: getattr(hopper, name) for name in ("EARLY_KEYS", "FEW_KEYS_TUNINGS")}
OF_FEW = [name for name, case in CASES.items() if not _traits(case).early]
SHORT_OF_FEW = {
    "causal",
    "causal_more_rows_sinks",
    "softcap",
    "grouped",
    "packed_causal_other_keys",
    "above_a_tile",
    "joined_threes_wide",
}


@pytest.mark.nightly_cases(*(f"{name}-*" for name in OF_FEW if name not in SHORT_OF_FEW))
@pytest.mark.parametrize("name, schedule", alternating_schedules(OF_FEW))
def test_hopper_forward_of_few_keys(name, schedule, as_of_few_keys):
    traits = _traits(CASES[name])
    assert not traits.early and (traits.swap_consumers or name not in SHORT_OF_FEW)
    n = OF_FEW.index(name) + 2 * SCHEDULES.index(schedule)
    run_and_judge(CASES[name], DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], schedule)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_hopper_forward_under_every_schedule(name, family):
    for dtype, schedule in in_turn(list(CASES).index(name), family):
        run_and_judge(CASES[name], dtype, family, schedule)


@pytest.mark.parametrize("name", [case.name for case in LARGE])
def test_sizes_wrap_the_rings_and_give_a_program_two_tiles(name):
    case = CASES[name]
    tuning = _traits(case).tuning
    pack_gqa = tuning.pack_gqa
    rows = hopper.ROWS * tuning.consumers // rows_per_query(pack_gqa)
    assert case.batch * case.heads[0] // pack_gqa * -(-case.seqlen_q // rows) >= 2 * PROGRAMS
    assert -(-case.keys // tuning.block_n) > tuning.stages


@pytest.mark.nightly_cases("packed_causal_other_keys", "packed_d192", "packed_d64_window")
@pytest.mark.parametrize("name", ("packed_causal_other_keys", "packed_d64_window", "packed_d192", "joined_packed"))
def test_what_neighbours_hold_does_not_matter(name):
    """Rows of another sequence share tiles with a sequence's last rows: NaN there changes no bit."""
    case = CASES[name]
    call = case.build("cpu", torch.bfloat16, "normal", 5, kernel="hopper")
    plain, _ = simulated(call, H200)
    n = 3
    (q_from, q_to), (k_from, k_to) = (offsets[n : n + 2].tolist() for offsets in (call.cu_seqlens_q, call.cu_seqlens_k))
    poisoned = [torch.full_like(t, float("nan")) for t in call[:3]]
    for into, tensor, first, last in zip(poisoned, call[:3], (q_from, k_from, k_from), (q_to, k_to, k_to)):
        into[first:last] = tensor[first:last]
    found, run = simulated(call._replace(q=poisoned[0], k=poisoned[1], v=poisoned[2]), H200)
    assert run.reports == [] and q_to > q_from
    assert torch.equal(found.out[q_from:q_to], plain.out[q_from:q_to])
    assert torch.equal(found.lse[:, q_from:q_to], plain.lse[:, q_from:q_to])


@pytest.mark.nightly_cases(
    "documents_causal-*", "documents_d96_scattered-*", "documents_scattered-*", "key_lengths_causal-*"
)
@pytest.mark.parametrize(
    "name, rows, keys",
    [
        ("documents_causal", (131, 195), (131, 195)),
        ("documents_other_keys_causal", (100, 300), (220, 420)),
        ("documents_scattered", (100, 160), (100, 160)),
        ("documents_d96_scattered", (70, 200), (70, 200)),
        ("key_lengths_causal", (0, 300), (0, 65)),
    ],
)
def test_what_other_documents_and_hidden_keys_hold_does_not_matter(name, rows, keys):
    call = CASES[name].build("cpu", torch.bfloat16, "normal", 5, kernel="hopper")
    plain, _ = simulated(call, H200)
    own, seen = (torch.zeros(t.shape[1], dtype=torch.bool) for t in (call.q, call.k))
    own[slice(*rows)] = seen[slice(*keys)] = True
    if call.ids_q is not None:  # all of the document
        own, seen = (ids[0] == call.ids_q[0, rows[0]] for ids in (call.ids_q, call.ids_k))
    poisoned = [torch.full_like(t, float("nan")) for t in call[:3]]
    for into, tensor, part in zip(poisoned, call[:3], (own, seen, seen)):
        into[0, part] = tensor[0, part]
    found, run = simulated(call._replace(q=poisoned[0], k=poisoned[1], v=poisoned[2]), H200)
    assert run.reports == [] and not found.out[0, own].isnan().any()
    assert torch.equal(found.out[0, own], plain.out[0, own])
    assert torch.equal(found.lse[0, :, own], plain.lse[0, :, own])


SCATTERED = ("documents_scattered", "documents_scattered_causal", "documents_d96_scattered", "documents_d256_scattered")
EACH_COMMIT = (("documents_scattered_causal", False), ("documents_d256_scattered", True))
SCATTERED_CASES = [
    pytest.param(name, early, marks=() if (name, early) in EACH_COMMIT else pytest.mark.nightly)
    for name in SCATTERED
    for early in (False, True)
]  # fmt: skip


@pytest.mark.nightly_cases("documents_scattered_causal-False")
@pytest.mark.parametrize("name, early", SCATTERED_CASES)
def test_only_tiles_that_met_no_numbers_of_others_come_back(name, early, monkeypatch):
    """Told from what landed: a tile done again loads and stores again. Its own numbers that are none stay what they
    are.
    """
    monkeypatch.setattr(hopper, "early", lambda problem: early)
    call = CASES[name].build("cpu", torch.bfloat16, "normal", 5, kernel="hopper")
    ids = call.ids_k[0].tolist()
    own, other = ids.index(0), next(i for i, one in enumerate(ids) if one == 1)
    landed = []
    for value, keys in ((0.0, []), (1e30, [other]), (float("inf"), [other]), (float("nan"), [own])):
        held = call._replace(v=call.v.clone())
        held.v[0, keys] = value
        found, run = simulated(held, H200)
        assert run.reports == []
        assert torch.equal(found.out.isfinite().all(-1), expected_finite(held))
        landed.append(run.stats["landed"])
    assert landed[0] == landed[1] < landed[2]


@pytest.mark.parametrize("width, packed", [(64, False), (64, True), (128, True)])
def test_consumers_without_rows_are_those_of_a_causal_sequences_first_tile(width, packed):
    """It sees fewest keys: told from how much landed, of two tiles of which the first has rows for one consumer."""

    def case(length: int) -> Case:
        return (
            _packed("", (length,), width=width, heads=(1, 1), mask=CAUSAL)
            if packed
            else _case("", length, None, width, heads=(1, 1), mask=CAUSAL)
        )

    tuning = _traits(case(300)).tuning
    length = tuning.block_m + 4
    _, run = simulated(case(length).build("cpu", torch.bfloat16, "normal", 5, kernel="hopper"), H200)
    assert run.reports == []
    seen = [
        -(-min(first + hopper.ROWS, length) // tuning.block_n) for first in range(0, length, hopper.ROWS)
    ]  # tiles of keys by each 64 rows
    loads, products, stores = seen[0] + seen[-1], sum(seen), 2 if tuning.half_staged else 1
    assert run.stats["landed"] == 2 * (loads + products) + 2 * tuning.consumers * (1 + stores)


def test_consumers_of_short_causal_rows_multiply_as_much_as_each_other(as_of_few_keys):
    """They change places from tile to tile: the last rows of a tile see more keys, and were always the same one's,
    which had 20 of 36 products.
    """
    case = _case("", 512, None, 128, heads=(2, 2), mask=CAUSAL)
    assert _traits(case).swap_consumers
    _, run = simulated(case.build("cpu", torch.bfloat16, "normal", 5, kernel="hopper"), H200, "timed")
    products = Counter((one.cta, one.name) for one in run.events if one.kind == "mma")
    assert run.reports == [] and len(products) == 2 * PROGRAMS * 2 and set(products.values()) == {18}


def expected_finite(call: Call) -> torch.Tensor:
    """Rows [B, S_q, H] whose out has numbers alone: those of documents with no value that is none among the keys that
    they see.
    """
    seen = call.mask.dense(call.q.shape[1], call.k.shape[1]).expand(call.q.shape[0], -1, -1)
    bad = (~call.v.isfinite()).any(-1).any(-1)
    return ~(seen & bad[:, None, :]).any(-1)[..., None].expand(-1, -1, call.q.shape[2])


def test_the_table_has_every_tiling():
    used = {hopper.tiled(case.head_dim, case.head_dim_v or case.head_dim) for case in LARGE}
    assert used == set(hopper.TUNINGS)


# ---------------------------------------------------------------- with the portable backward, and into a given out


@pytest.mark.nightly_cases("causal_more_rows_sinks", "d64_window_left_softcap")
@pytest.mark.parametrize("name", ("causal_more_rows_sinks", "d64_window_left_softcap", "head_dims_192_128_causal"))
def test_gradients_from_its_lse(name, judge):
    """The portable backward reads the Hopper forward's lse: natural logarithm, float32, -inf where a row sees no
    key."""
    call = CASES[name].build("cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="portable.backward")
    with on(H200) as run:
        judge(call, "normal", 5)
    assert run.reports == [] and run.launches == ["forward_kernel"] * 2 + [
        "delta_kernel",
        "keys_kernel",
        "queries_kernel",
    ]


def test_lse_of_rows_without_keys():
    call = CASES["causal_more_rows"].build("cpu", torch.bfloat16, kernel="hopper")
    found, _ = simulated(call, H200)
    assert found.lse.dtype == torch.float32
    assert found.lse[..., :135].eq(-torch.inf).all() and found.lse[..., 135:].isfinite().all()
    assert found.out[:, :135].eq(0).all()


@pytest.mark.parametrize("storage", ("odd_offset", "gaps", "heads_first"))
def test_out_that_tma_cannot_write(storage):
    """A given out lies as it likes: what TMA cannot address is written elsewhere and copied."""
    call = CASES["dense"].build("cpu", torch.bfloat16, kernel="hopper")
    out = laid_out(torch.full((1, 300, 2, 128), float("nan"), dtype=torch.bfloat16), storage, 0)
    assert (tma.addressable(out) is out) == (storage != "odd_offset")
    with on(H200):
        assert_as_good_as(ops.run(call, out), call)


def test_a_width_of_v_that_tma_cannot_write():
    """v is a slice whose rows TMA can read; out's own rows of 20 columns it could not write."""
    q, k, v = (
        torch.randn(1, 200, 2, width, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
        for width in (32, 32, 24)
    )
    call = Call(q, k, v[..., :20], kernel="hopper")
    found, run = simulated(call, H200)
    assert run.reports == []
    assert_as_good_as(found, call)


def test_more_tiles_than_a_launch_can_count():
    q = torch.empty(8, dtype=torch.bfloat16).expand(2**16, 2, 2**15, 8)
    call = Call(q, q, q)
    problem = Problem.from_call(call)
    plan = Plan(hopper.FORWARD, problem, H200, hopper.FORWARD.config(problem, H200), ())
    with pytest.raises(KernelFault, match=r"hopper\.forward: 2147483648 tiles .* split the batch"):
        launch_forward.forward_launch(plan, call, q, (q,))


@pytest.mark.parametrize(
    "batch, seqlen, heads, width, section",
    [
        (32, 512, (16, 16), 128, 64),  # of 512 heads, whose keys and values take 256 KiB each, few keys a row
        (32, 512, (16, 16), 256, 64),  # of so few heads there is no tile for each SM
        (16, 1024, (16, 16), 128, 64),
        (8, 2048, (16, 16), 128, 32),
        (8, 2048, (16, 16), 192, 16),  # of 128: a divisor for 21
        (1, 2048, (33, 33), 128, 17),  # 32 would leave one alone
        (1, 512, (16, 16), 128, 16),  # all: no program has two tiles
        (4, 4096, (16, 16), 128, 16),
        (4, 4096, (32, 16), 128, 128),  # all: a group's heads share keys already
        (4, 4096, (16, 16), 96, 64),
        (2, 8192, (16, 16), 128, 32),
        (1, 2048, (64, 8), 128, 64),  # 8 MiB in all
    ],
)
def test_a_section_of_causal_heads_stays_in_l2(batch, seqlen, heads, width, section):
    q, k = (torch.empty(batch, seqlen, count, width, dtype=torch.bfloat16, device="meta") for count in heads)
    call = Call(q, k, k, right=0)
    problem = Problem.from_call(call)
    plan = Plan(hopper.FORWARD, problem, H200, hopper.FORWARD.config(problem, H200), ())
    tiles, sizes, *_ = work_of(plan, call)
    assert sizes[5] == section and tiles == -(-batch * heads[0] // section) * section * sizes[4]


# ---------------------------------------------------------------- the library


@pytest.mark.parametrize(
    "target, kernel, ran", [("A100", "", "portable"), ("H200", "", "hopper"), ("H200", "portable", "portable")]
)
def test_what_select_gives_is_what_runs(target, kernel, ran, monkeypatch):
    called = []
    for family in ("hopper", "portable"):
        forward = type(next(one for one in kernels("forward") if one.name == f"{family}.forward"))
        monkeypatch.setattr(forward, "run", _noting(forward.run, family, called))
    call = Case("small", 70, 90, batch=1).build("cpu", torch.bfloat16)
    found, run = simulated(call, FAKES[target], kernel=kernel)
    assert called == [ran] and run.reports == []
    assert_as_good_as(found, call)


def _noting(run, family, called):
    def noted(self, *arguments):
        called.append(family)
        run(self, *arguments)

    return noted


def test_a_kernel_that_cannot_run_it_is_not_replaced():
    with pytest.raises(UnsupportedProblem, match="float16 and bfloat16 only"):
        simulated(Case("wide", 8).build("cpu", torch.float32), H200, kernel="hopper")


def test_what_is_not_written_is_nan_and_what_is_written_outside_is_noticed(monkeypatch):
    call = Case("small", 70, 90, batch=1).build("cpu", torch.bfloat16)
    monkeypatch.setattr(hopper.HopperForward, "run", lambda self, plan, call, tensors, workspace: None)
    found, _ = simulated(call, H200)
    assert found.out.isnan().all() and found.lse.isnan().all()
    beyond = lambda out: out.as_strided((1,), (1,), out.storage_offset() + out.numel())
    monkeypatch.setattr(
        hopper.HopperForward, "run", lambda self, plan, call, tensors, workspace: beyond(tensors.out).fill_(0)
    )
    with pytest.raises(AssertionError, match="elements outside it were written"):
        simulated(call, H200)
    monkeypatch.setattr(hopper.HopperForward, "run", lambda self, plan, call, tensors, workspace: call.k.fill_(0))
    with pytest.raises(AssertionError, match=r"k: .* overwritten"):
        simulated(call, H200)
