"""The generation acceptance test of this folder runs, writes the rows it describes, and can fail."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

import strobe


@pytest.fixture
def generate() -> ModuleType:
    for needed in ("rich", "transformers"):
        pytest.importorskip(needed)
    return importlib.import_module("tests.examples.generate_acceptance")


def _rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "generate.jsonl").read_text().splitlines()]


NEW = 24  # tokens for each prompt
BATCH = 4  # prompts of the CPU's model, which end before, at and after the edges of pages


def _write(module: ModuleType, folder: Path) -> tuple[int, list[dict]]:
    code = module.main(["--device", "cpu", "--new", str(NEW), "--rounds", "1", "--out", str(folder)])
    return code, _rows(folder)


def test_a_model_writes_the_same_tokens_over_a_paged_cache(generate, tmp_path, monkeypatch, capsys, recwarn):
    spies = {name: Mock(wraps=getattr(strobe, name)) for name in ("append", "attention_decode", "attention_varlen")}
    for name, spy in spies.items():
        monkeypatch.setattr(strobe, name, spy)
    code, (own, paged, verdict) = _write(generate, tmp_path / "made if need be")
    assert not [
        str(one.message) for one in recwarn if issubclass(one.category, FutureWarning)
    ]  # transformers' deprecations
    assert code == 0 and verdict["equal"] is True and verdict["wrong"] == 0 and verdict["errors"] == []
    runs, layers = 2, verdict["layers"]  # a round to warm up and one that counts
    each = {"append": NEW - 1 + BATCH, "attention_decode": NEW - 1, "attention_varlen": 1}
    assert {name: spy.call_count for name, spy in spies.items()} == {
        name: runs * layers * count for name, count in each.items()
    }
    assert verdict["tokens"] == runs * BATCH * NEW and verdict["compared"] + verdict["ties"] >= 0.9 * verdict["tokens"]
    assert 0 < verdict["rounding"] < 1e-3
    assert (own["kernel"], paged["kernel"]) == ("torch", "cpu.decode") and all(
        row["tokens_per_s"] > 0 < row["prompts_ms"] for row in (own, paged)
    )
    assert all(
        row["case"] == "generate" and row["new"] == NEW and len(row["prompts"]) == BATCH and "commit" in row
        for row in (own, paged, verdict)
    )
    assert "equal True" in capsys.readouterr().err


def test_what_the_model_writes_depends_on_what_it_was_shown(generate):
    """Else equal tokens would say nothing of a cache: no two sequences are alike, and none repeats a few bytes."""
    size = generate.SIZES["cpu"]._replace(prompts=(1, 16, 33), new=NEW)
    model = generate.model_of(size, torch.device("cpu"), torch.float32)
    prompts = [torch.arange(n) for n in size.prompts]
    with torch.no_grad():
        first, _, _ = generate.write(generate.Own(model, prompts, size), NEW)
        prompts[2] = prompts[2].index_fill(0, torch.tensor([3]), 7)  # 29 bytes before the first that is written
        second, _, _ = generate.write(generate.Own(model, prompts, size), NEW)
    assert all(len(set(row)) > NEW / 2 for row in first.tolist())
    assert torch.equal(first[:2], second[:2]) and (first[2] != second[2]).sum() > NEW / 2


def _exchange_tables(self):
    self.table.copy_(self.table.flip(0))


def _exchange_two_full_pages(self):
    self.table[3, 2], self.table[2, 0] = self.table[2, 0].clone(), self.table[3, 2].clone()


def _forget_a_key(self):
    self.stop.sub_(1)  # the next one goes where the prompt's last one lies


def _spoil_a_value(self):
    layer, page = 1, self.table[2, 1]
    self.pools[layer, 1, page, 5, 0] = math.nan


@pytest.mark.parametrize("damage", (_exchange_tables, _exchange_two_full_pages, _forget_a_key, _spoil_a_value))
def test_a_cache_that_is_damaged_after_the_prompts_shows(generate, tmp_path, monkeypatch, damage):
    prefill = generate.Paged.prefill

    def damaged(self):
        token = prefill(self)
        damage(self)
        return token

    monkeypatch.setattr(generate.Paged, "prefill", damaged)
    code, (*_, verdict) = _write(generate, tmp_path)
    assert code == 1 and verdict["equal"] is False
    assert verdict["wrong"] > 0 and verdict["compared"] < verdict["tokens"]


class _Said:
    """A model whose float64 logits are given."""

    implementation = "given"

    def __init__(self, logits: torch.Tensor, error: float):
        self.model, self.left = self, list(logits)
        self.logits = list((logits + error).unbind(1))  # what the model's own attention said

    def __deepcopy__(self, memo):
        return self

    def double(self):
        return self

    def set_attn_implementation(self, name: str) -> None:
        assert name == self.implementation

    def __call__(self, ids, use_cache, logits_to_keep):
        self.logits_of = self.left.pop(0)[None]
        assert ids.shape[1] >= logits_to_keep and not use_cache
        return type("Output", (), {"logits": self.logits_of})


@pytest.mark.parametrize("gap, tie", ((0.039, True), (0.041, False), (math.nan, False)))
def test_a_tie_is_what_four_times_the_models_own_error_allows(generate, gap, tie):
    """Own logits are off by 0.01, so two that are 0.04 apart may change places. Sequence 1 parts at its third token of
    five.
    """
    logits = torch.zeros(2, 5, 256, dtype=torch.float64)
    logits[:, :, 8], logits[:, :, 9] = 3.0, 2.0
    logits[1, 2, 9] = 3.0 - gap
    theirs = torch.full((2, 5), 8)
    ours = theirs.clone()[None]
    ours[0, 1, 2:] = 9  # the third, and all that follow from it
    strobe.last_errors()
    found = generate.compare_tokens(_Said(logits, 0.01), [torch.zeros(3, dtype=torch.long)] * 2, theirs, ours)
    assert (found["tokens"], found["compared"], found["ties"], found["wrong"]) == (10, 5 + 3, int(tie), int(not tie))
    assert found["equal"] is tie and found["close"] == int(tie)


@pytest.mark.parametrize(
    "flags, words", ((("--new", "1"), "at least 2"), (("--rounds", "0"), "at least 1"), (("--device", "meta"), "cuda"))
)
def test_flags_that_write_nothing_are_refused(generate, tmp_path, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        generate.main(["--out", str(tmp_path), *flags])
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_replayed_steps_write_the_same_tokens(generate, tmp_path, monkeypatch):
    monkeypatch.setitem(generate.SIZES, "cuda", generate.Size(3, 8, 2, 64, 16, (1, 16, 33, 250), NEW))
    assert generate.main(["--device", "cuda", "--rounds", "2", "--out", str(tmp_path)]) == 0
    _, paged, replayed, verdict = _rows(tmp_path)
    assert paged["kernel"] == replayed["kernel"] == "portable.decode" and "graph" in replayed["attention"]
    assert (
        verdict["equal"] is True
        and verdict["tokens"] == 2 * 3 * BATCH * NEW
        and verdict["compared"] >= 0.9 * verdict["tokens"]
    )
