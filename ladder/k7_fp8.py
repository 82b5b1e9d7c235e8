"""k7, 8 bits: q, k, v and weights in e4m3, twice the tensor cores' rate. Operand layouts, a transposed V, scaled
weights, short sums.

The idea: wgmma multiplies 8-bit numbers at twice the rate, and they take half the memory. What that asks for:

V transposed   16-bit wgmma reads its right operand in either major order, 8-bit only with the dimension it sums over
               along rows. K is so, V is not.
               `transpose_kernel` writes v [S, D] as [D, S] once, before, as fast as memory copies: 26 us, of 150 at 1k
               causal, 610 at 8k (H100).
Layouts        a lane's accumulator holds, of every 8 columns, columns 2t and 2t + 1 (t its place in the quad). As 8-bit
               operand it must hold, of
               every 16, columns 4t to 4t + 3: other columns, in other lanes. But a sum over keys may take them in any
               order: the weights stay where they are, and V's columns are permuted to match, which `transpose_kernel`
               does on the way. Of each 32 keys, place 16 i1 + 4 t + 2 i0 + e holds key 16 i1 + 8 i0 + 2 t + e. In
               registers it is a renaming: `convert_layout(..., assert_trivial=True)`.
Weights        are at most 1, and e4m3 ends at 2^-9: everything below 2^-10 would be lost. They are taken against the
               row's maximum less 4.5 in units
               of log2. The maximum in use is at most 4 below, as in k6: they reach 362 of e4m3's 448, and end at 2^-13 of the
               largest.
Turns          k6 issues the next scores before this softmax. Here weights would outlive a loop's turn for that, and
               8-bit values that do are taken
               apart into bytes. So a consumer has the tensor cores for itself for two products, o += P V and the next
               scores, and takes its softmax while the two others have them. Without turns all three multiply at once,
               and then all wait at their exponents.
Sums           Hopper's 8-bit products keep about 14 bits of what they add up. q k^T adds D terms, but o adds every key
               there is: at long rows it
               stagnates. `two_level` starts each tile's product from zero and adds it to o in float32, for 64 more
               registers a thread.
Tiles          are walked as in k5, but causal ones end where queries do, lest the longest of a head be one for 64 of
               192 rows; V follows its K.
Scales         `descale` (of q, k, v), what a unit of each is worth: the first two go into the softmax's scale, the
               third into out's division.

Cost model, a tile of 64 C queries (C consumers) and 128 keys, D columns, in 8 bits, on one SM:

    FLOPs       4 * 64 C * 128 D: 1,536 clocks of tensor cores for C = 3, D = 128
    exponents   1,536 clocks: as many. Issue slots: 4.5 instructions a score (scale, maximum, exponent, sum, half a
                rounding), three warps a scheduler
    bytes       256 D of K and V a tile; before, 2 S D H_kv to transpose V
    shared      D (2 64 + 128 for the output) 4, and 2 S 128 D for S stages: 192 KiB for D = 128, S = 2
    registers   o D / 2, scores 64, weights 16, of 160

What limits it: waits at D = 128 (half of the tensor cores' rate is left), exponents at 64; and accuracy: an outlier
takes the scale from all others.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024    0.3218     427.1          21.6
     64  dense     8192      1.88     584.9          29.6
     64  dense    16384     3.665       600          30.3
     64  causal    1024    0.2187     314.6            16
     64  causal    8192     1.073     512.3          25.9
     64  causal   16384     2.007     547.8          27.7
    128  dense     1024    0.2203     623.8          31.5
    128  dense     8192     1.213     906.7          45.8
    128  dense    16384     2.306     953.7          48.2
    128  causal    1024    0.1542       446          22.7
    128  causal    8192    0.7002     785.2          39.7
    128  causal   16384     1.286     854.7          43.2

on NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-25
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.device.dialect import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier,
    scale_rows,
    stay_before,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .harness.harness import Rung, Size, check_inputs, outputs, programs

LOG2_E = 1.4426950408889634
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
ROWS: gl.constexpr = gl.constexpr(64)  # of one consumer: what one wgmma takes
LAG: gl.constexpr = gl.constexpr(4.0)  # log2 by which a row's maximum may grow before o is rescaled
LIFT: gl.constexpr = gl.constexpr(4.5)  # weights reach 2^4.5, and 2^LAG times that; e4m3 ends at 448
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}


@dataclass(frozen=True)
class Form:
    head_dim: int
    causal: bool
    masks: bool = True  # whether any tile may hold a hidden key; else the loop has no code for them
    block_n: int = 128
    stages: int = 2
    turns: int = 1  # consumers take turns at the tensor cores
    two_level: int = 0  # each tile's product with V starts from zero and is added in float32

    @property
    def consumers(self) -> int:
        """Three of 160 registers; two of 240 where two_level asks for D / 2 more."""
        return 2 if self.two_level else 3

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def slots(self) -> int:
        return (
            2 if self.consumers == 2 else 4
        )  # tiles of o, and half of q's, that shared memory is laid out for: a power of two

    def shared_bytes(self) -> int:
        return self.head_dim * (4 * 64 * self.slots + 2 * self.stages * self.block_n)


@triton.jit
def transpose_kernel(v, turned, seqlen, padded, heads, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """v [B, S, H, D] as [B, H, D, S], keys of each 32 in the order in which accumulators hold them; zeros beyond the
    last. Four leave as a word.
    """
    entry, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    quad, d = (
        tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4),
        tl.arange(0, HEAD_DIM),
    )  # of four places that follow each other
    word = tl.zeros([BLOCK // 4, HEAD_DIM], tl.int32)
    for i in tl.static_range(4):
        key = quad // 4 * 16 + quad % 4 * 2 + (i // 2) * 8 + i % 2
        rows = v + (entry * seqlen * heads + head) * HEAD_DIM + key[:, None] * heads * HEAD_DIM + d[None, :]
        byte = tl.load(rows, mask=(key < seqlen)[:, None], other=0)
        word |= byte.to(tl.int32) << 8 * i
    places = turned + ((entry * heads + head) * HEAD_DIM + d[None, :]) * (padded // 4) + quad[:, None]
    tl.store(places, word, mask=(quad < padded // 4)[:, None])


@gluon.jit
def as_rows(tile):
    """A tile as rows and columns: TMA sees it as a block [1, 1, rows, columns]."""
    return tile.reshape([tile.shape[-2], tile.shape[-1]])


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barrier.index(i), count=arrivals)
    return barrier


@gluon.jit
def next_of(stage, parity, stages: gl.constexpr):
    """The next position in a ring: (stage, parity)."""
    return gl.where(stage == stages - 1, 0, stage + 1), gl.where(stage == stages - 1, parity ^ 1, parity)


@gluon.jit
def copy_tile(desc, place, row, ready, smem):
    """Have TMA fetch rows `row`.. of one head; `ready` turns when all bytes are there. Rows beyond the last are
    zeros."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    tma_load(desc, [place[0], place[1], row, 0], ready, smem)


