"""Forward attention on Blackwell: five roles around tensor memory. It has not run on a Blackwell GPU.

    a program walks tiles of 256 queries, two query stages t of 128; for each

    load_partition       1 warp   finds the tile and tells the others; q[t], then keys and values through one ring  k v k' v' ...
    mma_partition        1 warp   all products, in the order  q0 k, q1 k | p0 v, q0 k' | p1 v, q1 k' | p0 v', q0 k'' | ... | p0 v, p1 v
    softmax_partition t  4 warps  s[t] -> p[t], which lies over it; a thread owns a row: no shuffles
    correct_partition    4 warps  rescales o[t] where a row's maximum has grown by much; at the end normalises it and stages out
    store_partition      1 warp   out by TMA

While softmax 0 works on its scores, the tensor cores are busy with stage 1, and the other way round.

    barrier (slots)     producer -> consumer   arrivals         what becomes safe
    told (2)            load -> all others     1                read the board's slot: the tile's numbers
    told_free (2)       all others -> load     5                write the slot anew
    q_ready (2)         load -> mma            1 and bytes      products that read q[t]
    q_free (1)          mma -> load            1, by commit     load the next tile's queries: the products of both t are complete
    kv_ready (stages)   load -> mma            1 and bytes      products that read the stage: k or v has landed
    kv_free (stages)    mma -> load            1, by commit     load into the stage: the products of both t that read it are complete
    s_ready (2)         mma -> softmax t       1, by commit     read s[t]; and all products issued before are complete, so that by the
                                                                mailbox o[t] may be rescaled
    p_o_rescale (2)     softmax t, correct     2                multiply the first three quarters of p[t], which stand over s[t], and add
                        -> mma                                  to o[t], which is rescaled (for a tile's first keys: read out)
    p_ready_2 (2)       softmax t -> mma       1                multiply the last quarter of p[t]; all of s[t] has been read
    o_ready (2)         mma -> correct         1, by commit     read o[t]: the tile's last product is complete
    mail_ready (2)      softmax t -> correct   1                read the mailbox: each row's factor for o[t]; at the end its sum and maximum
    mail_free (2)       correct -> softmax t   1                write a tile's sums and maxima; the factors before them need not wait: s_ready says
                                                                that o[t] was multiplied into, so that the mail before was read
    out_ready (slots)   correct -> store       1                store the buffer: a finished tile of out stands in it
    out_free (slots)    store -> correct       1                write the buffer anew: TMA has read it

Products of one warp run in order. So p[t] is read before the next scores are written over it, and o[t] is complete when s_ready speaks of
scores issued after it.

A row's maximum, against which p is taken, may lag behind the true one by `threshold` in log2 units: o is rescaled only where it would lag by more,
and not at all where no row of the stage needs it. Sum and o are taken against the same number, so the quotient is exact.

Where heads of a group share a tile, its rows are queries, each with its heads: loads of q and stores of out and lse know of it, and `queries_of`.

A tensor's rows end where TMA is told: it gives zeros beyond them and writes nothing there, so lengths may be ragged, and what packed
neighbours hold is never loaded (`device.tma`). Head dimensions that are no power of two come in two parts, (64, 32) or (128, 64).

Sources: FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute), roles, order of products, p in two pieces, conditional rescaling;
FlashAttention-2 (arXiv 2307.08691), algorithm 1; online softmax (arXiv 1805.02867), algorithm 3.
"""

from ..device.dialect import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tcgen05_commit,
    tcgen05_mma,
    tma_store_wait,
    tmem_reg_layout,
)
from ..device.lagging import lagging_max
from ..device.mask import edges_of, hide_by_bits, interval_bits, row_interval
from ..device.pack_gqa import heads_of, load_sinks, queries_of
from ..device.pipeline import ring, ring_start
from ..device.seqlen import LONG_K, LONG_Q, OFFSETS_K, OFFSETS_Q, breaks_promise, guard_offsets
from ..device.softmax import exp2_by_fma, finish, tanh
from ..device.tile_scheduler import WORDS, is_told, read_tile, tell, tile_number, tile_of
from ..device.tma import copy_out, copy_parts, stage_of, tile_2d, tiles_for
from .traits import ROWS as _ROWS

