"""t, Triton: say what a tile does, and let the compiler place it. Three steps: minimal, causal with skipped tiles,
autotuned.

The idea: k2's algorithm needs twenty lines where a compiler chooses layouts, shared memory, copies and tensor-core
instructions. A program blocks the queries and streams the keys; `tl.dot` becomes mma.sync on Ampere and wgmma on
Hopper; `num_stages` asks for loads so many tiles ahead.

    step 1  minimal_kernel: every tile of keys in turn, dense attention only
    step 2  attend_kernel: causal rows stop at their diagonal. Tiles beyond it are not visited: half the work at long
            rows. Tiles that it cuts
            are masked under a scalar condition, all others pay nothing for it
    step 3  the same kernel under `triton.autotune`: tile sizes, warps and stages are timed once for each kind of
            problem, and kept

Cost model, a tile of M queries and N keys, D columns, in 16 bits:

    FLOPs       4 M N D, on tensor cores
    bytes       4 N D for K and V a tile; L2 sees 4 N D / (4 M N D) = 1 / M bytes a FLOP: at M = 128 and 500 TFLOP/s,
                3.9 TB/s
    shared      2 M D for q where wgmma reads it there, and 4 N D a stage: 112 KiB for M = 128, N = 64, D = 128 and
                three stages
    registers   scores M N and o M D in float32 over the program's threads: 96 of 255 for 128 x 64, D = 128, 8 warps

What limits it: what cannot be said. The softmax of a tile waits for its scores and the tensor cores wait for the
softmax; who waits for whom, and which warp does what, is the compiler's choice. The rungs above take that choice back,
one decision at a time.

Measured:

      D  mask       S_k        ms   TFLOP/s  % of ceiling
     64  dense     1024    0.3418     402.1          40.7
     64  dense     8192     2.395     459.1          46.4
     64  dense    16384     4.752     462.8          46.8
     64  causal    1024    0.2333     294.9          29.8
     64  causal    8192     1.384     397.3          40.2
     64  causal   16384     2.626     418.7          42.3
    128  dense     1024    0.3405     403.7          40.8
    128  dense     8192     2.302     477.6          48.3
    128  dense    16384     4.351     505.4          51.1
    128  causal    1024    0.2164     317.8          32.1
    128  causal    8192     1.218     451.6          45.7
    128  causal   16384      2.21     497.6          50.3

on NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-24 to 2026-11-25
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .harness.harness import Rung, Size, check_inputs, outputs

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Form:
    head_dim: int
    causal: bool
    step: int = 3
    block_m: int = 128
    block_n: int = 64
    warps: int = 8
    stages: int = 3

    def __post_init__(self) -> None:
        if self.step not in (1, 2, 3):
            raise ValueError(
                f"step: got {self.step}, expected 1 (minimal), 2 (causal) or 3 (autotuned); leave it out for 3"
            )
        if self.step == 1 and self.causal:
            raise ValueError(
                "step: got 1 for causal attention, expected 2 or 3: the minimal kernel visits every key for every query"
            )


@triton.jit
def minimal_kernel(
    q,
    k,
    v,
    out,
    lse,
    sizes,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Block the queries, stream the keys."""
    heads, group, seqlen_q, seqlen_k = sizes
    m_start = tl.program_id(0) * BLOCK_M
    head, entry = tl.program_id(1), tl.program_id(2).to(tl.int64)
    stride, stride_k = heads * HEAD_DIM, heads // group * HEAD_DIM
    rows, columns, d = m_start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    q_tile = tl.load(
        q + entry * seqlen_q * stride + head * HEAD_DIM + rows[:, None] * stride + d,
        mask=rows[:, None] < seqlen_q,
        other=0.0,
    )
    k += entry * seqlen_k * stride_k + head // group * HEAD_DIM
    v += entry * seqlen_k * stride_k + head // group * HEAD_DIM
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for n_start in range(0, seqlen_k, BLOCK_N):
        inside = n_start + columns < seqlen_k
        places = (n_start + columns)[:, None] * stride_k + d
        s = tl.dot(q_tile, tl.load(k + places, mask=inside[:, None], other=0.0).trans())
        s = tl.where(inside[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype.element_ty), tl.load(v + places, mask=inside[:, None], other=0.0), o * rescale[:, None])
        row_max = new_max
    tl.store(
        lse + (entry * heads + head) * seqlen_q + rows,
        row_max * 0.6931471805599453 + tl.log(row_sum),
        mask=rows < seqlen_q,
    )
    places = out + entry * seqlen_q * stride + head * HEAD_DIM + rows[:, None] * stride + d
    tl.store(places, (o / row_sum[:, None]).to(out.dtype.element_ty), mask=rows[:, None] < seqlen_q)


