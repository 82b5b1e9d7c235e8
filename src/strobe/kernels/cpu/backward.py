"""Backward over tiles ("FlashAttention-2", arXiv 2307.08691, section 3.2), with blocks of rows as the outer loop.

    for each tile:   p = exp2(s - lse)
                     dv += p^T do
                     ds = p * (do v^T - delta) * (derivative of the softcap)
                     dq += ds k
                     dk += ds^T q

All values are float32. Rows of a packed sequence beyond max_seqlen_q get NaN in dq and do not contribute to dk and dv.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...problem.call import Call
from ..protocol import Backward, Plan
from . import flash, parallel
from .forward import How, read_block, real_rows
from .modified import EMPTY, ModifiedBlock
from .parallel import Job
from .pieces import Piece, Pieces, as_batch, cut
from .tiles import LOG2_E, Block, Chunk, Config, Keys, Scores, blocks, chunks, hide, padded, tiles, wide


def run(plan: Plan, call: Call, tensors: Backward, workspace: dict[str, Tensor]) -> None:
    problem, config = plan.problem, plan.config
    call = call.gathered
    found = cut(call)
    call = as_batch(call)
    if problem.packed:
        tensors = Backward._make(None if t is None else t[None] for t in tensors)
    _fill(found, call, tensors)
    jobs: list[Job] = []
    for piece in found.pieces:
        if config.path == "torch_flash" and tensors.dlse is None and flash.takes_backward(piece):
            jobs += _flash_jobs(piece, len(found.pieces), plan, call, tensors)
        else:
            jobs += _attend_jobs(piece, plan, call, tensors)
    scratch = workspace["tiles"].view(-1, 2 * config.tile_elements(problem.group))
    if call.mods is not None and any(one is not None for one in call.mods.gradients):
        scratch = scratch[:1]  # one worker: all jobs add to the gradients of captured tensors, in one order
    parallel.run(jobs, scratch)


def _flash_jobs(piece: Piece, pieces: int, plan: Plan, call: Call, tensors: Backward) -> Iterator[Job]:
    problem = plan.problem
    _write_delta(piece, tensors)
    for heads in parallel.head_ranges(problem.heads_kv, pieces):
        work = 0 if pieces == 1 else piece.work * (heads.stop - heads.start) * problem.group * 5 * problem.head_dim
        yield Job(work, lambda scratch, heads=heads: flash.backward(piece, heads, call, tensors, problem))


def _attend_jobs(piece: Piece, plan: Plan, call: Call, tensors: Backward) -> Iterator[Job]:
    """Jobs of a piece in tiles: one per chunk, whose blocks of rows all add to its dk and dv."""
    config, problem = plan.config, plan.problem
    most = config.n_heads
    if not config.fixed_tiles:
        most = min(most, -(-(piece.entries.stop - piece.entries.start) * problem.heads_kv // torch.get_num_threads()))
    for chunk in chunks(piece, slice(0, problem.heads_kv), problem.group, most):
        work = piece.work // (piece.entries.stop - piece.entries.start) * chunk.n * problem.group * 5 * problem.head_dim
        yield Job(
            work, partial(_attend, Keys(chunk, piece, (call.k, call.v), wide(problem.dtype)), plan, call, tensors)
        )


def _attend(keys: Keys, plan: Plan, call: Call, tensors: Backward, scratch: Tensor) -> None:
    """Compute the gradients of one chunk in tiles."""
    config, problem, piece, chunk = plan.config, plan.problem, keys.piece, keys.chunk
    room = piece.n_keys + (-piece.n_keys % config.block_n if config.fixed_tiles else 0)
    grads = _Grads(*(torch.zeros(chunk.n, room, t.shape[-1], dtype=keys.dtype) for t in keys.tensors))
    for block in blocks(piece, config):
        index = block.index(piece)
        rows, delta = _read(chunk, call, tensors, index, config)
        how = Scores.of(problem), config, ModifiedBlock.of(plan, call, keys, block)
        dq = _block(rows, keys, grads, block, how, scratch.view(2, -1)).mul_(problem.scale)
        chunk.write_rows(tensors.dq, index, real_rows(dq, block, chunk))
        chunk.write_values(tensors.delta, index, delta)
    chunk.write_keys(tensors.dk, piece.keys, grads.dk[:, : piece.n_keys].mul_(problem.scale))
    chunk.write_keys(tensors.dv, piece.keys, grads.dv[:, : piece.n_keys])


class _Grads(NamedTuple):
    """Gradients of a chunk's keys and values, [N, keys, D]."""

    dk: Tensor
    dv: Tensor


