"""A forward on Hopper that gives each row the bits of its decode: the tiles and the arithmetic of `decode`, for any
number of queries.

    a program takes a tile of rows: queries, each with the heads that share a key head
    for each split of 2,048 keys   O_i, LSE_i = what the decode's program of that split would write
                                   O = rescale O + weight O_i, as the decode combines splits, one after the other

Schedule of a split, with two stages; all warps do the same
    prologue    S_0 = K_0 Q^T, P_0 = softmax(S_0)
    mainloop    S_i = K_i Q^T    |    O += V_{i-1}^T P_{i-1}    |    P_i = softmax(S_i) while O is in flight
    epilogue    O += V_n^T P_n

Synchronization            it orders
    wait_for_copies(2)     before S_0: K_0 and Q
    wait_for_copies(0)     before S_i and O: K_i, V_{i-1}, P_{i-1}; all warps have read what the next copies overwrite
    partition_barrier      between splits: all warps have read the stages that the next split's copies fill

O of the splits before stays in registers, or spills; partial results never go to memory. Packed sequences are found by
the tile's number, as `device.seqlen` does for all kernels. The speed is two thirds of `forward`'s.
"""

from ..device.dialect import cp_async_commit, gl, gluon, partition_barrier, record, warpgroup_mma_wait
from ..device.seqlen import LONG_K, LONG_Q, OFFSETS_K, OFFSETS_Q, guard_offsets
from ..device.softmax import SoftmaxState, apply_softcap
from ..device.split_kv import (
    KeyRange,
    combine_step,
    combined_factor,
    keys_of_tile,
    nan_beyond_promise,
    sequence_tile,
)
from .decode import (
    apply_mask,
    no_keys,
    normalize_split,
    online_softmax,
    pv_product,
    qk_product,
    visible_to_queries,
    zero_o,
)
from .decode_arguments import DecodeOutputs, DecodeSmem, InvariantArguments, KeyCache, MaskedQueries, TileRows
from .decode_layouts import allocate_operand, allocate_stages, copy_layout, product_layout
from .decode_loads import copy_rows, in_split, key_offsets, load_queries, store_queries, wait_for_copies
from .decode_store import as_rows, rows_of_tile, write_rows


@record
class InvariantState:
    """What a step of the mainloop hands the next. P of the block before lies in `stage`, and is not yet multiplied."""

    softmax: gl.tuple  # SoftmaxState; row_sum is [keys, queries]
    o: gl.tensor  # O^T [D_v, queries] float32
    stage: gl.tensor


@gluon.jit
def copy_k(smem, stage, cache, keys, n_start, traits: gl.constexpr):
    """Start copying a tile of K, as a group; an empty one where the split has no such tile."""
    layout: gl.constexpr = copy_layout(traits.block_d, 2, traits.warps)
    copy_tile(smem.k, stage, cache.k, cache.strides.k, cache, keys, n_start, layout, traits.head_dim, traits)


@gluon.jit
def copy_v(smem, stage, cache, keys, n_start, traits: gl.constexpr):
    layout: gl.constexpr = copy_layout(traits.block_dv, 2, traits.warps)
    copy_tile(smem.v, stage, cache.v, cache.strides.v, cache, keys, n_start, layout, traits.head_dim_v, traits)


@gluon.jit
def copy_tile(
    buffers, stage, pool, strides, cache, keys, n_start, layout: gl.constexpr, width: gl.constexpr, traits: gl.constexpr
):
    if n_start < keys.stop:
        rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, layout))
        offsets, is_copied = key_offsets(n_start, strides, cache, keys, n_start, rows, traits)
        copy_rows(buffers.index(stage), pool, offsets, is_copied, layout, width)
    else:
        cp_async_commit()


@gluon.jit
def keys_seen_by_all(tile, num_keys, window, traits: gl.constexpr):
    """The KeyRange that all rows of a tile see."""
    first, stop = num_keys * 0, num_keys
    if traits.left:
        last_token = (tile.block * traits.block_m + traits.block_m - 1) // traits.group
        first = num_keys - tile.tokens + last_token - window.left
    if traits.right:
        first_token = tile.block * traits.block_m // traits.group
        stop = gl.minimum(stop, num_keys - tile.tokens + first_token + window.right + 1)
    return KeyRange(first, stop)


