"""PTX arithmetic over whole arrays: types, rounding, and the function of each arithmetic opcode.

A register is a one-dimensional array of unsigned bits. `Kind.read` converts it to values, `Kind.write` converts back,
and `RULES` defines the opcodes. Rounding follows PTX: fused operations round once, ties go to even, and NaN results are
canonical. Operations that the hardware approximates (`ex2.approx`, `div.full`, `tanh.approx`) have NumPy's precision,
which is higher.

Source: NVIDIA's PTX ISA, version 8.8, chapter 9.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np

from . import formats
from .formats import from_bfloat16

# ---------------------------------------------------------------- types

UNSIGNED = {
    1: np.dtype(bool),
    8: np.dtype(np.uint8),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
    64: np.dtype(np.uint64),
}
SIGNED = {8: np.dtype(np.int8), 16: np.dtype(np.int16), 32: np.dtype(np.int32), 64: np.dtype(np.int64)}
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # NumPy has no bfloat16: its bits are passed under this name

SMALL = {"f16": "fp16", "bf16": "bf16", "e4m3": "fp8e4nv", "e5m2": "fp8e5"}  # PTX's name -> Triton's
LARGEST = {
    "f16": float(np.finfo(np.float16).max),
    "f32": float(np.finfo(np.float32).max),
    "f64": float(np.finfo(np.float64).max),
    "bf16": float(from_bfloat16(0x7F7F)),
    "e4m3": formats.LARGEST["fp8e4nv"],
    "e5m2": formats.LARGEST["fp8e5"],
}
_ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)
WIDENED = {  # all values as float32, indexed by their bits
    "f16": _ALL_16_BITS.view(np.float16).astype(np.float32),
    "bf16": from_bfloat16(_ALL_16_BITS),
    "e4m3": formats.VALUES["fp8e4nv"],
    "e5m2": formats.VALUES["fp8e5"],
}
NAN32 = np.uint32(0x7FFFFFFF).view(np.float32)
TINY32 = np.float32(2.0**-126)
ROUNDINGS = ("rn", "rz", "rm", "rp")


@dataclass(frozen=True)
class Kind:
    """A PTX type: `bf16x2` has 2 lanes of 16 bits and family "f".

    Families: f(loat), s(igned), u(nsigned), b(its), p(redicate).
    """

    name: str
    family: str
    bits: int
    number: np.dtype  # dtype of a lane in memory
    lanes: int = 1

    @property
    def width(self):
        return self.bits * self.lanes

    @property
    def lane(self):
        return self.name.removesuffix("x2")

    def read(self, bits):
        """Registers as values: small floats as float32, packed lanes along a second axis."""
        if self.lanes > 1:
            bits = bits[:, None].view(UNSIGNED[self.bits])
        return WIDENED[self.lane][bits] if self.lane in SMALL else bits.view(self.number)

    def write(self, values, mode="rn"):
        """Values as the bits of registers."""
        if self.lane in SMALL:
            values = narrowed(values, self.lane, mode)
        elif self.bits == 32 and self.family == "f":
            invalid = np.isnan(values)
            values = np.where(invalid, NAN32, values) if invalid.any() else values
        return (
            (np.ascontiguousarray(values).view(UNSIGNED[self.width])[:, 0])
            if self.lanes > 1
            else values.view(UNSIGNED[self.bits])
        )


def _kinds():
    kinds = {"pred": Kind("pred", "p", 1, UNSIGNED[1])}
    for family, numbers in (("b", UNSIGNED), ("u", UNSIGNED), ("s", SIGNED)):
        kinds |= {f"{family}{bits}": Kind(f"{family}{bits}", family, bits, numbers[bits]) for bits in SIGNED}
    floats = {
        "f16": np.float16,
        "bf16": BFLOAT16,
        "f32": np.float32,
        "f64": np.float64,
        "e4m3": np.uint8,
        "e5m2": np.uint8,
    }
    for name, number in floats.items():
        number = np.dtype(number)
        kinds[name] = Kind(name, "f", 8 * number.itemsize, number)
        if name != "f64":
            kinds[name + "x2"] = Kind(name + "x2", "f", 8 * number.itemsize, number, 2)
    return kinds


KINDS = _kinds()
PRED, U32, B32 = KINDS["pred"], KINDS["u32"], KINDS["b32"]


def fit(bits, width, signed=False):
    """Registers in another width: low bits, or extended by zeros or the sign."""
    if 8 * bits.itemsize == width or bits.dtype == bool:
        return bits
    return (
        bits.view(SIGNED[8 * bits.itemsize]).astype(SIGNED[width]).view(UNSIGNED[width])
        if signed
        else bits.astype(UNSIGNED[width])
    )


def join(parts):
    """Registers concatenated into one, the first lowest."""
    combined = np.empty((max(map(len, parts)), len(parts)), parts[0].dtype)
    for i, part in enumerate(parts):
        combined[:, i] = part
    return combined.view(UNSIGNED[8 * combined.itemsize * len(parts)])[:, 0]


def split(bits, count):
    """A register split into `count` smaller ones, the lowest first."""
    parts = bits[:, None].view(UNSIGNED[8 * bits.itemsize // count])
    return [parts[:, i] for i in range(count)]


# ---------------------------------------------------------------- rounding


def directed(bits, remainder, mode):
    """The nearest floats (as bits) moved to the neighbour required by rounding `mode`. `remainder` has the sign of
    exact - nearest.
    """
    negative, down, up = (bits >> (8 * bits.itemsize - 1)).astype(bool), remainder < 0, remainder > 0
    toward, away = {
        "rz": (np.where(negative, up, down), np.False_),
        "rm": (down & ~negative, down & negative),
        "rp": (up & negative, up & ~negative),
    }[mode]
    return bits - toward.astype(bits.dtype) + away.astype(bits.dtype)


def two_sum(a, b):
    """a + b without loss: (rounded sum, error) (Knuth's TwoSum)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def odd(total, error):
    """total + error rounded to odd, so that rounding to fewer bits is correct (Boldo and Melquiond)."""
    bits = total.view(np.int64)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    return np.where(inexact, bits + np.where((error < 0) == (total < 0), 1, -1), bits).view(np.float64)


def odd32(values):
    """float64 rounded to odd in float32."""
    nearest = values.astype(np.float32)
    wide = nearest.astype(np.float64)
    return (directed(nearest.view(np.uint32), values - wide, "rz") | (wide != values)).view(np.float32)


_SMALL_BITS = {
    "f16": lambda x: x.astype(np.float16).view(np.uint16),
    "bf16": formats.bfloat16_bits,
    "e4m3": lambda x: formats.float8_bits(x, "fp8e4nv"),
    "e5m2": lambda x: formats.float8_bits(x, "fp8e5"),
}


def narrowed(values, name, mode="rn"):
    """float32 rounded to a small type, as bits."""
    values = np.ascontiguousarray(values, np.float32)
    bits = _SMALL_BITS[name](values)
    invalid = np.isnan(values)
    if mode != "rn":
        bits = directed(bits, np.where(invalid, 0, values - WIDENED[name][bits]), mode)
    return (
        np.where(invalid, UNSIGNED[8 * bits.itemsize].type((1 << 8 * bits.itemsize - 1) - 1), bits)
        if invalid.any()
        else bits
    )


def exact_fma(a, b, c):
    """float32 a * b + c as (float64 sum, error)."""
    return two_sum(np.multiply(a, b, dtype=np.float64), c.astype(np.float64))


def fma_odd(a, b, c):
    return odd32(odd(*exact_fma(a, b, c)))


def fma32(a, b, c):
    """Fused multiply-add in float64, rounded to float32. The double rounding differs only for ties between two float32
    and for subnormals, which are corrected.
    """
    total = np.multiply(a, b, dtype=np.float64) + c
    result = total.astype(np.float32)
    suspect = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    small = np.abs(result) <= TINY32
    if small.any():
        suspect |= small & (total != 0)
    if suspect.any():
        result[suspect] = odd(*exact_fma(*(np.broadcast_to(x, total.shape)[suspect] for x in (a, b, c)))).astype(
            np.float32
        )
    return result


def _halves(x):
    scaled = x * 134217729.0  # 2**27 + 1: splits off the upper 26 bits (Veltkamp)
    upper = scaled - (scaled - x)
    return upper, x - upper


def fma64(a, b, c):
    """Fused float64 multiply-add (Boldo and Melquiond). Products near 2**996 or 2**-969 round twice."""
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    product = a * b
    rest = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    low, lower = two_sum(c, rest)
    high, middle = two_sum(product, low)
    result = high + odd(*two_sum(middle, lower))
    return np.where(np.isfinite(result), result, product + c)


def flush(values):
    """Subnormal float32 become zeros of their sign."""
    small = np.abs(values) < TINY32
    return np.where(small, np.copysign(np.float32(0), values), values) if small.any() else values


def clamped(values, mods, largest=np.inf):
    """Apply .sat, .relu and .satfinite to a result."""
    if "sat" in mods:
        values = np.where(values > 0, np.minimum(values, values.dtype.type(1)), values.dtype.type(0))
    if "relu" in mods:
        values = np.where((values > 0) | np.isnan(values), values, values.dtype.type(0))
    return np.clip(values, -largest, largest) if "satfinite" in mods else values


# ---------------------------------------------------------------- arithmetic


def floating(kind, mods, nearest, remainder=None):
    """A float function with its modifiers. `remainder(result, *values)` has the sign of exact - result."""
    mode = next((mod for mod in mods if mod in ROUNDINGS), "rn")
    if mode != "rn" and (remainder is None or kind.bits != 32):
        raise NotImplementedError(
            f"rounding .{mode} of .{kind.name} is not supported here; supported: .rn, and all of .f32"
        )
    if "ftz" in mods and kind.lane not in ("f32", "bf16"):
        raise NotImplementedError(f".ftz of .{kind.name} is not supported; supported: .f32 and .bf16")

    def function(*values):
        if "ftz" in mods:
            values = [flush(value) for value in values]
        result = nearest(*values)
        if mode != "rn" and remainder:
            result = directed(result.view(np.uint32), remainder(result, *values), mode).view(np.float32)
        return clamped(flush(result) if "ftz" in mods else result, mods)

    return function if len(mods) > ("rn" in mods) else nearest


ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)
FUSED: dict[str, tuple[Any, Any]] = {  # float32 and float64, integers, and the same operation as an exact a * b + c
    "add": (np.add, lambda a, b: (a, ONE, b)),
    "sub": (np.subtract, lambda a, b: (b, -ONE, a)),
    "mul": (np.multiply, lambda a, b: (a, b, -ZERO)),
    "fma": (None, lambda a, b, c: (a, b, c)),
}


