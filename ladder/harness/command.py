"""`python -m ladder`: turns flags into rows, and rows into a table, JSON lines and plots."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TextIO

import torch

from strobe.bench import plot as bench_plot
from strobe.bench import table
from strobe.bench.attempt import Attempt
from strobe.bench.run import circumstances, opened, written
from strobe.errors import InvalidProblem, UnsupportedProblem
from strobe.problem.target import Target

from . import RUNGS, Row, harness, measure
from .harness import Options, Rung
from .measure import Point
from .options import parser

SEQLENS = (4096,)


def main(argv: Sequence[str]) -> int:
    """Exit status. 0: success. 1: a rung failed or was wrong. 2: the command cannot run as given."""
    arguments = parser().parse_args(argv)
    try:
        return _run(arguments)
    except (InvalidProblem, UnsupportedProblem) as error:
        print(f"strobe: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    _fits(arguments, device)
    if arguments.rungs == ["page"]:
        _needs(torch.device("cpu"))
        from . import page

        return page.write(arguments.out or Path("ladder.html"))
    if arguments.plot:
        bench_plot.check(arguments.plot)
    _needs(device)
    if arguments.timeline:
        return _timeline(_points(arguments, device), arguments.timeline)
    with ExitStack() as stack:
        file = opened(arguments.json, stack)
        if arguments.outliers:
            return _outliers(device, file, arguments.json)
        points = _points(arguments, device)
        if arguments.counters:
            return _counters(points, device, file, arguments.json)
        found = list(written(_rows(points, arguments, device), file))
    if arguments.json != "-":
        show(found)
    if arguments.plot and any(row.get("ms") for row in found):
        from . import plot

        for path in plot.save(found, arguments.plot):
            print(f"wrote {path}", file=sys.stderr)
    return 1 if any(row["error"] for row in found) else 0


# ---------------------------------------------------------------- the request


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cuda", "cpu"):
        raise InvalidProblem("device", repr(name), "cuda, cuda:1 or cpu", "leave it out for this machine's own")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedProblem(f"device {name}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def _fits(arguments: argparse.Namespace, device: torch.device) -> None:
    """Reject combinations of options of which one would be ignored."""
    untimed = "a GPU and no --check" if device.type == "cpu" or arguments.check else ""
    for flag, given, wanted in (
        ("--plot", arguments.plot, untimed),
        ("--rivals", arguments.rivals, untimed),
        ("--counters", arguments.counters, untimed),
        ("--out", arguments.out, "" if arguments.rungs == ["page"] else "the page: python -m ladder page"),
        ("--seed", arguments.seed, "the simulator: --device cpu" if device.type == "cuda" else ""),
        ("RUNG", arguments.outliers and arguments.rungs, "no rung: --outliers runs k6, k7 and k8"),
    ):
        if given and wanted:
            raise InvalidProblem(flag, given, wanted, "leave it out")


def _needs(device: torch.device) -> None:
    for name in ("triton",) if device.type == "cuda" else ("triton", "greenlet"):
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            raise UnsupportedProblem(
                f"python -m ladder needs {name} here: pip install 'strobe-attention[sim,cli]'"
            ) from error


def _points(arguments: argparse.Namespace, device: torch.device) -> list[Point]:
    """Every requested rung, head_dim, mask and length that the machine can run."""
    unknown = [name for name in arguments.rungs if name not in RUNGS]
    if unknown:
        raise InvalidProblem(
            "rung", ", ".join(unknown), f"some of {', '.join(RUNGS)}", "leave them out for all; `page` stands alone"
        )
    masks = (False, True) if arguments.causal is None else (arguments.causal,)
    gpu = Target.of(device) if device.type == "cuda" else None
    points = []
    for name in arguments.rungs or RUNGS:
        rung = harness.load(name)
        if gpu and (gpu.capability < rung.capability or (rung.capability == 90 and gpu.capability != 90)):
            if arguments.rungs:
                raise UnsupportedProblem(
                    f"rung {name}: it is written for sm_{rung.capability}, this is {gpu}; --device cpu simulates it"
                )
            print(
                f"{name} is left out: it is written for sm_{rung.capability}, this is sm_{gpu.capability}",
                file=sys.stderr,
            )
            continue
        for head_dim in arguments.head_dim or ((128,) if gpu else (64,)):
            for causal in masks:
                options = _options(rung, head_dim, causal, arguments.set)
                sizes = [
                    rung.size(length, head_dim, causal) if gpu else rung.small(head_dim, causal, length)
                    for length in _lengths(arguments, gpu)
                ]
                points += [Point(rung, size, options) for size in sizes]
    return points


def _lengths(arguments: argparse.Namespace, gpu: Target | None) -> Sequence[int]:
    return arguments.seqlen or (SEQLENS if gpu else (0,))


def _options(rung: Rung, head_dim: int, causal: bool, pairs: Sequence[str]) -> Options:
    """NAME=N pairs as values of the rung's Form, except fields that the problem determines."""
    known = {field.name for field in fields(rung.form)} - {"head_dim", "causal", "masks", "short"}
    found = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in known or not value.lstrip("-").isdecimal():
            raise InvalidProblem(
                "--set", pair, f"NAME=N with a name of {rung.name}'s Form: {', '.join(sorted(known))}", "see its file"
            )
        found[name] = int(value)
    try:
        rung.form(head_dim, causal, **found)
    except ValueError as error:
        raise InvalidProblem(
            "--set", " ".join(pairs) or "nothing", f"values that {rung.name} can have", str(error)
        ) from error
    return found


