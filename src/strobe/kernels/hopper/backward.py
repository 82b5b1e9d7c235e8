"""Backward attention on Hopper: three kernels, five products, dq summed in float32 memory; backward_walks has what is done with a tile.

    rows_kernel       delta = rowsum(dout * out) - dlse; what the main kernel reads of a row (lse in log2 units, -delta), in whole tiles;
                      zeros for the sum of dq
    backward_kernel   a program keeps a tile of keys and values, and walks the tiles of queries that see it, head by head of its group, or of
                      its part of a group where whole groups would be too few programs or too unlike ones (form.splits)
    convert_dq_kernel dq = scale * its float32 sum, in q's dtype and in rows: the sum is in the order of registers (backward_steps.as_held)
    convert_kernel    so dk and dv where groups are split, from sums in rows

    load_partition    kv_ready once; per tile of queries  q_free[s] -> q_ready[s] (q, lse)     do_free[s] -> do_ready[s] (do, delta)
    mma_partition     two consumers: s = k q^T, dp = v do^T - delta | p | ds = p dp | dv += p do, dq = ds^T k, dk += ds q | dq_free -> dq_ready;
                      of 128 keys each takes half and sums half of dq (ds_ready); of 64 one makes p and dv, the other the rest (slope_ready)
    store_partition   dq_ready -> adds dq to its sum by TMA -> dq_free; at the end kv_done -> writes dk and dv;
                      of a split group: kv_done -> adds dk -> kv_free; kv_done -> adds dv; where form.ordered and halves, two, by turns

    barrier       arrivals                    says
    kv_ready      1 and the bytes of both     k and v have landed               kv_used     2   no product reads k or v any more
    q_ready       1 and the bytes of both     q[s] and lse[s] have landed       q_free      2   both are used up
    do_ready      1 and the bytes of both     do[s] and delta[s] have landed    do_free     2   both are used up; where do's ring is as
                                                                                                deep as q's, q_free says so of all four
    ds_ready[n]   1                           a half of ds stands in memory     its next arrival but one says that it has been read
    slope_ready   1                           the weights stand in memory       slope_free  1   they have been read
    dq_ready[w]   1                           dq's share stands in memory       dq_free[w]  1   it has been read
    kv_done       2                           dk and dv stand in k's and v's place                kv_free  1   dk has been read

A consumer holds everything transposed, keys in rows: p and ds may then be first operands in registers, and what a row has
(lse, delta) is one value a column. A row that sees no key, or is none, has lse +inf: its p is 0. TMA gives zeros beyond the last row
and column and writes nothing there. dk and dv of grouped heads are summed in registers, and of split groups in float32 memory; dq is added in
memory always: in any order, or (form.ordered) key tile by key tile from the last that a tile of queries sees to the first. That is the order in
which programs on the causal diagonal come to it by themselves, each two steps or more after the one before.

Sources: FlashAttention-2 (arXiv 2307.08691), algorithm 2; FlashAttention-3 (arXiv 2407.08608), section 3 and its backward's dq writer.
"""

from ..device.channel import ring, ring_start
from ..device.dialect import (
    fence_async_global,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    reinterpret,
    tma_load,
    tma_reduce_add,
    tma_store_drain,
    tma_store_wait,
)
from ..device.masking import first_row, row_interval, stop_row
from ..device.tiles import find_sequence, keys_of, span_of
from ..device.views import FAR, copy_out, copy_parts, stage_of, tiles_for
from .backward_steps import ROWS, of_do, parts_of, rows_of, tile_of_step, zeros_of
from .backward_walks import walk_gradients, walk_half, walk_weights


