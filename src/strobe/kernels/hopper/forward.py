"""Forward attention on Hopper: one warp loads by TMA, two or three consumers of four warps each multiply by wgmma.

    a program walks tiles of ROWS * consumers queries, the longest first; for each

    load_partition   q[w]: waits q_free[w], signals q_ready[w]      k[stage], v[stage]: wait *_free, signal *_ready
    mma_partition w  s = q k^T | p = softmax(s) | o += p v          frees k after its product, v after its own

           QK 0 | softmax 0 | QK 1, PV 0 in flight | softmax 1 over them | QK 2, PV 1 | ... | PV last | out, lse
    barrier   arrivals                  says
    q_ready   1 and the tile's bytes    q[w] has landed                    q_free   1          consumer w is done with q[w]
    k_ready   1 and the tile's bytes    k[stage] has landed                k_free   consumers  all are done with k[stage]
    v_ready   1 and the tile's bytes    v[stage] has landed                v_free   consumers  all are done with v[stage]

p stays in registers; the sum of a row is gathered across lanes once, at the end; o leaves through shared memory by TMA, while the next
tile's q, k and v are on their way. TMA gives zeros beyond the last row and column and writes nothing there, so lengths may be ragged.

Sources: FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2; online softmax (arXiv 1805.02867), algorithm 3.
"""

from ..device.dialect import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..device.masking import row_interval
from ..device.softmax import tanh

ROWS: gl.constexpr = gl.constexpr(64)  # of one consumer: wgmma's tile
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)


@aggregate
class Position:
    """Where one side of a ring stands: its stage, and the parity of the phase it waits for next."""

    stage: gl.tensor
    parity: gl.tensor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, stage, parity, stages):
        self.stage = stage
        self.parity = parity
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def next(self):
        last = self.stage + 1 == self.stages
        return Position(gl.where(last, 0, self.stage + 1), gl.where(last, self.parity ^ 1, self.parity), self.stages)


@gluon.jit
def ring_start(stages: gl.constexpr):
    return Position(gl.to_tensor(0), gl.to_tensor(0), stages)


@gluon.jit
def tile_of(turn, sizes, limits, form: gl.constexpr):
    """(whether there is one, batch entry, query head, first row, first key block, key blocks) of a program's next tile.

    Causal tiles go by falling cost, in sections of heads whose keys and values fit in L2; programs take them to and fro, so that what
    each gets evens out. Others go row by row within a head.
    """
    BLOCK_M: gl.constexpr = form.tuning.consumers * 64
    BLOCK_N: gl.constexpr = form.tuning.block_n
    batch, heads, seqlen_q, seqlen_k, tiles_m, section = sizes
    programs = gl.num_programs(0)
    if form.mask.right and not form.mask.left:
        tile = turn * programs + gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
        rest = tile % (tiles_m * section)
        m_block = tiles_m - 1 - rest // section
        index = tile // (tiles_m * section) * section + rest % section
        exists = index < batch * heads
    else:
        tile = turn * programs + gl.program_id(0)
        m_block = tile % tiles_m
        index = tile // tiles_m
        exists = index < batch * heads
    m_start = m_block * BLOCK_M
    n_first, n_stop = keys_of_rows(m_start, BLOCK_M, sizes, limits, form)
    n_begin = n_first // BLOCK_N
    blocks = gl.maximum(gl.cdiv(n_stop, BLOCK_N) - n_begin, 0)
    return exists, index // heads, index % heads, m_start, n_begin, blocks


@gluon.jit
def keys_of_rows(m_start, rows: gl.constexpr, sizes, limits, form: gl.constexpr):
    """Keys [first, stop) that some row of m_start .. m_start + rows - 1 sees."""
    batch, heads, seqlen_q, seqlen_k, tiles_m, section = sizes
    left, right = limits
    n_first, full_stop = row_interval(m_start, seqlen_q, seqlen_k, (seqlen_k, left, right), 0, form)
    full_first, n_stop = row_interval(gl.minimum(m_start + rows, seqlen_q) - 1, seqlen_q, seqlen_k, (seqlen_k, left, right), 0, form)
    return n_first, n_stop


