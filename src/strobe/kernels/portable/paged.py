"""Packed queries over a cache in Triton: prefill chunks, decodes and speculated tokens in three launches, whose grids
follow from shapes alone.

    schedule   a program per sequence: from all lengths on the device, how many tiles its rows take, in how many splits
               of keys each is computed, and its place in the work list. Items with many keys come first.
    attend     a program per item of the work list: one split of one tile, as the decode computes it. A tile's rows are
               tokens, each with the query heads that share a key head. A tile in one split is written at once.
    combine    a program per 16 rows of a split tile: partial results, weighted by their log-sum-exp

With W key blocks in all tiles, a split has about W / slots of them, where `slots` programs run at once. So tiles are
split where there are few of them, and there are at most `slots` more items than tiles. With batch_invariant, splits
have a fixed size and begin at fixed keys. A tile is then computed by several programs, or by one of them split after
split, with the same bits.

Sources: split keys, "Flash-Decoding" (pytorch.org, October 2023); work lists from lengths, FlashInfer (arXiv
2501.01005), which makes them on the host.
"""

import triton
import triton.language as tl

from ..device.seqlen import LONG_Q, OFFSETS_Q, guard_offsets, offset_at
from ..device.softmax import LN_2
from ..device.split_kv import (
    K_START,
    SEQLENS,
    KeyRange,
    RowRange,
    combine_step,
    combined_factor,
    fold_scale_signs,
    keys_of_tile,
    visible_keys,
)
from .arguments import LEAST_SHARE as _LEAST_SHARE
from .arguments import RECORD as _RECORD
from .arguments import HookParams, KeyCache, ScaledCache, SoftmaxParams
from .decode import (
    PAGES,
    attend,
    combine_in_order,
    combine_splits,
    normalize_split,
    row_offsets,
    rows_of_tile,
    store_at,
    write_rows,
)
from .forward import softmax_scalars
from .score_mods import ScoreMods

LANES = tl.constexpr(256)
LEAST_SHARE = tl.constexpr(_LEAST_SHARE)
RECORD = tl.constexpr(_RECORD)
# fields of a sequence's record
START = tl.constexpr(0)  # first row in q
TOKENS = tl.constexpr(1)
FIRST_KEY = tl.constexpr(2)
NUM_KEYS = tl.constexpr(3)
NUM_SPLITS = tl.constexpr(4)
SPLIT_SIZE = tl.constexpr(5)  # keys
FIRST_ITEM = tl.constexpr(6)
FIRST_PARTIAL = tl.constexpr(7)
FIRST_SPLIT_TILE = tl.constexpr(8)

# ---------------------------------------------------------------- schedule


@triton.jit
def clamped_keys(tensors, sequence, shape, traits: tl.constexpr):
    """(first key, number of keys, whether a length or a start is out of range) of sequences. Those before the first and
    behind the last have none.
    """
    inside = (sequence > 0) & (sequence <= shape.batch)
    batch = tl.maximum(sequence - 1, 0)
    length = tl.load(tensors.seqlens + batch, mask=inside, other=0)
    stop = tl.minimum(tl.maximum(length, 0), shape.capacity)
    first = stop * 0
    bad_start = inside & False
    if traits.k_start:
        start = tl.load(tensors.k_start + batch, mask=inside, other=0)
        first = tl.minimum(tl.maximum(start, 0), stop)
        bad_start = inside & (first != start)
    return first, stop - first, inside & (stop != length), bad_start


@triton.jit
def tokens_of(tensors, sequence, shape):
    """(first row, number of rows) of sequences; 0 rows where offsets fall and beyond the last sequence."""
    start = offset_at(tensors.cu_seqlens_q, sequence, shape.batch, shape.total_q)
    stop = offset_at(tensors.cu_seqlens_q, sequence + 1, shape.batch, shape.total_q)
    return start, tl.maximum(stop - start, 0)


@triton.jit
def tiles_and_reach(tokens, num_keys, window, traits: tl.constexpr):
    """(tiles of a key head, keys from the first block that a tile may visit to the last), of sequences."""
    tiles = tl.cdiv(tokens * traits.group, traits.block_m)
    reach = num_keys
    if traits.left and traits.right:
        tokens_of_tile: tl.constexpr = triton.cdiv(traits.block_m, traits.group) + 1
        seen = tl.minimum(window.left, num_keys) + tl.minimum(window.right, num_keys) + 1 + tokens_of_tile
        reach = tl.minimum(num_keys, seen) + traits.split_align  # the first block may begin before the window
        reach = tl.where(num_keys > 0, reach, 0)
    return tiles, reach


