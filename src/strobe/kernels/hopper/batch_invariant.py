"""Attention on Hopper whose rows have the bits of a decode: its tiles and its arithmetic (`decode`), for queries of any number.

    a program takes a tile of rows: queries, each with the heads that share a key head
    for each split of 2,048 keys   o, lse = what the decode's program of that split would keep
                                   joined = joined * kept + o * weight, as the decode joins partials, one after the other

No share goes to memory: o of the splits before waits in registers, or where they spill. Two thirds of the speed of `forward` is what equal bits
cost.
Packed sequences are found by the tile's number, as `device.seqlen` does for all kernels.
"""

from ..device.dialect import cp_async_commit, gl, gluon, partition_barrier, warpgroup_mma, warpgroup_mma_wait
from ..device.seqlen import LONG_K, LONG_Q, OFFSETS_K, OFFSETS_Q, guard_offsets
from ..device.softmax import tanh
from ..device.split_kv import KeyRange, combine_step, combined_factor, nan_beyond_promise, sequence_tile
from .decode import (
    apply_mask,
    copy_layout,
    copy_rows,
    in_sequence,
    key_offsets,
    keys_of_tile,
    load_queries,
    normalize_split,
    online_softmax,
    operand_buffer,
    product_layout,
    qk_product,
    rows_first,
    store_queries,
    tile_layout,
    visible_keys,
    wait_for_copies,
    write_rows,
)
from .decode_arguments import DecodeOutputs, DecodeSmem, SplitKeys, TileRows


@gluon.jit
def copy_tile(ring, slot, pool, stride, keys, n_start, layout: gl.constexpr, width: gl.constexpr, traits: gl.constexpr):
    """Start copying a tile of keys or of values, as a group; an empty one where the split has no such tile."""
    if n_start < keys.stop:
        at, ok = key_offsets(n_start, stride, keys, n_start, gl.arange(0, traits.block_n, gl.SliceLayout(1, layout)), traits)
        copy_rows(ring.index(slot), pool, at, ok, layout, width)
    else:
        cp_async_commit()


@gluon.jit
def shown_to_all(tile, n_keys, tokens, window, traits: gl.constexpr):
    """[first, stop) of the keys that all rows of a tile see."""
    first, stop = n_keys * 0, n_keys
    if traits.left:
        first = n_keys - tokens + (tile * traits.block_m + traits.block_m - 1) // traits.group - window.left
    if traits.right:
        stop = gl.minimum(stop, n_keys - tokens + tile * traits.block_m // traits.group + window.right + 1)
    return KeyRange(first, stop)


@gluon.jit
def softmax_of_tile(s, row_max, sums, n_start, keys, visible, shown, softmax, traits: gl.constexpr):
    """(p, rescale, row_max, sums) of a tile's scores: those of `decode.attend`, which looks at every tile for keys to hide."""
    rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, s.type.layout))
    if traits.softcap:
        s = tanh(s * softmax.softcap)
    if (n_start < gl.maximum(keys.start, shown.start)) | (n_start + traits.block_n > gl.minimum(keys.stop, shown.stop)):
        s = apply_mask(s, in_sequence(n_start, rows, keys), n_start, rows, visible, traits)
    return online_softmax(s, row_max, sums, softmax.scale_log2, traits)


