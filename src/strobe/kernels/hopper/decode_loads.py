"""What the Hopper decode reads: K and V by cp.async, from pages or rows, and Q.

Each thread computes the addresses of its own rows from their page ids. So pages of one key are copied as fast as rows,
and memory outside a sequence is not read. Page ids are loaded two tiles ahead of their copies.
"""

from ..device.dialect import (
    cp_async_commit,
    cp_async_load,
    cp_async_wait,
    fence_async_shared,
    gl,
    gluon,
    partition_barrier,
)
from ..device.split_kv import fold_scale_signs
from .decode_arguments import PageIds, PrefetchedPages, SoftmaxScalars
from .decode_layouts import copy_layout, key_layout, query_layout
from .decode_store import token_exists

# ---------------------------------------------------------------- page ids


@gluon.jit
def page_ids(table, n_start, rows, traits: gl.constexpr):
    """Page ids of keys n_start + rows, whatever the length. A scalar if the tile lies in one page."""
    if traits.page_size == 0:
        return n_start
    elif traits.page_size % traits.block_n == 0:
        return gl.load(table.ids + n_start // traits.page_size, mask=n_start < table.capacity, other=0)
    else:
        n = n_start + rows
        return gl.load(table.ids + n // traits.page_size, mask=n < table.capacity, other=0)


@gluon.jit
def page_ids_of_copies(table, n_start, traits: gl.constexpr):
    """PageIds of a tile."""
    k_layout: gl.constexpr = copy_layout(traits.block_d, traits.itemsize, traits.warps)
    k_rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, k_layout))
    pages = page_ids(table, n_start, k_rows, traits)
    if traits.block_d == traits.block_dv:
        return PageIds(pages, pages)
    else:
        v_layout: gl.constexpr = copy_layout(traits.block_dv, traits.itemsize, traits.warps)
        v_rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, v_layout))
        return PageIds(pages, page_ids(table, n_start, v_rows, traits))


@gluon.jit
def prefetch_pages(table, start, traits: gl.constexpr):
    """PrefetchedPages of the split that begins with key `start`."""
    begin = start // traits.block_n * traits.block_n
    rows = gl.arange(0, traits.block_n, key_layout(traits))
    to_copy = page_ids_of_copies(table, begin, traits)
    to_copy_next = page_ids_of_copies(table, begin + traits.step, traits)
    return PrefetchedPages(to_copy, to_copy_next, page_ids(table, begin, rows, traits))


# ---------------------------------------------------------------- copies of K and V


@gluon.jit
def in_split(n_start, rows, keys):
    """Which of the keys n_start + rows belong to the split `keys`."""
    return (rows >= keys.start - n_start) & (rows < keys.stop - n_start)


@gluon.jit
def in_pool(page, table):
    return (page >= 0) & (page < table.num_pages)


@gluon.jit
def cache_offsets(page, strides, cache, n_start, rows, traits: gl.constexpr):
    """Element offsets of keys n_start + rows. The terms that a loop need not compute again are summed first."""
    wide: gl.constexpr = gl.int32 if traits.int32_offsets else gl.int64
    stride, row_stride = strides.batch.to(wide), strides.row.to(wide)
    head = cache.head.to(wide) * strides.head.to(wide)
    if traits.page_size == 0:
        begin = cache.batch.to(wide) * stride + (cache.first_key + n_start).to(wide) * row_stride
        return begin + (rows.to(wide) * row_stride + head)
    elif traits.page_size % traits.block_n == 0:
        begin = page.to(wide) * stride + (n_start % traits.page_size).to(wide) * row_stride
        return begin + (rows.to(wide) * row_stride + head)
    elif traits.block_n % traits.page_size == 0:
        return page.to(wide) * stride + ((rows % traits.page_size).to(wide) * row_stride + head)
    else:
        return page.to(wide) * stride + ((n_start + rows) % traits.page_size).to(wide) * row_stride + head


@gluon.jit
def key_offsets(page, strides, cache, keys, n_start, rows, traits: gl.constexpr):
    """(element offsets of keys n_start + rows, which of them are copied)."""
    is_copied = in_split(n_start, rows, keys)
    if traits.page_size > 0:
        exists = in_pool(page, cache.table)
        is_copied = is_copied & exists
        page = gl.where(exists, page, 0)
    return cache_offsets(page, strides, cache, n_start, rows, traits), is_copied


@gluon.jit
def copy_rows(smem, pool, offsets, is_copied, layout: gl.constexpr, width: gl.constexpr):
    """Start copying one tile of K or V, as a group; other rows become 0."""
    vector: gl.constexpr = layout.size_per_thread[1]
    columns = gl.arange(0, smem.shape[1], gl.SliceLayout(0, layout))
    mask = is_copied[:, None] & (columns < width)[None, :]
    # addresses and strides are multiples of 16 bytes, which the compiler cannot derive
    pointers = gl.multiple_of(gl.max_contiguous(pool + offsets[:, None] + columns[None, :], [1, vector]), [1, 16])
    cp_async_load(smem, pointers, gl.max_constancy(mask, [1, vector]))
    cp_async_commit()


