"""Mutation scores: remove or change each synchronisation of each kernel, and count the mutants that the simulator
notices.

A mutant that no detector notices needs a reason in a JSON file of survivors ("ledger").

    python -m tools.proof.mutate --scene 'hopper_*'                      some scenes; writes results/mutation.jsonl
    python -m tools.proof.mutate --table docs/simulator_checks.md        all scenes, and the page's table
    python -m tools.proof.mutate --stale                                 scenes whose kernels changed since their row
    python -m tools.proof.mutate --scenes FILE --ledger FILE             the scenes of another file
    python -m tools.proof.mutate --resume mutants.jsonl                  go on after an interrupt
    python -m tools.proof.mutate --from-journal mutants.jsonl            rows of what another machine measured

Mutants run in `--jobs` processes. Each verdict goes to a journal at once (`mutation_workers`).

A scenes file defines `SCENES`. A scene has a name, a target, a function that returns the outputs, the file to mutate
(or a pattern of files), and whether floating-point atomic adds must be ordered.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from strobe.errors import InvalidProblem
from strobe.sim.campaign import DETECTORS, MAX_SECONDS, explain, timed
from strobe.sim.report import SimulationFault
from strobe.sim.scene import SceneError

from .mutation_workers import Journal, Measured, Runner, Suite
from .pages import fill
from .provenance import circumstances
from .record import add_results

RESULTS = Path("results/mutation.jsonl")
JOURNAL = Path("results/mutation_journal.jsonl")  # deleted at the end of a run that measured all
_NAMES = [name for name, *_ in DETECTORS]


SUITES = (
    Suite(Path("tests/specimens/scenes.py"), Path("tests/specimens/survivors.json")),
    Suite(Path("tests/kernels/hopper/hopper_scenes.py"), Path("tests/kernels/hopper/hopper_survivors.json")),
    Suite(
        Path("tests/kernels/blackwell/blackwell_scenes.py"), Path("tests/kernels/blackwell/blackwell_survivors.json")
    ),
)


def score(suite: Suite, scene: Any, all_detectors: bool = True) -> tuple[dict, list[str]]:
    """A scene's row, and messages for survivors without a reason and reasons without a survivor."""
    run = suite.campaign(scene, all_detectors)
    try:
        baseline = run.baseline()
    except SimulationFault as fault:
        return {}, [_faulty(scene, fault)]
    verdicts, seconds = timed(lambda: run.verdicts(baseline))
    return scored(Measured(suite, scene, verdicts, seconds, baseline.sources))


def scored(found: Measured) -> tuple[dict, list[str]]:
    """The row of a measured scene, and messages for survivors without a reason and reasons without a survivor."""
    suite, scene, verdicts = found.suite, found.scene, found.verdicts
    if found.fault:
        return {}, [_faulty(scene, found.fault)]
    unexplained, stale = explain(verdicts, suite.key(scene), suite.ledger)
    faults = [f"{scene.name}: survives without a reason in the ledger: {name}" for name in unexplained]
    faults += [f"{scene.name}: in the ledger, but noticed or gone: {name}" for name in stale]
    noticed = sum(verdict.noticed for verdict in verdicts)
    counts = {name: sum(bool(verdict.said.get(name)) for verdict in verdicts) for name in _NAMES}
    row = {
        "scenes": str(suite.scenes), "scene": scene.name, "target": scene.target, "file": scene.file,
        "mutants": len(verdicts), **counts, "noticed": noticed,
        "explained": len(verdicts) - noticed - len(unexplained), "seconds": round(found.seconds, 1),
        "sources": found.sources, **(found.circumstances or circumstances()),
    }  # fmt: skip
    return row, faults


def _faulty(scene: Any, fault: object) -> str:
    return f"{scene.name} has faults before anything is changed: {fault}"


# ---------------------------------------------------------------- results and the page


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def merged(old: Sequence[dict], new: Sequence[dict], order: Sequence[tuple[str, str]] = ()) -> list[dict]:
    """All rows, one for each scene; a new row replaces the old one of the same scene. order: (file, scene) of each
    scene. Rows of other scenes come last.
    """
    rows = {(row["scenes"], row["scene"]): row for row in [*old, *new]}
    return [rows[key] for key in order if key in rows] + [row for key, row in rows.items() if key not in order]


_COLUMNS = ["mutants", *_NAMES, "noticed", "explained"]


