"""k4_2, wgmma for both products: weights are passed in registers, V is read with its own major order.

The idea: wgmma takes its left operand from registers, too. Its accumulator [64, N] gives each warp 16 rows, laid out in
every 8 columns as mma.sync lays out C (rung a): rounded to 16 bits, neighbouring pieces are the left operand's
fragments of the next product. So scores, weights and operand are the same registers under three names, and
`convert_layout` costs nothing. The right operand stays in shared memory: K lies with d running along rows, as k^T wants
it; V's rows run along d while the product sums over keys, and wgmma reads 16-bit operands in either major order, so V
needs no transpose: a bit in its descriptor says it.

No warp reads K or V any more, only the tensor cores do: stages are refilled behind `warpgroup_mma_wait` and a barrier,
with no fence. The registers that fragments took hold more scores: N doubles at D = 128, and each tile pays its maximum,
rescale and barriers for twice the work.

Cost model, a tile of 128 queries and N keys (64), D columns, in 16 bits:

    FLOPs       4 * 128 N D, on wgmma: 4,096 FLOPs an SM and clock, one and a half times mma.sync
    bytes       4 N D of K and V a tile; shared memory feeds K twice (each wgmma has 64 rows) and V twice, q once for
                each tile
    shared      2 D (128 + 2 S N) for S stages: 96 KiB for D = 128 and S = 2, 112 KiB for D = 64 and S = 6; two programs
                an SM
    registers   o D, scores N, weights N / 2: 224 for D = 128

What limits it: turns. Tensor cores wait while the softmax works, and the softmax waits for the tensor cores; the warps
that load are the warps that multiply. A second program on the SM fills some of the gaps, by chance.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024    0.3608       381          38.5
     64  dense     8192     2.658     413.7          41.8
     64  dense    16384      5.17     425.4            43
     64  causal    1024    0.2301     298.9          30.2
     64  causal    8192     1.466     375.1          37.9
     64  causal   16384     2.824     389.4          39.4
    128  dense     1024     0.293     469.1          47.4
    128  dense     8192     2.134     515.2          52.1
    128  dense    16384     4.358     504.6            51
    128  causal    1024    0.1868     368.1          37.2
    128  causal    8192     1.168     470.9          47.6
    128  causal   16384     2.258     486.9          49.2

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
    stages: int = 0  # 0: as many as leave room for two programs on an SM
    warps: int = 4

    def __post_init__(self) -> None:
        if not self.stages:
            room = 113 * 1024 - 2 * self.head_dim * self.block_m
            object.__setattr__(self, "stages", room // (4 * self.head_dim * self.block_n))

    def shared_bytes(self) -> int:
        return 2 * self.head_dim * (self.block_m + 2 * self.stages * self.block_n)


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
def score_product(q_smem, k_smem, form: gl.constexpr):
    """q k^T by wgmma, both from shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [form.warps, 1], [16, form.block_n, 16])
    s = gl.full([form.block_m, form.block_n], 0.0, gl.float32, layout)
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
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [form.warps, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [form.warps, 1], [16, form.head_dim, 16])
    m_start = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M  # the longest first
    head, entry = gl.program_id(1), gl.program_id(2)
    kv_place = (entry, head // group)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005 (Triton has no *)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for j in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(j), count=1)
        mbarrier.init(v_ready.index(j), count=1)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    o = gl.full([BLOCK_M, form.head_dim], 0.0, gl.float32, o_layout)
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
        o = o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
        mbarrier.wait(v_ready.index(stage), parity)
        o = value_product(p, as_rows(v_smem.index(stage)), o)
        partition_barrier()
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
    "k4_2", "wgmma for both products, weights passed in registers", "k4_1", run, Form, moved,
    ("score_product", "value_product", "attend_kernel"),
)  # fmt: skip
