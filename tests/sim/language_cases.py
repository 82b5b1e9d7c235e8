"""Kernels whose values, or whose refusal, Triton's compiler decides: constants, arguments, tuples, branches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from triton import language as tl

SIZE: tl.constexpr = tl.constexpr(4)
PLAIN = 5
NOTHING = None


class Case(NamedTuple):
    kernel: Any
    expected: tuple  # the first elements of `out`, float32, NaN where nothing is written
    arguments: tuple


ACCEPTED: list[Case] = []
REFUSED: list[Case] = []
LENIENT: list[Case] = []


def gives(*expected: float, to: tuple = ()) -> Callable[[Any], Any]:
    """The kernel, called with (out, *to), compiles and writes `expected`."""
    return _listed(ACCEPTED, expected, to)


def refused(*to: Any) -> Callable[[Any], Any]:
    """Neither the compiler nor the simulator takes the kernel."""
    return _listed(REFUSED, (), to)


def lenient(*expected: float, to: tuple = ()) -> Callable[[Any], Any]:
    """The compiler refuses the kernel, the simulator runs it."""
    return _listed(LENIENT, expected, to)


def _listed(table: list[Case], expected: tuple, arguments: tuple) -> Callable[[Any], Any]:
    def add(kernel: Any) -> Any:
        table.append(Case(kernel, expected, arguments))
        return kernel

    return add


@triton.jit
def put(out, i, value):
    tl.store(out + i, value)


# ---------------------------------------------------------------- constants


@gives(14, 1, 2, 8)
@triton.jit
def constants_fold(out):
    folded: tl.constexpr = 2 * SIZE + 6
    put(out, 0, folded)
    put(out, 1, 7 // SIZE)
    put(out, 2, tl.cdiv(7, SIZE))
    put(out, 3, tl.constexpr(2) << 2)


@gives(4)
@triton.jit
def a_constexpr_global(out):
    put(out, 0, SIZE)


@refused()
@triton.jit
def a_plain_global(out):
    put(out, 0, PLAIN)


@gives(1)
@triton.jit
def a_global_that_is_none(out):
    put(out, 0, 1 if NOTHING is None else 0)


@refused()
@triton.jit
def an_unknown_name(out):
    put(out, 0, nobody)  # noqa: F821


@gives(1)
@triton.jit
def an_unknown_name_in_a_static_branch(out):
    if SIZE == 4:
        put(out, 0, 1)
    else:
        put(out, 0, nobody)  # noqa: F821


@gives(1)
@triton.jit
def an_unsupported_statement_in_a_static_branch(out):
    if SIZE == 4:
        put(out, 0, 1)
    else:
        raise ValueError("never compiled")


@refused()
@triton.jit
def an_unsupported_statement(out):
    try:
        put(out, 0, 1)
    finally:
        put(out, 1, 1)


@gives(3, to=(3,))
@triton.jit
def static_assertions_hold(out, n: tl.constexpr):
    """A docstring."""
    tl.static_assert(n == 3, f"n is {n}, expected 3")
    put(out, 0, n)


@refused(4)
@triton.jit
def a_static_assertion_fails(out, n: tl.constexpr):
    tl.static_assert(n == 3, f"n is {n}, expected 3")


@refused(3)
@triton.jit
def a_static_assertion_of_a_tensor(out, n):
    tl.static_assert(n == 3)


@gives(2, 3, to=("wide", None))
@triton.jit
def strings_and_none_are_constants(out, how: tl.constexpr, nothing):
    if how == "wide":
        put(out, 0, 2)
    if nothing is None:
        put(out, 1, 3)


# ---------------------------------------------------------------- arguments


@gives(0, 1, 1, to=(1, 2, 3))
@triton.jit
def one_is_specialised(out, a, b, c):
    """A tensor has a dtype, a constant has none."""
    put(out, 0, hasattr(a, "dtype"))
    put(out, 1, hasattr(b, "dtype"))
    put(out, 2, hasattr(c, "dtype"))


@gives(1, to=(1,))
@triton.jit(do_not_specialize=["a"])
def one_is_not_specialised(out, a):
    put(out, 0, hasattr(a, "dtype"))


@gives(32, 64, 64, 1, 32, 8, to=(5, 2**31, -(2**40), 2**63 + 5, 1.5, True))
@triton.jit
def types_of_numbers(out, a, b, c, d, e, f):
    put(out, 0, a.dtype.primitive_bitwidth)
    put(out, 1, b.dtype.primitive_bitwidth)
    put(out, 2, c.dtype.primitive_bitwidth)
    put(out, 3, d.dtype.is_int_unsigned())
    put(out, 4, e.dtype.primitive_bitwidth)
    put(out, 5, 8 * f.dtype.primitive_bitwidth)


@gives(64, 7, 16, to=(7, 2.5))
@triton.jit
def annotated_numbers(out, a: tl.int64, b: tl.float16):
    put(out, 0, a.dtype.primitive_bitwidth)
    put(out, 1, a)
    put(out, 2, b.dtype.primitive_bitwidth)


@gives(1, 1, to=(0.1, 2**40 + 3))
@triton.jit
def values_of_numbers(out, a, b):
    put(out, 0, a == 0.1)  # both are float32
    put(out, 1, (b - 3) // 1099511627776)


@gives(7, 9)
@triton.jit
def defaults_and_keywords(out, a=3, b: tl.constexpr = 4):
    put(out, 0, a + b)
    put(out, 1, weighted(1, weight=2, offset=7))


@triton.jit
def weighted(x, offset=5, weight: tl.constexpr = 1):
    return x * weight + offset


class Pair(NamedTuple):
    first: Any
    second: Any


@gives(3, 5, 1, 7, to=(Pair(3, 5), (None, (7, 2.0))))
@triton.jit
def tuples_as_arguments(out, pair, nested):
    put(out, 0, pair.first)
    put(out, 1, pair[1])
    put(out, 2, nested[0] is None)
    number, _ = nested[1]
    put(out, 3, number)


@gives(2, 4, to=((torch.tensor([2.0, 4.0]), 1),))
@triton.jit
def tensors_in_a_tuple(out, held):
    x, stride = held
    put(out, 0, tl.load(x))
    put(out, 1, tl.load(x + stride))


# ---------------------------------------------------------------- tuples


@gives(2, 1, 3, 6)
@triton.jit
def tuples(out):
    a, b = 1, 2
    a, b = b, a
    put(out, 0, a)
    put(out, 1, b)
    both = (a + b, (a * b, a * 3))
    put(out, 2, both[0])
    put(out, 3, both[1][1])


@gives(3, 2, 4, 6)
@triton.jit
def comprehensions_and_lengths(out):
    values = (1, 2, 3)
    doubled = [2 * v for v in values]
    put(out, 0, len(doubled))
    for i in tl.static_range(3):
        put(out, i + 1, doubled[i])


@refused()
@triton.jit
def a_comprehension_over_a_range(out):
    values = [2 * v for v in range(3)]
    put(out, 0, values[0])


@gives(6, 24)
@triton.jit
def starred_arguments(out):
    pair = (2, 3)
    put(out, 0, product(*pair))
    put(out, 1, product(*pair, 4))


@triton.jit
def product(a, b, c=1):
    return a * b * c


@gives(5, 6, 11)
@triton.jit
def functions_return_tuples_and_constants(out):
    low, high = bounds(5)
    put(out, 0, low)
    put(out, 1, high)
    put(out, 2, constant() + 1)


@triton.jit
def bounds(x):
    return x, x + 1


@triton.jit
def constant():
    return 10


@gives(1, 3)
@triton.jit
def constants_returned_are_tensors(out):
    put(out, 0, hasattr(constant(), "dtype"))
    put(out, 1, slices())


@triton.jit
def slices():
    values = (1, 2, 3, 4)
    return values[1:3][1]


@refused()
@triton.jit
def none_is_no_result(out):
    put(out, 0, gives_none() is None)


@triton.jit
def gives_none():
    return None


@gives(3, 7)
@triton.jit
def named_tuples_are_made_inside(out):
    pair = Pair(3, 7)
    put(out, 0, pair.first)
    put(out, 1, pair.second)


# ---------------------------------------------------------------- branches


@gives(1, 5, to=(3,))
@triton.jit
def branches(out, n):
    if n > 2:
        value = 1
    elif n > 1:
        value = 2
    else:
        value = 3
    put(out, 0, value)
    put(out, 1, 5 if n == 3 else 6)


@gives(8, to=(True,))
@triton.jit
def assigned_in_static_branches_only(out, wide: tl.constexpr):
    if wide:
        width = 8
    if wide:
        put(out, 0, width)


@gives(1, 0, 1, 0, 1, to=(3,))
@triton.jit
def logic(out, n):
    put(out, 0, n > 2 and n < 4)
    put(out, 1, n > 3 or n < 3)
    put(out, 2, not (n == 4))  # noqa: SIM201
    put(out, 3, SIZE is None)
    put(out, 4, n is not None)


@gives(1)
@triton.jit
def constants_short_circuit(out):
    if SIZE == 4 or nobody > 2:  # noqa: F821
        put(out, 0, 1)


@refused(3)
@triton.jit
def membership(out, n):
    put(out, 0, n in (1, 2, 3))


@refused(3)
@triton.jit
def chained_comparison(out, n):
    put(out, 0, 1 < n < 4)


@refused()
@triton.jit
def a_branch_on_a_whole_tensor(out):
    if tl.arange(0, 4) >= 0:
        put(out, 0, 1)


@refused()
@triton.jit
def a_branch_on_a_string(out):
    if "yes":
        put(out, 0, 1)


@gives(1, to=(3,))
@triton.jit
def early_return(out, n):
    put(out, 0, 1)
    if n == 3:
        return
    put(out, 1, 2)


@gives(7, 9, to=(3,))
@triton.jit
def early_return_of_a_function(out, n):
    put(out, 0, either(n, 7, 8))
    put(out, 1, either(n + 1, 8, 9))


@triton.jit
def either(n, a, b):
    if n == 3:
        return a
    return b
