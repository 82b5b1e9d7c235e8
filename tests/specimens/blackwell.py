"""Blackwell: a matmul and an attention forward whose sums, scores and weights live in tensor memory.

matmul_kernel, persistent, two accumulators, so that one is stored while the other is summed:
    load_partition    tile_free[s] -> tile_ready[s]
    mma_partition     tile_ready[s], acc_free[i] -> products; their completion signals tile_free[s], acc_ready[i]
    store_partition   acc_ready[i] -> registers -> acc_free[i] -> shared memory -> TMA

attention_kernel, two tiles t of 128 queries, key and value blocks in one ring k0 v0 k1 v1 ...:
    load_partition       q_ready[t] once; kv_free[s] -> kv_ready[s]
    product_partition    s[t] = q[t] k -> s_ready[t]  p_ready[t] -> o[t] += p[t] v  S(0) | PV(0) S(1) | PV(1) S(2) | ...
    softmax_partition t  s_ready[t] -> softmax, rescales o[t], p[t] over s[t] -> p_ready[t]; at the end o_ready[t] -> o,
                         lse out

s_ready[t] also says that every product issued before is complete: o[t] stands still while softmax_partition rescales
it, and p[t] is read before s[t] is written over it.
"""
# ruff: noqa: RUF059 (tuples are unpacked whole)

from dataclasses import dataclass

import torch
from torch import Tensor

from strobe import reference as oracle
from strobe.kernels.device.dialect import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tcgen05_commit,
    tcgen05_mma,
    tma_load,
    tma_store,
    tma_store_wait,
    tmem_reg_layout,
)
from strobe.kernels.device.pipeline import PipelineState
from strobe.kernels.device.softmax import SoftmaxState, online_step
from strobe.problem.call import Call

from .pieces import (
    LOG2_E,
    Launch,
    descriptor,
    empty_product,
    init_barriers,
    nans,
    require,
    require_attention,
    require_matrices,
    require_multiple,
    require_power_of_two,
    require_shared,
    rows,
)

ROWS = gl.constexpr(128)  # rows of one product: the lanes of tensor memory
LN_2 = gl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class Matmul:
    """block_m is 128, two accumulators [128, block_n] of float32 stand in the 512 columns of tensor memory."""

    block_n: int = 128
    block_k: int = 64
    stages: int = 3

    def __post_init__(self):
        require_power_of_two(self, block_n=16, block_k=16)
        require(self.block_n <= 256, "block_n", self.block_n, "at most 256", "two accumulators fill tensor memory")
        require(self.stages >= 2, "stages", self.stages, "at least 2", "with one stage the loads cannot overlap")
        require_shared(self, 227)

    def shared_bytes(self) -> int:
        return 2 * (self.stages * self.block_k * (128 + self.block_n) + 128 * self.block_n)


