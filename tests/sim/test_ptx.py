"""The evaluator of inline PTX against NumPy, torch, exact fractions and bits worked out by hand."""

import math
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

from strobe.sim.ptx import BFLOAT16, parse, run

INF, NAN = np.float32(np.inf), np.float32(np.nan)
LETTERS = {
    np.dtype(t): c
    for t, c in (
        (np.float32, "f"),
        (np.float64, "d"),
        (np.int32, "r"),
        (np.uint32, "r"),
        (np.int64, "l"),
        (np.uint64, "l"),
    )
}
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-40, -1e-40, 2.0**-126, 3.4e38, -3.4e38, 1.4e-45, 0.5, 2.5, -2.5],
    np.float32,
)


def letter(dtype):
    return LETTERS.get(np.dtype(dtype), "h")


def one(text, *arguments, to=np.float32, machine=None):
    """A block of one output, $0, with register letters from the types"""
    arguments = [np.asarray(argument) for argument in arguments]
    constraints = ",".join(["=" + letter(to), *(letter(argument.dtype) for argument in arguments)])
    return run(text, constraints, arguments, [to], 1, machine)[0]


def bits(x):
    return np.ascontiguousarray(x).view({2: np.uint16, 4: np.uint32, 8: np.uint64}[np.asarray(x).dtype.itemsize])


def floats(seed, count=4096, spread=8):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count) * 2.0 ** rng.integers(-spread, spread, count)
    return x.astype(np.float32)


def pairs():
    """Random numbers, and every pair of special ones"""
    a, b = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
    return np.concatenate([floats(1), a]), np.concatenate([floats(2), b])


def same_floats(found, expected):
    """Equal, signs of zeros too; NaN where NaN is"""
    invalid = np.isnan(expected)
    assert np.array_equal(np.isnan(found), invalid)
    assert np.array_equal(bits(found)[~invalid], bits(expected)[~invalid])


def rounded(exact, mode):
    """A fraction as float32, by the mode"""
    if exact == 0:
        return np.float32(0)
    exponent = max(math.floor(math.log2(abs(exact))) - 25, -149 - 2)
    while abs(exact) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    exponent = max(exponent, -149)
    steps = exact / Fraction(2) ** exponent
    whole = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}[mode](steps)
    return np.float32(math.ldexp(whole, exponent))


# ---------------------------------------------------------------- float arithmetic


@pytest.mark.parametrize(
    "name, expected", [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div.rn", np.divide)]
)
def test_float32_arithmetic_is_ieee(name, expected):
    a, b = pairs()
    with np.errstate(all="ignore"):
        same_floats(one(f"{name}.f32 $0, $1, $2;", a, b), expected(a, b))


def test_nan_results_are_canonical():
    found = one("add.f32 $0, $1, $2;", np.array([INF, NAN, 1], np.float32), np.array([-INF, 1, 1], np.float32))
    assert list(bits(found)) == [0x7FFFFFFF, 0x7FFFFFFF, 0x40000000]


FRACTIONS = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: a - b,
    "mul": lambda a, b, c: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b, c: a / b,
    "rcp": lambda a, b, c: 1 / a,
}


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", FRACTIONS)
def test_every_rounding_is_exact(name, mode):
    a, b, c = (floats(seed, 300, 30) for seed in (3, 4, 5))
    operands = {"fma": "$1, $2, $3", "rcp": "$1"}.get(name, "$1, $2")
    found = one(f"{name}.{mode}.f32 $0, {operands};", a, b, c)
    expected = [rounded(FRACTIONS[name](*map(Fraction, map(float, abc))), mode) for abc in zip(a, b, c)]
    assert np.array_equal(bits(found), bits(np.array(expected)))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_square_roots_bracket_the_exact_one(mode):
    a = np.abs(floats(6, 300))
    found = one(f"sqrt.{mode}.f32 $0, $1;", a)
    for x, root in zip(a, found):
        low, high = (np.nextafter(root, np.float32(s * INF)) for s in (-1, 1))
        square, x = [Fraction(float(r)) ** 2 for r in (low, root, high)], Fraction(float(x))
        if mode == "rn":
            assert (
                ((Fraction(float(low)) + Fraction(float(root))) / 2) ** 2
                <= x
                <= ((Fraction(float(root)) + Fraction(float(high))) / 2) ** 2
            )
        elif mode == "rp":
            assert square[0] < x <= square[1]
        else:
            assert square[1] <= x < square[2]


def test_fma_rounds_once():
    # a * b = 1 + 2^-11 + 2^-24 lies half way between two float32; c tips it where float64 cannot hold the sum
    a, b = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)
    c = np.array([2.0**-60, -(2.0**-60), 0], np.float32)
    found = one("fma.rn.f32 $0, $1, $2, $3;", np.full(3, a), np.full(3, b), c)
    even = np.float32(1 + 2.0**-11)
    assert list(found) == [np.nextafter(even, np.float32(2)), even, even]
    # below the normals too: 2^-150 less a little is under half of 2^-149, and float64 has no room for the little
    a, b, c = (
        np.array([x], np.float32) for x in (2.0**-75 * (1 + 2.0**-23), 2.0**-75 * (1 - 2.0**-23), 2.0**-130 + 2.0**-149)
    )
    assert one("fma.rn.f32 $0, $1, $2, $3;", a, b, c) == c


def test_fma_of_subnormals_agrees_with_fractions():
    a, b = floats(7, 400, 4) * np.float32(2.0**-70), floats(8, 400, 4) * np.float32(2.0**-70)
    c = floats(9, 400, 4) * np.float32(2.0**-140)
    expected = [rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), "rn") for x, y, z in zip(a, b, c)]
    assert np.array_equal(one("fma.rn.f32 $0, $1, $2, $3;", a, b, c), np.array(expected))


def test_fma_of_float64_rounds_once():
    rng = np.random.default_rng(10)
    a, b = rng.standard_normal((2, 500))
    c = -a * b * (1 + rng.integers(-2, 3, 500) * 2.0**-52)  # cancels but for the error of the product
    found = one("fma.rn.f64 $0, $1, $2, $3;", a, b, c, to=np.float64)
    expected = np.array([float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c)])
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, a * b + c)
    # the product is half way between 1 and its lower neighbour, and c is too small for every sum but the last
    tie = one(
        "fma.rn.f64 $0, $1, $2, $3;",
        np.array([1 + 2.0**-27]),
        np.array([1 - 2.0**-27]),
        np.array([-(2.0**-110)]),
        to=np.float64,
    )
    assert tie == 1 - 2.0**-53
    infinite = one(
        "fma.rn.f64 $0, $1, $2, $3;", np.array([np.inf, np.inf]), np.array([2.0, 0.0]), np.ones(2), to=np.float64
    )
    assert infinite[0] == np.inf and np.isnan(infinite[1])


