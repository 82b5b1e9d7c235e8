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
    NIGHTLY,
    PROGRAMS,
    SCHEDULES,
    WITHOUT_BOUND,
    alternating_schedules,
    band,
    key_lengths,
    prefix,
    runs,
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
from strobe.kernels.runtime.tma_requirements import fold_of
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from strobe.testing import FAMILIES, Case, assert_as_good_as
from strobe.testing.cases import laid_out
from tools.proof.simulate import on, simulated

pytestmark = pytest.mark.usefixtures("as_of_many_keys")


def _case(name: str, seqlen_q: int = 300, seqlen_k: int | None = 390, width: int = 128, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, **{"head_dim": width, "batch": 1, "heads": (2, 2)} | options)


def _narrow(name: str, seqlen_q: int = 390, seqlen_k: int | None = 520, **options) -> Case:
    return _case(name, seqlen_q, seqlen_k, 64, **options)


def _wide(name: str, seqlen_q: int = 260, seqlen_k: int | None = 200, **options) -> Case:
    return _case(name, seqlen_q, seqlen_k, 256, **options)


LARGE = (
    _case("dense"),
    _case("whole_tiles", 256, 512),
    _case("causal", 400, None, mask=CAUSAL),
    _case("causal_more_keys", 200, 500, mask=CAUSAL),
    _case("causal_more_rows", 520, 385, mask=CAUSAL),  # the first tile of a head sees no key
    _case("causal_more_rows_sinks", 520, 385, mask=CAUSAL, sinks=True),
    _case("window_left", 300, 420, mask=band(70, None)),
    _case("window_right", 300, 420, mask=band(None, 70)),
    _case("window_both", 400, None, mask=band(150, 20)),
    _case("window_zero", 400, None, mask=band(0, 0)),
    _case("window_wider_than_all", mask=band(5000, 5000)),
    _case("window_before_the_keys", 520, 390, mask=band(10, 10)),  # rows at the top see no key
    _case("softcap", mask=CAUSAL, softcap=3.0),
    _case("sinks", sinks=True),
    _case("sinks_without_bound", 520, 385, heads=(4, 2), mask=CAUSAL, sinks=WITHOUT_BOUND),
    _case("softcap_sinks_window", 400, None, mask=band(100, 0), softcap=5.0, sinks=True),
    _case("grouped", 384, heads=(4, 2), mask=CAUSAL),
    _case("one_key_head", 200, 390, heads=(5, 1)),
    _case("batch_of_three", 200, 390, batch=3, heads=(2, 1)),
    _case("scale", scale=0.3),
    _case("stored_heads_first", 380, heads=(4, 2), storage="heads_first", mask=CAUSAL),
    _case("stored_gaps", 380, heads=(4, 2), storage="gaps"),
    _case("stored_mixed", 380, heads=(4, 2), storage="mixed", mask=CAUSAL),
    _case("head_dim_96", width=96, mask=CAUSAL),
    _case("head_dims_72_120", width=72, head_dim_v=120),
    _narrow("d64_dense"),
    _narrow("d64_causal", 600, None, mask=CAUSAL),
    _narrow("d64_causal_more_rows_sinks", 800, 513, mask=CAUSAL, sinks=True),
    _narrow("d64_window", 600, None, mask=band(130, 60)),
    _narrow("d64_window_left_softcap", 600, 520, mask=band(40, None), softcap=7.0),
    _narrow("d64_grouped_gaps", heads=(4, 1), storage="gaps", mask=CAUSAL),
    _case("head_dim_8", 390, 520, 8, mask=CAUSAL),
    _case("head_dim_40", 390, 520, 40),
    _wide("d256_dense"),
    _wide("d256_causal", 330, None, mask=CAUSAL),
    _wide("d256_causal_more_rows_sinks", 400, 193, mask=CAUSAL, sinks=True),
    _wide("d256_window_softcap", 330, None, mask=band(60, 10), softcap=4.0, heads=(4, 2)),
    _case("head_dim_192", 260, 260, 192, mask=CAUSAL),
    _case("head_dim_160_window", 330, 260, 160, mask=band(60, 20)),
    _case("head_dims_192_128", 260, 390, 192, head_dim_v=128),
    _case("head_dims_192_128_causal", 390, None, 192, head_dim_v=128, mask=CAUSAL, sinks=True),
    _case("head_dims_192_128_window", 500, None, 192, head_dim_v=128, mask=band(70, 5), heads=(4, 2)),
    _case("head_dims_200_88", 260, 200, 200, head_dim_v=88, mask=CAUSAL),
)
LENGTHS = (130, 0, 1, 300, 65, 64)