@gluon.jit
def tile_number(turn):
    """Which tile this program takes in its turn: to and fro, so that who had the longest of a round has the shortest of
    the next.
    """
    return turn * gl.num_programs(0) + gl.where(
        turn % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0)
    )


@gluon.jit
def tile_of(number, sizes, form: gl.constexpr):
    """(batch entry, head, first query, tiles of keys); causal tiles of a section of heads from the longest to the
    shortest.
    """
    heads, tiles_m, section = sizes[0], sizes[4], sizes[6]
    index, m_block = number // tiles_m, number % tiles_m
    if form.causal:
        first = number // (tiles_m * section) * section
        within, section = number - first * tiles_m, gl.minimum(section, sizes[5] // tiles_m - first)
        index, m_block = first + within % section, tiles_m - 1 - within // section
    m_start = m_block * form.block_m
    # tiles end where queries do, and consumers without rows have none before the first query, where a tile sees fewest
    # keys
    if form.causal:
        m_start -= (tiles_m * form.block_m - sizes[2]) // ROWS * ROWS
    return index // heads, index % heads, m_start, blocks_of(m_start, form.block_m, sizes, form)


@gluon.jit
def blocks_of(m_start, rows: gl.constexpr, sizes, form: gl.constexpr):
    """Tiles of keys that some of these rows sees."""
    n_stop = sizes[3]
    if form.causal:
        n_stop = gl.minimum(n_stop, gl.maximum(m_start + rows + sizes[3] - sizes[2], 0))
    return gl.where(m_start < sizes[2], gl.cdiv(n_stop, form.block_n), 0)


@gluon.jit
def own_rows(m_start, w: gl.constexpr, sizes):
    return gl.where(m_start + w * ROWS < 0, sizes[2], m_start + w * ROWS)


@gluon.jit
def load_partition(q_desc, k_desc, v_desc, q, k, v, sizes, form: gl.constexpr):
    CONSUMERS: gl.constexpr = form.consumers
    q_smem, q_ready, q_free = q
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    at, parity = gl.to_tensor(0), gl.to_tensor(1)
    turn = gl.to_tensor(0)
    while tile_number(turn) < sizes[5]:
        entry, head, m_start, blocks = tile_of(tile_number(turn), sizes, form)
        kv_place = (entry, head // sizes[1])
        for w in gl.static_range(CONSUMERS):
            q_at = w + CONSUMERS * (turn & 1)
            mbarrier.wait(q_free.index(q_at), (turn >> 1 & 1) ^ 1)
            copy_tile(q_desc, (entry, head), own_rows(m_start, w, sizes), q_ready.index(q_at), q_smem.index(q_at))
        for i in range(blocks):  # the last keys first: there a causal tile is masked
            n_start = (blocks - 1 - i) * form.block_n
            mbarrier.wait(k_free.index(at), parity)
            copy_tile(k_desc, kv_place, n_start, k_ready.index(at), k_smem.index(at))
            mbarrier.wait(v_free.index(at), parity)
            mbarrier.expect(v_ready.index(at), v_desc.block_type.nbytes)  # V's tile is [D, keys]: the key is a column
            tma_load(v_desc, [entry, kv_place[1], 0, n_start], v_ready.index(at), v_smem.index(at))
            at, parity = next_of(at, parity, form.stages)
        turn += 1


@gluon.jit
def take_turn(w: gl.constexpr, form: gl.constexpr):
    """Wait until the consumer before has passed it on: named barrier 9 + w, its 128 threads and ours."""
    if form.turns:
        named_barrier("bar.sync", 9 + w, 256)


@gluon.jit
def pass_turn(w: gl.constexpr, form: gl.constexpr):
    if form.turns:
        named_barrier("bar.arrive", 9 + (w + 1) % form.consumers, 256)


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2, form: gl.constexpr):
    """(p, rescale, row_max, row_sum) after one more tile; row_max in units of log2, LIFT to LIFT + LAG below. row_sum
    [64, 8] is each lane's own.
    """
    lanes: gl.constexpr = row_sum.type.layout
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2 - LIFT)
    new_max = gl.where(new_max - row_max <= LAG, row_max, new_max)  # -inf - -inf is NaN: new_max
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[:, None])
    rescale = gl.exp2(row_max - base)
    part = gl.convert_layout(gl.sum(gl.reshape(p, [64, form.block_n // 8, 8]), 1), lanes, assert_trivial=True)
    spread = gl.convert_layout(rescale, gl.SliceLayout(1, lanes), assert_trivial=True)
    return p, rescale, new_max, row_sum * spread[:, None] + part


@gluon.jit
def weights_operand(p, form: gl.constexpr):
    """p [64, N] as the left operand, in transpose_kernel's order: nothing moves. Rounded here: 8-bit values that
    outlive a branch are taken apart.
    """
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 32])
    parts = gl.reshape(p, [64, form.block_n // 32, 2, 2, 4, 2])  # key = 32 b + 16 i1 + 8 i0 + 2 t + e
    placed = gl.reshape(gl.permute(parts, [0, 1, 2, 4, 3, 5]), [64, form.block_n])
    return gl.convert_layout(placed, gl.DotOperandLayout(0, o_layout, 4), assert_trivial=True).to(gl.float8e4nv)


@gluon.jit
def hide(s, m_start, n_start, sizes, form: gl.constexpr):
    """Scores with -inf where there is no key, or causal attention does not look."""
    shift = sizes[3] - sizes[2]
    partial = n_start + form.block_n > sizes[3]
    if form.causal:
        partial = partial | (n_start + form.block_n > m_start + shift + 1)
    if partial:
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
        # a column's bits 1 and 2 are its thread's, the others its register's: apart, no register holds a column
        column = gl.arange(0, form.block_n, gl.SliceLayout(0, s.type.layout))
        by_thread, by_register = (column & 6)[None, :], (column & -7)[None, :]
        stop = rows * 0 + (sizes[3] - n_start)
        if form.causal:
            stop = gl.minimum(stop, rows + (m_start + shift + 1 - n_start))
        s = gl.where(stop[:, None] - by_thread > by_register, s, float("-inf"))
    return s


@gluon.jit
def store_rows(o_desc, o, row_max, row_sum, lse_rows, place, m_start, seqlen_q, descale_v, o_smem):
    """lse from registers; o / row_sum through shared memory by TMA, which writes no row beyond the last."""
    rows = gl.arange(0, o.shape[0], row_sum.type.layout)
    row_lse = gl.where(row_sum == 0.0, float("-inf"), row_max * LN_2 + gl.log(row_sum))
    gl.store(lse_rows + m_start + rows, row_lse, mask=rows < seqlen_q - m_start)
    inverse = gl.convert_layout(gl.where(row_sum == 0.0, 0.0, descale_v / row_sum), gl.SliceLayout(1, o.type.layout))
    tma_store_wait(0)  # the tile before has left the buffer
    as_rows(o_smem).store((o * inverse[:, None]).to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [place[0], place[1], m_start, 0], o_smem)


@gluon.jit
def skip_tiles(w: gl.constexpr, k, v, at, count, form: gl.constexpr):
    """Pass over tiles that only others' rows see. It waits for both: K may land after V, and a wait that is a round of
    the ring ahead is none.
    """
    stage, parity = at
    for _ in range(count):
        take_turn(w, form)
        pass_turn(w, form)
        mbarrier.wait(k[1].index(stage), parity)
        mbarrier.wait(v[1].index(stage), parity)
        mbarrier.arrive(k[2].index(stage))
        mbarrier.arrive(v[2].index(stage))
        stage, parity = next_of(stage, parity, form.stages)
    return stage, parity


@gluon.jit
def add_values(weights, values, o, form: gl.constexpr):
    """o plus weights times values, at once or by way of a sum of their own."""
    if form.two_level:
        return o + warpgroup_mma_wait(
            0, deps=[warpgroup_mma(weights, values, gl.zeros_like(o), use_acc=False, is_async=True)]
        )
    else:
        return warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, values, o, is_async=True)])


@gluon.jit
def attend(w: gl.constexpr, q_tile, k, v, at, m_start, blocks, sizes, scale_log2, form: gl.constexpr):
    """(o, row_max, row_sum, where the rings stand then) over all tiles of keys, at least one."""
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_n, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 32])
    zero = gl.full([ROWS, form.block_n], 0.0, gl.float32, s_layout)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.full([ROWS, 8], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32]))
    o = gl.full([ROWS, form.head_dim], 0.0, gl.float32, o_layout)
    stage, parity = at
    n_start = (blocks - 1) * form.block_n
    mbarrier.wait(k_ready.index(stage), parity)
    take_turn(w, form)
    s = warpgroup_mma_wait(
        0,
        deps=[warpgroup_mma(q_tile, as_rows(k_smem.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)],
    )
    pass_turn(w, form)
    mbarrier.arrive(k_free.index(stage))
    for i in range(1, blocks):
        v_at, v_parity = stage, parity
        stage, parity = next_of(stage, parity, form.stages)
        if form.masks:
            s = hide(s, m_start, n_start - (i - 1) * form.block_n, sizes, form)
        p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2, form)
        o = scale_rows(o, rescale)
        mbarrier.wait(v_ready.index(v_at), v_parity)
        mbarrier.wait(k_ready.index(stage), parity)
        weights = weights_operand(p, form)
        if form.head_dim == 64:
            stay_before(blocks)  # else ptxas rounds weights within the turn
        take_turn(w, form)
        o = add_values(weights, as_rows(v_smem.index(v_at)).permute((1, 0)), o, form)
        mbarrier.arrive(v_free.index(v_at))
        s = warpgroup_mma_wait(
            0,
            deps=[
                warpgroup_mma(q_tile, as_rows(k_smem.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
            ],
        )
        pass_turn(w, form)
        mbarrier.arrive(k_free.index(stage))
    if form.masks:
        s = hide(s, m_start, n_start - (blocks - 1) * form.block_n, sizes, form)
    p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2, form)
    o = scale_rows(o, rescale)
    mbarrier.wait(v_ready.index(stage), parity)
    o = add_values(weights_operand(p, form), as_rows(v_smem.index(stage)).permute((1, 0)), o, form)
    mbarrier.arrive(v_free.index(stage))
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, s_layout))
    return o, row_max, row_sum, next_of(stage, parity, form.stages)


