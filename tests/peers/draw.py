"""Which parametrisations of the peers' tests run: drawn by a seed, from those whose work is bounded."""

from __future__ import annotations

import itertools
import random
import re
from fnmatch import fnmatchcase
from typing import Any

import pytest


def combinations(marks: list) -> tuple[tuple[str, ...], list[list[tuple[Any, list]]]]:
    """The names that parametrize marks give values to, and of each mark its values, beside the marks that a value has
    of its own.
    """
    names: list[str] = []
    axes = []
    for mark in marks:
        given, values = mark.args[:2] if len(mark.args) > 1 else (mark.args[0], mark.kwargs["argvalues"])
        own = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
        names += own
        axis = []
        for value in values:
            extra = list(value.marks) if hasattr(value, "marks") and hasattr(value, "values") else []
            plain = (
                value.values
                if extra or type(value).__name__ == "ParameterSet"
                else ((value,) if len(own) == 1 else tuple(value))
            )
            axis.append((plain, extra))
        axes.append(axis)
    return tuple(names), axes


def work(parameters: dict[str, Any]) -> int:
    """Query rows times keys times head dimension, as far as the parameters' names tell. A size that only the test's
    body knows is not counted.

    >>> work({"seqlen_q": 100, "seqlen_k": 200, "d": 64}), work({"seqlen": 100, "d": 64}), work({"dtype": "float16"})
    (1280000, 640000, 0)
    """
    lengths = sorted(
        (value for name, value in parameters.items() if re.search("seq_?len", name) and type(value) is int),
        reverse=True,
    )
    area = lengths[0] * (lengths[1] if len(lengths) > 1 else lengths[0]) if lengths else 0
    widths = [
        value for name, value in parameters.items() if name in ("d", "D", "headdim", "head_dim") and type(value) is int
    ]
    return area * (widths[0] if widths else 128)


class Draw:
    """Which parametrisations of a test run: at most `share` of those under the cap, the same ones for the same seed."""

    def __init__(self, name: str, function: Any, plan: dict):
        self.marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        self.names, axes = combinations(self.marks)
        self.name, self.plan, self.axes = name, plan, axes
        self.total = self.under_cap = 1
        self.drawn = 0

    def sizes(self) -> dict[str, int]:
        return {"total": self.total, "under_cap": self.under_cap, "drawn": self.drawn}

    def allowed(self) -> list[tuple]:
        """All parametrisations under the cap."""
        every = list(itertools.product(*self.axes))
        self.total = len(every)
        omitted = any(fnmatchcase(self.name, pattern) for pattern in self.plan["omitted"])
        kept = [
            each for each in every if not omitted and work(dict(zip(self.names, self.values(each)))) <= self.plan["cap"]
        ]
        self.under_cap = len(kept)
        return kept

    @staticmethod
    def values(each: tuple) -> list:
        return [value for plain, _ in each for value in plain]

    def chosen(self, share: int) -> list[tuple]:
        allowed = self.allowed()
        numbers = random.Random(f"{self.plan['seed']} {self.name}").sample(
            range(len(allowed)), min(share, len(allowed))
        )
        self.drawn = len(numbers)
        return [allowed[number] for number in sorted(numbers)]

    def apply(self, function: Any, share: int) -> None:
        """Leave the test one parametrize mark, of what was drawn."""
        if not self.marks:
            self.drawn = 1
            return
        rows = [
            pytest.param(*self.values(each), marks=[mark for _, extra in each for mark in extra])
            for each in self.chosen(share)
        ]
        others = [mark for mark in function.pytestmark if mark.name != "parametrize"]
        ids = [str(number) for number in range(len(rows))]
        function.pytestmark = [*others, pytest.mark.parametrize(",".join(self.names), rows, ids=ids).mark]


def shares(counts: dict[str, int], sample: int) -> dict[str, int]:
    """The sample dealt out to tests as evenly as their counts allow.

    >>> shares({"a": 2, "b": 50, "c": 500}, 32)
    {'a': 2, 'b': 15, 'c': 15}
    """
    dealt: dict[str, int] = {}
    for position, (name, count) in enumerate(sorted(counts.items(), key=lambda item: item[1])):
        dealt[name] = min(count, sample // (len(counts) - position))
        sample -= dealt[name]
    return dealt