@gluon.jit
def load_partition(views, q, k, v, work, form: gl.constexpr):
    CONSUMERS: gl.constexpr = form.tuning.consumers
    q_desc, k_desc, v_desc = views
    turns, sizes, limits, numbers = work
    q_smem, q_ready, q_free = q
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    at = ring_start(form.tuning.stages)
    q_at = ring_start(1)
    for turn in range(turns):
        exists, entry, head, m_start, n_begin, blocks = tile_of(turn, sizes, limits, form)
        if exists:
            kv_head = head // form.group
            for w in gl.static_range(CONSUMERS):
                mbarrier.wait(q_free.index(w), q_at.parity ^ 1)
                mbarrier.expect(q_ready.index(w), q_desc.block_type.nbytes)
                tma_load(q_desc, [entry, head, m_start + w * ROWS, 0], q_ready.index(w), q_smem.index(w))
                if w == 0:
                    if blocks > 0:  # the first keys, before the other consumers' queries
                        load_keys(k_desc, entry, kv_head, (n_begin + blocks - 1) * form.tuning.block_n, at, k_smem, k_ready, k_free)
            q_at = q_at.next()
            for i in range(blocks):
                n_start = (n_begin + blocks - 1 - i) * form.tuning.block_n
                v_at = at
                at = at.next()
                if i + 1 < blocks:
                    load_keys(k_desc, entry, kv_head, n_start - form.tuning.block_n, at, k_smem, k_ready, k_free)
                load_keys(v_desc, entry, kv_head, n_start, v_at, v_smem, v_ready, v_free)


@gluon.jit
def load_keys(desc, entry, head, row, at, smem, ready, free):
    """One tile of keys or values into its stage, once that is free."""
    mbarrier.wait(free.index(at.stage), at.parity ^ 1)
    mbarrier.expect(ready.index(at.stage), desc.block_type.nbytes)
    tma_load(desc, [entry, head, row, 0], ready.index(at.stage), smem.index(at.stage))


@gluon.jit
def tile_2d(ring, stage):
    """A stage of a ring as rows and columns: TMA sees it as a block [1, 1, rows, columns] of [B, H, S, D]."""
    tile = ring.index(stage)
    shape: gl.constexpr = [tile.shape[2], tile.shape[3]]
    return tile.reshape(shape)


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2, lift: gl.constexpr, lanes: gl.constexpr, form: gl.constexpr):
    """(p, rescale, row_max, row_sum): device.softmax.online_step with the row sum [ROWS, 8] left spread over lanes.

    Every lane keeps the sum of its own columns, which are gathered once, after the last step. row_max is what p is taken
    against: `lift` below the maximum, so that p reaches up to 2^lift. In float16 a p under 2^-14 is rounded to multiples of 2^-24, and
    where one key holds nearly all weight the others are that small (1.3 times the element-wise bound without the lift).
    """
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2 - lift)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[:, None])
    rescale = gl.exp2(row_max - base)
    columns: gl.constexpr = form.tuning.block_n // 8
    part = gl.convert_layout(gl.sum(gl.reshape(p, [64, columns, 8]), 1), lanes, assert_trivial=True)
    spread = gl.convert_layout(rescale, gl.SliceLayout(1, lanes), assert_trivial=True)
    return p, rescale, new_max, row_sum * spread[:, None] + part


@gluon.jit
def edges_of(m_start, sizes, limits, form: gl.constexpr):
    """(first key of row m_start, its stop by the diagonal alone, stop of all keys): three scalars, since consumers have few registers."""
    batch, heads, seqlen_q, seqlen_k, tiles_m, section = sizes
    left, right = limits
    diagonal = m_start + (seqlen_k - seqlen_q)
    return diagonal - left, diagonal + right + 1, seqlen_k


@gluon.jit
def scores(s, n_start, columns, edges, softcap, form: gl.constexpr):
    """Raw scores of a product: capped, and -inf where a row of this consumer does not see the key."""
    if form.softcap:
        s = tanh(s * softcap)
    if form.masks:
        first_edge, stop_edge, key_stop = edges
        layout: gl.constexpr = s.type.layout
        n_stop = n_start + form.tuning.block_n
        partial = n_stop > key_stop
        if form.mask.right:
            partial = partial | (n_stop > stop_edge)
        if form.mask.left:
            partial = partial | (n_start < first_edge + (ROWS - 1))
        if partial:
            lane = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            stop = lane * 0 + (key_stop - n_start)
            if form.mask.right:
                stop = gl.minimum(stop, lane + (stop_edge - n_start))
            s = gl.where(stop[:, None] > columns[None, :], s, float("-inf"))
            if form.mask.left:
                s = gl.where((lane + (first_edge - n_start))[:, None] <= columns[None, :], s, float("-inf"))
    return s


