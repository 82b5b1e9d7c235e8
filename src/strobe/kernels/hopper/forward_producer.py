"""What the Hopper forward's loader loads: rows of a tile's parts into their slots, keys and values into their stages, once those are free.

Of documents that lie scattered, values of a tile that is done `again` land on a barrier of the loader's own, which makes those of others 0
(`device.mending`) before the consumers may have them.
"""

from ..device.dialect import fence_async_shared, gl, gluon, mbarrier, partition_barrier
from ..device.mending import clear_others
from ..device.tma import copy_parts, stage_of


@gluon.jit
def load_keys(views, place, head, block, at, channel, rest: gl.constexpr, form: gl.constexpr):
    """One tile of keys or values into its stage, once that is free."""
    smem, ready, free = channel
    mbarrier.wait(free.index(at.stage), at.parity ^ 1)
    load_rows(views, place, head, block * form.tuning.block_n, at.stage, smem, ready.index(at.stage), rest, form)


@gluon.jit
def load_values(views, place, head, block, at, channel, mended, others, form: gl.constexpr):
    """`load_keys` of values, which land on the loader's own barrier where others lie among them."""
    smem, ready, free = channel
    mbarrier.wait(free.index(at.stage), at.parity ^ 1)
    if others:
        load_rows(views, place, head, block * form.tuning.block_n, at.stage, smem, mended.index(at.stage), form.rest_dv, form)
    else:
        mbarrier.arrive(mended.index(at.stage))
        load_rows(views, place, head, block * form.tuning.block_n, at.stage, smem, ready.index(at.stage), form.rest_dv, form)


@gluon.jit
def mend_values(channel, mended, at, block, keys, document, ids, form: gl.constexpr):
    """Let the consumers have values that have landed, once those of other documents are 0; `keys`: where their span begins, how many it has."""
    smem, ready, free = channel
    mbarrier.wait(mended.index(at.stage), at.parity)
    own = (0, keys[1], document, ids + keys[0])
    tile = stage_of(smem, at.stage)
    clear_others(tile[0], block * form.tuning.block_n, own)
    if len(tile) == 2:
        clear_others(tile[1], block * form.tuning.block_n, own)
    fence_async_shared()
    partition_barrier()  # all lanes have written before one tells
    mbarrier.arrive(ready.index(at.stage))


@gluon.jit
def load_rows(views, place, head, row, slot, smem, ready, rest: gl.constexpr, form: gl.constexpr, joined: gl.constexpr = False):
    """A tile's parts into their slots; the last columns of all are `rest`, the first a power of two."""
    if rest:
        mbarrier.expect(ready, views[0].block_type.nbytes + views[1].block_type.nbytes)
    else:
        mbarrier.expect(ready, views[0].block_type.nbytes)
    copy_parts(views, place, head, row, ready, stage_of(smem, slot), form, joined)
