"""Traits of a forward from its tile configuration, for tensors and for caches. Imports no kernel language."""

from __future__ import annotations

from dataclasses import replace

from ...problem.problem import Problem
from ...problem.target import Target
from ..protocol import entries, fills_tiles
from ..runtime.tma_requirements import qheads_per_tile, query_tiles
from .traits import ROWS, ForwardTraits, Tuning

# head dimensions for which optimistic softmax (`early`) is faster; at 256 the products alone are the limit. It needs
# EARLY_KEYS keys per row on average, because redo flags cost more than they save with fewer.
# speed relative to softmax that waits for row_max (H200), d128 and d64:
#   causal 512   0.97x, 0.99x
#   causal 1k    1.02x to 1.03x
#   dense 512    1.04x, 1.02x
EARLY = {(64, 64), (96, 96), (128, 128), (192, 128), (192, 192)}
EARLY_KEYS = 400


def forward_traits(
    problem: Problem, target: Target, tuning: Tuning, widths: tuple[int, int], early: bool
) -> ForwardTraits:
    """Traits of a forward without hooks, with pack_gqa where it pays. widths: padded head dimensions."""
    # A window's tile of more heads has fewer queries, which see fewer keys: up to 9 % faster for an equal number of
    # tiles (H200, windows of 128 to 4096).
    fewer = 0.0 if problem.mask.left else 0.1
    tuning = replace(tuning, pack_gqa=qheads_per_tile(problem, ROWS * tuning.consumers, ROWS, fewer))
    group = problem.group // tuning.pack_gqa
    even = fills_tiles(problem, tuning.block_n)
    counted = query_tiles(problem, tuning.block_m) * problem.heads_kv * group * entries(problem) > target.sm_count
    return ForwardTraits(
        tuning,
        *widths,
        group,
        problem.mask,
        bool(problem.softcap),
        problem.sinks,
        even,
        problem.packed,
        counted,
        early,
        runs=problem.runs,
    )
