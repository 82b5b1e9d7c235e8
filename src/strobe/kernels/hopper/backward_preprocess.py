"""What runs around the Hopper backward's main kernel: statistics of rows and zeros before it, conversion of float32
sums after it.

    rows_kernel        dO, O, LSE --> delta; LSE and -delta in whole tiles; zeroes counters, semaphores, dQ's sum;
                       copies offsets of packed sequences
    backward_kernel
    convert_dq_kernel  dQ's sum, in the order of registers --> dQ
    convert_kernel     sums of dK and dV --> dK and dV, where programs share the heads of a group
"""

import triton
import triton.language as tl

from ..device.seqlen import find_sequence, load_rows, span_of, store_rows, write_rising_offsets
from .backward_scheduler import DQ_WRITTEN


@triton.jit
def rows_kernel(tensors, strides, shape, zeroed, lse_unit, traits: tl.constexpr):
    """tensors: RowTensors; strides: RowStrides; shape: RowShape; zeroed: ZeroedParts (`launch_backward`).

    stats: LSE in log2 units, times `lse_unit`, of all batch entries and heads, then -delta of all, in whole tiles; a
    packed sequence begins a tile of its own. A row that sees no key has LSE +inf (lse_folded: -inf), so that its P is
    0.
    """
    BLOCK_M: tl.constexpr = traits.tuning.block_m
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(traits.block_dv)
    heads, total, num_m_blocks = shape.heads, shape.tokens, shape.num_m_blocks
    pid = from_last()
    index = pid // num_m_blocks
    tile = pid % num_m_blocks
    start, length, block = index * 0, total, tile
    if traits.packed:
        sequence, block = find_sequence(tensors.cu_seqlens_q, tile, shape.batch, total, BLOCK_M)
        start, length = span_of(tensors.cu_seqlens_q, sequence, shape.batch, total)
    lanes = tl.arange(0, BLOCK_M)
    row_ok = block * BLOCK_M + lanes < length
    m_offsets = start + block * BLOCK_M + lanes
    columns = tl.arange(0, BLOCK_DV)
    # delta = rowsum(dO O) - dLSE
    do_rows = head_of(tensors.dout, strides.dout, index, heads)
    do = load_rows(do_rows, m_offsets, columns, strides.dout.row, row_ok, traits.head_dim_v).to(tl.float32)
    o_rows = head_of(tensors.out, strides.out, index, heads)
    o = load_rows(o_rows, m_offsets, columns, strides.out.row, row_ok, traits.head_dim_v).to(tl.float32)
    row_delta = tl.sum(do * o, 1)
    place = index.to(tl.int64) * total + m_offsets
    if tensors.dlse is not None:
        row_delta -= tl.load(tensors.dlse + place, mask=row_ok, other=0.0)
    tl.store(tensors.delta + place, row_delta, mask=row_ok)
    row_lse = tl.load(tensors.lse + place, mask=row_ok, other=float("-inf")) * 1.4426950408889634
    empty = row_lse == float("-inf")
    # semaphores, dQ's sum and the tile counter
    if traits.dq_first_writer_stores or traits.dq_written_directly:
        tl.store(tensors.dq_semaphores + pid, 0)
    if traits.dq_zeroed_ahead:  # the sums of the first parts here, others by the main kernel
        part = index // traits.heads_per_program
        if pid % (num_m_blocks * traits.heads_per_program) == 0:
            tl.store(tensors.dq_semaphores + part, tl.where(part < zeroed.head_parts, zeroed.num_n_blocks, 0))
        if part < zeroed.head_parts:
            zero_sum(tensors.dq_sum, pid, traits)
    elif not traits.dq_first_writer_stores:
        zero_sum(tensors.dq_sum, pid, traits)
    if pid == 0:
        tl.store(tensors.tile_counter, 0)
    if traits.packed:
        if pid == tl.num_programs(0) - 1:  # the program that starts first
            n, many = shape.batch, tl.arange(0, 1024)
            write_rising_offsets(tensors.cu_seqlens_q, tensors.rising_q, n, many)
            write_rising_offsets(tensors.cu_seqlens_k, tensors.rising_k, n, many)
            if traits.runs:
                copy_first_keys(tensors.cu_seqlens_k + n + 1, tensors.rising_k + n + 1, n + 1)
    stats = tensors.stats + pid.to(tl.int64) * BLOCK_M + lanes
    tl.store(stats, tl.where(empty, float("inf"), row_lse) * lse_unit)
    tl.store(stats + tl.num_programs(0).to(tl.int64) * BLOCK_M, tl.where(empty, 0.0, -row_delta))


