"""Forward attention on Hopper: one warp loads by TMA, two to four consumers of four warps each multiply by wgmma.

    a program walks tiles of ROWS * consumers queries; for each

    load_partition   finds the tile and tells the consumers: waits told_free, writes the board, signals told
                     q[w]: waits q_free[w], signals q_ready[w]      k[stage], v[stage]: wait *_free, signal *_ready
    mma_partition w  reads the board | s = q k^T | p = softmax(s) | o += p v          frees k after its product, v after its own

           QK 0 | softmax 0 | QK 1, PV 0 in flight | softmax 1 over them | QK 2, PV 1 | ... | PV last | out, lse
           o is rescaled behind the next QK, where a row's maximum has moved (`device.lagging`)
           with early weights few steps look for a maximum (`early`), and a tile may come back (`again`)
    barrier   arrivals                  says
    told      1                         the board's slot holds a tile      told_free  consumers  all have read it to the end, and judged it
    q_ready   1 and the tile's bytes    q[w] has landed                    q_free     1          consumer w is done with q[w]
    k_ready   1 and the tile's bytes    k[stage] has landed                k_free     consumers  all are done with k[stage]; Tuning.each: all threads
    v_ready   1 and the tile's bytes    v[stage] has landed                v_free     consumers  all are done with v[stage]; the same
    mended    1 and the tile's bytes    v[stage] of a tile done again has landed; the loader makes rows of other documents 0, then signals v_ready

p stays in registers; the sum of a row is gathered across lanes once, at the end; o leaves through shared memory by TMA, while the next
tile's q, k and v are on their way. Head dimensions that are no power of two come in two parts, (64, 32) or (128, 64); so may q and k of 256.

A tensor's rows end where TMA is told: it gives zeros beyond them and writes nothing there, so lengths may be ragged. Packed sequences
lie end to end, so their descriptors wrap (`copy_in`): a neighbour's rows are neither read nor written, whatever they hold.
Where heads of a group share a tile, its rows are queries, each with its heads: loads of q and stores of out and lse know of it, and `queries_of`.
What a loop repeats is a function of its own: Triton reads a loop's body twice, of a loop in a loop four times, and a function once for all that
call it alike, as consumers do, to which w is a number (d64 causal is read in 0.65 s for 1.04, d128 causal in 0.48 for 0.74, an H200's host).

Sources: FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2; online softmax (arXiv 1805.02867), algorithm 3; conditional rescaling:
FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute); ragged descriptors: triton.tools.ragged_tma.
"""

from ..device.dialect import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier,
    stay_before,
    tma_store_drain,
    tma_store_wait,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..device.key_ranges import PURE, next_tile
from ..device.lagging import lift_of, rescaled
from ..device.mask import edges_of, row_interval
from ..device.pack_gqa import heads_of, load_sinks, queries_of
from ..device.pipeline import release, ring, ring_start
from ..device.seqlen import LONG_K, LONG_Q, OFFSETS_K, OFFSETS_Q, breaks_promise, guard_offsets
from ..device.softmax import finish
from ..device.tile_scheduler import blocks_within, is_told, own_start, read_tile, read_words, tell, tile_number, word
from ..device.tma import copy_out, tile_2d, tiles_for
from .forward_producer import load_keys, load_rows, load_values, mend_values
from .forward_softmax import first_step, is_careful, softmax_step
from .tile_redo import (
    DOCUMENT,
    K_START,
    KEYS,
    PREFIX,
    WORDS,
    back_or_next,
    came_back,
    is_done_again,
    judge,
    verdicts_of,
    witness_of,
)
from .traits import ROWS as _ROWS

ROWS: gl.constexpr = gl.constexpr(_ROWS)  # of one consumer: wgmma's tile


