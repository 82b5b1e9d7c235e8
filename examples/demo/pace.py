"""How much of the demo fits into the time that it says it takes, at the speed this machine has now, busy or quiet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

BUDGET_S = 150.0  # of all parts together: a model, its weights and torch take some seconds to load besides
SHARES = {"embeddings": 0.4, "ways": 0.3, "lengths": 0.15, "masks": 0.15}  # of the budget
Advance = Callable[[], None]
Step = Callable[
    [str, int, float], Advance
]  # (what comes next, how many pieces it has, seconds it may take): call what returns after each piece


class Pace:
    """Seconds that are left to a part. Each part is sized by what its pieces take, and ends early where they come to
    take longer.

    >>> part = Pace(100.0).part("ways")
    >>> part.seconds, part.fits(piece_s=0.5, least=3, most=1000), part.fits(piece_s=20.0, least=3, most=1000), part.over
    (30.0, 60, 3, False)
    """

    def __init__(self, seconds: float = math.inf):
        self.seconds = seconds
        self.end = time.perf_counter() + seconds

    def part(self, name: str) -> Pace:
        """The share of one part, from now on."""
        return Pace(self.seconds * SHARES[name])

    def fits(self, piece_s: float, least: int, most: int) -> int:
        """How many pieces of so many seconds: at least `least`, so that there is something to show."""
        return most if math.isinf(self.seconds) else max(least, min(most, int(self.seconds / max(piece_s, 1e-9))))

    def allows(self, seconds: float) -> bool:
        """Whether so much can be done before the end."""
        return time.perf_counter() + seconds <= self.end

    @property
    def over(self) -> bool:
        return not self.allows(0.0)


def seconds_of(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def silent(words: str, pieces: int, seconds: float) -> Advance:
    """A Step that says nothing."""
    return lambda: None


def minutes(seconds: float) -> str:
    """
    >>> minutes(150.0), minutes(44.0), minutes(60.0)
    ('2 min 30 s', '44 s', '1 min')
    """
    whole, rest = divmod(round(seconds), 60)
    return " ".join([f"{whole} min"] * bool(whole) + [f"{rest} s"] * bool(rest or not whole))
