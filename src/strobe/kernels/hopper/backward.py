"""Backward attention on Hopper: three kernels, five products, dq summed in float32. backward_split_keys and backward_split_products do the work
of a tile of queries, backward_store writes what leaves a program.

    rows_kernel       delta = rowsum(dout * out) - dlse; what the main kernel reads of a row (lse in log2 units, -delta), in whole tiles;
                      zeros for the counter of tiles, turns at dq, and its sum: unless the first tile of keys stores (form.first_stores), and with
                      form.clears for the first section of heads alone
    backward_kernel   a program takes tiles of keys and values from the counter; for each it walks the tiles of queries that see it, head by head of
                      its group, or of its part of a group where whole ones would be too few or too unlike (form.splits)
    convert_dq_kernel dq = scale * its float32 sum, in q's dtype and in rows: the sum is in the order of registers (backward_mainloop.as_held); with
                      form.finishes not of what the main kernel has written, with form.collects of nothing
    convert_kernel    so dk and dv where groups are split, from sums in rows

    load_partition    finds the tile of keys and tells the others; per tile of queries  q_free[s] -> q_ready[s] (q, lse)
                      do_free[s] -> do_ready[s] (do, delta); before the first of them, of one place behind it, kv_free[i] -> kv_ready[i]
    mma_partition     two consumers: s = k q^T, dp = v do^T - delta | p | ds = p dp | dv += p do, dq = ds^T k, dk += ds q | dq_free -> dq_ready;
                      by halves of 128 keys each takes 64 and sums half of dq (ds_ready); by roles one makes p, ds and dv of 64 or 128, the other
                      dq and dk (ds_ready); at the end kv_used; dq_free -> dv, then dk, stand where dq did -> dq_ready, or (of 128 keys by roles,
                      and of a split group) where k and v did -> sums_done
    store_partition   with form.clears first clears a share of what later tiles of keys add to; dq_ready -> adds dq to its sum, and writes dv and
                      dk -> dq_free; with form.collects dq_free says that a place is given, with the sum of all others where dq is whole with it

    barrier       arrivals                    says
    told          1                           the board holds a tile of keys    told_free   all readers  they have read it
    kv_ready[i]   1 and the bytes of both     k[i] and v[i] have landed         kv_used[i]  2   no product reads them any more: kv_free, unless
                                                                                                gradients leave in their place
    q_ready       1 and the bytes of both     q[s] and lse[s] have landed       q_free      2   both are used up; tuning.each: 256, and ds_free 128
    do_ready      1 and the bytes of both     do[s] and delta[s] have landed    do_free     1   both are used up; by halves q_free says so of
                                                                                                all four
    ds_ready[n]   1; form.bells: 128          ds, or a half, stands in memory   by halves its next arrival but one says that it has been read, by
                                                                                roles its step's q_free
    ds_free[n]    1                           with form.lags: the other has multiplied it
    dq_ready[i]   1; form.dq_bells: 128       a share of dq, by roles a unit,   dq_free[i]  1   they have been read
                                              or rows of dv or dk, stand in memory
    sums_done     2                           the sum of dk, or of dv, or both  sums_free   1   dk's has been read    kv_free  1  all have
                                              stand in k's and v's place

A program's next keys and queries are loaded while its gradients leave: a tile of keys costs 2.5 us (d64) and 2.9 us (d128) besides its steps,
for 4.4 and 5.9 of a program a tile (H200).

A consumer holds everything transposed, keys in rows: p and ds may then be first operands in registers, and what a row has
(lse, delta) is one value a column. A row that sees no key, or is none, has lse +inf: its p is 0. TMA gives zeros beyond the last row
and column and writes nothing there. dk and dv of grouped heads are summed in registers, and of split groups in float32 memory; dq is added in
memory always.

Sources: FlashAttention-2 (arXiv 2307.08691), algorithm 2; FlashAttention-3 (arXiv 2407.08608), section 3 and its backward's dq writer.
"""

