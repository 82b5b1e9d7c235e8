"""Measure what each level of the LaunchCache saves per call.

    python -m tools.proof.cache_levels                        on the GPU if there is one, else on the CPU
    python -m tools.proof.cache_levels --json rows.jsonl

A small causal forward runs in a loop. For each level, its table is emptied before each call, or its lookup is
replaced by a miss, together with all levels above it that would hide it. The table shows the host time of a call (least
of several samples) and the difference to the row above, which is what the level saves. Rows of `launches` and below
exist only on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns
from unittest import mock

import torch

import strobe
from strobe.kernels.runtime.launch_cache import CACHE, LaunchCache
from strobe.ops import attention as ops
from strobe.problem.target import Target

SAMPLES, CALLS = 12, 200


def measure() -> list[dict]:
    """A row for each level: {"level", "us", "saves_us", "device"}."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    q, k, v = (torch.randn(1, 64, 2, 64, device=device, dtype=dtype) for _ in range(3))
    call = lambda: strobe.attention(q, k, v, causal=True)
    miss = lambda *_, **__: None
    no_keywords = mock.patch.multiple(ops, run_keywords=miss, insert_keywords=miss)
    no_direct = mock.patch.object(LaunchCache, "direct_choice", miss)

    steps = [_us(call)]
    names = ["everything is found"]
    with ExitStack() as stack:
        for name, patch in (("calls, path KEYWORDS", no_keywords), ("calls, path DIRECT", no_direct)):
            stack.enter_context(patch)
            names.append(name)
            steps.append(_us(call))
        names.append("calls, path OP")
        steps.append(_us(call, CACHE.calls.clear))
    rows = _rows(names, steps)
    if on_gpu:
        tables = (CACHE.launches, CACHE.kernel_launches, CACHE.kernels)
        names = ["everything is found", "launches", "kernel_launches", "kernels"]
        steps = [_us(call)]
        for n in range(1, 4):
            steps.append(_us(call, lambda n=n: [table.clear() for table in tables[:n]]))
        rows += _rows(names, steps)[1:]
    name = Target.of(device).name
    return [{**row, "device": name} for row in rows]


def _us(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Microseconds of host time for one call after `before`, the least of SAMPLES means over CALLS."""
    for _ in range(CALLS):
        before()
        call()
    times = []
    for _ in range(SAMPLES):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = perf_counter_ns()
        for _ in range(CALLS):
            before()
            call()
        times.append((perf_counter_ns() - start) / CALLS / 1000)
    return min(times)


def _rows(names: Sequence[str], steps: Sequence[float]) -> list[dict]:
    saved = [0.0, *[step - last for last, step in itertools.pairwise(steps)]]
    return [
        {"level": name, "us": round(us, 2), "saves_us": round(save, 2)} for name, us, save in zip(names, steps, saved)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.proof.cache_levels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a row for each level")
    a = parser.parse_args(argv)
    rows = measure()
    print(f"{'without this level':<24} {'us per call':>11} {'it saves':>9}")
    for row in rows:
        print(f"{row['level']:<24} {row['us']:11.2f} {row['saves_us']:9.2f}")
    if a.json:
        with a.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
