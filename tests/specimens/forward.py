"""Hopper attention forward: two consumers of 64 query rows each, one warp that loads by TMA, products overlapped with
softmax.

    load_partition     q_free[w] -> q_ready[w]   k_free[s] -> k_ready[s]   v_free[s] -> v_ready[s]
    mma_partition w    S(0) | softmax(0) | S(1) PV(0) | softmax(1) | S(2) PV(1) | ... | PV(last) | o out through q's
                       shared memory
                       S(i+1) and PV(i) are in flight together; softmax(i+1) needs only S(i+1)

Key blocks go from the last to the first, so that a causal tile meets its diagonal at once. A program takes the tiles
program_id, program_id + num_programs, ...: with as many programs as tiles, one each.
"""
# ruff: noqa: RUF059, SIM102 (tuples are unpacked whole; nested ifs of constants are pruned, `and` is not)

from dataclasses import dataclass

import torch
from torch import Tensor

from strobe import reference as oracle
from strobe.kernels.device.dialect import (
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
from strobe.kernels.device.mask import apply_mask
from strobe.kernels.device.pipeline import PipelineState
from strobe.kernels.device.softmax import SoftmaxState, online_step
from strobe.problem.call import Call
from strobe.problem.mask import causal as causal_mask

from .pieces import (
    LOG2_E,
    Launch,
    descriptor,
    init_barriers,
    nans,
    require,
    require_attention,
    require_multiple,
    require_power_of_two,
    require_shared,
    rows,
)

ROWS = gl.constexpr(64)  # queries of one consumer: what one wgmma takes
LN_2 = gl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class Config:
    head_dim: int = 128
    block_n: int = 128
    stages: int = 2
    causal: bool = False
    ping_pong: bool = False  # the consumers take turns at issuing products
    persistent: bool = False  # fewer programs than tiles

    def __post_init__(self):
        require_power_of_two(self, head_dim=64, block_n=16)
        require(
            self.head_dim <= 128,
            "head_dim",
            self.head_dim,
            "64 or 128",
            "scores and output of wider heads do not fit in registers",
        )
        require(self.block_n <= 128, "block_n", self.block_n, "at most 128", "wider scores do not fit in registers")
        require(self.stages >= 2, "stages", self.stages, "at least 2", "with one stage the loads cannot overlap")
        require_shared(self, 227)

    def shared_bytes(self) -> int:
        return 2 * self.head_dim * (2 * 64 + 2 * self.stages * self.block_n)


@gluon.jit
def tile_of(tile, sizes, config: gl.constexpr):
    """(batch entry, head, first query, key blocks) of a tile. Later queries first: causal tiles get shorter."""
    batch, heads, group, seqlen_q, seqlen_k = sizes
    columns = batch * heads
    m_start = (seqlen_q // (2 * ROWS) - 1 - tile // columns) * (2 * ROWS)
    stop = seqlen_k
    if config.causal:
        stop = m_start + 2 * ROWS
    return tile % columns // heads, tile % heads, m_start, gl.cdiv(stop, config.block_n)


@gluon.jit
def load_partition(q_desc, k_desc, v_desc, q, k, v, sizes, config: gl.constexpr):
    q_smem, q_ready, q_free = q
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    batch, heads, group, seqlen_q, seqlen_k = sizes
    at = PipelineState.start(config.stages)
    q_at = PipelineState.start(1)
    for tile in range(gl.program_id(0), batch * heads * (seqlen_q // (2 * ROWS)), gl.num_programs(0)):
        entry, head, m_start, blocks = tile_of(tile, sizes, config)
        column = head // group * config.head_dim
        for w in gl.static_range(2):
            mbarrier.wait(q_free.index(w), q_at.phase ^ 1)
            mbarrier.expect(q_ready.index(w), q_desc.block_type.nbytes)
            tma_load(
                q_desc,
                [entry * seqlen_q + m_start + w * ROWS, head * config.head_dim],
                q_ready.index(w),
                q_smem.index(w),
            )
        for i in range(blocks):
            row = entry * seqlen_k + (blocks - 1 - i) * config.block_n
            mbarrier.wait(k_free.index(at.index), at.phase ^ 1)
            mbarrier.expect(k_ready.index(at.index), k_desc.block_type.nbytes)
            tma_load(k_desc, [row, column], k_ready.index(at.index), k_smem.index(at.index))
            mbarrier.wait(v_free.index(at.index), at.phase ^ 1)
            mbarrier.expect(v_ready.index(at.index), v_desc.block_type.nbytes)
            tma_load(v_desc, [row, column], v_ready.index(at.index), v_smem.index(at.index))
            at = at.advance()
        q_at = q_at.advance()


@gluon.jit
def take_turn(w: gl.constexpr):
    """Wait until the other consumer has passed the turn: named barrier 9 + w, 128 threads that wait and 128 that
    arrived.
    """
    if w == 0:
        gl.inline_asm_elementwise("bar.sync 9, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 10, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(w: gl.constexpr):
    """Let the other consumer issue. Numbers are written out: one in a register makes ptxas reserve all 16 barriers."""
    if w == 0:
        gl.inline_asm_elementwise("bar.arrive 10, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 9, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def softmax_step(s, row_max, row_sum, m_start, n_start, scale_log2, config: gl.constexpr):
    """online_step after the mask, which only a tile that the diagonal cuts pays for."""
    if config.causal:
        if n_start + config.block_n - 1 > m_start:
            row_offsets = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
            column_offsets = gl.arange(0, config.block_n, gl.SliceLayout(0, s.type.layout))
            stop = m_start + row_offsets + 1
            stop = (stop - n_start)[:, None]
            s = apply_mask(s, column_offsets[None, :], stop, stop, float("-inf"), False)
    p, rescale, state = online_step(s, SoftmaxState(row_max, row_sum), scale_log2)
    return p, rescale, state.row_max, state.row_sum


@gluon.jit
def store_output(o, row_max, row_sum, o_desc, o_row, column, lse_rows, o_smem):
    """o / row_sum by TMA, and the natural log-sum-exp. row_sum is 1 or more: every row sees a key, and its maximum
    counts 1.
    """
    inverse = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, o.type.layout))
    o_smem.store((o * inverse[:, None]).to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [o_row, column], o_smem)
    gl.store(lse_rows + gl.arange(0, ROWS, row_sum.type.layout), row_max * LN_2 + gl.log(row_sum))
    tma_store_wait(0)


@gluon.jit
def mma_partition(w: gl.constexpr, o_desc, lse, q, k, v, sizes, scale_log2, config: gl.constexpr):
    q_smem, q_ready, q_free = q
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    batch, heads, group, seqlen_q, seqlen_k = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.block_n, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.head_dim, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zero = gl.full([ROWS, config.block_n], 0.0, gl.float32, s_layout)
    q_tile = q_smem.index(w)
    at = PipelineState.start(config.stages)
    q_at = PipelineState.start(1)
    if config.ping_pong:
        if w == 1:
            pass_turn(w)  # consumer 0 begins
    for tile in range(gl.program_id(0), batch * heads * (seqlen_q // (2 * ROWS)), gl.num_programs(0)):
        entry, head, m_start, blocks = tile_of(tile, sizes, config)
        m_start += w * ROWS
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        o = gl.full([ROWS, config.head_dim], 0.0, gl.float32, o_layout)
        mbarrier.wait(q_ready.index(w), q_at.phase)
        mbarrier.wait(k_ready.index(at.index), at.phase)
        s = warpgroup_mma(q_tile, k_smem.index(at.index).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(at.index))
        p, rescale, row_max, row_sum = softmax_step(
            s, row_max, row_sum, m_start, (blocks - 1) * config.block_n, scale_log2, config
        )
        p_reg = gl.convert_layout(p.to(o_desc.dtype), p_layout)
        for i in range(1, blocks):
            v_at = at
            at = at.advance()
            mbarrier.wait(k_ready.index(at.index), at.phase)
            if config.ping_pong:
                take_turn(w)
            s = warpgroup_mma(q_tile, k_smem.index(at.index).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(v_at.index), v_at.phase)
            o = warpgroup_mma(p_reg, v_smem.index(v_at.index), o, is_async=True)
            if config.ping_pong:
                pass_turn(w)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_free.index(at.index))
            p, rescale, row_max, row_sum = softmax_step(
                s, row_max, row_sum, m_start, (blocks - 1 - i) * config.block_n, scale_log2, config
            )
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_free.index(v_at.index))
            o = o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
            p_reg = gl.convert_layout(p.to(o_desc.dtype), p_layout)
        mbarrier.wait(v_ready.index(at.index), at.phase)
        o = warpgroup_mma(p_reg, v_smem.index(at.index), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_free.index(at.index))
        lse_rows = lse + (entry * heads + head) * seqlen_q + m_start
        store_output(o, row_max, row_sum, o_desc, entry * seqlen_q + m_start, head * config.head_dim, lse_rows, q_tile)
        mbarrier.arrive(q_free.index(w))  # o has left q's shared memory
        at = at.advance()
        q_at = q_at.advance()


@gluon.jit
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse, sizes, scale_log2, config: gl.constexpr):
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, config.head_dim], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [config.stages, config.block_n, config.head_dim], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [config.stages, config.block_n, config.head_dim], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    init_barriers(q_ready, 1)
    init_barriers(q_free, 1)
    init_barriers(k_ready, 1)
    init_barriers(k_free, 2)  # both consumers
    init_barriers(v_ready, 1)
    init_barriers(v_free, 2)
    q = (q_smem, q_ready, q_free)
    k = (k_smem, k_ready, k_free)
    v = (v_smem, v_ready, v_free)
    gl.warp_specialize(
        [
            (mma_partition, (gl.constexpr(0), o_desc, lse, q, k, v, sizes, scale_log2, config)),
            (mma_partition, (gl.constexpr(1), o_desc, lse, q, k, v, sizes, scale_log2, config)),
            (load_partition, (q_desc, k_desc, v_desc, q, k, v, sizes, config)),
        ],
        [4, 1],
        [240, 24],
    )


def launch(q: Tensor, k: Tensor, v: Tensor, config: Config, scale: float | None = None, programs: int = 0) -> Launch:
    """`programs` is how many a persistent launch starts: the SMs of a GPU."""
    require_attention(q, k, v, config.causal)
    (batch, seqlen_q, heads, head_dim), seqlen_k = q.shape, k.shape[1]
    require(head_dim == config.head_dim, "q.shape[-1]", head_dim, f"config.head_dim {config.head_dim}", "change one")
    require_multiple("S_q", seqlen_q, 128)
    require_multiple("S_k", seqlen_k, config.block_n)
    tiles = batch * heads * (seqlen_q // 128)
    require(
        config.persistent == (programs > 0),
        "programs",
        programs,
        "positive where config.persistent, else 0",
        "give the number of SMs",
    )
    scale = head_dim**-0.5 if scale is None else scale
    require(scale > 0, "scale", scale, "a positive number", "negate q, and give -scale")
    out, lse = nans(*q.shape, like=q), nans(batch, heads, seqlen_q, like=q, dtype=torch.float32)
    blocks = ((q, 64), (k, config.block_n), (v, config.block_n), (out, 64))
    views = (descriptor(rows(tensor), [block, head_dim]) for tensor, block in blocks)
    sizes = (batch, heads, heads // k.shape[2], seqlen_q, seqlen_k)
    grid = (min(tiles, programs or tiles),)
    return Launch(
        forward_kernel, grid, (*views, lse, sizes, scale * LOG2_E, config), {"num_warps": 4, "maxnreg": 168}, (out, lse)
    )


def run(
    q: Tensor, k: Tensor, v: Tensor, config: Config, scale: float | None = None, programs: int = 0
) -> tuple[Tensor, ...]:
    """(out [B, S_q, H, D] in q's dtype, lse [B, H, S_q] float32)."""
    return launch(q, k, v, config, scale, programs).start()


def reference(q: Tensor, k: Tensor, v: Tensor, config: Config, scale: float | None = None) -> tuple[Tensor, ...]:
    """(out, lse) in float64."""
    call = Call(q, k, v, scale=scale)
    part = oracle.forward(call.with_mask(causal_mask()) if config.causal else call)
    return part.out, part.lse