@gluon.jit
def copy_tile(smem, stage, cache, pages, keys, n_start, traits: gl.constexpr):
    """Start copying a tile of K, then of V, as two groups; empty groups where the split has no such tile."""
    if n_start < keys.stop:
        copy_kv(smem, stage, cache, pages, keys, n_start, traits)
    else:
        cp_async_commit()
        cp_async_commit()


@gluon.jit
def copy_kv(smem, stage, cache, pages, keys, n_start, traits: gl.constexpr):
    k_layout: gl.constexpr = copy_layout(traits.block_d, traits.itemsize, traits.warps)
    v_layout: gl.constexpr = copy_layout(traits.block_dv, traits.itemsize, traits.warps)
    k_rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, k_layout))
    offsets, is_copied = key_offsets(pages.k, cache.strides.k, cache, keys, n_start, k_rows, traits)
    copy_rows(smem.k.index(stage), cache.k, offsets, is_copied, k_layout, traits.head_dim)
    if not traits.same_offsets:
        v_rows = gl.arange(0, traits.block_n, gl.SliceLayout(1, v_layout))
        offsets, is_copied = key_offsets(pages.v, cache.strides.v, cache, keys, n_start, v_rows, traits)
    copy_rows(smem.v.index(stage), cache.v, offsets, is_copied, v_layout, traits.head_dim_v)


@gluon.jit
def start_copies(smem, cache, pages, keys, traits: gl.constexpr):
    """Fill all stages but one. Returns the PrefetchedPages of the tiles that follow."""
    to_copy, to_copy_next = pages.to_copy, pages.to_copy_next
    begin = keys.start // traits.block_n * traits.block_n
    stage = begin * 0
    for n_start in range(begin, begin + (traits.stages - 1) * traits.step, traits.step):
        copy_tile(smem, stage, cache, to_copy, keys, n_start, traits)
        to_copy = to_copy_next
        to_copy_next = page_ids_of_copies(cache.table, n_start + 2 * traits.step, traits)
        stage += 1
    return PrefetchedPages(to_copy, to_copy_next, pages.of_scores)


@gluon.jit
def wait_for_copies(pending: gl.constexpr):
    """Wait until all threads' copies, except their last `pending` groups, and all their stores are visible to wgmma."""
    cp_async_wait(pending)
    fence_async_shared()
    partition_barrier()


# ---------------------------------------------------------------- Q


@gluon.jit
def load_queries(q, strides, tile, traits: gl.constexpr):
    """Q of TileRows [block_m, block_d]; 0 beyond the tokens and the head dimension."""
    layout: gl.constexpr = copy_layout(traits.block_d, 2, traits.warps)
    row = tile.block * traits.block_m + gl.arange(0, traits.block_m, gl.SliceLayout(1, layout))
    token = row // traits.group
    columns = gl.arange(0, traits.block_d, gl.SliceLayout(0, layout))
    offsets = tile.batch.to(gl.int64) * strides.batch + token.to(gl.int64) * strides.row
    head_q = tile.head * traits.group + row % traits.group
    offsets = offsets + head_q.to(gl.int64) * strides.head
    mask = token_exists(token, tile, traits)[:, None] & (columns < traits.head_dim)[None, :]
    return gl.load(q + offsets[:, None] + columns[None, :], mask=mask, other=0.0)


@gluon.jit
def store_queries(smem, q, k_scale, softmax_params, traits: gl.constexpr):
    """Q to shared memory, with the signs of the scales. Returns SoftmaxScalars."""
    params = softmax_params.scale_log2, softmax_params.softcap
    q, scale_log2, softcap = fold_scale_signs(q, params, k_scale, traits)
    q_scale = 1.0
    if traits.fp8:
        q, q_scale = as_float16(q, traits)
    smem.store(q)
    return SoftmaxScalars(scale_log2, softcap, q_scale)


@gluon.jit
def as_float16(q, traits: gl.constexpr):
    """(q in float16, what each row was divided by), for 8-bit keys: float16 holds all of their values, and converting
    two takes one instruction.

    Division by a power of two brings the largest element of a row to 2^14. bfloat16's 8 bits are then held exactly down
    to 2^-31 of it, and other elements to 2^-39.
    """
    largest = gl.max(gl.abs(q.to(gl.float32)), 1)
    exponent = largest.to(gl.int32, bitcast=True) >> 23
    exponent = gl.where(exponent == 255, 141, gl.maximum(exponent, 15))  # of rows with an infinity or NaN, 0
    q_scale = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    factor = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    q_scale = gl.convert_layout(q_scale, query_layout(traits))
    return (q.to(gl.float32) * factor[:, None]).to(gl.float16), q_scale
