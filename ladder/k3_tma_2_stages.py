"""k3_2, two stages: K and V in rings of their own, a tile ahead.

The idea: two buffers each for K and V, each with its barrier. While tile j is multiplied from one stage, tile j + 1
lands in the other; when a stage has been read it is asked for tile j + 2. A position in a ring is (stage, parity): the
stage steps through the buffers, and the parity turns each time round, so that a waiter never takes the tile of the
round before for its own. K and V have rings of their own because their stages fall free at different times: K's after
the scores, V's after the weights.

Cost model, a tile of 128 queries and 64 keys, in 16 bits:

    FLOPs       4 * 128 * 64 D, on mma.sync
    bytes       256 D of K and V a tile; as many again on their way while one is worked on
    shared      2 D (128 + 256): 96 KiB for D = 128; two programs an SM
    registers   as in k3_1, and a stage and a parity

What limits it: latency, where a tile's work is shorter than a load takes; then mma.sync.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024      0.52     264.3          26.7
     64  dense     8192     3.926     280.1          28.3
     64  dense    16384     7.719     284.9          28.8
     64  causal    1024    0.3091     222.6          22.5
     64  causal    8192     2.129     258.3          26.1
     64  causal   16384     4.126     266.5          26.9
    128  dense     1024    0.4052     339.2          34.3
    128  dense     8192     3.108     353.7          35.8
    128  dense    16384     6.187     355.4          35.9
    128  causal    1024    0.2579     266.8            27
    128  causal    8192     1.709     321.7          32.5
    128  causal   16384     3.224     341.1          34.5

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
    stages: int = 2
    warps: int = 4

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
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for j in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(j), count=1)
        mbarrier.init(v_ready.index(j), count=1)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, layout))
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
        all_have_read()
        if i + STAGES < blocks:
            copy_tile(k_desc, kv_place, n_start - STAGES * BLOCK_N, k_ready.index(stage), k_smem.index(stage))
        s = hide(s, m_start, n_start, (seqlen_q, seqlen_k), form)
        p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2)
        o = o * rescale[:, None]
        mbarrier.wait(v_ready.index(stage), parity)
        o = value_product(p, as_rows(v_smem.index(stage)), o)
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


RUNG = Rung("k3_2", "two stages: K and V in rings of their own", "k3_1", run, Form, moved, ("attend_kernel",))
