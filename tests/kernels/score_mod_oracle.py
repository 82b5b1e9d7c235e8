"""Attention with functions of scores and lists of key blocks in float64, and what rounding allows a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strobe.kernels.protocol import Forward
from strobe.problem.call import Call


@dataclass
class Mods:
    """Functions for the kernel with what they read, and what they mean: score(s, b, h, q, k), mask(b, h, q, k)."""

    score_mod: Any = None
    score_aux: tuple = ()
    mask_mod: Any = None
    mask_aux: tuple = ()
    score: Callable[..., Tensor] | None = None
    mask: Callable[..., Tensor] | None = None


@dataclass
class Blocks:
    """Lists, and which keys they show: bool [B or 1, H or 1, S_q, S_k] of listed blocks, and of full ones."""

    lists: Any
    size: tuple[int, int]
    listed: Tensor
    full: Tensor


def exact(call: Call, mods: Mods, blocks: Blocks | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and |p| |v| in float64: the last bounds what rounding p to 16 bits changes."""
    if call.packed:
        return _exact_packed(call, mods, blocks)
    q, k, v = (t.double().transpose(1, 2) for t in (call.q, call.k, call.v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    s = scale * q @ k.mT
    if call.softcap:
        s = call.softcap * torch.tanh(s / call.softcap)
    batch, heads, rows, keys = s.shape
    indices = [torch.arange(n, device=s.device) for n in (batch, heads, rows, keys)]
    places = [index.view([-1 if i == j else 1 for j in range(4)]) for i, index in enumerate(indices)]
    if mods.score is not None:
        s = mods.score(s, *places).to(s.dtype).expand(s.shape)
    seen = call.mask.dense(rows, keys, s.device)[:, None].expand(batch, heads, rows, keys)
    if mods.mask is not None:
        seen = seen & mods.mask(*places)
    if blocks is not None:
        seen = blocks.listed & (blocks.full | seen)
    s = torch.where(seen, s, -torch.inf)
    lse = s.logsumexp(-1)
    lonely = lse == -torch.inf
    shift = torch.where(lonely, 0.0, lse)
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.double()[:, None])
        shift = lse
    p = torch.exp(s - shift[..., None])
    return (p @ v).transpose(1, 2), lse, (p @ v.abs()).transpose(1, 2)


def _exact_packed(call: Call, mods: Mods, blocks: Blocks | None) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence by sequence: b is the sequence's index, and positions begin with 0 in each."""
    out = torch.zeros(*call.q.shape[:-1], call.v.shape[-1], dtype=torch.float64, device=call.q.device)
    size, lse = out.clone(), out.new_full((call.q.shape[1], call.q.shape[0]), -torch.inf)
    offsets_q, offsets_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for i in range(len(offsets_q) - 1):
        rows, keys = slice(*offsets_q[i : i + 2]), slice(*offsets_k[i : i + 2])
        if rows.stop == rows.start or keys.stop == keys.start:
            continue
        one = call._replace(
            q=call.q[None, rows], k=call.k[None, keys], v=call.v[None, keys], cu_seqlens_q=None, cu_seqlens_k=None
        )
        numbered = Mods(
            score=None if mods.score is None else lambda s, b, h, q, k, i=i: mods.score(s, b + i, h, q, k),
            mask=None if mods.mask is None else lambda b, h, q, k, i=i: mods.mask(b + i, h, q, k),
        )
        part = None
        if blocks is not None:
            shown = [
                t[i : i + 1, :, : rows.stop - rows.start, : keys.stop - keys.start]
                for t in (blocks.listed, blocks.full)
            ]
            part = Blocks(blocks.lists, blocks.size, *shown)
        out[rows], lse[:, rows], size[rows] = (t[0] for t in exact(one, numbered, part))
    return out, lse, size


@torch.no_grad()
def judge(found: Forward, call: Call, mods: Mods, blocks: Blocks | None = None) -> float:
    """`judge_against` the oracle."""
    return judge_against(found, call, *exact(call, mods, blocks))


def judge_against(found: Forward, call: Call, out: Tensor, lse: Tensor, size: Tensor, exp_error: float = 0.0) -> float:
    """Largest error relative to what rounding of p, of out and of float32 scores allows. size: |p| |v|. exp_error: the
    relative error of the kernel's exponentials, which row sums have, too.
    """
    u = torch.finfo(call.q.dtype).eps
    error = (found.out.double() - out).abs() / ((1.5 * u + 2 * exp_error) * size + u * out.abs() + 2e-5)
    lonely = lse == -torch.inf
    assert found.lse[lonely].eq(-torch.inf).all(), "lse of rows without keys"
    errors = torch.where(lonely, 0.0, found.lse.double() - lse).abs() / (
        3e-5 + exp_error + 3e-7 * lse.abs().clamp(max=1e30)
    )
    worst = max(float(error.max()), float(errors[~lonely].max()) if (~lonely).any() else 0.0)
    assert worst <= 1.0, f"{worst:.2f} times the allowance"  # NaN fails too
    return worst
