"""The evaluator of inline PTX against NumPy, torch, exact fractions and bits worked out by hand."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from strobe.sim.ptx import run
from tests.sim.ptx_calls import INF, NAN, OTHERS, SPECIAL, WORDS, as_half, bits, floats, one, raw, rounded


def pairs():
    """Random numbers, and every pair of special ones"""
    a, b = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
    return np.concatenate([floats(1), a]), np.concatenate([floats(2), b])


def same_floats(found, expected):
    """Equal, signs of zeros too; NaN where NaN is"""
    invalid = np.isnan(expected)
    assert np.array_equal(np.isnan(found), invalid)
    assert np.array_equal(bits(found)[~invalid], bits(expected)[~invalid])


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
