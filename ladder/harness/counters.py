"""`python -m ladder --counters`: hardware counters of each rung, by Nsight Compute (`ncu`).

ncu profiles a child process, which runs each rung once unprofiled to compile it, and once profiled. An empty kernel
separates the rungs.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl

from strobe.errors import UnsupportedProblem

from . import Row, harness
from .harness import Rung

BYTES = {
    "dram_bytes": "dram__bytes.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
}
SHARES = {  # percent of the kernel's time
    "tensor_percent": "sm__pipe_tensor_op_hmma_type_hmma_hgmma_qgmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
}
REASONS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar",
    "mio_throttle", "misc", "no_instruction", "not_selected", "selected", "short_scoreboard", "sleeping",
    "tex_throttle", "wait",
)  # fmt: skip
STALLS = {reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in REASONS}
TIME = "gpu__time_duration.sum"
BOUNDARY = "rung_boundary"  # the kernel at the end of this file
MOST_SECONDS = 600


def facts(names: Sequence[str], seqlen: int, head_dim: int, causal: bool, ncu: str | None = None) -> list[Row]:
    """One row per rung: its problem, and under "counters" bytes, percentages, conflicts, and stall reasons as fractions
    of warp time.
    """
    ncu = ncu or shutil.which("ncu")
    if ncu is None:
        raise UnsupportedProblem("--counters needs Nsight Compute: put ncu, which CUDA's toolkit has, on the PATH")
    metrics = ",".join([TIME, *BYTES.values(), *SHARES.values(), *STALLS.values()])
    watch = [
        ncu,
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--csv",
        "--print-units",
        "base",
        "--metrics",
        metrics,
    ]
    child = [sys.executable, "-m", __name__, json.dumps([list(names), seqlen, head_dim, causal])]
    said = subprocess.run([*watch, *child], capture_output=True, text=True, timeout=MOST_SECONDS)
    if said.returncode:
        raise UnsupportedProblem(f"ncu could not watch: {(said.stdout + said.stderr).strip()[-400:]}")
    runs = parts(said.stdout.splitlines())
    if len(runs) != len(names):
        raise UnsupportedProblem(f"ncu watched {len(runs)} of {len(names)} rungs: {said.stdout[-400:]}")
    return [
        heading(harness.load(name), seqlen, head_dim, causal) | {"counters": summary(kernels)}
        for name, kernels in zip(names, runs)
    ]


def heading(rung: Rung, seqlen: int, head_dim: int, causal: bool) -> Row:
    size = rung.size(seqlen, head_dim, causal)
    return harness.heading(rung.name, size, {}) | {
        "where": "gpu",
        "error": "",
        "model_bytes": rung.moved(size, rung.form_of(size, {})),
    }


def parts(lines: Iterable[str]) -> list[list[dict[str, float]]]:
    """Each rung's kernel metrics, in order, from ncu's CSV.

    >>> head = ["==PROF== watching", '"ID","Kernel Name","Metric Name","Metric Value"']
    >>> parts([*head, f'"0","{BOUNDARY}","a","1"', '"1","attend","a","1,024"'])
    [[{'a': 1024.0}]]
    """
    runs: list[list[dict[str, float]]] = []
    kernel = ""
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        if row["ID"] != kernel:
            kernel = row["ID"]
            if row["Kernel Name"].startswith(BOUNDARY):
                runs.append([])
            else:
                runs[-1].append({})
        if not row["Kernel Name"].startswith(BOUNDARY):
            runs[-1][-1][row["Metric Name"]] = float(row["Metric Value"].replace(",", "") or "nan")
    return runs


def summary(kernels: Sequence[dict[str, float]]) -> Row:
    """The kernels of one run combined: bytes are summed; percentages and fractions are averaged by kernel time."""
    total = sum(kernel[TIME] for kernel in kernels)
    mean = lambda metric: sum(kernel[metric] * kernel[TIME] for kernel in kernels) / total
    waited = {reason: mean(metric) for reason, metric in STALLS.items()}
    shares = {reason: round(100 * share / sum(waited.values()), 1) for reason, share in waited.items()}
    return {
        "watched_ms": round(total / 1e6, 4),
        **{name: sum(kernel[metric] for kernel in kernels) for name, metric in BYTES.items()},
        **{name: round(mean(metric), 1) for name, metric in SHARES.items()},
        "warps": {reason: share for reason, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= 1},
    }


def lines(rows: Iterable[Row]) -> list[list[object]]:
    """Table cells: rung, DRAM and L2 GB, percentages of tensor cores, issue slots and shared memory, conflicts in
    millions, main stall reasons.
    """
    found = []
    for row in rows:
        seen = row["counters"]
        waits = ", ".join(f"{reason} {share:.0f}" for reason, share in seen["warps"].items() if reason != "selected")
        figures = [
            seen["dram_bytes"] / 1e9,
            seen["l2_bytes"] / 1e9,
            *(seen[name] for name in SHARES),
            seen["bank_conflicts"] / 1e6,
        ]
        found.append([row["rung"], *figures, ", ".join(waits.split(", ")[:3])])
    return found


HEADERS = ("rung", "DRAM GB", "L2 GB", "tensor %", "issue %", "shared %", "conflicts, M", "warps wait, % of their time")


@triton.jit
def rung_boundary(x):
    tl.store(x, 0)


def _watched(names: Sequence[str], seqlen: int, head_dim: int, causal: bool) -> None:
    device = torch.device("cuda")
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    for name in names:
        rung = harness.load(name)
        size = rung.size(seqlen, head_dim, causal)
        q, k, v = harness.draw(rung, size, device)
        rung_boundary[(1,)](flag)
        rung.run(q, k, v, causal)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        rung_boundary[(1,)](flag)
        rung.run(q, k, v, causal)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    _watched(*json.loads(sys.argv[1]))
