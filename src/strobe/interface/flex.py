"""`flex_attention`: the signature of torch.nn.attention.flex_attention on strobe's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from ..mods.mask import lengths_of, mask_mod
from ..mods.score import ScoreMod
from ..ops import mods as ops_mods
from .attention import attention, call_of


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
        query, key, value: [B, H, S, D], as torch lays them out. A batch of 1 of key and value serves all entries.
        score_mod: (score, b, h, q_idx, kv_idx) -> score.
        block_mask: a BlockMask of torch. Blocks in no list are not seen.
        enable_gqa: key and value may have fewer heads than query.
        return_lse: return (out, lse). return_aux, in its place: an AuxRequest of lse, max_scores or both. max_scores,
            the greatest score of each row after score_mod and mask, has no gradient.
        kernel_options: ignored; they tune torch's own kernels.

    On CPUs the backward of 16-bit inputs reads an output in float32, as torch's dense reference computes it, and not
    the rounded one.

    Needs no torch.compile. Returns what torch returns: out [B, H, S, D], (out, lse) or (out, AuxOutput).
    Raises InvalidProblem, TypeError or UnsupportedProblem, as `attention` does.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, tensor, "a tensor [B, H, S, D]", "pass a torch.Tensor")
        if tensor.dim() != 4:
            got, remedy = f"shape {list(tensor.shape)}", "use strobe.attention_varlen for packed tensors"
            raise InvalidProblem(name, got, "[B, H, S, D]", remedy)
    if block_mask is not None and not hasattr(block_mask, "kv_num_blocks"):
        remedy = "call strobe.attention, which takes mask=, or make one with torch's create_block_mask"
        raise wrong_type("block_mask", block_mask, "a torch.nn.attention.flex_attention.BlockMask or None", remedy)
    if return_aux is not None and not hasattr(return_aux, "max_scores"):
        raise wrong_type("return_aux", return_aux, "an AuxRequest or None", "pass AuxRequest(lse=True)")
    if return_lse and return_aux is not None:
        remedy = "pass return_aux=AuxRequest(lse=True) alone"
        raise InvalidProblem("return_lse", "True beside return_aux", "False", remedy)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        got, expected = f"{key.shape[1]} heads", f"query's {query.shape[1]} heads"
        raise InvalidProblem("key", got, expected, "pass enable_gqa=True to share key heads")
    if key.shape[0] == 1 < query.shape[0]:
        key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    if block_mask is not None:
        asked = query.shape[2], key.shape[2]
        if lengths_of(block_mask) not in (asked, None):
            made = " x ".join(map(str, block_mask.seq_lengths))
            raise InvalidProblem(
                "block_mask", f"one of {made}", " x ".join(map(str, asked)), "make it for these lengths"
            )
    wants_lse = return_lse if return_aux is None else return_aux.lse
    wants_max = return_aux is not None and return_aux.max_scores
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    mask = None if block_mask is None else mask_mod(block_mask)
    greatest = None
    if wants_lse or wants_max or _keeps_out_unrounded(query):
        call = call_of(q, k, v, options=(scale, None, None))._replace(partial=True)
        call = ops_mods.bind(call, score_mod, mask, max_scores=wants_max)
        found, lse, *rest = ops_mods.run_bound(call)
        greatest = rest[0] if rest else None
        out = found.to(call.q.dtype).transpose(1, 2)  # autocast's dtype, if it is enabled
    else:
        out, lse = attention(q, k, v, mask=mask, score_mod=score_mod, scale=scale).transpose(1, 2), None
    if return_aux is None:
        return (out, lse) if return_lse else out
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse=lse if wants_lse else None, max_scores=greatest if wants_max else None)


def _keeps_out_unrounded(query: Tensor) -> bool:
    """Whether the backward gets a float32 output. Where one weight of a row is large, rowsum(dO * O) with O rounded to
    16 bits is most of the error of dQ and dK. GPUs have no memory to spare for it.
    """
    return query.dtype.itemsize == 2 and query.device.type == "cpu" and torch.is_grad_enabled()
