"""`python -m ladder --counters`: what ncu prints becomes a row a rung; a stand-in for ncu prints it here."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import torch

from ladder.harness import counters
from ladder.harness.command import main
from strobe.errors import UnsupportedProblem

NCU = """#!{python}
import json, sys
names, *size = json.loads(sys.argv[-1])
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
print("==PROF== Connected to process 1")
print('"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"')
number = 0
for place, name in enumerate(names[:{shown}]):
    for kernel, ms in (("rung_boundary", 0), ("first", 1), ("attend_kernel", 3)):
        for metric in metrics:
            value = ms * 1_000_000 if "duration" in metric else (10 if kernel == "first" else 2) * (place + 1)
            print(f'"{{number}}","1","{{kernel}}","{{metric}}","","{{value:,}}"')
        number += 1
print("==PROF== Disconnected")
sys.exit({status})
"""


@pytest.fixture
def ncu(tmp_path: Path):
    def made(shown: int = 99, status: int = 0) -> str:
        path = tmp_path / "ncu"
        path.write_text(NCU.format(python=sys.executable, shown=shown, status=status))
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
        return str(path)

    return made


def test_bytes_add_up_and_percents_are_weighed_by_time(ncu):
    first, second = counters.facts(["k6", "decode"], 512, 64, False, ncu())
    assert (first["rung"], first["seqlen_k"], first["head_dim"], second["rung"], second["seqlen_q"]) == (
        "k6",
        512,
        64,
        "decode",
        1,
    )
    assert first["model_bytes"] > 0 and first["error"] == "" and first["ms"] is None
    assert (first["counters"]["dram_bytes"], second["counters"]["dram_bytes"]) == (12, 24)
    assert first["counters"]["tensor_percent"] == (10 * 1 + 2 * 3) / 4 and first["counters"]["watched_ms"] == 4
    assert sum(first["counters"]["warps"].values()) == pytest.approx(100, abs=1.5)


def test_the_table_tells_where_warps_waited(ncu):
    (line,) = counters.lines(counters.facts(["k6"], 512, 64, True, ncu()))
    assert len(line) == len(counters.HEADERS) and line[0] == "k6"
    assert str(line[-1]).count(",") == 2 and "selected" not in str(line[-1]).replace("not_selected", "")


def test_what_cannot_be_counted_is_said(ncu, monkeypatch):
    with pytest.raises(UnsupportedProblem, match="watched 1 of 2 rungs"):
        counters.facts(["k5", "k6"], 512, 64, False, ncu(shown=1))
    with pytest.raises(UnsupportedProblem, match="could not watch"):
        counters.facts(["k6"], 512, 64, False, ncu(status=1))
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedProblem, match="put ncu"):
        counters.facts(["k6"], 512, 64, False)


def test_without_a_gpu_it_is_refused(capsys):
    assert main(["--counters", "--device", "cpu"]) == 2
    assert "--counters" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    if counters.shutil.which("ncu") is None or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs ncu and a Hopper GPU")
    assert (
        main(
            ["k6", "--counters", "--seqlen", "512", "--head-dim", "64", "--no-causal", "--json", str(tmp_path / "rows")]
        )
        == 0
    )
    (row,) = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert row["counters"]["dram_bytes"] > 1e6 and 0 < row["counters"]["tensor_percent"] < 100
