"""Splits that run in one cluster combine their partial results in shared memory: each program receives some columns of
all splits, and writes them.

    in global memory   store partial result | count | the last program loads all, combines, writes   1.3 of 5.9 us
    in a cluster       send a part to each program | each program combines its part, writes it       0.3 of 4.8 us

The times are of one sequence of 1,024 keys (H200). An inbox holds float32: O [splits, columns of a part, rows], then
the log-sum-exps [splits, rows].
"""

from ..device.cluster import await_inbox, cluster_wait, received, send
from ..device.dialect import gl, gluon
from ..device.split_kv import add_sink, combined_factor
from .decode_store import lse_offsets, token_exists


@gluon.jit
def send_partial(o, lse_log2, box, split, traits: gl.constexpr):
    """Send each program of the cluster its columns of a split's O^T [D_v, queries] and log-sum-exp [queries]."""
    ROWS: gl.constexpr = traits.sent_rows
    PART: gl.constexpr = traits.block_dv // traits.cluster
    SIZE: gl.constexpr = traits.inbox_bytes
    column = gl.arange(0, traits.block_dv, gl.SliceLayout(1, o.type.layout))[:, None]
    row = gl.arange(0, traits.block_m, gl.SliceLayout(0, o.type.layout))[None, :]
    o_address = box + ((split * PART + column % PART) * ROWS + row) * 4
    send(o, o_address, column // PART + row * 0, box, row < ROWS, SIZE)
    lse, _ = gl.broadcast(lse_log2[None, :], o)
    lse_address = box + (traits.block_dv * ROWS + split * ROWS + row) * 4 + column * 0
    send(lse, lse_address, column // PART + row * 0, box, (row < ROWS) & (column % PART == 0), SIZE)


@gluon.jit
def reduce_columns(box, traits: gl.constexpr):
    """(O of this program's columns, lse in log2 units), one element for each column and row, rows first."""
    ROWS: gl.constexpr = traits.sent_rows
    PART: gl.constexpr = traits.block_dv // traits.cluster
    layout: gl.constexpr = gl.BlockedLayout([1, traits.cluster], [32, 1], [gl.num_warps(), 1], [1, 0])
    element = gl.arange(0, PART * ROWS, gl.SliceLayout(1, layout))[:, None]
    split = gl.arange(0, traits.cluster, gl.SliceLayout(0, layout))[None, :]
    part = received(box + (split * (PART * ROWS) + element) * 4)
    lse = received(box + (traits.block_dv * ROWS + split * ROWS + element % ROWS) * 4)
    base = gl.max(lse, 1)
    level = gl.where(base == float("-inf"), 0.0, base)
    weight = gl.exp2(lse - level[:, None])
    factor, lse_log2 = combined_factor(base, gl.sum(weight, 1))
    # O = sum of weight_i O_i
    return gl.sum(part * weight, 1) * factor, lse_log2


@gluon.jit
def write_columns(outputs, o, lse_log2, tile, split, strides, traits: gl.constexpr):
    """This program's columns to out; the cluster's first program also writes lse."""
    ROWS: gl.constexpr = traits.sent_rows
    PART: gl.constexpr = traits.block_dv // traits.cluster
    element = gl.arange(0, PART * ROWS, o.type.layout)
    row, column = tile.block * traits.block_m + element % ROWS, split * PART + element // ROWS
    token, head_q = row // traits.group, tile.head * traits.group + row % traits.group
    exists = token_exists(token, tile, traits) & (element % ROWS < traits.partial_rows)
    sink = lse_log2
    if traits.sinks:
        sink = gl.load(outputs.sinks + head_q, mask=exists, other=0.0)
    o, row_lse = add_sink(o[:, None], lse_log2, sink, traits)
    entry = tile.batch.to(gl.int64) * strides.batch
    offsets = entry + token.to(gl.int64) * strides.row + head_q.to(gl.int64) * strides.head
    mask = (exists & (column < traits.head_dim_v))[:, None]
    gl.store(outputs.out + (offsets + column)[:, None], o.to(outputs.out.dtype.element_ty), mask=mask)
    gl.store(outputs.lse + lse_offsets(tile, head_q, traits) + token, row_lse, mask=exists & (column == 0))


@gluon.jit
def cluster_reduce(outputs, o, lse_log2, box, tile, split, strides, traits: gl.constexpr):
    """Exchange the partial results of a tile, and write this program's columns of its rows."""
    cluster_wait()
    send_partial(o, lse_log2, box, split, traits)
    await_inbox(box, traits.inbox_bytes)
    o, lse_log2 = reduce_columns(box, traits)
    write_columns(outputs, o, lse_log2, tile, split, strides, traits)