def _packed(
    name: str,
    lengths_q: tuple[int, ...] = LENGTHS,
    lengths_k: tuple[int, ...] | None = None,
    width: int = 128,
    **options,
) -> Case:
    return _case(name, lengths_q=lengths_q, lengths_k=lengths_k, width=width, **options)


PACKED = (
    _packed("packed"),
    _packed("packed_causal", mask=CAUSAL),
    _packed(
        "packed_causal_other_keys",
        (130, 0, 1, 200, 65),
        (100, 3, 150, 390, 0),
        mask=CAUSAL,
        outside=(5, 70),
        sinks=True,
    ),
    _packed("packed_window_softcap", mask=band(70, 20), softcap=5.0, heads=(4, 2), promised=True),
    _packed("packed_gaps", mask=CAUSAL, storage="gaps"),
    _packed("packed_heads_first", mask=CAUSAL, storage="heads_first", heads=(4, 1)),
    _packed("packed_d64_causal", (400, 30, 0, 193), width=64, mask=CAUSAL, outside=(3, 3)),
    _packed("packed_d64_window", (400, 30, 192, 193), width=64, mask=band(100, 0)),
    _packed("packed_d96", width=96, mask=CAUSAL),
    _packed("packed_d192", width=192, mask=CAUSAL),
    _packed("packed_d192_128", width=192, head_dim_v=128, mask=CAUSAL),
    _packed("packed_d256", width=256, mask=CAUSAL, outside=(1, 0)),
    _packed("packed_promised_outside", (20, 5), outside=(30, 140), promised=True, mask=CAUSAL),
    _packed("packed_nothing_but_empty", (0, 0, 0), (20, 0, 7), outside=(4, 5)),
)
SMALL = (  # no ring wraps, or a program has one tile: lengths around 0 and a tile
    _case("one", 1, 1),
    _case("one_row", 1, 700),
    _case("one_row_causal", 1, 700, heads=(4, 1), mask=CAUSAL),
    _case("one_key", 300, 1),
    _case("one_key_causal", 300, 1, mask=CAUSAL),
    _case("three", 3, 3, mask=CAUSAL),
    _case("below_a_tile", 63, 127),
    _case("above_a_tile", 65, 129, mask=CAUSAL),
    _narrow("d64_one_row", 1, 700, batch=3),
    _narrow("d64_odd", 193, 129, mask=CAUSAL),
    _wide("d256_one_row", 1, 300, mask=band(100, None)),
    _case("one_head", 300, 390, heads=(1, 1), mask=CAUSAL),
)
JOINED = (  # heads of a group share a tile; groups of three leave a row of each query without a head
    _case("joined_one_row", 1, 390, heads=(16, 2)),
    _case("joined_sinks_without_bound", 3, 200, heads=(4, 1), mask=CAUSAL, sinks=WITHOUT_BOUND),
    _case("joined_three_rows", 3, 260, heads=(16, 1), mask=CAUSAL, sinks=True),
    _case("joined_window", 129, 300, heads=(4, 1), mask=band(40, 5), softcap=5.0),
    _case("joined_threes", 63, 200, 96, heads=(6, 2), batch=2, storage="gaps", sinks=True),
    _case("joined_d64", 129, 300, 64, heads=(8, 2), mask=CAUSAL),
    _case("joined_d256", 63, 200, 256, heads=(4, 2), mask=CAUSAL, softcap=4.0, sinks=True),
    _case(
        "joined_packed",
        lengths_q=(3, 0, 1, 63),
        lengths_k=(140, 3, 0, 130),
        heads=(6, 2),
        mask=CAUSAL,
        outside=(3, 5),
        sinks=True,
    ),
    _case("joined_pairs_d64", 63, 300, 64, heads=(4, 2), mask=band(70, None), softcap=5.0),
    _case("joined_threes_d64", 5, 129, 64, heads=(6, 2), sinks=True),
    _case("joined_threes_wide", 61, 260, heads=(3, 1), batch=2, mask=CAUSAL),
    _case("joined_more_rows", 150, 129, heads=(8, 2), mask=CAUSAL, storage="mixed"),  # rows at the top see no key
    _case("joined_sixteen_d192_128", 33, 300, 192, head_dim_v=128, heads=(16, 1), mask=band(70, None)),
    _case("joined_d192", 5, 200, 192, heads=(8, 2), mask=band(20, 20), sinks=True),
    _case("joined_d256_128", 63, 200, 256, head_dim_v=128, heads=(8, 4), mask=CAUSAL),
    _case("joined_eight_d256", 5, 200, 256, heads=(16, 2), mask=CAUSAL),
    _case("joined_all", 3, 200, heads=(64, 1), mask=CAUSAL),
    _case("joined_all_d64", 4, 300, 64, heads=(64, 1), mask=CAUSAL, sinks=True),
    _packed(
        "joined_packed_d64_window",
        (40, 1, 0, 7),
        width=64,
        heads=(8, 2),
        mask=band(20, 20),
        outside=(2, 0),
        promised=True,
    ),
    _packed("joined_packed_d192_128", (3, 63), (90, 150), width=192, head_dim_v=128, heads=(4, 2), sinks=True),
    _packed("joined_packed_d256", (5, 0, 60), (130, 70, 200), width=256, heads=(4, 1), mask=CAUSAL),
)
FOUR = (130, 1, 64, 205)
SPANS = (  # rows of a batch entry see different spans of keys
    _case("documents", 400, None, batch=2, mask=runs(FOUR)),
    _case("documents_causal", 400, None, batch=2, mask=runs(FOUR, also=CAUSAL)),
    _case("documents_causal_gaps", 400, None, storage="gaps", mask=runs(FOUR, also=CAUSAL)),
    _case(
        "documents_window_softcap_sinks",
        400,
        None,
        heads=(4, 2),
        mask=runs((300, 100), also=band(70, 20)),
        softcap=5.0,
        sinks=True,
    ),
    _case("documents_scattered", 300, None, batch=2, mask=runs((100, 60, 90, 20, 30), (0, 1, 0, 2, 1))),
    _case(
        "documents_scattered_causal",
        300,
        None,
        batch=2,
        mask=runs((100, 60, 90, 20, 30), (0, 1, 0, 2, 1), also=CAUSAL),
        sinks=True,
    ),
    _case(
        "documents_padded_causal_sinks",
        300,
        None,
        batch=2,
        mask=runs((90, 20, 170, 20), (3, -1, 0, -1), also=CAUSAL),
        sinks=True,
    ),
    _case(
        "documents_other_keys_causal", 300, 420, mask=runs((100, 200), (0, 1), (150, 70, 200), (0, 5, 1), also=CAUSAL)
    ),
    _case(
        "documents_other_keys_window",
        300,
        420,
        mask=runs((100, 150, 50), (0, 1, 7), (150, 70, 200), (0, 5, 1), also=band(160, 40)),
    ),
    _case(
        "documents_lengths",
        300,
        None,
        batch=2,
        heads=(2, 1),
        mask=runs((200, 100), also=key_lengths(260, 90, also=CAUSAL)),
    ),
    _case(
        "documents_heads_first",
        200,
        None,
        batch=3,
        storage="heads_first",
        heads=(2, 1),
        mask=runs((130, 70), also=CAUSAL),
    ),
    _case("documents_gaps_between_entries", 200, None, batch=2, storage="gaps", mask=runs((130, 70), also=CAUSAL)),
    _case("key_lengths_mixed", 200, 300, batch=3, storage="mixed", mask=key_lengths(300, 0, 130)),
    _case("documents_one_row", 1, 390, mask=runs((1,), (4,), (200, 190), (0, 4))),
    _case("documents_d96", 300, None, 96, mask=runs((100, 200), also=CAUSAL)),
    _case("documents_d96_scattered", 300, None, 96, mask=runs((70, 130, 100), (0, 1, 0))),
    _case("documents_d192", 200, None, 192, mask=runs((70, 130), also=CAUSAL), heads=(2, 1)),
    _case("documents_d192_128", 300, None, 192, head_dim_v=128, mask=runs((200, 100))),
    _narrow("documents_d64", 400, None, batch=2, mask=runs((193, 7, 200), also=CAUSAL)),
    _narrow("documents_d64_window_scattered", 400, None, mask=runs((150, 100, 150), (0, 1, 0), also=band(100, 0))),
    _wide("documents_d256", 260, None, mask=runs((130, 130), also=CAUSAL)),
    _wide("documents_d256_scattered", 200, None, mask=runs((50, 100, 50), (0, 1, 0))),
    _case("key_lengths", 200, 390, batch=3, mask=key_lengths(390, 0, 130)),
    _case("key_lengths_causal", 300, 390, batch=3, heads=(2, 1), mask=key_lengths(65, 390, 257, also=CAUSAL)),
    _case("key_lengths_window_sinks", 300, None, batch=2, mask=key_lengths(129, 300, also=band(70, 10)), sinks=True),
    _narrow("key_lengths_d64_softcap", 300, None, batch=2, mask=key_lengths(1, 300, also=CAUSAL), softcap=4.0),
    _wide("key_lengths_d256", 200, batch=2, mask=key_lengths(200, 63)),
    _case("prefix", 300, 390, batch=3, heads=(2, 1), mask=prefix(130, 0, 390)),
    _case("prefix_right_bound", 400, None, mask=prefix(200, also=band(None, 90))),
    _case(
        "prefix_left_bound_lengths_sinks",
        400,
        None,
        batch=2,
        mask=prefix(150, 70, also=key_lengths(300, 140, also=band(180, None))),
        sinks=True,
    ),
    _case("prefix_more_rows", 520, 385, mask=prefix(65)),
    _case("prefix_documents", 400, None, batch=2, mask=runs(FOUR, also=prefix(180, 20))),
    _case("prefix_documents_scattered", 300, None, 96, mask=runs((100, 60, 90, 50), (0, 1, 0, 1), also=prefix(200))),
    _narrow("prefix_d64_softcap", 400, None, batch=2, mask=prefix(100, 333), softcap=4.0),
    _wide("prefix_d256", 200, batch=2, mask=prefix(50, 130)),
    _case("joined_prefix", 40, 300, batch=2, heads=(8, 2), mask=prefix(280, 10)),
    _case("joined_documents", 63, 300, heads=(8, 2), mask=runs((20, 43), (), (100, 200), also=CAUSAL), sinks=True),
    _case("joined_key_lengths_d64", 5, 300, 64, batch=3, heads=(6, 2), mask=key_lengths(300, 77, 0)),
)
CASES = {case.name: case for case in (*LARGE, *PACKED, *SMALL, *JOINED, *SPANS)}