class _Rows(NamedTuple):
    """A block's rows [N, group * rows, D], and lse (in log2 units) and delta [N, group * rows, 1]."""

    q: Tensor
    do: Tensor
    lse_log2: Tensor
    delta: Tensor


def _block(rows: _Rows, keys: Keys, grads: _Grads, block: Block, how: How, scratch: Tensor) -> Tensor:
    """dq of a block, without the scale. Adds to the keys' dk and dv."""
    scores, config, modified = how
    n, count = rows.q.shape[:2]
    dq = torch.zeros_like(rows.q)
    for tile in tiles(block, config):
        seen = None if modified is None else modified.seen(tile)
        if seen is EMPTY:
            continue
        at = tile.keys
        k, v = keys.read(at)
        p, ds = (buffer[: n * count * (at.stop - at.start)].view(n, count, -1) for buffer in scratch)
        scores.write(p, rows.q, k)
        torch.bmm(rows.do, v.transpose(1, 2), out=ds)
        if modified is not None:
            ds = modified.drop(ds, tile)
        ds.sub_(rows.delta)
        raw = p.clone() if modified is not None else p
        if scores.cap and modified is None:
            ds.mul_(1 - (p / scores.cap).square_())
        if modified is not None:
            modified.change(p, tile, seen)
        p.sub_(rows.lse_log2).exp2_()
        hide(p, tile, 0.0)
        weights = p if modified is None else modified.drop(p, tile)
        grads.dv[:, at].baddbmm_(weights.transpose(1, 2), rows.do)
        ds.mul_(p)
        hide(ds, tile, 0.0)  # 0 * NaN is NaN, and p of a NaN row is NaN at masked keys too
        if modified is not None:
            ds = modified.differentiate(ds, raw, tile, seen)
            if scores.cap:
                ds = ds.mul_(1 - (raw / scores.cap).square_())
            hide(ds, tile, 0.0)
        dq.baddbmm_(ds, k)
        grads.dk[:, at].baddbmm_(ds.transpose(1, 2), rows.q)
    return dq


def _read(chunk: Chunk, call: Call, tensors: Backward, index, config: Config) -> tuple[_Rows, Tensor]:
    """(a block's rows, padded for fixed tiles; its delta without padding). Padded rows have do = 0."""
    dtype = tensors.lse.dtype
    out = chunk.read_rows(tensors.out, index, dtype)
    delta = (chunk.read_rows(tensors.dout, index, dtype) * out).sum(-1, keepdim=True)
    if tensors.dlse is not None:
        delta -= chunk.read_values(tensors.dlse, index)
    lse_log2 = chunk.read_values(tensors.lse, index) * LOG2_E
    if call.mods is not None:  # a row without a visible key: exp2(-inf - inf) is 0, and do and dlse may be NaN
        empty = lse_log2 == -torch.inf
        lse_log2, delta = lse_log2.masked_fill(empty, torch.inf), delta.masked_fill(empty, 0.0)
    q, do = (read_block(chunk, t, index, dtype, config) for t in (call.q, tensors.dout))
    lines = lse_log2, delta
    if config.fixed_tiles:
        lines = (padded(t.unflatten(1, (chunk.group, -1)), 2, config.block_m).flatten(1, 2) for t in lines)
    rows = _Rows(q, do, *lines)
    if call.mods is not None:
        rows = rows._replace(do=do.masked_fill(rows.lse_log2 == torch.inf, 0.0))
    return rows, delta


def _fill(found: Pieces, call: Call, tensors: Backward) -> None:
    """Fill what no piece writes: rows without keys, keys without rows."""
    if not found.cover_rows(*call.q.shape[:2]):
        tensors.dq.zero_()
        tensors.delta.zero_() if tensors.dlse is None else torch.neg(tensors.dlse, out=tensors.delta)
    if not found.cover_keys(*call.k.shape[:2]):
        tensors.dk.zero_()
        tensors.dv.zero_()
    for rows in found.broken:
        tensors.dq[:, rows], tensors.delta[:, :, rows] = torch.nan, torch.nan


def _write_delta(piece: Piece, tensors: Backward) -> None:
    dout, out = (t[piece.entries, piece.rows].to(tensors.delta.dtype) for t in (tensors.dout, tensors.out))
    tensors.delta[piece.entries, :, piece.rows] = (dout * out).sum(-1).transpose(1, 2)