def fused(name, kind, mods):
    plain, triple = FUSED[name]
    if kind.family != "f":
        return saturating(plain, kind) if "sat" in mods else plain

    def remainder(result, *values):
        total, error = exact_fma(*triple(*values))
        return (total - result) + error

    nearest = plain or (fma64 if kind.bits == 64 else fma32)
    return floating(kind, mods, (lambda *values: fma_odd(*triple(*values))) if kind.bits == 16 else nearest, remainder)


def saturating(function, kind):
    if kind.name != "s32":
        raise NotImplementedError(f".sat of .{kind.name}")
    return lambda a, b: np.clip(function(a, b, dtype=np.int64), -(1 << 31), (1 << 31) - 1).astype(np.int32)


def high_half(a, b, kind):
    """The upper half of an integer product."""
    if kind.bits < 64:
        wide = (SIGNED if kind.family == "s" else UNSIGNED)[2 * kind.bits]
        return (np.multiply(a, b, dtype=wide) >> kind.bits).astype(kind.number)
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    middle = (x >> half) * (y & mask) + ((x & mask) * (y & mask) >> half)
    carry = (x & mask) * (y >> half) + (middle & mask)
    high = (x >> half) * (y >> half) + (middle >> half) + (carry >> half)
    if kind.family == "s":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(kind.number)