def test_ftz_flushes_what_goes_in_and_what_comes_out():
    a, b = np.array([1e-40, -1e-40, 2.0**-126, -(2.0**-126), 1], np.float32), np.array([1, 1, 0.5, 0.5, 1], np.float32)
    assert list(bits(one("mul.ftz.f32 $0, $1, $2;", a, b))) == [0, 0x80000000, 0, 0x80000000, 0x3F800000]
    assert (one("mul.f32 $0, $1, $2;", a, b) != 0).all()
    assert (
        one("mul.ftz.f32 $0, $1, $2;", np.float32(1e-40), np.float32(2.0**20)) == 0
    )  # the input, though the product is normal


def test_sat_clamps_and_turns_nan_into_zero():
    a = np.array([2, -1, 0.25, NAN, -INF], np.float32)
    assert list(bits(one("add.sat.f32 $0, $1, 0.0;", a))) == list(bits(np.array([1, 0, 0.25, 0, 0], np.float32)))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("ex2.approx.ftz", np.exp2),
        ("lg2.approx", np.log2),
        ("rcp.approx.ftz", np.reciprocal),
        ("sqrt.approx", np.sqrt),
        ("rsqrt.approx", lambda x: 1 / np.sqrt(x)),
        ("sin.approx", np.sin),
        ("cos.approx", np.cos),
        ("tanh.approx", np.tanh),
        ("neg", np.negative),
        ("abs", np.abs),
    ],
)
def test_functions_of_one_argument(name, expected):
    x = np.concatenate([floats(11, 1000, 3), np.array([0, -0.0, INF, -INF, NAN], np.float32)])
    with np.errstate(all="ignore"):
        exact = expected(x.astype(np.float64))
    found = one(f"{name}.f32 $0, $1;", x)
    assert np.array_equal(np.isnan(found), np.isnan(exact))
    np.testing.assert_allclose(found, exact, rtol=3e-7, atol=3e-7 if name[:3] in ("sin", "cos", "lg2") else 0)


def test_the_approximate_division_loses_large_divisors():
    a, b = np.array([1, INF, 1], np.float32), np.array([2.0**127, 2.0**127, 3], np.float32)
    found = one("div.approx.f32 $0, $1, $2;", a, b)
    assert found[0] == 0 and np.isnan(found[1]) and abs(found[2] - 1 / 3) < 1e-7
    assert one("div.full.f32 $0, $1, $2;", a, b)[0] == np.float32(2.0**-127)


def test_min_and_max_prefer_numbers_and_order_zeros():
    a, b = pairs()
    for name, number, strict in (("min", np.fmin, np.minimum), ("max", np.fmax, np.maximum)):
        found = one(f"{name}.f32 $0, $1, $2;", a, b)
        assert np.array_equal(found, number(a, b), equal_nan=True)
        zeros = (a == 0) & (b == 0)
        assert np.array_equal(
            np.signbit(found[zeros]),
            getattr(np, f"logical_{'or' if name == 'min' else 'and'}")(np.signbit(a), np.signbit(b))[zeros],
        )
        assert np.array_equal(one(f"{name}.NaN.f32 $0, $1, $2;", a, b), strict(a, b), equal_nan=True)
    three = one("max.f32 $0, $1, $2, $3;", np.float32(1), NAN, np.float32(3))
    assert three == 3 and three.shape == ()


# ---------------------------------------------------------------- halves and pairs


def as_half(x, name):
    x = torch.tensor(np.asarray(x, np.float32))
    return x.to(torch.float16 if name == "f16" else torch.bfloat16)


def raw(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_halves_round_once(name):
    a, b, c = (as_half(floats(seed, 4000, 3), name) for seed in (12, 13, 14))
    for operation, expected in (
        ("add", a + b),
        ("sub", a - b),
        ("mul", a * b),
        ("min", torch.minimum(a, b)),
        ("max", torch.maximum(a, b)),
    ):
        found = one(f"{operation}.{name} $0, $1, $2;", raw(a), raw(b), to=np.uint16)
        assert np.array_equal(found, raw(expected)), operation
    found = one(f"fma.rn.relu.{name} $0, $1, $2, $3;", raw(a), raw(b), raw(c), to=np.uint16)
    exact = torch.relu(a.double() * b.double() + c.double())
    gap = (torch.from_numpy(found.view(np.int16)).view(a.dtype).double() - exact).abs()
    assert (gap <= exact * (2.0**-11 if name == "f16" else 2.0**-8) + 2.0**-25).all()


def test_bfloat16_fma_is_not_rounded_in_between():
    # (17/16)^2 = 289/256 lies half way between two bfloat16, 288/256 (even) and 290/256: any addend tips it, however
    # small
    a, c = np.full(4, 1.0625), np.array([0, 2.0**-100, 2.0**-30, -(2.0**-30)])
    found = one("fma.rn.bf16 $0, $1, $1, $2;", raw(as_half(a, "bf16")), raw(as_half(c, "bf16")), to=np.uint16)
    assert list(found) == list(raw(as_half([1.125, 1.1328125, 1.1328125, 1.125], "bf16")))


def test_pairs_of_float32_and_of_halves():
    a, b = (floats(seed, 512).reshape(256, 2) for seed in (15, 16))
    wide = [x.view(np.uint64)[:, 0] for x in (a, b)]
    found = one("fma.rn.f32x2 $0, $1, $2, $1;", *wide, to=np.uint64)
    expected = (a.astype(np.float64) * b + a).astype(np.float32)
    assert np.array_equal(found[:, None].view(np.float32), expected)
    for name in ("f16", "bf16"):
        x, y = as_half(a, name), as_half(b, name)
        packed = [raw(t).view(np.uint32)[:, 0] for t in (x, y)]
        found = one(f"add.{name}x2 $0, $1, $2;", *packed, to=np.uint32)
        assert np.array_equal(found[:, None].view(np.uint16), raw(x + y))
        found = one(f"ex2.approx.ftz.{name}x2 $0, $1;", packed[0], to=np.uint32) if name == "bf16" else None
        assert found is None or np.array_equal(found[:, None].view(np.uint16), raw(torch.exp2(x.float()).to(x.dtype)))


# ---------------------------------------------------------------- integers and bits

WORDS = np.concatenate(
    [
        np.random.default_rng(17).integers(0, 1 << 32, 2000, np.uint32),
        np.array([0, 1, 1 << 31, (1 << 31) - 1, (1 << 32) - 1], np.uint32),
    ]
)
OTHERS = np.roll(WORDS[::-1], 3)


def python(function, *arguments, width=32, signed=False):
    """A function of Python integers, wrapped to the width"""
    number = {(32, False): np.uint32, (32, True): np.int32, (64, False): np.uint64, (64, True): np.int64}[width, signed]
    results = [function(*(int(x) for x in row)) & ((1 << width) - 1) for row in zip(*arguments)]
    return np.array(results, np.uint64).astype(np.uint64 if width == 64 else np.uint32).view(number)


@pytest.mark.parametrize("kind, number", [("u32", np.uint32), ("s32", np.int32), ("u64", np.uint64), ("s64", np.int64)])
def test_integer_arithmetic_is_pythons(kind, number):
    width, signed = int(kind[1:]), kind[0] == "s"
    a, b = (
        WORDS.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        OTHERS.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03),
    )
    a, b = (x.view(number) if width == 64 else (x >> np.uint64(32)).astype(np.uint32).view(number) for x in (a, b))
    wide = lambda f: python(f, a, b, width=width, signed=signed)
    for text, function in (
        ("add", lambda x, y: x + y),
        ("sub", lambda x, y: x - y),
        ("mul.lo", lambda x, y: x * y),
        ("mul.hi", lambda x, y: x * y >> width),
        ("min", min),
        ("max", max),
        ("div", lambda x, y: -1 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)),
    ):
        assert np.array_equal(one(f"{text}.{kind} $0, $1, $2;", a, b, to=number), wide(function)), text
    assert np.array_equal(one(f"mad.lo.{kind} $0, $1, $2, $1;", a, b, to=number), wide(lambda x, y: x * y + x))
    if width == 32:
        double = np.int64 if signed else np.uint64
        product = python(lambda x, y: x * y, a, b, width=64, signed=signed)
        assert np.array_equal(one(f"mul.wide.{kind} $0, $1, $2;", a, b, to=double), product)
    if signed:
        assert np.array_equal(one(f"abs.{kind} $0, $1;", a, to=number), python(abs, a, width=width, signed=True))
        assert np.array_equal(
            one(f"neg.{kind} $0, $1;", a, to=number), python(lambda x: -x, a, width=width, signed=True)
        )