# ---------------------------------------------------------------- rows


def _rows(points: Sequence[Point], arguments: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """One row per point. A failure is a row with its reason, and the remaining rungs still run."""
    about, rivals = circumstances(device), measure.pick([name for name in arguments.rivals.split(",") if name])
    if device.type == "cuda":
        rounds = 0 if arguments.check else arguments.rounds
        followed = table.follow(measure.in_order(points), "python -m ladder")
        yield from (row | about for row in measure.rows(followed, rivals, rounds, device))
        return
    yield from (row | about for row in _simulated(points, arguments.seed))


def _simulated(points: Sequence[Point], seed: int) -> Iterator[Row]:
    """One row per point. Progress goes to standard error, since a rung takes seconds."""
    names = ", ".join(dict.fromkeys(point.rung.name for point in points))
    does = "each rung is simulated on a small problem, checked for races and against the oracle; nothing is timed"
    print(f"python -m ladder without a GPU: {names}; {does}", file=sys.stderr)
    begin = time.perf_counter()
    for done, (rung, size, options) in enumerate(points, 1):
        mask = "causal" if size.causal else "dense"
        print(f"[{done}/{len(points)}] {rung.name} D={size.head_dim} {mask}: ", end="", file=sys.stderr, flush=True)
        row = harness.heading(rung.name, size, options)
        with Attempt() as attempt:
            row = harness.simulated(rung, size, options, "pct", seed)[0]
        gone = time.perf_counter() - begin
        left = (
            f"; about {gone / done * (len(points) - done):.0f} s left"
            if done < len(points)
            else f"; {gone:.0f} s in all"
        )
        print(
            (f"FAIL, {attempt.reason}" if attempt.reason else f"right, {row['worst']:.2f} of the error allowed") + left,
            file=sys.stderr,
        )
        yield row | {"error": attempt.reason}


def show(rows: Sequence[Row]) -> None:
    """Print the table, followed by failures and their reasons."""
    headers = [
        "rung",
        "S_q",
        "S_k",
        "D",
        "mask",
        "ms",
        "TFLOP/s",
        "% ceiling",
        "GB by model",
        "moved / model",
        "peak MB",
        "error / allowed",
    ]
    lines = []
    for row in rows:
        moved = row.get("moved_bytes")
        ratio = moved / row["model_bytes"] if moved else None
        figures = [
            row["ms"],
            row["tflops"],
            row.get("percent_of_ceiling"),
            row.get("model_bytes", 0) / 1e9,
            ratio,
            row.get("peak_bytes", 0) / 1e6,
        ]
        mask = "causal" if row["causal"] else "dense"
        lines.append([row["rung"], row["seqlen_q"], row["seqlen_k"], row["head_dim"], mask, *figures, row.get("worst")])
    simulated = rows[0].get("where") == "simulator"
    where = (
        "on the simulator: checked for races and against the oracle, not timed" if simulated else str(rows[0]["device"])
    )
    table.show(headers, lines, where)
    for row in rows:
        if row["error"]:
            print(f"FAIL: {row['rung']} D={row['head_dim']} {'causal' if row['causal'] else 'dense'}: {row['error']}")


# ---------------------------------------------------------------- other commands


def _outliers(device: torch.device, file: TextIO | None, where: str | None) -> int:
    from ..outliers import errors

    about = circumstances(device)
    found = list(written((row | about for row in errors(device)), file))
    if where != "-":
        best = found[-1]["rmse"]
        lines = [[row["method"], row["rmse"], row["rmse"] / best] for row in found]
        table.show(
            ["method", "RMSE", "against the last"],
            lines,
            f"S_q={found[0]['seqlen_q']} S_k={found[0]['seqlen_k']} D={found[0]['head_dim']}",
        )
    return 0


def _counters(points: Sequence[Point], device: torch.device, file: TextIO | None, where: str | None) -> int:
    from . import counters

    about, together = circumstances(device), defaultdict(list)
    for point in points:
        together[point.size.seqlen_k, point.size.head_dim, point.size.causal].append(point.rung.name)
    for (seqlen, head_dim, causal), names in together.items():
        rows = list(written((row | about for row in counters.facts(names, seqlen, head_dim, causal)), file))
        if where != "-":
            title = f"{about['device']}, D={head_dim} {'causal' if causal else 'dense'} S_k={seqlen}"
            table.show(list(counters.HEADERS), counters.lines(rows), title)
    return 0


def _timeline(points: Sequence[Point], path: Path) -> int:
    if len({point.rung.name for point in points}) > 1 or path.suffix not in (".html", ".svg", ".json"):
        raise InvalidProblem(
            "--timeline", str(path), "one rung, and a name that ends in .html, .svg or .json", "name the rung"
        )
    rung, size, options = points[0]
    small = size if size.rows <= 4096 else rung.small(size.head_dim, size.causal)
    _, run = harness.simulated(rung, small, options, "timed")
    run.save(str(path), f"{rung.name}: {small}")
    print(f"wrote {path}", file=sys.stderr)
    return 0
