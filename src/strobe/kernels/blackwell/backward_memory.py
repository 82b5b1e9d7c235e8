"""Pipelines that the roles of the Blackwell backward share, and the register layouts of tensor memory."""

from ..device.dialect import (
    Value,
    allocate_tensor_memory,
    gl,
    gluon,
    mbarrier,
    pair_tile_layout,
    record,
    reinterpret,
    tma_load,
    tmem_reg_layout,
)
from ..device.pipeline import Pipeline, ring
from ..device.tma import ColumnParts, allocate_tiles, as_rows, load_part
from .forward_memory import ROWS, tile_layout
from .traits import TENSOR_COLUMNS as _TENSOR_COLUMNS

TENSOR_COLUMNS: gl.constexpr = gl.constexpr(_TENSOR_COLUMNS)
HALF: gl.constexpr = gl.constexpr(64)  # columns of a tile that the compute warps hold at a time, 32 a thread
CHUNK: gl.constexpr = gl.constexpr(32)  # columns of dQ that the reduce warps hold at a time, a row a thread


@record
class InputMaps:
    """TMA descriptors of the inputs: ColumnParts, except `stats`."""

    q: Value
    k: Value
    v: Value
    do: Value
    stats: Value  # LSE of all rows, then -delta of all


@record
class OutputMaps:
    """TMA descriptors of the gradients, ColumnParts."""

    dk: Value
    dv: Value


@record
class RowsPipeline:
    """Stages of Q with LSE, or of dO with -delta. The bytes of both complete full[i]. Products read the tiles, and the
    compute warps read the values of rows, so empty[i] takes two arrivals.
    """

    tiles: ColumnParts
    stats: Value  # [stages, ROWS] float32: LSE in log2 units, or -delta
    full: Value
    empty: Value

    @gluon.jit
    def create(desc, stats_desc, stages: gl.constexpr):
        stats = gl.allocate_shared_memory(gl.float32, [stages, ROWS], stats_desc.layout)
        return RowsPipeline(allocate_tiles(stages, desc), stats, ring(stages, 1), ring(stages, 2))

    @gluon.jit
    def producer_load(
        self, state, desc, stats_desc, rows, m_start, stat, full, width: gl.constexpr, traits: gl.constexpr
    ):
        """Acquire a stage; load `width` columns of the tile of HeadRows that begins at m_start, and ROWS values from
        `stat` on. Their bytes complete `full`: the stage's own barrier, unless the load warp reads the tile first.
        """
        mbarrier.wait(self.empty.index(state.index), state.phase ^ 1)
        mbarrier.expect(full, ROWS * (2 * width + 4))
        load_parts(desc, rows, m_start, full, self.tiles.index(state.index), traits)
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
    """K and V of the program's keys. At the end TMA stores dK and dV from the same memory."""

    k: ColumnParts
    v: ColumnParts
    full: Value
    empty: Value  # key ranges: the previous work tile's gradients are stored; else None


