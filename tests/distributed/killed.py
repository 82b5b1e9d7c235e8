"""How long the other rank takes to end after one has died, over NCCL under several settings of PyTorch's watchdog.

    python -m tests.distributed.killed [--seconds 75] [--logs FOLDER] [NAME ...]

Every setting is observed at the same time, each in two processes of its own on the first two GPUs. The group's timeout
is 10 s. Without GPUs the processes use gloo.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import threading
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
DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"
NO_DUMP = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}
NO_TRACE = {**NO_DUMP, "TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_FR_BUFFER_SIZE": "0"}
SETTINGS: dict[str, tuple[str, dict[str, str]]] = {
    "defaults": ("exchange", {}),
    "step, defaults": ("step", {}),
    "no dump": ("exchange", NO_DUMP),
    "no dump, file store": ("file store", NO_DUMP),
    "no dump, no trace": ("exchange", NO_TRACE),
    "no dump, host polls": ("polls", NO_DUMP),
    "no dump, tear down": ("exchange", {**NO_DUMP, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
    "no dump, heartbeat 10 s": ("exchange", {**NO_DUMP, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10"}),
    "blocking wait": ("exchange", {"TORCH_NCCL_BLOCKING_WAIT": "1"}),
    "step, blocking wait": ("step", {"TORCH_NCCL_BLOCKING_WAIT": "1"}),
    "abort by a thread": ("abort", {}),
    "step, no dump": ("step", NO_DUMP),
}


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
    store = dist.FileStore(str(folder / "file"), 2) if way == "file store" else None
    store = store or dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), 2, False)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=store, rank=rank, world_size=2)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    step = _attention(group) if way == "step" else lambda: _exchange(group, 1 - rank)
    step()
    _synchronize("exchange")
    dist.barrier()
    if rank == 1:
        (folder / "died").touch()
        os._exit(9)
    say("the other rank has died")
    faulthandler.dump_traceback_later(3 * TIMEOUT, exit=False)
    if way == "abort":
        threading.Thread(target=_abort, args=(group, say), daemon=True).start()
    try:
        for number in range(3):
            step()
            say(f"step {number} is issued")
            _synchronize(way)
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


def _synchronize(way: str) -> None:
    if DEVICE != "cuda":
        return
    if way == "polls":
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            time.sleep(0.01)
    torch.cuda.synchronize()


def _abort(group, say) -> None:
    time.sleep(TIMEOUT)
    say("abort begins")
    group._get_backend(torch.device(DEVICE)).abort()
    say("abort is done")


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
        if code is None:
            _describe(left.pid, folders[name] / "threads.txt")
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


def _describe(pid: int, file: Path) -> None:
    """Where the threads of a process wait, as far as the system tells."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        texts = []
        for part in ("comm", "wchan", "syscall", "stack", "status"):
            try:
                text = (task / part).read_text()
            except OSError as error:
                text = str(error)
            texts.append(text.split("State:")[-1].split("\n")[0] if part == "status" else text.strip())
        lines.append(" | ".join(texts))
    file.write_text("\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        rank, folder, way = options.child
        _child(int(rank), Path(folder), way)
    with tempfile.TemporaryDirectory() as folder:
        found = _observe(options.names or list(SETTINGS), options.seconds, options.logs or Path(folder))
    for one in found:
        after = "alive" if one.seconds is None else f"{one.seconds:5.1f} s"
        print(f"{one.name:24} {after:>8} code {one.code!s:>5}  {one.words[:150]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
