"""Where a tile's rows live: one sequence's start, length and row addressing, for dense and packed layouts alike."""

import triton
import triton.language as tl

from ..runtime.error_flags import LENGTHS as _LENGTHS
from ..runtime.error_flags import LONG_K as _LONG_K
from ..runtime.error_flags import LONG_Q as _LONG_Q
from ..runtime.error_flags import OFFSETS_K as _OFFSETS_K
from ..runtime.error_flags import OFFSETS_Q as _OFFSETS_Q

LENGTHS = tl.constexpr(_LENGTHS)
LONG_K = tl.constexpr(_LONG_K)
LONG_Q = tl.constexpr(_LONG_Q)
OFFSETS_K = tl.constexpr(_OFFSETS_K)
OFFSETS_Q = tl.constexpr(_OFFSETS_Q)
OUTSIDE = tl.constexpr(-1)  # keys of rows that are in no sequence


@triton.jit
def offset_at(cu_seqlens, index, n, total):
    """Boundary `index` of 0, cu_seqlens[0], ..., cu_seqlens[n], total, kept within [0, total].

    The rows before the first and after the last sequence are so two sequences of their own, which see no key.
    """
    inner = tl.load(cu_seqlens + tl.minimum(tl.maximum(index - 1, 0), n))
    inner = tl.minimum(tl.maximum(inner, 0), total)
    return tl.where(index == 0, 0, tl.where(index > n + 1, total, inner))


@triton.jit
def find_sequence(cu_seqlens, tile, n, total, block: tl.constexpr, group: tl.constexpr = 1):
    """(sequence, block within it) of a linear tile of `block` rows, of which a token has `group`. Sequence i of the n + 2 starts at tile
    begin(i) * group // block + i: an upper bound on the tiles before it that needs no scan over the lengths, so the grid
    total * group // block + n + 2 is known on the host."""
    low = 0
    high = n + 1
    while low < high:
        middle = (low + high + 1) // 2
        reached = offset_at(cu_seqlens, middle, n, total) * group // block + middle <= tile
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low, tile - (offset_at(cu_seqlens, low, n, total) * group // block + low)


@triton.jit
def span_of(cu_seqlens, sequence, n, total):
    """(start, length) of one of the n + 2 sequences; length 0 where offsets fall."""
    start = offset_at(cu_seqlens, sequence, n, total)
    return start, tl.maximum(offset_at(cu_seqlens, sequence + 1, n, total) - start, 0)


@triton.jit
def keys_of(cu_seqlens, sequence, n, total, outside: tl.constexpr = 0):
    """`span_of` for the other side of a sequence: the rows outside every sequence have no keys, of which the length is said to be `outside`."""
    start, length = span_of(cu_seqlens, sequence, n, total)
    inside = (sequence > 0) & (sequence <= n)
    return tl.where(inside, start, 0), tl.where(inside, length, outside)


@triton.jit
def run_at(spans, position, length, across):
    """(end of the run that has row `position`, first key of its document, one past the last), of `length` rows and `across` keys.

    `spans` are those of the batch entry (mask.Documents). Numbers that reach outside are cut, so that spans made by hand neither read other memory
    nor keep a loop from its end.
    """
    run_end = tl.maximum(tl.minimum(tl.load(spans + 3 * position), length), position + 1)
    first = tl.minimum(tl.maximum(tl.load(spans + 3 * position + 1), 0), across)
    last = tl.maximum(tl.minimum(tl.load(spans + 3 * position + 2), across), first)
    return run_end, first, last


@triton.jit
def breaks_promise(token, keys, limits):
    """Of a sequence's tokens, those beyond the queries promised, or all where it has more keys than promised; limits (left, right, most queries, most
    keys), the last two negative where nothing was promised. Rows outside every sequence, whose keys are OUTSIDE, were promised nothing."""
    return ((limits[2] >= 0) & (token >= limits[2]) & (keys != OUTSIDE)) | ((limits[3] >= 0) & (keys > limits[3]))


@triton.jit
def load_rows(base, rows, columns, stride, row_ok, width: tl.constexpr):
    """A tile [M, block_d] of rows `rows`, 0 where row_ok is False and beyond the head dimension `width`; `columns` begin with 0."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if columns.shape[0] == width:
        return tl.load(pointers, mask=row_ok[:, None], other=0.0)
    return tl.load(pointers, mask=row_ok[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def store_rows(base, tile, rows, columns, stride, row_ok, width: tl.constexpr):
    """`load_rows`, the other way."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if columns.shape[0] == width:
        tl.store(pointers, tile.to(base.dtype.element_ty), mask=row_ok[:, None])
    else:
        tl.store(pointers, tile.to(base.dtype.element_ty), mask=row_ok[:, None] & (columns < width)[None, :])


@triton.jit
def guard_offsets(cu_seqlens, n, total, longest, lanes, faults, bad_offsets: tl.constexpr, too_long: tl.constexpr):
    """Report offsets that fall or leave [0, total], and sequences longer than promised; one program does it for all."""
    for start in range(0, n, lanes.shape[0]):
        inside = start + lanes < n
        begin = tl.load(cu_seqlens + start + lanes, mask=inside, other=0)
        end = tl.load(cu_seqlens + start + lanes + 1, mask=inside, other=0)
        bad = tl.max(((end < begin) | (begin < 0) | (end > total)).to(tl.int32), 0)
        long = tl.max(((longest >= 0) & (end - begin > longest)).to(tl.int32), 0)
        tl.atomic_or(faults, bad * bad_offsets + long * too_long, mask=bad + long > 0)


@triton.jit
def key_limit(key_lengths, batch, seqlen_k, faults, present: tl.constexpr):
    """Where this batch entry's keys end; a length outside [0, S_k] is clamped and reported."""
    if present:
        length = tl.load(key_lengths + batch)
        tl.atomic_or(faults, LENGTHS, mask=(length < 0) | (length > seqlen_k))
        return tl.minimum(tl.maximum(length, 0), seqlen_k)
    return seqlen_k
