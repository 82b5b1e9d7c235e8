"""libdevice, CUDA's library of mathematical functions, in NumPy. float32 functions are computed in float64.

A GPU's results differ by the errors that the CUDA C++ Programming Guide lists: at most a few units in the last place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .arrays import torch_if_installed
from .values import UNSIGNED, saturated, unsigned

_DIRECTED = re.compile(r"(f|d|fma|fmaf)?(add|sub|mul|div|rcp|sqrt|rsqrt|fma|)_(rn|rz|rd|ru)")
_CONVERTS = re.compile(r"(float|double|int|uint|ll|ull)2(float|double|int|uint|ll|ull)_(rn|rz|rd|ru)")
_ROUND = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
_INTEGER = {"int": np.int32, "uint": np.uint32, "ll": np.int64, "ull": np.uint64}


def _special(name: str) -> Callable[..., np.ndarray]:
    """A function of torch.special, in float64."""

    def call(*x: Any) -> np.ndarray:
        torch = torch_if_installed()
        if torch is None:
            raise NotImplementedError(f"libdevice: {name} is computed by torch.special, and torch is not installed")
        given = (torch.from_numpy(np.ascontiguousarray(one, np.float64)) for one in x)
        return getattr(torch.special, name)(*given).numpy().reshape(np.shape(x[0]))

    return call


def _elementwise(function: Callable[..., float]) -> Callable[..., np.ndarray]:
    """A function of Python floats."""

    def one(*x: float) -> float:
        try:
            return function(*x)
        except (ValueError, OverflowError, ZeroDivisionError):
            return math.nan

    return np.vectorize(one, otypes=[np.float64])


def _bessel(kind: str) -> Callable[[Any, Any], np.ndarray]:
    """Bessel functions of integer order by the upward recurrence (downward integration by the integral for J)."""

    def integral(order: Any, x: Any) -> float:
        angle = np.linspace(0.0, np.pi, 4097)
        values = np.cos(int(order) * angle - float(x) * np.sin(angle))
        return float((values[1:] + values[:-1]).sum() / 2 / 4096)

    def second(order: Any, x: Any) -> float:
        below, at = (float(_special(f"bessel_y{n}")(np.array([float(x)]))[0]) for n in (0, 1))
        if int(order) == 0:
            return below
        for n in range(1, int(order)):
            below, at = at, 2 * n / float(x) * at - below
        return at

    return np.vectorize(integral if kind == "j" else second, otypes=[np.float64])


def _norm(*x: np.ndarray) -> np.ndarray:
    return np.sqrt(sum(np.square(np.asarray(one, np.float64)) for one in x))


def _round_half_away(x: np.ndarray) -> np.ndarray:
    size = np.abs(x)
    whole = np.trunc(size)
    return np.copysign(whole + (size - whole >= 0.5), x)


def _sine(x: np.ndarray, quarters: int) -> np.ndarray:
    """sin(pi (x + quarters / 2)). x is reduced exactly."""
    turn = np.fmod(x, 2)
    nearest = np.rint(2 * turn)
    rest = np.pi * (turn - nearest / 2)
    at = (nearest + quarters) % 4
    size = np.where(at % 2 == 0, np.sin(rest), np.cos(rest))
    return np.where(at >= 2, -size, size)


def _inverse_error(x: np.ndarray) -> np.ndarray:
    return _special("erfinv")(x)


def _inverse_complement(x: np.ndarray) -> np.ndarray:
    """erfcinv. 1 - x is exact from 0.5 on."""
    return np.where(x < 0.5, -_special("ndtri")(x / 2) / math.sqrt(2), _inverse_error(1 - x))


def _gamma(x: float) -> float:
    if x == 0:
        return math.copysign(math.inf, x)
    try:
        return math.gamma(x)
    except OverflowError:
        return math.inf


def erf(x: ArrayLike) -> np.ndarray:
    """The error function, in float64."""
    return _elementwise(math.erf)(np.asarray(x, np.float64))


def _lgamma(x: float) -> float:
    return math.inf if math.isinf(x) or (x <= 0 and x == math.floor(x)) else math.lgamma(x)


_REAL: dict[str, Callable[..., Any]] = dict(
    acos=np.arccos,
    acosh=np.arccosh,
    asin=np.arcsin,
    asinh=np.arcsinh,
    atan=np.arctan,
    atan2=np.arctan2,
    atanh=np.arctanh,
    cbrt=np.cbrt,
    ceil=np.ceil,
    copysign=np.copysign,
    cos=np.cos,
    cosh=np.cosh,
    cospi=lambda x: _sine(x, 1) + 0.0,  # no -0
    cyl_bessel_i0=_special("i0"),
    cyl_bessel_i1=_special("i1"),
    erf=erf,
    erfc=_elementwise(math.erfc),
    erfcinv=_inverse_complement,
    erfcx=_special("erfcx"),
    erfinv=_inverse_error,
    exp=np.exp,
    exp10=lambda x: np.power(10.0, x),
    exp2=np.exp2,
    expm1=np.expm1,
    fabs=np.abs,
    fast_fdivide=np.divide,
    fdim=lambda x, y: np.where(x > y, x - y, np.where(x <= y, 0, np.nan)),
    floor=np.floor,
    fmax=np.fmax,
    fmin=np.fmin,
    fmod=np.fmod,
    hypot=np.hypot,
    j0=_special("bessel_j0"),
    j1=_special("bessel_j1"),
    lgamma=_elementwise(_lgamma),
    log=np.log,
    log10=np.log10,
    log1p=np.log1p,
    log2=np.log2,
    logb=lambda x: np.where(x == 0, -np.inf, np.where(np.isinf(x), np.inf, np.frexp(x)[1] - 1.0)),
    nearbyint=np.rint,
    norm3d=_norm,
    norm4d=_norm,
    normcdf=_elementwise(lambda x: math.erfc(-x / math.sqrt(2)) / 2),
    normcdfinv=_special("ndtri"),
    pow=np.power,
    rcbrt=lambda x: 1 / np.cbrt(x),
    remainder=_elementwise(math.remainder),
    rhypot=lambda x, y: 1 / np.hypot(x, y),
    rint=np.rint,
    rnorm3d=lambda *x: 1 / _norm(*x),
    rnorm4d=lambda *x: 1 / _norm(*x),
    round=_round_half_away,
    rsqrt=lambda x: 1 / np.sqrt(x),
    saturate=lambda x: np.where(np.isnan(x), 0, np.clip(x, 0, 1)),
    sin=np.sin,
    sinh=np.sinh,
    sinpi=lambda x: np.where(x == np.trunc(x), 0 * x, _sine(x, 0)),
    sqrt=np.sqrt,
    tan=np.tan,
    tanh=np.tanh,
    tgamma=_elementwise(_gamma),
    trunc=np.trunc,
    y0=_special("bessel_y0"),
    y1=_special("bessel_y1"),
)
_INT32 = np.int32
# functions of which an operand or the result is an integer, by name without the suffix of the type
# ---- bits of integers


def _bits(x: np.ndarray) -> int:
    return x.dtype.itemsize * 8


def _length(x: np.ndarray) -> np.ndarray:
    """The number of bits up to the highest one that is set."""
    return np.vectorize(lambda one: int(one).bit_length(), otypes=[np.int64])(unsigned(x))


def _first_set(x: np.ndarray) -> np.ndarray:
    raw = np.vectorize(lambda one: (int(one) & -int(one)).bit_length(), otypes=[np.int64])
    return raw(unsigned(x))


def _reversed(x: np.ndarray) -> np.ndarray:
    width = _bits(x)
    turned = np.vectorize(lambda one: int(f"{int(one):0{width}b}"[::-1], 2), otypes=[UNSIGNED[x.dtype]])(unsigned(x))
    return turned.astype(UNSIGNED[x.dtype])


def _ones(x: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda one: int(one).bit_count(), otypes=[np.int64])(unsigned(x))


def _unsigned_high(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return _high(unsigned(x), unsigned(y))


def _high(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The upper half of a product."""
    wide = np.asarray(x.astype(object) * y.astype(object) >> _bits(x))
    return wide.astype(x.dtype)


