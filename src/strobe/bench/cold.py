"""What the decode and paged suites share: timing over several cold caches, and the row of a case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..kernels.protocol import Cost
from ..problem.cache import PagedCache
from ..selection.select import Choice
from . import roofline
from .attempt import Attempt
from .run import Contender, Options, _drop_wrong, _short, circumstances, versions_of
from .timer import Function, Timing, as_graph, interleave

# least bytes of caches in a sample: five times the L2 of an H200 (50 MB), twice that of a B200 (126 MB)
COLD_BYTES = 256 * 2**20
Rows = TypeVar("Rows")  # a suite's queries, keys and values without pages


class ColdCase(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def fp8(self) -> bool: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def copies(self) -> int: ...  # the number of caches that one sample runs over


class Measured(NamedTuple):
    """times: of one sample, by contender. refused: reasons of rivals that cannot run the case. error: `_drop_wrong`."""

    times: dict[str, Timing]
    refused: dict[str, str]
    error: float | None


def side_stream(device: torch.device) -> AbstractContextManager:
    """On a GPU a stream on which CUDA graphs can be captured."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def measured(
    case: ColdCase,
    inputs: Sequence[tuple[Rows, PagedCache]],
    ours: Callable[[Rows, PagedCache], Callable[[], Tensor]],
    rivals: dict[str, Callable[[Rows], Callable[[], Tensor]]],
    options: Options,
) -> Measured:
    """Time strobe over the caches of `inputs` and every rival over their rows."""
    on_gpu = options.device.type == "cuda"
    refused = dict.fromkeys(rivals, "reads no keys of 8 bits") if case.fp8 else {}
    ready: dict[str, Contender] = {}
    for name, prepare in (*((n, p) for n, p in rivals.items() if n not in refused), ("strobe", None)):
        with Attempt() as attempt:
            calls = [ours(rows, cache) if prepare is None else prepare(rows) for rows, cache in inputs]
            ready[name] = Contender(_all(calls, on_gpu), (calls[0](),))
        if attempt.reason:
            refused[name] = attempt.reason
    error = _drop_wrong(ready, refused, case.dtype, "strobe")
    functions = {name: ready[name].function for name in sorted(ready, key=lambda name: name != "strobe")}
    return Measured(interleave(functions, options.device, options.rounds, options.sample_ms), refused, error)


def _all(calls: Sequence[Function], on_gpu: bool) -> Function:
    def function() -> None:
        for call in calls:
            call()

    return as_graph(function) if on_gpu else function


def row(
    case: ColdCase, direction: str, choice: Choice | None, work: Cost | None, found: Measured, options: Options
) -> dict:
    """The row, with the fields of `run.measure`. Times are those of one call: the time of a sample divided by its
    number of caches. choice and work are None if strobe has no time.
    """
    target = roofline.ceiling(options.device, case.dtype)
    each = {name: Timing(*(ms / case.copies for ms in timing)) for name, timing in found.times.items()}
    rivals = {name: _short(timing.median_ms) for name, timing in each.items() if name != "strobe"}
    row: dict = {"case": case.name, "direction": direction, "dtype": str(case.dtype).removeprefix("torch.")}
    row |= dict.fromkeys(("kernel", "config", "ms", "tflops", "percent_of_ceiling", "ratio", "flops", "gbps"))
    if choice is not None and work is not None:
        plan, mine = choice.forward, each["strobe"].median_ms
        row |= {"kernel": plan.kernel.name, "config": str(plan.config), "ms": _short(mine), "flops": work.flops}
        row |= {
            "tflops": _short(roofline.tflops(work, mine)),
            "percent_of_ceiling": _short(roofline.percent(work, target, mine)),
            "gbps": _short(work.moved_bytes / mine / 1e6),
            "ratio": _short(min(rivals.values()) / mine) if rivals else None,
        }
    row |= {
        "rivals": rivals,
        "versions": versions_of(rivals),
        "spread": {name: [_short(t.low_ms), _short(t.high_ms)] for name, t in each.items()},
        "timing": "graph" if options.device.type == "cuda" else "eager",
        "l2": "cold",
        "caches": case.copies,
        "rounds": options.rounds,
    }
    peaks = {"peak_tflops": _short(target.peak_tflops), "peak_gbps": _short(target.peak_gbps)}
    return row | peaks | circumstances(options.device) | {"refused": found.refused, "relative_error": found.error}
