"""Random functions of a score and of positions against dense attention in float64 that calls the same functions.

Trees are decoded from bytes, which hypothesis draws as one value and shrinks towards leaves. 20 trees share a call:
head n has the score and the mask of tree n. The nightly run has 100,000 trees in parts.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

import strobe
from strobe.testing.mods import Functions, dense

ROWS, KEYS = 9, 11
TREES = 20  # of a call
PARTS, OF_A_PART = 50, 100  # of the nightly run: calls of a part

# ---------------------------------------------------------------- trees from bytes

_INTEGER_LEAVES = ("b", "h", "q", "k", "q", "k", *range(-3, 13))
_INTEGER_UNARY = ("neg", "abs", "invert", "hash", "table")
_INTEGER_NODES = (
    *("add", "sub", "mul", "floordiv", "mod", "min", "max", "bits_and", "bits_or", "bits_xor"),
    *_INTEGER_UNARY,
)
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_SCORE_LEAVES = ("score", "float", "position", "row", "key", "scalar", "grid", "score")
_SCORE_BINARY = ("add", "sub", "mul", "minimum", "maximum")
_SCORE_UNARY = ("tanh", "sin", "abs", "sigmoid", "exp", "gelu", "softplus", "neg", "square", "fifth", "round")


class Reader:
    """Choices from bytes; behind their end the first choice."""

    def __init__(self, data: bytes) -> None:
        self.data = iter(data)

    def choose(self, among):
        return among[next(self.data, 0) % len(among)]

    def integer(self, depth: int = 2):
        if depth == 0 or self.choose((True, False, True)):
            return self.choose(_INTEGER_LEAVES)
        name = self.choose(_INTEGER_NODES)
        count = 1 if name in _INTEGER_UNARY else 2
        return name, *[self.integer(depth - 1) for _ in range(count)]

    def mask(self, depth: int = 2):
        if depth == 0 or self.choose((True, False)):
            return self.choose(_COMPARISONS), self.integer(), self.integer()
        name = self.choose(("and", "or", "xor", "not", "plus", "times"))
        return name, *[self.mask(depth - 1) for _ in range(1 if name == "not" else 2)]

    def score(self, depth: int = 3):
        if depth == 0 or self.choose((True, False, False)):
            name = self.choose(_SCORE_LEAVES)
            if name == "score":
                return name
            if name == "float":
                return name, self.choose(range(-16, 17)) / 8
            return name, self.integer(), *([] if name == "position" else [self.integer()])
        name = self.choose((*_SCORE_BINARY, *_SCORE_UNARY, "where", "where", "power"))
        if name == "power":
            return name, self.score(depth - 1), self.integer()
        if name == "where":
            return name, self.mask(1), self.score(depth - 1), self.score(depth - 1)
        return name, *[self.score(depth - 1) for _ in range(2 if name in _SCORE_BINARY else 1)]


def decoded(data: bytes) -> tuple:
    """(tree of a score, tree of a mask or None)."""
    reader = Reader(data)
    return reader.score(), reader.mask() if reader.choose((False, True, True)) else None


_INTEGER = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: (a % 13) * (b % 7),
    "floordiv": lambda a, b: a // (b % 5 + 1),
    "mod": lambda a, b: a % (b % 5 + 2),
    "min": torch.minimum,
    "max": torch.maximum,
    "bits_and": lambda a, b: a & b,
    "bits_or": lambda a, b: a | b,
    "bits_xor": lambda a, b: a ^ b,
    "neg": lambda a: -a,
    "abs": torch.abs,
    "invert": lambda a: ~a,
    "hash": lambda a: (a.long() * 2654435761).int() % 97,  # wraps around
}
_COMPARE = {name: getattr(torch, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_BOOLEAN = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "not": lambda a: ~a}
_BOOLEAN |= {"plus": lambda a, b: a + b, "times": lambda a, b: a * b}
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
    "fifth": lambda a: torch.tanh(a) ** 5,
    "round": lambda a: torch.round(a * 2),
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
    if name == "power":
        return torch.tanh(_score(parts[0], score, at, held)) ** (_integer(parts[1], at, held) % 5)
    return _SCORE[name](*(_score(part, score, at, held) for part in parts))


def _compare(trees: list) -> None:
    """Head n has the score and the mask of trees[n], so that one trace and one call serve all of them."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, up = (
        torch.randn(2, length, len(trees), width, generator=generator, dtype=torch.float64)
        for length, width in ((ROWS, 4), (KEYS, 4), (KEYS, 3), (ROWS, 3))
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()
    functions = _of_heads(trees, Captured())
    found = strobe.attention(q, k, v, score_mod=functions.score, mask=strobe.mask_mod(functions.mask))
    exact, _ = dense(q, k, v, functions)
    errors = (found - exact).abs().amax((0, 1, 3))
    assert errors.max() < 1e-10, f"tree {int(errors.argmax())}: {trees[int(errors.argmax())]}"
    leaves = [q, k, v, *functions.leaves]
    results = [torch.autograd.grad(one, leaves, up, allow_unused=True) for one in (found, exact)]
    for name, got, want in zip(("q", "k", "v", "row", "key", "scalar", "grid"), *results):
        if want is None:
            assert got is None or got.abs().max() == 0, name
        else:
            got = torch.zeros_like(want) if got is None else got
            assert (got - want).abs().max() < 1e-9 * (1 + want.abs().max()), name


