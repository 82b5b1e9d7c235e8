"""Run the mutants of many scenes in worker processes, and keep each verdict in a journal.

    runner = Runner(jobs=8, journal=Journal(Path("mutants.jsonl")))
    runner.run([(suite, scene), ...])                     a Measured for each scene, in that order

One queue holds the mutants of all scenes. A worker runs the unchanged kernel of a scene once (`run_baseline`), which
gives the scene's mutants and their expected outputs, and each mutant is a task of its own (`run_mutant`).

A journal is a file of JSON lines: one for each scene that was started and one for each mutant that was run. An
interrupted run goes on with the journal that it left. A line counts only for the sources that it was written for: it
holds a hash of the jit functions that the scene runs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from strobe.errors import InvalidProblem
from strobe.sim import Checks
from strobe.sim.campaign import MAX_SECONDS, Baseline, Campaign, Verdict
from strobe.sim.mutate import Mutant, mutants
from strobe.sim.report import SimulationFault
from strobe.sim.scene import FAILURES, Scene, load

from .provenance import circumstances


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

    def campaign(self, scene: Any, all_detectors: bool = True, max_seconds: float = MAX_SECONDS) -> Campaign:
        """The campaign of a scene. Raises InvalidProblem if its pattern of files matches none."""
        files = sorted(self.scenes.resolve().parent.glob(scene.file))
        if not files:
            raise InvalidProblem(
                "file",
                repr(scene.file),
                "a file's place from the scenes' on, or a pattern of files",
                f"correct it in {scene.name}",
            )
        checks = Checks(read_fences=scene.read_fences, atomic_order=scene.ordered)
        launched = Scene(f"{self.scenes}::{scene.name}", [])
        return Campaign(launched, scene.target, files, checks, all_detectors, max_seconds)


# ---------------------------------------------------------------- what a worker runs


class BaselineRun(NamedTuple):
    """`sources` and `candidates` are those of `Baseline`; `fault` says why there are none."""

    sources: str
    candidates: list[tuple[str, int]]
    seconds: float
    circumstances: dict[str, str | None]
    fault: str = ""


def run_baseline(suite: Suite, name: str, folder: str, sources: str = "") -> BaselineRun:
    """Run the unchanged kernel of a scene and store its outputs in the folder. sources: if one run already has this
    hash, the other schedules are left out.
    """
    started = time.perf_counter()
    run = _campaign(suite, name, MAX_SECONDS)
    try:
        baseline = run.baseline(every_schedule=not sources)
        if sources and baseline.sources != sources:
            baseline = run.baseline()
    except SimulationFault as fault:
        return BaselineRun("", [], time.perf_counter() - started, {}, str(fault))
    torch.save(baseline.expected, _outputs(folder, suite, name))
    candidates = [(str(file), number) for file, number in baseline.candidates]
    return BaselineRun(baseline.sources, candidates, time.perf_counter() - started, circumstances())


def run_mutant(suite: Suite, name: str, folder: str, candidate: tuple[str, int], max_seconds: float) -> dict:
    """A mutant's line of the journal without its scene. `said` is None if the scene does not reach the mutant."""
    started = time.perf_counter()
    file, number = candidate
    mutant = _mutants(file)[number]
    run = _campaign(suite, name, max_seconds)
    baseline = Baseline(torch.load(_outputs(folder, suite, name)))
    with tempfile.TemporaryDirectory() as written:
        verdict = run.verdict(baseline, Path(file), mutant, Path(written))
    return {
        "kind": mutant.kind, "function": mutant.function, "line": mutant.line, "text": mutant.text,
        "said": verdict and verdict.said, "seconds": round(time.perf_counter() - started, 2),
    }  # fmt: skip


def _campaign(suite: Suite, name: str, max_seconds: float) -> Campaign:
    scene = next(scene for scene in suite.all() if scene.name == name)
    return suite.campaign(scene, max_seconds=max_seconds)


def _outputs(folder: str, suite: Suite, name: str) -> Path:
    return Path(folder) / f"{suite.scenes.stem}_{name}.pt"


_mutants = lru_cache(None)(lambda file: mutants(Path(file).read_text()))


