"""Optimistic softmax: a step computes weights relative to the row maximum of earlier steps.

A step of online softmax looks at all scores of a row before it computes the first exponential. But a maximum only keeps
weights in range, and the maximum of a row's first keys does so for all scores that are not far above them. So only the
first steps look for maxima, until each row has met a key. In the other steps exponentials begin with the first score,
and their sums tell whether a row has outgrown its maximum. `renormalize_row` divides the weights, the sum and the
accumulator of a row whose sum exceeds 2^8 (`device.conditional_rescaling`) by the largest of its lanes' sums, and adds
the log2 of that sum to the row's maximum. A key that outweighs all others then has the weight 1. A warp without such a
row compares, votes and branches.

How far lse may err: where a row outgrows its maximum, the exponent of its weight is one float32 multiply-add, whose
result is below 128. Its rounding is at most 2^-18, or 2.7e-6 nats. The whole part of the log2 is added to the maximum
by itself, which adds no such error. A row whose sum exceeds 2^VAST in a step gets an infinite maximum, because the sum
or its reciprocal may not be a normal float32. A row whose first keys' scores are all -inf has no maximum when others
come. Both are found at the end of the tile, which is redone with row maxima in every step (`device.tile_redo`).
"""

from ..device.dialect import gl, gluon, record
from ..device.layouts import by_four, from_four

VAST: gl.constexpr = gl.constexpr(125)  # log2: the reciprocal of 2^125 is a normal number, which rcp.approx.ftz keeps


@record
class Renormalized:
    """P [M, N], and row statistics [M, 4] in lanes."""

    p: gl.tensor
    block_sum: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    rescale: gl.tensor


@gluon.jit
def renormalize_row(p, sums, row_max, row_sum, rescale, lift: gl.constexpr, most: gl.constexpr):
    """P and row statistics. In rows of which any lane's sum is above 2^(lift + most), all are divided by the largest /
    2^lift, whose log2 is added to row_max.
    """
    COUNT: gl.constexpr = p.shape[1] // 2  # a thread's elements
    text: gl.constexpr = _text(COUNT, lift, most, VAST)
    constraints: gl.constexpr = _constraints(COUNT)
    numbers = by_four((sums, row_max, row_sum, rescale), p)
    p, numbers = gl.inline_asm_elementwise(
        text, constraints, [p, numbers], dtype=(gl.float32, gl.float32), is_pure=True, pack=COUNT
    )
    return Renormalized(p, *from_four(numbers))


@gluon.constexpr_function
def _text(count, lift, most, vast):
    """PTX for a thread's weights and, of each of these, four numbers of its row. All in one block, so that there is one
    branch, and nothing but registers by other names where it is taken: arithmetic on the three numbers outside cost d64
    dense 4 % (H200).
    """
    limit, vast, unit, one, infinite = (
        f"0f{127 + power << 23:08X}" for power in (int(lift + most), int(vast), int(-lift), 0, 128)
    )
    lines = [".reg .pred out, vast; .reg .f32 top, other, factor, fraction; .reg .b32 bits, power;"]
    for n, name in enumerate(("sum", "max", "whole", "rescale")):
        first = 3 * count + 4 * n  # after two outputs and the weights, of which two are of a row, two of the other
        lines += [f".reg .f32 {name}0, {name}1; mov.f32 {name}0, ${first}; mov.f32 {name}1, ${first + 2};"]
    lines += [
        f"max.f32 top, sum0, sum1; setp.gt.f32 out, top, {limit}; vote.sync.any.pred out, out, -1; @!out bra FITS;"
    ]
    for row in (0, 1):  # eight rows of the warp each, seldom both
        lines += [f"setp.gt.f32 out, sum{row}, {limit}; vote.sync.any.pred out, out, -1; @!out bra FITS{row};"]
        for lane in (1, 2):
            lines += [f"shfl.sync.bfly.b32 other, sum{row}, {lane}, 31, -1; max.f32 sum{row}, sum{row}, other;"]
        lines += [
            # by what the row is divided, and the factor that does it
            f"setp.gt.f32 out, sum{row}, {limit}; setp.gt.f32 vast, sum{row}, {vast}; "
            f"mul.f32 sum{row}, sum{row}, {unit};",
            f"@!out mov.f32 sum{row}, {one}; @vast mov.f32 sum{row}, {infinite}; "
            f"rcp.approx.ftz.f32 factor, sum{row}; @!out mov.f32 factor, {one};",
            # its log2: the whole part is added by itself, and the rest is below 1. As one number it would be rounded to
            # an ulp of what a row grows by, which where maxima were far below 0 is more than lse may err by
            f"mov.b32 bits, sum{row}; shr.u32 power, bits, 23; sub.s32 power, power, 127; cvt.rn.f32.s32 other, power;",
            f"@vast mov.f32 other, {infinite}; add.f32 max{row}, max{row}, other;",
            "and.b32 bits, bits, 0x007FFFFF; or.b32 bits, bits, 0x3F800000; "
            "mov.b32 fraction, bits; lg2.approx.ftz.f32 fraction, fraction;",
            f"add.f32 max{row}, max{row}, fraction; "
            f"mul.f32 whole{row}, whole{row}, factor; mul.f32 rescale{row}, rescale{row}, factor;",
            *(f"mul.f32 ${i}, ${i}, factor;" for i in range(count) if i // 2 % 2 == row),
            f"FITS{row}:",
        ]
    names = [f"{name}{row}" for name in ("sum", "max", "whole", "rescale") for row in (0, 0, 1, 1)]
    lines += ["FITS:", *(f"mov.f32 ${count + i}, {names[i % 16]};" for i in range(count))]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _constraints(count):
    """Two outputs; weights in the registers of the first, and the numbers."""
    return ",".join(["=f"] * (2 * count) + [str(i) for i in range(count)] + ["f"] * count)
