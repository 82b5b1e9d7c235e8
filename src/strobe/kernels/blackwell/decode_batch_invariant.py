"""A forward on Blackwell that gives each row the bits of its decode: the tiles and the arithmetic of `decode`, for any
number of queries. It has not run on a Blackwell GPU.

    a program takes a tile of rows: queries, each with the heads that share a key head
    for each split of 2,048 keys   O_i, LSE_i = what the decode's program of that split would write
                                   O = rescale O + weight O_i, as the decode combines splits, one after the other

Schedule of a split, with two stages; four warps do the same
    S_i = K_i Q^T,  P_i = softmax(S_i),  O = rescale O + V_i^T P_i    while K_{i+1} and V_{i+1} are copied

Synchronization            it orders
    wait_for_copies(0)     before S_i: K_i, V_i; all warps have read P_{i-1} and the stage that the next copies fill
    partition_barrier      before O: P_i
    partition_barrier      before a split: Q; all warps have read the stages that the split's first copies fill

mma.sync computes eight queries at a time, whatever the tile's height, and adds 16 keys or columns after the other. So
the bits of a row do not depend on how many rows a tile has. Splits, masks and the combination are those of
`hopper.batch_invariant`.
"""

from ..device.dialect import cp_async_wait, gl, gluon, partition_barrier
from ..device.seqlen import LONG_K, LONG_Q, OFFSETS_K, OFFSETS_Q, guard_offsets
from ..device.softmax import SoftmaxState
from ..device.split_kv import (
    KeyRange,
    combine_step,
    combined_factor,
    keys_of_tile,
    nan_beyond_promise,
    sequence_tile,
)
from ..hopper.batch_invariant import InvariantState, copy_k, copy_v, keys_seen_by_all, softmax_step
from ..hopper.decode import no_keys, normalize_split, visible_to_queries, zero_o
from ..hopper.decode_arguments import DecodeOutputs, KeyCache, TileRows
from ..hopper.decode_layouts import product_layout
from ..hopper.decode_loads import load_queries, store_queries
from ..hopper.decode_store import as_rows, rows_of_tile, write_rows
from .decode import allocate_smem, pv_product, qk_product, queries_operand, wait_for_copies


@gluon.jit
def attend(smem, cache, keys, visible, seen_by_all, softmax, traits: gl.constexpr):
    """(O^T, not yet normalized, SoftmaxState) of at least one key: `decode.attend` to the bit."""
    BLOCK_N: gl.constexpr = traits.block_n
    begin = keys.start // BLOCK_N * BLOCK_N
    q = queries_operand(smem.q, traits)
    copy_k(smem, 0, cache, keys, begin, traits)
    copy_v(smem, 0, cache, keys, begin, traits)
    state = InvariantState(no_keys(traits), zero_o(traits), begin * 0)
    for n_start in range(begin, keys.stop, BLOCK_N):
        state = mainloop_step(n_start, state, smem, q, cache, keys, visible, seen_by_all, softmax, traits)
    cp_async_wait(0)  # the groups still in flight are empty; a kernel leaves none behind
    return state.o, SoftmaxState(state.softmax.row_max, gl.sum(state.softmax.row_sum, 0))


@gluon.jit
def mainloop_step(n_start, state, smem, q, cache, keys, visible, seen_by_all, softmax, traits: gl.constexpr):
    """The tile of keys from n_start on."""
    stage, later = state.stage, n_start + traits.block_n
    wait_for_copies(0)
    copy_k(smem, 1 - stage, cache, keys, later, traits)
    copy_v(smem, 1 - stage, cache, keys, later, traits)
    # S^T = K Q^T
    s = qk_product(q, smem.k.index(stage), traits)
    # P^T = softmax(S^T)
    p, rescale, softmax_state = softmax_step(s, state.softmax, n_start, keys, visible, seen_by_all, softmax, traits)
    # O^T = rescale O^T + V^T P^T
    o = state.o * rescale[None, :]
    smem.p.store(p.to(smem.p.dtype))
    partition_barrier()
    o = pv_product(smem.v.index(stage), smem.p, o, traits)
    return InvariantState(softmax_state, o, 1 - stage)


@gluon.jit
def attend_to_splits(smem, cache, tile, seen, num_keys, window, softmax, split_size, traits: gl.constexpr):
    """(O^T [D_v, queries], LSE in log2 units) of rows that see keys of the KeyRange `seen`."""
    layout: gl.constexpr = gl.SliceLayout(0, product_layout(traits.block_m, traits.warps))
    base = gl.full([traits.block_m], float("-inf"), gl.float32, layout)
    total = gl.full([traits.block_m], 0.0, gl.float32, layout)
    o = zero_o(traits)
    visible = visible_to_queries(tile, num_keys, window, traits)
    seen_by_all = keys_seen_by_all(tile, num_keys, window, traits)
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
    DecodeSoftmax (`hopper.decode_arguments`); shape: `runtime.batch_invariant.InvariantShape`.
    """
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
        softmax = store_queries(smem.q, load_queries(q, strides.q, tile, traits), 1.0, softmax_params, traits)
        # mainloop
        o, lse_log2 = attend_to_splits(smem, cache, tile, seen, num_keys, window, softmax, shape.split_size, traits)
        # epilogue
        o, lse_log2 = as_rows(o, lse_log2, traits)
        row = rows_of_tile(tile, traits.block_m, o, traits)
        if traits.packed:
            o, lse_log2 = nan_beyond_promise(o, lse_log2, row // traits.group, num_keys, window)
        write_rows(outputs, o, lse_log2, tile, row, strides.out, traits)
