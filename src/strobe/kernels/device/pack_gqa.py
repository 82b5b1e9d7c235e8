"""Heads that share a tile: which query and which head each of its rows holds. Where none do, rows are queries of one head.

A `form` says: tuning (joined, the heads that share a tile; fold, the rows that a query takes: as many, to a power of two).
"""

from .dialect import gl, gluon


@gluon.jit
def queries_of(row, form: gl.constexpr):
    """The queries that rows hold, counted from row 0's."""
    return row // form.tuning.fold


@gluon.jit
def heads_of(row, head, queries_exist, form: gl.constexpr):
    """(the query head of each row, whether the row has one); `head` is a tile's: a query head, or a key head where its heads are joined."""
    if form.tuning.joined > 1:
        member = row % form.tuning.fold
        return head * form.tuning.joined + member, queries_exist & (member < form.tuning.joined)
    else:
        return head, queries_exist


@gluon.jit
def load_sinks(sinks, head, exists, form: gl.constexpr):
    """The sinks of `heads_of`."""
    if form.tuning.joined > 1:
        return gl.load(sinks + head, mask=exists, other=0.0).to(gl.float32)
    else:
        return gl.load(sinks + head).to(gl.float32)
