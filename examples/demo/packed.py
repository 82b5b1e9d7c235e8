"""strobe under a transformers model: the sentences of a batch are packed, each attends to itself, nothing is padded.

The model gets one row of tokens [1, T], positions that restart at each sentence, and the sentences' offsets.
transformers passes unknown keywords to the attention function of every layer, where `strobe.integrations.transformers`
reads them.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Packed(NamedTuple):
    """Packed sentences: ids and positions int64 [1, T], offsets int32 [n + 1]."""

    ids: Tensor
    positions: Tensor
    offsets: Tensor
    longest: int


def pack(sentences: list[list[int]], device: torch.device) -> Packed:
    """
    >>> pack([[5, 6], [7, 8, 9]], torch.device("cpu")).offsets.tolist()
    [0, 2, 5]
    """
    lengths = [len(ids) for ids in sentences]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    ids = torch.tensor([token for ids in sentences for token in ids])
    return Packed(ids[None].to(device), positions[None].to(device), offsets.to(device), max(lengths))


def hidden_states(model: nn.Module, batch: Packed) -> Tensor:
    """The model's last layer for every token, [T, C]."""
    keywords = {
        "cu_seq_lens_q": batch.offsets,
        "max_length_q": batch.longest,
    }  # self-attention: the key offsets are the same
    return model(input_ids=batch.ids, position_ids=batch.positions, **keywords).last_hidden_state[0]


def mean_of_each(tokens: Tensor, batch: Packed) -> Tensor:
    """The mean over each sentence's tokens, [n, C] from [T, C]."""
    lengths = batch.offsets.diff()
    owner = torch.repeat_interleave(
        torch.arange(len(lengths), device=tokens.device), lengths, output_size=tokens.shape[0]
    )
    return tokens.new_zeros(len(lengths), tokens.shape[1]).index_add_(0, owner, tokens) / lengths[:, None]
