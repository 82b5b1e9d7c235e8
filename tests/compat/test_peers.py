"""tests/peers/run.py over a checkout made for this: what passes, is refused by name, fails, and is drawn."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.peers import draw, known, outcome

ROOT = Path(__file__).parents[2]
THEIRS = """
import time
import pytest
import torch
import torch.nn.functional as F
from flash_attn import flash_attn_func, flash_attn_never_exported, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input

assert torch.cuda.get_device_capability("cuda") >= (8, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen,d", [(n, 8) for n in range(3, 23)] + [(1 << 20, 64)])
def test_right(seqlen, d, causal, dtype):
    q = torch.randn(1, seqlen, 2, d, device="cuda", dtype=dtype)
    expected = F.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, is_causal=causal).transpose(1, 2)
    atol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(flash_attn_func(q, q, q, causal=causal), expected, atol=atol)


def test_wrong():
    q = torch.randn(1, 5, 2, 8, device="cuda")
    assert torch.allclose(flash_attn_func(q, q, q, causal=True), flash_attn_func(q, q, q))


@pytest.mark.parametrize("slopes", [torch.ones(2), torch.zeros(2)])
def test_unsupported(slopes):
    q = torch.randn(1, 5, 2, 8).cuda()
    flash_attn_with_kvcache(q, q, q, alibi_slopes=slopes)


def test_contradiction():
    q = torch.randn(1, 5, 2, 8, device=torch.device("cuda"))
    flash_attn_func(q, q.repeat(1, 1, 2, 1)[:, :, :3], q)


def test_wrong_type():
    flash_attn_func(1, 2, 3)


def test_unknown_keyword():
    flash_attn_func(torch.ones(1, 2, 1, 8), gqa_parallel=True)


def test_their_own_error():
    raise NotImplementedError("dropout_p: got 1, expected 0; no error of strobe's")


def test_missing_export():
    flash_attn_never_exported()


def test_skipped():
    pytest.skip("their own reason")


def test_endless():
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass


def test_race_condition():
    raise AssertionError("runs on a GPU alone")
"""
EXPECTED = {
    "test_right": {"passed": 5},
    "test_wrong": {"failed": 1},
    "test_unsupported": {"refused": 2},
    "test_contradiction": {"refused": 1},
    "test_wrong_type": {"refused": 1},
    "test_unknown_keyword": {"failed": 1},
    "test_their_own_error": {"failed": 1},
    "test_missing_export": {"failed": 1},
    "test_skipped": {"skipped": 1},
    "test_endless": {"over a limit": 1},
    "test_race_condition": {},
}


def test_outcomes_are_told_apart(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_flash_attn.py").write_text(THEIRS)
    rows, events = tmp_path / "rows.jsonl", tmp_path / "events.jsonl"
    command = [
        sys.executable,
        str(ROOT / "tests/peers/run.py"),
        str(tmp_path),
        "--suite",
        "fa2",
        "--sample",
        "15",
        "--limit",
        "2",
    ]
    done = subprocess.run([*command, "--record", str(rows), "--events", str(events)], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr  # failures that nothing explains
    told = [json.loads(line) for line in events.read_text().splitlines()]
    found = {
        name: dict(Counter(one["outcome"] for one in told if one["test"].endswith("::" + name))) for name in EXPECTED
    }
    assert found == EXPECTED
    recorded = {row["test"].rpartition("::")[2]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert {name: recorded[name]["drawn"] for name in EXPECTED} == {
        name: sum(counts.values()) for name, counts in EXPECTED.items()
    }
    assert (recorded["test_right"]["total"], recorded["test_right"]["under_cap"]) == (
        84,
        80,
    )  # a million rows are over the cap
    assert next(iter(recorded["test_unsupported"]["messages"]["refused"])).startswith(
        "UnsupportedProblem: alibi_slopes: got a tensor"
    )
    assert {"device", "torch", "date", "commit", "seed", "cap"} <= recorded["test_right"].keys()
    assert "flash_attn_never_exported" in done.stdout


def _function():
    def test(seqlen, causal, dtype):
        """Marked below."""

    for mark in (
        pytest.mark.parametrize("causal, dtype", [(False, 1), pytest.param(True, 2, marks=pytest.mark.skip)]),
        pytest.mark.gpu,
    ):
        test = mark(test)
    return pytest.mark.parametrize("seqlen", range(200))(test)


def _drawn(seed: int, share: int = 20) -> list[tuple]:
    function = _function()
    plan = {"seed": seed, "cap": 100 * 100 * 128, "omitted": ()}
    draw.Draw("test", function, plan).apply(function, share)
    kept, mark = function.pytestmark
    assert kept.name == "gpu"
    names = mark.args[0].split(",")
    return [(dict(zip(names, row.values)), [each.name for each in row.marks]) for row in mark.args[1]]


def test_a_seed_draws_the_same_again():
    first = _drawn(1)
    assert len(first) == 20 and first == _drawn(1) and first != _drawn(2)
    assert all(values["seqlen"] <= 100 for values, _ in first)
    assert all(
        (marks == ["skip"]) == values["causal"] and values["dtype"] == 1 + values["causal"] for values, marks in first
    )
    assert len(_drawn(1, 10_000)) == 2 * 101


@pytest.mark.parametrize("module", [draw, outcome])
def test_examples_in_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


def test_every_known_failure_says_why():
    assert all(one.why and len({one.suite, one.test, one.message} - {"*"}) >= 1 for one in known.KNOWN)


@pytest.mark.parametrize("error, explained", [("9.5e-07", True), ("0.002", False)])
def test_a_known_failure_of_rounding_covers_no_larger_one(error, explained):
    message = (
        f"AssertionError: assert {error} <= ((2 * 0.0) + 0.0) [assert (dq - dq_ref).abs().max().item() <= "
        "rtol * (dq_pt - dq_ref)]"
    )
    assert (
        any(one.covers("fa3", "test_flash_attn.py::test_flash_attn_output", message) for one in known.KNOWN)
        == explained
    )


def test_every_recorded_failure_is_explained():
    rows = [json.loads(line) for line in (ROOT / "results/peers.jsonl").read_text().splitlines()]
    failed = [(row["suite"], row["test"], message) for row in rows for message in row["messages"]["failed"]]
    assert failed and [one for one in failed if not any(each.covers(*one) for each in known.KNOWN)] == []