def _form(case: Case) -> hopper.Form:
    problem = Problem.from_call(case.build("cpu", torch.bfloat16))
    return hopper.FORWARD.config(problem, H200).form


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


@pytest.mark.nightly_cases(*(f"{name}-*" for name in LONG))
@pytest.mark.parametrize("name, schedule", alternating_schedules(CASES))
def test_hopper_forward(name, schedule):
    """All cases; the kind of schedule, dtypes and input families take turns."""
    n = list(CASES).index(name) + 2 * SCHEDULES.index(schedule)
    run_and_judge(CASES[name], DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], schedule)


def _is_usual_at_64(form: hopper.Form) -> bool:
    return (form.block_d, form.block_dv) == (64, 64) and not (
        form.softcap or form.packed or form.mask.left or form.mask.documents
    )


OF_FOUR = [name for name, case in CASES.items() if _is_usual_at_64(_form(case))]


@pytest.mark.nightly_cases(
    "d64_causal_more_rows_sinks-*", "d64_dense-*", "d64_grouped_gaps-*", "d64_one_row-*", "head_dim_40-*"
)
@pytest.mark.parametrize("name, schedule", alternating_schedules(OF_FOUR))
def test_hopper_forward_of_four_consumers(name, schedule, monkeypatch):
    """The same of fewer keys a row, though still with early weights."""
    monkeypatch.setattr(hopper, "FEW", {(64, 64): (float("inf"), hopper.PIECES[64, 64])})
    form = _form(CASES[name])
    assert form.tuning.consumers == 4 and form.early
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