def _byte_perm(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four bytes of x and y, chosen by the selector's four lower nibbles (CUDA, __byte_perm)."""
    both = unsigned(x).astype(np.uint64) | unsigned(y).astype(np.uint64) << np.uint64(32)
    out = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint64)
    for place in range(4):
        chosen = (unsigned(selector).astype(np.uint64) >> np.uint64(4 * place)) & np.uint64(7)
        out |= ((both >> (chosen * np.uint64(8))) & np.uint64(255)) << np.uint64(8 * place)
    return out.astype(np.uint32)


# ---- the table of functions with integers

_MIXED: dict[str, Callable[..., Any]] = dict(
    abs=np.abs,
    llabs=np.abs,
    clz=lambda x: _bits(x) - _length(x),
    clzll=lambda x: _bits(x) - _length(x),
    popc=_ones,
    popcll=_ones,
    brev=_reversed,
    brevll=_reversed,
    ffs=_first_set,
    ffsll=_first_set,
    byte_perm=_byte_perm,
    mulhi=_high,
    umulhi=_unsigned_high,
    mul64hi=_high,
    umul64hi=_unsigned_high,
    mul24=lambda x, y: (x << 8 >> 8).astype(np.int64) * (y << 8 >> 8),
    umul24=lambda x, y: (unsigned(x) & 0xFFFFFF).astype(np.uint64) * (unsigned(y) & 0xFFFFFF),
    sad=lambda x, y, z: np.abs(x.astype(np.int64) - y) + unsigned(z),
    usad=lambda x, y, z: np.abs(unsigned(x).astype(np.int64) - unsigned(y)) + unsigned(z),
    hadd=lambda x, y: (x.astype(np.int64) + y) >> 1,
    rhadd=lambda x, y: (x.astype(np.int64) + y + 1) >> 1,
    uhadd=lambda x, y: (unsigned(x).astype(np.int64) + unsigned(y)) >> 1,
    urhadd=lambda x, y: (unsigned(x).astype(np.int64) + unsigned(y) + 1) >> 1,
    isinf=np.isinf,
    isnan=np.isnan,
    finite=np.isfinite,
    isfinite=np.isfinite,
    signbit=np.signbit,
    ilogb=lambda x: np.where(np.isinf(x), 2**31 - 1, np.where(np.isnan(x) | (x == 0), -(2**31), np.frexp(x)[1] - 1)),
    ldexp=lambda x, n: np.ldexp(x.astype(np.float64), n),
    scalbn=lambda x, n: np.ldexp(x.astype(np.float64), n),
    powi=lambda x, n: np.power(x.astype(np.float64), n),
    jn=lambda n, x: _bessel("j")(n, x),
    yn=lambda n, x: _bessel("y")(n, x),
    llrint=np.rint,
    llround=_round_half_away,
    nextafter=np.nextafter,
    float_as_int=lambda x: x.view(_INT32),
    float_as_uint=lambda x: x.view(_INT32),
    int_as_float=lambda x: x.view(np.float32),
    uint_as_float=lambda x: x.view(np.float32),
    double_as_longlong=lambda x: x.view(np.int64),
    longlong_as_double=lambda x: x.view(np.float64),
    double2hiint=lambda x: x.view(np.int64) >> 32,
    double2loint=lambda x: x.view(np.int64) & 0xFFFFFFFF,
    hiloint2double=lambda high, low: (high.astype(np.int64) << 32 | low.view(np.uint32)).view(np.float64),
    rcp64h=lambda x: ((1 / x).view(np.int64) >> 32 << 32).view(np.float64),
    fma=lambda x, y, z: _directed("fma", "rn", x, y, z),
)