from ..device.dialect import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    warp_specialize,
    zero_of_turn,
)
from ..device.per_thread_mbarrier import bells, say
from ..device.pipeline import Position, ring, ring_start, rings
from ..device.tile_scheduler import is_told, tell
from ..device.tma import copy_parts, stage_of, tiles_for
from .backward_key_ranges import has_others, keys_of_run, mend, places_of
from .backward_mainloop import (
    ROWS,
    THREADS,
    delta_of,
    dq_position,
    free_parity,
    in_place_of_dq,
    of_do,
    parts_at,
    parts_of,
    rows_of,
    zeros_of,
)
from .backward_scheduler import (
    BACK,
    WORDS,
    head_and_tile,
    key_head,
    keys_of_number,
    next_number,
    seen_and_walk,
    walk_of,
)
from .backward_split_keys import walk_half
from .backward_split_products import walk_gradients, walk_weights
from .backward_store import store_partition


@gluon.jit
def load_partition(views, offsets, board, kv, q, do, mended, work, form: gl.constexpr):
    q_views, k_views, v_views, do_views, rows_desc = views
    k_tile, v_tile, sums, kv_ready, kv_used, kv_free, sums_done, sums_free = kv
    tiles, sizes, limits, numbers, counter = work
    told_at = ring_start(1)
    kv_at = ring_start(form.key_places)
    at = ring_start(form.tuning.stages)
    do_at = ring_start(form.tuning.stages_do)
    number = next_number(counter)
    row = number * 0
    while number < tiles:
        if form.spans:
            exists, row, tile = keys_of_run(number, row, offsets, work, form)
        else:
            exists, tile = keys_of_number(number, offsets, work, form)
        if exists:
            tell(board, told_at, tile)
            told_at = told_at.next()
            part, n_start, m_first, blocks, first_tile = tile[1], tile[2], tile[3], tile[4], tile[5]
            if form.spans:
                queries, gradients, keys, values = places_of(tile, sizes)
            else:
                queries, keys = (tile[0], tile[6], tile[7]), (tile[0], tile[8], tile[9])
                gradients, values = queries, keys
            walk = walk_of(blocks, tile[BACK] if form.last_sections else blocks, form)
            steps = (part, m_first, walk, first_tile, sizes[1] * sizes[4] * (1 if form.packed else sizes[0]))
            total = form.members * blocks
            if form.key_places == 2:
                load_keys((k_views, v_views), (keys, values), part, n_start, kv, kv_at, form)
            for step in range(gl.minimum(total, 1)):
                load_step(step, steps, views, (queries, gradients), (tile, offsets, mended), q, do, at, do_at, work, form)
                at = at.next()
                do_at = do_at.next()
            if form.key_places == 1:
                load_keys((k_views, v_views), (keys, values), part, n_start, kv, kv_at, form)
            kv_at = kv_at.next()
            for step in range(1, total):
                load_step(step, steps, views, (queries, gradients), (tile, offsets, mended), q, do, at, do_at, work, form)
                at = at.next()
                do_at = do_at.next()
        if form.spans:
            if row == 0:
                number = next_number(counter)
        else:
            number = next_number(counter)
    tell(board, told_at, (number, number, number, number, number * 0 - 1))


@gluon.jit
def load_keys(views, places, part, n_start, kv, at, form: gl.constexpr):
    """A tile's k and v, once their place is free: of two places that is long before, of one behind the last step, and q's is free sooner."""
    k_tile, v_tile, sums, kv_ready, kv_used, kv_free, sums_done, sums_free = kv
    ready = kv_ready.index(at.stage)
    mbarrier.wait(kv_free.index(at.stage), at.parity ^ 1)
    mbarrier.expect(ready, 2 * form.tuning.block_n * (form.block_d + form.block_dv))
    copy_parts(views[0], places[0], key_head(part, form), n_start, ready, stage_of(k_tile, at.stage), form)
    copy_parts(views[1], places[1], key_head(part, form), n_start, ready, stage_of(v_tile, v_slot(at, form)), form)


