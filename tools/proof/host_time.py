"""Compare the host time of public calls between this checkout and another commit.

    python -m tools.proof.host_time HEAD~3                    on the GPU if there is one, else on the CPU
    python -m tools.proof.host_time HEAD~3 --rounds 20 --json rows.jsonl

Processes of the two checkouts alternate, so that clock drift affects both, and run on the same four cores: processes of
the same code differed by 1.7x on an H100's host, which may come from their placement. Each process times small
problems, whose kernels finish before the host does: a forward, a step (forward and backward under autograd), a decode,
and a forward with a window and sinks. The table shows, for each call, the median over processes of a
process's least time, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns

from strobe.errors import InvalidProblem

SAMPLES, CALLS = 12, 200
CORES = 4  # Python, autograd's thread and the driver's
ONE_PROCESS = "--one-process"  # time the strobe on PYTHONPATH; both sides run this file's code


def measure() -> dict[str, float]:
    """{name: microseconds per call}, the least of SAMPLES samples."""
    import torch

    import strobe

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 64, 2, 64, device=device, dtype=dtype) for _ in range(3))
    graded = [t.clone().requires_grad_() for t in (q, k, v)]
    dout, sinks = torch.ones_like(q), torch.zeros(2, device=device)
    cache = strobe.DenseCache(k, v, torch.full((1,), 64, dtype=torch.int32, device=device))

    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: strobe.attention(q, k, v, causal=True),
        "step": lambda: torch.autograd.grad(strobe.attention(*graded, causal=True), graded, dout),
        "decode": lambda: strobe.attention_decode(q[:, :1], cache),
        "window and sinks": lambda: strobe.attention(q, k, v, window=(9, 0), sinks=sinks),
    }
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found = {}
    for name, call in calls.items():
        for _ in range(CALLS):
            call()
        times = []
        for _ in range(SAMPLES):
            wait()
            start = perf_counter_ns()
            for _ in range(CALLS):
                call()
            times.append((perf_counter_ns() - start) / CALLS / 1000)
        found[name] = min(times)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    if list(sys.argv[1:] if argv is None else argv) == [ONE_PROCESS]:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
        print(json.dumps(measure()))
        return 0
    parser = argparse.ArgumentParser(
        "python -m tools.proof.host_time", description="Host time of public calls, against another commit."
    )
    parser.add_argument("base", help="a commit of this repository")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="processes of each checkout (7)")
    parser.add_argument("--most", type=float, default=1.05, metavar="RATIO", help="exit code 1 above it (1.05)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a row for each call")
    a = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        if subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), a.base]).returncode:
            raise InvalidProblem("base", a.base, "a commit of this repository", "git said why above; name another")
        try:
            rows = _alternate({"base": tree / "src", "head": Path.cwd() / "src"}, a.rounds)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)])
    print(f"{'call':<18} {'base us':>8} {'head us':>8} {'ratio':>6}")
    for row in rows:
        print(f"{row['call']:<18} {row['base_us']:8.2f} {row['head_us']:8.2f} {row['ratio']:6.3f}")
    if a.json:
        with a.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return int(any(row["ratio"] > a.most for row in rows))


def _alternate(sources: dict[str, Path], rounds: int) -> list[dict]:
    found: dict[str, dict[str, list[float]]] = {side: {} for side in sources}
    for n in range(rounds):
        for side in list(sources)[:: 1 if n % 2 else -1]:
            environment = {**os.environ, "PYTHONPATH": str(sources[side])}
            done = subprocess.run(
                [sys.executable, __file__, ONE_PROCESS], capture_output=True, text=True, env=environment
            )
            if done.returncode:
                raise InvalidProblem(
                    side,
                    f"exit code {done.returncode}",
                    "a checkout whose calls run",
                    done.stderr.strip().split("\n")[-1],
                )
            for name, us in json.loads(done.stdout.strip().split("\n")[-1]).items():
                found[side].setdefault(name, []).append(us)
            print(f"{n + 1} of {rounds}, {side}", end="\r", file=sys.stderr)
    rows = []
    for name, times in found["base"].items():
        base, head = statistics.median(times), statistics.median(found["head"][name])
        rows.append(
            {"call": name, "base_us": round(base, 2), "head_us": round(head, 2), "ratio": round(head / base, 4)}
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
