"""`strobe sim`: run a scene in the simulator, draw its timeline, or try its mutants."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .campaign import Verdict, campaign, explain, summary, timed
from .checks import Checks
from .launch import SHARED_KIB, simulate
from .machine import MODES
from .report import Report, SimulationFault
from .scene import FAILURES, Scene, SceneError

PICTURES = (".html", ".svg", ".json")
EXAMPLE = """\
examples:
  strobe sim kernels.py::run bf16[200,320] bf16[320,256]                    a function that launches, on normal numbers
  strobe sim kernels.py::kernel f32[1000] nan:f32[1000] 1000 --grid 8       a kernel itself
  strobe sim kernels.py::run bf16[64,64] --timeline run.html                a picture (.html, .svg) or a Chrome trace (.json)
  strobe sim kernels.py::run bf16[64,64] --mutate --ledger survivors.json   drop one synchronisation at a time: who notices?
arguments: bf16[2,64] fp16 f32 i32 fp8e4 fp8e5 (normal numbers), nan: zeros: ones: before it, tma:bf16[64,64]/64x32 (a descriptor with its
block), numbers, True, False, None, name=value
"""


def run(argv: Sequence[str]) -> int:
    """0: nothing found; 1: faults, or survivors that nothing explains; 2: the scene cannot be run."""
    if argv and argv[0] == "mutate":
        argv = [*argv[1:], "--mutate"]
    arguments = _parser().parse_args(argv)
    try:
        _check(arguments)
        scene = Scene(arguments.scene, arguments.arguments, arguments.grid, {"num_warps": arguments.num_warps}, arguments.seed)
        return _mutate(scene, arguments) if arguments.mutate else _run(scene, arguments)
    except SceneError as error:
        print(f"strobe sim: {error}", file=sys.stderr)
    except FAILURES as error:  # the kernel's writer wants to see where
        traceback.print_exception(error)
    return 2


def _check(arguments: argparse.Namespace) -> None:
    """What argparse cannot know: options that go together, files."""
    if arguments.timeline and arguments.timeline.suffix not in PICTURES:
        raise SceneError(f"--timeline: got {arguments.timeline}, expected a name that ends in {', '.join(PICTURES)}")
    if arguments.timeline and not arguments.timeline.absolute().parent.is_dir():
        raise SceneError(f"--timeline: got {arguments.timeline}, expected a file in a folder that exists")
    if arguments.num_warps & (arguments.num_warps - 1):
        raise SceneError(f"--num-warps: got {arguments.num_warps}, expected a power of two")
    for file in arguments.file or []:
        if not file.is_file():
            raise SceneError(f"--file: got {file}, expected a Python file that exists")
    for flag, given in (("--file", arguments.file), ("--judges", arguments.judges), ("--ledger", arguments.ledger)):
        if given and not arguments.mutate:
            raise SceneError(f"{flag}: it is about mutants; give --mutate too")
    if arguments.ledger and not _is_json(arguments.ledger):
        raise SceneError(f"--ledger: got {arguments.ledger}, expected a file of JSON; {{}} explains nothing yet")
    if arguments.timeline and arguments.mutate:
        raise SceneError("--timeline: mutants have none; leave --mutate out")


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text()), dict)
    except (OSError, ValueError):
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("strobe sim", description="Run a kernel on the CPU and find its races, deadlocks and missing fences.",
                                     epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("scene", metavar="FILE::NAME", help="a function that launches kernels, or a kernel")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="see below")
    targets = [f"sm_{capability}" for capability in SHARED_KIB]
    parser.add_argument("--target", default="sm_90", choices=targets, help="whose memory limits and operations (sm_90)")
    parser.add_argument("--mode", default=None, choices=MODES, help="the schedule (all but timed, one after another, unless given)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the schedule and of the arguments")
    parser.add_argument("--seeds", type=_positive, default=1, metavar="N", help="so many seeds of each mode, from --seed on")
    parser.add_argument("--sms", type=_positive, default=4, metavar="N", help="CTAs in flight (4)")
    parser.add_argument("--grid", type=_grid, default=(1,), metavar="X[,Y[,Z]]", help="of a kernel")
    parser.add_argument("--num-warps", type=_positive, default=4, metavar="N", help="of a kernel (4)")
    parser.add_argument("--ordered", action="store_true", help="floating-point adds to one place must have an order (same bits every run)")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="modelled time as .html, .svg or .json")
    parser.add_argument("--mutate", action="store_true", help="drop or bend one synchronisation at a time")
    parser.add_argument("--file", type=Path, action="append", metavar="FILE", help="mutate this file instead of the scene's; repeatable")
    parser.add_argument("--judges", action="store_true", help="ask every judge about every mutant")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="JSON that explains survivors")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    return parser


def _seed(text: str) -> int:
    if not text.removeprefix("-").isdecimal() or not -(2**63) <= int(text) < 2**64:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 64 bits")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number >= 1")
    return int(text)


def _grid(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if len(sizes) > 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one to three positive sizes, such as 8 or 4,2")
    return tuple(map(int, sizes))


def _checks(arguments: argparse.Namespace) -> Checks:
    return Checks(atomic_order=arguments.ordered)


def _run(scene: Scene, arguments: argparse.Namespace) -> int:
    modes = [arguments.mode] if arguments.mode else [mode for mode in MODES if mode != "timed"]
    found: dict[tuple[str, str, int], Report] = {}  # by kind, place, and number among a run's others there
    stats: Counter[str] = Counter()
    runs = [(mode, seed) for mode in modes for seed in range(arguments.seed, arguments.seed + arguments.seeds)]
    for mode, seed in runs:
        with simulate(arguments.target, mode, seed, sms=arguments.sms, check=False, checks=_checks(arguments)) as run:
            scene()
        stats.update(run.stats)
        numbers: Counter[tuple[str, str]] = Counter()
        for report in run.reports:
            place = (report.kind, report.where)
            found.setdefault((*place, numbers[place]), report)
            numbers[place] += 1
    if arguments.timeline:
        with simulate(arguments.target, "timed", arguments.seed, sms=arguments.sms, check=False) as run:
            scene()
        run.save(str(arguments.timeline), f"{scene.path.name}::{scene.function} on {arguments.target}")
    if arguments.json:
        reports = [{"kind": r.kind, "text": r.text, "where": r.where, "count": r.count} for r in found.values()]
        print(json.dumps({"runs": len(runs), "stats": stats, "reports": reports}, indent=1))
    else:
        for report in found.values():
            print(f"- {report}")
        print(f"{_count(len(runs), 'run')}, {_count(len(found), 'finding')}" + (f"; timeline in {arguments.timeline}" if arguments.timeline else ""))
    return 1 if found else 0


def _mutate(scene: Scene, arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    files = [file.resolve() for file in arguments.file or [scene.path]]
    try:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("mutants")
            update = lambda done, total: bar.update(task, completed=done, total=total)
            verdicts, seconds = timed(lambda: campaign(scene, arguments.target, files, arguments.judges, update, _checks(arguments)))
    except SimulationFault as fault:
        raise SceneError(f"the kernel has faults before anything is changed: {fault}") from fault
    unexplained, stale = explain(verdicts, arguments.scene.rpartition("/")[2], arguments.ledger) if arguments.ledger else ([], [])
    if arguments.json:
        rows = [{"kind": v.mutant.kind, "line": v.mutant.line, "function": v.mutant.function, "text": v.mutant.text, **v.said} for v in verdicts]
        print(json.dumps({"mutants": rows, "unexplained": unexplained, "stale": stale}, indent=1))
    else:
        _table(verdicts)
        print(summary(verdicts, seconds))
        for title, names in (("survives, and the ledger does not say why", unexplained), ("in the ledger, but noticed or gone", stale)):
            for name in names:
                print(f"{title}: {name}")
    left = unexplained or stale if arguments.ledger else [v for v in verdicts if not v.noticed]
    return 1 if left else 0


def _table(verdicts: list[Verdict]) -> None:
    from rich.console import Console
    from rich.table import Table

    judges = list(dict.fromkeys(name for verdict in verdicts for name in verdict.said))
    table = Table("line", "function", "change", "statement", *judges)
    for verdict in verdicts:
        said = [verdict.said.get(name) or ("-" if name not in verdict.said else "nothing") for name in judges]
        mutant = verdict.mutant
        table.add_row(str(mutant.line), mutant.function, mutant.kind, mutant.text[:60], *said, style=None if verdict.noticed else "bold red")
    console = Console()
    Console(width=max(console.width, 150)).print(table)


def _count(number: int, what: str) -> str:
    """
    >>> _count(1, "finding"), _count(2, "run")
    ('1 finding', '2 runs')
    """
    return f"{number} {what}{'s' * (number != 1)}"
