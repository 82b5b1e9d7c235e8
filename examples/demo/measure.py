"""Peak memory of a call. Times come from `strobe.bench.timer`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak memory that `run` held in addition to earlier allocations: results and workspace, by torch's allocator.

    >>> peak_bytes(lambda: torch.empty(1000) + torch.empty(1000), torch.device("cpu")) >= 4000
    True
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    return _peak(_allocations(recorded.profiler.kineto_results.experimental_event_tree()))  # type: ignore[union-attr]


def _allocations(events: Iterable) -> Iterator[tuple[int, int]]:
    """(time, bytes) of every allocation; releases have negative bytes."""
    for event in events:
        if event.tag.name == "Allocation":
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)


def _peak(allocations: Iterable[tuple[int, int]]) -> int:
    level = top = 0
    for _, size in sorted(allocations, key=lambda pair: pair[0]):
        level += size
        top = max(top, level)
    return top


@contextmanager
def _quiet() -> Iterator[None]:
    """Redirect standard error: some builds of torch's profiler print a line at start and stop."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
