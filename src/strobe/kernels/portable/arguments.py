"""Arguments of the portable kernels, and what their functions hand each other, by name.

A tensor that the call does not have is None. Triton and its interpreter take NamedTuples, nested too, as arguments of
kernels; fields keep their names.
"""

from typing import Any, NamedTuple

# ---------------------------------------------------------------- arguments of kernels


class Strides(NamedTuple):
    """Of a tensor [batch, row, head, column], in elements. Columns are contiguous; `batch` is 0 in packed layouts."""

    batch: Any
    row: Any
    head: Any


class ForwardTensors(NamedTuple):
    """In the kernel also: pointers to the first row of one sequence and head, and the sink of that head."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any  # [B, H, S_q] or [H, T_q]
    sinks: Any  # [H]
    max_scores: Any = None  # as lse: the greatest score of each row


class ForwardStrides(NamedTuple):
    """Strides of each tensor."""

    q: Any
    k: Any
    v: Any
    out: Any


class DeltaTensors(NamedTuple):
    dout: Any
    out: Any
    lse: Any
    dlse: Any
    delta: Any  # as lse


class DeltaStrides(NamedTuple):
    """Strides of each tensor."""

    dout: Any
    out: Any


class DkDvTensors(NamedTuple):
    """In the kernel also: pointers to the first row of one sequence and head."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any
    dk: Any
    dv: Any


class DkDvStrides(NamedTuple):
    """Strides of each tensor."""

    q: Any
    k: Any
    v: Any
    dout: Any
    dk: Any
    dv: Any


class DqTensors(NamedTuple):
    """In the kernel also: pointers to the first row of one sequence and head."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any
    dq: Any


class DqStrides(NamedTuple):
    """Strides of each tensor."""

    q: Any
    k: Any
    v: Any
    dout: Any
    dq: Any


class MaskTensors(NamedTuple):
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    prefixes: Any  # [B]: how many first keys all rows see
    key_lengths: Any  # [B]
    ids_k: Any  # [B, S_k]: the document of each key
    ids_q: Any  # [B, S_q]
    ranges: Any  # [B, S, 3] for the rows or keys that tiles are of (`mask.Documents`, `seqlen.document_run`)
    hooks: Any = None  # HookParams


class BlockListParams(NamedTuple):
    """The blocks that each tile visits: of keys for a tile of queries, or of queries for a tile of keys."""

    num_blocks: Any  # int32 [B or 1, H or 1, tiles]; packed: a row for each sequence
    indices: Any  # int32 [B or 1, H or 1, tiles, most_blocks]
    stride_batch: Any  # of num_blocks: 0 where entries or heads share their lists
    stride_head: Any
    num_tiles: Any
    most_blocks: Any


class HookParams(NamedTuple):
    """What the call's functions on scores read (`score_mods`), and its block lists."""

    score_scale: Any  # the score in natural units that a raw score of 1 stands for
    score_aux: Any
    mask_aux: Any
    gradient_aux: Any
    dropout: Any = None  # dropout.DropoutParams
    block_lists: Any = None  # BlockListParams of the kernel's tiles


class ShapeParams(NamedTuple):
    """Sizes, int32."""

    heads: Any  # query heads
    seqlen_q: Any  # or all packed query tokens
    seqlen_k: Any
    batch: Any  # batch entries, or packed sequences
    num_blocks: Any  # tiles of a head


class SoftmaxParams(NamedTuple):
    """A raw score is q k^T, or tanh(softcap * q k^T) with a cap. All are positive: q has the sign of the scale.

    As arguments of a kernel each is three float32 that sum to a float64, because float arguments arrive as float32.
    """

    scale_log2: Any  # value of a raw score in log2 units
    softcap: Any  # |scale| / cap
    scale: Any = None  # |scale|, for gradients


# ---------------------------------------------------------------- arguments of decode and append


class DecodeTensors(NamedTuple):
    q: Any  # [B, S_q, H_q, D]
    k: Any  # the cache: [B, capacity, H_kv, D], or pages [pages, page_size, H_kv, D]
    v: Any
    page_table: Any  # [B, max_pages]
    seqlens: Any  # [B]
    k_start: Any  # [B]: first key
    out: Any
    lse: Any
    sinks: Any
    hooks: Any = None  # HookParams


class PerKeyHead(NamedTuple):
    """Scales of keys and values [H_kv], or one for each key and head."""

    k: Any
    v: Any


class SplitWorkspace(NamedTuple):
    """Partial results of all splits; None where there is one split."""

    o: Any  # [splits, rows, D_v], a row for each row of q
    lse: Any  # [splits, rows] in log2 units
    counters: Any  # [tiles]: how many splits of a tile are done; 0 before and after the launch


class DecodeShape(NamedTuple):
    """Sizes, int32."""

    seqlen_q: Any
    heads_kv: Any
    capacity: Any  # keys that a sequence may have
    num_pages: Any
    max_pages: Any  # of a sequence
    num_splits: Any
    split_size: Any  # keys
    num_m_blocks: Any  # tiles of rows of a key head


