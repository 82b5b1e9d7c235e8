"""Mutation testing of a kernel: run every mutant and tabulate which detectors notice it. Ledgers explain survivors."""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .arrays import as_numbers, copied
from .checks import USUAL, Checks
from .host import answers, capability_of
from .launch import Run, simulate
from .mutate import MODULE, Mutant, mutants
from .mutate_data import data_mutants
from .scene import FAILURES, Scene, load, replaced

MAX_STEPS = 50_000  # limit for a mutant's run, so that a livelock ends
MAX_SECONDS = 120.0  # the same, for runs whose steps are slow; far above what the slowest scene takes
TIME_LIMIT = "time limit"  # what a detector says of a run that took longer
BLIND = Checks(happens_before=False)
TOLERANCE = 2e-2  # relative to the largest output: far above rounding, far below the error of a wrong tile
# detectors: (name, [(mode, seed)], whether happens-before is checked)
DETECTORS = (
    ("plain run", [("eager", 0)], False),
    ("schedules", [("lazy", 0), ("pct", 0), ("pct", 1), ("pct", 2), ("random", 0)], False),
    ("happens-before", [("eager", 0)], True),
)
PLAIN, SCHEDULES, HAPPENS_BEFORE = DETECTORS


@dataclass
class Verdict:
    """What each detector found in a mutant: the kind of its first finding, or "" for none."""

    mutant: Mutant
    said: dict[str, str]

    @property
    def noticed(self) -> bool:
        return any(self.said.values())


@dataclass
class Baseline:
    """The unchanged kernel of a scene.

    Attributes:
        expected: the scene's outputs.
        entered: the jit functions that ran, as (file, name).
        lines: (file, line) of each call that ran under any schedule.
        sources: a hash of the sources of the functions that ran and of the candidates.
        candidates: (file, index of the mutant among `mutants` of that file) of each mutant that may be reached.
    """

    expected: list[Any]
    entered: set[tuple[Path, str]] = field(default_factory=set)
    lines: set[tuple[str, int]] = field(default_factory=set)
    sources: str = ""
    candidates: list[tuple[Path, int]] = field(default_factory=list)


@dataclass
class Campaign:
    """A scene whose mutants are run.

    Attributes:
        scene: what is called.
        target: the GPU.
        files: the source files to mutate; the scene's own file by default.
        checks: what the happens-before detector looks for.
        all_detectors: run every detector on every mutant; otherwise stop at the first that notices.
        max_seconds: limit for one run of a mutant.
        data: how many mutants of masks, indices, pointers and ring sizes are drawn of each file, by `seed`.
    """

    scene: Scene
    target: str
    files: list[Path] | None = None
    checks: Checks = USUAL
    all_detectors: bool = False
    max_seconds: float = MAX_SECONDS
    data: int = 0
    seed: int = 0

    def mutants_of(self, file: Path) -> list[Mutant]:
        source = file.read_text()
        return [*mutants(source), *data_mutants(source, self.data, self.seed)]

    def baseline(self, every_schedule: bool = True) -> Baseline:
        """Run the unchanged kernel under every schedule that its mutants run under, or once, which may reach less.

        Raises SimulationFault if the unchanged kernel has findings.
        """
        lines: set[tuple[str, int]] = set()
        functions: dict[int, Any] = {}
        expected: list[Any] = []
        others = SCHEDULES[1] if every_schedule else []
        for mode, seed, checks in [("eager", 0, self.checks), *((*how, BLIND) for how in others)]:
            with simulate(self.target, mode, seed, checks=checks) as run:
                run.machine.lines = lines
                outputs = [copied(tensor) for tensor in self.scene()]
            expected = expected or outputs
            functions |= run.machine.entered
        files = [path.resolve() for path in self.files or [self.scene.path]]
        entered = {
            (Path(code.co_filename).resolve(), code.co_name) for code in (fn.fn.__code__ for fn in functions.values())
        }
        found = Baseline(expected, entered, {(str(Path(file).resolve()), line) for file, line in lines})
        reached = [
            (file, number, mutant)
            for file in files
            for number, mutant in enumerate(self.mutants_of(file))
            if _may_be_reached(file, mutant, found)
        ]
        found.candidates = [(file, number) for file, number, _ in reached]
        found.sources = self._hash_of(functions, expected, [mutant for *_, mutant in reached])
        return found

    def verdict(self, baseline: Baseline, file: Path, mutant: Mutant, folder: Path) -> Verdict | None:
        """What the detectors say of a mutant, or None if the scene does not execute the mutated statement."""
        # a file may ask for the device's properties when it is imported
        with answers(capability_of(self.target), sms=4):
            with replaced(file, mutant.source, folder / "mutant", self.scene.path) as module:
                said = self._said(lambda *how: self._run(module, baseline.expected, *how))
            if any(said.values()) or _reached(self.scene, file, mutant, self.target, folder / "probe"):
                return Verdict(mutant, said)
        return None

    def verdicts(
        self, baseline: Baseline, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Verdict]:
        """The verdict on each mutant that the scene reaches, one after the other."""
        found = []
        for done, (file, number) in enumerate(baseline.candidates):
            with tempfile.TemporaryDirectory() as folder:
                verdict = self.verdict(baseline, file, self.mutants_of(file)[number], Path(folder))
            found += [verdict] if verdict else []
            progress(done + 1, len(baseline.candidates))
        return found

    def _hash_of(self, functions: dict[int, Any], outputs: list[Any], changes: list[Mutant]) -> str:
        """A hash of the jit functions that ran but Triton's, of the scene's function, and of what is changed."""
        ours = [fn for fn in functions.values() if fn.__module__.partition(".")[0] != "triton"]
        texts = sorted({f"{fn.__module__}.{fn.fn.__qualname__}\n{''.join(fn.raw_src)}" for fn in ours})
        function = getattr(load(self.scene.path), self.scene.function)
        texts += [inspect.getsource(getattr(function, "fn", function)), *(str(list(t.shape)) for t in outputs)]
        texts += [f"{mutant.function} {mutant.kind} {mutant.text}" for mutant in changes]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]

    def _said(self, finds: Callable[[str, int, Checks], str]) -> dict[str, str]:
        said: dict[str, str] = {}
        for name, runs, ordered in (HAPPENS_BEFORE, SCHEDULES, PLAIN):
            if name == PLAIN[0] and (not self.all_detectors or not said[HAPPENS_BEFORE[0]]):
                continue  # a run of the same schedule with happens-before checked has found nothing
            looked_for = self.checks if ordered else BLIND
            said[name] = next((found for mode, seed in runs if (found := finds(mode, seed, looked_for))), "")
            if said[name] and not self.all_detectors:
                break
        return {name: said.get(name, "") for name, *_ in DETECTORS} if self.all_detectors else said

    def _run(self, module: ModuleType, expected: list[Any], mode: str, seed: int, checks: Checks) -> str:
        with simulate(self.target, mode, seed, check=False, max_reports=1, checks=checks) as run:
            run.machine.max_steps, run.machine.deadline = MAX_STEPS, time.monotonic() + self.max_seconds
            try:
                got = self.scene(module)
            except FAILURES as error:
                return type(error).__name__
        return _kind(run) or ("" if all(map(_close, got, expected)) else "wrong result")


