"""How long the simulator takes for a few kernels, in seconds of one processor core.

    python -m tools.proof.simulator_times                                         print a row for each scene
    python -m tools.proof.simulator_times --results results/simulator.jsonl       and keep the best of each there
    PYTHONPATH=OLDER_CHECKOUT/src:. python -m tools.proof.simulator_times --of 0828e05~1      an older simulator
    python -m tools.proof.simulator_times --path UNPACKED_WHEELS --only sort      with flag-gems, which sorts

Time of the process, not of the clock, because other programs may share the machine. Every scene runs in happens-before
mode with the usual checks, and once before it is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import triton
import triton.language as tl

from strobe.sim import simulate
from tools.proof.provenance import circumstances

Scene = Callable[[], Callable[[], Any]]


@triton.jit
def add_kernel(x, y, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + tl.load(y + at))


@triton.jit
def attention_kernel(q, k, v, out, length, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr):
    """Attention of one head and one block of rows, with an online softmax."""
    head, block, at = tl.program_id(1) * length * D, tl.program_id(0), tl.arange(0, D)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = tl.load(q + head + rows[:, None] * D + at[None, :])
    row_max, row_sum = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, length, BLOCK_N):
        keys = head + (start + tl.arange(0, BLOCK_N)[:, None]) * D + at[None, :]
        scores = tl.dot(queries, tl.trans(tl.load(k + keys))) * scale
        highest = tl.maximum(row_max, tl.max(scores, 1))
        weights, rescale = tl.exp2(scores - highest[:, None]), tl.exp2(row_max - highest)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        total = tl.dot(weights.to(tl.float16), tl.load(v + keys), total * rescale[:, None])
        row_max = highest
    tl.store(out + head + rows[:, None] * D + at[None, :], total / row_sum[:, None])


def attention() -> Callable[[], Any]:
    """4 heads, 512 rows, D = 64, in float16."""
    q, k, v = (torch.randn(4, 512, 64, generator=torch.Generator().manual_seed(i)).half() for i in range(3))
    out = torch.empty(4, 512, 64)
    scale = 1.4426950408889634 / 8

    def run() -> None:
        with simulate("sm_90"):
            cast(Any, attention_kernel)[(4, 4)](q, k, v, out, 512, scale, 128, 64, 64)
        expected = ((q.float() @ k.float().transpose(1, 2)) / 8).softmax(-1) @ v.float()
        torch.testing.assert_close(out, expected, atol=5e-3, rtol=0)

    return run


def add() -> Callable[[], Any]:
    x, y = (torch.randn(2**20, generator=torch.Generator().manual_seed(i)) for i in range(2))
    out = torch.empty_like(x)

    def run() -> None:
        with simulate("sm_90"):
            cast(Any, add_kernel)[(1024,)](x, y, out, 1024)
        torch.testing.assert_close(out, x + y, atol=0, rtol=0)

    return run


def sort() -> Callable[[], Any]:
    from strobe.sim import cuda_on_cpu

    def run() -> None:
        with cuda_on_cpu("sm_90"):
            x = torch.randn(6, 100, generator=torch.Generator().manual_seed(0)).to("cuda")
            with simulate("sm_90", "pct"):
                ours = importlib.import_module("flag_gems.ops").sort(x)[0]
            torch.testing.assert_close(ours, torch.sort(x)[0], atol=0, rtol=0)

    return run


SCENES: dict[str, Scene] = {
    "attention, 4 heads x 512 rows x 64": attention,
    "sum of two tensors of 1,048,576 elements, 1,024 programs": add,
    "sort of 6 rows of 100 elements, flag-gems": sort,
}


def measured(scene: Scene, times: int) -> float:
    run = scene()
    seconds = []
    for _ in range(times):
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return round(min(seconds), 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", type=Path, help="a folder of unpacked wheels: flag-gems, sqlalchemy")
    parser.add_argument("--only", default="", help="scenes whose name contains this")
    parser.add_argument("--times", type=int, default=3, help="runs of each scene; the fastest counts (3)")
    parser.add_argument("--of", default="", help="commit of the simulator, where it is not the current one")
    parser.add_argument(
        "--results", type=Path, help="write rows there, in the place of those of the same scene and commit"
    )
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.path:
        sys.path.insert(0, str(a.path))
    rows = []
    for name, scene in SCENES.items():
        if a.only in name and (scene is not sort or a.path):
            rows.append({"scene": name, "seconds": measured(scene, a.times), **circumstances()})
            if a.of:
                rows[-1]["commit"] = subprocess.check_output(["git", "rev-parse", "--short", a.of], text=True).strip()
            print(json.dumps(rows[-1]), flush=True)
    if a.results:
        new = {(row["scene"], row["commit"]) for row in rows}
        kept = [json.loads(line) for line in a.results.read_text().splitlines()] if a.results.is_file() else []
        rows = [row for row in kept if (row["scene"], row["commit"]) not in new] + rows
        a.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
