"""libdevice: each function that Triton offers, against Python's mathematics and exact fractions."""

import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.language.extra.libdevice import tanh

from strobe.sim import simulate
from strobe.sim.libdevice import call

TYPES = dict(fp32=np.float32, fp64=np.float64, int32=np.int32, int64=np.int64, uint32=np.int32, uint64=np.int64)
ENTRY = re.compile(r'((?:\(core\.dtype\("\w+"\),? ?)+)\): \("(__nv_\w+)", core\.dtype\("(\w+)"\)\)')
FUNCTIONS = [
    (symbol, re.findall(r'"(\w+)"', types), result)
    for types, symbol, result in ENTRY.findall(Path(cuda_libdevice.__file__).read_text())
]


@pytest.mark.parametrize("symbol, types, result", FUNCTIONS, ids=[f"{s}-{'-'.join(t)}" for s, t, _ in FUNCTIONS])
def test_every_function_of_the_library_gives_its_type(symbol, types, result):
    arguments = [np.array([[0.25, 0.5]] if name[0] == "f" else [[3, 5]], TYPES[name]) for name in types]
    found = call(symbol, arguments, np.dtype(TYPES[result]))
    assert found.dtype == TYPES[result] and found.shape == (1, 2)
    assert np.isfinite(found).all() != symbol.startswith("__nv_acosh")  # whose domain begins at 1


def test_an_unknown_name_is_told():
    with pytest.raises(NotImplementedError, match="libdevice's waltz"):
        call("__nv_waltz", [np.float32([1])], np.dtype(np.float32))


REFERENCES = dict(
    acos=math.acos, acosh=lambda x: math.acosh(1 + x), asin=math.asin, asinh=math.asinh, atan=math.atan,
    atanh=math.atanh, cos=math.cos, cosh=math.cosh, erf=math.erf, erfc=math.erfc, exp=math.exp, expm1=math.expm1,
    lgamma=math.lgamma, log=math.log, log10=math.log10, log1p=math.log1p, log2=math.log2, sin=math.sin, sinh=math.sinh,
    sqrt=math.sqrt, tan=math.tan, tanh=math.tanh, tgamma=math.gamma, exp2=lambda x: 2.0**x, exp10=lambda x: 10.0**x,
    cbrt=lambda x: x ** (1 / 3), rcbrt=lambda x: x ** (-1 / 3), rsqrt=lambda x: x**-0.5, floor=math.floor,
    ceil=math.ceil, trunc=math.trunc, rint=round, nearbyint=round, cospi=lambda x: math.cos(math.pi * x),
    sinpi=lambda x: math.sin(math.pi * x), normcdf=lambda x: math.erfc(-x / math.sqrt(2)) / 2,
)  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
def test_a_real_function_is_right_to_the_last_place(name):
    x = np.random.default_rng(0).uniform(0.01, 0.99, 100).astype(np.float32)
    given = 1 + x if name == "acosh" else x
    found = call(f"__nv_{name}f", [given], np.dtype(np.float32))
    exact = [REFERENCES[name](float(given[i] - np.float32(1)) if name == "acosh" else float(x[i])) for i in range(100)]
    np.testing.assert_array_max_ulp(found, np.array(exact, np.float32), maxulp=1)