ROWS: gl.constexpr = gl.constexpr(_ROWS)
CHUNK: gl.constexpr = gl.constexpr(32)  # columns that are masked, and turned from s to p, at a time
READERS: gl.constexpr = gl.constexpr(5)  # of the board


@gluon.jit
def anew(number):
    """A number that the compiler does not know before it is here, so that nothing is computed of it earlier.

    What two roles would compute alike of a launch's arguments, LLVM computes once, before all roles. Through all of them ptxas keeps three
    registers, which a thread's own numbers fill, and spills what is more where a role begins (8 to 48 bytes: `right + 1`, of causal masks).
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def band_of(limits):
    """(left, right) of the mask."""
    return anew(limits[0]), anew(limits[1])


@gluon.jit
def load_partition(views, offsets, board, q, kv, work, form: gl.constexpr):
    q_views, k_views, v_views = views
    tiles, sizes, limits, numbers, faults, counter = work
    q_smem, q_ready, q_free = q
    JOINED: gl.constexpr = form.tuning.joined > 1
    sequences, heads, total_q, total_k = sizes[0], sizes[1], sizes[2], sizes[3]
    if form.packed:
        if gl.program_id(0) == 0:
            lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
            guard_offsets(offsets[0], sequences, total_q, limits[2], lanes, faults, OFFSETS_Q, LONG_Q)
            guard_offsets(offsets[1], sequences, total_k, limits[3], lanes, faults, OFFSETS_K, LONG_K)
    kv_at = ring_start(form.tuning.stages)
    q_at = ring_start(1)
    told_at = ring_start(2)
    turn = gl.to_tensor(0)
    number = tile_number(turn, counter, form)
    more = gl.to_tensor(True)
    while more:
        more = number < tiles
        upcoming = number
        if more:
            turn += 1
            upcoming = tile_number(turn, counter, form)  # asked for now, needed after this tile
            if form.counted:
                if upcoming == tiles + gl.num_programs(0) - 1:  # the last number that anyone asks for
                    gl.atomic_xchg(counter, 0, sem="relaxed")
        here = (
            anew(sequences),
            heads,
            total_q,
            total_k,
            sizes[4],
            sizes[5],
        )  # or sequences * heads is kept through all roles
        exists, tile, keys = tile_of(number, offsets, here, band_of(limits), form)
        entry, head, m_start, n_begin, blocks, q_start, rows, all_keys = tile
        if exists | (
            number >= tiles
        ):  # the end is told here too: from a place of its own, a lane's number was kept through all roles
            blocks = gl.where(more, blocks, -1)
            tell(board, told_at, (entry, head, m_start, n_begin, blocks, q_start, rows, all_keys))
            told_at = told_at.next()
            if blocks > 0:
                q_place, k_place, kv_head = (
                    (entry, q_start, rows, heads),
                    (entry, keys[0], keys[1], heads),
                    head // form.group,
                )
                mbarrier.wait(q_free.index(0), q_at.parity ^ 1)
                load_rows(q_views, q_place, head, m_start, 0, q_smem, q_ready.index(0), form.rest_d, form, JOINED)
                kv_at = load_keys(k_views, k_place, kv_head, n_begin + blocks - 1, kv_at, kv, form.rest_d, form)
                load_rows(
                    q_views,
                    q_place,
                    head,
                    m_start + form.stage_queries,
                    1,
                    q_smem,
                    q_ready.index(1),
                    form.rest_d,
                    form,
                    JOINED,
                )
                q_at = q_at.next()
                kv_at = load_keys(v_views, k_place, kv_head, n_begin + blocks - 1, kv_at, kv, form.rest_dv, form)
                for i in range(1, blocks):
                    block = n_begin + blocks - 1 - i
                    kv_at = load_keys(k_views, k_place, kv_head, block, kv_at, kv, form.rest_d, form)
                    kv_at = load_keys(v_views, k_place, kv_head, block, kv_at, kv, form.rest_dv, form)
        number = upcoming


@gluon.jit
def load_keys(views, place, head, block, at, kv, rest: gl.constexpr, form: gl.constexpr):
    """One tile of keys or values into the ring's next stage, once that is free; the position after it."""
    kv_smem, kv_ready, kv_free = kv
    mbarrier.wait(kv_free.index(at.stage), at.parity ^ 1)
    load_rows(views, place, head, block * form.tuning.block_n, at.stage, kv_smem, kv_ready.index(at.stage), rest, form)
    return at.next()