@record
class TensorMemory:
    """All columns of tensor memory in one allocation, because each allocation's address takes a register in every role.
    `BackwardTraits.columns` has the first column of each tile.
    """

    columns: Value  # [ROWS, TENSOR_COLUMNS] float32; [2 ROWS, TENSOR_COLUMNS] of a pair
    dtype: gl.constexpr  # of P and dS

    @gluon.jit
    def s(self, traits: gl.constexpr):
        """S^T [keys, queries]"""
        return self.tile(traits.columns.s, ROWS, traits)

    @gluon.jit
    def p(self, traits: gl.constexpr):
        """P^T [keys, queries]"""
        return half_precision(self.columns, traits.columns.s, self.dtype)

    @gluon.jit
    def dp(self, traits: gl.constexpr):
        """dP^T [keys, queries]"""
        return self.tile(traits.columns.dp, ROWS, traits)

    @gluon.jit
    def ds(self, traits: gl.constexpr):
        """dS^T [keys, queries]"""
        return half_precision(self.columns, traits.columns.dp, self.dtype)

    @gluon.jit
    def dq(self, traits: gl.constexpr):
        """dQ [queries, D]"""
        if traits.pair:
            main = half_tile(self.columns, traits.columns.dq, traits.main_d)
            if traits.tail_d:
                tail = half_tile(self.columns, traits.columns.dq + traits.main_d // 2, traits.tail_d)
                return ColumnParts(main, tail)
            else:
                return ColumnParts(main, None)
        else:
            return self.parts(traits.columns.dq, traits.main_d, traits.tail_d, traits)

    @gluon.jit
    def dv(self, traits: gl.constexpr):
        """dV [keys, D_v]"""
        return self.parts(traits.columns.dv, traits.main_dv, traits.tail_dv, traits)

    @gluon.jit
    def dk(self, traits: gl.constexpr):
        """dK [keys, D]"""
        return self.parts(traits.columns.dk, traits.main_d, traits.tail_d, traits)

    @gluon.jit
    def parts(self, first: gl.constexpr, main: gl.constexpr, tail: gl.constexpr, traits: gl.constexpr):
        if tail == 0:
            return ColumnParts(self.tile(first, main, traits), None)
        else:
            return ColumnParts(self.columns.slice(first, main), self.columns.slice(first + main, tail))

    @gluon.jit
    def tile(self, first: gl.constexpr, width: gl.constexpr, traits: gl.constexpr):
        """float32 [keys, width] from column `first` of tensor memory on."""
        if traits.half_tiles:
            return half_tile(self.columns, first, width)
        else:
            return self.columns.slice(first, width)


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
    landed: Value  # documents: barriers that only the load warp uses (`backward_load`); else None

    @gluon.jit
    def create(maps, traits: gl.constexpr):
        dtype: gl.constexpr = maps.k.main.dtype
        columns = allocate_tensor_memory(gl.float32, [ROWS, TENSOR_COLUMNS], tile_layout(TENSOR_COLUMNS))
        tensor = TensorMemory(columns, dtype)
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
        ds = gl.allocate_shared_memory(dtype, [ROWS, ROWS], ds_layout)
        kv_empty, landed = None, None
        if traits.key_ranges:
            kv_empty = ring(1, 1)
        if traits.mask.documents:
            landed = ring(traits.q_stages, 2)
        kv = KeyTile(allocate_tiles(1, maps.k), allocate_tiles(1, maps.v), ring(1, 1), kv_empty)
        q = RowsPipeline.create(maps.q, maps.stats, traits.q_stages)
        do = RowsPipeline.create(maps.do, maps.stats, traits.do_stages)
        s_pipe = Pipeline(None, ring(1, 1), None, False)
        p_pipe = Pipeline(None, ring(1, 1), None, False)
        dp_pipe = Pipeline(None, ring(1, 1), None, False)
        ds_pipe = Pipeline(ds, ring(1, 1), None, False)
        dq_pipe = Pipeline(None, ring(1, 1), ring(1, 1), False)
        dkv_pipe = Pipeline(None, ring(1, 1), None, False)
        return Pipelines(tensor, kv, q, do, s_pipe, p_pipe, dp_pipe, ds_pipe, dq_pipe, dkv_pipe, landed)


@gluon.jit
def load_parts(desc, rows, row, full, tile, traits: gl.constexpr):
    """Load a tile by TMA. The caller has already called mbarrier.expect with its bytes."""
    load_part(desc.main, rows, row, 0, full, tile.main, False, traits)
    if desc.tail is not None:
        load_part(desc.tail, rows, row, desc.main.block_shape[-1], full, tile.tail, False, traits)


@gluon.jit
def rows_at(tiles, index):
    """A stage's tile as rows and columns."""
    tile = tiles.index(index)
    if tile.tail is None:
        return ColumnParts(as_rows(tile.main), None)
    else:
        return ColumnParts(as_rows(tile.main), as_rows(tile.tail))


@gluon.jit
def half_precision(columns, first: gl.constexpr, dtype: gl.constexpr):
    """[keys, ROWS] of a 16-bit type over the 64 columns of tensor memory from `first` on. Triton 3.8 lays types over
    whole allocations alone.
    """
    whole = reinterpret(columns, dtype, [columns.shape[0], 2 * TENSOR_COLUMNS], columns.layout)
    return whole.slice(2 * first, ROWS)


@gluon.jit
def half_tile(columns, first: gl.constexpr, width: gl.constexpr):
    """[ROWS, width] of a pair over the width / 2 columns of tensor memory from `first` on."""
    return reinterpret(columns.slice(first, width // 2), gl.float32, [ROWS, width], half_tile_layout(width))


@gluon.constexpr_function
def compute_layout(dtype, columns, traits):
    """Registers of eight warps for [keys, columns] of tensor memory: a thread holds half of a row, or with half tiles a
    quarter.
    """
    layout = pair_tile_layout(traits.cta_keys, columns) if traits.pair else tile_layout(columns)
    return tmem_reg_layout(dtype, (traits.block_n, columns), layout, 8)


@gluon.constexpr_function
def half_tile_layout(columns):
    """Tensor memory of [ROWS, columns], of which each CTA of a pair has half of the rows: lanes 0 to 63 hold the first
    half of the columns, lanes 64 to 127 the second. dQ of any pair, and every tile with half tiles.
    """
    return pair_tile_layout(ROWS // 2, columns)


@gluon.constexpr_function
def reduce_layout():
    """Registers of four warps for [ROWS, CHUNK] of tensor memory: a thread holds a row."""
    return tmem_reg_layout(gl.float32, (ROWS, CHUNK), tile_layout(CHUNK), 4)


@gluon.constexpr_function
def pair_reduce_layout(columns):
    """Registers of four warps for a pair's dQ [ROWS, columns]: a thread holds half of a row."""
    return tmem_reg_layout(gl.float32, (ROWS, columns), half_tile_layout(columns), 4)
