"""Scales and caps below every float32, for tests of several kernels: scores are 0, and NaN arises nowhere."""

from __future__ import annotations

import torch

import strobe

OPTIONS = (
    {"scale": 1e-60},
    {"scale": -1e-60},
    {"scale": 1e-40, "causal": True},
    {"scale": 1e-60, "causal": True},
    {"scale": 1e-9, "softcap": 1e-46, "causal": True},
)


def assert_means_of_values(options: dict, dtype: torch.dtype, kernel: str, keys: int = 40) -> None:
    """Attention with weights that are all the same, and its gradients."""
    draw = lambda seed: torch.randn(1, keys, 2, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)
    q, k, v = (draw(seed).requires_grad_() for seed in range(3))
    out = strobe.attention(q, k, v, kernel=kernel, **options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    counts = torch.arange(1, keys + 1)[:, None, None] if options.get("causal") else keys
    expected = v.double().cumsum(1) / counts if options.get("causal") else v.double().mean(1, keepdim=True).expand_as(v)
    near = 1e-2 if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=near, atol=near)
    assert dv.isfinite().all() and dq.abs().max() < 1e-6 and dk.abs().max() < 1e-6


def assert_decode_means_of_values(scale: float, kernel: str) -> None:
    q, k = torch.randn(2, 1, 2, 16), torch.randn(2, 40, 2, 16)
    cache = strobe.DenseCache(k, k, torch.tensor([7, 40], dtype=torch.int32))
    out = strobe.attention_decode(q, cache, scale=scale, kernel=kernel)
    expected = torch.stack([k[0, :7].mean(0), k[1].mean(0)])[:, None]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
