"""What runs around the Blackwell backward's main kernel.

preprocess_kernel    dO, O, LSE --> delta; LSE and -delta in whole tiles; zeroes dQ's sum
backward_kernel
postprocess_kernel   dQ's sum, in the order of backward_reduce --> dQ
"""

import triton
import triton.language as tl

from ..device.seqlen import store_rows


@triton.jit
def head_of(base, strides, index, heads):
    """Row 0 of head `index` of all batch entries' heads; strides: Strides."""
    return base + (index // heads).to(tl.int64) * strides.batch + (index % heads).to(tl.int64) * strides.head


@triton.jit
def preprocess_kernel(tensors, strides, shape, traits: tl.constexpr):
    """A program for each tile of queries of each head. tensors: RowTensors; strides: RowStrides; shape: RowShape.

    stats: LSE in log2 units of all tiles, then -delta of all. A row that sees no key, or does not exist, has LSE +inf,
    so that its P is 0.
    """
    BLOCK_M: tl.constexpr = traits.block_m
    WIDTH: tl.constexpr = 64
    PART: tl.constexpr = 2048  # float32 of dQ's sum that are zeroed at a time
    PARTS: tl.constexpr = traits.block_m * traits.block_d // 2048
    pid = tl.program_id(0)
    index, block = pid // shape.num_m_blocks, pid % shape.num_m_blocks
    lanes = tl.arange(0, BLOCK_M)
    row = block * BLOCK_M + lanes
    row_ok = row < shape.seqlen_q
    # delta = rowsum(dO O) - dLSE, WIDTH columns at a time
    do_rows = head_of(tensors.dout, strides.dout, index, shape.heads)
    o_rows = head_of(tensors.out, strides.out, index, shape.heads)
    delta = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(traits.block_dv // WIDTH):
        column = part * WIDTH + tl.arange(0, WIDTH)
        is_value = row_ok[:, None] & (column < traits.head_dim_v)[None, :]
        place = row.to(tl.int64)[:, None]
        do = tl.load(do_rows + place * strides.dout.row + column[None, :], mask=is_value, other=0.0)
        o = tl.load(o_rows + place * strides.out.row + column[None, :], mask=is_value, other=0.0)
        delta += tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    place = index.to(tl.int64) * shape.seqlen_q + row
    if tensors.dlse is not None:
        delta -= tl.load(tensors.dlse + place, mask=row_ok, other=0.0)
    tl.store(tensors.delta + place, delta, mask=row_ok)
    lse = tl.load(tensors.lse + place, mask=row_ok, other=float("-inf")) * 1.4426950408889634
    is_empty = lse == float("-inf")
    stats = tensors.stats + pid.to(tl.int64) * BLOCK_M + lanes
    tl.store(stats, tl.where(is_empty, float("inf"), lse))
    tl.store(stats + tl.num_programs(0).to(tl.int64) * BLOCK_M, tl.where(is_empty, 0.0, -delta))
    sums = tensors.dq_sum + pid.to(tl.int64) * (PARTS * PART)
    for part in tl.static_range(PARTS):
        tl.store(sums + part * PART + tl.arange(0, PART), tl.zeros([PART], tl.float32))


@triton.jit
def postprocess_kernel(dq_sum, dq, strides, shape, scale, traits: tl.constexpr):
    """dQ = scale * its sum, a tile of queries a program. strides: Strides of dQ; shape: RowShape."""
    BLOCK_M: tl.constexpr = traits.block_m
    BLOCK_D: tl.constexpr = traits.block_d
    pid = tl.program_id(0)
    index, block = pid // shape.num_m_blocks, pid % shape.num_m_blocks
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    sums = dq_sum + pid.to(tl.int64) * (BLOCK_M * BLOCK_D)
    tile = tl.reshape(tl.load(sums + tl.arange(0, BLOCK_M * BLOCK_D)), [BLOCK_D // 4, BLOCK_M, 4])
    tile = tl.reshape(tl.permute(tile, [1, 0, 2]), [BLOCK_M, BLOCK_D]) * scale
    rows = head_of(dq, strides, index, shape.heads)
    columns = tl.arange(0, BLOCK_D)
    store_rows(rows, tile, row, columns, strides.row, row < shape.seqlen_q, traits.head_dim)