def product(kind, mods):
    """The function of mul."""
    if kind.family == "f":
        return fused("mul", kind, mods)
    if "lo" in mods:
        return np.multiply
    return (
        (lambda a, b: np.multiply(a, b, dtype=twice(kind).number)) if "wide" in mods else partial(high_half, kind=kind)
    )


def multiply_add(kind, mods):
    """The function of mad, which is fma for floats."""
    if kind.family == "f":
        return fused("fma", kind, mods)
    multiply = product(kind, mods)
    return lambda a, b, c: multiply(a, b) + c


def quotient(kind, mods):
    if kind.family == "f":

        def nearest(a, b):  # div.approx: the reciprocal of a divisor from 2**126 on is flushed
            return a * np.where(np.abs(b) > 2.0**126, np.copysign(ZERO, b), 1 / b) if "approx" in mods else a / b

        return floating(
            kind, mods, nearest, lambda n, a, b: (a.astype(np.float64) - n.astype(np.float64) * b) * np.sign(b)
        )

    def whole(a, b):
        """Integer division towards zero. Division by zero gives all ones, as on hardware (PTX leaves it undefined)."""
        down = a // b
        return np.where(
            b == 0,
            kind.number.type(-1) if kind.family == "s" else ~kind.number.type(0),
            down + ((down < 0) & (down * b != a)),
        )

    return lambda a, b: whole(a, b).astype(kind.number)