@gluon.jit
def softmax_step(s, state, n_start, keys, visible, seen_by_all, softmax, traits: gl.constexpr):
    """(P^T, rescale, SoftmaxState) of a tile: those of the decode, which applies the mask to every tile."""
    rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, s.type.layout))
    s = apply_softcap(s, softmax.softcap, traits)
    is_partial = n_start < gl.maximum(keys.start, seen_by_all.start)
    is_partial = is_partial | (n_start + traits.block_n > gl.minimum(keys.stop, seen_by_all.stop))
    if is_partial:
        s = apply_mask(s, in_split(n_start, rows, keys), n_start, rows, visible, traits)
    return online_softmax(s, state, softmax.scale_log2, traits)


@gluon.jit
def attend(smem, cache, keys, visible, seen_by_all, softmax, traits: gl.constexpr):
    """(O^T, not yet normalized, SoftmaxState) of at least one key: `decode.attend` to the bit, in another order."""
    BLOCK_N: gl.constexpr = traits.block_n
    begin = keys.start // BLOCK_N * BLOCK_N
    state, o = no_keys(traits), zero_o(traits)
    # prologue
    copy_k(smem, 0, cache, keys, begin, traits)
    copy_k(smem, 1, cache, keys, begin + BLOCK_N, traits)
    copy_v(smem, 0, cache, keys, begin, traits)
    wait_for_copies(2)
    # S^T = K Q^T, P^T = softmax(S^T)
    s = warpgroup_mma_wait(0, deps=[qk_product(smem.q, smem.k.index(0), traits)])
    p, _, state = softmax_step(s, state, begin, keys, visible, seen_by_all, softmax, traits)
    smem.p.index(0).store(gl.permute(p.to(smem.p.dtype), (1, 0)))
    # mainloop
    state = InvariantState(state, o, begin * 0)
    for n_start in range(begin + BLOCK_N, keys.stop, BLOCK_N):
        state = mainloop_step(n_start, state, smem, cache, keys, visible, seen_by_all, softmax, traits)
    # epilogue: O^T += V^T P^T
    wait_for_copies(0)
    o = pv_product(smem.v.index(state.stage), smem.p.index(state.stage), state.o, traits)
    o = warpgroup_mma_wait(0, deps=[o])
    return o, SoftmaxState(state.softmax.row_max, gl.sum(state.softmax.row_sum, 0))


@gluon.jit
def mainloop_step(n_start, state, smem, cache, keys, visible, seen_by_all, softmax, traits: gl.constexpr):
    """One barrier a tile, besides those of the maxima."""
    stage = state.stage
    wait_for_copies(0)
    # S^T = K Q^T
    s = qk_product(smem.q, smem.k.index(1 - stage), traits)
    # O^T += V^T P^T of the tile before
    o = pv_product(smem.v.index(stage), smem.p.index(stage), state.o, traits)
    copy_k(smem, stage, cache, keys, n_start + traits.block_n, traits)
    copy_v(smem, 1 - stage, cache, keys, n_start, traits)
    s = warpgroup_mma_wait(1, deps=[s])
    # P^T = softmax(S^T)
    p, rescale, softmax_state = softmax_step(s, state.softmax, n_start, keys, visible, seen_by_all, softmax, traits)
    stage = 1 - stage
    smem.p.index(stage).store(gl.permute(p.to(smem.p.dtype), (1, 0)))
    # O^T = rescale O^T
    o = warpgroup_mma_wait(0, deps=[o])
    return InvariantState(softmax_state, o * rescale[None, :], stage)