@triton.jit
def tile_step(q_tile, k, v, places, state, n_start, stop, seqlen_k, scale_log2, PARTIAL: tl.constexpr):
    """(o, row_max, row_sum) after one more tile of keys; only where a tile is `PARTIAL`, loads and scores are
    masked."""
    o, row_max, row_sum = state
    columns = n_start + tl.arange(0, places.shape[0])
    if PARTIAL:
        s = tl.dot(q_tile, tl.load(k + places, mask=(columns < seqlen_k)[:, None], other=0.0).trans())
        s = tl.where(stop[:, None] > columns[None, :], s, float("-inf"))
    else:
        s = tl.dot(q_tile, tl.load(k + places).trans())
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * scale_log2 - base[:, None])
    rescale = tl.exp2(row_max - base)
    if PARTIAL:
        v_tile = tl.load(v + places, mask=(columns < seqlen_k)[:, None], other=0.0)
    else:
        v_tile = tl.load(v + places)
    o = tl.dot(p.to(v_tile.dtype), v_tile, o * rescale[:, None])
    return o, new_max, row_sum * rescale + tl.sum(p, 1)


@triton.jit
def attend_kernel(
    q,
    k,
    v,
    out,
    lse,
    sizes,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The same up to the diagonal: first whole tiles, which need no mask, then those that the diagonal or the last key
    cuts. A row that sees no key ends as out 0, lse -inf.
    """
    heads, group, seqlen_q, seqlen_k = sizes
    shift = seqlen_k - seqlen_q
    m_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest first
    head, entry = tl.program_id(1), tl.program_id(2).to(tl.int64)
    stride, stride_k = heads * HEAD_DIM, heads // group * HEAD_DIM
    rows, d = m_start + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    q_tile = tl.load(
        q + entry * seqlen_q * stride + head * HEAD_DIM + rows[:, None] * stride + d,
        mask=rows[:, None] < seqlen_q,
        other=0.0,
    )
    k += entry * seqlen_k * stride_k + head // group * HEAD_DIM
    v += entry * seqlen_k * stride_k + head // group * HEAD_DIM
    places = tl.arange(0, BLOCK_N)[:, None] * stride_k + d
    stop = tl.full([BLOCK_M], 0, tl.int32) + seqlen_k
    n_stop, whole = seqlen_k, seqlen_k
    if CAUSAL:
        stop = tl.minimum(stop, rows + shift + 1)
        n_stop = tl.minimum(n_stop, m_start + BLOCK_M + shift)
        whole = tl.maximum(tl.minimum(whole, m_start + shift + 1), 0)
    whole = whole // BLOCK_N * BLOCK_N
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for n_start in range(0, whole, BLOCK_N):
        o, row_max, row_sum = tile_step(
            q_tile, k, v, places, (o, row_max, row_sum), n_start, stop, seqlen_k, scale_log2, False
        )
        k += BLOCK_N * stride_k
        v += BLOCK_N * stride_k
    for n_start in tl.range(whole, n_stop, BLOCK_N, num_stages=1):
        o, row_max, row_sum = tile_step(
            q_tile, k, v, places, (o, row_max, row_sum), n_start, stop, seqlen_k, scale_log2, True
        )
        k += BLOCK_N * stride_k
        v += BLOCK_N * stride_k
    row_lse = tl.where(row_sum == 0.0, float("-inf"), row_max * 0.6931471805599453 + tl.log(row_sum))
    tl.store(lse + (entry * heads + head) * seqlen_q + rows, row_lse, mask=rows < seqlen_q)
    o = o * tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)[:, None]
    places = out + entry * seqlen_q * stride + head * HEAD_DIM + rows[:, None] * stride + d
    tl.store(places, o.to(out.dtype.element_ty), mask=rows[:, None] < seqlen_q)


TILES = [
    (64, 64, 4, 3),
    (128, 32, 4, 3),
    (128, 64, 4, 3),
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (128, 128, 8, 2),
    (128, 128, 8, 3),
]
tuned_kernel = triton.autotune(
    [triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages) for m, n, warps, stages in TILES],
    key=["HEAD_DIM", "CAUSAL"],
)(attend_kernel)


def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: int) -> tuple[Tensor, Tensor]:
    check_inputs(q, k, v)
    batch, seqlen_q, heads, head_dim = q.shape
    form = Form(head_dim, causal, **options)
    out, lse = outputs(q)
    sizes = (heads, heads // k.shape[2], seqlen_q, k.shape[1])
    arguments = (q, k, v, out, lse, sizes, head_dim**-0.5 * LOG2_E, head_dim, causal)
    if form.step == 3 and q.is_cuda:  # without a device there is nothing to time: the form's own tiles do
        tuned_kernel[lambda chosen: (triton.cdiv(seqlen_q, chosen["BLOCK_M"]), heads, batch)](*arguments)
        return out, lse
    kernel = minimal_kernel if form.step == 1 else attend_kernel
    grid = (triton.cdiv(seqlen_q, form.block_m), heads, batch)
    kernel[grid](*arguments, form.block_m, form.block_n, num_warps=form.warps, num_stages=form.stages)
    return out, lse


def moved(size: Size, form: Form) -> int:
    """q and out once, K and V once for each tile of queries that sees them."""
    return 2 * size.head_dim * (2 * size.rows + 2 * size.streamed(form.block_m, form.block_n)) + 4 * size.rows


RUNG = Rung(
    "t",
    "Triton: the compiler places what a tile does",
    "k2",
    run,
    Form,
    moved,
    ("minimal_kernel", "tile_step", "attend_kernel"),
    capability=80,
)
