"""Captured Python numbers that change: which become arguments of a program, and which stay constants of a trace."""

from __future__ import annotations

import enum
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import strobe
from strobe.mods.cache import TRACES
from strobe.mods.trace import MASK_INPUTS, SCORE_INPUTS
from strobe.testing.mods import Functions, dense

Q = torch.randn(1, 9, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _check(function) -> torch.Tensor:
    """attention with a score function is dense attention with it."""
    found = strobe.attention(Q, Q, Q, score_mod=function)
    torch.testing.assert_close(found, dense(Q, Q, Q, Functions(function))[0])
    return found


def _traces(make, values) -> list[int]:
    """How many traces each value costs."""
    counts = []
    for value in values:
        before = TRACES.traced
        _check(make(value))
        counts.append(TRACES.traced - before)
    return counts


class Level(enum.IntEnum):
    LOW, MIDDLE, HIGH = 3, 5, 7


def _swallows(n):
    def score(s, b, h, q, k):
        try:
            return s * [0, 0, 0, 1, 2, 3, 4, 5, 6][n]
        except Exception:
            return s

    return score


def _of_type(n):
    return lambda s, b, h, q, k: s * (n if type(n) is float else 3.0)


INSPECTED = {
    "isinstance of a union": lambda n: lambda s, b, h, q, k: s * (n if isinstance(n, (int, float)) else n[h]),
    "a key": lambda n: lambda s, b, h, q, k: s * {3: 0.5, 5: 0.25}.get(n, 1.0),
    "a key that is met late": lambda n: lambda s, b, h, q, k: s * {7: 0.5}.get(n, 1.0),
    "a set": lambda n: lambda s, b, h, q, k: s * (2.0 if n in {7, 8} else 1.0),
    "an index": lambda n: lambda s, b, h, q, k: s * [0, 1, 2, 3, 4, 5, 6, 7, 8][n],
    "text": lambda n: lambda s, b, h, q, k: s * len(str(10**n)),
    "format": lambda n: lambda s, b, h, q, k: s * float(f"{n:.1f}"),
    "a comparison": lambda n: lambda s, b, h, q, k: s * (2.0 if n > 6 else 1.0),
    "a minimum": lambda n: lambda s, b, h, q, k: s * min(n, 6),
    "a count": lambda n: lambda s, b, h, q, k: sum([s] * 0 + [s for _ in range(n)]),
    "a square root": lambda n: lambda s, b, h, q, k: s * math.sqrt(n),
    "truth": lambda n: lambda s, b, h, q, k: s * (3.0 if n - 3 else 1.0),
    "an attribute": lambda n: lambda s, b, h, q, k: s * n.bit_length(),
    "an error that is caught": _swallows,
}


@pytest.mark.parametrize("name", INSPECTED)
def test_a_number_whose_value_is_read_stays_a_constant(name):
    """Also where it has the same answer for the first values."""
    for n in (3, 4, 7, 5, 8, 3):
        _check(INSPECTED[name](n))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: lambda s, b, h, q, k: s * (n if isinstance(n, float) else 1.0),
        lambda n: lambda s, b, h, q, k: s * (2.0 if hasattr(n, "dim") else n),
        lambda n: lambda s, b, h, q, k: s * (2.0 if n is None or torch.is_tensor(n) else n),
        lambda n: lambda s, b, h, q, k: s * np.float64(3) if isinstance(n, int) else s * -n,
        lambda n: lambda s, b, h, q, k: torch.where(q > k, s, n),
        lambda n: lambda s, b, h, q, k: s.clamp(-n, n) + n**2 / 3 + 2**n + abs(-n) % 3,
        lambda n: lambda s, b, h, q, k: n - s + n / (s * s + 1) + n // 2 + (s * s) ** n,
        lambda n: lambda s, b, h, q, k: s + SimpleNamespace(n=n).n * k,
        lambda n: lambda s, b, h, q, k: s + torch.where(n > k, n, k * n),
    ],
)
def test_a_number_that_is_computed_with_is_an_argument(make):
    assert _traces(make, (2.5, 3.0, 0.5, 4.25, 1e-3)) == [1, 1, 0, 0, 0]


def test_an_integer_that_is_computed_with_is_an_argument():
    make = lambda n: lambda s, b, h, q, k: s + (q + n) // (n + 1) - (k >> n) + k % (2 * n) + (q & ~n)
    assert _traces(make, (3, 5, 2, 7)) == [1, 1, 0, 0]