@gluon.jit
def attend(smem, pool, strides, keys, visible, shown, softmax, traits: gl.constexpr):
    """`decode.attend` to the bit, over at least one key, in another order: o += p v of a tile is under way while the next one's weights are made.

    One barrier a tile beside those of maxima: its keys are there, and p and values of the one before, and all have done with what was there before.
    """
    BLOCK_N: gl.constexpr = traits.block_n
    layout: gl.constexpr = product_layout(traits.block_m, traits.warps)
    k_layout: gl.constexpr = copy_layout(traits.block_d, 2, traits.warps)
    v_layout: gl.constexpr = copy_layout(traits.block_dv, 2, traits.warps)
    begin = keys.start // BLOCK_N * BLOCK_N
    row_max = gl.full([traits.block_m], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    sums = gl.full([BLOCK_N, traits.block_m], 0.0, gl.float32, layout)
    o = gl.full([traits.block_dv, traits.block_m], 0.0, gl.float32, layout)
    copy_tile(smem.k, 0, pool.k, strides.k, keys, begin, k_layout, traits.head_dim, traits)
    copy_tile(smem.k, 1, pool.k, strides.k, keys, begin + BLOCK_N, k_layout, traits.head_dim, traits)
    copy_tile(smem.v, 0, pool.v, strides.v, keys, begin, v_layout, traits.head_dim_v, traits)
    wait_for_copies(2)
    s = warpgroup_mma_wait(0, deps=[qk_product(smem.q, smem.k.index(0), traits)])
    p, rescale, row_max, sums = softmax_of_tile(s, row_max, sums, begin, keys, visible, shown, softmax, traits)
    smem.p.index(0).store(gl.permute(p.to(smem.p.dtype), (1, 0)))
    slot = begin * 0
    for n_start in range(begin + BLOCK_N, keys.stop, BLOCK_N):
        wait_for_copies(0)
        s = qk_product(smem.q, smem.k.index(1 - slot), traits)
        o = warpgroup_mma(smem.v.index(slot).permute((1, 0)), smem.p.index(slot).permute((1, 0)), o, is_async=True)
        copy_tile(smem.k, slot, pool.k, strides.k, keys, n_start + BLOCK_N, k_layout, traits.head_dim, traits)
        copy_tile(smem.v, 1 - slot, pool.v, strides.v, keys, n_start, v_layout, traits.head_dim_v, traits)
        s = warpgroup_mma_wait(1, deps=[s])
        p, rescale, row_max, sums = softmax_of_tile(s, row_max, sums, n_start, keys, visible, shown, softmax, traits)
        slot = 1 - slot
        smem.p.index(slot).store(gl.permute(p.to(smem.p.dtype), (1, 0)))
        o = warpgroup_mma_wait(0, deps=[o])
        o = o * rescale[None, :]
    wait_for_copies(0)
    o = warpgroup_mma(smem.v.index(slot).permute((1, 0)), smem.p.index(slot).permute((1, 0)), o, is_async=True)
    return warpgroup_mma_wait(0, deps=[o]), row_max, gl.sum(sums, 0)


@gluon.jit
def invariant_kernel(tensors, cu_seqlens, errors, strides, shape, window, softmax_params, traits: gl.constexpr):
    """tensors: InvariantTensors; cu_seqlens: CuSeqlens; strides: Strides; window: WindowParams; softmax_params: DecodeSoftmax (`decode_arguments`);
    shape: `runtime.batch_invariant.InvariantShape`."""
    if traits.packed:
        if gl.program_id(0) == 0:
            lanes = gl.arange(0, 256, gl.BlockedLayout([1], [32], [traits.warps], [0]))
            guard_offsets(cu_seqlens.q, shape.batch, shape.seqlen_q, window.max_seqlen_q, lanes, errors, OFFSETS_Q, LONG_Q)
            guard_offsets(cu_seqlens.k, shape.batch, shape.seqlen_k, window.max_seqlen_k, lanes, errors, OFFSETS_K, LONG_K)
    work = sequence_tile(cu_seqlens, shape, traits)
    batch, head, tile = work.batch, work.head, work.block
    q_start, tokens = work.queries.start, work.queries.length
    k_start, n_keys = work.keys.start, work.keys.length
    if tile * traits.block_m < tokens * traits.group:
        split_size = shape.split_size
        q = tensors.q + q_start.to(gl.int64) * strides.q.row
        out = tensors.out + q_start.to(gl.int64) * strides.out.row
        outputs = DecodeOutputs(out, tensors.lse + q_start, tensors.sinks)
        place = TileRows(batch, head, tokens, shape.heads_kv, shape.seqlen_q)
        first, stop = keys_of_tile(tile, n_keys, tokens, window, traits)
        layout: gl.constexpr = product_layout(traits.block_m, traits.warps)
        base = gl.full([traits.block_m], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
        total = gl.full([traits.block_m], 0.0, gl.float32, gl.SliceLayout(0, layout))
        o = gl.full([traits.block_dv, traits.block_m], 0.0, gl.float32, layout)
        dtype: gl.constexpr = tensors.k.dtype.element_ty
        q_smem = operand_buffer(traits.block_m, traits.block_d, dtype)
        p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([traits.block_m, traits.block_n], dtype)
        p_smem = gl.allocate_shared_memory(dtype, [2, traits.block_m, traits.block_n], p_layout)
        k_smem = gl.allocate_shared_memory(dtype, [2, traits.block_n, traits.block_d], tile_layout(traits.block_n, traits.block_d, dtype, traits))
        v_smem = gl.allocate_shared_memory(dtype, [2, traits.block_n, traits.block_dv], tile_layout(traits.block_n, traits.block_dv, dtype, traits))
        smem = DecodeSmem(q_smem, p_smem, k_smem, v_smem)
        softmax = store_queries(q_smem, load_queries(q, strides.q, place, tile, traits), 1.0, softmax_params, traits)
        visible = visible_keys(tile, n_keys, tokens, window, traits)
        shown = shown_to_all(tile, n_keys, tokens, window, traits)
        for split in range(first // split_size, gl.cdiv(gl.where(first < stop, stop, 0), split_size)):
            start = gl.maximum(split * split_size, first)
            keys = SplitKeys(batch, head, k_start, start, gl.minimum(split * split_size + split_size, stop), batch * 0)
            partition_barrier()  # all have read the stages that the next keys go to
            part, row_max, row_sum = attend(smem, tensors, strides, keys, visible, shown, softmax, traits)
            part, lse_log2 = normalize_split(part, row_max, row_sum, 1.0)
            base, total, kept, weight = combine_step(base, total, lse_log2)
            o = gl.fma(o, kept[None, :], part * weight[None, :])
        factor, lse_log2 = combined_factor(base, total)
        o, lse_log2 = rows_first(o * factor[None, :], lse_log2, traits)
        row = tile * traits.block_m + gl.arange(0, traits.block_m, gl.SliceLayout(1, o.type.layout))
        if traits.packed:
            o, lse_log2 = nan_beyond_promise(o, lse_log2, row // traits.group, n_keys, window)
        write_rows(outputs, o, lse_log2, place, row, strides.out, traits)
