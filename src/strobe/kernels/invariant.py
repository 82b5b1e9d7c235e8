"""Attention with the bits of a decode: what `batch_invariant=True` asks of a forward, to every family of GPUs.

A decode cuts a sequence's keys at fixed distances and joins the pieces in their order. A forward that does so too, with the decode's own tiles and
arithmetic, gives each row the bits that the decode of that row will have, whatever the batch, the padding, and the queries beside it.
"""

from __future__ import annotations

from typing import Any

from ..call import Dense
from ..decode import DecodeProblem
from ..problem import Problem
from .decoding import INVARIANT_SPLIT as INVARIANT_SPLIT
from .tma import against_mask

MOST_ROWS = 2**31  # rows of a tile are counted in int32


def as_decode(problem: Problem) -> DecodeProblem:
    """The problem over its keys as a dense cache; of packed sequences as if they were one."""
    layout: Any = problem.layout
    strides = tuple((0, *s) for s in problem.strides) if problem.packed else problem.strides
    return DecodeProblem(
        layout=Dense(1, *layout.tokens) if problem.packed else layout,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        dtype=problem.dtype,
        cache_dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        scale=problem.scale,
        softcap=problem.softcap,
        left=problem.left,
        right=problem.right,
        sinks=problem.sinks,
        k_start=False,
        scales=(False, False),
        strides=strides,
        alignment=problem.alignment_kv,
        batch_invariant=True,
        kernel=problem.kernel,
    )


def against(problem: Problem) -> str | None:
    """What a decode has no word for."""
    rows = problem.layout.tokens[0] * problem.group
    return against_mask(problem.mask) or (f"fewer than 2^31 rows of a key head; this has {rows}" if rows >= MOST_ROWS else None)


def row_tiles(problem: Problem, block_m: int) -> int:
    """Tiles of the rows of all query heads that share a key head; for packed sequences an upper bound: device.tiles.find_sequence."""
    layout: Any = problem.layout
    if problem.packed:
        return layout.total_q * problem.group // block_m + layout.batch + 2
    return -(-layout.seqlen_q * problem.group // block_m)


def sizes_of(problem: Problem, block_m: int) -> tuple[int, ...]:
    """(entries or sequences, key heads, S_q or T_q, S_k or T_k, row tiles, keys of a split), as the kernels are told."""
    layout: Any = problem.layout
    tokens = layout.tokens if problem.packed else layout[1:]
    return (layout.batch, problem.heads_kv, *tokens, row_tiles(problem, block_m), INVARIANT_SPLIT)


def programs(problem: Problem, block_m: int) -> int:
    return row_tiles(problem, block_m) * problem.heads_kv * (1 if problem.packed else problem.layout.batch)
