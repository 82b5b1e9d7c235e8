"""Compile-time constants of the Blackwell forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...problem.mask import MaskStructure
from ...problem.target import KIB
from ..runtime.compile_cache import Constants
from ..runtime.hook_constants import HookConstants, ListedBlocks, function_key
from ..runtime.tile_constants import ForwardTileConstants
from ..runtime.tma_requirements import rows_per_query

ROWS = 128  # rows of a query stage: the lanes of tensor memory
STAGES_Q = 2  # query stages, whose softmax and products alternate
TENSOR_COLUMNS = 512  # columns of tensor memory, 32 bits wide
DENSE_WORDS = 8  # int32 of a published work tile (device.forward_scheduler)
REGISTERS = 128  # per thread, of the 64 Ki of an SM: 16 warps, including the one that Triton adds


@dataclass(frozen=True)
class TileConfig:
    """Tile configuration of the forward."""

    stages: int  # pipeline stages, shared by keys and values
    out_stages: int  # buffers through which tiles of o are stored
    block_n: int = 128
    # per thread of softmax, and of mma, load and store; correction gets the remainder (`registers_of`)
    registers: tuple[int, int] = 184, 48
    # conditional rescaling: o is rescaled if a row's maximum grows by more, in log2 units
    rescale_threshold: float = 8.0
    # pack_gqa: query heads per tile, whose rows for one query are adjacent: one, or all that share a key head
    pack_gqa: int = 1

    @property
    def rows_per_query(self) -> int:
        """Rows of a tile per query."""
        return rows_per_query(self.pack_gqa)

    @property
    def block_m(self) -> int:
        """Queries per tile."""
        return ROWS * STAGES_Q // self.rows_per_query

    def registers_of(self) -> dict[str, int]:
        """Registers per thread of each role: 8 warps of softmax, 4 single-warp roles (one idle), 4 of correction."""
        softmax, few = self.registers
        return {
            "softmax": softmax,
            "mma": few,
            "load": few,
            "store": few,
            "correct": (16 * REGISTERS - 8 * softmax - 4 * few) // 4,
        }


@dataclass(frozen=True)
class ForwardTraits(Constants, ForwardTileConstants, HookConstants):
    """Compile-time constants of the forward. It has no __str__ of its own, because Triton identifies kernels by it."""

    tuning: TileConfig
    block_d: int
    block_dv: int
    group: int  # heads that share a key head and have their own tiles
    mask: MaskStructure
    softcap: bool
    sinks: bool
    even: bool  # S_k is a multiple of block_n
    packed: bool
    # programs take tiles from a counter, because tiles differ in cost; otherwise each program strides over the tiles
    counted: bool
    by_fma: int  # exponentials computed by multiply-adds, of each 32
    degree: int  # degree of their polynomial
    # p is at most 2^log2_offset with a new maximum, and 2^(log2_offset + rescale_threshold) with conditional rescaling
    log2_offset: float
    # functions of the call (device.forward_hooks). Triton identifies a function by its name alone, so `functions` has
    # keys of their text
    score_mod: Any = None
    mask_mod: Any = None
    block_lists: ListedBlocks | None = None
    functions: tuple[str | None, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "functions", tuple(function_key(fn) for fn in (self.score_mod, self.mask_mod)))

    # roles that read a work tile: mma, softmax of both query stages, correction, store
    consumers = 5
    # features of shared device functions (device.forward_scheduler, device.forward_mask) that this kernel lacks
    first_block_first = False
    ends_with_last_row = False

    @property
    def out_stages(self) -> int:
        return self.tuning.out_stages

    @property
    def key_ranges(self) -> bool:
        """The kernel takes no masks with key ranges."""
        return False

    @property
    def longest_tiles_first(self) -> bool:
        """Not with block lists, which say themselves what a tile visits; sections of heads may have further tiles."""
        return super().longest_tiles_first and not self.has_block_lists

    @property
    def rescale_threshold(self) -> float:
        return self.tuning.rescale_threshold

    @property
    def registers_softmax(self) -> int:
        """Registers per thread of the softmax warps."""
        return self.tuning.registers[0]

    @property
    def registers_one_warp(self) -> int:
        """Registers per thread of the roles with one warp."""
        return self.tuning.registers[1]

    @property
    def masks(self) -> bool:
        """Whether any tile may contain a masked key. If not, the mainloop has no mask code."""
        return self.mask.left or self.mask.right or not self.even

    @property
    def queries_per_consumer(self) -> int:
        """Queries per query stage."""
        return ROWS // self.tuning.rows_per_query

    def shared_bytes(self) -> int:
        """q, the stages of k and v, and o in 2 bytes each, row statistics in 4, barriers, and work tiles' records."""
        t = self.tuning
        widest = max(self.main_d, self.main_dv) + max(self.tail_d, self.tail_dv)
        tiles = 2 * (
            STAGES_Q * ROWS * self.block_d + t.stages * t.block_n * widest + t.out_stages * ROWS * self.block_dv
        )
        return (
            tiles + 4 * 2 * STAGES_Q * ROWS + 8 * (8 * STAGES_Q + 2 * t.stages + 2 * t.out_stages + 4) + 8 * DENSE_WORDS
        )

    def tensor_columns(self) -> int:
        """s (overlaid by p) and o of both query stages in float32."""
        return STAGES_Q * (self.tuning.block_n + self.block_dv)


@dataclass(frozen=True)
class ForwardConfig:
    traits: ForwardTraits

    def __str__(self) -> str:
        t = self.traits.tuning
        registers = ", ".join(f"{role} {count}" for role, count in t.registers_of().items())
        by_fma = (
            f", {self.traits.by_fma} of 32 exponentials by multiply-adds of degree {self.traits.degree}"
            if self.traits.by_fma
            else ""
        )
        order = "tiles from a counter" if self.traits.counted else "tiles in turn"
        heads = f" of {t.pack_gqa} heads" if t.pack_gqa > 1 else ""
        functions = "".join([
            ", score_mod" * (self.traits.score_mod is not None),
            ", mask_mod" * (self.traits.mask_mod is not None),
            ", block lists" * self.traits.has_block_lists,
        ])  # fmt: skip
        return (
            f"block_m={t.block_m}{heads} block_n={t.block_n} stages={t.stages}, {order}, shared "
            f"{self.traits.shared_bytes() / KIB:.0f} KiB, {self.traits.tensor_columns()} columns of tensor "
            f"memory{by_fma}, registers {registers}{functions}; has not run on a Blackwell GPU"
        )