@triton.jit
def copy_first_keys(first_keys, copy, count):
    """The second row of cu_seqlens_k, of runs over shared keys."""
    for start in range(0, count, 1024):
        index = start + tl.arange(0, 1024)
        tl.store(copy + index, tl.load(first_keys + index, mask=index < count, other=0), mask=index < count)


@triton.jit
def zero_sum(dq_sum, tile, traits: tl.constexpr):
    UNIT: tl.constexpr = traits.dq.lines * 256
    UNITS: tl.constexpr = traits.dq.units
    for unit in tl.static_range(UNITS):
        tl.store(dq_sum + (tile.to(tl.int64) * UNITS + unit) * UNIT + tl.arange(0, UNIT), tl.zeros([UNIT], tl.float32))


@triton.jit
def from_last():
    """The program's number, the last first: the main kernel then finds in L2 what it takes first, and these what it
    made last (512 x 32: 1.4 %).
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def head_of(base, strides, index, heads):
    """Row 0 of head `index` of all batch entries' heads; strides: Strides."""
    return base + (index // heads).to(tl.int64) * strides.batch + (index % heads).to(tl.int64) * strides.head


@triton.jit
def convert_kernel(
    tensors,
    strides,
    shape,
    scale,
    STORED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """grad = scale * sums. tensors: ConvertTensors; strides: ConvertStrides; shape: ConvertShape; the sums have STORED
    columns, of which WIDTH count.
    """
    tiles = tl.cdiv(shape.tokens, BLOCK_M)
    pid = from_last()
    index = pid // tiles
    m_offsets = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = m_offsets < shape.tokens
    columns = tl.arange(0, BLOCK_D)
    sums = head_of(tensors.sums, strides.sums, index, shape.heads)
    tile = load_rows(sums, m_offsets, columns, strides.sums.row, row_ok, STORED)
    grad = head_of(tensors.grad, strides.grad, index, shape.heads)
    store_rows(grad, tile * scale, m_offsets, columns, strides.grad.row, row_ok, WIDTH)


@triton.jit
def convert_dq_kernel(dq_sum, dq, cu_seqlens_q, dq_semaphores, strides, shape, scale, traits: tl.constexpr):
    """dQ = scale * its sum, as backward_store.in_register_order ordered it, tile by tile; strides: Strides of dQ;
    shape: RowShape.

    A thread reads four values at once, as they lie, and a tile is transposed in shared memory: read one by one in dQ's
    order they took 54 us for 49 of 134 MB (H200).
    """
    BLOCK_M: tl.constexpr = traits.tuning.block_m
    UNIT: tl.constexpr = traits.dq.unit
    UNITS: tl.constexpr = traits.dq.units_written
    heads, total = shape.heads, shape.tokens
    pid = from_last()
    index = pid // shape.num_m_blocks
    start, length, block = index * 0, total, pid % shape.num_m_blocks
    if traits.packed:
        sequence, block = find_sequence(cu_seqlens_q, pid % shape.num_m_blocks, shape.batch, total, BLOCK_M)
        start, length = span_of(cu_seqlens_q, sequence, shape.batch, total)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, UNIT)
    row_ok = block * BLOCK_M + row < length
    if traits.dq_written_directly:
        semaphore = tl.load(dq_semaphores + pid)
        if (semaphore != 0) if traits.dq_last_writer_converts else (semaphore == DQ_WRITTEN):
            return
    if traits.dq_first_writer_stores:
        if tl.load(dq_semaphores + pid) == 0:  # these rows see no key: there is no sum
            for unit in tl.static_range(UNITS):
                part = head_of(dq, strides, index, heads) + unit * UNIT
                nothing = tl.zeros([BLOCK_M, UNIT], tl.float32)
                store_rows(
                    part, nothing, start + block * BLOCK_M + row, column, strides.row, row_ok, traits.dq.width(unit)
                )
            return
    for unit in tl.static_range(UNITS):
        held = dq_sum + (pid.to(tl.int64) * traits.block_d + unit * UNIT) * BLOCK_M
        parts = tl.reshape(
            tl.load(held + tl.arange(0, BLOCK_M * UNIT)) * scale, [BLOCK_M // 64, UNIT // 8, 4, 8, 4, 2, 2]
        )
        tile = tl.reshape(tl.permute(parts, [0, 2, 5, 3, 1, 4, 6]), [BLOCK_M, UNIT])
        part = head_of(dq, strides, index, heads) + unit * UNIT
        store_rows(part, tile, start + block * BLOCK_M + row, column, strides.row, row_ok, traits.dq.width(unit))
