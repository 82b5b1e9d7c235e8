"""Gradients of captured tensors with `deterministic=True` on GPUs' kernels, in the simulator against the CPU's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import strobe
from strobe.ops import ordered_gradients
from strobe.problem.target import FAKES
from tools.proof.simulate import on

A100, H200 = FAKES["A100"], FAKES["H200"]
ROWS, KEYS, HEADS = 70, 90, (4, 2)


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CASES = {
    "per head": ((4,), lambda s, b, h, q, k, t: s * (1 + t[h]), {"causal": True}),
    "a scalar, softcap": ((), lambda s, b, h, q, k, t: s * t, {"softcap": 3.0}),
    "per row, window": ((ROWS,), lambda s, b, h, q, k, t: s + t[q] * torch.tanh(s), {"window": (30, 5)}),
    "per key, mask": (
        (KEYS,), lambda s, b, h, q, k, t: s + t[k],
        {"mask": strobe.mask_mod(lambda b, h, q, k: (q + k + h) % 3 != b) & strobe.causal()},
    ),
    "relative, hidden scores": (
        (4, 9), lambda s, b, h, q, k, t: torch.where(k % 7 == 3, -torch.inf, s + t[h, (q - k).clamp(-4, 4) + 4]), {},
    ),
    "sinks, key lengths": (
        (2, 4), lambda s, b, h, q, k, t: s * t[b, h],
        {"sinks": _draw(4, seed=9), "mask": strobe.key_lengths(torch.tensor([90, 33], dtype=torch.int32))},
    ),
}  # fmt: skip


def _gradients(name: str, target=None, seed: int = 0) -> list[torch.Tensor]:
    shape, function, options = CASES[name]
    captured = _draw(*shape, seed=5).requires_grad_()
    score = lambda s, b, h, q, k: function(s, b, h, q, k, captured)
    dtype = torch.float32 if target is None else torch.float16
    shapes = ((2, ROWS, HEADS[0], 16), (2, KEYS, HEADS[1], 16), (2, KEYS, HEADS[1], 16))
    leaves = [_draw(*one, seed=n).half().to(dtype).requires_grad_() for n, one in enumerate(shapes)]
    up = _draw(2, ROWS, HEADS[0], 16, seed=7).half().to(dtype)
    run = lambda: strobe.attention(*leaves, score_mod=score, deterministic=True, **options)
    if target is None:
        return list(torch.autograd.grad(run(), [*leaves, captured], up))
    with on(target, "random", seed):
        return list(torch.autograd.grad(run(), [*leaves, captured], up))


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_the_cpu(name, monkeypatch):
    monkeypatch.setattr(ordered_gradients, "MOST_ELEMENTS", 32 * KEYS * HEADS[0])  # several blocks of rows
    for got, exact in zip(_gradients(name, A100), _gradients(name)):
        assert ((got.float() - exact).norm() / exact.norm()).item() < 4e-3


def test_hopper_and_equal_bits():
    first, second = (_gradients("per head", H200, seed) for seed in (1, 2))
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    for got, exact in zip(first, _gradients("per head")):
        assert ((got.float() - exact).norm() / exact.norm()).item() < 4e-3


def test_refused_by_name():
    """Packed and partial calls, and dropout, have no ordered pass."""
    slopes = torch.rand(4, requires_grad=True)
    q = _draw(1, 20, 4, 16).half()
    options = {"score_mod": lambda s, b, h, q, k: s * slopes[h], "deterministic": True}
    offsets = torch.tensor([0, 5, 20], dtype=torch.int32)
    with on(A100):
        assert strobe.supports(q, q, q, **options)
        for run in (
            lambda: strobe.partial_attention(q, q, q, **options),
            lambda: strobe.attention_varlen(q[0], q[0], q[0], cu_seqlens_q=offsets, **options),
            lambda: strobe.attention(q, q, q, dropout_p=0.5, dropout_seed=1, **options),
        ):
            with pytest.raises(strobe.UnsupportedProblem, match="captured tensors are summed by atomics"):
                run()
