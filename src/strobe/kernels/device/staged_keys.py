"""Staging buffers of 8-bit keys and values: cp.async copies the words of a block into a buffer some blocks before the
producer converts them (`device.converted_keys`).

ptxas puts a MEMBAR beside each fence of the asynchronous proxy, and two fences a block are needed. A MEMBAR waits for a
thread's loads into registers, so they would not arrive while other blocks are converted. A copy has the time of two
blocks to arrive.

Eight lanes that load together have four vectors of two rows each. In rows of 128 bytes, odd rows have their halves
swapped, so that the vectors lie in different banks.
"""

from .converted_keys import WORD, words_layout
from .dialect import cp_async_commit, gl, gluon, record
from .tma import ColumnParts

HALF: gl.constexpr = gl.constexpr(16)  # words of half a row of 128 bytes


@record
class StagingBuffers:
    """ColumnParts of words [stages, block_n, columns / 4]."""

    k: ColumnParts
    v: ColumnParts

    @gluon.jit
    def create(stages: gl.constexpr, traits: gl.constexpr):
        k = allocate_words(stages, traits.main_d, traits.tail_d, traits.block_n)
        v = allocate_words(stages, traits.main_dv, traits.tail_dv, traits.block_n)
        return StagingBuffers(k, v)

    @gluon.jit
    def copy(self, state, keys_k, keys_v, pages, n_start, traits: gl.constexpr):
        """Start copying K and V of the block that begins at key n_start, as one group. Each thread has a group."""
        keys_k.copy(self.k.index(state.index), pages, n_start, traits)
        keys_v.copy(self.v.index(state.index), pages, n_start, traits)
        cp_async_commit()

    @gluon.jit
    def load(self, state, traits: gl.constexpr):
        """The words of K and of V of a block whose group has landed."""
        return load_words(self.k.index(state.index), traits), load_words(self.v.index(state.index), traits)


@gluon.jit
def load_words(buffer, traits: gl.constexpr):
    layout: gl.constexpr = words_layout(traits)
    if buffer.tail is None:
        return ColumnParts(buffer.main.load(layout), None)
    else:
        return ColumnParts(buffer.main.load(layout), buffer.tail.load(layout))


@gluon.jit
def allocate_words(stages: gl.constexpr, main: gl.constexpr, tail: gl.constexpr, rows: gl.constexpr):
    """main, tail: columns of the parts."""
    if tail == 0:
        return ColumnParts(_words(stages, rows, main // WORD), None)
    else:
        return ColumnParts(_words(stages, rows, main // WORD), _words(stages, rows, tail // WORD))


@gluon.jit
def _words(stages: gl.constexpr, rows: gl.constexpr, words: gl.constexpr):
    SWAPS: gl.constexpr = 2 if words == 2 * HALF else 1
    layout: gl.constexpr = gl.SwizzledSharedLayout(HALF, 1, SWAPS, [1, 0])
    return gl.allocate_shared_memory(gl.int32, [stages, rows, words], layout)