@gluon.jit
def mma_partition(w: gl.constexpr, o_desc, o_smem, lse, q, k, v, sizes, scales, form: gl.constexpr):
    q_smem, q_ready, q_free = q
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_n, 32])
    at = (gl.to_tensor(0), gl.to_tensor(0))
    if w == form.consumers - 1:
        pass_turn(w, form)  # consumer 0 begins
    turn = gl.to_tensor(0)
    while tile_number(turn) < sizes[5]:
        entry, head, m_start, blocks = tile_of(tile_number(turn), sizes, form)
        m_start = own_rows(m_start, w, sizes)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        o = gl.full(
            [ROWS, form.head_dim], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 32])
        )
        q_at = w + form.consumers * (turn & 1)
        mbarrier.wait(q_ready.index(q_at), turn >> 1 & 1)
        own = blocks_of(m_start, ROWS, sizes, form)
        at = skip_tiles(w, k, v, at, blocks - own, form)
        if own > 0:
            o, row_max, row_sum, at = attend(
                w, as_rows(q_smem.index(q_at)), k, v, at, m_start, own, sizes, scales[0], form
            )
        mbarrier.arrive(q_free.index(q_at))
        lse_rows = lse + (entry.to(gl.int64) * sizes[0] + head) * sizes[2]
        store_rows(o_desc, o, row_max, row_sum, lse_rows, (entry, head), m_start, sizes[2], scales[1], o_smem.index(w))
        turn += 1
    tma_store_wait(0)


