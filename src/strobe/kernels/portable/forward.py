"""Forward attention in Triton: one program for each tile of queries of a head.

    locate        the tile's sequence, head and rows (dense: by division; packed: by a search in cu_seqlens)
    for each run of one document in the tile (without documents: the whole tile)
        prologue  which key blocks its rows see; Q
        mainloop  for each of these blocks:  S = Q K^T, mask, P = softmax(S), O = rescale O + P V
        epilogue  O /= row_sum, LSE = ln 2 row_max + ln row_sum

To add a feature: scores -> `score_mods.modify_scores`; weights -> `score_mods.drop_weights`; which keys a row sees ->
`device.mask.row_interval`; which key blocks a tile visits -> `blocks_of_rows`; where rows lie -> `query_tile`; a
constant of the kernel -> `kernel.KernelTraits`; a scalar -> `arguments`.

Sources: FlashAttention-2 (arXiv 2307.08691), algorithm 1; online softmax (arXiv 1805.02867), algorithm 3.
"""

import triton
import triton.language as tl

from ..device.dropout import dropout_stream
from ..device.mask import apply_mask, row_interval
from ..device.seqlen import (
    LONG_K,
    LONG_Q,
    OFFSETS_K,
    OFFSETS_Q,
    OUTSIDE,
    breaks_promise,
    find_sequence,
    first_key,
    guard_offsets,
    key_limit,
    keys_of,
    load_rows,
    run_at,
    span_of,
    store_rows,
)
from ..device.softmax import SoftmaxState, apply_softcap, finish, online_step
from .arguments import BlockInfo, ForwardTensors, RowTile, SeqlenInfo, SoftmaxParams, WorkTile
from .score_mods import ScoreMods, drop_weights, list_of_tile, modify_scores, sequence_index

# ---------------------------------------------------------------- where a tile lies


@triton.jit
def query_tile(pid, masks, shape, traits: tl.constexpr):
    """(batch entry or sequence, head, m_block, first query, queries, first key, keys) of a program.

    Tiles of one head follow each other, the last first: under a causal mask it sees the most keys.
    """
    block = shape.num_blocks - 1 - pid % shape.num_blocks
    index = pid // shape.num_blocks
    if traits.packed:
        batch, block = find_sequence(masks.cu_seqlens_q, block, shape.batch, shape.seqlen_q, traits.block_m)
        head = index
        offset_q, seqlen_q = span_of(masks.cu_seqlens_q, batch, shape.batch, shape.seqlen_q)
        offset_k, seqlen_k = keys_of(masks.cu_seqlens_k, batch, shape.batch, shape.seqlen_k, OUTSIDE)
        offset_k = first_key(masks.cu_seqlens_k, batch, shape.batch, offset_k, traits.runs)
    else:
        batch = index // shape.heads
        head = index % shape.heads
        offset_q, seqlen_q = pid * 0, shape.seqlen_q
        offset_k, seqlen_k = pid * 0, shape.seqlen_k
    return WorkTile(batch, head, block, SeqlenInfo(offset_q, seqlen_q, offset_k, seqlen_k, seqlen_k, 0))


@triton.jit
def with_key_limits(work, masks, errors, traits: tl.constexpr):
    """The SeqlenInfo of a tile with what a mask's tensors say of its keys: key length and prefix."""
    s = work.seqlen
    num_keys = key_limit(masks.key_lengths, work.batch, s.seqlen_k, errors, traits.mask.key_lengths)
    prefix = tl.load(masks.prefixes + work.batch) if traits.mask.prefix else 0
    return SeqlenInfo(s.offset_q, s.seqlen_q, s.offset_k, s.seqlen_k, num_keys, prefix)


@triton.jit
def row_of(tensor, strides, batch, row, head):
    """Pointer to a row of one head."""
    return (
        tensor + batch.to(tl.int64) * strides.batch + row.to(tl.int64) * strides.row + head.to(tl.int64) * strides.head
    )


@triton.jit
def document_rows(masks, work, m_start, m_stop):
    """The run of one document that has row m_start, cut at m_stop: a RowTile."""
    rows_before = work.batch.to(tl.int64) * work.seqlen.seqlen_q
    run_end, k_first, k_stop = run_at(
        masks.ranges + 3 * rows_before, m_start, work.seqlen.seqlen_q, work.seqlen.seqlen_k
    )
    run_stop = tl.minimum(run_end, m_stop)
    return RowTile(m_start, run_stop, k_first, k_stop, tl.load(masks.ids_q + rows_before + m_start))


@triton.jit
def blocks_of_rows(m_offsets, rows, seqlen, window, traits: tl.constexpr):
    """The key blocks that rows of a RowTile visit: contiguous, each with a key that some row sees."""
    first, stop = visible_keys(m_offsets, seqlen, window, traits)
    n_first, full_stop = visible_keys(rows.m_start, seqlen, window, traits)
    full_start, n_stop = visible_keys(rows.m_stop - 1, seqlen, window, traits)
    n_start = tl.maximum(n_first, rows.k_first) // traits.block_n * traits.block_n
    n_stop = tl.minimum(n_stop, rows.k_stop)
    return BlockInfo(n_start, n_stop, full_start, full_stop, first, stop)


