"""k5, warp specialisation: one warp loads, two or three groups of four warps multiply, and registers go to those who
need them.

The idea: until now each warp did everything in turn, so a barrier of the whole program stood before each load. Here a
program is split for good:

    load_partition      one warp. Walks over the tiles of keys, waits until a stage is free, asks TMA for the next tile.
                        It never touches data.
    mma_partition w     four warps, 64 queries. Waits until a tile is ready, multiplies, takes the softmax, and says
                        when it is done with a stage.

Between them stand two barriers for each stage of a ring: `ready`, on which TMA's bytes arrive (1 arrival and the
bytes), and `free`, on which each consumer arrives (as many arrivals as consumers). The loader runs ahead as far as the
ring is long, and nobody else waits for anybody: one consumer may be in its softmax while the other has the tensor
cores. That overlap is not arranged, it falls out.

    barrier   arrivals                  says
    q_ready   1 and the tile's bytes    q of consumer w has landed             q_free    1           w is done with it
    k_ready   1 and the tile's bytes    k[stage] has landed                k_free   consumers   all are done with k[stage]
    v_ready   1 and the tile's bytes    v[stage] has landed                v_free   consumers   all are done with v[stage]

A consumer waits for the parity of the phase it wants; the loader waits for the other parity, whose phase counts as done
on a new barrier: the first round through the ring is free.

Since the loader knows nothing of what consumers do, it need not stop where a tile of queries ends: a program, one an
SM, walks tile after tile, and while consumers finish one, the next one's q, K and V are on their way: q has two places,
and o leaves through a buffer of its own. Causal tiles go from the longest to the shortest, to and fro, so that programs
end together; of short sequences in sections of heads whose keys and values stay in L2, two to four lengths a round,
long and short turned about in the next. A consumer passes over tiles that only others' rows see.

Registers: an SM has 65,536, and a program is compiled for one number a thread. `setmaxnreg` moves them while it runs:
the loader's warps fall to 24, consumers rise to 240 (two of them) or 160 (three). So two consumers hold o and scores of
64 x 128 each, at twice the tile of keys of k4_2.

Cost model, a tile of 64 C queries (C consumers) and 128 keys, D columns, in 16 bits:

    FLOPs       4 * 64 C * 128 D, on wgmma
    bytes       512 D of K and V a tile from L2, once for all consumers: 1 / (64 C) bytes a FLOP
    shared      2 D (3 * 64 C + 2 S 128) for S stages: 224 KiB for D = 128, C = 2, S = 2; one program an SM
    registers   o D / 2, scores 64, weights 32 a thread: 160 of 240 for D = 128

What limits it: each consumer by itself still multiplies, then exponentiates, then multiplies. While all are in their
softmax at once, the tensor cores idle, and nothing keeps the consumers out of step.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024    0.3443     399.2          40.4
     64  dense     8192     2.233     492.5          49.8
     64  dense    16384     4.375     502.6          50.8
     64  causal    1024    0.2073     331.9          33.6
     64  causal    8192     1.262     435.6            44
     64  causal   16384      2.35       468          47.3
    128  dense     1024    0.2848     482.6          48.8
    128  dense     8192      2.17     506.7          51.2
    128  dense    16384     4.279     513.9            52
    128  causal    1024    0.1671     411.7          41.6
    128  causal    8192     1.123     489.6          49.5
    128  causal   16384     2.099     523.9            53

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
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True)
class Form:
    head_dim: int
    causal: bool
    block_n: int = 128
    stages: int = 2
    consumers: int = 0  # 0: two of 240 registers at D = 128, three of 160 at D = 64

    def __post_init__(self) -> None:
        if self.consumers not in (0, 2, 3):
            raise ValueError(
                f"consumers: got {self.consumers}, expected 2 or 3; leave it out for what fits the head dimension"
            )
        if not self.consumers:
            object.__setattr__(self, "consumers", 2 if self.head_dim == 128 else 3)

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def slots(self) -> int:
        """Tiles of o, and half of q's, that shared memory is laid out for: a power of two."""
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
    stage, parity = gl.to_tensor(0), gl.to_tensor(1)
    turn = gl.to_tensor(0)
    while tile_number(turn) < sizes[5]:
        entry, head, m_start, blocks = tile_of(tile_number(turn), sizes, form)
        kv_place = (entry, head // sizes[1])
        for w in gl.static_range(CONSUMERS):
            q_at = w + CONSUMERS * (turn & 1)
            mbarrier.wait(q_free.index(q_at), (turn >> 1 & 1) ^ 1)
            copy_tile(q_desc, (entry, head), m_start + w * ROWS, q_ready.index(q_at), q_smem.index(q_at))
        for i in range(blocks):  # the last keys first: there a causal tile is masked
            row = (blocks - 1 - i) * form.block_n
            mbarrier.wait(k_free.index(stage), parity)
            copy_tile(k_desc, kv_place, row, k_ready.index(stage), k_smem.index(stage))
            mbarrier.wait(v_free.index(stage), parity)
            copy_tile(v_desc, kv_place, row, v_ready.index(stage), v_smem.index(stage))
            stage, parity = next_of(stage, parity, form.stages)
        turn += 1


@gluon.jit
def score_product(q_smem, k_smem, form: gl.constexpr):
    """q k^T by wgmma, both from shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_n, 16])
    s = gl.full([ROWS, form.block_n], 0.0, gl.float32, layout)
    s = warpgroup_mma(q_smem, k_smem.permute((1, 0)), s, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def value_product(p, v_smem, o):
    """o + p v by wgmma: p as it lies in registers, v from shared memory as it lies there."""
    p_reg = gl.convert_layout(p.to(v_smem.dtype), gl.DotOperandLayout(0, o.type.layout, 2))
    return warpgroup_mma_wait(0, deps=[warpgroup_mma(p_reg, v_smem, o, is_async=True)])


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2):
    """(p, rescale, row_max, row_sum) after one more tile of raw scores; row_max in units of log2."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[:, None])
    rescale = gl.exp2(row_max - base)
    return p, rescale, new_max, row_sum * rescale + gl.sum(p, 1)


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
def skip_tiles(k, v, at, count, form: gl.constexpr):
    """Pass over tiles that only others' rows see. It waits for both: K may land after V, and a wait that is a round of
    the ring ahead is none.
    """
    stage, parity = at
    for _ in range(count):
        mbarrier.wait(k[1].index(stage), parity)
        mbarrier.wait(v[1].index(stage), parity)
        mbarrier.arrive(k[2].index(stage))
        mbarrier.arrive(v[2].index(stage))
        stage, parity = next_of(stage, parity, form.stages)
    return stage, parity


@gluon.jit
def mma_partition(w: gl.constexpr, o_desc, o_smem, lse, q, k, v, sizes, scale_log2, form: gl.constexpr):
    q_smem, q_ready, q_free = q
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_n, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 16])
    at = (gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    while tile_number(turn) < sizes[5]:
        entry, head, m_start, blocks = tile_of(tile_number(turn), sizes, form)
        m_start += w * ROWS
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        o = gl.full([ROWS, form.head_dim], 0.0, gl.float32, o_layout)
        q_at = w + form.consumers * (turn & 1)
        mbarrier.wait(q_ready.index(q_at), turn >> 1 & 1)
        own = blocks_of(m_start, ROWS, sizes, form)
        stage, parity = skip_tiles(k, v, at, blocks - own, form)
        for i in range(own):
            mbarrier.wait(k_ready.index(stage), parity)
            s = score_product(as_rows(q_smem.index(q_at)), as_rows(k_smem.index(stage)), form)
            mbarrier.arrive(k_free.index(stage))
            s = hide(s, m_start, (own - 1 - i) * form.block_n, sizes, form)
            p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2)
            o = o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
            mbarrier.wait(v_ready.index(stage), parity)
            o = value_product(p, as_rows(v_smem.index(stage)), o)
            mbarrier.arrive(v_free.index(stage))
            stage, parity = next_of(stage, parity, form.stages)
        at = (stage, parity)
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
    if CONSUMERS == 3:
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
    form = Form(head_dim, causal, **options)
    out, lse = outputs(q)
    views = [descriptor(tensor, rows) for tensor, rows in ((q, 64), (k, form.block_n), (v, form.block_n), (out, 64))]
    tiles_m = -(-seqlen_q // form.block_m)
    walkers = programs(q, tiles_m * heads * batch)
    section = (
        heads * batch if seqlen_q > 2048 else -(-4 * walkers // max(8, tiles_m))
    )  # short ones' keys and values stay in L2: 33 MiB
    sizes = (heads, heads // k.shape[2], seqlen_q, k.shape[1], tiles_m, tiles_m * heads * batch, section)
    registers = 168 if form.consumers == 2 else 128  # a thread's, before they are moved
    attend_kernel[(walkers,)](*views, lse, sizes, head_dim**-0.5 * LOG2_E, form, num_warps=4, maxnreg=registers)
    return out, lse


def moved(size: Size, form: Form) -> int:
    """q and out once, K and V once for each tile of queries that sees them."""
    return 2 * size.head_dim * (2 * size.rows + 2 * size.streamed(form.block_m, form.block_n)) + 4 * size.rows


RUNG = Rung(
    "k5",
    "warp specialisation: a warp loads, others multiply",
    "k4_2",
    run,
    Form,
    moved,
    ("load_partition", "mma_partition", "attend_kernel"),
)
