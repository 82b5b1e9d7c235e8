"""`flex_attention`: the signature of torch.nn.attention.flex_attention on strobe's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .errors import InvalidProblem, UnsupportedProblem
from .interface import attention, partial_attention
from .mods.mask import mask_mod
from .mods.score import ScoreMod


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | Callable | None = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    """Compute attention with the arguments of torch.nn.attention.flex_attention.flex_attention.

    >>> import torch
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> q = torch.randn(1, 2, 128, 16)
    >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 1, 1, 128, 128, device="cpu")
    >>> flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx), causal).shape
    torch.Size([1, 2, 128, 16])

    Args:
        query, key, value: [B, H, S, D], as torch lays them out.
        score_mod: (score, b, h, q_idx, kv_idx) -> score.
        block_mask: a BlockMask of torch. Blocks in no list are not seen.
        enable_gqa: key and value may have fewer heads than query.
        return_lse: return (out, lse). return_aux: an AuxRequest; max_scores is not supported.
        kernel_options: ignored; they tune torch's own kernels.

    Needs no torch.compile. Returns what torch returns: out [B, H, S, D], (out, lse) or (out, AuxOutput).
    Raises InvalidProblem, TypeError or UnsupportedProblem, as `attention` does.
    """
    if not enable_gqa and query.dim() == 4 and key.dim() == 4 and query.shape[1] != key.shape[1]:
        got, expected = f"{key.shape[1]} heads", f"query's {query.shape[1]} heads"
        raise InvalidProblem("key", got, expected, "pass enable_gqa=True to share key heads")
    wants_lse = return_lse
    if return_aux is not None:
        if return_aux.max_scores:
            raise UnsupportedProblem("return_aux with max_scores: strobe returns lse alone; leave max_scores out")
        wants_lse = return_aux.lse
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    mask = None if block_mask is None else mask_mod(block_mask)
    if wants_lse:
        found, lse = partial_attention(q, k, v, mask=mask, score_mod=score_mod, scale=scale)
        out = found.to(query.dtype).transpose(1, 2)
    else:
        out, lse = attention(q, k, v, mask=mask, score_mod=score_mod, scale=scale).transpose(1, 2), None
    if return_aux is None:
        return (out, lse) if return_lse else out
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse=lse)