def test_saturating_addition():
    a = np.array([2**31 - 1, -(2**31), 5], np.int32)
    assert list(one("add.sat.s32 $0, $1, $2;", a, np.array([1, -1, 1], np.int32), to=np.int32)) == [
        2**31 - 1,
        -(2**31),
        6,
    ]


def test_logic_and_shifts():
    for text, function in (("and", lambda x, y: x & y), ("or", lambda x, y: x | y), ("xor", lambda x, y: x ^ y)):
        assert np.array_equal(
            one(f"{text}.b32 $0, $1, $2;", WORDS, OTHERS, to=np.uint32), python(function, WORDS, OTHERS)
        )
    assert np.array_equal(one("not.b32 $0, $1;", WORDS, to=np.uint32), ~WORDS)
    amounts = np.concatenate([np.arange(40, dtype=np.uint32), np.array([0xFFFFFFFF], np.uint32)])
    value = np.full(41, 0x89ABCDEF, np.uint32)
    assert np.array_equal(
        one("shl.b32 $0, $1, $2;", value, amounts, to=np.uint32), python(lambda x, y: x << min(y, 32), value, amounts)
    )
    assert np.array_equal(
        one("shr.u32 $0, $1, $2;", value, amounts, to=np.uint32), python(lambda x, y: x >> min(y, 32), value, amounts)
    )
    signed = value.view(np.int32)
    assert np.array_equal(
        one("shr.s32 $0, $1, $2;", signed, amounts, to=np.int32),
        python(lambda x, y: x >> min(y, 32), signed, amounts, signed=True),
    )


def test_bit_fields_follow_the_definition():
    rng = np.random.default_rng(18)
    starts, lengths = rng.integers(0, 40, WORDS.size, np.uint32), rng.integers(0, 40, WORDS.size, np.uint32)

    def extract(a, start, length, signed):
        sign = a >> min(start + length - 1, 31) & 1 if signed and length else 0
        return sum((a >> start + i & 1 if i < length and start + i <= 31 else sign) << i for i in range(32))

    def insert(a, b, start, length):
        for i in range(length):
            if start + i <= 31:
                b = b & ~(1 << start + i) | (a >> i & 1) << start + i
        return b

    unsigned = one("bfe.u32 $0, $1, $2, $3;", WORDS, starts, lengths, to=np.uint32)
    assert np.array_equal(unsigned, python(lambda *x: extract(*x, False), WORDS, starts, lengths))
    signed = one("bfe.s32 $0, $1, $2, $3;", WORDS, starts, lengths, to=np.uint32)
    assert np.array_equal(signed, python(lambda *x: extract(*x, True), WORDS, starts, lengths))
    found = one("bfi.b32 $0, $1, $2, $3, $4;", WORDS, OTHERS, starts, np.minimum(lengths, 32), to=np.uint32)
    assert np.array_equal(found, python(insert, WORDS, OTHERS, starts, np.minimum(lengths, 32)))


def test_permutation_and_truth_tables():
    a, b = np.array([0x33221100], np.uint32), np.array([0x776655C4], np.uint32)
    for selector, expected in ((0x7531, 0x77553311), (0x3210, 0x33221100), (0x000C, 0x000000FF), (0x4444, 0xC4C4C4C4)):
        assert one("prmt.b32 $0, $1, $2, $3;", a, b, np.array([selector], np.uint32), to=np.uint32)[0] == expected, hex(
            selector
        )
    assert one("prmt.b32.f4e $0, $1, $2, 1;", a, b, to=np.uint32)[0] == 0xC4332211
    assert one("prmt.b32.rc16 $0, $1, $2, 1;", a, b, to=np.uint32)[0] == 0x33223322
    c = WORDS ^ OTHERS >> 3
    found = one("lop3.b32 $0, $1, $2, $3, 0xEA;", WORDS, OTHERS, c, to=np.uint32)  # (a & b) | c
    assert np.array_equal(found, WORDS & OTHERS | c)
    assert np.array_equal(one("lop3.b32 $0, $1, $2, $3, 0x96;", WORDS, OTHERS, c, to=np.uint32), WORDS ^ OTHERS ^ c)
    assert not one("lop3.b32 $0, $1, $2, $3, 0;", WORDS, OTHERS, c, to=np.uint32).any()


