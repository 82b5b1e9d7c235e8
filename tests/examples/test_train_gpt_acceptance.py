"""The training acceptance test of this folder runs, writes the rows it describes, and can fail."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

import strobe
from strobe.bench.cases import on_data
from strobe.bench.run import circumstances


@pytest.fixture
def train_gpt() -> ModuleType:
    for needed in ("rich", "matplotlib"):
        pytest.importorskip(needed)
    return importlib.import_module("tests.examples.train_gpt_acceptance")


def _rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "train_gpt.jsonl").read_text().splitlines()]


def _run(module: ModuleType, folder: Path, *more: str) -> int:
    return module.main(["--device", "cpu", "--out", str(folder), *more])


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
