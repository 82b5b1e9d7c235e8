"""k8, incoherent processing: random signs and a Hadamard transform spread outliers before q and k are rounded to 8
bits; scales by block.

The idea: e4m3 keeps 3 bits of significand, so a product of two large entries is off by a large amount, whatever the
scale. Activations have such entries: a few channels many times the rest. A rotation changes no product, (q R)(k R)^T =
q k^T if R R^T = 1, but it does change who is large: R = diag(random signs) H, H the Hadamard matrix of +1 and -1, makes
each entry of q R a sum of all D entries of q under random signs. An outlier of 10 becomes 10 / sqrt(D) in every column;
the errors of D roundings are independent and average out.

`rotate_kernel` does it on the way to 8 bits: one product with a matrix of +1 and -1 (exact in bfloat16, and D^2 S FLOPs
are little beside S^2 D), the largest entry of each block of rows, one scale a block, rounding. The factor 1 / D of two
unnormalised transforms goes into the softmax's scale.

Scales by block: 64 rows of q, 128 of k, have one each, so that an outlier costs its own block only. The scores of a
tile are worth scale q_scale k_scale: one number a tile, asked for a tile ahead. V is summed over blocks, where a scale
by block would have to go into the weights; it gets one a head, through the division by row_sum. On numbers drawn from
N(0, 1) with 0.1 % of N(0, 100) added: `python -m ladder --outliers`.

Cost model: attention as in k7, but that a consumer walks the tiles of all three; before it

    FLOPs       2 D^2 S (H + H_kv) for the rotation
    bytes       2 S D (H + 2 H_kv) read, S D (H + 2 H_kv) written; V once more for its largest entry
    shared      as in k7
    registers   as in k7, and two scales

What limits it: as in k7. The passes before it are bound by memory; they could be part of what made q, k and v.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024    0.5164     266.1          13.5
     64  dense     8192     2.039     539.2          27.3
     64  dense    16384     3.879     566.9          28.7
     64  causal    1024    0.4497     152.9          12.4
     64  causal    8192      1.26     436.3          22.1
     64  causal   16384     2.183     503.7          25.5
    128  dense     1024    0.4437     309.8          15.7
    128  dense     8192     1.428       770          38.9
    128  dense    16384     2.576     853.5          43.1
    128  causal    1024    0.4079     168.6          13.7
    128  causal    8192    0.8804     624.5          31.6
    128  causal   16384     1.404       783          39.6

on NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-24 to 2026-11-25
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
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

from .harness.harness import Rung, Size, check_inputs, outputs, programs

LOG2_E = 1.4426950408889634
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
ROWS: gl.constexpr = gl.constexpr(64)  # of one consumer: what one wgmma takes
CONSUMERS: gl.constexpr = gl.constexpr(3)
BLOCK_M: gl.constexpr = gl.constexpr(192)  # theirs together
SLOTS: gl.constexpr = gl.constexpr(4)  # tiles of q that shared memory is laid out for: a power of two
LAG: gl.constexpr = gl.constexpr(4.0)  # log2 by which a row's maximum may grow before o is rescaled
LIFT: gl.constexpr = gl.constexpr(4.5)  # weights reach 2^4.5, and 2^LAG times that; e4m3 ends at 448
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}


@dataclass(frozen=True)
class Form:
    head_dim: int
    causal: bool
    masks: bool = True  # whether any tile may hold a hidden key; else the loop has no code for them
    block_n: int = 128
    stages: int = 2
    rotate: int = 1  # 0: no signs and no Hadamard transform

    def shared_bytes(self) -> int:
        return self.head_dim * (3 * 64 * SLOTS.value + 2 * self.stages * self.block_n)


@triton.jit
def rotate_kernel(x, rotation, out, scales, seqlen, heads, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """A block of rows of x [B, S, H, D] times rotation [D, D], as out [B, H, S, D] in 8 bits, and what one unit of it
    is worth.
    """
    entry, head, block = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    rows, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    places = x + (entry.to(tl.int64) * seqlen * heads + head) * HEAD_DIM + rows[:, None] * heads * HEAD_DIM + d[None, :]
    tile = tl.load(places, mask=(rows < seqlen)[:, None], other=0.0)
    turn = tl.load(rotation + d[:, None] * HEAD_DIM + d[None, :])
    turned = tl.dot(tile, turn)
    top = tl.max(tl.max(tl.abs(turned), 1), 0)
    top = tl.where(top == 0.0, 1.0, top)
    plane = entry.to(tl.int64) * heads + head
    rounded = (turned * tl.math.div_rn(448.0, top)).to(tl.float8e4nv)
    tl.store(
        out + plane * seqlen * HEAD_DIM + rows[:, None] * HEAD_DIM + d[None, :], rounded, mask=(rows < seqlen)[:, None]
    )
    tl.store(scales + plane * tl.num_programs(0) + block, tl.math.div_rn(top, 448.0))


@triton.jit
def transpose_kernel(v, turned, tops, seqlen, padded, heads, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """v [B, S, H, D] as [B, H, D, S] in 8 bits of scale tops / 448, keys of each 32 in the order in which accumulators
    hold them; zeros beyond the last.
    """
    entry, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    quad, d = (
        tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4),
        tl.arange(0, HEAD_DIM),
    )  # of four places that follow each other
    top = tl.load(tops + entry * heads + head)
    word = tl.zeros([BLOCK // 4, HEAD_DIM], tl.int32)
    for i in tl.static_range(4):
        key = quad // 4 * 16 + quad % 4 * 2 + (i // 2) * 8 + i % 2
        rows = v + (entry * seqlen * heads + head) * HEAD_DIM + key[:, None] * heads * HEAD_DIM + d[None, :]
        row = tl.load(rows, mask=(key < seqlen)[:, None], other=0.0).to(tl.float32)
        rounded = (row * tl.math.div_rn(448.0, tl.where(top == 0.0, 1.0, top))).to(tl.float8e4nv)
        word |= rounded.to(tl.uint8, bitcast=True).to(tl.int32) << 8 * i
    places = turned + ((entry * heads + head) * HEAD_DIM + d[None, :]) * (padded // 4) + quad[:, None]
    tl.store(places, word, mask=(quad < padded // 4)[:, None])


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
    """(batch entry, head, first query, tiles of keys); causal tiles from the longest to the shortest, others head by
    head.
    """
    heads, group, seqlen_q, seqlen_k, tiles_m, tiles = sizes
    all_heads = tiles // tiles_m
    index, m_block = number // tiles_m, number % tiles_m
    if form.causal:
        index, m_block = number % all_heads, tiles_m - 1 - number // all_heads
    m_start = m_block * BLOCK_M
    n_stop = seqlen_k
    if form.causal:
        n_stop = gl.minimum(n_stop, gl.maximum(m_start + BLOCK_M + seqlen_k - seqlen_q, 0))
    return index // heads, index % heads, m_start, gl.cdiv(n_stop, form.block_n)


@gluon.jit
def load_partition(q_desc, k_desc, v_desc, q, k, v, sizes, form: gl.constexpr):
    q_smem, q_ready, q_free = q
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    at, parity = gl.to_tensor(0), gl.to_tensor(1)
    turn = gl.to_tensor(0)
    while tile_number(turn) < sizes[5]:
        entry, head, m_start, blocks = tile_of(tile_number(turn), sizes, form)
        kv_place = (entry, head // sizes[1])
        for w in gl.static_range(CONSUMERS):
            mbarrier.wait(q_free.index(w), (turn & 1) ^ 1)
            copy_tile(q_desc, (entry, head), m_start + w * ROWS, q_ready.index(w), q_smem.index(w))
        for i in range(blocks):  # the last keys first: there a causal tile is masked
            n_start = (blocks - 1 - i) * form.block_n
            mbarrier.wait(k_free.index(at), parity)
            copy_tile(k_desc, kv_place, n_start, k_ready.index(at), k_smem.index(at))
            mbarrier.wait(v_free.index(at), parity)
            mbarrier.expect(v_ready.index(at), v_desc.block_type.nbytes)  # V's tile is [D, keys]: the key is a column
            tma_load(v_desc, [entry, kv_place[1], 0, n_start], v_ready.index(at), v_smem.index(at))
            at, parity = next_of(at, parity, form.stages)
        turn += 1


@gluon.jit
def take_turn(w: gl.constexpr):
    """Wait until the consumer before has passed it on: named barrier 9 + w, its 128 threads and ours."""
    named_barrier("bar.sync", 9 + w, 256)


@gluon.jit
def pass_turn(w: gl.constexpr):
    named_barrier("bar.arrive", 9 + (w + 1) % CONSUMERS, 256)


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2, form: gl.constexpr):
    """(p, rescale, row_max, row_sum) after one more tile of raw scores; row_max in units of log2, LIFT below the
    maximum, and up to LAG below that. row_sum [64, 8] keeps each lane's own columns.
    """
    lanes: gl.constexpr = row_sum.type.layout
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2 - LIFT)
    new_max = gl.where(new_max - row_max <= LAG, row_max, new_max)  # -inf - -inf is NaN: new_max
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[:, None])
    rescale = gl.exp2(row_max - base)
    part = gl.convert_layout(gl.sum(gl.reshape(p, [64, form.block_n // 8, 8]), 1), lanes, assert_trivial=True)
    spread = gl.convert_layout(rescale, gl.SliceLayout(1, lanes), assert_trivial=True)
    return p, rescale, new_max, row_sum * spread[:, None] + part


@gluon.jit
def weights_operand(p, form: gl.constexpr):
    """p [64, N] as the left operand of a product, its columns in the order of transpose_kernel's: nothing moves. It is
    rounded here, next to its product: 8-bit values that outlive a branch are taken apart into bytes and put together
    again.
    """
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 32])
    parts = gl.reshape(p, [64, form.block_n // 32, 2, 2, 4, 2])  # key = 32 b + 16 i1 + 8 i0 + 2 t + e
    placed = gl.reshape(gl.permute(parts, [0, 1, 2, 4, 3, 5]), [64, form.block_n])
    return gl.convert_layout(placed, gl.DotOperandLayout(0, o_layout, 4), assert_trivial=True).to(gl.float8e4nv)


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
def store_rows(o_desc, o, row_max, row_sum, lse_rows, place, m_start, seqlen_q, descale_v, o_smem):
    """lse from registers; o / row_sum through shared memory by TMA, which writes no row beyond the last."""
    entry, head = place
    rows = gl.arange(0, o.shape[0], row_sum.type.layout)
    row_lse = gl.where(row_sum == 0.0, float("-inf"), row_max * LN_2 + gl.log(row_sum))
    gl.store(lse_rows + m_start + rows, row_lse, mask=rows < seqlen_q - m_start)
    inverse = gl.convert_layout(gl.where(row_sum == 0.0, 0.0, descale_v / row_sum), gl.SliceLayout(1, o.type.layout))
    tma_store_wait(0)  # the tile before has left the buffer
    as_rows(o_smem).store((o * inverse[:, None]).to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [entry, head, m_start, 0], o_smem)


@gluon.jit
def attend(w: gl.constexpr, q_tile, k, v, at, m_start, blocks, sizes, scale_log2, k_scales, form: gl.constexpr):
    """(o, row_max, row_sum, where the rings stand then) over all tiles of keys, at least one; scores of tile j are
    worth scale_log2 k_scales[j].
    """
    k_smem, k_ready, k_free = k
    v_smem, v_ready, v_free = v
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_n, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 32])
    zero = gl.full([ROWS, form.block_n], 0.0, gl.float32, s_layout)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.full([ROWS, 8], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32]))
    o = gl.full([ROWS, form.head_dim], 0.0, gl.float32, o_layout)
    stage, parity = at
    n_start = (blocks - 1) * form.block_n
    worth = scale_log2 * gl.load(k_scales + blocks - 1)
    mbarrier.wait(k_ready.index(stage), parity)
    take_turn(w)
    s = warpgroup_mma_wait(
        0,
        deps=[warpgroup_mma(q_tile, as_rows(k_smem.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)],
    )
    pass_turn(w)
    mbarrier.arrive(k_free.index(stage))
    for i in range(1, blocks):
        v_at, v_parity = stage, parity
        stage, parity = next_of(stage, parity, form.stages)
        if form.masks:
            s = hide(s, m_start, n_start - (i - 1) * form.block_n, sizes, form)
        p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, worth, form)
        worth = scale_log2 * gl.load(k_scales + blocks - 1 - i)
        o = scale_rows(o, rescale)
        mbarrier.wait(v_ready.index(v_at), v_parity)
        mbarrier.wait(k_ready.index(stage), parity)
        weights = weights_operand(p, form)
        if form.head_dim == 64:
            stay_before(blocks)  # else ptxas rounds weights within the turn
        take_turn(w)
        o = warpgroup_mma_wait(
            0, deps=[warpgroup_mma(weights, as_rows(v_smem.index(v_at)).permute((1, 0)), o, is_async=True)]
        )
        mbarrier.arrive(v_free.index(v_at))
        s = warpgroup_mma_wait(
            0,
            deps=[
                warpgroup_mma(q_tile, as_rows(k_smem.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
            ],
        )
        pass_turn(w)
        mbarrier.arrive(k_free.index(stage))
    if form.masks:
        s = hide(s, m_start, n_start - (blocks - 1) * form.block_n, sizes, form)
    p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, worth, form)
    o = scale_rows(o, rescale)
    mbarrier.wait(v_ready.index(stage), parity)
    o = warpgroup_mma_wait(
        0,
        deps=[warpgroup_mma(weights_operand(p, form), as_rows(v_smem.index(stage)).permute((1, 0)), o, is_async=True)],
    )
    mbarrier.arrive(v_free.index(stage))
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, s_layout))
    return o, row_max, row_sum, next_of(stage, parity, form.stages)


@gluon.jit
def mma_partition(w: gl.constexpr, o_desc, o_smem, lse, q, k, v, sizes, scale_log2, worths, form: gl.constexpr):
    q_smem, q_ready, q_free = q
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.block_n, 32])
    at = (gl.to_tensor(0), gl.to_tensor(0))
    if w == CONSUMERS - 1:
        pass_turn(w)  # consumer 0 begins
    turn = gl.to_tensor(0)
    while tile_number(turn) < sizes[5]:
        entry, head, m_start, blocks = tile_of(tile_number(turn), sizes, form)
        m_start += w * ROWS
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        o = gl.full(
            [ROWS, form.head_dim], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.head_dim, 32])
        )
        mbarrier.wait(q_ready.index(w), turn & 1)
        if blocks > 0:
            q_scales, k_scales, v_tops = worths
            heads, group, seqlen_q, seqlen_k = sizes[0], sizes[1], sizes[2], sizes[3]
            q_block = (entry * heads + head) * gl.cdiv(seqlen_q, ROWS) + gl.minimum(
                m_start // ROWS, gl.cdiv(seqlen_q, ROWS) - 1
            )
            k_scales += (entry * (heads // group) + head // group) * gl.cdiv(seqlen_k, form.block_n)
            o, row_max, row_sum, at = attend(
                w,
                as_rows(q_smem.index(w)),
                k,
                v,
                at,
                m_start,
                blocks,
                sizes,
                scale_log2 * gl.load(q_scales + q_block),
                k_scales,
                form,
            )
        v_scale = gl.load(worths[2] + entry * (sizes[0] // sizes[1]) + head // sizes[1]) * (1.0 / 448.0)
        mbarrier.arrive(q_free.index(w))
        lse_rows = lse + (entry.to(gl.int64) * sizes[0] + head) * sizes[2]
        store_rows(o_desc, o, row_max, row_sum, lse_rows, (entry, head), m_start, sizes[2], v_scale, o_smem.index(w))
        turn += 1
    tma_store_wait(0)


@gluon.jit
def attend_kernel(q_desc, k_desc, v_desc, o_desc, lse, sizes, scale_log2, worths, form: gl.constexpr):
    """sizes (H, heads a key head, S_q, S_k, tiles of queries a head, in all); worths (scales of q's blocks, of k's,
    largest entries of v).
    """
    STAGES: gl.constexpr = form.stages
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [SLOTS] + q_desc.block_shape, q_desc.layout)  # noqa: RUF005 (Triton has no *)
    o_smem = gl.allocate_shared_memory(o_desc.dtype, [SLOTS] + o_desc.block_shape, o_desc.layout)  # noqa: RUF005
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    q = (q_smem, barriers(CONSUMERS, 1), barriers(CONSUMERS, 1))
    k = (k_smem, barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    v = (v_smem, barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    gl.warp_specialize(
        [
            (mma_partition, (gl.constexpr(0), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, worths, form)),
            (mma_partition, (gl.constexpr(1), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, worths, form)),
            (mma_partition, (gl.constexpr(2), o_desc, o_smem, lse, q, k, v, sizes, scale_log2, worths, form)),
            (load_partition, (q_desc, k_desc, v_desc, q, k, v, sizes, form)),
        ],
        [4, 4, 1],
        [160, 160, 32],
    )


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """TMA's view of a tensor [B, H, rows, columns], moved in tiles; the layout swizzles as wgmma reads it."""
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], DTYPES[tensor.dtype])
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, columns], layout)


