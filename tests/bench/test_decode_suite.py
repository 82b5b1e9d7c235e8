"""The decode benchmark: caches are cold in each sample, and a rival that is wrong or cannot run is reported."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from strobe.bench import cold, decode, run

CPU = torch.device("cpu")
OPTIONS = run.Options(CPU, rounds=2, sample_ms=0.0)


SMALL_DECODE = decode.DecodeCase("b2_100", 2, 100, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32)


def test_decode_is_measured_over_cold_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "COLD_BYTES", 100_000)
    assert SMALL_DECODE.copies == 2  # 2 * 2 * 100 * 2 * 16 * 4 = 51,200 bytes each
    seen = []
    plain = decode.interface.attention_decode
    monkeypatch.setattr(
        decode.interface,
        "attention_decode",
        lambda q, cache, **rest: seen.append(cache.k_pages.data_ptr()) or plain(q, cache, **rest),
    )
    row = decode.measure(SMALL_DECODE, decode.pick([], CPU), OPTIONS)
    assert row["kernel"] == "cpu.decode" and row["caches"] == 2 == len(set(seen)) and row["refused"] == {}
    assert row["relative_error"] < 1e-5 and row["ms"] > 0 and row["rivals"]["sdpa"] > 0 and row["versions"] == {}
    assert row["flops"] == 2 * 2 * 4 * 112 * 32 and row["gbps"] > 0  # its 7 pages hold 112
    json.dumps(row)


def test_decode_in_8_bits_has_no_rival_and_a_wrong_rival_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "COLD_BYTES", 1)
    row = decode.measure(replace(SMALL_DECODE, fp8=True), decode.pick([], CPU), OPTIONS)
    assert row["rivals"] == {} and "8 bits" in row["refused"]["sdpa"] and row["ms"] > 0
    right, wrong = decode.RIVALS["cpu"]["sdpa"], lambda rows: lambda: torch.zeros_like(rows[0])
    row = decode.measure(SMALL_DECODE, {"right": right, "wrong": wrong}, OPTIONS)
    assert list(row["rivals"]) == ["right"] and row["refused"]["wrong"].startswith("wrong: differs from right")


def test_the_decode_suite() -> None:
    assert len({case.name for case in decode.SUITE}) == len(decode.SUITE) == 9
    assert all(
        case.copies * 2 * case.batch * case.keys * 8 * 128 * (1 if case.fp8 else 2) >= cold.COLD_BYTES
        for case in decode.SUITE
    )
