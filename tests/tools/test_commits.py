"""tools/proof/commits: the commit of a row is found by the hash of its source."""

from __future__ import annotations

import json

import pytest

from tools.proof import commits


def test_a_row_gets_the_commit_of_its_tree(tmp_path):
    commit = commits._git("log", "--format=%h", "-1", "--", "src/strobe")
    if not commit:
        pytest.skip("no history")
    tree = commits._git("rev-parse", f"{commit}:src/strobe")[:12]
    rows = [
        {"source_tree": tree, "commit": None},
        {"source_tree": tree, "commit": "abc1234"},
        {"source_tree": "0" * 12, "commit": None},
        {"source_tree": tree, "commit": commit},
        {"case": "older"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    commits.main([str(path)])
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for row in found[:2]:
        assert commits._git("rev-parse", f"{row['commit']}:src/strobe").startswith(tree)
    assert found[2:] == rows[2:]
