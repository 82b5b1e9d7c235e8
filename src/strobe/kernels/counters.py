"""Counters in a GPU's memory that are 0 between launches, because each launch leaves them so: nothing need be cleared before one."""

from __future__ import annotations

import torch
from torch import Tensor

_held: dict[tuple[int, int, int], Tensor] = {}  # never let go of: a launch that is repeated knows only the address


def zeros_on(device: torch.device, count: int) -> Tensor:
    """int32, at least `count`: of the current stream, whose launches follow each other, or of the graph being captured.

    >>> zeros_on(torch.device("cpu"), 3).tolist()
    [0, 0, 0, 0]
    """
    size = 1 << max(0, count - 1).bit_length()
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(size, dtype=torch.int32, device=device)
    key = device.index, torch.cuda.current_stream(device).cuda_stream, size
    known = _held.get(key)
    return known if known is not None else _held.setdefault(key, torch.zeros(size, dtype=torch.int32, device=device))
