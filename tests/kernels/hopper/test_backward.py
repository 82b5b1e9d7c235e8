"""The Hopper backward's own source, through its own launch code, on the simulator, held against the oracle.

Its lse comes from the Hopper forward. Sizes wrap both rings; which of the table's cases are too small for that is said
by name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.hopper.hopper_cases import (
    CAUSAL,
    DTYPES,
    H200,
    SCHEDULES,
    alternating_schedules,
    band,
    in_turn,
)

pytest.importorskip("triton")

from strobe.errors import KernelFault
from strobe.kernels.device.backward_operands import batch_stride
from strobe.kernels.hopper import kernel as hopper
from strobe.kernels.hopper import launch_backward
from strobe.kernels.protocol import Plan
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.testing import FAMILIES, Case, assert_gradients_as_good_as
from strobe.testing.cases import laid_out
from tests.kernels.hopper.backward_cases import (
    BACKWARD,
    BACKWARD_OF_SPLIT_GROUPS,
    CASES,
    LARGE,
    SPANS,
    _case,
    _narrow,
    _traits,
)
from tools.proof.simulate import on

BACKWARD_OF_FEW_KEYS = BACKWARD[:-1]  # who adds last writes dq


LONG = (
    *(case.name for case in SPANS if case.head_dim not in (64, 128)),
    "documents_of_one_row", "d256_window_softcap", "d64_window", "documents_causal", "documents_d64_window_scattered",
    "documents_lengths", "head_dims_64_192", "head_dims_72_120", "key_lengths_causal", "packed", "packed_gaps",
    "prefix", "prefix_documents", "sinks", "window_right", "window_wider_than_all",
)  # fmt: skip


@pytest.mark.parts(12)
@pytest.mark.nightly_cases(*(f"{name}-*" for name in LONG))
@pytest.mark.parametrize("name, schedule", alternating_schedules(CASES))
def test_hopper_backward(name, schedule, judge):
    """All cases; the kind of schedule, dtypes and input families take turns."""
    n = list(CASES).index(name) + 2 * SCHEDULES.index(schedule)
    run_and_judge(judge, CASES[name], DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], schedule)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_hopper_backward_under_every_schedule(name, family, judge):
    for dtype, schedule in in_turn(list(CASES).index(name), family):
        run_and_judge(judge, CASES[name], dtype, family, schedule)


LONG_ROWS = (
    "causal",
    "causal_more_rows_sinks",
    "d64_causal",
    "d64_window",
    "head_dim_96",
    "packed_causal",
    "packed_d64_window",
)


@pytest.mark.nightly_cases("packed_causal-*")
@pytest.mark.parametrize("name, schedule", alternating_schedules(LONG_ROWS))
def test_the_sum_of_dq_is_cleared_where_rows_see_many_keys(name, schedule, judge, as_of_many_keys):
    assert not _traits(CASES[name]).dq_first_writer_stores
    n = LONG_ROWS.index(name)
    run_and_judge(judge, CASES[name], DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], schedule)


AHEAD = {
    "three_sections": _case("three_sections", 300, 390, heads=(3, 3), mask=CAUSAL),
    "grouped": _case("grouped", 200, 300, heads=(4, 2), batch=2, mask=CAUSAL),
    "dense": _case("dense", 200, 260, heads=(3, 3), batch=2),
    "d64": _narrow("d64", 260, 520, heads=(5, 5), mask=CAUSAL),
    "d64_window": _narrow("d64_window", 400, 400, heads=(6, 2), mask=band(100, 0)),
    "d96": _case("d96", 260, 390, 96, heads=(4, 4), mask=CAUSAL),
    "more_keys_than_rows": _case("more_keys_than_rows", 10, 700, heads=(4, 4)),
    "more_rows_than_keys": _case("more_rows_than_keys", 260, 10, heads=(6, 6)),
    "rows_without_keys": _case("rows_without_keys", 400, 130, heads=(4, 4), mask=CAUSAL),
}


@pytest.mark.nightly_cases(
    "d64-*",
    "d64_window-*",
    "d96-*",
    "dense-*",
    "grouped-*",
    "more_keys_than_rows-*",
    "more_rows_than_keys-*",
    "rows_without_keys-*",
)
@pytest.mark.parametrize("name, schedule", alternating_schedules(AHEAD))
def test_later_sums_of_dq_are_cleared_by_earlier_tiles_of_keys(name, schedule, judge, as_of_many_keys):
    """More parts of heads than a section has, and programs that are in several sections at once."""
    case, n = AHEAD[name], list(AHEAD).index(name)
    target = replace(H200, sm_count=(1, 3, 5)[n % 3])
    call = case.build("cpu", DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], seed=5, requires_grad=True, kernel="hopper")
    plan = select(Problem.from_call(call), target).backward
    assert plan is not None and plan.config.traits.dq_zeroed_ahead
    parts, _, section = launch_backward.parts_of_heads(plan)
    assert parts > section
    with on(target, *schedule) as run:
        judge(call, FAMILIES[n % len(FAMILIES)], 5)
    assert run.reports == [] and "backward_kernel" in run.launches


@pytest.mark.parametrize(
    "seqlen, heads, width, bounds, options, clears",
    [
        (8192, (16, 16), 128, (-1, 0), {}, True),
        (8192, (16, 16), 128, (-1, -1), {}, True),
        (8192, (64, 8), 128, (-1, 0), {}, True),
        (8192, (32, 32), 64, (-1, 0), {}, True),
        (8192, (16, 16), 96, (-1, 0), {}, True),
        (4096, (32, 32), 64, (-1, -1), {}, False),  # whose steps keep addresses
        (1024, (64, 8), 128, (-1, 0), {}, False),  # a tile of keys is done too soon
        (2048, (64, 8), 128, (-1, 0), {}, True),
        (512, (16, 16), 128, (-1, -1), {}, False),
        (8192, (16, 16), 192, (-1, 0), {}, False),  # adds bind
        (8192, (16, 16), 128, (-1, 0), {"deterministic": True}, False),  # the first tile stores
    ],
)
def test_when_sums_of_dq_are_cleared_ahead(seqlen, heads, width, bounds, options, clears):
    q, k = (torch.empty(2, seqlen, count, width, dtype=torch.bfloat16, device="meta") for count in heads)
    call = Call(q, k, k, left=bounds[0], right=bounds[1], needs_grad=True, **options)
    assert hopper.BACKWARD.config(Problem.from_call(call), FAKES["H200"]).traits.dq_zeroed_ahead == clears


@pytest.mark.parametrize("name", LONG_ROWS)
def test_the_first_tile_of_keys_stores_where_rows_see_few(name):
    assert _traits(CASES[name]).dq_first_writer_stores


LAGGING = (
    "causal",
    "dense",
    "causal_more_keys",
    "causal_more_rows_sinks",
    "window_right",
    "window_both",
    "window_before_the_keys",
    "grouped",
    "stored_mixed",
    "d64_dense",
    "d64_causal",
    "d64_window",
    "d64_grouped_gaps",
    "head_dim_96",
    "head_dims_72_120",
    "packed_causal",
    "packed_causal_other_keys",
    "packed_d64_causal",
    "one_row_causal",
    "key_lengths_causal",
)


@pytest.mark.nightly_cases(
    "causal-*",
    "causal_more_keys-*-True",
    "causal_more_rows_sinks-*",
    "d64_causal-*-False",
    "d64_dense-*",
    "d64_grouped_gaps-*",
    "d64_window-*",
    "dense-*",
    "grouped-*-False",
    "head_dims_72_120-*",
    "key_lengths_causal-*-False",
    "packed_causal-*",
    "packed_causal_other_keys-*-False",
    "packed_d64_causal-*",
    "stored_mixed-*",
    "window_before_the_keys-*",
    "window_both-*-True",
    "window_right-*",
)
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("name, schedule", alternating_schedules(LAGGING))
def test_dq_of_the_step_before(name, schedule, deterministic, judge, monkeypatch):
    """As long rows have it, beside a first tile of keys that stores, and turns."""
    if deterministic and name == "key_lengths_causal":
        pytest.skip("spans have no turns")
    monkeypatch.setattr(hopper, "DEFERRED_DQ_STEPS", dict.fromkeys(hopper.DEFERRED_DQ_STEPS, 0))
    case, n = CASES[name], LAGGING.index(name)
    call = case.build("cpu", DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], seed=5, requires_grad=True, kernel="hopper")
    call = call._replace(deterministic=deterministic)
    assert hopper.BACKWARD.config(Problem.from_call(call), H200).traits.dq_deferred
    with on(H200, *schedule) as run:
        judge(call, FAMILIES[n % len(FAMILIES)], 5)
    assert run.reports == [] and "backward_kernel" in run.launches


@pytest.mark.parametrize(
    "batch, seqlen, heads, width, bounds, deferred, folded",
    [
        (2, 8192, (16, 16), 128, (-1, 0), True, True),
        (4, 4096, (16, 16), 128, (-1, 0), True, True),
        (16, 1024, (16, 16), 128, (-1, 0), False, True),
        (2, 8192, (16, 16), 96, (-1, 0), True, True),
        (4, 4096, (16, 16), 96, (-1, 0), False, False),
        (2, 8192, (16, 16), 128, (-1, -1), True, True),
        (32, 512, (16, 16), 128, (-1, -1), False, False),
        (1, 16384, (32, 32), 64, (-1, 0), True, False),
        (2, 8192, (32, 32), 64, (-1, 0), False, False),
        (2, 8192, (16, 16), 192, (-1, 0), False, False),
        (1, 16384, (16, 16), 128, (1023, 0), True, True),
        (2, 8192, (64, 8), 128, (-1, 0), True, True),  # of a group that two programs share
    ],
)
def test_when_dq_is_of_the_step_before_and_scores_begin_at_lse(batch, seqlen, heads, width, bounds, deferred, folded):
    q, k = (torch.empty(batch, seqlen, count, width, dtype=torch.bfloat16, device="meta") for count in heads)
    call = Call(q, k, k, left=bounds[0], right=bounds[1], needs_grad=True)
    traits = hopper.BACKWARD.config(Problem.from_call(call), FAKES["H200"]).traits
    assert (traits.dq_deferred, traits.lse_folded) == (deferred, folded)
    for scale in (0.0, 1e-38, 1e38):  # by which lse cannot be divided
        assert not hopper.BACKWARD.config(
            Problem.from_call(call._replace(scale=scale)), FAKES["H200"]
        ).traits.lse_folded
    traits = hopper.BACKWARD.config(Problem.from_call(call._replace(softcap=20.0)), FAKES["H200"]).traits
    assert (traits.dq_deferred, traits.lse_folded) == (False, False)
    if (seqlen, width) == (8192, 64):
        assert hopper.BACKWARD.config(
            Problem.from_call(call._replace(deterministic=True)), FAKES["H200"]
        ).traits.dq_deferred


@pytest.mark.parametrize("scale", (1e-20, 1e-35, 3.0))
def test_scores_begin_at_lse_at_every_scale(scale, judge):
    case = _case("scaled", 200, 260, mask=CAUSAL, scale=scale)
    call = case.build("cpu", torch.bfloat16, "normal", seed=5, requires_grad=True, kernel="hopper")
    assert _traits(case).lse_folded == (abs(scale) > 1e-30)
    with on(H200, *SCHEDULES[0]) as run:
        judge(call, "normal", 5)
    assert run.reports == []


FEW_KEYS = {
    "of_four_tiles": dict(seqlen_q=512, seqlen_k=512, head_dim=128),
    "of_four_tiles_d64": dict(seqlen_q=512, seqlen_k=512, head_dim=64),
    "fewer_rows": dict(seqlen_q=150, seqlen_k=420, head_dim=128),
    "rows_before_the_keys": dict(seqlen_q=450, seqlen_k=300, head_dim=128),
    "rows_before_the_keys_d64": dict(seqlen_q=500, seqlen_k=210, head_dim=64),
    "keys_seen_ahead": dict(seqlen_q=300, seqlen_k=300, head_dim=128, mask=band(None, 70)),
    "a_narrow_head": dict(seqlen_q=260, seqlen_k=260, head_dim=40),
    "half_a_tile_of_keys": dict(seqlen_q=130, seqlen_k=170, head_dim=128),
}


@pytest.mark.parts(12)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule[0])
@pytest.mark.parametrize("name", FEW_KEYS)
def test_who_adds_last_writes_dq(name, schedule, judge):
    """Each tile of keys that a tile of queries sees adds to its dq but the last, which reads what the others have
    added, and writes.
    """
    sizes = {"heads": (2, 2), "mask": CAUSAL} | FEW_KEYS[name]
    case = _case(name, sizes.pop("seqlen_q"), sizes.pop("seqlen_k"), sizes.pop("head_dim"), **sizes)
    assert _traits(case).dq_last_writer_converts
    run_and_judge(judge, case, torch.bfloat16, "normal", schedule)


@pytest.mark.parametrize(
    "name, options",
    [
        ("deterministic", dict(seqlen_q=300, seqlen_k=300)),
        ("deterministic_d64", dict(seqlen_q=300, seqlen_k=300, head_dim=64)),
        ("grouped", dict(seqlen_q=300, seqlen_k=300, heads=(4, 2))),
        ("one_tile_of_keys", dict(seqlen_q=200, seqlen_k=128, mask=None)),
        ("one_ragged_tile_d64", dict(seqlen_q=200, seqlen_k=77, head_dim=64, mask=None)),
    ],
)
def test_dq_of_queries_that_see_one_tile_of_keys_is_written_at_once(name, options, judge):
    """Whoever takes turns, or shares a group's heads, adds to the others'; a last kernel makes dq of their sum, and
    leaves what is written alone.
    """
    case = _case(
        name,
        options.pop("seqlen_q"),
        options.pop("seqlen_k"),
        options.pop("head_dim", 128),
        **({"mask": CAUSAL} | options),
    )
    call = case.build("cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="hopper")
    call = call._replace(deterministic=name.startswith("deterministic"))
    traits = hopper.BACKWARD.config(Problem.from_call(call), H200).traits
    assert traits.dq_written_directly and traits.dq_last_writer_converts == (call.right < 0)
    with on(H200, *SCHEDULES[0]) as run:
        judge(call, "normal", 5)
    assert run.reports == []


@pytest.mark.parametrize("width, products", [(128, (12, 8)), (96, (20, 12))])
def test_half_the_keys_are_passed_over_where_no_query_sees_them(width, products):
    """Of a causal tile of keys the first 64 queries see the first half alone: there the other's consumer multiplies
    nothing but its share of dq.
    """
    call = _case("", 128, 128, width, mask=CAUSAL).build(
        "cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="hopper"
    )
    with on(H200, "timed", 0) as run:
        out, _ = ops.run(call)
        torch.autograd.grad(out, call[:3], torch.ones_like(out))
    found = Counter(
        one.name.rpartition(" of ")[2] for one in run.events if one.kind == "mma" and "backward" in one.where
    )
    assert run.reports == [] and found == dict(zip(("consumer", "consumer#2"), products))


@pytest.mark.parametrize(
    "batch, seqlen, heads, width, bounds, stores",
    [
        (32, 512, (16, 16), 128, (-1, 0), True),
        (8, 2048, (16, 16), 128, (-1, 0), True),
        (4, 4096, (16, 16), 128, (-1, 0), False),
        (8, 2048, (32, 32), 64, (-1, 0), True),
        (4, 4096, (32, 32), 64, (-1, 0), False),
        (32, 512, (16, 16), 192, (-1, 0), False),
        (32, 512, (16, 16), 128, (-1, -1), False),  # tiles of keys come together
        (64, 128, (16, 16), 128, (-1, -1), True),  # there is one
        (64, 129, (16, 16), 128, (-1, -1), False),
        (32, 512, (32, 8), 128, (-1, 0), False),  # shorter tiles come first to a group's second head
        (1, 2048, (64, 32), 128, (-1, 0), False),
        (1, 512, (16, 2), 128, (-1, 0), True),  # a head for each program
        (1, 16384, (64, 8), 64, (1023, 0), True),
        (1, 16384, (64, 8), 64, (4095, 0), False),
        (1, 16384, (64, 8), 64, (1023, -1), False),
    ],
)
def test_when_the_first_tile_of_keys_stores(batch, seqlen, heads, width, bounds, stores):
    q, k = (torch.empty(batch, seqlen, count, width, dtype=torch.bfloat16, device="meta") for count in heads)
    problem = Problem.from_call(Call(q, k, k, left=bounds[0], right=bounds[1], needs_grad=True))
    assert hopper.BACKWARD.config(problem, FAKES["H200"]).traits.dq_first_writer_stores == stores
    assert hopper.BACKWARD.config(replace(problem, deterministic=True), FAKES["H200"]).traits.dq_first_writer_stores


def run_and_judge(judge, case: Case, dtype: torch.dtype, family: str, schedule: tuple[str, int]) -> None:
    call = case.build("cpu", dtype, family, seed=5, requires_grad=True, kernel="hopper")
    with on(H200, *schedule) as run:
        judge(call, family, 5)
    assert run.reports == [] and run.launches == ["forward_kernel"] * 2 + _launched(call, _traits(case))


def _launched(call: Call, traits: hopper.BackwardTraits) -> list[str]:
    """The kernels of a backward: none makes dq of its sum where the last to add does, and no whole tile of queries is
    without keys.
    """
    if not traits.dq_last_writer_converts:
        return BACKWARD if traits.group_splits == 1 else BACKWARD_OF_SPLIT_GROUPS
    rows, keys = min(traits.tuning.block_m, call.q.shape[1]), call.k.shape[1]
    seen = call.mask.dense(call.q.shape[1], keys)[..., :rows, :].any() if keys else False
    return BACKWARD_OF_FEW_KEYS if seen else BACKWARD


@pytest.mark.parametrize("name", [case.name for case in LARGE])
def test_sizes_wrap_the_rings(name):
    case = CASES[name]
    tuning = _traits(case).tuning
    tiles = -(-case.seqlen_q // tuning.block_m)
    assert tiles * case.heads[0] // case.heads[1] > tuning.stages
    assert case.keys > tuning.block_n, "a second tile of keys adds to dq's sum"


@pytest.mark.nightly_cases("packed_causal_other_keys", "packed_d192_128")
@pytest.mark.parametrize("name", ("packed_causal_other_keys", "packed_d64_window", "packed_d192_128"))
def test_what_neighbours_hold_does_not_matter(name):
    """Rows of another sequence share tiles with a sequence's last rows: NaN there changes no bit of dk and dv, nor what
    dq adds up.
    """
    call = CASES[name].build("cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="hopper")
    n = 3
    (q_from, q_to), (k_from, k_to) = (offsets[n : n + 2].tolist() for offsets in (call.cu_seqlens_q, call.cu_seqlens_k))
    rows, keys = slice(q_from, q_to), slice(k_from, k_to)
    dout = torch.randn(*call.q.shape[:2], call.v.shape[-1], generator=torch.Generator().manual_seed(6)).to(
        torch.bfloat16
    )
    plain = _gradients_of(call, dout)
    alone = [_nan_but(t, part) for t, part in ((call.q, rows), (call.k, keys), (call.v, keys))]
    found = _gradients_of(call._replace(q=alone[0], k=alone[1], v=alone[2]), _nan_but(dout, rows))
    assert q_to > q_from
    for mine, other, part in zip(found, plain, (rows, keys, keys)):
        assert torch.equal(mine[part], other[part])


@pytest.mark.nightly_cases("documents_causal-*", "documents_scattered-*", "key_lengths_causal-*")
@pytest.mark.parametrize(
    "name, rows, keys",
    [
        ("documents_causal", (131, 195), (131, 195)),
        ("documents_scattered", (100, 140), (100, 140)),
        ("documents_d256", (70, 150), (70, 150)),
        ("documents_other_keys_causal", (60, 200), (200, 300)),
        ("key_lengths_causal", (0, 200), (0, 65)),
    ],
)
def test_what_other_documents_and_hidden_keys_hold_does_not_matter(name, rows, keys):
    """Documents share tiles of queries, and lie between the rows of one that is scattered: NaN there changes no bit."""
    call = CASES[name].build("cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="hopper")
    call = call._replace(
        **{
            field: getattr(call, field)[:1]
            for field in ("q", "k", "v", *OF_ENTRIES)
            if getattr(call, field) is not None
        }
    )
    seen, of_keys = torch.zeros(call.q.shape[1], dtype=torch.bool), torch.zeros(call.k.shape[1], dtype=torch.bool)
    seen[slice(*rows)] = of_keys[slice(*keys)] = True
    if call.ids_q is not None:  # all of the document
        seen, of_keys = (ids[0] == call.ids_q[0, rows[0]] for ids in (call.ids_q, call.ids_k))
    dout = torch.randn(*call.q.shape[:-1], call.v.shape[-1], generator=torch.Generator().manual_seed(6)).to(
        torch.bfloat16
    )
    plain = _gradients_of(call, dout)
    alone = [_nan_but(t, (slice(None), part)) for t, part in ((call.q, seen), (call.k, of_keys), (call.v, of_keys))]
    found = _gradients_of(call._replace(q=alone[0], k=alone[1], v=alone[2]), _nan_but(dout, (slice(None), seen)))
    for mine, other, part in zip(found, plain, (seen, of_keys, of_keys)):
        assert not mine[:, part].isnan().any() and torch.equal(mine[:, part], other[:, part])


OF_ENTRIES = ("ids_q", "ids_k", "spans_q", "spans_k", "key_lengths")


def _nan_but(tensor: torch.Tensor, part: Any) -> torch.Tensor:
    held = torch.full_like(tensor, float("nan"))
    held[part] = tensor.detach()[part]
    return held.requires_grad_(tensor.requires_grad)


def _gradients_of(call: Call, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with on(H200) as run:
        out, _ = ops.run(call)
        found = torch.autograd.grad(out, call[:3], dout)
    assert run.reports == [] and run.launches[1:] in (BACKWARD, BACKWARD_OF_SPLIT_GROUPS)
    return found


def test_the_table_has_every_tiling():
    used = {(traits.block_d, traits.block_dv) for traits in map(_traits, LARGE)}
    assert used == set(hopper.BACKWARD_TUNINGS)


# ---------------------------------------------------------------- what else it reads and writes


@pytest.mark.nightly_cases("dense")
@pytest.mark.parametrize("name", ("dense", "causal_more_rows_sinks", "d64_window", "packed_promised_outside"))
def test_gradients_of_a_partial_result(name, judge):
    """out and its gradient are float32, and lse has a gradient of its own."""
    call = replace(CASES[name], partial=True).build(
        "cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="hopper.backward"
    )
    with on(H200) as run:
        judge(call, "normal", 5)
    assert run.reports == [] and run.launches[-3:] == BACKWARD


@pytest.mark.parametrize("storage", ("odd_offset", "gaps", "heads_first", "expanded_batch"))
def test_a_dout_that_tma_cannot_read_is_copied(storage):
    dout = laid_out(torch.ones(2, 60, 2, 64, dtype=torch.bfloat16), storage, 0)
    call = CASES["d64_dense"].build("cpu", torch.bfloat16)
    given = launch_backward.operand(dout, call, False)
    assert (given is dout) == (storage in ("gaps", "heads_first")) and torch.equal(given, dout)
    assert given.data_ptr() % 16 == 0 and all(stride % 8 == 0 and stride > 0 for stride in given.stride()[:-1])


def test_a_dout_whose_entries_are_no_whole_rows_apart_is_copied_for_spans():
    """Their rows are addressed over all batch entries at once."""
    call = CASES["d64_dense"].build("cpu", torch.bfloat16)
    dout = torch.ones(16000, dtype=torch.bfloat16).as_strided((2, 60, 2, 64), (60 * 128 + 8, 128, 64, 1))
    assert launch_backward.operand(dout, call, False) is dout
    given = launch_backward.operand(dout, call, True)
    assert batch_stride(given) == 60 and torch.equal(given, dout)


def test_widths_that_tma_cannot_write(judge):
    """k and v are slices whose rows TMA can read; dk's own rows of 20 columns it could not write."""
    q, k, v = (
        torch.randn(1, 100, 2, 24, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16) for n in range(3)
    )
    call = Call(
        q[..., :20].requires_grad_(),
        k[..., :20].requires_grad_(),
        v[..., :20].requires_grad_(),
        kernel="hopper",
        needs_grad=True,
    )
    with on(H200) as run:
        out, _ = ops.run(call)
        dout = torch.ones_like(out)
        found = torch.autograd.grad(out, call[:3], dout)
    assert run.reports == [] and run.launches[1:] == BACKWARD_OF_FEW_KEYS
    assert_gradients_as_good_as((*found, None), call, dout)


def test_rows_without_keys_have_no_gradient():
    call = CASES["causal_more_rows"].build("cpu", torch.bfloat16, "normal", 5, requires_grad=True, kernel="hopper")
    with on(H200):
        out, _ = ops.run(call)
        dq, dk, dv = torch.autograd.grad(out, call[:3], torch.randn_like(out))
    assert dq[:, :190].eq(0).all() and dq[:, 190:].ne(0).any() and dk.isfinite().all() and dv.isfinite().all()


def test_more_programs_than_a_launch_can_count():
    q = torch.empty(8, dtype=torch.bfloat16).expand(2**16, 2, 2**15, 8)
    problem = Problem.from_call(Call(q, q, q))
    plan = Plan(hopper.BACKWARD, problem, H200, hopper.BACKWARD.config(problem, H200), ())
    with pytest.raises(KernelFault, match=r"hopper\.backward: 2147483648 programs .* split the batch"):
        launch_backward.counted(plan, 2**31)
