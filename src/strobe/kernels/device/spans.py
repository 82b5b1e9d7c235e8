"""Rows of one batch entry that see different spans of keys: documents, of whose rows those that follow each other are a run, and key lengths.

A tile of rows is walked run by run, so that no tile of keys holds a neighbour's: batch entries lie end to end, and TMA's views wrap as those of
packed sequences do (`views`), for any run of rows and any span of keys. Only documents that lie scattered have others' keys in their span, which
are then told apart by their ids.

    spans of a row (mask.Documents): where its run ends, the first key of its document, and one past the last
    offsets (spans of queries, spans of keys, ids of queries, ids of keys, key lengths), None where a mask has none

A `form` says: tuning (block_m), mask, and spans: whether its mask has either.
"""

from .dialect import gl, gluon
from .schedule import blocks_within, dense_place
from .tiles import key_limit

PURE: gl.constexpr = gl.constexpr(-1)  # for a document's id: all keys of the span are its own


@gluon.jit
def run_of(number, row, offsets, sizes, form: gl.constexpr):
    """(whether there is such a tile, its batch entry, its head, where the run that begins with row `row` of it begins and stops in its entry,
    where the tile stops)."""
    exists, entry, head, m_block = dense_place(number, sizes, form)
    seqlen_q = sizes[2]
    start = m_block * form.tuning.block_m + row
    tile_stop = gl.minimum((m_block + 1) * form.tuning.block_m, seqlen_q)
    stop = tile_stop
    if form.mask.documents:
        at = entry.to(gl.int64) * seqlen_q + start
        stop = gl.minimum(gl.load(offsets[0] + 3 * at, mask=exists, other=0), tile_stop)
    return exists, entry, head, start, stop, tile_stop


@gluon.jit
def row_after(number, row, offsets, sizes, form: gl.constexpr):
    """The row of the tile with which its next run begins, or 0."""
    exists, entry, head, start, stop, tile_stop = run_of(number, row, offsets, sizes, form)
    return gl.where(exists & (stop < tile_stop), row + stop - start, 0)


@gluon.jit
def tile_of_run(number, row, offsets, sizes, limits, faults, form: gl.constexpr):
    """schedule.tile_of of a run, with keys (where they begin, how many) and its document: PURE, or an id where others' keys lie among its own.

    Told of it: rows from the run's first on, and an S_k by which the diagonal is where the run's rows and keys have it; it is no number of keys.
    """
    exists, entry, head, start, stop, tile_stop = run_of(number, row, offsets, sizes, form)
    seqlen_q, seqlen_k = sizes[2], sizes[3]
    k_first, k_stop, document = number * 0, number * 0 + seqlen_k, number * 0 + PURE
    if form.mask.documents:
        at = entry.to(gl.int64) * seqlen_q + start
        k_first = gl.load(offsets[0] + 3 * at + 1, mask=exists, other=0)
        k_stop = gl.load(offsets[0] + 3 * at + 2, mask=exists, other=0)
        first_key = entry.to(gl.int64) * seqlen_k + k_first
        run_end = gl.load(offsets[1] + 3 * first_key, mask=exists & (k_stop > k_first), other=seqlen_k)
        document = gl.where(run_end >= k_stop, PURE, gl.load(offsets[2] + at, mask=exists, other=0))
    if form.mask.key_lengths:
        k_stop = gl.minimum(k_stop, key_limit(offsets[4], entry, seqlen_k, faults, True))
    rows, keys = stop - start, gl.maximum(k_stop - k_first, 0)
    lengths = (rows, rows + start - k_first + seqlen_k - seqlen_q)
    n_begin, blocks = blocks_within(number * 0, form.tuning.block_m, lengths, keys, limits, form)
    tile = (entry, head, number * 0, n_begin, blocks, entry * seqlen_q + start, rows, lengths[1])
    return exists, tile, (entry * seqlen_k + k_first, keys), document


@gluon.jit
def own_keys(s, n_start, document, ids, stop):
    """Scores of keys n_start.., -inf where they are not the document's own; `ids` points at the span's first key, `stop` is how many it has."""
    if document != PURE:
        n = n_start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s = gl.where((gl.load(ids + n, mask=n < stop, other=PURE) == document)[None, :], s, float("-inf"))
    return s
