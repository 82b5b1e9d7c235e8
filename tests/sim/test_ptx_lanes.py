"""Votes and butterflies in inline PTX: who talks to whom, and what is refused."""

import numpy as np
import pytest

from strobe.sim.ptx import run

X = np.arange(64, dtype=np.float32).reshape(2, 32)


def _one(text, *arguments, to=np.float32):
    letters = {np.float32: "f", np.int32: "r"}
    constraints = ",".join(["=" + letters[to], *(letters[argument.dtype.type] for argument in arguments)])
    return run(text, constraints, list(arguments), [to], 1, None)[0]


@pytest.mark.parametrize("distance", [1, 2, 5, 16, 31])
def test_a_butterfly_gives_the_lane_across(distance):
    found = _one(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", X)
    assert np.array_equal(found, X[:, np.arange(32) ^ distance])


def test_the_largest_of_four_lanes():
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    text = (
        "{ .reg .f32 t; mov.f32 $0, $1;"
        + "".join(f"shfl.sync.bfly.b32 t, $0, {i}, 31, -1; max.f32 $0, $0, t;" for i in (1, 2))
        + "}"
    )
    assert np.array_equal(_one(text, x), np.repeat(x.reshape(4, 8, 4).max(2), 4, 1))


@pytest.mark.parametrize("mode, want", [("any", [1, 0, 1]), ("all", [0, 0, 1])])
def test_votes_are_of_a_warp(mode, want):
    x = np.zeros((3, 32), np.int32)
    x[0, 7] = x[2] = 1
    found = _one(
        f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.{mode}.pred p, p, -1; selp.s32 $0, 1, 0, p; }}",
        x,
        to=np.int32,
    )
    assert np.array_equal(found, np.repeat(np.array(want)[:, None], 32, 1))


def test_a_warp_may_branch_as_one():
    x = np.where(np.arange(64) == 40, 9, 1).astype(np.float32)
    text = """{ .reg .pred p; .reg .f32 t; mov.f32 $0, $1; setp.gt.f32 p, $1, 5.0;
        vote.sync.any.pred p, p, -1; @!p bra ON;
        shfl.sync.bfly.b32 t, $1, 1, 31, -1; add.f32 $0, $0, t; ON: }"""
    want = x.copy()
    want[32:] += x[32:].reshape(16, 2)[:, ::-1].reshape(-1)
    assert np.array_equal(_one(text, x), want)


@pytest.mark.parametrize("work", ["shfl.sync.bfly.b32 $0, $1, 1, 31, -1;", "vote.sync.any.pred p, p, -1;"])
def test_lanes_that_branched_away_are_an_error(work):
    text = f"{{ .reg .pred p; mov.f32 $0, $1; setp.gt.f32 p, $1, 5.0; @!p bra ON; {work} ON: }}"
    with pytest.raises(ValueError, match="branched away"):
        _one(text, X)


def test_part_of_a_warp_is_an_error():
    with pytest.raises(ValueError, match="40 groups of elements are not a multiple of 32; choose another pack"):
        _one("shfl.sync.bfly.b32 $0, $1, 1, 31, -1;", np.zeros(40, np.float32))


@pytest.mark.parametrize(
    "text",
    [
        "shfl.sync.up.b32 $0, $1, 1, 0, -1;",
        "shfl.sync.bfly.b32 $0, $1, 1, 31, 15;",
        "shfl.sync.bfly.b32 $0, $1, 32, 31, -1;",
        "{ .reg .pred p; setp.ne.f32 p, $1, 0.0; vote.sync.uni.pred p, p, -1; mov.f32 $0, $1; }",
        "{ .reg .pred p; setp.ne.f32 p, $1, 0.0; vote.sync.any.pred p, p, 255; mov.f32 $0, $1; }",
    ],
)
def test_what_is_not_known_is_said(text):
    with pytest.raises(NotImplementedError, match=r"expected vote.sync.any.pred, .all.pred, or shfl.sync.bfly.b32"):
        _one(text, X)
