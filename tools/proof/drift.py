"""Drift: run a few test files under other versions of Triton, each in its own environment.

An environment (`.drift/VERSION`) contains only Triton. torch and all other packages come from the Python that runs
this. A failure that is not listed in KNOWN with a reason gives the exit code 1.

    python -m tools.proof.drift                    all VERSIONS; writes .drift/rows.jsonl
    python -m tools.proof.drift --triton 3.9.0     one version; --suite clusters: one suite
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from strobe.errors import InvalidProblem

VERSIONS = ("3.7.1", "3.8.0", "3.9.0")
RESULTS = Path(".drift/rows.jsonl")
FOLDER = Path(".drift")
LONGEST_LINE = 160  # characters kept of an error
LONGEST_S = 1800  # time limit for one suite under one version; "kernels" takes 600 s on two cores
PAIR_TESTS = "tests/kernels/blackwell/test_pair_backward.py"
SUITES: dict[str, tuple[str, ...]] = {  # suite -> arguments of pytest; a suite whose file does not exist is skipped
    "kernels": ("tests/tools/each_kernel.py",),
    "specimens": ("tests/tools/test_specimens_compile.py",),
    "simulator": ("tests/sim", "-k", "smoke"),
    "clusters": ("tests/sim/test_verdicts_multicta.py", "tests/sim/test_verdicts_pairs.py"),
    # pairs of CTAs need 3.9; older versions skip these
    "pairs": (
        PAIR_TESTS,
        "tests/kernels/blackwell/test_pair_backward_barriers.py",
        "tests/tools/test_blackwell_cycles.py",
        "-m",
        "not nightly and not gpu",
    ),
    # `make pairs` leaves these to the night, whose tests run under 3.6 and skip the pair
    "pair_seeds": (PAIR_TESTS, "-m", "nightly", "-k", "hundred_seeds"),
    "pair_inputs": (PAIR_TESTS, "-m", "nightly", "-k", "not hundred_seeds"),
}
NONE_COLLECTED = 5  # pytest's exit code
_QUOTED = re.compile(r": at \d+:\d+:$")  # Triton's errors start with quoted source and end with the cause


class Known(NamedTuple):
    """A known failure: patterns of version, test and error, and the reason to accept it."""

    triton: str
    test: str
    error: str
    why: str

    def covers(self, row: dict) -> bool:
        return all(fnmatchcase(row[key], getattr(self, key)) for key in ("triton", "test", "error"))


_SPILLS = "*spill_store_bytes=[1-9]*"
_PTXAS = (
    "without spills under the Triton that is pinned; its successors bring another ptxas, which allocates "
    "otherwise. Tune when the pin moves"
)
KNOWN: tuple[Known, ...] = (
    Known("3.8.0", "*specimens*blackwell attention d64*", _SPILLS, _PTXAS),
    Known("3.9.0", "*specimens*blackwell attention d*", _SPILLS, _PTXAS),
    Known("3.9.0", "*specimens*backward d128*", _SPILLS, _PTXAS),
    Known(
        "3.8.0",
        "*test_a_step_is_what_the_model_says[[]widths1[]]",
        "*UnsupportedProblem*",
        "Triton 3.8 cannot address the tensor memory of 192/128; blackwell.backward refuses it by name",
    ),
)


def environment(version: str) -> Path:
    """The Python of the environment with this Triton and all packages of the running Python. Creates the environment if
    needed.

    Raises InvalidProblem if pip cannot install the version, or if the environment imports another one."""
    home = (FOLDER / version).absolute()
    python = home / "bin" / "python"
    if not python.exists() or _answer(python, "import importlib.metadata as m; print(m.version('triton'))") != version:
        print(f"making {FOLDER / version}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        if subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", f"triton=={version}"]).returncode:
            raise InvalidProblem(
                "--triton", version, "a release that pip can install", "pip said why above; name another"
            )
    own = _answer(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    # a .pth file appends folders to the path, so the environment's own Triton is found first
    Path(own, "rest.pth").write_text(f"{Path(__file__).parents[2] / 'src'}\n{sysconfig.get_path('purelib')}\n")
    found = _answer(python, "import triton; print(triton.__version__)")
    if found != version:
        raise InvalidProblem(
            "--triton", version, f"what its environment imports, {found}", f"remove {home} and run this again"
        )
    return python


def _answer(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def ask(python: Path, version: str, *names: str) -> Iterator[dict]:
    """One row for each test of every suite, or of those named. "error" is the first line of its error, empty if it
    passed.
    """
    for suite, arguments in SUITES.items():
        if Path(arguments[0]).exists() and (not names or suite in names):
            for test, error in sorted(_suite(python, suite, arguments).items()):  # workers finish in arbitrary order
                yield {"triton": version, "suite": suite, "test": test, "error": error}


def _suite(python: Path, suite: str, arguments: Sequence[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # with workers, a crash of the compiler ends only a worker, and pytest reports the test
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-n",
            "2",
            f"--junitxml={report}",
            *arguments,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            return {suite: f"no end after {LONGEST_S} s"}
        if done.returncode == NONE_COLLECTED:
            print(f"{suite}: {' '.join(arguments)} selects no test")
            return {}
        found = outcomes(report.read_text()) if report.exists() else {}
    said = (done.stderr or done.stdout).strip().splitlines() or ["pytest ended without a word"]
    return found or {suite: said[-1][:LONGEST_LINE]}


def outcomes(report: str) -> dict[str, str]:
    """{test: first line of its error, or ""} from pytest's JUnit XML report. Skipped tests are left out.

    >>> failed = '<testcase name="y"><failure message="KeyError: 1&#10;more"/></testcase>'
    >>> outcomes(f'<a><testcase classname="tests.f" name="x"/>{failed}</a>')
    {'f::x': '', 'y': 'KeyError: 1'}
    """
    found: dict[str, str] = {}
    for case in xml.fromstring(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        wrong = next((fault for kind in ("failure", "error") for fault in case.findall(kind)), None)
        file = case.get("classname", "").rpartition(".")[2]  # empty if the file cannot be collected
        found["::".join(filter(None, (file, case.get("name", ""))))] = "" if wrong is None else _first_line(wrong)
    return found


def _first_line(fault: xml.Element) -> str:
    """The first line of the first error. pytest marks lines of exceptions with E, and prints the first exception of a
    chain first.

    For a file that cannot be collected, it is the last such line."""
    said = [line.removeprefix("E").strip() if line.startswith("E ") else "" for line in (fault.text or "").splitlines()]
    blocks = [block.splitlines() for block in re.split(r"\n\n+", "\n".join(said).strip()) if block]
    if not blocks:
        return next(iter((fault.get("message") or "it failed without a word").splitlines()))
    if (fault.get("message") or "").startswith("collection failure"):
        return blocks[-1][-1]
    first, last = blocks[0][0][:LONGEST_LINE], blocks[0][-1][:LONGEST_LINE]
    return last if _QUOTED.search(first) else first


def unknown(rows: Iterable[dict]) -> list[dict]:
    """Rows with an error that no line of KNOWN covers."""
    return [row for row in rows if row["error"] and not any(line.covers(row) for line in KNOWN)]


def table(rows: Sequence[dict]) -> list[str]:
    """Lines of a table of tests by versions. A cell is ok, or the number of an error in the list below the table.

    >>> print(*table([{"triton": "3.9.0", "suite": "kernels", "test": "f", "error": "KeyError: 1"}]), sep="\\n")
    kernels    f  3.9.0: 1
    1 KeyError: 1
    """
    tests = list(dict.fromkeys((row["suite"], row["test"]) for row in rows))
    found = {(row["suite"], row["test"], row["triton"]): row["error"] for row in rows}
    versions = list(dict.fromkeys(row["triton"] for row in rows))
    errors = list(dict.fromkeys(row["error"] for row in rows if row["error"]))
    width = max((len(test) for _, test in tests), default=0)

    def cell(key: tuple[str, str, str]) -> str:
        error = found.get(key)
        return "-" if error is None else str(errors.index(error) + 1) if error else "ok"

    lines = [
        f"{suite:<10} {test:<{width}}  " + "  ".join(f"{v}: {cell((suite, test, v))}" for v in versions)
        for suite, test in tests
    ]
    return lines + [f"{number} {error}" for number, error in enumerate(errors, 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a test fails with an unknown error or no test ran, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.proof.drift", description="This code under other versions of Triton."
    )
    parser.add_argument(
        "--triton", action="append", metavar="VERSION", help=f"{', '.join(VERSIONS)} unless given; repeatable"
    )
    parser.add_argument(
        "--suite", action="append", default=[], choices=list(SUITES), help="all unless given; repeatable"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help=f"rows go there ({RESULTS})")
    a = parser.parse_args(argv)
    try:
        pythons = {version: environment(version) for version in a.triton or VERSIONS}
    except InvalidProblem as error:
        parser.error(str(error))
    rows = [row for version, python in pythons.items() for row in ask(python, version, *a.suite)]
    a.results.parent.mkdir(parents=True, exist_ok=True)
    a.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("\n".join(table(rows)))
    for line in KNOWN:
        seen = any(line.covers(row) for row in rows if row["error"])
        print(
            f"known: {line.triton} {line.test}: {line.why}"
            if seen
            else f"known, and gone: take the line of {line.test} ({line.triton}) away"
        )
    new = unknown(rows)
    asked = {row["triton"] for row in rows}
    print(
        f"{len(rows)} tests under Triton {', '.join(sorted(asked)) or 'of no version'}, {len(new)} broken that "
        "were not known to be"
    )
    return 1 if new or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