@lru_cache
def rotation(width: int, device: torch.device, rotate: int) -> Tensor:
    """diag(signs) H of +1 and -1, [D, D] in bfloat16: always the same signs; or 1 where nothing is to be rotated."""
    if not rotate:
        return torch.eye(width, dtype=torch.bfloat16, device=device)
    hadamard = torch.ones(1, 1)
    while len(hadamard) < width:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (signs * hadamard).to(device, torch.bfloat16)


def rounded(x: Tensor, block: int, form: Form) -> tuple[Tensor, Tensor]:
    """(x [B, S, H, D] rotated, as [B, H, S, D] in e4m3; what a unit of each block of rows is worth, [B, H, blocks])."""
    batch, seqlen, heads, head_dim = x.shape
    turn, blocks = rotation(head_dim, x.device, form.rotate), -(-seqlen // block)
    out = torch.empty(batch, heads, seqlen, head_dim, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(batch, heads, blocks, dtype=torch.float32, device=x.device)
    rotate_kernel[(blocks, heads, batch)](x, turn, out, scales, seqlen, heads, head_dim, block, num_warps=4)
    return out, scales


def turn(v: Tensor) -> tuple[Tensor, Tensor]:
    """(v [B, S, H, D] as [B, H, D, S rounded up to 128] in e4m3, keys in the order of transpose_kernel; the largest
    entry of each head).
    """
    batch, seqlen, heads, head_dim = v.shape
    padded, tops = -(-seqlen // 128) * 128, v.abs().amax((1, 3)).float()
    turned = torch.empty(batch, heads, head_dim, padded, dtype=torch.float8_e4m3fn, device=v.device)
    transpose_kernel[(padded // 128, heads, batch)](
        v, turned.view(torch.int32), tops, seqlen, padded, heads, head_dim, 128, num_warps=4
    )
    return turned, tops


def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: int) -> tuple[Tensor, Tensor]:
    check_inputs(q, k, v, (torch.bfloat16,))
    batch, seqlen_q, heads, head_dim = q.shape
    form = Form(head_dim, causal, causal or k.shape[1] % options.get("block_n", Form.block_n) > 0, **options)
    out, lse = outputs(q)
    (q8, q_scales), (k8, k_scales), (v8, tops) = rounded(q, 64, form), rounded(k, form.block_n, form), turn(v)
    tiles = (
        (q8, 64, head_dim),
        (k8, form.block_n, head_dim),
        (v8, head_dim, form.block_n),
        (out.transpose(1, 2), 64, head_dim),
    )
    views = [descriptor(*tile) for tile in tiles]
    tiles_m = -(-seqlen_q // BLOCK_M.value)
    sizes = (heads, heads // k.shape[2], seqlen_q, k.shape[1], tiles_m, tiles_m * heads * batch)
    scale = head_dim**-0.5 * LOG2_E / (head_dim if form.rotate else 1)
    attend_kernel[(programs(q, sizes[-1]),)](
        *views, lse, sizes, scale, (q_scales, k_scales, tops), form, num_warps=4, maxnreg=128
    )
    return out, lse


def seen(q: Tensor, k: Tensor, v: Tensor, rotate: int = 1, **rest: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the products see of q, k and v, in float64: rotated, rounded to e4m3 by block, and scaled back. In torch's
    words, not the kernels'.
    """
    turn = rotation(q.shape[-1], q.device, rotate).float()
    found = []
    for x, block in ((q, 64), (k, 128)):
        y = (x.float() @ turn).transpose(1, 2)
        whole = torch.nn.functional.pad(y, (0, 0, 0, -y.shape[2] % block)).unflatten(2, (-1, block))
        top = whole.abs().amax((3, 4), keepdim=True).clamp(min=1e-30)
        back = (
            (whole * (448.0 / top)).to(torch.float8_e4m3fn).double()
            * (top / 448.0).double()
            * (x.shape[-1] ** -0.5 if rotate else 1)
        )
        found.append(back.flatten(2, 3)[:, :, : y.shape[2]].transpose(1, 2))
    top = v.abs().amax((1, 3), keepdim=True).float().clamp(min=1e-30)
    return found[0], found[1], (v.float() * (448.0 / top)).to(torch.float8_e4m3fn).double() * top.double() / 448.0


def moved(size: Size, form: Form) -> int:
    """As k7; before it q and k are read in 16 bits and written in 8, beside a rotation a block, and v is read in 16."""
    padded = -(-size.seqlen_k // 128) * 128
    keys, heads = size.batch * size.heads_kv * size.seqlen_k, size.batch * size.heads
    blocks = heads * -(-size.seqlen_q // 64) + size.batch * size.heads_kv * -(-size.seqlen_k // form.block_n)
    before = size.head_dim * (3 * size.rows + 5 * keys + size.batch * size.heads_kv * padded) + blocks * (
        2 * size.head_dim**2 + 4
    )
    streamed = size.streamed(BLOCK_M.value, form.block_n) + size.streamed(BLOCK_M.value, form.block_n, padded)
    return size.head_dim * (3 * size.rows + streamed) + 4 * size.rows + before


RUNG = Rung(
    "k8", "incoherent processing: signs, a Hadamard transform, scales by block", "k7", run, Form, moved,
    ("rotate_kernel", "attend", "mma_partition"), weights=torch.float8_e4m3fn, seen=seen,
)  # fmt: skip
