"""What a forward step does with its scores: hides keys, looks for maxima where it must, makes weights of them.

A careful step looks for maxima. Weights are taken against one that is a lift below the maximum so far and lags (with early weights, which come
before maxima, as it does by itself). Without a left bound only careful steps hide keys: the keys of others end before those of any row do.

Sources: online softmax (arXiv 1805.02867), algorithm 3; conditional rescaling: FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute).
"""

from ..device.dialect import gl, gluon
from ..device.key_ranges import PURE, own_keys
from ..device.lagging import THRESHOLD, lagging_max
from ..device.layouts import in_lanes, lanes_of, over_lanes, sum_in_lanes
from ..device.pack_gqa import queries_of
from ..device.softmax import tanh
from .optimistic_softmax import kept_in_range
from .traits import ROWS as _ROWS

ROWS: gl.constexpr = gl.constexpr(_ROWS)


@gluon.jit
def first_step(s, n_start, edges, numbers, lift: gl.constexpr, form: gl.constexpr):
    """`softmax_step` of a tile's first keys, before which there is no maximum and no sum: it is careful, and nothing is to be rescaled."""
    if form.softcap:
        s = tanh(s * numbers[1])
    if form.masks:
        s = hidden(s, n_start, edges, form)
    rescale = gl.full([ROWS, 4], 1.0, gl.float32, lanes_of(ROWS))
    row_max = gl.broadcast(in_lanes(gl.max(s, 1) * numbers[0] - lift), rescale)[0]
    p = gl.exp2(s * numbers[0] - over_lanes(finite(row_max), s))
    return p, rescale, row_max, sum_in_lanes(p)


@gluon.jit
def softmax_step(s, careful, row_max, row_sum, n_start, edges, numbers, lift: gl.constexpr, form: gl.constexpr):
    """(p, rescale, row_max, row_sum): device.softmax.online_step with all but p [ROWS, 4] in lanes, of which each keeps the sum of its own columns:
    they are gathered once, after the last step."""
    scale_log2 = numbers[0]
    if form.softcap:
        s = tanh(s * numbers[1])
    if form.mask.left:
        s = hidden(s, n_start, edges, form)
    rescale = gl.full([ROWS, 4], 1.0, gl.float32, lanes_of(ROWS))
    if careful:
        if form.masks and not form.mask.left:
            s = hidden(s, n_start, edges, form)
        new_max = gl.maximum(row_max, in_lanes(gl.max(s, 1) * scale_log2 - lift))
        if not form.early:
            new_max = lagging_max(row_max, new_max, THRESHOLD)
        rescale = gl.exp2(row_max - finite(new_max))
        row_max = new_max
    p = gl.exp2(s * scale_log2 - over_lanes(finite(row_max), s))
    part = sum_in_lanes(p)
    row_sum = row_sum * rescale + part
    if form.early:
        p, row_max, row_sum, rescale = kept_in_range(p, part, row_max, row_sum, rescale, lift, THRESHOLD)
    return p, rescale, row_max, row_sum


@gluon.jit
def is_careful(n_start, edges, again, form: gl.constexpr):
    """Whether a step after the first looks for maxima: always, but with early weights only until each row has met a key, and in a tile that
    is done again.

    A window's tile begins at the diagonal, where a row may see one key. One key's score is a poor maximum, which most rows then outgrow, so the
    block behind the diagonal is careful too."""
    careful: gl.constexpr = True
    if form.early:
        last = edges[2]
        if form.mask.prefix:
            last = gl.minimum(last, first_stop(edges, form))
        elif form.mask.right:
            last = gl.minimum(last, edges[1])
        behind: gl.constexpr = 1 if form.first_block_first else 2
        careful = (again > 0) | (n_start + behind * form.tuning.block_n >= last)
        if form.mask.documents:
            careful = careful | (edges[5] != PURE)  # a row may meet its first key anywhere
    return careful


@gluon.jit
def finite(row_max):
    """What scores are taken against: 0 in rows that have seen nothing, of whose scores -inf - -inf would be NaN."""
    return gl.where(row_max == float("-inf"), 0.0, row_max)


@gluon.jit
def hidden(s, n_start, edges, form: gl.constexpr):
    first_edge, stop_edge, key_stop = edges[0], edges[1], edges[2]
    layout: gl.constexpr = s.type.layout
    n_stop = n_start + form.tuning.block_n
    partial = n_stop > key_stop
    if form.mask.prefix:
        partial = partial | (n_stop > first_stop(edges, form))
    elif form.mask.right:
        partial = partial | (n_stop > stop_edge)
    if form.mask.left:
        partial = partial | (n_start < first_edge + (form.own_queries - 1))
    if partial:
        # a column's bits 1 and 2 are its thread's, the others its register's: apart, no register holds a column
        column = gl.arange(0, form.tuning.block_n, gl.SliceLayout(0, layout))
        by_thread, by_register = (column & 6)[None, :], (column & -7)[None, :]
        row = queries_of(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), form)
        stop = row * 0 + (key_stop - n_start)
        if form.mask.prefix:
            stop = gl.minimum(stop, gl.maximum(row + (stop_edge - n_start), edges[3] - n_start))
            if form.mask.right:
                stop = gl.minimum(stop, row + (stop_edge + edges[4] - n_start))
        elif form.mask.right:
            stop = gl.minimum(stop, row + (stop_edge - n_start))
        s = gl.where(stop[:, None] - by_thread > by_register, s, float("-inf"))
        if form.mask.left:
            s = gl.where((row + (first_edge - n_start))[:, None] - by_thread <= by_register, s, float("-inf"))
    if form.mask.documents:
        s = own_keys(s, n_start, edges[5], edges[6], key_stop)
    return s


@gluon.jit
def first_stop(edges, form: gl.constexpr):
    """Where the keys of the first row end, by the diagonal and the prefix."""
    stop = gl.maximum(edges[1], edges[3])
    if form.mask.right:
        stop = gl.minimum(stop, edges[1] + edges[4])
    return stop
