"""k3_3, five stages: as many loads under way as latency asks for.

The idea: to keep a memory system busy, bytes under way must reach latency times rate (Little's law). An H200 that gives
each of 132 SMs 36 GB/s from memory, or five times that from L2, with a microsecond from request to arrival, wants 36 to
180 KB under way in each SM. Five stages of K and of V hold 80 KiB at D = 64, and an SM runs two programs. At D = 128
five tiles of 64 keys are 80 KiB too: two stages of K and three of V, whose stage is asked for again a tile later
(below), so that both are on their way for two tiles. So each ring has a length of its own.

And who has tiles in hand need not ask for the next at once. Behind the scores of tile i all threads meet, and then K's
stage is asked for again and so is V's of tile i - 1: one meeting a tile where k3_2 has two, since V's may wait.

Whether more under way helps depends on who is slow. Where tiles are multiplied more slowly than they arrive, more
stages only wait in shared memory, and take it from a second program on the same SM: five and five at D = 128 leave room
for one, and cost a quarter of the speed. Measured, what helps here is the meeting that is saved, at D = 64, where a
tile is half as long; at D = 128 this rung has 0.98 to 1.04 of k3_2's speed: mma.sync is slow.

Cost model, a tile of 128 queries and 64 keys, in 16 bits:

    FLOPs       4 * 128 * 64 D, on mma.sync
    bytes       256 D of K and V a tile; 80 KiB of them on their way
    shared      2 D (128 + 64 S) for S stages of both: 96 KiB at D = 64, 112 at D = 128; two programs still fit in 227
    registers   as in k3_2

What limits it: mma.sync, which reaches about two thirds of what Hopper's tensor cores can do: its operands come through
registers, and each warp fetches all of K and V for its few rows.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024    0.4808     285.9          28.9
     64  dense     8192     3.578     307.3          31.1
     64  dense    16384     7.181     306.2            31
     64  causal    1024    0.2988     230.2          23.3
     64  causal    8192     1.957     280.9          28.4
     64  causal   16384     3.834     286.8            29
    128  dense     1024    0.4007       343          34.7
    128  dense     8192     3.039     361.8          36.6
    128  dense    16384     6.029     364.7          36.9
    128  causal    1024     0.247     278.4          28.2
    128  causal    8192     1.691     325.1          32.9
    128  causal   16384     3.284     334.9          33.9

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
    mma_v2,
    partition_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
)

from .harness.harness import Rung, Size, check_inputs, outputs

LOG2_E = 1.4426950408889634
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True)
class Form:
    head_dim: int
    causal: bool
    block_m: int = 128
    block_n: int = 64
    stages_k: int = 0  # 0: five and five at D = 64; at D = 128 two and three, so that two programs share an SM
    stages_v: int = 0
    warps: int = 4

    def __post_init__(self) -> None:
        if not self.stages_k:
            object.__setattr__(self, "stages_k", 5 if self.head_dim == 64 else 2)
        if not self.stages_v:
            object.__setattr__(self, "stages_v", 5 if self.head_dim == 64 else 3)

    def shared_bytes(self) -> int:
        return 2 * self.head_dim * (self.block_m + (self.stages_k + self.stages_v) * self.block_n)


@gluon.jit
def as_rows(tile):
    """A tile as rows and columns: TMA sees it as a block [1, 1, rows, columns]."""
    shape: gl.constexpr = [tile.shape[-2], tile.shape[-1]]
    return tile.reshape(shape)


@gluon.jit
def copy_tile(desc, place, row, ready, smem):
    """Have TMA fetch rows `row`.. of one head: one thread asks, and `ready` turns when all bytes are there. Rows beyond
    the last are zeros.
    """
    entry, head = place
    mbarrier.expect(ready, desc.block_type.nbytes)
    tma_load(desc, [entry, head, row, 0], ready, smem)


@gluon.jit
def all_have_read():
    """Until every warp has read what TMA is about to overwrite. The fence orders those reads before TMA's writes, which
    take another path.
    """
    fence_async_shared()
    partition_barrier()


@gluon.jit
def score_product(q_smem, k_smem, form: gl.constexpr):
    """q k^T by mma.sync, 16 columns of d at a time."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [form.warps, 1], [16, 8])
    HEAD_DIM: gl.constexpr = form.head_dim
    s = gl.full([form.block_m, form.block_n], 0.0, gl.float32, layout)
    for d in gl.static_range(0, HEAD_DIM, 16):
        q = q_smem.slice(d, 16, 1).load(gl.DotOperandLayout(0, layout, 2))
        k = k_smem.slice(d, 16, 1).permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2))
        s = mma_v2(q, k, s)
    return s