@gluon.jit
def load_rows(
    views, place, head, row, slot, smem, ready, rest: gl.constexpr, form: gl.constexpr, joined: gl.constexpr = False
):
    """A tile's parts into their slots; the last columns of all are `rest`, the first a power of two."""
    if rest:
        mbarrier.expect(ready, views[0].block_type.nbytes + views[1].block_type.nbytes)
    else:
        mbarrier.expect(ready, views[0].block_type.nbytes)
    copy_parts(views, place, head, row, ready, stage_of(smem, slot), form, joined)


# ---------------------------------------------------------------- products


@gluon.jit
def score_product(t, q_smem, kv_smem, stage, s, form: gl.constexpr):
    """s[t] = q[t] k^T, under way: one product a part; s_ready[t] says when."""
    s_tmem, s_ready, p_o_rescale, p_ready_2 = s
    tcgen05_mma(tile_2d(q_smem[0], t), tile_2d(kv_smem[0], stage).permute((1, 0)), s_tmem.index(t), use_acc=False)
    if form.rest_d:
        tcgen05_mma(tile_2d(q_smem[1], t), tile_2d(kv_smem[1], stage).permute((1, 0)), s_tmem.index(t), use_acc=True)
    tcgen05_commit(s_ready.index(t))


@gluon.jit
def weights_of(s_tmem, t, dtype: gl.constexpr, form: gl.constexpr):
    """p's place: the first half of the columns of s[t], 16 bits an element."""
    WIDTH: gl.constexpr = 2 * form.tuning.block_n
    halves: gl.constexpr = TensorMemoryLayout([ROWS, WIDTH], col_stride=1)
    return reinterpret(s_tmem, dtype, [2, ROWS, WIDTH], halves).index(t).slice(0, form.tuning.block_n)


@gluon.jit
def value_part(p_tmem, kv_smem, stage, o_tmem, t, start: gl.constexpr, keys: gl.constexpr, use_acc, form: gl.constexpr):
    """o[t] += p v over `keys` keys from `start` on: one product a part."""
    p = p_tmem.slice(start, keys)
    tcgen05_mma(p, tile_2d(kv_smem[0], stage).slice(start, keys), o_tmem[0].index(t), use_acc=use_acc)
    if form.rest_dv:
        tcgen05_mma(p, tile_2d(kv_smem[1], stage).slice(start, keys), o_tmem[1].index(t), use_acc=use_acc)


@gluon.jit
def value_product(t, kv_smem, stage, s, o_tmem, at, use_acc, form: gl.constexpr):
    """o[t] += p[t] v, under way; the last quarter of p may come later than the first three, which two shapes make: 64 + 32 of 96."""
    s_tmem, s_ready, p_o_rescale, p_ready_2 = s
    QUARTER: gl.constexpr = form.tuning.block_n // 4
    p_tmem = weights_of(s_tmem, t, kv_smem[0].dtype, form)
    mbarrier.wait(p_o_rescale.index(t), at.parity)
    value_part(p_tmem, kv_smem, stage, o_tmem, t, 0, 2 * QUARTER, use_acc, form)
    value_part(p_tmem, kv_smem, stage, o_tmem, t, 2 * QUARTER, QUARTER, True, form)
    mbarrier.wait(p_ready_2.index(t), at.parity)
    value_part(p_tmem, kv_smem, stage, o_tmem, t, 3 * QUARTER, QUARTER, True, form)