@gluon.jit
def load_partition(views, offsets, board, q, k, v, mended, work, form: gl.constexpr):
    tiles, sizes, limits, numbers, faults, counter = work
    sequences, total_q, total_k = sizes[0], sizes[2], sizes[3]
    if form.packed:
        if gl.program_id(0) == 0:
            lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
            guard_offsets(offsets[0], sequences, total_q, limits[2], lanes, faults, OFFSETS_Q, LONG_Q)
            guard_offsets(offsets[1], sequences, total_k, limits[3], lanes, faults, OFFSETS_K, LONG_K)
    k_at = ring_start(form.tuning.stages)
    v_at = ring_start(form.tuning.stages)
    q_at = ring_start(1)
    told_at = ring_start(2)
    turn = gl.to_tensor(0)
    number = tile_number(turn, counter, form)
    row, again, slot = number * 0, number * 0, number * 0
    while (number < tiles) | (again > 0):
        upcoming = number
        if not form.spans:
            if again == 0:
                turn, upcoming = next_number(turn, tiles, counter, form)  # asked for now, needed after this tile
        if form.returns:
            exists, tile, keys, document, beyond = back_or_next(number, row, again, slot, board, offsets, sizes, limits, faults, form)
        else:
            exists, tile, keys, document, beyond = next_tile(number, row, offsets, sizes, limits, faults, form)
        if exists:
            what, at = (tile, keys, document, again), (told_at, k_at, q_at, v_at)
            told_at, k_at, q_at, v_at = load_tile(what, at, views, offsets, board, q, k, v, mended, sizes, form)
        if form.spans:
            if again == 0:
                row = beyond
                if row == 0:
                    turn, number = next_number(turn, tiles, counter, form)
        else:
            number = upcoming
        if form.returns:
            again, slot = came_back(board, told_at, number < tiles, form.tuning.consumers)
    tell(board, told_at, (turn, turn, turn, turn, turn * 0 - 1, turn, turn, turn))


@gluon.jit
def load_tile(what, at, views, offsets, board, q, k, v, mended, sizes, form: gl.constexpr):
    """A tile's numbers, queries, keys and values; where the rings stand then."""
    CONSUMERS: gl.constexpr = form.tuning.consumers
    JOINED: gl.constexpr = form.tuning.joined > 1
    q_views, k_views, v_views = views
    q_smem, q_ready, q_free = q
    tile, keys, document, again = what
    told_at, k_at, q_at, v_at = at
    heads = sizes[1]
    entry, head, m_start, n_begin, blocks, q_start, rows, all_keys = tile
    if form.spans:
        tell(board, told_at, (entry, head, m_start, n_begin, blocks, q_start, rows, all_keys, again, keys[0], keys[1], document, keys[2]))
    else:
        tell(board, told_at, (entry, head, m_start, n_begin, blocks, q_start, rows, all_keys, again, keys[0]))
    told_slot, told_at = told_at.stage, told_at.next()
    q_place, k_place, kv_head = (entry, q_start, rows, heads), (entry, keys[0], keys[1], heads), head // form.group
    v_place = k_place
    if form.spans:  # entries may stand further apart than their rows take
        q_place = (entry, q_start + entry * sizes[6], rows, heads)
        k_place, v_place = (entry, keys[0] + entry * sizes[7], keys[1], heads), (entry, keys[0] + entry * sizes[8], keys[1], heads)
    for w in gl.static_range(CONSUMERS):
        mbarrier.wait(q_free.index(w), q_at.parity ^ 1)
        own_first = own_start(m_start, place_of(w, told_slot, form), rows, form)
        load_rows(q_views, q_place, head, own_first, w, q_smem, q_ready.index(w), form.rest_d, form, JOINED)
        if w == 0:
            if blocks > 0:  # the first keys, before the other consumers' queries
                load_keys(k_views, k_place, kv_head, visited_block(0, n_begin, blocks, form), k_at, k, form.rest_d, form)
                k_at = k_at.next()
    q_at = q_at.next()
    if form.mask.documents:
        others = (document != PURE) & (again > 0)
    for i in range(blocks):
        block = visited_block(i, n_begin, blocks, form)
        if i + 1 < blocks:
            load_keys(k_views, k_place, kv_head, visited_block(i + 1, n_begin, blocks, form), k_at, k, form.rest_d, form)
            k_at = k_at.next()
        if form.mask.documents:
            if others & (i > 0):  # the values before these, which have landed meanwhile
                mend_values(v, mended, v_at.before(), visited_block(i - 1, n_begin, blocks, form), keys, document, offsets[3], form)
            load_values(v_views, v_place, kv_head, block, v_at, v, mended, others, form)
        else:
            load_keys(v_views, v_place, kv_head, block, v_at, v, form.rest_dv, form)
        v_at = v_at.next()
    if form.mask.documents:
        if others & (blocks > 0):
            mend_values(v, mended, v_at.before(), visited_block(blocks - 1, n_begin, blocks, form), keys, document, offsets[3], form)
    return told_at, k_at, q_at, v_at


