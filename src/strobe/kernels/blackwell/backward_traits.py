"""Compile-time constants of the Blackwell backward."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem.mask import MaskStructure
from ...problem.target import KIB
from ..runtime.compile_cache import Constants
from .traits import REGISTERS, ROWS


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


@dataclass(frozen=True)
class BackwardTraits(Constants):
    """Compile-time constants of the backward. It has no __str__ of its own, because Triton identifies kernels by it."""

    tuning: BackwardTileConfig
    block_d: int
    block_dv: int
    head_dim: int
    head_dim_v: int
    group: int  # query heads that share a key head: a program visits all of them
    mask: MaskStructure
    even: bool  # S_k is a multiple of block_n

    block_m = ROWS
    block_n = ROWS
    wraps = False  # TMA descriptors of packed sequences wrap (device.tma)

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
        return self.mask.left or self.mask.right or not self.even

    def shared_bytes(self) -> int:
        """K, V, dS, the stages of Q and dO in 2 bytes each, their LSE and delta in 4, and barriers."""
        t = self.tuning
        columns = (1 + t.q_stages) * self.block_d + (1 + t.do_stages) * self.block_dv + ROWS
        barriers = 1 + 2 * t.q_stages + 2 * t.do_stages + 7
        return 2 * ROWS * columns + 4 * ROWS * (t.q_stages + t.do_stages) + 8 * barriers

    def tensor_columns(self) -> int:
        """S^T (overlaid by P^T), dV, dP^T (overlaid by dS^T, then by dQ) and dK, ROWS columns each."""
        return 4 * ROWS


@dataclass(frozen=True)
class BackwardConfig:
    form: BackwardTraits

    def __str__(self) -> str:
        form, t = self.form, self.form.tuning
        registers = ", ".join(f"{role} {count}" for role, count in t.registers_of().items())
        return (
            f"block_m={form.block_m} block_n={form.block_n} stages={t.q_stages}/{t.do_stages} one CTA, dq added by "
            f"vector atomics, shared {form.shared_bytes() / KIB:.0f} KiB, {form.tensor_columns()} columns of tensor "
            f"memory, registers {registers}; has not run on a Blackwell GPU"
        )
