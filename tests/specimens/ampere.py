"""Ampere matmul: every thread copies by cp.async into a ring of stages, and all multiply by mma.sync from registers.

    step i   wait for group i | its operands to registers | copy step i + stages - 1 into the stage read at i - 1 |
             multiply

A group is committed at every step, also where nothing is left to copy: so "all but the newest stages - 2 groups" is
always step i. c [M, N] = a [M, K] @ b [K, N], float32 sums, edges masked: what cp.async does not copy becomes zero. It
copies 16 bytes or nothing, so K and N are multiples of 8; M is any.
"""
# ruff: noqa: RUF059 (tuples are unpacked whole)

from dataclasses import dataclass

import torch
from torch import Tensor

from strobe.kernels.device.dialect import cp_async_commit, cp_async_load, cp_async_wait, gl, gluon, mma_v2

from .pieces import (
    Launch,
    empty_product,
    require,
    require_matrices,
    require_multiple,
    require_power_of_two,
    require_shared,
)


@dataclass(frozen=True)
class Config:
    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    stages: int = 3

    def __post_init__(self):
        require_power_of_two(self, block_m=32, block_n=32, block_k=16)
        tile = (self.block_m, self.block_n)
        require(
            self.block_m * self.block_n <= 128 * 128, "tile", tile, "at most 128 by 128", "its sums fill the registers"
        )
        require(2 <= self.stages <= 8, "stages", self.stages, "2 to 8", "with one stage the copies cannot overlap")
        require_shared(self, 163)

    def shared_bytes(self) -> int:
        return 2 * self.stages * self.block_k * (self.block_m + self.block_n)


@gluon.constexpr_function
def copy_layout(width):
    """Four warps over rows of `width` elements, 16 bytes a thread."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def ring_layout(width):
    """Rows of `width` elements in shared memory, 16-byte pieces swizzled so that eight rows of a matrix load meet no
    bank twice.
    """
    pieces = min(8, width // 8)
    return gl.SwizzledSharedLayout(8, max(1, 8 // pieces), pieces, [1, 0])


@gluon.jit
def copy_tile(smem, base, row, column, shape, layout: gl.constexpr):
    """Start copying the tile of `base` that begins at (row, column) into `smem`."""
    height, width, stride = shape
    rows = row + gl.arange(0, smem.shape[0], gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, smem.shape[1], gl.SliceLayout(0, layout))
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    pieces = base + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    # widths and strides are multiples of 8: the compiler does not see it, and cp.async moves 4 bytes or more
    cp_async_load(smem, gl.multiple_of(gl.max_contiguous(pieces, [1, 8]), [1, 16]), gl.max_constancy(inside, [1, 8]))


@gluon.jit
def copy_step(smem, stage, step, a, b, start, sizes, config: gl.constexpr):
    """Copy the tiles of a and b that `step` multiplies; commit them, or an empty group beyond the last step."""
    a_smem, b_smem = smem
    m_start, n_start = start
    size_m, size_n, size_k, stride_a, stride_b = sizes
    k_start = step * config.block_k
    if k_start < size_k:
        copy_tile(a_smem.index(stage), a, m_start, k_start, (size_m, size_k, stride_a), copy_layout(config.block_k))
        copy_tile(b_smem.index(stage), b, k_start, n_start, (size_k, size_n, stride_b), copy_layout(config.block_n))
    cp_async_commit()


@gluon.jit
def matmul_kernel(a, b, c, sizes, stride_c, config: gl.constexpr):
    size_m, size_n, size_k, stride_a, stride_b = sizes
    dtype: gl.constexpr = c.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    a_smem = gl.allocate_shared_memory(
        dtype, [config.stages, config.block_m, config.block_k], ring_layout(config.block_k)
    )
    b_smem = gl.allocate_shared_memory(
        dtype, [config.stages, config.block_k, config.block_n], ring_layout(config.block_n)
    )
    smem = (a_smem, b_smem)
    start = (gl.program_id(0) * config.block_m, gl.program_id(1) * config.block_n)
    ahead: gl.constexpr = config.stages - 1
    for step in gl.static_range(ahead):
        copy_step(smem, step, step, a, b, start, sizes, config)
    total = gl.full([config.block_m, config.block_n], 0.0, gl.float32, layout)
    stage = 0
    for step in range(gl.cdiv(size_k, config.block_k)):
        cp_async_wait(config.stages - 2)
        a_reg = a_smem.index(stage).load(gl.DotOperandLayout(0, layout, 2))
        b_reg = b_smem.index(stage).load(gl.DotOperandLayout(1, layout, 2))
        before = gl.where(stage == 0, ahead, stage - 1)
        copy_step(smem, before, step + ahead, a, b, start, sizes, config)
        total = mma_v2(a_reg, b_reg, total)
        stage = gl.where(stage == ahead, 0, stage + 1)
    cp_async_wait(0)  # the groups still open are empty; a kernel leaves none behind all the same
    m_start, n_start = start
    rows = m_start + gl.arange(0, config.block_m, gl.SliceLayout(1, layout))
    columns = n_start + gl.arange(0, config.block_n, gl.SliceLayout(0, layout))
    inside = (rows < size_m)[:, None] & (columns < size_n)[None, :]
    gl.store(c + rows.to(gl.int64)[:, None] * stride_c + columns[None, :], total.to(dtype), mask=inside)


def launch(a: Tensor, b: Tensor, config: Config = Config()) -> Launch:
    require_matrices(a, b)
    for name, size in (("K", a.shape[1]), ("N", b.shape[1])):
        require_multiple(name, size, 8)
    c = empty_product(a, b)
    grid = (-(-a.shape[0] // config.block_m), -(-b.shape[1] // config.block_n))
    sizes = (a.shape[0], b.shape[1], a.shape[1], a.stride(0), b.stride(0))
    return Launch(matmul_kernel, grid, (a, b, c, sizes, c.stride(0), config), {"num_warps": 4}, (c,))


def run(a: Tensor, b: Tensor, config: Config = Config()) -> Tensor:
    """c [M, N] in a's dtype."""
    return launch(a, b, config).start()[0]


def reference(a: Tensor, b: Tensor) -> Tensor:
    return a.to(torch.float64) @ b.to(torch.float64)
