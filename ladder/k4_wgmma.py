"""k4_1, wgmma for the scores: q and K straight from shared memory. Its result passes through shared memory for
mma.sync.

The idea: `warpgroup_mma` (wgmma) is Hopper's own product. Four warps together multiply [64, 16 k] by [16 k, N]; both
operands are read from shared memory where TMA put them, through descriptors that know the swizzle, so no ldmatrix, no
fragments of K in registers, no issue slots for fetching them. It runs asynchronously: issued, then awaited
(`warpgroup_mma_wait`), and its accumulator must not be touched in between.

Only q k^T is done so here. The product with V is still mma.sync's, and to stay clear of who holds which element the
scores change their layout: once exponentiated they are written to shared memory in 16 bits and read back as mma.sync's
fragments, 4 bytes of traffic a score that k4_2 gets rid of. (As float32 they were twice the traffic, and
the rung half as fast: 233 instead of 431 TFLOP/s at D = 128.) The reads of K are now asynchronous: once the product has
been awaited they are over, and K's stage may be filled without a fence; V's, read by ldmatrix, still needs one.

Cost model, a tile of 128 queries and 64 keys, in 16 bits:

    FLOPs       2 * 128 * 64 D on wgmma and as many on mma.sync
    bytes       256 D of K and V a tile from global memory; through shared memory 32 KiB for the scores, there and back
    shared      2 D 128 for q, 64 KiB of K and V (four stages at D = 64, two at 128) and 16 for scores: 112 KiB at D =
                128; two programs an SM
    registers   o D, scores 64, and V's fragments

What limits it: the round trip of scores, mma.sync for half the FLOPs, and tensor cores that idle while the softmax
works.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024    0.4825     284.8          28.8
     64  dense     8192     3.677       299          30.2
     64  dense    16384     7.362     298.7          30.2
     64  causal    1024    0.2909     236.4          23.9
     64  causal    8192     1.981     277.5          28.1
     64  causal   16384     3.825     287.5          29.1
    128  dense     1024    0.3666     374.9          37.9
    128  dense     8192      2.65     414.9            42
    128  dense    16384     5.269     417.4          42.2
    128  causal    1024    0.2337     294.3          29.8
    128  causal    8192     1.592     345.4          34.9
    128  causal   16384     2.877     382.1          38.6

on NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-24 to 2026-11-25
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
    warpgroup_mma,
    warpgroup_mma_wait,
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
    stages: int = 0  # 0: 64 KiB of keys and values, so that two programs share an SM
    warps: int = 4

    def __post_init__(self) -> None:
        if not self.stages:
            object.__setattr__(self, "stages", 64 * 1024 // (4 * self.head_dim * self.block_n))

    def shared_bytes(self) -> int:
        return 2 * self.head_dim * (self.block_m + 2 * self.stages * self.block_n) + 2 * self.block_m * self.block_n


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
    """q k^T by wgmma, both from shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [form.warps, 1], [16, form.block_n, 16])
    s = gl.full([form.block_m, form.block_n], 0.0, gl.float32, layout)
    s = warpgroup_mma(q_smem, k_smem.permute((1, 0)), s, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def value_product(p, p_smem, v_smem, o):
    """o + p v by mma.sync, 16 keys at a time: p through shared memory into its fragments, v transposed on its way
    there.
    """
    layout: gl.constexpr = o.type.layout
    KEYS: gl.constexpr = v_smem.shape[0]
    p_smem.store(p.to(v_smem.dtype))
    for n in gl.static_range(0, KEYS, 16):
        p_part = p_smem.slice(n, 16, 1).load(gl.DotOperandLayout(0, layout, 2))
        o = mma_v2(p_part, v_smem.slice(n, 16, 0).load(gl.DotOperandLayout(1, layout, 2)), o)
    return o


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
def attend_kernel(q_desc, k_desc, v_desc, o_desc, lse, sizes, scale_log2, form: gl.constexpr):
    heads, group, seqlen_q, seqlen_k = sizes
    BLOCK_M: gl.constexpr = form.block_m
    BLOCK_N: gl.constexpr = form.block_n
    STAGES: gl.constexpr = form.stages
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [form.warps, 1], [16, 8])
    m_start = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M  # the longest first
    head, entry = gl.program_id(1), gl.program_id(2)
    kv_place = (entry, head // group)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005 (Triton has no *)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    p_smem = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_M, BLOCK_N], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for j in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(j), count=1)
        mbarrier.init(v_ready.index(j), count=1)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [form.warps, 1], [16, BLOCK_N, 16])
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    o = gl.full([BLOCK_M, form.head_dim], 0.0, gl.float32, layout)
    blocks = blocks_of(m_start, (seqlen_q, seqlen_k), form)
    copy_tile(q_desc, (entry, head), m_start, q_ready, q_smem)
    for j in gl.static_range(STAGES):
        if j < blocks:
            copy_tile(k_desc, kv_place, (blocks - 1 - j) * BLOCK_N, k_ready.index(j), k_smem.index(j))
            copy_tile(v_desc, kv_place, (blocks - 1 - j) * BLOCK_N, v_ready.index(j), v_smem.index(j))
    mbarrier.wait(q_ready, 0)
    stage, parity = 0, 0
    for i in range(blocks):  # the last keys first: there a causal tile is masked
        n_start = (blocks - 1 - i) * BLOCK_N
        mbarrier.wait(k_ready.index(stage), parity)
        s = score_product(as_rows(q_smem), as_rows(k_smem.index(stage)), form)
        partition_barrier()  # all have awaited the product that read K
        if i + STAGES < blocks:
            copy_tile(k_desc, kv_place, n_start - STAGES * BLOCK_N, k_ready.index(stage), k_smem.index(stage))
        s = hide(s, m_start, n_start, (seqlen_q, seqlen_k), form)
        p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2)
        mbarrier.wait(v_ready.index(stage), parity)
        o = o * gl.convert_layout(rescale, gl.SliceLayout(1, layout))[:, None]
        o = value_product(p, p_smem, as_rows(v_smem.index(stage)), o)
        all_have_read()
        if i + STAGES < blocks:
            copy_tile(v_desc, kv_place, n_start - STAGES * BLOCK_N, v_ready.index(stage), v_smem.index(stage))
        last = stage == STAGES - 1
        stage = gl.where(last, 0, stage + 1)
        parity = gl.where(last, parity ^ 1, parity)
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


RUNG = Rung(
    "k4_1",
    "wgmma for the scores, which pass through shared memory",
    "k3_3",
    run,
    Form,
    moved,
    ("score_product", "attend_kernel"),
)
