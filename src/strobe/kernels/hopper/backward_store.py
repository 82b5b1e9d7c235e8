"""The store partition of the Hopper backward: what leaves a program, by TMA.

    store_partition   dq_ready -> adds dq to its sum, at the end writes dv, then dk -> dq_free; where form.stores is 2, two, by turns;
                      with form.collects: dq_free with what others have added, where dq is whole with it -> dq_ready -> writes dq;
                      of a split group: sums_done -> adds dk -> sums_free; sums_done -> adds dv -> kv_free
                      of two tiles of keys: sums_done -> writes dv and dk -> kv_free

Tiles of keys add to a tile of dq in any order behind the first, or (form.ordered) one by one from the last that a tile of queries sees to the first:
the order in which programs on the causal diagonal come to it by themselves, each two steps or more after the one before. In a last section of causal
heads it is from the first to the last (backward_scheduler.dense_keys).
"""

from ..device.dialect import (
    fence_async_global,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_drain,
    tma_store_wait,
    zero_of_turn,
)
from ..device.mask import row_interval
from ..device.per_thread_mbarrier import await_said
from ..device.pipeline import ring_start
from ..device.tile_scheduler import is_told
from ..device.tma import FAR, copy_out, stage_of
from .backward_key_ranges import places_written
from .backward_mainloop import in_place_of_dq, share_in_place
from .backward_scheduler import WHOLE, head_and_tile, key_head, read_place, rows_finished


@gluon.jit
def store_partition(own: gl.constexpr, out, turns, dq_sum, board, kv, dq, work, form: gl.constexpr):
    """Every tile that dq's channel holds, or every other one where there are two of this partition: dq of each step, then dv and dk."""
    words, told, told_free = board
    at = ring_start(1)  # of the tiles that are its own
    told_at = ring_start(1)
    passed = gl.to_tensor(0)  # the channel's tiles, of all tiles of keys before
    owed = passed - 1  # with form.collects the tile of dq that it has added to, and not counted yet
    while is_told(words, told, told_at):
        steps, n_start, lengths, keys = read_place(words, form)
        values, whole = keys, keys
        if form.finishes:
            whole = rows_finished(words, work[2], form)
        if form.spans:
            keys, values = places_written(keys, work[1])
        part = steps[0]
        mbarrier.arrive(told_free.index(0))  # now: the next tile's loads would wait for this one's last step
        if form.clears:
            clear_ahead(turns, dq_sum, keys[0], part, n_start, work[1], form)
        total = form.members * steps[2][0]
        first = (own + passed) % form.stores
        for step in range(first, total, form.stores):
            if form.collects:
                at, owed = collect_step(own, step, steps, n_start, lengths, (whole, owed), out[0], turns, dq, at, work, form)
            else:
                at = add_step(own, step, steps, n_start, lengths, whole, out[0], turns, dq, at, work, form)
        if form.collects:
            give_place(own, dq, form)
            owed = count_owed(turns, owed)
        if form.two_tiles:
            write_in_place((out[1], out[2]), ((keys, part, n_start), (values, part, n_start)), kv, told_at, form)
        elif form.splits > 1:
            add_sums(out[1], out[2], (keys, values), key_head(part, form), n_start, kv, form)
        elif form.stores == 2:
            if (first + total) % 2 == 0:
                at = write_gradient(own, out[2], (values, part, n_start), dq, at, form)
            else:
                at = write_gradient(own, out[1], (keys, part, n_start), dq, at, form)
        else:
            at = write_gradient(own, out[2], (values, part, n_start), dq, at, form)
            at = write_gradient(own, out[1], (keys, part, n_start), dq, at, form)
        passed = (passed + total) % form.stores
        told_at = told_at.next()


