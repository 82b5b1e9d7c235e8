"""Query heads that share a tile of the Hopper forward (`pack_gqa`): when they do, and that no bit changes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.hopper.hopper_cases import (
    DTYPES,
    H200,
)

pytest.importorskip("triton")

from strobe.kernels.device import tma
from strobe.kernels.hopper import forward_config
from strobe.kernels.hopper import kernel as hopper
from strobe.ops import attention as ops
from strobe.testing import assert_as_good_as
from strobe.testing.cases import laid_out
from tests.kernels.hopper.forward_cases import CASES, JOINED, _case, _packed, _traits
from tools.proof.simulate import on, simulated

pytestmark = pytest.mark.usefixtures("as_of_many_keys")


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
    traits_by_name = {name: _traits(case) for name, case in CASES.items() if case.heads[0] > case.heads[1]}
    shared = {name for name, traits in traits_by_name.items() if traits.tuning.pack_gqa > 1}
    assert shared == {*SHARING, *SHARING_ALSO} and traits_by_name.keys() - shared == set(APART)
    assert all(traits_by_name[name].group == 1 for name in shared)
    assert all(traits_by_name[name].group > 1 for name in APART)
    wanted = {hopper.tiled(case.head_dim, case.head_dim_v or case.head_dim) for case in JOINED}
    assert wanted == set(hopper.TUNINGS)


@pytest.mark.parametrize(
    "rows, heads, width, pack_gqa, packed",
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
def test_heads_share_tiles_where_that_makes_fewer(rows, heads, width, pack_gqa, packed):
    """As many rows a query as the next power of two: three heads take four. A tile has 128, at d64 192, of packed ones
    at d128 192, at d64 256.
    """
    assert _traits(_case("shared", rows, 130, width, heads=heads)).tuning.pack_gqa == pack_gqa
    assert _traits(_packed("shared", (rows, rows), (130, 130), width, heads=heads)).tuning.pack_gqa == packed


def test_packed_queries_whose_heads_lie_apart_do_not_share_tiles():
    """TMA has no dimension left for them; dense ones may lie as they like."""
    for storage, pack_gqa in (("contiguous", 4), ("gaps", 1), ("heads_first", 1)):
        assert _traits(_packed("apart", (3, 7), heads=(8, 2), storage=storage)).tuning.pack_gqa == pack_gqa, storage
        assert _traits(_case("apart", 3, 9, heads=(8, 2), storage=storage)).tuning.pack_gqa == 4, storage


NOW = ("joined_window", "joined_threes", "joined_d64", "joined_packed")


@pytest.mark.nightly_cases("joined_d64", "joined_packed", "joined_threes")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in NOW else pytest.mark.nightly) for name in (*SHARING, *SHARING_ALSO)]
)
def test_sharing_a_tile_changes_no_bit(name, monkeypatch, wide_sums):
    """Without early weights, of which bits follow which rows share a tile."""
    monkeypatch.setattr(hopper, "early", lambda problem: False)
    call = CASES[name].build("cpu", torch.bfloat16, "normal", 5, kernel="hopper")
    together, _ = simulated(call, H200)
    monkeypatch.setattr(forward_config, "qheads_per_tile", lambda *_: 1)
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
    assert (tma.addressable(out, pack_gqa=True) is out) == (storage == "contiguous") and tma.addressable(out) is out
    with on(H200):
        assert_as_good_as(ops.run(call, out), call)
