"""Zeroing rows of other documents in a tile in shared memory, before the producer hands it to the consumers.

The weight of a row that is not visible is 0, but 0 times NaN or infinity is NaN. Tiles that TMA cuts at a document's
ends hold no rows of other documents (`device.tma`). If a document's rows have gaps, or a tile's position is fixed, the
tile holds some. It then lands on a barrier of the producer's own, and the producer zeroes them.
"""

from .dialect import gl, gluon, reinterpret
from .key_ranges import PURE

ROWS_PER_STEP: gl.constexpr = gl.constexpr(8)  # few, because producers have few registers


@gluon.jit
def zero_foreign_rows(tile, row, own):
    """Zero the rows of a swizzled tile [..., rows, columns] that are not the document's own. `row` is its first row.

    own: (first, stop, document, ids). Rows first .. stop - 1 are the document's own, and if it is not PURE only those
    with its id; `ids` points to the id of row 0.

    Some rows and a block of columns are processed at a time. A tile wider than its swizzle lies in memory block by
    block, and the rows of a block one after the other.
    """
    COLUMNS: gl.constexpr = min(tile.shape[-1], tile.layout.swizzle_byte_width // 2)
    BLOCKS: gl.constexpr = tile.shape[-1] // COLUMNS
    PIECES: gl.constexpr = tile.shape[-2] // ROWS_PER_STEP
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [1, 1], [1, 0])
    memory_layout: gl.constexpr = gl.NVMMASharedLayout(2 * COLUMNS, 16, 2)
    pieces = reinterpret(tile, tile.dtype, [BLOCKS * PIECES, ROWS_PER_STEP, COLUMNS], memory_layout)
    first, stop, document, ids = own
    for i in range(PIECES):
        begin = row + i * ROWS_PER_STEP
        if (begin < first) | (begin + ROWS_PER_STEP > stop) | (document != PURE):
            kept = is_own_row(begin + gl.arange(0, ROWS_PER_STEP, gl.SliceLayout(1, layout)), own)
            for block in range(BLOCKS):
                piece = pieces.index(block * PIECES + i)
                # no row is the document's own, as in most pieces at a run's ends: no load to wait for
                if (begin + ROWS_PER_STEP <= first) | (begin >= stop):
                    piece.store(gl.full(piece.shape, 0.0, piece.dtype, layout))
                else:
                    piece.store(gl.where(kept[:, None], piece.load(layout), 0.0))


@gluon.jit
def is_own_row(row, own):
    """Whether rows are the document's own; `own` as in `zero_foreign_rows`."""
    first, stop, document, ids = own
    kept = (row >= first) & (row < stop)
    if document != PURE:
        kept = kept & (gl.load(ids + row, mask=kept, other=PURE) == document)
    return kept
