"""Tiles that are done again: a forward takes what is nearly always right, and looks at the end whether it was.

Two things may turn out to be wrong. Early weights, of which maxima come too late (`early`): then a row's maximum is no number. And values of other
documents between a document's own, where those lie scattered: their weights are 0, but 0 times infinity or NaN is NaN, so a row of o is none. Seen at
the end, neither costs a step anything.

Consumers write what they have, leave a verdict on each row in shared memory beside the board's slot, and free the slot. The loader looks there before
it fills the slot again, and after its last tile, and tells a tile anew of which any row was unsound. Then every step looks for maxima, others' values
are made 0 before they are multiplied, nothing is written before what was written first has arrived, and the result stands, whatever it is.
"""

from ..device.dialect import gl, gluon, mbarrier, partition_barrier
from ..device.key_ranges import PURE, next_tile
from ..device.tile_scheduler import read_tile, read_words, word

WORDS: gl.constexpr = gl.constexpr(16)  # of a tile on the board: the eight of every forward, then
AGAIN: gl.constexpr = gl.constexpr(8)  # 1 if it is done again
K_START: gl.constexpr = gl.constexpr(9)  # where its keys begin
KEYS: gl.constexpr = gl.constexpr(10)  # how many there are, where S_k does not say so
DOCUMENT: gl.constexpr = gl.constexpr(11)  # spans.PURE, or whose keys they are
PREFIX: gl.constexpr = gl.constexpr(12)  # how many of its first keys all rows see
COLUMNS: gl.constexpr = gl.constexpr(4)  # of verdicts a slot, of which as many are used as there are consumers


@gluon.jit
def verdicts_of(slots: gl.constexpr, rows: gl.constexpr):
    """Verdicts in shared memory, of which none is bad."""
    verdicts = gl.allocate_shared_memory(gl.int32, [slots * COLUMNS, rows], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(slots * COLUMNS):
        acquit(verdicts.index(i))
    return verdicts


@gluon.jit
def acquit(verdict):
    layout: gl.constexpr = gl.BlockedLayout([verdict.shape[0] // 32], [32], [gl.num_warps()], [0])
    verdict.store(gl.full([verdict.shape[0]], 0, gl.int32, layout))


@gluon.jit
def judge(w, verdicts, slot, witness, accepted):
    """A verdict on each row: 1 if it is to be done again, as its witness is no number. Rows that are `accepted` are sound whatever they hold."""
    verdicts.index(slot * COLUMNS + w).store(((witness * 0.0 != 0.0) & ~accepted).to(gl.int32))  # -inf, inf and NaN times 0 are NaN


@gluon.jit
def witness_of(row_max, empty, o, document, form: gl.constexpr):
    """(a number of each row that is none where the row is unsound, rows that are sound whatever it is). Of a scattered document's row it is the sum
    of o's columns, each times 0: of one that sees no key, too."""
    witness = row_max
    if form.mask.documents:
        if not form.early:
            witness = gl.full(row_max.shape, 0.0, gl.float32, row_max.type.layout)
        if document != PURE:
            sums = gl.sum(o[0] * 0.0, 1)
            if len(o) == 2:
                sums += gl.convert_layout(gl.sum(o[1] * 0.0, 1), sums.type.layout)
            sums = gl.convert_layout(sums, row_max.type.layout)
            witness = gl.where(sums == 0.0, witness, sums)
            empty = empty & (sums == 0.0)
    return witness, empty


@gluon.jit
def is_done_again(words, slot):
    return word(read_words(words, slot), AGAIN)


@gluon.jit
def came_back(board, at, more, consumers: gl.constexpr):
    """(whether a tile is to be done again, 1 or 0, its slot), once all are done with the slot at `at`. If there are no more tiles, it may be the
    tile told last, in the other slot: it is told anew at `at`, whose verdicts are good, and those of its own slot are made so."""
    again, slot = is_bad(board, at, consumers), at.stage
    if (again == 0) & ~more:
        again, slot = is_bad(board, at.next(), consumers), at.next().stage
    return again, slot


@gluon.jit
def is_bad(board, at, consumers: gl.constexpr):
    words, told, told_free, verdicts = board
    layout: gl.constexpr = gl.BlockedLayout([verdicts.shape[1] // 32], [32], [1], [0])
    mbarrier.wait(told_free.index(at.stage), at.parity ^ 1)
    bad = verdicts.index(at.stage * COLUMNS).load(layout)
    for w in gl.static_range(1, consumers):
        bad = bad | verdicts.index(at.stage * COLUMNS + w).load(layout)
    return gl.max(bad, 0)


@gluon.jit
def back_or_next(number, row, again, slot, board, offsets, sizes, limits, faults, form: gl.constexpr):
    """`next_tile`, of the slot's tile where it came back: it does so once."""
    words, told, told_free, verdicts = board
    consumers: gl.constexpr = form.tuning.consumers
    if again > 0:
        entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k = read_tile(words, slot)
        row_told = read_words(words, slot)
        if form.spans:
            keys, document = (word(row_told, K_START), word(row_told, KEYS), word(row_told, PREFIX)), word(row_told, DOCUMENT)
        else:
            keys, document = (word(row_told, K_START), seqlen_k), number * 0
        partition_barrier()  # all lanes have read
        for w in gl.static_range(consumers):
            acquit(verdicts.index(slot * COLUMNS + w))
        partition_barrier()  # all lanes have written before one tells
        exists, tile, beyond = slot >= 0, (entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k), slot * 0
    else:
        exists, tile, keys, document, beyond = next_tile(number, row, offsets, sizes, limits, faults, form)
    return exists, tile, keys, document, beyond
