"""The decode step of continuous batching over pages: write the new keys at slots, then attend by a page table.

transformers gathers the keys of all requests in each step, unless flash_attention_2 or 3 runs on CUDA and no layer has
a window. `decode_over_pages` lets the step run over pages on every device and with windows.

Layers with a window keep a ring of at most `sliding_window` keys: position p lies in slot p % sliding_window. The order
of keys does not matter to attention, and every key in the ring is visible to the newest token. So a decode over the
ring has no mask.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching import initialization
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

import strobe

from ...errors import UnsupportedProblem, describe


class PagedCacheAllocator(FullAttentionCacheAllocator):
    """transformers' allocator, whose pages do not overlap in the views that kernels get: a page table holds blocks, and
    a view holds one page of each block. transformers' own views hold all pages of all layers, keys' and values'.
    """

    supports_block_table = True

    def register_cache_tensor(self, *given: Any, **more: Any) -> None:
        super().register_cache_tensor(*given, **more)
        step = self.block_physical_stride // self.tokens_per_page
        self._own_pages = {layer: (k[::step], v[::step]) for layer, (k, v) in self._kv_page_views.items()}

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        blocks = torch.tensor(self.block_table[request_id], dtype=block_table.dtype)
        block_table[: len(blocks)].copy_(blocks, non_blocking=True)

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        return self._own_pages[layer_idx]


class RingCacheAllocator(PagedCacheAllocator, SlidingAttentionCacheAllocator):
    """The same of layers with a window, whose ring is read through a page table."""


ALLOCATORS = {kind.layer_type: kind for kind in (PagedCacheAllocator, RingCacheAllocator)}


@contextmanager
def decode_over_pages(name: str) -> Iterator[None]:
    """Within the block, models with attn_implementation `name` decode over pages. max_blocks_per_request=0 in the
    configuration of continuous batching turns it off, as for transformers' own functions.
    """
    allocators: MutableMapping[str, Any] = cb_cache.ATTN_TYPE_TO_ALLOCATOR
    module: Any = initialization
    before, ensure = dict(allocators), module.ensure_decode_fast_path_is_available

    def ensure_here(config: Any, cb_config: Any, user_requested: bool) -> None:
        if config._attn_implementation != name:
            ensure(config, cb_config, user_requested)

    allocators.update(ALLOCATORS)
    module.ensure_decode_fast_path_is_available = ensure_here
    try:
        yield
    finally:
        allocators.update(before)
        module.ensure_decode_fast_path_is_available = ensure


def decode(qkv: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Attention of one new token of each request: q, k and v [T, heads, D]. keywords: the layer's, after the update of
    transformers' cache, which adds the pages and the table of this layer.

    Rows behind the last request are padding. options: scale, softcap and sinks.
    """
    q, k, v = qkv
    if keywords.get("dropout"):
        remedy = "call model.eval()"
        raise UnsupportedProblem(describe("dropout", keywords["dropout"], "0.0 over pages", remedy))
    positions = keywords.get("position_ids")
    if not isinstance(positions, Tensor):
        remedy = "set max_blocks_per_request=0 in the ContinuousBatchingConfig, so that keys are gathered"
        raise UnsupportedProblem(describe("position_ids", None, "the positions of new tokens", remedy))
    table: Tensor = keywords["block_table"]
    cache = strobe.PagedCache(keywords["k_cache"], keywords["v_cache"], table, keywords["cu_seq_lens_k"].diff())
    place = positions.flatten().long()
    if keywords.get("sliding_window") is not None:
        place = place % keywords["sliding_window"]
    strobe.append(cache, k, v, slots=_slots(place, table, cache.k_pages.shape[1]))
    offsets = keywords["cu_seq_lens_q"].to(torch.int32)
    out: Any = strobe.attention_paged(q, cache, cu_seqlens_q=offsets, max_seqlen_q=1, causal=False, **options)
    return out


def _slots(place: Tensor, table: Tensor, page_size: int) -> Tensor:
    """The slots of keys that lie at `place` in their requests' pages; negative for padding, whose pages are -1."""
    rows = min(len(place), len(table))
    column = (place[:rows] // page_size).clamp(max=table.shape[1] - 1)
    pages = table[:rows].long().gather(1, column[:, None])[:, 0]
    slots = pages * page_size + place[:rows] % page_size
    return torch.nn.functional.pad(slots, (0, len(place) - rows), value=-1)