@triton.jit
def splits_of(tiles, reach, share, traits: tl.constexpr):
    """(splits of each tile, keys of a split) of sequences. share: key blocks of a split."""
    if traits.in_order:
        splits = tl.where(tiles == 1, tl.maximum(tl.cdiv(reach, traits.split_align), 1), 1)
        size = splits * 0 + traits.split_align
    else:
        blocks = tl.cdiv(reach, traits.block_n)
        splits = tl.maximum(tl.cdiv(blocks, share), 1)
        size = tl.cdiv(blocks, splits) * traits.block_n
    return splits, size


@triton.jit
def schedule_kernel(tensors, work, errors, shape, window, traits: tl.constexpr):
    """tensors: PagedTensors; work: WorkList; shape: PagedShape; window: WindowParams."""
    own = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    n = shape.batch
    # all key blocks of all tiles
    blocks = tl.full([], 0, tl.int64)
    for begin in range(0, n + 2, LANES):
        _, tokens = tokens_of(tensors, begin + lanes, shape)
        _, num_keys, _, _ = clamped_keys(tensors, begin + lanes, shape, traits)
        tiles, reach = tiles_and_reach(tokens, num_keys, window, traits)
        blocks += tl.sum(tiles.to(tl.int64) * tl.cdiv(reach, traits.block_n).to(tl.int64), 0)
    share = tl.maximum(tl.cdiv(blocks * shape.heads_kv, shape.slots.to(tl.int64)), LEAST_SHARE).to(tl.int32)
    # this sequence
    start, own_tokens = tokens_of(tensors, own, shape)
    first_key, own_keys, bad_length, bad_start = clamped_keys(tensors, own, shape, traits)
    own_tiles, own_reach = tiles_and_reach(own_tokens, own_keys, window, traits)
    own_splits, own_size = splits_of(own_tiles, own_reach, share, traits)
    own_work = tl.minimum(own_reach, own_size)
    # the items, partial results and split tiles of all sequences, and of those that precede it
    items = tl.full([], 0, tl.int64)
    partials = tl.full([], 0, tl.int64)
    split_tiles = tl.full([], 0, tl.int64)
    plain_items = tl.full([], 0, tl.int64)  # if no tile is split
    first_item = tl.full([], 0, tl.int64)
    first_partial = tl.full([], 0, tl.int64)
    first_split_tile = tl.full([], 0, tl.int64)
    first_plain_item = tl.full([], 0, tl.int64)
    for begin in range(0, n + 2, LANES):
        sequence = begin + lanes
        _, tokens = tokens_of(tensors, sequence, shape)
        _, num_keys, _, _ = clamped_keys(tensors, sequence, shape, traits)
        tiles, reach = tiles_and_reach(tokens, num_keys, window, traits)
        splits, size = splits_of(tiles, reach, share, traits)
        length = tl.minimum(reach, size)
        precedes = (length > own_work) | ((length == own_work) & (sequence < own))
        tiles = tiles.to(tl.int64) * shape.heads_kv
        is_split = splits > 1
        parts = tiles * splits
        items += tl.sum(parts, 0)
        plain_items += tl.sum(tiles, 0)
        partials += tl.sum(tl.where(is_split, parts, 0), 0)
        split_tiles += tl.sum(tl.where(is_split, tiles, 0), 0)
        first_item += tl.sum(tl.where(precedes, parts, 0), 0)
        first_plain_item += tl.sum(tl.where(precedes, tiles, 0), 0)
        first_partial += tl.sum(tl.where(precedes & is_split, parts, 0), 0)
        first_split_tile += tl.sum(tl.where(precedes & is_split, tiles, 0), 0)
    if partials > shape.max_partials:  # more than there is memory for: no tile is split
        own_splits = own_splits * 0 + 1
        items = plain_items
        first_item = first_plain_item
        split_tiles = split_tiles * 0
    # the record and the lists
    record = work.sequences + own * RECORD
    tl.store(record + START, start)
    tl.store(record + TOKENS, own_tokens)
    tl.store(record + FIRST_KEY, first_key)
    tl.store(record + NUM_KEYS, own_keys)
    tl.store(record + NUM_SPLITS, own_splits)
    tl.store(record + SPLIT_SIZE, own_size)
    tl.store(record + FIRST_ITEM, first_item.to(tl.int32))
    tl.store(record + FIRST_PARTIAL, first_partial.to(tl.int32))
    tl.store(record + FIRST_SPLIT_TILE, first_split_tile.to(tl.int32))
    own_tiles = own_tiles * shape.heads_kv
    own_items = own_tiles * own_splits
    for begin in range(0, own_items, LANES):
        place = first_item + begin + lanes
        tl.store(work.items + place, own, mask=(begin + lanes < own_items) & (place < shape.max_items))
    if own_splits > 1:
        for begin in range(0, own_tiles, LANES):
            place = first_split_tile + begin + lanes
            tl.store(work.split_tiles + place, own, mask=(begin + lanes < own_tiles) & (2 * place < shape.max_partials))
    tl.atomic_or(errors, SEQLENS, mask=bad_length, sem="relaxed")
    tl.atomic_or(errors, K_START, mask=bad_start, sem="relaxed")
    if own == 0:
        tl.store(work.totals, tl.minimum(items, shape.max_items).to(tl.int32))
        tl.store(work.totals + 1, tl.minimum(split_tiles, shape.max_partials // 2).to(tl.int32))
        longest = window.max_seqlen_q
        guard_offsets(tensors.cu_seqlens_q, n, shape.total_q, longest, lanes, errors, OFFSETS_Q, LONG_Q)


# ---------------------------------------------------------------- attend


@triton.jit
def attend_in_order(q, cache, strides, keys, visible, softmax, v_scale, traits: tl.constexpr):
    """(O [M, D_v], LSE in log2 units, which keys' pages are lost) of rows that see keys of the KeyRange `keys`, one
    fixed split after the other, as `combine_in_order` combines them.
    """
    base = tl.full([traits.block_m], float("-inf"), traits.accumulator)
    total = tl.full([traits.block_m], 0.0, traits.accumulator)
    o = tl.full([traits.block_m, traits.block_dv], 0.0, traits.accumulator)
    lost = tl.full([traits.block_n], 0, tl.int1)
    size: tl.constexpr = traits.split_align
    for split in range(keys.start // size, tl.cdiv(keys.stop, size)):
        own = KeyRange(tl.maximum(split * size, keys.start), tl.minimum(split * size + size, keys.stop))
        part, state, lost_here = attend(q, cache, strides, own, visible, softmax, traits)
        part, lse_log2 = normalize_split(part, state)
        if traits.v_scale:
            part = tl.where((state.row_sum == 0)[:, None], 0.0, part * v_scale)
        base, total, kept, weight = combine_step(base, total, lse_log2)
        o = tl.fma(o, kept[:, None], part * weight[:, None])
        lost = lost | lost_here
    factor, lse_log2 = combined_factor(base, total)
    return o * factor[:, None], lse_log2, lost


@triton.jit
def finish(tensors, o, lse_log2, rows, span, sequence, strides, shape, window, traits: tl.constexpr):
    """Write rows that have seen all their keys. NaN if the sequence has more tokens than promised. span: RowRange."""
    start = span.start
    is_inside = (sequence > 0) & (sequence <= shape.batch)
    broken = (window.max_seqlen_q >= 0) & (span.length > window.max_seqlen_q) & is_inside
    o = tl.where(broken, float("nan"), o)
    lse_log2 = tl.where(broken, float("nan"), lse_log2)
    out_offsets = row_offsets(strides.out, sequence * 0, rows, start)
    lse_offsets = rows.head_q.to(tl.int64) * shape.total_q + (start + rows.token).to(tl.int64)
    write_rows(tensors, out_offsets, lse_offsets, o, lse_log2, rows, traits)


@triton.jit
def paged_kernel(tensors, scales, work, partials, errors, strides, shape, window, softmax_params, traits: tl.constexpr):
    """tensors: PagedTensors; scales: PerKeyHead; work: WorkList; partials: SplitWorkspace; strides: ForwardStrides,
    with a page for a batch entry where there are pages; shape: PagedShape; window: WindowParams; softmax_params:
    SoftmaxParams.
    """
    pid = tl.program_id(0)
    if pid < tl.load(work.totals):
        # prologue
        sequence = tl.load(work.items + pid)
        record = work.sequences + sequence * RECORD
        start, tokens = tl.load(record + START), tl.load(record + TOKENS)
        first_key, num_keys = tl.load(record + FIRST_KEY), tl.load(record + NUM_KEYS)
        num_splits, split_size = tl.load(record + NUM_SPLITS), tl.load(record + SPLIT_SIZE)
        item = pid - tl.load(record + FIRST_ITEM)
        head = item % shape.heads_kv  # heads of one tile follow each other: with rows first they share cache lines
        split = item // shape.heads_kv % num_splits
        # tiles that see most keys come first
        block = tl.cdiv(tokens * traits.group, traits.block_m) - 1 - item // shape.heads_kv // num_splits
        batch = tl.maximum(sequence - 1, 0)
        rows = rows_of_tile(block, head, tokens, traits)
        visible = visible_keys(rows.token, num_keys, tokens, window, traits)
        keys = keys_of_tile(block, num_keys, tokens, window, traits)
        if num_splits > 1:
            begin = keys.start // traits.split_align * traits.split_align + split * split_size
            keys = KeyRange(tl.maximum(begin, keys.start), tl.minimum(begin + split_size, keys.stop))
        has_keys = keys.start < keys.stop
        d = tl.arange(0, traits.block_d)
        pointers = tensors.q + row_offsets(strides.q, batch, rows, start)[:, None] + d[None, :]
        q = tl.load(pointers, mask=(rows.exists & has_keys)[:, None] & (d < traits.head_dim)[None, :], other=0.0)
        k_scale = tl.load(scales.k + head) if traits.k_scale else 1.0
        v_scale = tl.load(scales.v + head) if traits.v_scale else 1.0
        softmax = softmax_scalars(softmax_params, traits)
        q, scale_log2, softcap = fold_scale_signs(q, (softmax.scale_log2, softmax.softcap), k_scale, traits)
        softmax = SoftmaxParams(scale_log2, softcap, 0.0)
        page_table = tensors.page_table
        if traits.page_size > 0:
            page_table += batch.to(tl.int64) * shape.max_pages
        cache = KeyCache(tensors.k, tensors.v, page_table, shape.num_pages, batch, head, first_key)
        if traits.k_token_scale or traits.v_token_scale:
            cache = ScaledCache(
                tensors.k,
                tensors.v,
                page_table,
                shape.num_pages,
                batch,
                head,
                first_key,
                scales.k,
                scales.v,
                shape.page_rows,
                shape.heads_kv,
            )
        q_idx, mods = None, None
        if traits.has_mods:
            # a sequence of fewer keys than tokens has rows before its first key
            q_idx = tl.maximum(num_keys - tokens + rows.token, 0)[:, None]
            hooks = HookParams(scale_log2 * LN_2, tensors.hooks.score_aux, tensors.hooks.mask_aux, None)
            mods = ScoreMods(batch, rows.head_q[:, None], hooks, None)
        # mainloop
        if traits.in_order:
            o, lse_log2, lost = attend_in_order(q, cache, strides, keys, visible, softmax, v_scale, traits)
        else:
            o, state, lost = attend(q, cache, strides, keys, visible, softmax, traits, q_idx, mods)
            o, lse_log2 = normalize_split(o, state)
            if traits.v_scale:
                o = tl.where((state.row_sum == 0)[:, None], 0.0, o * v_scale)
        # epilogue
        if traits.page_size > 0:
            tl.atomic_or(errors, PAGES, mask=tl.max(lost.to(tl.int32), 0) > 0, sem="relaxed")
        if num_splits > 1:
            tile = block * shape.heads_kv + head
            partial = tl.load(record + FIRST_PARTIAL) + tile * num_splits + split
            row = partial.to(tl.int64) * traits.block_m + tl.arange(0, traits.block_m)
            dv = tl.arange(0, traits.block_dv)
            # an empty split does not write its part
            store_at(partials.o, o, row * traits.head_dim_v, dv, rows.exists & has_keys, traits.head_dim_v)
            tl.store(partials.lse + row, lse_log2, mask=rows.exists)
        else:
            finish(tensors, o, lse_log2, rows, RowRange(start, tokens), sequence, strides, shape, window, traits)


# ---------------------------------------------------------------- combine


@triton.jit
def combine_kernel(tensors, work, partials, strides, shape, window, traits: tl.constexpr):
    """As `paged_kernel`. traits.block_m rows of the traits.tile_rows of a tile."""
    parts: tl.constexpr = traits.tile_rows // traits.block_m
    split_tile = tl.program_id(0) // parts
    if split_tile < tl.load(work.totals + 1):
        sequence = tl.load(work.split_tiles + split_tile)
        record = work.sequences + sequence * RECORD
        start, tokens, num_splits = tl.load(record + START), tl.load(record + TOKENS), tl.load(record + NUM_SPLITS)
        tile = split_tile - tl.load(record + FIRST_SPLIT_TILE)
        part = tl.program_id(0) % parts
        rows = rows_of_tile(tile // shape.heads_kv * parts + part, tile % shape.heads_kv, tokens, traits)
        row = (tl.load(record + FIRST_PARTIAL) + tile * num_splits).to(tl.int64) * traits.tile_rows
        row += part * traits.block_m + tl.arange(0, traits.block_m)
        n_rows = tl.full([], traits.tile_rows, tl.int64)
        if traits.in_order:
            o, lse_log2 = combine_in_order(partials, row, rows.exists, n_rows, num_splits, traits)
        else:
            o, lse_log2 = combine_splits(partials, row, rows.exists, n_rows, num_splits, traits)
        finish(tensors, o, lse_log2, rows, RowRange(start, tokens), sequence, strides, shape, window, traits)