@gluon.jit
def keys_of_program(offsets, work, form: gl.constexpr):
    """(queries, keys, part of heads, first key, first row, tiles of queries, number of the first head's first tile) of this program.

    A part is form.members query heads that share a key head.

    queries and keys are (batch entry, start, length) of a sequence; starts are 0 in dense layouts. Causal tiles go by falling cost, in
    sections of heads whose queries fit in L2; others go key by key within a head. Where form.ordered, keys go from the last to the first, so
    that a program waits for earlier ones only.
    """
    BLOCK_M: gl.constexpr = form.tuning.block_m
    BLOCK_N: gl.constexpr = form.tuning.block_n
    sizes, limits, numbers = work
    batch, heads, seqlen_q, seqlen_k, tiles_m, tiles_n, section = sizes
    left, right = limits
    parts = heads // form.members
    tile = gl.program_id(0)
    if form.packed:
        cu_seqlens_q, cu_seqlens_k = offsets
        sequence, n_block = find_sequence(cu_seqlens_k, from_end(tile // parts, tiles_n, form), batch, seqlen_k, BLOCK_N)
        k_start, k_length = span_of(cu_seqlens_k, sequence, batch, seqlen_k)
        q_start, q_length = keys_of(cu_seqlens_q, sequence, batch, seqlen_q)
        queries, keys = (tile * 0, q_start, q_length), (tile * 0, k_start, k_length)
        part = tile % parts
        first_tile = q_start // BLOCK_M + sequence  # device.tiles.find_sequence
    else:
        if form.mask.right and not form.mask.left:
            begin = tile // (tiles_n * section) * section
            count = gl.minimum(section, batch * parts - begin)
            within = tile - begin * tiles_n
            n_block = from_end(within // count, tiles_n, form)
            index = begin + within % count
        else:
            n_block = from_end(tile % tiles_n, tiles_n, form)
            index = tile // tiles_n
        entry, part = index // parts, index % parts
        queries, keys = (entry, entry * 0, entry * 0 + seqlen_q), (entry, entry * 0, entry * 0 + seqlen_k)
        first_tile = entry * heads * tiles_m
    n_start = n_block * BLOCK_N
    bounds = (keys[2], left, right)
    m_begin = first_row(n_start, queries[2], bounds, 0, form) // BLOCK_M
    m_stop = stop_row(gl.minimum(n_start + BLOCK_N, keys[2]) - 1, queries[2], bounds, form)
    blocks = gl.where(n_start < keys[2], gl.cdiv(m_stop, BLOCK_M) - m_begin, 0)
    return queries, keys, part, n_start, m_begin * BLOCK_M, gl.maximum(blocks, 0), first_tile


@gluon.jit
def key_head(part, form: gl.constexpr):
    if form.splits > 1:
        return part // form.splits
    else:
        return part


@gluon.jit
def from_end(place, places, form: gl.constexpr):
    if form.ordered:
        return places - 1 - place
    else:
        return place


@gluon.jit
def load_partition(views, offsets, kv, q, do, work, form: gl.constexpr):
    q_views, k_views, v_views, do_views, rows_desc = views
    k_tile, v_tile, sums, kv_ready, kv_done, kv_free, kv_used = kv
    q_smem, lse_smem, q_ready, q_free = q
    do_smem, delta_smem, do_ready, do_free = do
    sizes, limits, numbers = work
    batch, heads, seqlen_q, seqlen_k, tiles_m, tiles_n, section = sizes
    queries, keys, part, n_start, m_first, blocks, first_tile = keys_of_program(offsets, work, form)
    mbarrier.expect(kv_ready.index(0), 2 * form.tuning.block_n * (form.block_d + form.block_dv))
    copy_parts(k_views, keys, key_head(part, form), n_start, kv_ready.index(0), k_tile, form)
    copy_parts(v_views, keys, key_head(part, form), n_start, kv_ready.index(0), v_tile, form)
    at = ring_start(form.tuning.stages)
    do_at = ring_start(form.tuning.stages_do)
    tiles = heads * tiles_m * (1 if form.packed else batch)
    for member in range(form.members):
        head = part * form.members + member
        for i in range(blocks):
            m_start = m_first + tile_of_step(i, blocks, form) * form.tuning.block_m
            tile = first_tile + head * tiles_m + m_start // form.tuning.block_m
            mbarrier.wait(q_free.index(at.stage), at.parity ^ 1)
            mbarrier.expect(q_ready.index(at.stage), form.tuning.block_m * (2 * form.block_d + 4))
            copy_parts(q_views, queries, head, m_start, q_ready.index(at.stage), stage_of(q_smem, at.stage), form)
            tma_load(rows_desc, [tile * form.tuning.block_m], q_ready.index(at.stage), lse_smem.index(at.stage))
            slot = of_do(at, do_at, form)
            if form.tuning.apart:
                mbarrier.wait(do_free.index(slot.stage), slot.parity ^ 1)
            mbarrier.expect(do_ready.index(slot.stage), form.tuning.block_m * (2 * form.block_dv + 4))
            copy_parts(do_views, queries, head, m_start, do_ready.index(slot.stage), stage_of(do_smem, slot.stage), form)
            tma_load(rows_desc, [(tiles + tile) * form.tuning.block_m], do_ready.index(slot.stage), delta_smem.index(slot.stage))
            at = at.next()
            do_at = do_at.next()


@gluon.jit
def mma_partition(w: gl.constexpr, offsets, kv, q, do, dq, handed, work, form: gl.constexpr):
    k_tile, v_tile, sums, kv_ready, kv_done, kv_free, kv_used = kv
    sizes, limits, numbers = work
    queries, keys, part, n_start, m_first, blocks, first_tile = keys_of_program(offsets, work, form)
    row: gl.constexpr = ROWS * w if form.halves else 0
    diagonal = m_first + (keys[2] - queries[2]) - n_start - row  # the consumer's key that its first query has on the diagonal
    seen = (diagonal, keys[2] - n_start - row)
    k_all, v_own = parts_of(k_tile), rows_of(parts_of(v_tile), row)
    channels = (q, do, dq, handed)
    mbarrier.wait(kv_ready.index(0), 0)
    dk = zeros_of(ROWS, form.first_d, form.rest_d)
    dv = zeros_of(ROWS, form.first_dv, form.rest_dv)
    if form.halves:
        dk, dv = walk_half(w, dk, dv, (k_all, v_own), channels, seen, blocks, work, form)
    elif w == 0:
        dv = walk_weights(dv, (k_all, v_own), channels, seen, blocks, work, form)
    else:
        dk = walk_gradients(dk, (k_all, v_own), channels, blocks, form)
    mbarrier.arrive(kv_used.index(0))
    mbarrier.wait(kv_used.index(0), 0)
    if form.splits > 1:  # k and v leave room for the sum of one of them
        if form.has_dk(w):
            keep(rows_of(parts_of(sums), row), dk, 1.0)
        fence_async_shared()
        mbarrier.arrive(kv_done.index(0))
        mbarrier.wait(kv_free.index(0), 0)
        if form.has_dv(w):
            keep(rows_of(parts_of(sums), row), dv, 1.0)
    else:
        if form.has_dv(w):
            keep(v_own, dv, 1.0)
        if form.has_dk(w):
            keep(rows_of(k_all, row), dk, numbers[2])
    fence_async_shared()
    mbarrier.arrive(kv_done.index(0))


@gluon.jit
def keep(parts, sums, factor):
    """The sums times a factor, in the parts' dtype, in their memory."""
    parts[0].store((sums[0] * factor).to(parts[0].dtype))
    if len(sums) == 2:
        parts[1].store((sums[1] * factor).to(parts[1].dtype))


@gluon.jit
def await_turn(turn, n_start, row, lengths, limits, form: gl.constexpr):
    """Wait until the key tiles behind n_start's have added to the tile of dq that begins at `row`; each of them counts `turn` up."""
    bounds = (lengths[1], limits[0], limits[1])
    seen_first, seen_stop = row_interval(row + form.tuning.block_m - 1, lengths[0], lengths[1], bounds, 0, form)
    before = (seen_stop - 1 - n_start) // form.tuning.block_n
    while gl.atomic_add(turn, 0, sem="acquire") != before:
        pass
    fence_async_global()


@gluon.jit
def pass_turn(turn):
    """Let the next one add, once all that was added stands in memory."""
    tma_store_drain()
    fence_async_global()
    partition_barrier()  # one thread has waited for TMA, another publishes
    gl.atomic_add(turn, 1, sem="release")


@gluon.jit
def store_partition(own: gl.constexpr, out, turns, offsets, kv, dq, work, form: gl.constexpr):
    """Every step's dq, or every other step's where there are two of this partition; the first also writes dk and dv."""
    PARTS: gl.constexpr = form.tuning.parts
    SHARES: gl.constexpr = form.shares
    LINES: gl.constexpr = form.dq_lines
    UNITS: gl.constexpr = form.dq_units(0)
    dq_desc, dk_views, dv_views = out
    sizes, limits, numbers = work
    batch, heads, seqlen_q, seqlen_k, tiles_m, tiles_n, section = sizes
    k_tile, v_tile, sums, kv_ready, kv_done, kv_free, kv_used = kv
    dq_smem, dq_ready, dq_free = dq
    queries, keys, part, n_start, m_first, blocks, first_tile = keys_of_program(offsets, work, form)
    at = ring_start(1)
    for step in range(own, form.members * blocks, form.stores):
        head = part * form.members + step // blocks
        m_start = m_first + tile_of_step(step % blocks, blocks, form) * form.tuning.block_m
        tile = first_tile + head * tiles_m + m_start // form.tuning.block_m
        if form.ordered:
            turn = turns + tile
        for piece in gl.static_range(PARTS):
            for share in gl.static_range(SHARES):
                mbarrier.wait(dq_ready.index(own * SHARES + share), at.parity)
            if form.ordered and piece == 0:
                await_turn(turn, n_start, m_start, (queries[2], keys[2]), limits, form)
            for unit in gl.static_range(form.dq_units(piece)):
                tma_reduce_add(dq_desc, [(tile * form.dq_units() + piece * UNITS + unit) * LINES, 0], dq_smem.index(own * UNITS + unit))
            tma_store_wait(0)
            for share in gl.static_range(SHARES):
                mbarrier.arrive(dq_free.index(own * SHARES + share))
            at = at.next()
        if form.ordered:
            pass_turn(turn)
    if own == 0:
        mbarrier.wait(kv_done.index(0), 0)
        if form.splits > 1:
            add_parts(dk_views, keys, key_head(part, form), n_start, sums, form)
            tma_store_wait(0)
            mbarrier.arrive(kv_free.index(0))
            mbarrier.wait(kv_done.index(0), 1)
            add_parts(dv_views, keys, key_head(part, form), n_start, sums, form)
        else:
            write_parts(dv_views, keys, part, n_start, v_tile, form)
            write_parts(dk_views, keys, part, n_start, k_tile, form)
        tma_store_wait(0)


@gluon.jit
def add_out(desc, place, head, row, column: gl.constexpr, smem, form: gl.constexpr):
    """`copy_out` that adds to what is there."""
    entry, start, length = place
    if form.packed:
        tma_reduce_add(desc, [FAR, start + length, head, FAR - length + row, column], smem)
    else:
        tma_reduce_add(desc, [entry, head, row, column], smem)


@gluon.jit
def add_parts(views, place, head, row, tile, form: gl.constexpr):
    add_out(views[0], place, head, row, 0, tile[0], form)
    if len(tile) == 2:
        add_out(views[1], place, head, row, tile[0].shape[-1], tile[1], form)


@gluon.jit
def write_parts(views, place, head, row, tile, form: gl.constexpr):
    copy_out(views[0], place, head, row, 0, tile[0], form)
    if len(tile) == 2:
        copy_out(views[1], place, head, row, tile[0].shape[-1], tile[1], form)


@gluon.jit
def as_sums(both, views):
    """The memory of two tiles as that of one tile of float32 sums, part by part."""
    first = reinterpret(both[0], gl.float32, views[0].block_shape, views[0].layout)
    if len(both) == 2:
        return (first, reinterpret(both[1], gl.float32, views[1].block_shape, views[1].layout))
    else:
        return (first,)


@gluon.jit
def backward_kernel(q_desc, k_desc, v_desc, do_desc, rows_desc, dk_desc, dv_desc, dq_desc, q_rest, k_rest, v_rest, do_rest, dk_rest, dv_rest, turns,
                    offsets, work, form: gl.constexpr):  # fmt: skip
    """Descriptors as launch.descriptor makes them, of a tile's first columns and of the rest (None where there is none), rows_desc of the rows'
    numbers, dq_desc of dq's sum, as are dk's and dv's where groups are split; turns: how many key tiles have added
    to each tile of dq, or None; offsets (cu_seqlens_q, cu_seqlens_k) or Nones; work: sizes (B or sequences, H_q, S_q or T_q, S_k or T_k, tiles of
    rows and of keys a head, heads in a section), limits (left, right), numbers (scale_log2, softcap, scale)."""
    STAGES: gl.constexpr = form.tuning.stages
    STAGES_DO: gl.constexpr = form.tuning.stages_do
    BLOCK_M: gl.constexpr = form.tuning.block_m
    dtype: gl.constexpr = q_desc.dtype
    q_views, k_views, v_views, do_views = (q_desc, q_rest), (k_desc, k_rest), (v_desc, v_rest), (do_desc, do_rest)
    dk_views, dv_views = (dk_desc, dk_rest), (dv_desc, dv_rest)
    if form.splits > 1:
        both = tiles_for(2, k_views, form.rest_d)
        k_tile, v_tile = stage_of(both, 0), stage_of(both, 1)
        sums = as_sums(both, dk_views)
    else:
        k_tile, v_tile = stage_of(tiles_for(1, k_views, form.rest_d), 0), stage_of(tiles_for(1, v_views, form.rest_dv), 0)
        sums = k_tile
    q_smem = tiles_for(STAGES, q_views, form.rest_d)
    do_smem = tiles_for(STAGES_DO, do_views, form.rest_dv)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], rows_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES_DO, BLOCK_M], rows_desc.layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [form.stores * form.dq_units(0), form.dq_lines, 256], dq_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
    if form.halves:
        handed = (gl.allocate_shared_memory(dtype, [4, ROWS, BLOCK_M], ds_layout), ring(4, 1))
    else:
        slope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], gl.float32)
        slope_smem = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK_M], slope_layout)
        handed = (gl.allocate_shared_memory(dtype, [ROWS, BLOCK_M], ds_layout), slope_smem, ring(1, 1), ring(1, 1))
    kv_done = ring(1, 2)
    kv_free = kv_done
    if form.splits > 1:
        kv_free = ring(1, 1)
    kv = (k_tile, v_tile, sums, ring(1, 1), kv_done, kv_free, ring(1, 2))
    q = (q_smem, lse_smem, ring(STAGES, 1), ring(STAGES, 2))
    do_free = q[3]
    if form.tuning.apart:
        do_free = ring(STAGES_DO, 2)
    do = (do_smem, delta_smem, ring(STAGES_DO, 1), do_free)
    dq = (dq_smem, ring(form.stores * form.shares, 1), ring(form.stores * form.shares, 1))
    views = (q_views, k_views, v_views, do_views, rows_desc)
    out = (dq_desc, dk_views, dv_views)
    consumer_registers: gl.constexpr = 240 if form.halves else 248
    if form.stores == 1:
        gl.warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), offsets, kv, q, do, dq, handed, work, form)),
                (mma_partition, (gl.constexpr(1), offsets, kv, q, do, dq, handed, work, form)),
                (load_partition, (views, offsets, kv, q, do, work, form)),
                (store_partition, (gl.constexpr(0), out, turns, offsets, kv, dq, work, form)),
            ],
            [4, 1, 1],
            [consumer_registers, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), offsets, kv, q, do, dq, handed, work, form)),
                (mma_partition, (gl.constexpr(1), offsets, kv, q, do, dq, handed, work, form)),
                (load_partition, (views, offsets, kv, q, do, work, form)),
                (store_partition, (gl.constexpr(0), out, turns, offsets, kv, dq, work, form)),
                (store_partition, (gl.constexpr(1), out, turns, offsets, kv, dq, work, form)),
            ],
            [4, 1, 1, 1],
            [consumer_registers, 24, 24, 24],
        )
