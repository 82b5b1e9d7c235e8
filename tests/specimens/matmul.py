"""Hopper matmul: one warp loads by TMA into a ring of stages, four or eight warps multiply by wgmma and store by TMA.

    load_partition   waits tile_free[s]    loads a, b into stage s    signals tile_ready[s] by bytes
    mma_partition    waits tile_ready[s]   multiplies                 frees the stage before, whose product is done

c [M, N] = a [M, K] @ b [K, N], float32 sums. Edges need no masks: TMA loads zeros beyond M, N, K and stores nothing
there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strobe.kernels.device.dialect import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.kernels.device.pipeline import PipelineState

from .pieces import (
    Launch,
    descriptor,
    empty_product,
    init_barriers,
    require,
    require_matrices,
    require_power_of_two,
    require_shared,
)


@dataclass(frozen=True)
class Config:
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    stages: int = 3
    warps: int = 4

    def __post_init__(self):
        require_power_of_two(self, block_m=64, block_n=16, block_k=16, warps=4)
        require(self.block_n <= 256, "block_n", self.block_n, "at most 256", "wgmma has no wider tile")
        require(
            self.warps * 16 <= self.block_m,
            "warps",
            self.warps,
            f"at most {self.block_m // 16}",
            "a warp takes 16 rows",
        )
        require(self.stages >= 2, "stages", self.stages, "at least 2", "a ring of one stage cannot overlap")
        require_shared(self, 227)

    def shared_bytes(self) -> int:
        return 2 * (self.stages * self.block_k * (self.block_m + self.block_n) + self.block_m * self.block_n)


@gluon.jit
def load_partition(a_desc, b_desc, tiles, m_start, n_start, steps, config: gl.constexpr):
    a_smem, b_smem, tile_ready, tile_free = tiles
    at = PipelineState.start(config.stages)
    for step in range(steps):
        mbarrier.wait(tile_free.index(at.index), at.phase ^ 1)
        mbarrier.expect(tile_ready.index(at.index), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [m_start, step * config.block_k], tile_ready.index(at.index), a_smem.index(at.index))
        tma_load(b_desc, [step * config.block_k, n_start], tile_ready.index(at.index), b_smem.index(at.index))
        at = at.advance()


@gluon.jit
def mma_partition(c_desc, c_smem, tiles, m_start, n_start, steps, config: gl.constexpr):
    a_smem, b_smem, tile_ready, tile_free = tiles
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [config.warps, 1], [16, config.block_n, 16])
    total = gl.full([config.block_m, config.block_n], 0.0, gl.float32, layout)
    at = PipelineState.start(config.stages)
    before = PipelineState.start(config.stages)  # not `at`: Triton's frontend would take it for unchanged in the loop
    for step in range(steps):
        mbarrier.wait(tile_ready.index(at.index), at.phase)
        total = warpgroup_mma(a_smem.index(at.index), b_smem.index(at.index), total, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])  # all but this step's product
        mbarrier.arrive(tile_free.index(before.index), pred=step > 0)
        before = at
        at = at.advance()
    total = warpgroup_mma_wait(0, deps=[total])  # nobody waits for the last stage: it is not freed
    c_smem.store(total.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [m_start, n_start], c_smem)
    tma_store_wait(0)


@gluon.jit
def matmul_kernel(a_desc, b_desc, c_desc, inner, config: gl.constexpr):
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [config.stages, config.block_m, config.block_k], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [config.stages, config.block_k, config.block_n], b_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [config.block_m, config.block_n], c_desc.layout)
    tile_ready = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    init_barriers(tile_ready, 1)
    init_barriers(tile_free, 1)
    tiles = (a_smem, b_smem, tile_ready, tile_free)
    m_start = gl.program_id(0) * config.block_m
    n_start = gl.program_id(1) * config.block_n
    steps = gl.cdiv(inner, config.block_k)
    gl.warp_specialize(
        [
            (mma_partition, (c_desc, c_smem, tiles, m_start, n_start, steps, config)),
            (load_partition, (a_desc, b_desc, tiles, m_start, n_start, steps, config)),
        ],
        [1],
        [24],
    )


def launch(a: Tensor, b: Tensor, config: Config = Config()) -> Launch:
    require_matrices(a, b)
    c = empty_product(a, b)
    grid = (-(-a.shape[0] // config.block_m), -(-b.shape[1] // config.block_n))
    views = (
        descriptor(a, [config.block_m, config.block_k]),
        descriptor(b, [config.block_k, config.block_n]),
        descriptor(c, [config.block_m, config.block_n]),
    )
    return Launch(matmul_kernel, grid, (*views, a.shape[1], config), {"num_warps": config.warps}, (c,))


def run(a: Tensor, b: Tensor, config: Config = Config()) -> Tensor:
    """c [M, N] in a's dtype."""
    return launch(a, b, config).start()[0]


def reference(a: Tensor, b: Tensor) -> Tensor:
    return a.to(torch.float64) @ b.to(torch.float64)
