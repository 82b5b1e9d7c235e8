"""Gradients of captured tensors that many scores share, by an index whose text does not say which share it: the GPU
kernels in the simulator, against the CPU kernels.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import strobe
from strobe.mods import emit
from strobe.mods.score import ScoreMod
from strobe.problem.target import FAKES
from tools.proof.simulate import on

ROWS = 130
BOUND = 8 * 2**-11  # P, dP, delta and out are rounded to half precision, and the terms of a sum have both signs


def _gradients(leaf, score_mod, dtype, target=None, **options):
    draw = torch.Generator().manual_seed(5)
    q, k, v, up = (torch.randn(1, ROWS, 2, 64, generator=draw).half().to(dtype) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if target is None:
        out = strobe.attention(*leaves, causal=True, score_mod=score_mod)
        return torch.autograd.grad(out, [*leaves, leaf], up)
    with on(FAKES[target], "random", 3):
        out = strobe.attention(*leaves, causal=True, score_mod=score_mod, **options)
        return torch.autograd.grad(out, [*leaves, leaf], up)


def _judge(leaf, score_mod, target, **options):
    wanted = _gradients(leaf, score_mod, torch.float32)
    for got, exact in zip(_gradients(leaf, score_mod, torch.float16, target, **options), wanted):
        assert ((got.float() - exact).norm() / exact.norm()).item() < BOUND


TABLE = torch.randn(2, 40, generator=torch.Generator().manual_seed(6)).requires_grad_()
NEAR = TABLE.detach()[:, :17].clone().requires_grad_()
FUNCTIONS = {
    "clamped distance": (NEAR, strobe.relative_bias(NEAR)),
    "buckets": (TABLE, lambda s, b, h, q, k: s + TABLE[h, torch.clamp((q - k) // 7, 0, 9) + (q > 100).int()]),
    "clamped query": (TABLE, lambda s, b, h, q, k: s * TABLE[h, torch.clamp(q, 0, 30)]),
    "clamped key": (TABLE, lambda s, b, h, q, k: s * TABLE[h, torch.clamp(k, 70, 90) - 60]),
}
NIGHTLY = [
    pytest.param(name, target, exact, marks=[pytest.mark.nightly] * (name != "clamped distance" or exact))
    for name in FUNCTIONS
    for target in ("A100", "H200")
    for exact in (False, True)
]


@pytest.mark.parametrize(("name", "target", "exact"), NIGHTLY)
def test_equal_indices(name, target, exact):
    _judge(*FUNCTIONS[name], target, deterministic=exact)


@pytest.mark.parametrize("target", ("A100", "H200"))
def test_an_index_that_is_a_number_which_has_changed(target):
    """The number is an argument of the kernel then, and the emitted index a tensor with the shape of q_idx."""
    for place in (3, 2):
        _judge(TABLE, lambda s, b, h, q, k: s * TABLE[h, place], target)  # noqa: B023


def test_indices_are_compared_where_they_may_be_equal():
    table = torch.zeros(4, 64, requires_grad=True)
    of = lambda index: emit.backward_text(ScoreMod(lambda s, b, h, q, k: s + table[h, index(q, k)]).bind(True).gradient)
    for index in (lambda q, k: torch.clamp(q - k, -8, 8), lambda q, k: (q % 8) + k // 20, lambda q, k: q * 0):
        assert "is_equal0" in of(index)
    for index in (lambda q, k: q - k, lambda q, k: k + 3, lambda q, k: q // 16, lambda q, k: 64 - q):
        assert "is_equal0" not in of(index)
