"""Every operation of the simulator against torch, NumPy or Python's exact numbers, to the bit unless the function is
transcendental.

The same tests run on a GPU where there is one: what holds here is what the hardware does.
"""

from __future__ import annotations

import math
import operator
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
from triton import language as tl

from tests.sim.places import PLACES, any_bits, bits, launch, name, same_bits

pytestmark = pytest.mark.parametrize("place", PLACES)

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
LARGEST_FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
COUNT = 1024


@triton.jit
def elementwise(xs, out, fn: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, fn(*[tl.load(x + i) for x in xs]))


def apply(place, fn, *xs, dtype=None):
    out = torch.zeros(xs[0].shape, dtype=dtype or xs[0].dtype)
    launch(place, elementwise, xs, out, fn, xs[0].numel())
    return out


# ---------------------------------------------------------------- two operands


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def sub(a, b):
    return a - b


@triton.jit
def mul(a, b):
    return a * b


@triton.jit
def div(a, b):
    return a / b


@triton.jit
def floordiv(a, b):
    return a // b


@triton.jit
def mod(a, b):
    return a % b


@triton.jit
def and_(a, b):
    return a & b


@triton.jit
def or_(a, b):
    return a | b


@triton.jit
def xor(a, b):
    return a ^ b


@triton.jit
def lshift(a, b):
    return a << b


@triton.jit
def rshift(a, b):
    return a >> b


@triton.jit
def lt(a, b):
    return a < b


@triton.jit
def le(a, b):
    return a <= b


@triton.jit
def gt(a, b):
    return a > b


@triton.jit
def ge(a, b):
    return a >= b


@triton.jit
def eq(a, b):
    return a == b


@triton.jit
def ne(a, b):
    return a != b


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b)