@gluon.jit
def take_turn(w: gl.constexpr, consumers: gl.constexpr):
    """Wait until the consumer before has issued its products: named barrier 9 + w, its 128 threads and ours. Numbers are written out: one in
    a register makes ptxas reserve all 16 barriers."""
    if w == 0:
        gl.inline_asm_elementwise("bar.sync 9, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif w == 1:
        gl.inline_asm_elementwise("bar.sync 10, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 11, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(w: gl.constexpr, consumers: gl.constexpr):
    """Let the next consumer issue."""
    if (w + 1) % consumers == 0:
        gl.inline_asm_elementwise("bar.arrive 9, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif (w + 1) % consumers == 1:
        gl.inline_asm_elementwise("bar.arrive 10, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 11, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def attend(w: gl.constexpr, q, k, v, at, tile, work, form: gl.constexpr):
    """(o, row_max, row_sum, position after the last stage) over a tile's key blocks, of which there is at least one, the last first."""
    BLOCK_N: gl.constexpr = form.tuning.block_n
    WIDTH_V: gl.constexpr = form.block_dv
    m_start, n_begin, blocks = tile
    turns, sizes, limits, numbers = work
    scale_log2, softcap = numbers
    edges = edges_of(m_start, sizes, limits, form)
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    lanes: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = k_smem.dtype
    lift: gl.constexpr = 14.0 if dtype == gl.float16 else 0.0
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, s_layout)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.full([ROWS, 8], 0.0, gl.float32, lanes)
    o = gl.full([ROWS, WIDTH_V], 0.0, gl.float32, o_layout)
    n_start = (n_begin + blocks - 1) * BLOCK_N
    mbarrier.wait(k_ready.index(at.stage), at.parity)
    s = warpgroup_mma(q, tile_2d(k_smem, at.stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(at.stage))
    s = scores(s, n_start, columns, edges, softcap, form)
    p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2, lift, lanes, form)
    p_reg = gl.convert_layout(p.to(dtype), p_layout)
    for i in range(1, blocks):
        v_at = at
        at = at.next()
        mbarrier.wait(k_ready.index(at.stage), at.parity)
        if form.tuning.ping_pong:
            take_turn(w, form.tuning.consumers)
        s = warpgroup_mma(q, tile_2d(k_smem, at.stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        if form.tuning.late_rescale:
            o = o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
        mbarrier.wait(v_ready.index(v_at.stage), v_at.parity)
        o = warpgroup_mma(p_reg, tile_2d(v_smem, v_at.stage), o, is_async=True)
        if form.tuning.ping_pong:
            pass_turn(w, form.tuning.consumers)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_free.index(at.stage))
        s = scores(s, n_start - i * BLOCK_N, columns, edges, softcap, form)
        p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2, lift, lanes, form)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_free.index(v_at.stage))
        if not form.tuning.late_rescale:
            o = o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
        p_reg = gl.convert_layout(p.to(dtype), p_layout)
    if form.tuning.late_rescale:
        o = o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
    mbarrier.wait(v_ready.index(at.stage), at.parity)
    o = warpgroup_mma(p_reg, tile_2d(v_smem, at.stage), o, is_async=True)
    total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, s_layout))
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_free.index(at.stage))
    return o, row_max, total, at.next()


@gluon.jit
def finish(o, row_max, row_sum, empty, sink, form: gl.constexpr):
    """(what o is multiplied by, lse) of each row; `empty` rows see no key: the mask says so, not a maximum of -inf."""
    top = gl.where(row_max == float("-inf"), 0.0, row_max)
    lse_empty = float("-inf")
    shrink = row_sum * 0.0 + 1.0
    if form.sinks:
        sink_log2 = sink * LOG2_E
        last = gl.maximum(row_max, sink_log2)
        last = gl.where(last == float("-inf"), 0.0, last)
        shrink = gl.exp2(row_max - last)
        row_sum = row_sum * shrink + gl.exp2(sink_log2 - last)
        top = last
        lse_empty = sink
    return gl.where(empty, 0.0, shrink / row_sum), gl.where(empty, lse_empty, top * LN_2 + gl.log(row_sum))


