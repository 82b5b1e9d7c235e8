"""Error words: faults that kernels find in device metadata, kept until `last_errors` reads them.

An error word is one int32 per device. Kernels set its bits by atomic or, so nothing waits and CUDA graphs can replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .workspace import persistent_zeros

OFFSETS_Q, OFFSETS_K, LONG_Q, LONG_K, LENGTHS = 1, 2, 4, 8, 16
SEQLENS, PAGES, K_START, NO_ROOM, NO_ANGLE = 32, 64, 128, 256, 512

MEANING = {
    OFFSETS_Q: "cu_seqlens_q: an offset is below the one before it or beyond T_q; it was clamped",
    OFFSETS_K: "cu_seqlens_k: an offset is below the one before it or beyond T_k; it was clamped",
    LONG_Q: "max_seqlen_q: a sequence has more queries than promised; its rows beyond the promise are NaN",
    LONG_K: "max_seqlen_k: a sequence has more keys than promised; all its rows are NaN",
    LENGTHS: "key_lengths: a length is negative or beyond S_k; it was clamped",
    SEQLENS: "cache.seqlens: a length is negative or beyond what a sequence may hold; it was clamped",
    PAGES: (
        "cache.page_table: a page id is negative or beyond the pool; its keys are hidden, and nothing was written there"
    ),
    K_START: "cache.k_start: a start is negative or beyond the sequence's length; it was clamped",
    NO_ROOM: "append: a token's position is negative or beyond what a sequence may hold; it was not written",
    NO_ANGLE: "append: a token's position is beyond rotary.cos; its key is NaN in the rotary dimensions",
}

_words: dict[torch.device, Tensor] = {}


def word(device: torch.device) -> Tensor:
    """The device's error word, int32 [1]. It is created once and kept, so that captured graphs may hold its address."""
    known = _words.get(device)
    # a single word even if threads race
    return known if known is not None else _words.setdefault(device, persistent_zeros(device, 1))


def report(device: torch.device, bits: int) -> None:
    """Set bits from the host, for kernels that run there."""
    word(device).bitwise_or_(bits)


def read_and_clear(device: torch.device | None = None) -> list[str]:
    """Messages for the bits set on `device` (default: all devices), which are then cleared. Synchronises."""
    found: list[str] = []
    for owner, value in list(_words.items()):
        if device is None or owner == device:
            bits = int(value.item())
            value.zero_()
            found += [f"{owner}: {meaning}" for bit, meaning in MEANING.items() if bits & bit]
    return found
