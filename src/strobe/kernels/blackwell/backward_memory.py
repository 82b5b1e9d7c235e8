"""What the roles of the Blackwell backward share: pipelines, and how threads read tensor memory."""

from ..device.dialect import (
    Value,
    allocate_tensor_memory,
    gl,
    gluon,
    mbarrier,
    record,
    reinterpret,
    tma_load,
    tmem_reg_layout,
)
from ..device.pipeline import Pipeline, ring
from ..device.tma import load_part
from .forward_memory import ROWS, tile_layout

HALF: gl.constexpr = gl.constexpr(64)  # columns of a tile that the compute warps handle at a time, 32 a thread
CHUNK: gl.constexpr = gl.constexpr(32)  # columns of dQ that the reduce warps hold at a time, a row a thread


@record
class InputMaps:
    """TMA descriptors of what is read."""

    q: Value
    k: Value
    v: Value
    do: Value
    stats: Value  # LSE of all rows, then -delta of all


@record
class OutputMaps:
    """TMA descriptors of the gradients."""

    dk: Value
    dv: Value


@record
class RowsPipeline:
    """Stages of Q with LSE, or of dO with -delta. The bytes of both complete full[i]. Products read the tiles, and the
    compute warps read the values of rows, so empty[i] takes two arrivals.
    """

    tiles: Value
    stats: Value  # [stages, ROWS] float32: LSE in log2 units, or -delta
    full: Value
    empty: Value

    @gluon.jit
    def create(desc, stats_desc, stages: gl.constexpr):
        tiles = gl.allocate_shared_memory(desc.dtype, [stages] + desc.block_shape, desc.layout)  # noqa: RUF005
        stats = gl.allocate_shared_memory(gl.float32, [stages, ROWS], stats_desc.layout)
        return RowsPipeline(tiles, stats, ring(stages, 1), ring(stages, 2))

    @gluon.jit
    def producer_load(self, state, desc, stats_desc, rows, m_start, stat, traits: gl.constexpr):
        """Acquire a stage; load the tile of HeadRows that begins at m_start, and ROWS values from `stat` on."""
        full = self.full.index(state.index)
        mbarrier.wait(self.empty.index(state.index), state.phase ^ 1)
        mbarrier.expect(full, desc.block_type.nbytes + stats_desc.block_type.nbytes)
        load_part(desc, rows, m_start, 0, full, self.tiles.index(state.index), False, traits)
        tma_load(stats_desc, [stat], full, self.stats.index(state.index))

    @gluon.jit
    def consumer_wait(self, state):
        mbarrier.wait(self.full.index(state.index), state.phase)

    @gluon.jit
    def consumer_release(self, state):
        """The values of rows have been read. Products release the tile by tcgen05_commit."""
        mbarrier.arrive(self.empty.index(state.index))


@record
class KeyTile:
    """K and V of the program's keys. At the end dK and dV leave in their place."""

    k: Value
    v: Value
    full: Value


@record
class TensorMemory:
    """All 512 columns as [4, ROWS, 128] float32. One address for all: each takes a register of every role.

    0   S^T, and P^T over its first half
    1   dV
    2   dP^T, dS^T over its first half, and dQ
    3   dK
    """

    columns: Value
    dtype: gl.constexpr  # of P and dS

    @gluon.jit
    def s(self):
        """S^T [keys, queries]"""
        return self.columns.index(0)

    @gluon.jit
    def p(self):
        """P^T [keys, queries]"""
        return half_precision(self.s(), self.dtype)

    @gluon.jit
    def dp(self):
        """dP^T [keys, queries]"""
        return self.columns.index(2)

    @gluon.jit
    def ds(self):
        """dS^T [keys, queries]"""
        return half_precision(self.dp(), self.dtype)

    @gluon.jit
    def dq(self, traits: gl.constexpr):
        """dQ [queries, D]"""
        return self.columns.index(2).slice(0, traits.block_d)

    @gluon.jit
    def dv(self, traits: gl.constexpr):
        """dV [keys, D_v]"""
        return self.columns.index(1).slice(0, traits.block_dv)

    @gluon.jit
    def dk(self, traits: gl.constexpr):
        """dK [keys, D]"""
        return self.columns.index(3).slice(0, traits.block_d)


@record
class Pipelines:
    """Every pipeline of the kernel. Those of one stage advance with each step. Where a tile is in tensor memory, its
    pipeline holds barriers alone, and `tensor` the tile.
    """

    tensor: TensorMemory
    kv: KeyTile
    q: RowsPipeline
    do: RowsPipeline
    s: Pipeline
    p: Pipeline
    dp: Pipeline
    ds: Pipeline  # dS [keys, queries] in shared memory, and dS^T in tensor memory
    dq: Pipeline
    dkv: Pipeline  # dV and dK, at the end

    @gluon.jit
    def create(maps, traits: gl.constexpr):
        dtype: gl.constexpr = maps.k.dtype
        tensor = TensorMemory(allocate_tensor_memory(gl.float32, [4, ROWS, ROWS], tile_layout(ROWS)), dtype)
        k = gl.allocate_shared_memory(dtype, maps.k.block_shape, maps.k.layout)
        v = gl.allocate_shared_memory(dtype, maps.v.block_shape, maps.v.layout)
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
        ds = gl.allocate_shared_memory(dtype, [ROWS, ROWS], ds_layout)
        kv = KeyTile(k, v, ring(1, 1))
        q = RowsPipeline.create(maps.q, maps.stats, traits.q_stages)
        do = RowsPipeline.create(maps.do, maps.stats, traits.do_stages)
        s_pipe = Pipeline(None, ring(1, 1), None, False)
        p_pipe = Pipeline(None, ring(1, 1), None, False)
        dp_pipe = Pipeline(None, ring(1, 1), None, False)
        ds_pipe = Pipeline(ds, ring(1, 1), None, False)
        dq_pipe = Pipeline(None, ring(1, 1), ring(1, 1), False)
        dkv_pipe = Pipeline(None, ring(1, 1), None, False)
        return Pipelines(tensor, kv, q, do, s_pipe, p_pipe, dp_pipe, ds_pipe, dq_pipe, dkv_pipe)


@gluon.jit
def half_precision(tile, dtype: gl.constexpr):
    """[ROWS, ROWS] of a 16-bit type over the first half of the columns of a float32 tile [ROWS, ROWS]."""
    return reinterpret(tile, dtype, [ROWS, 2 * ROWS], tile_layout(2 * ROWS)).slice(0, ROWS)


@gluon.constexpr_function
def compute_layout(dtype):
    """Registers of eight warps for [ROWS, HALF] of tensor memory: a thread holds 32 columns of a row."""
    return tmem_reg_layout(dtype, (ROWS, HALF), tile_layout(HALF), 8)


@gluon.constexpr_function
def reduce_layout():
    """Registers of four warps for [ROWS, CHUNK] of tensor memory: a thread holds a row."""
    return tmem_reg_layout(gl.float32, (ROWS, CHUNK), tile_layout(CHUNK), 4)
