"""torch's scaled_dot_product_attention with a tensor as mask, or with dropout, on strobe.

`sdpa.enable` puts `kernel_of` above torch's choice of a backend, since flash attention's own op takes no mask. A call
without mask and dropout goes on to that choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem
from ..mods.mask import mask_mod
from ..mods.score import bias
from ..ops import mods as ops
from ..ops.attention import decide
from ..problem.call import Call
from ..problem.keywords import dropout_of
from ..problem.mask import NO_BOUND
from .aten import served, top_left


class Asked(NamedTuple):
    """The arguments of `enable`. masks=None: calls for which strobe is faster than torch, or torch holds all scores."""

    masks: bool | None = None
    dropout: bool = False

    def serves(self, query: Tensor, attn_mask: Tensor | None, dropout_p: float) -> bool:
        if dropout_p and not self.dropout:
            return False
        if attn_mask is None or self.masks is not None:
            return attn_mask is None or bool(self.masks)
        if query.device.type == "cuda":
            return query.dtype.itemsize == 2
        return dropout_p > 0 or (attn_mask.requires_grad and torch.is_grad_enabled())


def kernel_of(original: Callable, asked: Callable[[], Asked], passed: Callable[[Exception], None]) -> Callable:
    """A kernel of aten::scaled_dot_product_attention. original: torch's kernel. asked: returns the current arguments of
    `enable`. passed: gets the reason why a call goes to torch's kernel.
    """

    def kernel(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False, **later
    ):
        if attn_mask is None and dropout_p == 0.0 and not later:
            if scale is None and enable_gqa is False:  # each argument costs host time
                return original(query, key, value, None, 0.0, True) if is_causal else original(query, key, value)
            return original(query, key, value, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        options = {"scale": scale, "enable_gqa": enable_gqa, **later}
        is_ours = (
            not later
            and _is_plain(query, key, value, attn_mask, is_causal, enable_gqa)
            and torch.backends.cuda.flash_sdp_enabled()  # as `torch.nn.attention.sdpa_kernel` sets it
            and asked().serves(query, attn_mask, dropout_p)
        )
        if is_ours:
            try:
                return attend((query, key, value), attn_mask, dropout_p, is_causal, scale)
            except (InvalidProblem, UnsupportedProblem) as refusal:
                passed(refusal)
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)

    return kernel


def attend(
    qkv: tuple[Tensor, Tensor, Tensor], attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """softmax(scale * q k^T + attn_mask) v, [B, H, S, D], with gradients of q, k, v and a mask of numbers.

    >>> q, mask = torch.randn(1, 2, 5, 16), torch.zeros(5, 5, requires_grad=True)
    >>> attend((q, q, q), mask, 0.0, False, None).sum().backward()
    >>> mask.grad.shape
    torch.Size([5, 5])

    attn_mask: bool or floating, and broadcasts to [B, H, S_q, S_k]. Dropped weights are those of strobe's random
    numbers, seeded by torch's generator. The result lies in memory as q does.
    """
    q, k, v = (t.transpose(1, 2) for t in qkv)
    q, k, v, right = top_left(q, k, v) if is_causal else (q, k, v, NO_BOUND)
    deterministic = torch.are_deterministic_algorithms_enabled()
    call = Call(q, k, v, right=right, scale=scale, deterministic=deterministic)
    score, mask = None, None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = mask_mod(attn_mask)
    elif attn_mask is not None:
        score = bias(attn_mask)
    out = _run(ops.bind(call, score, mask, dropout_of(dropout_p, None, q)), qkv[0])
    if type(out) is Tensor:  # else a graph is traced
        served[decide(call).forward.kernel.name] += 1
    return out


def _run(call: Call, query: Tensor) -> Tensor:
    """The result [B, H, S_q, D_v]. It lies as torch's does, for `view`: as query, or contiguous if D_v is another."""
    width = call.v.shape[-1]
    out = torch.empty_like(query) if width == query.shape[-1] else query.new_empty((*query.shape[:3], width))
    if out.transpose(1, 2).is_contiguous():  # as kernels allocate it
        return ops.run_bound(call)[0].transpose(1, 2)
    if call.needs_grad or type(out) is not Tensor:  # strobe's ops take out without gradients
        return out.copy_(ops.run_bound(call)[0].transpose(1, 2))
    ops.run_bound(call, out.transpose(1, 2))
    return out


def _is_plain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    """Whether shapes are those of the usual call; torch broadcasts others or refuses them in its own words."""
    if not (query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]):
        return False
    if any(hasattr(one, "device_mesh") for one in (query, key, value, attn_mask)):  # of a DTensor
        return False
    same_heads = query.shape[1] == key.shape[1] and key.shape[1] == value.shape[1]
    if not (same_heads or (enable_gqa and key.shape[1] == value.shape[1])) or 0 in (*query.shape, *key.shape):
        return False
    if attn_mask is None:
        return True
    whole = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    fits = 2 <= attn_mask.dim() <= 4 and all(
        size in (1, full) for size, full in zip(attn_mask.shape[::-1], whole[::-1])
    )
    return fits and not is_causal and attn_mask.dtype in (torch.bool, torch.float32, query.dtype)
