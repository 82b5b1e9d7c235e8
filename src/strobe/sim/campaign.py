"""Mutation testing of a kernel: run every mutant and tabulate which detectors notice it. Ledgers explain survivors."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from .checks import USUAL, Checks
from .host import answers, capability_of
from .launch import simulate
from .mutate import MODULE, Mutant, mutants
from .scene import FAILURES, Scene, replaced

MAX_STEPS = 50_000  # limit for a mutant's run, so that a livelock ends
BLIND = Checks(happens_before=False)
TOLERANCE = 2e-2  # relative to the largest output: far above rounding, far below the error of a wrong tile
# detectors: (name, [(mode, seed)], whether happens-before is checked)
DETECTORS = (
    ("plain run", [("eager", 0)], False),
    ("schedules", [("lazy", 0), ("pct", 0), ("pct", 1), ("pct", 2), ("random", 0)], False),
    ("happens-before", [("eager", 0)], True),
)


@dataclass
class Verdict:
    """What each detector found in a mutant: the kind of its first finding, or "" for none."""

    mutant: Mutant
    said: dict[str, str]

    @property
    def noticed(self) -> bool:
        return any(self.said.values())


def campaign(
    scene: Scene,
    target: str,
    files: list[Path] | None = None,
    all_detectors: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    checks: Checks = USUAL,
) -> list[Verdict]:
    """Run every mutant that the scene reaches. Stop at the first detector that notices, unless `all_detectors`.

    files: the source files to mutate; the scene's own file by default.
    progress: called with (mutants done, mutants in total).
    checks: what the happens-before detector looks for.

    Raises SimulationFault if the unchanged kernel already has findings.
    """
    with simulate(target, "eager", checks=checks) as run:  # the unchanged kernel must have no findings
        expected = [tensor.clone() for tensor in scene()]
    entered = {
        (Path(code.co_filename).resolve(), code.co_name)
        for code in (fn.fn.__code__ for fn in run.machine.entered.values())
    }
    changed = [
        (file, mutant)
        for file in map(Path.resolve, files or [scene.path])
        for mutant in mutants(file.read_text())
        if (file, mutant.function) in entered or mutant.function == MODULE
    ]
    verdicts = []
    # a file may ask for the device's properties when it is imported
    with tempfile.TemporaryDirectory() as folder, answers(capability_of(target), sms=4):
        for number, (file, mutant) in enumerate(changed):
            with replaced(file, mutant.source, Path(folder) / f"mutant_{number}", scene.path) as module:
                said = _verdict(lambda *how: _run_mutant(scene, module, target, expected, *how), all_detectors, checks)
            if any(said.values()) or _reached(scene, file, mutant, target, Path(folder) / f"probe_{number}"):
                verdicts.append(Verdict(mutant, said))
            progress(number + 1, len(changed))
    return verdicts


def _verdict(detector: Callable[[str, int, Checks], str], all_detectors: bool, checks: Checks) -> dict[str, str]:
    said: dict[str, str] = {}
    for name, runs, ordered in DETECTORS if all_detectors else (DETECTORS[2], DETECTORS[1]):
        looked_for = checks if ordered else BLIND
        said[name] = next((found for mode, seed in runs if (found := detector(mode, seed, looked_for))), "")
        if said[name] and not all_detectors:
            break
    return said


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


def _run_mutant(
    scene: Scene, module: ModuleType, target: str, expected: list[torch.Tensor], mode: str, seed: int, checks: Checks
) -> str:
    with simulate(target, mode, seed, check=False, max_reports=1, checks=checks) as run:
        run.machine.max_steps = MAX_STEPS
        try:
            got = scene(module)
        except FAILURES as error:
            return type(error).__name__
    if run.reports:
        return run.reports[0].kind
    return "" if all(map(_close, got, expected)) else "wrong result"


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    got, expected = got.to(torch.float64), expected.to(torch.float64)
    scale = torch.nan_to_num(expected).abs().max() if expected.numel() else 0.0
    return torch.allclose(got, expected, rtol=0.0, atol=float(TOLERANCE * scale), equal_nan=True)


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
