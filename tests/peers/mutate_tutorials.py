"""Mutants of Triton's tutorials: does the simulator report what changes their behaviour?

    python -m tests.peers.mutate_tutorials FOLDER --target sm_100 [--only 08] [--results results/tutorials.jsonl]

Each test function runs on its smallest parameters. Every mutant of its file's synchronisations that it reaches, and
mutants of data drawn by `--seed`, run under all detectors until one reports. The tutorial's own assertions say whether
a mutant that nothing reports gives wrong numbers. A tutorial with a fault must be mended first.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from strobe.sim import SimulationFault, cuda_on_cpu
from strobe.sim.campaign import Campaign, Verdict
from strobe.sim.scene import Scene, load
from tests.peers.tutorials import Call, calls, skipped, without_benchmarks
from tools.proof.provenance import circumstances

WRONG = ("AssertionError", "wrong result")  # what the tutorial's own comparison says
SECONDS = 20.0  # for one run of a mutant
# beside the smallest parameters: with these a program has several tiles, and its rings have several slots
MORE: dict[str, Call] = {
    "test_elementwise_add_warp_specialized": {"num_load_buffers": 2, "num_store_buffers": 2},
    "test_matmul_warp_specialized": {"M": 640, "N": 512},
}


class TutorialScene(Scene):
    """A test function of a tutorial with its arguments. It has no outputs to compare, because it asserts itself."""

    def __init__(self, path: Path, function: str, call: Call):
        self.path, self.function, self.call = path, function, call

    def __call__(self, module: ModuleType | None = None) -> list[Any]:
        with contextlib.redirect_stdout(io.StringIO()):
            getattr(module or load(self.path), self.function)(**self.call)
        return []


def scenes(folder: Path) -> dict[str, TutorialScene]:
    """The test functions that this target runs, by the names of their files."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        if "pytest.mark.parametrize" in file.read_text():
            module = load(file.resolve())
            for name, test in vars(module).items():
                own = name.startswith("test_") and getattr(test, "__module__", "") == module.__name__
                if own and not skipped(test):
                    found[f"{file.name}::{name}"] = TutorialScene(
                        file.resolve(), name, next(calls(test)) | MORE.get(name, {})
                    )
    return found


def row_of(verdicts: list[Verdict]) -> dict[str, Any]:
    """Counts of what was said of the mutants, and the unreported ones."""
    said = [next(filter(None, verdict.said.values()), "") for verdict in verdicts]
    unreported = [(word, verdict.mutant) for word, verdict in zip(said, verdicts, strict=True) if word in ("", *WRONG)]
    return {
        "mutants": len(verdicts),
        "reported": len(verdicts) - len(unreported),
        "wrong_numbers_alone": sum(word in WRONG for word, _ in unreported),
        "kinds": dict(Counter(word for word in said if word not in ("", *WRONG))),
        "unreported": [f"{word or 'nothing'}: {mutant}"[:200] for word, mutant in unreported],
    }


def measured(scene: Scene, target: str, data: int, seed: int) -> dict[str, Any]:
    campaign = Campaign(scene, target, max_seconds=SECONDS, data=data, seed=seed)
    try:
        return row_of(campaign.verdicts(campaign.baseline()))
    except (SimulationFault, AssertionError) as fault:  # of the tutorial as it is: its mutants would tell nothing
        return {"mutants": 0, "reported": 0, "fault": str(fault)[:300]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="python/tutorials/gluon of a checkout of Triton")
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--only", default="", help="names of scenes begin with this")
    parser.add_argument("--data", type=int, default=6, help="mutants of data drawn of each file (6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--results", type=Path, help="write rows there, in the place of those of the same scene and target"
    )
    a = parser.parse_args()
    sys.path.insert(0, str(a.folder.resolve()))
    with cuda_on_cpu(a.target), without_benchmarks():
        for name, scene in scenes(a.folder).items():
            if name.startswith(a.only):
                row = {
                    "tutorial": name,
                    "target": a.target,
                    "seed": a.seed,
                    **measured(scene, a.target, a.data, a.seed),
                }
                print(json.dumps(row), flush=True)
                if a.results:
                    _record(a.results, row | circumstances())
    return 0


def _record(results: Path, row: dict[str, Any]) -> None:
    key: Callable[[dict[str, Any]], tuple] = lambda one: (one["tutorial"], one["target"])
    kept = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    rows = [one for one in kept if key(one) != key(row)] + [row]
    results.write_text("".join(json.dumps(one) + "\n" for one in rows))


if __name__ == "__main__":
    sys.exit(main())