@triton.jit
def maximum_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum_nan(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


COMPARISONS = {lt: operator.lt, le: operator.le, gt: operator.gt, ge: operator.ge, eq: operator.eq, ne: operator.ne}


def pair(dtype, count=COUNT):
    return any_bits(dtype, count, 1), any_bits(dtype, count, 2)[
        torch.randperm(count, generator=torch.Generator().manual_seed(3))
    ]


def number_of(pick):
    """As `pick`, but a NaN gives way to the other operand."""
    return lambda a, b: torch.where(a.isnan(), b, torch.where(b.isnan(), a, pick(a, b)))


FLOAT_OPERATIONS = {
    add: torch.add, sub: torch.sub, mul: torch.mul, div: torch.div, maximum: number_of(torch.maximum),
    minimum: number_of(torch.minimum),
    maximum_nan: torch.maximum, minimum_nan: torch.minimum,
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("fn", FLOAT_OPERATIONS, ids=name)
def test_float_operations_round_once(fn, dtype, place):
    a, b = pair(dtype)
    run = (
        div_rn if fn is div and dtype == torch.float32 else fn
    )  # `/` of float32 is div.full, which is not correctly rounded
    same_bits(apply(place, run, a, b), FLOAT_OPERATIONS[fn](a, b), sign_of_zero=fn in (add, sub, mul))


@triton.jit
def div_rn(a, b):
    return tl.div_rn(a, b)


def test_float_remainder_has_the_sign_of_the_dividend(place):
    a, b = torch.randn(COUNT) * 10, torch.randn(COUNT).abs() + 0.5
    same_bits(apply(place, mod, a, b), torch.fmod(a, b), sign_of_zero=False)


def _quotient(a, b):
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


INTEGER_OPERATIONS = {
    add: operator.add, sub: operator.sub, mul: operator.mul, and_: operator.and_, or_: operator.or_, xor: operator.xor,
    maximum: max, minimum: min, floordiv: _quotient, mod: lambda a, b: a - b * _quotient(a, b),
    lshift: operator.lshift, rshift: operator.rshift,
}  # fmt: skip


def wrapped(values, dtype):
    """Python's integers in a type of fixed width."""
    size = dtype.itemsize * 8
    return torch.from_numpy(np.array([v % (1 << size) for v in values], np.uint64).astype(f"u{size // 8}")).view(dtype)


@pytest.mark.parametrize("dtype", (*SIGNED, *UNSIGNED), ids=name)
@pytest.mark.parametrize("fn", INTEGER_OPERATIONS, ids=name)
def test_integer_operations_wrap_and_divide_as_in_c(fn, dtype, place):
    a, b = pair(dtype)
    if fn in (floordiv, mod):
        b = torch.from_numpy(np.where(b.numpy() == 0, np.ones_like(b.numpy()), b.numpy()))
        overflows = (
            (a.numpy() == np.iinfo(a.numpy().dtype).min) & (b.numpy() == -1)
            if dtype in SIGNED
            else np.zeros(COUNT, bool)
        )
        b = torch.from_numpy(np.where(overflows, np.ones_like(b.numpy()), b.numpy()))  # undefined in C
    if fn in (lshift, rshift):
        b = (b.view(SIGNED[UNSIGNED.index(dtype)] if dtype in UNSIGNED else dtype) & (dtype.itemsize * 8 - 1)).view(
            dtype
        )
    want = [INTEGER_OPERATIONS[fn](x, y) for x, y in zip(a.tolist(), b.tolist())]
    same_bits(apply(place, fn, a, b), wrapped(want, dtype))


@pytest.mark.parametrize("dtype", (*FLOATS, *SIGNED, *UNSIGNED), ids=name)
@pytest.mark.parametrize("fn", COMPARISONS, ids=name)
def test_comparisons(fn, dtype, place):
    a, b = pair(dtype)
    b[::3] = a[::3]
    want = [COMPARISONS[fn](x, y) for x, y in zip(a.tolist(), b.tolist())]
    same_bits(apply(place, fn, a, b, dtype=torch.bool), torch.tensor(want))


@pytest.mark.parametrize("types, wanted", [
    ((torch.int8, torch.int32), torch.int32), ((torch.uint8, torch.int8), torch.uint8),
    ((torch.int32, torch.float16), torch.float16),
    ((torch.float16, torch.bfloat16), torch.float32), ((torch.bool, torch.int32), torch.int32),
    ((torch.bfloat16, torch.float32), torch.float32),
], ids=str)  # fmt: skip
def test_mixed_types_are_promoted(types, wanted, place):
    a, b = (torch.tensor([1, 0, 1, 3] * 4).to(dtype) for dtype in types)
    same_bits(apply(place, add, a, b, dtype=wanted), a.to(wanted) + b.to(wanted))


@pytest.mark.parametrize("dtype", (torch.int32, torch.uint32, torch.int64, torch.uint64), ids=name)
def test_umulhi_is_the_upper_half_of_the_unsigned_product(dtype, place):
    size = dtype.itemsize * 8
    a, b = pair(dtype)
    want = [(x % (1 << size)) * (y % (1 << size)) >> size for x, y in zip(a.tolist(), b.tolist())]
    same_bits(apply(place, umulhi, a, b), wrapped(want, dtype))


@triton.jit
def umulhi(a, b):
    return tl.umulhi(a, b)


# ---------------------------------------------------------------- one operand


@triton.jit
def neg(a):
    return -a


@triton.jit
def invert(a):
    return ~a


@triton.jit
def absolute(a):
    return tl.abs(a)


@pytest.mark.parametrize("dtype", (*FLOATS, *SIGNED), ids=name)
def test_signs(dtype, place):
    a = any_bits(dtype, COUNT)
    same_bits(apply(place, absolute, a), a.abs())
    same_bits(apply(place, neg, a), -a, sign_of_zero=False)
    if dtype in SIGNED:
        same_bits(apply(place, invert, a), ~a)


@np.errstate(invalid="ignore")
def square_root(x):
    return torch.from_numpy(np.sqrt(x.numpy()))  # torch's own is not correctly rounded everywhere


ROUNDINGS = {tl.floor: torch.floor, tl.ceil: torch.ceil, tl.sqrt_rn: square_root}
TRANSCENDENTAL = {
    tl.exp: torch.exp,
    tl.exp2: torch.exp2,
    tl.log: torch.log,
    tl.log2: torch.log2,
    tl.sin: torch.sin,
    tl.cos: torch.cos,
    tl.sqrt: torch.sqrt,
    tl.rsqrt: torch.rsqrt,
    tl.erf: torch.erf,
    tl.sigmoid: torch.sigmoid,
}


@triton.jit
def called(xs, out, fn: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, fn(tl.load(xs + i)))


@pytest.mark.parametrize("fn", ROUNDINGS, ids=name)
def test_exact_functions(fn, place):
    a, out = any_bits(torch.float32, COUNT), torch.zeros(COUNT)
    flushed = (
        torch.where(a.abs() < torch.finfo(torch.float32).tiny, a.sign() * 0, a) if fn in (tl.floor, tl.ceil) else a
    )
    launch(place, called, a, out, fn, COUNT)
    same_bits(out, ROUNDINGS[fn](flushed), sign_of_zero=fn is tl.sqrt_rn)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=name)
@pytest.mark.parametrize("fn", TRANSCENDENTAL, ids=name)
def test_transcendental_functions(fn, dtype, place):
    corners = torch.tensor([0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 100.0, 1e-3], dtype=dtype)
    a = torch.cat([torch.randn(248, dtype=dtype, generator=torch.Generator().manual_seed(4)) * 3, corners])
    if place == "cuda" and fn in (tl.sin, tl.cos):
        a = torch.where(a.abs() == 100, 1.0, a)  # sin.approx is poor for large arguments
    out = torch.zeros_like(a)
    launch(place, called, a, out, fn, 256)
    loose = 4e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(out, TRANSCENDENTAL[fn](a), rtol=loose, atol=loose, equal_nan=True)


# ---------------------------------------------------------------- three operands


@triton.jit
def fma(a, b, c):
    return tl.fma(a, b, c)


@triton.jit
def where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def clamp(x, low, high):
    return tl.clamp(x, low, high)


@triton.jit
def clamp_nan(x, low, high):
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


def exact_fma(a, b, c):
    return Fraction(a) * Fraction(b) + Fraction(c)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16), ids=name)
