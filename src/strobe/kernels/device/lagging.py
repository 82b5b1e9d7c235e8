"""A row's maximum that lags behind the true one, so that sums in registers are seldom rescaled.

Source: FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute), conditional rescaling.
"""

from .dialect import gl, gluon

THRESHOLD: gl.constexpr = gl.constexpr(8.0)  # the most a maximum lags on Hopper, in log2 units: weights reach up to 2^8 times what they would


@gluon.constexpr_function
def lift_of(dtype):
    """How far below its row's maximum weights are taken against, in log2 units.

    A float16 weight under 2^-14 loses bits, and where one key holds nearly all weight the others are that small (1.3 times the element-wise
    bound without a lift). Of the 15 powers of two up to its largest, 7 raise weights and 8 are the threshold's.
    """
    return 7.0 if dtype == gl.float16 else 0.0


@gluon.jit
def lagging_max(row_max, new_max, threshold: gl.constexpr):
    """row_max where new_max is above it by the threshold at most, else new_max."""
    return gl.where(new_max - row_max <= threshold, row_max, new_max)  # -inf - -inf is NaN: new_max, which is -inf too
