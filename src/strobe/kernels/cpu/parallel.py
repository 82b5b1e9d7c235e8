"""Jobs on threads that run their torch ops alone.

An op that torch spreads over threads ends at a barrier where they spin. Beside other processes each barrier can cost a
time slice, and a call in tiles has hundreds of them. Here each worker takes whole jobs and runs every op on one thread,
so a call has one barrier, at which nobody spins.
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
UNEVEN = 1.5  # times a fair share that the largest job may have: beyond it, torch's own threads finish it sooner
LEAST_WORK = 1 << 22  # multiply-adds of all jobs: handing over takes some 50 us


def head_ranges(heads: int, pieces: int) -> list[slice]:
    """All heads where there is one piece, whose op torch spreads over threads itself; else ranges of them, so that
    there are jobs for all workers.
    """
    count = 1 if pieces == 1 else min(heads, -(-JOBS_A_WORKER * torch.get_num_threads() // pieces))
    bounds = [heads * n // count for n in range(count + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


class Job(NamedTuple):
    work: int  # multiply-adds, roughly: what jobs are ordered by
    run: Callable[[Tensor], None]  # takes memory for one tile of scores


def run(jobs: Sequence[Job], scratch: Tensor) -> None:
    """All jobs, in any order; scratch [workers, elements].

    Where there is one worker, where the work is little, or where one job is most of it, they run one after another in
    the caller's thread, each op on torch's threads.
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
        waiting.clear()  # after a failure or an interrupt no further job starts
    wait(futures)
    for future in futures:
        future.result()


def _work(waiting: deque[Job], scratch: Tensor) -> None:
    with (
        torch.inference_mode()
    ):  # the caller's may be on, and its outputs then refuse to be written by a thread without it
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
    """Threads whose ops run on one thread each. torch.set_num_threads also sets what threads that start later get, so
    the caller's number is set again as soon as all workers have theirs.
    """
    here = torch.get_num_threads()
    started = threading.Barrier(size + 1)

    def alone() -> None:
        torch.get_num_threads()  # a thread takes the common number at its first question, and then its own
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
