"""k2, tiles and the online softmax: one kernel, scores never leave the SM. FlashAttention-2's algorithm, still without
tensor cores.

The idea: a softmax can be taken a tile of keys at a time. A program keeps 64 queries and walks over the keys; for each
row it carries the largest score so far (row_max), the sum of exp(score - row_max) (row_sum), and the output weighted
alike (o). A tile that raises row_max makes what was summed before worth exp(old - new) of itself: `rescale`, one
multiplication. So a row of scores need never exist.

What goes with it:
    one buffer   K is needed for scores, V only after them: both take turns in one piece of shared memory
    in place     weights take the registers of their scores; a copy in shared memory lends each row's weights to the
                 threads of its output
    division     by row_sum comes once, at the end, not in every tile
    guard        a row that has seen no key has row_max -inf, and -inf - -inf is NaN: it is measured against 0, keeps
                 weights of 0, and ends
                 as out 0, lse -inf
    causal       tiles beyond the diagonal are not visited; only tiles that the diagonal cuts are masked

Cost model, a tile of 64 queries and 64 keys, D columns:

    FLOPs       4 * 64 * 64 * D, on CUDA cores
    bytes       64 rows of K and V: 256 D bytes in 16 bits, for 16,384 D FLOPs; scores cost nothing
    shared      q 256 D + K or V 256 D + weights 16,384 bytes, in float32: 80 KiB for D = 128
                a thread reads 12 numbers of them for 32 multiply-adds
    registers   scores 32, o 64 (D = 128) of 255

What limits it: shared memory first, then CUDA cores, which are a sixteenth of the tensor cores; loading and multiplying
take turns.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024     7.261     18.93          1.91
     64  dense     8192     57.27      19.2          1.94
     64  dense    16384     112.8      19.5          1.97
     64  causal    1024     3.914     17.57          1.78
     64  causal    8192     30.87     17.81           1.8
     64  causal   16384      58.3     18.86          1.91
    128  dense     1024     10.14     13.56          1.37
    128  dense     8192      75.8     14.51          1.47
    128  dense    16384     143.2     15.36          1.55
    128  causal    1024     5.469     12.58          1.27
    128  causal    8192     41.19     13.35          1.35
    128  causal   16384     76.28     14.42          1.46

on NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-23 to 2026-11-25
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strobe.kernels.device.dialect import gl, gluon, reinterpret

from .harness.harness import Rung, Size, check_inputs, outputs

LOG2_E = 1.4426950408889634
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
PLAIN: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # a matrix, row by row
ROWS: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # the same memory as so many rows


@dataclass(frozen=True)
class Form:
    head_dim: int
    causal: bool
    block_m: int = 64
    block_n: int = 64

    def shared_bytes(self) -> int:
        return 4 * (self.head_dim * (self.block_m + self.block_n) + self.block_m * self.block_n)


@gluon.jit
def load_tile(base, start, stop, stride, rows: gl.constexpr, form: gl.constexpr):
    """Rows start .. start + rows - 1 in float32, zeros from `stop` on. A lane has a row, so that storing columns meets
    no bank twice.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [2, 2], [1, 0])
    offsets = gl.arange(0, rows, gl.SliceLayout(1, layout))
    columns = gl.arange(0, form.head_dim, gl.SliceLayout(0, layout))
    pointers = base + start * stride + (offsets[:, None] * stride + columns[None, :])
    return gl.load(pointers, mask=(offsets < stop - start)[:, None], other=0.0).to(gl.float32)


