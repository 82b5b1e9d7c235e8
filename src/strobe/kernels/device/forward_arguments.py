"""Arguments of the forward kernels on Hopper and Blackwell, by name."""

from typing import Any, NamedTuple


class ShapeParams(NamedTuple):
    """Sizes, int32."""

    batch: Any  # batch entries, or packed sequences
    heads: Any  # of the grid: query heads, or key heads where a tile packs the query heads of a key head
    seqlen_q: Any  # or all packed query tokens
    seqlen_k: Any
    num_m_blocks: Any  # of a head
    l2_heads: Any  # heads that are processed together, so that their keys and values stay in L2
    # key ranges: rows between the end of one batch entry and the start of the next
    gap_q: Any = None
    gap_k: Any = None
    gap_v: Any = None


class WindowParams(NamedTuple):
    """Bounds of the mask relative to the diagonal, and lengths that callers of packed sequences promised (negative:
    none), int32.
    """

    left: Any
    right: Any
    max_seqlen_q: Any
    max_seqlen_k: Any


class SoftmaxParams(NamedTuple):
    """Float32. The raw score is q k^T, or tanh(softcap * q k^T) with a cap."""

    scale_log2: Any  # value of a raw score in log2 units
    softcap: Any  # scale / cap
    score_scale: Any = (
        None  # score_mod: the score in natural units that a raw score of 1 stands for; scale_log2 is then log2(e)
    )


class BlockLists(NamedTuple):
    """The key blocks that each block of queries sees, as FlexAttention's BlockMask has them. int32, contiguous.

    Masks hold in partial blocks. A full block promises that all of its keys are seen by all rows.
    """

    kv_num_blocks: Any  # [B or 1, H or 1, M]: how many partial blocks
    kv_indices: Any  # [B or 1, H or 1, M, N]: their numbers
    full_kv_num_blocks: Any = None  # the same of full blocks
    full_kv_indices: Any = None


class BlockListParams(NamedTuple):
    """BlockLists for the kernel, and the strides of kv_num_blocks: 0 where entries or heads share their lists."""

    kv_num_blocks: Any
    kv_indices: Any
    full_kv_num_blocks: Any
    full_kv_indices: Any
    stride_batch: Any
    stride_head: Any
    most_blocks: Any  # N
    most_full_blocks: Any
    num_m_blocks: Any  # M


class ForwardHooks(NamedTuple):
    """What the functions of a call read (tensors, ints, floats), and its block lists."""

    score_aux: tuple = ()
    mask_aux: tuple = ()
    block_lists: BlockLists | None = None


class HookParams(NamedTuple):
    """ForwardHooks for the kernel."""

    score_aux: Any
    mask_aux: Any
    block_lists: BlockListParams | None


class PoolStrides(NamedTuple):
    """Strides of 8-bit K or V in a cache, in words of 4 bytes; in bytes where they are copied."""

    page: Any  # or of a sequence in a dense cache
    row: Any
    head: Any


class CacheParams(NamedTuple):
    """Sizes of a cache whose keys packed queries see, int32. 0 where it has no pages."""

    max_pages: Any  # of a sequence
    num_pages: Any  # of the pool
    k_step: Any  # rows of K from one page, or one sequence of a dense cache, to the next
    v_step: Any
    few_tokens: Any  # another launch runs sequences with at most this many new tokens
    k_strides: Any = None  # PoolStrides of 8-bit keys
    v_strides: Any = None


class LaunchParams(NamedTuple):
    """All scalars of a launch, and what its hooks read."""

    num_tiles: Any
    shape: ShapeParams
    window: WindowParams
    softmax: SoftmaxParams
    hooks: HookParams | None = None
    cache: CacheParams | None = None


class CacheTensors(NamedTuple):
    """Where the keys of sequences lie in a cache (`device.cached_keys`), int32, and 8-bit keys themselves; None where
    the call has none.
    """

    page_table: Any  # [B, max_pages]
    seqlens: Any  # [B]
    k_start: Any  # [B]
    k: Any = None  # float8_e4m3fn
    v: Any = None
    k_scale: Any = None  # [H_kv] float32
    v_scale: Any = None
    is_copied: Any = None  # [B]: 1 for sequences whose keys have been copied (hopper.copied_keys), else 0


class Pointers(NamedTuple):
    """Tensors that TMA does not move; None where the call has none."""

    lse: Any  # [B, H, S_q] or [H, T_q] float32
    sinks: Any  # [H]
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    ranges: Any  # KeyRangeTensors
    errors: Any  # error word
    tile_counter: Any
    cache: Any = None  # CacheTensors


class KeyRangeTensors(NamedTuple):
    """Tensors that define the key ranges of each batch entry's rows (`device.key_ranges`)."""

    spans_q: Any
    spans_k: Any
    ids_q: Any
    ids_k: Any
    key_lengths: Any
    prefixes: Any


class InputMaps(NamedTuple):
    """ColumnParts of TMA descriptors each."""

    q: Any
    k: Any
    v: Any


class Outputs(NamedTuple):
    """What a consumer writes, and what else it reads from memory."""

    o: Any  # ColumnParts of TMA descriptors
    lse: Any
    sinks: Any
    ids_k: Any
    k_scale: Any = None  # of 8-bit keys
    v_scale: Any = None


class CuSeqlens(NamedTuple):
    """Offsets of packed sequences; None in other layouts."""

    q: Any
    k: Any


class Workspace(NamedTuple):
    """Memory that kernels write besides the outputs."""

    errors: Any
    tile_counter: Any