def test_fma_rounds_once(dtype, place):
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(COUNT, dtype=torch.float64, generator=generator).to(dtype) for _ in range(2))
    c = (-a.double() * b.double()).to(
        dtype
    )  # nearly all cancels: a product that was rounded leaves nothing of the rest
    c[::2] = torch.randn(COUNT // 2, generator=generator).to(dtype)
    want = [nearest(exact_fma(*xyz), dtype) for xyz in zip(a.tolist(), b.tolist(), c.tolist())]
    same_bits(apply(place, fma, a, b, c), torch.tensor(want, dtype=torch.float64).to(dtype), sign_of_zero=False)


def test_fma_just_below_a_tie(place):
    unit = 2.0**-23
    a, b, c = (torch.full((16,), v) for v in (2.0**-12 * (1 + unit), 2.0**-12 * (1 - unit), 1 + unit))
    same_bits(apply(place, fma, a, b, c), c)  # half a last place less 2**-70, which float64 does not hold


def nearest(value, dtype):
    """The number of `dtype` nearest to an exact rational, ties to even, for results that are normal or at least
    exact."""
    if value == 0:
        return 0.0
    digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11}[dtype]
    least = {torch.float64: -1074, torch.float32: -149, torch.float16: -24}[dtype]
    exponent = math.frexp(float(value))[1] - digits
    unit = max(exponent, least)
    scaled = value / (2**unit) if unit >= 0 else value * 2**-unit
    return float(round(scaled)) * 2.0**unit  # Python rounds a rational's ties to even


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int32), ids=name)
def test_where(dtype, place):
    condition, (a, b) = any_bits(torch.bool, COUNT), pair(dtype)
    out = torch.zeros_like(a)
    launch(place, elementwise, (condition, a, b), out, where, COUNT)
    same_bits(out, torch.where(condition, a, b))


def test_clamp_and_nan(place):
    x = any_bits(torch.float32, COUNT)
    low, high = torch.full((COUNT,), -1.5), torch.full((COUNT,), 2.25)
    same_bits(apply(place, clamp, x, low, high), torch.where(x.isnan(), low, x.clamp(-1.5, 2.25)))
    same_bits(apply(place, clamp_nan, x, low, high), x.clamp(-1.5, 2.25))


# ---------------------------------------------------------------- casts


