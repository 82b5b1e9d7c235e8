"""What stands around the Hopper backward's main kernel: the numbers of rows that it reads, the counter and sums set to 0, and sums made gradients."""

import triton
import triton.language as tl

from ..device.seqlen import find_sequence, load_rows, span_of, store_rows
from .backward_scheduler import WHOLE


@triton.jit
def rows_kernel(tensors, strides, sizes, unit, form: tl.constexpr):
    """tensors (dout, out, lse, dlse, delta, rows, dq_sum, cu_seqlens_q, turns, counter); strides (batch, row, head) of dout and out;
    sizes (H, S_q or T, sequences, tiles of rows a head), then parts of heads of which this clears dq's sum and tiles of keys a part.

    rows: lse in log2 units, times `unit`, of all batch entries and heads, then -delta of all, in whole tiles; a packed sequence begins a tile of
    its own.
    """
    BLOCK_M: tl.constexpr = form.tuning.block_m
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(form.block_dv)
    dout, out, lse, dlse, delta, rows, dq_sum, cu_seqlens_q, turns, counter = tensors
    heads, total, sequences, tiles, cleared, tiles_n = sizes
    pid = from_last()
    index = pid // tiles
    tile = pid % tiles
    start, length, block = index * 0, total, tile
    if form.packed:
        sequence, block = find_sequence(cu_seqlens_q, tile, sequences, total, BLOCK_M)
        start, length = span_of(cu_seqlens_q, sequence, sequences, total)
    lanes = tl.arange(0, BLOCK_M)
    row_ok = block * BLOCK_M + lanes < length
    m_offsets = start + block * BLOCK_M + lanes
    columns = tl.arange(0, BLOCK_DV)
    do = load_rows(head_of(dout, strides[0], index, heads), m_offsets, columns, strides[0][1], row_ok, form.head_dim_v).to(tl.float32)
    o = load_rows(head_of(out, strides[1], index, heads), m_offsets, columns, strides[1][1], row_ok, form.head_dim_v).to(tl.float32)
    row_delta = tl.sum(do * o, 1)
    place = index.to(tl.int64) * total + m_offsets
    if dlse is not None:
        row_delta -= tl.load(dlse + place, mask=row_ok, other=0.0)
    tl.store(delta + place, row_delta, mask=row_ok)
    row_lse = tl.load(lse + place, mask=row_ok, other=float("-inf")) * 1.4426950408889634
    empty = row_lse == float("-inf")
    if form.first_stores or form.finishes:
        tl.store(turns + pid, 0)
    if form.clears:  # the sums of the first parts here, others by the main kernel
        part = index // form.members
        if pid % (tiles * form.members) == 0:
            tl.store(turns + part, tl.where(part < cleared, tiles_n, 0))
        if part < cleared:
            clear_sum(dq_sum, pid, form)
    elif not form.first_stores:
        clear_sum(dq_sum, pid, form)
    if pid == 0:
        tl.store(counter, 0)
    numbers = rows + pid.to(tl.int64) * BLOCK_M + lanes
    tl.store(numbers, tl.where(empty, float("inf"), row_lse) * unit)
    tl.store(numbers + tl.num_programs(0).to(tl.int64) * BLOCK_M, tl.where(empty, 0.0, -row_delta))


@triton.jit
def clear_sum(dq_sum, tile, form: tl.constexpr):
    UNIT: tl.constexpr = form.dq_lines * 256
    for unit in tl.static_range(form.dq_units()):
        tl.store(dq_sum + (tile.to(tl.int64) * form.dq_units() + unit) * UNIT + tl.arange(0, UNIT), tl.zeros([UNIT], tl.float32))


@triton.jit
def from_last():
    """The program's number, the last first: the main kernel then finds in L2 what it takes first, and these what it made last (512 x 32: 1.4 %)."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def head_of(base, strides, index, heads):
    """Row 0 of head `index` of all batch entries' heads."""
    return base + (index // heads).to(tl.int64) * strides[0] + (index % heads).to(tl.int64) * strides[2]


@triton.jit
def convert_kernel(tensors, strides, sizes, scale, STORED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """tensors (sum, gradient); strides (batch, row, head) of each; sizes (heads, tokens); STORED columns of the sum, of which WIDTH count."""
    held, gradient = tensors
    heads, total = sizes
    tiles = tl.cdiv(total, BLOCK_M)
    pid = from_last()
    index = pid // tiles
    m_offsets = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = m_offsets < total
    columns = tl.arange(0, BLOCK_D)
    tile = load_rows(head_of(held, strides[0], index, heads), m_offsets, columns, strides[0][1], row_ok, STORED)
    store_rows(head_of(gradient, strides[1], index, heads), tile * scale, m_offsets, columns, strides[1][1], row_ok, WIDTH)


@triton.jit
def convert_dq_kernel(dq_sum, dq, cu_seqlens_q, turns, strides, sizes, scale, form: tl.constexpr):
    """dq = scale * its sum, as backward_mainloop.as_held ordered it, tile by tile; strides and sizes as rows_kernel has them, of dq.

    A thread reads four numbers at once, as they lie, and turns a tile around in shared memory: read one by one in dq's order they took 54 us for 49
    of 134 MB (H200).
    """
    BLOCK_M: tl.constexpr = form.tuning.block_m
    UNIT: tl.constexpr = form.dq_unit
    heads, total, sequences, tiles = sizes
    pid = from_last()
    index = pid // tiles
    start, length, block = index * 0, total, pid % tiles
    if form.packed:
        sequence, block = find_sequence(cu_seqlens_q, pid % tiles, sequences, total, BLOCK_M)
        start, length = span_of(cu_seqlens_q, sequence, sequences, total)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, UNIT)
    row_ok = block * BLOCK_M + row < length
    if form.finishes:
        turn = tl.load(turns + pid)
        if (turn != 0) if form.collects else (turn == WHOLE):
            return
    if form.first_stores:
        if tl.load(turns + pid) == 0:  # nobody sees a key: there is no sum
            for unit in tl.static_range(form.dq_units_written()):
                part = head_of(dq, strides, index, heads) + unit * UNIT
                nothing = tl.zeros([BLOCK_M, UNIT], tl.float32)
                store_rows(part, nothing, start + block * BLOCK_M + row, column, strides[1], row_ok, form.dq_width(unit))
            return
    for unit in tl.static_range(form.dq_units_written()):
        held = dq_sum + (pid.to(tl.int64) * form.block_d + unit * UNIT) * BLOCK_M
        parts = tl.reshape(tl.load(held + tl.arange(0, BLOCK_M * UNIT)) * scale, [BLOCK_M // 64, UNIT // 8, 4, 8, 4, 2, 2])
        tile = tl.reshape(tl.permute(parts, [0, 2, 5, 3, 1, 4, 6]), [BLOCK_M, UNIT])
        part = head_of(dq, strides, index, heads) + unit * UNIT
        store_rows(part, tile, start + block * BLOCK_M + row, column, strides[1], row_ok, form.dq_width(unit))
