"""Environment variables for debugging. No other module reads the environment, and no variable changes the meaning of a
result.

`strobe env` prints them. Configuration is always an argument of a call, never an environment variable.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Environment(NamedTuple):
    interpret: bool  # TRITON_INTERPRET: run Triton kernels in Triton's CPU interpreter
    log: str  # STROBE_LOG: level of the logger "strobe"; WARNING by default
    sync: bool  # STROBE_SYNC: synchronize after each launch, so that the call that caused a fault raises it
    commit: str  # STROBE_COMMIT: the commit of source files without git's history, for the rows of `strobe bench`
    cache: str  # TRITON_CACHE_DIR: Triton's compile cache; "" is Triton's default


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "on", "yes", "y")  # the values that Triton takes as true


def read() -> Environment:
    """Read the environment.

    >>> read().interpret in (True, False)
    True
    """
    return Environment(
        interpret=_flag("TRITON_INTERPRET"),
        log=os.environ.get("STROBE_LOG", "WARNING").upper(),
        sync=_flag("STROBE_SYNC"),
        commit=os.environ.get("STROBE_COMMIT", ""),
        cache=os.environ.get("TRITON_CACHE_DIR", ""),
    )


ENV = read()  # read once, at import, so that all calls of a process agree
