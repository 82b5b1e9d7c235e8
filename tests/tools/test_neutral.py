"""Machine code of this checkout against rows that were compiled before."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")
from tools.proof import neutral
from tools.proof.budget import Unit
from tools.proof.compile import rows

CHOSEN = ["--family", "portable", "--case", "d64 dense", "--kernel", "delta*", "--target", "sm_90"]


@pytest.mark.nightly_cases("changed1-*")  # compiled MORE times more
@pytest.mark.parametrize(
    "changed, code, said", [({}, 0, "1 kernels alike, 0 differ"), ({"code": "0" * 16}, 1, "code 0000000000000000 -> ")]
)
def test_kernels_are_compared_with_rows(changed, code, said, tmp_path, capsys):
    (row,) = rows(Unit("portable", "d64 dense", "sm_90"), "delta*")
    base = tmp_path / "base.jsonl"
    base.write_text(json.dumps(row | changed) + "\n")
    assert neutral.main(["--rows", str(base), *CHOSEN]) == code
    assert said in capsys.readouterr().out


def test_a_kernel_that_the_base_lacks_differs():
    row = {"family": "portable", "case": "c", "target": "sm_90", "kernel": "k", "code": "1"}
    assert neutral.compare([], [row]) == (["portable.k, c, sm_90: not in the base"], 0)


def test_a_base_is_named_once(tmp_path):
    with pytest.raises(SystemExit):
        neutral.main(CHOSEN)
    with pytest.raises(SystemExit):
        neutral.main(["HEAD", "--rows", str(tmp_path / "rows.jsonl")])
