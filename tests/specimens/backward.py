"""Hopper attention backward: a program keeps one block of keys and values and walks the queries that see it.

    load_partition    kv_ready once; per query block: do_free[s] -> do_ready[s] (do, delta), q_free -> q_ready (q, lse)
    mma_partition     s = k q^T, dp = v do^T | p, ds | dv += p do | ds to shared memory | dq = ds^T k, dk += ds q |
                      dq_free -> dq_ready
    store_partition   dq_ready -> adds dq to global memory by TMA -> dq_free   ("red" has no such partition)

Everything stands transposed, keys in rows, so that p and ds are first operands in registers. dq is summed over programs
in float32:

    "tma"      TMA's reduce-add from shared memory, in any order
    "red"      red.global.add.v4.f32 from registers, in any order
    "ordered"  TMA's reduce-add, key blocks in increasing order: a semaphore per query block says whose turn it is.
               Deterministic.
"""
# ruff: noqa: RUF059 (tuples are unpacked whole)

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from strobe import reference as oracle
from strobe.kernels.device.dialect import (
    fence_async_global,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_drain,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.kernels.device.pipeline import PipelineState
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

WAYS = ("tma", "red", "ordered")


@dataclass(frozen=True)
class Config:
    head_dim: int = 128
    block_m: int = 64
    block_n: int = 128
    stages: int = 2
    causal: bool = False
    dq: str = "tma"

    def __post_init__(self):
        require(self.dq in WAYS, "dq", self.dq, f"one of {WAYS}", "choose how dq is summed")
        require_power_of_two(self, head_dim=64, block_m=64, block_n=128)
        tile = (self.block_m, self.block_n, self.head_dim)
        small = self.block_m == 64 and self.block_n == 128 and self.head_dim <= 128
        require(
            small,
            "block_m, block_n, head_dim",
            tile,
            "64, 128 and at most 128",
            "eight warps have registers for no more",
        )
        require(self.stages >= 2, "stages", self.stages, "at least 2", "with one stage the loads cannot overlap")
        require_shared(self, 227)

    def shared_bytes(self) -> int:
        ring = 2 * self.stages * self.block_m * (2 * self.head_dim + 4)
        resident = 2 * self.block_n * (2 * self.head_dim + self.block_m)
        return ring + resident + (0 if self.dq == "red" else 4 * self.block_m * self.head_dim)


@gluon.jit
def place(sizes, config: gl.constexpr):
    """(batch entry, head, first key, first query block that sees it) of this program."""
    heads, seqlen_q, seqlen_k = sizes
    n_start = gl.program_id(0) * config.block_n
    m_first = 0
    if config.causal:
        m_first = n_start // config.block_m
    return gl.program_id(1) // heads, gl.program_id(1) % heads, n_start, m_first


@gluon.jit
def load_partition(views, kv, q, do, sizes, config: gl.constexpr):
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = views
    k_smem, v_smem, kv_ready = kv
    q_smem, lse_smem, q_ready, q_free = q
    do_smem, delta_smem, do_ready, do_free = do
    heads, seqlen_q, seqlen_k = sizes
    entry, head, n_start, m_first = place(sizes, config)
    column = head * config.head_dim
    mbarrier.expect(kv_ready.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(k_desc, [entry * seqlen_k + n_start, column], kv_ready.index(0), k_smem)
    tma_load(v_desc, [entry * seqlen_k + n_start, column], kv_ready.index(0), v_smem)
    at = PipelineState.start(config.stages)
    for m_block in range(m_first, seqlen_q // config.block_m):
        row = entry * seqlen_q + m_block * config.block_m
        statistics = (entry * heads + head) * seqlen_q + m_block * config.block_m
        mbarrier.wait(do_free.index(at.index), at.phase ^ 1)  # do before q: it is free before q is
        mbarrier.expect(do_ready.index(at.index), do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
        tma_load(do_desc, [row, column], do_ready.index(at.index), do_smem.index(at.index))
        tma_load(delta_desc, [statistics], do_ready.index(at.index), delta_smem.index(at.index))
        mbarrier.wait(q_free.index(at.index), at.phase ^ 1)
        mbarrier.expect(q_ready.index(at.index), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
        tma_load(q_desc, [row, column], q_ready.index(at.index), q_smem.index(at.index))
        tma_load(lse_desc, [statistics], q_ready.index(at.index), lse_smem.index(at.index))
        at = at.advance()


@gluon.jit
def hide_future(s, m_start, n_start, config: gl.constexpr):
    """s [keys, queries] with -inf where a query stands before the key."""
    if m_start < n_start + config.block_n - 1:
        keys = gl.arange(0, config.block_n, gl.SliceLayout(1, s.type.layout))
        queries = gl.arange(0, config.block_m, gl.SliceLayout(0, s.type.layout))
        s = gl.where(queries[None, :] >= (keys + (n_start - m_start))[:, None], s, float("-inf"))
    return s


@gluon.jit
def add_dq(dq, dq_sum, m_block, sizes, config: gl.constexpr):
    """dq [block_m, D] into the float32 sum, 16 bytes an instruction, straight from registers.

    wgmma leaves a thread 2 columns of rows r and r + 8: neighbours exchange one pair, and each then holds 4 columns of
    one row.
    """
    heads, seqlen_q, seqlen_k = sizes
    entry, head, n_start, m_first = place(sizes, config)
    layout: gl.constexpr = wide_layout(config.block_m, config.head_dim)
    dq = gl.convert_layout(dq, layout)
    row_offsets = entry * seqlen_q + m_block * config.block_m + gl.arange(0, config.block_m, gl.SliceLayout(1, layout))
    column_offsets = head * config.head_dim + gl.arange(0, config.head_dim, gl.SliceLayout(0, layout))
    places = dq_sum + row_offsets[:, None] * (heads * config.head_dim) + column_offsets[None, :]
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [places.to(gl.int64, bitcast=True), dq],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.constexpr_function
def wide_layout(block_m, head_dim):
    """8 warps, 4 by 2, over [block_m, D] as wgmma has them; a thread holds 4 neighbouring columns."""
    half = head_dim // 2
    registers = [[0, 1], [0, 2]] + [[0, 1 << bit] for bit in range(3, half.bit_length() - 1)]
    lanes = [[8, 0], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [0, half]], [], [block_m, head_dim])


@gluon.jit
def mma_partition(out, kv, q, do, dq, sizes, scales, config: gl.constexpr):
    dk_desc, dv_desc, dq_sum = out
    k_smem, v_smem, kv_ready = kv
    q_smem, lse_smem, q_ready, q_free = q
    do_smem, delta_smem, do_ready, do_free = do
    ds_smem, dq_smem, dq_ready, dq_free = dq
    heads, seqlen_q, seqlen_k = sizes
    entry, head, n_start, m_first = place(sizes, config)
    scale, scale_log2 = scales
    dtype: gl.constexpr = k_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, config.block_m, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, config.head_dim, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, config.head_dim // 2, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.full([config.block_n, config.block_m], 0.0, gl.float32, s_layout)
    dq_zero = gl.full([config.block_m, config.head_dim], 0.0, gl.float32, dq_layout)
    dk = gl.full([config.block_n, config.head_dim], 0.0, gl.float32, d_layout)
    dv = gl.full([config.block_n, config.head_dim], 0.0, gl.float32, d_layout)
    at = PipelineState.start(config.stages)
    dq_at = PipelineState.start(1)
    mbarrier.wait(kv_ready.index(0), 0)
    for m_block in range(m_first, seqlen_q // config.block_m):
        mbarrier.wait(q_ready.index(at.index), at.phase)
        s = warpgroup_mma(k_smem, q_smem.index(at.index).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(do_ready.index(at.index), at.phase)
        dp = warpgroup_mma(v_smem, do_smem.index(at.index).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        if config.causal:
            s = hide_future(s, m_block * config.block_m, n_start, config)
        lse_log2 = lse_smem.index(at.index).load(columns)  # not sooner: 16 registers more would spill
        p = gl.exp2(s * scale_log2 - lse_log2[None, :])
        delta = delta_smem.index(at.index).load(columns)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (p * (dp - delta[None, :])).to(dtype)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), do_smem.index(at.index), dv, is_async=True)
        ds_smem.store(ds)
        # and all eight warps meet: the compiler puts that barrier before a product that reads others' stores
        fence_async_shared()
        dq_tile = warpgroup_mma(ds_smem.permute((1, 0)), k_smem, dq_zero, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv])
        mbarrier.arrive(do_free.index(at.index))
        dk = warpgroup_mma(gl.convert_layout(ds, operand), q_smem.index(at.index), dk, is_async=True)
        dq_tile = warpgroup_mma_wait(1, deps=[dq_tile])
        if config.dq == "red":
            add_dq(dq_tile, dq_sum, m_block, sizes, config)
        else:
            mbarrier.wait(dq_free.index(0), dq_at.phase ^ 1)
            dq_smem.store(dq_tile)
            fence_async_shared()
            mbarrier.arrive(dq_ready.index(0))
        dk = warpgroup_mma_wait(0, deps=[dk])
        mbarrier.arrive(q_free.index(at.index))
        at = at.advance()
        dq_at = dq_at.advance()
    entry, head, n_start, m_first = place(sizes, config)
    v_smem.store(dv.to(dtype))  # k and v are used up: dk and dv leave through their shared memory
    k_smem.store((dk * scale).to(dtype))
    fence_async_shared()
    tma_store(dv_desc, [entry * seqlen_k + n_start, head * config.head_dim], v_smem)
    tma_store(dk_desc, [entry * seqlen_k + n_start, head * config.head_dim], k_smem)
    tma_store_wait(0)


@gluon.jit
def store_partition(dq_desc, turns, dq, sizes, config: gl.constexpr):
    ds_smem, dq_smem, dq_ready, dq_free = dq
    heads, seqlen_q, seqlen_k = sizes
    entry, head, n_start, m_first = place(sizes, config)
    at = PipelineState.start(1)
    m_blocks = seqlen_q // config.block_m
    for m_block in range(m_first, m_blocks):
        turn = turns + (entry * heads + head) * m_blocks + m_block
        mbarrier.wait(dq_ready.index(0), at.phase)
        if config.dq == "ordered":
            mine = n_start // config.block_n
            now = gl.atomic_add(turn, 0, sem="acquire", scope="gpu")
            while now != mine:
                now = gl.atomic_add(turn, 0, sem="acquire", scope="gpu")
            fence_async_global()
        tma_reduce_add(dq_desc, [entry * seqlen_q + m_block * config.block_m, head * config.head_dim], dq_smem)
        if config.dq == "ordered":
            tma_store_drain()  # written, not only read: the next program adds to the sum
            fence_async_global()
            partition_barrier()  # one thread issued the reduce and waited for it, another may publish it
            gl.atomic_add(turn, 1, sem="release", scope="gpu")
        else:
            tma_store_wait(0)
        mbarrier.arrive(dq_free.index(0))
        at = at.advance()


@gluon.jit
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc, dq_sum, turns, sizes, scales,
    config: gl.constexpr
):  # fmt: skip
    views = (
        q_desc,
        k_desc,
        v_desc,
        do_desc,
        lse_desc,
        delta_desc,
    )  # Triton's launcher takes no descriptor inside of a tuple
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [config.block_n, config.head_dim], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [config.block_n, config.head_dim], v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [config.stages, config.block_m, config.head_dim], q_desc.layout)
    do_smem = gl.allocate_shared_memory(do_desc.dtype, [config.stages, config.block_m, config.head_dim], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [config.stages, config.block_m], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [config.stages, config.block_m], delta_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([config.block_n, config.block_m], k_desc.dtype)
    ds_smem = gl.allocate_shared_memory(k_desc.dtype, [config.block_n, config.block_m], ds_layout)
    kv_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    do_free = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    init_barriers(kv_ready, 1)
    init_barriers(q_ready, 1)
    init_barriers(q_free, 1)
    init_barriers(do_ready, 1)
    init_barriers(do_free, 1)
    kv = (k_smem, v_smem, kv_ready)
    q = (q_smem, lse_smem, q_ready, q_free)
    do = (do_smem, delta_smem, do_ready, do_free)
    ends = (dk_desc, dv_desc, dq_sum)
    if config.dq == "red":
        dq = (ds_smem, None, None, None)
        gl.warp_specialize(
            [
                (mma_partition, (ends, kv, q, do, dq, sizes, scales, config)),
                (load_partition, (views, kv, q, do, sizes, config)),
            ],
            [1],
            [24],
        )
    else:
        dq_smem = gl.allocate_shared_memory(gl.float32, [config.block_m, config.head_dim], dq_desc.layout)
        dq_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        dq_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        init_barriers(dq_ready, 1)
        init_barriers(dq_free, 1)
        dq = (ds_smem, dq_smem, dq_ready, dq_free)
        gl.warp_specialize(
            [
                (mma_partition, (ends, kv, q, do, dq, sizes, scales, config)),
                (load_partition, (views, kv, q, do, sizes, config)),
                (store_partition, (dq_desc, turns, dq, sizes, config)),
            ],
            [1, 1],
            [24, 24],
        )


class Saved(NamedTuple):
    """What the forward leaves for the backward: q, k, v [B, S, H, D], out like q, lse [B, H, S_q] float32, and dout
    like q.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor


def launch(saved: Saved, config: Config, scale: float | None = None) -> Launch:
    """Its outputs: dq's float32 sum before the scale, dk, dv."""
    q, k, v, out, lse, dout = saved
    require_attention(q, k, v, config.causal)
    (batch, seqlen_q, heads, head_dim), seqlen_k = q.shape, k.shape[1]
    require(heads == k.shape[2], "H_kv", k.shape[2], f"H {heads}", "repeat the heads of k and v")
    require(head_dim == config.head_dim, "q.shape[-1]", head_dim, f"config.head_dim {config.head_dim}", "change one")
    for name, tensor in (("out", out), ("dout", dout)):
        fits = tensor.shape == q.shape and tensor.dtype == q.dtype and tensor.is_contiguous()
        require(
            fits,
            name,
            (tuple(tensor.shape), tensor.dtype),
            f"contiguous, {tuple(q.shape)} {q.dtype} as q",
            "pass the forward's",
        )
    fits = lse.shape == (batch, heads, seqlen_q) and lse.dtype == torch.float32
    require(fits, "lse", (tuple(lse.shape), lse.dtype), f"{(batch, heads, seqlen_q)} float32", "pass the forward's")
    require_multiple("S_q", seqlen_q, config.block_m)
    require_multiple("S_k", seqlen_k, config.block_n)
    scale = head_dim**-0.5 if scale is None else scale
    require(scale > 0, "scale", scale, "a positive number", "negate q and dq, and give -scale")
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous()  # [B, H, S_q]
    dk, dv = nans(*k.shape, like=k), nans(*v.shape, like=v)
    dq_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    turns = torch.zeros(batch * heads * (seqlen_q // config.block_m), dtype=torch.int32, device=q.device)
    queries, keys = [config.block_m, head_dim], [config.block_n, head_dim]
    views = (
        descriptor(rows(q), queries), descriptor(rows(k), keys), descriptor(rows(v), keys),
        descriptor(rows(dout), queries),
        descriptor((lse * LOG2_E).view(-1), [config.block_m]), descriptor(delta.view(-1), [config.block_m]),
    )  # fmt: skip
    ends = (descriptor(rows(dk), keys), descriptor(rows(dv), keys))
    sizes, scales = (heads, seqlen_q, seqlen_k), (scale, scale * LOG2_E)
    arguments = (*views, *ends, descriptor(rows(dq_sum), queries), dq_sum, turns, sizes, scales, config)
    return Launch(
        backward_kernel, (seqlen_k // config.block_n, batch * heads), arguments, {"num_warps": 8}, (dq_sum, dk, dv)
    )


def run(saved: Saved, config: Config, scale: float | None = None) -> tuple[Tensor, ...]:
    """(dq float32, dk, dv), shaped as q, k, v."""
    dq, dk, dv = launch(saved, config, scale).start()
    return dq * (config.head_dim**-0.5 if scale is None else scale), dk, dv


def reference(saved: Saved, config: Config, scale: float | None = None) -> tuple[Tensor, ...]:
    """(dq, dk, dv) in float64."""
    call = Call(saved.q, saved.k, saved.v, scale=scale)
    return tuple(oracle.backward(call.with_mask(causal_mask()) if config.causal else call, saved.dout)[:3])