@gluon.jit
def mma_partition(board, q, kv, s, o, form: gl.constexpr):
    words, told, told_free = board
    q_smem, q_ready, q_free = q
    kv_smem, kv_ready, kv_free = kv
    o_tmem, o_ready = o
    kv_at = ring_start(form.tuning.stages)
    q_at = ring_start(1)
    p_at = ring_start(1)
    told_at = ring_start(2)
    both = anew(
        2
    )  # query stages: loops over them stay loops, lest the addresses of 60 products fill the role's registers
    while is_told(words, told, told_at):
        blocks = read_tile(words, told_at.stage)[4]
        mbarrier.arrive(told_free.index(told_at.stage))
        told_at = told_at.next()
        if blocks > 0:
            mbarrier.wait(kv_ready.index(kv_at.stage), kv_at.parity)
            for t in range(both):
                mbarrier.wait(q_ready.index(t), q_at.parity)
                score_product(t, q_smem, kv_smem, kv_at.stage, s, form)
            tcgen05_commit(kv_free.index(kv_at.stage))
            q_at = q_at.next()
            for i in range(1, blocks):
                v_at = kv_at.next()
                kv_at = v_at.next()
                mbarrier.wait(kv_ready.index(v_at.stage), v_at.parity)
                for t in range(both):
                    value_product(t, kv_smem, v_at.stage, s, o_tmem, p_at, i > 1, form)
                    if t == 0:
                        mbarrier.wait(kv_ready.index(kv_at.stage), kv_at.parity)
                    else:
                        tcgen05_commit(kv_free.index(v_at.stage))
                    score_product(t, q_smem, kv_smem, kv_at.stage, s, form)
                tcgen05_commit(kv_free.index(kv_at.stage))
                p_at = p_at.next()
            tcgen05_commit(q_free.index(0))
            kv_at = kv_at.next()
            mbarrier.wait(kv_ready.index(kv_at.stage), kv_at.parity)
            for t in range(both):
                value_product(t, kv_smem, kv_at.stage, s, o_tmem, p_at, blocks > 1, form)
                tcgen05_commit(o_ready.index(t))
            tcgen05_commit(kv_free.index(kv_at.stage))
            kv_at = kv_at.next()
            p_at = p_at.next()


# ---------------------------------------------------------------- softmax


@gluon.jit
def hidden(quarters, n_start, edges, form: gl.constexpr):
    """A tile's quarters with -inf where a row does not see the key."""
    layout: gl.constexpr = quarters[0].type.layout
    first_edge, stop_edge, key_stop = edges
    columns = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    row = queries_of(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), form)
    stop = row * 0 + (key_stop - n_start)
    if (
        form.mask.right
    ):  # bounded, lest the compiler add up what it can before all roles, in registers that it keeps through all of them
        stop = gl.minimum(stop, row + gl.minimum(stop_edge - n_start, form.tuning.block_n))
    first = row + gl.maximum(first_edge - n_start, -ROWS)
    return [
        hide_by_bits(quarters[i], interval_bits(first - i * CHUNK, stop - i * CHUNK, form.mask.left), columns)
        for i in (0, 1, 2, 3)
    ]  # fmt: skip


