"""Versions, date and commit of a row of results."""

from __future__ import annotations

import platform
import subprocess
from datetime import date
from importlib.metadata import version


def circumstances() -> dict[str, str | None]:
    """Versions, date, and the commit of the repository in the current directory."""
    versions = {"triton": version("triton"), "torch": version("torch"), "python": platform.python_version()}
    return {**versions, "date": date.today().isoformat(), "commit": _commit()}


def _commit() -> str | None:
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip()
