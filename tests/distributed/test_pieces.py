"""By which calls a rank computes its rows, and which keys it copies or receives for them."""

from __future__ import annotations

import torch

import strobe
from strobe.distributed.pieces import Piece, Pieces
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