@gluon.jit
def attend_kernel(q_desc, k_desc, v_desc, o_desc, lse, sizes, scales, form: gl.constexpr):
    """sizes (H, queries' heads a key head, S_q, S_k, tiles of queries a head, and in all, heads a section); scales (of
    scores in log2, of v).
    """
    STAGES: gl.constexpr = form.stages
    CONSUMERS: gl.constexpr = form.consumers
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * form.slots] + q_desc.block_shape, q_desc.layout)  # noqa: RUF005 (Triton has no *)
    o_smem = gl.allocate_shared_memory(o_desc.dtype, [form.slots] + o_desc.block_shape, o_desc.layout)  # noqa: RUF005
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    q = (q_smem, barriers(2 * CONSUMERS, 1), barriers(2 * CONSUMERS, 1))
    k = (k_smem, barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    v = (v_smem, barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), o_desc, o_smem, lse, q, k, v, sizes, scales, form)),
                (mma_partition, (gl.constexpr(1), o_desc, o_smem, lse, q, k, v, sizes, scales, form)),
                (mma_partition, (gl.constexpr(2), o_desc, o_smem, lse, q, k, v, sizes, scales, form)),
                (load_partition, (q_desc, k_desc, v_desc, q, k, v, sizes, form)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), o_desc, o_smem, lse, q, k, v, sizes, scales, form)),
                (mma_partition, (gl.constexpr(1), o_desc, o_smem, lse, q, k, v, sizes, scales, form)),
                (load_partition, (q_desc, k_desc, v_desc, q, k, v, sizes, form)),
            ],
            [4, 1],
            [240, 24],
        )


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """TMA's view of a tensor [B, H, rows, columns], moved in tiles; the layout swizzles as wgmma reads it."""
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], DTYPES[tensor.dtype])
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, columns], layout)


