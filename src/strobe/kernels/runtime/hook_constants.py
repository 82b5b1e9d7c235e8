"""What is constant of a forward's hooks (device.forward_hooks): functions of scores, and lists of key blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...problem.mask import MaskStructure
from .compile_cache import hash_callees_first


class ListedBlocks(NamedTuple):
    """Sizes of the blocks that a call's lists name."""

    block_q: int  # queries, a multiple of the tile's
    block_kv: int  # keys, a multiple of the kernel's key block
    has_full: bool  # whether there is a list of full blocks


class HookConstants:
    """Base of a forward's traits. These defaults are those of a forward without hooks."""

    score_mod: Any = None
    mask_mod: Any = None
    block_lists: ListedBlocks | None = None
    dropout: bool = False
    max_scores: bool = False
    has_pages: bool = False
    packed: bool
    mask: MaskStructure
    block_n: Any

    @property
    def has_mods(self) -> bool:
        return self.score_mod is not None or self.mask_mod is not None or self.dropout

    @property
    def has_block_lists(self) -> bool:
        return self.block_lists is not None

    @property
    def has_full_blocks(self) -> bool:
        return self.block_lists is not None and self.block_lists.has_full

    @property
    def list_block_q(self) -> int:
        """Queries of a listed block."""
        return 0 if self.block_lists is None else self.block_lists.block_q

    @property
    def blocks_per_listed(self) -> int:
        """Key blocks of the kernel in a listed block."""
        return 1 if self.block_lists is None else self.block_lists.block_kv // self.block_n

    @property
    def numbers_sequences(self) -> bool:
        """Whether consumers know which packed sequence a tile is of."""
        return self.packed and (self.has_mods or self.has_block_lists)

    @property
    def hides_beyond_mask(self) -> bool:
        """Whether a row whose interval of keys is not empty may see no key."""
        return self.has_mods or self.has_block_lists or self.has_pages

    @property
    def no_sum_means_no_key(self) -> bool:
        """Optimistic softmax: whether a row with the sum 0 sees no key, because the steps that look for row maxima
        would have met it. A score_mod may hide keys in any step, and so may lost pages, and key lengths in a listed
        block.
        """
        anywhere = self.score_mod is not None or self.has_pages or self.mask.key_lengths
        return self.hides_beyond_mask and not anywhere


def function_key(function: Any) -> str | None:
    """A hash of the text of a device function that traits hold, and of all functions that it calls. Triton's key of a
    kernel has only the name of such a function.
    """
    if function is None:
        return None
    hash_callees_first(function)
    return getattr(function, "cache_key", "interpreted")[:16]
