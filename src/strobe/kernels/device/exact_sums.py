"""Adds float32 numbers to sums that do not depend on the order of the additions: `mods.exact_sums`.

`mods.emit` writes calls of `add_exactly` into functions of deterministic gradients. The functions run in Triton and in
Gluon kernels.
"""

import triton
import triton.language as tl

from ...mods.exact_sums import BITS as _BITS
from ...mods.exact_sums import FINITE as _FINITE

BITS = tl.constexpr(_BITS)
FINITE = tl.constexpr(_FINITE)


@triton.jit
def add_exactly(sums, step, x):
    """Add x to the sums whose first slots are at the pointers `sums`; a slot is `step` integers after the one before.

    x = m 2^(p - 149) with an integer m of 24 bits. m shifted left by p mod 31 lies in slots p / 31 and p / 31 + 1: the
    low 31 bits and the high 23. All of it but the additions is arithmetic of 32 bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 255
    fraction = bits & 0x7FFFFF
    p = tl.where(exponent == 0, 0, exponent - 1)
    m = tl.where(exponent == 0, fraction, fraction + 0x800000)
    slot = (p * 2115) >> 16  # p / 31 for p below 255
    shift = p - slot * BITS
    low, high = (m << shift) & 0x7FFFFFFF, m >> (BITS - shift)
    low, high = tl.where(bits < 0, -low, low), tl.where(bits < 0, -high, high)
    is_finite, is_nan = exponent != 255, fraction != 0
    slot = tl.where(is_finite, slot, FINITE)
    low = tl.where(is_finite, low, (is_nan | (bits >= 0)).to(tl.int32))
    high = tl.where(is_finite, high, (is_nan | (bits < 0)).to(tl.int32))
    place = sums + slot * step  # 11 slots of at most 2^24 integers: 32 bits
    tl.atomic_add(place, low.to(tl.int64), mask=low != 0, sem="relaxed")
    tl.atomic_add(place + step, high.to(tl.int64), mask=high != 0, sem="relaxed")
