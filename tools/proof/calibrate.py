"""Calibration: run the same kernels, inputs and mutants in the simulator and on a GPU. A disagreement is an error of
the simulator.

    python -m tools.proof.calibrate prepare tests/specimens/scenes.py .carry/calibration  without a GPU: simulates
    python -m tools.proof.calibrate measure .carry/calibration OUT                        on a GPU: needs torch, Triton
    python -m tools.proof.calibrate compare .carry/calibration OUT --results results/calibration.jsonl

A scenes file defines `SCENES`. A scene has a name, a target, a function of the device that returns the outputs, the
file to mutate, and whether floating-point atomic adds must be ordered. A mutant that hangs in some simulated schedule
does not run on the GPU. Every other mutant runs `RUNS` times, each mutant in its own process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from .pages import fill

RUNS = 200
LIMIT_S = 150  # time limit of one process on the GPU
HANGS = ("deadlock", "barrier", "bytes")  # kinds of report that mean that a GPU may hang
TOLERANCE = 2e-2  # relative to the largest output: far above rounding errors, far below the error of a wrong tile


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "tools.proof.calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, run, places in (
        ("prepare", prepare, ("scenes", "folder")),
        ("measure", measure, ("folder", "out")),
        ("compare", compare, ("folder", "out")),
        ("repeat", repeat, ("package", "out")),
    ):
        command = commands.add_parser(name)
        for place in places:
            command.add_argument(place, type=Path)
        command.add_argument("--scene", default="", help="names that contain this")
        command.add_argument("--results", type=Path)
        command.add_argument("--table", type=Path, help="a page whose calibration table is rewritten")
        command.set_defaults(run=run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


# ---- without a GPU: the simulator


def prepare(arguments: argparse.Namespace) -> int:
    """Write to `folder`, for each scene, the simulator's outputs, and for each mutant a copy of the package with the
    mutated file.

    plan.json lists all cases with the simulator's reports."""
    from strobe.sim import Checks, simulate
    from strobe.sim.campaign import campaign
    from strobe.sim.scene import Scene, load

    package = arguments.scenes.resolve().parent
    shutil.rmtree(arguments.folder, ignore_errors=True)
    plan = []
    for scene in load(arguments.scenes.resolve()).SCENES:
        if int(scene.target.removeprefix("sm_")) > 90 or arguments.scene not in scene.name:
            continue
        with simulate(scene.target, "eager"):
            outputs = scene.run()
        place = arguments.folder / scene.name
        _copy(package, place / "original")
        torch.save([output.clone() for output in outputs], place / "simulated.pt")
        plan.append({"scene": scene.name, "mutant": "original", "said": {}, "what": "unchanged", "safe": True})
        launched, checks = Scene(f"{arguments.scenes}::{scene.name}", []), Checks(atomic_order=scene.ordered)
        verdicts = campaign(launched, scene.target, [package / scene.file], all_detectors=True, checks=checks)
        for number, verdict in enumerate(verdicts):
            name = f"mutant_{number:02}"
            safe = not any(verdict.said[detector] in HANGS for detector in ("plain run", "schedules"))
            plan.append(
                {"scene": scene.name, "mutant": name, "said": verdict.said, "what": str(verdict.mutant), "safe": safe}
            )
            if safe:
                _copy(package, place / name)
                (place / name / package.name / scene.file).write_text(verdict.mutant.source)
        print(
            (
                f"{scene.name}: {len(verdicts)} mutants, "
                f"{sum(one['safe'] for one in plan if one['scene'] == scene.name) - 1} for the GPU"
            ),
            flush=True,
        )
    (arguments.folder / "plan.json").write_text(json.dumps({"package": package.name, "cases": plan}, indent=1))
    return 0


def _copy(package: Path, place: Path) -> None:
    shutil.copytree(package, place / package.name, ignore=shutil.ignore_patterns("__pycache__"))


# ---- on the GPU


