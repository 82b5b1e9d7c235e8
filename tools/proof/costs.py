"""The simulator's counts of global memory against the compiler's instructions, and against Nsight Compute.

    python -m tools.proof.costs                  ten kernels: simulated requests and sectors beside the PTX of sm_90
    python -m tools.proof.costs --json FILE      the simulated counts, for a machine without the simulator
    python -m tools.proof.costs --ncu FILE       on a GPU, where ncu is installed: its counts beside those of FILE

In a kernel without loops each instruction of the PTX runs once in each warp, so requests are instructions times warps.
Where a mask excludes all lanes of a warp there is no request, so that number is a bound. Sectors need a GPU's counters.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

SIZE, WARPS = 4096, 4
METRICS = {
    f"l1tex__t_{what}_pipe_lsu_mem_global_op_{op}.sum": f"{kind} {what}"
    for op, kind in (("ld", "load"), ("st", "store"))
    for what in ("requests", "sectors")
}


@triton.jit
def copy_kernel(x, out, STRIDE: tl.constexpr, SHIFT: tl.constexpr, SIZE: tl.constexpr, LIVE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at * STRIDE + SHIFT, tl.load(x + at * STRIDE + SHIFT, mask=at < LIVE, other=0), mask=at < LIVE)


@triton.jit
def transpose_kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SAME: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    value = tl.load(x + columns * ROWS + rows)
    tl.store(out + (columns * ROWS + rows if SAME else rows * COLUMNS + columns), value)


class Case(NamedTuple):
    name: str
    kernel: Any
    constants: tuple[int, ...]
    dtype: torch.dtype
    elements: int
    masked: bool = False  # whole warps are masked


CASES = [
    Case("contiguous float32", copy_kernel, (1, 0, SIZE, SIZE), torch.float32, SIZE),
    Case("contiguous float16", copy_kernel, (1, 0, SIZE, SIZE), torch.float16, SIZE),
    Case("contiguous int8", copy_kernel, (1, 0, SIZE, SIZE), torch.int8, SIZE),
    Case("contiguous float64", copy_kernel, (1, 0, SIZE, SIZE), torch.float64, SIZE),
    Case("shifted by one float32", copy_kernel, (1, 1, SIZE, SIZE), torch.float32, SIZE + 1),
    Case("every second float32", copy_kernel, (2, 0, SIZE, SIZE), torch.float32, 2 * SIZE),
    Case("every eighth float32", copy_kernel, (8, 0, SIZE, SIZE), torch.float32, 8 * SIZE),
    Case("first half float32", copy_kernel, (1, 0, SIZE, SIZE // 2), torch.float32, SIZE, True),
    Case("columns float32", transpose_kernel, (64, 64, 1), torch.float32, 64 * 64),
    Case("columns float16", transpose_kernel, (64, 64, 1), torch.float16, 64 * 64),
]
NCU = "/usr/local/cuda/bin/ncu"
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int8: "*i8", torch.float64: "*fp64"}
Counts = dict[str, int]


def simulated(case: Case) -> Counts:
    """Requests and sectors of loads and stores, as the simulator counts them."""
    from strobe.sim import Checks, simulate
    from strobe.sim.costs import total

    x, out = (torch.zeros(case.elements, dtype=case.dtype) for _ in range(2))
    with simulate("sm_90", "eager", checks=Checks(costs=True)) as run:
        case.kernel[(1,)](x, out, *case.constants)
    found = {}
    for kind in ("load", "store"):
        row = total(run.costs.rows, f"global {kind}")
        found |= {f"{kind} requests": row.requests, f"{kind} sectors": row.sectors}
    return found


def compiled(case: Case) -> Counts:
    """Requests of loads and stores: instructions of the PTX for sm_90, times warps."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = dict.fromkeys(names[:2], POINTERS[case.dtype]) | dict.fromkeys(names[2:], "constexpr")
    aligned: Any = {(index,): [["tt.divisibility", 16]] for index in range(2)}
    source = ASTSource(case.kernel, signature, dict(zip(names[2:], case.constants, strict=True)), aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS}).asm["ptx"]
    return {
        "load requests": WARPS * len(re.findall(r"\bld\.global\b", ptx)),
        "store requests": WARPS * len(re.findall(r"\bst\.global\b", ptx)),
    }


def on_gpu() -> None:
    """Launch each case once, for ncu to look at."""
    for case in CASES:
        x, out = (torch.zeros(case.elements, dtype=case.dtype, device="cuda") for _ in range(2))
        case.kernel[(1,)](x, out, *case.constants)
    torch.cuda.synchronize()


def profiled() -> dict[str, Counts]:
    """What ncu counts of each case. Raises RuntimeError with what it says where it cannot."""
    ncu = shutil.which("ncu") or NCU
    command = [ncu, "--csv", "--metrics", ",".join(METRICS)]
    command += ["-k", "regex:copy_kernel|transpose_kernel", sys.executable, "-m", "tools.proof.costs", "--launch"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = parsed(done.stdout)
    if len(found) != len(CASES):
        raise RuntimeError(
            f"ncu gave {len(found)} of {len(CASES)} kernels: {(done.stdout + done.stderr).strip()[-400:]}"
        )
    return {case.name: counts for case, counts in zip(CASES, found, strict=True)}


def parsed(text: str) -> list[Counts]:
    """The counts of each launch in ncu's CSV, in order.

    >>> parsed('"ID","Metric Name","Metric Value"\\n"0","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","1,024"')
    [{'load sectors': 1024}]
    """
    rows = csv.DictReader(io.StringIO("\n".join(line for line in text.splitlines() if line.startswith('"'))))
    found: dict[str, Counts] = {}
    for row in rows:
        if row["Metric Name"] in METRICS:
            value = int(float(row["Metric Value"].replace(",", "")))
            found.setdefault(row["ID"], {})[METRICS[row["Metric Name"]]] = value
    return list(found.values())


def agrees(simulated: int, other: int, bound: bool) -> bool:
    """Whether two counts are equal, or the other is an upper bound.

    >>> agrees(16, 16, False), agrees(16, 32, False), agrees(16, 32, True)
    (True, False, True)
    """
    return simulated <= other if bound else simulated == other


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.proof.costs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the simulated counts")
    parser.add_argument("--ncu", type=Path, help="compare ncu's counts with these")
    parser.add_argument("--launch", action="store_true", help="launch each case on the GPU")
    a = parser.parse_args(argv)
    if a.launch:
        on_gpu()
        return 0
    if a.ncu:
        expected: dict[str, Counts] = json.loads(a.ncu.read_text())
        if not (shutil.which("ncu") or Path(NCU).exists()):
            print("no ncu here")
            return 0
        other = profiled()
    else:
        expected = {case.name: simulated(case) for case in CASES}
        other = {case.name: compiled(case) for case in CASES}
        if a.json:
            a.json.write_text(json.dumps(expected, indent=1))
    differ = 0
    for name, counts in other.items():
        pairs = [f"{what} {expected[name][what]} / {count}" for what, count in counts.items()]
        case = next(case for case in CASES if case.name == name)
        bound = case.masked and not a.ncu
        wrong = not all(agrees(expected[name][what], count, bound) for what, count in counts.items())
        differ += wrong
        print(f"{name:24} {', '.join(pairs)}{'  DIFFERS' * wrong}")
    print(f"{len(other)} kernels, simulated / {'ncu' if a.ncu else 'compiled'}; {differ} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
