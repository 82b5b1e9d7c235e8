"""strobe: exact attention in one pass over the keys, on CPUs and on GPUs from Ampere on.

>>> import torch, strobe
>>> q = k = v = torch.randn(1, 128, 4, 64)
>>> strobe.attention(q, k, v, causal=True).shape
torch.Size([1, 128, 4, 64])
"""

import sys
from typing import TYPE_CHECKING

from .cli import help_request

if TYPE_CHECKING or not help_request.alone(getattr(sys, "argv", []), sys.orig_argv):
    from . import distributed as distributed
    from .errors import InvalidProblem, KernelFault, UnsupportedProblem
    from .interface.attention import (
        attention,
        attention_varlen,
        explain,
        explain_varlen,
        last_errors,
        partial_attention,
        partial_attention_varlen,
        supports,
        warmup,
    )
    from .interface.decode import append, attention_decode, explain_decode, partial_attention_decode
    from .interface.flex import flex_attention
    from .interface.paged import attention_paged, explain_paged, partial_attention_paged
    from .mods.block_lists import block_lists
    from .mods.mask import mask_mod
    from .mods.score import alibi, bias, relative_bias, score_mod
    from .problem.cache import DenseCache, PagedCache, Rotary, quantize_kv
    from .problem.mask import Mask, causal, documents, full, key_lengths, prefix_causal, window
    from .problem.merge import Partial, merge, with_sinks
    from .problem.problem import Problem
    from .problem.target import Target
    from .selection.select import Choice

__version__ = "0.2.0"  # the only place: pyproject.toml reads it, and a test holds CITATION.cff and CHANGELOG.md to it

__all__ = [
    "Choice",
    "DenseCache",
    "InvalidProblem",
    "KernelFault",
    "Mask",
    "PagedCache",
    "Partial",
    "Problem",
    "Rotary",
    "Target",
    "UnsupportedProblem",
    "alibi",
    "append",
    "attention",
    "attention_decode",
    "attention_paged",
    "attention_varlen",
    "bias",
    "block_lists",
    "causal",
    "documents",
    "explain",
    "explain_decode",
    "explain_paged",
    "explain_varlen",
    "flex_attention",
    "full",
    "key_lengths",
    "last_errors",
    "mask_mod",
    "merge",
    "partial_attention",
    "partial_attention_decode",
    "partial_attention_paged",
    "partial_attention_varlen",
    "prefix_causal",
    "quantize_kv",
    "relative_bias",
    "score_mod",
    "supports",
    "warmup",
    "window",
    "with_sinks",
]
