"""The paged benchmark: a mix of prefills and decodes over cold caches, and rivals over packed keys."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from strobe.bench import cold, paged, run
from strobe.cli.main import main

CPU = torch.device("cpu")
OPTIONS = run.Options(CPU, rounds=2, sample_ms=0.0)
SMALL = paged.PagedBenchCase("small", ((2, 40, 5), (1, 16, 1)), heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32)


@pytest.fixture(name="cold", autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "COLD_BYTES", 40_000)


def test_a_mix_is_measured_over_cold_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SMALL.copies == 2  # 2 * 96 * 2 * 16 * 4 = 24,576 bytes each
    seen = set()
    plain = paged.interface.attention_paged
    watch = lambda q, cache, **rest: seen.add(cache.k_pages.data_ptr()) or plain(q, cache, **rest)
    monkeypatch.setattr(paged.interface, "attention_paged", watch)
    row = paged.measure(SMALL, paged.pick([], CPU), OPTIONS)
    assert row["kernel"] == "cpu.paged" and row["caches"] == 2 == len(seen) and row["refused"] == {}
    assert row["relative_error"] < 1e-5 and row["ms"] > 0 and row["rivals"]["varlen"] > 0
    assert row["flops"] == 4 * 4 * 16 * (2 * (5 * 35 + 15) + 16)  # visible pairs of each row
    json.dumps(row)


def test_8_bits_have_no_rival_and_a_wrong_rival_is_refused() -> None:
    row = paged.measure(replace(SMALL, fp8=True), paged.pick([], CPU), OPTIONS)
    assert row["rivals"] == {} and "8 bits" in row["refused"]["varlen"] and row["ms"] > 0
    wrong = lambda rows: lambda: torch.zeros_like(rows.q)
    row = paged.measure(SMALL, {"right": paged.RIVALS["cpu"]["varlen"], "wrong": wrong}, OPTIONS)
    assert list(row["rivals"]) == ["right"] and row["refused"]["wrong"].startswith("wrong: differs from right")


def test_the_command_lists_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paged", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [case.name for case in paged.SUITE]
    assert main(["bench", "paged", "--list", "--case", "mixed"]) == 0
    assert "462848" in capsys.readouterr().out  # keys: 8 * 512 + 56 * 8192
