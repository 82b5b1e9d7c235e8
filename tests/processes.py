"""Processes that compute together over gloo, on this machine's CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

WORLD = 2
IMPORTED = ["torch.distributed.tensor", "torch._dynamo", "strobe"]  # 3 s, once for all processes


def together(work: Callable[..., None], folder: Path, *args, world: int = WORLD) -> None:
    """`work(rank, *args)` in each of `world` processes, which have met; what one raises is raised here. `folder` is
    where they meet. They are forks of one that has imported torch.
    """
    get_context("forkserver").set_forkserver_preload(IMPORTED)
    arguments = work, str(folder / "store"), world, args
    multiprocessing.start_processes(_process, args=arguments, nprocs=world, join=True, start_method="forkserver")


def _process(rank: int, work: Callable[..., None], store: str, world: int, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )  # no port that another may take, no server to outlive
    work(rank, *args)
    dist.barrier()
    # Not the interpreter's own end: a mesh keeps the group and so gloo's threads alive, and one that still waits for
    # Python, to let go of a tensor that it has reduced, is ended by Python in a destructor that may not throw:
    # "terminate called without an active exception". Seen once in some forty runs of all tests; in 5 of 40 pairs of
    # processes that reduce one tensor, without strobe, where Python's switch interval is long.
    os._exit(0)