def campaign(
    scene: Scene,
    target: str,
    files: list[Path] | None = None,
    all_detectors: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    checks: Checks = USUAL,
) -> list[Verdict]:
    """Run every mutant that the scene reaches, one after the other. `Campaign` explains the arguments.

    progress: called with (mutants done, mutants in total).

    Raises SimulationFault if the unchanged kernel already has findings.
    """
    run = Campaign(scene, target, files, checks, all_detectors)
    return run.verdicts(run.baseline(), progress)


def _kind(run: Run) -> str:
    """The kind of a run's first report, or "" for none."""
    return TIME_LIMIT if run.machine.out_of_time else run.reports[0].kind if run.reports else ""


def _may_be_reached(file: Path, mutant: Mutant, baseline: Baseline) -> bool:
    """Whether the scene enters the mutant's function, and has evaluated a call on the lines of the mutated call."""
    if mutant.function == MODULE:
        return True
    if (file, mutant.function) not in baseline.entered:
        return False
    return mutant.call is None or any((str(file), line) in baseline.lines for line in mutant.call)


def _reached(scene: Scene, file: Path, mutant: Mutant, target: str, folder: Path) -> bool:
    """Whether the scene executes the mutated statement, which may be in a constant branch that is never taken."""
    try:
        with replaced(file, mutant.probe, folder, scene.path) as module, simulate(target, "eager", checks=BLIND):
            scene(module)
    except FAILURES as error:  # the library may have wrapped it
        chain: list[BaseException] = [error]
        while cause := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(cause)
        if not any(isinstance(one, NameError) for one in chain):
            raise
        return True
    return False


def _close(got: Any, expected: Any) -> bool:
    got, expected = as_numbers(got), as_numbers(expected)
    if got.shape != expected.shape:
        return False
    scale = np.nan_to_num(np.abs(expected)).max() if expected.size else 0.0
    return np.allclose(got, expected, rtol=0.0, atol=float(TOLERANCE * scale), equal_nan=True)


# ---- the ledger of survivors


def survivors(verdicts: list[Verdict]) -> Iterator[dict[str, str]]:
    """Each unnoticed mutant with its ledger key: kind, function, text of the line, and index among equal lines."""
    seen: Counter[tuple[str, str, str]] = Counter()
    for verdict in verdicts:
        mutant = verdict.mutant
        key = (mutant.kind, mutant.function, mutant.text)
        seen[key] += 1
        if not verdict.noticed:
            yield {"kind": mutant.kind, "function": mutant.function, "text": mutant.text, "number": str(seen[key])}


def explain(verdicts: list[Verdict], scene: str, ledger: Path) -> tuple[list[str], list[str]]:
    """(survivors without a reason, reasons without a survivor) for one scene of a ledger.

    A ledger is a JSON file: {scene: [{"kind", "function", "text", "number", "why"}, ...]}.
    """
    known = json.loads(ledger.read_text()).get(scene, []) if ledger.exists() else []
    reasons = {_name(entry): entry.get("why", "") for entry in known}
    alive = [_name(entry) for entry in survivors(verdicts)]
    return [name for name in alive if not reasons.get(name)], [name for name in reasons if name not in alive]


def _name(entry: dict[str, str]) -> str:
    return f"{entry['kind']} in {entry['function']}: {entry['text']} (number {entry['number']})"


def summary(verdicts: list[Verdict], seconds: float) -> str:
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.said)
    counts = [f"{name} {sum(bool(v.said.get(name)) for v in verdicts)}" for name in names]
    return f"{len(verdicts)} mutants, {sum(v.noticed for v in verdicts)} noticed ({', '.join(counts)}), {seconds:.0f} s"


def timed(run: Callable[[], list[Verdict]]) -> tuple[list[Verdict], float]:
    start = time.perf_counter()
    return run(), time.perf_counter() - start
