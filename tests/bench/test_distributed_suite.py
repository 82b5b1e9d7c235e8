"""`strobe bench distributed` on a CPU: two gloo processes and small cases."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from strobe.bench.rings import RINGS
from strobe.cli.main import main

ROOT = Path(__file__).parents[2]


def test_the_distributed_suite_lists_its_cases(capsys):
    assert main(["bench", "distributed", "--list", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == ["causal_64", "window_8"]


@pytest.mark.parametrize(
    "flags, named", [(["--case", "none"], "causal_64, window_8"), (["--kernel", "cpu"], "none of them")]
)
def test_the_distributed_suite_refuses_what_it_does_not_know(flags, named, capsys):
    assert main(["bench", "distributed", "--device", "cpu", *flags]) == 2
    assert named in capsys.readouterr().err


def test_the_distributed_suite_refuses_one_of_several_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert main(["bench", "distributed", "--device", "cuda:1", "--list"]) == 2
    assert "--device: got cuda:1, expected cuda or cpu; it runs on all GPUs" in capsys.readouterr().err
    assert main(["bench", "distributed", "--device", "cuda", "--list"]) == 0


@pytest.mark.nightly
def test_the_distributed_suite_measures_each_scheme(capsys):
    assert main(["bench", "distributed", "--device", "cpu", "--case", "window_8", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["contender"] for row in rows] == ["one GPU", "keys", "heads"]
    assert all(row["forward"] > 0 and row["backward"] > 0 and row["why"] is None for row in rows)


@pytest.mark.nightly
def test_causal_attention_is_measured_beside_a_ring(capsys):
    """It runs, or the row says why: ring-flash-attn is an optional package."""
    assert main(["bench", "distributed", "--device", "cpu", "--case", "causal_64", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (ring,) = (row for row in rows if row["contender"] == "zigzag, strobe")
    assert ring["forward"] > 0 if importlib.util.find_spec("ring_flash_attn") else "ring_flash_attn" in ring["why"]


@pytest.mark.parametrize("name", ["distributed", "distributed_two"])
def test_published_figures_stand_in_the_results(name):
    """Each line of the tables of docs/results.md is a case of a file of rows."""
    section = (ROOT / "docs" / "results.md").read_text().split("## Four GPUs")[1].split("\n## ")[0]
    tables = section.split("| case |")[1:]
    lines = [line.strip("| ").split(" | ") for line in tables[name.endswith("two")].splitlines() if "k |" in line]
    rows = [json.loads(line) for line in (ROOT / "results" / f"{name}.jsonl").read_text().splitlines()]
    found = {(row["case"], row["contender"]): row for row in rows if row["forward"]}
    cases = {"causal": "causal", "documents of 2k": "documents_2k", "window of 1,024": "window_1024"}
    for kind, tokens, *cells in lines:
        case = f"causal_{tokens}" if kind == "causal" else cases[kind]
        expected = []
        for contender in ("one GPU", "keys", "heads", *RINGS):
            row = found.get((case, contender))
            expected.append(f"{row['forward']:.0f}, {row['backward']:.0f}" if row else "-")
            if contender in ("keys", "heads"):
                expected.append(f"{row['forward_share']:.2f}, {row['backward_share']:.2f}" if row else "-")
        assert cells == expected
    assert len(lines) == 4