EXACT = {
    "add": lambda x, y: Fraction(x) + Fraction(y), "sub": lambda x, y: Fraction(x) - Fraction(y),
    "mul": lambda x, y: Fraction(x) * Fraction(y), "div": lambda x, y: Fraction(x) / Fraction(y),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f", "d"])
@pytest.mark.parametrize("name", EXACT)
def test_a_rounding_direction(name, kind):
    dtype = np.float32 if kind == "f" else np.float64
    x, y = np.random.default_rng(1).standard_normal((2, 50)).astype(dtype)
    found = {mode: call(f"__nv_{kind}{name}_{mode}", [x, y], np.dtype(dtype)) for mode in ("rn", "rz", "rd", "ru")}
    for i in range(50):
        exact = EXACT[name](float(x[i]), float(y[i]))
        down, up = Fraction(float(found["rd"][i])), Fraction(float(found["ru"][i]))
        assert down <= exact <= up
        assert down == up == exact or np.nextafter(found["rd"][i], dtype(np.inf)) == found["ru"][i]
        assert found["rz"][i] == (found["rd"][i] if exact > 0 else found["ru"][i])
        assert abs(Fraction(float(found["rn"][i])) - exact) <= min(exact - down, up - exact)


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    "name, given, expected",
    [
        ("float2int_rn", [2.5, 3.5, -1e20, np.nan], [2, 4, -(2**31), 0]),
        ("float2int_rz", [-2.7, 2.7], [-2, 2]),
        ("float2uint_ru", [0.1, 3e9, -5.0], [1, 3_000_000_000 - 2**32, 0]),
        ("double2float_rd", [0.1], [0.09999999403953552]),
        ("double2float_ru", [0.1], [0.10000000149011612]),
        ("int2float_rz", [2**24 + 1, -(2**24) - 1], [2**24, -(2**24)]),
        ("ilogbf", [8.0, 0.1], [3, -4]),
        ("roundf", [0.5, -2.5, 1.4], [1, -3, 1]),
        ("saturatef", [-1.0, 0.5, 7.0, np.nan], [0, 0.5, 1, 0]),
        ("float2ll_rz", [np.nan, 1e30, -1.5], [-(2**63), 2**63 - 1, -1]),
        ("float2ull_rz", [np.nan, -1.0], [-(2**63), 0]),
        ("double2int_rz", [np.nan, 1.5], [-(2**31), 1]),
        ("llrintf", [np.nan, 2.5], [-(2**63), 2]),
        ("llroundf", [np.nan, 2.5], [-(2**63), 3]),
        ("double2float_rz", [1e300, -1e300, np.inf], [LARGEST, -LARGEST, np.inf]),
        ("double2float_rd", [1e300, -1e300], [LARGEST, -np.inf]),
        ("double2float_ru", [1e300, -1e300], [np.inf, -LARGEST]),
        ("double2float_ru", [np.nextafter(LARGEST, np.inf)], [np.inf]),
        ("frcp_rz", [0.0, -np.inf], [np.inf, 0]),
        ("tgammaf", [200.0, 5.0, 0.0, -0.0, -1.0, -np.inf], [np.inf, 24, np.inf, -np.inf, np.nan, np.nan]),
        ("erfcinvf", [1e-20, 0.0, 2.0, 1.0], [6.6015806, np.inf, -np.inf, 0]),
        ("sinpif", [1.0, 0.5, -2.0, 1.5, 1e9, np.inf], [0, 1, 0, -1, 0, np.nan]),
        ("cospif", [0.5, 1.5, 1.0, -2.5, np.inf], [0, 0, -1, 0, np.nan]),
    ],
)
def test_conversions_and_rounding(name, given, expected):
    source = np.float64 if name[0] == "d" else np.int32 if name[0] == "i" and "2" in name else np.float32
    result = np.int32 if "int" in name.partition("2")[2] or name == "ilogbf" else np.float32
    result = np.int64 if "ll" in name else result
    found = call(f"__nv_{name}", [np.array(given, source)], np.dtype(result))
    np.testing.assert_array_equal(found, np.array(expected, result))


@pytest.mark.parametrize(
    "name, given, expected",
    [
        ("popc", [[-1, 5, 0]], [32, 2, 0]),
        ("clz", [[1, -1, 0]], [31, 0, 32]),
        ("ffs", [[8, 0, 1]], [4, 0, 1]),
        ("brev", [[1, 2]], [-(2**31), 2**30]),
        ("mulhi", [[2**30, -(2**30)], [8, 8]], [2, -2]),
        ("umulhi", [[-1], [-1]], [-2]),
        ("mul24", [[2**24 - 1], [3]], [-3]),
        ("hadd", [[-3], [2]], [-1]),
        ("rhadd", [[-3], [2]], [0]),
        ("sad", [[1], [5], [10]], [14]),
        ("byte_perm", [[0x03020100], [0x07060504], [0x5140]], [0x05010400]),
    ],
)
def test_bits_of_integers(name, given, expected):
    found = call(f"__nv_{name}", [np.array(one, np.int32) for one in given], np.dtype(np.int32))
    assert found.tolist() == expected


def test_round_of_float64_is_exact():
    x = np.array([4503599627370497.0, 0.49999999999999994, 0.5, -2.5, 2.0**60, -0.0, np.inf, np.nan])
    found = call("__nv_round", [x], np.dtype(np.float64))
    np.testing.assert_array_equal(found, [4503599627370497.0, 0, 1, -3, 2.0**60, 0, np.inf, np.nan])
    assert np.signbit(found[5])


@triton.jit
def functions_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    value = tl.load(x + at)
    tl.store(out + at, libdevice.asin(value))
    tl.store(out + SIZE + at, tl.extra.libdevice.pow(value, 2.0))
    tl.store(out + 2 * SIZE + at, tanh(value))


def test_a_kernel_calls_the_library_by_each_of_its_names():
    x = torch.linspace(-1, 1, 64)
    out = torch.empty(3, 64)
    with simulate("sm_90"):
        functions_kernel[(1,)](x, out, 64)
    torch.testing.assert_close(out, torch.stack([x.asin(), x**2, x.tanh()]), rtol=1e-6, atol=1e-7)
