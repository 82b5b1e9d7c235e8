"""Attention of a sequence that several gloo processes share is that of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import strobe
from strobe.distributed import context_parallel
from tests.distributed import divided
from tests.distributed.sessions import EACH, session
from tests.processes import together

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

NIGHTLY = [pytest.param((world, True), marks=pytest.mark.nightly, id=f"{world} whole") for world in (2, 3, 4, 8)]
SESSIONS = [pytest.param((2, False), id="2"), *NIGHTLY]  # 3 and 4: test_more_ranks
EXACT = 1e-11  # float64: sums in another order
SCHEMES = ("keys", "heads")


@pytest.fixture(scope="module", params=SESSIONS)
def found(request, tmp_path_factory) -> dict:
    """What so many processes found: one start of them serves all tests."""
    world, is_whole = request.param
    folder = tmp_path_factory.mktemp(f"world{world}")
    together(session, folder, str(folder), world, is_whole, world=world)
    return {**torch.load(folder / "found.pt"), "world": world, "is whole": is_whole}


def _of(found: dict, start: str) -> dict:
    part = {name: value for name, value in found.items() if name.startswith(start)}
    if not part and found["world"] > 2 and not found["is whole"]:
        pytest.skip("two processes run it, and others at night")
    assert part, start
    return part


@pytest.mark.parametrize("way", divided.WAYS)
def test_every_mask_gives_what_one_process_gives(way, found):
    part = _of(found, f"{way}: ")
    assert len(part) >= len(divided.MASKS) // (1 if found["is whole"] else EACH[found["world"]])
    assert {name: error for name, error in part.items() if not error < EXACT} == {}


@pytest.mark.parametrize("start", ["few", "unseen", "packed", "other mask", "given", "runs"])
def test_other_calls_give_what_one_process_gives(start, found):
    assert {name: error for name, error in _of(found, f"{start}: ").items() if not error < EXACT} == {}


def test_pieces_become_runs_of_one_call(found):
    """Forward and backward of some rank; with two ranks each head-tail run is a call of its own."""
    joined = _of(found, "joined: tiles") if found["world"] == 2 else _of(found, "joined: ")
    assert {name for name, calls in joined.items() if calls >= 2} >= {"joined: tiles, full", "joined: tiles, causal"}


def test_random_delays_change_no_bit(found):
    assert set(_of(found, "delayed: ").values()) == {0.0}


def test_bits_are_the_same_on_a_second_call(found):
    assert set(_of(found, "bits: ").values()) == {0.0}


def test_bfloat16_obeys_the_contract(found):
    assert {name: ratio for name, ratio in _of(found, "bfloat16: ").items() if not ratio <= 1} == {}


@pytest.mark.parametrize("start", ["layout", "read once"])
def test_what_must_hold_exactly(start, found):
    assert {name for name, holds in _of(found, f"{start}: ").items() if holds is not True} == set()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "what, named", [("dtype", "q"), ("batch", "q"), ("rows", ""), ("mask", "mask"), ("scale", "options")]
)
def test_a_call_that_differs_is_named_on_every_rank(scheme, what, named, found):
    """Of two ranks, rank 0 is taken to be right."""
    told, last = found[f"wrong {what}: {scheme}"], found["world"] - 1
    if what == "rows":  # that rank's own error, and its message on the others
        assert "q: got" in told[last] and all(f"the call on rank {last}: got q: got" in one for one in told[:last])
    else:
        assert all(one.startswith(f"{named} on rank {last}: got ") for one in told), told


def test_groups_and_meshes(found):
    names = {3: ["subgroup"], 4: ["nested: "], 8: ["nested: "]}.get(found["world"], [])
    for name in names:
        assert all(error < EXACT for error in _of(found, name).values())


@pytest.mark.parametrize("rows", [[[(0, 3)]], [[(0, 4)], []], [[(0, 5)]], [[(2, 4), (0, 2)]], [[(0, 3), (2, 4)]]])
def test_rows_that_are_no_division_are_refused(rows):
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(strobe.InvalidProblem, match="rows: got"):
            context_parallel().plan(seqlen=4, heads_q=2, rows=rows)
    finally:
        dist.destroy_process_group()
