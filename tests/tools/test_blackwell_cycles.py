"""Cycles of a step of the Blackwell backward, counted from the kernel's operands in the simulator."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from strobe.bench.cycles import backward, cycles
from tools.proof import blackwell_cycles
from tools.proof.blackwell_cycles import PUBLISHED, counted, has_pairs, main, predicted, ways


def test_the_kernels_own_operands_give_the_published_cycles():
    """One CTA and a pair, as FlashAttention-4's paper counts them. This kernel adds dQ from registers."""
    found = {way.name: way.cycles for way in ways()}
    figures = {name: (c.tensor, c.shared, c.exp) for name, c in found.items()}
    own_pair = {"pair, dQ from registers": (2560, 1792, 1024)} if has_pairs() else {}
    assert (
        figures
        == {
            "one CTA, dQ from registers": (2560, 2304, 1024),
            "one CTA": (2560, 3328, 1024),
            "pair": (2560, 2688, 1024),
        }
        | own_pair
    )


@pytest.mark.parametrize("widths", [(64, 64), (192, 128)])
def test_a_step_is_what_the_model_says(widths):
    """Products of one tile, whose columns may come in two parts, and dS alone in shared memory."""
    step = counted(3, *widths).less(counted(2, *widths))
    model = backward(128, 128, *widths, dq_through_shared=False)
    assert sum(p.flops() for p in step.products.elements()) == sum(p.flops() for p in model.products)
    assert step.stored == model.moved_bytes and step.added == 4 * 128 * widths[0]
    assert step.loaded == model.loaded_bytes + 2 * 4 * 128  # LSE and delta


def test_a_prediction_lies_between_the_published_waits():
    found = ways()
    low, high = predicted(found)
    assert PUBLISHED["one CTA"] < low < high < found[0].bound == blackwell_cycles.PEAK
    one = found[1]
    assert one.waiting(PUBLISHED["one CTA"]) == pytest.approx(2250 * 2560 / 1248 - 3328)
    assert cycles(backward(), 100) == one.cycles._replace(loads=cycles(backward(), 100).loads)


def test_the_command_prints_a_table_or_an_object(capsys):
    assert main(["--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    names = [row["way"] for row in printed["rows"]]
    assert names == ["one CTA, dQ from registers", "one CTA", "pair"] + ["pair, dQ from registers"] * has_pairs()
    assert printed["rows"][1]["published_tflops"] == 1248 and len(printed["predicted_tflops"]) == 2
