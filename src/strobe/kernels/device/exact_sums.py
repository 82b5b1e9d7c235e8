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
    """Add x to the sums whose first slots are at the pointers `sums`; a slot is `step` integers behind the one before.

    x = m 2^(p - 149) with an integer m of 24 bits. m shifted left by p mod 32 lies in slots p / 32 and p / 32 + 1.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 255
    fraction = bits & 0x7FFFFF
    p = tl.where(exponent == 0, 0, exponent - 1)
    m = tl.where(exponent == 0, fraction, fraction + 0x800000)
    shifted = m.to(tl.int64) << (p & (BITS - 1)).to(tl.int64)
    low, high = shifted & 0xFFFFFFFF, shifted >> BITS
    low, high = tl.where(bits < 0, -low, low), tl.where(bits < 0, -high, high)
    is_finite, is_nan = exponent != 255, fraction != 0
    slot = tl.where(is_finite, p // BITS, FINITE)
    low = tl.where(is_finite, low, (is_nan | (bits >= 0)).to(tl.int64))
    high = tl.where(is_finite, high, (is_nan | (bits < 0)).to(tl.int64))
    place = sums + slot.to(tl.int64) * step
    tl.atomic_add(place, low, mask=low != 0, sem="relaxed")
    tl.atomic_add(place + step, high, mask=high != 0, sem="relaxed")