@gluon.jit
def scores(s_tile, n_start, edges, softcap, form: gl.constexpr):
    """s[t] in four quarters: capped, and -inf where a row does not see the key."""
    layout: gl.constexpr = tmem_reg_layout(
        gl.float32, (ROWS, CHUNK), TensorMemoryLayout([ROWS, CHUNK], col_stride=1), 4
    )
    if (
        form.softcap
    ):  # in their place, a quarter after the other: tanh of all that a thread has would take more registers than it may
        for i in gl.static_range(4):
            quarter = s_tile.slice(i * CHUNK, CHUNK)
            quarter.store(tanh(quarter.load(layout) * softcap))
    quarters = [s_tile.slice(start, CHUNK).load(layout) for start in (0, 32, 64, 96)]
    if form.masks:
        first_edge, stop_edge, key_stop = edges
        n_stop = n_start + form.tuning.block_n
        partial = n_stop > key_stop
        if form.mask.right:
            partial = partial | (n_stop > stop_edge)
        if form.mask.left:
            partial = partial | (n_start < first_edge + (form.stage_queries - 1))
        if partial:
            quarters = hidden(quarters, n_start, edges, form)
    return quarters


@gluon.jit
def kept_max(row_max, quarters, scale_log2, form: gl.constexpr):
    """The number that weights are taken against: a row's maximum so far, raised only where it would lag behind by more than the threshold."""
    a = gl.maximum(gl.max(quarters[0], 1), gl.max(quarters[1], 1))
    b = gl.maximum(gl.max(quarters[2], 1), gl.max(quarters[3], 1))
    new_max = gl.maximum(row_max, gl.maximum(a, b) * scale_log2 - form.lift)
    return lagging_max(row_max, new_max, form.tuning.threshold)


@gluon.jit
def weights(quarter, p_tmem, base, scale_log2, part: gl.constexpr, form: gl.constexpr):
    """Write a quarter of p to its place; the sum of its rows."""
    p_layout: gl.constexpr = tmem_reg_layout(
        p_tmem.dtype, (ROWS, CHUNK), TensorMemoryLayout([ROWS, CHUNK], col_stride=1), 4
    )
    x = quarter * scale_log2 - base[:, None]
    p = gl.exp2(x)
    if form.by_fma:  # a column is a thread's register, so each computes one of the two
        columns = gl.arange(0, CHUNK, gl.SliceLayout(0, quarter.type.layout))
        p = gl.where(((columns * form.by_fma) % CHUNK < form.by_fma)[None, :], exp2_by_fma(x, form.degree), p)
    p_tmem.slice(part * CHUNK, CHUNK).store(gl.convert_layout(p.to(p_tmem.dtype), p_layout))
    return gl.sum(p, 1)


@gluon.jit
def softmax_partition(t: gl.constexpr, board, s, mailbox, work, dtype: gl.constexpr, form: gl.constexpr):
    words, told, told_free = board
    s_tmem, s_ready, p_o_rescale, p_ready_2 = s
    mail, mail_ready, mail_free = mailbox
    tiles, sizes, limits, numbers, faults, counter = work
    scale_log2, softcap = numbers
    most_log2: gl.constexpr = 15.0 if dtype == gl.float16 else 127.0
    gl.static_assert(
        form.lift + form.tuning.threshold <= most_log2,
        "p may exceed the largest number of its type: lower lift or threshold",
    )
    layout: gl.constexpr = tmem_reg_layout(
        gl.float32, (ROWS, CHUNK), TensorMemoryLayout([ROWS, CHUNK], col_stride=1), 4
    )
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    p_tmem = weights_of(s_tmem, t, dtype, form)
    s_at = ring_start(1)
    mail_at = ring_start(1)
    told_at = ring_start(2)
    while is_told(words, told, told_at):
        entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k = read_tile(words, told_at.stage)
        mbarrier.arrive(told_free.index(told_at.stage))
        told_at = told_at.next()
        edges = edges_of(m_start + t * form.stage_queries, (seqlen_q, seqlen_k), band_of(limits))
        row_max = gl.full([ROWS], float("-inf"), gl.float32, rows)
        row_sum = gl.full([ROWS], 0.0, gl.float32, rows)
        for i in range(blocks):
            mbarrier.wait(s_ready.index(t), s_at.parity)
            s_at = s_at.next()
            quarters = scores(s_tmem.index(t), (n_begin + blocks - 1 - i) * form.tuning.block_n, edges, softcap, form)
            new_max = kept_max(row_max, quarters, scale_log2, form)
            base = gl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = gl.exp2(row_max - base)
            if i > 0:
                mail.index(2 * t).store(rescale)
                mbarrier.arrive(mail_ready.index(t))
                mail_at = mail_at.next()
            row_max = new_max
            sum_0 = weights(quarters[0], p_tmem, base, scale_log2, 0, form)
            sum_1 = weights(quarters[1], p_tmem, base, scale_log2, 1, form)
            sum_2 = weights(quarters[2], p_tmem, base, scale_log2, 2, form)
            mbarrier.arrive(p_o_rescale.index(t))
            sum_3 = weights(quarters[3], p_tmem, base, scale_log2, 3, form)
            mbarrier.arrive(p_ready_2.index(t))
            row_sum = row_sum * rescale + ((sum_0 + sum_1) + (sum_2 + sum_3))
        mbarrier.wait(mail_free.index(t), mail_at.parity ^ 1)
        mail.index(2 * t).store(row_sum)
        mail.index(2 * t + 1).store(row_max)
        mbarrier.arrive(mail_ready.index(t))
        mail_at = mail_at.next()


