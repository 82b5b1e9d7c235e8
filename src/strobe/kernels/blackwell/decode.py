"""Decoding on Blackwell: the Hopper decode with products by mma.sync. It has not run on a Blackwell GPU.

Each program attends to one split of one sequence's keys, for all query heads of a key head. Copies of K and V, splits,
clusters, the merge of partial results and the layouts of tiles are those of `hopper.decode`, whose docstring describes
them. wgmma does not exist on sm_100, so this file has the two products and the mainloop around them.

Schedule of the program's four warps, with three stages. S_i = K_i Q^T, O += V_i^T P_i
    copies (cp.async)   K_0 V_0 K_1 V_1 | K_2 V_2             | K_3 V_3             | ...
    four warps          |                 S_0  softmax  O     | S_1  softmax  O     | ...

Synchronization                          it orders
    wait_for_copies(2 AHEAD - 1)         before S_i: K_i, Q; all warps have read stage i - 1, which the next copy fills
    wait_for_copies(2 AHEAD)             before O: V_i and P_i
    partition_barrier, then counter      the program's partial result, before it counts as done
    counter (acquire and release)        the partial results of other splits, before the last program combines them
    cluster_wait, inbox                  in a cluster: all programs have started; all parts have arrived
AHEAD is `stages` - 1, the number of tiles in flight. A tile is two groups of copies, one of K and one of V.

Keys are the rows of both products: S^T = K Q^T [keys, queries] and O^T += V^T P^T [D_v, queries]. mma.sync takes 16
rows and 8 columns. A warp owns 16 keys of each 64, and 16 columns of values of each 64. Its operand A is its own part
of K or V^T, so each byte of K and V is read from shared memory once. Its operand B is all of Q^T or P^T: 8 columns are
enough for one token of 8 heads. The fragments of a product are those of wgmma, so `hopper.decode`'s functions of S^T
and O^T run as they are. 8-bit keys and values become float16 in registers, without a second copy in shared memory.

Why not tcgen05: a decode reads 64 keys of 128 columns in about 1,120 cycles (B200, 8 TB/s). mma.sync needs 128 of these
for 8 rows and 512 for 32 rows. tcgen05 would take its operands from shared memory, so 8-bit keys would be written there
a second time, and the results would come back through tensor memory. The lab note of 2026-11-28, "the Blackwell
decode", has the table.
"""

from ..device.dialect import (
    cp_async_wait,
    gl,
    gluon,
    mma_v2,
    partition_barrier,
    zero_of_turn,
)
from ..device.softmax import SoftmaxState, apply_softcap
from ..hopper.decode import (
    PAGES,
    DecodeState,
    apply_mask,
    decode_split,
    no_keys,
    online_softmax,
    visible_to_queries,
    zero_o,
)
from ..hopper.decode_arguments import DecodeArguments, DecodeSmem, PrefetchedPages
from ..hopper.decode_hooks import modify_scores
from ..hopper.decode_layouts import allocate_operand, allocate_stages, product_layout
from ..hopper.decode_loads import (
    copy_tile,
    in_pool,
    in_split,
    page_ids,
    page_ids_of_copies,
)

K_STEP: gl.constexpr = gl.constexpr(16)  # k of mma.sync; products in parts of it take the fewest registers


# ---------------------------------------------------------------- products


@gluon.constexpr_function
def mma_layout(warps):
    """Accumulators of mma.sync m16n8k16 whose warps share the rows."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.jit
def rows_operand(tile, traits: gl.constexpr):
    """A tile of K, or of V^T, as operand A: each warp reads its own rows. 8-bit elements become float16."""
    a = tile.load(gl.DotOperandLayout(0, mma_layout(traits.warps), 2))
    if traits.fp8:
        a = a.to(gl.float16)
    return a


@gluon.jit
def columns_operand(tile, traits: gl.constexpr):
    """Q^T or P^T as operand B, all of it in each warp."""
    return tile.load(gl.DotOperandLayout(1, mma_layout(traits.warps), 2))


@gluon.constexpr_function
def holds_queries(traits):
    """Whether each warp keeps Q^T in registers, at most 64 per thread. Larger tiles are read again in each step. With
    batch_invariant every tile is, so that products of all tile sizes add in the same parts.
    """
    return not traits.in_order and traits.block_m <= 32 and traits.block_m * traits.block_d <= 4096


@gluon.jit
def queries_operand(q_smem, traits: gl.constexpr):
    """Q^T as operand B where registers hold it during the mainloop, else Q^T in shared memory."""
    q = q_smem.permute((1, 0))
    if holds_queries(traits):
        return columns_operand(q, traits)
    else:
        return q


@gluon.jit
def qk_product(q, k_tile, traits: gl.constexpr):
    """S^T = K Q^T: [block_n, d] x [d, queries]. q: what `queries_operand` returned."""
    s = gl.full([traits.block_n, traits.block_m], 0.0, gl.float32, mma_layout(traits.warps))
    if holds_queries(traits):
        s = mma_v2(rows_operand(k_tile, traits), q, s)
    else:
        PARTS: gl.constexpr = traits.block_d // K_STEP
        for i in gl.static_range(PARTS):
            k = rows_operand(k_tile.slice(i * K_STEP, K_STEP, 1), traits)
            s = mma_v2(k, columns_operand(q.slice(i * K_STEP, K_STEP), traits), s)
    return gl.convert_layout(s, product_layout(traits.block_m, traits.warps), assert_trivial=True)


@gluon.jit
def pv_product(v_tile, p_smem, o, traits: gl.constexpr):
    """O^T + V^T P^T: [dv, block_n] x [block_n, queries]."""
    PARTS: gl.constexpr = traits.block_n // K_STEP
    o = gl.convert_layout(o, mma_layout(traits.warps), assert_trivial=True)
    for i in gl.static_range(PARTS):
        v = rows_operand(v_tile.permute((1, 0)).slice(i * K_STEP, K_STEP, 1), traits)
        o = mma_v2(v, columns_operand(p_smem.slice(i * K_STEP, K_STEP), traits), o)
    return gl.convert_layout(o, product_layout(traits.block_m, traits.warps), assert_trivial=True)


@gluon.constexpr_function
def weights_layout(queries):
    """P^T [keys, queries] of 16 bits in shared memory: the eight rows that ldmatrix reads lie in different banks."""
    return gl.SwizzledSharedLayout(8, max(1, 64 // queries), max(1, queries // 8), [1, 0])


@gluon.jit
def allocate_smem(dtype: gl.constexpr, traits: gl.constexpr):
    """DecodeSmem for K and V of `dtype`. P lies transposed, so that a product reads a part of the keys."""
    operand: gl.constexpr = gl.float16 if traits.fp8 else dtype
    q = allocate_operand(traits.block_m, traits.block_d, operand)
    p = gl.allocate_shared_memory(operand, [traits.block_n, traits.block_m], weights_layout(traits.block_m))
    k = allocate_stages(traits.stages, traits.block_d, dtype, traits)
    return DecodeSmem(q, p, k, allocate_stages(traits.stages, traits.block_dv, dtype, traits))


# ---------------------------------------------------------------- mainloop


@gluon.jit
def wait_for_copies(pending: gl.constexpr):
    """Wait until all threads' copies, except their last `pending` groups, and all their stores have landed."""
    cp_async_wait(pending)
    partition_barrier()


