"""The nightly run: long tests, then the kernels under newer versions of Triton (drift), one step for each version, and
torch under other Pythons (matrix).

    python -m tools.nightly                                   all steps; a second start goes on where the first ended
    python -m tools.nightly --jobs 32 --step tests --minutes 9 --records FILE
    python -m tools.nightly --read FILE --read FILE           with the records of other machines

Outcomes are kept in `.nightly` under a hash of the tested files: a test that has passed does not run again until a file
that it depends on changes. Once all tests have ended, one row goes to `results/nightly.jsonl`; commands that did not
run are null in it.
Exit code: 1 if a test or a step failed or did not end, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tools.nightly.records import RECORDS, Line, Tree, append, best, cpu_s, machine, read, row, tree_of
from tools.proof.drift import VERSIONS
from tools.proof.provenance import circumstances

RESULTS = Path("results/nightly.jsonl")
INTERPRETED = "tests/kernels/portable"
MARKS = "nightly and not gpu"  # on a GPU: pytest -m "nightly and gpu"


class Suite(NamedTuple):
    """A step of tests: arguments of pytest, and whether Triton interprets its kernels."""

    arguments: tuple[str, ...]
    interpreted: bool = False


STEPS: dict[str, Suite | tuple[str, ...]] = {  # others are commands
    "tests": Suite(("--ignore", INTERPRETED)),
    "interpreter": Suite((INTERPRETED,), interpreted=True),
    **{f"drift-{version}": (sys.executable, "-m", "tools.proof.drift", "--triton", version) for version in VERSIONS},
    "matrix": ("make", "--no-print-directory", "matrix"),
}
ENDED = (0, 1, 5)  # pytest's exit codes: all passed, some failed, none were left


def run_tests(step: Suite, a: argparse.Namespace) -> bool:
    """Run the tests of a step that have not passed yet. Returns whether all of them have ended."""
    log = a.records.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    spread = ["-n", str(a.jobs), "--dist", "worksteal"] if a.jobs > 1 else []
    files = [f"--nightly-records={a.records}", *(f"--nightly-read={file}" for file in a.read)]  # "=": no path to tests
    command = [
        sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", a.marks, *spread,
        "-p", "tools.nightly.plugin", *files, *step.arguments, *a.pytest,
    ]  # fmt: skip
    environment = (
        {"HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
        | os.environ
        | ({"TRITON_INTERPRET": "1"} if step.interpreted else {})
    )
    is_stopped = False
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    with (
        log.open("a") as out,
        subprocess.Popen(command, stdout=out, env=environment, preexec_fn=interruptible) as process,
    ):
        try:
            code = process.wait(a.minutes and 60 * a.minutes)
        except subprocess.TimeoutExpired:
            is_stopped = True
            process.send_signal(signal.SIGINT)  # pytest stops its workers
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            print(f"stopped after {a.minutes} minutes; start it again to go on", file=sys.stderr)
    if code not in (0, 5):
        print(f"what pytest says is in {log}", file=sys.stderr)
    return code in ENDED and not is_stopped


def run_command(name: str, command: Sequence[str], tree: Tree, a: argparse.Namespace) -> bool:
    """Run a step that is no test, unless it has passed, and record its outcome."""
    done = best(read([a.records, *a.read]), tree).get(name)
    if done is None or done.outcome != "passed":
        before = cpu_s()
        code = subprocess.run(command).returncode
        outcome = "failed" if code else "passed"
        append(a.records, Line(tree.whole, name, outcome, round(cpu_s() - before, 1), machine()))
    return True


def write_row(file: Path, tree: Tree, counts: dict) -> dict:
    """Append the row of a tree to a file, in the place of an earlier row of it."""
    rows = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
    found = {"tree": tree.whole, **circumstances(), **counts}
    lines = [json.dumps(one) for one in [*(one for one in rows if one["tree"] != tree.whole), found]]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.nightly", description="All long tests, in as many pieces as it takes."
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--step", action="append", choices=tuple(STEPS), help="all unless given; repeatable")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop the tests of a step after M minutes")
    parser.add_argument("--records", type=Path, metavar="FILE", help=f"outcomes go there ({RECORDS})")
    parser.add_argument(
        "--read", type=Path, action="append", default=[], metavar="FILE",
        help="outcomes of another machine for the same files; repeatable",
    )  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help=f"the row goes there ({RESULTS})")
    parser.add_argument("--marks", default=MARKS, metavar="EXPRESSION", help=f"of pytest -m ({MARKS})")
    parser.add_argument("pytest", nargs="*", help="more arguments of pytest, after --; then no row is written")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    a = parser.parse_args(argv)
    tree = tree_of(Path.cwd())
    a.records = a.records or RECORDS
    for file in a.read:
        if not best(read([file]), tree):
            parser.error(f"--read: got {file}, expected outcomes of the files that are here (hash {tree.whole})")
    ended, chosen = [], a.step or tuple(STEPS)
    for name, step in STEPS.items():
        if name in chosen:
            print(f"{name}:", file=sys.stderr, flush=True)
            ended.append(run_tests(step, a) if isinstance(step, Suite) else run_command(name, step, tree, a))
    commands = [name for name, step in STEPS.items() if not isinstance(step, Suite)]
    counts = row(read([a.records, *a.read]), tree, commands)
    are_all_tests = all(name in chosen for name, step in STEPS.items() if isinstance(step, Suite))
    if all(ended) and are_all_tests and not a.pytest:
        counts = write_row(a.results, tree, counts)
    print(json.dumps(counts))
    return int(not all(ended) or counts["failed"] > 0 or any(counts[name] == "failed" for name in commands))


if __name__ == "__main__":
    sys.exit(main())
