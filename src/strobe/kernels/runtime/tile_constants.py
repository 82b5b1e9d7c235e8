"""Compile-time constants that kernels with TMA have in common: column parts, key ranges, and a forward's tiles."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

from ...problem.mask import MaskStructure
from .tma_requirements import has_spans, rest

MOST_STAGED_COLUMNS = 320  # of 8-bit keys and values; wider ones leave no shared memory for staging buffers


class TileConstants:
    """Constants of forwards and backwards: key ranges of rows, and tile columns in two parts, each a power of two."""

    block_d: int
    block_dv: int
    mask: MaskStructure
    packed: bool

    @property
    def key_ranges(self) -> bool:
        """Whether rows of a batch entry may have different key ranges (device.key_ranges)."""
        return has_spans(self.mask)

    @property
    def wraps(self) -> bool:
        """Whether TMA descriptors wrap around (device.tma)."""
        return self.packed or self.key_ranges

    @property
    def main_d(self) -> int:
        """Columns of the main part of Q and K."""
        return self.block_d - self.tail_d

    @property
    def tail_d(self) -> int:
        """Columns of the tail of Q and K, or 0."""
        return rest(self.block_d)

    @property
    def main_dv(self) -> int:
        """Columns of the main part of V and O."""
        return self.block_dv - self.tail_dv

    @property
    def tail_dv(self) -> int:
        """Columns of the tail of V and O, or 0."""
        return rest(self.block_dv)


class CacheConstants(NamedTuple):
    """Compile-time constants of a cache (device.cached_keys)."""

    page_size: int  # 0: a dense cache
    k_start: bool = False
    # 8-bit keys and values, which the producer converts (device.converted_keys)
    fp8: bool = False
    k_scale: bool = False  # one for each key head
    v_scale: bool = False
    head_dim: int = 0  # of 8-bit keys
    head_dim_v: int = 0
    # Keys in a TMA copy, which are at most those of a window. TMA zeroes either the rows before a window or those after
    # the last key of a sequence, so a copy must not hold both.
    most_box_rows: int = 256  # TMA's limit
    # whether a launch runs the sequences whose keys have been copied, or the others; None: nothing is copied
    in_copy: bool | None = None


class ForwardTileConstants(TileConstants):
    """Constants of forwards that follow from the tile configuration `tuning`."""

    tuning: Any
    counted: bool
    cache: CacheConstants | None = None  # packed queries see the keys of a cache
    runs: bool = False  # packed queries in runs over shared keys

    @property
    def cached(self) -> bool:
        return self.cache is not None

    @property
    def has_pages(self) -> bool:
        """Whether keys lie in pages. Any page may have an id that is not in the pool."""
        return self.cache is not None and self.cache.page_size > 0

    @property
    def page_size(self) -> int:
        return 0 if self.cache is None else self.cache.page_size

    @property
    def k_start(self) -> bool:
        """Whether sequences of a dense cache do not begin with its row 0."""
        return self.cache is not None and self.cache.k_start

    @property
    def converts_keys(self) -> bool:
        """Whether the cache holds 8-bit keys, which the producer converts to q's dtype."""
        return self.cache is not None and self.cache.fp8

    @property
    def has_k_scale(self) -> bool:
        return self.cache is not None and self.cache.k_scale

    @property
    def has_v_scale(self) -> bool:
        return self.cache is not None and self.cache.v_scale

    @property
    def copies_keys(self) -> bool:
        """Whether 8-bit keys of some sequences have been copied to a cache in q's dtype, over which another launch
        runs.
        """
        return self.cache is not None and self.cache.in_copy is not None

    @property
    def in_copy(self) -> bool:
        """Whether this launch runs the sequences whose keys have been copied."""
        return self.cache is not None and self.cache.in_copy is True

    @property
    def box_rows(self) -> int:
        """Keys that one TMA copy moves. With 8-bit keys, as many as share a page wherever a tile begins."""
        if self.converts_keys:
            return gcd(self.page_size, self.block_n)
        most = self.block_n if self.cache is None else min(self.block_n, self.cache.most_box_rows)
        return min(self.page_size or most, most)

    @property
    def stages_keys(self) -> bool:
        """Whether 8-bit keys are copied into staging buffers before they are converted (device.staged_keys)."""
        return self.converts_keys and self.block_d + self.block_dv <= MOST_STAGED_COLUMNS

    @property
    def producer_warps(self) -> int:
        return 4 if self.converts_keys else 1

    @property
    def stages(self) -> int:
        return self.tuning.stages

    @property
    def block_m(self) -> int:
        """Queries per tile."""
        return self.tuning.block_m

    @property
    def block_n(self) -> int:
        return self.tuning.block_n

    @property
    def pack_gqa(self) -> int:
        """Query heads per tile: 1, or all that share a key head."""
        return self.tuning.pack_gqa

    @property
    def rows_per_query(self) -> int:
        """Rows of a tile per query: pack_gqa, rounded up to a power of two."""
        return self.tuning.rows_per_query

    @property
    def dynamic_scheduler(self) -> bool:
        """Whether programs take tiles from a counter."""
        return self.counted

    @property
    def longest_tiles_first(self) -> bool:
        """Whether later rows see more keys: tiles that see most come first, and heads in sections."""
        return (self.mask.right or self.mask.prefix) and not self.mask.left
