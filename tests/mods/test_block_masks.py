"""Masks from BlockMasks of torch's FlexAttention: what their lists cover."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import strobe


def _tensors(rows: int, keys: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(1, 1, length, 16, generator=draw) for length in (rows, keys, keys)]


def _lists(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32)
    width = max(map(len, rows))
    return counts, torch.tensor([[[row + [0] * (width - len(row)) for row in rows]]], dtype=torch.int32)


def _made(partial, full=None, lengths=(128, 1024)) -> BlockMask:
    options = {"BLOCK_SIZE": 128, "seq_lengths": lengths, "compute_q_blocks": False}
    return BlockMask.from_kv_blocks(*partial, *(full or (None, None)), **options)


NARROW = {
    "the first blocks": (_lists([0, 1]), None, [0, 1]),
    "a block beyond the width": (_lists([0, 5]), None, [0, 5]),
    "narrow full lists": (_lists([0, 1]), _lists([6]), [0, 1, 6]),
    "narrow partial lists": (_lists([7]), _lists([0, 2, 3]), [0, 2, 3, 7]),
}


@pytest.mark.parametrize("name", NARROW)
def test_lists_narrower_than_the_keys_hide_all_other_blocks(name):
    partial, full, blocks = NARROW[name]
    q, k, v = _tensors(128, 1024)
    seen = torch.zeros(8, 1, dtype=torch.bool).index_fill(0, torch.tensor(blocks), True).expand(8, 128).flatten()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen.expand(1, 1, 128, -1))
    mask = _made(partial, full)
    assert (strobe.flex_attention(q, k, v, block_mask=mask) - expected).abs().max() < 1e-5
    own = strobe.attention(*(t.transpose(1, 2) for t in (q, k, v)), mask=strobe.mask_mod(mask)).transpose(1, 2)
    assert (own - expected).abs().max() < 1e-5


def test_flex_attention_refuses_rows_beyond_the_lists():
    q, k, v = _tensors(256, 1024)
    with pytest.raises(strobe.InvalidProblem, match="lists of 1 blocks of 128 queries, expected at least 2 blocks"):
        strobe.flex_attention(q, k, v, block_mask=_made(_lists([0, 1]), lengths=(256, 1024)))


def test_flex_attention_takes_a_mask_of_one_row_and_key_for_these_lengths_alone():
    one = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 1, 1, device="cpu")
    q, k, v = _tensors(1, 1)
    assert torch.allclose(strobe.flex_attention(q, k, v, block_mask=one), v)
    with pytest.raises(strobe.InvalidProblem, match="block_mask: got one of 1 x 1, expected 8 x 8"):
        strobe.flex_attention(*_tensors(8, 8), block_mask=one)


@pytest.mark.parametrize(("rows", "keys", "message"), (
    (100, 1024, "mask: got a BlockMask for 200 keys, expected one for the call's 1024"),
    (100, 201, "mask: got a BlockMask for 200 keys, expected one for the call's 201"),
    (120, 200, "mask: got a BlockMask for 100 queries, expected one for the call's 120"),
))  # fmt: skip
def test_a_call_longer_than_the_block_mask_is_refused(rows, keys, message):
    mask = strobe.mask_mod(create_block_mask(lambda b, h, i, j: i >= 0, 1, 1, 100, 200, device="cpu"))
    q, k = torch.zeros(1, rows, 1, 16), torch.zeros(1, keys, 1, 16)
    with pytest.raises(strobe.InvalidProblem, match=message):
        strobe.attention(q, k, k, mask=mask)
    strobe.attention(q[:, :100], k[:, :200], k[:, :200], mask=mask)


def test_packed_rows_and_keys_beyond_the_lists_are_not_seen():
    """The host does not know the lengths of packed sequences."""
    mask = strobe.mask_mod(create_block_mask(lambda b, h, i, j: i >= 0, 1, 1, 128, 128, device="cpu"))
    q, k, v = (t[0].transpose(0, 1) for t in _tensors(130, 140))
    of_q, of_k = (torch.tensor([0, length], dtype=torch.int32) for length in (130, 140))
    out = strobe.attention_varlen(q, k, v, cu_seqlens_q=of_q, cu_seqlens_k=of_k, mask=mask)
    expected = strobe.attention(q[None, :128], k[None, :128], v[None, :128])[0]
    assert torch.allclose(out[:128], expected, atol=1e-5) and not out[128:].any()
