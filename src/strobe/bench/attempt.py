"""Run code that may raise any exception: a rival library, a compiler, a failing device."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager

from ..errors import UnsupportedProblem


class Attempt(AbstractContextManager):
    """Catch any Exception of the block and store its text in `reason`, for the caller to report.

    >>> with Attempt() as attempt:
    ...     raise RuntimeError("out of memory")
    >>> attempt.reason
    'RuntimeError: out of memory'
    """

    reason: str | None = None

    def __enter__(self) -> Attempt:
        self._warnings = warnings.catch_warnings(record=True)
        self._said: list = self._warnings.__enter__()  # a list, since it records
        warnings.simplefilter("always")
        return self

    def __exit__(self, kind, error, trace) -> bool:
        self._warnings.__exit__(kind, error, trace)
        if not isinstance(error, Exception):
            return False
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        every = isinstance(error, UnsupportedProblem)  # one line a kernel: keep all
        # a heading and its first line
        said = "; ".join(lines) if every else " ".join(lines[: 1 + lines[0].endswith(":")])
        # SDPA says only "no available kernel" and gives its reasons as warnings
        told = [str(w.message).split(" (Triggered")[0] for w in self._said] if "No available kernel" in lines[0] else []
        self.reason = "; ".join([f"{type(error).__name__}: {said}", *told])[:600]
        return True