@gluon.jit
def load_step(step, steps, views, places, of_keys, q, do, at, do_at, work, form: gl.constexpr):
    """A tile of queries and what belongs to it, once its places are free; of documents, once rows of others are made none of its own."""
    part, m_first, walk, first_tile, all_rows = steps
    head, block = head_and_tile(part, step, walk, form)
    m_start = m_first + block * form.tuning.block_m
    number = first_tile + head * work[1][4] + m_start // form.tuning.block_m
    slot = of_do(at, do_at, form)
    q_ready, do_ready = q[2].index(at.stage), do[2].index(slot.stage)
    where = (head, m_start, number, all_rows)
    if form.mask.documents:
        tile, offsets, mended = of_keys
        landed = mended.index(at.stage)
        if has_others(block, (tile[12], tile[13])):
            load_rows(where, views, places, q, do, at, slot, landed, landed, form)
            mbarrier.wait(landed, at.parity)
            lse, delta = q[1].index(at.stage), delta_of(do, slot.stage, form)
            mend(stage_of(q[0], at.stage), stage_of(do[0], slot.stage), lse, delta, m_start, tile, offsets[2], form)
            mbarrier.arrive(q_ready)
            mbarrier.arrive(do_ready)
        else:
            mbarrier.arrive(landed, count=2)
            load_rows(where, views, places, q, do, at, slot, q_ready, do_ready, form)
    else:
        load_rows(where, views, places, q, do, at, slot, q_ready, do_ready, form)


@gluon.jit
def load_rows(where, views, places, q, do, at, slot, q_ready, do_ready, form: gl.constexpr):
    """q and lse, do and delta of a tile of queries into their places; two barriers, or one for both, say when they have landed."""
    q_views, k_views, v_views, do_views, rows_desc = views
    q_smem, lse_smem, told_ready, q_free = q
    do_smem, delta_smem, told_do_ready, do_free = do
    head, m_start, number, all_rows = where
    mbarrier.wait(q_free.index(at.stage), at.parity ^ 1)
    mbarrier.expect(q_ready, form.tuning.block_m * (2 * form.block_d + 4))
    copy_parts(q_views, places[0], head, m_start, q_ready, stage_of(q_smem, at.stage), form)
    tma_load(rows_desc, [number * form.tuning.block_m], q_ready, lse_smem.index(at.stage))
    if not form.halves:
        mbarrier.wait(do_free.index(slot.stage), slot.parity ^ 1)
    mbarrier.expect(do_ready, form.tuning.block_m * (2 * form.block_dv + 4))
    copy_parts(do_views, places[1], head, m_start, do_ready, stage_of(do_smem, slot.stage), form)
    tma_load(rows_desc, [(all_rows + number) * form.tuning.block_m], do_ready, delta_of(do, slot.stage, form))


@gluon.jit
def mma_partition(w: gl.constexpr, gradients, board, kv, q, do, dq, handed, work, form: gl.constexpr):
    words, told, told_free = board
    at = (ring_start(form.tuning.stages), ring_start(form.tuning.stages_do), ring_start(2 if form.halves else 1))
    kv_at = ring_start(form.key_places)
    while is_told(words, told, board_at(kv_at, form)):
        at = take_tile(w, gradients, board, kv, q, do, dq, handed, at, kv_at, work, form)
        kv_at = kv_at.next()


@gluon.jit
def board_at(kv_at, form: gl.constexpr):
    """Where the board stands: its parity is that of all that a tile of keys has one of."""
    if form.key_places == 2:
        return Position(kv_at.stage * 0, kv_at.stage, 1)
    else:
        return kv_at


