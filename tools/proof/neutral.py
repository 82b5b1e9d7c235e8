"""Check that the kernels of this checkout compile to the same machine code as those of another commit.

    python -m tools.proof.neutral HEAD~3                      every case on every target; takes minutes to an hour
    python -m tools.proof.neutral HEAD~3 --family hopper --kernel 'forward*' --target sm_90
    python -m tools.proof.neutral --rows base.jsonl           compare with rows compiled earlier

Triton 3.6 compiles some portable kernels in one of two ways, from run to run. So a kernel that differs is compiled up
to four times more. Both sides compile without line information (`TRITON_DISABLE_LINE_INFO=1`), because it influences
ptxas's scheduling. Hashes of sources are not compared. The exit code is 1 if a kernel differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from strobe.errors import InvalidProblem

from .record import key, read

MORE = 4
COMPARED = ("code", "registers", "shared_bytes", "spill_store_bytes", "spill_load_bytes", "tensor_columns", "error")
MODULES = ("tools/proof/compile.py", "src/strobe/proof/compile.py")  # paths of the compile tool, newest first


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.proof.neutral", description="Compare compiled kernels with those of another commit."
    )
    parser.add_argument("base", nargs="?", help="a commit of this repository")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="the base's rows, compiled before")
    for name in ("family", "target"):
        parser.add_argument(f"--{name}", action="append", default=[], help="repeatable; all unless given")
    for name in ("case", "kernel"):
        parser.add_argument(f"--{name}", default="*", metavar="PATTERN", help="of names; all unless given")
    a = parser.parse_args(argv)
    if (a.base is None) == (a.rows is None):
        parser.error("name a commit, or rows by --rows FILE")
    chosen = [f"--{name}={value}" for name in ("family", "target") for value in getattr(a, name)]
    chosen += [f"--case={a.case}", f"--kernel={a.kernel}"]
    with tempfile.TemporaryDirectory() as folder:
        base = read(a.rows) if a.rows else list(_rows_of(a.base, chosen, Path(folder)))
        head = list(_compiled(Path.cwd(), chosen, Path(folder) / "head.jsonl"))
        head = [_again(row, base, Path(folder)) for row in head]
    lines, alike = compare(base, head)
    print("\n".join([*lines, f"{alike} kernels alike, {len(lines)} differ"]))
    return 1 if lines else 0


def _again(row: dict, base: Sequence[dict], folder: Path) -> dict:
    """The row, or the row of a later compilation that equals the base."""
    family, case, target, kernel = key(row)
    for n in range(MORE):
        if not compare(base, [row])[0] or all(key(other) != key(row) for other in base):
            break
        chosen = [f"--family={family}", f"--case={case}", f"--target={target}", f"--kernel={kernel}"]
        row = next(one for one in _compiled(Path.cwd(), chosen, folder / f"again{n}.jsonl") if key(one) == key(row))
        (folder / f"again{n}.jsonl").unlink()
    return row


def compare(base: Sequence[dict], head: Sequence[dict]) -> tuple[list[str], int]:
    """A message for each kernel of `head` that differs from `base` or is missing there, and the number of equal
    kernels.

    >>> row = {"family": "cpu", "case": "c", "target": "sm_90", "kernel": "k", "code": "1", "registers": 8}
    >>> compare([row], [row | {"registers": 9}])
    (['cpu.k, c, sm_90: registers 8 -> 9'], 0)
    """
    known, lines, alike = {key(row): row for row in base}, [], 0
    for row in head:
        family, case, target, kernel = key(row)
        before = known.get(key(row))
        if before is None:
            lines.append(f"{family}.{kernel}, {case}, {target}: not in the base")
            continue
        changes = [
            f"{name} {before.get(name)} -> {row.get(name)}" for name in COMPARED if before.get(name) != row.get(name)
        ]
        alike += not changes
        lines += [f"{family}.{kernel}, {case}, {target}: {', '.join(changes)}"] if changes else []
    return lines, alike


def _rows_of(commit: str, chosen: Sequence[str], folder: Path) -> Iterator[dict]:
    tree = folder / "base"
    if subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit]).returncode:
        raise InvalidProblem("base", commit, "a commit of this repository", "git said why above; name another")
    try:
        yield from _compiled(tree, chosen, folder / "base.jsonl")
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)])


def _compiled(tree: Path, chosen: Sequence[str], rows: Path) -> list[dict]:
    """The rows of a checkout's kernels, compiled by the tool of that checkout."""
    file = next(name for name in MODULES if (tree / name).exists())
    module = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, "-m", module, "--results", str(rows), *chosen]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL)
    if not rows.exists():
        raise InvalidProblem(
            "base", str(tree), f"rows of {module}", f"it ended with exit code {done.returncode}; run it there by hand"
        )
    return read(rows)


if __name__ == "__main__":
    raise SystemExit(main())