@triton.jit
def cast(xs, out, kind: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(xs + i).to(kind))


@triton.jit
def bitcast(xs, out, kind: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(xs + i).to(kind, bitcast=True))


KINDS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float64: tl.float64,
    torch.bool: tl.int1,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    **{dtype: getattr(tl, name(dtype)) for dtype in (*SIGNED, *UNSIGNED)},
}


def converted(place, kernel, x, dtype):
    out = torch.zeros(x.shape, dtype=dtype)
    launch(place, kernel, x, out, KINDS[dtype], x.numel())
    return out


def representable(dtype):
    """The finite numbers of a type of at most 16 bits that are not negative, in order; then what would be the next."""
    count = 128 if dtype.itemsize == 1 else 32768
    values = torch.arange(count).to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype).double()
    values = values[values.isfinite()]
    return torch.cat([values, 2 * values[-1:] - values[-2:-1]]).numpy()


def rounded(x, dtype):
    """float64 `x` in `dtype`: nearest, ties to the even bit pattern; fp8 saturates, the others overflow to infinity."""
    values = representable(dtype)
    size = np.abs(x)
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    closer = np.where(size == (low + high) / 2, above % 2 == 0, size > (low + high) / 2)  # True: the upper one
    near = np.where(closer, high, low)
    near = np.where(size >= values[-1], values[-1], near)
    near = np.minimum(near, LARGEST_FP8[dtype]) if dtype in FP8 else np.where(near == values[-1], np.inf, near)
    return torch.from_numpy(np.copysign(np.where(np.isnan(x), np.nan, near), x)).to(dtype)


def halfway(dtype):
    """Numbers of `dtype`, the points halfway between neighbours, and what lies just off those, with both signs."""
    values = representable(dtype)
    values = values[:: max(1, len(values) // 4096)] if dtype.itemsize == 2 else values
    middle = torch.from_numpy((representable(dtype)[:-1] + representable(dtype)[1:]) / 2)
    middle = middle[:: max(1, len(middle) // 4096)]
    points = torch.cat([torch.from_numpy(values), middle, middle * (1 + 2.0**-22), middle * (1 - 2.0**-22)])
    points = torch.cat([points, -points, torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30])])
    return torch.nn.functional.pad(points, (0, triton.next_power_of_2(len(points)) - len(points)))


@pytest.mark.parametrize("source", (torch.float32, torch.float64), ids=name)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, *FP8), ids=name)
def test_narrowing_rounds_to_nearest_even(dtype, source, place):
    if source == torch.float64 and dtype in FP8:
        pytest.skip("Triton has no conversion from float64 to fp8")
    x = torch.cat([halfway(dtype).to(source), any_bits(source, 8192)])
    x = torch.nn.functional.pad(x, (0, triton.next_power_of_2(len(x)) - len(x)))
    same_bits(converted(place, cast, x, dtype), rounded(x.double().numpy(), dtype))


def test_float64_to_bfloat16_is_rounded_once(place):
    x = (
        1 + 2.0**-8 + torch.tensor([2.0**-40, -(2.0**-40)] * 8, dtype=torch.float64)
    )  # by way of float32 both become the tie
    same_bits(converted(place, cast, x, torch.bfloat16), rounded(x.numpy(), torch.bfloat16))


@pytest.mark.parametrize("source", (torch.float16, torch.bfloat16), ids=name)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64, *FP8), ids=name)
def test_sixteen_bit_floats_to_every_other(dtype, source, place):
    x = any_bits(source, 65536)
    want = rounded(x.double().numpy(), dtype) if dtype.itemsize < 4 else x.to(dtype)
    same_bits(converted(place, cast, x, dtype), want)


@pytest.mark.parametrize("source", FP8, ids=name)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=name)
def test_fp8_widens_exactly(dtype, source, place):
    x = any_bits(source, 256)
    if place == "cuda" and (source, dtype) == (torch.float8_e5m2, torch.bfloat16):
        x.view(torch.uint8)[~x.float().isfinite()] = 0  # Triton 3.6 makes numbers of them on sm_90
    same_bits(converted(place, cast, x, dtype), x.to(dtype))


