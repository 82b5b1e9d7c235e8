"""Zeros on a device that are kept for as long as the process runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def zeros(device: torch.device, count: int) -> Tensor:
    """int32 [count], there for all streams, whatever pool the caller's allocations go to; within a capture the graph's own, which each replay clears.

    A call's first run under torch.compile(mode="reduce-overhead") takes its memory from a pool that may hold its outputs and nothing else when it
    ends. Such a pool is a thread's, so another thread asks.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False):  # or nobody outside could write to them
            return torch.zeros(count, dtype=torch.int32, device=device)
    with ThreadPoolExecutor(1) as other:
        return other.submit(_zeros, device, count).result()


def _zeros(device: torch.device, count: int) -> Tensor:
    made = torch.zeros(count, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # once: launches on other streams wait for nothing of this one
    return made
