"""Decoding on Hopper: each program attends to one split of one sequence's keys, for all query heads of a key head.

Schedule of the program's four warps, with three stages. S_i = K_i Q^T, O += V_i^T P_i
    copies (cp.async)   K_0 V_0 K_1 V_1 | K_2 V_2             | K_3 V_3             | ...
    tensor cores                        | S_0            O    | S_1            O    | ...
    the rest                            |      softmax        |      softmax        | ...

Synchronization                          it orders
    wait_for_copies(2 AHEAD - 1)         before S_i: K_i, Q; all warps have read stage i - 1, which the next copy fills
    wait_for_copies(2 AHEAD)             before O: V_i and P_i
    partition_barrier, then counter      the program's partial result, before it counts as done
    counter (acquire and release)        the partial results of other splits, before the last program combines them
    cluster_wait, inbox                  in a cluster: all programs have started; all parts have arrived
AHEAD is `stages` - 1, the number of tiles in flight. A tile is two groups of copies, one of K and one of V.

Keys are the rows of both products: S^T = K Q^T [keys, queries] and O^T += V^T P^T [D_v, queries]. wgmma takes 64 rows
and as few as 8 columns, so few queries waste nothing. For tiles of 64 queries `decode_tall` has another mainloop. Two
programs share an SM; one computes while the other's copies are in flight.

The last program to finish a tile, known by a counter, combines the partial results of all splits by their log-sum-exp,
in the order of the splits. The number of splits is counted from the sequence's length, so a short sequence in a large
cache combines few. A single split writes its rows directly.

A short decode takes as long as its chain of loads: length and page ids are loaded together, then K, V and Q, then
partial results. Where one program per SM takes a few tiles of keys, the splits form a cluster, and exchange their
partial results through shared memory (`cluster_reduce`).

Functions of the call (`decode_hooks`) are constants of the kernel. mask_mod runs beside the product that it
masks, score_mod between the softcap and the mask.

Sources: split keys, "Flash-Decoding" (pytorch.org, October 2023); packed heads, FlashAttention-3 (arXiv 2407.08608);
pages, vLLM (arXiv 2309.06180).
"""

