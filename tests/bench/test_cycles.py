"""Cycles counted unit by unit: the published figures, the Hopper kernels that were measured, and what each remedy is
predicted to buy.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from strobe.bench import predictions
from strobe.bench.cycles import BY_FMA_INSTRUCTIONS, Cycles, backward, cycles, forward, table
from strobe.cli.main import main
from strobe.errors import InvalidProblem
from strobe.kernels.blackwell import kernel as blackwell
from strobe.problem.target import FAKES

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize(
    "step, ctas, tensor, exp, shared",
    [
        (forward(), 1, 1024, 1024, 768),
        (forward(256), 1, 2048, 2048, 1536),
        (backward(), 1, 2560, 1024, 3328),
        (backward(), 2, 2560, 1024, 2688),
    ],
)
def test_published_figures_of_blackwell(step, ctas, tensor, exp, shared):
    found = cycles(step, 100, ctas)
    assert (found.tensor, found.exp, found.shared) == (tensor, exp, shared)
    assert cycles(step, 103, ctas) == found._replace(exp=exp / 2)


def test_operands_of_hopper_are_counted_as_wgmma_reads_them():
    """128 x 128: q once, k twice, v twice; the backward's 64 x 128: 336 KiB, and 32 by TMA."""
    assert cycles(forward(), 90) == Cycles(2048, 1024, 1280, 512, 512)
    found = cycles(backward(64), 90)
    assert (found.tensor, found.exp, found.shared, found.loads) == (2560, 512, 2688, 256)


def _best(direction: str) -> dict[str, float]:
    """The largest share of the peak that a Hopper kernel reached on an H200, for each width without a mask."""
    found: dict[str, float] = {}
    for row in map(json.loads, (RESULTS / f"{direction}.jsonl").read_text().splitlines()):
        width, _, mask = row["case"].partition("_")
        if (row["kernel"] or "").startswith("hopper.") and mask.startswith("dense"):
            found[width] = max(found.get(width, 0.0), row["percent_of_ceiling"] / 100)
    return found


def test_measured_hopper_kernels_bind_where_the_model_says():
    """Tensor cores bind the forward at d128, at d64 the exp unit is as busy, shared memory binds the backward: both
    reach less than the first.
    """
    steps = {"forward d128": forward(), "forward d64": forward(192, 128, 64), "backward d128": backward(64)}
    counted = {name: cycles(step, 90) for name, step in steps.items()}
    assert counted["forward d128"].binds == "tensor" and counted["backward d128"].binds == "shared"
    assert counted["forward d64"].exp == counted["forward d64"].tensor
    reached = {"forward": _best("forward"), "backward": _best("backward")}
    for name, found in counted.items():
        direction, width = name.split()
        assert reached[direction][width] < found.tensor / max(found[:4])
    assert (
        reached["forward"]["d128"] > reached["forward"]["d64"]
        and reached["forward"]["d128"] > reached["backward"]["d128"]
    )


@pytest.mark.parametrize("degree", (3, 5))
def test_the_share_of_exponentials_is_near_the_models_best(degree):
    """At d64 no share leaves less to the busiest unit; at d128 the exp unit has a quarter of its time left, and issue
    slots too.
    """
    plain = max(cycles(forward(128, 128, 64), 100)[:4])
    shares = {n: max(cycles(forward(128, 128, 64), 100, 1, n / 32, degree)[:4]) for n in range(17)}
    assert shares[blackwell.BY_FMA[100, (64, 64), False][degree]] == min(shares.values()) < 0.8 * plain
    found = cycles(forward(), 100, 1, blackwell.BY_FMA[100, (128, 128), False][degree] / 32, degree)
    assert found.exp == 0.75 * found.tensor and found.issue < found.tensor
    assert BY_FMA_INSTRUCTIONS > 0 and all(key[0] == 100 for key in blackwell.BY_FMA)


