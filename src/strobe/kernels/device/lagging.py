"""A row's maximum that lags behind the true one, so that sums in registers are seldom rescaled.

Source: FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute), conditional rescaling.
"""

from .dialect import gl, gluon

THRESHOLD: gl.constexpr = gl.constexpr(8.0)  # the most a maximum lags, in log2 units: weights reach up to 2^8 times what they would


@gluon.constexpr_function
def lift_of(dtype):
    """How far below its row's maximum weights are taken against, in log2 units.

    A float16 weight under 2^-14 loses bits, and where one key holds nearly all weight the others are that small (1.3 times the element-wise
    bound without a lift). Of the 15 powers of two up to its largest, 7 raise weights and 8 are the threshold's.
    """
    return 7.0 if dtype == gl.float16 else 0.0


@gluon.jit
def lagging_max(row_max, new_max):
    """row_max where new_max is above it by the threshold at most, else new_max."""
    return gl.where(new_max - row_max <= THRESHOLD, row_max, new_max)  # -inf - -inf is NaN: new_max, which is -inf too


@gluon.jit
def rescaled(parts, factor):
    """Parts of a sum in registers with each row multiplied; threads whose rows all have the factor 1 skip that: a fifth (128 columns) to a third
    (256) of what a step of attention executes beside its products."""
    return [rescaled_part(part, gl.convert_layout(factor, gl.SliceLayout(1, part.type.layout))[:, None]) for part in parts]


@gluon.jit
def rescaled_part(part, factor):
    COUNT: gl.constexpr = min(part.shape[1] // 2, 64)  # a thread's elements, at most 64 at once: two of a row, two of the row 8 below, and so on
    text: gl.constexpr = _rescale_text(COUNT)
    constraints: gl.constexpr = _rescale_constraints(COUNT)
    return gl.inline_asm_elementwise(text, constraints, [part, factor], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.constexpr_function
def _rescale_text(count):
    """PTX that multiplies `count` registers by as many factors, of which the first and the third say whether any is not 1."""
    first = 2 * count
    products = " ".join(f"mul.f32 ${i}, ${i}, ${first + i};" for i in range(count))
    return (f"{{ .reg .pred moved; setp.neu.f32 moved, ${first}, 0f3F800000; @!moved setp.neu.f32 moved, ${first + 2}, 0f3F800000; "
            f"@!moved bra KEPT; {products} KEPT: }}")  # fmt: skip


@gluon.constexpr_function
def _rescale_constraints(count):
    """The registers written are those of the sum."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)
