"""Rows of packed queries that the Hopper decode does not write: those of no sequence, and those of sequences with more
tokens than promised. In Triton.
"""

import triton
import triton.language as tl

from ..device.seqlen import LONG_Q, OFFSETS_Q, guard_offsets, sequence_of_row

LANES = tl.constexpr(128)


@triton.jit
def other_rows_kernel(tensors, errors, strides, shape, heads_q, width: tl.constexpr, block: tl.constexpr):
    """A program per row. tensors: DecodeTensors; strides: RowStrides of out; shape: DecodeShape; `block` columns hold
    the `width` of a row.
    """
    row = tl.program_id(0)
    n, total = shape.batch, shape.total_q
    if row == 0:
        lanes = tl.arange(0, LANES)
        guard_offsets(tensors.cu_seqlens_q, n, total, shape.seqlen_q, lanes, errors, OFFSETS_Q, LONG_Q)
    sequence, _, tokens = sequence_of_row(tensors.cu_seqlens_q, row, n, total)
    is_outside = (sequence == 0) | (sequence > n)
    if is_outside | (tokens > shape.seqlen_q):
        columns = tl.arange(0, block)
        for head in range(0, heads_q):
            lse = float("-inf")
            if tensors.sinks is not None:
                lse = tl.load(tensors.sinks + head).to(tl.float32)
            lse = tl.where(is_outside, lse, float("nan"))
            value = tl.full([block], 0.0, tl.float32) + tl.where(is_outside, 0.0, float("nan"))
            out = tensors.out + row.to(tl.int64) * strides.row + head.to(tl.int64) * strides.head
            tl.store(out + columns, value.to(tensors.out.dtype.element_ty), mask=columns < width)
            tl.store(tensors.lse + head.to(tl.int64) * total + row, lse)