def test_tables_of_each_target():
    for name in ("H100", "H200", "B200", "B300"):
        rows = table(FAKES[name])
        assert len(rows) >= 6 and all(0 < row.ceiling <= 1 for row in rows)
    with pytest.raises(InvalidProblem, match="one of H100, H200, B200, B300"):
        table(FAKES["A100"])


def test_the_command(capsys, tmp_path):
    assert main(["bench", "roofline", "--target", "B200", "--plot", str(tmp_path / "cycles.svg")]) == 0
    said = capsys.readouterr().out
    assert "have not run on a Blackwell GPU" in said and "forward d128 256x128" in said
    assert "have not run on a Blackwell GPU" not in _shown("H200", capsys)
    assert "</svg>" in (tmp_path / "cycles.svg").read_text()
    assert main(["bench", "roofline", "--target", "Z80"]) == 2 and main(["bench", "cpu", "--target", "B200"]) == 2


def _shown(name: str, capsys) -> str:
    assert main(["bench", "roofline", "--target", name]) == 0
    return capsys.readouterr().out


def once(functions, device, **options):
    """In place of `interleave`: each function runs once."""
    for function in functions.values():
        function()
    return {name: SimpleNamespace(median_ms=1.0) for name in functions}


def test_the_measuring_script_times_the_backward_and_compares_gradients(monkeypatch):
    """On the simulator: timing is replaced by one run of each variant."""
    pytest.importorskip("triton")
    from tools.proof.simulate import on

    monkeypatch.setattr(predictions, "interleave", once)
    with on(FAKES["B200"]) as run:
        rows = list(predictions.measured_backward((64, 64), True, (1, 130, 1), "cpu"))
    assert [row["variant"] for row in rows] == ["as it is", "deterministic", "portable"]
    assert run.launches.count("preprocess_kernel") == 2 and run.reports == []
    # P, dS and the result are rounded to 8 bits by both kernels; another seed, mask or scale would differ by 1
    assert all(row["difference"] < 6 * 2**-8 for row in rows) and rows[2]["difference"] == 0.0
    # seven operands of 16 KiB (S, dP: two each; dV, dK, dQ: one), and dS of 32 KiB written and read; 128 bytes a clock
    assert [row["cycles"] for row in rows] == [1408.0, 1408.0, None]
    assert rows[0]["tflops"] == pytest.approx(5 * 2 * 64 * (131 * 130 / 2) / 1e-3 / 1e12)


@pytest.mark.parametrize("bits", [16, 8])
def test_the_measuring_script_times_the_decode_and_compares_it(bits, monkeypatch):
    """On the simulator: timing is replaced by one run of each variant."""
    pytest.importorskip("triton")
    from tools.proof.simulate import on

    monkeypatch.setattr(predictions, "interleave", once)
    monkeypatch.setattr("strobe.kernels.hopper.launch_decode.zeros_on", lambda device, count: torch.zeros(count).int())
    monkeypatch.setattr("strobe.kernels.portable.launch_decode.zeros_on", lambda device, n: torch.zeros(n).int())
    with on(FAKES["B200"]) as run:
        rows = list(predictions.measured_decode(2, 256, 1, bits, (4, 1), "cpu"))
    assert [row["variant"] for row in rows] == ["as it is", "portable"] and run.reports == []
    assert run.launches.count("decode_kernel") == 2
    # both round P and out to 8 bits; another page, length or scale would differ by 1
    assert 0 < rows[0]["difference"] < 3 * 2**-8 and rows[1]["difference"] == 0.0
    assert rows[0]["gbps"] == pytest.approx(2 * 2 * 256 * 128 * bits / 8 / 1e-3 / 1e9)
    assert rows[0]["ceiling"] == pytest.approx(rows[0]["gbps"] / 8000)


def test_predictions_need_the_machine(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert predictions.main() == 2
    assert "there is none here" in capsys.readouterr().err
