"""Attention in Triton whose rows have the bits of a decode: its tiles and its arithmetic (`decode`), for queries of any number.

    a program takes a tile of rows: queries, each with the heads that share a key head
    for each split of 2,048 keys   o, lse = what the decode's program of that split would keep
                                   joined = joined * kept + o * weight, as the decode joins shares, one after the other

Tiles are of 32 rows whatever the problem: products of other heights are other instructions on some GPUs, and sum in another order.
"""

import triton
import triton.language as tl

from ..device.seqlen import LONG_K, LONG_Q, OFFSETS_K, OFFSETS_Q, guard_offsets
from ..device.split_kv import broken, locate, signed, weighed, worth
from .decode import attend, whole, write
from .forward import softmax_scalars


@triton.jit
def intervals(tile, token, n_keys, tokens, limits, form: tl.constexpr):
    """([first, stop) of the keys that each row sees, the same of all rows together)."""
    position = n_keys - tokens + token
    first, end = position * 0, position * 0 + n_keys
    begin, stop = n_keys * 0, n_keys
    if form.left:
        first = tl.maximum(position - limits[0], 0)
        begin = tl.maximum(n_keys - tokens + tile * form.block_m // form.group - limits[0], 0)
    if form.right:
        end = tl.minimum(end, position + limits[1] + 1)
        last = tl.minimum((tile * form.block_m + form.block_m - 1) // form.group, tokens - 1)
        stop = tl.minimum(stop, n_keys - tokens + last + limits[1] + 1)
    return (first, end), (begin, stop)


@triton.jit
def invariant_kernel(tensors, offsets, faults, strides, sizes, limits, numbers, form: tl.constexpr):
    """tensors (q, k, v, out, lse, sinks); offsets (cu_seqlens_q, cu_seqlens_k) or Nones; strides (batch, row, head) of q, k, v, out; sizes as
    `runtime.batch_invariant.sizes_of` has them; limits (left, right, max_seqlen_q, max_seqlen_k); numbers (scale_log2, softcap)."""
    BLOCK_M: tl.constexpr = form.block_m
    BLOCK_DV: tl.constexpr = form.block_dv
    q, k, v, out, lse, sinks = tensors
    heads_kv, total_q, split_size = sizes[1], sizes[2], sizes[5]
    if form.packed:
        if tl.program_id(0) == 0:
            guard_offsets(offsets[0], sizes[0], total_q, limits[2], tl.arange(0, 128), faults, OFFSETS_Q, LONG_Q)
            guard_offsets(offsets[1], sizes[0], sizes[3], limits[3], tl.arange(0, 128), faults, OFFSETS_K, LONG_K)
    batch, head, tile, queries, keys = locate(offsets, sizes, form)
    q_start, tokens = queries
    k_start, n_keys = keys
    if tile * BLOCK_M < tokens * form.group:
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        token = rows // form.group
        head_q = head * form.group + rows % form.group
        row_ok = token < tokens
        interval, seen = intervals(tile, token, n_keys, tokens, limits, form)
        first, stop = seen
        d = tl.arange(0, form.block_d)
        head_64, batch_64, token_64 = head_q.to(tl.int64), batch.to(tl.int64), (q_start + token).to(tl.int64)
        q_at = q + (batch_64 * strides[0][0] + token_64 * strides[0][1] + head_64 * strides[0][2])[:, None] + d[None, :]
        q_tile = tl.load(q_at, mask=row_ok[:, None] & (d < form.head_dim)[None, :], other=0.0)
        softmax = softmax_scalars(numbers, form)
        q_tile, scale_log2, softcap = signed(q_tile, (softmax.scale_log2, softmax.softcap), 1.0, form)
        base = tl.full([BLOCK_M], float("-inf"), form.accumulator)
        total = tl.zeros([BLOCK_M], form.accumulator)
        o = tl.zeros([BLOCK_M, BLOCK_DV], form.accumulator)
        for split in range(first // split_size, tl.cdiv(stop, split_size)):
            where = (
                batch,
                head,
                k_start,
                tl.maximum(split * split_size, first),
                tl.minimum(split * split_size + split_size, stop),
                batch * 0,
            )
            part, row_max, row_sum, _ = attend(
                q_tile, (k, v, k), (strides[1], strides[2]), where, interval, (scale_log2, softcap), form
            )
            part, held = whole(part, row_max, row_sum)
            base, total, kept, weight = weighed(base, total, held)
            o = tl.fma(o, kept[:, None], part * weight[:, None])
        factor, row_lse = worth(base, total)
        o = o * factor[:, None]
        if form.packed:
            o, row_lse = broken(o, row_lse, token, n_keys, limits)
        out_at = batch_64 * strides[3][0] + token_64 * strides[3][1] + head_64 * strides[3][2]
        places = (out_at, (batch_64 * heads_kv * form.group + head_64) * total_q + token_64)
        write((out, lse, sinks), places, o, row_lse, head_q, row_ok, form)