@gluon.jit
def outer_products(left, right, total, count: gl.constexpr):
    """total + left^T right: `count` steps, each a row of both from shared memory and one multiply-add an element."""
    layout: gl.constexpr = total.type.layout
    lefts = reinterpret(left, gl.float32, [count, total.shape[0]], ROWS)
    rights = reinterpret(right, gl.float32, [count, total.shape[1]], ROWS)
    for i in range(count):
        column = lefts.index(i).load(gl.SliceLayout(1, layout))
        row = rights.index(i).load(gl.SliceLayout(0, layout))
        total += column[:, None] * row[None, :]
    return total


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
def attend_kernel(q, k, v, out, lse, sizes, scale_log2, form: gl.constexpr):
    heads, group, seqlen_q, seqlen_k = sizes
    BLOCK_M: gl.constexpr = form.block_m
    BLOCK_N: gl.constexpr = form.block_n
    HEAD_DIM: gl.constexpr = form.head_dim
    s_layout: gl.constexpr = gl.BlockedLayout([4, 8], [4, 8], [4, 1], [1, 0])
    o_layout: gl.constexpr = gl.BlockedLayout([4, HEAD_DIM // 8], [4, 8], [4, 1], [1, 0])
    m_start = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M  # the longest first
    head, entry = gl.program_id(1), gl.program_id(2).to(gl.int64)
    stride, stride_k = heads * HEAD_DIM, heads // group * HEAD_DIM
    q += entry * seqlen_q * stride + head * HEAD_DIM
    out += entry * seqlen_q * stride + head * HEAD_DIM
    k += entry * seqlen_k * stride_k + head // group * HEAD_DIM
    v += entry * seqlen_k * stride_k + head // group * HEAD_DIM
    q_smem = gl.allocate_shared_memory(gl.float32, [HEAD_DIM, BLOCK_M], PLAIN)
    kv_smem = gl.allocate_shared_memory(gl.float32, [HEAD_DIM, BLOCK_N], PLAIN)
    p_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_N, BLOCK_M], PLAIN)
    k_smem, v_smem = kv_smem, reinterpret(kv_smem, gl.float32, [BLOCK_N, HEAD_DIM], PLAIN)
    q_smem.permute((1, 0)).store(load_tile(q, m_start, seqlen_q, stride, BLOCK_M, form))
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    o = gl.full([BLOCK_M, HEAD_DIM], 0.0, gl.float32, o_layout)
    n_stop = seqlen_k
    if form.causal:
        n_stop = gl.minimum(n_stop, gl.maximum(m_start + BLOCK_M + seqlen_k - seqlen_q, 0))
    for n_start in range(0, n_stop, BLOCK_N):
        k_smem.permute((1, 0)).store(load_tile(k, n_start, seqlen_k, stride_k, BLOCK_N, form))
        s = outer_products(q_smem, k_smem, gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, s_layout), HEAD_DIM)
        s = hide(s, m_start, n_start, (seqlen_q, seqlen_k), form)
        p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2)
        p_smem.permute((1, 0)).store(p)
        v_smem.store(load_tile(v, n_start, seqlen_k, stride_k, BLOCK_N, form))  # where K was: scores are done with it
        o = o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
        o = outer_products(p_smem, v_smem, o, BLOCK_N)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))
    row_lse = gl.where(row_sum == 0.0, float("-inf"), row_max * LN_2 + gl.log(row_sum))
    gl.store(lse + (entry * heads + head) * seqlen_q + m_start + rows, row_lse, mask=rows < seqlen_q - m_start)
    inverse = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    o = o * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
    o_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, o_layout))
    columns = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))
    places = out + m_start * stride + (o_rows[:, None] * stride + columns[None, :])
    gl.store(places, o.to(out.dtype.element_ty), mask=(o_rows < seqlen_q - m_start)[:, None])


def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: int) -> tuple[Tensor, Tensor]:
    check_inputs(q, k, v)
    batch, seqlen_q, heads, head_dim = q.shape
    form = Form(head_dim, causal, **options)
    out, lse = outputs(q)
    sizes = (heads, heads // k.shape[2], seqlen_q, k.shape[1])
    grid = (-(-seqlen_q // form.block_m), heads, batch)
    attend_kernel[grid](q, k, v, out, lse, sizes, head_dim**-0.5 * LOG2_E, form, num_warps=4)
    return out, lse


def moved(size: Size, form: Form) -> int:
    """q and out once, K and V once for each tile of queries that sees them."""
    return 2 * size.head_dim * (2 * size.rows + 2 * size.streamed(form.block_m, form.block_n)) + 4 * size.rows


RUNG = Rung(
    "k2", "tiles and the online softmax in one kernel, CUDA cores", "k1", run, Form, moved,
    ("softmax_step", "attend_kernel"), capability=80, weights=torch.float32, small_seqlen=70,
)  # fmt: skip