@gluon.jit
def matmul_load_partition(a_desc, b_desc, tiles, counts, config: gl.constexpr):
    a_smem, b_smem, tile_ready, tile_free = tiles
    m_tiles, n_tiles, steps = counts
    at = PipelineState.start(config.stages)
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        for step in range(steps):
            mbarrier.wait(tile_free.index(at.index), at.phase ^ 1)
            mbarrier.expect(tile_ready.index(at.index), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma_load(
                a_desc,
                [tile // n_tiles * ROWS, step * config.block_k],
                tile_ready.index(at.index),
                a_smem.index(at.index),
            )
            tma_load(
                b_desc,
                [step * config.block_k, tile % n_tiles * config.block_n],
                tile_ready.index(at.index),
                b_smem.index(at.index),
            )
            at = at.advance()


@gluon.jit
def matmul_mma_partition(tiles, acc, counts, config: gl.constexpr):
    a_smem, b_smem, tile_ready, tile_free = tiles
    acc_tmem, acc_ready, acc_free = acc
    m_tiles, n_tiles, steps = counts
    at = PipelineState.start(config.stages)
    acc_at = PipelineState.start(2)
    for _tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        mbarrier.wait(acc_free.index(acc_at.index), acc_at.phase ^ 1)
        total = acc_tmem.index(acc_at.index)
        for step in range(steps):
            mbarrier.wait(tile_ready.index(at.index), at.phase)
            tcgen05_mma(a_smem.index(at.index), b_smem.index(at.index), total, use_acc=step > 0)
            tcgen05_commit(tile_free.index(at.index))
            at = at.advance()
        tcgen05_commit(acc_ready.index(acc_at.index))
        acc_at = acc_at.advance()


@gluon.jit
def matmul_store_partition(c_desc, c_smem, acc, counts, config: gl.constexpr):
    acc_tmem, acc_ready, acc_free = acc
    m_tiles, n_tiles, steps = counts
    layout: gl.constexpr = tmem_reg_layout(gl.float32, (ROWS, config.block_n), acc_tmem.layout, gl.num_warps())
    at = PipelineState.start(2)
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        mbarrier.wait(acc_ready.index(at.index), at.phase)
        total = acc_tmem.index(at.index).load(layout)
        mbarrier.arrive(acc_free.index(at.index))
        tma_store_wait(0)  # the tile before has left c_smem
        c_smem.store(total.to(c_desc.dtype))
        fence_async_shared()
        tma_store(c_desc, [tile // n_tiles * ROWS, tile % n_tiles * config.block_n], c_smem)
        at = at.advance()
    tma_store_wait(0)


@gluon.jit
def matmul_kernel(a_desc, b_desc, c_desc, counts, config: gl.constexpr):
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [config.stages, ROWS, config.block_k], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [config.stages, config.block_k, config.block_n], b_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [ROWS, config.block_n], c_desc.layout)
    acc_layout: gl.constexpr = TensorMemoryLayout([ROWS, config.block_n], col_stride=1)
    acc_tmem = allocate_tensor_memory(gl.float32, [2, ROWS, config.block_n], acc_layout)
    tile_ready = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    acc_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    acc_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    init_barriers(tile_ready, 1)
    init_barriers(tile_free, 1)
    init_barriers(acc_ready, 1)
    init_barriers(acc_free, 1)
    tiles = (a_smem, b_smem, tile_ready, tile_free)
    acc = (acc_tmem, acc_ready, acc_free)
    gl.warp_specialize(
        [
            (matmul_store_partition, (c_desc, c_smem, acc, counts, config)),
            (matmul_mma_partition, (tiles, acc, counts, config)),
            (matmul_load_partition, (a_desc, b_desc, tiles, counts, config)),
        ],
        [1, 1],
        [24, 24],
    )


def launch_matmul(a: Tensor, b: Tensor, config: Matmul = Matmul(), programs: int = 148) -> Launch:
    """`programs` is how many start at most: the SMs of a GPU."""
    require_matrices(a, b)
    require(programs > 0, "programs", programs, "a positive number", "give the number of SMs")
    c = empty_product(a, b)
    views = (
        descriptor(a, [128, config.block_k]),
        descriptor(b, [config.block_k, config.block_n]),
        descriptor(c, [128, config.block_n]),
    )
    counts = (-(-a.shape[0] // 128), -(-b.shape[1] // config.block_n), -(-a.shape[1] // config.block_k))
    return Launch(
        matmul_kernel, (min(programs, counts[0] * counts[1]),), (*views, counts, config), {"num_warps": 4}, (c,)
    )


def run_matmul(a: Tensor, b: Tensor, config: Matmul = Matmul(), programs: int = 148) -> Tensor:
    """c [M, N] in a's dtype."""
    return launch_matmul(a, b, config, programs).start()[0]


def reference_matmul(a: Tensor, b: Tensor) -> Tensor:
    return a.to(torch.float64) @ b.to(torch.float64)


@dataclass(frozen=True)
class Attention:
    """Two tiles of s [128, block_n] and o [128, D] in float32 stand in the 512 columns of tensor memory; p over s."""

    head_dim: int = 128
    block_n: int = 128
    stages: int = 3

    def __post_init__(self):
        require_power_of_two(self, head_dim=64, block_n=32)
        columns = 2 * (self.head_dim + self.block_n)
        require(
            columns <= 512,
            "head_dim + block_n",
            columns // 2,
            "at most 256",
            "tensor memory has 512 columns: smaller blocks",
        )
        require(
            self.stages >= 2,
            "stages",
            self.stages,
            "at least 2",
            "a tile of keys and one of values are in use together",
        )
        require_shared(self, 227)

    def shared_bytes(self) -> int:
        return 2 * self.head_dim * (2 * 128 + self.stages * self.block_n)


@gluon.jit
def tile_here(sizes):
    """(batch entry, head, first query) of this program."""
    heads, group, seqlen_q, seqlen_k = sizes
    return gl.program_id(1) // heads, gl.program_id(1) % heads, gl.program_id(0) * (2 * ROWS)


@gluon.jit
def load_partition(q_desc, k_desc, v_desc, q, kv, sizes, config: gl.constexpr):
    q_smem, q_ready = q
    kv_smem, kv_ready, kv_free = kv
    heads, group, seqlen_q, seqlen_k = sizes
    entry, head, m_start = tile_here(sizes)
    for t in gl.static_range(2):
        mbarrier.expect(q_ready.index(t), q_desc.block_type.nbytes)
        tma_load(
            q_desc, [entry * seqlen_q + m_start + t * ROWS, head * config.head_dim], q_ready.index(t), q_smem.index(t)
        )
    at = PipelineState.start(config.stages)
    column = head // group * config.head_dim
    for block in range(seqlen_k // config.block_n):
        row = entry * seqlen_k + block * config.block_n
        mbarrier.wait(kv_free.index(at.index), at.phase ^ 1)
        mbarrier.expect(kv_ready.index(at.index), k_desc.block_type.nbytes)
        tma_load(k_desc, [row, column], kv_ready.index(at.index), kv_smem.index(at.index))
        at = at.advance()
        mbarrier.wait(kv_free.index(at.index), at.phase ^ 1)
        mbarrier.expect(kv_ready.index(at.index), v_desc.block_type.nbytes)
        tma_load(v_desc, [row, column], kv_ready.index(at.index), kv_smem.index(at.index))
        at = at.advance()


@gluon.jit
def weights_of(s_tmem, t: gl.constexpr, dtype: gl.constexpr, config: gl.constexpr):
    """p's place: the first half of the columns of s[t], 16 bits an element. (Triton 3.8 reinterprets whole allocations
    only.)
    """
    halves: gl.constexpr = TensorMemoryLayout([ROWS, 2 * config.block_n], col_stride=1)
    return reinterpret(s_tmem, dtype, [2, ROWS, 2 * config.block_n], halves).index(t).slice(0, config.block_n)


@gluon.jit
def product_partition(q, kv, s, o, sizes, config: gl.constexpr):
    q_smem, q_ready = q
    kv_smem, kv_ready, kv_free = kv
    s_tmem, s_ready, p_ready = s
    o_tmem, o_ready = o
    heads, group, seqlen_q, seqlen_k = sizes
    blocks = seqlen_k // config.block_n
    at = PipelineState.start(config.stages)
    p_at = PipelineState.start(1)
    mbarrier.wait(kv_ready.index(at.index), at.phase)
    for t in gl.static_range(2):
        mbarrier.wait(q_ready.index(t), 0)
        tcgen05_mma(q_smem.index(t), kv_smem.index(at.index).permute((1, 0)), s_tmem.index(t), use_acc=False)
        tcgen05_commit(s_ready.index(t))
    tcgen05_commit(kv_free.index(at.index))
    for block in range(blocks - 1):
        v_at = at.advance()
        at = v_at.advance()
        mbarrier.wait(kv_ready.index(v_at.index), v_at.phase)
        for t in gl.static_range(2):
            mbarrier.wait(p_ready.index(t), p_at.phase)
            p_tmem = weights_of(s_tmem, t, q_smem.dtype, config)
            tcgen05_mma(p_tmem, kv_smem.index(v_at.index), o_tmem.index(t), use_acc=block > 0)
            if t == 0:
                mbarrier.wait(kv_ready.index(at.index), at.phase)
            else:
                tcgen05_commit(kv_free.index(v_at.index))
            tcgen05_mma(q_smem.index(t), kv_smem.index(at.index).permute((1, 0)), s_tmem.index(t), use_acc=False)
            tcgen05_commit(s_ready.index(t))
        tcgen05_commit(kv_free.index(at.index))
        p_at = p_at.advance()
    at = at.advance()
    mbarrier.wait(kv_ready.index(at.index), at.phase)
    for t in gl.static_range(2):
        mbarrier.wait(p_ready.index(t), p_at.phase)
        p_tmem = weights_of(s_tmem, t, q_smem.dtype, config)
        tcgen05_mma(p_tmem, kv_smem.index(at.index), o_tmem.index(t), use_acc=blocks > 1)
        tcgen05_commit(o_ready.index(t))


@gluon.jit
def rescale_output(o_tmem, rescale, config: gl.constexpr):
    """o *= rescale, 32 columns at a time: whole rows beside the softmax's state would spill."""
    narrow: gl.constexpr = TensorMemoryLayout([ROWS, 32], col_stride=1)
    layout: gl.constexpr = tmem_reg_layout(gl.float32, (ROWS, 32), narrow, gl.num_warps())
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, layout))
    for part in gl.static_range(config.head_dim // 32):
        columns = o_tmem.slice(part * 32, 32)
        columns.store(columns.load(layout) * factor[:, None])


@gluon.jit
def softmax_partition(t: gl.constexpr, o_desc, lse, q, s, o, sizes, scale_log2, config: gl.constexpr):
    q_smem, q_ready = q
    s_tmem, s_ready, p_ready = s
    o_tmem, o_ready = o
    heads, group, seqlen_q, seqlen_k = sizes
    entry, head, m_start = tile_here(sizes)
    m_start += t * ROWS
    s_layout: gl.constexpr = tmem_reg_layout(gl.float32, (ROWS, config.block_n), s_tmem.layout, gl.num_warps())
    o_layout: gl.constexpr = tmem_reg_layout(gl.float32, (ROWS, config.head_dim), o_tmem.layout, gl.num_warps())
    p_tmem = weights_of(s_tmem, t, o_desc.dtype, config)
    p_layout: gl.constexpr = tmem_reg_layout(o_desc.dtype, (ROWS, config.block_n), p_tmem.layout, gl.num_warps())
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    at = PipelineState.start(1)
    for block in range(seqlen_k // config.block_n):
        mbarrier.wait(s_ready.index(t), at.phase)
        scores = s_tmem.index(t).load(s_layout)
        p, rescale, state = online_step(scores, SoftmaxState(row_max, row_sum), scale_log2)
        row_max, row_sum = state.row_max, state.row_sum
        p_tmem.store(gl.convert_layout(p.to(o_desc.dtype), p_layout))
        if block > 0:
            rescale_output(o_tmem.index(t), rescale, config)
        mbarrier.arrive(p_ready.index(t))
        at = at.advance()
    mbarrier.wait(o_ready.index(t), 0)
    inverse = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, o_layout))
    o_smem = q_smem.index(t)  # no product reads q any more
    o_smem.store((o_tmem.index(t).load(o_layout) * inverse[:, None]).to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [entry * seqlen_q + m_start, head * config.head_dim], o_smem)
    lse_rows = lse + (entry * heads + head) * seqlen_q + m_start
    gl.store(lse_rows + gl.arange(0, ROWS, row_sum.type.layout), row_max * LN_2 + gl.log(row_sum))
    tma_store_wait(0)


@gluon.jit
def attention_kernel(q_desc, k_desc, v_desc, o_desc, lse, sizes, scale_log2, config: gl.constexpr):
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, config.head_dim], q_desc.layout)
    kv_smem = gl.allocate_shared_memory(k_desc.dtype, [config.stages, config.block_n, config.head_dim], k_desc.layout)
    s_layout: gl.constexpr = TensorMemoryLayout([ROWS, config.block_n], col_stride=1)
    o_layout: gl.constexpr = TensorMemoryLayout([ROWS, config.head_dim], col_stride=1)
    s_tmem = allocate_tensor_memory(gl.float32, [2, ROWS, config.block_n], s_layout)
    o_tmem = allocate_tensor_memory(gl.float32, [2, ROWS, config.head_dim], o_layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_ready = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    kv_free = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    s_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    o_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    init_barriers(q_ready, 1)
    init_barriers(kv_ready, 1)
    init_barriers(kv_free, 1)
    init_barriers(s_ready, 1)
    init_barriers(p_ready, 1)
    init_barriers(o_ready, 1)
    q = (q_smem, q_ready)
    kv = (kv_smem, kv_ready, kv_free)
    s = (s_tmem, s_ready, p_ready)
    o = (o_tmem, o_ready)
    gl.warp_specialize(
        [
            (softmax_partition, (gl.constexpr(0), o_desc, lse, q, s, o, sizes, scale_log2, config)),
            (softmax_partition, (gl.constexpr(1), o_desc, lse, q, s, o, sizes, scale_log2, config)),
            (product_partition, (q, kv, s, o, sizes, config)),
            (load_partition, (q_desc, k_desc, v_desc, q, kv, sizes, config)),
        ],
        [4, 1, 1],
        [232, 24, 24],
    )


def launch_attention(q: Tensor, k: Tensor, v: Tensor, config: Attention, scale: float | None = None) -> Launch:
    require_attention(q, k, v, False)
    (batch, seqlen_q, heads, head_dim), seqlen_k = q.shape, k.shape[1]
    require(head_dim == config.head_dim, "q.shape[-1]", head_dim, f"config.head_dim {config.head_dim}", "change one")
    require_multiple("S_q", seqlen_q, 256)
    require_multiple("S_k", seqlen_k, config.block_n)
    scale = head_dim**-0.5 if scale is None else scale
    require(scale > 0, "scale", scale, "a positive number", "negate q, and give -scale")
    out, lse = nans(*q.shape, like=q), nans(batch, heads, seqlen_q, like=q, dtype=torch.float32)
    blocks = ((q, 128), (k, config.block_n), (v, config.block_n), (out, 128))
    views = (descriptor(rows(tensor), [block, head_dim]) for tensor, block in blocks)
    sizes = (heads, heads // k.shape[2], seqlen_q, seqlen_k)
    grid = (seqlen_q // 256, batch * heads)
    return Launch(attention_kernel, grid, (*views, lse, sizes, scale * LOG2_E, config), {"num_warps": 4}, (out, lse))


def run_attention(q: Tensor, k: Tensor, v: Tensor, config: Attention, scale: float | None = None) -> tuple[Tensor, ...]:
    """(out [B, S_q, H, D] in q's dtype, lse [B, H, S_q] float32); every query sees every key."""
    return launch_attention(q, k, v, config, scale).start()


def reference_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, ...]:
    """(out, lse) in float64."""
    part = oracle.forward(Call(q, k, v, scale=scale))
    return part.out, part.lse
