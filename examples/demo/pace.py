"""Fits the demo into a time budget at the machine's current speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

BUDGET_S = 150.0  # for all parts; loading torch, the model and its weights comes on top
SHARES = {"embeddings": 0.4, "ways": 0.3, "lengths": 0.15, "masks": 0.15}  # fractions of the budget
Advance = Callable[[], None]
# (description, number of pieces, time limit in seconds) -> a function to call after each piece
Step = Callable[[str, int, float], Advance]


class Pace:
    """Remaining seconds of a part. A part is sized by the time of its pieces and stops early if they become slower.

    >>> part = Pace(100.0).part("ways")
    >>> part.seconds, part.fits(piece_s=0.5, least=3, most=1000), part.fits(piece_s=20.0, least=3, most=1000), part.over
    (30.0, 60, 3, False)
    """

    def __init__(self, seconds: float = math.inf):
        self.seconds = seconds
        self.end = time.perf_counter() + seconds

    def part(self, name: str) -> Pace:
        """The pace of one part, starting now."""
        return Pace(self.seconds * SHARES[name])

    def fits(self, piece_s: float, least: int, most: int) -> int:
        """How many pieces of `piece_s` seconds fit, between `least` and `most`."""
        return most if math.isinf(self.seconds) else max(least, min(most, int(self.seconds / max(piece_s, 1e-9))))

    def allows(self, seconds: float) -> bool:
        """Whether that many seconds remain."""
        return time.perf_counter() + seconds <= self.end

    @property
    def over(self) -> bool:
        return not self.allows(0.0)


def seconds_of(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def silent(words: str, pieces: int, seconds: float) -> Advance:
    """A Step that prints nothing."""
    return lambda: None


def minutes(seconds: float) -> str:
    """
    >>> minutes(150.0), minutes(44.0), minutes(60.0)
    ('2 min 30 s', '44 s', '1 min')
    """
    whole, rest = divmod(round(seconds), 60)
    return " ".join([f"{whole} min"] * bool(whole) + [f"{rest} s"] * bool(rest or not whole))