def test_counting_bits():
    assert np.array_equal(one("popc.b32 $0, $1;", WORDS, to=np.uint32), python(lambda x: bin(x).count("1"), WORDS))
    assert np.array_equal(one("clz.b32 $0, $1;", WORDS, to=np.uint32), python(lambda x: 32 - x.bit_length(), WORDS))
    wide = WORDS.astype(np.uint64) << np.uint64(20)
    assert np.array_equal(one("clz.b64 $0, $1;", wide, to=np.uint32), python(lambda x: 64 - x.bit_length(), wide))


# ---------------------------------------------------------------- predicates

RELATIONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("name", [*RELATIONS, *(name + "u" for name in RELATIONS), "num", "nan"])
def test_comparisons_and_nan(name):
    a, b = pairs()
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        expected = unordered if name == "nan" else ~unordered
    else:
        expected = RELATIONS[name.rstrip("u")](a, b) & ~unordered | (unordered if name not in RELATIONS else False)
    text = f"{{ .reg .pred p; setp.{name}.f32 p, $1, $2; selp.u32 $0, 7, 3, p; }}"
    assert np.array_equal(one(text, a, b, to=np.uint32), np.where(expected, 7, 3))


def test_integer_comparisons_know_the_sign():
    a, b = WORDS, OTHERS
    text = "{{ .reg .pred p, q; setp.{} p|q, $1, $2; selp.b32 $0, 1, 0, {}; }}"
    assert np.array_equal(one(text.format("lo.u32", "p"), a, b, to=np.uint32), a < b)
    assert np.array_equal(one(text.format("lt.s32", "p"), a, b, to=np.uint32), a.view(np.int32) < b.view(np.int32))
    assert np.array_equal(one(text.format("ge.s32", "q"), a, b, to=np.uint32), a.view(np.int32) < b.view(np.int32))


def test_joined_comparisons_and_guards():
    x = np.arange(-5, 6, dtype=np.int32)
    text = """{
        .reg .pred p<3>;
        setp.gt.s32 p0, $1, -3;
        setp.lt.and.s32 p1|p2, $1, 3, p0;   // -3 < x < 3, and x >= 3 of those above -3
        mov.u32 $0, 0;
        @p1 add.s32 $0, $0, 1;
        @p2 add.s32 $0, $0, 2;
        @!p0 mov.u32 $0, 9;
        not.pred p0, p0;
        @p0 add.s32 $0, $0, 1;
    }"""
    assert list(one(text, x, to=np.int32)) == [10, 10, 10, 1, 1, 1, 1, 1, 2, 2, 2]
    negated = "{ .reg .pred p, q; setp.gt.s32 p, $1, 0; setp.lt.or.s32 q, $1, -3, !p; selp.b32 $0, 1, 0, q; }"
    assert list(one(negated, x, to=np.int32)) == [1] * 6 + [0] * 5


def test_branches_skip_to_a_label_ahead():
    x = np.arange(4, dtype=np.int32)
    text = """{
        .reg .pred p;
        mov.u32 $0, 0;
        setp.gt.s32 p, $1, 1;
        @p bra ON;
        setp.eq.s32 p, $1, 0;               // the branch asked before this
        @!p add.s32 $0, $0, 1;
        ON: add.s32 $0, $0, 10;
        @p bra END; add.s32 $0, $0, 100;
        END: }"""
    assert list(one(text, x, to=np.int32)) == [10, 111, 10, 10]
    crossing = """{
        .reg .pred p<2>;
        mov.u32 $0, 0; setp.eq.s32 p0, $1, 1; setp.le.s32 p1, $1, 2;
        @p0 bra FIRST; add.s32 $0, $0, 1; @p1 bra SECOND; add.s32 $0, $0, 10;
        FIRST: add.s32 $0, $0, 100;
        SECOND: add.s32 $0, $0, 1000;
    }"""
    assert list(one(crossing, x, to=np.int32)) == [1001, 1100, 1001, 1111]  # 1 never comes to the second branch
    with pytest.raises(ValueError, match="no label 'OFF' lies ahead"):
        run("{ .reg .pred p; setp.eq.s32 p, 0, 0; @p bra OFF; mov.u32 $0, 0; }", "=r", [], [np.int32], 1, None)


def test_a_register_first_written_under_a_guard_is_poison_elsewhere():
    text = "{ .reg .pred p; .reg .f32 t; setp.gt.f32 p, $1, 0.0; @p mov.f32 t, $1; mov.f32 $0, t; }"
    found = one(text, np.array([1, -1], np.float32))
    assert found[0] == 1 and np.isnan(found[1])


# ---------------------------------------------------------------- conversions


def special_halves():
    return np.concatenate(
        [
            floats(19, 4000, 12),
            floats(20, 2000, 3) * np.float32(2.0**-130),
            SPECIAL,
            np.array([65504, 65519.9, 65520, -1e30], np.float32),
        ]
    )


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_narrowing_is_to_nearest_even_and_packs_the_first_source_high(name):
    a = special_halves()
    # ties: the middle of two neighbours, even and odd below
    halves = raw(as_half(floats(21, 1000), name))
    lower, upper = (
        torch.from_numpy((halves + i).view(np.int16)).view(as_half(0, name).dtype).float().numpy() for i in (0, 1)
    )
    a = np.concatenate([a, (lower + upper) / 2])
    b = a[::-1].copy()
    x, y = (np.where(np.isnan(t), 0x7FFF, raw(as_half(t, name))) for t in (a, b))
    found = one(f"cvt.rn.{name}x2.f32 $0, $1, $2;", a, b, to=np.uint32)
    assert np.array_equal(found >> 16, x) and np.array_equal(found & 0xFFFF, y)
    back = one(f"cvt.f32.{name} $0, $1;", x.astype(np.uint16))
    assert np.array_equal(back, as_half(a, name).float().numpy(), equal_nan=True)


def test_narrowing_in_other_directions():
    a = special_halves()
    a = a[np.isfinite(a)]
    truncated = one("cvt.rz.bf16.f32 $0, $1;", a, to=np.uint16)
    assert np.array_equal(truncated, (bits(a) >> 16).astype(np.uint16))
    for mode, sign in (("rm", -1), ("rp", 1)):
        found = torch.from_numpy(one(f"cvt.{mode}.f16.f32 $0, $1;", a, to=np.uint16).view(np.int16)).view(torch.float16)
        inside = np.abs(a) < 60000
        gap = (found.double().numpy() - a)[inside] * sign
        assert (gap >= 0).all() and (gap <= np.maximum(np.abs(a[inside]) * 2.0**-10, 2.0**-24)).all()
    saturated = one("cvt.rn.satfinite.f16.f32 $0, $1;", np.array([1e9, -INF, 1], np.float32), to=np.uint16)
    assert list(saturated) == [0x7BFF, 0xFBFF, 0x3C00]
    assert list(one("cvt.rn.relu.f16.f32 $0, $1;", np.array([-2, 2, NAN], np.float32), to=np.uint16)) == [
        0,
        0x4000,
        0x7FFF,
    ]


