"""Errors for arguments of other attention libraries. Each TypeError names the strobe argument to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature

import torch
from torch import Tensor

from ..errors import wrong_type

MASKS = (
    "causal=True, window=(left, right), or mask= of strobe.causal(), strobe.window(), strobe.prefix_causal(), "
    "strobe.documents(), strobe.key_lengths() and strobe.mask_mod(), combined by &, | and ~"
)
_WRITTEN_OUT = f"give what it stands for: {MASKS}; leave it out where all keys are seen"
# argument of scaled_dot_product_attention, FlexAttention or FlashAttention -> (expected, remedy)
_INSTEAD = {
    "attn_mask": ("mask=", _WRITTEN_OUT),
    "attention_mask": ("mask=", _WRITTEN_OUT),
    "block_mask": ("mask=", _WRITTEN_OUT),
    "is_causal": (
        "causal=",
        (
            "give causal=True; it is aligned at the bottom right, and torch's at the top left, which differs where S_q "
            "is not S_k"
        ),
    ),
    "dropout_p": ("no dropout", "leave it out; strobe.attention(..., dropout_p=) drops weights"),
    "dropout": ("dropout_p=", "give dropout_p= to strobe.attention or strobe.attention_varlen"),
    "enable_gqa": (
        "k and v with a divisor of q's heads",
        "leave it out: query head h reads key head h // (H_q // H_kv)",
    ),
    "softmax_scale": ("scale=", "give scale=, which multiplies q k^T"),
    "sm_scale": ("scale=", "give scale=, which multiplies q k^T"),
    "window_size": ("window=", "give window=(left, right), both ends included; None or a negative number is no bound"),
    "sinks": ("no sinks", "apply them once, after the last merge: strobe.with_sinks(partial, sinks)"),
    "out": ("no output tensor", "leave it out: attention and attention_varlen alone write to a given tensor"),
    "context_parallel": ("no plan", "give context_parallel= to strobe.attention or strobe.attention_varlen"),
    "sink": ("sinks=", "give sinks= [H_q], one logit a head"),
    "s_aux": ("sinks=", "give sinks= [H_q], one logit a head"),
    "alibi_slopes": ("score_mod=", "give score_mod=strobe.alibi(slopes)"),
    "return_lse": ("one tensor", "call strobe.partial_attention, which gives the log-sum-exp too"),
    "return_softmax_lse": ("one tensor", "call strobe.partial_attention, which gives the log-sum-exp too"),
    "return_attn_probs": ("one tensor", "call strobe.partial_attention, which gives the log-sum-exp too"),
}


def unknown(function: Callable, given: Mapping[str, object]) -> TypeError:
    """The TypeError for the first of the keywords that a function does not have.

    >>> def attention(q, causal=False, **others): ...
    >>> str(unknown(attention, {"is_causal": True}))[:54]
    'is_causal: got bool, expected causal=; give causal=Tru'
    >>> str(unknown(attention, {"casual": True}))
    "attention() got an unexpected keyword argument 'casual'; did you mean causal=?"
    """
    name, value = next(iter(given.items()))
    if name in _INSTEAD:
        expected, remedy = _INSTEAD[name]
        return wrong_type(name, value, expected, remedy)
    near = get_close_matches(name, signature(function).parameters, 1)
    return TypeError(
        f"{function.__name__}() got an unexpected keyword argument {name!r}"
        + (f"; did you mean {near[0]}=?" if near else "")
    )


def no_mask(got: object) -> TypeError:
    """The TypeError for a mask that is not a strobe.Mask.

    >>> str(no_mask(lambda b, h, i, j: i >= j))[:61]
    'mask: got function, expected a strobe.Mask; wrap it: strobe.m'
    """
    remedy = f"give {MASKS}"
    if isinstance(got, Tensor) and got.dtype == torch.bool:
        remedy = f"give mask=strobe.mask_mod(tensor), which reads each element; faster are {MASKS}"
    elif isinstance(got, Tensor):
        remedy = "give numbers that are added to scores as score_mod=strobe.bias(tensor)"
        remedy = f"{remedy}, and zeros and ones as mask=strobe.mask_mod(tensor != 0); faster are {MASKS}"
    elif isinstance(got, (list, tuple)):
        remedy = "combine masks by &, as in strobe.causal() & strobe.documents(ids)"
    elif callable(got):
        maker = getattr(got, "__name__", "") if getattr(got, "__module__", "") == "strobe.problem.mask" else ""
        remedy = f"call it: strobe.{maker}(...)" if maker else "wrap it: strobe.mask_mod(function)"
    return wrong_type("mask", got, "a strobe.Mask", remedy)
