"""Attention at growing length against torch's own and the formula written down, and what a mask saves at one length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import strobe

from ..bench.timer import interleave
from .measure import peak_bytes

LARGEST_SCORES_BYTES = 2**29  # the plain formula holds all scores at once, two or three times over: left out beyond this


class Sizes(NamedTuple):
    """How large the experiment is on a device."""

    lengths: tuple[int, ...]
    masks_at: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    rounds: int


def sizes(device: torch.device, quick: bool) -> Sizes:
    if quick:
        return Sizes((64, 128, 256), 256, 2, 32, torch.float32, 1)
    if device.type == "cuda":
        return Sizes((1024, 2048, 4096, 8192, 16384, 32768), 16384, 16, 128, torch.bfloat16, 7)
    return Sizes((1024, 2048, 4096, 8192, 16384), 8192, 2, 64, torch.float32, 3)


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as it is written: all scores in memory. [B, S, H, D]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """torch's own attention on [B, S, H, D]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


def growing(device: torch.device, size: Sizes) -> list[dict[str, Any]]:
    """Causal attention at each length: milliseconds and peak bytes of each way."""
    rows = []
    for length in size.lengths:
        q, k, v = _tensors(length, size, device)
        ways: dict[str, Callable[[], Tensor]] = {
            "strobe": lambda q=q, k=k, v=v: strobe.attention(q, k, v, causal=True),
            "SDPA": lambda q=q, k=k, v=v: sdpa(q, k, v, causal=True),
        }
        if size.heads * length**2 * size.dtype.itemsize <= LARGEST_SCORES_BYTES:
            ways["formula"] = lambda q=q, k=k, v=v: formula(q, k, v)
        rows.append({"length": length, **_measure(ways, device, size), "difference": _differences(ways)})
    return rows


def masks(length: int, device: torch.device | str) -> dict[str, strobe.Mask]:
    """The masks that the demo shows, for one sequence."""
    ends = torch.tensor([0.16, 0.30, 0.55, 0.63, 0.86, 1.0]).mul(length).long()
    ids = torch.searchsorted(ends, torch.arange(length), right=True).to(torch.int32)[None].to(device)
    return {
        "full": strobe.full(),
        "causal": strobe.causal(),
        "window of 1/8": strobe.causal() & strobe.window(length // 8, 0),
        "prefix of 1/4": strobe.prefix_causal(length // 4),
        "6 documents": strobe.documents(ids),
        "6 documents, causal": strobe.causal() & strobe.documents(ids),
    }


def masked(device: torch.device, size: Sizes) -> list[dict[str, Any]]:
    """Each mask at one length: strobe, which skips tiles, against torch's attention, which is given the mask written out."""
    length = size.masks_at
    q, k, v = _tensors(length, size, device)
    rows = []
    for name, mask in masks(length, device).items():
        dense = mask.dense(length, length, device)
        ways = {"strobe": lambda mask=mask: strobe.attention(q, k, v, mask=mask), "SDPA": lambda dense=dense: sdpa(q, k, v, dense[:, None])}
        if name in ("full", "causal"):  # the two that SDPA knows by name
            ways["SDPA"] = lambda causal=name == "causal": sdpa(q, k, v, causal=causal)
        visible = dense.float().mean().item()
        rows.append({"mask": name, "length": length, "visible": visible, **_measure(ways, device, size), "difference": _differences(ways)})
    return rows


def _tensors(length: int, size: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator(device).manual_seed(length)
    q, k, v = (torch.randn(1, length, size.heads, size.head_dim, device=device, generator=draw).to(size.dtype) for _ in range(3))
    return q, k, v


def _measure(ways: dict[str, Callable[[], Tensor]], device: torch.device, size: Sizes) -> dict[str, Any]:
    with torch.inference_mode():
        times = interleave(ways, device, rounds=size.rounds, sample_ms=0)
        peaks = {name: peak_bytes(way, device) for name, way in ways.items()}
    return {"ms": {name: times[name].median_ms for name in ways}, "peak_bytes": peaks}


def _differences(ways: dict[str, Callable[[], Tensor]]) -> float:
    """The largest difference between strobe and torch's attention."""
    with torch.inference_mode():
        return (ways["strobe"]().float() - ways["SDPA"]().float()).abs().max().item()
