"""Backward attention in Triton: three kernels, no atomics, so the gradients have the same bits each time.

    delta = rowsum(dout * out) - dlse                                      one program for each tile of rows
    dk, dv: for each tile of keys, over the heads of its group and the tiles of queries that see it
            p = exp(s - lse); dv += p^T do; ds = p * (do v^T - delta); dk += ds^T q
    dq:     for each tile of queries, over the tiles of keys it sees       dq += ds k

s is computed twice, 7 products instead of 5; in exchange nothing is added in memory, and with grouped heads dk and dv are
summed in registers. Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2 and section 3.2.
"""

import triton
import triton.language as tl

from ..device.mask import first_row, row_interval, stop_row
from ..device.seqlen import find_sequence, key_limit, keys_of, load_rows, run_at, span_of, store_rows
from .forward import at, load_keys, load_tile, locate, number, score, source


@triton.jit
def delta_kernel(tensors, strides, sizes, form: tl.constexpr, BLOCK_M: tl.constexpr):
    """tensors (dout, out, dlse, delta); strides (batch, row, head) of dout and out; sizes (heads, rows a batch entry)."""
    BLOCK_DV: tl.constexpr = form.block_dv
    dout, out, dlse, delta = tensors
    heads, rows = sizes
    tiles = tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    index = pid // tiles
    m_offsets = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = m_offsets < rows
    columns = tl.arange(0, BLOCK_DV)
    do_base = at(dout, strides[0], index // heads, pid * 0, index % heads)
    o_base = at(out, strides[1], index // heads, pid * 0, index % heads)
    do = load_rows(do_base, m_offsets, columns, strides[0][1], row_ok, form.head_dim_v).to(form.accumulator)
    o = load_rows(o_base, m_offsets, columns, strides[1][1], row_ok, form.head_dim_v).to(form.accumulator)
    total = tl.sum(do * o, 1)
    place = index.to(tl.int64) * rows + m_offsets
    if dlse is not None:
        total -= tl.load(dlse + place, mask=row_ok, other=0.0)
    tl.store(delta + place, total, mask=row_ok)


@triton.jit
def load_per_row(lse, delta, m_offsets, row_ok):
    """(lse in log2 units, delta) of rows; rows that see no key, or are no rows, get lse +inf, so that their p is 0."""
    row_lse = tl.load(lse + m_offsets, mask=row_ok, other=float("-inf")) * 1.4426950408889634
    return tl.where(row_lse == float("-inf"), float("inf"), row_lse), tl.load(delta + m_offsets, mask=row_ok, other=0.0)


@triton.jit
def score_gradient(p, dp, delta, s, form: tl.constexpr):
    """ds = p * (dp - delta), through the softcap where there is one: its slope is 1 - tanh^2, and tanh is the raw score."""
    ds = p * (dp - delta)
    if form.softcap:
        ds = ds * (1.0 - s * s)
    return ds


@triton.jit
def keys_gradient(q, do, kv, per_row, row_strides, rows, keys, numbers, state, form: tl.constexpr):
    """dk and dv of one tile of keys from the queries of one head; all scores stand transposed, [N, M], so that p^T and ds^T
    enter their products from registers.

    kv (k tile, v tile); per_row (lse, delta, ids_q) pointers; rows (m_first, m_stop, S_q, document, full_first, full_stop);
    keys (n_start, key_stop, S_k, left, right, prefix).
    """
    BLOCK_M: tl.constexpr = form.tuning.block_m
    BLOCK_N: tl.constexpr = form.tuning.block_n
    BLOCK_D: tl.constexpr = form.block_d
    BLOCK_DV: tl.constexpr = form.block_dv
    k, v = kv
    lse, delta, ids_q = per_row
    m_first, m_stop, seqlen_q, document = rows
    n_start, n_last, key_stop, seqlen_k, left, right, prefix = keys
    scale_log2, softcap = numbers
    dk, dv = state
    columns = tl.arange(0, BLOCK_N)
    for m_start in tl.range(m_first, m_stop, BLOCK_M, num_stages=form.tuning.stages):
        m_offsets = m_start + tl.arange(0, BLOCK_M)
        row_ok = m_offsets < m_stop
        if form.mask.documents:
            row_ok = row_ok & (tl.load(ids_q + m_offsets, mask=row_ok, other=-1) == document)
        q_tile = load_tile(q, m_start, m_offsets, tl.arange(0, BLOCK_D), row_strides[0], row_ok, form.head_dim, form)
        if form.sign != 1:
            q_tile = (q_tile * form.sign).to(q_tile.dtype)
        row_lse, row_delta = load_per_row(lse, delta, m_offsets, row_ok)
        s = score(k, q_tile, softcap, form)
        p = tl.exp2(s * scale_log2 - row_lse[None, :])
        first, _ = row_interval(tl.minimum(m_start + BLOCK_M, m_stop) - 1, seqlen_q, key_stop, (seqlen_k, left, right), prefix, form)
        _, stop = row_interval(m_start, seqlen_q, key_stop, (seqlen_k, left, right), prefix, form)
        if (first > n_start) | (stop < n_last):
            firsts, stops = row_interval(m_offsets, seqlen_q, key_stop, (seqlen_k, left, right), prefix, form)
            p = tl.where(columns[:, None] < (stops - n_start)[None, :], p, 0.0)
            if form.mask.left:
                p = tl.where(columns[:, None] >= (firsts - n_start)[None, :], p, 0.0)
        do_tile = load_tile(do, m_start, m_offsets, tl.arange(0, BLOCK_DV), row_strides[1], row_ok, form.head_dim_v, form).to(v.dtype)
        dv = tl.dot(p.to(v.dtype), do_tile, dv, input_precision="ieee", out_dtype=form.accumulator)
        dp = tl.dot(v, tl.trans(do_tile), input_precision="ieee", out_dtype=form.accumulator)
        ds = score_gradient(p, dp, row_delta[None, :], s, form)
        dk = tl.dot(ds.to(k.dtype), q_tile, dk, input_precision="ieee", out_dtype=form.accumulator)
    return dk, dv


@triton.jit
def locate_keys(pid, cu_seqlens_q, cu_seqlens_k, sizes, form: tl.constexpr):
    """`locate` for a tile of keys: (batch or sequence, key head, n_block, (q start, q length), (k start, k length)).

    The first tiles come first: under a causal mask the most rows see those.
    """
    heads_kv, total_q, total_k, n_sequences, n_tiles = sizes
    tile = pid % n_tiles
    index = pid // n_tiles
    if form.packed:
        sequence, n_block = find_sequence(cu_seqlens_k, tile, n_sequences, total_k, form.tuning.block_n)
        k_span = span_of(cu_seqlens_k, sequence, n_sequences, total_k)
        return sequence, index, n_block, keys_of(cu_seqlens_q, sequence, n_sequences, total_q), k_span
    return index // heads_kv, index % heads_kv, tile, (pid * 0, total_q), (pid * 0, total_k)


@triton.jit
def run_of_keys(tensors, per_row, strides, keys, rows, place, numbers, limits, form: tl.constexpr):
    """dk and dv of keys [n_start, n_stop) of one document from rows [q_first, q_stop), summed over the heads of the group.

    tensors (q, k, v, dout, dk, dv) at the start of the sequence; per_row (lse, delta, ids_q) of the batch entry;
    keys (n_start, n_stop, key_stop, S_k, document); rows (q_first, q_stop, S_q); place (first head, rows from one head to the next).
    """
    BLOCK_N: tl.constexpr = form.tuning.block_n
    BLOCK_M: tl.constexpr = form.tuning.block_m
    BLOCK_D: tl.constexpr = form.block_d
    BLOCK_DV: tl.constexpr = form.block_dv
    q, k, v, dout, dk_out, dv_out = tensors
    lse, delta, ids_q = per_row
    n_start, n_stop, key_stop, seqlen_k, document = keys
    q_first, q_stop, seqlen_q = rows
    head, next_head = place
    scale_log2, softcap, factor = numbers
    left, right, prefix = limits
    n_offsets = n_start + tl.arange(0, BLOCK_N)
    key_ok = n_offsets < tl.minimum(n_stop, key_stop)
    k_tile = load_rows(k, n_offsets, tl.arange(0, BLOCK_D), strides[1][1], key_ok, form.head_dim)
    v_tile = load_rows(v, n_offsets, tl.arange(0, BLOCK_DV), strides[2][1], key_ok, form.head_dim_v)
    bounds = (seqlen_k, left, right)
    n_last = tl.minimum(n_stop, key_stop)
    m_first = tl.maximum(first_row(n_start, seqlen_q, bounds, prefix, form), q_first) // BLOCK_M * BLOCK_M
    m_stop = tl.minimum(stop_row(n_last - 1, seqlen_q, bounds, form), q_stop)
    m_stop = tl.where(n_start < n_last, m_stop, m_first)
    dk = tl.zeros([BLOCK_N, BLOCK_D], form.accumulator)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], form.accumulator)
    for member in tl.range(0, form.group, num_stages=1):  # making a descriptor cannot be pipelined
        own = head + member
        pointers = (lse + own.to(tl.int64) * next_head, delta + own.to(tl.int64) * next_head, ids_q)
        q_own = source(q + own.to(tl.int64) * strides[0][2], seqlen_q, form.head_dim, strides[0][1], BLOCK_M, BLOCK_D, form)
        do_own = source(dout + own.to(tl.int64) * strides[3][2], seqlen_q, form.head_dim_v, strides[3][1], BLOCK_M, BLOCK_DV, form)
        where = (n_start, tl.minimum(n_start + BLOCK_N, seqlen_k), key_stop, seqlen_k, left, right, prefix)
        dk, dv = keys_gradient(
            q_own, do_own, (k_tile, v_tile), pointers, (strides[0][1], strides[3][1]), (m_first, m_stop, seqlen_q, document), where,
            (scale_log2, softcap), (dk, dv), form,
        )  # fmt: skip
    n_inside = n_offsets < n_stop
    store_rows(dk_out, dk * factor, n_offsets, tl.arange(0, BLOCK_D), strides[4][1], n_inside, form.head_dim)
    store_rows(dv_out, dv, n_offsets, tl.arange(0, BLOCK_DV), strides[5][1], n_inside, form.head_dim_v)


