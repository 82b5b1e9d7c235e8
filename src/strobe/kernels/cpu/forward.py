"""Forward over tiles: online softmax ("FlashAttention-2", arXiv 2307.08691, section 3.1) per block of rows.

    for each tile of keys:   s = scores; row_max grows; acc and row_sum shrink by exp2(old - new)
                             p = exp2(s - row_max); row_sum += sum p; acc += p v
    at the end:              out = acc / row_sum; lse = log(row_sum) + row_max

All values are float32, including p. torch's 16-bit products round their results to 16 bits, too few for an accumulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...problem.call import Call
from ..protocol import Forward, Plan
from . import flash, parallel
from .modified import EMPTY, ModifiedBlock
from .parallel import Job, head_ranges
from .pieces import Piece, as_batch, cut
from .tiles import LN_2, LOG2_E, Block, Chunk, Config, Keys, Scores, blocks, chunks, hide, padded, tiles, wide


def run(plan: Plan, call: Call, tensors: Forward, workspace: dict[str, Tensor]) -> None:
    problem, config = plan.problem, plan.config
    call = call.gathered
    found = cut(call)
    call = as_batch(call)
    out, lse = (t[None] if problem.packed else t for t in tensors)
    if not found.cover_rows(*call.q.shape[:2]):
        out.zero_()
        lse.copy_(call.sinks[:, None].expand_as(lse)) if call.sinks is not None else lse.fill_(-torch.inf)
    for rows in found.broken:
        out[:, rows], lse[:, :, rows] = torch.nan, torch.nan
    jobs: list[Job] = []
    for piece in found.pieces:
        shape = flash.shape_of(piece, problem.dtype) if config.path == "torch_flash" else None
        if shape is None:
            jobs += attend_jobs(piece, slice(0, problem.heads_kv), plan, call, Forward(out, lse))
        else:
            jobs += _flash_jobs(piece, shape, len(found.pieces), plan, call, Forward(out, lse))
    parallel.run(jobs, tile_memory(plan, workspace["scores"]))


def tile_memory(plan: Plan, scratch: Tensor) -> Tensor:
    """The workspace, as memory for one tile per worker."""
    return scratch.view(-1, plan.config.tile_elements(plan.problem.group))


def _flash_jobs(
    piece: Piece, shape: flash.Shape, pieces: int, plan: Plan, call: Call, tensors: Forward
) -> Iterator[Job]:
    """Jobs of one piece (of `pieces`) for torch's kernel: one per block of a band and range of key heads."""
    problem = plan.problem
    parts = flash.parts(piece) if shape is flash.Shape.BAND else [piece]
    alone = pieces * len(parts) == 1
    for part in parts:
        for heads in head_ranges(problem.heads_kv, pieces * len(parts)):
            work = (
                0
                if alone
                else part.work * (heads.stop - heads.start) * problem.group * (problem.head_dim + problem.head_dim_v)
            )
            yield Job(work, partial(_flash, part, shape, heads, plan, call, tensors))


def _flash(
    piece: Piece, shape: flash.Shape, heads: slice, plan: Plan, call: Call, tensors: Forward, scratch: Tensor
) -> None:
    def tile() -> None:
        for job in attend_jobs(piece, heads, plan, call, tensors):
            job.run(scratch)

    flash.forward(piece, shape, heads, call, tensors, plan.problem, tile)


def attend_jobs(piece: Piece, heads: slice, plan: Plan, call: Call, tensors: Forward) -> Iterator[Job]:
    """Jobs of these key heads of a piece in tiles: one per block of rows."""
    config, problem = plan.config, plan.problem
    for chunk in chunks(piece, heads, problem.group, config.n_heads):
        keys = Keys(chunk, piece, (call.k, call.v), wide(problem.dtype), config.columns)
        for block in blocks(piece, config):
            work = block.pairs * chunk.n * problem.group * (problem.head_dim + problem.head_dim_v)
            yield Job(work, partial(_attend, keys, block, plan, call, tensors))