@triton.jit
def visible_keys(row, seqlen, window, traits: tl.constexpr):
    """Keys [first, stop) of a row or a vector of rows; neither falls from a row to the next. Documents count for
    nothing here.
    """
    bounds = (seqlen.seqlen_k, window.left, window.right)
    return row_interval(row, seqlen.seqlen_q, seqlen.num_keys, bounds, seqlen.prefix, traits)


# ---------------------------------------------------------------- loads


@triton.jit
def tile_source(base, rows, width: tl.constexpr, stride, block: tl.constexpr, block_width: tl.constexpr,
                traits: tl.constexpr):  # fmt: skip
    """What tiles of a tensor are loaded from: a pointer, or a TMA descriptor, which reads 0 beyond rows and width."""
    if traits.tma:
        if traits.packed:
            rows = tl.maximum(rows, 0)  # of keys OUTSIDE
        source = tl.make_tensor_descriptor(base, [rows, width], [stride.to(tl.int64), 1], [block, block_width])
    else:
        source = base
    return source


@triton.jit
def load_tile(source, start, offsets, columns, stride, row_ok, width: tl.constexpr, traits: tl.constexpr):
    """Rows `offsets` = start + 0..N-1 of a source, 0 where row_ok is False."""
    if traits.tma:
        tile = source.load([start, 0])
    else:
        tile = load_rows(source, offsets, columns, stride, row_ok, width)
    return tile


@triton.jit
def load_keys(k, ids_k, n_start, columns, d, stride, key_stop, document, traits: tl.constexpr):
    """(K [N, D], which of its keys exist and are the document's own)."""
    n_offsets = n_start + columns
    key_ok = n_offsets < key_stop
    if traits.mask.documents:
        key_ok = key_ok & (tl.load(ids_k + n_offsets, mask=key_ok, other=-1) == document)
    return load_tile(k, n_start, n_offsets, d, stride, key_ok, traits.head_dim, traits), key_ok


@triton.jit
def load_queries(q, m_offsets, stride, row_ok, traits: tl.constexpr):
    """Q [M, D] with the sign of the scale, so that what multiplies scores is positive."""
    tile = load_rows(q, m_offsets, tl.arange(0, traits.block_d), stride, row_ok, traits.head_dim)
    return with_sign(tile, traits)


@triton.jit
def with_sign(q, traits: tl.constexpr):
    if traits.sign != 1:
        q = (q * traits.sign).to(q.dtype)
    return q


@triton.jit
def softmax_scalars(params, traits: tl.constexpr):
    """SoftmaxParams as scalars of the accumulator's type."""
    scale_log2 = scalar(params.scale_log2, traits)
    softcap = scalar(params.softcap, traits)
    if params.scale is None:
        return SoftmaxParams(scale_log2, softcap, 0.0)
    else:
        return SoftmaxParams(scale_log2, softcap, scalar(params.scale, traits))


@triton.jit
def scalar(parts, traits: tl.constexpr):
    """The sum of three float32; of the first, where float32 is the accumulator's type."""
    first, second, third = parts
    value = tl.full([], 0.0, traits.accumulator) + first
    if traits.accumulator == tl.float64:
        value = value + second + third
    return value


# ---------------------------------------------------------------- one tile


