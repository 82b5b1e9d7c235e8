"""Mutation scores: remove or change each synchronisation of each kernel, and count the mutants that the simulator
notices.

A mutant that no detector notices needs a reason in a JSON file of survivors ("ledger").

    python -m tools.proof.mutate --scene 'hopper_*'                      some scenes; writes results/mutation.jsonl
    python -m tools.proof.mutate --table docs/simulator_checks.md        all scenes, and the page's table
    python -m tools.proof.mutate --scenes FILE --ledger FILE             the scenes of another file

A scenes file defines `SCENES`. A scene has a name, a target, a function that returns the outputs, the file to mutate
(or a pattern of files), and whether floating-point atomic adds must be ordered.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from strobe.errors import InvalidProblem
from strobe.sim import Checks
from strobe.sim.campaign import DETECTORS, Verdict, campaign, explain, timed
from strobe.sim.report import SimulationFault
from strobe.sim.scene import Scene, SceneError, load

from .pages import fill
from .provenance import circumstances
from .record import add_results

RESULTS = Path("results/mutation.jsonl")
_NAMES = [name for name, *_ in DETECTORS]


class Suite(NamedTuple):
    """A file of scenes, and the JSON file with the reasons for surviving mutants."""

    scenes: Path
    ledger: Path

    def all(self) -> tuple[Any, ...]:
        if not self.scenes.is_file():
            raise InvalidProblem(
                "--scenes", self.scenes, "a Python file with SCENES", "run this at the root of the repository"
            )
        return load(self.scenes.resolve()).SCENES

    def key(self, scene: Any) -> str:
        """A scene's name in the ledger, as for `strobe sim`: FILE::NAME."""
        return f"{self.scenes.name}::{scene.name}"

    def strays(self) -> list[str]:
        """A message for each name in the ledger without a scene."""
        names = {self.key(scene) for scene in self.all()}
        known = json.loads(self.ledger.read_text()) if self.ledger.exists() else {}
        return [f"{name}: in the ledger, but no scene" for name in known if name not in names]


SUITES = (
    Suite(Path("tests/specimens/scenes.py"), Path("tests/specimens/survivors.json")),
    Suite(Path("tests/kernels/hopper/hopper_scenes.py"), Path("tests/kernels/hopper/hopper_survivors.json")),
    Suite(
        Path("tests/kernels/blackwell/blackwell_scenes.py"), Path("tests/kernels/blackwell/blackwell_survivors.json")
    ),
)


Progress = Callable[[int, int], None]  # called with (mutants done, mutants in total)


def score(
    suite: Suite, scene: Any, all_detectors: bool = True, progress: Progress = lambda done, total: None
) -> tuple[dict, list[str]]:
    """A scene's row, and messages for survivors without a reason and reasons without a survivor."""
    files = sorted(suite.scenes.resolve().parent.glob(scene.file))
    if not files:
        raise InvalidProblem(
            "file",
            repr(scene.file),
            "a file's place from the scenes' on, or a pattern of files",
            f"correct it in {scene.name}",
        )
    launched = Scene(f"{suite.scenes}::{scene.name}", [])
    try:
        checks = Checks(read_fences=scene.read_fences, atomic_order=scene.ordered)
        verdicts, seconds = timed(lambda: campaign(launched, scene.target, files, all_detectors, progress, checks))
    except SimulationFault as fault:
        return {}, [f"{scene.name} has faults before anything is changed: {fault}"]
    unexplained, stale = explain(verdicts, suite.key(scene), suite.ledger)
    faults = [f"{scene.name}: survives without a reason in the ledger: {name}" for name in unexplained]
    faults += [f"{scene.name}: in the ledger, but noticed or gone: {name}" for name in stale]
    return _row(suite, scene, verdicts, len(unexplained), seconds), faults


def _row(suite: Suite, scene: Any, verdicts: list[Verdict], unexplained: int, seconds: float) -> dict:
    noticed = sum(verdict.noticed for verdict in verdicts)
    counts = {name: sum(bool(verdict.said.get(name)) for verdict in verdicts) for name in _NAMES}
    return {
        "scenes": str(suite.scenes), "scene": scene.name, "target": scene.target, "file": scene.file,
        "mutants": len(verdicts), **counts,
        "noticed": noticed, "explained": len(verdicts) - noticed - unexplained, "seconds": round(seconds, 1),
        **circumstances(),
    }  # fmt: skip


# ---------------------------------------------------------------- results and the page


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def merged(old: Sequence[dict], new: Sequence[dict]) -> list[dict]:
    """All rows, one for each scene; a new row replaces the old one of the same scene. Rows of new scenes come last."""
    key = lambda row: (row["scenes"], row["scene"])
    return list({key(row): row for row in [*old, *new]}.values())


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
    add_results(parser, RESULTS)
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="a page whose table is written anew from all results"
    )
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
    scored = list(_scored(chosen))
    found = [row for row, _ in scored if row]
    faults = [fault for _, faults in scored for fault in faults] + [
        stray for suite in suites for stray in suite.strays()
    ]
    everything = merged(read(a.results), found)
    a.results.write_text("".join(json.dumps(row) + "\n" for row in everything))
    if a.table:
        fill(a.table, "mutation", table(everything))
    if found:
        _show(found)
    print("\n".join([*faults, f"{len(scored)} scenes, {len(faults)} faults"]))
    return 1 if faults else 0


def _scored(chosen: Sequence[tuple[Suite, Any]]) -> Iterator[tuple[dict, list[str]]]:
    """The score of each scene, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        for suite, scene in chosen:
            task = bar.add_task(scene.name, total=None)
            yield score(
                suite, scene, progress=lambda done, total, task=task: bar.update(task, completed=done, total=total)
            )
            bar.remove_task(task)


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
