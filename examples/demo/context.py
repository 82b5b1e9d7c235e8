"""Attention at growing length compared with torch's and with the plain formula, and the time that masks save."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import strobe
from strobe.bench.timer import interleave

from .measure import peak_bytes
from .pace import Advance, Pace

# limit of the plain formula, which holds all scores two or three times
LARGEST_SCORES_BYTES = 2**29
FEWEST_LENGTHS = 2
WARM_UP = 2  # the first call compiles
MASKS = 6
SLOWER = 6.0


class Sizes(NamedTuple):
    """Sizes of the experiment on one kind of device."""

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
    """Causal attention by the formula, with all scores in memory. Tensors are [B, S, H, D]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """torch's attention on [B, S, H, D]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


def growing(device: torch.device, size: Sizes, pace: Pace, advance: Advance) -> list[dict[str, Any]]:
    """Causal attention at each length: milliseconds and peak bytes per implementation, until the pace is over."""
    rows: list[dict[str, Any]] = []
    took = 0.0
    for length in size.lengths:
        if len(rows) >= FEWEST_LENGTHS and not pace.allows(took * (length / rows[-1]["length"]) ** 2):
            break
        begin = time.perf_counter()
        q, k, v = _tensors(length, size, device)
        ways: dict[str, Callable[[], Tensor]] = {
            "strobe": lambda q=q, k=k, v=v: strobe.attention(q, k, v, causal=True),
            "SDPA": lambda q=q, k=k, v=v: sdpa(q, k, v, causal=True),
        }
        if size.heads * length**2 * size.dtype.itemsize <= LARGEST_SCORES_BYTES:
            ways["formula"] = lambda q=q, k=k, v=v: formula(q, k, v)
        rows.append({"length": length, **_measure(ways, device, size, pace), "difference": _differences(ways)})
        took = time.perf_counter() - begin
        advance()
    return rows


def mask_length(size: Sizes, rows: list[dict[str, Any]], pace: Pace) -> int:
    """The length at which masks are compared: the largest at which all should fit, judging by the causal times."""
    measured = {row["length"]: row["ms"] for row in rows}
    calls = WARM_UP + size.rounds + 2  # plus one for memory and one for the difference
    for length in sorted((length for length in measured if length <= size.masks_at), reverse=True):
        # with an explicit mask, SDPA computes every pair, by a slower kernel than the causal one
        if MASKS * calls * (SLOWER * measured[length]["SDPA"] + 2 * measured[length]["strobe"]) / 1e3 <= pace.seconds:
            return length
    return min(measured)


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


def masked(device: torch.device, size: Sizes, length: int, pace: Pace, advance: Advance) -> list[dict[str, Any]]:
    """Each mask at one length: strobe, which skips tiles, and torch's attention with an explicit mask."""
    q, k, v = _tensors(length, size, device)
    rows = []
    for name, mask in masks(length, device).items():
        dense = mask.dense(length, length, device)
        ways = {
            "strobe": lambda mask=mask: strobe.attention(q, k, v, mask=mask),
            "SDPA": lambda dense=dense: sdpa(q, k, v, dense[:, None]),
        }
        if name in ("full", "causal"):  # SDPA supports these two directly
            ways["SDPA"] = lambda causal=name == "causal": sdpa(q, k, v, causal=causal)
        visible = dense.float().mean().item()
        rows.append(
            {
                "mask": name,
                "length": length,
                "visible": visible,
                **_measure(ways, device, size, pace),
                "difference": _differences(ways),
            }
        )
        advance()
    return rows


def _tensors(length: int, size: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator(device).manual_seed(length)
    q, k, v = (
        torch.randn(1, length, size.heads, size.head_dim, device=device, generator=draw).to(size.dtype)
        for _ in range(3)
    )
    return q, k, v


def _measure(ways: dict[str, Callable[[], Tensor]], device: torch.device, size: Sizes, pace: Pace) -> dict[str, Any]:
    with torch.inference_mode():
        times = interleave(
            ways, device, rounds=size.rounds, sample_ms=0, warm_up=WARM_UP, goes_on=lambda: not pace.over
        )
        peaks = {name: peak_bytes(way, device) for name, way in ways.items()}
    return {"ms": {name: times[name].median_ms for name in ways}, "peak_bytes": peaks}


def _differences(ways: dict[str, Callable[[], Tensor]]) -> float:
    """The largest difference between strobe and torch's attention."""
    with torch.inference_mode():
        return (ways["strobe"]().float() - ways["SDPA"]().float()).abs().max().item()
