"""One suite in one process: pytest over the peers' files, with a draw of each test's parametrisations and an outcome
for each test that ran.

run.py starts it and reads its events, a JSON object a line, from the file descriptor that it is given.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import tempfile
from pathlib import Path

import cuda_on_cpu
import pytest
import standins
import torch
from draw import Draw, shares
from outcome import OutOfTime, outcome


class Session:
    """The plugin: counts first, then draws, runs and reports."""

    def __init__(self, plan: dict, write):
        self.plan, self.write = plan, write
        self.counting = True
        self.counts: dict[str, int] = {}
        self.shares: dict[str, int] = {}
        self.draws: dict[str, Draw] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector, name, obj):
        if not (name.startswith("test") and callable(obj)):
            return None
        test = f"{collector.path.name}::{name}"
        if self.counting:
            draw = Draw(test, obj, self.plan)
            self.draws[test], self.counts[test] = draw, len(draw.allowed())
            return []
        if not self.shares[test]:
            return []
        self.draws[test].apply(obj, self.shares[test])
        self.draws[test].marks = []  # applied once, should pytest ask again
        return None

    def pytest_collectreport(self, report):
        if report.failed and self.counting:
            self.write({"event": "uncollected", "where": report.nodeid, "message": str(report.longrepr)[-2000:]})

    def pytest_collection_finish(self, session):
        if self.counting:
            self.shares = shares(self.counts, self.plan["sample"])
        else:
            self.write(
                {
                    "event": "planned",
                    "tests": len(session.items),
                    "draws": {name: draw.sizes() for name, draw in self.draws.items()},
                }
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        random.seed(self.plan["seed"])
        torch.manual_seed(self.plan["seed"])
        signal.signal(signal.SIGALRM, _ring)
        signal.setitimer(signal.ITIMER_REAL, self.plan["limit"])
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_runtest_logstart(self, nodeid, location):
        self.write({"event": "started", "id": nodeid})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "call" or (call.when == "setup" and report.outcome != "passed"):
            self.write({"event": "ended", **self.outcome_of(item, call, report)})
        return report

    def outcome_of(self, item, call, report) -> dict:
        found, words, where = report.outcome, "", ""
        if found == "failed":
            last = call.excinfo.traceback[-1]
            found, words = outcome(call.excinfo.value, Path(last.path))
            if isinstance(call.excinfo.value, AssertionError):
                said = str(call.excinfo.value).strip().splitlines() or [""]
                words = f"AssertionError: {said[0]} [{str(last.statement).strip().splitlines()[0]}]"
            where = f"{last.path}:{last.lineno + 1}"
        elif found == "skipped":
            words = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        parameters = {
            name: str(value) for name, value in getattr(getattr(item, "callspec", None), "params", {}).items()
        }
        test = f"{item.path.name}::{item.originalname or item.name}"
        return {
            "test": test,
            "outcome": found,
            "message": words[:2000],
            "where": where,
            "parameters": parameters,
            "seconds": round(call.duration, 3),
        }


def _ring(*_):
    raise OutOfTime


def main() -> int:
    plan = json.loads(sys.argv[1])
    events = os.fdopen(plan["events"], "w", buffering=1)
    if plan["capability"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (plan["memory"], plan["memory"]))
        cuda_on_cpu.install(tuple(plan["capability"]))
    standins.install(Path(plan["root"]))
    sys.path += dict.fromkeys(str(Path(file).parent) for file in plan["files"])  # helpers beside the tests
    session = Session(plan, lambda event: events.write(json.dumps(event) + "\n"))
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch, "pytest.ini")
        settings.write_text("[pytest]\n")
        os.chdir(scratch)  # some of their tests write files
        options = [
            "-q",
            "-c",
            str(settings),
            "--rootdir",
            plan["root"],
            "--noconftest",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-W",
            "ignore",
        ]
        pytest.main([*options, "--collect-only", *plan["files"]], plugins=[session])
        session.counting = False
        pytest.main([*options, "--tb=no", *plan["files"]], plugins=[session])
    events.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
