"""What is constant in a compiled Blackwell forward."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem.mask import MaskStructure
from ...problem.target import KIB
from ..runtime.constants import Constants
from ..runtime.tma_requirements import fold_of, rest

ROWS = 128  # of one query stage: the lanes of tensor memory
STAGES_Q = 2  # query stages, whose softmaxes take turns with their products
TENSOR_COLUMNS = 512  # of tensor memory, 32 bits wide
REGISTERS = 128  # a thread, of the 64 Ki of an SM: 16 warps with the one that Triton adds


@dataclass(frozen=True)
class Tuning:
    """Tile and rings of the forward."""

    stages: int  # of the ring that keys and values share
    out_stages: int  # buffers through which tiles of o leave
    block_n: int = 128
    # of a thread of softmax, and of mma, load and store; correct has what they leave: see `registers_of`
    registers: tuple[int, int] = 184, 48
    threshold: float = 8.0  # o is rescaled where a row's maximum grows by more, in log2 units
    # query heads that a tile holds, of a query each in rows that follow each other: one, or all that share a key head
    joined: int = 1

    @property
    def fold(self) -> int:
        """Rows of a tile that a query takes."""
        return fold_of(self.joined)

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return ROWS * STAGES_Q // self.fold

    def registers_of(self) -> dict[str, int]:
        """Each role's registers a thread: 8 warps of softmax, 4 of one warp each (one of them idle), 4 of correct."""
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
    """All that a compiled kernel holds as constants; no __str__ of its own, since Triton tells kernels apart by it."""

    tuning: Tuning
    block_d: int
    block_dv: int
    group: int  # heads that share a key head and have tiles of their own
    mask: MaskStructure
    softcap: bool
    sinks: bool
    even: bool  # S_k is a multiple of block_n
    packed: bool
    # programs take tiles from a counter, since tiles differ in cost; else each takes those that stand apart by their
    # number
    counted: bool
    by_fma: int  # of each 32 weights, those whose exponentials multiply-adds compute
    degree: int  # of their polynomial
    lift: float  # p reaches up to 2^lift where a maximum is new, and up to 2^(lift + threshold) where it lags

    @property
    def wraps(self) -> bool:
        """Whether TMA's views wrap: device.tma."""
        return self.packed

    @property
    def masks(self) -> bool:
        """Whether any tile may hold a hidden key; where none can, the loop has no code for masks."""
        return self.mask.left or self.mask.right or not self.even

    @property
    def own_queries(self) -> int:
        """Queries that walk keys by themselves: both query stages walk the same."""
        return self.tuning.block_m

    @property
    def stage_queries(self) -> int:
        """Queries of a query stage."""
        return ROWS // self.tuning.fold

    @property
    def rest_d(self) -> int:
        """Columns of q and k beyond their first part: shapes are powers of two."""
        return rest(self.block_d)

    @property
    def rest_dv(self) -> int:
        return rest(self.block_dv)

    def shared_bytes(self) -> int:
        """q, the ring of k and v, and o at 2 bytes; the mailboxes at 4, the barriers, and the board of two tiles'
        numbers."""
        t = self.tuning
        widest = max(self.block_d - self.rest_d, self.block_dv - self.rest_dv) + max(self.rest_d, self.rest_dv)
        tiles = 2 * (
            STAGES_Q * ROWS * self.block_d + t.stages * t.block_n * widest + t.out_stages * ROWS * self.block_dv
        )
        return tiles + 4 * 2 * STAGES_Q * ROWS + 8 * (8 * STAGES_Q + 2 * t.stages + 2 * t.out_stages + 4) + 64

    def tensor_columns(self) -> int:
        """s (p lies over it) and o of both query stages in float32."""
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
            f"{self.form.shared_bytes() / KIB:.0f} KiB, "
            f"{self.form.tensor_columns()} columns of tensor memory{by_fma}, registers {registers}; has not run on "
            "a Blackwell GPU"
        )