class PagedTensors(NamedTuple):
    q: Any  # [T, H_q, D]
    k: Any  # the cache: [B, capacity, H_kv, D], or pages [pages, page_size, H_kv, D]
    v: Any
    page_table: Any  # [B, max_pages]
    seqlens: Any  # [B]
    k_start: Any  # [B]: first key
    cu_seqlens_q: Any  # [B + 1]
    out: Any  # [T, H_q, D_v]
    lse: Any  # [H_q, T]
    sinks: Any
    hooks: Any = None  # HookParams


RECORD = 16  # int32 of a sequence's record in the WorkList
LEAST_SHARE = 2  # key blocks of a split


class WorkList(NamedTuple):
    """What `schedule_kernel` writes, int32. Sequences are the n + 2 of `seqlen.offset_at`."""

    totals: Any  # [2]: items, split tiles
    sequences: Any  # [n + 2, RECORD]
    items: Any  # [max_items]: the sequence of each item
    split_tiles: Any  # [max_partials / 2]: the sequence of each split tile


class PagedShape(NamedTuple):
    """Sizes, int32."""

    total_q: Any
    batch: Any
    heads_kv: Any
    capacity: Any  # keys that a sequence may have
    num_pages: Any
    max_pages: Any  # of a sequence
    page_rows: Any  # keys of a page, or of a batch entry where there are no pages
    max_items: Any
    max_partials: Any
    slots: Any  # programs that the device runs at once


class AppendTensors(NamedTuple):
    k_new: Any  # [B, S, H_kv, D], or packed [S, H_kv, D]
    v_new: Any
    seqlens: Any  # [B], or the slots of tokens
    page_table: Any
    cu_seqlens_q: Any  # [B + 1] of packed tokens


class Caches(NamedTuple):
    k: Any
    v: Any


class RotaryTables(NamedTuple):
    cos: Any  # [positions, rotary_dim / 2]
    sin: Any


class RotaryStrides(NamedTuple):
    cos: Any
    sin: Any
    positions: Any  # that have angles


class AppendStrides(NamedTuple):
    """Strides of each tensor; of caches with pages, `batch` is that of a page."""

    k_new: Any
    v_new: Any
    k: Any
    v: Any
    rotary: Any  # RotaryStrides


class AppendShape(NamedTuple):
    """Sizes, int32."""

    seqlen: Any  # new tokens of a sequence
    heads_kv: Any
    capacity: Any
    page_size: Any
    num_pages: Any
    max_pages: Any
    batch: Any  # sequences of packed tokens; else None


# ---------------------------------------------------------------- in kernels


class WorkTile(NamedTuple):
    """What one program computes."""

    batch: Any  # batch entry, or packed sequence
    head: Any
    block: Any  # tile of rows or keys within the sequence
    seqlen: Any  # SeqlenInfo


class SeqlenInfo(NamedTuple):
    """One sequence. Offsets are rows from the start of the tensor in packed layouts, and 0 in dense ones."""

    offset_q: Any
    seqlen_q: Any
    offset_k: Any
    seqlen_k: Any  # where the diagonal ends
    num_keys: Any  # where the keys end: seqlen_k, or less by a key length
    prefix: Any  # how many first keys all rows see


class RowStatistics(NamedTuple):
    """Of rows, for gradients."""

    lse: Any  # in log2 units; +inf for rows that see no key or do not exist, so that their P is 0
    delta: Any


class KeyGradients(NamedTuple):
    """Of a tile of keys, before the scale."""

    dk: Any  # [N, D]
    dv: Any  # [N, D_v]


class RowTile(NamedTuple):
    """Rows of one document and the keys that they may see. Without documents: of the sequence, and all its keys."""

    m_start: Any
    m_stop: Any
    k_first: Any
    k_stop: Any
    document: Any


class KeyTile(NamedTuple):
    """Keys of one document and the rows that may see them. Without documents: of the sequence, and all its rows."""

    n_start: Any
    n_stop: Any
    m_first: Any
    m_stop: Any
    document: Any


class BlockInfo(NamedTuple):
    """The keys that a tile of rows visits, from n_start to n_stop in blocks, and its mask."""

    n_start: Any
    n_stop: Any
    full_start: Any  # keys full_start .. full_stop - 1 are visible to all rows: blocks within need no mask
    full_stop: Any
    first: Any  # [M]: each row sees keys first .. stop - 1
    stop: Any


class KeyCache(NamedTuple):
    """Where the keys and values of one sequence and key head lie."""

    k: Any
    v: Any
    page_table: Any  # of the sequence
    num_pages: Any
    batch: Any
    head: Any
    first_key: Any  # keys are counted from here


class ScaledCache(NamedTuple):
    """A KeyCache whose keys and values have scales [pages or batch entries, page_rows, heads_kv]."""

    k: Any
    v: Any
    page_table: Any
    num_pages: Any
    batch: Any
    head: Any
    first_key: Any
    k_scale: Any
    v_scale: Any
    page_rows: Any
    heads_kv: Any


class RowInfo(NamedTuple):
    """The rows of a decode's tile: the query heads of a key head, a token after the other."""

    token: Any
    head_q: Any
    exists: Any
