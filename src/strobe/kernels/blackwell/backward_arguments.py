"""Arguments of the Blackwell backward's main kernel."""

from __future__ import annotations

from typing import Any, NamedTuple


class ShapeParams(NamedTuple):
    """Sizes, int32."""

    batch: Any  # batch entries, or packed sequences
    heads: Any  # query heads
    seqlen_q: Any  # or all packed query tokens
    seqlen_k: Any
    num_m_blocks: Any  # tiles of queries of a head
    num_n_blocks: Any  # tiles of keys of a head
    l2_heads: Any  # key heads of a section, whose queries stay in L2
    # key ranges: rows between the starts of batch entries; else 0
    stride_q: Any = 0
    stride_do: Any = 0
    stride_k: Any = 0
    stride_v: Any = 0
    stride_dk: Any = 0
    stride_dv: Any = 0


class WindowParams(NamedTuple):
    """Bounds of the mask relative to the diagonal, int32."""

    left: Any
    right: Any


class SoftmaxParams(NamedTuple):
    """Float32. The raw score is q k^T, or tanh(softcap * q k^T) with a cap."""

    scale_log2: Any  # value of a raw score in log2 units
    softcap: Any  # scale / cap
    scale: Any  # of dQ and dK


class LaunchParams(NamedTuple):
    """All scalars of the main kernel."""

    shape: ShapeParams
    window: WindowParams
    softmax: SoftmaxParams


class KeyRangeTensors(NamedTuple):
    """Tensors that define the key ranges of each batch entry's rows (`device.key_ranges`)."""

    spans_q: Any
    spans_k: Any
    ids_q: Any
    ids_k: Any
    key_lengths: Any
    prefixes: Any


class Pointers(NamedTuple):
    """Tensors of the main kernel that TMA does not move; None where the call has none."""

    dq_sum: Any
    dq_semaphores: Any  # deterministic: number of work tiles that have added to each tile of dQ
    tile_counter: Any  # deterministic: number of the next program
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    ranges: Any  # KeyRangeTensors