@gluon.jit
def mma_partition(w: gl.constexpr, out, q, k, v, o_smem, work, form: gl.constexpr):
    o_desc, lse, sinks = out
    turns, sizes, limits, numbers = work
    q_smem, q_ready, q_free = q
    batch, heads, seqlen_q, seqlen_k, tiles_m, section = sizes
    left, right = limits
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.tuning.block_n, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_dv, 16])
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    at = ring_start(form.tuning.stages)
    q_at = ring_start(1)
    if form.tuning.ping_pong:
        if w == form.tuning.consumers - 1:
            pass_turn(w, form.tuning.consumers)  # consumer 0 begins
    for turn in range(turns):
        exists, entry, head, m_start, n_begin, blocks = tile_of(turn, sizes, limits, form)
        if exists:
            m_start += w * ROWS
            mbarrier.wait(q_ready.index(w), q_at.parity)
            q_tile = tile_2d(q_smem, w)
            if form.tuning.q_in_registers:
                q_tile = q_tile.load(gl.DotOperandLayout(0, s_layout, 2))
                mbarrier.arrive(q_free.index(w))
            row_max = gl.full([ROWS], float("-inf"), gl.float32, rows)
            row_sum = gl.full([ROWS], 0.0, gl.float32, rows)
            o = gl.full([ROWS, form.block_dv], 0.0, gl.float32, o_layout)
            if blocks > 0:
                o, row_max, row_sum, at = attend(w, q_tile, k, v, at, (m_start, n_begin, blocks), work, form)
            m_offsets = m_start + gl.arange(0, ROWS, rows)
            first, stop = row_interval(m_offsets, seqlen_q, seqlen_k, (seqlen_k, left, right), 0, form)
            sink = 0.0
            if form.sinks:
                sink = gl.load(sinks + head).to(gl.float32)
            inverse, row_lse = finish(o, row_max, row_sum, first >= stop, sink, form)
            o = o * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
            lse_rows = lse + (entry.to(gl.int64) * heads + head) * seqlen_q
            gl.store(lse_rows + m_offsets, row_lse, mask=m_offsets < seqlen_q)
            tma_store_wait(0)  # this consumer's tile before has left its staging buffer
            staging = o_smem.index(w)
            tile_2d(o_smem, w).store(o.to(o_smem.dtype))
            fence_async_shared()
            tma_store(o_desc, [entry, head, m_start, 0], staging)
            if not form.tuning.q_in_registers:
                if form.tuning.o_over_q:
                    tma_store_wait(0)
                mbarrier.arrive(q_free.index(w))
            q_at = q_at.next()
    tma_store_wait(0)


@gluon.jit
def ring(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` barriers of `arrivals` arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse, sinks, turns, sizes, limits, numbers, form: gl.constexpr):
    """Descriptors of [B, H, S, D]; lse [B, H, S_q]; sinks [H] or None; turns: tiles of the busiest program;
    sizes (B, H, S_q, S_k, row tiles a head, heads in an L2 section); limits (left, right); numbers (scale_log2, softcap)."""
    STAGES: gl.constexpr = form.tuning.stages
    CONSUMERS: gl.constexpr = form.tuning.consumers
    SLOTS: gl.constexpr = 2 if CONSUMERS == 2 else 4  # shapes are powers of two
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, ROWS, form.block_d], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, form.tuning.block_n, form.block_d], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, form.tuning.block_n, form.block_dv], v_desc.layout)
    if form.tuning.o_over_q:
        o_smem = q_smem
    else:
        o_smem = gl.allocate_shared_memory(o_desc.dtype, [SLOTS, 1, 1, ROWS, form.block_dv], o_desc.layout)
    q = (q_smem, ring(CONSUMERS, 1), ring(CONSUMERS, 1))
    k = (k_smem, ring(STAGES, 1), ring(STAGES, CONSUMERS))
    v = (v_smem, ring(STAGES, 1), ring(STAGES, CONSUMERS))
    out = (o_desc, lse, sinks)
    views = (q_desc, k_desc, v_desc)
    work = (turns, sizes, limits, numbers)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), out, q, k, v, o_smem, work, form)),
                (mma_partition, (gl.constexpr(1), out, q, k, v, o_smem, work, form)),
                (mma_partition, (gl.constexpr(2), out, q, k, v, o_smem, work, form)),
                (load_partition, (views, q, k, v, work, form)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), out, q, k, v, o_smem, work, form)),
                (mma_partition, (gl.constexpr(1), out, q, k, v, o_smem, work, form)),
                (load_partition, (views, q, k, v, work, form)),
            ],
            [4, 1],
            [240, 24],
        )
