"""A pytest plugin (`-p tests.public_torch`): strobe finds no private name of torch and uses the public fallbacks.

It must be imported before strobe. torch itself keeps its names.
"""

from __future__ import annotations

import pkgutil
import sys

HIDDEN: list[str] = []  # the names that strobe asked for
_resolve = pkgutil.resolve_name


def _without_torch(path: str):
    if sys._getframe(1).f_globals["__name__"] == "strobe.problem.torch_private":  # torch uses this function too
        HIDDEN.append(path)
        raise AttributeError(f"{path} is hidden")
    return _resolve(path)


if "strobe" in sys.modules:
    raise ImportError("strobe has been imported already")
pkgutil.resolve_name = _without_torch
