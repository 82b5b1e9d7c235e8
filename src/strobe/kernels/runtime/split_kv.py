"""Host code that all families' decodes share: compile-time constants, the number of splits, kept launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...problem.call import DTYPES
from ...problem.decode import DecodeCall, DecodeProblem
from ...problem.mask import NO_BOUND
from ...problem.paged import PagedCall
from ..protocol import Forward, Plan
from .launch_cache import CACHE, decode_addresses
from .workspace import pieces_of

MOST_SPLITS = 128
JOIN_BLOCKS = 0.5  # combining splits takes as long as this many key tiles
# Each split adds this many key tiles for each row of a tile beyond EASY_ROWS. The Hopper decode of 1 sequence of 4096
# keys in 16 splits and in 32, us (H200): 8 rows 12.5, 13.5; 16 rows 13.9, 15.4; 32 rows 18.8, 25.1; 64 rows 26.8, 37.7
JOIN_BLOCKS_A_ROW, EASY_ROWS = 1 / 150, 8
# Keys per split with batch_invariant: a constant, because it determines the bits. 8 sequences of 8k take 67.5 us, and
# 71.1 us with splits of 1024 (H200).
INVARIANT_SPLIT = 2048


@dataclass(frozen=True)
class Traits:
    """The parts of a decode problem that a kernel is compiled for."""

    dtype: str
    head_dim: int
    head_dim_v: int
    group: int
    page_size: int  # 0: dense
    left: bool
    right: bool
    softcap: bool
    sinks: bool
    k_start: bool
    k_scale: bool
    v_scale: bool
    sign: int  # sign of the scale


def traits(problem: DecodeProblem) -> dict[str, Any]:
    """The fields of Traits."""
    return dict(
        dtype=DTYPES[problem.dtype],
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        group=problem.group,
        page_size=problem.page_size if problem.paged else 0,
        left=problem.left != NO_BOUND,
        right=problem.right != NO_BOUND,
        softcap=bool(problem.softcap),
        sinks=problem.sinks,
        k_start=problem.k_start,
        k_scale=problem.scales[0],
        v_scale=problem.scales[1],
        sign=(problem.scale > 0) - (problem.scale < 0),
    )


def splits(capacity: int, tiles: int, block_n: int, slots: int, rows: int = EASY_ROWS) -> tuple[int, int]:
    """(splits, keys per split): the fewest splits that take about as long as the optimum.

    A device runs programs in waves of `slots` programs, and each wave takes as long as one split. slots 0 gives splits
    of a fixed size, for batch_invariant. rows: of a tile, whose partial results are combined.

    >>> sizes = (1, 8192), (1, 131072), (8, 8192), (32, 4096), (64, 8192)  # batch, keys
    >>> [splits(keys, batch * 8, 128, 132)[0] for batch, keys in sizes]
    [16, 16, 2, 1, 1]
    >>> splits(8192, 8, 128, 0), splits(1000, 512, 128, 0)
    ((4, 2048), (1, 2048))
    >>> [splits(4096, 8, 64, 264, rows)[0] for rows in (8, 16, 32, 64)]
    [32, 32, 16, 11]
    """
    blocks = max(1, -(-capacity // block_n))
    if not slots:
        return max(1, -(-capacity // INVARIANT_SPLIT)), INVARIANT_SPLIT
    if 10 * tiles >= 8 * slots and not slots < tiles < 1.5 * slots:  # a second wave would be mostly empty
        return 1, blocks * block_n
    counts = range(1, min(MOST_SPLITS, slots, blocks) + 1)
    join = JOIN_BLOCKS_A_ROW * max(0, rows - EASY_ROWS)
    # in key tiles
    length = {n: -(-tiles * n // slots) * -(-blocks // n) + (JOIN_BLOCKS + join * n) * (n > 1) for n in counts}
    count = next(n for n, tiles_long in length.items() if 0.95 * tiles_long <= min(length.values()))
    size = -(-blocks // count) * block_n
    return -(-blocks * block_n // size), size


def insert_launch(
    plan: Plan, call: DecodeCall | PagedCall, t: Forward, workspace: dict[str, Tensor], launch: Any
) -> None:
    """Insert a decode's launch into the cache. A launch that combines splits uses counters of the current stream, so it
    is replayed on this stream only.
    """
    launch = launch.on_this_stream() if launch is not None and workspace else launch
    if t.out.is_contiguous():
        written = [tensor.data_ptr() for tensor in (*t, *pieces_of(workspace))]
        CACHE.insert_launch(plan, decode_addresses(call, *written), launch)
