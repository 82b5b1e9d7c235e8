"""Decoding on Hopper: each program streams one share of one sequence's keys past all query heads that share a key head.

    copy (cp.async)     k0 v0 k1 v1 | k2 v2        | k3 v3        | ...            a ring of `stages` tiles of keys and of values
    tensor cores                    | s0      o0   | s1      o1   | ...
    the rest                        |    p0        |    p1        | ...            two barriers a tile: keys are there; values and p are there

Keys are the rows of both products: s = k q^T [keys, queries], o = v^T p [D_v, queries]. wgmma takes 64 rows and as few as 8 columns, so a
decode's few queries waste nothing, and what a thread keeps is small: two programs share an SM, one's arithmetic under the other's copies.

Every thread finds its own rows by page id, so pages of one key are copied as fast as rows; what lies outside a sequence is never read. The
last program to finish a tile joins the shares of all by their log-sum-exp, in the order of the splits. How many there are is counted from
the length, so a short sequence in a long table joins little, and a split that is alone writes its rows at once.

A short decode takes as long as its chain of loads: length and page ids come together, then keys, values and queries, then shares. Where one
program an SM takes a few tiles of keys, splits run together in a cluster, and send each other their shares (`cluster_reduce`).

Sources: split keys, "Flash-Decoding" (pytorch.org, October 2023); packed heads, FlashAttention-3 (arXiv 2407.08608); pages, vLLM
(arXiv 2309.06180).
"""