def _of_heads(trees: list, held: Captured) -> Functions:
    """Functions of many trees, chosen by the head."""

    def score_mod(score, b, h, q, k):
        at, total = {"b": b, "h": h, "q": q, "k": k}, score
        for head, (tree, _) in enumerate(trees):
            total = torch.where(h == head, _score(tree, score, at, held), total)
        return total

    def mask_mod(b, h, q, k):
        at, total = {"b": b, "h": h, "q": q, "k": k}, h >= 0
        for head, (_, tree) in enumerate(trees):
            if tree is not None:
                total = torch.where(h == head, _seen(tree, at, held), total)
        return total

    return Functions(score_mod, mask_mod, held.leaves)


BYTES = 40  # of a tree
# One value for all trees: of a list of values hypothesis repeats parts, and of 2,000 trees 350 were different.
DRAWN = st.binary(min_size=TREES * BYTES, max_size=TREES * BYTES).map(
    lambda data: [data[start : start + BYTES] for start in range(0, len(data), BYTES)]
)


@settings(max_examples=100, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(DRAWN)
def test_random_functions(drawn):
    """2,000 pairs of a score and a mask."""
    _compare([decoded(data) for data in drawn])


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_more_random_functions(part):
    @seed(part)
    @settings(max_examples=OF_A_PART, deadline=None, database=None)
    @given(DRAWN)
    def compared(drawn):
        _compare([decoded(data) for data in drawn])

    compared()


def test_trees_differ():
    """Of 1,000 trees at least 900: a draw that repeats itself tests less than it says."""
    trees: set = set()

    @settings(max_examples=50, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
    @given(DRAWN)
    def drawn_trees(drawn):
        trees.update(decoded(data) for data in drawn)

    drawn_trees()
    assert len(trees) >= 900


def test_trees_cover_every_operation():
    """Of the 2,000 of each commit: a name that is never drawn would be tested by none."""
    names: set = set()

    def walk(tree) -> None:
        for part in tree if isinstance(tree, tuple) else (tree,):
            walk(part) if isinstance(part, tuple) else names.add(part)

    @settings(max_examples=100, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
    @given(DRAWN)
    def drawn_trees(drawn):
        for data in drawn:
            walk(decoded(data))

    drawn_trees()
    assert names >= {
        *_INTEGER,
        *_COMPARE,
        *_BOOLEAN,
        *_SCORE,
        "table",
        "where",
        "power",
        "row",
        "key",
        "scalar",
        "grid",
        "b",
        "h",
    }
