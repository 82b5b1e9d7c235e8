"""What the Blackwell backward's main kernel is told, by name."""

from __future__ import annotations

from typing import Any, NamedTuple


class ShapeParams(NamedTuple):
    """Sizes, int32."""

    batch: Any
    heads: Any  # query heads
    seqlen_q: Any
    seqlen_k: Any
    num_m_blocks: Any  # tiles of queries of a head
    num_n_blocks: Any  # tiles of keys of a head
    l2_heads: Any  # key heads of a section, whose queries stay in L2


class WindowParams(NamedTuple):
    """Bounds of the mask relative to the diagonal, int32."""

    left: Any
    right: Any


class SoftmaxParams(NamedTuple):
    """Float32."""

    scale_log2: Any  # value of a raw score in log2 units
    scale: Any  # of dQ and dK


class LaunchParams(NamedTuple):
    """All scalars of the main kernel."""

    shape: ShapeParams
    window: WindowParams
    softmax: SoftmaxParams