@pytest.mark.parametrize("name, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_float8_saturates_and_comes_back(name, dtype):
    a = np.concatenate([floats(22, 4000, 9), SPECIAL, np.array([448, 464, 465, 57344, 61440, 1e9], np.float32)])
    b = a[::-1].copy()
    limit = torch.finfo(dtype).max
    x, y = (
        np.where(np.isnan(t), 0x7F, torch.tensor(t).clamp(-limit, limit).to(dtype).view(torch.uint8).numpy())
        for t in (a, b)
    )
    found = one(f"cvt.rn.satfinite.{name}x2.f32 $0, $1, $2;", a, b, to=np.uint16)
    assert np.array_equal(found >> 8, x) and np.array_equal(found & 0xFF, y)
    halves = one(f"cvt.rn.f16x2.{name}x2 $0, $1;", found, to=np.uint32)
    expected = torch.from_numpy(x.astype(np.uint8)).view(dtype).half().numpy()
    assert np.array_equal((halves >> 16).astype(np.uint16).view(np.float16), expected, equal_nan=True)
    assert np.array_equal(one(f"cvt.rn.satfinite.{name}x2.f16x2 $0, $1;", halves, to=np.uint16), found)


def test_floats_to_integers():
    a = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 1.7, -1.7, 3e9, -3e9, 5e9, INF, -INF, NAN], np.float32)
    top, low = 2**31 - 1, -(2**31)
    expected = {
        "rni": [0, 2, 2, 0, -2, 2, -2],
        "rzi": [0, 1, 2, 0, -1, 1, -1],
        "rmi": [0, 1, 2, -1, -2, 1, -2],
        "rpi": [1, 2, 3, 0, -1, 2, -1],
    }
    for mode, values in expected.items():
        found = one(f"cvt.{mode}.s32.f32 $0, $1;", a, to=np.int32)
        assert list(found) == [*values, top, low, top, top, low, 0], mode
        assert np.array_equal(one(f"cvt.{mode}.f32.f32 $0, $1;", a[:7]), np.array(values, np.float32))
    assert list(one("cvt.rzi.u32.f32 $0, $1;", a, to=np.uint32)[-6:]) == [3000000000, 0, 2**32 - 1, 2**32 - 1, 0, 0]
    assert list(one("cvt.rzi.s64.f32 $0, $1;", a, to=np.int64)[-4:]) == [5000000000, 2**63 - 1, -(2**63), -(2**63)]


def test_integers_to_floats_and_integers():
    x = WORDS.view(np.int32)
    assert np.array_equal(one("cvt.rn.f32.s32 $0, $1;", x), x.astype(np.float32))
    assert np.array_equal(one("cvt.rn.f32.u32 $0, $1;", WORDS), WORDS.astype(np.float32))
    assert np.array_equal(
        one("cvt.rz.f32.u32 $0, $1;", WORDS), np.array([rounded(Fraction(int(w)), "rz") for w in WORDS])
    )
    assert np.array_equal(one("cvt.s64.s32 $0, $1;", x, to=np.int64), x.astype(np.int64))
    assert np.array_equal(one("cvt.s32.s8 $0, $1;", x, to=np.int32), x.astype(np.int8).astype(np.int32))
    assert np.array_equal(one("cvt.u32.u8 $0, $1;", WORDS, to=np.uint32), WORDS & 0xFF)
    assert np.array_equal(one("cvt.sat.s8.s32 $0, $1;", x, to=np.int32), np.clip(x, -128, 127))
    assert np.array_equal(one("cvt.sat.u32.s32 $0, $1;", x, to=np.uint32), np.maximum(x, 0))
    wide = np.concatenate([floats(23).astype(np.float64) * (1 + 2.0**-30), np.array([1e300, 2.0**-149 * 0.5, np.inf])])
    with np.errstate(over="ignore"):
        assert np.array_equal(one("cvt.rn.f32.f64 $0, $1;", wide), wide.astype(np.float32))
    # just above a tie of bf16, by less than float32 can hold
    assert one("cvt.rn.bf16.f64 $0, $1;", np.array([1 + 2.0**-8 + 2.0**-40]), to=np.uint16)[0] == 0x3F81


# ---------------------------------------------------------------- moves, constants, packing, text


def test_moves_pack_and_unpack():
    a, b = WORDS, OTHERS
    pair = one("mov.b64 $0, {$1, $2};", a, b, to=np.uint64)
    assert np.array_equal(pair, a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32))
    high = one("{ .reg .b32 low, high; mov.b64 {low, high}, $1; xor.b32 $0, low, high; }", pair, to=np.uint32)
    assert np.array_equal(high, a ^ b)
    assert np.array_equal(
        one("{ .reg .b16 h; mov.b32 {_, h}, $1; mov.b32 $0, {h, h}; }", a, to=np.uint32), a >> 16 | a >> 16 << 16
    )


@pytest.mark.parametrize(
    "constant, value",
    [("0f3FC00000", 1.5), ("0F3fc00000", 1.5), ("1.5", 1.5), ("-2.5e-1", -0.25), ("1e3", 1000)],
)
def test_float_constants(constant, value):
    assert one(f"mov.f32 $0, {constant};") == np.float32(value)


def test_other_constants():
    assert one("mov.f64 $0, 0d3FF8000000000000;", to=np.float64) == 1.5
    assert one("mov.u32 $0, 0xFFu;".replace("u;", "U;"), to=np.uint32) == 255
    assert one("mov.s32 $0, -7;", to=np.int32) == -7
    assert one("mov.b32 $0, 0f3F800000;", to=np.uint32) == 0x3F800000
    assert one("mov.u32 $0, 0b101;", to=np.uint32) == 5
    assert one("mov.u32 $0, 010;", to=np.uint32) == 8


