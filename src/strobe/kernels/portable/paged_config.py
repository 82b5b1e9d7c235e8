"""What the portable kernel of packed queries over a cache can run, and with which tiles. Imports no kernel language."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ...problem.cache import FP8
from ...problem.call import FARTHEST
from ...problem.paged import PagedCall, PagedProblem
from ...problem.target import Target
from ..protocol import Buffer, Cost, Forward, Plan, decode_cost
from ..runtime.mod_function import mod_functions
from ..runtime.split_kv import INVARIANT_SPLIT
from . import decode_config as decode
from .arguments import LEAST_SHARE, RECORD

COMBINED_ROWS = 16  # rows per program of the combine
PROGRAMS_PER_SM = 2
MOST_PARTIALS = 8192  # with batch_invariant: partial results that are in memory at once
LEAST_PARTIALS = 2  # also where no tile can be split: the kernels are compiled with memory for partial results
PREFILL_ROWS = 128  # of tiles for prefills; 64 over 8-bit keys, which take registers while they are converted
PREFILL_TILES = tuple(
    decode.TileConfig(*sizes) for sizes in ((64, 8, 3), (64, 8, 2), (32, 8, 3), (32, 8, 2), (16, 8, 1))
)


@dataclass(frozen=True)
class PagedTraits(decode.DecodeTraits):
    """Compile-time constants of the three kernels."""

    k_token_scale: bool = False  # a scale for each key and head
    v_token_scale: bool = False
    tile_rows: int = 0  # rows of a tile; block_m of the combine is smaller
    split_align: int = 0  # splits begin at multiples of so many keys


@dataclass(frozen=True)
class PagedConfig:
    traits: PagedTraits
    combine: PagedTraits
    slots: int  # programs that run at once
    max_items: int
    max_partials: int  # partial results of split tiles

    def __str__(self) -> str:
        f = self.traits
        can_split = self.max_partials > LEAST_PARTIALS
        splits = f"keys split over {self.slots} programs where tiles are few" if can_split else "one split"
        return f"block_m={f.block_m} block_n={f.block_n} warps={f.warps} stages={f.stages}, {splits}"


def paged_config(problem: PagedProblem, target: Target) -> PagedConfig:
    layout, heads = problem.layout, problem.heads_kv
    # a mixed batch has long and short sequences: tiles fit sequences of up to four times the average length
    tokens = min(layout.seqlen_q, 4 * -(-problem.total_q // max(1, layout.batch)))
    if problem.dtype.itemsize > 2:  # registers of products on CUDA cores
        tokens = min(tokens, max(1, decode.MOST_ROWS_WIDE // problem.group))
    known = decode.traits_of(replace(problem, layout=layout._replace(seqlen_q=tokens)), target)
    if tokens * problem.group > decode.MOST_ROWS and known.block_m == decode.MOST_ROWS:
        block_m = decode.MOST_ROWS if problem.cache_dtype == FP8 else PREFILL_ROWS
        tile = decode.tile_of(problem, target, block_m, PREFILL_TILES)
        known = replace(known, block_m=block_m, block_n=tile.block_n, warps=tile.warps, stages=tile.stages)
    if problem.mods is not None:
        functions = mod_functions(problem.mods)
        known = replace(known, score_mod=functions.score_mod, mask_mod=functions.mask_mod)
    traits = PagedTraits(
        **{field.name: getattr(known, field.name) for field in fields(known) if field.init},
        k_token_scale=problem.token_scales[0],
        v_token_scale=problem.token_scales[1],
        tile_rows=known.block_m,
        split_align=INVARIANT_SPLIT if problem.batch_invariant else known.block_n,
    )
    tiles = heads * (problem.total_q * problem.group // traits.block_m + layout.batch + 2)
    slots = target.sm_count * PROGRAMS_PER_SM
    if problem.batch_invariant:
        most = -(-problem.capacity // INVARIANT_SPLIT)
        partials = min(layout.batch * heads * most, MOST_PARTIALS) if most > 1 else 0
    else:
        partials = 2 * slots if problem.capacity > LEAST_SHARE * traits.block_n else 0
    partials = max(partials, LEAST_PARTIALS)
    combine = replace(
        traits, block_m=min(COMBINED_ROWS, traits.block_m), warps=4, score_mod=None, mask_mod=None
    )  # scores are done
    return PagedConfig(traits, combine, slots, tiles + max(partials, slots), partials)


class PortablePaged:
    name = "portable.paged"

    def why_not(self, problem: PagedProblem, target: Target) -> str | None:
        rows = problem.total_q * problem.group + problem.layout.batch * decode.MOST_ROWS
        if rows * max(1, problem.heads_kv) >= FARTHEST:
            return f"fewer than 2^30 rows of query heads; these may be {rows * problem.heads_kv}"
        return decode.DECODE.why_not(problem, target)

    def config(self, problem: PagedProblem, target: Target) -> PagedConfig:
        return paged_config(problem, target)

    def cost(self, problem: PagedProblem) -> Cost:
        return decode_cost(problem)

    def workspace(self, problem: PagedProblem, config: PagedConfig) -> tuple[Buffer, ...]:
        ints = (2 + RECORD * (problem.layout.batch + 2) + config.max_items + config.max_partials // 2 + 1,)
        work = Buffer("work", ints, torch.int32)
        rows, wide = config.max_partials * config.traits.tile_rows, problem.lse_dtype
        return work, Buffer("partials", (rows, problem.head_dim_v), wide), Buffer("lse_partials", (rows,), wide)

    def run(self, plan: Plan, call: PagedCall, tensors: Forward, workspace: dict[str, Tensor]) -> None:
        from .launch_paged import run_paged

        run_paged(plan, call, tensors, workspace)


PAGED = PortablePaged()
