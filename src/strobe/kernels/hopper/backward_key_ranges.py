"""Documents and key lengths in the Hopper backward: tiles of keys are runs, and in tiles of queries rows of others are made none.

A tile of keys is of one document, and a document is walked run by run, as the forward's queries are (`device.key_ranges`): views wrap, so that no key
of another is read, nor any gradient of one written. Keys beyond their entry's length are not read either; their gradients are written, as 0.

Tiles of queries stand where they do without documents, since dq's sum and the numbers of rows lie tile by tile. One that also has rows of others,
at a run's ends or anywhere where documents lie scattered, lands on a barrier of the loader's own. That makes such rows none, whatever they hold:
q and dout 0, lse +inf, so that their weights are 0, and delta 0. Only then are the consumers told. They leave such rows out of what they add to
dq, since keys may hold what 0 times is not 0.

    barrier        arrivals              says
    mended[s]      2                     what goes to q[s] and with it has landed; of tiles without others' rows, that there is nothing to mend
"""

from ..device.dialect import fence_async_shared, gl, gluon, partition_barrier
from ..device.key_ranges import PURE, prefix_of, tile_at
from ..device.mask import first_row, stop_row
from ..device.zero_foreign_rows import is_own_row, zero_foreign_rows
from .backward_scheduler import dense_keys


@gluon.jit
def keys_of_run(number, row, offsets, work, form: gl.constexpr):
    """(whether there is such a tile, the row from which its number has further ones or 0, what the partitions are told of it).

    Told: as `keys_of_number` tells, but for the rows of its document (first, one past the last) in the place of starts; then where its keys end that
    are seen, where those that are its own; of its tiles of queries the first without others' rows, and one past the last; the document: PURE, or an
    id where others' rows lie among its own; and how many keys of the entry all rows see.
    """
    BLOCK_M: gl.constexpr = form.tuning.block_m
    tiles, sizes, limits, numbers, counter = work
    seqlen_q, seqlen_k = sizes[2], sizes[3]
    entry, part, n_block, back = dense_keys(number, sizes, form)
    exists, n_start, n_stop, beyond, span = tile_at(number >= 0, entry, n_block, row, 1, offsets, sizes, form.tuning.block_n, form)
    q_first, q_stop, document = span
    seen = n_stop
    if form.mask.key_lengths:
        seen = gl.minimum(seen, gl.maximum(gl.load(offsets[4] + entry), 0))  # the forward has reported a length that is none
    bounds, prefix = (seqlen_k, limits[0], limits[1]), prefix_of(offsets[5], entry, seqlen_k, form)
    m_begin = gl.maximum(first_row(n_start, seqlen_q, bounds, prefix, form), q_first) // BLOCK_M
    m_stop = gl.minimum(stop_row(seen - 1, seqlen_q, bounds, form), q_stop)
    blocks = gl.where(seen > n_start, gl.maximum(gl.cdiv(m_stop, BLOCK_M) - m_begin, 0), 0)
    first_tile = entry * sizes[1] * sizes[4]
    whole = gl.where(q_stop == seqlen_q, m_begin + blocks, q_stop // BLOCK_M)  # beyond S_q there are no rows
    pure_begin, pure_stop = gl.cdiv(q_first, BLOCK_M) - m_begin, gl.where(document == PURE, whole - m_begin, 0)
    m_first = m_begin * BLOCK_M
    return exists, beyond, (
        entry, part, n_start, m_first, blocks, first_tile, q_first, seqlen_q, q_stop, seqlen_k, seen, n_stop, pure_begin, pure_stop, document, prefix
    )  # fmt: skip


@gluon.jit
def places_of(tile, sizes):
    """Of q, dout, k and v the (entry, start, length) of a tile's rows, as views that wrap have them: entries stand some rows apart."""
    entry, seqlen_q, seen = tile[0], tile[7], tile[10]
    q = (entry, entry * sizes[7], seqlen_q)
    dout = (entry, entry * sizes[8], seqlen_q)
    return q, dout, (entry, entry * sizes[9], seen), (entry, entry * sizes[10], seen)


@gluon.jit
def places_written(keys, sizes):
    """The same of dk and dv."""
    entry, start, length = keys
    return (entry, entry * sizes[11], length), (entry, entry * sizes[12], length)


@gluon.jit
def has_others(block, pure):
    """Whether the `block`-th tile of queries that a tile of keys walks has rows that are not of its document."""
    return (block < pure[0]) | (block >= pure[1])


@gluon.jit
def without_others(dq, lse):
    """A tile of dq with 0 in rows that are none, whose lse, or what scores begin at, says so."""
    kept = gl.convert_layout(gl.abs(lse) != float("inf"), gl.SliceLayout(1, dq.type.layout), assert_trivial=True)
    return gl.where(kept[:, None], dq, 0.0)


@gluon.jit
def mend(q_tile, do_tile, lse, delta, m_start, tile, ids, form: gl.constexpr):
    """Make rows of others none, as rows_kernel has such, in a tile of queries that has landed."""
    own = (tile[6], tile[8], tile[14], ids + tile[0].to(gl.int64) * tile[7])
    layout: gl.constexpr = gl.BlockedLayout([lse.shape[0] // 32], [32], [1], [0])
    kept = is_own_row(m_start + gl.arange(0, lse.shape[0], layout), own)
    lse.store(gl.where(kept, lse.load(layout), float("-inf") if form.begun else float("inf")))
    delta.store(gl.where(kept, delta.load(layout), 0.0))
    zero_foreign_rows(q_tile[0], m_start, own)
    if len(q_tile) == 2:
        zero_foreign_rows(q_tile[1], m_start, own)
    zero_foreign_rows(do_tile[0], m_start, own)
    if len(do_tile) == 2:
        zero_foreign_rows(do_tile[1], m_start, own)
    fence_async_shared()
    partition_barrier()  # all lanes have written before one tells
