"""Random functions of a score and of positions against dense attention in float64 that calls the same functions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import strobe
from strobe.testing.mods import Functions, dense

ROWS, KEYS, HEADS = 9, 11, 2

# ---------------------------------------------------------------- integers: functions of (b, h, q, k)

_integer_leaves = st.sampled_from(("b", "h", "q", "k", "q", "k")) | st.integers(-3, 12)
_integer_nodes = lambda inner: st.one_of(
    st.tuples(st.sampled_from(("add", "sub", "mul", "floordiv", "mod", "min", "max")), inner, inner),
    st.tuples(st.sampled_from(("neg", "abs", "table")), inner),
)
integers = st.recursive(_integer_leaves, _integer_nodes, max_leaves=5)
_comparisons = st.tuples(st.sampled_from(("lt", "le", "gt", "ge", "eq", "ne")), integers, integers)
masks = st.recursive(
    _comparisons,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(("and", "or", "xor")), inner, inner), st.tuples(st.just("not"), inner)
    ),
    max_leaves=4,
)

# ---------------------------------------------------------------- scores

_score_leaves = st.one_of(
    st.just("score"),
    st.floats(-2, 2, width=16).map(lambda x: ("float", x)),
    integers.map(lambda x: ("position", x)),
    st.tuples(st.sampled_from(("row", "key", "scalar", "grid")), integers, integers),
)
_score_nodes = lambda inner: st.one_of(
    st.tuples(st.sampled_from(("add", "sub", "mul", "minimum", "maximum")), inner, inner),
    st.tuples(st.sampled_from(("tanh", "sin", "abs", "sigmoid", "exp", "gelu", "softplus", "neg", "square")), inner),
    st.tuples(st.just("where"), masks, inner, inner),
)
scores = st.recursive(_score_leaves, _score_nodes, max_leaves=5)

_INTEGER = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: (a % 13) * (b % 7),
    "floordiv": lambda a, b: a // (b % 5 + 1),
    "mod": lambda a, b: a % (b % 5 + 2),
    "min": torch.minimum,
    "max": torch.maximum,
    "neg": lambda a: -a,
    "abs": torch.abs,
}
_COMPARE = {name: getattr(torch, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_BOOLEAN = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "not": lambda a: ~a}
_SCORE = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * torch.tanh(b),
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
    "exp": lambda a: torch.exp(torch.tanh(a)),
    "gelu": torch.nn.functional.gelu,
    "softplus": torch.nn.functional.softplus,
    "neg": lambda a: -a,
    "square": lambda a: torch.tanh(a) ** 2,
}


class Captured:
    """What random functions read beside their arguments."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        self.table = torch.randint(-4, 9, (16,), generator=generator, dtype=torch.int32)
        self.row, self.key, self.scalar, self.grid = draw(ROWS), draw(KEYS), draw(), draw(4, 5)

    @property
    def leaves(self):
        return self.row, self.key, self.scalar, self.grid


def _integer(tree, at, held):
    if isinstance(tree, str):
        return at[tree]
    if isinstance(tree, int):
        return at["q"] * 0 + tree
    name, *parts = tree
    values = [_integer(part, at, held) for part in parts]
    return held.table[values[0] % 16] if name == "table" else _INTEGER[name](*values)


def _seen(tree, at, held):
    name, *parts = tree
    if name in _COMPARE:
        return _COMPARE[name](*(_integer(part, at, held) for part in parts))
    return _BOOLEAN[name](*(_seen(part, at, held) for part in parts))


def _score(tree, score, at, held):
    if tree == "score":
        return score
    name, *parts = tree
    if name == "float":
        return score * 0 + parts[0]
    if name == "position":
        return score * 0 + _integer(parts[0], at, held) * 0.125
    if name in ("row", "key", "scalar", "grid"):
        first, second = (_integer(part, at, held) for part in parts)
        if name == "scalar":
            return held.scalar + score * 0
        if name == "grid":
            return held.grid[first % 4, second % 5] + score * 0
        return getattr(held, name)[first % (ROWS if name == "row" else KEYS)] + score * 0
    if name == "where":
        return torch.where(_seen(parts[0], at, held), *(_score(part, score, at, held) for part in parts[1:]))
    return _SCORE[name](*(_score(part, score, at, held) for part in parts))


def _functions(score_tree, mask_tree, held) -> Functions:
    def score_mod(score, b, h, q, k):
        return _score(score_tree, score, {"b": b, "h": h, "q": q, "k": k}, held)

    def mask_mod(b, h, q, k):
        return _seen(mask_tree, {"b": b, "h": h, "q": q, "k": k}, held)

    return Functions(score_mod, None if mask_tree is None else mask_mod, held.leaves)


def _compare(score_tree, mask_tree):
    generator = torch.Generator().manual_seed(2)
    q, k, v, up = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, ROWS, HEADS, 4), (2, KEYS, HEADS, 4), (2, KEYS, HEADS, 3), (2, ROWS, HEADS, 3))
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()
    functions = _functions(score_tree, mask_tree, Captured())
    mask = None if mask_tree is None else strobe.mask_mod(functions.mask)
    found = strobe.attention(q, k, v, score_mod=functions.score, mask=mask)
    exact, _ = dense(q, k, v, functions)
    assert (found - exact).abs().max() < 1e-10
    leaves = [q, k, v, *functions.leaves]
    results = [torch.autograd.grad(one, leaves, up, allow_unused=True) for one in (found, exact)]
    for got, want in zip(*results):
        if want is None:
            assert got is None or got.abs().max() == 0
        else:
            got = torch.zeros_like(want) if got is None else got
            assert (got - want).abs().max() < 1e-9 * (1 + want.abs().max())


@settings(max_examples=200, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(scores, st.none() | masks)
def test_random_functions(score_tree, mask_tree):
    _compare(score_tree, mask_tree)


@pytest.mark.nightly
@settings(max_examples=3000, deadline=None)
@given(scores, st.none() | masks)
def test_more_random_functions(score_tree, mask_tree):
    _compare(score_tree, mask_tree)