from ..device.cluster import inbox, open_inbox
from ..device.dialect import (
    await_launch_before,
    cp_async_wait,
    gl,
    gluon,
    next_launch_may_start,
    partition_barrier,
    record,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..device.seqlen import offset_at
from ..device.softmax import LOG2_E, SoftmaxState, apply_softcap
from ..device.split_kv import KeyRange, combined_factor, keys_of_tile, sequence_keys, visible_keys
from ..runtime.error_flags import PAGES as _PAGES
from .cluster_reduce import cluster_reduce
from .decode_arguments import (
    DecodeArguments,
    DecodeOutputs,
    DecodeSmem,
    KeyCache,
    MaskedQueries,
    PackedRows,
    PageTable,
    PrefetchedPages,
    SoftmaxScalars,
    SplitTile,
    TileRows,
)
from .decode_hooks import ScoreMods, modify_scores
from .decode_layouts import allocate_operand, allocate_stages, product_layout, query_layout
from .decode_loads import (
    copy_tile,
    in_pool,
    in_split,
    load_queries,
    page_ids,
    page_ids_of_copies,
    prefetch_pages,
    start_copies,
    store_queries,
    wait_for_copies,
)
from .decode_store import as_rows, rows_of_tile, store_partial, write_combined, write_rows

PAGES: gl.constexpr = gl.constexpr(_PAGES)


@record
class DecodeState:
    """What a step of the mainloop hands the next."""

    pages: gl.tuple  # PrefetchedPages
    # SoftmaxState; row_sum is [keys, queries], since each thread sums its own keys, and [queries] in `decode_tall`
    softmax: gl.tuple
    o: gl.tensor  # O^T [D_v, queries] float32; O in `decode_tall`
    stage: gl.tensor


# ---------------------------------------------------------------- products and softmax


@gluon.jit
def qk_product(q_smem, k_tile, traits: gl.constexpr):
    """S^T = K Q^T, in flight: [block_n, d] x [d, queries]."""
    layout: gl.constexpr = product_layout(traits.block_m, traits.warps)
    zero = gl.full([traits.block_n, traits.block_m], 0.0, gl.float32, layout)
    k = k_tile
    if traits.fp8:
        k = k_tile.load(gl.DotOperandLayout(0, layout, 2)).to(gl.float16)
    return warpgroup_mma(k, q_smem.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def pv_product(v_tile, p_smem, o, traits: gl.constexpr):
    """O^T += V^T P^T, in flight: [dv, block_n] x [block_n, queries]."""
    v = v_tile.permute((1, 0))
    if traits.fp8:
        v = v.load(gl.DotOperandLayout(0, o.type.layout, 2)).to(gl.float16)
    return warpgroup_mma(v, p_smem.permute((1, 0)), o, is_async=True)


@gluon.jit
def apply_mask(s, is_key, n_start, rows, visible, traits: gl.constexpr):
    """Scores of keys n_start + rows, -inf where a query does not see the key or `is_key` is False."""
    if traits.masks_queries:
        n = n_start + rows
        is_seen = is_key[:, None] & (n[:, None] >= visible.start[None, :]) & (n[:, None] < visible.stop[None, :])
        return gl.where(is_seen, s, float("-inf"))
    else:
        return gl.where(is_key[:, None], s, float("-inf"))


@gluon.jit
def no_keys(traits: gl.constexpr):
    """SoftmaxState of queries that have seen no key."""
    layout: gl.constexpr = product_layout(traits.block_m, traits.warps)
    row_max = gl.full([traits.block_m], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    return SoftmaxState(row_max, gl.full([traits.block_n, traits.block_m], 0.0, gl.float32, layout))


@gluon.jit
def zero_o(traits: gl.constexpr):
    layout: gl.constexpr = product_layout(traits.block_m, traits.warps)
    return gl.full([traits.block_dv, traits.block_m], 0.0, gl.float32, layout)


@gluon.jit
def online_softmax(s, state, scale_log2, traits: gl.constexpr):
    """(P^T, rescale, SoftmaxState) after the raw scores of a tile. row_max is what P was taken against."""
    new_max = gl.maximum(state.row_max, gl.max(s, 0) * scale_log2 - traits.log2_offset)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[None, :])
    rescale = gl.exp2(state.row_max - base)
    return p, rescale, SoftmaxState(new_max, state.row_sum * rescale[None, :] + p)


# ---------------------------------------------------------------- mainloop


@gluon.jit
def attend(smem, cache, pages, keys, queries, softmax, mods, errors, traits: gl.constexpr):
    """(O^T, not yet normalized, SoftmaxState) of the split `keys`, after `start_copies`.

    pages: PrefetchedPages that start_copies returned; queries: MaskedQueries; softmax: SoftmaxScalars; mods:
    ScoreMods, or None.
    """
    visible = visible_to_queries(queries.tile, queries.num_keys, queries.window, traits)
    begin = keys.start // traits.block_n * traits.block_n
    rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, product_layout(traits.block_m, traits.warps)))
    state = DecodeState(pages, no_keys(traits), zero_o(traits), begin * 0)
    for n_start in range(begin, keys.stop, traits.step):
        state = mainloop_step(n_start, rows, state, smem, cache, keys, visible, softmax, mods, errors, traits)
    cp_async_wait(0)  # the groups still in flight are empty; a kernel leaves none behind
    return state.o, SoftmaxState(state.softmax.row_max, gl.sum(state.softmax.row_sum, 0))