def table(rows: Sequence[dict]) -> str:
    """Scores as a Markdown table: one line for each scene, and one for all.

    >>> found = {"plain run": 5, "schedules": 7, "happens-before": 8, "noticed": 8, "explained": 1}
    >>> print(table([{"scene": "matmul", "target": "sm_90", "mutants": 9, **found}]))
    | scene | target | mutants | plain run | schedules | happens-before | noticed | explained |
    | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
    | matmul | sm_90 | 9 | 5 | 7 | 8 | 8 | 1 |
    | **all** |  | 9 | 5 | 7 | 8 | 8 | 1 |
    """
    lines = [[row["scene"], row["target"], *(row[name] for name in _COLUMNS)] for row in rows]
    lines.append(["**all**", "", *(sum(row[name] for row in rows) for name in _COLUMNS)])
    head = [["scene", "target", *_COLUMNS], ["---", "---", *["---:"] * len(_COLUMNS)]]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [*head, *lines])


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a survivor has no reason or a reason has no survivor, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.proof.mutate", description="Drop or bend one synchronisation at a time: who notices?"
    )
    parser.add_argument(
        "--scene", default="*", metavar="PATTERN", help="names of scenes, such as 'hopper_*'; '' is none"
    )
    parser.add_argument("--scenes", type=Path, metavar="FILE", help="one file of scenes (all that this project has)")
    parser.add_argument(
        "--ledger", type=Path, metavar="FILE", help="JSON that explains survivors (survivors.json beside the scenes)"
    )
    parser.add_argument("--stale", action="store_true", help="measure only scenes whose row is of other sources")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="worker processes (one a core)"
    )
    parser.add_argument(
        "--max-seconds", type=float, default=MAX_SECONDS, metavar="S",
        help=f"limit for one run of a mutant, which then counts as noticed ({MAX_SECONDS:.0f})",
    )  # fmt: skip
    journals = parser.add_mutually_exclusive_group()
    journals.add_argument(
        "--journal", type=Path, default=JOURNAL, metavar="FILE", help=f"verdicts go there at once ({JOURNAL})"
    )
    journals.add_argument("--resume", type=Path, metavar="FILE", help="go on with the journal of an interrupted run")
    journals.add_argument("--from-journal", type=Path, metavar="FILE", help="only make rows of what a journal holds")
    add_results(parser, RESULTS)
    parser.add_argument("--table", type=Path, metavar="FILE", help="a page whose table is rewritten from all results")
    a = parser.parse_args(argv)
    try:
        return _run(a)
    except (InvalidProblem, SceneError) as error:
        parser.error(str(error))


def _run(a: argparse.Namespace) -> int:
    if a.ledger and not a.scenes:
        raise InvalidProblem("--ledger", a.ledger, "the file of scenes that it is of", "give --scenes too")
    suites = (Suite(a.scenes, a.ledger or a.scenes.with_name("survivors.json")),) if a.scenes else SUITES
    chosen = [(suite, scene) for suite in suites for scene in suite.all() if fnmatchcase(scene.name, a.scene)]
    if a.scene and not chosen:
        names = ", ".join(scene.name for suite in suites for scene in suite.all())
        raise InvalidProblem(
            "--scene", repr(a.scene), f"a pattern of {names}", "quote it, so that the shell leaves it alone"
        )
    journal = _journal(a)
    found, errors = _measure(a, chosen, journal)
    whole = [scored(one) for one in found if not one.missing]
    rows = [row for row, _ in whole if row]
    faults = errors + [fault for _, faults in whole for fault in faults]
    faults += [stray for suite in suites for stray in suite.strays()]
    order = [(str(suite.scenes), scene.name) for suite in suites for scene in suite.all()]
    everything = merged(read(a.results), rows, order)
    a.results.write_text("".join(json.dumps(row) + "\n" for row in everything))
    if a.table:
        fill(a.table, "mutation", table(everything))
    if rows:
        _show(rows)
    missing = [one.scene.name for one in found if one.missing]
    if missing:
        print(f"not measured for these sources: {', '.join(missing)}; --resume {journal.path} goes on")
    elif journal.path == JOURNAL:
        journal.path.unlink(missing_ok=True)
    print("\n".join([*faults, f"{len(whole)} scenes, {len(faults)} faults"]))
    return 1 if faults or missing else 0


def _journal(a: argparse.Namespace) -> Journal:
    """The journal to append to, with what is known already."""
    journal = Journal(a.from_journal or a.resume or a.journal)
    if journal.path.is_file() and (a.from_journal or a.resume):
        journal.load()
    elif a.from_journal or a.resume:
        raise InvalidProblem(
            "--from-journal" if a.from_journal else "--resume", journal.path, "the journal of a run", "name its file"
        )
    return journal


def _measure(
    a: argparse.Namespace, chosen: Sequence[tuple[Suite, Any]], journal: Journal
) -> tuple[list[Measured], list[str]]:
    """The verdicts of each scene, and what kept mutants from being run. Shows a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("mutants", total=None)

        def update(done: int, total: int, scenes: int, of_all: int) -> None:
            bar.update(task, completed=done, total=total or None, description=f"{scenes} of {of_all} scenes, mutants")

        runner = Runner(journal, a.jobs, measure=not a.from_journal, max_seconds=a.max_seconds, progress=update)
        current = {(row["scenes"], row["scene"]): row.get("sources") for row in read(a.results)} if a.stale else {}
        return runner.run(chosen, current), runner.errors


def _show(rows: Sequence[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table("scene", "target", *_COLUMNS, "s")
    for row in rows:
        shown.add_row(row["scene"], row["target"], *(str(row[name]) for name in [*_COLUMNS, "seconds"]))
    console = Console()
    Console(width=max(console.width, 125)).print(shown)


if __name__ == "__main__":
    sys.exit(main())
