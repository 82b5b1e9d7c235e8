"""Which keys a row sees, as an interval [first, stop), and masks made of it: the device's side of strobe.problem.mask.
For Triton and Gluon; rows may be scalars or vectors.

traits.mask is a MaskStructure. Documents are no part of the interval. bounds: (S_k, left, right).
"""

import triton
import triton.language as tl


@triton.jit
def row_interval(row, seqlen_q, key_stop, bounds, prefix, traits: tl.constexpr):
    """Keys [first, stop) that rows see; neither falls from a row to the next.

    key_stop is where the batch entry's keys end: S_k, or its key length. The diagonal depends on S_k alone.
    """
    seqlen_k, left, right = bounds
    diagonal = row + (seqlen_k - seqlen_q)
    first = row * 0
    if traits.mask.left:
        first = tl.maximum(first, diagonal - left)
    stop = first * 0 + key_stop
    if traits.mask.prefix:
        reach = tl.maximum(prefix, diagonal + 1)
        if traits.mask.right:
            reach = tl.minimum(reach, diagonal + right + 1)
        stop = tl.minimum(stop, reach)
    elif traits.mask.right:
        stop = tl.minimum(stop, diagonal + right + 1)
    return first, stop


@triton.jit
def first_row(key, seqlen_q, bounds, prefix, traits: tl.constexpr):
    """The first row that sees `key` (a scalar)."""
    seqlen_k, left, right = bounds
    row = key * 0
    if traits.mask.right:
        row = tl.maximum(row, key - right - (seqlen_k - seqlen_q))
    if traits.mask.prefix:
        beyond = tl.maximum(row, key - (seqlen_k - seqlen_q))
        # within the prefix only the right bound counts, beyond it the diagonal, too
        row = tl.where(key < prefix, row, beyond)
    return row


@triton.jit
def stop_row(key, seqlen_q, bounds, traits: tl.constexpr):
    """One past the last row that sees `key` (a scalar)."""
    seqlen_k, left, right = bounds
    row = key * 0 + seqlen_q
    if traits.mask.left:
        row = tl.minimum(row, key + left - (seqlen_k - seqlen_q) + 1)
    return row


@triton.jit
def apply_mask(x, column, first, stop, value, two_sided: tl.constexpr):
    """x with `value` where a row's interval of keys leaves out the key: -inf for scores, 0 for weights.

    column: 0..N-1, constants of a register; first and stop are relative to the tile's first key, since absolute columns
    would have to be computed for every tile. All three broadcast to x: [1, N] and [M, 1], or for x^T [N, 1] and [1, M].
    """
    x = tl.where(stop > column, x, value)
    if two_sided:
        x = tl.where(first <= column, x, value)
    return x


@triton.jit
def interval_bits(first, stop, two_sided: tl.constexpr):
    """A word for each row with a bit for each of 32 columns, set in [first, stop). Each register of a thread tests a
    bit.
    """
    bits = tl.where(stop >= 32, -1, (1 << tl.minimum(tl.maximum(stop, 0), 31)) - 1)
    if two_sided:
        below = tl.where(first >= 32, -1, (1 << tl.minimum(tl.maximum(first, 0), 31)) - 1)
        bits = bits & ~below
    return bits


@triton.jit
def hide_by_bits(s, bits, columns):
    """Scores s [M, 32] with -inf where a row's bit is 0; columns are 0..31."""
    return tl.where((bits[:, None] & (1 << columns)[None, :]) != 0, s, float("-inf"))
