"""attention with Python functions on the portable kernels, in Triton's interpreter (TRITON_INTERPRET=1), against dense
attention in float64 that calls the functions.
"""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.env import ENV
from strobe.testing.mods import MODS, Functions, dense

pytestmark = pytest.mark.skipif(not ENV.interpret, reason="TRITON_INTERPRET is not set")
NAMES = (
    "documents", "speculation_tree", "batchify", "by_head", "alibi", "softcap", "graphormer_edges", "learned",
    "dense_bias", "hidden_by_score", "relative",
)  # fmt: skip


def _tensors(rows=64, keys=64):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).requires_grad_()
    return draw(2, rows, 4, 16), draw(2, keys, 2, 16), draw(2, keys, 2, 16)


def _check(tensors, functions: Functions, builtin=None, **options):
    q, k, v = tensors
    mask = builtin
    if functions.mask is not None:
        mask = strobe.mask_mod(functions.mask) if builtin is None else builtin & strobe.mask_mod(functions.mask)
    options = {"score_mod": functions.score} | options
    found = strobe.attention(q, k, v, mask=mask, kernel="portable", **options)
    exact, _ = dense(q, k, v, functions, builtin=builtin)
    assert (found - exact).abs().max() < 1e-5
    up = torch.randn(exact.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaves = [*tensors, *functions.leaves]
    wanted = torch.autograd.grad(exact, leaves, up)
    for got, want in zip(torch.autograd.grad(found, leaves, up.float()), wanted):
        assert (got - want).abs().max() < 3e-5 * (1 + want.abs().max())


@pytest.mark.parts(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_named_function_is_that_of_the_oracle(name):
    _check(_tensors(), MODS[name].make(torch.float32))


def test_a_function_beside_built_in_masks_and_ready_made_scores():
    slopes = torch.rand(4, requires_grad=True)
    formula = Functions(lambda s, b, h, q, k: s - slopes[h] * (q + 7 - k).abs(), None, (slopes,))
    _check(_tensors(60, 67), formula, strobe.causal(), score_mod=strobe.alibi(slopes))
    _check(_tensors(60, 67), MODS["by_head"].make(torch.float32), strobe.window(20, 9))


def test_a_number_that_changes_reaches_the_kernel():
    q, k, v = (t.detach() for t in _tensors())
    for factor in (0.5, 0.25, 0.75):
        scaled = lambda s, b, h, q, k, f=factor: s * f
        found = strobe.attention(q, k, v, score_mod=scaled, kernel="portable")
        assert (found - dense(q, k, v, Functions(scaled))[0]).abs().max() < 1e-5


def test_what_it_cannot_run_says_why():
    q, k, v = _tensors()
    slopes = torch.rand(4, requires_grad=True)
    with pytest.raises(strobe.UnsupportedProblem, match="batch_invariant"):
        strobe.attention(q, k, v, score_mod=strobe.alibi(slopes), batch_invariant=True, kernel="portable")
