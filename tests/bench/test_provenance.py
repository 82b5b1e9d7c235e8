"""Rows of benchmarks name the source that ran."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from strobe.bench import provenance

REPOSITORY = Path(__file__).parents[2]


def _git(*words: str) -> str:
    asked = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True)
    if asked.returncode:
        pytest.skip(asked.stderr.strip() or "no history")
    return asked.stdout.strip()


def _written(folder: Path) -> Path:
    """Files whose order by name is not git's order, and an executable one."""
    for name in ("a.py", "a/b.py", "a-b/c.py", "a/d/e.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "a" / "b.py").chmod(0o755)
    return folder


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_hash_is_that_of_gits_tree(tmp_path):
    _written(tmp_path)
    expected = ""
    for words in (["init", "-q"], ["add", "."], ["write-tree"]):
        asked = subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        expected = asked.stdout.strip()
    shutil.rmtree(tmp_path / ".git")
    for folder in ("a", "empty"):  # git does not know an empty folder
        (tmp_path / folder / "__pycache__").mkdir(parents=True)
        (tmp_path / folder / "__pycache__" / "b.pyc").write_bytes(b"compiled")
    assert provenance.tree_hash(tmp_path).hex() == expected


def test_a_changed_file_changes_the_hash(tmp_path):
    before = provenance.tree_hash(_written(tmp_path))
    (tmp_path / "a.py").write_text("other")
    assert provenance.tree_hash(tmp_path) != before


@pytest.mark.parametrize("given", ["", "abc1234"])
@pytest.mark.parametrize("top", ["/somewhere/else", None])
def test_the_commit_is_this_trees_alone(top, given, monkeypatch):
    """Of another repository, or without git's history, it is that of the environment."""

    def asked(*_, **__):
        if top is None:
            raise subprocess.CalledProcessError(128, "git")
        return SimpleNamespace(stdout=f"{top}\nfffffff\n")

    monkeypatch.setattr(provenance.subprocess, "run", asked)
    monkeypatch.setattr(provenance, "ENV", provenance.ENV._replace(commit=given))
    provenance.commit.cache_clear()
    assert provenance.commit() == (given or None)
    provenance.commit.cache_clear()


def test_published_rows_ran_the_source_of_their_commit():
    for path in (REPOSITORY / "results").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if isinstance(row, dict) and row.get("source_tree"):
                tree = _git("rev-parse", f"{row['commit']}:src/strobe")
                assert tree.startswith(row["source_tree"]), (path.name, row["commit"])