@triton.jit
def keys_kernel(tensors, mask_tensors, faults, strides, sizes, limits, numbers, form: tl.constexpr):
    """dk, dv. tensors (q, k, v, dout, lse, delta, dk, dv); mask_tensors as in forward, with spans_k; strides (batch, row, head) of
    q, k, v, dout, dk, dv; sizes (heads_q, S_q or T_q, S_k or T_k, sequences, tiles of keys); numbers (scale_log2, softcap, factor)."""
    BLOCK_N: tl.constexpr = form.tuning.block_n
    numbers = (number(numbers[0], form), number(numbers[1], form), number(numbers[2], form))
    q, k, v, dout, lse, delta, dk, dv = tensors
    cu_seqlens_q, cu_seqlens_k, prefixes, key_lengths, ids_k, ids_q, spans_k = mask_tensors
    heads, total_q, total_k, n_sequences, n_tiles = sizes
    left, right = limits
    pid = tl.program_id(0)
    sizes_kv = (heads // form.group, total_q, total_k, n_sequences, n_tiles)
    batch, kv_head, n_block, q_span, k_span = locate_keys(pid, cu_seqlens_q, cu_seqlens_k, sizes_kv, form)
    q_start, seqlen_q = q_span
    k_start, seqlen_k = k_span
    key_stop = key_limit(key_lengths, batch, seqlen_k, faults, form.mask.key_lengths)
    prefix = tl.load(prefixes + batch) if form.mask.prefix else 0
    outer = batch * 0 if form.packed else batch
    places = (
        at(q, strides[0], outer, q_start, batch * 0),
        at(k, strides[1], outer, k_start, kv_head),
        at(v, strides[2], outer, k_start, kv_head),
        at(dout, strides[3], outer, q_start, batch * 0),
        at(dk, strides[4], outer, k_start, kv_head),
        at(dv, strides[5], outer, k_start, kv_head),
    )
    rows_of_entry = outer.to(tl.int64) * heads * total_q + q_start
    if form.mask.documents:
        ids_q += batch.to(tl.int64) * seqlen_q
    per_row = (lse + rows_of_entry, delta + rows_of_entry, ids_q)
    place = (kv_head * form.group, total_q)
    n_start = n_block * BLOCK_N
    n_stop = tl.minimum(n_start + BLOCK_N, seqlen_k)
    more = (left, right, prefix)
    if form.mask.documents:
        before = batch.to(tl.int64) * seqlen_k
        while n_start < n_stop:
            run_end, m_first, m_stop = run_at(spans_k + 3 * before, n_start, seqlen_k, seqlen_q)
            run_stop = tl.minimum(run_end, n_stop)
            keys = (n_start, run_stop, key_stop, seqlen_k, tl.load(ids_k + before + n_start))
            run_of_keys(places, per_row, strides, keys, (m_first, m_stop, seqlen_q), place, numbers, more, form)
            n_start = run_stop
    elif n_start < n_stop:
        keys = (n_start, n_stop, key_stop, seqlen_k, 0)
        run_of_keys(places, per_row, strides, keys, (0, seqlen_q, seqlen_q), place, numbers, more, form)


@triton.jit
def queries_gradient(q, do, row_lse, row_delta, kv, row_strides, keys, interval, numbers, form: tl.constexpr):
    """dq of one tile of queries: kv (k, v, ids_k) pointers; keys (n_first, n_stop, key_stop, document); interval as in forward."""
    BLOCK_M: tl.constexpr = form.tuning.block_m
    BLOCK_N: tl.constexpr = form.tuning.block_n
    BLOCK_D: tl.constexpr = form.block_d
    BLOCK_DV: tl.constexpr = form.block_dv
    k, v, ids_k = kv
    n_first, n_stop, key_stop, document = keys
    first, stop, full_first, full_stop = interval
    scale_log2, softcap = numbers
    columns = tl.arange(0, BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], form.accumulator)
    for n_start in tl.range(n_first, n_stop, BLOCK_N, num_stages=form.tuning.stages):
        n_offsets = n_start + columns
        k_tile, key_ok = load_keys(k, ids_k, n_start, columns, tl.arange(0, BLOCK_D), row_strides[0], key_stop, document, form)
        s = score(q, k_tile, softcap, form)
        p = tl.exp2(s * scale_log2 - row_lse[:, None])
        if form.mask.documents:
            p = tl.where(key_ok[None, :], p, 0.0)
        if (n_start < full_first) | (n_start + BLOCK_N > full_stop):
            p = tl.where(columns[None, :] < (stop - n_start)[:, None], p, 0.0)
            if form.mask.left:
                p = tl.where(columns[None, :] >= (first - n_start)[:, None], p, 0.0)
        v_tile = load_tile(v, n_start, n_offsets, tl.arange(0, BLOCK_DV), row_strides[1], key_ok, form.head_dim_v, form)
        dp = tl.dot(do, tl.trans(v_tile), input_precision="ieee", out_dtype=form.accumulator)
        ds = score_gradient(p, dp, row_delta[:, None], s, form)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee", out_dtype=form.accumulator)
    return dq