def measure(arguments: argparse.Namespace) -> int:
    """Run each case that cannot hang in its own process, several in parallel. Writes CASE.json and the outputs of the
    original kernels.
    """
    plan = json.loads((arguments.folder / "plan.json").read_text())
    arguments.out.mkdir(parents=True, exist_ok=True)
    cases = [case for case in plan["cases"] if case["safe"] and arguments.scene in case["scene"]]

    def run(case: dict) -> None:
        name = f"{case['scene']}.{case['mutant']}"
        command = [
            sys.executable,
            "-m",
            "tools.proof.calibrate",
            "repeat",
            str(arguments.folder / case["scene"] / case["mutant"] / plan["package"]),
            str(arguments.out / name),
            "--scene",
            case["scene"],
        ]
        start = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
            error = done.stderr[-2000:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            error = f"no end after {LIMIT_S} s"
        if error:
            (arguments.out / f"{name}.json").write_text(json.dumps({"error": error}))
        print(
            (
                f"{name}: {'FAILED ' + error.strip().splitlines()[-1] if error else 'ran'} in "
                f"{time.perf_counter() - start:.0f} s"
            ),
            flush=True,
        )

    originals = [case for case in cases if case["mutant"] == "original"]
    with ThreadPoolExecutor(max(1, min(12, (os.cpu_count() or 2) - 2))) as pool:
        list(pool.map(run, originals))  # first, because mutants are compared with their outputs
        list(pool.map(run, [case for case in cases if case["mutant"] != "original"]))
    return 0


def repeat(arguments: argparse.Namespace) -> int:
    """Run one case: import the package, run its scene `RUNS` times, and count runs whose outputs differ from the
    original kernel's.
    """
    sys.path.insert(0, str(arguments.package.parent))
    scenes = __import__(f"{arguments.package.name}.scenes", fromlist=["SCENES"])
    run = next(scene.run for scene in scenes.SCENES if scene.name == arguments.scene)
    kept = arguments.out.with_name(f"{arguments.scene}.original.pt")
    if arguments.out.name.endswith(".original"):
        torch.save([output.cpu() for output in run("cuda")], kept)
    expected = [output.to("cuda") for output in torch.load(kept)]
    wrong, bits, worst = 0, 0, 0.0
    for _ in range(RUNS):
        got = run("cuda")
        errors = [_error(a, b) for a, b in zip(got, expected, strict=True)]
        wrong += max(errors) > TOLERANCE
        bits += not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        worst = max(worst, *errors)
    found = {"runs": RUNS, "wrong": wrong, "bits_differ": bits, "worst": worst, "machine": _machine()}
    arguments.out.with_name(arguments.out.name + ".json").write_text(json.dumps(found))
    return 0


def _machine() -> dict[str, str]:
    import triton

    from strobe.problem.target import Target

    return {
        "device": Target.of(torch.device("cuda")).name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference divided by the largest expected value. NaN and infinite differences count as 1e9."""
    difference = (got.double() - expected.double()).abs()
    return float(torch.nan_to_num(difference, nan=1e9, posinf=1e9).max() / expected.double().abs().max())


# ---- comparison


def compare(arguments: argparse.Namespace) -> int:
    """Print a row for each case: the report of each detector of the simulator, and the result on the GPU.

    Returns 1 if the outputs of an original kernel differ from the simulator's."""
    plan = json.loads((arguments.folder / "plan.json").read_text())
    rows, failed = [], False
    for case in plan["cases"]:
        file = arguments.out / f"{case['scene']}.{case['mutant']}.json"
        row = {key: case[key] for key in ("scene", "mutant", "what", "said")}
        row["gpu"] = (
            json.loads(file.read_text())
            if file.exists()
            else {"skipped": "may hang" if not case["safe"] else "not run"}
        )
        if case["mutant"] == "original" and file.exists():
            simulated = torch.load(arguments.folder / case["scene"] / "simulated.pt")
            measured = torch.load(arguments.out / f"{case['scene']}.original.pt")
            row["differs"] = [_difference(a, b) for a, b in zip(measured, simulated, strict=True)]
            failed = failed or max(row["differs"]) > TOLERANCE
        rows.append(row)
    for row in rows:
        simulated = json.dumps(row.get("differs") or row["said"])
        print(
            f"{row['scene']:26} {row['mutant']:10} {json.dumps(row['gpu'])[:90]:92} {simulated[:110]}  "
            f"{row['what'][:100]}"
        )
    if arguments.results:
        arguments.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if arguments.table:
        fill(arguments.table, "calibration", table(rows))
    return int(failed)


def table(rows: list[dict]) -> str:
    """Markdown with a line for each scene: the original kernel's difference from the simulator, and the mutants that
    each side noticed.
    """
    titles = (
        "scene",
        "largest difference",
        "mutants",
        "may hang",
        "wrong on the GPU",
        "of these noticed here",
        "silent on the GPU, noticed here",
        "silent in both",
    )
    lines = ["| " + " | ".join(titles) + " |", "| --- |" + " ---: |" * (len(titles) - 1)]
    for scene in dict.fromkeys(row["scene"] for row in rows):
        mine = [row for row in rows if row["scene"] == scene and row["mutant"] != "original"]
        differs = next(row["differs"] for row in rows if row["scene"] == scene and row["mutant"] == "original")
        ran = [row for row in mine if "wrong" in row["gpu"]]
        wrong, silent = [row for row in ran if row["gpu"]["wrong"]], [row for row in ran if not row["gpu"]["wrong"]]
        noticed = lambda some: sum(any(row["said"].values()) for row in some)
        hang = sum(row["gpu"].get("skipped") == "may hang" for row in mine)
        counts = (len(mine), hang, len(wrong), noticed(wrong), noticed(silent), len(silent) - noticed(silent))
        lines.append(f"| {scene} | {max(differs):.1e} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _difference(measured: torch.Tensor, simulated: torch.Tensor) -> float:
    return _error(measured.cpu(), simulated.cpu())


if __name__ == "__main__":
    raise SystemExit(main())
