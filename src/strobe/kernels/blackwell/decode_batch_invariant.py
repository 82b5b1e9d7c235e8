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
from ..device.softmax import SoftmaxState
from ..hopper.batch_invariant import InvariantState, attend_tile, copy_k, copy_v, softmax_step
from ..hopper.decode import no_keys, zero_o
from ..hopper.decode_arguments import InvariantArguments
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
def invariant_kernel(tensors, cu_seqlens, errors, strides, shape, window, softmax_params, traits: gl.constexpr):
    """tensors: InvariantTensors; cu_seqlens: CuSeqlens; strides: Strides; window: WindowParams; softmax_params:
    DecodeSoftmax (`hopper.decode_arguments`); shape: `runtime.batch_invariant.InvariantShape`.
    """
    call = InvariantArguments(tensors, cu_seqlens, errors, strides, shape, window, softmax_params)
    attend_tile(call, allocate_smem, attend, traits)
