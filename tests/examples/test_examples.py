"""The programs in examples/ run, write what they say they write, and can fail."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

import strobe
from strobe.bench.cases import on_data
from strobe.bench.run import circumstances

EXAMPLES = Path(__file__).parents[2] / "examples"


def _module(name: str, *needs: str) -> ModuleType:
    for needed in needs:
        pytest.importorskip(needed)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train_gpt() -> ModuleType:
    return _module("train_gpt", "rich", "matplotlib")


@pytest.fixture
def generate() -> ModuleType:
    return _module("generate", "rich", "transformers")


def _rows(folder: Path, name: str = "train_gpt") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def _run(module: ModuleType, folder: Path, *more: str) -> int:
    return module.main(["--device", "cpu", "--out", str(folder), *more])


# ---------------------------------------------------------------- train_gpt.py


def test_a_gpt_is_trained_and_its_rows_say_how(train_gpt, tmp_path, capsys):
    folder = tmp_path / "made if need be"
    assert _run(train_gpt, folder, "--steps", "5", "--seeds", "2", "--save-qkv", str(tmp_path / "qkv.pt")) == 0
    (case,) = on_data([], str(tmp_path / "qkv.pt"), backward=False)
    assert (case.batch, case.seqlen, case.heads_q, case.head_dim) == (2 * 8, 64, 2, 32) and case.inputs(
        torch.device("cpu")
    ).q.std() > 0.1
    *runs, verdict = _rows(folder)
    assert [(row["attention"], row["seed"]) for row in runs] == [("sdpa", 0), ("strobe", 0), ("sdpa", 1), ("strobe", 1)]
    for row in (*runs, verdict):
        assert row["case"] == "train_gpt" and row["steps"] == 5 and row["torch"] == torch.__version__
        assert all(row[name] for name in ("device", "date", "python", "threads")) and "commit" in row
    for row in runs:
        assert (
            len(row["losses"]) == 5
            and row["losses"][0] == pytest.approx(math.log(256), abs=0.1)
            and row["losses"][-1] < row["losses"][0]
        )
        assert row["seconds"] > 0
    assert {row["kernel"] for row in runs} == {"torch", "cpu.forward, cpu.backward"}
    assert "tiled" in runs[1]["config"]  # not PyTorch's own kernel, which would be held against itself
    for ours, theirs in zip(runs[1::2], runs[::2]):
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-3)  # the same weights and batches ...
    assert runs[0]["losses"] != runs[2]["losses"]  # ... of each seed its own
    assert verdict["equal"] is True and verdict["seeds"] == 2 and max(verdict["share_of_band"]) < 1
    assert (folder / "train_gpt.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().err
    assert "cpu.forward" in told and "cpu.backward" in told and "equal within the noise of 2 seeds" in told


@pytest.mark.nightly_cases("False")
@pytest.mark.parametrize("causal", (True, False))
def test_attention_that_sees_the_future_is_told_from_pytorchs(train_gpt, tmp_path, monkeypatch, causal):
    """A model this narrow learns to copy the byte it is to guess in 100 steps: its loss is too good."""
    monkeypatch.setitem(train_gpt.SIZES, "cpu", train_gpt.Size(1, 4, 16, 4, 64, 100, 1e-2))
    monkeypatch.setitem(train_gpt.ATTENTIONS, "strobe", lambda q, k, v: strobe.attention(q, k, v, causal=causal))
    assert _run(train_gpt, tmp_path) == (0 if causal else 1)
    verdict = _rows(tmp_path)[-1]
    assert verdict["equal"] is causal
    assert max(verdict["share_of_band"]) < 0.1 if causal else verdict["share_of_band"][-1] > 2


def _curves(seeds: int = 3, steps: int = 40) -> dict[str, torch.Tensor]:
    noise = 0.1 * torch.randn(seeds, steps, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    falling = torch.linspace(5, 3, steps, dtype=torch.float64) + noise
    return {"sdpa": falling, "strobe": falling.clone()}


def test_one_step_beyond_the_band_is_enough(train_gpt):
    curves = _curves()
    assert train_gpt.compare_losses(curves).equal
    curves["strobe"][:, 25] += 1.0
    verdict = train_gpt.compare_losses(curves)
    assert not verdict.equal and verdict.share[:25].max() == 0
    width = 40 // 10
    assert verdict.share[25:29].gt(1).all() and verdict.share[29:].max() < 1e-9, f"a mean over {width} steps"


def test_the_band_is_twice_the_error_of_a_difference_of_means(train_gpt):
    """Three seeds at -1, 0 and 1 about a line: s is 1, and the means may differ by 2 * sqrt(2 / 3)."""
    line = torch.linspace(5, 3, 20, dtype=torch.float64) + torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)[:, None]
    allowed = 2 * math.sqrt(2 / 3)
    torch.testing.assert_close(
        train_gpt.compare_losses({"sdpa": line, "strobe": line}).band, torch.full((20,), allowed, dtype=torch.float64)
    )
    for gap, equal in ((0.999 * allowed, True), (1.001 * allowed, False), (-1.001 * allowed, False)):
        assert train_gpt.compare_losses({"sdpa": line, "strobe": line + gap}).equal is equal


def test_noise_of_strobes_own_makes_the_band_no_wider(train_gpt):
    curves = _curves()
    curves["strobe"] = curves["strobe"] + torch.tensor([-9.0, 0.0, 15.0], dtype=torch.float64)[:, None]
    assert not train_gpt.compare_losses(curves).equal


@pytest.mark.parametrize("wrong", (math.nan, math.inf))
def test_a_loss_that_is_no_number_is_not_equal(train_gpt, tmp_path, wrong):
    curves = _curves()
    curves["strobe"][1, 7] = wrong
    verdict = train_gpt.compare_losses(curves)
    assert not verdict.equal
    train_gpt.picture(verdict, circumstances(torch.device("cpu")), tmp_path / "wrong.png")
    assert None in train_gpt.short(verdict.share)


@pytest.mark.parametrize(
    "flags, words",
    ((("--seeds", "1"), "at least 2"), (("--steps", "0"), "at least 1"), (("--device", "meta"), "cuda or cpu")),
)
def test_flags_that_make_no_sense_are_refused(train_gpt, tmp_path, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        train_gpt.main(["--out", str(tmp_path), *flags])
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_a_gpus_kernels_train_it(train_gpt, tmp_path):
    assert train_gpt.main(["--device", "cuda", "--steps", "20", "--seeds", "2", "--out", str(tmp_path)]) == 0
    family = "hopper" if torch.cuda.get_device_capability() == (9, 0) else "portable"
    assert {row["kernel"] for row in _rows(tmp_path)[:-1]} == {"torch", f"{family}.forward, {family}.backward"}


# ---------------------------------------------------------------- generate.py

NEW, BATCH = (
    24,
    4,
)  # tokens for each prompt; the prompts of the CPU's model, which end before, at and after the edges of pages


def _write(module: ModuleType, folder: Path) -> tuple[int, list[dict]]:
    code = module.main(["--device", "cpu", "--new", str(NEW), "--rounds", "1", "--out", str(folder)])
    return code, _rows(folder, "generate")


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
    _, paged, replayed, verdict = _rows(tmp_path, "generate")
    assert paged["kernel"] == replayed["kernel"] == "portable.decode" and "graph" in replayed["attention"]
    assert (
        verdict["equal"] is True
        and verdict["tokens"] == 2 * 3 * BATCH * NEW
        and verdict["compared"] >= 0.9 * verdict["tokens"]
    )
