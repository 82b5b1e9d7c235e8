"""A forward in Triton that gives each row the bits of its decode: the tiles and the arithmetic of `decode`, for any
number of queries.

    a program takes a tile of rows: queries, each with the heads that share a key head
    for each split of 2,048 keys   O_i, LSE_i = what the decode's program of that split would write
                                   O = kept O + weight O_i, as the decode combines splits, one after the other

Tiles have 32 rows whatever the problem. On some GPUs, products of other heights are other instructions, which sum in
another order.
"""

import triton
import triton.language as tl

from ..device.seqlen import LONG_K, LONG_Q, OFFSETS_K, OFFSETS_Q, guard_offsets
from ..device.split_kv import (
    KeyRange,
    combine_step,
    combined_factor,
    fold_scale_signs,
    keys_of_tile,
    nan_beyond_promise,
    sequence_tile,
    visible_keys,
)
from .arguments import KeyCache, SoftmaxParams
from .decode import attend, normalize_split, row_offsets, rows_of_tile, write_rows
from .forward import softmax_scalars


@triton.jit
def attend_to_splits(q, tensors, strides, tile, keys, visible, shape, softmax, traits: tl.constexpr):
    """(O [M, D_v], LSE in log2 units) of rows that see keys of the KeyRange `keys`."""
    base = tl.full([traits.block_m], float("-inf"), traits.accumulator)
    total = tl.full([traits.block_m], 0.0, traits.accumulator)
    o = tl.full([traits.block_m, traits.block_dv], 0.0, traits.accumulator)
    cache = KeyCache(tensors.k, tensors.v, None, tile.batch * 0, tile.batch, tile.head, tile.keys.start)
    for split in range(keys.start // shape.split_size, tl.cdiv(keys.stop, shape.split_size)):
        start = split * shape.split_size
        own = KeyRange(tl.maximum(start, keys.start), tl.minimum(start + shape.split_size, keys.stop))
        part, state, _ = attend(q, cache, strides, own, visible, softmax, traits)
        part, lse_log2 = normalize_split(part, state)
        base, total, kept, weight = combine_step(base, total, lse_log2)
        o = tl.fma(o, kept[:, None], part * weight[:, None])
    factor, lse_log2 = combined_factor(base, total)
    return o * factor[:, None], lse_log2


@triton.jit
def invariant_kernel(tensors, cu_seqlens, errors, strides, shape, window, softmax_params, traits: tl.constexpr):
    """tensors: ForwardTensors; cu_seqlens: CuSeqlens; strides: ForwardStrides; shape:
    runtime.batch_invariant.InvariantShape; window: WindowParams; softmax_params: SoftmaxParams.
    """
    if traits.packed:
        if tl.program_id(0) == 0:
            lanes = tl.arange(0, 128)
            longest_q, longest_k = window.max_seqlen_q, window.max_seqlen_k
            guard_offsets(cu_seqlens.q, shape.batch, shape.seqlen_q, longest_q, lanes, errors, OFFSETS_Q, LONG_Q)
            guard_offsets(cu_seqlens.k, shape.batch, shape.seqlen_k, longest_k, lanes, errors, OFFSETS_K, LONG_K)
    tile = sequence_tile(cu_seqlens, shape, traits)
    tokens, num_keys = tile.queries.length, tile.keys.length
    if tile.block * traits.block_m < tokens * traits.group:
        # prologue
        rows = rows_of_tile(tile.block, tile.head, tokens, traits)
        visible = visible_keys(rows.token, num_keys, tokens, window, traits)
        keys = keys_of_tile(tile.block, num_keys, tokens, window, traits)
        d = tl.arange(0, traits.block_d)
        pointers = tensors.q + row_offsets(strides.q, tile.batch, rows, tile.queries.start)[:, None] + d[None, :]
        q = tl.load(pointers, mask=rows.exists[:, None] & (d < traits.head_dim)[None, :], other=0.0)
        softmax = softmax_scalars(softmax_params, traits)
        q, scale_log2, softcap = fold_scale_signs(q, (softmax.scale_log2, softmax.softcap), 1.0, traits)
        softmax = SoftmaxParams(scale_log2, softcap, 0.0)
        # mainloop
        o, lse_log2 = attend_to_splits(q, tensors, strides, tile, keys, visible, shape, softmax, traits)
        # epilogue
        if traits.packed:
            o, lse_log2 = nan_beyond_promise(o, lse_log2, rows.token, num_keys, window)
        out_offsets = row_offsets(strides.out, tile.batch, rows, tile.queries.start)
        heads_q = shape.heads_kv * traits.group
        lse_rows = (tile.batch.to(tl.int64) * heads_q + rows.head_q.to(tl.int64)) * shape.seqlen_q
        lse_offsets = lse_rows + (tile.queries.start + rows.token).to(tl.int64)
        write_rows(tensors, out_offsets, lse_offsets, o, lse_log2, rows, traits)
