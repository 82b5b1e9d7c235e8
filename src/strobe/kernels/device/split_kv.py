"""What every decode kernel does: which keys a sequence has, the signs of scales, how splits are combined, sinks. For
Triton and Gluon.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..runtime.error_flags import K_START as _K_START
from ..runtime.error_flags import SEQLENS as _SEQLENS
from .seqlen import OUTSIDE, breaks_promise, find_sequence, keys_of, span_of
from .softmax import LN_2, in_log2

K_START = tl.constexpr(_K_START)
SEQLENS = tl.constexpr(_SEQLENS)


@triton.jit
def sequence_keys(seqlens, k_start, batch, capacity, errors, traits: tl.constexpr):
    """(first key, number of keys) of a sequence, clamped to its capacity. A clamped value is reported."""
    length = tl.load(seqlens + batch)
    stop = tl.minimum(tl.maximum(length, 0), capacity)
    tl.atomic_or(errors, SEQLENS, mask=stop != length, sem="relaxed")
    first = batch * 0
    if traits.k_start:
        start = tl.load(k_start + batch)
        first = tl.minimum(tl.maximum(start, 0), stop)
        tl.atomic_or(errors, K_START, mask=first != start, sem="relaxed")
    return first, stop - first


class RowRange(NamedTuple):
    """Rows of a tensor that belong to one sequence."""

    start: Any
    length: Any


class SequenceTile(NamedTuple):
    """A tile of rows, which one program takes through all their keys."""

    batch: Any
    head: Any  # key head
    block: Any  # within the sequence
    queries: Any  # RowRange
    keys: Any  # RowRange


class KeyRange(NamedTuple):
    """Keys start .. stop - 1 of a sequence: scalars, or a vector with an element a row."""

    start: Any
    stop: Any


@triton.jit
def sequence_tile(cu_seqlens, shape, traits: tl.constexpr):
    """The SequenceTile of a program of a batch-invariant forward. Tiles that see most keys come first."""
    cu_seqlens_q, cu_seqlens_k = cu_seqlens
    pid = tl.program_id(0)
    block = shape.num_m_blocks - 1 - pid % shape.num_m_blocks
    head = pid // shape.num_m_blocks % shape.heads_kv
    batch = pid // shape.num_m_blocks // shape.heads_kv
    queries = RowRange(batch * 0, shape.seqlen_q)
    keys = RowRange(batch * 0, shape.seqlen_k)
    if traits.packed:
        sequence, block = find_sequence(cu_seqlens_q, block, shape.batch, shape.seqlen_q, traits.block_m, traits.group)
        queries = RowRange(*span_of(cu_seqlens_q, sequence, shape.batch, shape.seqlen_q))
        keys = RowRange(*keys_of(cu_seqlens_k, sequence, shape.batch, shape.seqlen_k, OUTSIDE))
    return SequenceTile(batch, head, block, queries, keys)


@triton.jit
def visible_keys(token, num_keys, tokens, window, traits: tl.constexpr):
    """The KeyRange that each row sees. The last token sees the last key."""
    position = num_keys - tokens + token
    start = position * 0
    stop = start + num_keys
    if traits.left:
        start = tl.maximum(position - window.left, 0)
    if traits.right:
        stop = tl.minimum(stop, position + window.right + 1)
    return KeyRange(start, stop)


@triton.jit
def keys_of_tile(block, num_keys, tokens, window, traits: tl.constexpr):
    """The KeyRange that some row of a tile sees; `traits.group` rows have one token."""
    start, stop = num_keys * 0, num_keys
    if traits.left:
        start = tl.maximum(num_keys - tokens + block * traits.block_m // traits.group - window.left, 0)
    if traits.right:
        last = tl.minimum((block * traits.block_m + traits.block_m - 1) // traits.group, tokens - 1)
        stop = tl.maximum(tl.minimum(stop, num_keys - tokens + last + window.right + 1), 0)
    return KeyRange(start, stop)


@triton.jit
def nan_beyond_promise(o, lse_log2, token, keys, window):
    """(O, LSE) with NaN in rows beyond a promised length, and in all of a sequence with more keys than promised."""
    broken = breaks_promise(token, keys, window)
    return tl.where(broken[:, None], float("nan"), o), tl.where(broken, float("nan"), lse_log2)


@triton.jit
def fold_scale_signs(q, softmax, k_scale, traits: tl.constexpr):
    """(q, scale_log2, softcap), with the signs of the scales in q. What multiplies scores is then positive, so masked
    scores stay -inf. softmax: (scale_log2, softcap).
    """
    scale_log2, softcap = softmax
    if traits.sign != 1:
        q = (q * traits.sign).to(q.dtype)
    if traits.k_scale:
        size = tl.abs(k_scale).to(traits.accumulator)
        q = (q * tl.where(k_scale < 0, -1.0, tl.where(k_scale == 0, 0.0, 1.0))).to(q.dtype)
        size = tl.where(size == 0, 1.0, size)
        if traits.softcap:
            softcap = softcap * size
        else:
            scale_log2 = scale_log2 * size
    return q, scale_log2, softcap


@triton.jit
def combine_step(base, total, lse_log2):
    """(base, total, kept, weight) after a split with this log-sum-exp, in log2 units. Before the first: (-inf, 0).

    Then O = fma(O, kept, part * weight). In the order of the splits this gives the same bits in each kernel, because no
    other operation can be fused: of a * b + c * d a compiler may fuse either product.
    """
    top = tl.maximum(base, lse_log2)
    level = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.exp2(base - level)
    weight = tl.exp2(lse_log2 - level)
    return top, tl.fma(total, kept, weight), kept, weight


@triton.jit
def combined_factor(base, total):
    """(what combined rows are multiplied by, their log-sum-exp in log2 units) after the last split: 0 and -inf for rows
    that see no key.
    """
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    return tl.where(is_empty, 0.0, 1.0 / total), tl.where(is_empty, float("-inf"), base + tl.log2(total))


@triton.jit
def add_sink(o, lse_log2, sink, traits: tl.constexpr):
    """(out, LSE) of rows [M, D_v] that have seen all their keys, LSE as a natural logarithm. The LSE of a row that sees
    no key is its sink, or -inf.
    """
    lse = lse_log2 * LN_2
    if traits.sinks:
        sink = sink.to(traits.accumulator)
        sink_log2 = in_log2(sink)
        top = tl.maximum(lse_log2, sink_log2)
        top = tl.where(top == float("-inf"), 0.0, top)
        share = tl.exp2(lse_log2 - top)
        total = share + tl.exp2(sink_log2 - top)
        is_empty = total == 0
        total = tl.where(is_empty, 1.0, total)
        o = o * (share / total)[:, None]
        with_sink = tl.where(is_empty, float("-inf"), (top + tl.log2(total)) * LN_2)
        with_sink = tl.where(with_sink < sink, sink, with_sink)
        lse = tl.where(lse_log2 == float("-inf"), sink, with_sink)
    return o, lse
