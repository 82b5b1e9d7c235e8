"""Early weights: a row's weights are taken against the maximum of its first keys, and a tile whose rows outgrow that is done again.

A step of online softmax looks at all scores of a row before it may take one exponential. But a maximum only keeps weights in range, and bfloat16
weights and float32 sums reach 2^127: that of the first keys does as well for those after, unless scores grow by some 2^100. So only careful steps
look for maxima: the first, and those in which some row may not have met a key. Exponentials of all others begin with the first score.

Whether that held is seen at the end: a row is sound if its maximum is one, what its sums are multiplied by is no tiny number, and the products are
finite. Consumers write what they have, leave a verdict on each row in shared memory beside the board's slot, and free the slot. The loader looks
there before it fills the slot again, and after its last tile, and tells a tile anew of which any row was unsound. Then every step is careful,
nothing is written before what was written first has arrived, and the result stands, whatever it is.
"""

from ..device.dialect import gl, gluon, mbarrier, partition_barrier
from ..device.schedule import read_tile, read_words, tile_of, word

WORDS: gl.constexpr = gl.constexpr(16)  # of a tile on the board: the eight of every forward, then
AGAIN: gl.constexpr = gl.constexpr(8)  # 1 if it is done again
K_START: gl.constexpr = gl.constexpr(9)  # where its keys begin
CONSUMERS: gl.constexpr = gl.constexpr(4)  # columns of verdicts a slot, of which as many are used as there are consumers
LEAST: gl.constexpr = gl.constexpr(2.0**-96)  # of what sums are multiplied by: both it and its inverse are normal numbers


@gluon.jit
def verdicts_of(slots: gl.constexpr, rows: gl.constexpr):
    """Verdicts in shared memory, of which none is bad."""
    verdicts = gl.allocate_shared_memory(gl.int32, [slots * CONSUMERS, rows], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(slots * CONSUMERS):
        acquit(verdicts.index(i))
    return verdicts


@gluon.jit
def acquit(verdict):
    layout: gl.constexpr = gl.BlockedLayout([verdict.shape[0] // 32], [32], [gl.num_warps()], [0])
    verdict.store(gl.full([verdict.shape[0]], 0, gl.int32, layout))


@gluon.jit
def judge(w: gl.constexpr, verdicts, slot, o, row_max, inverse, accepted):
    """A verdict on each row: 1 if it is to be done again. `o` is what was written, `inverse` what sums were multiplied by; rows that are `accepted`
    are sound whatever they hold."""
    strange = row_max * 0.0  # of -inf, inf and NaN: NaN
    for i in gl.static_range(len(o)):
        eighths = gl.sum(gl.reshape(o[i] * 0.0, [o[i].shape[0], o[i].shape[1] // 8, 8]), 1)  # in a thread, twice as many sums of half the length
        strange += gl.convert_layout(gl.sum(eighths, 1), row_max.type.layout, assert_trivial=True)
    unsound = (strange != 0.0) | ~(inverse > LEAST)
    verdicts.index(slot * CONSUMERS + w).store((unsound & ~accepted).to(gl.int32))


@gluon.jit
def is_done_again(words, slot):
    return word(read_words(words, slot), AGAIN)


@gluon.jit
def came_back(board, at, more, consumers: gl.constexpr):
    """(whether a tile is to be done again, 1 or 0, its slot), once all are done with the slot at `at`. If there are no more tiles, it may be the
    tile told last."""
    again, slot = is_bad(board, at, consumers), at.stage
    if (again == 0) & ~more:
        again, slot = is_bad(board, at.next(), consumers), at.next().stage
    return again, slot


@gluon.jit
def is_bad(board, at, consumers: gl.constexpr):
    words, told, told_free, verdicts = board
    layout: gl.constexpr = gl.BlockedLayout([verdicts.shape[1] // 32], [32], [1], [0])
    mbarrier.wait(told_free.index(at.stage), at.parity ^ 1)
    bad = verdicts.index(at.stage * CONSUMERS).load(layout)
    for w in gl.static_range(1, consumers):
        bad = bad | verdicts.index(at.stage * CONSUMERS + w).load(layout)
    return gl.max(bad, 0)


@gluon.jit
def back_or_next(number, again, slot, board, offsets, sizes, limits, form: gl.constexpr):
    """schedule.tile_of, of the slot's tile where it came back: it does so once."""
    words, told, told_free, verdicts = board
    consumers: gl.constexpr = form.tuning.consumers
    if again > 0:
        entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k = read_tile(words, slot)
        k_start = word(read_words(words, slot), K_START)
        partition_barrier()  # all lanes have read
        for w in gl.static_range(consumers):
            acquit(verdicts.index(slot * CONSUMERS + w))
        partition_barrier()  # all lanes have written before one tells
        exists, tile, keys = slot >= 0, (entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k), (k_start, seqlen_k)
    else:
        exists, tile, keys = tile_of(number, offsets, sizes, limits, form)
    return exists, tile, keys
