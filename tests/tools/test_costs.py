"""The simulator counts as many requests as the compiler makes instructions."""

import json

import pytest

from tools.proof import costs


@pytest.mark.parametrize("case", costs.CASES, ids=lambda case: case.name)
def test_requests_are_the_compilers_instructions_times_warps(case):
    counted, made = costs.simulated(case), costs.compiled(case)
    for what, instructions in made.items():
        assert costs.agrees(counted[what], instructions, case.masked)
        assert counted[what.replace("requests", "sectors")] >= counted[what]


def test_the_counts_are_written_for_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "CASES", costs.CASES[:1])
    assert costs.main(["--json", str(tmp_path / "counts.json")]) == 0
    counts = json.loads((tmp_path / "counts.json").read_text())["contiguous float32"]
    assert counts == {"load requests": 32, "load sectors": 512, "store requests": 32, "store sectors": 512}
