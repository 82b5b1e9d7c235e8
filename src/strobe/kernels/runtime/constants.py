"""What compiled kernels hold as constants, and what these answer by.

Triton keeps compiled kernels on disk, under a key made of the text of their functions and of their constants. While it
reads a kernel it asks a form for properties as well, whose text is in no key: after an upgrade that changed those
alone, a machine would go on running what the version before compiled. So each form holds a hash of the package's own
code.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
LAUNCHING = {"first_call_overlap.py", "keys.py", "launcher.py"}  # no form asks these


@lru_cache
def host_code() -> str:
    """A hash of the code that forms answer by: of kernels, and of what they know of masks and problems. It takes 5
    ms."""
    kernels = [file for file in sorted((PACKAGE / "kernels").rglob("*.py")) if file.name not in LAUNCHING]
    files = [*kernels, PACKAGE / "problem" / "mask.py", PACKAGE / "problem" / "problem.py"]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


@dataclass(frozen=True)
class Constants:
    """The base of forms. They have no __str__ of their own, since Triton tells kernels apart by it."""

    host: str = field(default_factory=host_code, kw_only=True)
