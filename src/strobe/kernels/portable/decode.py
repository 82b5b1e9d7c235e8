"""Decoding in Triton: each program attends to one split of one sequence's keys, for all query heads of a key head.

    rows      of a tile: query heads of the group, a token after the other, at least 16 (what a product takes)
    splits    of the keys: of one size, planned from shapes alone; programs beyond a short sequence's end do nothing
    keys      are counted from the sequence's first; `locate_keys` finds them in pages or rows
    combine   the last program to finish a tile, known by a counter, weights the partial results of all splits by
              their log-sum-exp, in the order of the splits. So the bits do not depend on which program is last. A
              kernel of its own would be a second launch.

Sources: split keys, "Flash-Decoding" (pytorch.org, October 2023); packed heads, FlashAttention-3 (arXiv 2407.08608);
pages, vLLM (arXiv 2309.06180).
"""

import triton
import triton.language as tl

from ..device.softmax import LN_2, LOG2_E, SoftmaxState, apply_softcap, online_step
from ..device.split_kv import (
    KeyRange,
    add_sink,
    combine_step,
    combined_factor,
    fold_scale_signs,
    keys_of_tile,
    sequence_keys,
    visible_keys,
)
from ..runtime.error_flags import PAGES as _PAGES
from .arguments import HookParams, KeyCache, RowInfo, SoftmaxParams
from .forward import softmax_scalars
from .score_mods import ScoreMods, modify_scores

PAGES = tl.constexpr(_PAGES)

# ---------------------------------------------------------------- loads


