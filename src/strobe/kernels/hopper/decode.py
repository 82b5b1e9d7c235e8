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
program an SM takes a few tiles of keys, splits run together in a cluster, and send each other their shares (exchange).

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
from ..device.split_kv import add_sink, combine_step, combined_factor, fold_scale_signs, sequence_keys
from ..runtime.error_flags import PAGES as _PAGES
from .cluster_reduce import exchange

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
def join_layout(joined, width):
    """Four warps over rows of `width`, each thread with its columns of `joined` splits."""
    lanes = min(32, width // 4)
    return gl.BlockedLayout([joined, 1, 4], [1, 32 // lanes, lanes], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def product_layout(columns, warps):
    """Of a product with so many columns: four warps share its rows, further four the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, columns * 4 // warps, 16])


@gluon.constexpr_function
def tile_layout(rows, width, dtype, form):
    """Of a tile of the ring: as wgmma reads it, or where keys are of 8 bits as threads do, 16 bytes of eight rows in different banks."""
    if form.fp8:
        return gl.SwizzledSharedLayout(16, 1, min(8, width // 16), [1, 0])
    return gl.NVMMASharedLayout.get_default_for([rows, width], dtype)


# ---------------------------------------------------------------- where keys lie


@gluon.jit
def pages_of(table, n_start, capacity, rows, form: gl.constexpr):
    """Page ids of keys n_start + rows, whatever the length: one for all where they lie in one page."""
    if form.page_size == 0:
        return n_start
    elif form.page_size % form.block_n == 0:
        return gl.load(table + n_start // form.page_size, mask=n_start < capacity, other=0)
    else:
        n = n_start + rows
        return gl.load(table + n // form.page_size, mask=n < capacity, other=0)


@gluon.jit
def both_pages(table, n_start, capacity, form: gl.constexpr):
    """`pages_of` as the copies of keys and of values need them."""
    k_rows = gl.arange(0, form.block_n, gl.SliceLayout(1, copy_layout(form.block_d, form.itemsize, form.warps)))
    pages = pages_of(table, n_start, capacity, k_rows, form)
    if form.block_d == form.block_dv:
        return pages, pages
    else:
        v_rows = gl.arange(0, form.block_n, gl.SliceLayout(1, copy_layout(form.block_dv, form.itemsize, form.warps)))
        return pages, pages_of(table, n_start, capacity, v_rows, form)


@gluon.jit
def first_pages_of(table, start, capacity, form: gl.constexpr):
    """Page ids of the tile of key `start` and of the split's next, as copies need them, and of the first as its scores do."""
    begin = start // form.block_n * form.block_n
    rows = gl.arange(0, form.block_n, gl.SliceLayout(1, product_layout(form.block_m, form.warps)))
    first, second = both_pages(table, begin, capacity, form), both_pages(table, begin + form.step, capacity, form)
    return first, second, pages_of(table, begin, capacity, rows, form)


@gluon.jit
def in_sequence(n_start, rows, where):
    """Which of keys n_start + rows are this split's."""
    return (rows >= where[3] - n_start) & (rows < where[4] - n_start)


@gluon.jit
def in_pool(page, where):
    return (page >= 0) & (page < where[5])


@gluon.jit
def offsets_of(page, strides, where, n_start, rows, form: gl.constexpr):
    """Where keys n_start + rows begin. What a loop need not compute again stands apart."""
    wide: gl.constexpr = gl.int32 if form.near else gl.int64
    stride, row_stride = strides[0].to(wide), strides[1].to(wide)
    head = where[1].to(wide) * strides[2].to(wide)
    if form.page_size == 0:
        begin = where[0].to(wide) * stride + (where[2] + n_start).to(wide) * row_stride
        return begin + (rows.to(wide) * row_stride + head)
    elif form.page_size % form.block_n == 0:
        begin = page.to(wide) * stride + (n_start % form.page_size).to(wide) * row_stride
        return begin + (rows.to(wide) * row_stride + head)
    elif form.block_n % form.page_size == 0:
        return page.to(wide) * stride + ((rows % form.page_size).to(wide) * row_stride + head)
    else:
        return page.to(wide) * stride + ((n_start + rows) % form.page_size).to(wide) * row_stride + head


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
def places_of(page, strides, where, n_start, rows, form: gl.constexpr):
    """(offsets of keys n_start + rows, which are to be copied)."""
    ok = in_sequence(n_start, rows, where)
    if form.page_size > 0:
        inside = in_pool(page, where)
        ok = ok & inside
        page = gl.where(inside, page, 0)
    return offsets_of(page, strides, where, n_start, rows, form), ok


@gluon.jit
def copy_tile(rings, slot, pools, strides, pages, where, n_start, form: gl.constexpr):
    """Start copying a tile of keys, then of values, as two groups; empty ones where the split has no such tile."""
    if n_start < where[4]:
        copy_pair(rings, slot, pools, strides, pages, where, n_start, form)
    else:
        cp_async_commit()
        cp_async_commit()


@gluon.jit
def copy_pair(rings, slot, pools, strides, pages, where, n_start, form: gl.constexpr):
    k_layout: gl.constexpr = copy_layout(form.block_d, form.itemsize, form.warps)
    v_layout: gl.constexpr = copy_layout(form.block_dv, form.itemsize, form.warps)
    at, ok = places_of(pages[0], strides[0], where, n_start, gl.arange(0, form.block_n, gl.SliceLayout(1, k_layout)), form)
    copy_rows(rings[0].index(slot), pools[0], at, ok, k_layout, form.head_dim)
    if not form.alike:
        at, ok = places_of(pages[1], strides[1], where, n_start, gl.arange(0, form.block_n, gl.SliceLayout(1, v_layout)), form)
    copy_rows(rings[1].index(slot), pools[1], at, ok, v_layout, form.head_dim_v)


# ---------------------------------------------------------------- one split


@gluon.jit
def landed(pending: gl.constexpr):
    """What all threads copied, but for their last `pending` groups, and what they stored is there for wgmma."""
    cp_async_wait(pending)
    fence_async_shared()
    partition_barrier()


@gluon.jit
def score_product(q_smem, k_tile, form: gl.constexpr):
    """s = k q^T [keys, queries], under way."""
    layout: gl.constexpr = product_layout(form.block_m, form.warps)
    zero = gl.full([form.block_n, form.block_m], 0.0, gl.float32, layout)
    if form.fp8:
        k = k_tile.load(gl.DotOperandLayout(0, layout, 2)).to(gl.float16)
        return warpgroup_mma(k, q_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(k_tile, q_smem.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def start_copies(rings, pools, strides, pages, where, form: gl.constexpr):
    """Fill the ring but for one tile. pages as `first_pages_of` gives them; returned, those of the two tiles after the ring's, and the third."""
    current, upcoming, scored = pages
    begin = where[3] // form.block_n * form.block_n
    slot = begin * 0
    for n_start in range(begin, begin + (form.stages - 1) * form.step, form.step):
        copy_tile(rings, slot, pools, strides, current, where, n_start, form)
        current = upcoming
        upcoming = both_pages(pools[2], n_start + 2 * form.step, pools[3], form)
        slot += 1
    return current, upcoming, scored


@gluon.jit
def hidden(s, seen, n_start, rows, interval, form: gl.constexpr):
    """Scores of keys n_start + rows, -inf where a row does not see the key or it is none of those `seen`."""
    if form.banded:
        first, end = interval
        n = n_start + rows
        return gl.where(seen[:, None] & (n[:, None] >= first[None, :]) & (n[:, None] < end[None, :]), s, float("-inf"))
    else:
        return gl.where(seen[:, None], s, float("-inf"))


@gluon.jit
def softmax_step(s, row_max, sums, scale_log2, form: gl.constexpr):
    """(p, rescale, row_max, sums) after a tile; each thread sums its own keys, gathered once after the last tile."""
    new_max = gl.maximum(row_max, gl.max(s, 0) * scale_log2 - form.lift)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[None, :])
    rescale = gl.exp2(row_max - base)
    return p, rescale, new_max, sums * rescale[None, :] + p


@gluon.jit
def attend(smem, pools, strides, pages, where, interval, numbers, form: gl.constexpr):
    """(o [D_v, queries], row_max, row_sum) after keys [start, stop) of a sequence, of which all tiles that `start_copies` takes are under way.

    row_max is what p was taken against. pools (k, v, table, capacity, error word); pages: what that returned, and those of the first
    tile in the order of its scores; where (batch, head, first key, start, stop, n_pages); interval (first, stop) of each row; numbers
    (scale_log2, softcap, what a row of q was divided by).
    """
    BLOCK_N: gl.constexpr = form.block_n
    AHEAD: gl.constexpr = form.stages - 1
    layout: gl.constexpr = product_layout(form.block_m, form.warps)
    q_smem, p_smem, rings = smem
    table, capacity = pools[2], pools[3]
    current, upcoming, page = pages
    scale_log2, softcap, level = numbers
    begin, stop = where[3] // BLOCK_N * BLOCK_N, where[4]
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    row_max = gl.full([form.block_m], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    sums = gl.full([BLOCK_N, form.block_m], 0.0, gl.float32, layout)
    o = gl.full([form.block_dv, form.block_m], 0.0, gl.float32, layout)
    slot = begin * 0
    for n_start in range(begin, stop, form.step):
        landed(2 * AHEAD - 1)
        s = score_product(q_smem, rings[0].index(slot), form)
        later = n_start + AHEAD * form.step
        copy_tile(rings, gl.where(slot == 0, AHEAD, slot - 1), pools, strides, current, where, later, form)
        current = upcoming
        upcoming = both_pages(table, later + 2 * form.step, capacity, form)
        s = warpgroup_mma_wait(0, deps=[s])
        if form.fp8:
            s = s * level[None, :]
        if form.softcap:
            s = tanh(s * softcap)
        seen = in_sequence(n_start, rows, where)
        if form.page_size > 0:
            inside = in_pool(page, where)
            gl.atomic_or(pools[4] + rows * 0, rows * 0 + PAGES, mask=seen & (inside == 0), sem="relaxed")
            seen = seen & inside
            page = pages_of(table, n_start + form.step, capacity, rows, form)
        p, rescale, row_max, sums = softmax_step(hidden(s, seen, n_start, rows, interval, form), row_max, sums, scale_log2, form)
        o = o * rescale[None, :]
        p_smem.store(gl.permute(p.to(p_smem.dtype), (1, 0)))
        landed(2 * AHEAD)
        v_tile = rings[1].index(slot).permute((1, 0))
        if form.fp8:
            o = warpgroup_mma(v_tile.load(gl.DotOperandLayout(0, layout, 2)).to(gl.float16), p_smem.permute((1, 0)), o, is_async=True)
        else:
            o = warpgroup_mma(v_tile, p_smem.permute((1, 0)), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        slot = gl.where(slot == AHEAD, 0, slot + 1)
    cp_async_wait(0)  # the groups still open are empty; a kernel leaves none behind all the same
    return o, row_max, gl.sum(sums, 0)


# ---------------------------------------------------------------- rows


@gluon.jit
def load_queries(q, strides, place, tile, form: gl.constexpr):
    """The tile's queries [rows, block_d]; 0 beyond the tokens and the head dimension."""
    batch, head, tokens = place[0], place[1], place[2]
    layout: gl.constexpr = copy_layout(form.block_d, 2, form.warps)
    row = tile * form.block_m + gl.arange(0, form.block_m, gl.SliceLayout(1, layout))
    token = row // form.group
    columns = gl.arange(0, form.block_d, gl.SliceLayout(0, layout))
    at = batch.to(gl.int64) * strides[0] + token.to(gl.int64) * strides[1] + (head * form.group + row % form.group).to(gl.int64) * strides[2]
    return gl.load(q + at[:, None] + columns[None, :], mask=(token < tokens)[:, None] & (columns < form.head_dim)[None, :], other=0.0)


@gluon.jit
def as_float16(q, form: gl.constexpr):
    """(q in float16, what each row was divided by): 8-bit keys become float16, which holds them all, and takes one instruction for two.

    A power of two brings the largest of a row to 2^14, so bfloat16's 8 bits are held exactly down to 2^-31 of it, and the rest to 2^-39.
    """
    largest = gl.max(gl.abs(q.to(gl.float32)), 1)
    exponent = largest.to(gl.int32, bitcast=True) >> 23
    exponent = gl.where(exponent == 255, 141, gl.maximum(exponent, 15))  # of rows with an infinity or NaN, 0
    level = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    factor = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    level = gl.convert_layout(level, gl.SliceLayout(0, product_layout(form.block_m, form.warps)))
    return (q.to(gl.float32) * factor[:, None]).to(gl.float16), level


@gluon.jit
def write(tensors, o, lse_log2, place, row, strides, form: gl.constexpr):
    """Whole rows to out and lse; place (batch, head, tokens, key heads, queries of a head in lse)."""
    out, lse, sinks = tensors
    batch, head, tokens, heads_kv, queries = place
    layout: gl.constexpr = o.type.layout
    columns = gl.arange(0, form.block_dv, gl.SliceLayout(0, layout))
    token, head_q = row // form.group, head * form.group + row % form.group
    row_ok = token < tokens
    sink = lse_log2
    if form.sinks:
        sink = gl.load(sinks + head_q, mask=row_ok, other=0.0)
    o, row_lse = add_sink(o, lse_log2, sink, form)
    at = batch.to(gl.int64) * strides[0] + token.to(gl.int64) * strides[1] + head_q.to(gl.int64) * strides[2]
    gl.store(out + at[:, None] + columns[None, :], o.to(out.dtype.element_ty), mask=row_ok[:, None] & (columns < form.head_dim_v)[None, :])
    gl.store(lse + (batch.to(gl.int64) * heads_kv * form.group + head_q) * queries + token, row_lse, mask=row_ok)


@gluon.jit
def keep_share(shares, o, lse_log2, share, form: gl.constexpr):
    """One split's rows, as many as can be queries, where that split of that tile keeps them: shares of one tile follow each other."""
    layout: gl.constexpr = o.type.layout
    row = gl.arange(0, form.block_m, gl.SliceLayout(1, layout))
    columns = gl.arange(0, form.block_dv, gl.SliceLayout(0, layout))
    at = share.to(gl.int64) * form.joined_rows
    mask = row < form.joined_rows
    gl.store(shares[0] + at * form.block_dv + (row * form.block_dv)[:, None] + columns[None, :], o, mask=mask[:, None] & (columns >= 0)[None, :])
    gl.store(lse_shares(shares, form) + at + row, lse_log2, mask=mask)


@gluon.jit
def lse_shares(shares, form: gl.constexpr):
    """Behind o of all programs."""
    return shares[0] + gl.num_programs(0).to(gl.int64) * (form.joined_rows * form.block_dv)


@gluon.jit
def rounded_product(a, b):
    """a * b that is not fused into an addition. Of a * b + c * d a compiler may fuse either product, and did one or the other as strides of out
    made other code of it: the same shares, and in 3 of 130 tests on an H200 another last bit where they cancel."""
    a, b = gl.broadcast(a, b)
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def join(shares, first_share, stop_share, form: gl.constexpr):
    """(o [rows, D_v], lse in log2 units) from the shares of a tile, form.joined of them at a time, past the first-level cache.

    Lanes share out the log-sum-exps, and pass on the weights.
    """
    layout: gl.constexpr = join_layout(form.joined, form.block_dv)
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    split = gl.arange(0, form.joined, gl.SliceLayout(1, lanes))
    split_3d = gl.arange(0, form.joined, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    rows = gl.arange(0, form.joined_rows, gl.SliceLayout(0, lanes))
    rows_3d = gl.arange(0, form.joined_rows, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    columns = gl.arange(0, form.block_dv, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    place = gl.expand_dims(split_3d[:, None] * form.joined_rows + rows_3d[None, :], 2) * form.block_dv + gl.expand_dims(columns[None, :], 0)
    place_lse = split[:, None] * form.joined_rows + rows[None, :]
    base = gl.full([form.joined_rows], float("-inf"), gl.float32, gl.SliceLayout(0, lanes))
    total = gl.full([form.joined_rows], 0.0, gl.float32, gl.SliceLayout(0, lanes))
    o = gl.full([form.joined_rows, form.block_dv], 0.0, gl.float32, gl.SliceLayout(0, layout))
    for share in range(first_share, stop_share, form.joined):
        at = share.to(gl.int64) * form.joined_rows
        known = (split < stop_share - share)[:, None] & (rows >= 0)[None, :]
        held = gl.load(lse_shares(shares, form) + at + place_lse, mask=known, other=float("-inf"), cache_modifier=".cg")
        mask = gl.expand_dims((split_3d < stop_share - share)[:, None] & (rows_3d >= 0)[None, :], 2) & gl.expand_dims((columns >= 0)[None, :], 0)
        part = gl.load(shares[0] + at * form.block_dv + place, mask=mask, other=0.0, cache_modifier=".cg")
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
def join_in_order(shares, first_share, stop_share, form: gl.constexpr):
    """`join` one share after the other, so that a row has the bits of `invariant.invariant_kernel`, which has no others to wait for."""
    JOINED: gl.constexpr = form.joined
    layout: gl.constexpr = row_layout(form.block_dv, form.warps)
    row = gl.arange(0, form.joined_rows, gl.SliceLayout(1, layout))
    columns = gl.arange(0, form.block_dv, gl.SliceLayout(0, layout))
    base = gl.full([form.joined_rows], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.full([form.joined_rows], 0.0, gl.float32, gl.SliceLayout(1, layout))
    o = gl.full([form.joined_rows, form.block_dv], 0.0, gl.float32, layout)
    for first in range(first_share, stop_share, JOINED):
        for i in gl.static_range(JOINED):  # written out, so that all loads are under way
            at = (first + i).to(gl.int64) * form.joined_rows
            known = row * 0 + first + i < stop_share
            held = gl.load(lse_shares(shares, form) + at + row, mask=known, other=float("-inf"), cache_modifier=".cg")
            place = at * form.block_dv + (row * form.block_dv)[:, None] + columns[None, :]
            part = gl.load(shares[0] + place, mask=known[:, None] & (columns >= 0)[None, :], other=0.0, cache_modifier=".cg")
            base, total, kept, weight = combine_step(base, total, held)
            o = gl.fma(o, kept[:, None], part * weight[:, None])
    factor, lse_log2 = combined_factor(base, total)
    return o * factor[:, None], lse_log2


@gluon.jit
def write_joined(tensors, shares, place, tile, share, strides, form: gl.constexpr):
    if form.in_order:
        o, lse_log2 = join_in_order(shares, share[0], share[1], form)
    else:
        o, lse_log2 = join(shares, share[0], share[1], form)
    row = tile * form.block_m + gl.arange(0, form.joined_rows, gl.SliceLayout(1, o.type.layout))
    write(tensors, o, lse_log2, place, row, strides, form)


@gluon.jit
def keys_of_tile(tile, n_keys, tokens, limits, form: gl.constexpr):
    """[first, stop) of the keys that some row of the tile sees."""
    first, stop = n_keys * 0, n_keys
    if form.left:
        first = gl.maximum(n_keys - tokens + tile * form.block_m // form.group - limits[0], 0)
    if form.right:
        last = gl.minimum((tile * form.block_m + form.block_m - 1) // form.group, tokens - 1)
        stop = gl.maximum(gl.minimum(stop, n_keys - tokens + last + limits[1] + 1), 0)
    return first, stop


@gluon.jit
def store_queries(smem, q, scale, numbers, form: gl.constexpr):
    """The queries into shared memory, with the signs of scales; (scale_log2, softcap, what each row was divided by)."""
    q, scale_log2, softcap = fold_scale_signs(q, numbers, scale, form)
    level = 1.0
    if form.fp8:
        q, level = as_float16(q, form)
    smem.store(q)
    return scale_log2, softcap, level


@gluon.jit
def interval_of(tile, n_keys, tokens, limits, form: gl.constexpr):
    """[first, stop) of the keys that each row sees."""
    layout: gl.constexpr = gl.SliceLayout(0, product_layout(form.block_m, form.warps))
    position = n_keys - tokens + (tile * form.block_m + gl.arange(0, form.block_m, layout)) // form.group
    first, end = position * 0, position * 0 + n_keys
    if form.left:
        first = gl.maximum(position - limits[0], 0)
    if form.right:
        end = gl.minimum(end, position + limits[1] + 1)
    return first, end


@gluon.jit
def whole(o, row_max, row_sum, v_scale):
    """(o [D_v, queries] of weight 1, lse in log2 units) of a split."""
    empty = row_sum == 0
    factor = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, row_sum)) * v_scale
    lse_log2 = gl.where(empty, float("-inf"), row_max + gl.log2(gl.where(empty, 1.0, row_sum)))
    return gl.where(empty[None, :], 0.0, o * factor[None, :]), lse_log2


@gluon.jit
def as_rows(o, lse_log2, form: gl.constexpr):
    """o as [queries, D_v], and lse_log2 as its rows have it."""
    layout: gl.constexpr = row_layout(form.block_dv, form.warps)
    return gl.convert_layout(gl.permute(o, (1, 0)), layout), gl.convert_layout(lse_log2, gl.SliceLayout(1, layout))


@gluon.jit
def matrix(rows: gl.constexpr, width: gl.constexpr, dtype: gl.constexpr):
    """Shared memory for an operand of wgmma."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, width], dtype)
    return gl.allocate_shared_memory(dtype, [rows, width], layout)


@gluon.jit
def decode_kernel(tensors, scales, shares, faults, strides, sizes, limits, numbers, form: gl.constexpr):
    """tensors (q, k, v, page_table, seqlens, k_start, out, lse, sinks); scales (k_scale, v_scale); shares (o and lse, counters) or Nones:
    for every tile of rows and every split o [joined_rows, block_dv], then lse [joined_rows]; how many splits are done, 0 before and after;
    strides (batch or page, row, head) of q, k, v, out; sizes (tokens, heads_kv, capacity, n_pages, max_pages, n_splits, split_size, row tiles);
    limits (left, right); numbers (scale_log2, softcap)."""
    q, k, v, page_table, seqlens, k_start, out, lse, sinks = tensors
    tokens, heads_kv, capacity, n_pages, max_pages, n_splits, split_size, n_tiles = sizes
    pid = gl.program_id(0)  # heads of one sequence follow each other: in a pool that keeps rows first they share lines of memory
    head = pid % heads_kv
    tile = pid // heads_kv % n_tiles
    split = pid // heads_kv // n_tiles % n_splits
    batch = pid // heads_kv // n_tiles // n_splits
    box = 0
    if form.cluster:
        split, head = pid % n_splits, pid // n_splits % heads_kv
        tile, batch = pid // n_splits // heads_kv % n_tiles, pid // n_splits // heads_kv // n_tiles
        box = inbox(form.inbox_bytes)
        open_inbox(box, form.inbox_bytes)
    if form.early:
        next_launch_may_start()
        await_launch_before()
    place = (batch, head, tokens, heads_kv, tokens)
    table = seqlens  # any pointer: rows have no pages
    if form.page_size > 0:
        table = page_table + batch.to(gl.int64) * max_pages
    start = split * split_size
    if form.cluster:  # tile by tile in turn, so that all take part however short the sequence
        start = split * form.block_n
    if not form.left:  # these loads wait for no length
        first_pages = first_pages_of(table, start, capacity, form)
    origin, n_keys = sequence_keys(seqlens, k_start, batch, capacity, faults, form)
    first, stop = keys_of_tile(tile, n_keys, tokens, limits, form)
    if form.left:
        if form.cluster:
            start += first // form.block_n * form.block_n
        start = gl.maximum(start, first)
        first_pages = first_pages_of(table, start, capacity, form)
    first_split = first // split_size
    stop_split = gl.maximum(gl.cdiv(stop, split_size), first_split + 1)  # a tile that sees no key still has rows to write
    last = gl.minimum(split * split_size + split_size, stop)
    if form.cluster:  # all are there to the end: each gets a part of the rows
        first_split, stop_split, last = n_splits * 0, n_splits, stop
    if (split >= first_split) & (split < stop_split):
        held: gl.constexpr = k.dtype.element_ty
        dtype: gl.constexpr = gl.float16 if form.fp8 else held
        q_smem, p_smem = matrix(form.block_m, form.block_d, dtype), matrix(form.block_m, form.block_n, dtype)
        k_smem = gl.allocate_shared_memory(held, [form.stages, form.block_n, form.block_d], tile_layout(form.block_n, form.block_d, held, form))
        v_smem = gl.allocate_shared_memory(held, [form.stages, form.block_n, form.block_dv], tile_layout(form.block_n, form.block_dv, held, form))
        where = (batch, head, origin, start, last, n_pages)
        pools = (k, v, table, capacity, faults)
        smem = (q_smem, p_smem, (k_smem, v_smem))
        pages = start_copies(smem[2], pools, (strides[1], strides[2]), first_pages, where, form)
        queries = load_queries(q, strides[0], place, tile, form)  # behind the copies, none of which waits for them
        k_scale, v_scale = 1.0, 1.0
        if form.k_scale:
            k_scale = gl.load(scales[0] + head)
        if form.v_scale:
            v_scale = gl.load(scales[1] + head)
        units = store_queries(q_smem, queries, k_scale, numbers, form)
        interval = interval_of(tile, n_keys, tokens, limits, form)
        o, row_max, row_sum = attend(smem, pools, (strides[1], strides[2]), pages, where, interval, units, form)
        o, lse_log2 = whole(o, row_max, row_sum, v_scale)
        if form.cluster:
            exchange((out, lse, sinks), o, lse_log2, box, place, tile * form.block_m, split, strides[3], form)
        elif form.single:
            o, lse_log2 = as_rows(o, lse_log2, form)
            row = tile * form.block_m + gl.arange(0, form.block_m, gl.SliceLayout(1, o.type.layout))
            write((out, lse, sinks), o, lse_log2, place, row, strides[3], form)
        else:
            o, lse_log2 = as_rows(o, lse_log2, form)
            row = tile * form.block_m + gl.arange(0, form.block_m, gl.SliceLayout(1, o.type.layout))
            if stop_split - first_split == 1:
                write((out, lse, sinks), o, lse_log2, place, row, strides[3], form)
            else:
                tile_of_all = (batch * n_tiles + tile) * heads_kv + head
                keep_share(shares, o, lse_log2, tile_of_all * n_splits + split, form)
                partition_barrier()  # all threads have stored before one counts
                counter = shares[1] + tile_of_all
                if gl.atomic_add(counter, 1, sem="acq_rel") == stop_split - first_split - 1:
                    share = (tile_of_all * n_splits + first_split, tile_of_all * n_splits + stop_split)
                    write_joined((out, lse, sinks), shares, place, tile, share, strides[3], form)
                    gl.store(counter, 0)
