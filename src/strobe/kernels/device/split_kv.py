"""What every decode kernel does alike: which keys a sequence holds, the signs of scales, splits joined, rows made whole. For Triton and Gluon."""

import triton
import triton.language as tl

from ..runtime.error_flags import K_START as _K_START
from ..runtime.error_flags import SEQLENS as _SEQLENS
from .seqlen import OUTSIDE, breaks_promise, find_sequence, keys_of, span_of
from .softmax import in_log2

K_START = tl.constexpr(_K_START)
SEQLENS = tl.constexpr(_SEQLENS)


@triton.jit
def span(seqlens, k_start, batch, capacity, faults, form: tl.constexpr):
    """(first key, number of keys) of a sequence, kept within what it may hold; what had to be changed is reported."""
    length = tl.load(seqlens + batch)
    stop = tl.minimum(tl.maximum(length, 0), capacity)
    tl.atomic_or(faults, SEQLENS, mask=stop != length, sem="relaxed")
    first = batch * 0
    if form.k_start:
        start = tl.load(k_start + batch)
        first = tl.minimum(tl.maximum(start, 0), stop)
        tl.atomic_or(faults, K_START, mask=first != start, sem="relaxed")
    return first, stop - first


@triton.jit
def locate(offsets, sizes, form: tl.constexpr):
    """Of a program that takes a tile of rows through all their keys: (batch entry, key head, tile in its sequence, (first query, queries), (first
    key, keys)). Tiles that see most keys come first."""
    batch, heads_kv, total_q, total_k, n_tiles, _ = sizes
    pid = tl.program_id(0)
    tile = n_tiles - 1 - pid % n_tiles
    head = pid // n_tiles % heads_kv
    entry = pid // n_tiles // heads_kv
    queries = (entry * 0, total_q)
    keys = (entry * 0, total_k)
    if form.packed:
        sequence, tile = find_sequence(offsets[0], tile, batch, total_q, form.block_m, form.group)
        queries = span_of(offsets[0], sequence, batch, total_q)
        keys = keys_of(offsets[1], sequence, batch, total_k, OUTSIDE)
    return entry, head, tile, queries, keys


@triton.jit
def broken(o, lse_log2, token, keys, limits):
    """NaN in rows beyond a promised length, and in all of a sequence with more keys than promised."""
    bad = breaks_promise(token, keys, limits)
    return tl.where(bad[:, None], float("nan"), o), tl.where(bad, float("nan"), lse_log2)


@triton.jit
def signed(q, numbers, scale, form: tl.constexpr):
    """(q, scale_log2, softcap factor) with the sign of the scales in q, so that what multiplies scores is positive: hidden ones stay -inf."""
    scale_log2, softcap = numbers
    if form.sign != 1:
        q = (q * form.sign).to(q.dtype)
    if form.k_scale:
        size = tl.abs(scale).to(form.accumulator)
        q = (q * tl.where(scale < 0, -1.0, tl.where(scale == 0, 0.0, 1.0))).to(q.dtype)
        size = tl.where(size == 0, 1.0, size)
        if form.softcap:
            softcap = softcap * size
        else:
            scale_log2 = scale_log2 * size
    return q, scale_log2, softcap


@triton.jit
def weighed(base, total, lse_log2):
    """(base, total) of rows once a split of this log-sum-exp (in log2 units) has joined those before it, what o so far is worth, and what the split
    is. From (-inf, 0): `tl.fma(o, kept, part * weight)`, in the order of the splits, has the same bits wherever it is done. Nothing is left to
    fuse: of a * b + c * d a compiler may fuse either product."""
    top = tl.maximum(base, lse_log2)
    level = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.exp2(base - level)
    weight = tl.exp2(lse_log2 - level)
    return top, tl.fma(total, kept, weight), kept, weight


@triton.jit
def worth(base, total):
    """(what joined rows are multiplied by, their log-sum-exp in log2 units) after the last split: 0 and -inf of rows that saw nothing."""
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    return tl.where(empty, 0.0, 1.0 / total), tl.where(empty, float("-inf"), base + tl.log2(total))


@triton.jit
def with_sink(o, lse_log2, sink, form: tl.constexpr):
    """(out, lse) of whole rows [M, D_v]: the sink enters once, and lse becomes a natural logarithm; the sink itself, of a row that saw nothing."""
    lse = lse_log2 * 0.6931471805599453
    if form.sinks:
        sink = sink.to(form.accumulator)
        sink_log2 = in_log2(sink)
        top = tl.maximum(lse_log2, sink_log2)
        top = tl.where(top == float("-inf"), 0.0, top)
        share = tl.exp2(lse_log2 - top)
        total = share + tl.exp2(sink_log2 - top)
        empty = total == 0
        total = tl.where(empty, 1.0, total)
        o = o * (share / total)[:, None]
        joined = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
        joined = tl.where(joined < sink, sink, joined)
        lse = tl.where(lse_log2 == float("-inf"), sink, joined)
    return o, lse