def test_pairs_of_halves_share_a_register():
    x, y = (as_half(floats(seed, 64).reshape(4, 16), "bf16") for seed in (24, 25))
    (found,) = run("mul.bf16x2 $0, $1, $2;", "=r,r,r", [raw(x), raw(y)], [np.uint16], 2, None)
    assert found.shape == (4, 16) and np.array_equal(found, raw(x * y))
    (found,) = run(
        "mul.bf16x2 $0, $2, $4; mul.bf16x2 $1, $3, $5;", "=r,=r,r,r,r,r", [raw(x), raw(y)], [np.uint16], 4, None
    )
    assert np.array_equal(found, raw(x * y))


def test_float32_pairs_come_in_turn_and_leave_as_halves():
    x = floats(26, 64).reshape(8, 8)
    (found,) = run("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], [np.uint16], 2, None)
    assert np.array_equal(found, raw(as_half(x, "bf16")))
    text = "{ .reg .b64 a, b; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5}; add.rn.f32x2 a, a, b; mov.b64 {$0, $1}, a; }"
    (found,) = run(text, "=f,=f,f,f,f,f", [x, x[::-1]], [np.float32], 2, None)
    assert np.array_equal(found, x + x[::-1])


def test_bytes_four_to_a_register():
    x = np.arange(32, dtype=np.uint8).reshape(2, 16)
    (found,) = run("prmt.b32 $0, $1, 0, 0x0123;", "=r,r", [x], [np.uint8], 4, None)
    assert np.array_equal(found, x.reshape(2, 4, 4)[:, :, ::-1].reshape(2, 16))
    floats8 = (
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
        "mov.b32 $0, {a, b}; }"
    )
    y = floats(27, 32, 3).reshape(2, 16)
    (found,) = run(floats8, "=r,f,f,f,f", [y], [np.uint8], 4, None)
    assert np.array_equal(found, torch.tensor(y).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy())


def test_several_outputs_scalars_and_tied_operands():
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    sums, products = run(
        "add.s32 $0, $2, $3; mul.lo.s32 $1, $2, $3;",
        "=&r,=r,r,r,~{memory}",
        [x, np.int32(5)],
        [np.int32, np.int32],
        1,
        None,
    )
    assert np.array_equal(sums, x + 5) and np.array_equal(products, x * 5)
    (found,) = run("add.s32 $0, $0, 1;", "=r,0", [x], [np.int32], 1, None)
    assert np.array_equal(found, x + 1)
    assert np.array_equal(x, np.arange(6).reshape(2, 3))
    (narrow,) = run("add.u32 $0, $1, 1;", "=r,r", [np.array([0xFFFF, 1], np.uint16)], [np.uint16], 1, None)
    assert list(narrow) == [0, 2]  # a 16-bit element in a register of 32
    result = run("mov.u32 $0, 3;", "=r", [], [np.int32], 1, None)[0]
    assert result.shape == () and result == 3


def test_strided_and_broadcast_arguments():
    x = np.arange(64, dtype=np.uint16).reshape(8, 8)
    for argument in (
        x.reshape(-1)[::2],
        x[::2, ::2],
        x.T[:, :4],
        np.broadcast_to(np.arange(4, dtype=np.uint16), (3, 4)),
    ):
        (found,) = run("xor.b32 $0, $1, 0x00010001;", "=r,r", [argument], [np.uint16], 2, None)
        assert np.array_equal(found, argument ^ 1)
        found[:] = 0  # outputs are the caller's own


def test_scopes_comments_and_names():
    text = """
    {   /* an outer
           scope */ .reg .b32 t, %u<2>;
        mov.b32 t, 1; // t of the outer scope; not { this }
        { .reg .b32 t; mov.b32 t, 5; mov.b32 %u0, t; }
        add.u32 %u1, t, %u0;
        mov.u32 $0, %u1;
    }"""
    assert one(text, to=np.uint32) == 6


EXP2 = """{
    .reg .f32 x, whole, part;
    .reg .b32 y, power;
    max.ftz.f32 x, $1, 0fC2FE0000;                // -127
    add.rm.ftz.f32 whole, x, 0f4B400000;          // 1.5 * 2^23: the units of the sum are its last bits
    sub.rn.ftz.f32 part, whole, 0f4B400000;
    sub.rn.ftz.f32 part, x, part;
    fma.rn.ftz.f32 y, part, 0f3D9DF09D, 0f3E6906A4;
    fma.rn.ftz.f32 y, y, part, 0f3F31F519;
    fma.rn.ftz.f32 y, y, part, 1.0;
    mov.b32 power, whole;
    shl.b32 power, power, 23;
    add.s32 power, power, y;
    mov.b32 $0, power;
}"""


def test_the_polynomial_exp2_holds_its_bound():
    x = np.concatenate(
        [
            -np.abs(floats(28, 8000, 5)),
            np.linspace(-20, 4, 4001, dtype=np.float32),
            np.array([0, -126, -0.0, 1], np.float32),
        ]
    )
    x = x[x >= -126]
    found = one(EXP2, x)
    assert np.max(np.abs(found / np.exp2(x.astype(np.float64)) - 1)) < 1.1e-4
    assert (one(EXP2, np.array([-1e30, -INF], np.float32)) < 2.0**-125).all()
    whole = np.arange(-20, 5, dtype=np.float32)
    assert np.array_equal(one(EXP2, whole), np.exp2(whole))


def test_a_block_costs_little_beyond_its_arithmetic():
    x = floats(29, 8192)
    program = EXP2.replace(".rm", "")
    one(program, x)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        one(program, x)
        times.append(time.perf_counter() - start)
    assert min(times) < 3e-3
    assert parse(program, "=f,f") is parse(program, "=f,f")


# ---------------------------------------------------------------- effects


class Recorder:
    """A machine that writes down what it is asked"""

    def __init__(self):
        self.calls = []

    def barrier(self, number, threads, wait):
        self.calls.append(("barrier", number, threads, wait))

    def fence(self, name):
        self.calls.append(("fence", name))

    def bulk_commit(self):
        self.calls.append(("commit",))

    def bulk_wait(self, pending, read):
        self.calls.append(("wait", pending, read))

    def load(self, address, dtype, mask, order):
        self.calls.append(("load", list(address), dtype, None if mask is None else list(mask), order))
        return address.astype(dtype)

    def store(self, address, value, mask, order):
        self.calls.append(
            ("store", list(address), value.dtype, list(value), None if mask is None else list(mask), order)
        )

    def atomic(self, operation, address, operands, mask, order, returns):
        values = [(operand.dtype, operand.tolist()) for operand in operands]
        self.calls.append(
            ("atomic", operation, list(address), values, None if mask is None else list(mask), order, returns)
        )
        return (address + 1).astype(operands[0].dtype) if returns else None


ADDRESSES = np.array([128, 256], np.int64)


def effects(text, constraints, arguments, dtypes=(np.int32,)):
    machine = Recorder()
    return run(text, constraints, arguments, dtypes, 1, machine), machine.calls


def test_synchronisation_in_program_order():
    text = """bar.sync 3, 128; barrier.sync.aligned 2; bar.arrive 4, 256; barrier.arrive 5, $1;
        fence.proxy.async; fence.proxy.async.shared::cta; fence.acq_rel.gpu; fence.sc.sys; membar.gl;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 1; cp.async.bulk.wait_group.read 0;
        nanosleep.u32 20; griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;"""
    _, calls = effects(text, "=r,r", [np.full(2, 64, np.int32)])
    fences = ["fence.proxy.async", "fence.proxy.async.shared::cta", "fence.acq_rel.gpu", "fence.sc.sys", "membar.gl"]
    barriers = [(3, 128, True), (2, None, True), (4, 256, False), (5, 64, False)]
    assert calls == [
        *(("barrier", *b) for b in barriers),
        *(("fence", f) for f in fences),
        ("commit",),
        ("wait", 1, False),
        ("wait", 0, True),
    ]


def test_synchronisation_under_a_predicate():
    text = "{ .reg .pred p; setp.gt.s32 p, $1, 0; mov.u32 $0, 0; @p bar.sync 1, 32; }"
    assert effects(text, "=r,r", [np.array([1, 2], np.int32)])[1] == [("barrier", 1, 32, True)]
    assert effects(text, "=r,r", [np.array([0, -2], np.int32)])[1] == []
    with pytest.raises(ValueError, match=r"line 1: 'bar.sync' synchronises, and its predicate holds for some"):
        effects(text, "=r,r", [np.array([1, 0], np.int32)])


@pytest.mark.parametrize(
    "opcode, order, dtype",
    [
        ("ld.global.b32", "weak", np.uint32),
        ("ld.global.volatile.u32", "volatile", np.uint32),
        ("ld.acquire.gpu.global.s32", "acquire", np.int32),
        ("ld.global.relaxed.sys.f32", "relaxed", np.float32),
    ],
)
def test_loads(opcode, order, dtype):
    (found,), calls = effects(f"{opcode} $0, [$1+16];", "=r,l", [ADDRESSES], [dtype])
    assert calls == [("load", [144, 272], np.dtype(dtype), None, order)]
    assert np.array_equal(found, np.array([144, 272], dtype)) and found.dtype == dtype


def test_vector_loads_and_narrow_ones():
    found, calls = effects("ld.global.v2.f32 {$0, $1}, [$2];", "=f,=f,l", [ADDRESSES], [np.float32, np.float32])
    assert [call[1] for call in calls] == [[128, 256], [132, 260]] and [list(x) for x in found] == [
        [128, 256],
        [132, 260],
    ]
    (found,), _ = effects("ld.global.s8 $0, [$1 + -1];", "=r,l", [ADDRESSES])
    assert list(found) == [127, -1]  # 255 of 8 bits, sign and all
    (found,), _ = effects("ld.global.u8 $0, [$1+-1];", "=r,l", [ADDRESSES])
    assert list(found) == [127, 255]


def test_masked_loads_keep_what_was_there():
    text = "{ .reg .pred p; setp.gt.s32 p, $2, 0; mov.u32 $0, 7; @!p ld.global.u32 $0, [$1]; }"
    (found,), calls = effects(text, "=r,l,r", [ADDRESSES, np.array([1, 0], np.int32)])
    assert list(found) == [7, 256] and calls[0][3] == [False, True]


def test_stores():
    x = np.array([1.5, -2], np.float32)
    text = """{ .reg .b16 h; mov.b32 {h, _}, $2; mov.u32 $0, 0;
        st.global.release.gpu.f32 [$1+4], $2; st.global.v2.f32 [$1], {$2, 1.0}; st.global.b16 [$1], h; }"""
    _, calls = effects(text, "=r,l,f", [ADDRESSES, x])
    f32, u16 = np.dtype(np.float32), np.dtype(np.uint16)
    assert calls == [
        ("store", [132, 260], f32, [1.5, -2], None, "release"),
        ("store", [128, 256], f32, [1.5, -2], None, "weak"),
        ("store", [132, 260], f32, [1, 1], None, "weak"),
        ("store", [128, 256], u16, [0, 0], None, "weak"),
    ]


def test_reductions():
    x = np.array([1.5, -2], np.float32)
    text = """{ .reg .pred p; .reg .b32 h; setp.gt.f32 p, $2, 0.0; mov.u32 $0, 0;
        @p red.global.add.f32 [$1], $2;
        red.release.gpu.global.max.u32 [$1+8], 3;
        cvt.rn.f16x2.f32 h, $2, 1.0;
        red.global.add.noftz.f16x2 [$1], h;
        mov.b32 h, 0x3F804000; red.global.add.noftz.bf16x2 [$1], h; }"""
    _, calls = effects(text, "=r,l,f", [ADDRESSES, x])
    f16 = np.dtype(np.float16)
    assert calls == [
        ("atomic", "add", [128, 256], [(np.dtype(np.float32), [1.5, -2])], [True, False], "relaxed", False),
        ("atomic", "max", [136, 264], [(np.dtype(np.uint32), [3, 3])], None, "release", False),
        ("atomic", "add", [128, 256], [(f16, [1, 1])], None, "relaxed", False),
        ("atomic", "add", [130, 258], [(f16, [1.5, -2])], None, "relaxed", False),
        ("atomic", "add", [128, 256], [(BFLOAT16, [(0x4000,)] * 2)], None, "relaxed", False),
        ("atomic", "add", [130, 258], [(BFLOAT16, [(0x3F80,)] * 2)], None, "relaxed", False),
    ]


def test_vector_reductions_of_packed_elements():
    machine, address, x = Recorder(), np.arange(8, dtype=np.int64) * 4, np.arange(8, dtype=np.float32)
    text = "red.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;"
    (zeros,) = run(text, "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [address, x], [np.int32], 4, machine)
    assert zeros.shape == (8,) and not zeros.any()
    assert [(call[2], call[3][0][1]) for call in machine.calls] == [([4 * i, 16 + 4 * i], [i, 4 + i]) for i in range(4)]


def test_vectors_of_pairs_are_one_call_a_half():
    text = "red.global.add.noftz.v2.f16x2 [$1], {$2, $3}; mov.u32 $0, 0;"
    _, calls = effects(
        text, "=r,l,r,r", [ADDRESSES, np.full(2, 0x40003C00, np.int32), np.full(2, 0x44004200, np.int32)]
    )
    assert [(call[2], call[3][0][1]) for call in calls] == [
        ([128 + 2 * i, 256 + 2 * i], [1 + i, 1 + i]) for i in range(4)
    ]


def test_atomics_return_the_old_value():
    (old,), calls = effects(
        "atom.global.acq_rel.gpu.cas.b32 $0, [$1], 5, $2;", "=r,l,r", [ADDRESSES, np.array([8, 9], np.int32)]
    )
    assert list(old) == [129, 257]
    u32 = np.dtype(np.uint32)
    assert calls == [("atomic", "cas", [128, 256], [(u32, [5, 5]), (u32, [8, 9])], None, "acq_rel", True)]
    (old,), calls = effects(
        "atom.global.add.noftz.f16x2 $0, [$1], $2;", "=r,l,r", [ADDRESSES, np.array([0, 0], np.int32)]
    )
    assert len(calls) == 2
    assert np.array_equal(old[:, None].view(np.float16), [[129, 131], [257, 259]])
    effects("atom.global.exch.b32 _, [$1], $2; mov.u32 $0, 0;", "=r,l,r", [ADDRESSES, np.array([0, 0], np.int32)])


def test_a_scalar_address_is_asked_once_an_element():
    _, calls = effects(
        "red.global.add.u32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [np.int64(64), np.arange(3, dtype=np.int32)]
    )
    assert calls[0][2] == [64, 64, 64]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "mov.u32 $0, 0;\nfrobnicate.b32 $0, 1;",
            r"line 2: 'frobnicate.b32' is not supported; supported opcodes: abs, add, .*xor",
        ),
        ("again: mov.u32 $0, 0;", r"line 1: no branch before the label 'again'"),
        ("mov.u32 $0, 0;\n\nbra.uni on; on:", r"line 3: 'bra.uni': is an unconditional branch; give it a predicate"),
        ("elect.sync _|p, 1;", "'elect.sync' is not supported"),
        ("add.b32 $0, 1, 2;", r"'add.b32': has no supported type; supported types: .*s32"),
        ("add.rz.f16x2 $0, 1, 2;", r"rounding .rz of .f16x2"),
        ("add.wide.s32 $0, 1, 2;", r"modifier '.wide' is not supported"),
        ("mul.s32 $0, 1, 2;", "without .lo, .hi or .wide"),
        ("ld.shared.u16 $0, [$1];", r"modifier '.shared'"),
        ("cp.async.cg $0, 1;", "is not a supported copy"),
        ("fence.proxy.tensormap $0;", "is not a supported fence"),
        ("setp.ltu.s32 $0, 1, 2;", "comparison .ltu of .s32"),
        (".shared .b32 x;", "only instructions, labels, .reg and .shared are known"),
        ("cvt.s32.f32 $0, 1.0;", "needs .rni, .rzi"),
        (
            "{ .reg .pred p; AGAIN: setp.eq.s32 p, 1, 1; @!p bra AGAIN; } mov.u32 $0, 0;",
            "is a backward branch; supported is a loop of one mbarrier.try_wait",
        ),
    ],
)
def test_what_is_not_known_is_said(text, message):
    with pytest.raises(NotImplementedError, match=message):
        run(text, "=r", [], [np.int32], 1, Recorder())


