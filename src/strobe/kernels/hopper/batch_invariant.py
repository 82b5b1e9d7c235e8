"""Attention on Hopper whose rows have the bits of a decode: its tiles and its arithmetic (`decode`), for queries of any number.

    a program takes a tile of rows: queries, each with the heads that share a key head
    for each split of 2,048 keys   o, lse = what the decode's program of that split would keep
                                   joined = joined * kept + o * weight, as the decode joins shares, one after the other

No share goes to memory: o of the splits before waits in registers, or where they spill. Two thirds of the speed of `forward` is what equal bits
cost.
Packed sequences are found by the tile's number, as `device.seqlen` does for all kernels.
"""

from ..device.dialect import cp_async_commit, gl, gluon, partition_barrier, warpgroup_mma, warpgroup_mma_wait
from ..device.seqlen import LONG_K, LONG_Q, OFFSETS_K, OFFSETS_Q, guard_offsets
from ..device.softmax import tanh
from ..device.split_kv import combine_step, combined_factor, nan_beyond_promise, sequence_tile
from .decode import (
    as_rows,
    copy_layout,
    copy_rows,
    hidden,
    in_sequence,
    interval_of,
    keys_of_tile,
    landed,
    load_queries,
    matrix,
    places_of,
    product_layout,
    score_product,
    softmax_step,
    store_queries,
    tile_layout,
    whole,
    write,
)


@gluon.jit
def copy_tile(ring, slot, pool, stride, where, n_start, layout: gl.constexpr, width: gl.constexpr, form: gl.constexpr):
    """Start copying a tile of keys or of values, as a group; an empty one where the split has no such tile."""
    if n_start < where[4]:
        at, ok = places_of(n_start, stride, where, n_start, gl.arange(0, form.block_n, gl.SliceLayout(1, layout)), form)
        copy_rows(ring.index(slot), pool, at, ok, layout, width)
    else:
        cp_async_commit()


