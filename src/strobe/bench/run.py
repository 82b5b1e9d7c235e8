"""Measure one case with strobe and its rivals: one row, written as one JSON line."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from ..errors import InvalidProblem
from ..problem.target import Target
from . import provenance, roofline
from .accuracy import distances, errors
from .attempt import Attempt
from .cases import Case, Inputs
from .machine import version
from .rivals import SELF, Forward, Rival, Strobe
from .timer import Function, Timing, as_graph, interleave

# Allowed relative difference (Frobenius). Two correct kernels differ by a few roundings, a wrong one by tenths. float32
# allows for TF32.
AGREE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 2e-3, torch.float64: 1e-6}

# In PyTorch 2.11 a CUDA graph of these reads freed memory when it is replayed (flash: with grouped heads). The fault
# would end the process and lose all its measurements.
NOT_CAPTURED = dict.fromkeys(
    (("math", "backward"), ("flash", "backward")), "its backward faults when a CUDA graph of it is replayed"
)


class Options(NamedTuple):
    device: torch.device
    kernel: str | None = None
    rounds: int = 10
    sample_ms: float = 20.0
    graph: bool = False
    flush: bool = False


class Contender(NamedTuple):
    function: Function
    result: tuple[Tensor, ...]  # the output, or the gradients of q, k and v


def measure(case: Case, rivals: Iterable[Rival], options: Options) -> dict:
    """Measure a case with strobe and every rival. "refused" in the row names rivals that cannot run it, with
    reasons.
    """
    side = nullcontext()
    if options.graph:
        side = torch.cuda.stream(torch.cuda.Stream(options.device))
    with side, reproducible(case.deterministic):
        x, ours, refused = case.inputs(options.device), Strobe(options.kernel), {}
        ready: dict[str, Contender] = {}
        for rival in (*rivals, ours):  # ours last, because results are compared with the first in `ready`
            contender, reason = _ready(rival, case, x, options)
            if contender is None:
                refused[rival.name] = reason
            else:
                ready[rival.name] = contender
        exact = partial(distances, case, x, {name: contender.result for name, contender in ready.items()})
        error = _drop_wrong(ready, refused, case.dtype, ours.name, exact)
        del exact
        accuracy = errors(case, x, {name: contender.result[0] for name, contender in ready.items()})
        functions = {name: ready[name].function for name in sorted(ready, key=lambda name: name != ours.name)}
        del ready
        times = interleave(functions, options.device, options.rounds, options.sample_ms, options.flush)
        return _row(case, ours, x, times, refused, options) | {"relative_error": error, "errors": accuracy}


@contextmanager
def reproducible(wanted: bool) -> Iterator[None]:
    """Set torch's switch for deterministic algorithms if `wanted`, which kernels follow, without filling empty
    tensors.
    """
    filling: Any = import_module("torch.utils.deterministic")
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    if wanted:
        torch.use_deterministic_algorithms(True)
        filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]


def _ready(rival: Rival, case: Case, x: Inputs, options: Options) -> tuple[Contender | None, str]:
    """(the rival's prepared call with one result, "") or (None, the reason why it cannot run)."""
    with Attempt() as attempt:
        if reason := rival.why_not(case, options.device):
            return None, reason
        if options.graph and (reason := NOT_CAPTURED.get((rival.name, "backward" if case.backward else "forward"))):
            return None, reason
        forward = rival.prepare(case, x)
        function = _backward(forward, x) if case.backward else forward
        found = function()
        result = (found,) if isinstance(found, Tensor) else found
        return Contender(as_graph(function) if options.graph else function, result), ""
    return None, attempt.reason or ""


def _backward(forward: Forward, x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """A function that runs only the backward and returns dq, dk, dv. The forward runs once and keeps its graph."""
    out, leaves = forward(), (x.q, x.k, x.v)
    return lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True)


def _drop_wrong(
    ready: dict[str, Contender],
    refused: dict[str, str],
    dtype: torch.dtype,
    ours: str,
    exact: Callable[[], dict[str, float]] = dict,
) -> float | None:
    """Drop contenders with wrong results, so that no wrong kernel is reported as fast. Returns our distance from the
    first contender in `ready`.

    All results must agree with the first. If some do not, `exact` (`accuracy.distances`) gives each one's distance from
    float64 and decides: gradients may cancel, and then kernels differ by rounding only.
    """
    first, agree = next(iter(ready), ours), AGREE[dtype]
    apart = {name: _distance(ready[name].result, ready[first].result) for name in ready if name != first}
    wrong = {
        name: f"differs from {first} by {distance:.2g} of its norm, more than {agree:g}"
        for name, distance in apart.items()
        if not distance <= agree
    }
    if wrong and (errors := exact()):
        far = {name: error for name, error in errors.items() if not error <= agree}
        wrong = {
            name: f"differs from float64 by {error:.2g} of its norm, more than {agree:g}" for name, error in far.items()
        }
    for name, reason in wrong.items():
        refused[name] = f"wrong: {reason}"
        del ready[name]
    return apart.get(ours)


def _distance(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(mine, theirs)]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def _row(
    case: Case, ours: Strobe, x: Inputs, times: dict[str, Timing], refused: dict[str, str], options: Options
) -> dict:
    target = roofline.ceiling(options.device, case.dtype)
    work = roofline.cost(case, x)
    row: dict = {
        "case": case.name,
        "data": case.data,
        "direction": "backward" if case.backward else "forward",
        "dtype": str(case.dtype).removeprefix("torch."),
    }
    row |= dict.fromkeys(("kernel", "config", "ms", "tflops", "percent_of_ceiling", "ratio"))
    mine = times.get(ours.name)
    rivals = {name: _short(timing.median_ms) for name, timing in times.items() if name != ours.name}
    if mine is not None:
        choice = ours.choice(case, x)
        plan = choice.backward if case.backward and choice.backward else choice.forward
        work = roofline.cost(case, x, plan.kernel)
        row |= {"kernel": plan.kernel.name, "config": str(plan.config), "ms": _short(mine.median_ms)}
        row |= {
            "tflops": _short(roofline.tflops(work, mine.median_ms)),
            "percent_of_ceiling": _short(roofline.percent(work, target, mine.median_ms)),
        }
        others = [ms for name, ms in rivals.items() if name != SELF]
        row |= {"ratio": _short(min(others) / mine.median_ms) if others else None}
    row |= {"rivals": rivals, "versions": versions_of(rivals), "refused": refused}
    row |= {"flops": work.flops, "intensity": _short(work.flops / work.moved_bytes)}
    row |= {"spread": {name: [_short(t.low_ms), _short(t.high_ms)] for name, t in times.items()}}
    row |= {
        "timing": "graph" if options.graph else "eager",
        "l2": "flushed" if options.flush else "warm",
        "rounds": options.rounds,
    }
    return (
        row
        | {"peak_tflops": _short(target.peak_tflops), "peak_gbps": _short(target.peak_gbps)}
        | circumstances(options.device)
    )


def versions_of(names: Iterable[str]) -> dict[str, str | None]:
    """The versions of rivals that are not part of torch: name -> version.

    >>> versions_of(["naive", "sdpa"])
    {}
    """
    own = {"fa4": lambda: version("flash-attn-4"), "cudnn": lambda: str(torch.backends.cudnn.version())}
    return {name: own[name]() for name in names if name in own}


def _short(number: float) -> float:
    return float(f"{number:.5g}")


def circumstances(device: torch.device) -> dict:
    """Device, versions, date, commit and hash of the source of a measurement."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    versions = {
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    return {
        "device": str(Target.of(device)),
        "threads": torch.get_num_threads(),
        **versions,
        "date": now,
        "commit": provenance.commit(),
        "source_tree": provenance.source_tree(),
    }


def rows(
    cases: Iterable[Case], rivals: Iterable[Rival], options: Options, file: TextIO | None = None
) -> Iterator[dict]:
    """Measure the cases. Each row is written to `file` as one JSON line as soon as it is measured."""
    rivals = list(rivals)
    return written((measure(case, rivals, options) for case in cases), file)


def opened(name: str | None, stack: ExitStack) -> TextIO | None:
    """The file of --json, opened to append: standard output for "-", None without a name. Raises InvalidProblem if it
    cannot be written.
    """
    if name is None or name == "-":
        return sys.stdout if name else None
    try:
        return stack.enter_context(Path(name).open("a"))
    except OSError as error:
        raise InvalidProblem("--json", name, "a file that can be written", str(error)) from error


def written(found: Iterable[dict], file: TextIO | None) -> Iterator[dict]:
    for row in found:
        if file is not None:
            file.write(json.dumps(row) + "\n")
            file.flush()
        yield row
