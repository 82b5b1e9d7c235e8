"""Tile redo: a forward makes two assumptions that rarely fail, and checks at the end of a tile whether they held.

Optimistic softmax may find a row's maximum too late: the maximum is then inf or NaN. And among the keys of a document
there may be keys of other documents: their weights are 0, but 0 times infinity or NaN is NaN, so a row of O is NaN.
Checks at the end add nothing to a step.

    consumers   write O in any case, set a redo flag for each row in shared memory, release the work tile's slot
    producer    reads the flags before it fills the slot again, and after its last tile; publishes a flagged tile again
    redo        each step looks for maxima, V rows of other documents are zeroed, stores wait for the earlier stores

The result of a redo stands, even if a row is inf or NaN again.
"""

from .dialect import gl, gluon, record
from .key_ranges import PURE

FLAG_ROWS: gl.constexpr = gl.constexpr(4)  # rows of flags of a slot: one for each consumer, at most


@record
class RedoRequest:
    """Whether the tile of `slot` has to be computed once more: 0 or 1."""

    pending: gl.tensor
    slot: gl.tensor

    @gluon.jit
    def none():
        return RedoRequest(gl.to_tensor(0), gl.to_tensor(0))


@record
class RedoFlags:
    """Two slots of FLAG_ROWS rows of flags, int32."""

    flags: gl.shared_memory_descriptor

    @gluon.jit
    def create(slots: gl.constexpr, rows: gl.constexpr):
        self = RedoFlags(
            gl.allocate_shared_memory(gl.int32, [slots * FLAG_ROWS, rows], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        )
        for i in gl.static_range(slots * FLAG_ROWS):
            clear_flags(self.flags.index(i))
        return self

    @gluon.jit
    def clear(self, slot, consumers: gl.constexpr):
        for consumer in gl.static_range(consumers):
            clear_flags(self.flags.index(slot * FLAG_ROWS + consumer))

    @gluon.jit
    def set(self, slot, consumer, witness, accepted):
        """Flag rows whose witness is inf or NaN, unless `accepted`."""
        flags = self.flags.index(slot * FLAG_ROWS + consumer)
        flags.store(((witness * 0.0 != 0.0) & ~accepted).to(gl.int32))  # -inf, inf and NaN times 0 are NaN

    @gluon.jit
    def any(self, slot, consumers: gl.constexpr):
        """1 if a flag of the slot is set, else 0."""
        layout: gl.constexpr = gl.BlockedLayout([self.flags.shape[1] // 32], [32], [gl.num_warps()], [0])
        flags = self.flags.index(slot * FLAG_ROWS).load(layout)
        for consumer in gl.static_range(1, consumers):
            flags = flags | self.flags.index(slot * FLAG_ROWS + consumer).load(layout)
        return gl.max(flags, 0)


@gluon.jit
def clear_flags(flags):
    layout: gl.constexpr = gl.BlockedLayout([flags.shape[0] // 32], [32], [gl.num_warps()], [0])
    flags.store(gl.full([flags.shape[0]], 0, gl.int32, layout))


@gluon.jit
def redo_witness(row_max, is_empty, o, document, traits: gl.constexpr):
    """(witness, is_empty) of each row: a row needs a redo if its witness is inf or NaN, unless is_empty.

    The witness is the row's maximum. For rows of a document among whose keys are other documents' keys, it is the
    sum of O's columns, each times 0; there rows that see no key may need a redo, too.
    """
    witness = row_max
    if traits.mask.documents:
        if not traits.optimistic:
            witness = gl.full(row_max.shape, 0.0, gl.float32, row_max.type.layout)
        if document != PURE:
            sums = gl.sum(o.main * 0.0, 1)
            if o.tail is not None:
                sums += gl.convert_layout(gl.sum(o.tail * 0.0, 1), sums.type.layout)
            sums = gl.convert_layout(sums, row_max.type.layout)
            witness = gl.where(sums == 0.0, witness, sums)
            is_empty = is_empty & (sums == 0.0)
    return witness, is_empty
