"""Compile-time constants of the Blackwell forward."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem.mask import MaskStructure
from ...problem.target import KIB
from ..runtime.compile_cache import Constants
from ..runtime.tma_requirements import fold_of, rest

ROWS = 128  # rows of a query stage: the lanes of tensor memory
STAGES_Q = 2  # query stages, whose softmax and products alternate
TENSOR_COLUMNS = 512  # columns of tensor memory, 32 bits wide
REGISTERS = 128  # per thread, of the 64 Ki of an SM: 16 warps, including the one that Triton adds


@dataclass(frozen=True)
class Tuning:
    """Tile configuration of the forward."""

    stages: int  # pipeline stages, shared by keys and values
    out_stages: int  # buffers through which tiles of o are stored
    block_n: int = 128
    # per thread of softmax, and of mma, load and store; correction gets the remainder (`registers_of`)
    registers: tuple[int, int] = 184, 48
    threshold: float = 8.0  # conditional rescaling: o is rescaled if a row's maximum grows by more, in log2 units
    # pack_gqa: query heads per tile, whose rows for one query are adjacent: one, or all that share a key head
    joined: int = 1

    @property
    def fold(self) -> int:
        """Rows of a tile per query."""
        return fold_of(self.joined)

    @property
    def block_m(self) -> int:
        """Queries per tile."""
        return ROWS * STAGES_Q // self.fold

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
class Form(Constants):
    """Compile-time constants of the forward. It has no __str__ of its own, because Triton identifies kernels by it."""

    tuning: Tuning
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
    lift: float  # p is at most 2^lift with a new maximum, and 2^(lift + threshold) with conditional rescaling

    @property
    def wraps(self) -> bool:
        """Whether TMA descriptors wrap around (device.tma)."""
        return self.packed

    @property
    def masks(self) -> bool:
        """Whether any tile may contain a masked key. If not, the mainloop has no mask code."""
        return self.mask.left or self.mask.right or not self.even

    @property
    def own_queries(self) -> int:
        """Queries that iterate over keys together: both query stages do."""
        return self.tuning.block_m

    @property
    def stage_queries(self) -> int:
        """Queries per query stage."""
        return ROWS // self.tuning.fold

    @property
    def rest_d(self) -> int:
        """Columns of q and k after their first part. Each part is a power of two wide."""
        return rest(self.block_d)

    @property
    def rest_dv(self) -> int:
        return rest(self.block_dv)

    def shared_bytes(self) -> int:
        """q, the stages of k and v, and o in 2 bytes each, row statistics in 4, barriers, and work tiles' records."""
        t = self.tuning
        widest = max(self.block_d - self.rest_d, self.block_dv - self.rest_dv) + max(self.rest_d, self.rest_dv)
        tiles = 2 * (
            STAGES_Q * ROWS * self.block_d + t.stages * t.block_n * widest + t.out_stages * ROWS * self.block_dv
        )
        return tiles + 4 * 2 * STAGES_Q * ROWS + 8 * (8 * STAGES_Q + 2 * t.stages + 2 * t.out_stages + 4) + 64

    def tensor_columns(self) -> int:
        """s (overlaid by p) and o of both query stages in float32."""
        return STAGES_Q * (self.tuning.block_n + self.block_dv)


@dataclass(frozen=True)
class ForwardConfig:
    form: Form

    def __str__(self) -> str:
        t = self.form.tuning
        registers = ", ".join(f"{role} {count}" for role, count in t.registers_of().items())
        by_fma = (
            f", {self.form.by_fma} of 32 exponentials by multiply-adds of degree {self.form.degree}"
            if self.form.by_fma
            else ""
        )
        order = "tiles from a counter" if self.form.counted else "tiles in turn"
        heads = f" of {t.joined} heads" if t.joined > 1 else ""
        return (
            f"block_m={t.block_m}{heads} block_n={t.block_n} stages={t.stages}, {order}, shared "
            f"{self.form.shared_bytes() / KIB:.0f} KiB, {self.form.tensor_columns()} columns of tensor memory{by_fma}, "
            f"registers {registers}; has not run on a Blackwell GPU"
        )