@gluon.jit
def place_of(w, slot, form: gl.constexpr):
    """Which of a tile's consumers w is by its rows: in every other tile the last is the first (`Form.trades`)."""
    if form.trades:
        return gl.where(slot == 0, w, form.tuning.consumers - 1 - w)
    else:
        return w


@gluon.jit
def next_number(turn, tiles, counter, form: gl.constexpr):
    """(the turn after this one, the number of its tile)."""
    upcoming = tile_number(turn + 1, counter, form)
    if form.counted:
        if upcoming == tiles + gl.num_programs(0) - 1:  # the last number that anyone asks for
            gl.atomic_xchg(counter, 0, sem="relaxed")
    return turn + 1, upcoming


@gluon.jit
def take_turn(w):
    """Wait until the consumer before has passed it on: named barrier 9 + w, its 128 threads and ours."""
    named_barrier("bar.sync", 9 + w, 256)


@gluon.jit
def pass_turn(w, consumers: gl.constexpr):
    named_barrier("bar.arrive", 9 + (w + 1) % consumers, 256)


@gluon.jit
def score_product(q, k_smem, stage, zero, form: gl.constexpr):
    """q k^T of a stage, under way: one product a part."""
    s = warpgroup_mma(q[0], tile_2d(k_smem[0], stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    if form.rest_d:
        s = warpgroup_mma(q[1], tile_2d(k_smem[1], stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def value_product(p, v_smem, stage, o, form: gl.constexpr):
    """o + p v of a stage, under way: one product a part."""
    if form.rest_dv:
        return (
            warpgroup_mma(p, tile_2d(v_smem[0], stage), o[0], is_async=True),
            warpgroup_mma(p, tile_2d(v_smem[1], stage), o[1], is_async=True),
        )
    else:
        return (warpgroup_mma(p, tile_2d(v_smem[0], stage), o[0], is_async=True),)


@gluon.jit
def landed(o, form: gl.constexpr):
    """o after all products under way."""
    if form.rest_dv:
        return warpgroup_mma_wait(0, deps=[o[0], o[1]])
    else:
        return (warpgroup_mma_wait(0, deps=[o[0]]),)


@gluon.jit
def scaled(o, factor):
    """o's parts with each row multiplied."""
    return [part * gl.convert_layout(factor, gl.SliceLayout(1, part.type.layout))[:, None] for part in o]


@gluon.jit
def zeros(form: gl.constexpr):
    """An o of zeros."""
    main: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_dv - form.rest_dv, 16])
    rest: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.rest_dv or 8, 16])
    if form.rest_dv:
        return (
            gl.full([ROWS, form.block_dv - form.rest_dv], 0.0, gl.float32, main),
            gl.full([ROWS, form.rest_dv], 0.0, gl.float32, rest),
        )
    else:
        return (gl.full([ROWS, form.block_dv], 0.0, gl.float32, main),)


@gluon.jit
def skip_stages(w, k, v, at, count, form: gl.constexpr):
    """The position after `count` stages of keys and values that this consumer's rows do not see, released unread."""
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    for _ in range(count):
        if form.tuning.ping_pong:
            take_turn(w)
            pass_turn(w, form.tuning.consumers)
        mbarrier.wait(k_ready.index(at.stage), at.parity)
        release(k_free.index(at.stage), form.tuning.each)
        mbarrier.wait(v_ready.index(at.stage), at.parity)
        release(v_free.index(at.stage), form.tuning.each)
        at = at.next()
    return at