# ---------------------------------------------------------------- correction and output


@gluon.jit
def rescale_part(o_tile, factor):
    """A part of o times its rows' factors, CHUNK columns at a time."""
    layout: gl.constexpr = tmem_reg_layout(
        gl.float32, (ROWS, CHUNK), TensorMemoryLayout([ROWS, CHUNK], col_stride=1), 4
    )
    WIDTH: gl.constexpr = o_tile.shape[1]
    for c in gl.static_range(WIDTH // CHUNK):
        columns = o_tile.slice(c * CHUNK, CHUNK)
        columns.store(columns.load(layout) * factor[:, None])


@gluon.jit
def correct_tile(t, o_tmem, mailbox, at, form: gl.constexpr):
    """Rescale o[t] by the factors in the mailbox, where any row of it needs that."""
    layout: gl.constexpr = tmem_reg_layout(
        gl.float32, (ROWS, CHUNK), TensorMemoryLayout([ROWS, CHUNK], col_stride=1), 4
    )
    mail, mail_ready, mail_free = mailbox
    mbarrier.wait(mail_ready.index(t), at.parity)
    factor = mail.index(2 * t).load(gl.SliceLayout(1, layout))
    mbarrier.arrive(mail_free.index(t))
    needed = gl.max((factor != 1.0).to(gl.int32), 0)
    if needed > 0:
        rescale_part(o_tmem[0].index(t), factor)
        if form.rest_dv:
            rescale_part(o_tmem[1].index(t), factor)


@gluon.jit
def stage_part(o_tile, smem, slot, inverse, blocks):
    """A part of o times its rows' inverse into its buffer; zeros where no product was made."""
    layout: gl.constexpr = tmem_reg_layout(
        gl.float32, (ROWS, CHUNK), TensorMemoryLayout([ROWS, CHUNK], col_stride=1), 4
    )
    WIDTH: gl.constexpr = o_tile.shape[1]
    tile = tile_2d(smem, slot)
    for c in gl.static_range(WIDTH // CHUNK):
        columns = gl.full([ROWS, CHUNK], 0.0, gl.float32, layout)
        if blocks > 0:
            columns = o_tile.slice(c * CHUNK, CHUNK).load(layout) * inverse[:, None]
        tile.slice(c * CHUNK, CHUNK, dim=1).store(columns.to(smem.dtype))


@gluon.jit
def finish_tile(t, tile, lse, sinks, o, mailbox, out, at, out_at, work, form: gl.constexpr):
    """lse, and o[t] normalised into its buffer, from the row sums and maxima in the mailbox."""
    layout: gl.constexpr = tmem_reg_layout(
        gl.float32, (ROWS, CHUNK), TensorMemoryLayout([ROWS, CHUNK], col_stride=1), 4
    )
    entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k = tile
    tiles, sizes, limits, numbers, faults, counter = work
    heads, total_q = sizes[1] * form.tuning.joined, sizes[2]
    mail, mail_ready, mail_free = mailbox
    o_tmem, o_ready = o
    out_smem, out_ready, out_free = out
    mail_at, o_at = at
    mbarrier.wait(mail_ready.index(t), mail_at.parity)
    row_sum = mail.index(2 * t).load(gl.SliceLayout(1, layout))
    row_max = mail.index(2 * t + 1).load(gl.SliceLayout(1, layout))
    mbarrier.arrive(mail_free.index(t))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    m_offsets = m_start + t * form.stage_queries + queries_of(row, form)
    head, exists = heads_of(row, head, m_offsets < seqlen_q, form)
    left, right = band_of(limits)
    first, stop = row_interval(m_offsets, seqlen_q, seqlen_k, (seqlen_k, left, right), 0, form)
    sink = 0.0
    if form.sinks:
        sink = load_sinks(sinks, head, exists, form)
    inverse, row_lse = finish(row_max, row_sum, first >= stop, sink, form)
    if form.packed:
        broken = breaks_promise(m_offsets, seqlen_k, limits)
        inverse = gl.where(broken, float("nan"), inverse)
        row_lse = gl.where(broken, float("nan"), row_lse)
    lse_rows = lse + (entry.to(gl.int64) * heads + head) * total_q + q_start
    gl.store(lse_rows + m_offsets, row_lse, mask=exists)
    if blocks > 0:
        mbarrier.wait(o_ready.index(t), o_at.parity)
    mbarrier.wait(out_free.index(out_at.stage), out_at.parity ^ 1)
    stage_part(o_tmem[0].index(t), out_smem[0], out_at.stage, inverse, blocks)
    if form.rest_dv:
        stage_part(o_tmem[1].index(t), out_smem[1], out_at.stage, inverse, blocks)
    fence_async_shared()
    mbarrier.arrive(out_ready.index(out_at.stage))
    return out_at.next()


@gluon.jit
def correct_partition(board, lse, sinks, s, o, mailbox, out, work, form: gl.constexpr):
    words, told, told_free = board
    s_tmem, s_ready, p_o_rescale, p_ready_2 = s
    o_tmem, o_ready = o
    mail_at = ring_start(1)
    o_at = ring_start(1)
    out_at = ring_start(form.tuning.out_stages)
    told_at = ring_start(2)
    while is_told(words, told, told_at):
        blocks = read_tile(words, told_at.stage)[4]
        if blocks > 0:
            mbarrier.arrive(p_o_rescale.index(0))  # the tile before has been read out of o
            mbarrier.arrive(p_o_rescale.index(1))
        for _ in range(1, blocks):
            for t in range(2):
                correct_tile(t, o_tmem, mailbox, mail_at, form)
                mbarrier.arrive(p_o_rescale.index(t))
            mail_at = mail_at.next()
        tile = read_tile(words, told_at.stage)  # again, rather than kept in registers meanwhile
        mbarrier.arrive(told_free.index(told_at.stage))
        told_at = told_at.next()
        for t in range(2):
            out_at = finish_tile(t, tile, lse, sinks, o, mailbox, out, (mail_at, o_at), out_at, work, form)
        mail_at = mail_at.next()
        if tile[4] > 0:
            o_at = o_at.next()


@gluon.jit
def store_partition(views, board, out, work, form: gl.constexpr):
    JOINED: gl.constexpr = form.tuning.joined > 1
    tiles, sizes, limits, numbers, faults, counter = work
    words, told, told_free = board
    out_smem, out_ready, out_free = out
    out_at = ring_start(form.tuning.out_stages)
    told_at = ring_start(2)
    while is_told(words, told, told_at):
        entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k = read_tile(words, told_at.stage)
        mbarrier.arrive(told_free.index(told_at.stage))
        told_at = told_at.next()
        place = (entry, q_start, seqlen_q, sizes[1])
        for t in gl.static_range(2):
            mbarrier.wait(out_ready.index(out_at.stage), out_at.parity)
            row = m_start + t * form.stage_queries
            copy_out(views[0], place, head, row, 0, out_smem[0].index(out_at.stage), form, JOINED)
            if form.rest_dv:
                copy_out(
                    views[1], place, head, row, views[0].block_shape[-1], out_smem[1].index(out_at.stage), form, JOINED
                )
            tma_store_wait(0)
            mbarrier.arrive(out_free.index(out_at.stage))
            out_at = out_at.next()


# ---------------------------------------------------------------- the kernel


@gluon.jit
def columns_for(width: gl.constexpr):
    """Tensor memory for a part of o of both query stages."""
    return allocate_tensor_memory(gl.float32, [2, ROWS, width], TensorMemoryLayout([ROWS, width], col_stride=1))


@gluon.jit
def forward_kernel(q_desc, k_desc, v_desc, o_desc, q_rest, k_rest, v_rest, o_rest, pointers, work, form: gl.constexpr):
    """Descriptors of a tile's first columns and of the rest (None where there is none), as `device.tma` describes; pointers (lse
    [B, H, S_q] or [H, T_q], sinks [H] or None, cu_seqlens_q, cu_seqlens_k, error word, counter of tiles); work (tiles in all, sizes, limits,
    numbers): `device.persistent_launch.work_of`."""
    STAGES: gl.constexpr = form.tuning.stages
    OUT_STAGES: gl.constexpr = form.tuning.out_stages
    SOFTMAX: gl.constexpr = form.tuning.registers[0]
    FEW: gl.constexpr = form.tuning.registers[1]
    lse, sinks, cu_seqlens_q, cu_seqlens_k, faults, counter = pointers
    tiles, sizes, limits, numbers = work
    dtype: gl.constexpr = q_desc.dtype
    q_views, k_views, v_views, o_views = (q_desc, q_rest), (k_desc, k_rest), (v_desc, v_rest), (o_desc, o_rest)
    s_tmem = allocate_tensor_memory(
        gl.float32, [2, ROWS, form.tuning.block_n], TensorMemoryLayout([ROWS, form.tuning.block_n], col_stride=1)
    )
    if form.rest_dv:
        o_tmem = (columns_for(form.block_dv - form.rest_dv), columns_for(form.rest_dv))
    else:
        o_tmem = (columns_for(form.block_dv),)
    words = gl.allocate_shared_memory(gl.int32, [2, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    board = (words, ring(2, 1), ring(2, READERS))
    q = (tiles_for(2, q_views, form.rest_d), ring(2, 1), ring(1, 1))
    kv = (tiles_for(STAGES, k_views, form.rest_d), ring(STAGES, 1), ring(STAGES, 1))
    s = (s_tmem, ring(2, 1), ring(2, 2), ring(2, 1))
    o = (o_tmem, ring(2, 1))
    mailbox = (mail, ring(2, 1), ring(2, 1))
    out = (tiles_for(OUT_STAGES, o_views, form.rest_dv), ring(OUT_STAGES, 1), ring(OUT_STAGES, 1))
    work = (tiles, sizes, limits, numbers, faults, counter)
    gl.warp_specialize(
        [
            (correct_partition, (board, lse, sinks, s, o, mailbox, out, work, form)),
            (mma_partition, (board, q, kv, s, o, form)),
            (load_partition, ((q_views, k_views, v_views), (cu_seqlens_q, cu_seqlens_k), board, q, kv, work, form)),
            (store_partition, (o_views, board, out, work, form)),
            (softmax_partition, (gl.constexpr(0), board, s, mailbox, work, dtype, form)),
            (softmax_partition, (gl.constexpr(1), board, s, mailbox, work, dtype, form)),
        ],
        [1, 1, 1, 4, 4],
        [FEW, FEW, FEW, SOFTMAX, SOFTMAX],
    )
