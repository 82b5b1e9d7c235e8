"""Decode on CPUs: gather each sequence's keys and run the tiled forward on them.

A row's bits therefore equal those of the same row in a prefill if the tiles are equal, as with batch_invariant=True.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...problem.call import Call
from ...problem.decode import DecodeCall, DecodeProblem
from ...problem.mask import NO_BOUND
from ...problem.paged import PagedCall
from ..protocol import Forward, Plan
from ..runtime import error_flags
from . import parallel
from .forward import attend_jobs, tile_memory
from .parallel import Job
from .pieces import Piece, _together
from .tiles import wide


class Keys(NamedTuple):
    """The keys that a sequence's rows may see, gathered: k and v [1, n, H_kv, D], and sorted positions."""

    k: Tensor
    v: Tensor
    position: Tensor


def run(plan: Plan, call: DecodeCall, tensors: Forward, workspace: dict[str, Tensor]) -> None:
    problem: DecodeProblem = plan.problem
    call = call._replace(q=apart_from(tensors.out, call.q))
    out, lse = clear(call, tensors)
    tokens = problem.layout.seqlen_q
    jobs = [
        sequence_job(b, span, call.q[b : b + 1], plan, call, Forward(out[b : b + 1], lse[b : b + 1]))
        for b, span in enumerate(spans(call, problem))
        if tokens
    ]
    parallel.run(jobs, tile_memory(plan, workspace["scores"]))


def apart_from(out: Tensor, q: Tensor) -> Tensor:
    """q, or a copy of it if out=q."""
    return q.clone() if out.untyped_storage().data_ptr() == q.untyped_storage().data_ptr() else q


def clear(call: DecodeCall | PagedCall, tensors: Forward) -> Forward:
    """Write what rows that see no key have."""
    out, lse = tensors
    out.zero_()
    sinks = None if call.sinks is None else call.sinks.view(-1, 1)  # lse is [B, H_q, T] or [H_q, T]
    lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks.expand_as(lse))
    return tensors


def sequence_job(
    b: int, span: tuple[int, int], q: Tensor, plan: Plan, call: DecodeCall | PagedCall, tensors: Forward
) -> Job:
    """The job of sequence b, whose keys are in `span` and whose queries are q [1, T, H_q, D]."""
    problem: DecodeProblem = plan.problem
    tokens, length = q.shape[1], span[1] - span[0]
    seen = length if call.left == NO_BOUND else min(length, call.left + tokens)
    work = seen * tokens * problem.heads_q * (problem.head_dim + problem.head_dim_v)
    return Job(work, partial(_sequence, b, span, q, plan, call, tensors))


def _sequence(
    b: int,
    span: tuple[int, int],
    q: Tensor,
    plan: Plan,
    call: DecodeCall | PagedCall,
    tensors: Forward,
    scratch: Tensor,
) -> None:
    """Compute the rows of one sequence, whose keys are in `span`."""
    problem: DecodeProblem = plan.problem
    start, stop = span
    row = torch.arange(q.shape[1]) + stop - q.shape[1]
    first = torch.full_like(row, start) if call.left == NO_BOUND else (row - call.left).clamp(start, stop)
    last = torch.full_like(row, stop) if call.right == NO_BOUND else (row + call.right + 1).clamp(start, stop)
    keys = _keys(call, problem, b, int(first[0]), int(last[-1]))
    edge = _aligned(int(first[0]), start, plan.config.block_n)
    if plan.config.fixed_tiles and edge < first[0]:
        keys = _from_edge(keys, int(first[0]), edge)
    first, last = (torch.searchsorted(keys.position, bound) for bound in (first, last))
    seeing = first < last
    if seeing.any():
        piece = Piece(
            slice(0, 1),
            _together(seeing.nonzero().flatten()),
            slice(0, len(keys.position)),
            first[seeing],
            last[seeing],
            sequence=b,
            origin=(q.shape[1] - (stop - start), start),  # functions count positions from the first key
            key_positions=keys.position,
        )
        one = Call(q, keys.k, keys.v, sinks=call.sinks, mods=call.mods)
        for job in attend_jobs(piece, slice(0, problem.heads_kv), plan, one, tensors):
            job.run(scratch)


def _aligned(first: int, start: int, block: int) -> int:
    """The last tile boundary at or before `first`. Tiles are counted from the sequence's first key, as in a prefill."""
    return start + (first - start) // block * block


def _from_edge(keys: Keys, first: int, edge: int) -> Keys:
    """The keys from `first` on, preceded by zeros back to the tile boundary. The zeros replace rows before every
    window, which may belong to another sequence and must not be read.
    """
    zeros = [t.new_zeros(1, first - edge, *t.shape[2:]) for t in (keys.k, keys.v)]
    k, v = (torch.cat(pair, 1) for pair in zip(zeros, (keys.k, keys.v)))
    return Keys(k, v, torch.cat([torch.arange(edge, first), keys.position]))


def spans(call: DecodeCall | PagedCall, problem: DecodeProblem) -> list[tuple[int, int]]:
    """(first key, end) of each sequence, clamped to its capacity."""
    stop = call.seqlens.clamp(0, problem.capacity)
    if not torch.equal(stop, call.seqlens):
        error_flags.report(call.q.device, error_flags.SEQLENS)
    if call.k_start is None:
        return [(0, end) for end in stop.tolist()]
    start = torch.minimum(call.k_start.clamp(min=0), stop)
    if not torch.equal(start, call.k_start):
        error_flags.report(call.q.device, error_flags.K_START)
    return list(zip(start.tolist(), stop.tolist()))


def _keys(call: DecodeCall | PagedCall, problem: DecodeProblem, b: int, start: int, stop: int) -> Keys:
    """Keys [start, stop) of sequence b, except those whose page id is invalid."""
    if call.page_table is None:
        own = lambda scale: scale if scale is None or scale.dim() == 1 else scale[b, start:stop]
        k, v = (_worth(t[b, start:stop], own(scale), problem) for t, scale in _both(call))
        return Keys(k, v, torch.arange(start, stop))
    size = problem.page_size
    pages = torch.arange(start // size, -(-stop // size))
    ids = call.page_table[b, pages]
    present = (ids >= 0) & (ids < call.k.shape[0])
    if not present.all():
        error_flags.report(call.q.device, error_flags.PAGES)
        pages, ids = pages[present], ids[present]
    position = (pages[:, None] * size + torch.arange(size)).flatten()
    inside = _together(((position >= start) & (position < stop)).nonzero().flatten())
    own = lambda scale: scale if scale is None or scale.dim() == 1 else _rows(scale, ids)[inside]
    k, v = (_worth(_rows(t, ids)[inside], own(scale), problem) for t, scale in _both(call))
    return Keys(k, v, position[inside])


def _both(call: DecodeCall | PagedCall) -> tuple[tuple[Tensor, Tensor | None], ...]:
    return (call.k, call.k_scale), (call.v, call.v_scale)


def _rows(pages: Tensor, ids: Tensor) -> Tensor:
    """The rows of these pages, concatenated."""
    return pages[ids.long()].flatten(0, 1)


def _worth(rows: Tensor, scale: Tensor | None, problem: DecodeProblem) -> Tensor:
    """Rows as [1, n, H, D], dequantised by scales [H] or [n, H] if they are 8-bit."""
    if problem.cache_dtype == problem.dtype:
        return rows[None]
    rows = rows.to(wide(problem.dtype))
    return (rows if scale is None else rows * scale[..., None])[None]
