"""Failures of the peers' tests that are known: patterns of suite, test and message, and the cause."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple


class Known(NamedTuple):
    suite: str
    test: str
    message: str
    why: str

    def covers(self, suite: str, test: str, message: str) -> bool:
        return all(fnmatchcase(given, pattern) for given, pattern in zip((suite, test, message), self))


KNOWN: tuple[Known, ...] = ()
