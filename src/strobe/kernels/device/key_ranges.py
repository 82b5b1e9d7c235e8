"""Rows of one batch entry that see different spans of keys: documents, of whose rows those that follow each other are a run, key lengths, and the
first keys that all rows see.

A tile of rows is walked run by run, so that no tile of keys holds a neighbour's: batch entries lie end to end, and TMA's views wrap as those of
packed sequences do (`views`), for any run of rows and any span of keys. Only documents that lie scattered have others' keys in their span, which
are then told apart by their ids.

    spans of a row (mask.Documents): where its run ends, the first key of its document, and one past the last
    offsets (spans of queries, spans of keys, ids of queries, ids of keys, key lengths, prefixes), None where a mask has none

A `form` says: tuning (block_m), mask, and spans: whether its mask has any of these.
"""

from .dialect import gl, gluon

PURE: gl.constexpr = gl.constexpr(-1)  # for a document's id: all keys of the span are its own


@gluon.jit
def tile_at(exists, entry, index, row, side: gl.constexpr, offsets, sizes, block: gl.constexpr, form: gl.constexpr):
    """(whether there is such a tile, the rows of its entry with which it begins and stops, the row from which its number has further ones or 0, and
    its document: the first row that it has on the other side, one past the last, and PURE, or its id where others' rows lie among those), of
    queries (side 0) or keys (1).

    A number, the `index` of its head, speaks of `block` rows, and has the tiles that begin there; `row` says from which on. A run's tiles follow each
    other from its first row on, wherever that is, so that no run has a tile more than its length asks for; where that row is not known, since ids of
    keys are others or a document has several runs, they are cut where the number's rows stop.
    """
    length, across = sizes[2 + side], sizes[3 - side]
    begin = index * block
    rows_stop = gl.minimum(begin + block, length)
    start, stop = begin + row, rows_stop
    first, last, document = index * 0, index * 0 + across, index * 0 + PURE
    if form.mask.documents:
        start, stop, run_end, span = tile_from(begin + row, rows_stop, exists, entry, side, offsets, sizes, block)
        if start >= run_end:  # the run that goes on here has its last tile before
            exists = exists & (run_end < rows_stop)
            start, stop, run_end, span = tile_from(run_end, rows_stop, exists, entry, side, offsets, sizes, block)
            exists = exists & (start < run_end)  # always, of spans that documents() made
        first, last, other_end = span
        at = entry.to(gl.int64) * length + start
        document = gl.where(other_end >= last, PURE, gl.load(offsets[2 + side] + at, mask=exists & (other_end < last), other=0))
    beyond = gl.where(exists & (stop < rows_stop), stop - begin, 0)
    return exists, start, stop, beyond, (first, last, document)


@gluon.jit
def tile_from(position, rows_stop, exists, entry, side: gl.constexpr, offsets, sizes, block: gl.constexpr):
    """(start, stop) of the first tile at `position` or behind it of the run that has this row, where the run ends, and of its document on the other
    side the first row, one past the last, and where the first run ends. Two loads one after the other: whoever looks for short runs waits for them.
    """
    spans = offsets[side] + 3 * (entry.to(gl.int64) * sizes[2 + side] + position)
    run_end = gl.maximum(gl.minimum(gl.load(spans, mask=exists, other=0), sizes[2 + side]), position + 1)  # cut as `tiles.run_at` cuts them
    first = gl.minimum(gl.maximum(gl.load(spans + 1, mask=exists, other=0), 0), sizes[3 - side])
    last = gl.maximum(gl.minimum(gl.load(spans + 2, mask=exists, other=0), sizes[3 - side]), first)
    seen = exists & (last > first)
    across = offsets[1 - side] + 3 * (entry.to(gl.int64) * sizes[3 - side] + first)
    other_end = gl.load(across, mask=seen, other=sizes[3 - side])
    alike = seen & (offsets[2].to(gl.int64) == offsets[3].to(gl.int64)) & (sizes[2] == sizes[3])
    known = alike & (first <= position) & (other_end == run_end)  # a document's first key is then a row, of this run or of one before
    start = gl.where(known, first + gl.cdiv(position - first, block) * block, position)
    stop = gl.minimum(run_end, gl.where(known, start + block, rows_stop))
    return start, stop, run_end, (first, last, other_end)


@gluon.jit
def prefix_of(prefixes, entry, seqlen_k, form: gl.constexpr):
    """How many of an entry's first keys all of its rows see."""
    if form.mask.prefix:
        return gl.minimum(gl.maximum(gl.load(prefixes + entry), 0), seqlen_k)
    else:
        return entry * 0