@gluon.jit
def take_tile(w: gl.constexpr, gradients, board, kv, q, do, dq, handed, at, kv_at, work, form: gl.constexpr):
    """All queries of a tile of keys, and its gradients; where the rings (q's, do's, what is handed over once a step) stand then."""
    k_tile, v_tile, sums, kv_ready, kv_used, kv_free, sums_done, sums_free = kv
    words, told, told_free = board
    row: gl.constexpr = ROWS * w if form.halves else 0
    q_at, do_at, handed_at = at
    lap = board_at(kv_at, form).parity
    seen, walk = seen_and_walk(words, row, work[2], form)
    mbarrier.arrive(told_free.index(0))
    keys = ((k_tile, kv_at.stage), (v_tile, v_slot(kv_at, form)))
    channels = (q, do, dq, handed)
    dk = zeros_of(ROWS, form.first_d, form.rest_d)
    dv = zeros_of(ROWS, form.first_dv, form.rest_dv)
    if form.two_tiles:
        dk, dv = (dk, dk), (dv, dv)
    mbarrier.wait(kv_ready.index(kv_at.stage), kv_at.parity)
    if form.halves:
        dk, dv, q_at, handed_at = walk_half(w, dk, dv, keys, channels, (q_at, handed_at, lap), seen, walk, work, form)
    elif w == 0:
        dv, q_at, do_at = walk_weights(dv, keys, channels, (q_at, do_at), seen, walk, work, form)
    else:
        dk, q_at, handed_at = walk_gradients(dk, keys[0], channels, (q_at, handed_at), walk[0], form)
    if form.two_tiles:
        leave_in_place(w, dk, dv, kv, work[3][2])
    else:
        leave(w, dk, dv, gradients, kv, kv_at, dq, handed_at, lap, work[3][2], form)
    return (q_at, do_at, handed_at)


@gluon.jit
def leave(w: gl.constexpr, dk, dv, gradients, kv, kv_at, dq, handed_at, lap, scale, form: gl.constexpr):
    """dk and dv to the store partition, by dq's channel, or where groups are split in the place of k and v."""
    k_tile, v_tile, sums, kv_ready, kv_used, kv_free, sums_done, sums_free = kv
    row: gl.constexpr = ROWS * w if form.halves else 0
    place = dq_position(handed_at, lap, form)
    if not form.halves:
        if w == 1:  # now, since the place of the second gradient is waited for next
            await_place(dq, place, form)
    mbarrier.arrive(kv_used.index(kv_at.stage))
    if form.splits > 1 or not form.halves:  # else dq's place says as much: the other's share of the last step has left it
        mbarrier.wait(kv_used.index(0), lap)
    if form.splits > 1:
        keep_sums(w, dk, dv, sums, (sums_done, sums_free), row, lap, form)
    else:
        if form.halves:
            await_place(dq, place, form)
        if form.has_dv(w):
            hand_gradient(w, dv, 1.0, gradients[1], row, dq, place, form)
        if form.has_dk(w):
            await_place(dq, place.next(), form)
            hand_gradient(w, dk, scale, gradients[0], row, dq, place.next(), form)


@gluon.jit
def leave_in_place(w: gl.constexpr, dk, dv, kv, scale):
    """dv and dk of two tiles of keys to the store partition, in the place of v and k: v only this consumer has read, and k the other no longer reads,
    whose last ds this one has taken."""
    k_tile, v_tile, sums, kv_ready, kv_used, kv_free, sums_done, sums_free = kv
    place = parts_at(v_tile if w == 0 else k_tile, zero_of_turn())
    left, factor = (dv, 1.0) if w == 0 else (dk, scale)
    keep(rows_of(place, 0), left[0], factor)
    keep(rows_of(place, ROWS), left[1], factor)
    fence_async_shared()
    mbarrier.arrive(sums_done.index(0))


@gluon.jit
def keep_sums(w: gl.constexpr, dk, dv, sums, channel, row: gl.constexpr, lap, form: gl.constexpr):
    """A split group's dk, then dv, to the store partition: k and v leave room for the sum of one of them."""
    sums_done, sums_free = channel
    if form.has_dk(w):
        keep(rows_of(parts_of(sums), row), dk, 1.0)
    fence_async_shared()
    mbarrier.arrive(sums_done.index(0))
    mbarrier.wait(sums_free.index(0), lap)
    if form.has_dv(w):
        keep(rows_of(parts_of(sums), row), dv, 1.0)
    fence_async_shared()
    mbarrier.arrive(sums_done.index(0))


