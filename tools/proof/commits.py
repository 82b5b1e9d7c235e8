"""Name the commits of rows that were measured on files without git's history, or with another's.

    python -m tools.proof.commits results/distributed.jsonl

A row's `source_tree` is git's hash of src/strobe, so the commit is found and not chosen: the newest one with that tree.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 2000  # commits that are looked at


def commit_of(source_tree: str) -> str | None:
    """The newest commit whose src/strobe has this hash, or its first digits; None if there is none."""
    for commit in _git("log", "--format=%h", f"-{MOST}").split():
        if _git("rev-parse", f"{commit}:src/strobe").startswith(source_tree):
            return commit
    return None


def named(line: str, known: dict[str, str | None]) -> str:
    """A row with the commit of its tree, if it names none or one of another tree. known: commits by tree."""
    row = json.loads(line)
    tree = row.get("source_tree")
    if not tree or (row["commit"] and _git("rev-parse", f"{row['commit']}:src/strobe").startswith(tree)):
        return line
    if tree not in known:
        known[tree] = commit_of(tree)
    return json.dumps(row | {"commit": known[tree]})


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.proof.commits", description="name the commits of rows")
    parser.add_argument("files", type=Path, nargs="+", help="files of rows")
    known: dict[str, str | None] = {}
    for path in parser.parse_args(arguments).files:
        lines = [named(line, known) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