@gluon.jit
def clear_ahead(turns, dq_sum, entry, part, n_start, sizes, form: gl.constexpr):
    """Clear this tile of keys' share of the sum of dq that a part of heads a section ahead adds to, and wait until that of its own is cleared, by
    earlier tiles and by what came before this kernel: as `turns` counts. Zeros written there had kept memory busy for 30 us of d64 causal 4k's
    1,450: 1.03 of the speed, 8k 1.02, d128 causal 8k 1.02, d96 1.03, GQA 2k 1.02 (H100)."""
    batch, heads, tiles_m, tiles_n, section = sizes[0], sizes[1], sizes[4], sizes[5], sizes[6]
    if form.masks:  # else ptxas keeps what is reckoned of the number of parts, and has no register for addresses of a consumer's step: 10 more of 382
        heads = heads + zero_of_turn()
    parts = heads // form.members
    own = entry * parts + part
    later = own + section
    if later < batch * parts:
        lines = form.members * tiles_m * form.dq_units() * form.dq_lines
        share = gl.cdiv(lines, tiles_n)
        begin = n_start // form.tuning.block_n * share
        numbers = gl.arange(0, 256, gl.BlockedLayout([4], [32], [1], [0]))
        for line in range(begin, gl.minimum(begin + share, lines)):
            gl.store(dq_sum + (later.to(gl.int64) * lines + line) * 256 + numbers, gl.zeros_like(numbers).to(gl.float32))
        partition_barrier()  # one thread publishes what all have written
        gl.atomic_add(turns + later, 1, sem="release")
    while gl.atomic_add(turns + own, 0, sem="acquire") != tiles_n:
        pass
    fence_async_global()


@gluon.jit
def add_step(own: gl.constexpr, step, steps, n_start, lengths, whole, dq_desc, turns, dq, at, work, form: gl.constexpr):
    """Add a step's dq to its sum, or write it where it is whole; the channel's next place."""
    part, m_first, walk, first_tile = steps
    head, block = head_and_tile(part, step, walk, form)
    m_start = m_first + block * form.tuning.block_m
    tile = first_tile + head * work[1][4] + m_start // form.tuning.block_m
    if form.finishes:
        if block < whole[0]:
            write_rows(own, (whole[1], head, m_start), turns + tile, dq, at, form)
        else:
            add_tile(own, tile, n_start, m_start, walk[1], lengths, dq_desc, turns, dq, at, work, form)
        return at.next()
    else:
        return add_tile(own, tile, n_start, m_start, walk[1], lengths, dq_desc, turns, dq, at, work, form)