@pytest.mark.parametrize(
    "text, message",
    [
        ("mov.u32 $0, 0", "does not end with a semicolon"),
        ("{ mov.u32 $0, 0;", "never closed"),
        ("mov.u32 $0, 0; }", "closes nothing"),
        ("mov.u32 $0, t;", "register 't' is not declared"),
        ("{ .reg .b32 t; mov.u32 $0, t; }", "'t' is read before it is written"),
        ("{ .reg .b32 t; mov.u32 t, 0; }", r"output \$0 is never written"),
        ("{ .reg .b64 t; mov.b64 t, 0; add.u32 $0, t, 1; }", "'t' has 64 bits, .u32 has 32"),
        ("add.u32 $0, 1;", "has 2 operands, not 3"),
        ("fma.rn.f32 $0, 1, 2, 3;", r"constant '1' for .f32; write it as 1.0"),
        ("mov.u32 $0, 0x1FFFFFFFF;", "constant '0x1FFFFFFFF' for .u32"),
        ("mov.u32 $0, 0d0000000000000000;", "constant '0d0"),
        ("{ .reg .f32 t; mov.f32 t, 1.0; add.s32 $0, t, 1; }", "'t' and .s32: one is of floats, one of integers"),
        ("mov.u32 $0, 0;;", "'' is not an instruction"),
        ("ld.global.u32 $0, $0;", "'\\$0' is not an address"),
        ("mov.u32 5, 6;", "'5' is not a register"),
        ("cvt.rn.f16x2.f32 $0, 1.0;", "makes 2 lanes of 1"),
    ],
)
def test_what_ptxas_would_refuse_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        run(text, "=r", [], [np.int32], 1, Recorder())


