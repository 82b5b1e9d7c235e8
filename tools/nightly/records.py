"""Records of nightly runs: one line for each test, appended when it ends, under a hash of the files that it depends on.

A line holds the hash, the test, its outcome ("passed", "failed" or "skipped"), its CPU seconds and the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

RECORDS = Path(".nightly/outcomes.jsonl")
FILES = ("pyproject.toml", "src", "tests", "tools", "ladder", "examples", "packages")  # what tests run
_BUILT = ("__pycache__", ".egg-info")
_BEST = ("passed", "failed", "skipped")  # the first of these that a test has is its outcome
_TEST_NAME = re.compile(r"\btest_\w+")


class Line(NamedTuple):
    """The outcome of a test, or of a step that is no test."""

    tree: str
    test: str
    outcome: str
    cpu_s: float
    machine: str


@dataclass(frozen=True)
class Tree:
    """Hashes of the files that are here, with or without git. Files that Python builds are left out.

    A test depends on its own file, on the test files that this file names, and on every file that is no test file. So
    after a test file is mended, only its tests and those of files that name it run again.
    """

    whole: str
    of_file: dict[str, str]  # of each test file

    def of(self, test: str) -> str:
        """The hash for a test, given by its pytest id, or for a step that is no test."""
        return self.of_file.get(test.partition("::")[0], self.whole)


def tree_of(root: Path) -> Tree:
    """The hashes of FILES, by paths and contents."""
    contents = {file.relative_to(root).as_posix(): file.read_bytes() for name in FILES for file in _files(root / name)}
    tests = {path for path in contents if path.startswith("tests/") and Path(path).match("test_*.py")}
    named = {path: _named(contents[path], tests) for path in contents if path.startswith(("tests/", "tools/"))}
    of_all = _closure(set(contents) - tests, named)
    return Tree(
        _hash(contents, contents),
        {path: _hash(of_all | _closure({path}, named), contents) for path in tests},
    )


def _named(content: bytes, tests: set[str]) -> set[str]:
    """The test files whose names are in a file."""
    words = set(_TEST_NAME.findall(content.decode(errors="replace")))
    return {path for path in tests if Path(path).stem in words}


def _closure(paths: set[str], named: dict[str, set[str]]) -> set[str]:
    """The paths, the files that they name, the files that those name, and so on."""
    found, left = set(paths), list(paths)
    while left:
        new = named.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def _hash(paths: Iterable[str], contents: dict[str, bytes]) -> str:
    lines = (f"{path} {hashlib.sha256(contents[path]).hexdigest()}\n" for path in sorted(paths))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, inside, names in os.walk(path):
        inside[:] = [name for name in inside if not name.endswith(_BUILT)]
        yield from (Path(folder, name) for name in names)


def machine() -> str:
    """The kind of this machine, such as "2 cores"."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores"


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system


def append(file: Path, line: Line) -> None:
    """Write a line at the end of a file, at once and in one piece. What a killed run left of a line stays by itself."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(line._asdict()) + "\n"
    with file.open("a+b") as out:
        if out.tell() and (out.seek(-1, os.SEEK_END), out.read(1))[1] != b"\n":
            text = "\n" + text
        out.write(text.encode())


def read(files: Iterable[Path]) -> list[Line]:
    """The lines of all files that exist, but for pieces of lines."""
    found = []
    for file in files:
        for text in file.read_text().splitlines() if file.exists() else ():
            try:
                found.append(Line(**json.loads(text)))
            except (ValueError, TypeError):
                continue
    return found


def best(lines: Iterable[Line], tree: Tree) -> dict[str, Line]:
    """{test: its line} of the tests of `tree`. A test that has passed once has passed, for the files are the same.

    >>> failed = Line("t", "test_a", "failed", 2.0, "2 cores")
    >>> best([failed, failed._replace(outcome="passed"), failed], Tree("t", {}))["test_a"].outcome
    'passed'
    """
    found: dict[str, Line] = {}
    for line in lines:
        if line.tree == tree.of(line.test):
            before = found.get(line.test)
            if before is None or _BEST.index(line.outcome) <= _BEST.index(before.outcome):
                found[line.test] = line
    return found


def row(lines: Iterable[Line], tree: Tree, steps: Iterable[str]) -> dict[str, Any]:
    """The counts of a tree: its tests by outcome, those that failed before they passed, and the outcome of each step
    that is no test.

    >>> passed = Line("t", "test_a", "passed", 2.0, "2 cores")
    >>> found = row([passed, passed._replace(test="drift", machine="8 cores")], Tree("t", {}), ["drift"])
    >>> found["passed"], found["drift"], found["cpu_s"], found["machines"]
    (1, 'passed', 4.0, ['2 cores', '8 cores'])
    """
    lines, steps = list(lines), list(steps)
    found = best(lines, tree)
    counts = Counter(line.outcome for test, line in found.items() if test not in steps)
    failed = {line.test for line in lines if line.tree == tree.of(line.test) and line.outcome == "failed"}
    return {
        **{outcome: counts[outcome] for outcome in _BEST},
        "passed_after_a_failure": sum(found[test].outcome == "passed" for test in failed),
        **{step: found[step].outcome if step in found else None for step in steps},
        "cpu_s": round(sum(line.cpu_s for line in found.values()), 1),
        "machines": sorted({line.machine for line in found.values()}),
    }