from ..device.cluster import inbox, open_inbox
from ..device.dialect import (
    await_launch_before,
    cp_async_commit,
    cp_async_load,
    cp_async_wait,
    fence_async_shared,
    gl,
    gluon,
    next_launch_may_start,
    partition_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..device.softmax import tanh
from ..device.split_kv import KeyRange, add_sink, combine_step, combined_factor, fold_scale_signs, sequence_keys
from ..runtime.error_flags import PAGES as _PAGES
from .cluster_reduce import cluster_reduce
from .decode_arguments import (
    DecodeOutputs,
    DecodeSmem,
    FirstPages,
    KeyPool,
    PageIds,
    SoftmaxScalars,
    SplitKeys,
    TileRows,
)

PAGES: gl.constexpr = gl.constexpr(_PAGES)


@gluon.constexpr_function
def copy_layout(width, itemsize, warps):
    """Warps over rows of `width` elements, 16 bytes a thread."""
    lanes = min(32, width * itemsize // 16)
    return gl.BlockedLayout([1, 16 // itemsize], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def row_layout(width, warps):
    """Warps over rows of `width` numbers of 32 bits."""
    lanes = min(32, width // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def combine_layout(joined, width):
    """Four warps over rows of `width`, each thread with its columns of `joined` splits."""
    lanes = min(32, width // 4)
    return gl.BlockedLayout([joined, 1, 4], [1, 32 // lanes, lanes], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def product_layout(columns, warps):
    """Of a product with so many columns: four warps share its rows, further four the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, columns * 4 // warps, 16])


@gluon.constexpr_function
def tile_layout(rows, width, dtype, traits):
    """Of a tile of the ring: as wgmma reads it, or where keys are of 8 bits as threads do, 16 bytes of eight rows in different banks."""
    if traits.fp8:
        return gl.SwizzledSharedLayout(16, 1, min(8, width // 16), [1, 0])
    return gl.NVMMASharedLayout.get_default_for([rows, width], dtype)


# ---------------------------------------------------------------- where keys lie


@gluon.jit
def pages_of(table, n_start, capacity, rows, traits: gl.constexpr):
    """Page ids of keys n_start + rows, whatever the length: one for all where they lie in one page."""
    if traits.page_size == 0:
        return n_start
    elif traits.page_size % traits.block_n == 0:
        return gl.load(table + n_start // traits.page_size, mask=n_start < capacity, other=0)
    else:
        n = n_start + rows
        return gl.load(table + n // traits.page_size, mask=n < capacity, other=0)


@gluon.jit
def both_pages(table, n_start, capacity, traits: gl.constexpr):
    """`pages_of` as the copies of keys and of values need them."""
    k_rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, copy_layout(traits.block_d, traits.itemsize, traits.warps)))
    pages = pages_of(table, n_start, capacity, k_rows, traits)
    if traits.block_d == traits.block_dv:
        return PageIds(pages, pages)
    else:
        v_rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, copy_layout(traits.block_dv, traits.itemsize, traits.warps)))
        return PageIds(pages, pages_of(table, n_start, capacity, v_rows, traits))


@gluon.jit
def first_pages_of(table, start, capacity, traits: gl.constexpr):
    """Page ids of the tile of key `start` and of the split's next, as copies need them, and of the first as its scores do."""
    begin = start // traits.block_n * traits.block_n
    rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, product_layout(traits.block_m, traits.warps)))
    first, second = both_pages(table, begin, capacity, traits), both_pages(table, begin + traits.step, capacity, traits)
    return FirstPages(first, second, pages_of(table, begin, capacity, rows, traits))


@gluon.jit
def in_sequence(n_start, rows, keys):
    """Which of keys n_start + rows are this split's."""
    return (rows >= keys.start - n_start) & (rows < keys.stop - n_start)


@gluon.jit
def in_pool(page, keys):
    return (page >= 0) & (page < keys.num_pages)


@gluon.jit
def offsets_of(page, strides, keys, n_start, rows, traits: gl.constexpr):
    """Where keys n_start + rows begin. What a loop need not compute again stands apart."""
    wide: gl.constexpr = gl.int32 if traits.near else gl.int64
    stride, row_stride = strides.batch.to(wide), strides.row.to(wide)
    head = keys.head.to(wide) * strides.head.to(wide)
    if traits.page_size == 0:
        begin = keys.batch.to(wide) * stride + (keys.first_key + n_start).to(wide) * row_stride
        return begin + (rows.to(wide) * row_stride + head)
    elif traits.page_size % traits.block_n == 0:
        begin = page.to(wide) * stride + (n_start % traits.page_size).to(wide) * row_stride
        return begin + (rows.to(wide) * row_stride + head)
    elif traits.block_n % traits.page_size == 0:
        return page.to(wide) * stride + ((rows % traits.page_size).to(wide) * row_stride + head)
    else:
        return page.to(wide) * stride + ((n_start + rows) % traits.page_size).to(wide) * row_stride + head


@gluon.jit
def copy_rows(smem, pool, at, ok, layout: gl.constexpr, width: gl.constexpr):
    """Start copying one tile of keys or values; zeros where a key is none of the sequence's. Commit it."""
    vector: gl.constexpr = layout.size_per_thread[1]
    columns = gl.arange(0, smem.shape[1], gl.SliceLayout(0, layout))
    inside = ok[:, None] & (columns < width)[None, :]
    # addresses and strides are multiples of 16 bytes: the compiler does not see it
    pieces = gl.multiple_of(gl.max_contiguous(pool + at[:, None] + columns[None, :], [1, vector]), [1, 16])
    cp_async_load(smem, pieces, gl.max_constancy(inside, [1, vector]))
    cp_async_commit()


@gluon.jit
def key_offsets(page, strides, keys, n_start, rows, traits: gl.constexpr):
    """(offsets of keys n_start + rows, which are to be copied)."""
    ok = in_sequence(n_start, rows, keys)
    if traits.page_size > 0:
        inside = in_pool(page, keys)
        ok = ok & inside
        page = gl.where(inside, page, 0)
    return offsets_of(page, strides, keys, n_start, rows, traits), ok


@gluon.jit
def copy_tile(smem, slot, pool, strides, pages, keys, n_start, traits: gl.constexpr):
    """Start copying a tile of keys, then of values, as two groups; empty ones where the split has no such tile."""
    if n_start < keys.stop:
        copy_pair(smem, slot, pool, strides, pages, keys, n_start, traits)
    else:
        cp_async_commit()
        cp_async_commit()


@gluon.jit
def copy_pair(smem, slot, pool, strides, pages, keys, n_start, traits: gl.constexpr):
    k_layout: gl.constexpr = copy_layout(traits.block_d, traits.itemsize, traits.warps)
    v_layout: gl.constexpr = copy_layout(traits.block_dv, traits.itemsize, traits.warps)
    at, ok = key_offsets(pages.k, strides.k, keys, n_start, gl.arange(0, traits.block_n, gl.SliceLayout(1, k_layout)), traits)
    copy_rows(smem.k.index(slot), pool.k, at, ok, k_layout, traits.head_dim)
    if not traits.alike:
        at, ok = key_offsets(pages.v, strides.v, keys, n_start, gl.arange(0, traits.block_n, gl.SliceLayout(1, v_layout)), traits)
    copy_rows(smem.v.index(slot), pool.v, at, ok, v_layout, traits.head_dim_v)


# ---------------------------------------------------------------- one split


@gluon.jit
def wait_for_copies(pending: gl.constexpr):
    """What all threads copied, but for their last `pending` groups, and what they stored is there for wgmma."""
    cp_async_wait(pending)
    fence_async_shared()
    partition_barrier()


@gluon.jit
def qk_product(q_smem, k_tile, traits: gl.constexpr):
    """s = k q^T [keys, queries], under way."""
    layout: gl.constexpr = product_layout(traits.block_m, traits.warps)
    zero = gl.full([traits.block_n, traits.block_m], 0.0, gl.float32, layout)
    if traits.fp8:
        k = k_tile.load(gl.DotOperandLayout(0, layout, 2)).to(gl.float16)
        return warpgroup_mma(k, q_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(k_tile, q_smem.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def start_copies(smem, pool, strides, pages, keys, traits: gl.constexpr):
    """Fill the ring but for one tile. pages as `first_pages_of` gives them; returned, those of the two tiles after the ring's, and the third."""
    current, upcoming = pages.current, pages.upcoming
    begin = keys.start // traits.block_n * traits.block_n
    slot = begin * 0
    for n_start in range(begin, begin + (traits.stages - 1) * traits.step, traits.step):
        copy_tile(smem, slot, pool, strides, current, keys, n_start, traits)
        current = upcoming
        upcoming = both_pages(pool.page_table, n_start + 2 * traits.step, pool.capacity, traits)
        slot += 1
    return FirstPages(current, upcoming, pages.scored)


@gluon.jit
def apply_mask(s, seen, n_start, rows, visible, traits: gl.constexpr):
    """Scores of keys n_start + rows, -inf where a row does not see the key or it is none of those `seen`."""
    if traits.banded:
        n = n_start + rows
        return gl.where(seen[:, None] & (n[:, None] >= visible.start[None, :]) & (n[:, None] < visible.stop[None, :]), s, float("-inf"))
    else:
        return gl.where(seen[:, None], s, float("-inf"))


@gluon.jit
def online_softmax(s, row_max, sums, scale_log2, traits: gl.constexpr):
    """(p, rescale, row_max, sums) after a tile; each thread sums its own keys, gathered once after the last tile."""
    new_max = gl.maximum(row_max, gl.max(s, 0) * scale_log2 - traits.lift)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[None, :])
    rescale = gl.exp2(row_max - base)
    return p, rescale, new_max, sums * rescale[None, :] + p


@gluon.jit
def attend(smem, pool, strides, pages, keys, visible, softmax, traits: gl.constexpr):
    """(o [D_v, queries], row_max, row_sum) after keys [start, stop) of a sequence, of which all tiles that `start_copies` takes are under way.

    row_max is what p was taken against. pool: KeyPool; pages: FirstPages that start_copies returned; keys: SplitKeys; visible: KeyRange of each row;
    softmax: SoftmaxScalars.
    """
    BLOCK_N: gl.constexpr = traits.block_n
    AHEAD: gl.constexpr = traits.stages - 1
    layout: gl.constexpr = product_layout(traits.block_m, traits.warps)
    table, capacity = pool.page_table, pool.capacity
    current, upcoming, page = pages.current, pages.upcoming, pages.scored
    begin, stop = keys.start // BLOCK_N * BLOCK_N, keys.stop
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    row_max = gl.full([traits.block_m], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    sums = gl.full([BLOCK_N, traits.block_m], 0.0, gl.float32, layout)
    o = gl.full([traits.block_dv, traits.block_m], 0.0, gl.float32, layout)
    slot = begin * 0
    for n_start in range(begin, stop, traits.step):
        wait_for_copies(2 * AHEAD - 1)
        s = qk_product(smem.q, smem.k.index(slot), traits)
        later = n_start + AHEAD * traits.step
        copy_tile(smem, gl.where(slot == 0, AHEAD, slot - 1), pool, strides, current, keys, later, traits)
        current = upcoming
        upcoming = both_pages(table, later + 2 * traits.step, capacity, traits)
        s = warpgroup_mma_wait(0, deps=[s])
        if traits.fp8:
            s = s * softmax.q_scale[None, :]
        if traits.softcap:
            s = tanh(s * softmax.softcap)
        seen = in_sequence(n_start, rows, keys)
        if traits.page_size > 0:
            inside = in_pool(page, keys)
            gl.atomic_or(pool.errors + rows * 0, rows * 0 + PAGES, mask=seen & (inside == 0), sem="relaxed")
            seen = seen & inside
            page = pages_of(table, n_start + traits.step, capacity, rows, traits)
        p, rescale, row_max, sums = online_softmax(apply_mask(s, seen, n_start, rows, visible, traits), row_max, sums, softmax.scale_log2, traits)
        o = o * rescale[None, :]
        smem.p.store(gl.permute(p.to(smem.p.dtype), (1, 0)))
        wait_for_copies(2 * AHEAD)
        v_tile = smem.v.index(slot).permute((1, 0))
        if traits.fp8:
            o = warpgroup_mma(v_tile.load(gl.DotOperandLayout(0, layout, 2)).to(gl.float16), smem.p.permute((1, 0)), o, is_async=True)
        else:
            o = warpgroup_mma(v_tile, smem.p.permute((1, 0)), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        slot = gl.where(slot == AHEAD, 0, slot + 1)
    cp_async_wait(0)  # the groups still open are empty; a kernel leaves none behind all the same
    return o, row_max, gl.sum(sums, 0)


# ---------------------------------------------------------------- rows


@gluon.jit
def load_queries(q, strides, place, tile, traits: gl.constexpr):
    """The tile's queries [rows, block_d]; 0 beyond the tokens and the head dimension."""
    batch, head, tokens = place.batch, place.head, place.tokens
    layout: gl.constexpr = copy_layout(traits.block_d, 2, traits.warps)
    row = tile * traits.block_m + gl.arange(0, traits.block_m, gl.SliceLayout(1, layout))
    token = row // traits.group
    columns = gl.arange(0, traits.block_d, gl.SliceLayout(0, layout))
    at = batch.to(gl.int64) * strides.batch + token.to(gl.int64) * strides.row + (head * traits.group + row % traits.group).to(gl.int64) * strides.head
    return gl.load(q + at[:, None] + columns[None, :], mask=(token < tokens)[:, None] & (columns < traits.head_dim)[None, :], other=0.0)


@gluon.jit
def as_float16(q, traits: gl.constexpr):
    """(q in float16, what each row was divided by): 8-bit keys become float16, which holds them all, and takes one instruction for two.

    A power of two brings the largest of a row to 2^14, so bfloat16's 8 bits are held exactly down to 2^-31 of it, and the rest to 2^-39.
    """
    largest = gl.max(gl.abs(q.to(gl.float32)), 1)
    exponent = largest.to(gl.int32, bitcast=True) >> 23
    exponent = gl.where(exponent == 255, 141, gl.maximum(exponent, 15))  # of rows with an infinity or NaN, 0
    level = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    factor = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    level = gl.convert_layout(level, gl.SliceLayout(0, product_layout(traits.block_m, traits.warps)))
    return (q.to(gl.float32) * factor[:, None]).to(gl.float16), level


@gluon.jit
def write_rows(tensors, o, lse_log2, place, row, strides, traits: gl.constexpr):
    """Whole rows to out and lse; place (batch, head, tokens, key heads, queries of a head in lse)."""
    out, lse, batch, head = tensors.out, tensors.lse, place.batch, place.head
    layout: gl.constexpr = o.type.layout
    columns = gl.arange(0, traits.block_dv, gl.SliceLayout(0, layout))
    token, head_q = row // traits.group, head * traits.group + row % traits.group
    row_ok = token < place.tokens
    sink = lse_log2
    if traits.sinks:
        sink = gl.load(tensors.sinks + head_q, mask=row_ok, other=0.0)
    o, row_lse = add_sink(o, lse_log2, sink, traits)
    at = batch.to(gl.int64) * strides.batch + token.to(gl.int64) * strides.row + head_q.to(gl.int64) * strides.head
    gl.store(out + at[:, None] + columns[None, :], o.to(out.dtype.element_ty), mask=row_ok[:, None] & (columns < traits.head_dim_v)[None, :])
    gl.store(lse + (batch.to(gl.int64) * place.heads_kv * traits.group + head_q) * place.lse_rows + token, row_lse, mask=row_ok)


@gluon.jit
def store_partial(partials, o, lse_log2, share, traits: gl.constexpr):
    """One split's rows, as many as can be queries, where that split of that tile keeps them: shares of one tile follow each other."""
    layout: gl.constexpr = o.type.layout
    row = gl.arange(0, traits.block_m, gl.SliceLayout(1, layout))
    columns = gl.arange(0, traits.block_dv, gl.SliceLayout(0, layout))
    at = share.to(gl.int64) * traits.joined_rows
    mask = row < traits.joined_rows
    gl.store(partials.o + at * traits.block_dv + (row * traits.block_dv)[:, None] + columns[None, :], o, mask=mask[:, None] & (columns >= 0)[None, :])
    gl.store(partial_lse(partials, traits) + at + row, lse_log2, mask=mask)


@gluon.jit
def partial_lse(partials, traits: gl.constexpr):
    """Behind o of all programs."""
    return partials.o + gl.num_programs(0).to(gl.int64) * (traits.joined_rows * traits.block_dv)


@gluon.jit
def rounded_product(a, b):
    """a * b that is not fused into an addition. Of a * b + c * d a compiler may fuse either product, and did one or the other as strides of out
    made other code of it: the same shares, and in 3 of 130 tests on an H200 another last bit where they cancel."""
    a, b = gl.broadcast(a, b)
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def combine_splits(partials, first_share, stop_share, traits: gl.constexpr):
    """(o [rows, D_v], lse in log2 units) from the shares of a tile, traits.joined of them at a time, past the first-level cache.

    Lanes share out the log-sum-exps, and pass on the weights.
    """
    layout: gl.constexpr = combine_layout(traits.joined, traits.block_dv)
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    split = gl.arange(0, traits.joined, gl.SliceLayout(1, lanes))
    split_3d = gl.arange(0, traits.joined, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    rows = gl.arange(0, traits.joined_rows, gl.SliceLayout(0, lanes))
    rows_3d = gl.arange(0, traits.joined_rows, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    columns = gl.arange(0, traits.block_dv, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    place = gl.expand_dims(split_3d[:, None] * traits.joined_rows + rows_3d[None, :], 2) * traits.block_dv + gl.expand_dims(columns[None, :], 0)
    place_lse = split[:, None] * traits.joined_rows + rows[None, :]
    base = gl.full([traits.joined_rows], float("-inf"), gl.float32, gl.SliceLayout(0, lanes))
    total = gl.full([traits.joined_rows], 0.0, gl.float32, gl.SliceLayout(0, lanes))
    o = gl.full([traits.joined_rows, traits.block_dv], 0.0, gl.float32, gl.SliceLayout(0, layout))
    for share in range(first_share, stop_share, traits.joined):
        at = share.to(gl.int64) * traits.joined_rows
        known = (split < stop_share - share)[:, None] & (rows >= 0)[None, :]
        held = gl.load(partial_lse(partials, traits) + at + place_lse, mask=known, other=float("-inf"), cache_modifier=".cg")
        mask = gl.expand_dims((split_3d < stop_share - share)[:, None] & (rows_3d >= 0)[None, :], 2) & gl.expand_dims((columns >= 0)[None, :], 0)
        part = gl.load(partials.o + at * traits.block_dv + place, mask=mask, other=0.0, cache_modifier=".cg")
        top = gl.maximum(base, gl.max(held, 0))
        level = gl.where(top == float("-inf"), 0.0, top)
        kept = gl.exp2(base - level)
        weight = gl.exp2(held - level[None, :])
        total = total * kept + gl.sum(weight, 0)
        spread = gl.convert_layout(weight, gl.SliceLayout(2, layout))
        o = o * gl.convert_layout(kept, gl.SliceLayout(1, o.type.layout))[:, None] + gl.sum(rounded_product(gl.expand_dims(spread, 2), part), 0)
        base = top
    empty = total == 0
    factor = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
    lse_log2 = gl.where(empty, float("-inf"), base + gl.log2(gl.where(empty, 1.0, total)))
    return o * gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))[:, None], gl.convert_layout(lse_log2, gl.SliceLayout(1, o.type.layout))


@gluon.jit
def combine_in_order(partials, first_share, stop_share, traits: gl.constexpr):
    """`join` one share after the other, so that a row has the bits of `invariant.invariant_kernel`, which has no others to wait for."""
    JOINED: gl.constexpr = traits.joined
    layout: gl.constexpr = row_layout(traits.block_dv, traits.warps)
    row = gl.arange(0, traits.joined_rows, gl.SliceLayout(1, layout))
    columns = gl.arange(0, traits.block_dv, gl.SliceLayout(0, layout))
    base = gl.full([traits.joined_rows], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.full([traits.joined_rows], 0.0, gl.float32, gl.SliceLayout(1, layout))
    o = gl.full([traits.joined_rows, traits.block_dv], 0.0, gl.float32, layout)
    for first in range(first_share, stop_share, JOINED):
        for i in gl.static_range(JOINED):  # written out, so that all loads are under way
            at = (first + i).to(gl.int64) * traits.joined_rows
            known = row * 0 + first + i < stop_share
            held = gl.load(partial_lse(partials, traits) + at + row, mask=known, other=float("-inf"), cache_modifier=".cg")
            place = at * traits.block_dv + (row * traits.block_dv)[:, None] + columns[None, :]
            part = gl.load(partials.o + place, mask=known[:, None] & (columns >= 0)[None, :], other=0.0, cache_modifier=".cg")
            base, total, kept, weight = combine_step(base, total, held)
            o = gl.fma(o, kept[:, None], part * weight[:, None])
    factor, lse_log2 = combined_factor(base, total)
    return o * factor[:, None], lse_log2


@gluon.jit
def write_combined(tensors, partials, place, tile, first_share, stop_share, strides, traits: gl.constexpr):
    if traits.in_order:
        o, lse_log2 = combine_in_order(partials, first_share, stop_share, traits)
    else:
        o, lse_log2 = combine_splits(partials, first_share, stop_share, traits)
    row = tile * traits.block_m + gl.arange(0, traits.joined_rows, gl.SliceLayout(1, o.type.layout))
    write_rows(tensors, o, lse_log2, place, row, strides, traits)


@gluon.jit
def keys_of_tile(tile, n_keys, tokens, window, traits: gl.constexpr):
    """[first, stop) of the keys that some row of the tile sees."""
    first, stop = n_keys * 0, n_keys
    if traits.left:
        first = gl.maximum(n_keys - tokens + tile * traits.block_m // traits.group - window.left, 0)
    if traits.right:
        last = gl.minimum((tile * traits.block_m + traits.block_m - 1) // traits.group, tokens - 1)
        stop = gl.maximum(gl.minimum(stop, n_keys - tokens + last + window.right + 1), 0)
    return first, stop


@gluon.jit
def store_queries(smem, q, scale, softmax_params, traits: gl.constexpr):
    """The queries into shared memory, with the signs of scales; (scale_log2, softcap, what each row was divided by)."""
    q, scale_log2, softcap = fold_scale_signs(q, (softmax_params.scale_log2, softmax_params.softcap), scale, traits)
    level = 1.0
    if traits.fp8:
        q, level = as_float16(q, traits)
    smem.store(q)
    return SoftmaxScalars(scale_log2, softcap, level)


@gluon.jit
def visible_keys(tile, n_keys, tokens, window, traits: gl.constexpr):
    """[first, stop) of the keys that each row sees."""
    layout: gl.constexpr = gl.SliceLayout(0, product_layout(traits.block_m, traits.warps))
    position = n_keys - tokens + (tile * traits.block_m + gl.arange(0, traits.block_m, layout)) // traits.group
    first, end = position * 0, position * 0 + n_keys
    if traits.left:
        first = gl.maximum(position - window.left, 0)
    if traits.right:
        end = gl.minimum(end, position + window.right + 1)
    return KeyRange(first, end)


@gluon.jit
def normalize_split(o, row_max, row_sum, v_scale):
    """(o [D_v, queries] of weight 1, lse in log2 units) of a split."""
    empty = row_sum == 0
    factor = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, row_sum)) * v_scale
    lse_log2 = gl.where(empty, float("-inf"), row_max + gl.log2(gl.where(empty, 1.0, row_sum)))
    return gl.where(empty[None, :], 0.0, o * factor[None, :]), lse_log2


@gluon.jit
def rows_first(o, lse_log2, traits: gl.constexpr):
    """o as [queries, D_v], and lse_log2 as its rows have it."""
    layout: gl.constexpr = row_layout(traits.block_dv, traits.warps)
    return gl.convert_layout(gl.permute(o, (1, 0)), layout), gl.convert_layout(lse_log2, gl.SliceLayout(1, layout))


@gluon.jit
def operand_buffer(rows: gl.constexpr, width: gl.constexpr, dtype: gl.constexpr):
    """Shared memory for an operand of wgmma."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, width], dtype)
    return gl.allocate_shared_memory(dtype, [rows, width], layout)


@gluon.jit
def decode_kernel(tensors, scales, partials, errors, strides, shape, window, softmax_params, traits: gl.constexpr):
    """tensors: DecodeTensors; scales: KeyScales; partials: Partials; strides: Strides; shape: DecodeShape; window: DecodeWindow; softmax_params:
    DecodeSoftmax (`decode_arguments`)."""
    tokens, heads_kv, capacity = shape.seqlen_q, shape.heads_kv, shape.capacity
    n_splits, split_size, n_tiles = shape.num_splits, shape.split_size, shape.num_m_blocks
    outputs = DecodeOutputs(tensors.out, tensors.lse, tensors.sinks)
    pid = gl.program_id(0)  # heads of one sequence follow each other: in a pool that keeps rows first they share lines of memory
    head = pid % heads_kv
    tile = pid // heads_kv % n_tiles
    split = pid // heads_kv // n_tiles % n_splits
    batch = pid // heads_kv // n_tiles // n_splits
    box = 0
    if traits.cluster:
        split, head = pid % n_splits, pid // n_splits % heads_kv
        tile, batch = pid // n_splits // heads_kv % n_tiles, pid // n_splits // heads_kv // n_tiles
        box = inbox(traits.inbox_bytes)
        open_inbox(box, traits.inbox_bytes)
    if traits.early:
        next_launch_may_start()
        await_launch_before()
    place = TileRows(batch, head, tokens, heads_kv, tokens)
    table = tensors.seqlens  # any pointer: rows have no pages
    if traits.page_size > 0:
        table = tensors.page_table + batch.to(gl.int64) * shape.max_pages
    start = split * split_size
    if traits.cluster:  # tile by tile in turn, so that all take part however short the sequence
        start = split * traits.block_n
    if not traits.left:  # these loads wait for no length
        first_pages = first_pages_of(table, start, capacity, traits)
    origin, n_keys = sequence_keys(tensors.seqlens, tensors.k_start, batch, capacity, errors, traits)
    first, stop = keys_of_tile(tile, n_keys, tokens, window, traits)
    if traits.left:
        if traits.cluster:
            start += first // traits.block_n * traits.block_n
        start = gl.maximum(start, first)
        first_pages = first_pages_of(table, start, capacity, traits)
    first_split = first // split_size
    stop_split = gl.maximum(gl.cdiv(stop, split_size), first_split + 1)  # a tile that sees no key still has rows to write
    last = gl.minimum(split * split_size + split_size, stop)
    if traits.cluster:  # all are there to the end: each gets a part of the rows
        first_split, stop_split, last = n_splits * 0, n_splits, stop
    if (split >= first_split) & (split < stop_split):
        held: gl.constexpr = tensors.k.dtype.element_ty
        dtype: gl.constexpr = gl.float16 if traits.fp8 else held
        q_smem, p_smem = operand_buffer(traits.block_m, traits.block_d, dtype), operand_buffer(traits.block_m, traits.block_n, dtype)
        k_smem = gl.allocate_shared_memory(held, [traits.stages, traits.block_n, traits.block_d], tile_layout(traits.block_n, traits.block_d, held, traits))
        v_smem = gl.allocate_shared_memory(held, [traits.stages, traits.block_n, traits.block_dv], tile_layout(traits.block_n, traits.block_dv, held, traits))
        keys = SplitKeys(batch, head, origin, start, last, shape.num_pages)
        pool = KeyPool(tensors.k, tensors.v, table, capacity, errors)
        smem = DecodeSmem(q_smem, p_smem, k_smem, v_smem)
        pages = start_copies(smem, pool, strides, first_pages, keys, traits)
        queries = load_queries(tensors.q, strides.q, place, tile, traits)  # behind the copies, none of which waits for them
        k_scale, v_scale = 1.0, 1.0
        if traits.k_scale:
            k_scale = gl.load(scales.k + head)
        if traits.v_scale:
            v_scale = gl.load(scales.v + head)
        softmax = store_queries(q_smem, queries, k_scale, softmax_params, traits)
        visible = visible_keys(tile, n_keys, tokens, window, traits)
        o, row_max, row_sum = attend(smem, pool, strides, pages, keys, visible, softmax, traits)
        o, lse_log2 = normalize_split(o, row_max, row_sum, v_scale)
        if traits.cluster:
            cluster_reduce(outputs, o, lse_log2, box, place, tile * traits.block_m, split, strides.out, traits)
        elif traits.single:
            o, lse_log2 = rows_first(o, lse_log2, traits)
            row = tile * traits.block_m + gl.arange(0, traits.block_m, gl.SliceLayout(1, o.type.layout))
            write_rows(outputs, o, lse_log2, place, row, strides.out, traits)
        else:
            o, lse_log2 = rows_first(o, lse_log2, traits)
            row = tile * traits.block_m + gl.arange(0, traits.block_m, gl.SliceLayout(1, o.type.layout))
            if stop_split - first_split == 1:
                write_rows(outputs, o, lse_log2, place, row, strides.out, traits)
            else:
                tile_of_all = (batch * n_tiles + tile) * heads_kv + head
                store_partial(partials, o, lse_log2, tile_of_all * n_splits + split, traits)
                partition_barrier()  # all threads have stored before one counts
                counter = partials.counters + tile_of_all
                if gl.atomic_add(counter, 1, sem="acq_rel") == stop_split - first_split - 1:
                    first_share = tile_of_all * n_splits + first_split
                    stop_share = tile_of_all * n_splits + stop_split
                    write_combined(outputs, partials, place, tile, first_share, stop_share, strides.out, traits)
                    gl.store(counter, 0)