@gluon.jit
def mainloop_step(n_start, rows, state, smem, cache, keys, visible, softmax, mods, errors, traits: gl.constexpr):
    """The tile of keys n_start + rows."""
    AHEAD: gl.constexpr = traits.stages - 1
    stage, table = state.stage, cache.table
    # S^T = K Q^T, and the copies of a later tile
    wait_for_copies(2 * AHEAD - 1)
    s = qk_product(smem.q, smem.k.index(stage), traits)
    later = n_start + AHEAD * traits.step
    copy_tile(smem, gl.where(stage == 0, AHEAD, stage - 1), cache, state.pages.to_copy, keys, later, traits)
    to_copy_next = page_ids_of_copies(table, later + 2 * traits.step, traits)
    shown = 0
    if traits.mask_mod is not None:
        shown = mods.shown(n_start, rows, traits)
    s = warpgroup_mma_wait(0, deps=[s])
    # P^T = softmax(S^T)
    if traits.fp8:
        s = s * softmax.q_scale[None, :]
    s = apply_softcap(s, softmax.softcap, traits)
    s = modify_scores(s, n_start, rows, shown, mods, traits)
    is_key, of_scores = in_split(n_start, rows, keys), state.pages.of_scores
    if traits.page_size > 0:
        exists = in_pool(of_scores, table)
        gl.atomic_or(errors + rows * 0, rows * 0 + PAGES, mask=is_key & (exists == 0), sem="relaxed")
        is_key = is_key & exists
        of_scores = page_ids(table, n_start + traits.step, rows, traits)
    s = apply_mask(s, is_key, n_start, rows, visible, traits)
    p, rescale, softmax_state = online_softmax(s, state.softmax, softmax.scale_log2, traits)
    # O^T = rescale O^T + V^T P^T
    o = state.o * rescale[None, :]
    smem.p.store(gl.permute(p.to(smem.p.dtype), (1, 0)))
    wait_for_copies(2 * AHEAD)
    o = pv_product(smem.v.index(stage), smem.p, o, traits)
    o = warpgroup_mma_wait(0, deps=[o])
    pages = PrefetchedPages(state.pages.to_copy_next, to_copy_next, of_scores)
    return DecodeState(pages, softmax_state, o, gl.where(stage == AHEAD, 0, stage + 1))


@gluon.jit
def normalize_split(o, state, v_scale):
    """(O^T / row_sum, log-sum-exp in log2 units) of a split: 0 and -inf for queries that see none of its keys."""
    factor, lse_log2 = combined_factor(state.row_max, state.row_sum)
    factor = factor * v_scale
    return gl.where((state.row_sum == 0)[None, :], 0.0, o * factor[None, :]), lse_log2


@gluon.jit
def visible_to_queries(tile, num_keys, window, traits: gl.constexpr):
    """The KeyRange that each query of TileRows sees, as queries lie along the scores."""
    token = (tile.block * traits.block_m + gl.arange(0, traits.block_m, query_layout(traits))) // traits.group
    return visible_keys(token, num_keys, tile.tokens, window, traits)


# ---------------------------------------------------------------- kernel


@gluon.jit
def tile_of_program(shape, traits: gl.constexpr):
    """The program's SplitTile. Programs of a cluster are the splits of a tile. Otherwise the key heads of a sequence
    follow each other: in a cache with rows first they share cache lines.
    """
    pid = gl.program_id(0)
    if traits.cluster:
        split, tile = pid % shape.num_splits, pid // shape.num_splits
        head, tile = tile % shape.heads_kv, tile // shape.heads_kv
        block, batch = tile % shape.num_m_blocks, tile // shape.num_m_blocks
    else:
        head, tile = pid % shape.heads_kv, pid // shape.heads_kv
        block, tile = tile % shape.num_m_blocks, tile // shape.num_m_blocks
        split, batch = tile % shape.num_splits, tile // shape.num_splits
    return SplitTile(batch, head, block, split)


@gluon.jit
def decode_kernel(tensors, scales, partials, errors, strides, shape, window, softmax_params, traits: gl.constexpr):
    """tensors: DecodeTensors; scales: KeyScales; partials: Partials; strides: Strides; shape: DecodeShape; window:
    DecodeWindow; softmax_params: DecodeSoftmax (`decode_arguments`).
    """
    call = DecodeArguments(tensors, scales, partials, errors, strides, shape, window, softmax_params)
    decode_split(call, allocate_smem, attend, traits)


