"""TMA's views of a call's tensors: made on the host, moved in tiles by the device. They agree on how packed sequences lie.

A tensor's rows end where TMA is told: it gives zeros beyond them and writes nothing there, so lengths may be ragged. Packed sequences
lie end to end, so their views wrap: a neighbour's rows are neither read nor written, whatever they hold.

Source of ragged descriptors: triton.tools.ragged_tma.
"""

from typing import Any

import torch
from torch import Tensor

from ...problem import ALIGNMENT
from ..tma import MOST_ROWS
from .dialect import TensorDescriptor, gl, gluon, tma_load, tma_store

FAR: gl.constexpr = gl.constexpr(MOST_ROWS)  # where the rows of a wrapping descriptor end
WRAP = 2**34  # elements: MOST_ROWS steps of this come back to where they began, modulo 2**64 bytes
MOST_STEPS = 0x7FFF0000  # a dimension without an end of its own
DTYPES = {"torch.float16": gl.float16, "torch.bfloat16": gl.bfloat16, "torch.float32": gl.float32}


@gluon.jit
def copy_in(desc, place, head, row, column: gl.constexpr, ready, smem, form: gl.constexpr):
    """Load a tile from row `row` of a head on; `place` is (batch entry, start, length) of its sequence.

    A packed sequence's rows are made to end at coordinate FAR, whatever they begin at: the first dimension takes FAR rows back, the
    second steps by rows to the sequence's end.
    """
    entry, start, length = place
    if form.packed:
        tma_load(desc, [FAR, start + length, head, FAR - length + row, column], ready, smem)
    else:
        tma_load(desc, [entry, head, row, column], ready, smem)


@gluon.jit
def copy_out(desc, place, head, row, column: gl.constexpr, smem, form: gl.constexpr):
    """`copy_in`, the other way."""
    entry, start, length = place
    if form.packed:
        tma_store(desc, [FAR, start + length, head, FAR - length + row, column], smem)
    else:
        tma_store(desc, [entry, head, row, column], smem)


@gluon.jit
def tile_2d(ring, stage):
    """A stage of a ring as rows and columns."""
    return as_rows(ring.index(stage))


@gluon.jit
def as_rows(tile):
    """A tile as rows and columns: TMA sees it as a block [..., rows, columns]."""
    shape: gl.constexpr = [tile.shape[-2], tile.shape[-1]]
    return tile.reshape(shape)


def addressable(out: Tensor) -> Tensor:
    """`out` itself where TMA can write to it, else a tensor like it, whose rows begin at multiples of 16 bytes."""
    itemsize, bits = out.element_size(), out.data_ptr()
    for stride in out.stride()[:-1]:
        bits |= stride * itemsize
    if bits % ALIGNMENT == 0:
        return out
    whole = -(-out.shape[-1] * itemsize // ALIGNMENT) * ALIGNMENT // itemsize
    return torch.empty((*out.shape[:-1], whole), dtype=out.dtype, device=out.device)[..., : out.shape[-1]]


def descriptor(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    """TMA's view of [B, S, H, D] as [B, H, S, D], or of packed [T, H, D] as `copy_in` wants it, moved in tiles of one head's rows."""
    if tensor.dim() == 4:
        b, s, h, d = tensor.stride()
        batch, length, heads, size = tensor.shape
        shape, strides, ones = [batch, heads, length, size], [b, h, s, d], [1, 1]
    else:
        s, h, d = tensor.stride()
        _, heads, size = tensor.shape
        shape, strides, ones = [MOST_STEPS, MOST_STEPS, heads, MOST_ROWS, size], [WRAP - s, s, h, s, d], [1, 1, 1]
    layout: Any = gl.NVMMASharedLayout.get_default_for([*ones, rows, width], DTYPES[str(tensor.dtype)])
    return TensorDescriptor(tensor, shape, strides, [*ones, rows, width], layout)
