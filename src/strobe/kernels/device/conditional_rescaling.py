"""Conditional rescaling: a row's maximum is updated only if it grew by more than a threshold, so O is seldom rescaled.

Source: FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute).
"""

from .dialect import gl, gluon

# Hopper, in log2 units: weights reach up to 2^8 times what they would be with the true maximum
RESCALE_THRESHOLD: gl.constexpr = gl.constexpr(8.0)


@gluon.constexpr_function
def log2_offset_of(dtype):
    """How far below a row's maximum the number lies that exponents are relative to, in log2 units.

    A float16 weight under 2^-14 loses bits. If one key has nearly all the weight, the others are that small: without an
    offset the error was 1.3 times the element-wise bound. Float16 has 15 powers of two above 1: 7 raise the weights, 8
    are for the threshold.
    """
    return 7.0 if dtype == gl.float16 else 0.0


@gluon.jit
def conditional_max(row_max, new_max, rescale_threshold: gl.constexpr):
    """row_max if new_max exceeds it by the threshold at most, else new_max."""
    # -inf - -inf is NaN: new_max, which is -inf too
    return gl.where(new_max - row_max <= rescale_threshold, row_max, new_max)
