"""Backward attention in Triton: three kernels, no atomics, so the gradients have the same bits each time.

    delta_kernel    delta = rowsum(dO * O) - dLSE                             a program for each tile of rows
    keys_kernel     dV = P^T dO, dK = dS^T Q                                  a program for each tile of keys
        for each head of the key head's group, for each tile of queries that sees one of the keys:
            S^T = K Q^T   P^T = exp(S^T - LSE)   dV += P^T dO   dP^T = V dO^T   dS^T = P^T (dP^T - delta)   dK += dS^T Q
    queries_kernel  dQ = dS K                                                 a program for each tile of queries
        for each tile of keys that one of the queries sees:
            S = Q K^T     P = exp(S - LSE)       dP = dO V^T    dS = P (dP - delta)    dQ += dS K

S and dP are computed twice: 7 products instead of 5. In exchange nothing is added in memory, and with grouped heads dK
and dV are summed in registers. Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2 and section 3.2.
"""

import triton
import triton.language as tl

from ..device.dropout import dropout_stream
from ..device.mask import apply_mask, first_row, stop_row
from ..device.seqlen import find_sequence, first_key, keys_of, load_rows, run_at, span_of, store_rows
from .arguments import DkDvTensors, DqTensors, KeyGradients, KeyTile, RowStatistics, RowTile, SeqlenInfo, WorkTile
from .forward import (
    blocks_of_rows,
    document_rows,
    load_keys,
    load_queries,
    load_tile,
    qk_product,
    query_tile,
    row_of,
    softmax_scalars,
    tile_source,
    visible_keys,
    with_key_limits,
    with_sign,
)
from .score_mods import ScoreMods, drop_weights, gradient_of_raw, list_of_tile, modify_scores, sequence_index

# ---------------------------------------------------------------- delta