def _alone() -> None:
    """Start of a worker: one thread, and the parent alone handles an interrupt."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Inline(Executor):
    """Runs each task when it is submitted, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except FAILURES as error:  # as in a worker process, it belongs to the future
            future.set_exception(error)
        return future


# ---------------------------------------------------------------- the journal


Known = dict[tuple[str, str, str, int], dict]  # (scenes, scene, sources, index of the mutant) -> line


class Journal:
    """The verdicts in a file, one JSON object a line.

    >>> journal = Journal(Path("mutants.jsonl"))  # doctest: +SKIP
    >>> journal.load()  # doctest: +SKIP
    >>> journal.add({"scenes": "scenes.py", "scene": "matmul", "sources": "9f", "index": 0})  # doctest: +SKIP
    """

    def __init__(self, path: Path):
        self.path = path
        self._mode = "w"  # a journal that was not loaded is overwritten
        self.known: Known = {}
        self.baselines: dict[tuple[str, str], dict] = {}  # the last line of each scene

    def load(self) -> None:
        """Read the file. Its last line may be cut off, where the run was interrupted."""
        text = self.path.read_text()
        for line in text.splitlines():
            try:
                self._note(json.loads(line))
            except json.JSONDecodeError:
                continue
        if text and not text.endswith("\n"):
            self.path.write_text(f"{text}\n")
        self._mode = "a"

    def add(self, line: dict) -> None:
        self._note(line)
        with self.path.open(self._mode) as file:
            file.write(json.dumps(line) + "\n")
        self._mode = "a"

    def _note(self, line: dict) -> None:
        if "index" in line:
            self.known[line["scenes"], line["scene"], line["sources"], line["index"]] = line
        else:
            self.baselines[line["scenes"], line["scene"]] = line


@dataclass
class Measured:
    """A scene's verdicts; `missing` counts mutants without one."""

    suite: Suite
    scene: Any
    verdicts: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0
    sources: str = ""
    circumstances: dict[str, str | None] = field(default_factory=dict)
    missing: int = 0
    fault: str = ""


def measured(suite: Suite, scene: Any, sources: str, journal: Journal) -> Measured:
    """What a journal holds of a scene with these sources."""
    first = journal.baselines.get((str(suite.scenes), scene.name), {})
    if first.get("sources") != sources:
        return Measured(suite, scene, missing=1)
    keys = [(str(suite.scenes), scene.name, sources, index) for index in range(first["candidates"])]
    lines = [journal.known[key] for key in keys if key in journal.known]
    verdicts = [
        Verdict(Mutant(line["kind"], line["line"], line["text"], line["function"], "", ""), line["said"])
        for line in lines
        if line["said"] is not None
    ]
    seconds = first["seconds"] + sum(line["seconds"] for line in lines)
    made_with = first["circumstances"]
    if made_with["commit"] is None:  # measured on a copy without a repository, whose sources are those of this one
        made_with = made_with | {"commit": circumstances()["commit"]}
    return Measured(suite, scene, verdicts, seconds, sources, made_with, len(keys) - len(lines))


# ---------------------------------------------------------------- the queue


class _Task(NamedTuple):
    """A call of `run_baseline` or `run_mutant` for a scene; index: of the mutant."""

    suite: Suite
    scene: Any
    function: Callable[..., Any]
    arguments: tuple
    index: int = -1


Progress = Callable[[int, int, int, int], None]  # (mutants done, mutants known so far, scenes done, scenes)


