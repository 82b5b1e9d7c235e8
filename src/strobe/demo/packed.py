"""strobe under a transformers model: the sentences of a batch laid end to end, each attending to itself, with no padding.

The model is handed one row of tokens [1, T], positions that start again at each sentence, and the sentences' offsets;
transformers passes keywords it does not know on to the attention function of every layer, so the offsets arrive there.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

import strobe

NAME = "strobe_packed"  # transformers looks a name that holds "flash" up elsewhere


class Packed(NamedTuple):
    """Sentences end to end: ids and positions int64 [1, T], offsets int32 [n + 1]."""

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


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords) -> tuple[Tensor, None]:
    """What transformers calls in each layer, with query, key and value [1, H, T, D]; returns [1, T, H, D] and no weights."""
    if "cu_seq_lens_q" not in keywords:
        raise strobe.InvalidProblem("cu_seq_lens_q", "nothing", "offsets of the packed sentences", f"use {NAME} with packed input alone")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    longest = keywords["max_length_q"]
    out = strobe.attention_varlen(
        q, k, v, cu_seqlens_q=keywords["cu_seq_lens_q"], max_seqlen_q=longest, max_seqlen_k=longest, scale=keywords["scaling"]
    )
    return out[None], None


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def hidden_states(model: nn.Module, batch: Packed) -> Tensor:
    """The model's last layer for every token, [T, C]."""
    keywords = {"cu_seq_lens_q": batch.offsets, "max_length_q": batch.longest}
    return model(input_ids=batch.ids, position_ids=batch.positions, **keywords).last_hidden_state[0]


def mean_of_each(tokens: Tensor, batch: Packed) -> Tensor:
    """The mean over each sentence's tokens, [n, C] from [T, C]."""
    lengths = batch.offsets.diff()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=tokens.device), lengths, output_size=tokens.shape[0])
    return tokens.new_zeros(len(lengths), tokens.shape[1]).index_add_(0, owner, tokens) / lengths[:, None]
