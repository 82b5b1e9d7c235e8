"""Calls on a GPU, forward and backward, for the reliability tests."""

from __future__ import annotations

import torch

import strobe
from tests.reliability.test_reliability import draw

KERNEL = {"kernel": "portable"}


def qkv(batch=2, rows=300, keys=None, heads=(4, 2), width=64, dtype=torch.bfloat16, grad=False, seed=0):
    keys = rows if keys is None else keys
    tensors = draw(
        (batch, rows, heads[0], width), *[(batch, keys, heads[1], width)] * 2, dtype=dtype, device="cuda", seed=seed
    )
    return [t.requires_grad_(grad) for t in tensors]


def both_ways(tensors, dout=None, attend=strobe.attention, **options):
    """out and the gradients of q, k and v."""
    out = attend(*tensors, **KERNEL | options)
    return out, *torch.autograd.grad(out, tensors, torch.ones_like(out) if dout is None else dout)


def same(results, others) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, others))
