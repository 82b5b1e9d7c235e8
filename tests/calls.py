"""Small calls of every kind, by name: what the tests of the ops and of their composition run."""

from __future__ import annotations

import torch

import strobe
from strobe.problem.call import Call


def _qkv(heads_q=4, heads_kv=2, seqlen_q=5, seqlen_k=7, batch=2, width=2, width_v=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return (
        random(batch, seqlen_q, heads_q, width),
        random(batch, seqlen_k, heads_kv, width),
        random(batch, seqlen_k, heads_kv, width_v),
    )


def _int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def _sinks(dtype, heads=4):
    return torch.linspace(-1, 1, heads, dtype=torch.float64).to(dtype)


def _packed(dtype, **options) -> Call:
    """Three sequences, the middle one empty, and two rows that belong to none."""
    q, k, v = (t.flatten(0, 1) for t in _qkv(dtype=dtype))
    return Call(q, k, v, cu_seqlens_q=_int32(0, 3, 3, 8), cu_seqlens_k=_int32(0, 6, 6, 12), **options)


def _masked(dtype, mask: strobe.Mask, **options) -> Call:
    seqlen_q = 7 if mask.documents is not None else 5
    return Call(*_qkv(seqlen_q=seqlen_q, dtype=dtype), **options).with_mask(mask)


CALLS = {
    "dense": lambda dtype: Call(*_qkv(dtype=dtype)),
    "causal": lambda dtype: Call(*_qkv(dtype=dtype), right=0),
    "empty rows": lambda dtype: Call(*_qkv(seqlen_q=7, seqlen_k=3, dtype=dtype), right=0),
    "empty rows sinks": lambda dtype: Call(*_qkv(seqlen_q=7, seqlen_k=3, dtype=dtype), right=0, sinks=_sinks(dtype)),
    "window softcap": lambda dtype: Call(*_qkv(dtype=dtype), left=2, right=1, softcap=1.5),
    "negative scale": lambda dtype: Call(*_qkv(dtype=dtype), scale=-0.7),
    "sinks": lambda dtype: Call(*_qkv(dtype=dtype), sinks=_sinks(dtype), right=0),
    "partial": lambda dtype: Call(*_qkv(dtype=dtype), partial=True),
    "prefix": lambda dtype: _masked(dtype, strobe.prefix_causal(3)),
    "key_lengths": lambda dtype: _masked(dtype, strobe.key_lengths(_int32(4, 0)) & strobe.causal()),
    "documents": lambda dtype: _masked(
        dtype, strobe.documents(_int32([0, 0, 1, 1, 1, 2, -1], [5, 5, 5, 5, -1, 0, 0])) & strobe.causal()
    ),
    "varlen": lambda dtype: _packed(dtype),
    "varlen causal sinks": lambda dtype: _packed(
        dtype, left=2, right=0, sinks=_sinks(dtype), max_seqlen_q=5, max_seqlen_k=6
    ),
    "no keys": lambda dtype: Call(*_qkv(seqlen_k=0, dtype=dtype), sinks=_sinks(dtype)),
    "no rows": lambda dtype: Call(*_qkv(seqlen_q=0, dtype=dtype)),
}


def with_grad(call: Call) -> Call:
    """The same call on leaves that want gradients."""
    leaves = {
        name: getattr(call, name).detach().clone().requires_grad_()
        for name in ("q", "k", "v", "sinks")
        if getattr(call, name) is not None
    }
    return call._replace(**leaves)


def leaves(call: Call) -> tuple[torch.Tensor, ...]:
    return tuple(t for t in (*call[:3], call.sinks) if t is not None)
