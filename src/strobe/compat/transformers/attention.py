"""The attention function that transformers calls in each layer. It reads grouped heads and cached keys in place,
without copies.

The mask comes from one of four sources: the mask function (`masks`), the offsets of packed sequences (cu_seq_lens;
faster), position_ids that restart, for models that do not pass them to the mask function, or a mask of the user's own
with four dimensions (`dense_masks`). What is read from the device is cached for all layers of a forward.
"""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.utils.import_utils import is_tracing

import strobe

from ...errors import InvalidProblem, UnsupportedProblem, describe
from ..signatures import rows_contiguous
from . import paged
from .context import active_plan, mask_of_plan
from .dense_masks import Sizes, dense_mask, is_dense
from .layer_mask import SDPA, Band, LayerMask


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query [B, H_q, S_q, D], key [B, H_kv, S_k, D] and value [B, H_kv, S_k, D_v] give ([B,
    S_q, H_q, D_v], None).

    attention_mask is the result of the mask function (`masks.mask`), a mask [B, H, S_q, S_k] of bools or of numbers
    that are added to scores, or None. position_bias [B, H_q, S_q, S_k] is added to scores, too; any of its sizes may be
    1, and it gets gradients. dropout drops weights by strobe's random numbers, which are not PyTorch's. Raises
    UnsupportedProblem for unsupported keywords.
    """
    _refuse(keywords)
    if isinstance(keywords.get("cache"), PagedAttentionCache):  # continuous batching: the keys of all sequences, packed
        key, value = keywords["cache"].update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=keywords
        )
    q, k, v = (rows_contiguous(t.transpose(1, 2)) for t in (query, key, value))
    if keywords.get("block_table") is not None:
        _refuse_biases(keywords, "block_table")
        own = {"scale": scaling, "softcap": keywords.get("softcap") or None, "sinks": keywords.get("s_aux")}
        return paged.decode((q[0], k[0], v[0]), keywords, own)[None], None
    options = {
        "scale": scaling,
        "softcap": keywords.get("softcap") or None,
        "sinks": keywords.get("s_aux"),
        "dropout_p": keywords.get("dropout") or 0.0,
    }
    if attention_mask is not None and is_dense(attention_mask):
        return _dense(attention_mask, (q, k, v), keywords, options), None
    if attention_mask is None:
        layer_mask = _mask_from_keywords(module, k.shape[1], keywords)
    else:
        layer_mask = LayerMask.from_tensor(attention_mask, q.shape[0], q.shape[1], k.shape[1])
    options["causal"], options["window"] = _band(module, layer_mask.band, attention_mask is not None, keywords)
    plan = active_plan()
    if plan is not None:
        _refuse_biases(keywords, "context_parallel")
        return strobe.attention(q, k, v, mask=mask_of_plan(plan), context_parallel=plan, **options), None
    packing = _packing(layer_mask, q, k, keywords)
    if isinstance(packing, Offsets):
        _refuse_biases(keywords, "cu_seq_lens_q")
        return strobe.attention_varlen(q[0], k[0], v[0], **packing._asdict(), **options)[None], None
    if layer_mask.seqlen_k < k.shape[1]:  # the cache is not full
        k, v = k[:, : layer_mask.seqlen_k], v[:, : layer_mask.seqlen_k]
    if keywords.get("position_bias") is not None:
        options["score_mod"] = strobe.bias(keywords["position_bias"])
    return strobe.attention(q, k, v, mask=packing, **options), None


def _dense(
    attention_mask: Tensor, qkv: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any], options: dict[str, Any]
) -> Tensor:
    """Attention under a mask [B, H, S_q, S_k], beside a position_bias."""
    if active_plan() is not None:
        got, expected = "a mask [B, H, S_q, S_k]", "None under context_parallel"
        raise UnsupportedProblem(describe("attention_mask", got, expected, "give the plan a mask"))
    if keywords.get("cu_seq_lens_q") is not None:
        got, expected = "offsets beside a mask [B, H, S_q, S_k]", "one of them"
        raise InvalidProblem("cu_seq_lens_q", got, expected, "leave attention_mask out of packed batches")
    q, k, _ = qkv
    found = dense_mask(attention_mask, Sizes(q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    biases = [one for one in (keywords.get("position_bias"), found.bias) if one is not None]
    if len(biases) == 2:
        biases = [biases[0][..., : k.shape[1]] + biases[1]]
    score_mod = strobe.bias(biases[0]) if biases else None
    return strobe.attention(*qkv, window=found.window, mask=found.mask, score_mod=score_mod, **options)


# ---------------------------------------------------------------- the band


def _mask_from_keywords(module: nn.Module, seqlen_k: int, keywords: dict[str, Any]) -> LayerMask:
    """The LayerMask of a layer without attention_mask: from is_causal and sliding_window, as in transformers' own
    functions.
    """
    causal = keywords.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if keywords.get("sliding_window") is None:
        return LayerMask(Band.CAUSAL if causal else Band.FULL, seqlen_k)
    return LayerMask(Band.WINDOW if causal else Band.AROUND, seqlen_k)


def _band(
    module: nn.Module, band: Band, masked: bool, keywords: dict[str, Any]
) -> tuple[bool, tuple[int, int | None] | None]:
    """strobe's `causal` and `window`. A mask was made with the config's sliding_window, and not every layer passes it
    again.

    transformers' causal windows include the row's own key, so strobe's left bound is one less."""
    if band in (Band.FULL, Band.CAUSAL):
        return band == Band.CAUSAL, None
    width = getattr(getattr(module, "config", None), "sliding_window", None) if masked else None
    left = width if band == Band.AROUND else width and width - 1
    if width is None:
        width = keywords.get("sliding_window")
        left = width and width - 1
    if left is None:
        raise UnsupportedProblem(describe("sliding_window", None, "the width of this layer's window", SDPA))
    return (True, (left, None)) if band == Band.WINDOW else (False, (left, left))