@triton.jit
def qk_product(q, k, softmax, traits: tl.constexpr):
    """Raw scores S = Q K^T [M, N], capped."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=traits.accumulator)
    return apply_softcap(s, softmax.softcap, traits)


@triton.jit
def attend(q, head, ids_k, strides, blocks, rows, seqlen, softmax, mods, traits: tl.constexpr):
    """Mainloop: (O [M, D_v] not yet normalized, SoftmaxState) over the key blocks of `blocks`."""
    BLOCK_N: tl.constexpr = traits.block_n
    row_max = tl.full([traits.block_m], float("-inf"), traits.accumulator)
    state = SoftmaxState(row_max, tl.full([traits.block_m], 0.0, traits.accumulator))
    o = tl.full([traits.block_m, traits.block_dv], 0.0, traits.accumulator)
    key_stop = tl.minimum(seqlen.num_keys, rows.k_stop)
    k_source = tile_source(head.k, seqlen.num_keys, traits.head_dim, strides.k.row, BLOCK_N, traits.block_d, traits)
    v_source = tile_source(head.v, seqlen.num_keys, traits.head_dim_v, strides.v.row, BLOCK_N, traits.block_dv, traits)
    columns = tl.arange(0, BLOCK_N)
    d = tl.arange(0, traits.block_d)
    dv = tl.arange(0, traits.block_dv)
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
        q_idx, kv_idx = None, None
        if traits.has_mods:
            q_idx, kv_idx = (rows.m_start + tl.arange(0, traits.block_m))[:, None], (n_start + columns)[None, :]
            s = modify_scores(s, q_idx, kv_idx, mods, traits)
        if traits.mask.documents:
            s = tl.where(key_ok[None, :], s, float("-inf"))
        if (n_start < blocks.full_start) | (n_start + BLOCK_N > blocks.full_stop):
            first, stop = (blocks.first - n_start)[:, None], (blocks.stop - n_start)[:, None]
            s = apply_mask(s, columns[None, :], first, stop, float("-inf"), traits.mask.left)
        # P = softmax(S)
        p, rescale, state = online_step(s, state, softmax.scale_log2)
        p = drop_weights(p, q_idx, kv_idx, mods, traits)
        # O = rescale O + P V
        v = load_tile(v_source, n_start, n_start + columns, dv, strides.v.row, key_ok, traits.head_dim_v, traits)
        o = tl.dot(p.to(v.dtype), v, o * rescale[:, None], input_precision="ieee", out_dtype=traits.accumulator)
    return o, state


@triton.jit
def forward_rows(head, ids_k, strides, rows, seqlen, window, softmax, mods, traits: tl.constexpr):
    """Attention for the rows of a RowTile. `head`: ForwardTensors of the sequence and head."""
    # prologue
    m_offsets = rows.m_start + tl.arange(0, traits.block_m)
    row_ok = m_offsets < rows.m_stop
    blocks = blocks_of_rows(m_offsets, rows, seqlen, window, traits)
    q = load_queries(head.q, m_offsets, strides.q.row, row_ok, traits)
    # mainloop
    o, state = attend(q, head, ids_k, strides, blocks, rows, seqlen, softmax, mods, traits)
    # epilogue
    is_empty = blocks.first >= blocks.stop
    if traits.mask.documents or traits.has_mods:
        is_empty = (
            state.row_sum == 0
        )  # a document's keys may have gaps, and functions may hide keys; only the sum knows
    normalizer, lse = finish(state.row_max, state.row_sum, is_empty, head.sinks, traits)
    o = tl.where(is_empty[:, None], 0.0, o * normalizer[:, None])
    if traits.packed:  # NaN shows rows and keys beyond what the caller promised
        broken = breaks_promise(m_offsets, seqlen.seqlen_k, window)
        o = tl.where(broken[:, None], float("nan"), o)
        lse = tl.where(broken, float("nan"), lse)
    store_rows(head.out, o, m_offsets, tl.arange(0, traits.block_dv), strides.out.row, row_ok, traits.head_dim_v)
    tl.store(head.lse + m_offsets, lse, mask=row_ok)
    if traits.max_scores:
        greatest = tl.where(is_empty, float("-inf"), state.row_max * 0.6931471805599453)
        tl.store(head.max_scores + m_offsets, greatest, mask=row_ok)


# ---------------------------------------------------------------- kernel


@triton.jit
def forward_kernel(tensors, masks, errors, strides, shape, window, softmax_params, traits: tl.constexpr):
    """tensors: ForwardTensors; masks: MaskTensors; strides: ForwardStrides; shape: ShapeParams; window: WindowParams;
    softmax_params: SoftmaxParams (`arguments`); errors: the error word.
    """
    softmax = softmax_scalars(softmax_params, traits)
    pid = tl.program_id(0)
    if traits.packed:
        if pid == 0:
            lanes = tl.arange(0, 128)
            longest_q, longest_k = window.max_seqlen_q, window.max_seqlen_k
            guard_offsets(masks.cu_seqlens_q, shape.batch, shape.seqlen_q, longest_q, lanes, errors, OFFSETS_Q, LONG_Q)
            guard_offsets(masks.cu_seqlens_k, shape.batch, shape.seqlen_k, longest_k, lanes, errors, OFFSETS_K, LONG_K)
    work = query_tile(pid, masks, shape, traits)
    seqlen = with_key_limits(work, masks, errors, traits)
    sink = tl.load(tensors.sinks + work.head).to(traits.accumulator) if traits.sinks else 0.0
    entry = work.batch * 0 if traits.packed else work.batch
    kv_head = work.head // traits.group
    rows_before = (entry.to(tl.int64) * shape.heads + work.head) * shape.seqlen_q + seqlen.offset_q
    head = ForwardTensors(
        row_of(tensors.q, strides.q, entry, seqlen.offset_q, work.head),
        row_of(tensors.k, strides.k, entry, seqlen.offset_k, kv_head),
        row_of(tensors.v, strides.v, entry, seqlen.offset_k, kv_head),
        row_of(tensors.out, strides.out, entry, seqlen.offset_q, work.head),
        tensors.lse + rows_before,
        sink,
        tensors.max_scores + rows_before if traits.max_scores else None,
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
            forward_rows(head, ids_k, strides, rows, seqlen, window, softmax, mods, traits)
            m_start = rows.m_stop
    elif m_start < m_stop:
        rows = RowTile(m_start, m_stop, 0, seqlen.num_keys, 0)
        forward_rows(head, None, strides, rows, seqlen, window, softmax, mods, traits)