def _attend(keys: Keys, block: Block, plan: Plan, call: Call, tensors: Forward, scratch: Tensor) -> None:
    chunk, config = keys.chunk, plan.config
    index = block.index(keys.piece)
    q = padded(read_block(chunk, call.q, index, keys.dtype, config), 2, config.columns)
    sinks = _sinks(call, chunk, q)
    modified = ModifiedBlock.of(plan, call, keys, block)
    acc, row_sum, row_max = _block(q, keys, block, (Scores.of(plan.problem), config, modified), (scratch, sinks))
    if call.mods is not None and call.mods.max_scores is not None:
        chunk.write_values(call.mods.max_scores, index, real_rows(row_max * LN_2, block, chunk))
    row_max = row_max.mul_(LN_2).add_(row_sum.log())
    if sinks is not None:
        torch.maximum(row_max, sinks, out=row_max)  # the largest sinks are clamped in log2 units
    acc = acc[..., : call.v.shape[-1]].div_(row_sum)
    if modified is not None:  # a function may hide every key of a row
        acc.masked_fill_(row_sum == 0, 0.0)
    chunk.write_rows(tensors.out, index, real_rows(acc, block, chunk))
    chunk.write_values(tensors.lse, index, real_rows(row_max, block, chunk))


How = tuple[Scores, Config, "ModifiedBlock | None"]


def _block(q: Tensor, keys: Keys, block: Block, how: How, state: tuple[Tensor, Tensor | None]):
    """acc [N, rows, D_v padded], row_sum and row_max [N, rows, 1] of one block. A sink acts as a first key with value
    0.
    """
    (scores, config, modified), (scratch, sinks) = how, state
    n, rows = q.shape[:2]
    row_max = (
        q.new_full((n, rows, 1), -torch.inf)
        if sinks is None
        else sinks.clamp(max=torch.finfo(q.dtype).max / 1.5).mul_(LOG2_E)
    )
    row_sum = q.new_zeros(n, rows, 1) if sinks is None else (sinks != -torch.inf).to(q.dtype)
    width = keys.tensors[1].shape[-1]
    acc = q.new_zeros(n, rows, width + -width % config.columns)
    for tile in tiles(block, config):
        seen = None if modified is None else modified.seen(tile)
        if seen is EMPTY:
            continue
        s = scratch[: n * rows * (tile.keys.stop - tile.keys.start)].view(n, rows, -1)
        k, v = keys.read(tile.keys)
        scores.write(s, q, k)
        if modified is not None:
            modified.change(s, tile, seen)
        hide(s, tile, -torch.inf)
        new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
        # rows without a visible key so far: exp2(-inf - 0) is 0
        finite_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
        s.sub_(finite_max).exp2_()
        rescale = row_max.sub_(finite_max).exp2_()
        row_sum = row_sum.mul_(rescale).add_(s.sum(-1, keepdim=True))
        if modified is not None:
            s = modified.drop(s, tile)
        acc.mul_(rescale).baddbmm_(s, v)
        row_max = new_max
    return acc, row_sum, row_max


def _sinks(call: Call, chunk: Chunk, q: Tensor) -> Tensor | None:
    """The sinks of a chunk's heads, one per row: [N, group * rows, 1]."""
    if call.sinks is None:
        return None
    heads = call.sinks[chunk.heads_q].to(q.dtype).view(1, -1, chunk.group, 1)
    entries, rows = chunk.entries.stop - chunk.entries.start, q.shape[1] // chunk.group
    return heads.expand(entries, -1, -1, rows).reshape(q.shape[0], q.shape[1], 1)


def read_block(chunk: Chunk, tensor: Tensor, index, dtype: torch.dtype, config: Config) -> Tensor:
    """A block's rows of [B, S, H_q, D]; fixed_tiles pads each head's rows to block_m."""
    rows = chunk.read_rows(tensor, index, dtype)
    if not config.fixed_tiles:
        return rows
    return padded(rows.unflatten(1, (chunk.group, -1)), 2, config.block_m).flatten(1, 2)


def real_rows(rows: Tensor, block: Block, chunk: Chunk) -> Tensor:
    """[N, group * rows, D] without the padding of fixed_tiles."""
    count = block.stop - block.start
    if rows.shape[1] == chunk.group * count:
        return rows
    return rows.unflatten(1, (chunk.group, -1))[:, :, :count].flatten(1, 2)
