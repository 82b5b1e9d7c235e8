"""The reduce warps of the Blackwell backward with a pair of CTAs: what `backward_reduce` does with dQ of a step.

Each CTA adds dQ of its half of a tile's queries, a sum over the pair's 256 keys. So a tile of dQ gets half as many adds
as with one CTA.
"""

from ..device.dialect import gl, gluon, partition_barrier
from .backward_dq import add_rows, kept_rows
from .backward_memory import pair_reduce_layout


@gluon.jit
def add_pair(pipes, sums, m_start, own, state, traits: gl.constexpr):
    """Add dQ of a step. A thread holds half of the columns of a row. It reads them and releases dQ before it adds,
    because S waits for that.
    """
    pipes.dq.consumer_wait(state)
    dq = pipes.tensor.dq(traits)
    columns = dq.main.load(pair_reduce_layout(traits.main_d))
    if traits.tail_d:  # registers do not hold both parts
        add_kept_rows(sums, columns, 0, m_start, own, traits)
        columns = dq.tail.load(pair_reduce_layout(traits.tail_d))
    pipes.dq.consumer_release(state)
    add_kept_rows(sums, columns, traits.main_d if traits.tail_d else 0, m_start, own, traits)


@gluon.jit
def add_kept_rows(sums, dq, offset: gl.constexpr, m_start, own, traits: gl.constexpr):
    """`add_rows`; with documents, of the document's own rows."""
    kept = None
    if traits.mask.documents:
        kept = kept_rows(m_start, own, dq.type.layout)
    add_rows(sums, dq, offset, kept)


@gluon.jit
def meet_pair():
    """All reduce warps of both CTAs meet: all have added before one counts."""
    partition_barrier(cluster=True)