@gluon.jit
def shown_to_all(tile, n_keys, tokens, limits, form: gl.constexpr):
    """[first, stop) of the keys that all rows of a tile see."""
    first, stop = n_keys * 0, n_keys
    if form.left:
        first = n_keys - tokens + (tile * form.block_m + form.block_m - 1) // form.group - limits[0]
    if form.right:
        stop = gl.minimum(stop, n_keys - tokens + tile * form.block_m // form.group + limits[1] + 1)
    return first, stop


@gluon.jit
def weights(s, state, n_start, where, interval, shown, units, form: gl.constexpr):
    """(p, rescale, row_max, sums) of a tile's scores: those of `decode.attend`, which looks at every tile for keys to hide."""
    row_max, sums = state
    rows = gl.arange(0, form.block_n, gl.SliceLayout(1, s.type.layout))
    if form.softcap:
        s = tanh(s * units[1])
    if (n_start < gl.maximum(where[3], shown[0])) | (n_start + form.block_n > gl.minimum(where[4], shown[1])):
        s = hidden(s, in_sequence(n_start, rows, where), n_start, rows, interval, form)
    return softmax_step(s, row_max, sums, units[0], form)


@gluon.jit
def attend(smem, pools, strides, where, interval, shown, units, form: gl.constexpr):
    """`decode.attend` to the bit, over at least one key, in another order: o += p v of a tile is under way while the next one's weights are made.

    One barrier a tile beside those of maxima: its keys are there, and p and values of the one before, and all have done with what was there before.
    """
    BLOCK_N: gl.constexpr = form.block_n
    layout: gl.constexpr = product_layout(form.block_m, form.warps)
    k_layout: gl.constexpr = copy_layout(form.block_d, 2, form.warps)
    v_layout: gl.constexpr = copy_layout(form.block_dv, 2, form.warps)
    q_smem, p_smem, k_smem, v_smem = smem
    begin = where[3] // BLOCK_N * BLOCK_N
    row_max = gl.full([form.block_m], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    sums = gl.full([BLOCK_N, form.block_m], 0.0, gl.float32, layout)
    o = gl.full([form.block_dv, form.block_m], 0.0, gl.float32, layout)
    copy_tile(k_smem, 0, pools[0], strides[0], where, begin, k_layout, form.head_dim, form)
    copy_tile(k_smem, 1, pools[0], strides[0], where, begin + BLOCK_N, k_layout, form.head_dim, form)
    copy_tile(v_smem, 0, pools[1], strides[1], where, begin, v_layout, form.head_dim_v, form)
    landed(2)
    s = warpgroup_mma_wait(0, deps=[score_product(q_smem, k_smem.index(0), form)])
    p, rescale, row_max, sums = weights(s, (row_max, sums), begin, where, interval, shown, units, form)
    p_smem.index(0).store(gl.permute(p.to(p_smem.dtype), (1, 0)))
    slot = begin * 0
    for n_start in range(begin + BLOCK_N, where[4], BLOCK_N):
        landed(0)
        s = score_product(q_smem, k_smem.index(1 - slot), form)
        o = warpgroup_mma(v_smem.index(slot).permute((1, 0)), p_smem.index(slot).permute((1, 0)), o, is_async=True)
        copy_tile(k_smem, slot, pools[0], strides[0], where, n_start + BLOCK_N, k_layout, form.head_dim, form)
        copy_tile(v_smem, 1 - slot, pools[1], strides[1], where, n_start, v_layout, form.head_dim_v, form)
        s = warpgroup_mma_wait(1, deps=[s])
        p, rescale, row_max, sums = weights(s, (row_max, sums), n_start, where, interval, shown, units, form)
        slot = 1 - slot
        p_smem.index(slot).store(gl.permute(p.to(p_smem.dtype), (1, 0)))
        o = warpgroup_mma_wait(0, deps=[o])
        o = o * rescale[None, :]
    landed(0)
    o = warpgroup_mma(v_smem.index(slot).permute((1, 0)), p_smem.index(slot).permute((1, 0)), o, is_async=True)
    return warpgroup_mma_wait(0, deps=[o]), row_max, gl.sum(sums, 0)


@gluon.jit
def invariant_kernel(tensors, offsets, faults, strides, sizes, limits, numbers, form: gl.constexpr):
    """tensors (q, k, v, out, lse, sinks); offsets (cu_seqlens_q, cu_seqlens_k) or Nones; strides (batch, row, head) of q, k, v, out; sizes as
    `runtime.batch_invariant.sizes_of` has them; limits (left, right, max_seqlen_q, max_seqlen_k); numbers (scale_log2, softcap)."""
    q, k, v, out, lse, sinks = tensors
    if form.packed:
        if gl.program_id(0) == 0:
            lanes = gl.arange(0, 256, gl.BlockedLayout([1], [32], [form.warps], [0]))
            guard_offsets(offsets[0], sizes[0], sizes[2], limits[2], lanes, faults, OFFSETS_Q, LONG_Q)
            guard_offsets(offsets[1], sizes[0], sizes[3], limits[3], lanes, faults, OFFSETS_K, LONG_K)
    batch, head, tile, queries, keys = sequence_tile(offsets, sizes, form)
    q_start, tokens = queries
    k_start, n_keys = keys
    if tile * form.block_m < tokens * form.group:
        heads_kv, split_size = sizes[1], sizes[5]
        q += q_start.to(gl.int64) * strides[0][1]
        out += q_start.to(gl.int64) * strides[3][1]
        place = (batch, head, tokens, heads_kv, sizes[2])
        first, stop = keys_of_tile(tile, n_keys, tokens, limits, form)
        layout: gl.constexpr = product_layout(form.block_m, form.warps)
        base = gl.full([form.block_m], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
        total = gl.full([form.block_m], 0.0, gl.float32, gl.SliceLayout(0, layout))
        o = gl.full([form.block_dv, form.block_m], 0.0, gl.float32, layout)
        dtype: gl.constexpr = k.dtype.element_ty
        q_smem = matrix(form.block_m, form.block_d, dtype)
        p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([form.block_m, form.block_n], dtype)
        p_smem = gl.allocate_shared_memory(dtype, [2, form.block_m, form.block_n], p_layout)
        k_smem = gl.allocate_shared_memory(dtype, [2, form.block_n, form.block_d], tile_layout(form.block_n, form.block_d, dtype, form))
        v_smem = gl.allocate_shared_memory(dtype, [2, form.block_n, form.block_dv], tile_layout(form.block_n, form.block_dv, dtype, form))
        smem = (q_smem, p_smem, k_smem, v_smem)
        units = store_queries(q_smem, load_queries(q, strides[0], place, tile, form), 1.0, numbers, form)
        interval = interval_of(tile, n_keys, tokens, limits, form)
        shown = shown_to_all(tile, n_keys, tokens, limits, form)
        for split in range(first // split_size, gl.cdiv(gl.where(first < stop, stop, 0), split_size)):
            start = gl.maximum(split * split_size, first)
            where = (batch, head, k_start, start, gl.minimum(split * split_size + split_size, stop), batch * 0)
            partition_barrier()  # all have read the stages that the next keys go to
            part, row_max, row_sum = attend(smem, (k, v), (strides[1], strides[2]), where, interval, shown, units, form)
            part, lse_log2 = whole(part, row_max, row_sum, 1.0)
            base, total, kept, weight = combine_step(base, total, lse_log2)
            o = gl.fma(o, kept[None, :], part * weight[None, :])
        factor, lse_log2 = combined_factor(base, total)
        o, lse_log2 = as_rows(o * factor[None, :], lse_log2, form)
        row = tile * form.block_m + gl.arange(0, form.block_m, gl.SliceLayout(1, o.type.layout))
        if form.packed:
            o, lse_log2 = nan_beyond_promise(o, lse_log2, row // form.group, n_keys, limits)
        write((out, lse + q_start, sinks), o, lse_log2, place, row, strides[3], form)