def reciprocal(kind, mods):
    return floating(kind, mods, lambda x: 1 / x, lambda n, x: (1 - n.astype(np.float64) * x) * np.sign(x))


def root(kind, mods):
    return floating(kind, mods, np.sqrt, lambda n, x: x - np.square(n, dtype=np.float64))


def inverse_root(kind, mods):
    return floating(kind, mods, lambda x: (1 / np.sqrt(x, dtype=np.float64)).astype(x.dtype))


def plain(function):
    return lambda kind, mods: floating(kind, mods, function) if kind.family == "f" else function


def extreme(name, kind, mods):
    """min and max of two or three. A number wins over NaN unless .NaN is given; -0 is below +0."""
    if kind.family != "f":
        return lambda *values: reduce(getattr(np, f"{name}imum"), values)
    choose = getattr(np, f"{name}imum" if "NaN" in mods else f"f{name}")
    if "xorsign" in mods:
        return floating(kind, mods, lambda a, b: _with_both_signs(choose(np.abs(a), np.abs(b)), a, b))
    zeros = np.bitwise_and if name == "max" else np.bitwise_or

    def one(a, b):
        bits = zeros(a.view(UNSIGNED[8 * a.itemsize]), b.view(UNSIGNED[8 * b.itemsize]))
        return np.where(a == b, bits.view(a.dtype), choose(a, b))

    return floating(kind, mods, lambda *values: reduce(one, values))


def _with_both_signs(size, a, b):
    """A magnitude that is negative where just one of a and b is."""
    return np.where(np.signbit(a) ^ np.signbit(b), -size, size)