AS_IT_IS = {name: getattr(hopper, name) for name in ("EARLY_KEYS", "FEW")}
OF_FEW = [name for name, case in CASES.items() if not _form(case).early]
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
    form = _form(CASES[name])
    assert not form.early and (form.trades or name not in SHORT_OF_FEW)
    n = OF_FEW.index(name) + 2 * SCHEDULES.index(schedule)
    run_and_judge(CASES[name], DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], schedule)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_hopper_forward_under_every_schedule(name, family):
    for dtype in DTYPES:
        for schedule in NIGHTLY:
            run_and_judge(CASES[name], dtype, family, schedule)


@pytest.mark.parametrize("name", [case.name for case in LARGE])
def test_sizes_wrap_the_rings_and_give_a_program_two_tiles(name):
    case = CASES[name]
    tuning = _form(case).tuning
    joined = tuning.joined
    rows = hopper.ROWS * tuning.consumers // fold_of(joined)
    assert case.batch * case.heads[0] // joined * -(-case.seqlen_q // rows) >= 2 * PROGRAMS
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

    tuning = _form(case(300)).tuning
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
    assert _form(case).trades
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


# ---------------------------------------------------------------- heads that share a tile


SHARING = tuple(case.name for case in JOINED)
SHARING_ALSO = (
    "d64_grouped_gaps",
    "one_row_causal",
    "d256_window_softcap",
    "packed_window_softcap",
    "head_dims_192_128_window",
    "joined_documents",
    "joined_key_lengths_d64",
    "documents_window_softcap_sinks",
    "key_lengths_causal",
    "prefix",
    "joined_prefix",
    "sinks_without_bound",
)
APART = (
    "documents_d192",
    "documents_lengths",
    "documents_heads_first",
    "grouped",
    "one_key_head",
    "batch_of_three",
    "packed_heads_first",
    "stored_heads_first",
    "stored_gaps",
    "stored_mixed",
)