@dataclass
class Runner:
    """Measures scenes.

    Attributes:
        journal: where verdicts go; those that it knows are not measured again.
        jobs: number of worker processes. With 1 all runs in this process.
        measure: whether what the journal does not know is measured; otherwise it stays missing.
        max_seconds: limit for one run of a mutant, which then counts as noticed ("time limit").
        progress: called after each task.
    """

    journal: Journal
    jobs: int = 1
    measure: bool = True
    max_seconds: float = MAX_SECONDS
    progress: Progress = lambda *_: None

    def run(
        self, chosen: Sequence[tuple[Suite, Any]], current: Mapping[tuple[str, str], str | None] | None = None
    ) -> list[Measured]:
        """Measure scenes. An interrupt ends the run; what was not measured is then missing.

        current: hashes of sources by (file, scene). A scene of these sources is left out of what is returned.
        """
        self.errors: list[str] = []  # what kept mutants from being run
        self._current = current or {}
        self._sources: dict[tuple[str, str], str] = {}
        self._faults: dict[tuple[str, str], str] = {}
        handler = signal.getsignal(signal.SIGINT)
        with tempfile.TemporaryDirectory() as folder, self._workers() as pool:
            try:
                self._drain(pool, folder, chosen)
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # `timeout` sends a second one
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in multiprocessing.active_children():
                    worker.terminate()
        signal.signal(signal.SIGINT, handler)
        return [self._measured(suite, scene) for suite, scene in chosen if not self._is_current(suite, scene)]

    def _is_current(self, suite: Suite, scene: Any) -> bool:
        key = str(suite.scenes), scene.name
        return bool(self._current.get(key)) and self._current[key] == self._sources.get(key)

    def _workers(self) -> Executor:
        if self.jobs == 1:
            return _Inline()
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy reads it when a worker imports it
        return ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn"), initializer=_alone)

    def _drain(self, pool: Executor, folder: str, chosen: Sequence[tuple[Suite, Any]]) -> None:
        left: dict[tuple[str, str], int] = {}  # mutants of each scene
        total = done = 0
        tasks = deque(
            _Task(suite, scene, run_baseline, (suite, scene.name, folder, self._known_sources(suite, scene)))
            for suite, scene in chosen
        )
        pending: dict[Future, _Task] = {}
        while tasks or pending:
            while tasks and len(pending) < (1 if self.jobs == 1 else 2 * self.jobs):
                task = tasks.popleft()
                pending[pool.submit(task.function, *task.arguments)] = task
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                task = pending.pop(future)
                key = str(task.suite.scenes), task.scene.name
                if error := future.exception():
                    what = f"mutant {task.index}" if task.index >= 0 else "the unchanged kernel"
                    self.errors.append(f"{task.scene.name}: {what} was not run: {type(error).__name__}: {error}")
                elif task.function is run_baseline:
                    mutants = self._begin(task.suite, task.scene, future.result())
                    left[key], total = len(mutants), total + len(mutants)
                    for index, candidate in mutants:
                        arguments = task.suite, task.scene.name, folder, candidate, self.max_seconds
                        tasks.append(_Task(task.suite, task.scene, run_mutant, arguments, index))
                else:
                    place = {"scenes": key[0], "scene": key[1], "sources": self._sources[key], "index": task.index}
                    self.journal.add(place | future.result())
                    left[key], done = left[key] - 1, done + 1
                self.progress(done, total, sum(count == 0 for count in left.values()), len(chosen))

    def _known_sources(self, suite: Suite, scene: Any) -> str:
        """The hash for which nothing of a scene is left to measure, or ""."""
        key = str(suite.scenes), scene.name
        known = self.journal.baselines.get(key, {}).get("sources") or ""
        return known if not self.measure else self._current.get(key) or ""

    def _begin(self, suite: Suite, scene: Any, baseline: BaselineRun) -> list[tuple[int, tuple[str, int]]]:
        """Note a scene. Returns its mutants that the journal does not know, with their indices."""
        key = str(suite.scenes), scene.name
        self._sources[key], self._faults[key] = baseline.sources, baseline.fault
        if baseline.fault or not self.measure or self._is_current(suite, scene):
            return []
        if self.journal.baselines.get(key, {}).get("sources") != baseline.sources:
            self.journal.add(
                {
                    "scenes": key[0], "scene": key[1], "sources": baseline.sources,
                    "candidates": len(baseline.candidates), "seconds": round(baseline.seconds, 2),
                    "circumstances": baseline.circumstances,
                }
            )  # fmt: skip
        return [
            (index, candidate)
            for index, candidate in enumerate(baseline.candidates)
            if (*key, baseline.sources, index) not in self.journal.known
        ]

    def _measured(self, suite: Suite, scene: Any) -> Measured:
        key = str(suite.scenes), scene.name
        if key not in self._sources:  # interrupted before
            return Measured(suite, scene, missing=1)
        if self._faults[key]:
            return Measured(suite, scene, fault=self._faults[key])
        return measured(suite, scene, self._sources[key], self.journal)
