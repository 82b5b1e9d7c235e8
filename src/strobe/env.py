"""The only reader of the environment: a few typed switches for debugging. Nothing here changes what a result means.

`strobe env` prints them. Configuration is an argument of the call, never a variable of the environment.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Environment(NamedTuple):
    interpret: bool  # TRITON_INTERPRET: Triton kernels run in Triton's CPU interpreter; true for what Triton takes as true
    log: str  # STROBE_LOG: level of the logger "strobe" (WARNING unless set)
    sync: bool  # STROBE_SYNC: wait after each launch, so that a fault is raised by the call that caused it
    cache: str  # TRITON_CACHE_DIR: where Triton keeps compiled kernels ("" is Triton's own choice)


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "on", "yes", "y")  # as Triton reads its own


def read() -> Environment:
    """
    >>> read().interpret in (True, False)
    True
    """
    return Environment(
        interpret=_flag("TRITON_INTERPRET"),
        log=os.environ.get("STROBE_LOG", "WARNING").upper(),
        sync=_flag("STROBE_SYNC"),
        cache=os.environ.get("TRITON_CACHE_DIR", ""),
    )


ENV = read()  # read once, at import: a switch flipped halfway would make two calls of one process disagree