def test_cases_share_tiles_or_do_not_as_their_names_say():
    forms = {name: _form(case) for name, case in CASES.items() if case.heads[0] > case.heads[1]}
    shared = {name for name, form in forms.items() if form.tuning.joined > 1}
    assert shared == {*SHARING, *SHARING_ALSO} and forms.keys() - shared == set(APART)
    assert all(forms[name].group == 1 for name in shared) and all(forms[name].group > 1 for name in APART)
    wanted = {hopper.tiled(case.head_dim, case.head_dim_v or case.head_dim) for case in JOINED}
    assert wanted == set(hopper.TUNINGS)


@pytest.mark.parametrize(
    "rows, heads, width, joined, packed",
    [
        (1, (8, 1), 128, 8, 8),
        (1, (8, 8), 128, 1, 1),
        (3, (6, 2), 128, 3, 3),
        (64, (2, 1), 128, 2, 2),
        (65, (2, 1), 128, 1, 2),
        (128, (8, 1), 128, 1, 8),
        (129, (2, 1), 128, 2, 1),
        (192, (8, 1), 128, 8, 1),
        (4096, (8, 1), 128, 1, 1),
        (1, (64, 1), 128, 64, 64),
        (1, (65, 1), 128, 1, 1),
        (63, (3, 1), 96, 3, 3),
        (96, (3, 1), 96, 1, 1),
        (96, (2, 1), 64, 2, 2),
        (97, (2, 1), 64, 1, 2),
        (256, (8, 1), 64, 8, 1),
        (192, (8, 1), 64, 1, 8),
    ],
)
def test_heads_share_tiles_where_that_makes_fewer(rows, heads, width, joined, packed):
    """As many rows a query as the next power of two: three heads take four. A tile has 128, at d64 192, of packed ones
    at d128 192, at d64 256.
    """
    assert _form(_case("shared", rows, 130, width, heads=heads)).tuning.joined == joined
    assert _form(_packed("shared", (rows, rows), (130, 130), width, heads=heads)).tuning.joined == packed


