"""pack_gqa: the query heads of a key head share a tile. Which query and which head each of its rows holds.

traits.pack_gqa is the number of heads that share a tile; with 1, rows are queries of one head. traits.rows_per_query is
the number of rows that a query takes: as many, rounded up to a power of two.
"""

from .dialect import gl, gluon


@gluon.jit
def queries_of(row, traits: gl.constexpr):
    """The queries that rows hold, counted from row 0's."""
    return row // traits.rows_per_query


@gluon.jit
def heads_of(row, head, queries_exist, traits: gl.constexpr):
    """(the query head of each row, whether the row has one). `head` is the tile's: a query head, or with pack_gqa a key
    head.
    """
    if traits.pack_gqa > 1:
        member = row % traits.rows_per_query
        return head * traits.pack_gqa + member, queries_exist & (member < traits.pack_gqa)
    else:
        return head, queries_exist


@gluon.jit
def load_sinks(sinks, head, exists, traits: gl.constexpr):
    """The sinks of the heads that `heads_of` returns."""
    if traits.pack_gqa > 1:
        return gl.load(sinks + head, mask=exists, other=0.0).to(gl.float32)
    else:
        return gl.load(sinks + head).to(gl.float32)