@triton.jit
def locate_keys(cache, n_start, columns, key_ok, traits: tl.constexpr):
    """(page or batch entry, row in it, which exist) of keys n_start + columns. The page is a scalar if the tile lies in
    one page.
    """
    first = cache.first_key + n_start
    if traits.page_size == 0:
        page = cache.batch
        row = first + columns
    else:
        if traits.page_size % traits.block_n == 0:
            page = tl.load(cache.page_table + first // traits.page_size)
            row = first % traits.page_size + columns
        else:
            page = tl.load(cache.page_table + (first + columns) // traits.page_size, mask=key_ok, other=0)
            row = (first + columns) % traits.page_size
        inside = (page >= 0) & (page < cache.num_pages)
        page = tl.where(inside, page, 0)
        key_ok = key_ok & inside
    return page, row, key_ok


@triton.jit
def load_cached(pool, page, row, strides, head, d, key_ok, width: tl.constexpr, traits: tl.constexpr):
    """Keys or values [N, block_d] in q's dtype, 0 where key_ok is False: that memory is not read."""
    start = page.to(tl.int64) * strides.batch + row.to(tl.int64) * strides.row + head.to(tl.int64) * strides.head
    pointers = pool + start[:, None] + d[None, :]
    mask = key_ok[:, None]
    if d.shape[0] != width:
        mask = mask & (d < width)[None, :]
    if traits.storage == "bits":
        tile = tl.load(pointers, mask=mask, other=0)
        # e4m3 as float16 with an exponent that is 8 too small; float16 holds all of its numbers, subnormal ones too
        tile = tile.to(tl.uint16)
        high = ((tile & 0x80) << 8) | ((tile & 0x7F) << 7)
        tile = tl.where((tile & 0x7F) == 0x7F, float("nan"), high.to(tl.float16, bitcast=True) * 256.0)
    else:
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def load_token_scale(scale, cache, page, row, key_ok):
    """The scales of keys [N] of a ScaledCache, 0 where key_ok is False."""
    key = page.to(tl.int64) * cache.page_rows + row.to(tl.int64)
    return tl.load(scale + key * cache.heads_kv + cache.head, mask=key_ok, other=0.0)


@triton.jit
def load_lse(lse, split, row, row_ok, n_rows, n_splits):
    """lse [splits, rows], past the first-level cache, which does not see other programs' stores."""
    known = (split < n_splits)[:, None] & row_ok[None, :]
    pointers = lse + split.to(tl.int64)[:, None] * n_rows + row[None, :]
    return tl.load(pointers, mask=known, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def row_offsets(strides, batch, rows, offset):
    """Element offsets of a tile's rows in q or out, of which the sequence's first token is `offset`."""
    token = (offset + rows.token).to(tl.int64)
    return batch.to(tl.int64) * strides.batch + token * strides.row + rows.head_q.to(tl.int64) * strides.head


@triton.jit
def rows_of_tile(block, head, tokens, traits: tl.constexpr):
    row = block * traits.block_m + tl.arange(0, traits.block_m)
    token = row // traits.group
    return RowInfo(token, head * traits.group + row % traits.group, token < tokens)


# ---------------------------------------------------------------- one split


@triton.jit
def attend(q, cache, strides, keys, visible, softmax, traits: tl.constexpr, q_idx=None, mods=None):
    """Mainloop: (O [M, D_v] not yet normalized, SoftmaxState, which keys' pages are not in the pool) over the keys of a
    split. cache: KeyCache; keys: KeyRange of the split; visible: KeyRange of each row; q_idx: the rows' positions
    [M, 1], for functions of scores.
    """
    BLOCK_N: tl.constexpr = traits.block_n
    columns = tl.arange(0, BLOCK_N)
    d = tl.arange(0, traits.block_d)
    dv = tl.arange(0, traits.block_dv)
    row_max = tl.full([traits.block_m], float("-inf"), traits.accumulator)
    state = SoftmaxState(row_max, tl.full([traits.block_m], 0.0, traits.accumulator))
    o = tl.full([traits.block_m, traits.block_dv], 0.0, traits.accumulator)
    lost = tl.full([BLOCK_N], 0, tl.int1)
    for n_start in tl.range(keys.start // BLOCK_N * BLOCK_N, keys.stop, BLOCK_N, num_stages=traits.loop_stages):
        # S = Q K^T
        n = n_start + columns
        wanted = (n >= keys.start) & (n < keys.stop)
        page, row, key_ok = locate_keys(cache, n_start, columns, wanted, traits)
        k = load_cached(cache.k, page, row, strides.k, cache.head, d, key_ok, traits.head_dim, traits).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=traits.accumulator)
        if traits.k_token_scale:
            s = s * load_token_scale(cache.k_scale, cache, page, row, key_ok)[None, :].to(traits.accumulator)
        s = apply_softcap(s, softmax.softcap, traits)
        if traits.has_mods:
            s = modify_scores(s, q_idx, n[None, :], mods, traits)
        # P = softmax(S)
        seen = key_ok[None, :] & (n[None, :] >= visible.start[:, None]) & (n[None, :] < visible.stop[:, None])
        scale_log2 = softmax.scale_log2
        if traits.score_mod is not None:  # natural units from here on
            scale_log2 = LOG2_E
        p, rescale, state = online_step(tl.where(seen, s, float("-inf")), state, scale_log2)
        # O = rescale O + P V
        v = load_cached(cache.v, page, row, strides.v, cache.head, dv, key_ok, traits.head_dim_v, traits)
        if traits.v_token_scale:  # not on p, which could become subnormal in float16
            v = v.to(traits.accumulator) * load_token_scale(cache.v_scale, cache, page, row, key_ok)[:, None]
        v = v.to(q.dtype)
        o = tl.dot(p.to(v.dtype), v, o * rescale[:, None], input_precision="ieee", out_dtype=traits.accumulator)
        lost = lost | (wanted & (key_ok == 0))
    return o, state, lost


@triton.jit
def normalize_split(o, state):
    """(O / row_sum, log-sum-exp in log2 units) of a split: 0 and -inf for rows that see none of its keys."""
    is_empty = state.row_sum == 0
    row_sum = tl.where(is_empty, 1.0, state.row_sum)
    lse_log2 = tl.where(is_empty, float("-inf"), state.row_max + tl.log2(row_sum))
    return tl.where(is_empty[:, None], 0.0, o / row_sum[:, None]), lse_log2


# ---------------------------------------------------------------- all splits of a tile


@triton.jit
def combine_splits(workspace, row, row_ok, n_rows, n_splits, traits: tl.constexpr):
    """(O [M, D_v], LSE in log2 units) of rows from the partial results of all splits, several splits at a time."""
    SPLITS: tl.constexpr = traits.splits_per_load
    lanes = tl.arange(0, SPLITS)
    dv = tl.arange(0, traits.block_dv)
    base = tl.full([traits.block_m], float("-inf"), traits.accumulator)
    for split in range(0, n_splits, SPLITS):
        lse = load_lse(workspace.lse, split + lanes, row, row_ok, n_rows, n_splits)
        base = tl.maximum(base, tl.max(lse, 0))
    base = tl.where(base == float("-inf"), 0.0, base)
    o = tl.full([traits.block_m, traits.block_dv], 0.0, traits.accumulator)
    total = tl.full([traits.block_m], 0.0, traits.accumulator)
    for split in range(0, n_splits, SPLITS):
        lse = load_lse(workspace.lse, split + lanes, row, row_ok, n_rows, n_splits)
        weight = tl.exp2(lse - base[None, :])
        offsets = ((split + lanes).to(tl.int64)[:, None] * n_rows + row[None, :]) * traits.head_dim_v
        # an empty split does not write its part
        known = (lse != float("-inf"))[:, :, None] & (dv < traits.head_dim_v)[None, None, :]
        pointers = workspace.o + offsets[:, :, None] + dv[None, None, :]
        part = tl.load(pointers, mask=known, other=0.0, cache_modifier=".cg")
        o += tl.sum(weight[:, :, None] * part, 0)
        total += tl.sum(weight, 0)
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    lse_log2 = tl.where(is_empty, float("-inf"), base + tl.log2(total))
    return tl.where(is_empty[:, None], 0.0, o / total[:, None]), lse_log2


@triton.jit
def combine_in_order(workspace, row, row_ok, n_rows, n_splits, traits: tl.constexpr):
    """`combine_splits`, one split after the other. A row then has the bits of `batch_invariant.invariant_kernel`, which
    processes splits one by one.
    """
    dv = tl.arange(0, traits.block_dv)
    base = tl.full([traits.block_m], float("-inf"), traits.accumulator)
    total = tl.full([traits.block_m], 0.0, traits.accumulator)
    o = tl.full([traits.block_m, traits.block_dv], 0.0, traits.accumulator)
    for split in range(0, n_splits):
        offsets = n_rows * split + row  # n_rows is an int64
        lse = tl.load(workspace.lse + offsets, mask=row_ok, other=float("-inf"), cache_modifier=".cg")
        known = (lse != float("-inf"))[:, None] & (dv < traits.head_dim_v)[None, :]
        pointers = workspace.o + (offsets * traits.head_dim_v)[:, None] + dv[None, :]
        part = tl.load(pointers, mask=known, other=0.0, cache_modifier=".cg")
        base, total, kept, weight = combine_step(base, total, lse)
        o = tl.fma(o, kept[:, None], part * weight[:, None])
    factor, lse_log2 = combined_factor(base, total)
    return o * factor[:, None], lse_log2


# ---------------------------------------------------------------- stores


@triton.jit
def store_at(base, tile, offsets, columns, row_ok, width: tl.constexpr):
    """A tile [M, columns] to rows at element offsets."""
    mask = row_ok[:, None]
    if columns.shape[0] != width:
        mask = mask & (columns < width)[None, :]
    tl.store(base + offsets[:, None] + columns[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def write_rows(tensors, out_offsets, lse_offsets, o, lse_log2, rows, traits: tl.constexpr):
    """Rows that have seen all their keys, and their sink, to out and lse."""
    sink = lse_log2
    if traits.sinks:
        sink = tl.load(tensors.sinks + rows.head_q, mask=rows.exists, other=0.0)
    o, row_lse = add_sink(o, lse_log2, sink, traits)
    store_at(tensors.out, o, out_offsets, tl.arange(0, traits.block_dv), rows.exists, traits.head_dim_v)
    tl.store(tensors.lse + lse_offsets, row_lse, mask=rows.exists)


# ---------------------------------------------------------------- kernel


@triton.jit
def decode_kernel(tensors, scales, workspace, errors, strides, shape, window, softmax_params, traits: tl.constexpr):
    """tensors: DecodeTensors; scales: PerKeyHead; workspace: SplitWorkspace; strides: ForwardStrides, with a page for a
    batch entry where there are pages; shape: DecodeShape; window: WindowParams; softmax_params: SoftmaxParams.
    """
    # prologue
    pid = tl.program_id(0)  # heads of one sequence follow each other: in a cache with rows first they share cache lines
    head = pid % shape.heads_kv
    block = pid // shape.heads_kv % shape.num_m_blocks
    split = pid // shape.heads_kv // shape.num_m_blocks % shape.num_splits
    batch = pid // shape.heads_kv // shape.num_m_blocks // shape.num_splits
    first_key, num_keys = sequence_keys(tensors.seqlens, tensors.k_start, batch, shape.capacity, errors, traits)
    rows = rows_of_tile(block, head, shape.seqlen_q, traits)
    visible = visible_keys(rows.token, num_keys, shape.seqlen_q, window, traits)
    of_tile = keys_of_tile(block, num_keys, shape.seqlen_q, window, traits)
    start = split * shape.split_size
    keys = KeyRange(tl.maximum(start, of_tile.start), tl.minimum(start + shape.split_size, of_tile.stop))
    has_keys = keys.start < keys.stop
    d = tl.arange(0, traits.block_d)
    pointers = tensors.q + row_offsets(strides.q, batch, rows, 0)[:, None] + d[None, :]
    q = tl.load(pointers, mask=(rows.exists & has_keys)[:, None] & (d < traits.head_dim)[None, :], other=0.0)
    k_scale = tl.load(scales.k + head) if traits.k_scale else 1.0
    softmax = softmax_scalars(softmax_params, traits)
    q, scale_log2, softcap = fold_scale_signs(q, (softmax.scale_log2, softmax.softcap), k_scale, traits)
    softmax = SoftmaxParams(scale_log2, softcap, 0.0)
    page_table = tensors.page_table
    if traits.page_size > 0:
        page_table += batch.to(tl.int64) * shape.max_pages
    cache = KeyCache(tensors.k, tensors.v, page_table, shape.num_pages, batch, head, first_key)
    q_idx, mods = None, None
    if traits.has_mods:
        # a sequence of fewer keys than tokens has rows before its first key
        q_idx = tl.maximum(num_keys - shape.seqlen_q + rows.token, 0)[:, None]
        hooks = HookParams(scale_log2 * LN_2, tensors.hooks.score_aux, tensors.hooks.mask_aux, None)
        mods = ScoreMods(batch, rows.head_q[:, None], hooks, None)
    # mainloop
    o, state, lost = attend(q, cache, strides, keys, visible, softmax, traits, q_idx, mods)
    # epilogue
    if traits.page_size > 0:
        tl.atomic_or(errors, PAGES, mask=tl.max(lost.to(tl.int32), 0) > 0, sem="relaxed")
    o, lse_log2 = normalize_split(o, state)
    if traits.v_scale:
        o = tl.where((state.row_sum == 0)[:, None], 0.0, o * tl.load(scales.v + head))
    heads_q = shape.heads_kv * traits.group
    head_q, batch_64 = rows.head_q.to(tl.int64), batch.to(tl.int64)
    out_offsets = row_offsets(strides.out, batch, rows, 0)
    lse_offsets = (batch_64 * heads_q + head_q) * shape.seqlen_q + rows.token
    if traits.single:
        write_rows(tensors, out_offsets, lse_offsets, o, lse_log2, rows, traits)
    else:
        num_batches = tl.num_programs(0) // shape.num_splits // (shape.heads_kv * shape.num_m_blocks)
        n_rows = num_batches.to(tl.int64) * shape.seqlen_q * heads_q
        row = (batch_64 * shape.seqlen_q + rows.token) * heads_q + rows.head_q
        offsets = (split * n_rows + row) * traits.head_dim_v
        dv = tl.arange(0, traits.block_dv)
        store_at(workspace.o, o, offsets, dv, rows.exists & has_keys, traits.head_dim_v)
        tl.store(workspace.lse + split * n_rows + row, lse_log2, mask=rows.exists)
        # all threads store before one counts; the simulator cannot check this: it runs a program as one thread
        tl.debug_barrier()
        counter = workspace.counters + (batch * shape.num_m_blocks + block) * shape.heads_kv + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == shape.num_splits - 1:
            if traits.in_order:
                o, lse_log2 = combine_in_order(workspace, row, rows.exists, n_rows, shape.num_splits, traits)
            else:
                o, lse_log2 = combine_splits(workspace, row, rows.exists, n_rows, shape.num_splits, traits)
            write_rows(tensors, out_offsets, lse_offsets, o, lse_log2, rows, traits)
            tl.store(counter, 0)