COMPARED = {
    **{
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    },
    **{"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
    **{
        "num": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
        "nan": lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
    },
}
JOINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
UNORDERED = {name + "u": name for name in ("eq", "ne", "lt", "le", "gt", "ge")} | {"nan": "nan"}


def comparison(kind, mods):
    """setp p|q: the comparison and its complement, each combined with a predicate if there is one."""
    name = next((mod for mod in mods if mod in COMPARED or mod in UNORDERED), "")
    if (
        not name
        or (kind.family != "f" and (name in UNORDERED or name == "num"))
        or (kind.family == "f" and name in ("lo", "ls", "hi", "hs"))
    ):
        raise NotImplementedError(f"comparison .{name} of .{kind.name} is not supported")
    compare, combine = COMPARED[UNORDERED.get(name, name)], next((JOINED[mod] for mod in mods if mod in JOINED), None)

    def function(a, b, *given):
        if "ftz" in mods:
            a, b = flush(a), flush(b)
        holds = compare(a, b)
        if kind.family == "f":
            unordered = np.isnan(a) | np.isnan(b)
            holds = holds | unordered if name in UNORDERED else holds & ~unordered
        return [combine(x, *given) for x in (holds, ~holds)] if combine else [holds, ~holds]

    return function


# ---------------------------------------------------------------- bits


def shift(function):
    """A shift by the width or more clears the register (or fills it with the sign). NumPy has the same rule."""
    return lambda kind, mods: lambda a, amount: function(a, np.minimum(amount, kind.bits).astype(a.dtype))


def extract(kind, mods):
    def function(a, start, length):
        start, length = (np.minimum(x & 0xFF, kind.bits).astype(a.dtype) for x in (start, length))
        rest = a.dtype.type(kind.bits) - length
        return ((a >> start) << rest) >> rest

    return function


def insert(kind, mods):
    def function(a, b, start, length):
        one = a.dtype.type(1)
        start, length = ((x & 0xFF).astype(a.dtype) for x in (start, length))
        mask = ((one << length) - one) << start
        return (b & ~mask) | ((a << start) & mask)

    return function


PERMUTED = {  # selectors of each mode of prmt
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def permute(kind, mods):
    def function(a, b, selector):
        if mods:
            selector = np.array(PERMUTED[mods[0]], np.uint32)[selector & 3]
        pair, result = join([a, b]), np.uint32(0)
        for i in range(4):
            chosen = selector >> 4 * i & 0xF
            byte = (pair >> ((chosen & 7) * 8).astype(np.uint64) & 0xFF).astype(np.uint32)
            result = result | np.where(chosen & 8, (byte >> 7) * 0xFF, byte).astype(np.uint32) << 8 * i
        return result

    return function


def lookup(kind, mods):
    def function(a, b, c, table):
        if table.size != 1:
            raise ValueError("the truth table of lop3 must be a constant")
        rows = [i for i in range(8) if int(table[0]) >> i & 1]
        terms = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in rows]
        return reduce(np.bitwise_or, terms, a & b & c & np.uint32(0))

    return function


def _ones(bits):
    """Every bit of every register, the highest first."""
    return np.unpackbits(np.ascontiguousarray(bits)[:, None].view(np.uint8)[:, ::-1], axis=1)


def count_ones(kind, mods):
    return lambda bits: _ones(bits).sum(1, dtype=np.uint32)


def count_leading_zeros(kind, mods):
    return lambda bits: np.where(bits == 0, kind.bits, _ones(bits).argmax(1)).astype(np.uint32)


# ---------------------------------------------------------------- conversion

INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_float(values, source, target, mods):
    """Values of a float or integer type in the form that `target.write` takes."""
    if source.family != "f":
        if source.bits == 64 and (target.lane == "bf16" or "rn" not in mods):
            raise NotImplementedError(
                f"cvt of .{source.name} to .{target.name} rounds twice here: by way of .f64 it is exact"
            )
        values = values.astype(np.float32 if target.lane == "f32" and source.bits == 64 else np.float64)
    whole = next((INTEGRAL[mod] for mod in mods if mod in INTEGRAL), None)
    values = whole(values) if whole else values
    if target.bits == 64:
        return values.astype(np.float64)
    if values.dtype == np.float32:
        return values
    if target.lane != "f32":
        return odd32(values)
    mode, nearest = next((mod for mod in mods if mod in ROUNDINGS), "rn"), values.astype(np.float32)
    return nearest if mode == "rn" else directed(nearest.view(np.uint32), values - nearest, mode).view(np.float32)


def to_integer(values, source, target, mods):
    """To an integer type. Integers wrap or saturate; floats saturate, NaN becomes 0 (in 64 bits: the top bit alone)."""
    limits = np.iinfo(target.number)
    if source.family != "f":
        if "sat" in mods:
            own = np.iinfo(values.dtype)
            values = np.clip(
                values, values.dtype.type(max(own.min, limits.min)), values.dtype.type(min(own.max, limits.max))
            )
        return values.astype(target.number)
    whole = next((INTEGRAL[mod] for mod in mods if mod in INTEGRAL), None)
    if whole is None:
        raise NotImplementedError("converting a float to an integer needs .rni, .rzi, .rmi or .rpi")
    values = whole(values.astype(np.float64))
    under, over = values < float(limits.min), values >= float(limits.max) + (target.bits < 64)
    result = np.where(under | over | np.isnan(values), 0, values).astype(target.number)
    result = np.where(under, target.number.type(limits.min), np.where(over, target.number.type(limits.max), result))
    top = np.array(1 << target.bits - 1, UNSIGNED[target.bits]).view(target.number)
    return np.where(np.isnan(values), top if 64 in (source.bits, target.bits) else target.number.type(0), result)


def conversion(target, source, mods):
    """cvt: bits to bits. Of two sources the first becomes the upper lane."""
    mode = next((mod for mod in mods if mod in ROUNDINGS), "rn")

    def function(*bits):
        values = [source.read(fit(x, source.width)) for x in reversed(bits)]
        values = np.stack(np.broadcast_arrays(*values), -1) if len(bits) > 1 else values[0]
        if "ftz" in mods and source.lane == "f32":
            values = flush(values)
        if target.family != "f":
            return target.write(to_integer(values, source, target, mods))
        values = clamped(to_float(values, source, target, mods), mods, LARGEST[target.lane])
        if "ftz" in mods and target.lane == "f32":
            values = flush(values)
        return target.write(values, mode) if target.lane in SMALL else target.write(values)

    return function


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Rule:
    """An opcode: its types and modifiers, `shape(kind, mods, operands) -> (targets, sources)`, and `make(kind, mods)`,
    which returns the function of values.
    """

    types: str
    modifiers: str
    shape: Callable[..., tuple[list, list]]
    make: Callable
    raw: bool = False  # the function takes and returns bits instead of values


def same(count):
    return lambda kind, mods, operands: ([kind], [kind] * count)


def twice(kind):
    return KINDS[f"{kind.family}{2 * kind.bits}"]


def product_shape(kind, mods, operands):
    if kind.family != "f" and not {"lo", "hi", "wide"} & set(mods):
        raise NotImplementedError("without .lo, .hi or .wide")
    result = twice(kind) if "wide" in mods else kind
    return [result], [kind, kind] + [result] * (operands - 3)


def compared_shape(kind, mods, operands):
    sources = [kind, kind] + [PRED] * any(mod in JOINED for mod in mods)
    return [PRED] * min(2, operands - len(sources)), sources


def shaped(*sources, target=None):
    """(target types, source types) of operands with fixed types. None stands for the instruction's type."""
    return lambda kind, mods, operands: ([target or kind], [source or kind for source in sources])


WHOLE, SMALLER, WORDS = "s16 u16 s32 u32 s64 u64", "f16 f16x2 bf16 bf16x2", "b16 b32 b64"
FLOAT, ANY = f"{SMALLER} f32 f32x2 f64", f"b8 u8 s8 {WORDS} {WHOLE} f16 f16x2 bf16 bf16x2 f32 f64 pred"
ROUND = "rn rz rm rp ftz sat"
RULES = {
    "add": Rule(f"{FLOAT} {WHOLE}", ROUND, same(2), partial(fused, "add")),
    "sub": Rule(f"{FLOAT} {WHOLE}", ROUND, same(2), partial(fused, "sub")),
    "mul": Rule(f"{FLOAT} {WHOLE}", f"{ROUND} lo hi wide", product_shape, product),
    "mad": Rule(f"f32 f64 {WHOLE}", f"{ROUND} lo hi wide", product_shape, multiply_add),
    "fma": Rule(FLOAT, f"{ROUND} relu", same(3), partial(fused, "fma")),
    "div": Rule(f"f32 f64 {WHOLE}", f"{ROUND[:-4]} approx full", same(2), quotient),
    "rcp": Rule("f32 f64", f"{ROUND[:-4]} approx", same(1), reciprocal),
    "sqrt": Rule("f32 f64", f"{ROUND[:-4]} approx", same(1), root),
    "rsqrt": Rule("f32 f64", "approx ftz", same(1), inverse_root),
    "neg": Rule(f"{SMALLER} f32 f64 s16 s32 s64", "ftz", same(1), plain(np.negative)),
    "abs": Rule(f"{SMALLER} f32 f64 s16 s32 s64", "ftz", same(1), plain(np.abs)),
    "min": Rule(
        f"{SMALLER} f32 f64 {WHOLE}",
        "ftz NaN xorsign abs",
        lambda kind, mods, n: ([kind], [kind] * min(max(n - 1, 2), 3)),
        partial(extreme, "min"),
    ),
    "max": Rule(
        f"{SMALLER} f32 f64 {WHOLE}",
        "ftz NaN xorsign abs",
        lambda kind, mods, n: ([kind], [kind] * min(max(n - 1, 2), 3)),
        partial(extreme, "max"),
    ),
    "ex2": Rule(f"{SMALLER} f32", "approx ftz", same(1), plain(np.exp2)),
    "lg2": Rule("f32", "approx ftz", same(1), plain(np.log2)),
    "sin": Rule("f32", "approx ftz", same(1), plain(np.sin)),
    "cos": Rule("f32", "approx ftz", same(1), plain(np.cos)),
    "tanh": Rule(f"{SMALLER} f32", "approx", same(1), plain(np.tanh)),
    "setp": Rule(
        f"f16 bf16 f32 f64 {WHOLE} {WORDS}",
        " ".join((*COMPARED, *UNORDERED, *JOINED, "ftz")),
        compared_shape,
        comparison,
    ),
    "selp": Rule(
        ANY.removesuffix(" pred"),
        "",
        shaped(None, None, PRED),
        lambda kind, mods: lambda a, b, p: np.where(p, a, b),
        raw=True,
    ),
    "and": Rule(f"{WORDS} pred", "", same(2), lambda kind, mods: np.bitwise_and),
    "or": Rule(f"{WORDS} pred", "", same(2), lambda kind, mods: np.bitwise_or),
    "xor": Rule(f"{WORDS} pred", "", same(2), lambda kind, mods: np.bitwise_xor),
    "not": Rule(f"{WORDS} pred", "", same(1), lambda kind, mods: np.invert),
    "shl": Rule(WORDS, "", shaped(None, U32), shift(np.left_shift)),
    "shr": Rule(f"{WORDS} {WHOLE}", "", shaped(None, U32), shift(np.right_shift)),
    "bfe": Rule("s32 u32 s64 u64", "", shaped(None, U32, U32), extract),
    "bfi": Rule("b32 b64", "", shaped(None, None, U32, U32), insert),
    "prmt": Rule("b32", " ".join(PERMUTED), same(3), permute),
    "lop3": Rule("b32", "", shaped(None, None, None, U32), lookup),
    "popc": Rule("b32 b64", "", shaped(None, target=U32), count_ones),
    "clz": Rule("b32 b64", "", shaped(None, target=U32), count_leading_zeros),
}
