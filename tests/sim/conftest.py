"""The judge of the simulator's verdicts: a kernel, run in every mode under many seeds, gets exactly the reports that
its faults deserve.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from strobe.sim import KINDS, Checks, Report, simulate
from strobe.sim.machine import MODES

SEEDS = 10
Expected = tuple[
    str, ...
]  # a kind, then words that the report's text must hold; "@name" is the line that ends in the comment `# @name`


@pytest.fixture
def verdict(request) -> Callable[..., None]:
    """verdict(start, *expected, sometimes=(), seeds=SEEDS, **options of simulate).

    `start` launches kernels. Every report must be one of `expected` or `sometimes`, and each of `expected` must be
    there, in all modes and seeds. `sometimes` is for what does depend on the schedule: such a test says why. Without
    `expected`, one of `sometimes` must be there.
    """
    lines = marked(request.path)

    def judge(
        start: Callable[[], None],
        *expected: Expected,
        sometimes: tuple[Expected, ...] = (),
        seeds: int = SEEDS,
        **options,
    ) -> None:
        certain, possible = [_resolved(one, lines) for one in expected], [_resolved(one, lines) for one in sometimes]
        for mode in MODES:
            for seed in range(seeds):
                checks = options.get("checks", Checks())
                with simulate(
                    options.get("target", "sm_90"), mode, seed, sms=options.get("sms", 4), check=False, checks=checks
                ) as run:
                    start()
                _compare(run.reports, certain, possible, f"mode {mode}, seed {seed}")

    return judge


def marked(path: Path) -> dict[str, str]:
    """`# @name` at the end of a line -> "file.py:line ", as reports write it."""
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if marks := re.search(r"#((?: @[\w-]+)+)$", line):
            for name in marks[1].split():
                assert name not in found, f"{path.name}:{number}: {name} is marked twice"
                found[name] = f"{path.name}:{number} "
    return found


def _resolved(expected: Expected, lines: dict[str, str]) -> Expected:
    assert expected[0] in KINDS, f"{expected[0]} is no kind of report"
    return tuple(lines[word] if word.startswith("@") else word for word in expected)


def _matches(report: Report, expected: Expected) -> bool:
    return report.kind == expected[0] and all(word in report.text for word in expected[1:])


def _compare(reports: list[Report], expected: list[Expected], possible: list[Expected], when: str) -> None:
    told = "\n".join(map(str, reports)) or "no report"
    missing = [one for one in expected if not any(_matches(report, one) for report in reports)]
    assert not missing, f"{when}: nothing says {missing[0]}:\n{told}"
    assert reports or not possible, f"{when}: nothing says any of {possible}"
    wrong = [report for report in reports if not any(_matches(report, one) for one in [*expected, *possible])]
    assert not wrong, f"{when}: not expected: {wrong[0]}\nall:\n{told}"
