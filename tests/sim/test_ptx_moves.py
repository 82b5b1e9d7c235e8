"""PTX conversions, moves, constants and packing, bit for bit."""

import time
from fractions import Fraction

import numpy as np
import pytest
import torch

from strobe.sim.ptx import parse, run
from tests.sim.ptx_calls import INF, NAN, OTHERS, SPECIAL, WORDS, as_half, bits, floats, one, raw, rounded

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
