"""Another version of strobe as a rival in the same process: `--rivals @HEAD~1`, or `@FOLDER` with a package `strobe`.

A process can import a package name only once. So the other version is copied, and each word `strobe` in its source is
renamed. It then has its own imports and torch ops, and Triton's caches distinguish its kernels from ours.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import fields
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path

import torch

from ..errors import InvalidProblem
from .cases import Case, Inputs

MARK = "@"
_PACKAGE = Path(__file__).resolve().parents[1]


class Earlier:
    """A rival that runs the code of a git revision of this source tree, or of a folder.

    Raises InvalidProblem if `where` is neither.
    """

    def __init__(self, where: str):
        folder = Path(where) / "strobe"
        if where and (folder / "__init__.py").is_file():
            self.name, self._package = (
                MARK + where,
                partial(renamed, folder, hashlib.sha1(str(folder.resolve()).encode()).hexdigest()[:9]),
            )
        elif where and (said := _git("rev-parse", "--verify", "--short", "--end-of-options", where + "^{commit}")):
            commit = said.decode().strip()
            self.name, self._package = MARK + commit, partial(at_revision, commit)
        else:
            expected = "a git revision of the tree that strobe runs from, or a folder that holds a package strobe"
            raise InvalidProblem(
                "rivals", repr(MARK + where), expected, "such as @HEAD~1 in a clone, or @../before/src"
            )

    def why_not(self, case: Case, device: torch.device) -> str | None:
        return None

    def prepare(self, case: Case, x: Inputs):
        cases, rivals = (import_module(f"{self._package()}.bench.{name}") for name in ("cases", "rivals"))
        # an older Case has fewer fields; x already reflects the others
        known = {field.name for field in fields(cases.Case)}
        return rivals.Strobe().prepare(
            cases.Case(**{name: value for name, value in vars(case).items() if name in known}), x
        )


@lru_cache
def at_revision(commit: str) -> str:
    """Import the code at `commit` under a new package name; returns the name."""
    files = io.BytesIO(_git("archive", "--format=zip", commit, "src/strobe") or b"")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(files) as archive:
        archive.extractall(folder)
        return renamed(Path(folder) / "src" / "strobe", commit)


@lru_cache
def renamed(folder: Path, tag: str) -> str:
    """Copy `folder` to a new package and import it; returns the package's name. The files are deleted at exit, because
    kernels' sources are read from them.
    """
    name = f"strobe_at_{tag}"
    home = Path(tempfile.mkdtemp(prefix="strobe_")) / name
    atexit.register(shutil.rmtree, home.parent, ignore_errors=True)
    shutil.copytree(folder, home, ignore=shutil.ignore_patterns("__pycache__"))
    for file in home.rglob("*.py"):
        file.write_text(re.sub(r"\bstrobe\b", name, file.read_text(encoding="utf-8")), encoding="utf-8")
    sys.path.append(str(home.parent))
    import_module(name)
    return name


def _git(*arguments: str) -> bytes | None:
    """The output of git in the source tree of this package; None without a source tree or git, or if git fails."""
    top = _PACKAGE.parents[1]
    if _PACKAGE.parent.name != "src" or not (top / ".git").exists():
        return None
    try:
        return subprocess.run(["git", *arguments], cwd=top, capture_output=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
