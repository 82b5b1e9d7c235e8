"""Runs jobs on threads, each of which runs its torch ops single-threaded.

An op that torch distributes over threads ends at a spinning barrier. Beside other processes, each barrier can cost a
time slice, and a tiled call has hundreds. Here each worker takes whole jobs, so a call has one barrier, which does not
spin.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

JOBS_A_WORKER = 4
UNEVEN = 1.5  # largest job, relative to a fair share: above it, torch's own threads are faster
LEAST_WORK = 1 << 22  # multiply-adds of all jobs: dispatching costs about 50 us


def head_ranges(heads: int, pieces: int) -> list[slice]:
    """Slices of the heads: one for a single piece, whose op torch parallelises itself, else enough for all workers."""
    count = 1 if pieces == 1 else min(heads, -(-JOBS_A_WORKER * torch.get_num_threads() // pieces))
    bounds = [heads * n // count for n in range(count + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


class Job(NamedTuple):
    work: int  # approximate multiply-adds; jobs are ordered by it
    run: Callable[[Tensor], None]  # called with memory for one tile of scores


def run(jobs: Sequence[Job], scratch: Tensor) -> None:
    """Run all jobs in any order. scratch [workers, elements].

    With one worker, little work, or one dominant job, they run one after another in the caller's thread, each op on
    torch's threads.
    """
    if len(jobs) == 1:
        jobs[0].run(scratch[0])
        return
    total, largest = sum(job.work for job in jobs), max((job.work for job in jobs), default=0)
    workers = min(len(jobs), scratch.shape[0], torch.get_num_threads())
    if workers <= 1 or total < LEAST_WORK or largest * torch.get_num_threads() > UNEVEN * total:
        for job in jobs:
            job.run(scratch[0])
        return
    waiting = deque(sorted(jobs, key=lambda job: -job.work))
    pool = _pool(workers)
    futures = [pool.submit(_work, waiting, memory) for memory in scratch[:workers].unbind()]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        waiting.clear()  # no further job starts after an exception
    wait(futures)
    for future in futures:
        future.result()


def _work(waiting: deque[Job], scratch: Tensor) -> None:
    # inference mode may be on for the caller, whose outputs then cannot be written from a thread without it
    with torch.inference_mode():
        while True:
            try:
                job = waiting.popleft()
            except IndexError:
                return
            job.run(scratch)


# ---------------------------------------------------------------- the workers

_made: dict[int, ThreadPoolExecutor] = {}  # by their number of threads
_making = threading.Lock()


def _pool(workers: int) -> ThreadPoolExecutor:
    size = max(workers, os.cpu_count() or 1)
    with _making:
        if size not in _made:
            _made[size] = _started(size)
        return _made[size]


def _started(size: int) -> ThreadPoolExecutor:
    """Worker threads whose ops are single-threaded.

    torch.set_num_threads also sets the default of threads that start later, so the caller's number is restored once all
    workers have theirs.
    """
    here = torch.get_num_threads()
    started = threading.Barrier(size + 1)

    def alone() -> None:
        torch.get_num_threads()  # a thread adopts the default at its first query and then keeps its own number
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(size, "strobe", alone)
    for _ in range(size):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(here)
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_making.acquire,
        after_in_parent=_making.release,
        after_in_child=lambda: (_made.clear(), _making.release()),
    )
