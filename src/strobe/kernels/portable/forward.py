"""Forward attention in Triton, one program for each tile of queries.

    locate the tile's sequence, head and rows (dense: by division; packed: by a search over cu_seqlens)
    for each run of one document in the tile (the whole tile where there are no documents)
        for each tile of keys that some row of the run sees
            s = q k^T; hide what the mask hides; online softmax; o = o * rescale + p v
        write out and lse

Sources: FlashAttention-2 (arXiv 2307.08691), algorithm 1; online softmax (arXiv 1805.02867), algorithm 3.
"""

import triton
import triton.language as tl

from ..device.mask import hide, row_interval
from ..device.seqlen import (
    LONG_K,
    LONG_Q,
    OFFSETS_K,
    OFFSETS_Q,
    OUTSIDE,
    breaks_promise,
    find_sequence,
    guard_offsets,
    key_limit,
    keys_of,
    load_rows,
    run_at,
    span_of,
    store_rows,
)
from ..device.softmax import in_log2, online_step, tanh


@triton.jit
def locate(pid, cu_seqlens_q, cu_seqlens_k, sizes, form: tl.constexpr):
    """(batch or sequence, head, m_block, (q start, q length), (k start, k length)) of a program.

    Tiles of one head follow each other, the last first: under a causal mask those see the most keys.
    """
    heads, total_q, total_k, n_sequences, n_tiles = sizes
    tile = n_tiles - 1 - pid % n_tiles
    index = pid // n_tiles
    if form.packed:
        sequence, m_block = find_sequence(cu_seqlens_q, tile, n_sequences, total_q, form.tuning.block_m)
        q_span = span_of(cu_seqlens_q, sequence, n_sequences, total_q)
        return sequence, index, m_block, q_span, keys_of(cu_seqlens_k, sequence, n_sequences, total_k, OUTSIDE)
    return index // heads, index % heads, tile, (pid * 0, total_q), (pid * 0, total_k)


@triton.jit
def at(tensor, strides, batch, start, head):
    """Pointer to row `start` of one head; strides are (batch, row, head) in elements."""
    return tensor + batch.to(tl.int64) * strides[0] + start.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]


