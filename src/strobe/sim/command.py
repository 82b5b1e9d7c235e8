"""`strobe sim`: run a scene in the simulator, draw its timeline, or run its mutants."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .campaign import Campaign, Verdict, explain, summary, timed
from .checks import Checks
from .launch import simulate
from .options import MODES, PROGRAM, parse
from .report import Report, SimulationFault
from .scene import FAILURES, Scene, SceneError

PICTURES = (".html", ".svg", ".json")


def main() -> int:
    """The console script of the distribution strobe-sim."""
    return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
    """Exit status. 0: no findings. 1: findings, or unexplained survivors. 2: the scene cannot run."""
    arguments = parse(list(argv))
    try:
        _check(arguments)
        scene = Scene(
            arguments.scene, arguments.arguments, arguments.grid, {"num_warps": arguments.num_warps}, arguments.seed
        )
        with _on_cuda(arguments):
            return _mutate(scene, arguments) if arguments.mutate else _run(scene, arguments)
    except SceneError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
    except SystemExit as ended:  # passing on a status of 0 would mean "no findings"
        print(
            f"{PROGRAM}: {arguments.scene} ended the process with sys.exit({ended.code!r}); have it return",
            file=sys.stderr,
        )
    except FAILURES as error:  # the traceback shows the kernel's author where
        traceback.print_exception(error)
    return 2


def _on_cuda(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    if not arguments.cuda:
        return nullcontext()
    from .on_cuda import cuda_on_cpu  # needs torch

    return cuda_on_cpu(arguments.target, sms=arguments.sms)


def _check(arguments: argparse.Namespace) -> None:
    """Checks beyond argparse: combinations of options, and files."""
    if arguments.timeline and arguments.timeline.suffix not in PICTURES:
        raise SceneError(f"--timeline: got {arguments.timeline}, expected a name that ends in {', '.join(PICTURES)}")
    if arguments.timeline and not arguments.timeline.absolute().parent.is_dir():
        raise SceneError(f"--timeline: got {arguments.timeline}, expected a file in a folder that exists")
    if arguments.num_warps & (arguments.num_warps - 1):
        raise SceneError(f"--num-warps: got {arguments.num_warps}, expected a power of two")
    for file in arguments.file or []:
        if not file.is_file():
            raise SceneError(f"--file: got {file}, expected a Python file that exists")
    for flag, given in (
        ("--file", arguments.file),
        ("--data-mutants", arguments.data_mutants),
        ("--judges", arguments.judges),
        ("--ledger", arguments.ledger),
    ):
        if given and not arguments.mutate:
            raise SceneError(f"{flag}: needs --mutate")
    if arguments.ledger and not _is_json(arguments.ledger):
        raise SceneError(f"--ledger: got {arguments.ledger}, expected a JSON file; start with {{}}")
    if arguments.timeline and arguments.mutate:
        raise SceneError("--timeline: mutants have no timeline; leave out --mutate")


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text()), dict)
    except (OSError, ValueError):
        return False


def _checks(arguments: argparse.Namespace) -> Checks:
    also = [*(arguments.check or ()), *(["atomic_order"] if arguments.ordered else [])]
    also += ["costs"] if arguments.costs else []
    also += ["every_config"] if arguments.all_configs else []
    return Checks(max_iterations=arguments.max_iterations, **dict.fromkeys(also, True))


def _run(scene: Scene, arguments: argparse.Namespace) -> int:
    modes = [arguments.mode] if arguments.mode else [mode for mode in MODES if mode != "timed"]
    found: dict[tuple[str, str, int], Report] = {}  # by (kind, place, index at that place)
    stats: Counter[str] = Counter()
    runs = [(mode, seed) for mode in modes for seed in range(arguments.seed, arguments.seed + arguments.seeds)]
    options: dict[str, Any] = {
        "sms": arguments.sms,
        "check": False,
        "fuse": arguments.fuse,
        "checks": _checks(arguments),
    }
    for mode, seed in runs:
        with simulate(arguments.target, mode, seed, **options) as run:
            scene()
        stats.update(run.stats)
        numbers: Counter[tuple[str, str]] = Counter()
        for report in run.reports:
            place = (report.kind, report.where)
            found.setdefault((*place, numbers[place]), report)
            numbers[place] += 1
    costs = run.costs  # equal in all runs, unless the kernel depends on the schedule
    if arguments.timeline:
        with simulate(arguments.target, "timed", arguments.seed, **options) as run:
            scene()
        run.save(str(arguments.timeline), f"{scene.path.name}::{scene.function} on {arguments.target}")
    if arguments.json:
        reports = [{"kind": r.kind, "text": r.text, "where": r.where, "count": r.count} for r in found.values()]
        counted = {"costs": [vars(row) for row in costs.rows]} if arguments.costs else {}
        print(json.dumps({"runs": len(runs), "stats": stats, "reports": reports} | counted, indent=1))
    else:
        for report in found.values():
            print(f"- {report}")
        if arguments.costs:
            print(costs)
        print(
            f"{_count(len(runs), 'run')}, {_count(len(found), 'finding')}"
            + (f"; timeline in {arguments.timeline}" if arguments.timeline else "")
        )
    return 1 if found else 0


def _mutate(scene: Scene, arguments: argparse.Namespace) -> int:
    files = [file.resolve() for file in arguments.file or [scene.path]]
    try:
        with _progress() as update:
            drawn = {"data": arguments.data_mutants, "seed": arguments.seed}
            runs = Campaign(scene, arguments.target, files, _checks(arguments), arguments.judges, **drawn)
            verdicts, seconds = timed(lambda: runs.verdicts(runs.baseline(), update))
    except SimulationFault as fault:
        raise SceneError(f"the unchanged kernel has faults: {fault}") from fault
    unexplained, stale = (
        explain(verdicts, arguments.scene.rpartition("/")[2], arguments.ledger) if arguments.ledger else ([], [])
    )
    if arguments.json:
        rows = [
            {
                "kind": v.mutant.kind,
                "line": v.mutant.line,
                "function": v.mutant.function,
                "text": v.mutant.text,
                **v.said,
            }
            for v in verdicts
        ]
        print(json.dumps({"mutants": rows, "unexplained": unexplained, "stale": stale}, indent=1))
    else:
        _table(verdicts)
        print(summary(verdicts, seconds))
        if arguments.data_mutants:
            print(f"mutants of data drawn by seed {arguments.seed}")
        for title, names in (
            ("survives without a reason in the ledger", unexplained),
            ("in the ledger, but noticed or gone", stale),
        ):
            for name in names:
                print(f"{title}: {name}")
    left = unexplained or stale if arguments.ledger else [v for v in verdicts if not v.noticed]
    return 1 if left else 0


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Shows how many mutants are done, where rich is installed."""
    if find_spec("rich") is None:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("mutants")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _table(verdicts: list[Verdict]) -> None:
    detectors = list(dict.fromkeys(name for verdict in verdicts for name in verdict.said))
    titles, rows = ["line", "function", "change", "statement", *detectors], []
    for verdict in verdicts:
        said = [verdict.said.get(name) or ("-" if name not in verdict.said else "nothing") for name in detectors]
        mutant = verdict.mutant
        rows.append([str(mutant.line), mutant.function, mutant.kind, mutant.text[:60], *said])
    if find_spec("rich") is None:
        widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
        for row in [titles, *rows]:
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*titles)
    for row, verdict in zip(rows, verdicts, strict=True):
        table.add_row(*row, style=None if verdict.noticed else "bold red")
    console = Console()
    Console(width=max(console.width, 150)).print(table)


def _count(number: int, what: str) -> str:
    """The number with its noun, singular or plural.

    >>> _count(1, "finding"), _count(2, "run")
    ('1 finding', '2 runs')
    """
    return f"{number} {what}{'s' * (number != 1)}"
