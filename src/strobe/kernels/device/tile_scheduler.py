"""How the backward's producer publishes work tiles to its consumers, as rows of int32 in shared memory; `forward_scheduler` is the forwards'."""

from .dialect import gl, gluon, mbarrier, partition_barrier, reinterpret


@gluon.jit
def tell(board, at, tile):
    """Write a tile's numbers for the consumers to read, the fifth of which is never negative; a negative one says that there are no more tiles."""
    words, told, told_free = board[0], board[1], board[2]
    fours = in_fours(words)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    lane = gl.arange(0, 4, layout)
    mbarrier.wait(told_free.index(at.stage), at.parity ^ 1)
    for n in gl.static_range(words.shape[-1] // 4):
        row = lane * 0
        for i in gl.static_range(4):
            if 4 * n + i < len(tile):
                row = gl.where(lane == i, tile[4 * n + i], row)
        fours.index(at.stage * (words.shape[-1] // 4) + n).store(row)  # all: rows are read whole
    partition_barrier()  # all lanes store, one arrives
    mbarrier.arrive(told.index(at.stage))


@gluon.jit
def in_fours(words):
    """The board's memory in rows of four numbers. A row of sixteen is made by as many selects of sixteen, which MLIR takes apart number by number: of
    d64 causal's canonicalization 0.6 of 0.7 s."""
    return reinterpret(words, gl.int32, [words.shape[0] * words.shape[-1] // 4, 4], words.type.layout)


@gluon.jit
def read_words(words, stage):
    """A tile's numbers as a row; `word` has each."""
    layout: gl.constexpr = gl.BlockedLayout([words.shape[-1]], [32], [gl.num_warps()], [0])
    return words.index(stage).load(layout)


@gluon.jit
def word(row, i: gl.constexpr):
    """The i-th number of a row, as a scalar."""
    return gl.sum(gl.where(gl.arange(0, row.shape[0], row.type.layout) == i, row, 0), 0)


@gluon.jit
def is_told(words, told, at):
    """Wait for the next tile; whether there is one."""
    mbarrier.wait(told.index(at.stage), at.parity)
    return word(read_words(words, at.stage), 4) >= 0
