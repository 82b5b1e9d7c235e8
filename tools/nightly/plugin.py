"""A pytest plugin that records each test's outcome in a file, and leaves out tests that have passed on the same files.

    python -m pytest -p tools.nightly.plugin --nightly-records=FILE -n 2 -m nightly

It shows counts and the time left on standard error. With pytest-xdist the process that starts the workers writes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.nightly.records import Line, Tree, append, best, cpu_s, machine, read, tree_of

SECONDS_A_LINE = 60  # between two lines of progress where there is no terminal


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nightly")
    group.addoption("--nightly-records", type=Path, metavar="FILE", help="outcomes are appended to it")
    group.addoption(
        "--nightly-read", type=Path, action="append", default=[], metavar="FILE",
        help="outcomes of other machines, too; repeatable",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    file: Path | None = config.getoption("--nightly-records")
    if not file:
        return
    others: list[Path] = config.getoption("--nightly-read") or []
    given: dict[str, Any] | None = getattr(config, "workerinput", None)
    if given is not None:  # every worker must collect the same tests, though others write meanwhile
        config.pluginmanager.register(Worker(set(given["nightly_passed"])))
        return
    tree, lines = tree_of(config.rootpath), read([file, *others])
    passed = {test for test, line in best(lines, tree).items() if line.outcome == "passed"}
    known = {line.test: line.cpu_s for line in lines}
    config.pluginmanager.register(Controller(file, tree, passed, known))
    if not config.getoption("numprocesses", None):
        config.pluginmanager.register(Worker(passed))


class Worker:
    """Runs tests: those that have passed are deselected, and each report gets its CPU seconds."""

    def __init__(self, passed: set[str]) -> None:
        self.passed = passed
        self.before = 0.0

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        gone = [item for item in items if item.nodeid in self.passed]
        if gone:
            config.hook.pytest_deselected(items=gone)
            items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logstart(self) -> None:
        self.before = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        vars(report)["cpu_s"], self.before = cpu_s() - self.before, cpu_s()  # xdist hands it on
        return report


class Controller:
    """Writes a line for each test that ends, and shows how far the run is."""

    def __init__(self, file: Path, tree: Tree, passed: set[str], known: dict[str, float]) -> None:
        self.file, self.tree, self.passed = file, tree, passed
        self.running: dict[str, Line] = {}
        self.progress = Progress(known)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["nightly_passed"] = sorted(self.passed)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.progress.begin(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.progress.begin([item.nodeid for item in session.items])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "passed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        before = self.running.pop(
            report.nodeid, Line(self.tree.of(report.nodeid), report.nodeid, "passed", 0.0, machine())
        )
        line = before._replace(
            outcome=before.outcome if outcome == "passed" else outcome,
            cpu_s=round(before.cpu_s + getattr(report, "cpu_s", 0.0), 3),
        )
        if report.when in ("setup", "call"):
            self.running[report.nodeid] = line
            return
        append(self.file, line)  # teardown, or the report of a worker that died
        self.progress.advance(line)

    def pytest_sessionfinish(self) -> None:
        self.progress.end()


def words(done: int, total: int, failed: int, left_s: float) -> str:
    """
    >>> words(30, 120, 1, 5400)
    '30 of 120 tests (25 %), 1 failed, 1 h 30 min left'
    """
    hours, minutes = divmod(round(left_s / 60), 60)
    left = f"{hours} h {minutes} min" if hours else f"{minutes} min"
    return f"{done} of {total} tests ({100 * done // max(total, 1)} %), {failed} failed, {left} left"


class Progress:
    """Counts and the time left: a bar on a terminal, a line each minute elsewhere. Tests that ran before are expected
    to take as long as they did, and others as long as those on average.
    """

    def __init__(self, known: dict[str, float]) -> None:
        self.known = known
        self.usual = max(sum(known.values()) / len(known), 1e-3) if known else 1.0
        self.left: dict[str, float] = {}
        self.total = self.failed = 0
        self.expected = self.seconds = 0.0
        self.bar: Any = None

    def begin(self, ids: Sequence[str]) -> None:
        if self.total:  # another worker found the same
            return
        self.left = {test: max(self.known.get(test, self.usual), 1e-3) for test in ids}
        self.total, self.expected = len(ids), sum(self.left.values())
        self.start = self.shown = time.monotonic()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            # refreshed here alone: pytest redirects standard error while a test runs
            self.bar = Bar(
                BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True), auto_refresh=False
            )
            self.bar.start()
            self.bar.add_task(words(0, self.total, 0, 0.0), total=self.expected)

    def advance(self, line: Line) -> None:
        self.failed += line.outcome == "failed"
        self.left.pop(line.test, None)
        now, left = time.monotonic(), sum(self.left.values())
        done = self.expected - left
        text = words(
            self.total - len(self.left), self.total, self.failed, (now - self.start) * left / done if done else 0.0
        )
        failure = f"FAILED {line.test}" if line.outcome == "failed" else ""
        if self.bar:
            if failure:
                self.bar.console.print(failure, markup=False)
            self.bar.update(0, completed=done, description=text, refresh=True)
        elif failure or now - self.shown >= SECONDS_A_LINE or not self.left:
            print(*filter(None, (failure, text)), sep="\n", file=sys.stderr, flush=True)
            self.shown = now

    def end(self) -> None:
        if self.bar:
            self.bar.stop()