@gluon.jit
def hand_gradient(w: gl.constexpr, sums, factor, views, row: gl.constexpr, dq, at, form: gl.constexpr):
    """This consumer's rows of dk or dv to the store partition, in dq's place."""
    PLACES: gl.constexpr = form.places
    dq_smem, dq_ready, dq_free, of_rows = dq
    tile = in_place_of_dq(dq_smem, at.stage + zero_of_turn(), views, form)
    keep(rows_of(parts_of(tile), row), sums, factor)
    fence_async_shared()
    for i in gl.static_range(PLACES):
        if i == w or not form.halves:
            say(dq_ready, at.stage * PLACES + i, form.dq_bells)


@gluon.jit
def await_place(dq, at, form: gl.constexpr):
    """Wait until all of a tile's place in dq's channel is free."""
    PLACES: gl.constexpr = form.places
    dq_smem, dq_ready, dq_free, of_rows = dq
    for i in gl.static_range(PLACES):
        mbarrier.wait(dq_free.index(at.stage * PLACES + i), free_parity(at, form))


@gluon.jit
def keep(parts, sums, factor):
    """The sums times a factor, in the parts' dtype, in their memory."""
    parts[0].store((sums[0] * factor).to(parts[0].dtype))
    if len(sums) == 2:
        parts[1].store((sums[1] * factor).to(parts[1].dtype))


@gluon.jit
def v_slot(kv_at, form: gl.constexpr):
    """Where a tile's v stands: with its k, or where a split group's sums take the place of both, these are one ring of two."""
    if form.splits > 1:
        return 1
    else:
        return kv_at.stage


@gluon.jit
def as_sums(both, views):
    """The memory of two tiles as that of one tile of float32 sums, part by part."""
    first = reinterpret(both[0], gl.float32, views[0].block_shape, views[0].layout)
    if len(both) == 2:
        return (first, reinterpret(both[1], gl.float32, views[1].block_shape, views[1].layout))
    else:
        return (first,)


