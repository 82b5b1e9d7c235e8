"""When 8-bit keys are copied in q's dtype before the Hopper forward reads them. Imports no kernel language."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...problem.cache import FP8
from ...problem.call import DTYPES, Paged
from ...problem.mask import NO_BOUND
from ...problem.paged import PagedProblem
from ...problem.problem import ALIGNMENT
from ...problem.problem import rows_apart as contiguous_strides
from ...problem.target import KIB, Target
from ..protocol import Buffer
from ..runtime.compile_cache import Constants
from .prefill_config import LEAST_PAGE, MOST_TOKENS, against_prefill, prefill_traits
from .traits import ForwardTraits

COPIED_TILE = 64  # keys
# Sequences with at least so many rows for each key head are copied. To copy a key takes 0.2 ns a head; to convert it in
# each work tile takes as long for 900 rows (H200).
LEAST_ROWS = 2048
# Two launches more take 6 us, a third of a prefill of 512 tokens without other keys.
LEAST_CAPACITY = 2048  # keys of a sequence
MOST_COPIED = 512 * KIB * KIB  # bytes of the copy


@dataclass(frozen=True)
class CopyTraits(Constants):
    """Compile-time constants of the kernel that copies keys."""

    page_size: int  # of the cache; 0: a dense cache
    page_copy: int  # keys of a page of the copy
    k_start: bool
    k_scale: bool
    left: bool
    head_dim: int
    head_dim_v: int


@dataclass(frozen=True)
class KeyCopy:
    """A copy of the keys of sequences that have many new tokens, and the forward over it."""

    traits: CopyTraits
    forward: ForwardTraits
    problem: PagedProblem  # the call's, with the copy for its cache
    least_tokens: int  # new tokens of a sequence that is copied
    tiles: int  # of COPIED_TILE keys, for which there is room

    def buffers(self) -> tuple[Buffer, ...]:
        rows, batch = self.traits.page_copy, self.problem.layout.batch
        pool = (self.tiles * COPIED_TILE // rows, rows, self.problem.heads_kv)
        return (
            Buffer("k_copy", (*pool, self.problem.head_dim), self.problem.dtype),
            Buffer("v_copy", (*pool, self.problem.head_dim_v), self.problem.dtype),
            Buffer("copy_table", (batch, self.problem.capacity // rows), torch.int32),
            Buffer("is_copied", (batch,), torch.int32),
            Buffer("key_counts", (batch,), torch.int32),
        )

    def __str__(self) -> str:
        t = self.forward.tuning
        room = f"{self.tiles * COPIED_TILE} keys in {DTYPES[self.problem.dtype]}"
        return f"from {self.least_tokens} tokens, over a copy of up to {room}: block_m={t.block_m} stages={t.stages}"


def key_copy(problem: PagedProblem, target: Target) -> KeyCopy | None:
    """The copy with which a problem of 8-bit keys is faster, or None."""
    page = problem.page_size if problem.paged else 0
    least_tokens = max(-(-LEAST_ROWS // problem.group), MOST_TOKENS + 1)
    most_copied = problem.total_q // least_tokens  # sequences
    is_long = problem.layout.seqlen_q >= least_tokens and problem.capacity >= LEAST_CAPACITY
    if problem.cache_dtype != FP8 or not is_long or _window(problem) * problem.group < LEAST_ROWS:
        return None
    if not (page == 0 or _divides(page)):
        return None
    page_copy = min(page or COPIED_TILE, COPIED_TILE)
    table_tiles = -(-problem.capacity // COPIED_TILE)
    tiles_each = min(table_tiles, (problem.left + problem.layout.seqlen_q) // COPIED_TILE + 2)
    if problem.left == NO_BOUND:
        tiles_each = table_tiles
    tile_bytes = COPIED_TILE * problem.heads_kv * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    tiles = min(min(problem.layout.batch, most_copied) * tiles_each, MOST_COPIED // tile_bytes)
    pages = COPIED_TILE // page_copy
    shapes = [(tiles * pages, page_copy, problem.heads_kv, width) for width in (problem.head_dim, problem.head_dim_v)]
    copied = replace(
        problem,
        layout=Paged(problem.layout.batch, problem.layout.seqlen_q, page_copy, tiles * pages, table_tiles * pages),
        cache_dtype=problem.dtype,
        k_start=False,
        strides=(problem.strides[0], *map(contiguous_strides, shapes)),
        alignment=ALIGNMENT,
    )
    if against_prefill(copied, target) is not None:
        return None
    forward = prefill_traits(copied, target, in_copy=True)
    left = problem.left != NO_BOUND
    traits = CopyTraits(page, page_copy, problem.k_start, problem.scales[0], left, problem.head_dim, problem.head_dim_v)
    return KeyCopy(traits, forward, copied, least_tokens, tiles)


def _window(problem: PagedProblem) -> int:
    """The most queries that see a key."""
    if NO_BOUND in (problem.left, problem.right):
        return problem.layout.seqlen_q
    return min(problem.layout.seqlen_q, problem.left + problem.right + 1)


def _divides(page_size: int) -> bool:
    """Whether copied tiles are whole pages, or parts of one."""
    return page_size % COPIED_TILE == 0 or (page_size >= LEAST_PAGE and COPIED_TILE % page_size == 0)