def call(symbol: str, arguments: list[np.ndarray], out: np.dtype) -> np.ndarray:
    """The function that libdevice calls `symbol`, on arrays of one type. `out` is the type of the result.

    >>> call("__nv_powf", [np.float32([2, 9]), np.float32([10, 0.5])], np.dtype(np.float32))
    array([1024.,    3.], dtype=float32)
    >>> call("__nv_float2int_rd", [np.float32([-1.5, 1e10])], np.dtype(np.int32))
    array([        -2, 2147483647], dtype=int32)

    Raises NotImplementedError for a name that it does not know.
    """
    name = symbol.removeprefix("__nv_")
    arguments = [np.ascontiguousarray(argument).reshape(np.shape(argument)) for argument in arguments]
    with np.errstate(all="ignore"):
        if match := _CONVERTS.fullmatch(name):
            return _converted(arguments[0], *match.groups()).view(out)
        if match := _DIRECTED.fullmatch(name):
            kind = match[2] or match[1] or ""
            return np.asarray(_directed("fma" if "fma" in kind else kind, match[3], *arguments)).astype(out)
        shorter = name.removeprefix("fast_")
        for known in (name, shorter, name.removesuffix("f"), shorter.removesuffix("f"), name.removesuffix("d")):
            if known in _MIXED:
                return _fitted(_MIXED[known](*arguments), out)
            if known in _REAL:
                return np.asarray(_REAL[known](*(np.asarray(one, np.float64) for one in arguments))).astype(out)
    raise NotImplementedError(f"the simulator does not know libdevice's {name}")


