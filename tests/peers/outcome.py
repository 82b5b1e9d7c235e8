"""What a test's exception says of the stand-in that it called."""

from __future__ import annotations

import re
from pathlib import Path

import strobe
from strobe.errors import InvalidProblem, UnsupportedProblem

PACKAGE = Path(strobe.__file__).parent
LONGEST_MESSAGE = 200


class OutOfTime(BaseException):
    """A test ran longer than a test may. No handler of an Exception takes it."""


def outcome(error: BaseException, raised_in: Path) -> tuple[str, str]:
    """What a test's exception says of the stand-in: refused by name, over a limit or failed; and in which words."""
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, OutOfTime):
        return "over a limit", "more time than a test may take"
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return "over a limit", "more memory than a suite may take"
    ours = raised_in.is_relative_to(PACKAGE)
    if isinstance(error, (InvalidProblem, UnsupportedProblem)) or (isinstance(error, NotImplementedError) and ours):
        return "refused", words
    if ours and isinstance(error, TypeError) and re.match(r"[\w. ]+: got .*, expected .*; ", str(error), re.DOTALL):
        return "refused", words  # errors.wrong_type has no class of its own
    return "failed", words  # a KernelFault too


def normalised(message: str) -> str:
    """A message on one line, without the numbers in which its repetitions differ. An assertion keeps its numbers: they
    say how wrong it was.

    >>> normalised("alibi: got 0.25 at 0x7f00"), normalised("AssertionError: assert 0.25 <= (2 * 0.0)")
    ('alibi: got # at #', 'AssertionError: assert 0.25 <= (2 * 0.0)')
    """
    line = message.strip().splitlines()[0] if message.strip() else ""
    line = re.sub(r"0x[0-9a-f]+", "#", line)
    if not line.startswith("AssertionError"):
        line = re.sub(r"(?<![\w.])-?\d+(\.\d+)?(e-?\d+)?(?![\w])", "#", line)
    return line[:LONGEST_MESSAGE]
