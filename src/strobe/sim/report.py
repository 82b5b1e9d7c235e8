"""Findings of a simulated run: a list of reports, each with its place in the kernel's source."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType

KINDS = {
    "race": "two unordered accesses to one place, at least one of them a write",
    "order": "two unordered floating-point adds: the sum differs from run to run",
    "uninitialised": "a read of memory that was never written",
    "fence": "the async proxy accesses what generic code wrote without fence_async_shared in between",
    "wgmma": "an accumulator used before the wait that covers it",
    "barrier": "a barrier misused: not initialised, too many arrivals, a phase left half full",
    "bytes": "the bytes expected on a barrier are not the bytes copied",
    "deadlock": "every partition waits and nothing is in flight",
    "unfinished": "asynchronous work still in flight when its owner ends",
    "bounds": "a misaligned access, or one outside every argument, allocation or buffer array",
    "target": "an operation that the target does not support",
    "budget": "more shared or tensor memory, or warps of a CTA, than the target has",
    "assert": "a device_assert failed, an assumption or a hint is false, an integer overflows or is divided by zero",
    "contraction": "a result that changes if the compiler fuses a product into a sum",
    "coverage": "an output's element that the launch never writes, or writes more than once",
    "compiler": "source that Triton is known to miscompile, or not to compile",
}

Place = tuple[tuple[CodeType, int], ...]  # innermost kernel function first: (code, line)


def place_text(place: Place) -> str:
    """A place as text, innermost function first: `forward.py:93 load_partition < forward.py:202 forward`."""
    return " < ".join(f"{os.path.basename(code.co_filename)}:{line} {code.co_name}" for code, line in place[:4]) or "?"


@dataclass
class Report:
    """One finding: its kind (a key of `KINDS`), a description, its place, and how often it occurred."""

    kind: str
    text: str
    where: str
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.kind}: {self.text}{times}"


class SimulationFault(Exception):
    """The simulator found faults in a kernel; `reports` lists them."""

    def __init__(self, reports: Iterable[Report]):
        self.reports = list(reports)
        many = f"{len(self.reports)} faults" if len(self.reports) > 1 else "a fault"
        super().__init__(f"the simulator found {many}:\n" + "\n".join(f"- {r}" for r in self.reports))


class Stop(BaseException):
    """Ends a launch early: the limit of reports is reached, or the run cannot continue (a deadlock)."""


class Reports:
    """Collects distinct findings and ends the run after `limit` of them."""

    def __init__(self, limit: int):
        self.list: list[Report] = []
        self._seen: dict[tuple, Report] = {}
        self._limit = limit

    def knows(self, kind: str, key: tuple) -> bool:
        """Whether there is a report of this kind and key."""
        return (kind, key) in self._seen

    def add(self, kind: str, text: str, where: str, key: tuple = ()) -> None:
        known = self._seen.get((kind, key or (text, where)))
        if known:
            known.count += 1
            return
        report = Report(kind, text, where)
        self._seen[kind, key or (text, where)] = report
        self.list.append(report)
        if len(self.list) >= self._limit:
            raise Stop