@gluon.jit
def attend(w, q, q_free, k, v, k_at, keys, edges, again, numbers, form: gl.constexpr):
    """(o, row_max, row_sum, the position after the last stage) over (first key block, key blocks, stages to skip), at least one block, in the order
    of `visited_block`. Keys and values of a block lie in the same stage of their rings, so the values of a step are where its keys were.

    q's place is free once the last scores are there, a product before the end: of the speed of later d256 1.006 to 1.01, d64 512 1.02 (H200).
    """
    BLOCK_N: gl.constexpr = form.tuning.block_n
    n_begin, blocks, unseen = keys
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_dv - form.rest_dv, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = k_smem[0].dtype
    LIFT: gl.constexpr = lift_of(dtype)
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, s_layout)
    o = zeros(form)
    n_start = visited_block(0, n_begin, blocks, form) * BLOCK_N
    mbarrier.wait(k_ready.index(k_at.stage), k_at.parity)
    if form.tuning.ping_pong:
        take_turn(w)
    s = score_product(q, k_smem, k_at.stage, zero, form)
    if form.tuning.ping_pong:
        pass_turn(w, form.tuning.consumers)
    s = warpgroup_mma_wait(0, deps=[s])
    release(k_free.index(k_at.stage), form.tuning.each)
    v_at, k_at = k_at, k_at.next()
    p, rescale, row_max, row_sum = first_step(s, n_start, edges, numbers, LIFT, form)
    p_reg = gl.convert_layout(p.to(dtype), p_layout)
    if form.first_block_first:
        k_at = skip_stages(w, k, v, k_at, unseen, form)  # the diagonal's last blocks, which come next
    for i in range(1, blocks):
        place, so_far = (k_at, v_at, n_begin, i, blocks), (o, row_max, row_sum, rescale, p_reg)
        o, row_max, row_sum, rescale, p_reg, k_at, v_at = attend_step(w, q, k, v, place, so_far, zero, edges, again, numbers, form)
    if not form.q_is_read:
        mbarrier.arrive(q_free.index(w))
    o = rescaled(o, rescale)
    mbarrier.wait(v_ready.index(v_at.stage), v_at.parity)
    o = value_product(p_reg, v_smem, v_at.stage, o, form)
    total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, s_layout))
    row_max = gl.convert_layout(gl.max(row_max, 1), gl.SliceLayout(1, s_layout))
    o = landed(o, form)
    release(v_free.index(v_at.stage), form.tuning.each)
    return o, row_max, total, k_at


@gluon.jit
def attend_step(w, q, k, v, place, so_far, zero, edges, again, numbers, form: gl.constexpr):
    """`attend` of the i-th block of keys: its scores, behind them the weights before times their values, under which its weights are made."""
    k_at, v_at, n_begin, i, blocks = place
    o, row_max, row_sum, rescale, p_reg = so_far
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_dv - form.rest_dv, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = k_smem[0].dtype
    LIFT: gl.constexpr = lift_of(dtype)
    parts_v: gl.constexpr = 2 if form.rest_dv else 1  # products under way for each o += p v
    mbarrier.wait(k_ready.index(k_at.stage), k_at.parity)
    if form.tuning.ping_pong:
        take_turn(w)
    s = score_product(q, k_smem, k_at.stage, zero, form)
    o = rescaled(o, rescale)
    mbarrier.wait(v_ready.index(v_at.stage), v_at.parity)
    o = value_product(p_reg, v_smem, v_at.stage, o, form)
    if form.tuning.ping_pong:
        pass_turn(w, form.tuning.consumers)
    s = warpgroup_mma_wait(parts_v, deps=[s])
    release(k_free.index(k_at.stage), form.tuning.each)
    n_start = visited_block(i, n_begin, blocks, form) * form.tuning.block_n
    careful = is_careful(n_start, edges, again, form)
    p, rescale, row_max, row_sum = softmax_step(s, careful, row_max, row_sum, n_start, edges, numbers, LIFT, form)
    if form.tuning.under and not form.early:  # whose branch holds weights back as well
        stay_before(blocks)
    o = landed(o, form)
    release(v_free.index(v_at.stage), form.tuning.each)
    p_reg = gl.convert_layout(p.to(dtype), p_layout)
    return o, row_max, row_sum, rescale, p_reg, k_at.next(), k_at