@triton.jit
def delta_kernel(tensors, strides, shape, traits: tl.constexpr, BLOCK_M: tl.constexpr):
    """tensors: DeltaTensors; strides: DeltaStrides; shape: (heads, rows of a batch entry)."""
    heads, num_rows = shape
    num_blocks = tl.cdiv(num_rows, BLOCK_M)
    pid = tl.program_id(0)
    index = pid // num_blocks
    m_offsets = pid % num_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = m_offsets < num_rows
    columns = tl.arange(0, traits.block_dv)
    dout = row_of(tensors.dout, strides.dout, index // heads, pid * 0, index % heads)
    out = row_of(tensors.out, strides.out, index // heads, pid * 0, index % heads)
    do = load_rows(dout, m_offsets, columns, strides.dout.row, row_ok, traits.head_dim_v).to(traits.accumulator)
    o = load_rows(out, m_offsets, columns, strides.out.row, row_ok, traits.head_dim_v).to(traits.accumulator)
    # delta = rowsum(dO * O) - dLSE; dLSE of a row without keys may be NaN
    delta = tl.sum(do * o, 1)
    rows = index.to(tl.int64) * num_rows + m_offsets
    if tensors.dlse is not None:
        lse = tl.load(tensors.lse + rows, mask=row_ok, other=0.0)
        dlse = tl.load(tensors.dlse + rows, mask=row_ok, other=0.0)
        delta -= tl.where(lse == float("-inf"), 0.0, dlse)
    tl.store(tensors.delta + rows, delta, mask=row_ok)


# ---------------------------------------------------------------- what both kernels of gradients share


@triton.jit
def load_per_row(lse, delta, m_offsets, row_ok):
    """RowStatistics."""
    row_lse = tl.load(lse + m_offsets, mask=row_ok, other=float("-inf")) * 1.4426950408889634
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    return RowStatistics(row_lse, tl.load(delta + m_offsets, mask=row_ok, other=0.0))


@triton.jit
def score_gradient(p, dp, delta, s, q_idx, kv_idx, mods, traits: tl.constexpr):
    """dS = P (dP - delta), through score_mod and the softcap: the slope of tanh is 1 - tanh^2, and tanh is the raw
    score.
    """
    ds = p * (dp - delta)
    ds = gradient_of_raw(ds, s, q_idx, kv_idx, mods, traits)
    if traits.softcap:
        ds = ds * (1.0 - tl.minimum(s * s, 1.0))  # a number where s of a hidden key is NaN
    return ds


# ---------------------------------------------------------------- dK and dV


@triton.jit
def key_tile(pid, masks, shape, traits: tl.constexpr):
    """`query_tile` for a tile of keys of a key head. The first tiles come first: under a causal mask the most rows see
    them.
    """
    heads_kv = shape.heads // traits.group
    block = pid % shape.num_blocks
    index = pid // shape.num_blocks
    if traits.packed:
        batch, block = find_sequence(masks.cu_seqlens_k, block, shape.batch, shape.seqlen_k, traits.block_n)
        head = index
        offset_k, seqlen_k = span_of(masks.cu_seqlens_k, batch, shape.batch, shape.seqlen_k)
        offset_q, seqlen_q = keys_of(masks.cu_seqlens_q, batch, shape.batch, shape.seqlen_q)
    else:
        batch = index // heads_kv
        head = index % heads_kv
        offset_q, seqlen_q = pid * 0, shape.seqlen_q
        offset_k, seqlen_k = pid * 0, shape.seqlen_k
    return WorkTile(batch, head, block, SeqlenInfo(offset_q, seqlen_q, offset_k, seqlen_k, seqlen_k, 0))


@triton.jit
def document_keys(masks, work, n_start, n_stop):
    """The run of one document that has key n_start, cut at n_stop: a KeyTile."""
    keys_before = work.batch.to(tl.int64) * work.seqlen.seqlen_k
    run_end, m_first, m_stop = run_at(
        masks.ranges + 3 * keys_before, n_start, work.seqlen.seqlen_k, work.seqlen.seqlen_q
    )
    run_stop = tl.minimum(run_end, n_stop)
    return KeyTile(n_start, run_stop, m_first, m_stop, tl.load(masks.ids_k + keys_before + n_start))


@triton.jit
def apply_mask_transposed(p, m_start, m_offsets, keys, seqlen, window, traits: tl.constexpr):
    """P^T [N, M] with 0 where a row does not see the key, unless all rows of the tile see all of its keys."""
    n_last = tl.minimum(keys.n_start + traits.block_n, seqlen.seqlen_k)
    first, _ = visible_keys(tl.minimum(m_start + traits.block_m, keys.m_stop) - 1, seqlen, window, traits)
    _, stop = visible_keys(m_start, seqlen, window, traits)
    if (first > keys.n_start) | (stop < n_last):
        firsts, stops = visible_keys(m_offsets, seqlen, window, traits)
        column = tl.arange(0, traits.block_n)[:, None]
        firsts, stops = (firsts - keys.n_start)[None, :], (stops - keys.n_start)[None, :]
        p = apply_mask(p, column, firsts, stops, 0.0, traits.mask.left)
    return p


@triton.jit
def dk_dv_of_head(k, v, head, ids_q, strides, keys, seqlen, window, softmax, mods, sums, traits: tl.constexpr):
    """Mainloop: dK and dV of a tile of keys with the products of one query head added. Scores are transposed, [N, M],
    so that P^T and dS^T are operands in registers.
    """
    BLOCK_M: tl.constexpr = traits.block_m
    q_source = tile_source(head.q, seqlen.seqlen_q, traits.head_dim, strides.q.row, BLOCK_M, traits.block_d, traits)
    do_source = tile_source(
        head.dout, seqlen.seqlen_q, traits.head_dim_v, strides.dout.row, BLOCK_M, traits.block_dv, traits
    )
    dk, dv = sums.dk, sums.dv
    at_begin, at_stop, listed = keys.m_first, keys.m_stop, None
    if traits.has_block_lists:
        listed, at_stop = list_of_tile(keys.n_start // traits.block_n, at_begin < at_stop, mods, traits)
        at_begin = at_stop * 0
    STEP: tl.constexpr = 1 if traits.has_block_lists else BLOCK_M
    for at in tl.range(at_begin, at_stop, STEP, num_stages=traits.stages):
        m_start = at
        if traits.has_block_lists:
            m_start = tl.load(listed + at) * BLOCK_M
        m_offsets = m_start + tl.arange(0, BLOCK_M)
        row_ok = m_offsets < keys.m_stop
        if traits.mask.documents:
            row_ok = row_ok & (tl.load(ids_q + m_offsets, mask=row_ok, other=-1) == keys.document)
        # S^T = K Q^T
        d = tl.arange(0, traits.block_d)
        q = load_tile(q_source, m_start, m_offsets, d, strides.q.row, row_ok, traits.head_dim, traits)
        q = with_sign(q, traits)
        stats = load_per_row(head.lse, head.delta, m_offsets, row_ok)
        s = qk_product(k, q, softmax, traits)
        modified = s
        q_idx, kv_idx = None, None
        if traits.has_mods:
            q_idx, kv_idx = m_offsets[None, :], (keys.n_start + tl.arange(0, traits.block_n))[:, None]
            modified = modify_scores(s, q_idx, kv_idx, mods, traits)
        # P^T = exp(S^T - LSE)
        p = tl.exp2(modified * softmax.scale_log2 - stats.lse[None, :])
        p = apply_mask_transposed(p, m_start, m_offsets, keys, seqlen, window, traits)
        if traits.score_mod_bwd is not None:  # it may add for each element; dK of these keys is not stored
            p = tl.where(kv_idx < tl.minimum(keys.n_stop, seqlen.num_keys), p, 0.0)
        # dV += P^T dO
        d_v = tl.arange(0, traits.block_dv)
        do = load_tile(do_source, m_start, m_offsets, d_v, strides.dout.row, row_ok, traits.head_dim_v, traits)
        do = do.to(v.dtype)
        kept = drop_weights(p, q_idx, kv_idx, mods, traits)
        dv = tl.dot(kept.to(v.dtype), do, dv, input_precision="ieee", out_dtype=traits.accumulator)
        # dP^T = V dO^T
        dp = tl.dot(v, tl.trans(do), input_precision="ieee", out_dtype=traits.accumulator)
        dp = drop_weights(dp, q_idx, kv_idx, mods, traits)
        # dK += dS^T Q
        ds = score_gradient(p, dp, stats.delta[None, :], s, q_idx, kv_idx, mods, traits)
        dk = tl.dot(ds.to(k.dtype), q, dk, input_precision="ieee", out_dtype=traits.accumulator)
    return dk, dv


@triton.jit
def visible_rows(keys, n_last, seqlen, window, traits: tl.constexpr):
    """A KeyTile with its rows cut to those that see a key of n_start .. n_last - 1, from a whole tile of rows on."""
    bounds = (seqlen.seqlen_k, window.left, window.right)
    m_first = tl.maximum(first_row(keys.n_start, seqlen.seqlen_q, bounds, seqlen.prefix, traits), keys.m_first)
    m_first = m_first // traits.block_m * traits.block_m
    m_stop = tl.minimum(stop_row(n_last - 1, seqlen.seqlen_q, bounds, traits), keys.m_stop)
    m_stop = tl.where(keys.n_start < n_last, m_stop, m_first)
    return KeyTile(keys.n_start, keys.n_stop, m_first, m_stop, keys.document)


@triton.jit
def head_of_group(base, i, strides, shape):
    """DkDvTensors of query head i, from those of query head 0: q, dout, lse and delta move."""
    i = i.to(tl.int64)
    q, dout = base.q + i * strides.q.head, base.dout + i * strides.dout.head
    lse, delta = base.lse + i * shape.seqlen_q, base.delta + i * shape.seqlen_q
    return DkDvTensors(q, base.k, base.v, dout, lse, delta, base.dk, base.dv)


@triton.jit
def dk_dv_of_keys(base, ids_q, strides, keys, kv_head, seqlen, shape, window, softmax, mods, traits: tl.constexpr):
    """dK and dV of a KeyTile, summed over the query heads of its key head. `base`: DkDvTensors of the sequence, of
    query head 0 and this key head.
    """
    # prologue
    n_offsets = keys.n_start + tl.arange(0, traits.block_n)
    n_last = tl.minimum(keys.n_stop, seqlen.num_keys)
    key_ok = n_offsets < n_last
    d, d_v = tl.arange(0, traits.block_d), tl.arange(0, traits.block_dv)
    k = load_rows(base.k, n_offsets, d, strides.k.row, key_ok, traits.head_dim)
    v = load_rows(base.v, n_offsets, d_v, strides.v.row, key_ok, traits.head_dim_v)
    keys = visible_rows(keys, n_last, seqlen, window, traits)
    dk = tl.full([traits.block_n, traits.block_d], 0.0, traits.accumulator)
    dv = tl.full([traits.block_n, traits.block_dv], 0.0, traits.accumulator)
    # mainloop, for each head
    for member in tl.range(0, traits.group, num_stages=1):  # making a descriptor cannot be pipelined
        head = head_of_group(base, kv_head * traits.group + member, strides, shape)
        of_head = None
        if traits.has_mods:
            query_head = kv_head * traits.group + member
            stream = dropout_stream(mods.hooks.dropout, mods.entry, query_head) if traits.dropout else None
            of_head = ScoreMods(mods.entry, query_head, mods.hooks, stream)
        sums = KeyGradients(dk, dv)
        dk, dv = dk_dv_of_head(k, v, head, ids_q, strides, keys, seqlen, window, softmax, of_head, sums, traits)
    # epilogue
    n_inside = n_offsets < keys.n_stop
    store_rows(base.dk, dk * softmax.scale, n_offsets, d, strides.dk.row, n_inside, traits.head_dim)
    store_rows(base.dv, dv, n_offsets, d_v, strides.dv.row, n_inside, traits.head_dim_v)


@triton.jit
def keys_kernel(tensors, masks, errors, strides, shape, window, softmax_params, traits: tl.constexpr):
    """dK and dV. tensors: DkDvTensors; masks: MaskTensors with the ranges of keys; strides: DkDvStrides; shape:
    ShapeParams with tiles of keys; window, softmax_params: as in the forward.
    """
    softmax = softmax_scalars(softmax_params, traits)
    work = key_tile(tl.program_id(0), masks, shape, traits)
    seqlen = with_key_limits(work, masks, errors, traits)
    entry = work.batch * 0 if traits.packed else work.batch
    query_head = work.batch * 0
    k_start = first_key(masks.cu_seqlens_k, work.batch, shape.batch, seqlen.offset_k, traits.runs)
    rows_before = entry.to(tl.int64) * shape.heads * shape.seqlen_q + seqlen.offset_q
    base = DkDvTensors(
        row_of(tensors.q, strides.q, entry, seqlen.offset_q, query_head),
        row_of(tensors.k, strides.k, entry, k_start, work.head),
        row_of(tensors.v, strides.v, entry, k_start, work.head),
        row_of(tensors.dout, strides.dout, entry, seqlen.offset_q, query_head),
        tensors.lse + rows_before,
        tensors.delta + rows_before,
        row_of(tensors.dk, strides.dk, entry, seqlen.offset_k, work.head),
        row_of(tensors.dv, strides.dv, entry, seqlen.offset_k, work.head),
    )
    mods = None
    if traits.has_mods:
        mods = ScoreMods(sequence_index(work.batch, shape, traits), work.head, masks.hooks)
    n_start = work.block * traits.block_n
    n_stop = tl.minimum(n_start + traits.block_n, seqlen.seqlen_k)
    if traits.mask.documents:
        ids_q = masks.ids_q + work.batch.to(tl.int64) * seqlen.seqlen_q
        while n_start < n_stop:
            keys = document_keys(masks, work, n_start, n_stop)
            dk_dv_of_keys(base, ids_q, strides, keys, work.head, seqlen, shape, window, softmax, mods, traits)
            n_start = keys.n_stop
    elif n_start < n_stop:
        keys = KeyTile(n_start, n_stop, 0, seqlen.seqlen_q, 0)
        dk_dv_of_keys(base, None, strides, keys, work.head, seqlen, shape, window, softmax, mods, traits)


# ---------------------------------------------------------------- dQ


@triton.jit
def dq_of_blocks(q, do, stats, head, ids_k, strides, blocks, rows, seqlen, softmax, mods, traits: tl.constexpr):
    """Mainloop: dQ [M, D] of a tile of queries over the key blocks of `blocks`."""
    BLOCK_N: tl.constexpr = traits.block_n
    key_stop = tl.minimum(seqlen.num_keys, rows.k_stop)
    k_source = tile_source(head.k, seqlen.num_keys, traits.head_dim, strides.k.row, BLOCK_N, traits.block_d, traits)
    v_source = tile_source(head.v, seqlen.num_keys, traits.head_dim_v, strides.v.row, BLOCK_N, traits.block_dv, traits)
    columns = tl.arange(0, BLOCK_N)
    d, d_v = tl.arange(0, traits.block_d), tl.arange(0, traits.block_dv)
    dq = tl.full([traits.block_m, traits.block_d], 0.0, traits.accumulator)
    at_begin, at_stop, listed = blocks.n_start, blocks.n_stop, None
    if traits.has_block_lists:
        listed, at_stop = list_of_tile(rows.m_start // traits.block_m, at_begin < at_stop, mods, traits)
        at_begin = at_stop * 0
    STEP: tl.constexpr = 1 if traits.has_block_lists else BLOCK_N
    for at in tl.range(at_begin, at_stop, STEP, num_stages=traits.stages):
        n_start = at
        if traits.has_block_lists:
            n_start = tl.load(listed + at) * BLOCK_N
        # S = Q K^T
        k, key_ok = load_keys(k_source, ids_k, n_start, columns, d, strides.k.row, key_stop, rows.document, traits)
        s = qk_product(q, k, softmax, traits)
        modified = s
        q_idx, kv_idx = None, None
        if traits.has_mods:
            q_idx, kv_idx = (rows.m_start + tl.arange(0, traits.block_m))[:, None], (n_start + columns)[None, :]
            modified = modify_scores(s, q_idx, kv_idx, mods, traits)
        # P = exp(S - LSE)
        p = tl.exp2(modified * softmax.scale_log2 - stats.lse[:, None])
        if traits.mask.documents:
            p = tl.where(key_ok[None, :], p, 0.0)
        if (n_start < blocks.full_start) | (n_start + BLOCK_N > blocks.full_stop):
            first, stop = (blocks.first - n_start)[:, None], (blocks.stop - n_start)[:, None]
            p = apply_mask(p, columns[None, :], first, stop, 0.0, traits.mask.left)
        # dP = dO V^T
        v = load_tile(v_source, n_start, n_start + columns, d_v, strides.v.row, key_ok, traits.head_dim_v, traits)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee", out_dtype=traits.accumulator)
        dp = drop_weights(dp, q_idx, kv_idx, mods, traits)
        # dQ += dS K
        ds = score_gradient(p, dp, stats.delta[:, None], s, q_idx, kv_idx, mods, traits)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee", out_dtype=traits.accumulator)
    return dq


@triton.jit
def dq_of_rows(head, ids_k, strides, rows, seqlen, window, softmax, mods, traits: tl.constexpr):
    """dQ of a RowTile. `head`: DqTensors of the sequence and head."""
    # prologue
    m_offsets = rows.m_start + tl.arange(0, traits.block_m)
    row_ok = m_offsets < rows.m_stop
    blocks = blocks_of_rows(m_offsets, rows, seqlen, window, traits)
    q = load_queries(head.q, m_offsets, strides.q.row, row_ok, traits)
    d_v = tl.arange(0, traits.block_dv)
    do = load_rows(head.dout, m_offsets, d_v, strides.dout.row, row_ok, traits.head_dim_v).to(q.dtype)
    stats = load_per_row(head.lse, head.delta, m_offsets, row_ok)
    # mainloop
    dq = dq_of_blocks(q, do, stats, head, ids_k, strides, blocks, rows, seqlen, softmax, mods, traits)
    # epilogue
    d = tl.arange(0, traits.block_d)
    store_rows(head.dq, dq * (softmax.scale * traits.sign), m_offsets, d, strides.dq.row, row_ok, traits.head_dim)


@triton.jit
def queries_kernel(tensors, masks, errors, strides, shape, window, softmax_params, traits: tl.constexpr):
    """dQ. tensors: DqTensors; masks: MaskTensors; strides: DqStrides; other arguments as in the forward."""
    softmax = softmax_scalars(softmax_params, traits)
    work = query_tile(tl.program_id(0), masks, shape, traits)
    seqlen = with_key_limits(work, masks, errors, traits)
    entry = work.batch * 0 if traits.packed else work.batch
    kv_head = work.head // traits.group
    rows_before = (entry.to(tl.int64) * shape.heads + work.head) * shape.seqlen_q + seqlen.offset_q
    head = DqTensors(
        row_of(tensors.q, strides.q, entry, seqlen.offset_q, work.head),
        row_of(tensors.k, strides.k, entry, seqlen.offset_k, kv_head),
        row_of(tensors.v, strides.v, entry, seqlen.offset_k, kv_head),
        row_of(tensors.dout, strides.dout, entry, seqlen.offset_q, work.head),
        tensors.lse + rows_before,
        tensors.delta + rows_before,
        row_of(tensors.dq, strides.dq, entry, seqlen.offset_q, work.head),
    )
    mods = None
    if traits.has_mods:
        index = sequence_index(work.batch, shape, traits)
        stream = dropout_stream(masks.hooks.dropout, index, work.head) if traits.dropout else None
        mods = ScoreMods(index, work.head, masks.hooks, stream)
    m_start = work.block * traits.block_m
    m_stop = tl.minimum(m_start + traits.block_m, seqlen.seqlen_q)
    if traits.mask.documents:
        ids_k = masks.ids_k + work.batch.to(tl.int64) * seqlen.seqlen_k
        while m_start < m_stop:
            rows = document_rows(masks, work, m_start, m_stop)
            dq_of_rows(head, ids_k, strides, rows, seqlen, window, softmax, mods, traits)
            m_start = rows.m_stop
    elif m_start < m_stop:
        rows = RowTile(m_start, m_stop, 0, seqlen.num_keys, 0)
        dq_of_rows(head, None, strides, rows, seqlen, window, softmax, mods, traits)