@gluon.jit
def collect_step(own: gl.constexpr, step, steps, n_start, lengths, so_far, dq_desc, turns, dq, at, work, form: gl.constexpr):
    """`add_step` of form.collects: (the channel's next place, the tile that is to be counted now).

    A place is given when it is known what comes into it: where dq is whole but for what others have added, that is loaded into it first. That one's
    own share stands in memory is counted once the next place is given, lest consumers wait for it.
    """
    part, m_first, walk, first_tile = steps
    whole, owed = so_far
    head, block = head_and_tile(part, step, walk, form)
    m_start = m_first + block * form.tuning.block_m
    tile = first_tile + head * work[1][4] + m_start // form.tuning.block_m
    if block < whole[0]:
        if n_start > 0:  # what is owed first: a later tile of keys may wait for it as this one waits for those before
            owed = count_owed(turns, owed)
            load_sum(own, dq_desc, tile, turns, n_start // form.tuning.block_n, dq, form)
        else:
            give_place(own, dq, form)
            owed = count_owed(turns, owed)
        write_rows(own, (whole[1], head, m_start), turns + tile, dq, at, form)
    else:
        give_place(own, dq, form)
        count_owed(turns, owed)
        add_tile(own, tile, n_start, m_start, walk[1], lengths, dq_desc, turns, dq, at, work, form)
        owed = tile
    return at.next(), owed


@gluon.jit
def give_place(own: gl.constexpr, dq, form: gl.constexpr):
    """Let consumers have dq's place."""
    PLACES: gl.constexpr = form.places
    for i in gl.static_range(PLACES):
        mbarrier.arrive(dq[2].index(own * PLACES + i))


@gluon.jit
def load_sum(own: gl.constexpr, dq_desc, tile, turns, others, dq, form: gl.constexpr):
    """Give consumers dq's place with the sum of all others in it, once that stands in memory."""
    PLACES: gl.constexpr = form.places
    while gl.atomic_add(turns + tile, 0, sem="acquire") != others:
        pass
    fence_async_global()
    for i in gl.static_range(PLACES):
        free, unit = dq[2].index(own * PLACES + i), form.share_unit(i)
        mbarrier.expect(free, form.dq_lines * 1024)
        tma_load(dq_desc, [(tile * form.dq_units() + unit) * form.dq_lines, 0], free, dq[0].index(own * form.dq_slot + unit))


@gluon.jit
def count_owed(turns, owed):
    """Count that a share of dq has been added, once it stands in memory: none is owed then."""
    if owed >= 0:
        pass_turn(turns + owed)
    return owed * 0 - 1


@gluon.jit
def write_rows(own: gl.constexpr, place, turn, dq, at, form: gl.constexpr):
    """A tile of dq that is whole, as rows; its turn says so to who makes dq of its sum."""
    queries, head, m_start = place
    view = dq[3][0]
    await_ready(own, dq, at, form)
    for share in gl.static_range(2):
        copy_out(view, queries, head, m_start + form.share_row(share), form.share_column(share), share_in_place(dq[0], own, share, view, form), form)
    set_free(own, dq, form)
    gl.store(turn, WHOLE)


@gluon.jit
def add_tile(own: gl.constexpr, tile, n_start, m_start, back, lengths, dq_desc, turns, dq, at, work, form: gl.constexpr):
    first = False
    if form.first_stores:
        turn = turns + tile
        first = await_turn(turn, n_start, m_start, back, lengths, work[2], form)
    line = tile * form.dq_units() * form.dq_lines
    if form.halves:
        await_ready(own, dq, at, form)
        for unit in gl.static_range(form.dq_units()):
            add_unit(first, dq_desc, line + unit * form.dq_lines, dq[0].index(own * form.dq_slot + unit), form)
        set_free(own, dq, form)
        at = at.next()
    else:
        at = add_units(first, dq_desc, line, dq, at, form)
    if form.ordered:
        pass_turn(turn)
    elif form.first_stores and not form.collects:
        if first:
            pass_turn(turn)
    return at


@gluon.jit
def await_turn(turn, n_start, row, back, lengths, limits, form: gl.constexpr):
    """Whether this tile of keys is the first to add to the tile of dq that begins at `row`: it stores, so that nothing need be cleared before.

    Else wait until that has been done; where form.ordered, until all key tiles behind n_start's have added, or with `back` all before it: each counts
    `turn` up. The first is the last that a row of the tile sees where form.ordered, but with `back`, and else the first: programs have taken that
    sooner.
    """
    bounds = (lengths[1], limits[0], limits[1])
    if form.ordered:
        seen_first, seen_stop = row_interval(row + form.tuning.block_m - 1, lengths[0], lengths[1], bounds, 0, form)
        ahead = seen_stop - 1 - n_start
        if form.last_sections:
            ahead = gl.where(back == 1, n_start, ahead)
        before = ahead // form.tuning.block_n
        while gl.atomic_add(turn, 0, sem="acquire") != before:
            pass
        first = before == 0
    else:
        seen_first, seen_stop = row_interval(row, lengths[0], lengths[1], bounds, 0, form)
        first = seen_first // form.tuning.block_n * form.tuning.block_n == n_start
        if not first:
            while gl.atomic_add(turn, 0, sem="acquire") == 0:
                pass
    fence_async_global()
    return first


@gluon.jit
def pass_turn(turn):
    """Let the next one add, once all that was added stands in memory."""
    tma_store_drain()
    fence_async_global()
    partition_barrier()  # one thread has waited for TMA, another publishes
    gl.atomic_add(turn, 1, sem="release")


@gluon.jit
def add_unit(first, dq_desc, line, unit, form: gl.constexpr):
    if not form.first_stores:
        tma_reduce_add(dq_desc, [line, 0], unit)
    elif first:
        tma_store(dq_desc, [line, 0], unit)
    else:
        tma_reduce_add(dq_desc, [line, 0], unit)


@gluon.jit
def add_units(first, dq_desc, line, dq, at, form: gl.constexpr):
    """`add_step` of 64 keys, whose dq comes unit by unit: a place is free once its unit has been read, while the next is added."""
    PARTS: gl.constexpr = form.tuning.parts
    PLACES: gl.constexpr = form.places
    for part in gl.static_range(PARTS):
        for i in gl.static_range(PLACES):
            await_said(dq[1], i, at.parity, form.dq_bells)
            add_unit(first, dq_desc, line + (part * PLACES + i) * form.dq_lines, dq[0].index(i), form)
            if part + i > 0:
                tma_store_wait(1)
                mbarrier.arrive(dq[2].index((i + PLACES - 1) % PLACES))
        at = at.next()
    tma_store_wait(0)
    mbarrier.arrive(dq[2].index(PLACES - 1))
    return at


@gluon.jit
def write_gradient(own: gl.constexpr, views, place, dq, at, form: gl.constexpr):
    """dk or dv from the channel's next place; the one after it."""
    await_ready(own, dq, at, form)
    write_parts(views, place, in_place_of_dq(dq[0], own, views, form), form)
    set_free(own, dq, form)
    return at.next()


@gluon.jit
def write_parts(views, place, tile, form: gl.constexpr):
    keys, head, n_start = place
    copy_out(views[0], keys, head, n_start, 0, tile[0], form)
    if len(tile) == 2:
        copy_out(views[1], keys, head, n_start, views[0].block_shape[-1], tile[1], form)


@gluon.jit
def await_ready(own: gl.constexpr, dq, at, form: gl.constexpr):
    """Wait until the channel's next place is full."""
    PLACES: gl.constexpr = form.places
    for i in gl.static_range(PLACES):
        await_said(dq[1], own * PLACES + i, at.parity, form.dq_bells)


@gluon.jit
def set_free(own: gl.constexpr, dq, form: gl.constexpr):
    """Free the channel's place, once all that leaves it has been read."""
    PLACES: gl.constexpr = form.places
    tma_store_wait(0)
    if not form.collects:  # which gives a place once it is known what for
        for i in gl.static_range(PLACES):
            mbarrier.arrive(dq[2].index(own * PLACES + i))


@gluon.jit
def write_in_place(views, places, kv, at, form: gl.constexpr):
    """dk and dv of two tiles of keys, which stand in the place of k and v."""
    k_tile, v_tile, sums, kv_ready, kv_used, kv_free, sums_done, sums_free = kv
    mbarrier.wait(sums_done.index(0), at.parity)
    write_parts(views[1], places[1], stage_of(v_tile, 0), form)
    write_parts(views[0], places[0], stage_of(k_tile, 0), form)
    tma_store_wait(0)
    mbarrier.arrive(kv_free.index(0))


@gluon.jit
def add_sums(dk_views, dv_views, places, head, n_start, kv, form: gl.constexpr):
    """dk and dv of a split group to their sums."""
    k_tile, v_tile, sums, kv_ready, kv_used, kv_free, sums_done, sums_free = kv
    mbarrier.wait(sums_done.index(0), 0)
    add_parts(dk_views, (places[0], head, n_start), sums, form)
    tma_store_wait(0)
    mbarrier.arrive(sums_free.index(0))
    mbarrier.wait(sums_done.index(0), 1)
    add_parts(dv_views, (places[1], head, n_start), sums, form)
    tma_store_wait(0)
    mbarrier.arrive(kv_free.index(0))


@gluon.jit
def add_parts(views, place, tile, form: gl.constexpr):
    add_out(views[0], place, 0, tile[0], form)
    if len(tile) == 2:
        add_out(views[1], place, tile[0].shape[-1], tile[1], form)


@gluon.jit
def add_out(desc, place, column: gl.constexpr, smem, form: gl.constexpr):
    """`copy_out` that adds to what is there."""
    keys, head, row = place
    entry, start, length = keys
    if form.wraps:
        tma_reduce_add(desc, [FAR, start + length, head, FAR - length + row, column], smem)
    else:
        tma_reduce_add(desc, [entry, head, row, column], smem)
