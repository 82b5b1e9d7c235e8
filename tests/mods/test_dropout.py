"""Dropout on a CPU: its random words against a second implementation, and attention against dense attention."""

from __future__ import annotations

import math

import pytest
import torch

import strobe
from strobe.mods.dropout import kept, least_word, philox
from strobe.problem.target import FAKES
from strobe.selection.select import select

P = 0.3


def _philox(x: int, y: int, key: int) -> tuple[int, int]:
    """Philox2x32-10 on Python integers."""
    for n in range(10):
        product = 0xD256D193 * x
        x, y = (product >> 32) ^ ((key + n * 0x9E3779B9) % 2**32) ^ y, product % 2**32
    return x, y


def _word(seed: int, b: int, h: int, q: int, k: int) -> int:
    low, high = seed % 2**32, (seed >> 32) % 2**32
    x, y = _philox(*_philox(b, h, low), high)
    key, _ = _philox(y, x, high)
    return _philox((k + x) % 2**32, (q + y) % 2**32, key)[0]


def _tensors(dtype=torch.float64, rows=40, keys=50, heads=(4, 2), batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, rows, heads[0], 16), (batch, keys, heads[1], 16), (batch, keys, heads[1], 8)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def _dense(q, k, v, seed: int, p: float = P, b: int = 0, causal: bool = False):
    """b: the index of the first batch entry."""
    batch, rows, heads, width = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) / math.sqrt(width)
    if causal:
        s = s.masked_fill(~strobe.causal().dense(rows, keys)[:, None], -torch.inf)
    words = [[[[_word(seed, b + n, h, i, j) for j in range(keys)] for i in range(rows)] for h in range(heads)]
             for n in range(batch)]  # fmt: skip
    keep = torch.tensor(words) >= p * 2**32
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1) * keep / (1 - p), v.repeat_interleave(group, 2))


def test_words_are_those_of_philox():
    """The first two are known answers of Random123."""
    at = lambda *words: [torch.tensor(word) for word in words]
    assert [w.item() for w in philox(*at(0, 0, 0))] == [0xFF1DAE59, 0x6CD10DF2]
    assert [w.item() for w in philox(*at(2**32 - 1, 2**32 - 1, 2**32 - 1))] == [0x2C3F628B, 0xAB4FD7AD]
    for seed in (0, 7, 2**62 + 5, -3):
        for b, h, q, k in ((0, 0, 0, 0), (3, 17, 100, 2**20), (1, 0, 5, 4)):
            found = kept(torch.tensor([seed]), 0.5, *at(b, h, q, k))
            assert found.item() == (_word(seed, b, h, q, k) >= 2**31)
    assert least_word(0.25) == 2**30 and kept(torch.tensor(1), 0.0, *at(0, 0, 0, 0)).item()


def test_the_share_and_the_independence_of_what_is_dropped():
    index = torch.arange(256)
    found = kept(torch.tensor(3), P, index[:2, None, None, None], index[:4, None, None], index[:, None], index).float()
    deviation = math.sqrt(P * (1 - P))
    assert abs(found.mean().item() - (1 - P)) < 5 * deviation / math.sqrt(found.numel())
    centred = (found - (1 - P)) / deviation
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(1, 2), centred.roll(1, 3), centred.mT):
        share = (centred * other)[..., ~torch.eye(256, dtype=torch.bool)]  # an element is equal to its own transpose
        assert abs(share.mean().item()) < 5 / math.sqrt(share.numel())


@pytest.mark.parametrize("causal", (False, True))
def test_attention_drops_weights_after_their_sum(causal):
    tensors, seed = _tensors(), 2**40 + 9
    found = strobe.attention(*tensors, causal=causal, dropout_p=P, dropout_seed=seed)
    exact = _dense(*tensors, seed, causal=causal)
    assert (found - exact).abs().max() < 1e-12
    up = torch.randn_like(exact)
    for got, want in zip(torch.autograd.grad(found, tensors, up), torch.autograd.grad(exact, tensors, up)):
        assert (got - want).abs().max() < 1e-11