@gluon.jit
def decode_split(call, allocate_smem: gl.constexpr, attend: gl.constexpr, traits: gl.constexpr):
    """The program of one split of a tile of rows. call: DecodeArguments; allocate_smem and attend: functions with the
    arguments of those in this file, which contain the two products.
    """
    tensors, shape, window, errors = call.tensors, call.shape, call.window, call.errors
    # prologue: the split, and page ids in flight before its length is known
    tile = tile_of_program(shape, traits)
    box = 0
    if traits.cluster:
        box = inbox(traits.inbox_bytes)
        open_inbox(box, traits.inbox_bytes)
    if traits.programmatic_launch:
        next_launch_may_start()
        await_launch_before()
    table = page_table_of(tensors, tile, shape, traits)
    start = tile.split * shape.split_size
    if traits.cluster:  # tiles in turn, so that all programs take part however short the sequence
        start = tile.split * traits.block_n
    if not traits.left:
        pages = prefetch_pages(table, start, traits)
    first_key, num_keys = sequence_keys(tensors.seqlens, tensors.k_start, tile.batch, shape.capacity, errors, traits)
    packed = PackedRows(0, 0, num_keys)
    if traits.ragged:
        packed = packed_rows(tensors.cu_seqlens_q, tile, num_keys, shape, traits)
    num_keys = packed.num_keys
    seen = keys_of_tile(tile.block, num_keys, shape.seqlen_q, window, traits)
    if traits.ragged and traits.left:  # keys before the first token's window may have been freed
        first_seen = num_keys - shape.seqlen_q + packed.first_token - window.left
        seen = KeyRange(gl.maximum(seen.start, first_seen), seen.stop)
    if traits.left:
        if traits.cluster:
            start += seen.start // traits.block_n * traits.block_n
        start = gl.maximum(start, seen.start)
        pages = prefetch_pages(table, start, traits)
    splits = splits_of_tile(seen, shape, traits)
    stop = seen.stop
    if not traits.cluster:
        stop = gl.minimum(tile.split * shape.split_size + shape.split_size, stop)
    if (tile.split >= splits.start) & (tile.split < splits.stop):
        cache = KeyCache(tensors.k, tensors.v, call.strides, table, tile.batch, tile.head, first_key)
        rows = TileRows(tile.batch, tile.head, tile.block, shape.seqlen_q, shape.heads_kv, shape.seqlen_q, 0)
        q_rows = tensors.q
        outputs = DecodeOutputs(tensors.out, tensors.lse, tensors.sinks)
        if traits.ragged:
            rows = TileRows(
                tile.batch * 0,
                tile.head,
                tile.block,
                shape.seqlen_q,
                shape.heads_kv,
                shape.total_q,
                packed.first_token,
            )
            offset = packed.offset.to(gl.int64)
            q_rows = tensors.q + offset * call.strides.q.row
            outputs = DecodeOutputs(tensors.out + offset * call.strides.out.row, tensors.lse + offset, tensors.sinks)
        # mainloop
        smem = allocate_smem(tensors.k.dtype.element_ty, traits)
        keys = KeyRange(start, stop)
        later_pages = start_copies(smem, cache, pages, keys, traits)
        q = load_queries(q_rows, call.strides.q, rows, traits)  # after the copies, none of which waits for them
        k_scale, v_scale = load_scales(call.scales, tile.head, traits)
        softmax = store_queries(smem.q, q, k_scale, call.softmax, traits)
        queries = MaskedQueries(rows, num_keys, window)
        mods = None
        if traits.has_mods:
            mods = ScoreMods.of_tile(rows, tile.batch, num_keys, softmax.scale_log2, tensors.hooks, traits)
        if traits.score_mod is not None:
            softmax = SoftmaxScalars(LOG2_E, softmax.softcap, softmax.q_scale)
        o, state = attend(smem, cache, later_pages, keys, queries, softmax, mods, errors, traits)
        # epilogue
        o, lse_log2 = normalize_split(o, state, v_scale)
        if traits.cluster:
            cluster_reduce(outputs, o, lse_log2, box, rows, tile.split, call.strides.out, traits)
        else:
            write_split(outputs, call.partials, o, lse_log2, rows, tile, splits, shape, call.strides.out, traits)


