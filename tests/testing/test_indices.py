"""strobe.testing.out_of_range: indices of captured tensors outside of their sizes."""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.testing import OutOfRange, out_of_range
from strobe.testing.mods import MODS

SIZES = (2, 4, 64, 64)


@pytest.mark.parametrize("name", MODS)
def test_the_named_functions_stay_inside(name):
    functions = MODS[name].make(torch.float64)
    mask = None if functions.mask is None else strobe.mask_mod(functions.mask)
    if functions.score is not None:
        assert out_of_range(functions.score, SIZES, mask) == []
    assert mask is None or out_of_range(mask, SIZES) == []


@pytest.mark.parametrize(
    ("index", "found"),
    [
        (lambda b, h, i, j: (h, i), None),
        (lambda b, h, i, j: (h, i - j), None),
        (lambda b, h, i, j: (h, -1 - j), None),
        (lambda b, h, i, j: (h, i + 1), OutOfRange((4, 64), 1, 64, (0, 0, 63, 0))),
        (lambda b, h, i, j: (h, -2 - j), OutOfRange((4, 64), 1, -65, (0, 0, 0, 63))),
        (lambda b, h, i, j: (h + b, j), OutOfRange((4, 64), 0, 4, (1, 3, 0, 0))),
    ],
)
def test_the_first_place_of_an_index_outside_is_named(index, found):
    table = torch.zeros(4, 64)
    score = lambda s, *at: s + table[index(*at)]
    assert out_of_range(score, SIZES) == ([] if found is None else [found])


def test_what_a_mask_hides_does_not_count():
    table = torch.zeros(64)
    score = lambda s, b, h, i, j: s + table[64 - (j - i)]  # inside right of the diagonal
    right = strobe.window(None, None) & ~strobe.causal()
    assert out_of_range(score, SIZES)[0].index == 64 and out_of_range(score, SIZES, right) == []
    short = torch.zeros(32)
    seen = strobe.mask_mod(lambda b, h, i, j: short[j] == 0)
    lengths = strobe.key_lengths(torch.tensor([32, 20], dtype=torch.int32))
    assert out_of_range(seen, SIZES)[0].index == 32 and out_of_range(lengths & seen, SIZES) == []
    with pytest.raises(TypeError, match="built-in masks index nothing"):
        out_of_range(strobe.causal(), SIZES)