@triton.jit
def run_of_queries(tensors, per_row, strides, rows, keys, numbers, limits, form: tl.constexpr):
    """dq of rows [m_start, m_stop) of one document over keys [k_first, k_stop); tensors (q, k, v, dout, dq) at the sequence's first rows."""
    BLOCK_M: tl.constexpr = form.tuning.block_m
    BLOCK_N: tl.constexpr = form.tuning.block_n
    BLOCK_D: tl.constexpr = form.block_d
    BLOCK_DV: tl.constexpr = form.block_dv
    q, k, v, dout, dq_out = tensors
    lse, delta, ids_k = per_row
    m_start, m_stop, seqlen_q = rows
    k_first, k_stop, key_stop, seqlen_k, document = keys
    scale_log2, softcap, factor = numbers
    left, right, prefix = limits
    m_offsets = m_start + tl.arange(0, BLOCK_M)
    row_ok = m_offsets < m_stop
    bounds = (seqlen_k, left, right)
    first, stop = row_interval(m_offsets, seqlen_q, key_stop, bounds, prefix, form)
    n_first, full_stop = row_interval(m_start, seqlen_q, key_stop, bounds, prefix, form)
    full_first, n_stop = row_interval(m_stop - 1, seqlen_q, key_stop, bounds, prefix, form)
    n_first = tl.maximum(n_first, k_first) // BLOCK_N * BLOCK_N
    q_tile = load_rows(q, m_offsets, tl.arange(0, BLOCK_D), strides[0][1], row_ok, form.head_dim)
    if form.sign != 1:
        q_tile = (q_tile * form.sign).to(q_tile.dtype)
    do_tile = load_rows(dout, m_offsets, tl.arange(0, BLOCK_DV), strides[3][1], row_ok, form.head_dim_v).to(q_tile.dtype)
    row_lse, row_delta = load_per_row(lse, delta, m_offsets, row_ok)
    where = (n_first, tl.minimum(n_stop, k_stop), tl.minimum(key_stop, k_stop), document)
    k = source(k, key_stop, form.head_dim, strides[1][1], BLOCK_N, BLOCK_D, form)
    v = source(v, key_stop, form.head_dim_v, strides[2][1], BLOCK_N, BLOCK_DV, form)
    dq = queries_gradient(
        q_tile, do_tile, row_lse, row_delta, (k, v, ids_k), (strides[1][1], strides[2][1]), where,
        (first, stop, full_first, full_stop), (scale_log2, softcap), form,
    )  # fmt: skip
    store_rows(dq_out, dq * (factor * form.sign), m_offsets, tl.arange(0, BLOCK_D), strides[4][1], row_ok, form.head_dim)


