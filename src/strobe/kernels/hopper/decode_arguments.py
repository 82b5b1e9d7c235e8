"""Arguments of the Hopper decode and of the batch-invariant forward, and of their functions, by name."""

from typing import Any, NamedTuple


class DecodeTensors(NamedTuple):
    """Tensors of a decode; None where the call has none."""

    q: Any  # [B, S_q, H, D]
    k: Any  # pages [P, page_size, H_kv, D], or rows [B, S_k, H_kv, D]
    v: Any
    page_table: Any
    seqlens: Any
    k_start: Any
    out: Any
    lse: Any
    sinks: Any
    cu_seqlens_q: Any  # [B + 1] where q is packed
    hooks: Any = None  # HookParams: what functions of scores and masks read


class PackedRows(NamedTuple):
    """Where the last tokens of a sequence lie in packed q and out: token t of the tokens that a launch is for is row
    `offset` + t.
    """

    offset: Any  # negative where the sequence has fewer tokens than rows before it
    first_token: Any  # that the sequence has
    num_keys: Any  # 0 if no row of the tile exists


class InvariantTensors(NamedTuple):
    """Tensors of a batch-invariant forward."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    sinks: Any


class CuSeqlens(NamedTuple):
    """Offsets of packed sequences; None in other layouts."""

    q: Any
    k: Any


class KeyScales(NamedTuple):
    """Scales of 8-bit keys and values, one for each key head; None without."""

    k: Any
    v: Any


class Partials(NamedTuple):
    """Where splits leave their partial results; None with one split or a cluster.

    o holds O [partial_rows, block_dv] of each split of each tile, then all log-sum-exps [partial_rows], float32.
    counters holds how many splits of a tile are done, 0 before and after a launch.
    """

    o: Any
    counters: Any


class RowStrides(NamedTuple):
    """Strides of batch entries (or pages), rows and heads, in elements."""

    batch: Any
    row: Any
    head: Any


class Strides(NamedTuple):
    """RowStrides of each tensor."""

    q: Any
    k: Any
    v: Any
    out: Any


class DecodeShape(NamedTuple):
    """Sizes, int32."""

    seqlen_q: Any
    heads_kv: Any
    capacity: Any  # most keys of a sequence
    num_pages: Any  # of the pool
    max_pages: Any  # of a sequence
    num_splits: Any
    split_size: Any  # keys
    num_m_blocks: Any  # tiles of rows of a key head
    batch: Any  # sequences, where q is packed; else None
    total_q: Any  # rows of packed q; else None


class DecodeWindow(NamedTuple):
    """Bounds of the mask relative to the diagonal, int32."""

    left: Any
    right: Any


class DecodeSoftmax(NamedTuple):
    """Float32. The raw score is q k^T, or tanh(softcap * q k^T) with a cap; times scale_log2 it is in log2 units."""

    scale_log2: Any
    softcap: Any


class DecodeArguments(NamedTuple):
    """The arguments of a decode kernel."""

    tensors: DecodeTensors
    scales: KeyScales
    partials: Partials
    errors: Any  # pointer to the device's error word
    strides: Strides
    shape: DecodeShape
    window: DecodeWindow
    softmax: DecodeSoftmax


class InvariantArguments(NamedTuple):
    """The arguments of a batch-invariant forward."""

    tensors: InvariantTensors
    cu_seqlens: CuSeqlens
    errors: Any  # pointer to the device's error word
    strides: Strides
    shape: Any  # `runtime.batch_invariant.InvariantShape`
    window: Any  # WindowParams
    softmax: DecodeSoftmax


class SoftmaxScalars(NamedTuple):
    """DecodeSoftmax of a key head, and the power of two by which each row of float16 q was divided. With a score_mod
    scale_log2 is log2(e): its scores are in natural units.
    """

    scale_log2: Any
    softcap: Any
    q_scale: Any


class SplitTile(NamedTuple):
    """What one program computes: a split of the keys for a tile of rows."""

    batch: Any
    head: Any  # key head
    block: Any  # tile of the key head's rows
    split: Any


class TileRows(NamedTuple):
    """The rows of a tile: tokens of a sequence, each with the query heads of a key head."""

    batch: Any
    head: Any  # key head
    block: Any  # tile of the key head's rows
    tokens: Any  # of the sequence
    heads_kv: Any
    lse_rows: Any  # of a head in lse
    first_token: Any  # with traits.ragged: tokens before it do not exist


class MaskedQueries(NamedTuple):
    """What says which keys each query of a tile sees."""

    tile: TileRows
    num_keys: Any  # of the sequence
    window: DecodeWindow


class PageTable(NamedTuple):
    """Page ids of a sequence; `ids` is not read where keys lie in rows."""

    ids: Any
    capacity: Any  # keys
    num_pages: Any  # of the pool


class KeyCache(NamedTuple):
    """Keys and values of a key head of a sequence."""

    k: Any
    v: Any
    strides: Any  # Strides of the call
    table: PageTable
    batch: Any
    head: Any
    first_key: Any  # row of the sequence's key 0 in its batch entry


class PageIds(NamedTuple):
    """Page ids of one tile, as the copies of K and of V need them."""

    k: Any
    v: Any


class PrefetchedPages(NamedTuple):
    """PageIds of the next two tiles to copy, and the page ids of the next tile of scores, as those need them."""

    to_copy: PageIds
    to_copy_next: PageIds
    of_scores: Any


class DecodeSmem(NamedTuple):
    """Buffers in shared memory: K and V have `stages` tiles each."""

    q: Any
    p: Any
    k: Any
    v: Any


class TallSmem(NamedTuple):
    """DecodeSmem of `decode_tall`, where P is in registers."""

    q: Any
    k: Any
    v: Any


class DecodeOutputs(NamedTuple):
    """What finished rows are written to, and the sinks."""

    out: Any
    lse: Any
    sinks: Any