@gluon.jit
def allocate_smem(dtype: gl.constexpr, traits: gl.constexpr):
    """DecodeSmem with two stages, of P too."""
    q = allocate_operand(traits.block_m, traits.block_d, dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([traits.block_m, traits.block_n], dtype)
    p = gl.allocate_shared_memory(dtype, [2, traits.block_m, traits.block_n], p_layout)
    k = allocate_stages(2, traits.block_d, dtype, traits)
    return DecodeSmem(q, p, k, allocate_stages(2, traits.block_dv, dtype, traits))


@gluon.jit
def attend_to_splits(smem, cache, queries, seen, softmax, split_size, attend: gl.constexpr, traits: gl.constexpr):
    """(O^T [D_v, queries], LSE in log2 units) of rows that see keys of the KeyRange `seen`."""
    layout: gl.constexpr = gl.SliceLayout(0, product_layout(traits.block_m, traits.warps))
    base = gl.full([traits.block_m], float("-inf"), gl.float32, layout)
    total = gl.full([traits.block_m], 0.0, gl.float32, layout)
    o = zero_o(traits)
    visible = visible_to_queries(queries.tile, queries.num_keys, queries.window, traits)
    seen_by_all = keys_seen_by_all(queries.tile, queries.num_keys, queries.window, traits)
    for split in range(seen.start // split_size, gl.cdiv(gl.where(seen.start < seen.stop, seen.stop, 0), split_size)):
        start = gl.maximum(split * split_size, seen.start)
        keys = KeyRange(start, gl.minimum(split * split_size + split_size, seen.stop))
        partition_barrier()  # Q is there; all warps have read the stages that the next keys go to
        part, state = attend(smem, cache, keys, visible, seen_by_all, softmax, traits)
        part, lse_log2 = normalize_split(part, state, 1.0)
        # O = rescale O + weight O_i
        base, total, rescale, weight = combine_step(base, total, lse_log2)
        o = gl.fma(o, rescale[None, :], part * weight[None, :])
    factor, lse_log2 = combined_factor(base, total)
    return o * factor[None, :], lse_log2


@gluon.jit
def invariant_kernel(tensors, cu_seqlens, errors, strides, shape, window, softmax_params, traits: gl.constexpr):
    """tensors: InvariantTensors; cu_seqlens: CuSeqlens; strides: Strides; window: WindowParams; softmax_params:
    DecodeSoftmax (`decode_arguments`); shape: `runtime.batch_invariant.InvariantShape`.
    """
    call = InvariantArguments(tensors, cu_seqlens, errors, strides, shape, window, softmax_params)
    attend_tile(call, allocate_smem, attend, traits)


@gluon.jit
def attend_tile(call, allocate_smem: gl.constexpr, attend: gl.constexpr, traits: gl.constexpr):
    """The program of a tile of rows. call: InvariantArguments; allocate_smem and attend: functions with the arguments
    of those in this file, which contain the two products.
    """
    tensors, cu_seqlens, errors, strides = call.tensors, call.cu_seqlens, call.errors, call.strides
    shape, window = call.shape, call.window
    if traits.packed:
        if gl.program_id(0) == 0:
            lanes = gl.arange(0, 256, gl.BlockedLayout([1], [32], [traits.warps], [0]))
            longest_q, longest_k = window.max_seqlen_q, window.max_seqlen_k
            guard_offsets(cu_seqlens.q, shape.batch, shape.seqlen_q, longest_q, lanes, errors, OFFSETS_Q, LONG_Q)
            guard_offsets(cu_seqlens.k, shape.batch, shape.seqlen_k, longest_k, lanes, errors, OFFSETS_K, LONG_K)
    work = sequence_tile(cu_seqlens, shape, traits)
    if work.block * traits.block_m < work.queries.length * traits.group:
        # prologue
        q_start, tokens, num_keys = work.queries.start, work.queries.length, work.keys.length
        q = tensors.q + q_start.to(gl.int64) * strides.q.row
        out = tensors.out + q_start.to(gl.int64) * strides.out.row
        outputs = DecodeOutputs(out, tensors.lse + q_start, tensors.sinks)
        tile = TileRows(work.batch, work.head, work.block, tokens, shape.heads_kv, shape.seqlen_q, 0)
        cache = KeyCache(tensors.k, tensors.v, strides, None, work.batch, work.head, work.keys.start)
        seen = keys_of_tile(work.block, num_keys, tokens, window, traits)
        smem = allocate_smem(tensors.k.dtype.element_ty, traits)
        softmax = store_queries(smem.q, load_queries(q, strides.q, tile, traits), 1.0, call.softmax, traits)
        # mainloop
        queries = MaskedQueries(tile, num_keys, window)
        o, lse_log2 = attend_to_splits(smem, cache, queries, seen, softmax, shape.split_size, attend, traits)
        # epilogue
        o, lse_log2 = as_rows(o, lse_log2, traits)
        row = rows_of_tile(tile, traits.block_m, o, traits)
        if traits.packed:
            o, lse_log2 = nan_beyond_promise(o, lse_log2, row // traits.group, num_keys, window)
        write_rows(outputs, o, lse_log2, tile, row, strides.out, traits)
