"""k6, overlap: the scores of the next tile are multiplied under the softmax of this one, and consumers may take turns.

The idea: the tensor cores need not wait for a softmax, or for memory, if there is a product that does not depend on it.
Three things arrange that.

Within a consumer (intra-group overlap): q k^T of tile j + 1 needs nothing of tile j's softmax. So it is issued first,
then P V of tile j, and while both are under way the consumer waits for the scores alone (`warpgroup_mma_wait(1)`: all
but the newest product) and takes their softmax under P V:

    QK 0 | softmax 0 | QK 1, PV 0 under way | softmax 1 over them | QK 2, PV 1 under way | ...  | PV last

The price is registers: weights of j and scores of j + 1 live together. The order of loads follows: K(j + 1) before
V(j). And ptxas, which sees no reason to compute exponentials before it waits for P V, must be told: `stay_before` is a
branch that it cannot move them over.

Between consumers (ping-pong): a turn is passed round. A consumer issues its two products only in its turn, then passes
it on and takes its softmax while another's products run. Two named barriers of 256 threads do it, `bar.sync` for who
waits and `bar.arrive` for who passes. With overlap within each of two consumers there is little left to gain; where
three or four share the tensor cores (D = 64) turns are worth up to 8 %. Four have registers for tiles of 64 keys, and a
tile's ends, which nothing hides, come once in 256 rows; long dense rows prefer three, and 128 keys.

And since the softmax is now what others hide behind, it gets shorter: a row's sum stays spread over lanes, and is
gathered once at the end; and o is rescaled only where a row's maximum has grown by more than `lag`: weights reach up to
2^lag (FlashAttention-4's conditional rescaling).

Cost model, a tile of 64 C queries (C consumers) and 128 keys, D columns, in 16 bits, on one SM:

    FLOPs       4 * 64 C * 128 D: 2,048 clocks of tensor cores for C = 2, D = 128; exponents half of that, as many at D
                = 64
    bytes       512 D of K and V a tile, once for all consumers
    shared      as in k5
    registers   o D / 2, scores 64, weights 32 and the next tile's in the making: 0 spills at 240

What limits it: at D = 128 tensor cores and their power; at D = 64 exponents and issue slots as much. In turn: 0.90 to
1.05 of production's speed.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024    0.2929     469.2          47.4
     64  dense     8192     2.049     536.6          54.3
     64  dense    16384     4.008     548.6          55.5
     64  causal    1024    0.1856     370.6          37.5
     64  causal    8192     1.126     488.2          49.4
     64  causal   16384     2.167     507.5          51.3
    128  dense     1024     0.229     600.2          60.7
    128  dense     8192     1.629       675          68.2
    128  dense    16384     3.182     691.1          69.9
    128  causal    1024    0.1513     454.6            46
    128  causal    8192    0.9114     603.3            61
    128  causal   16384     1.712     642.3          64.9

on NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-25
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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

from .harness.harness import SHORT, Rung, Size, check_inputs, outputs, programs

LOG2_E = 1.4426950408889634
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
ROWS: gl.constexpr = gl.constexpr(64)  # of one consumer: what one wgmma takes
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True)
class Form:
    head_dim: int
    causal: bool
    masks: bool = True  # whether any tile may hold a hidden key; else the loop has no code for them
    short: bool = False  # rows of few keys
    block_n: int = 0  # 0: 64 for four consumers, else 128
    stages: int = 0  # 0: of 256 keys, at least two
    consumers: int = 0  # 0: two of 240 registers at D = 128; at D = 64 four of 112, but of long dense rows three of 160
    overlap: bool = True  # the next scores under this softmax
    ping_pong: int = -1  # consumers take turns at issuing products; -1: where there are three or four
    late_sum: bool = True  # sums of rows are gathered at the end
    lag: float = 8.0  # log2 by which a row's maximum may grow before o is rescaled

    def __post_init__(self) -> None:
        if self.consumers not in (0, 2, 3, 4):
            raise ValueError(
                f"consumers: got {self.consumers}, expected 2 to 4; leave it out for what fits the head dimension"
            )
        consumers = self.consumers or (2 if self.head_dim == 128 else 4 if self.causal or self.short else 3)
        block_n = self.block_n or (64 if consumers == 4 else 128)
        turns = int(consumers > 2) if self.ping_pong < 0 else self.ping_pong
        self.__dict__.update(
            block_n=block_n, stages=self.stages or max(2, 256 // block_n), consumers=consumers, ping_pong=turns
        )

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def slots(self) -> int:
        """Tiles of o that shared memory is laid out for: a power of two."""
        return 2 if self.consumers == 2 else 4

    def shared_bytes(self) -> int:
        """q in two places, o, and K and V of all stages."""
        return 2 * self.head_dim * (3 * 64 * self.slots + 2 * self.stages * self.block_n)


@gluon.jit
def as_rows(tile):
    """A tile as rows and columns: TMA sees it as a block [1, 1, rows, columns]."""
    shape: gl.constexpr = [tile.shape[-2], tile.shape[-1]]
    return tile.reshape(shape)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barrier.index(i), count=arrivals)
    return barrier


@gluon.jit
def next_of(stage, parity, stages: gl.constexpr):
    """The next position in a ring: (stage, parity)."""
    last = stage == stages - 1
    return gl.where(last, 0, stage + 1), gl.where(last, parity ^ 1, parity)


@gluon.jit
def copy_tile(desc, place, row, ready, smem):
    """Have TMA fetch rows `row`.. of one head; `ready` turns when all bytes are there. Rows beyond the last are
    zeros."""
    entry, head = place
    mbarrier.expect(ready, desc.block_type.nbytes)
    tma_load(desc, [entry, head, row, 0], ready, smem)


@gluon.jit
def tile_number(turn):
    """Which tile this program takes in its turn: to and fro, so that who had the longest of a round has the shortest of
    the next.
    """
    programs, place = gl.num_programs(0), gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def tile_of(number, sizes, form: gl.constexpr):
    """(batch entry, head, first query, tiles of keys); causal tiles of a section of heads from the longest to the
    shortest, others head by head.
    """
    heads, tiles_m, section = sizes[0], sizes[4], sizes[6]
    index, m_block = number // tiles_m, number % tiles_m
    if form.causal:
        first = number // (tiles_m * section) * section
        within, section = number - first * tiles_m, gl.minimum(section, sizes[5] // tiles_m - first)
        index, m_block = first + within % section, tiles_m - 1 - within // section
    m_start = m_block * form.block_m
    return index // heads, index % heads, m_start, blocks_of(m_start, form.block_m, sizes, form)


@gluon.jit
def blocks_of(m_start, rows: gl.constexpr, sizes, form: gl.constexpr):
    """Tiles of keys that some of these rows sees."""
    seqlen_q, seqlen_k = sizes[2], sizes[3]
    n_stop = seqlen_k
    if form.causal:
        n_stop = gl.minimum(n_stop, gl.maximum(m_start + rows + seqlen_k - seqlen_q, 0))
    return gl.where(m_start < seqlen_q, gl.cdiv(n_stop, form.block_n), 0)


@gluon.jit
def load_partition(q_desc, k_desc, v_desc, q, k, v, sizes, form: gl.constexpr):
    CONSUMERS: gl.constexpr = form.consumers
    q_smem, q_ready, q_free = q
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    k_at, k_parity = gl.to_tensor(0), gl.to_tensor(1)
    v_at, v_parity = gl.to_tensor(0), gl.to_tensor(1)
    turn = gl.to_tensor(0)
    while tile_number(turn) < sizes[5]:
        entry, head, m_start, blocks = tile_of(tile_number(turn), sizes, form)
        kv_place = (entry, head // sizes[1])
        for w in gl.static_range(CONSUMERS):
            q_at = w + CONSUMERS * (turn & 1)
            mbarrier.wait(q_free.index(q_at), (turn >> 1 & 1) ^ 1)
            copy_tile(q_desc, (entry, head), m_start + w * ROWS, q_ready.index(q_at), q_smem.index(q_at))
        for i in range(
            blocks + 1
        ):  # K of a tile comes before V of the tile above it; the last keys first: there a causal tile is masked
            if i < blocks:
                mbarrier.wait(k_free.index(k_at), k_parity)
                copy_tile(k_desc, kv_place, (blocks - 1 - i) * form.block_n, k_ready.index(k_at), k_smem.index(k_at))
                k_at, k_parity = next_of(k_at, k_parity, form.stages)
            if i > 0:
                mbarrier.wait(v_free.index(v_at), v_parity)
                copy_tile(v_desc, kv_place, (blocks - i) * form.block_n, v_ready.index(v_at), v_smem.index(v_at))
                v_at, v_parity = next_of(v_at, v_parity, form.stages)
        turn += 1


@gluon.jit
def take_turn(w: gl.constexpr, form: gl.constexpr):
    """Wait until the consumer before has passed it on: named barrier 9 + w, its 128 threads and ours."""
    if form.ping_pong:
        named_barrier("bar.sync", 9 + w, 256)


@gluon.jit
def pass_turn(w: gl.constexpr, form: gl.constexpr):
    if form.ping_pong:
        named_barrier("bar.arrive", 9 + (w + 1) % form.consumers, 256)


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2, form: gl.constexpr):
    """(p, rescale, row_max, row_sum) after one more tile of raw scores; row_max in units of log2, up to form.lag below
    the maximum. row_sum [64, 8] keeps each lane's own columns.
    """
    lanes: gl.constexpr = row_sum.type.layout
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    new_max = gl.where(new_max - row_max <= form.lag, row_max, new_max)  # -inf - -inf is NaN: new_max
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[:, None])
    rescale = gl.exp2(row_max - base)
    if form.late_sum:
        part = gl.convert_layout(gl.sum(gl.reshape(p, [64, form.block_n // 8, 8]), 1), lanes, assert_trivial=True)
    else:
        total = gl.convert_layout(gl.sum(p, 1), gl.SliceLayout(1, lanes), assert_trivial=True)
        part = gl.where(gl.arange(0, 8, gl.SliceLayout(0, lanes))[None, :] == 0, total[:, None], 0.0)
    spread = gl.convert_layout(rescale, gl.SliceLayout(1, lanes), assert_trivial=True)
    return p, rescale, new_max, row_sum * spread[:, None] + part


@gluon.jit
def hide(s, m_start, n_start, sizes, form: gl.constexpr):
    """Scores with -inf where there is no key, or causal attention does not look."""
    seqlen_q, seqlen_k = sizes[2], sizes[3]
    shift = seqlen_k - seqlen_q
    partial = n_start + form.block_n > seqlen_k
    if form.causal:
        partial = partial | (n_start + form.block_n > m_start + shift + 1)
    if partial:
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
        # a column's bits 1 and 2 are its thread's, the others its register's: apart, no register holds a column
        column = gl.arange(0, form.block_n, gl.SliceLayout(0, s.type.layout))
        by_thread, by_register = (column & 6)[None, :], (column & -7)[None, :]
        stop = rows * 0 + (seqlen_k - n_start)
        if form.causal:
            stop = gl.minimum(stop, rows + (m_start + shift + 1 - n_start))
        s = gl.where(stop[:, None] - by_thread > by_register, s, float("-inf"))
    return s


@gluon.jit
def store_rows(o_desc, o, row_max, row_sum, lse_rows, place, m_start, seqlen_q, o_smem):
    """lse from registers; o / row_sum through shared memory by TMA, which writes no row beyond the last."""
    entry, head = place
    rows = gl.arange(0, o.shape[0], row_sum.type.layout)
    row_lse = gl.where(row_sum == 0.0, float("-inf"), row_max * LN_2 + gl.log(row_sum))
    gl.store(lse_rows + m_start + rows, row_lse, mask=rows < seqlen_q - m_start)
    inverse = gl.convert_layout(gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum), gl.SliceLayout(1, o.type.layout))
    tma_store_wait(0)  # the tile before has left the buffer
    as_rows(o_smem).store((o * inverse[:, None]).to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [entry, head, m_start, 0], o_smem)


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
def attend(w: gl.constexpr, q_tile, k, v, at, m_start, blocks, sizes, scale_log2, form: gl.constexpr):
    """(o, row_max, row_sum, where the rings stand then) over all tiles of keys, at least one."""
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_n, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = k_smem.dtype
    zero = gl.full([ROWS, form.block_n], 0.0, gl.float32, s_layout)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.full([ROWS, 8], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
    o = gl.full([ROWS, form.head_dim], 0.0, gl.float32, o_layout)
    stage, parity = at
    n_start = (blocks - 1) * form.block_n
    mbarrier.wait(k_ready.index(stage), parity)
    take_turn(w, form)
    s = warpgroup_mma(q_tile, as_rows(k_smem.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
    pass_turn(w, form)
    s = warpgroup_mma_wait(0, deps=[s])
    if form.masks:
        s = hide(s, m_start, n_start, sizes, form)
    mbarrier.arrive(k_free.index(stage))
    p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2, form)
    p_reg = gl.convert_layout(p.to(dtype), p_layout)
    for i in range(1, blocks):
        v_at, v_parity = stage, parity
        stage, parity = next_of(stage, parity, form.stages)
        if not form.overlap:  # as in k5: this tile's product with V before the next one's scores
            o = add_values(p_reg, v_smem, v_ready, v_at, v_parity, o, rescale)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_free.index(v_at))
        mbarrier.wait(k_ready.index(stage), parity)
        take_turn(w, form)
        s = warpgroup_mma(q_tile, as_rows(k_smem.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
        if form.overlap:
            o = add_values(p_reg, v_smem, v_ready, v_at, v_parity, o, rescale)
        pass_turn(w, form)
        if form.overlap:
            s = warpgroup_mma_wait(1, deps=[s])  # the scores; the product with V goes on
        else:
            s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(stage))
        if form.masks:
            s = hide(s, m_start, n_start - i * form.block_n, sizes, form)
        p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2, form)
        if form.overlap:
            if form.consumers == 2:
                stay_before(blocks)  # else ptxas waits for the product first, and the exponentials run under nothing
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_free.index(v_at))
        p_reg = gl.convert_layout(p.to(dtype), p_layout)
    o = add_values(p_reg, v_smem, v_ready, stage, parity, o, rescale)
    total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, s_layout))
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_free.index(stage))
    return o, row_max, total, next_of(stage, parity, form.stages)


@gluon.jit
def add_values(p_reg, v_smem, v_ready, stage, parity, o, rescale):
    """o rescaled, where a maximum has grown, plus P V of a stage, under way."""
    o = scale_rows(o, rescale)
    mbarrier.wait(v_ready.index(stage), parity)
    return warpgroup_mma(p_reg, as_rows(v_smem.index(stage)), o, is_async=True)


@gluon.jit
def mma_partition(w: gl.constexpr, o_desc, o_smem, lse, q, k, v, sizes, scale_log2, form: gl.constexpr):
    q_smem, q_ready, q_free = q
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_n, 16])
    at = (gl.to_tensor(0), gl.to_tensor(0))
    if w == form.consumers - 1:
        pass_turn(w, form)  # consumer 0 begins
    turn = gl.to_tensor(0)
    while tile_number(turn) < sizes[5]:
        entry, head, m_start, blocks = tile_of(tile_number(turn), sizes, form)
        m_start += w * ROWS
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        o = gl.full(
            [ROWS, form.head_dim], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 16])
        )
        q_at = w + form.consumers * (turn & 1)
        mbarrier.wait(q_ready.index(q_at), turn >> 1 & 1)
        own = blocks_of(m_start, ROWS, sizes, form)
        at = skip_tiles(w, k, v, at, blocks - own, form)
        if own > 0:
            o, row_max, row_sum, at = attend(
                w, as_rows(q_smem.index(q_at)), k, v, at, m_start, own, sizes, scale_log2, form
            )
        mbarrier.arrive(q_free.index(q_at))
        lse_rows = lse + (entry.to(gl.int64) * sizes[0] + head) * sizes[2]
        store_rows(o_desc, o, row_max, row_sum, lse_rows, (entry, head), m_start, sizes[2], o_smem.index(w))
        turn += 1
    tma_store_wait(0)


@gluon.jit
def attend_kernel(q_desc, k_desc, v_desc, o_desc, lse, sizes, scale_log2, form: gl.constexpr):
    """sizes (H, queries' heads a key head, S_q, S_k, tiles of queries a head, and in all, heads a section)."""
    STAGES: gl.constexpr = form.stages
    CONSUMERS: gl.constexpr = form.consumers
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * form.slots] + q_desc.block_shape, q_desc.layout)  # noqa: RUF005 (Triton has no *)
    o_smem = gl.allocate_shared_memory(o_desc.dtype, [form.slots] + o_desc.block_shape, o_desc.layout)  # noqa: RUF005
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    q = (q_smem, barriers(2 * CONSUMERS, 1), barriers(2 * CONSUMERS, 1))
    k = (k_smem, barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    v = (v_smem, barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    if CONSUMERS == 4:
        gl.warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, form)),
                (mma_partition, (gl.constexpr(1), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, form)),
                (mma_partition, (gl.constexpr(2), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, form)),
                (mma_partition, (gl.constexpr(3), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, form)),
                (load_partition, (q_desc, k_desc, v_desc, q, k, v, sizes, form)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 32],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, form)),
                (mma_partition, (gl.constexpr(1), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, form)),
                (mma_partition, (gl.constexpr(2), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, form)),
                (load_partition, (q_desc, k_desc, v_desc, q, k, v, sizes, form)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize(
            [
                (mma_partition, (gl.constexpr(0), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, form)),
                (mma_partition, (gl.constexpr(1), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, form)),
                (load_partition, (q_desc, k_desc, v_desc, q, k, v, sizes, form)),
            ],
            [4, 1],
            [240, 24],
        )


def descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """TMA's view of [B, S, H, D] as [B, H, S, D], moved in tiles of one head's rows; the layout swizzles as wgmma reads
    it.
    """
    batch, length, heads, width = tensor.shape
    b, s, h, d = tensor.stride()
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], DTYPES[tensor.dtype])
    return TensorDescriptor(tensor, [batch, heads, length, width], [b, h, s, d], [1, 1, rows, width], layout)


