"""Kernels that run before and after the Blackwell backward's main kernel.

preprocess_kernel    dO, O, LSE --> delta; LSE and -delta in whole tiles; zeroes dQ's sum, semaphores and counter;
                     copies offsets of packed sequences
backward_kernel
postprocess_kernel   dQ's sum, in the order of backward_reduce --> dQ
"""

import triton
import triton.language as tl

from ..device.seqlen import find_sequence, span_of, store_rows, write_rising_offsets


@triton.jit
def head_of(base, strides, index, heads):
    """Row 0 of head `index` of all batch entries' heads; strides: Strides."""
    return base + (index // heads).to(tl.int64) * strides.batch + (index % heads).to(tl.int64) * strides.head


@triton.jit
def rows_of_tile(index, num_m_blocks, cu_seqlens_q, batch, total, traits: tl.constexpr):
    """(first row of the sequence, its number of rows, first row of the tile in it) of tile `index` of a head."""
    start, length, block = index * 0, total, index
    if traits.packed:
        sequence, block = find_sequence(cu_seqlens_q, index, batch, total, traits.block_m)
        start, length = span_of(cu_seqlens_q, sequence, batch, total)
    return start, length, block * traits.block_m


@triton.jit
def preprocess_kernel(tensors, strides, shape, traits: tl.constexpr):
    """A program for each tile of queries of each head. tensors: RowTensors; strides: RowStrides; shape: RowShape.

    stats: LSE in log2 units of all tiles, then -delta of all; a packed sequence begins a tile of its own. A row that
    sees no key, or does not exist, has LSE +inf, so that its P is 0.
    """
    BLOCK_M: tl.constexpr = traits.block_m
    WIDTH: tl.constexpr = 64 if traits.block_dv % 64 == 0 else 32
    PART: tl.constexpr = 2048  # float32 of dQ's sum that are zeroed at a time
    PARTS: tl.constexpr = traits.block_m * traits.block_d // 2048
    pid = tl.program_id(0)
    index, block = pid // shape.num_m_blocks, pid % shape.num_m_blocks
    start, length, m_start = rows_of_tile(
        block, shape.num_m_blocks, tensors.cu_seqlens_q, shape.batch, shape.tokens, traits
    )
    lanes = tl.arange(0, BLOCK_M)
    row, row_ok = start + m_start + lanes, m_start + lanes < length
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
    place = index.to(tl.int64) * shape.tokens + row
    if tensors.dlse is not None:
        delta -= tl.load(tensors.dlse + place, mask=row_ok, other=0.0)
    tl.store(tensors.delta + place, delta, mask=row_ok)
    lse = tl.load(tensors.lse + place, mask=row_ok, other=float("-inf")) * 1.4426950408889634
    is_empty = lse == float("-inf")
    stats = tensors.stats + pid.to(tl.int64) * BLOCK_M + lanes
    tl.store(stats, tl.where(is_empty, float("inf"), lse))
    tl.store(stats + tl.num_programs(0).to(tl.int64) * BLOCK_M, tl.where(is_empty, 0.0, -delta))
    if traits.deterministic:
        tl.store(tensors.dq_semaphores + pid, 0)
        if pid == 0:
            tl.store(tensors.tile_counter, 0)
    if traits.packed:
        if pid == 0:
            many = tl.arange(0, 1024)
            write_rising_offsets(tensors.cu_seqlens_q, tensors.rising_q, shape.batch, many)
            write_rising_offsets(tensors.cu_seqlens_k, tensors.rising_k, shape.batch, many)
    sums = tensors.dq_sum + pid.to(tl.int64) * (PARTS * PART)
    for part in tl.static_range(PARTS):
        tl.store(sums + part * PART + tl.arange(0, PART), tl.zeros([PART], tl.float32))


@triton.jit
def postprocess_kernel(dq_sum, dq, cu_seqlens_q, strides, shape, scale, traits: tl.constexpr):
    """dQ = scale * its sum, a tile of queries a program, WIDTH columns at a time. strides: Strides of dQ; shape:
    RowShape.
    """
    BLOCK_M: tl.constexpr = traits.block_m
    WIDTH: tl.constexpr = traits.tail_d if traits.tail_d else min(traits.block_d, 128)
    pid = tl.program_id(0)
    index, block = pid // shape.num_m_blocks, pid % shape.num_m_blocks
    start, length, m_start = rows_of_tile(block, shape.num_m_blocks, cu_seqlens_q, shape.batch, shape.tokens, traits)
    lanes = tl.arange(0, BLOCK_M)
    row, row_ok = start + m_start + lanes, m_start + lanes < length
    sums = dq_sum + pid.to(tl.int64) * (BLOCK_M * traits.block_d)
    rows = head_of(dq, strides, index, shape.heads)
    for part in tl.static_range(traits.block_d // WIDTH):
        held = tl.load(sums + part * BLOCK_M * WIDTH + tl.arange(0, BLOCK_M * WIDTH))
        tile = tl.permute(tl.reshape(held, [WIDTH // 4, BLOCK_M, 4]), [1, 0, 2])
        tile = tl.reshape(tile, [BLOCK_M, WIDTH]) * scale
        base, width = rows + part * WIDTH, traits.head_dim - part * WIDTH
        store_rows(base, tile, row, tl.arange(0, WIDTH), strides.row, row_ok, width)
