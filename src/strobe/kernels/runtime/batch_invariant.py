"""Forwards with the bits of a decode (`batch_invariant=True`), for all GPU families.

A decode splits a sequence's keys at fixed positions and combines the parts in order. A forward that does the same, with
the decode's tiles and arithmetic, gives each row the bits of that row's decode, independent of the batch, the padding
and the other queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...problem.call import Dense
from ...problem.decode import DecodeProblem
from ...problem.problem import Problem
from ..protocol import entries
from .split_kv import INVARIANT_SPLIT as INVARIANT_SPLIT
from .tma_requirements import against_mask, query_tiles

MOST_ROWS = 2**31  # a tile's rows are counted in int32


ALIKE = (
    "heads_q",
    "heads_kv",
    "head_dim",
    "head_dim_v",
    "dtype",
    "out_dtype",
    "scale",
    "softcap",
    "left",
    "right",
    "sinks",
    "kernel",
)


def as_decode(problem: Problem) -> DecodeProblem:
    """The problem as a decode over a dense cache. Packed sequences count as one."""
    layout: Any = problem.layout
    return DecodeProblem(
        layout=Dense(1, *layout.tokens) if problem.packed else layout,
        cache_dtype=problem.dtype,
        k_start=False,
        scales=(False, False),
        strides=tuple((0, *s) for s in problem.strides) if problem.packed else problem.strides,
        alignment=problem.alignment_kv,
        batch_invariant=True,
        **{name: getattr(problem, name) for name in ALIKE},
    )


def against(problem: Problem) -> str | None:
    """Why a decode kernel cannot run the problem, or None."""
    rows = problem.layout.tokens[0] * problem.group
    return against_mask(problem.mask) or (
        f"fewer than 2^31 rows of a key head; this has {rows}" if rows >= MOST_ROWS else None
    )


class InvariantShape(NamedTuple):
    """Sizes that kernels are passed, int32."""

    batch: Any  # batch entries, or packed sequences
    heads_kv: Any
    seqlen_q: Any  # or all packed query tokens
    seqlen_k: Any
    num_m_blocks: Any  # tiles of rows of a key head
    split_size: Any  # keys


def sizes_of(problem: Problem, block_m: int) -> InvariantShape:
    layout: Any = problem.layout
    seqlen_q, seqlen_k = layout.tokens if problem.packed else layout[1:]
    num_m_blocks = query_tiles(problem, block_m, problem.group)
    return InvariantShape(layout.batch, problem.heads_kv, seqlen_q, seqlen_k, num_m_blocks, INVARIANT_SPLIT)


def programs(problem: Problem, block_m: int) -> int:
    return query_tiles(problem, block_m, problem.group) * problem.heads_kv * entries(problem)
