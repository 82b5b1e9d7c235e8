"""TMA descriptors of a call's tensors, made on the host, and TMA copies of tiles on the device. Both agree on how
packed sequences are addressed.

A tensor's rows end where the descriptor says: TMA reads zeros beyond them and writes nothing there, so lengths may be
ragged. Packed sequences follow each other, so their descriptors wrap: a neighbour's rows are neither read nor written.

Source of ragged descriptors: triton.tools.ragged_tma.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem.problem import ALIGNMENT
from ..runtime.tma_requirements import MOST_ROWS, heads_merge_with_rows
from .dialect import TensorDescriptor, Value, gl, gluon, record, tma_load, tma_store

FAR: gl.constexpr = gl.constexpr(MOST_ROWS)  # where the rows of a wrapping descriptor end
WRAP = 2**34  # elements: MOST_ROWS steps of this come back to where they began, modulo 2**64 bytes
MOST_STEPS = 0x7FFF0000  # a dimension without an end of its own
DTYPES = {"torch.float16": gl.float16, "torch.bfloat16": gl.bfloat16, "torch.float32": gl.float32}


@gluon.jit
def _tiles(slots: gl.constexpr, view, flat: gl.constexpr):
    """Tiles as TMA sees them, or as rows and columns (`flat`), which warps of other roles are passed in 8 bytes less of
    shared memory.
    """
    if flat:
        COLUMNS: gl.constexpr = view.block_shape[-1]
        ROWS: gl.constexpr = view.block_type.nbytes * 8 // view.dtype.primitive_bitwidth // COLUMNS
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], view.dtype)
        return gl.allocate_shared_memory(view.dtype, [slots, ROWS, COLUMNS], layout)
    else:
        return gl.allocate_shared_memory(view.dtype, [slots] + view.block_shape, view.layout)  # noqa: RUF005 (no * here)


@gluon.jit
def as_block(tile, desc):
    """A tile as TMA sees it, where it is rows and columns."""
    if len(tile.shape) != len(desc.block_shape):
        tile = tile.reshape(desc.block_shape)
    return tile


@record
class ColumnParts:
    """A tile's columns in two parts: `main`, a power of two, and `tail`, or None. The parts are descriptors, buffers,
    operands or accumulators.
    """

    main: Value
    tail: Value

    @gluon.jit
    def index(self, i):
        """Tile i of buffers [tiles, ...]."""
        if self.tail is None:
            return ColumnParts(self.main.index(i), None)
        else:
            return ColumnParts(self.main.index(i), self.tail.index(i))


class HeadRows(NamedTuple):
    """The rows of one head of one sequence in a tensor."""

    batch: Any
    offset: Any  # first row, in packed layouts
    length: Any
    head: Any
    heads: Any  # of the tensor, where a tile packs the query heads of a key head


@gluon.jit
def of_head(rows, head):
    """The same HeadRows of another head."""
    return HeadRows(rows.batch, rows.offset, rows.length, head, rows.heads)


@gluon.jit
def from_row(rows, offset):
    """The same number of rows, from `offset` on."""
    return HeadRows(rows.batch, offset, rows.length, rows.head, rows.heads)


@gluon.jit
def allocate_tiles(count: gl.constexpr, desc, flat: gl.constexpr = False):
    """Shared memory for `count` tiles as TMA writes them, or (flat) as rows and columns. desc: ColumnParts of
    descriptors.
    """
    if desc.tail is None:
        return ColumnParts(_tiles(count, desc.main, flat), None)
    else:
        return ColumnParts(_tiles(count, desc.main, flat), _tiles(count, desc.tail, flat))


@gluon.jit
def tma_coordinates(rows, row, column: gl.constexpr, pack_gqa: gl.constexpr, traits: gl.constexpr):
    """Coordinates of the tile that begins at `row` of HeadRows.

    With descriptors that wrap, a sequence's rows end at coordinate FAR wherever they begin: the first dimension steps
    FAR rows back, and the second steps by rows to the sequence's end. With `pack_gqa`, rows are queries, rows.head is a
    key head, and the second dimension steps by key heads, of which there are rows.heads.
    """
    if traits.wraps:
        if pack_gqa:
            return [FAR, (rows.offset + rows.length) * rows.heads + rows.head, FAR - rows.length + row, 0, column]
        else:
            return [FAR, rows.offset + rows.length, rows.head, FAR - rows.length + row, column]
    else:
        if pack_gqa:
            return [rows.batch, rows.head, row, 0, column]
        else:
            return [rows.batch, rows.head, row, column]


@gluon.jit
def load_part(desc, rows, row, column: gl.constexpr, full, tile, pack_gqa: gl.constexpr, traits: gl.constexpr):
    tma_load(desc, tma_coordinates(rows, row, column, pack_gqa, traits), full, as_block(tile, desc))


@gluon.jit
def store_part(desc, rows, row, column: gl.constexpr, tile, pack_gqa: gl.constexpr, traits: gl.constexpr):
    tma_store(desc, tma_coordinates(rows, row, column, pack_gqa, traits), as_block(tile, desc))


@gluon.jit
def as_rows(tile):
    """A tile as rows and columns: TMA sees it as a block [..., rows, columns], or [..., queries, heads, columns]."""
    shape: gl.constexpr = [tile.numel // tile.shape[-1], tile.shape[-1]]
    return tile.reshape(shape)


def addressable(out: Tensor, pack_gqa: bool = False) -> Tensor:
    """`out` itself where TMA can write to it, else a tensor like it, whose rows begin at multiples of 16 bytes."""
    itemsize, bits = out.element_size(), out.data_ptr()
    for stride in out.stride()[:-1]:
        bits |= stride * itemsize
    if (
        bits % ALIGNMENT == 0
        and out.stride(-1) == 1
        and not (pack_gqa and out.dim() == 3 and not heads_merge_with_rows(out.stride(), out.shape[1]))
    ):
        return out
    whole = -(-out.shape[-1] * itemsize // ALIGNMENT) * ALIGNMENT // itemsize
    return torch.empty((*out.shape[:-1], whole), dtype=out.dtype, device=out.device)[..., : out.shape[-1]]


def pack_gqa_descriptor(tensor: Tensor, rows: int, width: int, heads: int, rows_per_query: int) -> TensorDescriptor:
    """`descriptor` with the `heads` query heads of a key head as a dimension: a tile's rows are rows / rows_per_query
    queries, each with its heads.

    `rows_per_query`, a power of two, may exceed `heads`: TMA gives zeros for the heads that are none, and writes none.
    """
    size = tensor.shape[-1]
    if tensor.dim() == 4:
        b, s, h, d = tensor.stride()
        shape, strides = (
            [tensor.shape[0], tensor.shape[2] // heads, tensor.shape[1], heads, size],
            [b, heads * h, s, h, d],
        )
    else:
        s, h, d = tensor.stride()
        shape, strides = [MOST_STEPS, MOST_STEPS, MOST_ROWS, heads, size], [WRAP - s, heads * h, s, h, d]
    return _described(tensor, shape, strides, [1, 1, rows // rows_per_query, rows_per_query, width])


def describing(tuning: Any) -> Callable[[Tensor, int, int], TensorDescriptor]:
    """How q and out are described: by `descriptor`, or where heads of a group share a tile by `pack_gqa_descriptor`."""
    return (
        partial(pack_gqa_descriptor, heads=tuning.pack_gqa, rows_per_query=tuning.rows_per_query)
        if tuning.pack_gqa > 1
        else descriptor
    )


def descriptor(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    """A descriptor of [B, S, H, D] as [B, H, S, D], or of packed [T, H, D] as `tma_coordinates` addresses it, with
    tiles of one head's rows.
    """
    if tensor.dim() == 4:
        b, s, h, d = tensor.stride()
        batch, length, heads, size = tensor.shape
        shape, strides, ones = [batch, heads, length, size], [b, h, s, d], [1, 1]
    else:
        s, h, d = tensor.stride()
        _, heads, size = tensor.shape
        shape, strides, ones = [MOST_STEPS, MOST_STEPS, heads, MOST_ROWS, size], [WRAP - s, s, h, s, d], [1, 1, 1]
    return _described(tensor, shape, strides, [*ones, rows, width])


def _described(tensor: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    layout: Any = gl.NVMMASharedLayout.get_default_for(block, DTYPES[str(tensor.dtype)])
    return TensorDescriptor(tensor, shape, strides, block, layout)
