"""Splits that run at the same time join their shares in shared memory: each program of a cluster gets some columns of all, and writes them whole.

    in memory     share to memory | count | the last program reads all shares, joins them | write       1.3 of 5.9 us at one sequence of 1k (H200)
    in a cluster  a part of the share to each program | each joins its part | write                     0.3 of 4.8

An inbox holds float32 numbers [splits, columns of a part, rows], then log-sum-exps [splits, rows].
"""

from ..device.cluster import await_inbox, cluster_wait, received, send
from ..device.dialect import gl, gluon
from ..device.split_kv import add_sink, combined_factor


@gluon.jit
def send_share(o, lse_log2, box, split, form: gl.constexpr):
    """A split's o [D_v, queries] and log-sum-exp [queries], to each program of the cluster its columns."""
    ROWS: gl.constexpr = form.sent_rows
    PART: gl.constexpr = form.block_dv // form.cluster
    SIZE: gl.constexpr = form.inbox_bytes
    column = gl.arange(0, form.block_dv, gl.SliceLayout(1, o.type.layout))[:, None]
    row = gl.arange(0, form.block_m, gl.SliceLayout(0, o.type.layout))[None, :]
    o_place = box + ((split * PART + column % PART) * ROWS + row) * 4
    send(o, o_place, column // PART + row * 0, box, row < ROWS, SIZE)
    lse, _ = gl.broadcast(lse_log2[None, :], o)
    lse_place = box + (form.block_dv * ROWS + split * ROWS + row) * 4 + column * 0
    send(lse, lse_place, column // PART + row * 0, box, (row < ROWS) & (column % PART == 0), SIZE)


@gluon.jit
def join_part(box, form: gl.constexpr):
    """(o of this program's columns, lse in log2 units), a number a column and row, rows first."""
    ROWS: gl.constexpr = form.sent_rows
    PART: gl.constexpr = form.block_dv // form.cluster
    layout: gl.constexpr = gl.BlockedLayout([1, form.cluster], [32, 1], [gl.num_warps(), 1], [1, 0])
    number = gl.arange(0, PART * ROWS, gl.SliceLayout(1, layout))[:, None]
    split = gl.arange(0, form.cluster, gl.SliceLayout(0, layout))[None, :]
    share = received(box + (split * (PART * ROWS) + number) * 4)
    held = received(box + (form.block_dv * ROWS + split * ROWS + number % ROWS) * 4)
    top = gl.max(held, 1)
    level = gl.where(top == float("-inf"), 0.0, top)
    weight = gl.exp2(held - level[:, None])
    factor, lse_log2 = combined_factor(top, gl.sum(weight, 1))
    return gl.sum(share * weight, 1) * factor, lse_log2


@gluon.jit
def write_part(tensors, o, lse_log2, place, first_row, split, strides, form: gl.constexpr):
    """This program's columns to out, the first program's lse; as decode.write."""
    ROWS: gl.constexpr = form.sent_rows
    PART: gl.constexpr = form.block_dv // form.cluster
    out, lse, sinks = tensors
    batch, head, tokens, heads_kv, queries = place
    number = gl.arange(0, PART * ROWS, o.type.layout)
    row, column = first_row + number % ROWS, split * PART + number // ROWS
    token, head_q = row // form.group, head * form.group + row % form.group
    exists = (token < tokens) & (number % ROWS < form.joined_rows)
    sink = lse_log2
    if form.sinks:
        sink = gl.load(sinks + head_q, mask=exists, other=0.0)
    o, row_lse = add_sink(o[:, None], lse_log2, sink, form)
    at = batch.to(gl.int64) * strides[0] + token.to(gl.int64) * strides[1] + head_q.to(gl.int64) * strides[2]
    gl.store(out + (at + column)[:, None], o.to(out.dtype.element_ty), mask=(exists & (column < form.head_dim_v))[:, None])
    gl.store(lse + (batch.to(gl.int64) * heads_kv * form.group + head_q) * queries + token, row_lse, mask=exists & (column == 0))


@gluon.jit
def exchange(tensors, o, lse_log2, box, place, first_row, split, strides, form: gl.constexpr):
    """All of a tile's rows from all splits' shares."""
    cluster_wait()
    send_share(o, lse_log2, box, split, form)
    await_inbox(box, form.inbox_bytes)
    o, lse_log2 = join_part(box, form)
    write_part(tensors, o, lse_log2, place, first_row, split, strides, form)
