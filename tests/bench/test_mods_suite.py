"""The benchmark of custom scores and masks: every case computes what its built-in option does, and counts its pairs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from strobe.bench import mods, run
from strobe.cli.main import main

CPU = torch.device("cpu")
OPTIONS = run.Options(CPU, rounds=1, sample_ms=0.0)


def small(what: str, backward: bool) -> mods.ModsCase:
    return mods.ModsCase("small", what, backward, seqlen=128, heads=2, head_dim=16, dtype=torch.float32)


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("what", mods.MAKERS)
def test_a_case_is_measured(what: str, backward: bool) -> None:
    row = mods.measure(small(what, backward), mods.pick([], CPU), OPTIONS)
    assert row["kernel"] == ("cpu.backward" if backward else "cpu.forward") and row["ms"] > 0
    has_option = what in ("softcap", "documents", "prefix", "window", "padding")
    assert list(row["rivals"]) == (["built_in"] if has_option else []) and len(row["refused"]) == 1 - has_option
    if has_option:
        assert row["relative_error"] < 1e-5 and row["of_built_in"] > 0
    json.dumps(row)


def test_visible_pairs_are_counted() -> None:
    lengths = [8, 24, 16, 16, 24, 8, 16, 16]
    pairs = {
        "alibi": 128 * 129 // 2,
        "documents": sum(n * (n + 1) // 2 for n in lengths),
        "prefix": 128 * 129 // 2 + 32 * 31 // 2,
        "window": 8 * 9 // 2 + 120 * 8,
        "dilated": 128 * 128,  # one block
    }
    for what, count in pairs.items():
        row = mods.measure(small(what, False), {}, OPTIONS)
        assert row["flops"] == count * 2 * 4 * 16
    backward = mods.measure(replace(small("window", True), batch=2), {}, OPTIONS)
    assert backward["flops"] == 2 * pairs["window"] * 2 * 4 * 16 * 2.5


def test_a_contender_that_is_wrong_is_not_timed() -> None:
    wrong = lambda case, functions, x: lambda: torch.zeros_like(x.q)
    rivals = {"built_in": mods.RIVALS["built_in"], "wrong": wrong}
    row = mods.measure(small("softcap", False), rivals, OPTIONS)
    assert list(row["rivals"]) == ["built_in"] and row["refused"]["wrong"].startswith("wrong: differs from built_in")


def test_the_command_lists_the_suite(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "mods", "--list", "--json", "--device", "cpu"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert len(names) == len(set(names)) == 2 * len(mods.MAKERS) - 1
    assert main(["bench", "mods", "--graph", "--device", "cpu"]) == 2
    assert "--graph" in capsys.readouterr().err
