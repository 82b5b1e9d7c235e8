"""Compile-time constants of the Blackwell backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...problem.mask import MaskStructure
from ...problem.target import KIB
from ..runtime.compile_cache import Constants
from ..runtime.tile_constants import TileConstants
from .traits import REGISTERS, ROWS, TENSOR_COLUMNS

PAIR_BARRIERS = 23  # of each CTA


@dataclass(frozen=True)
class BackwardTileConfig:
    """Tile configuration of the backward. Tiles of queries and of keys have 128 rows, the lanes of tensor memory."""

    q_stages: int = 2
    do_stages: int = 1
    # per thread of compute, and of mma and load; reduce gets the remainder (`registers_of`)
    registers: tuple[int, int] = 176, 48

    def registers_of(self) -> dict[str, int]:
        """Registers per thread of each role: 8 warps of compute, 2 single-warp roles of 4 slots, 4 of reduce."""
        compute, few = self.registers
        return {"reduce": (16 * REGISTERS - 8 * compute - 4 * few) // 4, "compute": compute, "mma": few, "load": few}


class TensorColumns(NamedTuple):
    """First column of tensor memory of each tile. P^T lies over the first half of S^T, dS^T over that of dP^T."""

    s: int
    dv: int
    dp: int
    dk: int
    dq: int


@dataclass(frozen=True)
class BackwardTraits(Constants, TileConstants):
    """Compile-time constants of the backward. It has no __str__ of its own, because Triton identifies kernels by it."""

    tuning: BackwardTileConfig
    block_d: int
    block_dv: int
    head_dim: int
    head_dim_v: int
    group: int  # query heads that share a key head: a program visits all of them
    mask: MaskStructure
    softcap: bool
    even: bool  # S_k is a multiple of block_n
    packed: bool
    deterministic: bool = False  # work tiles add to a tile of dQ in a fixed order (backward_work)
    reversed_sections: int = 0  # sections of heads whose deterministic programs start from the first keys
    pair: bool = False  # two CTAs share a tile of keys (pair_backward)

    block_m = ROWS

    @property
    def half_tiles(self) -> bool:
        """Whether each CTA of a pair has 64 keys, because dK and dV of 128 would fill tensor memory. A tile then takes
        half as many columns: lanes 0 to 63 hold the first half of its columns, lanes 64 to 127 the second.
        """
        return self.pair and self.block_d + self.block_dv >= TENSOR_COLUMNS

    @property
    def cta_keys(self) -> int:
        """Keys per tile of each CTA."""
        return ROWS // 2 if self.half_tiles else ROWS

    @property
    def block_n(self) -> int:
        """Keys per tile, of one CTA or of both of a pair."""
        return 2 * self.cta_keys if self.pair else self.cta_keys

    @property
    def part_columns(self) -> int:
        """Queries that the compute warps handle at a time, 32 a thread."""
        return ROWS if self.half_tiles else ROWS // 2

    @property
    def q_stages(self) -> int:
        return self.tuning.q_stages

    @property
    def do_stages(self) -> int:
        return self.tuning.do_stages

    @property
    def registers_compute(self) -> int:
        """Registers per thread of the compute warps."""
        return self.tuning.registers[0]

    @property
    def registers_one_warp(self) -> int:
        """Registers per thread of the roles with one warp."""
        return self.tuning.registers[1]

    @property
    def masks(self) -> bool:
        """Whether any tile may contain a masked pair. If not, the mainloop has no mask code."""
        return self.mask.left or self.mask.right or self.mask.prefix or not self.even

    @property
    def masks_p(self) -> bool:
        """With a softcap: whether the mask is applied to P instead of the scores. Deterministic kernels with windows
        spilled 16 bytes before, 0 now. Other kernels with windows spill 0 bytes, and up to 80 with a mask on P.
        """
        return self.deterministic

    @property
    def serial(self) -> bool:
        """Whether the products of a step follow each other. Tensor memory does not hold S, dP and the gradients at
        once, so dP overlaps S, and dQ overlaps both. Half tiles do not overlap, but shared memory does not hold the
        rows and the columns of Q and dO at once.
        """
        return 2 * ROWS + self.block_d + self.block_dv > TENSOR_COLUMNS

    @property
    def columns(self) -> TensorColumns:
        """First columns. Serial: dP overlaps the half of S that P does not overlap, and dQ overlaps P and dP. Pair: dQ
        has half as many columns and overlaps the half of S that P does not overlap; serial: dP and dS. Half tiles do
        not overlap.
        """
        if self.half_tiles:
            dv, dk = self.block_dv // 2, self.block_d // 2
            return TensorColumns(dv=0, dk=dv, s=dv + dk, dp=dv + dk + ROWS // 2, dq=dv + dk + ROWS)
        if self.serial:
            return TensorColumns(
                s=TENSOR_COLUMNS - ROWS - ROWS // 2,
                dv=0,
                dp=TENSOR_COLUMNS - ROWS,
                dk=self.block_dv,
                dq=TENSOR_COLUMNS - (self.block_d // 2 if self.pair else self.block_d),
            )
        return TensorColumns(s=0, dv=ROWS, dp=2 * ROWS, dk=3 * ROWS, dq=ROWS // 2 if self.pair else 2 * ROWS)

    def shared_bytes(self) -> int:
        """K, V, dS, the stages of Q and dO in 2 bytes each, their LSE and delta in 4, and barriers. Pair: of one CTA,
        which has half of K's columns, Q's and dO's rows and columns besides. Serial: Q's rows and columns share memory.
        Half tiles: dO's, too, and P and dS^T lie in shared memory.
        """
        t = self.tuning
        stats = 4 * ROWS * (t.q_stages + t.do_stages)
        if self.half_tiles:
            columns = 3 * self.block_d + 2 * self.block_dv + 3 * ROWS
            return 2 * self.cta_keys * columns + stats + 8 * (PAIR_BARRIERS + self.key_ranges + self.mask.documents)
        if self.pair:
            barriers = PAIR_BARRIERS + self.key_ranges + self.mask.documents
            columns = 3 * self.block_d - self.serial * self.block_d // 2 + 2 * self.block_dv + ROWS
            return 2 * ROWS * columns + stats + 8 * barriers
        columns = (1 + t.q_stages) * self.block_d + (1 + t.do_stages) * self.block_dv + ROWS
        barriers = 1 + 2 * t.q_stages + 2 * t.do_stages + 7
        barriers += self.key_ranges + self.mask.documents * t.q_stages
        return 2 * ROWS * columns + stats + 8 * barriers

    def tensor_columns(self) -> int:
        """Triton allocates powers of two."""
        return TENSOR_COLUMNS


@dataclass(frozen=True)
class BackwardConfig:
    traits: BackwardTraits

    def __str__(self) -> str:
        traits, t = self.traits, self.traits.tuning
        registers = ", ".join(f"{role} {count}" for role, count in t.registers_of().items())
        order = ", serial products" if traits.serial else ""
        ctas = "a pair of CTAs" if traits.pair else "one CTA"
        adds = "vector atomics in order" if traits.deterministic else "vector atomics"
        return (
            f"block_m={traits.block_m} block_n={traits.block_n} stages={t.q_stages}/{t.do_stages} {ctas}{order}, dq "
            f"added by {adds}, shared {traits.shared_bytes() / KIB:.0f} KiB, {traits.tensor_columns()} columns of "
            f"tensor memory, registers {registers}; has not run on a Blackwell GPU"
        )