def _fitted(result: Any, out: np.dtype) -> np.ndarray:
    """The result in its type: integers wrap, and rounded numbers saturate."""
    result = np.asarray(result)
    if result.dtype.kind == "f" and out.kind == "i":
        return saturated(result.astype(np.float64), out, result.dtype == np.float64 or out.itemsize == 8)
    return result.astype(out) if out.kind != "i" or result.dtype.kind == "b" else _wrapped(result, out)


def _wrapped(result: np.ndarray, out: np.dtype) -> np.ndarray:
    return result.astype(UNSIGNED[out]).view(out) if result.dtype.kind == "u" else result.astype(out)


def _converted(x: np.ndarray, source: str, target: str, mode: str) -> np.ndarray:
    """A conversion such as float2int_rd, as bits in an array of the target's size."""
    if source in ("uint", "ull"):
        x = unsigned(x)
    if target in _INTEGER:
        kind = np.dtype(_INTEGER[target])
        whole = _ROUND[mode](x.astype(np.float64))
        return saturated(whole, kind, source == "double" or kind.itemsize == 8).view(np.dtype(f"i{kind.itemsize}"))
    wide = np.dtype(np.float32 if target == "float" else np.float64)
    return _nearest_towards(x.astype(wide), lambda near, one: Fraction(one) - Fraction(near), x, mode)


def _directed(kind: str, mode: str, *arguments: ArrayLike) -> np.ndarray:
    """An exact operation, rounded once in the given direction."""
    x = [np.asarray(one) for one in arguments]
    dtype = x[0].dtype
    near = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
            "rcp": lambda a: 1 / a, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a.astype(np.float64)),
            "fma": lambda a, b, c: a.astype(np.float64) * b + c}[kind](*x).astype(dtype)  # fmt: skip
    if kind == "rsqrt":
        return near
    exact = {"add": lambda r, a, b: a + b - r, "sub": lambda r, a, b: a - b - r, "mul": lambda r, a, b: a * b - r,
             "div": lambda r, a, b: a / b - r, "rcp": lambda r, a: 1 / a - r, "sqrt": lambda r, a: a - r * r,
             "fma": lambda r, a, b, c: a * b + c - r}[kind]  # fmt: skip

    def error(near: float, *numbers: float) -> Fraction:
        return exact(Fraction(near), *map(Fraction, numbers))

    return _nearest_towards(near, error, *x, mode)


def _nearest_towards(near: np.ndarray, error: Callable[..., Fraction], *numbers_and_mode: Any) -> np.ndarray:
    """The floating-point number next to the exact result, in the rounding direction. `near` is close to it, and `error`
    gives the sign of exact result - candidate.
    """
    *numbers, mode = numbers_and_mode
    kind = near.dtype.type

    def overflowed(infinite: Any, *given: Any) -> Any:
        """The largest number, if the exact result is beyond it and rounded towards zero. A quotient by zero stays."""
        largest = kind(math.copysign(np.finfo(kind).max, infinite))
        inward = mode == "rz" or mode == ("rd" if infinite > 0 else "ru")
        try:
            beyond = error(float(largest), *given)
        except ZeroDivisionError:
            return infinite
        return largest if inward and (beyond > 0) == (infinite > 0) and beyond else infinite

    def one(close: Any, *given: Any) -> Any:
        given = tuple(number.item() if isinstance(number, np.generic) else number for number in given)
        if math.isnan(close) or not all(map(math.isfinite, given)):
            return close
        if math.isinf(close):
            return overflowed(close, *given)
        below = above = kind(close)
        while math.isfinite(below) and error(float(below), *given) < 0:
            above, below = below, np.nextafter(below, kind(-np.inf))
        while math.isfinite(above) and error(float(above), *given) > 0:
            below, above = above, np.nextafter(above, kind(np.inf))
        if below == above:
            return above
        if mode == "rn":
            if not (math.isfinite(below) and math.isfinite(above)):
                return close
            gap = error(float(below), *given) + error(float(above), *given)
            even = below if below.view(f"u{below.itemsize}") % 2 == 0 else above
            return above if gap > 0 else below if gap < 0 else even
        return {"rd": below, "ru": above, "rz": below if above > 0 else above}[mode]

    return np.vectorize(one, otypes=[near.dtype])(near, *numbers)