@gluon.jit
def visited_block(i, n_begin, blocks, form: gl.constexpr):
    """The key block that a tile visits as its i-th: the last first, but where all rows see the first keys these before all others. Attention sinks
    lie there, so later scores seldom outgrow a row's first maximum; and the diagonal comes next, where scores of positions nearby are large."""
    block = n_begin + blocks - 1 - i
    if form.first_block_first:
        block = gl.where(i == 0, n_begin, block + 1)
    return block


@gluon.jit
def keys_told(words, slot, seqlen_k, form: gl.constexpr):
    """How many keys a tile has: of spans, whose S_k says where the diagonal is, a number of its own."""
    if form.spans:
        return word(read_words(words, slot), KEYS)
    else:
        return seqlen_k


@gluon.jit
def prefix_told(words, slot, form: gl.constexpr):
    """How many of a tile's first keys all rows see."""
    if form.mask.prefix:
        return word(read_words(words, slot), PREFIX)
    else:
        return 0


@gluon.jit
def document_told(words, slot, ids):
    """(the document, where the ids of its keys' span begin)."""
    row = read_words(words, slot)
    return word(row, DOCUMENT), ids + word(row, K_START)


@gluon.jit
def query_operand(w, q_smem, form: gl.constexpr):
    """q's parts as products take them: the first of them in registers, where the tuning says so."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.tuning.block_n, 16])
    layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    main = tile_2d(q_smem[0], w)
    if form.tuning.q_in_registers > 0:
        main = main.load(layout)
    if form.rest_d:
        last = tile_2d(q_smem[1], w)
        if form.tuning.q_in_registers > 1:
            last = last.load(layout)
        return (main, last)
    else:
        return (main,)


@gluon.jit
def stage_out(w, o, o_views, o_smem, place, head, m_start, form: gl.constexpr):
    """o by TMA through its staging buffer, which may hold half of it: that waits until the first half has left."""
    WIDTH: gl.constexpr = form.block_dv - form.rest_dv
    if form.tuning.half_staged:
        left, right = gl.split(gl.permute(gl.reshape(o[0], [ROWS, 2, WIDTH // 2]), [0, 2, 1]))
        stage_part(w, left, o_views[0], o_smem[0], place, head, m_start, 0, form)
        stage_part(w, right, o_views[0], o_smem[0], place, head, m_start, WIDTH // 2, form)
    else:
        stage_part(w, o[0], o_views[0], o_smem[0], place, head, m_start, 0, form)
    if form.rest_dv:
        stage_part(w, o[1], o_views[1], o_smem[1], place, head, m_start, WIDTH, form)


@gluon.jit
def stage_part(w, part, view, smem, place, head, m_start, column: gl.constexpr, form: gl.constexpr):
    if column == 0 or form.tuning.half_staged:
        tma_store_wait(0)  # what this buffer held has left it
    tile_2d(smem, w).store(part.to(smem.dtype))
    fence_async_shared()
    copy_out(view, place, head, m_start, column, smem.index(w), form, form.tuning.joined > 1)


@gluon.jit
def mma_partition(w: gl.constexpr, out, board, q, k, v, o_smem, work, form: gl.constexpr):
    own = gl.to_tensor(w)
    if form.tuning.ping_pong:
        if w == form.tuning.consumers - 1:
            pass_turn(own, form.tuning.consumers)  # consumer 0 begins
    walk_tiles(own, out, board, q, k, v, o_smem, work, form)


@gluon.jit
def walk_tiles(w, out, board, q, k, v, o_smem, work, form: gl.constexpr):
    words, told, told_free, verdicts = board
    k_at = ring_start(form.tuning.stages)
    q_at = ring_start(1)
    told_at = ring_start(2)
    while is_told(words, told, told_at):
        k_at, told_at, q_at = take_tile(w, out, board, q, k, v, o_smem, (k_at, told_at, q_at), work, form)
    tma_store_wait(0)


@gluon.jit
def take_tile(w, out, board, q, k, v, o_smem, at, work, form: gl.constexpr):
    """A tile's o and lse; where the rings stand then."""
    o_views, lse, sinks, ids = out
    tiles, sizes, limits, numbers, faults, counter = work
    words, told, told_free, verdicts = board
    q_smem, q_ready, q_free = q
    heads, total_q = sizes[1] * form.tuning.joined, sizes[2]
    k_at, told_at, q_at = at
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.tuning.block_n, 16])
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k = read_tile(words, told_at.stage)
    m_start = own_start(m_start, place_of(w, told_at.stage, form), seqlen_q, form)
    mbarrier.wait(q_ready.index(w), q_at.parity)
    q_tile = query_operand(w, q_smem, form)
    if form.tuning.q_in_registers:
        fence_async_shared()  # without it TMA overtook loads that queued behind stores: wrong rows in 12 of 12 runs (H200)
    if form.q_is_read:
        mbarrier.arrive(q_free.index(w))
    row_max = gl.full([ROWS], float("-inf"), gl.float32, rows)
    row_sum = gl.full([ROWS], 0.0, gl.float32, rows)
    o = zeros(form)
    lengths, key_stop = (seqlen_q, seqlen_k), keys_told(words, told_at.stage, seqlen_k, form)
    prefix = prefix_told(words, told_at.stage, form)
    own_begin, own = blocks_within(m_start, form.own_queries, lengths, key_stop, limits, prefix, form)
    again = is_done_again(words, told_at.stage) if form.early else 0
    unseen = blocks
    if own > 0:
        unseen = n_begin + blocks - own_begin - own
        if not form.first_block_first:
            k_at = skip_stages(w, k, v, k_at, unseen, form)
        edges = edges_of(m_start, lengths, limits)
        if form.spans:
            stop_edge = m_start + (seqlen_k - seqlen_q) + 1 if form.mask.prefix else edges[1]
            edges = (edges[0], stop_edge, key_stop, prefix, limits[1])
        if form.mask.documents:
            document, own_ids = document_told(words, told_at.stage, ids)
            edges = (edges[0], edges[1], key_stop, prefix, limits[1], document, own_ids)
        o, row_max, row_sum, k_at = attend(w, q_tile, q_free, k, v, k_at, (own_begin, own, unseen), edges, again, numbers, form)
        unseen = own_begin - n_begin
    if not form.q_is_read:
        if own <= 0:
            mbarrier.arrive(q_free.index(w))
    k_at = skip_stages(w, k, v, k_at, unseen, form)
    # read again rather than kept in registers meanwhile
    entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k = read_tile(words, told_at.stage)
    m_start = own_start(m_start, place_of(w, told_at.stage, form), seqlen_q, form)
    row = gl.arange(0, ROWS, rows)
    m_offsets = m_start + queries_of(row, form)
    row_head, exists = heads_of(row, head, m_offsets < seqlen_q, form)
    key_stop = keys_told(words, told_at.stage, seqlen_k, form)
    bounds = (seqlen_k, limits[0], limits[1])
    first, stop = row_interval(m_offsets, seqlen_q, key_stop, bounds, prefix_told(words, told_at.stage, form), form)
    empty = first >= stop
    document = PURE
    if form.mask.documents:
        document = word(read_words(words, told_at.stage), DOCUMENT)
        empty = empty | ((row_sum == 0) & (document != PURE))  # of scattered ones only the sum knows
    sink = 0.0
    if form.sinks:
        sink = load_sinks(sinks, row_head, exists, form)
    inverse, row_lse = finish(row_max, row_sum, empty, sink, form)
    if form.packed:
        broken = breaks_promise(m_offsets, seqlen_k, limits)
        inverse = gl.where(broken, float("nan"), inverse)
        row_lse = gl.where(broken, float("nan"), row_lse)
    lse_rows = lse + (entry.to(gl.int64) * heads + row_head) * total_q + q_start
    if form.spans:
        lse_rows -= entry * total_q  # q_start counts from the first entry
    gl.store(lse_rows + m_offsets, row_lse, mask=exists)
    o = scaled(o, inverse)
    if form.returns:
        again = is_done_again(words, told_at.stage)
        if again > 0:
            tma_store_drain()  # what this tile's rows were at first
        witness, empty = witness_of(row_max, empty, o, document, form)
        judge(w, verdicts, told_at.stage, witness, (again > 0) | empty | ~exists)
    mbarrier.arrive(told_free.index(told_at.stage))
    told_at = told_at.next()
    stage_out(w, o, o_views, o_smem, (entry, q_start, seqlen_q, sizes[1]), head, m_start, form)
    return k_at, told_at, q_at.next()


