"""Arithmetic on scores: softcap, a step of the online softmax, normalization, sinks. For Triton and Gluon.

Scores are those of the product (raw). scale_log2 = scale * log2(e) enters with the exponent, in one fused multiply-add
for each element. That needs scale > 0: kernels fold the sign of the scale into q when they load it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """tanh by exp2, and near 0 by its series, because 1 - 2 / (1 + exp(2 x)) cancels there.

    The largest relative error is where the two meet: 5 float32 ulp at 0.2, 10 float64 ulp at 0.1.
    """
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
    y = x * x
    if x.dtype == tl.float64:
        tail = -0.008863235529902197 + y * (0.003592128036572481 + y * -0.0014558343870513183)
        tail = 0.021869488536155203 + y * tail
        limit = 0.01
    else:
        tail = y * 0.0 + 0.021869488536155203
        limit = 0.04
    near = x * (1.0 + y * (-0.3333333333333333 + y * (0.13333333333333333 + y * (-0.05396825396825397 + y * tail))))
    return tl.where(y < limit, near, far)


@triton.jit
def apply_softcap(s, softcap, traits: tl.constexpr):
    """Raw scores under a cap c: tanh(scale / c * s), where softcap = scale / c. The factor c is in scale_log2."""
    if traits.softcap:
        s = tanh(s * softcap)
    return s


class SoftmaxState(NamedTuple):
    """Of each row [M]."""

    row_max: Any  # in log2 units; -inf until the row has seen a key
    row_sum: Any


@triton.jit
def online_step(s, state, scale_log2):
    """(P, rescale, state) after the raw scores s [M, N]. A row that saw no key yet keeps its maximum of -inf, and P 0.

    row_max is carried as the rounded product that P was taken against. Carried raw, its product would be contracted
    into rescale = exp2(fma(row_max, scale_log2, -base)), which is not 1 where the maximum stays: each tile then moved
    row_sum by an ulp of the maximum, and lse to 8.1 times its bound after 1,024 tiles (H200).
    """
    new_max = tl.maximum(state.row_max, tl.max(s, 1) * scale_log2)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
    p = tl.exp2(s * scale_log2 - base[:, None])
    rescale = tl.exp2(state.row_max - base)
    return p, rescale, SoftmaxState(new_max, state.row_sum * rescale + tl.sum(p, 1))


@triton.jit
def in_log2(sink):
    """A sink in log2 units, at most 3.3e38. A sink of +inf becomes finite: it has all the weight, and out is 0.

    The minimum comes after the product, because a product that is subtracted directly is contracted into a
    multiply-add. The difference of a sink and itself was then the rounding error of the product, and not 0: sinks above
    1e10 gave NaN on GPUs.
    """
    return tl.minimum(sink * LOG2_E, 3.3e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def finish(row_max, row_sum, empty, sink, traits: tl.constexpr):
    """(normalizer of O, LSE) of each row after its last key. `empty` rows see no key: the mask decides that, because a
    maximum of -inf may also come from the scores.
    """
    top = tl.where(row_max == float("-inf"), 0.0, row_max)
    lse_empty = float("-inf")
    shrink = row_sum * 0.0 + 1.0
    if traits.sinks:
        sink_log2 = in_log2(sink)
        last = tl.maximum(row_max, sink_log2)
        last = tl.where(last == float("-inf"), 0.0, last)
        shrink = tl.exp2(row_max - last)
        row_sum = row_sum * shrink + tl.exp2(sink_log2 - last)
        top = last
        lse_empty = sink
    lse = top * LN_2 + tl.log(row_sum)
    if traits.sinks:
        lse = tl.where(lse < sink, sink, lse)
    return tl.where(empty, 0.0, shrink / row_sum), tl.where(empty, lse_empty, lse)


@triton.jit
def exp2_by_fma(x, degree: tl.constexpr):
    """2^x by multiply-adds, for the share of weights that the exp unit has no time for; x below 127.

    The relative error is 1.0e-4 with a polynomial of degree 3, a twentieth of bfloat16's rounding error, and 1.7e-7
    with degree 5 (`tools.proof.exponential`). Adding 1.5 * 2^23 rounds x to an integer, which the low bits then hold.
    At -127 and below the result is 0, because the power of two is. NaN stays NaN.
    """
    tl.static_assert(
        degree == 3 or degree == 5, "degree 3 or 5: derive other coefficients with tools.proof.exponential"
    )
    x = tl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = x + 12582912.0
    f = x - (shifted - 12582912.0)
    if degree == 3:
        p = 0.24221097431584956 + f * 0.05500893308681032
        p = 0.6932829285396241 + f * p
    else:
        p = 0.009671512875865589 + f * 0.0013264727499207214
        p = 0.05550733744683933 + f * p
        p = 0.24022242081769488 + f * p
        p = 0.6931469775970389 + f * p
    p = 1.0 + f * p
    power = (shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000
    return p * power.to(tl.float32, bitcast=True)
