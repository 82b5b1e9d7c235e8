"""Early weights: a row's weights are taken against the maximum of some of its keys, and a tile whose rows outgrow that is done again.

A step of online softmax looks at all scores of a row before it may take one exponential. But a maximum only keeps weights in range, and that of some
keys does as well for others whose scores are not far above them. So only careful steps look for maxima: the first, until each row has met a tile's
worth of keys, then one of EVERY, and with them that of the first key of all, which in trained models often outweighs all others. Exponentials of
all other steps begin with the first score.

Weights may reach MOST, little more than with a maximum that lags (`device.lagging`): what one key outweighs by more than a rounding is as exact as
there, and range is no matter. A sum of weights beyond it becomes infinite and stays so or turns into NaN, which is seen at the end: a row is sound if
its maximum is a number and what its sums are multiplied by is no tiny one. Consumers write what they have, leave a verdict on each row in shared
memory beside the board's slot, and free the slot. The loader looks there before it fills the slot again, and after its last tile, and tells a tile
anew of which any row was unsound. Then every step is careful, nothing is written before what was written first has arrived, and the result stands,
whatever it is.
"""

from ..device.dialect import gl, gluon, mbarrier, partition_barrier
from ..device.schedule import read_tile, read_words, tile_of, word

WORDS: gl.constexpr = gl.constexpr(16)  # of a tile on the board: the eight of every forward, then
AGAIN: gl.constexpr = gl.constexpr(8)  # 1 if it is done again
K_START: gl.constexpr = gl.constexpr(9)  # where its keys begin
COLUMNS: gl.constexpr = gl.constexpr(4)  # of verdicts a slot, of which as many are used as there are consumers
EVERY: gl.constexpr = gl.constexpr(8)  # tiles of keys, counted from the first of all
MOST: gl.constexpr = gl.constexpr(2.0**9)  # of the weights of a thread's keys of a row, in a step that is not careful
LEAST: gl.constexpr = gl.constexpr(2.0**-96)  # of what sums are multiplied by: a sink far above all scores makes it small, too


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
def judge(w: gl.constexpr, verdicts, slot, row_max, inverse, accepted):
    """A verdict on each row: 1 if it is to be done again. `inverse` is what sums were multiplied by; rows that are `accepted` are sound whatever they
    hold."""
    unsound = (row_max * 0.0 != 0.0) | ~(inverse > LEAST)  # -inf, inf and NaN times 0 are NaN
    verdicts.index(slot * COLUMNS + w).store((unsound & ~accepted).to(gl.int32))


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
def back_or_next(number, again, slot, board, offsets, sizes, limits, form: gl.constexpr):
    """schedule.tile_of, of the slot's tile where it came back: it does so once."""
    words, told, told_free, verdicts = board
    consumers: gl.constexpr = form.tuning.consumers
    if again > 0:
        entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k = read_tile(words, slot)
        k_start = word(read_words(words, slot), K_START)
        partition_barrier()  # all lanes have read
        for w in gl.static_range(consumers):
            acquit(verdicts.index(slot * COLUMNS + w))
        partition_barrier()  # all lanes have written before one tells
        exists, tile, keys = slot >= 0, (entry, head, m_start, n_begin, blocks, q_start, seqlen_q, seqlen_k), (k_start, seqlen_k)
    else:
        exists, tile, keys = tile_of(number, offsets, sizes, limits, form)
    return exists, tile, keys
