"""Work tiles as rows of int32 words in shared memory: what the producer's pipelines to the other roles share.

A slot has up to 16 words. The producer writes them four at a time and the others read them one by one.
"""

from .dialect import gl, gluon, record, reinterpret

WORDS: gl.constexpr = gl.constexpr(16)  # of a slot
NUM_BLOCKS: gl.constexpr = gl.constexpr(4)  # the word with a tile's number of blocks
END: gl.constexpr = gl.constexpr(-1)  # as a tile's number of blocks: there are no more tiles


@gluon.jit
def warp_lanes():
    """0 .. 31, one a lane, alike in all warps of the role."""
    return gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def read_words(words, slot):
    """The words of a slot; `word` reads one of them."""
    layout: gl.constexpr = gl.BlockedLayout([words.shape[-1]], [32], [gl.num_warps()], [0])
    return words.index(slot).load(layout)


@gluon.jit
def word(row, i: gl.constexpr):
    """Word i of `read_words`, as a scalar."""
    return gl.sum(gl.where(gl.arange(0, row.shape[0], row.type.layout) == i, row, 0), 0)


@record
class FourWordRows:
    """A slot in rows of four words: MLIR takes a row of sixteen apart word by word, which is 0.6 s of compile time."""

    rows: gl.shared_memory_descriptor
    slot: gl.tensor
    lane: gl.tensor

    @gluon.jit
    def of_slot(words, slot):
        """Slot `slot` of words [slots, WORDS]. All warps of the role write the same."""
        shape: gl.constexpr = [words.shape[0] * words.shape[1] // 4, 4]
        rows = reinterpret(words, gl.int32, shape, words.type.layout)
        return FourWordRows(rows, slot, gl.arange(0, 4, gl.BlockedLayout([4], [32], [gl.num_warps()], [0])))

    @gluon.jit
    def store(self, i: gl.constexpr, a, b, c, d):
        """Write words 4 i .. 4 i + 3. None leaves 0."""
        lane = self.lane
        words = set_word(set_word(set_word(set_word(lane * 0, lane, 0, a), lane, 1, b), lane, 2, c), lane, 3, d)
        self.rows.index(self.slot * (self.rows.shape[0] // 2) + i).store(words)


@gluon.jit
def set_word(row, lane, i: gl.constexpr, value):
    """row with `value` in lane i, unless it is None."""
    if value is not None:
        row = gl.where(lane == i, value, row)
    return row
