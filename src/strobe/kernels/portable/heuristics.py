"""Tile sizes of the portable kernels, looked up by the problem and the target, never timed at run time.

Each row is the fastest of 8 to 15 configs on an H200 (2026-11-21, bfloat16, 16k tokens, Triton 3.6.0). Tiles of 64 x 64
with 4 warps allow two or three CTAs per SM, whose products and softmax overlap: d128 dense runs at 547 TFLOP/s, and at
469 with 128 x 128 and 8 warps. TMA instead of cp.async frees registers and raises 445 to 547 TFLOP/s. `_fit` reduces
stages and tiles if shared memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...problem.problem import ALIGNMENT, Problem
from ...problem.target import KIB, Target

FIRST_TMA = 90  # compute capability


@dataclass(frozen=True)
class TileConfig:
    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = True


@dataclass(frozen=True)
class TileConfigs:
    """The fastest configs for head dimensions up to `width` (padded to powers of two)."""

    width: int
    forward: TileConfig
    forward_masked: TileConfig
    keys: TileConfig
    keys_masked: TileConfig
    queries: TileConfig


HOPPER = (
    TileConfigs(
        64,
        TileConfig(64, 128, 4, 3),
        TileConfig(64, 64, 4, 3),
        TileConfig(128, 64, 4, 2),
        TileConfig(64, 64, 4, 3),
        TileConfig(64, 64, 4, 3),
    ),
    TileConfigs(
        128,
        TileConfig(64, 64, 4, 3),
        TileConfig(64, 64, 4, 3),
        TileConfig(64, 128, 8, 3),
        TileConfig(64, 64, 4, 2),
        TileConfig(128, 64, 8, 3),
    ),
    TileConfigs(
        256,
        TileConfig(128, 64, 8, 2),
        TileConfig(128, 64, 8, 2),
        TileConfig(64, 64, 8, 2),
        TileConfig(64, 64, 8, 2),
        TileConfig(128, 64, 8, 1),
    ),
)
# sm_80 to 89 and sm_120, whose products read both operands from registers: not measured; compiled for few spills
AMPERE = (
    TileConfigs(64, *[TileConfig(64, 64, 4, 3)] * 5),
    TileConfigs(128, *[TileConfig(64, 64, 4, 3)] * 2, *[TileConfig(64, 64, 4, 2)] * 3),
    TileConfigs(256, *[TileConfig(64, 64, 8, 1)] * 5),
)
BLACKWELL = (  # sm_100 and 103: not measured; chosen for few spills when compiled
    TileConfigs(64, *[TileConfig(64, 64, 4, 3)] * 5),
    TileConfigs(128, *[TileConfig(64, 64, 8, 2)] * 5),
    TileConfigs(256, *[TileConfig(64, 64, 8, 1)] * 5),
)
BY_CAPABILITY = {90: HOPPER, 100: BLACKWELL, 103: BLACKWELL}
# float32 products run on CUDA cores (TF32 would lose half the digits), and float64 is slow on most GPUs: small tiles,
# for correctness only
WIDE = {
    torch.float32: (
        TileConfigs(128, *[TileConfig(64, 32, 4, 2, tma=False)] * 2, *[TileConfig(32, 32, 8, 1, tma=False)] * 3),
        TileConfigs(256, *[TileConfig(32, 32, 4, 2, tma=False)] * 2, *[TileConfig(16, 16, 4, 1, tma=False)] * 3),
    ),
    torch.float64: (
        TileConfigs(128, *[TileConfig(32, 32, 4, 1, tma=False)] * 2, *[TileConfig(16, 16, 4, 1, tma=False)] * 3),
        TileConfigs(256, *[TileConfig(16, 16, 4, 1, tma=False)] * 2, *[TileConfig(16, 16, 4, 1, tma=False)] * 3),
    ),
}


def forward_tile(problem: Problem, target: Target) -> TileConfig:
    configs = _configs(problem, target)
    tile = configs.forward_masked if any(problem.mask) else configs.forward
    return _fit(tile, problem, target, lambda t: _forward_bytes(t, problem))


def backward_tiles(problem: Problem, target: Target) -> tuple[TileConfig, TileConfig]:
    """Tiles of (the kernel for dk and dv, the kernel for dq)."""
    configs = _configs(problem, target)
    keys = configs.keys_masked if any(problem.mask) or problem.packed else configs.keys
    if problem.mods is not None and problem.mods.dropout and target.capability != 90:
        # at 64 keys the random numbers spill 596 to 1,236 bytes of a thread (d64, sm_80), and at 32 none
        keys = replace(keys, block_n=max(16, keys.block_n // 2))
    return (
        _fit(keys, problem, target, lambda t: _backward_bytes(t.block_n, t.block_m, t.stages, problem)),
        _fit(configs.queries, problem, target, lambda t: _backward_bytes(t.block_m, t.block_n, t.stages, problem)),
    )


def _configs(problem: Problem, target: Target) -> TileConfigs:
    known = WIDE.get(problem.dtype) or BY_CAPABILITY.get(target.capability, AMPERE)
    width = max(padded(problem.head_dim), padded(problem.head_dim_v))
    return next(configs for configs in known if configs.width >= width)


class Widths:
    """Sizes that follow from head_dim, head_dim_v and dtype."""

    head_dim: int
    head_dim_v: int
    dtype: str

    @property
    def block_d(self) -> int:
        return padded(self.head_dim)

    @property
    def block_dv(self) -> int:
        return padded(self.head_dim_v)

    @property
    def accumulator(self) -> Any:
        import triton.language as tl

        return tl.float64 if self.dtype == "float64" else tl.float32


def padded(width: int) -> int:
    """Head dimensions are loaded as powers of two, at least 16; the rest is masked."""
    return max(16, 1 << (width - 1).bit_length())


def _fit(tile: TileConfig, problem: Problem, target: Target, shared_bytes) -> TileConfig:
    """The config reduced to what target and problem allow: TMA only for aligned rows that lie apart; tiles fit in
    shared memory.
    """
    tma = tile.tma and target.capability >= FIRST_TMA and problem.alignment == ALIGNMENT and not problem.mask.documents
    tma = tma and all([strides[-3] for strides in problem.strides])
    tile = replace(tile, tma=tma)
    limit = (target.shared_bytes or 99 * KIB) - 2 * KIB  # reserved for barriers, reductions and padding
    while shared_bytes(tile) > limit:
        if tile.stages > 1:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.block_n >= tile.block_m:
            tile = replace(tile, block_n=tile.block_n // 2)
        else:
            tile = replace(tile, block_m=tile.block_m // 2)
    return tile


def _forward_bytes(tile: TileConfig, problem: Problem) -> int:
    """Shared memory of q, and of k and v per stage."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    return problem.dtype.itemsize * (tile.block_m * d + tile.stages * tile.block_n * (d + dv))


def _backward_bytes(resident: int, streamed: int, stages: int, problem: Problem) -> int:
    """Shared memory of two resident tiles, two streamed tiles per stage, and p or ds during layout conversion."""
    width = padded(problem.head_dim) + padded(problem.head_dim_v)
    return problem.dtype.itemsize * ((resident + stages * streamed) * width + resident * streamed)