@gluon.jit
def packed_rows(cu_seqlens, tile, num_keys, shape, traits: gl.constexpr):
    """PackedRows of a tile's sequence, whose tokens are the last of the shape.seqlen_q that a launch is for. It has no
    row if it has more tokens than these.
    """
    start = offset_at(cu_seqlens, tile.batch + 1, shape.batch, shape.total_q)
    stop = offset_at(cu_seqlens, tile.batch + 2, shape.batch, shape.total_q)
    has_rows = (start < stop) & (stop - start <= shape.seqlen_q)
    # without rows, after all rows of a tile, some of which may have no token
    first_token = gl.where(has_rows, shape.seqlen_q - (stop - start), shape.seqlen_q + traits.block_m)
    last_token = (tile.block * traits.block_m + traits.block_m - 1) // traits.group
    return PackedRows(stop - shape.seqlen_q, first_token, gl.where(last_token < first_token, 0, num_keys))


@gluon.jit
def page_table_of(tensors, tile, shape, traits: gl.constexpr):
    """The PageTable of the tile's sequence."""
    ids = tensors.seqlens  # any pointer: rows have no page ids
    if traits.page_size > 0:
        ids = tensors.page_table + tile.batch.to(gl.int64) * shape.max_pages
    return PageTable(ids, shape.capacity, shape.num_pages)


@gluon.jit
def splits_of_tile(seen, shape, traits: gl.constexpr):
    """The splits start .. stop - 1 that have work: those with keys that the tile sees, and at least one, because a tile
    that sees no key still has rows to write. In a cluster all splits, each of which writes some columns.
    """
    first = seen.start // shape.split_size
    stop = gl.maximum(gl.cdiv(seen.stop, shape.split_size), first + 1)
    if traits.cluster:
        first, stop = shape.num_splits * 0, shape.num_splits
    return KeyRange(first, stop)


@gluon.jit
def allocate_smem(dtype: gl.constexpr, traits: gl.constexpr):
    """DecodeSmem for K and V of `dtype`."""
    operand: gl.constexpr = gl.float16 if traits.fp8 else dtype
    q = allocate_operand(traits.block_m, traits.block_d, operand)
    p = allocate_operand(traits.block_m, traits.block_n, operand)
    k = allocate_stages(traits.stages, traits.block_d, dtype, traits)
    return DecodeSmem(q, p, k, allocate_stages(traits.stages, traits.block_dv, dtype, traits))


@gluon.jit
def load_scales(scales, head, traits: gl.constexpr):
    """(k_scale, v_scale) of a key head; 1 without."""
    k_scale, v_scale = 1.0, 1.0
    if traits.k_scale:
        k_scale = gl.load(scales.k + head)
    if traits.v_scale:
        v_scale = gl.load(scales.v + head)
    return k_scale, v_scale


@gluon.jit
def write_split(outputs, partials, o, lse_log2, rows, tile, splits, shape, strides, traits: gl.constexpr):
    """Write the TileRows of a tile with one split, or the partial result of this SplitTile; the last program of a tile
    combines.
    """
    o, lse_log2 = as_rows(o, lse_log2, traits)
    row = rows_of_tile(rows, traits.block_m, o, traits)
    if traits.single:
        write_rows(outputs, o, lse_log2, rows, row, strides, traits)
    else:
        if splits.stop - splits.start == 1:
            write_rows(outputs, o, lse_log2, rows, row, strides, traits)
        else:
            tile_index = (tile.batch * shape.num_m_blocks + tile.block) * shape.heads_kv + tile.head
            first_index = tile_index * shape.num_splits
            store_partial(partials, o, lse_log2, first_index + tile.split, traits)
            partition_barrier()  # all threads store before one counts
            counter = partials.counters + tile_index
            if gl.atomic_add(counter, 1, sem="acq_rel") == splits.stop - splits.start - 1:
                indices = KeyRange(first_index + splits.start, first_index + splits.stop)
                write_combined(outputs, partials, rows, indices, strides, traits)
                gl.store(counter, 0)
