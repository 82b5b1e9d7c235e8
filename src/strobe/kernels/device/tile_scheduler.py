"""How consumers read a published work tile: a row of int32 in shared memory, word by word."""

from .dialect import gl, gluon


@gluon.jit
def read_words(words, stage):
    """A tile's numbers as a row; `word` has each."""
    layout: gl.constexpr = gl.BlockedLayout([words.shape[-1]], [32], [gl.num_warps()], [0])
    return words.index(stage).load(layout)


@gluon.jit
def word(row, i: gl.constexpr):
    """The i-th number of a row, as a scalar."""
    return gl.sum(gl.where(gl.arange(0, row.shape[0], row.type.layout) == i, row, 0), 0)
