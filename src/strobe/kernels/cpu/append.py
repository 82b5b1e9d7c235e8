"""Append to a cache on CPUs: positions become (page, row) pairs, and one indexed write stores all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem.append import AppendCall, AppendProblem
from ...problem.cache import FP8, quantize_rows, to_fp8
from ..protocol import Plan
from ..runtime import error_flags
from .pieces import offsets_of
from .tiles import wide


def run(plan: Plan, call: AppendCall, tensors: None, workspace: dict[str, Tensor]) -> None:
    problem: AppendProblem = plan.problem
    place, position, page = _at_slots(call, problem) if call.at_slots else _at_ends(call, problem)
    present = (page >= 0) & (page < call.k.shape[0])
    if not present.all():
        error_flags.report(call.k.device, error_flags.PAGES)
    place, position, page = place[present], position[present], page[present]
    row = position % max(1, problem.page_size)
    dtype = wide(problem.dtype)
    k, v = (new.reshape(-1, *new.shape[-2:])[place].to(dtype) for new in (call.k_new, call.v_new))
    if call.cos is not None and call.sin is not None:
        k = _turned(k, (call.cos, call.sin), position, call.interleaved)
    for pool, new, scale in ((call.k, k, call.k_scale), (call.v, v, call.v_scale)):
        if pool.dtype == FP8:  # torch cannot index 8-bit floats, so their bytes are used
            if scale is not None and scale.dim() > 1:
                new, scale[page, row] = quantize_rows(new)
            else:
                new = to_fp8(new, scale)
            pool, new = pool.view(torch.uint8), new.view(torch.uint8)
        pool[page, row] = new.to(pool.dtype)


def _at_ends(call: AppendCall, problem: AppendProblem) -> tuple[Tensor, Tensor, Tensor]:
    """(row of the packed k_new, position in its sequence, page) of each new token that has room."""
    batch, rank, place = _tokens(call, problem)
    position = call.seqlens.long()[batch] + rank
    inside = (position >= 0) & (position < problem.capacity)
    if not inside.all():
        error_flags.report(call.k.device, error_flags.NO_ROOM)
    batch, place, position = batch[inside], place[inside], position[inside]
    page = batch if call.page_table is None else call.page_table[batch, position // problem.page_size].long()
    return place, position, page


def _at_slots(call: AppendCall, problem: AppendProblem) -> tuple[Tensor, Tensor, Tensor]:
    """The same of tokens with a slot. A negative slot is padding."""
    place = (call.seqlens >= 0).nonzero().flatten()
    slot = call.seqlens.long()[place]
    return place, slot, slot // problem.page_size


def _tokens(call: AppendCall, problem: AppendProblem) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, rank in it, row of the packed k_new) of each new token that has a sequence."""
    row = torch.arange(problem.tokens)
    if call.cu_seqlens_q is None:
        return row // problem.layout.seqlen_q, row % problem.layout.seqlen_q, row
    offsets = torch.tensor(offsets_of("cu_seqlens_q", call.cu_seqlens_q, problem.tokens))
    batch = torch.repeat_interleave(torch.arange(problem.layout.batch), offsets.diff())
    row = row[int(offsets[0]) : int(offsets[-1])]
    return batch, row - offsets[batch], row


def _turned(k: Tensor, angles: tuple[Tensor, Tensor], position: Tensor, interleaved: bool) -> Tensor:
    """k [n, H, D] with its first rotary_dim dimensions rotated by each token's angles; NaN if there are none."""
    known = angles[0].shape[0]
    beyond = position >= known
    if beyond.any():
        error_flags.report(k.device, error_flags.NO_ANGLE)
    cos, sin = (
        t[position.clamp(max=known - 1)].to(k.dtype).masked_fill(beyond[:, None], torch.nan)[:, None] for t in angles
    )
    width = 2 * cos.shape[-1]
    pairs = k[..., :width].unflatten(-1, (-1, 2)).unbind(-1) if interleaved else k[..., :width].chunk(2, -1)
    a, b = pairs
    turned = a * cos - b * sin, b * cos + a * sin
    combined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([combined, k[..., width:]], -1)
