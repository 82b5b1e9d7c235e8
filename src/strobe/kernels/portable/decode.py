"""Decoding in Triton: each program takes one share of one sequence's keys, for all query heads that share a key head.

    rows    of a tile: query heads of the group, a token after the other, at least 16 (what a product takes)
    splits  of the keys: of one size, planned from shapes alone; a sequence that is shorter leaves its last programs nothing to do
    keys    are counted from the sequence's first; an address function finds them in pages or rows
    join    the last program to finish a tile, known by a counter, weighs the shares of all by their log-sum-exp, in the order of the splits:
            neither who is last nor how many there are changes a bit. A kernel of its own would be a second launch.

Sources: split keys, "Flash-Decoding" (pytorch.org, October 2023); packed heads, FlashAttention-3 (arXiv 2407.08608); pages, vLLM (arXiv 2309.06180).
"""

import triton
import triton.language as tl

from ..device.softmax import SoftmaxState, online_step, tanh
from ..device.split_kv import signed, span, weighed, with_sink, worth
from ..runtime.error_flags import PAGES as _PAGES
from .forward import softmax_scalars

PAGES = tl.constexpr(_PAGES)


@triton.jit
def place(table, batch, first_key, columns, key_ok, n_pages, form: tl.constexpr):
    """(page or batch entry, row in it, which lie in the pool) of keys first_key + columns; page is one number where the tile lies in one."""
    if form.page_size == 0:
        page = batch
        row = first_key + columns
    else:
        if form.page_size % form.block_n == 0:
            page = tl.load(table + first_key // form.page_size)
            row = first_key % form.page_size + columns
        else:
            page = tl.load(table + (first_key + columns) // form.page_size, mask=key_ok, other=0)
            row = (first_key + columns) % form.page_size
        inside = (page >= 0) & (page < n_pages)
        page = tl.where(inside, page, 0)
        key_ok = key_ok & inside
    return page, row, key_ok


@triton.jit
def load_held(pool, page, row, strides, head, d, key_ok, width: tl.constexpr, form: tl.constexpr):
    """Keys or values [N, block_d] as q's dtype has them, 0 where key_ok is False: what lies there is never read."""
    start = page.to(tl.int64) * strides[0] + row.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]
    pointers = pool + start[:, None] + d[None, :]
    mask = key_ok[:, None]
    if d.shape[0] != width:
        mask = mask & (d < width)[None, :]
    if form.storage == "bits":
        tile = tl.load(pointers, mask=mask, other=0)
        # e4m3 as float16 of an exponent that is 8 too small; float16 holds all of its numbers, the smallest too
        tile = tile.to(tl.uint16)
        high = ((tile & 0x80) << 8) | ((tile & 0x7F) << 7)
        tile = tl.where((tile & 0x7F) == 0x7F, float("nan"), high.to(tl.float16, bitcast=True) * 256.0)
    else:
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def attend(q, pools, strides, where, interval, numbers, form: tl.constexpr):
    """(o, row_max, row_sum, whether a page was not in the pool) after keys [start, stop) of a sequence.

    pools (k, v, table); where (batch, head, first, start, stop, n_pages); interval (first, stop) of each row.
    """
    BLOCK_M: tl.constexpr = form.block_m
    BLOCK_N: tl.constexpr = form.block_n
    BLOCK_DV: tl.constexpr = form.block_dv
    k, v, table = pools
    batch, head, origin, start, stop, n_pages = where
    first, end = interval
    scale_log2, softcap = numbers
    columns = tl.arange(0, BLOCK_N)
    d = tl.arange(0, form.block_d)
    dv = tl.arange(0, BLOCK_DV)
    state = SoftmaxState(tl.full([BLOCK_M], float("-inf"), form.accumulator), tl.zeros([BLOCK_M], form.accumulator))
    o = tl.zeros([BLOCK_M, BLOCK_DV], form.accumulator)
    lost = tl.zeros([BLOCK_N], tl.int1)
    for n_start in tl.range(start // BLOCK_N * BLOCK_N, stop, BLOCK_N, num_stages=form.loop_stages):
        n = n_start + columns
        wanted = (n >= start) & (n < stop)
        page, row, key_ok = place(table, batch, origin + n_start, columns, wanted, n_pages, form)
        k_tile = load_held(k, page, row, strides[0], head, d, key_ok, form.head_dim, form).to(q.dtype)
        s = tl.dot(q, tl.trans(k_tile), input_precision="ieee", out_dtype=form.accumulator)
        if form.softcap:
            s = tanh(s * softcap)
        seen = key_ok[None, :] & (n[None, :] >= first[:, None]) & (n[None, :] < end[:, None])
        p, rescale, state = online_step(tl.where(seen, s, float("-inf")), state, scale_log2)
        values = load_held(v, page, row, strides[1], head, dv, key_ok, form.head_dim_v, form).to(q.dtype)
        o = tl.dot(p.to(values.dtype), values, o * rescale[:, None], input_precision="ieee", out_dtype=form.accumulator)
        lost = lost | (wanted & (key_ok == 0))
    return o, state.row_max, state.row_sum, lost


@triton.jit
def whole(o, row_max, row_sum):
    """(o of weight 1, lse in log2 units) of a split."""
    empty = row_sum == 0
    row_sum = tl.where(empty, 1.0, row_sum)
    return tl.where(empty[:, None], 0.0, o / row_sum[:, None]), tl.where(
        empty, float("-inf"), row_max + tl.log2(row_sum)
    )


@triton.jit
def join(shares, row, row_ok, n_rows, n_splits, form: tl.constexpr):
    """(o [M, D_v], lse in log2 units) of rows from the shares of all splits; form.joined of them are under way at a time."""
    BLOCK_M: tl.constexpr = form.block_m
    BLOCK_DV: tl.constexpr = form.block_dv
    JOINED: tl.constexpr = form.joined
    lanes = tl.arange(0, JOINED)
    dv = tl.arange(0, BLOCK_DV)
    base = tl.full([BLOCK_M], float("-inf"), form.accumulator)
    for split in range(0, n_splits, JOINED):
        held = load_lse(shares[1], split + lanes, row, row_ok, n_rows, n_splits)
        base = tl.maximum(base, tl.max(held, 0))
    base = tl.where(base == float("-inf"), 0.0, base)
    o = tl.zeros([BLOCK_M, BLOCK_DV], form.accumulator)
    total = tl.zeros([BLOCK_M], form.accumulator)
    for split in range(0, n_splits, JOINED):
        held = load_lse(shares[1], split + lanes, row, row_ok, n_rows, n_splits)
        weight = tl.exp2(held - base[None, :])
        place = ((split + lanes).to(tl.int64)[:, None] * n_rows + row[None, :]) * form.head_dim_v
        known = (held != float("-inf"))[:, :, None] & (dv < form.head_dim_v)[
            None, None, :
        ]  # what an empty split would have written never was
        part = tl.load(shares[0] + place[:, :, None] + dv[None, None, :], mask=known, other=0.0, cache_modifier=".cg")
        o += tl.sum(weight[:, :, None] * part, 0)
        total += tl.sum(weight, 0)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    return tl.where(empty[:, None], 0.0, o / total[:, None]), tl.where(empty, float("-inf"), base + tl.log2(total))


@triton.jit
def join_in_order(shares, row, row_ok, n_rows, n_splits, form: tl.constexpr):
    """`join` one split after the other, so that a row has the bits of `invariant.invariant_kernel`, which has no others to wait for."""
    BLOCK_M: tl.constexpr = form.block_m
    BLOCK_DV: tl.constexpr = form.block_dv
    dv = tl.arange(0, BLOCK_DV)
    base = tl.full([BLOCK_M], float("-inf"), form.accumulator)
    total = tl.zeros([BLOCK_M], form.accumulator)
    o = tl.zeros([BLOCK_M, BLOCK_DV], form.accumulator)
    for split in range(0, n_splits):
        place = n_rows * split + row  # n_rows is an int64
        held = tl.load(shares[1] + place, mask=row_ok, other=float("-inf"), cache_modifier=".cg")
        known = (held != float("-inf"))[:, None] & (dv < form.head_dim_v)[None, :]
        part = tl.load(
            shares[0] + (place * form.head_dim_v)[:, None] + dv[None, :], mask=known, other=0.0, cache_modifier=".cg"
        )
        base, total, kept, weight = weighed(base, total, held)
        o = tl.fma(o, kept[:, None], part * weight[:, None])
    factor, lse_log2 = worth(base, total)
    return o * factor[:, None], lse_log2


@triton.jit
def load_lse(lse, split, row, row_ok, n_rows, n_splits):
    """lse [splits, rows], past the first-level cache, which knows nothing of other programs' stores."""
    known = (split < n_splits)[:, None] & row_ok[None, :]
    return tl.load(
        lse + split.to(tl.int64)[:, None] * n_rows + row[None, :], mask=known, other=float("-inf"), cache_modifier=".cg"
    )


@triton.jit
def store_wide(base, tile, offsets, columns, row_ok, width: tl.constexpr):
    mask = row_ok[:, None]
    if columns.shape[0] != width:
        mask = mask & (columns < width)[None, :]
    tl.store(base + offsets[:, None] + columns[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def write(tensors, places, o, lse_log2, head_q, row_ok, form: tl.constexpr):
    """Whole rows to out and lse, at `places` in each."""
    out, lse, sinks = tensors
    sink = lse_log2
    if form.sinks:
        sink = tl.load(sinks + head_q, mask=row_ok, other=0.0)
    o, row_lse = with_sink(o, lse_log2, sink, form)
    store_wide(out, o, places[0], tl.arange(0, form.block_dv), row_ok, form.head_dim_v)
    tl.store(lse + places[1], row_lse, mask=row_ok)


@triton.jit
def decode_kernel(tensors, scales, shares, faults, strides, sizes, limits, numbers, form: tl.constexpr):
    """tensors (q, k, v, page_table, seqlens, k_start, out, lse, sinks); scales (k_scale, v_scale); shares (o, lse, counters) of splits or Nones:
    o [splits, rows, D_v] and lse [splits, rows] of every row of q, and for every tile of rows how many splits are done, 0 before and after;
    strides (batch or page, row, head) of q, k, v, out; sizes (tokens, heads_kv, capacity, n_pages, max_pages, n_splits, split_size, row tiles);
    limits (left, right); numbers (scale_log2, softcap), each as `number` takes it."""
    q, k, v, page_table, seqlens, k_start, out, lse, sinks = tensors
    tokens, heads_kv, capacity, n_pages, max_pages, n_splits, split_size, n_tiles = sizes
    pid = tl.program_id(
        0
    )  # heads of one sequence follow each other: in a pool that keeps rows first they share lines of memory
    head = pid % heads_kv
    tile = pid // heads_kv % n_tiles
    split = pid // heads_kv // n_tiles % n_splits
    batch = pid // heads_kv // n_tiles // n_splits
    origin, n_keys = span(seqlens, k_start, batch, capacity, faults, form)
    rows = tile * form.block_m + tl.arange(0, form.block_m)
    token = rows // form.group
    head_q = head * form.group + rows % form.group
    row_ok = token < tokens
    position = n_keys - tokens + token
    start = split * split_size
    stop = tl.minimum(start + split_size, n_keys)
    first = position * 0
    end = first + n_keys
    if form.left:
        first = tl.maximum(position - limits[0], 0)
        start = tl.maximum(start, n_keys - tokens + tile * form.block_m // form.group - limits[0])
    if form.right:
        end = tl.minimum(end, position + limits[1] + 1)
        last = tl.minimum((tile * form.block_m + form.block_m - 1) // form.group, tokens - 1)
        stop = tl.minimum(stop, n_keys - tokens + last + limits[1] + 1)
    d = tl.arange(0, form.block_d)
    dv = tl.arange(0, form.block_dv)
    head_64, batch_64 = head_q.to(tl.int64), batch.to(tl.int64)
    q_at = (
        q
        + (batch_64 * strides[0][0] + token.to(tl.int64) * strides[0][1] + head_64 * strides[0][2])[:, None]
        + d[None, :]
    )
    q_tile = tl.load(q_at, mask=(row_ok & (start < stop))[:, None] & (d < form.head_dim)[None, :], other=0.0)
    scale = 1.0
    if form.k_scale:
        scale = tl.load(scales[0] + head)
    softmax = softmax_scalars(numbers, form)
    q_tile, scale_log2, softcap = signed(q_tile, (softmax.scale_log2, softmax.softcap), scale, form)
    pools = (k, v, page_table)
    if form.page_size > 0:
        pools = (k, v, page_table + batch_64 * max_pages)
    where = (batch, head, origin, start, stop, n_pages)
    o, row_max, row_sum, lost = attend(
        q_tile, pools, (strides[1], strides[2]), where, (first, end), (scale_log2, softcap), form
    )
    if form.page_size > 0:
        tl.atomic_or(faults, PAGES, mask=tl.max(lost.to(tl.int32), 0) > 0, sem="relaxed")
    o, row_lse = whole(o, row_max, row_sum)
    if form.v_scale:
        o = tl.where((row_sum == 0)[:, None], 0.0, o * tl.load(scales[1] + head))
    heads_q = heads_kv * form.group
    out_at = batch_64 * strides[3][0] + token.to(tl.int64) * strides[3][1] + head_64 * strides[3][2]
    places = (out_at, (batch_64 * heads_q + head_64) * tokens + token)
    if form.single:
        write((out, lse, sinks), places, o, row_lse, head_q, row_ok, form)
    else:
        n_tiles_all = tl.num_programs(0) // n_splits
        n_rows = (n_tiles_all // (heads_kv * n_tiles)).to(tl.int64) * tokens * heads_q
        row = (batch_64 * tokens + token) * heads_q + head_q
        store_wide(shares[0], o, (split * n_rows + row) * form.head_dim_v, dv, row_ok & (start < stop), form.head_dim_v)
        tl.store(shares[1] + split * n_rows + row, row_lse, mask=row_ok)
        tl.debug_barrier()  # all threads have stored before one counts; the simulator, to which a program is one, would not miss it
        counter = shares[2] + (batch * n_tiles + tile) * heads_kv + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == n_splits - 1:
            if form.in_order:
                o, row_lse = join_in_order(shares, row, row_ok, n_rows, n_splits, form)
            else:
                o, row_lse = join(shares, row, row_ok, n_rows, n_splits, form)
            write((out, lse, sinks), places, o, row_lse, head_q, row_ok, form)
            tl.store(counter, 0)
