"""k1, naive: three kernels, S x S scores in memory, no tensor cores.

The idea: attention as the formula says it. One kernel writes every score q k^T, one turns each row into weights, one
multiplies the weights with v. A program owns a tile of the result and walks the inner dimension one step at a time: a
column of the left operand, a row of the right one, and one multiply-add for each element of the tile. Nothing is kept
for a neighbour: what the next kernel needs goes through memory.

Cost model, for H heads of S queries and keys and D columns, in 2-byte inputs and float32 scores:

    FLOPs       4 S^2 D H, on CUDA cores: 128 multiply-adds an SM and clock, against 2,048 (bfloat16) on its tensor
                cores
    bytes       scores are written once (4 S^2 H), read twice and written as weights (12 S^2 H), and read again by each
                tile of
                columns of the output: 20 S^2 H at least, far more than the 8 S D H of q, k, v and out
    memory      4 S^2 H bytes: 17 GB for 16 heads of 16,384
    shared      none
    registers   a tile of 64 x 64 over 128 threads is 32 sums a thread

What limits it: the CUDA cores' rate, and at long rows the traffic of scores; the memory it needs grows with the square
of the length.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024     22.89     6.004         0.607
     64  dense     8192     185.1     5.941         0.601
     64  dense    16384       369     5.959         0.603
     64  causal    1024     23.39     2.941         0.297
     64  causal    8192     189.2     2.906         0.294
     64  causal   16384     377.8      2.91         0.294
    128  dense     1024     22.05     6.234          0.63
    128  dense     8192     176.3     6.237         0.631

on NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-21 to 2026-11-22
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .harness.harness import Rung, Size, check_inputs, outputs


@dataclass(frozen=True)
class Form:
    head_dim: int
    causal: bool
    block: int = 64  # queries and keys of a tile of scores, rows and columns of a tile of the output
    row_block: int = 1024  # scores of a row that the softmax holds at a time


@triton.jit
def scores_kernel(q, k, s, sizes, scale, form: tl.constexpr):
    """A tile of scores: scale q k^T, -inf where causal attention does not look."""
    heads, group, seqlen_q, seqlen_k = sizes
    BLOCK: tl.constexpr = form.block
    n_offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry, head = tl.program_id(2).to(tl.int64) // heads, tl.program_id(2) % heads
    heads_kv = heads // group
    q_rows = q + entry * seqlen_q * heads * form.head_dim + (m_offsets * heads + head) * form.head_dim
    k_rows = k + entry * seqlen_k * heads_kv * form.head_dim + (n_offsets * heads_kv + head // group) * form.head_dim
    tile = tl.zeros([BLOCK, BLOCK], tl.float32)
    for d in range(form.head_dim):
        q_column = tl.load(q_rows + d, mask=m_offsets < seqlen_q, other=0.0).to(tl.float32)
        k_column = tl.load(k_rows + d, mask=n_offsets < seqlen_k, other=0.0).to(tl.float32)
        tile += q_column[:, None] * k_column[None, :]
    tile = tile * scale
    if form.causal:
        tile = tl.where((m_offsets + (seqlen_k - seqlen_q))[:, None] >= n_offsets[None, :], tile, float("-inf"))
    s_rows = s + (tl.program_id(2).to(tl.int64) * seqlen_q + m_offsets) * seqlen_k
    tl.store(
        s_rows[:, None] + n_offsets[None, :],
        tile,
        mask=(m_offsets < seqlen_q)[:, None] & (n_offsets < seqlen_k)[None, :],
    )


@triton.jit
def softmax_kernel(s, lse, seqlen_k, form: tl.constexpr):
    """One row of scores becomes weights in its place: once over it for the maximum, once for the sum, once to
    divide."""
    BLOCK: tl.constexpr = form.row_block
    row = s + tl.program_id(0).to(tl.int64) * seqlen_k
    columns = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, seqlen_k, BLOCK):
        largest = tl.maximum(
            largest, tl.load(row + start + columns, mask=start + columns < seqlen_k, other=float("-inf"))
        )
    row_max = tl.max(largest, 0)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)  # a row that sees nothing: -inf - -inf would be NaN
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, seqlen_k, BLOCK):
        sums += tl.exp(tl.load(row + start + columns, mask=start + columns < seqlen_k, other=float("-inf")) - base)
    row_sum = tl.sum(sums, 0)
    inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    for start in range(0, seqlen_k, BLOCK):
        weights = (
            tl.exp(tl.load(row + start + columns, mask=start + columns < seqlen_k, other=float("-inf")) - base)
            * inverse
        )
        tl.store(row + start + columns, weights, mask=start + columns < seqlen_k)
    tl.store(lse + tl.program_id(0), tl.where(row_sum == 0.0, float("-inf"), base + tl.log(row_sum)))


@triton.jit
def output_kernel(s, v, out, sizes, form: tl.constexpr):
    """A tile of the output: weights times v, one key at a time."""
    heads, group, seqlen_q, seqlen_k = sizes
    BLOCK: tl.constexpr = form.block
    d_offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry, head = tl.program_id(2).to(tl.int64) // heads, tl.program_id(2) % heads
    heads_kv = heads // group
    s_rows = s + (tl.program_id(2).to(tl.int64) * seqlen_q + m_offsets) * seqlen_k
    v_head = v + entry * seqlen_k * heads_kv * form.head_dim + head // group * form.head_dim
    tile = tl.zeros([BLOCK, BLOCK], tl.float32)
    for n in range(seqlen_k):
        p_column = tl.load(s_rows + n, mask=m_offsets < seqlen_q, other=0.0)
        v_row = tl.load(v_head + n * heads_kv * form.head_dim + d_offsets).to(tl.float32)
        tile += p_column[:, None] * v_row[None, :]
    out_rows = out + entry * seqlen_q * heads * form.head_dim + (m_offsets * heads + head) * form.head_dim
    tl.store(
        out_rows[:, None] + d_offsets[None, :], tile.to(out.dtype.element_ty), mask=(m_offsets < seqlen_q)[:, None]
    )


def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: int) -> tuple[Tensor, Tensor]:
    check_inputs(q, k, v)
    (batch, seqlen_q, heads, head_dim), seqlen_k = q.shape, k.shape[1]
    form = Form(head_dim, causal, **options)
    out, lse = outputs(q)
    s = torch.empty(batch, heads, seqlen_q, seqlen_k, dtype=torch.float32, device=q.device)
    sizes = (heads, heads // k.shape[2], seqlen_q, seqlen_k)
    m_blocks, n_blocks, d_blocks = (triton.cdiv(size, form.block) for size in (seqlen_q, seqlen_k, head_dim))
    scores_kernel[(n_blocks, m_blocks, batch * heads)](q, k, s, sizes, head_dim**-0.5, form, num_warps=4)
    softmax_kernel[(batch * heads * seqlen_q,)](s, lse, seqlen_k, form, num_warps=4)
    output_kernel[(d_blocks, m_blocks, batch * heads)](s, v, out, sizes, form, num_warps=4)
    return out, lse


def moved(size: Size, form: Form) -> int:
    """Every tile of scores reads its rows of q and k; scores are written twice and read three times, and again by each
    tile of columns.
    """
    tiles_q, tiles_k = triton.cdiv(size.seqlen_q, form.block), triton.cdiv(size.seqlen_k, form.block)
    heads, scores = size.batch * size.heads, size.rows * size.seqlen_k
    operands = 2 * size.head_dim * heads * (tiles_k * size.seqlen_q + 2 * tiles_q * size.seqlen_k)
    return operands + 4 * scores * (5 + size.head_dim // form.block) + 2 * size.rows * size.head_dim + 4 * size.rows


RUNG = Rung(
    "k1", "the formula in three kernels, scores in memory, CUDA cores", "", run, Form, moved,
    ("scores_kernel", "softmax_kernel", "output_kernel"), capability=80, weights=torch.float32, small_seqlen=40,
)  # fmt: skip
