"""The distributed suite: one sequence over all GPUs of this machine, beside the whole sequence on one GPU.

A rank is a process. A time is the slowest rank's: the median of a few steps between barriers. FLOPs count the pairs of
a row and a key that the mask admits. On a machine without two GPUs two CPU processes run small cases over gloo.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from ..distributed import Plan, context_parallel, problems, warmup
from ..distributed.visible import Visible
from ..errors import InvalidProblem
from ..interface import attention as interface
from ..problem.call import Call
from ..problem.mask import Mask, documents
from ..problem.problem import Problem
from .attempt import Attempt
from .rings import ON_CPU, RINGS

STEPS, WARM = 5, 2
STEP_SECONDS, MOST_LAYERS = 0.08, 16  # a step makes as many calls as fill this time, and at most so many
POLL = 0.2  # seconds between looks for new rows
CONTENDERS = {
    "keys": {"scheme": "keys"},
    "heads": {"scheme": "heads"},
    "keys, own first": {"scheme": "keys", "overlap": True},
}


class Case(NamedTuple):
    """`rows` positions a rank."""

    name: str
    rows: int
    window: int | None = None
    document: int | None = None  # the length of each document
    heads_q: int = 64
    heads_kv: int = 8
    head_dim: int = 128

    def shapes(self, count: int) -> list[tuple[int, ...]]:
        """Of q, k, v and the gradient of the output, on all ranks together."""
        heads = self.heads_q, self.heads_kv, self.heads_kv, self.heads_q
        return [(1, count * self.rows, number, self.head_dim) for number in heads]

    def mask(self, seqlen: int, device: str) -> Mask:
        causal = Mask(self.window, 0)
        if self.document is None:
            return causal
        ids = torch.arange(seqlen, dtype=torch.int32, device=device)[None] // self.document
        return causal & documents(ids)


CASES = (
    Case("causal_16k", 16384),
    Case("documents_2k", 16384, document=2048),
    Case("window_1024", 16384, window=1024),
    Case("causal_8k", 8192),
)
SMALL = (Case("causal_64", 64, None, None, 4, 2, 16), Case("window_8", 64, 8, None, 4, 2, 16))


def suite(patterns: list[str], on_cpu: bool) -> list[Case]:
    """The cases that a pattern names; all without patterns. Raises InvalidProblem for a pattern that names none."""
    cases = SMALL if on_cpu else CASES
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            raise InvalidProblem("--case", pattern, f"one of {', '.join(c.name for c in cases)}", "see --list")
    return [case for case in cases if not patterns or any(fnmatchcase(case.name, one) for one in patterns)]


def measure(cases: list[Case], device: torch.device) -> Iterator[dict]:
    """Yield a row per case and contender as soon as it is measured: TFLOP/s per GPU forward and backward, and their
    share of one GPU's.
    """
    count = torch.cuda.device_count() if device.type == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        path, names, read = Path(folder) / "rows", [case.name for case in cases], 0
        path.touch()
        processes = spawn(_process, args=(count, device.type, names, folder), nprocs=count, join=False)
        ended = processes is None
        while processes is not None and not ended:
            ended = processes.join(POLL)  # raises what a process raised
            lines = path.read_text().split("\n")[:-1]  # what follows the last end of a line is not complete yet
            yield from map(json.loads, lines[read:])
            read = len(lines)


def _process(rank: int, count: int, kind: str, names: list[str], folder: str) -> None:
    device = f"{kind}:{rank}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    place = f"file://{folder}/store"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=place, rank=rank, world_size=count)
    cases = suite(names, kind == "cpu")
    _compile(cases, count, device)
    for case in cases:
        for row in _rows(case, count, device):
            if rank == 0:
                with (Path(folder) / "rows").open("a") as file:
                    file.write(json.dumps(row | {"processes": count}) + "\n")
    dist.barrier()
    os._exit(0)  # the process group's threads may outlive Python's own end


def _compile(cases: list[Case], count: int, device: str) -> None:
    """Compile all kernels at once, shared among the ranks."""
    found: list[Problem] = []
    for case in cases:
        empty = [torch.empty(shape, device=device, dtype=_dtype(device)) for shape in case.shapes(count)[:3]]
        mask = case.mask(case.rows * count, device)
        found.append(Problem.from_call(Call(empty[0], empty[1], empty[2]).with_mask(mask).with_grad))
        for plan in _plans(case, mask, count).values():
            local = [t[:, : plan.local_rows] for t in empty]
            found += problems(plan, local[0], local[1], local[2])
    warmup(found)


def _dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def _plans(case: Case, mask: Mask, count: int) -> dict[str, Plan]:
    """A plan for each contender. With windows and documents `keys, own first` is left out, since there `keys` already
    begins with rows that need own keys alone.
    """
    seqlen, plans = case.rows * count, {}
    for name, settings in CONTENDERS.items():
        plan = context_parallel(**settings).plan(mask, seqlen=seqlen, heads_q=case.heads_q, heads_kv=case.heads_kv)
        if not (plan.settings.own_first and (case.document or case.window)):
            plans[name] = plan
    return plans


def _rows(case: Case, count: int, device: str) -> Iterator[dict]:
    seqlen = case.rows * count
    mask = case.mask(seqlen, device)
    visible = Visible.of(mask, seqlen)
    pairs = int((visible.stop - visible.first).clamp(min=0).sum())
    flops = 4 * pairs * case.heads_q * case.head_dim
    generator = torch.Generator(device).manual_seed(1)
    whole = [torch.randn(s, generator=generator, device=device, dtype=_dtype(device)) for s in case.shapes(count)]
    single = _times(lambda q, k, v: interface.attention(q, k, v, mask=mask), whole, device)
    one = tuple(flops * factor / seconds / 1e12 for factor, seconds in zip((1, 2.5), single))
    yield {"case": case.name, "contender": "one GPU", "forward": one[0], "backward": one[1], "why": None}
    for name, plan in _plans(case, mask, count).items():
        with Attempt() as attempt:
            call = lambda q, k, v, plan=plan: interface.attention(q, k, v, context_parallel=plan)
            times = _times(call, list(map(plan.shard, whole)), device)
        yield _row(case, name, None if attempt.reason else times, (flops / count, one), attempt.reason)
    if case.window is None and case.document is None:
        for name in RINGS if device != "cpu" else ON_CPU:
            with Attempt() as attempt, RINGS[name](whole) as (call, tensors):
                times = _times(call, tensors, device)
            yield _row(case, name, None if attempt.reason else times, (flops / count, one), attempt.reason)


def _row(case: Case, name: str, times: Any, flops: Any, why: str | None = None) -> dict:
    if times is None:
        return {"case": case.name, "contender": name, "forward": None, "backward": None, "why": why}
    work, one = flops
    rates = [work * factor / seconds / 1e12 for factor, seconds in zip((1, 2.5), times)]
    shares = {"forward_share": rates[0] / one[0], "backward_share": rates[1] / one[1]}
    return {"case": case.name, "contender": name, "forward": rates[0], "backward": rates[1], **shares, "why": None}


def line(row: dict) -> str:
    """A row as text, to print as soon as it is measured."""
    if row["forward"] is None:
        return f"{row['case']:14} {row['contender']:20} {row['why']}"
    share = [row.get(f"{name}_share", 1.0) for name in ("forward", "backward")]
    speeds = f"TFLOP/s per GPU {row['forward']:6.1f} {row['backward']:6.1f}"
    return f"{row['case']:14} {row['contender']:20} {speeds}, share of one GPU {share[0]:.3f} {share[1]:.3f}"


def _times(call: Callable[..., Tensor], tensors: list[Tensor], device: str) -> tuple[float, float]:
    """Seconds of a forward and of a backward on the slowest rank: medians of steps. A step makes several calls one
    after another, as the layers of a model do, so that the host runs ahead of the device.
    """
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    dout, found, layers = tensors[3], [], 1
    for step in range(WARM + STEPS):
        marks = [_now(device)]
        outs = [call(q, k, v) for _ in range(layers)]
        marks.append(_now(device))
        for out in outs:
            torch.autograd.grad(out, (q, k, v), dout)
        marks.append(_now(device))
        del outs, out
        found.append([(after - before) / layers for before, after in pairwise(marks)])
        if step == WARM - 1:
            slowest = torch.tensor(found[-1][0], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)  # the same number of layers on each rank
            layers = 1 if device == "cpu" else max(1, min(MOST_LAYERS, round(STEP_SECONDS / float(slowest))))
    medians = torch.tensor([median(times) for times in zip(*found[WARM:])], device=device)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return float(medians[0]), float(medians[1])


def _now(device: str) -> float:
    """The time once all ranks have finished."""
    if device != "cpu":
        torch.cuda.synchronize()
    dist.barrier()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()