@gluon.jit
def forward_kernel(q_desc, k_desc, v_desc, o_desc, q_rest, k_rest, v_rest, o_rest, pointers, work, form: gl.constexpr):
    """Descriptors of a tile's first columns and of the rest (None where there is none): of [B, H, S, D], or for packed layouts
    or spans wrapping ones (`copy_in`). pointers (lse [B, H, S_q] or [H, T_q], sinks [H] or None, cu_seqlens_q, cu_seqlens_k, error word,
    counter of tiles), for spans with their offsets (`device.key_ranges`) in the place of cu_seqlens; work (tiles in all, sizes, limits, numbers):
    sizes (B or sequences, H, S_q or T_q, S_k or T_k, row tiles a head, heads in an L2 section, for spans by how many rows the entries of q, of k and
    of v stand further apart than they have); limits (left, right, max_seqlen_q, max_seqlen_k);
    numbers (scale_log2, softcap)."""
    STAGES: gl.constexpr = form.tuning.stages
    CONSUMERS: gl.constexpr = form.tuning.consumers
    if form.spans:
        lse, sinks, spans_q, spans_k, ids_q, ids_k, key_lengths, prefixes, faults, counter = pointers
        offsets, out = (spans_q, spans_k, ids_q, ids_k, key_lengths, prefixes), ((o_desc, o_rest), lse, sinks, ids_k)
    else:
        lse, sinks, cu_seqlens_q, cu_seqlens_k, faults, counter = pointers
        offsets, out = (cu_seqlens_q, cu_seqlens_k), ((o_desc, o_rest), lse, sinks, None)
    tiles, sizes, limits, numbers = work
    q_views, k_views, v_views, o_views = (q_desc, q_rest), (k_desc, k_rest), (v_desc, v_rest), (o_desc, o_rest)
    q_smem = tiles_for(form.slots, q_views, form.rest_d)
    k_smem = tiles_for(STAGES, k_views, form.rest_d)
    v_smem = tiles_for(STAGES, v_views, form.rest_dv)
    o_smem = tiles_for(form.slots, o_views, form.rest_dv)
    words = gl.allocate_shared_memory(gl.int32, [2, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    board = (words, ring(2, 1), ring(2, CONSUMERS), verdicts_of(2, ROWS) if form.returns else None)
    q = (q_smem, ring(CONSUMERS, 1), ring(CONSUMERS, 1))
    k = (k_smem, ring(STAGES, 1), ring(STAGES, CONSUMERS * form.tuning.arrivals))
    v = (v_smem, ring(STAGES, 1), ring(STAGES, CONSUMERS * form.tuning.arrivals))
    mended = v[1]
    if form.mask.documents:
        mended = ring(STAGES, 1)
    views = (q_views, k_views, v_views)
    work = (tiles, sizes, limits, numbers, faults, counter)
    if CONSUMERS == 4:
        warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), out, board, q, k, v, o_smem, work, form)),
                (mma_partition, (gl.constexpr(1), out, board, q, k, v, o_smem, work, form)),
                (mma_partition, (gl.constexpr(2), out, board, q, k, v, o_smem, work, form)),
                (mma_partition, (gl.constexpr(3), out, board, q, k, v, o_smem, work, form)),
                (load_partition, (views, offsets, board, q, k, v, mended, work, form)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 32],
        )
    elif CONSUMERS == 3:
        warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), out, board, q, k, v, o_smem, work, form)),
                (mma_partition, (gl.constexpr(1), out, board, q, k, v, o_smem, work, form)),
                (mma_partition, (gl.constexpr(2), out, board, q, k, v, o_smem, work, form)),
                (load_partition, (views, offsets, board, q, k, v, mended, work, form)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), out, board, q, k, v, o_smem, work, form)),
                (mma_partition, (gl.constexpr(1), out, board, q, k, v, o_smem, work, form)),
                (load_partition, (views, offsets, board, q, k, v, mended, work, form)),
            ],
            [4, 1],
            [240, 24],
        )