def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: int) -> tuple[Tensor, Tensor]:
    check_inputs(q, k, v)
    batch, seqlen_q, heads, head_dim = q.shape
    form = Form(
        head_dim, causal, causal or k.shape[1] % max(128, options.get("block_n", 0)) > 0, k.shape[1] <= SHORT, **options
    )
    out, lse = outputs(q)
    views = [descriptor(tensor, rows) for tensor, rows in ((q, 64), (k, form.block_n), (v, form.block_n), (out, 64))]
    tiles_m = -(-seqlen_q // form.block_m)
    walkers = programs(q, tiles_m * heads * batch)
    section = (
        heads * batch if seqlen_q > 2048 else -(-4 * walkers // max(8, tiles_m))
    )  # short ones' keys and values stay in L2: 33 MiB
    sizes = (heads, heads // k.shape[2], seqlen_q, k.shape[1], tiles_m, tiles_m * heads * batch, section)
    registers = {2: 168, 3: 128, 4: 96}[form.consumers]  # a thread's, before they are moved
    attend_kernel[(walkers,)](*views, lse, sizes, head_dim**-0.5 * LOG2_E, form, num_warps=4, maxnreg=registers)
    return out, lse


def moved(size: Size, form: Form) -> int:
    """q and out once, K and V once for each tile of queries that sees them."""
    return 2 * size.head_dim * (2 * size.rows + 2 * size.streamed(form.block_m, form.block_n)) + 4 * size.rows


RUNG = Rung(
    "k6", "overlap: the next scores under this softmax, and ping-pong", "k5", run, Form, moved,
    ("load_partition", "softmax_step", "take_turn", "attend"),
)  # fmt: skip
