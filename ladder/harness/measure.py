"""Measures rungs on a GPU. Each is checked first; then all rungs and rivals of a problem are timed alternately, so that
clock drift affects all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strobe import reference
from strobe.bench.attempt import Attempt
from strobe.bench.cases import Case, Inputs
from strobe.bench.rivals import RIVALS, Strobe
from strobe.bench.timer import as_graph, interleave
from strobe.errors import InvalidProblem
from strobe.problem.call import Call
from strobe.problem.target import Target

from . import RUNGS, Row, harness
from .harness import Options, Rung, Size

AGREE = 2e-2  # allowed difference between rival and oracle, relative to the oracle's norm


class Point(NamedTuple):
    rung: Rung
    size: Size
    options: Options

    @property
    def place(self) -> tuple:
        """Key of the problem: points with equal keys are timed together."""
        size = self.size
        return size.head_dim, size.causal, size.seqlen_k, self.rung.queries


def in_order(points: Iterable[Point]) -> list[Point]:
    return sorted(points, key=lambda point: (*point.place, RUNGS.index(point.rung.name)))


def pick(names: Sequence[str]) -> list[Any]:
    """The rivals with these names. `strobe` is the production kernel."""
    known = {"strobe": Strobe(), **{name: RIVALS[name] for name in ("flash", "cudnn", "fa4", "flex")}}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidProblem("--rivals", ",".join(unknown), f"some of {', '.join(known)}", "separate them by commas")
    return [known[name] for name in names]


def rows(points: Iterable[Point], rivals: Sequence[Any], rounds: int, device: torch.device) -> Iterator[Row]:
    """One row per point and rival, for points `in_order`. With rounds=0 it only checks. A failure is a row with its
    reason under "error".
    """
    for _, group in groupby(points, key=lambda point: point.place):
        found: list[Row] = []
        ready: dict[int, Callable[[], object]] = {}
        sizes = []
        for rung, size, options in group:
            sizes.append(size)
            row: Row = harness.heading(rung.name, size, options)
            with Attempt() as attempt:
                row, ready[len(found)] = harness.checked(rung, size, options, device)
            found.append(row | {"error": attempt.reason})
        size = sizes[0]
        for rival in rivals if rounds and size.seqlen_q == size.seqlen_k else ():
            row = harness.heading(rival.name, size, {}) | {"flops": size.flops, "where": "gpu"}
            with Attempt() as attempt:
                ready[len(found)] = _rival(rival, size, device)
            found.append(row | {"error": attempt.reason})
        if rounds and ready:
            _timed(found, ready, rounds, device)
        yield from found


def _rival(rival: Any, size: Size, device: torch.device) -> Callable[[], Tensor]:
    """The rival's call, after its first head agreed with the oracle."""
    case = Case(rival.name, size.batch, size.seqlen_q, size.heads, size.heads_kv, size.head_dim, causal=size.causal)
    if reason := rival.why_not(case, device):
        raise RuntimeError(reason)
    q, k, v = harness.draw(harness.load("k6"), size, device)
    call = rival.prepare(case, Inputs(q, k, v, torch.empty_like(q), None, None))
    one = Call(q[:1, :, :1], k[:1, :, :1], v[:1, :, :1])
    exact = reference.forward(one._replace(right=0) if size.causal else one).out
    distance = float((call()[:1, :, :1].double() - exact).norm() / exact.norm())
    if not distance <= AGREE:
        raise AssertionError(f"differs from the oracle by {distance:.2g} of its norm, more than {AGREE:g}")
    return call


def _timed(found: list[Row], ready: dict[int, Callable[[], object]], rounds: int, device: torch.device) -> None:
    """Add times to the rows whose runs are `ready`, measured alternately. Device time only: for short kernels, host
    launches would take longer.
    """
    on_gpu = device.type == "cuda"
    with Attempt() as attempt, torch.cuda.stream(torch.cuda.Stream(device) if on_gpu else None):
        times = interleave({str(n): as_graph(run) if on_gpu else run for n, run in ready.items()}, device, rounds)
        for n in ready:
            row, ms = found[n], times[str(n)].median_ms
            row |= {"timing": "graph" if on_gpu else "eager", "ms": short(ms), "tflops": short(row["flops"] / ms / 1e9)}
            row["percent_of_ceiling"] = percent(row, ms, Target.of(device))
            if row.get("model_bytes"):
                row["gbps"] = short(row["model_bytes"] / ms / 1e6)
    if attempt.reason:
        for n in ready:
            found[n]["error"] = attempt.reason


def percent(row: Row, ms: float, target: Target) -> float | None:
    """The lower bound of the time, by FLOPs and compulsory bytes, in percent of the measured time. 8-bit rungs count
    twice the 16-bit rate.
    """
    if not target.peak_tflops:
        return None
    rung = harness.load(row["rung"]) if row["rung"] in RUNGS else harness.load("k6")
    rate = target.peak_tflops * (2 if rung.weights == torch.float8_e4m3fn else 1)
    size = Size(*(row[name] for name in Size._fields))
    keys = size.batch * size.heads_kv * size.seqlen_k
    least_bytes = rung.inputs.itemsize * size.head_dim * (size.rows + 2 * keys) + 2 * size.rows * size.head_dim
    least_ms = max(size.flops / rate / 1e9, least_bytes / target.peak_gbps / 1e6)
    return short(100 * least_ms / ms)


def short(number: float) -> float:
    return float(f"{number:.5g}")
