"""Rows of other documents in a tile that has landed in shared memory, made 0 before whoever multiplies it is told.

Weights of what a row does not see are 0, but 0 times what a neighbour holds need not be: 0 x NaN is NaN. Tiles that TMA cuts at a document's
ends hold no neighbour's rows (`views`). Where documents lie scattered, or a tile's place is given, it holds some: it then lands on a barrier of
the loader's own, and its other rows go.
"""

from .dialect import gl, gluon, reinterpret
from .key_ranges import PURE

AT_ONCE: gl.constexpr = gl.constexpr(8)  # rows, since loaders have few registers


@gluon.jit
def clear_others(tile, row, own):
    """0 in the rows of a swizzled tile [..., rows, columns], whose first is `row`, that are not `own`: own are those from the first to the stop, and
    where the document is not PURE those with its id; ids are of row 0 on.

    A few rows and a block of columns at a time: a tile wider than its swizzle lies block by block, and a block's rows one after the other.
    """
    COLUMNS: gl.constexpr = min(tile.shape[-1], tile.layout.swizzle_byte_width // 2)
    BLOCKS: gl.constexpr = tile.shape[-1] // COLUMNS
    PIECES: gl.constexpr = tile.shape[-2] // AT_ONCE
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [1, 1], [1, 0])
    pieces = reinterpret(tile, tile.dtype, [BLOCKS * PIECES, AT_ONCE, COLUMNS], gl.NVMMASharedLayout(2 * COLUMNS, 16, 2))
    first, stop, document, ids = own
    for i in range(PIECES):
        begin = row + i * AT_ONCE
        if (begin < first) | (begin + AT_ONCE > stop) | (document != PURE):
            kept = is_own(begin + gl.arange(0, AT_ONCE, gl.SliceLayout(1, layout)), own)
            for block in range(BLOCKS):
                piece = pieces.index(block * PIECES + i)
                if (begin + AT_ONCE <= first) | (begin >= stop):  # most pieces at a run's ends: nothing to wait for
                    piece.store(gl.full(piece.shape, 0.0, piece.dtype, layout))
                else:
                    piece.store(gl.where(kept[:, None], piece.load(layout), 0.0))


@gluon.jit
def is_own(row, own):
    first, stop, document, ids = own
    kept = (row >= first) & (row < stop)
    if document != PURE:
        kept = kept & (gl.load(ids + row, mask=kept, other=PURE) == document)
    return kept
