"""FlashAttention-2's `flash_attn.layers.rotary`: rotary position embeddings.

Written in PyTorch, without kernels and without einops, for any device. Differentiable in x; cos and sin get no
gradient, as in the original.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InvalidProblem, wrong_type


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Replace the pairs (a, b) of the last dimension by (-b, a). Pairs are its two halves, or neighbours if
    interleaved.

    >>> rotate_half(torch.arange(4.0)).tolist(), rotate_half(torch.arange(4.0), interleaved=True).tolist()
    ([-2.0, -3.0, 0.0, 1.0], [-1.0, 0.0, -3.0, 2.0])
    """
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    return torch.stack([-b, a], -1).flatten(-2) if interleaved else torch.cat([-b, a], -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R of x's D dimensions by cos and sin, in x's dtype. x is [B, S, H, D], cos and sin [S, R / 2] or
    [B, S, R / 2].

    >>> apply_rotary_emb_torch(torch.ones(1, 1, 1, 3), torch.zeros(1, 1), torch.ones(1, 1)).tolist()
    [[[[-1.0, 1.0, 1.0]]]]
    """
    width = 2 * cos.shape[-1]
    if width > x.shape[-1]:
        raise InvalidProblem("cos", f"angles of {width} dimensions", f"at most x's {x.shape[-1]}", "turn fewer of them")
    doubled = [t.repeat_interleave(2, -1) if interleaved else torch.cat([t, t], -1) for t in (cos, sin)]
    wide_cos, wide_sin = (t[..., None, :] for t in doubled)
    turning = x[..., :width]
    return torch.cat([turning * wide_cos + rotate_half(turning, interleaved) * wide_sin, x[..., width:]], -1)


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """Rotate x [B, S, H, D], or packed [T, H, D] with cu_seqlens, by the angles of its positions. cos and sin are
    [S_max, R / 2].

    >>> x, angles = torch.randn(2, 5, 4, 16), torch.randn(9, 4)
    >>> turned = apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=torch.tensor([0, 4], dtype=torch.int32))
    >>> second = apply_rotary_emb(x[1:], angles.cos(), angles.sin(), seqlen_offsets=4)
    >>> torch.equal(turned[1:], second), torch.equal(turned[..., 8:], x[..., 8:])
    (True, True)

    seqlen_offsets, an int or int32 [B], is the position of each sequence's first row. Products are float32 or wider;
    the result has x's dtype. Rows at or beyond S_max, or outside every sequence, are unchanged. inplace=True writes to
    x and returns it. max_seqlen is ignored.
    """
    for name, given, dims in (("x", x, 4 if cu_seqlens is None else 3), ("cos", cos, 2), ("sin", sin, 2)):
        if not isinstance(given, Tensor):
            raise wrong_type(name, given, "a tensor", "pass a torch.Tensor")
        if given.dim() != dims:
            raise InvalidProblem(
                name, f"shape {list(given.shape)}", f"{dims} dimensions", "reshape it; packed rows need cu_seqlens"
            )
    if cos.shape != sin.shape:
        raise InvalidProblem(
            "sin", f"shape {list(sin.shape)}", f"cos's {list(cos.shape)}", "make both of the same angles"
        )
    if not len(cos):
        raise InvalidProblem(
            "cos", f"shape {list(cos.shape)}", "a row for each position", "make angles up to the longest sequence"
        )
    position, known = _positions(x, seqlen_offsets, cu_seqlens), len(cos)
    has_angles = ((position >= 0) & (position < known))[..., None]
    place, wide = position.clamp(0, known - 1), torch.promote_types(x.dtype, torch.float32)
    at = lambda angles, otherwise: torch.where(has_angles, angles.detach().to(wide)[place], otherwise)
    turned = apply_rotary_emb_torch(x.to(wide), at(cos, 1.0), at(sin, 0.0), interleaved).to(x.dtype)
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb


def _positions(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """int64 [B, S] or [T]: the position of each row, or -1 for a row outside every sequence."""
    if cu_seqlens is None:
        first = seqlen_offsets.long()[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        return (torch.arange(x.shape[1], device=x.device) + first).expand(x.shape[0], -1)
    row, ends = torch.arange(len(x), device=x.device), cu_seqlens[1:].long()
    held, last = torch.searchsorted(ends, row, right=True), max(len(ends) - 1, 0)
    sequence = held.clamp(max=last)
    first = seqlen_offsets.long()[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    within = row - cu_seqlens[:-1].long()[sequence]
    return torch.where((held <= last) & (within >= 0), within + first, -1)


__all__ = ["apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_torch", "rotate_half"]