def test_calls_that_do_not_fit_are_refused():
    x = np.zeros((2, 3), np.float32)
    move = "mov.f32 $0, $1;"
    for arguments, dtypes, pack, constraints, message in (
        ([x, np.zeros(3, np.float32)], [np.float32], 1, "=f,f,f", "one shape"),
        ([x], [np.float32], 2, "=f,f", "pack=2 does not divide"),
        ([x, x], [np.float32], 1, "=f,f", "name 1 input registers.* take 2"),
        ([x], [np.float32, np.float32], 1, "=f,f", "name 1 output registers.* take 2"),
        ([x.astype(np.float64)], [np.float32], 1, "=f,f", "64 bits does not fit the 32-bit"),
        ([x], [np.float64], 1, "=f,f", "an output of 64 bits from the 32-bit"),
        ([x], [np.float32], 1, "=f,x", "constraint 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(move, constraints, arguments, dtypes, pack, None)
    with pytest.raises(ValueError, match="writes to '\\$1', an input"):
        run("mov.f32 $0, $1; mov.f32 $1, 0.0;", "=f,f", [x], [np.float32], 1, None)


def test_effects_need_a_machine():
    with pytest.raises(ValueError, match=r"line 1: 'bar.sync' touches memory or synchronises, and machine is None"):
        run("bar.sync 0; mov.u32 $0, 0;", "=r", [], [np.int32], 1, None)
    with pytest.raises(ValueError, match="must be the same for all"):
        effects("bar.sync $1; mov.u32 $0, 0;", "=r,r", [np.array([1, 2], np.int32)])
