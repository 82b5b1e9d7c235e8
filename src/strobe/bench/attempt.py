"""Running what may raise anything: a rival's code, a compiler, a device that gave up."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager

from ..errors import UnsupportedProblem


class Attempt(AbstractContextManager):
    """Whatever the block raises becomes `reason`, which the caller reports.

    >>> with Attempt() as attempt:
    ...     raise RuntimeError("out of memory")
    >>> attempt.reason
    'RuntimeError: out of memory'
    """

    reason: str | None = None

    def __enter__(self) -> Attempt:
        self._warnings = warnings.catch_warnings(record=True)
        self._said: list = self._warnings.__enter__()  # type: ignore[assignment]  # a list, since it records
        warnings.simplefilter("always")
        return self

    def __exit__(self, kind, error, trace) -> bool:
        self._warnings.__exit__(kind, error, trace)
        if not isinstance(error, Exception):
            return False
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        every = isinstance(error, UnsupportedProblem)  # what each kernel has against it
        said = "; ".join(lines) if every else " ".join(lines[: 1 + lines[0].endswith(":")])  # a heading with the first line under it
        # SDPA says only "no available kernel" and gives its reasons as warnings
        told = [str(w.message).split(" (Triggered")[0] for w in self._said] if "No available kernel" in lines[0] else []
        self.reason = "; ".join([f"{type(error).__name__}: {said}", *told])[:600]
        return True