@pytest.mark.parametrize("source", FLOATS, ids=name)
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64, torch.uint32), ids=name)
def test_float_to_integer_is_towards_zero_and_saturates(dtype, source, place):
    x = any_bits(source, COUNT)
    info = torch.iinfo(dtype)
    nan = (info.min or 1 << dtype.itemsize * 8 - 1) if torch.float64 == source or dtype.itemsize == 8 else 0
    want = [
        nan if math.isnan(v) else info.min if v <= info.min else info.max if v >= info.max else math.trunc(v)
        for v in x.double().tolist()
    ]
    same_bits(converted(place, cast, x, dtype), wrapped(want, dtype))


@pytest.mark.parametrize("dtype", (torch.int8, torch.int16, torch.uint8, torch.uint16), ids=name)
def test_float_to_small_integer_in_range(dtype, place):
    info = torch.iinfo(dtype)
    x = torch.rand(COUNT, generator=torch.Generator().manual_seed(5)) * (info.max - info.min) + info.min
    same_bits(converted(place, cast, x, dtype), wrapped(map(math.trunc, x.tolist()), dtype))


@pytest.mark.parametrize("source", (torch.float32, torch.float16, torch.float64), ids=name)
@pytest.mark.parametrize("dtype, wide", [(torch.int8, torch.int16), (torch.uint8, torch.uint16)], ids=name)
def test_float_to_8_bits_is_the_lower_byte_of_16(dtype, wide, source, place):
    x = torch.tensor([300.0, -300.0, 40000.0, -40000.0, 255.0, -1.0, torch.inf, -torch.inf]).to(source)
    info = torch.iinfo(wide)
    want = [math.trunc(min(max(v, info.min), info.max)) for v in x.tolist()]
    same_bits(converted(place, cast, x, dtype), wrapped(want, dtype))


@pytest.mark.parametrize("source", (*SIGNED, *UNSIGNED, torch.bool), ids=name)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16, torch.bfloat16), ids=name)
def test_integer_to_float(dtype, source, place):
    x = any_bits(source, COUNT)
    wide = x.numpy().astype(np.float64 if dtype == torch.float64 else np.float32)
    if dtype == torch.float16:
        wide = x.numpy().astype(np.float64).clip(-1e5, 1e5).astype(np.float16)  # one rounding, infinite from 65520 on
    same_bits(
        converted(place, cast, x, dtype), torch.from_numpy(wide).to(dtype)
    )  # bfloat16 by way of float32, as Triton lowers it


@pytest.mark.parametrize("source", (*SIGNED, *UNSIGNED, torch.bool), ids=name)
@pytest.mark.parametrize("dtype", (*SIGNED, *UNSIGNED, torch.bool), ids=name)
def test_integer_to_integer_extends_by_the_source_and_truncates(dtype, source, place):
    x = any_bits(source, COUNT)
    want = torch.tensor([v != 0 for v in x.tolist()]) if dtype == torch.bool else wrapped(map(int, x.tolist()), dtype)
    same_bits(converted(place, cast, x, dtype), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_float_to_bool_is_whether_it_is_not_zero(dtype, place):
    x = any_bits(dtype, COUNT)
    x = torch.where(x.isnan(), 1, x)
    same_bits(converted(place, cast, x, torch.bool), x != 0)


@pytest.mark.parametrize("source, dtype", [
    (torch.float32, torch.int32), (torch.int32, torch.float32), (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.int16),
    (torch.int16, torch.bfloat16), (torch.float64, torch.int64), (torch.float8_e4m3fn, torch.int8),
    (torch.int8, torch.float8_e5m2),
    (torch.uint32, torch.float32), (torch.float16, torch.uint16),
], ids=name)  # fmt: skip
def test_bitcast_keeps_the_bits(source, dtype, place):
    x = any_bits(source, 256)
    same_bits(converted(place, bitcast, x, dtype), x.view(dtype))
    finite = (
        torch.where(x.double().isnan(), torch.zeros_like(x.double()), x.double()) if x.dtype.is_floating_point else None
    )
    if finite is not None:
        assert torch.equal(bits(converted(place, bitcast, finite.to(source), dtype)), bits(finite.to(source)))