def test_packed_queries_whose_heads_lie_apart_do_not_share_tiles():
    """TMA has no dimension left for them; dense ones may lie as they like."""
    for storage, joined in (("contiguous", 4), ("gaps", 1), ("heads_first", 1)):
        assert _form(_packed("apart", (3, 7), heads=(8, 2), storage=storage)).tuning.joined == joined, storage
        assert _form(_case("apart", 3, 9, heads=(8, 2), storage=storage)).tuning.joined == 4, storage


NOW = ("joined_window", "joined_threes", "joined_d64", "joined_packed")


@pytest.mark.nightly_cases("joined_d64", "joined_packed", "joined_threes")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in NOW else pytest.mark.nightly) for name in (*SHARING, *SHARING_ALSO)]
)
def test_sharing_a_tile_changes_no_bit(name, monkeypatch):
    """Without early weights, of which bits follow which rows share a tile."""
    monkeypatch.setattr(hopper, "early", lambda problem: False)
    call = CASES[name].build("cpu", torch.bfloat16, "normal", 5, kernel="hopper")
    together, _ = simulated(call, H200)
    monkeypatch.setattr(hopper, "qheads_per_tile", lambda *_: 1)
    apart, run = simulated(call, H200)
    assert run.reports == [] and torch.equal(together.out, apart.out) and torch.equal(together.lse, apart.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHARING)
def test_heads_share_tiles_on_a_gpu(name, judge):
    """With gradients: a backward finds out and lse where it always did."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for sm_90")
    for dtype in DTYPES:
        judge(CASES[name].build("cuda", dtype, "normal", 5, requires_grad=True, kernel="hopper.forward"))


@pytest.mark.parametrize("storage", ("contiguous", "heads_first"))
def test_out_whose_heads_lie_apart(storage):
    """A given out that TMA cannot write for all heads at once is written elsewhere and copied."""
    case = CASES["joined_packed"]
    call = case.build("cpu", torch.bfloat16, kernel="hopper")
    out = laid_out(torch.full(call.q.shape, float("nan"), dtype=torch.bfloat16), storage, 0)
    assert (tma.addressable(out, joined=True) is out) == (storage == "contiguous") and tma.addressable(out) is out
    with on(H200):
        assert_as_good_as(ops.run(call, out), call)


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
