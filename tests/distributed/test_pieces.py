"""By which calls a rank computes its rows, and which keys it copies or receives for them."""

from __future__ import annotations

import torch

import strobe
from strobe.distributed.pieces import Piece, Pieces
from strobe.distributed.run_calls import RunOffsets, are_runs
from strobe.distributed.visible import Visible

SEQLEN = 64


def _pieces(mask: strobe.Mask, *runs: tuple[int, int]) -> Pieces:
    return Pieces.of(runs, Visible.of(mask, SEQLEN), mask, False)


def test_rows_whose_window_lies_in_their_run_read_own_keys_in_place():
    pieces = _pieces(strobe.window(4, 0), (16, 32))
    assert pieces.own == (Piece((20, 32), (16, 32)),)
    assert pieces.rest == (Piece((16, 20), (12, 20)),)
    assert pieces.rows_once and pieces.are_all_rows(((16, 32),))


def test_a_window_to_both_sides_cuts_a_run_twice():
    pieces = _pieces(strobe.window(4, 2), (16, 32))
    assert pieces.own == (Piece((20, 30), (16, 32)),)
    assert pieces.rest == (Piece((16, 20), (12, 22)), Piece((30, 32), (26, 34)))


def test_documents_that_end_with_a_run_need_no_keys_of_others():
    ids = torch.arange(SEQLEN, dtype=torch.int32)[None] // 8
    assert _pieces(strobe.causal() & strobe.documents(ids), (16, 32)).rest == ()


def test_a_document_that_crosses_a_border_is_a_piece_of_its_own():
    ids = (torch.arange(SEQLEN, dtype=torch.int32)[None] + 5) // 8  # [11, 19), [19, 27), [27, 35)
    pieces = _pieces(strobe.causal() & strobe.documents(ids), (16, 32))
    assert pieces.own == (Piece((19, 32), (19, 32)),)
    assert pieces.rest == (Piece((16, 19), (11, 19)),)


def test_causal_rows_stay_one_piece():
    pieces = _pieces(strobe.causal(), (0, 8), (56, 64))
    assert pieces.own == (Piece((0, 8), (0, 8)),)
    assert pieces.rest == (Piece((56, 64), (0, 64)),)


def test_a_run_with_few_rows_over_own_keys_alone_is_not_cut():
    assert _pieces(strobe.window(9, 0), (16, 32)).rest == (Piece((16, 32), (7, 32)),)


def _launches(plan_rows: tuple[tuple[int, int], ...], mask: strobe.Mask) -> list[int]:
    """How many pieces each launch has, where one launch may have several."""
    pieces = _pieces(mask, *plan_rows)
    return [
        size
        for part in (pieces.own, pieces.rest)
        for size in ([len(part)] if are_runs(part, plan_rows, mask) else [1] * len(part))
    ]


def test_the_runs_of_a_causal_rank_are_one_launch():
    assert _launches(((8, 16), (48, 56)), strobe.causal()) == [2]
    assert _launches(((0, 8), (56, 64)), strobe.causal()) == [1, 1]  # the first run needs no key of other ranks


def test_eight_runs_are_one_launch():
    assert _launches(tuple((start, start + 4) for start in range(4, 64, 8)), strobe.full()) == [8]


def test_pieces_with_other_bounds_or_documents_are_launches_of_their_own():
    assert _launches(((8, 16), (48, 63)), strobe.window(None, 2)) == [1, 1]  # the last rows see no key behind them
    ids = torch.zeros(1, SEQLEN, dtype=torch.int32)
    assert _launches(((8, 16), (48, 56)), strobe.causal() & strobe.documents(ids)) == [1, 1]


def test_runs_read_one_tensor_of_keys_without_copies_of_ranges():
    """Their offsets; the buffer holds each position once."""
    rows = ((8, 16), (48, 56))
    found = RunOffsets.of(_pieces(strobe.causal(), *rows).rest, ((0, 56),), torch.device("cpu"))
    assert found.cu_seqlens_q.tolist() == [0, 8, 16]
    assert found.cu_seqlens_k.tolist() == [[0, 16, 72], [0, 0, 0]]
    assert (found.max_seqlen_q, found.max_seqlen_k) == (8, 72)
