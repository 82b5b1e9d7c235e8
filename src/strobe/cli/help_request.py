"""Whether this process is `strobe` with nothing to do but to print its help: that needs no torch, whose import takes
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

PROGRAMS = ("strobe", "strobe.exe", "strobe-script.py")
ASKS = ("-h", "--help", "--version")


def alone(argv: Sequence[str], started: Sequence[str]) -> bool:
    """argv: sys.argv while strobe is imported; started: sys.orig_argv. The parser ends such a process, by the help or
    by a mistake before it.

    >>> alone(["/usr/bin/strobe", "bench", "--help"], []), alone(["-m", "--help"], ["python", "-m", "strobe", "--help"])
    (True, True)
    >>> alone(["train.py", "--help"], []), alone(["/usr/bin/strobe", "env"], [])
    (False, False)
    >>> alone(["-m", "-h"], ["python", "-m", "pytest", "-h"])
    False
    """
    program, words = argv[:1], list(argv[1:])
    if program == ["-m"]:
        if "-m" not in started or list(started[started.index("-m") + 1 :])[:1] != ["strobe"]:
            return False
    elif not program or PurePath(program[0]).name not in PROGRAMS:
        return False
    options = words[: words.index("--")] if "--" in words else words
    return not words or any(word in ASKS for word in options)