@gluon.jit
def backward_kernel(q_desc, k_desc, v_desc, do_desc, rows_desc, dk_desc, dv_desc, dq_desc, q_rest, k_rest, v_rest, do_rest, dk_rest, dv_rest,
                    rows_of_dq, dq_sum, turns, counter, offsets, work, form: gl.constexpr):  # fmt: skip
    """Descriptors as tma.descriptor makes them, of a tile's first columns and of the rest (None where there is none), rows_desc of the rows'
    numbers, dq_desc of dq's sum, as are dk's and dv's where groups are split; rows_of_dq of dq itself with form.finishes, else None; turns: how many
    key tiles have added to each tile of dq, or with form.clears cleared their share of dq_sum, dq's sum, for each part of heads, or None;
    counter of tiles of keys taken; offsets (cu_seqlens_q, cu_seqlens_k) or Nones, for spans those of `device.key_ranges`; work: tiles of keys in all,
    sizes (B or sequences, H_q, S_q or T_q, S_k or T_k, tiles of rows and of keys a head, heads in a section, for spans by how many rows the
    entries of q, dout, k, v, dk and dv stand apart), limits (left, right), numbers (scale_log2, softcap, scale)."""
    STAGES: gl.constexpr = form.tuning.stages
    STAGES_DO: gl.constexpr = form.tuning.stages_do
    BLOCK_M: gl.constexpr = form.tuning.block_m
    CONSUMER: gl.constexpr = form.registers[0]
    ONE_WARP: gl.constexpr = form.registers[1]
    dtype: gl.constexpr = q_desc.dtype
    tiles, sizes, limits, numbers = work
    work = (tiles, sizes, limits, numbers, counter)
    q_views, k_views, v_views, do_views = (q_desc, q_rest), (k_desc, k_rest), (v_desc, v_rest), (do_desc, do_rest)
    dk_views, dv_views = (dk_desc, dk_rest), (dv_desc, dv_rest)
    if form.splits > 1:
        k_tile = tiles_for(2, k_views, form.rest_d, form.slim)
        v_tile, sums = k_tile, as_sums(k_tile, dk_views)
    else:
        k_tile = tiles_for(form.key_places, k_views, form.rest_d, form.slim)
        v_tile = tiles_for(form.key_places, v_views, form.rest_dv, form.slim)
        sums = k_tile
    q_smem = tiles_for(STAGES, q_views, form.rest_d, form.slim)
    do_smem = tiles_for(STAGES_DO, do_views, form.rest_dv, form.slim)
    if form.slim:  # each allocation begins at a KiB
        lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES + STAGES_DO, BLOCK_M], rows_desc.layout)
        delta_smem = lse_smem
    else:
        lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], rows_desc.layout)
        delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES_DO, BLOCK_M], rows_desc.layout)
    dq_shape: gl.constexpr = [form.stores * form.dq_slot, form.dq_lines, 256]
    held = gl.allocate_shared_memory(gl.float32, dq_shape, gl.NVMMASharedLayout(128, 32, 2))  # where gradients, which are swizzled, may begin
    dq_smem = reinterpret(held, gl.float32, dq_shape, dq_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
    ds_shape: gl.constexpr = [form.ds_places, ROWS if form.halves else form.tuning.block_n, BLOCK_M]
    ds_smem = gl.allocate_shared_memory(dtype, ds_shape, ds_layout)
    if form.bells:
        ds_ready = bells(form.ds_places + form.stores * form.places * form.dq_bells, THREADS)
    else:
        ds_ready = ring(form.ds_places, 1)
    ds_free = ds_smem
    if form.lags:
        ds_free = ring(4, form.tuning.arrivals)
        for i in gl.static_range(2, 4):  # what the first step finds, and fences before its products
            ds_smem.index(i).store(gl.full([ROWS, BLOCK_M], 0.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    handed = (ds_smem, ds_ready, ds_free)  # by roles ds is free with its step's q
    words = gl.allocate_shared_memory(gl.int32, [1, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told, told_free, kv_used, kv_free, sums_done, sums_free, kv_ready = rings(gl.constexpr(form.rings), form.slim)
    board = (words, told, told_free)
    if form.splits == 1 and not form.two_tiles:
        kv_free = kv_used
    kv = (k_tile, v_tile, sums, kv_ready, kv_used, kv_free, sums_done, sums_free)
    q_ready, q_free = ring(STAGES, 1), ring(STAGES, 2 * form.tuning.arrivals)
    q = (q_smem, lse_smem, q_ready, q_free)
    do_free = q_free
    if not form.halves:
        do_free = ring(STAGES_DO, 1)
    do_ready, dq_free = rings(gl.constexpr(((STAGES_DO, 1), (form.stores * form.places, 1))), not form.halves)  # by roles one waits for each
    do = (do_smem, delta_smem, do_ready, do_free)
    mended = q_ready
    if form.mask.documents:
        mended = ring(STAGES, 2)
    if form.dq_bells:
        dq_ready = ds_ready + 8 * form.ds_places
    else:
        dq_ready = ring(form.stores * form.places, 1)
    dq = (dq_smem, dq_ready, dq_free, (rows_of_dq, numbers[2]))
    views = (q_views, k_views, v_views, do_views, rows_desc)
    gradients = (dk_views, dv_views)
    out = (dq_desc, dk_views, dv_views)
    if form.stores == 1:
        warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), gradients, board, kv, q, do, dq, handed, work, form)),
                (mma_partition, (gl.constexpr(1), gradients, board, kv, q, do, dq, handed, work, form)),
                (load_partition, (views, offsets, board, kv, q, do, mended, work, form)),
                (store_partition, (gl.constexpr(0), out, turns, dq_sum, board, kv, dq, work, form)),
            ],
            [4, 1, 1],
            [CONSUMER, ONE_WARP, ONE_WARP],
        )
    else:
        warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), gradients, board, kv, q, do, dq, handed, work, form)),
                (mma_partition, (gl.constexpr(1), gradients, board, kv, q, do, dq, handed, work, form)),
                (load_partition, (views, offsets, board, kv, q, do, mended, work, form)),
                (store_partition, (gl.constexpr(0), out, turns, dq_sum, board, kv, dq, work, form)),
                (store_partition, (gl.constexpr(1), out, turns, dq_sum, board, kv, dq, work, form)),
            ],
            [4, 1, 1, 1],
            [CONSUMER, ONE_WARP, ONE_WARP, ONE_WARP],
        )
