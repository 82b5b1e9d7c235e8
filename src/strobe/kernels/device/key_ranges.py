"""Rows of one batch entry that see different ranges of keys, because of documents, key lengths or a prefix.

A tile of rows is processed run by run: a run is rows of one document that follow each other. So no tile of keys has
rows of another document. TMA's descriptors wrap as those of packed sequences do (`device.tma`), as if batch entries lay
end to end, and a tile may be any run of rows and any range of keys. Only the range of a document with gaps has keys of
others, and their ids tell these apart.

    range of a row (mask.Documents)   where its run ends, the first key of its document, one past the last
    ranges (KeyRangeTensors)          ranges of queries, of keys; ids of queries, of keys; key lengths; prefixes; None
                                      where the mask has none
"""

from .dialect import gl, gluon, record

PURE: gl.constexpr = gl.constexpr(-1)  # in place of a document's id: all keys of the range are its own


@record
class RangeTile:
    """Rows start .. stop - 1 of a batch entry, all of one range: queries, or keys."""

    exists: gl.tensor
    start: gl.tensor
    stop: gl.tensor
    next_row: gl.tensor  # the row at which the block has further tiles, counted from the block's first, or 0
    others: gl.tuple  # of the other side: (first, one past the last, document)


@gluon.jit
def tile_at(exists, entry, index, row, side: gl.constexpr, ranges, sizes, block: gl.constexpr, traits: gl.constexpr):
    """The RangeTile at row `row` of block `index` of a batch entry, of queries (side 0) or keys (1).

    Rows count from the entry's first, `row` from the block's. The document is PURE, or its id if the range of the other
    side has rows of other documents.

    A block of `block` rows has the tiles that begin in it. Tiles of a run follow each other from the run's first row,
    wherever that is, so a run has no more tiles than its length needs. Where that row is not known (ids of keys differ
    from those of queries, or a document has several runs), tiles end where the block ends.
    """
    length, across = sizes[2 + side], sizes[3 - side]
    begin = index * block
    rows_stop = gl.minimum(begin + block, length)
    start, stop = begin + row, rows_stop
    first, last, document = index * 0, index * 0 + across, index * 0 + PURE
    if traits.mask.documents:
        start, stop, run_end, keys = tile_from(begin + row, rows_stop, exists, entry, side, ranges, sizes, block)
        if start >= run_end:  # the run's last tile begins before
            exists = exists & (run_end < rows_stop)
            start, stop, run_end, keys = tile_from(run_end, rows_stop, exists, entry, side, ranges, sizes, block)
            exists = exists & (start < run_end)  # always true for ranges that documents() made
        first, last, other_end = keys
        at = entry.to(gl.int64) * length + start
        document = gl.where(
            other_end >= last, PURE, gl.load(ranges[2 + side] + at, mask=exists & (other_end < last), other=0)
        )
    beyond = gl.where(exists & (stop < rows_stop), stop - begin, 0)
    return RangeTile(exists, start, stop, beyond, (first, last, document))


@gluon.jit
def tile_from(position, rows_stop, exists, entry, side: gl.constexpr, ranges, sizes, block: gl.constexpr):
    """(start, stop) of the first tile at or after `position` in the run that has this row, where the run ends, and the
    other side's (first row of the document, one past the last, end of its first run).

    Two loads depend on each other, so tiles of short runs wait for both.
    """
    own = ranges[side] + 3 * (entry.to(gl.int64) * sizes[2 + side] + position)
    # clamped as in `seqlen.run_at`
    run_end = gl.maximum(gl.minimum(gl.load(own, mask=exists, other=0), sizes[2 + side]), position + 1)
    first = gl.minimum(gl.maximum(gl.load(own + 1, mask=exists, other=0), 0), sizes[3 - side])
    last = gl.maximum(gl.minimum(gl.load(own + 2, mask=exists, other=0), sizes[3 - side]), first)
    seen = exists & (last > first)
    across = ranges[1 - side] + 3 * (entry.to(gl.int64) * sizes[3 - side] + first)
    other_end = gl.load(across, mask=seen, other=sizes[3 - side])
    alike = seen & (ranges[2].to(gl.int64) == ranges[3].to(gl.int64)) & (sizes[2] == sizes[3])
    known = alike & (first <= position) & (other_end == run_end)
    # known: the document's first key is also its first row, of this run or of one before
    start = gl.where(known, first + gl.cdiv(position - first, block) * block, position)
    stop = gl.minimum(run_end, gl.where(known, start + block, rows_stop))
    return start, stop, run_end, (first, last, other_end)


@gluon.jit
def prefix_of(prefixes, entry, seqlen_k, traits: gl.constexpr):
    """How many first keys all rows of a batch entry see."""
    if traits.mask.prefix:
        return gl.minimum(gl.maximum(gl.load(prefixes + entry), 0), seqlen_k)
    else:
        return entry * 0
