"""Adds tiles of dQ in registers to their float32 sum in global memory.

A thread holds a row of dQ, or half of one. In a sum ordered by rows the 32 lanes of a warp would add to 32 lines of
memory at a time. So the sum of a tile is ordered [D / 4, rows, 4]: a lane adds 16 bytes, and a warp 512 adjacent bytes
(red.global.add.v4.f32). `backward_preprocess.postprocess_kernel` reads that order.

Documents: rows of other documents in a tile add nothing, because a key may hold NaN or inf, and 0 times these is NaN.
"""

from ..device.dialect import gl, gluon
from ..device.zero_foreign_rows import is_own_row
from .backward_memory import ROWS


@gluon.jit
def add_rows(sums, dq, offset: gl.constexpr, kept):
    """sums += dQ [ROWS, columns], which begins at column `offset`; sums points at the tile's sum. kept: which rows to
    add, or None for all.
    """
    layout: gl.constexpr = dq.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = offset + gl.arange(0, dq.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.atomic_add(sums + (column // 4 * (4 * ROWS) + row * 4 + column % 4), dq, mask=kept, sem="relaxed")


@gluon.jit
def kept_rows(m_start, own, layout: gl.constexpr):
    """Which rows of the tile from m_start are the document's own, in a tile's layout."""
    return is_own_row(m_start + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), own)[:, None]
