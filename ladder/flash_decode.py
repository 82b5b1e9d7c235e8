"""decode, split keys: few queries over long caches. Heads are packed into one tile, keys are split over programs, and a
second kernel combines.

The idea: a token that is generated asks one query of each head. k5 would give each (batch entry, head) a program with 1
row of 128 in use, which reads all keys of its head in turn: too few programs, each too slow. What bounds decode is
reading K and V, once; so

    packed heads   the G query heads that share a key head are rows of one tile of 64, together with the S_q newest
                   tokens: K and V are read once for
                   all of them. The tensor cores multiply empty rows, too; they have time
    split keys     the tiles of keys are dealt out to `splits` programs. Each takes its own softmax over its share and
                   writes a partial output in
                   float32 and its log-sum-exp
    combine        a row's partial outputs are one weighted sum: weights exp(lse_i - lse), lse the log-sum-exp of them
                   all. The online softmax's
                   rescale, across programs instead of tiles

The machine is k5's: a warp loads, four warps consume. The ring is as deep as shared memory allows, for bytes under way
are all that counts: 4.8 TB/s and 132 SMs are 36 GB/s each, which at a microsecond of latency is 36 KB under way.

Cost model, for H_kv key heads of S_k keys and D columns, in 16 bits:

    FLOPs       4 G S_q S_k D H_kv B useful ones
    bytes       4 S_k D H_kv B for K and V; partial results 4 (D + 1) splits a row, twice: little, while a split has
                more keys than 2 G
    shared      128 D for q, 512 D S for S stages of 128 keys: 208 KiB (3 stages at D = 128, 6 at D = 64)
    registers   o D / 2 and scores 64 a thread

What limits it: memory, when each SM has a share; at short caches the launch, the first load's latency, and the second
kernel.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024    0.1784     12.03          31.6
     64  dense     8192    0.1778     12.08          31.5
     64  dense    16384    0.2432     8.832            23
     64  causal    1024    0.1851      11.6          30.4
     64  causal    8192    0.1835      11.7          30.5
     64  causal   16384    0.2455     8.747          22.8
    128  dense     1024    0.2253     19.06            50
    128  dense     8192    0.1288     33.35          86.9
    128  dense    16384    0.1404      30.6          79.7
    128  causal    1024    0.1415     30.36          79.7
    128  causal    8192    0.1318     32.59          84.9
    128  causal   16384    0.1986     21.63          56.3

on NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-21 to 2026-11-22
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strobe.kernels.device.dialect import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .harness.harness import Rung, Size, check_inputs, outputs

LOG2_E = 1.4426950408889634
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
ROWS: gl.constexpr = gl.constexpr(64)  # of one consumer: what one wgmma takes
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True)
class Form:
    head_dim: int
    causal: bool
    block_n: int = 128
    stages: int = 0  # 0: 192 KiB of keys and values
    splits: int = 0  # programs that share the keys of a head; 0: as many as give each SM of an H200 one

    def __post_init__(self) -> None:
        if not self.stages:
            object.__setattr__(self, "stages", 192 * 1024 // (4 * self.head_dim * self.block_n))

    def shared_bytes(self) -> int:
        return 2 * self.head_dim * (64 + 2 * self.stages * self.block_n)


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
def share_of(seqlen_k, form: gl.constexpr):
    """(first tile of keys, tiles) of this split; the last ones may have none."""
    blocks = gl.cdiv(seqlen_k, form.block_n)
    share = gl.cdiv(blocks, form.splits)
    first = gl.minimum(gl.program_id(0) * share, blocks)
    return first, gl.minimum(share, blocks - first)


@gluon.jit
def load_partition(k_desc, v_desc, k, v, sizes, form: gl.constexpr):
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    place = (gl.program_id(2), gl.program_id(1))
    first, blocks = share_of(sizes[3], form)
    stage, parity = gl.to_tensor(0), gl.to_tensor(1)
    for i in range(blocks):
        row = (first + i) * form.block_n
        mbarrier.wait(k_free.index(stage), parity)
        copy_tile(k_desc, place, row, k_ready.index(stage), k_smem.index(stage))
        mbarrier.wait(v_free.index(stage), parity)
        copy_tile(v_desc, place, row, v_ready.index(stage), v_smem.index(stage))
        stage, parity = next_of(stage, parity, form.stages)


@gluon.jit
def load_queries(q, q_smem, sizes, form: gl.constexpr):
    """Row r is query r // G of the key head's query head r % G; zeros beyond the last. In shared memory, not in
    registers as the left operand: ptxas 12.8 would pack p over them (`tools.proof.operands`).
    """
    heads, group, seqlen_q, seqlen_k = sizes
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // form.head_dim, form.head_dim // 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, form.head_dim, gl.SliceLayout(0, layout))
    place = (gl.program_id(2) * seqlen_q + rows // group) * heads + gl.program_id(1) * group + rows % group
    tile = gl.load(
        q + place.to(gl.int64)[:, None] * form.head_dim + columns[None, :],
        mask=(rows < group * seqlen_q)[:, None],
        other=0.0,
    )
    q_smem.store(tile)
    fence_async_shared()


@gluon.jit
def score_product(q_smem, k_smem, form: gl.constexpr):
    """q k^T by wgmma."""
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
def hide(s, n_start, sizes, form: gl.constexpr):
    """Scores with -inf where there is no key, or causal attention does not look."""
    heads, group, seqlen_q, seqlen_k = sizes
    shift = seqlen_k - seqlen_q
    partial = n_start + form.block_n > seqlen_k
    if form.causal:
        partial = partial | (n_start + form.block_n > shift + 1)
    if partial:
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
        columns = gl.arange(0, form.block_n, gl.SliceLayout(0, s.type.layout))
        stop = rows * 0 + (seqlen_k - n_start)
        if form.causal:
            stop = gl.minimum(stop, rows // group + (shift + 1 - n_start))
        s = gl.where(stop[:, None] > columns[None, :], s, float("-inf"))
    return s


@gluon.jit
def mma_partition(q, q_smem, parts, lses, k, v, sizes, scale_log2, form: gl.constexpr):
    """A split's o / row_sum and log-sum-exp in units of log2, as parts [splits, B, H_kv, 64, D] and lses [splits, B,
    H_kv, 64].
    """
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_n, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 16])
    first, blocks = share_of(sizes[3], form)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    o = gl.full([ROWS, form.head_dim], 0.0, gl.float32, o_layout)
    load_queries(q, q_smem, sizes, form)
    stage, parity = gl.to_tensor(0), gl.to_tensor(0)
    for i in range(blocks):
        mbarrier.wait(k_ready.index(stage), parity)
        s = score_product(q_smem, as_rows(k_smem.index(stage)), form)
        mbarrier.arrive(k_free.index(stage))
        s = hide(s, (first + i) * form.block_n, sizes, form)
        p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2)
        o = o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
        mbarrier.wait(v_ready.index(stage), parity)
        o = value_product(p, as_rows(v_smem.index(stage)), o)
        mbarrier.arrive(v_free.index(stage))
        stage, parity = next_of(stage, parity, form.stages)
    place = (gl.program_id(0).to(gl.int64) * gl.num_programs(2) + gl.program_id(2)) * gl.num_programs(
        1
    ) + gl.program_id(1)
    used = sizes[1] * sizes[2]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    gl.store(
        lses + place * ROWS + rows,
        gl.where(row_sum == 0.0, float("-inf"), row_max + gl.log2(row_sum)),
        mask=rows < used,
    )
    inverse = gl.convert_layout(gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum), gl.SliceLayout(1, o_layout))
    o_rows = gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
    columns = gl.arange(0, form.head_dim, gl.SliceLayout(0, o_layout))
    places = parts + place * ROWS * form.head_dim + (o_rows[:, None] * form.head_dim + columns[None, :])
    gl.store(places, o * inverse[:, None], mask=(o_rows < used)[:, None])


@gluon.jit
def attend_kernel(q, k_desc, v_desc, parts, lses, sizes, scale_log2, form: gl.constexpr):
    """sizes (H, query heads a key head, S_q, S_k); a program is a split of one key head of one batch entry."""
    STAGES: gl.constexpr = form.stages
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, form.head_dim], k_desc.dtype)
    q_smem = gl.allocate_shared_memory(k_desc.dtype, [ROWS, form.head_dim], Q_LAYOUT)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005 (Triton has no *)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    k = (k_smem, barriers(STAGES, 1), barriers(STAGES, 1))
    v = (v_smem, barriers(STAGES, 1), barriers(STAGES, 1))
    gl.warp_specialize(
        [
            (mma_partition, (q, q_smem, parts, lses, k, v, sizes, scale_log2, form)),
            (load_partition, (k_desc, v_desc, k, v, sizes, form)),
        ],
        [1],
        [24],
    )


@gluon.jit
def combine_kernel(parts, lses, out, lse, sizes, form: gl.constexpr):
    """One row's splits into one: out and the natural log-sum-exp."""
    heads, group, seqlen_q, seqlen_k = sizes
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    query, head, entry = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    row = query * group + head % group
    columns = gl.arange(0, form.head_dim, layout)
    plane = gl.num_programs(2) * (heads // group)
    place = (entry * (heads // group) + head // group).to(gl.int64)
    top = gl.to_tensor(float("-inf"))
    for i in range(form.splits):
        top = gl.maximum(top, gl.load(lses + (place + i * plane) * ROWS + row))
    base = gl.where(top == float("-inf"), 0.0, top)
    total = gl.to_tensor(0.0)
    o = gl.full([form.head_dim], 0.0, gl.float32, layout)
    for i in range(form.splits):
        at = (place + i * plane) * ROWS + row
        weight = gl.exp2(gl.load(lses + at) - base)
        total += weight
        o += weight * gl.load(parts + at * form.head_dim + columns)
    o = o * gl.where(total == 0.0, 0.0, 1.0 / total)
    gl.store(
        out + ((entry.to(gl.int64) * seqlen_q + query) * heads + head) * form.head_dim + columns,
        o.to(out.dtype.element_ty),
    )
    row_lse = gl.where(total == 0.0, float("-inf"), (base + gl.log2(total)) * LN_2)
    gl.store(lse + (entry.to(gl.int64) * heads + head) * seqlen_q + query, row_lse)


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
    (batch, seqlen_q, heads, head_dim), (seqlen_k, heads_kv) = q.shape, k.shape[1:3]
    group = heads // heads_kv
    if seqlen_q * group > 64:
        raise ValueError(
            f"q.shape: got {seqlen_q} queries of {group} heads a key head, expected at most 64 rows together: k6 "
            "takes more"
        )
    form = Form(head_dim, causal, **options)
    if not form.splits:
        form = replace(form, splits=max(1, min(132 // (batch * heads_kv), -(-seqlen_k // form.block_n))))
    out, lse = outputs(q)
    parts = torch.empty(form.splits, batch, heads_kv, 64, head_dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(form.splits, batch, heads_kv, 64, dtype=torch.float32, device=q.device)
    sizes = (heads, group, seqlen_q, seqlen_k)
    views = [descriptor(tensor, form.block_n) for tensor in (k, v)]
    attend_kernel[(form.splits, heads_kv, batch)](
        q, *views, parts, lses, sizes, head_dim**-0.5 * LOG2_E, form, num_warps=4
    )
    combine_kernel[(seqlen_q, heads, batch)](parts, lses, out, lse, sizes, form, num_warps=1)
    return out, lse


def moved(size: Size, form: Form) -> int:
    """K and V once; q once a split; partial results written and read, their log-sum-exps read twice; out."""
    splits = form.splits or max(1, min(132 // (size.batch * size.heads_kv), -(-size.seqlen_k // form.block_n)))
    keys = 4 * size.head_dim * size.batch * size.heads_kv * size.seqlen_k
    return keys + size.rows * (splits * (10 * size.head_dim + 12) + 2 * size.head_dim + 4)


RUNG = Rung(
    "decode", "split keys, packed heads, and a kernel that combines", "k5", run, Form, moved,
    ("share_of", "load_queries", "mma_partition", "combine_kernel"), queries=1, small_seqlen=700,
)  # fmt: skip