@gluon.jit
def counted_anew(num_keys, traits: gl.constexpr):
    """The same number. With 64 rows LLVM does not know this, so KeyRanges of all rows take no registers between steps:
    they spilled 24 bytes (window, softcap).
    """
    if traits.block_m == 64:
        num_keys += zero_of_turn()
    return num_keys


@gluon.jit
def attend(smem, cache, pages, keys, queries, softmax, mods, errors, traits: gl.constexpr):
    """(O^T, not yet normalized, SoftmaxState) of the split `keys`, after `start_copies`.

    pages: PrefetchedPages that start_copies returned; queries: MaskedQueries; softmax: SoftmaxScalars; mods:
    ScoreMods, or None.
    """
    begin = keys.start // traits.block_n * traits.block_n
    rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, product_layout(traits.block_m, traits.warps)))
    q = queries_operand(smem.q, traits)
    state = DecodeState(pages, no_keys(traits), zero_o(traits), begin * 0)
    for n_start in range(begin, keys.stop, traits.step):
        state = mainloop_step(n_start, rows, state, smem, q, cache, keys, queries, softmax, mods, errors, traits)
    cp_async_wait(0)  # the groups still in flight are empty; a kernel leaves none behind
    return state.o, SoftmaxState(state.softmax.row_max, gl.sum(state.softmax.row_sum, 0))


@gluon.jit
def mainloop_step(n_start, rows, state, smem, q, cache, keys, queries, softmax, mods, errors, traits: gl.constexpr):
    """The tile of keys n_start + rows."""
    AHEAD: gl.constexpr = traits.stages - 1
    stage, table = state.stage, cache.table
    # the copies of a later tile, then S^T = K Q^T
    wait_for_copies(2 * AHEAD - 1)
    later = n_start + AHEAD * traits.step
    copy_tile(smem, gl.where(stage == 0, AHEAD, stage - 1), cache, state.pages.to_copy, keys, later, traits)
    to_copy_next = page_ids_of_copies(table, later + 2 * traits.step, traits)
    s = qk_product(q, smem.k.index(stage), traits)
    # P^T = softmax(S^T)
    if traits.fp8:
        s = s * softmax.q_scale[None, :]
    s = apply_softcap(s, softmax.softcap, traits)
    shown = 0
    if traits.mask_mod is not None:
        shown = mods.shown(n_start, rows, traits)
    s = modify_scores(s, n_start, rows, shown, mods, traits)
    is_key, of_scores = in_split(n_start, rows, keys), state.pages.of_scores
    if traits.page_size > 0:
        exists = in_pool(of_scores, table)
        gl.atomic_or(errors + rows * 0, rows * 0 + PAGES, mask=is_key & (exists == 0), sem="relaxed")
        is_key = is_key & exists
        of_scores = page_ids(table, n_start + traits.step, rows, traits)
    visible = visible_to_queries(queries.tile, counted_anew(queries.num_keys, traits), queries.window, traits)
    s = apply_mask(s, is_key, n_start, rows, visible, traits)
    p, rescale, softmax_state = online_softmax(s, state.softmax, softmax.scale_log2, traits)
    # O^T = rescale O^T + V^T P^T
    o = state.o * rescale[None, :]
    smem.p.store(p.to(smem.p.dtype))
    wait_for_copies(2 * AHEAD)
    o = pv_product(smem.v.index(stage), smem.p, o, traits)
    pages = PrefetchedPages(state.pages.to_copy_next, to_copy_next, of_scores)
    return DecodeState(pages, softmax_state, o, gl.where(stage == AHEAD, 0, stage + 1))


# ---------------------------------------------------------------- kernel


@gluon.jit
def decode_kernel(tensors, scales, partials, errors, strides, shape, window, softmax_params, traits: gl.constexpr):
    """tensors: DecodeTensors; scales: KeyScales; partials: Partials; strides: Strides; shape: DecodeShape; window:
    DecodeWindow; softmax_params: DecodeSoftmax (`hopper.decode_arguments`).
    """
    call = DecodeArguments(tensors, scales, partials, errors, strides, shape, window, softmax_params)
    decode_split(call, allocate_smem, attend, traits)