@triton.jit
def score(q, k, softcap, form: tl.constexpr):
    """Raw scores [M, N]: q k^T, or tanh(scale / c * q k^T) where there is a softcap c (its factor c is in scale_log2)."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=form.accumulator)
    if form.softcap:
        s = tanh(s * softcap)
    return s


@triton.jit
def number(parts, form: tl.constexpr):
    """A scalar argument: float arguments arrive as float32, so a float64 comes as three that sum to it."""
    value = tl.full([], 0.0, form.accumulator) + parts[0]
    if form.accumulator == tl.float64:
        value = value + parts[1] + parts[2]
    return value


@triton.jit
def source(base, rows, width: tl.constexpr, stride, block: tl.constexpr, block_width: tl.constexpr, form: tl.constexpr):
    """What tiles are loaded from: a pointer, or where the tuning says so a TMA descriptor, which gives 0 beyond `rows` and `width`."""
    if form.tuning.tma:
        if form.packed:
            rows = tl.maximum(rows, 0)  # of keys OUTSIDE
        stream = tl.make_tensor_descriptor(base, [rows, width], [stride.to(tl.int64), 1], [block, block_width])
    else:
        stream = base
    return stream


@triton.jit
def load_tile(stream, start, offsets, columns, stride, row_ok, width: tl.constexpr, form: tl.constexpr):
    """Rows `offsets` = start + 0..N-1 of a source, 0 where row_ok is False."""
    if form.tuning.tma:
        tile = stream.load([start, 0])
    else:
        tile = load_rows(stream, offsets, columns, stride, row_ok, width)
    return tile


@triton.jit
def load_keys(k, ids_k, n_start, columns, d, stride, key_stop, document, form: tl.constexpr):
    """(k tile, which of its keys are the document's own)."""
    n_offsets = n_start + columns
    key_ok = n_offsets < key_stop
    if form.mask.documents:
        key_ok = key_ok & (tl.load(ids_k + n_offsets, mask=key_ok, other=-1) == document)
    return load_tile(k, n_start, n_offsets, d, stride, key_ok, form.head_dim, form), key_ok


@triton.jit
def attend(q, kv, kv_rows, keys, interval, numbers, state, form: tl.constexpr):
    """The online softmax over the run's keys: (o, row_max, row_sum).

    kv (k, v, ids_k); kv_rows their row strides; keys (n_first, n_stop, key_stop, document); interval (first, stop) of each row,
    and of all rows together; numbers (scale_log2, softcap).
    """
    BLOCK_N: tl.constexpr = form.tuning.block_n
    BLOCK_D: tl.constexpr = form.block_d
    BLOCK_DV: tl.constexpr = form.block_dv
    k, v, ids_k = kv
    n_first, n_stop, key_stop, document = keys
    first, stop, full_first, full_stop = interval
    scale_log2, softcap = numbers
    o, row_max, row_sum = state
    columns = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    for n_start in tl.range(n_first, n_stop, BLOCK_N, num_stages=form.tuning.stages):
        k_tile, key_ok = load_keys(k, ids_k, n_start, columns, d, kv_rows[0], key_stop, document, form)
        s = score(q, k_tile, softcap, form)
        if form.mask.documents:
            s = tl.where(key_ok[None, :], s, float("-inf"))
        if (n_start < full_first) | (n_start + BLOCK_N > full_stop):
            s = hide(s, columns, first, stop, n_start, form.mask.left)
        p, rescale, row_max, row_sum = online_step(s, row_max, row_sum, scale_log2)
        values = load_tile(v, n_start, n_start + columns, dv, kv_rows[1], key_ok, form.head_dim_v, form)
        o = tl.dot(p.to(values.dtype), values, o * rescale[:, None], input_precision="ieee", out_dtype=form.accumulator)
    return o, row_max, row_sum


@triton.jit
def finish(o, row_max, row_sum, empty, sink, form: tl.constexpr):
    """(out, lse) after a row's last key. `empty` rows see no key: the mask says so, not a maximum of -inf."""
    top = tl.where(row_max == float("-inf"), 0.0, row_max)
    lse_empty = float("-inf")
    if form.sinks:
        sink_log2 = in_log2(sink)
        last = tl.maximum(row_max, sink_log2)
        last = tl.where(last == float("-inf"), 0.0, last)
        shrink = tl.exp2(row_max - last)
        row_sum = row_sum * shrink + tl.exp2(sink_log2 - last)
        o = o * shrink[:, None]
        top = last
        lse_empty = sink
    out = tl.where(empty[:, None], 0.0, o / row_sum[:, None])
    lse = top * 0.6931471805599453 + tl.log(row_sum)
    if form.sinks:
        lse = tl.where(lse < sink, sink, lse)
    return out, tl.where(empty, lse_empty, lse)


@triton.jit
def run_of_rows(tensors, mask_tensors, row_strides, rows, keys, numbers, limits, form: tl.constexpr):
    """Attention for rows [m_start, m_stop) of one document over keys [k_first, k_stop); tensors point at the sequence's first rows.

    rows (m_start, m_stop, S_q); keys (k_first, k_stop, key_stop, S_k, document); limits (left, right, max_seqlen_q, max_seqlen_k, prefix).
    """
    BLOCK_M: tl.constexpr = form.tuning.block_m
    BLOCK_N: tl.constexpr = form.tuning.block_n
    BLOCK_D: tl.constexpr = form.block_d
    BLOCK_DV: tl.constexpr = form.block_dv
    q, k, v, out, lse = tensors
    ids_k, sink = mask_tensors
    q_row, k_row, v_row, out_row = row_strides
    m_start, m_stop, seqlen_q = rows
    k_first, k_stop, key_stop, seqlen_k, document = keys
    scale_log2, softcap = numbers
    left, right, prefix = limits[0], limits[1], limits[4]
    m_offsets = m_start + tl.arange(0, BLOCK_M)
    row_ok = m_offsets < m_stop
    bounds = (seqlen_k, left, right)
    first, stop = row_interval(m_offsets, seqlen_q, key_stop, bounds, prefix, form)
    n_first, full_stop = row_interval(m_start, seqlen_q, key_stop, bounds, prefix, form)
    full_first, n_stop = row_interval(m_stop - 1, seqlen_q, key_stop, bounds, prefix, form)
    n_first = tl.maximum(n_first, k_first) // BLOCK_N * BLOCK_N
    n_stop = tl.minimum(n_stop, k_stop)
    q_tile = load_rows(q, m_offsets, tl.arange(0, BLOCK_D), q_row, row_ok, form.head_dim)
    if form.sign != 1:
        q_tile = (q_tile * form.sign).to(q_tile.dtype)
    row_max = tl.full([BLOCK_M], float("-inf"), form.accumulator)
    row_sum = tl.zeros([BLOCK_M], form.accumulator)
    o = tl.zeros([BLOCK_M, BLOCK_DV], form.accumulator)
    where = (n_first, n_stop, tl.minimum(key_stop, k_stop), document)
    k = source(k, key_stop, form.head_dim, k_row, BLOCK_N, BLOCK_D, form)
    v = source(v, key_stop, form.head_dim_v, v_row, BLOCK_N, BLOCK_DV, form)
    o, row_max, row_sum = attend(
        q_tile, (k, v, ids_k), (k_row, v_row), where, (first, stop, full_first, full_stop), numbers, (o, row_max, row_sum), form
    )
    empty = first >= stop
    if form.mask.documents:
        empty = row_sum == 0  # scattered documents may leave a gap anywhere; then only the sum knows
    o, row_lse = finish(o, row_max, row_sum, empty, sink, form)
    if form.packed:
        bad = breaks_promise(m_offsets, seqlen_k, limits)
        o = tl.where(bad[:, None], float("nan"), o)
        row_lse = tl.where(bad, float("nan"), row_lse)
    store_rows(out, o, m_offsets, tl.arange(0, BLOCK_DV), out_row, row_ok, form.head_dim_v)
    tl.store(lse + m_offsets, row_lse, mask=row_ok)


@triton.jit
def forward_kernel(tensors, mask_tensors, faults, strides, sizes, limits, numbers, form: tl.constexpr):
    """tensors (q, k, v, out, lse, sinks); mask_tensors (cu_seqlens_q, cu_seqlens_k, prefix, key_lengths, ids_k, ids_q, spans_q);
    strides (batch, row, head) of q, k, v, out; sizes (heads_q, S_q or T_q, S_k or T_k, sequences, tiles);
    limits (left, right, max_seqlen_q, max_seqlen_k); numbers (scale_log2, softcap), each as `number` takes it."""
    BLOCK_M: tl.constexpr = form.tuning.block_m
    numbers = (number(numbers[0], form), number(numbers[1], form))
    q, k, v, out, lse, sinks = tensors
    cu_seqlens_q, cu_seqlens_k, prefixes, key_lengths, ids_k, ids_q, spans_q = mask_tensors
    heads, total_q, total_k, n_sequences, n_tiles = sizes
    left, right, max_seqlen_q, max_seqlen_k = limits
    pid = tl.program_id(0)
    if form.packed:
        if pid == 0:
            guard_offsets(cu_seqlens_q, n_sequences, total_q, max_seqlen_q, tl.arange(0, 128), faults, OFFSETS_Q, LONG_Q)
            guard_offsets(cu_seqlens_k, n_sequences, total_k, max_seqlen_k, tl.arange(0, 128), faults, OFFSETS_K, LONG_K)
    batch, head, m_block, q_span, k_span = locate(pid, cu_seqlens_q, cu_seqlens_k, sizes, form)
    q_start, seqlen_q = q_span
    k_start, seqlen_k = k_span
    key_stop = key_limit(key_lengths, batch, seqlen_k, faults, form.mask.key_lengths)
    prefix = tl.load(prefixes + batch) if form.mask.prefix else 0
    sink = tl.load(sinks + head).to(form.accumulator) if form.sinks else 0.0
    outer = batch * 0 if form.packed else batch
    kv_head = head // form.group
    places = (
        at(q, strides[0], outer, q_start, head),
        at(k, strides[1], outer, k_start, kv_head),
        at(v, strides[2], outer, k_start, kv_head),
        at(out, strides[3], outer, q_start, head),
        lse + (outer.to(tl.int64) * heads + head) * total_q + q_start,
    )
    row_strides = (strides[0][1], strides[1][1], strides[2][1], strides[3][1])
    m_start = m_block * BLOCK_M
    m_stop = tl.minimum(m_start + BLOCK_M, seqlen_q)
    more = (left, right, max_seqlen_q, max_seqlen_k, prefix)
    if form.mask.documents:
        ids = ids_k + batch.to(tl.int64) * seqlen_k
        before = batch.to(tl.int64) * seqlen_q
        while m_start < m_stop:
            run_end, k_first, k_stop = run_at(spans_q + 3 * before, m_start, seqlen_q, seqlen_k)
            run_stop = tl.minimum(run_end, m_stop)
            keys = (k_first, k_stop, key_stop, seqlen_k, tl.load(ids_q + before + m_start))
            run_of_rows(places, (ids, sink), row_strides, (m_start, run_stop, seqlen_q), keys, numbers, more, form)
            m_start = run_stop
    elif m_start < m_stop:
        keys = (0, key_stop, key_stop, seqlen_k, 0)
        run_of_rows(places, (ids_k, sink), row_strides, (m_start, m_stop, seqlen_q), keys, numbers, more, form)
