"""FlashAttention-3's descales: q, k and v in float8_e4m3fn, each with a float32 scale for every sequence and key head.

Keys and values of a cache stay in 8 bits. Scales that are equal for all sequences, as engines expand them, become the
cache's own scales. Others are multiplied into q and out, because a score is linear in its query and in its key. q is
converted to bfloat16, and so are k and v without a cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from ..problem.cache import FP8


class Descales(NamedTuple):
    """float32 [B, H_kv] each, or None for 1."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


class Scaled(NamedTuple):
    """Queries without a descale, the cache's scales [H_kv], and what out is multiplied by, [B, H_kv] or None."""

    q: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    out_scale: Tensor | None


def over_cache(q: Tensor, pool: Tensor, descales: Descales, batch: int, offsets: Tensor | None) -> Scaled:
    """q [B, S, H_q, D], or packed [T, H_q, D] with offsets, over a cache whose keys are `pool`."""
    heads = pool.shape[2]
    _check("q_descale", descales.q, q, batch, heads)
    _check("k_descale", descales.k, pool, batch, heads)
    _check("v_descale", descales.v, pool, batch, heads)
    k_scale, by_sequence = _split(descales.k)
    v_scale, out_scale = _split(descales.v)
    for scale in (descales.q, by_sequence):
        if scale is not None:
            q = (q.float() * _beside(scale, q, offsets)).to(_wide(q))
    return Scaled(q.to(_wide(q)), k_scale, v_scale, out_scale)


def rescaled(out: Tensor, scale: Tensor | None, offsets: Tensor | None) -> Tensor:
    """out multiplied by a scale [B, H_kv]."""
    return out if scale is None else (out.float() * _beside(scale, out, offsets)).to(out.dtype)


def dequantized(
    qkv: tuple[Tensor, Tensor, Tensor], descales: Descales, offsets: tuple[Tensor | None, Tensor | None] = (None, None)
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in bfloat16 if they are 8-bit. offsets: of packed queries and of packed keys.

    >>> x = torch.ones(1, 3, 2, 16).to(torch.float8_e4m3fn)
    >>> q, _, _ = dequantized((x, x, x), Descales(q=torch.tensor([[0.5, 2.0]])))
    >>> q.dtype, q[0, 0, :, 0].tolist()
    (torch.bfloat16, [0.5, 2.0])
    """
    found = []
    for name, x, scale, own in zip(Descales._fields, qkv, descales, (offsets[0], offsets[1], offsets[1])):
        if isinstance(x, Tensor):
            heads = qkv[1].shape[-2] if isinstance(qkv[1], Tensor) else x.shape[-2]
            batch = len(x) if own is None else len(own) - 1
            _check(f"{name}_descale", scale, x, batch, heads)
            if scale is not None:
                x = (x.float() * _beside(scale, x, own)).to(_wide(x))
            x = x.to(_wide(x)) if x.dtype == FP8 else x
        found.append(x)
    return found[0], found[1], found[2]


def _wide(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype == FP8 else x.dtype


def _split(scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(a scale [H_kv] of all sequences, None), or (None, the scale [B, H_kv])."""
    if scale is None:
        return None, None
    if len(scale) == 1 or (len(scale) > 0 and scale.stride(0) == 0):  # expanded, as engines do
        return scale[0].contiguous(), None
    return None, scale


def _beside(scale: Tensor, x: Tensor, offsets: Tensor | None) -> Tensor:
    """The scale [B, H_kv] in the shape of x [B, S, H, D] or [T, H, D], whose heads are a multiple of H_kv. Rows of no
    sequence get an arbitrary scale: 1 if there are no sequences.
    """
    if offsets is not None and len(scale) == 0:
        return scale.new_ones(1, 1, 1)
    scale = scale.repeat_interleave(x.shape[-2] // scale.shape[1], 1)
    if offsets is None:
        return scale[:, None, :, None]
    row = torch.arange(len(x), device=x.device, dtype=offsets.dtype)
    sequence = torch.searchsorted(offsets[1:].contiguous(), row, right=True).clamp(max=len(scale) - 1)
    return scale[sequence][:, :, None]


def _check(name: str, scale: object, x: Tensor, batch: int, heads: int) -> None:
    if scale is None:
        return
    if not isinstance(scale, Tensor):
        raise wrong_type(name, scale, f"a float32 tensor [{batch}, {heads}] or None", "pass a torch.Tensor")
    if x.dtype != FP8:
        remedy = "leave it out, or quantize with strobe.quantize_kv"
        raise InvalidProblem(name, f"a scale beside {x.dtype}", "None, except for float8_e4m3fn", remedy)
    if scale.dtype != torch.float32 or tuple(scale.shape) != (batch, heads) or scale.device != x.device:
        got = f"{scale.dtype} {list(scale.shape)} on {scale.device}"
        raise InvalidProblem(name, got, f"torch.float32 [{batch}, {heads}] on {x.device}", "expand it")
