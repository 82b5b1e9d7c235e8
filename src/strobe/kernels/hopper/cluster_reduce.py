"""Splits that run at the same time join their shares in shared memory: each program of a cluster gets some columns of all, and writes them whole.

    in memory     share to memory | count | the last program reads all shares, joins them | write       1.3 of 5.9 us at one sequence of 1k (H200)
    in a cluster  a part of the share to each program | each joins its part | write                     0.3 of 4.8

An inbox holds float32 numbers [splits, columns of a part, rows], then log-sum-exps [splits, rows].
"""

from ..device.cluster import await_inbox, cluster_wait, received, send
from ..device.dialect import gl, gluon
from ..device.split_kv import add_sink, combined_factor


@gluon.jit
def send_partial(o, lse_log2, box, split, traits: gl.constexpr):
    """A split's o [D_v, queries] and log-sum-exp [queries], to each program of the cluster its columns."""
    ROWS: gl.constexpr = traits.sent_rows
    PART: gl.constexpr = traits.block_dv // traits.cluster
    SIZE: gl.constexpr = traits.inbox_bytes
    column = gl.arange(0, traits.block_dv, gl.SliceLayout(1, o.type.layout))[:, None]
    row = gl.arange(0, traits.block_m, gl.SliceLayout(0, o.type.layout))[None, :]
    o_place = box + ((split * PART + column % PART) * ROWS + row) * 4
    send(o, o_place, column // PART + row * 0, box, row < ROWS, SIZE)
    lse, _ = gl.broadcast(lse_log2[None, :], o)
    lse_place = box + (traits.block_dv * ROWS + split * ROWS + row) * 4 + column * 0
    send(lse, lse_place, column // PART + row * 0, box, (row < ROWS) & (column % PART == 0), SIZE)


@gluon.jit
def reduce_columns(box, traits: gl.constexpr):
    """(o of this program's columns, lse in log2 units), a number a column and row, rows first."""
    ROWS: gl.constexpr = traits.sent_rows
    PART: gl.constexpr = traits.block_dv // traits.cluster
    layout: gl.constexpr = gl.BlockedLayout([1, traits.cluster], [32, 1], [gl.num_warps(), 1], [1, 0])
    number = gl.arange(0, PART * ROWS, gl.SliceLayout(1, layout))[:, None]
    split = gl.arange(0, traits.cluster, gl.SliceLayout(0, layout))[None, :]
    share = received(box + (split * (PART * ROWS) + number) * 4)
    held = received(box + (traits.block_dv * ROWS + split * ROWS + number % ROWS) * 4)
    top = gl.max(held, 1)
    level = gl.where(top == float("-inf"), 0.0, top)
    weight = gl.exp2(held - level[:, None])
    factor, lse_log2 = combined_factor(top, gl.sum(weight, 1))
    return gl.sum(share * weight, 1) * factor, lse_log2


@gluon.jit
def write_columns(tensors, o, lse_log2, place, first_row, split, strides, traits: gl.constexpr):
    """This program's columns to out, the first program's lse; as decode.write."""
    ROWS: gl.constexpr = traits.sent_rows
    PART: gl.constexpr = traits.block_dv // traits.cluster
    out, lse, batch, head = tensors.out, tensors.lse, place.batch, place.head
    number = gl.arange(0, PART * ROWS, o.type.layout)
    row, column = first_row + number % ROWS, split * PART + number // ROWS
    token, head_q = row // traits.group, head * traits.group + row % traits.group
    exists = (token < place.tokens) & (number % ROWS < traits.joined_rows)
    sink = lse_log2
    if traits.sinks:
        sink = gl.load(tensors.sinks + head_q, mask=exists, other=0.0)
    o, row_lse = add_sink(o[:, None], lse_log2, sink, traits)
    at = batch.to(gl.int64) * strides.batch + token.to(gl.int64) * strides.row + head_q.to(gl.int64) * strides.head
    gl.store(out + (at + column)[:, None], o.to(out.dtype.element_ty), mask=(exists & (column < traits.head_dim_v))[:, None])
    gl.store(lse + (batch.to(gl.int64) * place.heads_kv * traits.group + head_q) * place.lse_rows + token, row_lse, mask=exists & (column == 0))


@gluon.jit
def cluster_reduce(tensors, o, lse_log2, box, place, first_row, split, strides, traits: gl.constexpr):
    """All of a tile's rows from all splits' shares."""
    cluster_wait()
    send_partial(o, lse_log2, box, split, traits)
    await_inbox(box, traits.inbox_bytes)
    o, lse_log2 = reduce_columns(box, traits)
    write_columns(tensors, o, lse_log2, place, first_row, split, strides, traits)
