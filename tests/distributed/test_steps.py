"""Training steps of two processes that share a sequence, compiled and checkpointed calls, and a process that ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.distributed.sessions import abandoned, losses, steps
from tests.processes import together

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("steps")
    together(steps, folder, str(folder))
    return torch.load(folder / "found.pt")


def _of(found: dict, start: str) -> dict:
    part = {name: value for name, value in found.items() if name.startswith(start)}
    assert part, start
    return part


@pytest.mark.parametrize("start", ["checkpointed", "compiled", "autocast", "warmed", "counted"])
def test_what_must_hold_exactly(start, found):
    assert {name for name, holds in _of(found, f"{start}: ").items() if holds is not True} == set()


def test_a_small_gpt_trains_as_in_one_process(found):
    """30 steps, a full and a windowed layer, both with sinks."""
    alone = losses(None)
    assert alone[-1] < 0.7 * alone[0]
    for name, one in _of(found, "trained: ").items():
        torch.testing.assert_close(one, alone, rtol=1e-7, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.nightly
@pytest.mark.parametrize("world", [3, 4, 8])
def test_more_processes_train_as_one(world, tmp_path: Path):
    together(steps, tmp_path, str(tmp_path), True, world=world)
    alone = losses(None)
    for name, one in _of(torch.load(tmp_path / "found.pt"), "trained: ").items():
        torch.testing.assert_close(one, alone, rtol=1e-7, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_rank_that_dies_ends_the_others_with_an_error(world, tmp_path: Path):
    arguments = str(tmp_path), str(tmp_path / "store"), world
    context = spawn(abandoned, args=arguments, nprocs=world, join=False)
    assert context is not None
    processes: list[Any] = list(context.processes)
    for process in processes:
        process.join(120)
    for rank in {*range(world)} - {1}:
        message, seconds = torch.load(tmp_path / f"error{rank}.pt")
        assert message != "nothing" and seconds < 40
    assert [process.exitcode for process in processes] == [9 if rank == 1 else 0 for rank in range(world)]