def test_numbers_of_numpy_and_of_enumerations_are_read_as_they_are_now():
    make = lambda n: lambda s, b, h, q, k: s * n + n / 4
    for value in (2.5, 3.0, 0.5, 4.25):
        _check(make(np.float64(value)))
    for level in (Level.LOW, Level.MIDDLE, Level.HIGH):
        _check(make(level))
        _check((lambda n: lambda s, b, h, q, k: s * (2 if n is Level.MIDDLE else 3))(level))
        _check((lambda n: lambda s, b, h, q, k: s * len(n.name))(level))


def test_the_type_of_a_number_is_not_that_of_its_stand_in():
    """type(n) cannot be noticed, so the trace with an argument is compared with the first one."""
    for n in (2.0, 4.0, 5.0, 2.0):
        _check(_of_type(n))


def test_two_numbers_that_change_at_once():
    make = lambda a, b_: lambda s, b, h, q, k: s * a + b_ * k
    counts = []
    for pair in ((1.0, 2.0), (2.0, 3.0), (3.0, 1.0), (0.5, 0.25)):
        before = TRACES.traced
        _check(make(*pair))
        counts.append(TRACES.traced - before)
    assert counts == [1, 2, 0, 0]
    mixed = lambda a, b_: lambda s, b, h, q, k: sum([s * a] * 1 + [s for _ in range(b_)])
    for a, n in ((1.0, 1), (2.0, 2), (3.0, 3), (4.0, 3), (5.0, 3)):
        _check(mixed(a, n))


def test_another_constant_may_make_a_function_read_an_argument():
    make = lambda n, count: lambda s, b, h, q, k: s * n if count == 1 else s * sum(range(n)) + count
    for n, count in ((2, 1), (3, 1), (4, 1), (4, 2), (5, 2), (6, 1), (7, 3)):
        _check(make(n, count))


@pytest.mark.parametrize("values", [(46000, 65536, 131072, 3), (3, 65536, 46340, 46341)])
def test_integers_alone_are_computed_as_in_python(values):
    """In 32 bits the square of 65,536 is 0."""
    near = lambda n: lambda s, b, h, q, k: s + (q - k) / (n * n) * 1e9
    for n in values:
        _check(near(n))
    squared = lambda n: lambda s, b, h, q, k: s + (k * (n * n)).float()
    for n in (2, 3, 4):
        _check(squared(n))
    with pytest.raises(strobe.UnsupportedProblem, match=r"holds the integer 4294967296, .* float"):
        strobe.attention(Q, Q, Q, score_mod=squared(65536))


def test_a_result_of_another_type_is_another_trace():
    make = lambda n: lambda s, b, h, q, k: s * (k // 2**n) / 3
    for n in (1, 2, -1, 3, -2):
        _check(make(n))
    with pytest.raises(ZeroDivisionError):
        strobe.attention(Q, Q, Q, score_mod=(lambda n: lambda s, b, h, q, k: s * (1 / n))(0))


def test_a_mask_over_numbers_alone_is_recognized():
    make = lambda n: strobe.mask_mod(lambda b, h, q, k: q - k < 2 * n + 1)
    for n in (1, 2, 3):
        assert str(strobe.explain(Q, Q, Q, mask=make(n)).problem.mask) == "left"
        bound = TRACES.bind(make(n).only_function, MASK_INPUTS)
        assert bound.numbers == ((2 * n + 1,) if n > 1 else ())


def test_a_gradient_reads_the_same_numbers():
    table = torch.linspace(0.1, 1.0, 9, dtype=torch.float64).requires_grad_()
    make = lambda n: lambda s, b, h, q, k: (s * n).tanh() * (1 / n) + table[k] * n**3 + (n * n) * s
    counts = []
    for n in (1.5, 2.0, 2.5):
        before = TRACES.traced
        gradients = []
        for attend in (lambda f: strobe.attention(Q, Q, Q, score_mod=f), lambda f: dense(Q, Q, Q, Functions(f))[0]):
            gradients += torch.autograd.grad(attend(make(n)).square().sum(), table)
        torch.testing.assert_close(*gradients)
        counts.append(TRACES.traced - before)
    assert counts[-1] == 0
    assert len(TRACES.bind(make(3.0), SCORE_INPUTS, True).numbers) == 4
