"""Where rows lie: start, length and addresses of a sequence's rows in dense and packed layouts. Triton and Gluon."""

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
OUTSIDE = tl.constexpr(-1)  # number of keys of rows that are in no sequence


@triton.jit
def offset_at(cu_seqlens, index, n, total):
    """Boundary `index` of 0, cu_seqlens[0], ..., cu_seqlens[n], total, clamped to [0, total].

    So the rows before the first and after the last sequence are two sequences of their own, which see no key.
    """
    inner = tl.load(cu_seqlens + tl.minimum(tl.maximum(index - 1, 0), n))
    inner = tl.minimum(tl.maximum(inner, 0), total)
    return tl.where(index == 0, 0, tl.where(index > n + 1, total, inner))


@triton.jit
def find_sequence(cu_seqlens, tile, n, total, block: tl.constexpr, group: tl.constexpr = 1):
    """(sequence, block within it) of a linear tile of `block` rows; a token has `group` rows.

    Sequence i of the n + 2 starts at tile begin(i) * group // block + i. That is an upper bound on the number of tiles
    before it and needs no scan over the lengths, so the host knows the grid: total * group // block + n + 2.
    """
    low = 0
    high = n + 1
    while low < high:
        middle = (low + high + 1) // 2
        reached = offset_at(cu_seqlens, middle, n, total) * group // block + middle <= tile
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low, tile - (offset_at(cu_seqlens, low, n, total) * group // block + low)


@triton.jit
def sequence_of_row(cu_seqlens, row, n, total):
    """(sequence, its first row, its number of rows) of a row, among the n + 2 sequences of `offset_at`."""
    low = 0
    high = n + 1
    while low < high:
        middle = (low + high + 1) // 2
        reached = offset_at(cu_seqlens, middle, n, total) <= row
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    start, length = span_of(cu_seqlens, low, n, total)
    return low, start, length


@triton.jit
def span_of(cu_seqlens, sequence, n, total):
    """(start, length) of one of the n + 2 sequences; length 0 where offsets fall."""
    start = offset_at(cu_seqlens, sequence, n, total)
    return start, tl.maximum(offset_at(cu_seqlens, sequence + 1, n, total) - start, 0)


@triton.jit
def keys_of(cu_seqlens, sequence, n, total, outside: tl.constexpr = 0):
    """`span_of` for the keys of a sequence of queries, or the queries of a sequence of keys. The rows outside every
    sequence have none: (0, outside).
    """
    start, length = span_of(cu_seqlens, sequence, n, total)
    inside = (sequence > 0) & (sequence <= n)
    return tl.where(inside, start, 0), tl.where(inside, length, outside)


@triton.jit
def first_key(cu_seqlens_k, sequence, n, offset_k, runs: tl.constexpr):
    """The row of K and V with a sequence's first key: offset_k, or what the second row of cu_seqlens_k says of a run
    over shared keys (`problem.call.Call`).
    """
    if runs:
        offset_k = tl.load(cu_seqlens_k + n + 1 + tl.minimum(tl.maximum(sequence - 1, 0), n))
    return offset_k


@triton.jit
def run_at(ranges, position, length, across):
    """(end of the run that has row `position`, first key of its document, one past the last), for `length` rows and
    `across` keys. A run is rows of one document that follow each other.

    `ranges` are those of the batch entry (mask.Documents). Values out of range are clamped, so that ranges made by hand
    neither read other memory nor make a loop endless.
    """
    run_end = tl.maximum(tl.minimum(tl.load(ranges + 3 * position), length), position + 1)
    first = tl.minimum(tl.maximum(tl.load(ranges + 3 * position + 1), 0), across)
    last = tl.maximum(tl.minimum(tl.load(ranges + 3 * position + 2), across), first)
    return run_end, first, last


@triton.jit
def breaks_promise(token, keys, window):
    """Which tokens of a sequence are beyond the promised number of queries; all if it has more keys than promised.

    window.max_seqlen_q and max_seqlen_k are negative if nothing was promised. Nothing is promised for rows outside
    every sequence, whose number of keys is OUTSIDE.
    """
    longest_q, longest_k = window.max_seqlen_q, window.max_seqlen_k
    return ((longest_q >= 0) & (token >= longest_q) & (keys != OUTSIDE)) | ((longest_k >= 0) & (keys > longest_k))


@triton.jit
def load_rows(base, rows, columns, stride, row_ok, width: tl.constexpr):
    """A tile [M, block_d] of rows, 0 where row_ok is False and beyond the head dimension `width`; columns: 0, 1, ..."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if columns.shape[0] == width:
        return tl.load(pointers, mask=row_ok[:, None], other=0.0)
    return tl.load(pointers, mask=row_ok[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def store_rows(base, tile, rows, columns, stride, row_ok, width: tl.constexpr):
    """Store a tile [M, block_d] where row_ok is True and within the head dimension `width`; columns: 0, 1, ..."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if columns.shape[0] == width:
        tl.store(pointers, tile.to(base.dtype.element_ty), mask=row_ok[:, None])
    else:
        tl.store(pointers, tile.to(base.dtype.element_ty), mask=row_ok[:, None] & (columns < width)[None, :])


@triton.jit
def guard_offsets(cu_seqlens, n, total, longest, lanes, errors, bad_offsets: tl.constexpr, too_long: tl.constexpr):
    """Report offsets that fall or leave [0, total], and sequences longer than promised. One program does it for all."""
    for start in range(0, n, lanes.shape[0]):
        inside = start + lanes < n
        begin = tl.load(cu_seqlens + start + lanes, mask=inside, other=0)
        end = tl.load(cu_seqlens + start + lanes + 1, mask=inside, other=0)
        bad = tl.max(((end < begin) | (begin < 0) | (end > total)).to(tl.int32), 0)
        long = tl.max(((longest >= 0) & (end - begin > longest)).to(tl.int32), 0)
        tl.atomic_or(errors, bad * bad_offsets + long * too_long, mask=bad + long > 0)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def write_rising_offsets(cu_seqlens, rising, n, lanes):
    """Copy the offsets, each raised to the largest before it: invalid offsets then name every tile once, so that no
    program waits for one that does not exist. One program does it for all.
    """
    most = 0
    for start in range(0, n + 1, lanes.shape[0]):
        index = start + lanes
        offsets = tl.maximum(tl.load(cu_seqlens + index, mask=index <= n, other=0), most)
        offsets = tl.associative_scan(offsets, 0, larger)
        tl.store(rising + index, offsets, mask=index <= n)
        most = tl.max(offsets, 0)


@triton.jit
def key_limit(key_lengths, batch, seqlen_k, errors, present: tl.constexpr):
    """Where this batch entry's keys end; a length outside [0, S_k] is clamped and reported."""
    if present:
        length = tl.load(key_lengths + batch)
        tl.atomic_or(errors, LENGTHS, mask=(length < 0) | (length > seqlen_k))
        return tl.minimum(tl.maximum(length, 0), seqlen_k)
    return seqlen_k
