"""Number formats that NumPy lacks, bfloat16 and FP8: their bits, and rounding to nearest even."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Float8(NamedTuple):
    """An 8-bit format. `has_infinity` as in IEEE 754; without it, only the largest code is NaN (OCP's e4m3)."""

    mantissa: int
    bias: int
    has_infinity: bool


FLOAT8 = {"fp8e4nv": Float8(3, 7, False), "fp8e5": Float8(2, 15, True)}


def _every_value(form: Float8) -> np.ndarray:
    """All 256 values as float32, indexed by their bits."""
    codes = np.arange(128)
    exponent, fraction = codes >> form.mantissa, (codes & (1 << form.mantissa) - 1) / (1 << form.mantissa)
    values = np.where(
        exponent == 0,
        np.ldexp(fraction, 1 - form.bias),
        np.ldexp(1 + fraction, np.maximum(exponent, 1) - form.bias),
    ).astype(np.float32)
    if form.has_infinity:
        top = (1 << 7 - form.mantissa) - 1
        values[exponent == top] = np.where(fraction[exponent == top] == 0, np.inf, np.nan)
    else:
        values[127] = np.nan
    return np.concatenate([values, np.negative(values)])


VALUES = {name: _every_value(form) for name, form in FLOAT8.items()}
LARGEST = {name: float(np.nanmax(np.where(np.isinf(values), np.nan, values))) for name, values in VALUES.items()}


def float8_rounded(x: np.ndarray, name: str) -> np.ndarray:
    """float32 rounded to the grid of an 8-bit format, ties to even, without a limit above.

    >>> float8_rounded(np.float32([0.3, 17.0, 1000.0]), "fp8e4nv")
    array([3.125e-01, 1.600e+01, 1.024e+03], dtype=float32)
    """
    form = FLOAT8[name]
    exponent = np.maximum(np.frexp(x)[1] - 1, 1 - form.bias) - form.mantissa
    return np.ldexp(np.rint(np.ldexp(x, -exponent)), exponent).astype(np.float32)


def float8_bits(x: np.ndarray, name: str) -> np.ndarray:
    """float32 as the bits of an 8-bit format, rounded. What is too large becomes infinite, or the largest number where
    the format has no infinity.
    """
    form, x = FLOAT8[name], np.ascontiguousarray(x, np.float32)
    largest = np.float32(2 * LARGEST[name] if form.has_infinity else LARGEST[name])
    size = float8_rounded(np.minimum(np.abs(x), largest), name)
    normal = (size.view(np.uint32) >> np.uint32(23 - form.mantissa)) - np.uint32(127 - form.bias << form.mantissa)
    small = np.ldexp(size, form.bias + form.mantissa - 1)  # the multiple of the smallest number
    with np.errstate(invalid="ignore"):
        codes = np.where(small < 1 << form.mantissa, small, normal).astype(np.uint8)
    if form.has_infinity:
        codes = np.minimum(codes, 127 - (1 << form.mantissa) + 1)
    codes = np.where(np.isnan(x), np.uint8(127), codes)
    return codes | np.where(np.signbit(x), np.uint8(128), np.uint8(0))


# the magnitudes of e2m1 (OCP Microscaling Formats, table 5), by the lower three bits; the fourth is the sign
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_E2M1, -_E2M1])


def e2m1_bits(x: np.ndarray) -> np.ndarray:
    """float32 as 4 bits, to nearest even. What is too large becomes 6, and so does NaN (cvt.rn.satfinite).

    >>> e2m1_bits(np.float32([0.25, 0.26, 2.5, -100.0, np.nan]))
    array([ 0,  1,  4, 15,  7], dtype=uint8)
    """
    size = np.minimum(np.abs(np.where(np.isnan(x), np.float32(6), x)), np.float32(6))
    exponent = np.maximum(np.frexp(size)[1] - 1, 0) - 1
    code = np.searchsorted(_E2M1, np.ldexp(np.rint(np.ldexp(size, -exponent)), exponent)).astype(np.uint8)
    return code | np.where(np.signbit(x) & ~np.isnan(x), np.uint8(8), np.uint8(0))


def e2m1_pair(bits: np.ndarray) -> list[np.ndarray]:
    """The two numbers in each byte, the lower half first."""
    return [E2M1[bits & 15], E2M1[bits >> 4 & 15]]


def bfloat16_rounded(x: np.ndarray) -> np.ndarray:
    """float32, none of it NaN, rounded to bfloat16."""
    bits = np.array(x, np.float32, order="C").view(np.uint32)
    bits += ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    bits &= np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """float32 as bfloat16 bits: add half of the last kept place, plus one if that place is odd.

    >>> [hex(bits) for bits in bfloat16_bits(np.float32([1.0, 1.00390625, 1.01171875]))]
    ['0x3f80', '0x3f80', '0x3f82']
    """
    bits = np.ascontiguousarray(array).view(np.uint32).reshape(array.shape)
    high = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    # values that are bfloat16 already keep their bits
    nan = np.where(bits & np.uint32(0xFFFF), np.uint32(0x7FFF), bits >> np.uint32(16))
    return np.where(np.isnan(array), nan, high).astype(np.uint16)


def from_bfloat16(bits: Any) -> np.ndarray:
    """bfloat16 bits as float32."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)