@triton.jit
def queries_kernel(tensors, mask_tensors, faults, strides, sizes, limits, numbers, form: tl.constexpr):
    """dq. tensors (q, k, v, dout, lse, delta, dq); mask_tensors as in forward; strides of q, k, v, dout, dq; sizes as in forward."""
    BLOCK_M: tl.constexpr = form.tuning.block_m
    numbers = (number(numbers[0], form), number(numbers[1], form), number(numbers[2], form))
    q, k, v, dout, lse, delta, dq = tensors
    cu_seqlens_q, cu_seqlens_k, prefixes, key_lengths, ids_k, ids_q, spans_q = mask_tensors
    heads, total_q, total_k, n_sequences, n_tiles = sizes
    left, right = limits
    batch, head, m_block, q_span, k_span = locate(tl.program_id(0), cu_seqlens_q, cu_seqlens_k, sizes, form)
    q_start, seqlen_q = q_span
    k_start, seqlen_k = k_span
    key_stop = key_limit(key_lengths, batch, seqlen_k, faults, form.mask.key_lengths)
    prefix = tl.load(prefixes + batch) if form.mask.prefix else 0
    outer = batch * 0 if form.packed else batch
    kv_head = head // form.group
    places = (
        at(q, strides[0], outer, q_start, head),
        at(k, strides[1], outer, k_start, kv_head),
        at(v, strides[2], outer, k_start, kv_head),
        at(dout, strides[3], outer, q_start, head),
        at(dq, strides[4], outer, q_start, head),
    )
    row_place = (outer.to(tl.int64) * heads + head) * total_q + q_start
    if form.mask.documents:
        ids_k += batch.to(tl.int64) * seqlen_k
    per_row = (lse + row_place, delta + row_place, ids_k)
    m_start = m_block * BLOCK_M
    m_stop = tl.minimum(m_start + BLOCK_M, seqlen_q)
    more = (left, right, prefix)
    if form.mask.documents:
        before = batch.to(tl.int64) * seqlen_q
        while m_start < m_stop:
            run_end, k_first, k_stop = run_at(spans_q + 3 * before, m_start, seqlen_q, seqlen_k)
            run_stop = tl.minimum(run_end, m_stop)
            keys = (k_first, k_stop, key_stop, seqlen_k, tl.load(ids_q + before + m_start))
            run_of_queries(places, per_row, strides, (m_start, run_stop, seqlen_q), keys, numbers, more, form)
            m_start = run_stop
    elif m_start < m_stop:
        keys = (0, key_stop, key_stop, seqlen_k, 0)
        run_of_queries(places, per_row, strides, (m_start, m_stop, seqlen_q), keys, numbers, more, form)
