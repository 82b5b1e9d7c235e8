"""What ends the other rank after one has died, over NCCL, under several settings of PyTorch.

    python -m tests.distributed.killed [--seconds 45] [--logs FOLDER] [NAME ...]

Each setting runs in two processes of its own on the first two GPUs, all at the same time. The group's timeout is 10 s.
The exit code is 1 if a setting that the guide recommends (HOLD) takes longer than LATE seconds more. Without two GPUs
the processes use gloo.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import strobe
from strobe.distributed import context_parallel
from strobe.distributed.group import Transfer

TIMEOUT = 10  # seconds, of the group
LATE = 2
DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"
SHORT_DUMP = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}
NO_TRACE = {**SHORT_DUMP, "TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_FR_BUFFER_SIZE": "0"}
BLOCKING = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
# name -> (what the ranks do, environment). "defaults" takes a minute longer, so it must be named
SETTINGS: dict[str, tuple[str, dict[str, str]]] = {
    "short dump": ("exchange", SHORT_DUMP),
    "short dump, no trace": ("exchange", NO_TRACE),
    "step, short dump, no trace": ("step", NO_TRACE),
    "blocking wait": ("exchange", BLOCKING),
    "step, blocking wait": ("step", BLOCKING),
    "defaults": ("exchange", {}),
}
HOLD = ("short dump, no trace", "step, short dump, no trace", "blocking wait", "step, blocking wait")


class Ended(NamedTuple):
    name: str
    seconds: float | None  # after the death; None: still alive at the end
    code: int | None
    words: str


def _child(rank: int, folder: Path, way: str) -> None:
    began = time.monotonic()
    say = lambda text: print(f"{time.monotonic() - began:6.1f} s rank {rank}: {text}", file=sys.stderr, flush=True)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), 2, False)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=store, rank=rank, world_size=2)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    step = _attention(group) if way == "step" else lambda: _exchange(group, 1 - rank)
    step()
    _synchronize()
    dist.barrier()
    if rank == 1:
        (folder / "died").touch()
        os._exit(9)
    say("the other rank has died")
    try:
        for number in range(3):
            step()
            say(f"step {number} is issued")
            _synchronize()
            say(f"step {number} is done")
    except RuntimeError as error:
        say(f"{type(error).__name__}: {str(error)[:300]}")
        (folder / "error").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
    say("no error")
    os._exit(0)


def _exchange(group, peer: int) -> None:
    given, taken = torch.ones(2**20, device=DEVICE), torch.empty(2**20, device=DEVICE)
    Transfer([(peer, given)], [(peer, taken)], group).wait()
    taken += 1


def _attention(group):
    plan = context_parallel(group, scheme="keys").plan(strobe.causal(), seqlen=256, heads_q=2)
    q, k, v = (plan.shard(torch.randn(1, 256, 2, 64, device=DEVICE).bfloat16()).requires_grad_() for _ in range(3))
    kernel = {"kernel": "portable"} if DEVICE == "cuda" else {}  # compiled in seconds

    def step() -> None:
        out = strobe.attention(q, k, v, causal=True, context_parallel=plan, **kernel)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return step


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _observe(names: list[str], seconds: float, logs: Path) -> list[Ended]:
    """Start all settings, and see when the rank that is left of each ends."""
    began, store = time.monotonic(), {}
    started: dict[str, list[subprocess.Popen]] = {}
    folders = {name: logs / name.replace(", ", "_").replace(" ", "_") for name in names}
    for name, folder in folders.items():
        way, environment = SETTINGS[name]
        folder.mkdir(parents=True, exist_ok=True)
        store[name] = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        (folder / "port").write_text(str(store[name].port))
        started[name] = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.killed", "--child", str(rank), str(folder), way],
                env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=open(folder / f"rank{rank}.txt", "w"),  # noqa: SIM115
            )
            for rank in (0, 1)
        ]
    died: dict[str, float] = {}
    ended: dict[str, float] = {}
    while time.monotonic() - began < seconds and len(ended) < len(names):
        for name, (left, other) in started.items():
            if name not in died and (folders[name] / "died").exists() and other.poll() is not None:
                died[name] = time.monotonic()
            if name not in ended and left.poll() is not None:
                ended[name] = time.monotonic()
        time.sleep(0.05)
    found = []
    for name, (left, other) in started.items():
        code = left.poll()
        after = ended[name] - died[name] if name in ended and name in died else None
        observed = f"observed {time.monotonic() - died[name]:.0f} s" if name in died else "the other rank has not died"
        found.append(Ended(name, after, code, _words(folders[name]) or observed))
        for process in (left, other):
            process.kill()
    return found


def _words(folder: Path) -> str:
    """What the rank that is left said of its end."""
    if (folder / "error").exists():
        return (folder / "error").read_text().splitlines()[0]
    lines = (folder / "rank0.txt").read_text().splitlines()
    marks = "terminated with exception", "Terminating the process", "Watchdog caught", "watchdog got stuck", "Error"
    return next((line[-150:] for mark in marks for line in lines if mark in line), "")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        rank, folder, way = options.child
        _child(int(rank), Path(folder), way)
    with tempfile.TemporaryDirectory() as folder:
        found = _observe(
            options.names or [name for name in SETTINGS if name != "defaults"],
            options.seconds,
            options.logs or Path(folder),
        )
    for one in found:
        after = "alive" if one.seconds is None else f"{one.seconds:5.1f} s"
        print(f"{one.name:27} {after:>8} code {one.code!s:>5}  {one.words[:150]}", flush=True)
    ends = [one.name for one in found if one.code and one.seconds is not None and one.seconds < TIMEOUT + LATE]
    late = [one.name for one in found if one.name in HOLD and one.name not in ends]
    print(f"{'failed' if late else 'all hold'} {late}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
