"""FlashAttention-2's `flash_attn.bert_padding`: pack the rows of a padded batch [B, S, ...] into [T, ...], and unpack
them.

Row indices are int64 or int32. All functions are differentiable. A function whose output shape depends on a count of
rows synchronises with the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


class _ResidualRows(torch.autograd.Function):
    """Selected rows and all rows. The backward accumulates both gradients in one buffer."""

    @staticmethod
    def forward(ctx, rows: Tensor, indices: Tensor):
        indices = indices.long()
        ctx.save_for_backward(indices)
        return rows[indices], rows.detach()

    @staticmethod
    def backward(ctx, chosen, everything):
        (indices,) = ctx.saved_tensors
        return everything.index_add(0, indices, chosen), None


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of [N, ...] at `indices`: [len(indices), ...].

    >>> index_first_axis(torch.arange(8).view(4, 2), torch.tensor([3, 0])).tolist()
    [[6, 7], [0, 1]]
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ...] with `values` at the rows `indices` and zero elsewhere.

    >>> index_put_first_axis(torch.ones(2, 1), torch.tensor([3, 0]), 4).flatten().tolist()
    [1.0, 0.0, 0.0, 1.0]
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of [N, ...] at `indices`, and the whole input."""
    return _ResidualRows.apply(input, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the rows of [B, S, ...] where attention_mask [B, S] is 1. unused_mask marks further rows to keep space for.

    Returns rows [T, ...], indices int64 [T], cu_seqlens int32 [B + 1], the longest length, and attention_mask's row
    counts int32 [B].

    >>> padded, mask = torch.arange(6).view(2, 3, 1), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> rows, indices, cu_seqlens, longest, used = unpad_input(padded, mask)
    >>> rows.flatten().tolist(), indices.tolist(), cu_seqlens.tolist(), longest, used.tolist()
    ([0, 1, 3], [0, 1, 3], [0, 2, 3], 2, [2, 1])
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    rows, indices, cu_seqlens, longest = _gathered(hidden_states, kept != 0, kept.sum(-1, dtype=torch.int32))
    return rows, indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """As `unpad_input`, for rows with several sequences each. attention_mask_in_length [B, S] holds their lengths, then
    zeros.

    >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
    >>> rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(torch.zeros(2, 4, 1), lengths)
    >>> indices.tolist(), cu_seqlens.tolist(), longest
    ([0, 1, 2, 4, 5, 6], [0, 2, 3, 6], 3)
    """
    lengths = attention_mask_in_length
    within = torch.arange(lengths.shape[-1], device=lengths.device) < lengths.sum(-1, keepdim=True)
    return _gathered(hidden_states, within, lengths[lengths != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Unpack [T, ...] to [batch, seqlen, ...], with zeros where there is no row.

    >>> pad_input(torch.ones(3, 1), torch.tensor([0, 1, 3]), 2, 3).flatten().tolist()
    [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _gathered(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """The kept rows, their indices, the running sum of lengths and the longest length."""
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


__all__ = [
    "index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
    "unpad_input_for_concatenated_sequences",
]  # fmt: skip