@gluon.jit
def halves(p):
    """The left and the right columns: a renaming of registers."""
    return gl.split(gl.permute(gl.reshape(p, [p.shape[0], 2, p.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def add_product(p, v_smem, o):
    """o + p v by mma.sync: p as it lies in registers, v transposed on its way there."""
    layout: gl.constexpr = o.type.layout
    p_reg = gl.convert_layout(p.to(v_smem.dtype), gl.DotOperandLayout(0, layout, 2))
    return mma_v2(p_reg, v_smem.load(gl.DotOperandLayout(1, layout, 2)), o)


@gluon.jit
def value_product(p, v_smem, o):
    """o + p v, 16 keys at a time: v's fragments of so many are few registers."""
    KEYS: gl.constexpr = p.shape[1] // 2
    left, right = halves(p)
    if KEYS > 16:
        o = value_product(left, v_smem.slice(0, KEYS, 0), o)
        return value_product(right, v_smem.slice(KEYS, KEYS, 0), o)
    else:
        o = add_product(left, v_smem.slice(0, KEYS, 0), o)
        return add_product(right, v_smem.slice(KEYS, KEYS, 0), o)


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2):
    """(p, rescale, row_max, row_sum) after one more tile of raw scores; row_max in units of log2."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[:, None])
    rescale = gl.exp2(row_max - base)
    return p, rescale, new_max, row_sum * rescale + gl.sum(p, 1)


@gluon.jit
def hide(s, m_start, n_start, lengths, form: gl.constexpr):
    """Scores with -inf where there is no key, or causal attention does not look."""
    seqlen_q, seqlen_k = lengths
    shift = seqlen_k - seqlen_q
    partial = n_start + form.block_n > seqlen_k
    if form.causal:
        partial = partial | (n_start + form.block_n > m_start + shift + 1)
    if partial:
        rows = gl.arange(0, form.block_m, gl.SliceLayout(1, s.type.layout))
        columns = gl.arange(0, form.block_n, gl.SliceLayout(0, s.type.layout))
        stop = rows * 0 + (seqlen_k - n_start)
        if form.causal:
            stop = gl.minimum(stop, rows + (m_start + shift + 1 - n_start))
        s = gl.where(stop[:, None] > columns[None, :], s, float("-inf"))
    return s


@gluon.jit
def blocks_of(m_start, lengths, form: gl.constexpr):
    """How many tiles of keys some row of this program sees."""
    seqlen_q, seqlen_k = lengths
    n_stop = seqlen_k
    if form.causal:
        n_stop = gl.minimum(n_stop, gl.maximum(m_start + form.block_m + seqlen_k - seqlen_q, 0))
    return gl.cdiv(n_stop, form.block_n)


@gluon.jit
def store_rows(o_desc, o, row_max, row_sum, lse_rows, place, m_start, seqlen_q, o_smem):
    """lse from registers; o / row_sum through shared memory by TMA, which writes no row beyond the last."""
    entry, head = place
    rows = gl.arange(0, o.shape[0], row_sum.type.layout)
    row_lse = gl.where(row_sum == 0.0, float("-inf"), row_max * LN_2 + gl.log(row_sum))
    gl.store(lse_rows + m_start + rows, row_lse, mask=rows < seqlen_q - m_start)
    inverse = gl.convert_layout(gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum), gl.SliceLayout(1, o.type.layout))
    as_rows(o_smem).store((o * inverse[:, None]).to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [entry, head, m_start, 0], o_smem)
    tma_store_wait(0)


@gluon.jit
def barriers(count: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(count):
        mbarrier.init(barrier.index(j), count=1)
    return barrier


@gluon.jit
def next_of(stage, parity, stages: gl.constexpr):
    """The next position in a ring: (stage, parity)."""
    last = stage == stages - 1
    return gl.where(last, 0, stage + 1), gl.where(last, parity ^ 1, parity)


@gluon.jit
def attend_kernel(q_desc, k_desc, v_desc, o_desc, lse, sizes, scale_log2, form: gl.constexpr):
    heads, group, seqlen_q, seqlen_k = sizes
    BLOCK_M: gl.constexpr = form.block_m
    BLOCK_N: gl.constexpr = form.block_n
    STAGES_K: gl.constexpr = form.stages_k
    STAGES_V: gl.constexpr = form.stages_v
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [form.warps, 1], [16, 8])
    m_start = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M  # the longest first
    head, entry = gl.program_id(1), gl.program_id(2)
    kv_place = (entry, head // group)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES_K] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005 (Triton has no *)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES_V] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = barriers(STAGES_K)
    v_ready = barriers(STAGES_V)
    mbarrier.init(q_ready, count=1)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, layout))
    o = gl.full([BLOCK_M, form.head_dim], 0.0, gl.float32, layout)
    blocks = blocks_of(m_start, (seqlen_q, seqlen_k), form)
    copy_tile(q_desc, (entry, head), m_start, q_ready, q_smem)
    for j in gl.static_range(max(STAGES_K, STAGES_V)):
        if j < blocks:
            if j < STAGES_K:
                copy_tile(k_desc, kv_place, (blocks - 1 - j) * BLOCK_N, k_ready.index(j), k_smem.index(j))
            if j < STAGES_V:
                copy_tile(v_desc, kv_place, (blocks - 1 - j) * BLOCK_N, v_ready.index(j), v_smem.index(j))
    mbarrier.wait(q_ready, 0)
    k_at, k_parity = gl.to_tensor(0), gl.to_tensor(0)
    v_at, v_parity = gl.to_tensor(0), gl.to_tensor(0)
    v_read = gl.to_tensor(0)
    for i in range(blocks):  # the last keys first: there a causal tile is masked
        n_start = (blocks - 1 - i) * BLOCK_N
        mbarrier.wait(k_ready.index(k_at), k_parity)
        s = score_product(as_rows(q_smem), as_rows(k_smem.index(k_at)), form)
        all_have_read()  # K of this tile, and V of the one before
        if i + STAGES_K < blocks:
            copy_tile(k_desc, kv_place, n_start - STAGES_K * BLOCK_N, k_ready.index(k_at), k_smem.index(k_at))
        if i > 0:
            if i - 1 + STAGES_V < blocks:
                copy_tile(
                    v_desc, kv_place, n_start - (STAGES_V - 1) * BLOCK_N, v_ready.index(v_read), v_smem.index(v_read)
                )
        s = hide(s, m_start, n_start, (seqlen_q, seqlen_k), form)
        p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2)
        o = o * rescale[:, None]
        mbarrier.wait(v_ready.index(v_at), v_parity)
        o = value_product(p, as_rows(v_smem.index(v_at)), o)
        v_read = v_at
        k_at, k_parity = next_of(k_at, k_parity, STAGES_K)
        v_at, v_parity = next_of(v_at, v_parity, STAGES_V)
    lse_rows = lse + (entry.to(gl.int64) * heads + head) * seqlen_q
    store_rows(o_desc, o, row_max, row_sum, lse_rows, (entry, head), m_start, seqlen_q, q_smem)


def descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """TMA's view of [B, S, H, D] as [B, H, S, D], moved in tiles of one head's rows; the layout swizzles as the tensor
    cores' loads want it.
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
    views = [
        descriptor(tensor, rows)
        for tensor, rows in ((q, form.block_m), (k, form.block_n), (v, form.block_n), (out, form.block_m))
    ]
    sizes = (heads, heads // k.shape[2], seqlen_q, k.shape[1])
    grid = (-(-seqlen_q // form.block_m), heads, batch)
    attend_kernel[grid](*views, lse, sizes, head_dim**-0.5 * LOG2_E, form, num_warps=form.warps)
    return out, lse


def moved(size: Size, form: Form) -> int:
    """q and out once, K and V once for each tile of queries that sees them."""
    return 2 * size.head_dim * (2 * size.rows + 2 * size.streamed(form.block_m, form.block_n)) + 4 * size.rows


RUNG = Rung("k3_3", "five stages", "k3_2", run, Form, moved, ("Form", "attend_kernel"))