def turn(v: Tensor) -> Tensor:
    """v [B, S, H, D] as [B, H, D, S rounded up to 128], keys in the order of transpose_kernel."""
    batch, seqlen, heads, head_dim = v.shape
    padded = -(-seqlen // 128) * 128
    turned = torch.empty(batch, heads, head_dim, padded, dtype=v.dtype, device=v.device)
    transpose_kernel[(padded // 128, heads, batch)](
        v.view(torch.uint8), turned.view(torch.int32), seqlen, padded, heads, head_dim, 128, num_warps=4
    )
    return turned


def run(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, descale: tuple[float, ...] = (1.0, 1.0, 1.0), **options: int
) -> tuple[Tensor, Tensor]:
    check_inputs(q, k, v, (torch.float8_e4m3fn,))
    batch, seqlen_q, heads, head_dim = q.shape
    form = Form(head_dim, causal, causal or k.shape[1] % options.get("block_n", Form.block_n) > 0, **options)
    out, lse = outputs(q, torch.bfloat16)
    views = [
        descriptor(tensor.transpose(1, 2), rows, head_dim) for tensor, rows in ((q, 64), (k, form.block_n), (out, 64))
    ]
    views.insert(2, descriptor(turn(v), head_dim, form.block_n))
    tiles_m = -(-seqlen_q // form.block_m)
    walkers = programs(q, tiles_m * heads * batch)
    section = (
        heads * batch if seqlen_q > 4096 else -(-4 * walkers // max(8, tiles_m))
    )  # short ones' keys and values stay in L2
    sizes = (heads, heads // k.shape[2], seqlen_q, k.shape[1], tiles_m, tiles_m * heads * batch, section)
    scales = (head_dim**-0.5 * descale[0] * descale[1] * LOG2_E, float(descale[2]))
    attend_kernel[(walkers,)](*views, lse, sizes, scales, form, num_warps=4, maxnreg=168 if form.two_level else 128)
    return out, lse


def moved(size: Size, form: Form) -> int:
    """q once and out in 16 bits, K and V once for each tile of queries that sees them; V once before, to be transposed
    and filled up.
    """
    padded, before = -(-size.seqlen_k // 128) * 128, -size.seqlen_q % form.block_m // 64 * 64 if size.causal else 0
    turned = size.head_dim * size.batch * size.heads_kv * (size.seqlen_k + padded)
    streamed = sum(size.streamed(form.block_m, form.block_n, stop, before) for stop in (0, padded))
    return size.head_dim * (3 * size.rows + streamed) + 4 * size.rows + turned


RUNG = Rung(
    "k7", "8 bits: e4m3 operands, V transposed before, weights scaled", "k6", run, Form, moved,
    ("transpose_kernel", "softmax_step", "weights_operand", "attend"), inputs=torch.float8_e4m3fn,
    weights=torch.float8_e4m3fn,
)  # fmt: skip