def test_tiles_drop_what_one_tile_drops():
    """More rows and keys than a tile has, and fewer threads."""
    tensors = [t[:1] for t in _tensors(torch.float32, 300, 310)]
    found = strobe.attention(*tensors, dropout_p=P, dropout_seed=4)
    b, h, i = (torch.arange(n) for n in (1, 4, 310))
    keep = kept(torch.tensor(4), P, b[:, None, None, None], h[:, None, None], i[:300, None], i)
    s = torch.einsum("bihd,bjhd->bhij", tensors[0], tensors[1].repeat_interleave(2, 2)) / 4
    exact = torch.einsum("bhij,bjhd->bihd", s.softmax(-1) * keep / (1 - P), tensors[2].repeat_interleave(2, 2))
    assert torch.allclose(found, exact, atol=2e-6)


def test_gradients_are_finite_differences():
    tensors = [t.detach()[:, :6].requires_grad_() for t in _tensors()]
    table = torch.randn(4, dtype=torch.float64, requires_grad=True)
    run = lambda q, k, v, _: strobe.attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s * table[h], dropout_p=P, dropout_seed=1
    )
    assert torch.autograd.gradcheck(run, (*tensors, table), fast_mode=True)


def test_packed_sequences_have_words_of_their_own():
    offsets = torch.tensor([0, 10, 10, 30], dtype=torch.int32)
    q, k, v = (t[0].detach() for t in _tensors(rows=30, keys=30))
    found = strobe.attention_varlen(q, k, v, cu_seqlens_q=offsets, dropout_p=P, dropout_seed=8)
    parts = [_dense(*(t[None, at] for t in (q, k, v)), 8, b=n)[0] for n, at in ((0, slice(0, 10)), (2, slice(10, 30)))]
    assert (found - torch.cat(parts)).abs().max() < 1e-12


def test_the_seed_decides_and_torchs_generator_gives_one():
    q, k, v = (t.detach() for t in _tensors(torch.float32))
    run = lambda seed=None: strobe.attention(q, k, v, dropout_p=P, dropout_seed=seed)
    assert torch.equal(run(5), run(torch.tensor([5]))) and not torch.equal(run(5), run(6))
    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    assert torch.equal(run(), first) and not torch.equal(first, second)
    assert torch.equal(strobe.attention(q, k, v, dropout_p=0.0, dropout_seed=5), strobe.attention(q, k, v))


def test_a_compiled_call_drops_the_same():
    q, k, v = _tensors(torch.float32)
    run = lambda q, k, v, seed: strobe.attention(q, k, v, dropout_p=P, dropout_seed=seed)
    seed = torch.tensor([5])
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found, exact = compiled(q, k, v, seed), run(q, k, v, seed)
    assert torch.equal(found, exact)
    grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (found, exact)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    drawn = torch.compile(lambda q, k, v: strobe.attention(q, k, v, dropout_p=P), backend="aot_eager", fullgraph=True)
    assert not torch.equal(drawn(q, k, v), drawn(q, k, v))


def test_kernels_without_dropout_are_passed_over():
    q, k, v = (t.half() for t in _tensors(torch.float32))
    problem = strobe.explain(q, k, v, dropout_p=P).problem
    assert "dropout" in str(problem)
    for name in ("H200", "B200", "A100"):
        choice = select(problem, FAKES[name])
        assert (choice.forward.kernel.name, choice.backward.kernel.name) == ("portable.forward", "portable.backward")
    reasons = dict(select(problem, FAKES["H200"]).rejections)
    assert "dropout" in reasons["hopper.forward"] and "dropout" in reasons["hopper.backward"]


@pytest.mark.parametrize(
    ("options", "match"),
    (({"dropout_p": 1.0}, "below 1"), ({"dropout_p": -0.1}, "below 1"), ({"dropout_p": 1 - 1e-8}, "below 1"),
     ({"dropout_p": P, "dropout_seed": 2**64}, "64 bits"),
     ({"dropout_p": P, "dropout_seed": torch.tensor([1, 2])}, "int64"),
     ({"dropout_p": P, "batch_invariant": True}, "batch_inv"),
     ({"dropout_p": P, "dropout_seed": torch.zeros(1, dtype=torch.int64, device="meta")}, "device meta")),
)  # fmt: skip
def test_wrong_arguments_are_named(options, match):
    q, k, v = (t.detach() for t in _tensors(torch.float32))
    with pytest.raises(strobe.InvalidProblem, match=match):
        strobe.attention(q, k, v, **options)
    with pytest.raises(TypeError, match="dropout_seed"):
        strobe.attention(q, k, v, dropout_p=P, dropout_seed=1.5)
