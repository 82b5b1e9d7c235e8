"""Emitted functions in Triton's interpreter, and what their text is like."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import strobe
from strobe.mods import emit
from strobe.mods.score import ScoreMod


@pytest.mark.parametrize("module", ("emitted", "emitted_arithmetic"))
def test_emitted_functions_compute_what_torch_does(module):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.mods.{module}"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "agree" in done.stdout, done.stderr[-2000:]


def test_what_depends_on_a_row_alone_is_not_computed_for_each_element():
    rows = torch.zeros(64)
    text = emit.forward_text(ScoreMod(lambda s, b, h, q, k: s + rows[q]).bind(False).text)
    assert "tl.load(aux[0] + (tl.where(q_idx < aux[2], q_idx, aux[2] - 1)).to(tl.int64) * aux[1])" in text


def test_an_added_bias_needs_no_score_in_the_backward():
    table = torch.zeros(4, requires_grad=True)
    text = emit.backward_text(strobe.alibi(table).bind(True).gradient)
    assert " score " not in text.split("\n", 2)[2] and text.endswith("return dscore")
    assert text.count("tl.atomic_add") == 1


def test_equal_functions_have_equal_texts():
    make = lambda table: ScoreMod(lambda s, b, h, q, k: s * 2 + table[h]).bind(True)
    one, other = make(torch.zeros(4)), make(torch.ones(4))
    assert emit.forward_text(one.text) is emit.forward_text(other.text)


def test_a_distance_is_converted_by_rows_and_columns():
    """An integer's conversion costs as much as an exponential."""
    slopes = torch.zeros(4)
    for score in (strobe.alibi(slopes), strobe.score_mod(lambda s, b, h, q, k: s - slopes[h] * (q - k))):
        text = emit.forward_text(score.bind(False).text)
        assert ".to(tl.float32) - (kv_idx).to(tl.float32)" in text
    mixed = emit.forward_text(strobe.score_mod(lambda s, b, h, q, k: s + (q * k - k).float()).bind(False).text)
    assert "(kv_idx).to(tl.float32)" not in mixed


def test_a_division_by_a_power_of_two_is_a_shift():
    """Of negative numbers, too: both round down. Other divisors and floats are divided."""
    table = torch.zeros(64)
    of = lambda index: emit.forward_text(ScoreMod(lambda s, b, h, q, k: s + table[index(q, k)]).bind(False).text)
    assert "q_idx >> 6" in of(lambda q, k: q // 64) and "kv_idx & 7" in of(lambda q, k: k % 8)
    assert " >> 2" in of(lambda q, k: (q - k) // 4) and "//" not in of(lambda q, k: (q - k) // 4)
    assert "q_idx // (6)" in of(lambda q, k: q // 6) and ">>" not in of(lambda q, k: (q.float() // 64).long())


def test_sums_for_gradients_skip_what_changes_nothing():
    """dscore times a finite factor is 0 where dscore is; times a captured value it may be NaN."""
    table, weight = torch.zeros(64, 64, requires_grad=True), torch.zeros(4, requires_grad=True)
    added = emit.backward_text(ScoreMod(lambda s, b, h, q, k: s + table[q // 4, k // 4] * 0.5).bind(True).gradient)
    assert "tl.where(dscore == 0" not in added
    scaled = emit.backward_text(ScoreMod(lambda s, b, h, q, k: s * weight[h]).bind(True).gradient)
    assert "tl.where(dscore == 0, 0.0" in scaled


def test_values_are_computed_before_their_first_use():
    """Sums that read the score come first, and what the function returns last: fewer tiles are alive at a time."""
    rows, weight = torch.zeros(64, requires_grad=True), torch.ones((), requires_grad=True)
    text = emit.backward_text(ScoreMod(lambda s, b, h, q, k: s * weight + rows[q] * 0.5).bind(True).gradient)
    lines = [line.strip() for line in text.split("\n")[2:]]
    first, second = (n for n, line in enumerate(lines) if line.startswith("tl.atomic_add"))
    assert any("dscore * score" in line for line in lines[:first])
    assert any("dscore * (0.5)" in line for line in lines[first:second])
    returned = lines[-1].removeprefix("return ")
    assert lines[-2].startswith(f"{returned} = dscore * ")


def test_sums_and_products_of_bools_are_or_and_and():
    """A kernel adds bools modulo 2. numpy, and so Triton's interpreter, does not."""
    program = lambda function: strobe.mask_mod(function).bind().text
    either = program(lambda b, h, q, k: (q >= k) | (k < 4))
    for sum_of in (torch.add, torch.maximum, lambda x, y: x + y):
        assert program(lambda b, h, q, k, f=sum_of: f(q >= k, k < 4)) == either
    both = program(lambda b, h, q, k: (q >= k) & (k < 4))
    for product in (torch.mul, torch.minimum, lambda x, y: x * y):
        assert program(lambda b, h, q, k, f=product: f(q >= k, k < 4)) == both
    score = strobe.score_mod(lambda s, b, h, q, k: s + ((q >= k) + (k < 4)) * 1.0)
    assert " | " in emit.forward_text(score.bind(False).text)