# ---------------------------------------------------------------- sequences packed end to end


class Offsets(NamedTuple):
    """Keywords of `strobe.attention_varlen`."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None


def _packing(layer_mask: LayerMask, q: Tensor, k: Tensor, keywords: dict[str, Any]) -> Offsets | strobe.Mask | None:
    """Offsets for one row of packed sequences, or a documents mask, or None."""
    if keywords.get("cu_seq_lens_q") is not None:
        return _given(layer_mask, q, keywords)
    positions = keywords.get("position_ids")
    alone = (
        layer_mask.final or layer_mask.band in (Band.FULL, Band.AROUND) or q.shape[1] == 1 or q.shape[1] != k.shape[1]
    )
    if alone or not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != q.shape[1]:
        return layer_mask.hidden
    if layer_mask.hidden is not None and (q.shape[0] > 1 or is_tracing(positions)):
        return layer_mask.hidden  # transformers has read the positions
    if is_tracing(positions):
        return _documents(_starts(positions), q.shape[0])
    found = _from_positions(positions, q.shape[0])
    if found is not None and keywords.get("use_cache"):
        remedy = (
            "pass use_cache=False, since a later step over the cache sees the keys of all of them; or "
            "generate from a padded batch"
        )
        message = describe(
            "position_ids", "packed sequences with use_cache=True", "one sequence a row beside a cache", remedy
        )
        warnings.warn(message, UserWarning, stacklevel=2)
    return layer_mask.hidden if found is None else found


def _given(layer_mask: LayerMask, q: Tensor, keywords: dict[str, Any]) -> Offsets:
    """Offsets from cu_seq_lens, as DataCollatorWithFlattening and continuous batching pass them. Without cu_seq_lens_k,
    q's are used for k.
    """
    if q.shape[0] != 1:
        raise InvalidProblem(
            "cu_seq_lens_q",
            f"a batch of {q.shape[0]}",
            "one row of packed sequences",
            "leave it out, or flatten the batch",
        )
    if layer_mask.final and layer_mask.hidden is not None:
        raise InvalidProblem(
            "cu_seq_lens_q",
            "offsets beside a padding mask or chunks",
            "one of them",
            "leave attention_mask out of packed batches",
        )
    keys = "k" if keywords.get("cu_seq_lens_k") is not None else "q"
    offsets = [keywords[f"cu_seq_lens_{side}"].to(torch.int32) for side in ("q", keys)]
    longest = [keywords.get(f"max_length_{side}") for side in ("q", keys)]
    return Offsets(
        *offsets, *(length if isinstance(length, int) else None for length in longest)
    )  # reading a tensor would synchronise


# position_ids -> ((batch, version), result of _read); all layers of a forward share the tensor
_seen: MutableMapping[Tensor, tuple[tuple[int, int], Offsets | strobe.Mask | None]] = WeakIdKeyDictionary()


def _from_positions(positions: Tensor, batch: int) -> Offsets | strobe.Mask | None:
    """Offsets or documents from positions [B or 1, S] that restart; None if they do not. Read once for all layers.

    Under inference_mode tensors have no version counter, so each layer reads them."""
    if positions.is_inference():
        return _read(positions, batch)
    known, state = _seen.get(positions), (batch, positions._version)
    if known is None or known[0] != state:
        known = _seen[positions] = state, _read(positions, batch)
    return known[1]


def _read(positions: Tensor, batch: int) -> Offsets | strobe.Mask | None:
    starts = _starts(positions)
    if batch > 1:
        return _documents(starts, batch) if bool(starts[:, 1:].any()) else None
    places = starts[0].nonzero().flatten().tolist()
    if len(places) < 2:
        return None
    ends = [*places, positions.shape[1]]
    offsets = torch.tensor(ends, dtype=torch.int32).to(positions.device)
    longest = max(stop - start for start, stop in pairwise(ends))
    return Offsets(offsets, offsets, longest, longest)


def _documents(starts: Tensor, batch: int) -> strobe.Mask:
    return strobe.documents(starts.cumsum(1).to(torch.int32).expand(batch, -1))


def _starts(positions: Tensor) -> Tensor:
    """bool [B, S]: the first position of each sequence. A row counts up by one and restarts at its first number or at
    0; any other row is one sequence.
    """
    later = positions[:, 1:]
    again = later != positions[:, :-1] + 1
    packed = (~again | (later == positions[:, :1]) | (later == 0)).all(1, keepdim=True)
    return torch.nn.functional.pad(again & packed, (1, 0), value=True)


# ---------------------------------------------------------------- unsupported keywords

_UNSERVED = {
    "indices": "strobe picks no keys by index; " + SDPA,
    "block_indices": "strobe picks no keys by index; " + SDPA,
    "sinks": "strobe's sinks are one number a head, s_aux; " + SDPA,
    "head_mask": "strobe weighs no heads; " + SDPA,
}


def _refuse_biases(keywords: dict[str, Any], beside: str) -> None:
    """A position_bias needs positions of one whole sequence, so packed, paged and distributed calls refuse it."""
    if keywords.get("position_bias") is not None:
        raise UnsupportedProblem(describe("position_bias", f"one beside {beside}", "None", SDPA))


def _refuse(keywords: dict[str, Any]) -> None:
    """Raise UnsupportedProblem for keywords that would change the result and that strobe does not support."""
    if keywords.get("output_attentions"):
        remedy = 'strobe never holds the weights; attn_implementation="eager" does'
        raise UnsupportedProblem(describe("output_attentions", True, "False", remedy))
    has_pages = "k_cache" in keywords or isinstance(keywords.get("cache"), PagedAttentionCache)
    if keywords.get("block_table") is not None and not has_pages:
        remedy = "call strobe.attention_paged, which takes pages of your own"
        raise UnsupportedProblem(describe("block_table", "a table without a cache", "continuous batching's", remedy))
    for name, remedy in _UNSERVED.items():
        if keywords.get(name) is not None:
            raise UnsupportedProblem(describe(name, type(keywords[name]).__name__, "None", remedy))
