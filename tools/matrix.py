"""Run `tools/smoke.py` under every Python and the oldest and newest torch, on the CPU, each in its own environment.

    python -m tools.matrix                                    all of PYTHONS and TORCHES that are here
    python -m tools.matrix --python 3.12 --torch 'torch==2.11.*'

torch comes from an index of CPU builds, so that no CUDA library is downloaded. A pair is `skipped` if its Python or a
build of its torch is not available here. Exit code: 1 if a pair fails or none runs, else 0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.release_check import ROOT, ReleaseFault, build, environment, run_installed

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("torch==2.10.*", "torch")  # the oldest that pyproject.toml allows, the newest that the index has
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FOLDER = Path(".matrix")


class Outcome(NamedTuple):
    python: str
    torch: str
    state: str  # "ok", "FAILED" or "skipped"
    words: str


def interpreter(version: str) -> str | None:
    """The path of the Python of this version: on PATH, or pyenv's.

    >>> interpreter("2.0") is None
    True
    """
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for candidate in (shutil.which(f"python{version}"), *map(str, root.glob(f"versions/{version}.*/bin/python"))):
        if candidate and _says(candidate, "import sys; print('%d.%d' % sys.version_info[:2])") == version:
            return candidate
    return None


def attempt(version: str, torch: str, wheel: Path, index: str) -> Outcome:
    """The outcome of one pair."""
    own = interpreter(version)
    if own is None:
        return Outcome(version, torch, "skipped", "this Python is not installed here")
    folder = FOLDER.absolute() / f"{version}-{'oldest' if '=' in torch else 'newest'}"
    try:
        python = environment(folder, own, "--upgrade", "pip")
    except ReleaseFault as fault:
        return Outcome(version, torch, "FAILED", str(fault).splitlines()[-1])
    # without pip's configuration, whose other indexes have CUDA builds
    alone = {name: value for name, value in os.environ.items() if name != "PIP_EXTRA_INDEX_URL"}
    alone["PIP_CONFIG_FILE"] = os.devnull
    only = ("--no-deps", "--only-binary=:all:", "--retries", "1", "--index-url", index)
    found = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-compile", *only, torch],
        capture_output=True, text=True, env=alone,
    )  # fmt: skip
    if found.returncode:
        return Outcome(version, torch, "skipped", "pip finds no CPU build of it")
    try:
        torch_version = _says(str(python), "import importlib.metadata as m; print(m.version('torch'))")
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", wheel, f"torch=={torch_version}"]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            raise ReleaseFault(done.stderr.strip() or "pip failed")
        run_installed(python)
    except ReleaseFault as fault:
        return Outcome(version, torch, "FAILED", str(fault).splitlines()[-1])
    return Outcome(version, torch, "ok", f"torch {torch_version}")


def _says(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.matrix", description="strobe under other Pythons and torches."
    )
    parser.add_argument(
        "--python", action="append", metavar="VERSION", help=f"default {', '.join(PYTHONS)}; repeatable"
    )
    parser.add_argument(
        "--torch", action="append", metavar="REQUIREMENT", help=f"default {', '.join(TORCHES)}; repeatable"
    )
    parser.add_argument("--index", default=CPU_INDEX, metavar="URL", help=f"where torch comes from ({CPU_INDEX})")
    a = parser.parse_args(argv)
    try:
        wheel, _ = build(ROOT, "strobe_attention")
    except ReleaseFault as fault:
        print(fault, file=sys.stderr)
        return 1
    found = []
    for version in a.python or PYTHONS:
        for torch in a.torch or TORCHES:
            outcome = attempt(version, torch, wheel, a.index)
            print(f"Python {version:<5} {torch:<14} {outcome.state:<8} {outcome.words}", flush=True)
            found.append(outcome)
    failed, ran = (sum(outcome.state == state for outcome in found) for state in ("FAILED", "ok"))
    print(f"{ran} passed, {failed} failed, {len(found) - ran - failed} skipped")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
