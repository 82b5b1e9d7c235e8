"""Pipelines of the Blackwell backward with a pair of CTAs. Barriers `of_both` are the first CTA's alone: each CTA
arrives there, and the MMA warp of the first waits. A commit completes the other barriers in both CTAs.
"""

from ..device.dialect import (
    Value,
    allocate_tensor_memory,
    gl,
    gluon,
    mbarrier,
    pair_barriers,
    pair_tile_layout,
    record,
    reinterpret,
    store_cluster,
)
from ..device.pipeline import Pipeline
from ..device.tma import ColumnParts, allocate_tiles
from .backward_memory import ROWS, TENSOR_COLUMNS, TensorMemory


@record
class PairInputMaps:
    """TMA descriptors of the inputs: ColumnParts, except `stats`. A tile's rows, or its columns, are divided between
    the CTAs.
    """

    k: Value
    v: Value
    k_columns: Value
    q: Value
    q_columns: Value
    do: Value
    do_columns: Value
    stats: Value  # LSE of all rows, then -delta of all


@record
class StatsPipeline:
    """Two stages of LSE, or of -delta, in each CTA. They need no empty barriers: before the load warp loads step t + 2,
    it has waited until dK of step t has read Q, and dK waits for compute, which has read LSE and delta by then.
    """

    stats: Value  # [2, ROWS] float32: LSE in log2 units, or -delta
    full: Value

    @gluon.jit
    def create(desc):
        return StatsPipeline(gl.allocate_shared_memory(gl.float32, [2, ROWS], desc.layout), pair_barriers(2, 1, False))

    @gluon.jit
    def consumer_wait(self, state):
        mbarrier.wait(self.full.index(state.index), state.phase)

    @gluon.jit
    def consumer_release(self, state):
        """Nothing: see above."""


@record
class PairKeyTile:
    """K and V of the pair's keys. At the end TMA stores dK and dV, or zeros, from the same memory."""

    k: ColumnParts
    v: ColumnParts
    columns: ColumnParts  # K of all 256 keys, half of the columns in each CTA
    full: Value
    empty: Value  # key ranges: the previous work tile's gradients are stored; else None


@record
class PairPipelines:
    """Every pipeline of the kernel. `q` and `do` have two stages, the others one. Where a tile is in tensor memory, its
    pipeline holds barriers alone, and `tensor` the tile.
    """

    tensor: TensorMemory
    kv: PairKeyTile
    q: StatsPipeline  # LSE
    do: StatsPipeline  # -delta
    q_rows: Pipeline
    q_columns: Pipeline
    do_rows: Pipeline
    do_columns: Pipeline
    s: Pipeline
    p: Pipeline
    dp: Pipeline
    ds: Pipeline  # dS^T in tensor memory
    exchange: Pipeline  # dS in shared memory: all keys, half of the queries in each CTA
    landed: Value  # dS of both CTAs has landed in this CTA
    dq: Pipeline
    dkv: Pipeline  # dV and dK, at the end
    rows_landed: Value  # documents: barriers that only the load warp uses (`pair_backward_load`); else None

    @gluon.jit
    def create(maps, traits: gl.constexpr):
        dtype: gl.constexpr = maps.k.main.dtype
        layout: gl.constexpr = pair_tile_layout(ROWS, TENSOR_COLUMNS)
        columns = allocate_tensor_memory(gl.float32, [2 * ROWS, TENSOR_COLUMNS], layout)
        exchange = keys_by_queries(dtype, 1, traits)
        p, ds = None, None
        if traits.half_tiles:
            p, ds = keys_by_queries(dtype, 0, traits), keys_by_queries(dtype, 0, traits)
        kv_empty, rows_landed = None, None
        if traits.key_ranges:
            kv_empty = pair_barriers(1, 1, False)
        if traits.mask.documents:
            rows_landed = pair_barriers(1, 1, False)
        kv = PairKeyTile(
            allocate_tiles(1, maps.k),
            allocate_tiles(1, maps.v),
            allocate_tiles(1, maps.k_columns),
            pair_barriers(1, 1, True),
            kv_empty,
        )
        q_rows = allocate_tiles(1, maps.q)
        if traits.serial:
            q_columns = tiles_over(q_rows, maps.q_columns)
        else:
            q_columns = allocate_tiles(1, maps.q_columns)
        do_rows = allocate_tiles(1, maps.do)
        if traits.half_tiles:
            do_columns = tiles_over(do_rows, maps.do_columns)
        else:
            do_columns = allocate_tiles(1, maps.do_columns)
        return PairPipelines(
            TensorMemory(columns, dtype),
            kv,
            StatsPipeline.create(maps.stats),
            StatsPipeline.create(maps.stats),
            of_products(q_rows),
            of_products(q_columns),
            of_products(do_rows),
            of_products(do_columns),
            by_products(),
            for_products(p),
            by_products(),
            for_products(ds),
            of_products(exchange),
            pair_barriers(1, 1, False),
            Pipeline(None, pair_barriers(1, 1, False), pair_barriers(1, 1, True), False),
            by_products(),
            rows_landed,
        )

    @gluon.jit
    def acquire_exchange(self, state):
        """Wait until dQ of the step before has read dS in both CTAs."""
        self.exchange.producer_acquire(state)

    @gluon.jit
    def acquire_kv(self, state):
        """Key ranges, a work tile that no query sees: wait until the load warp has acquired the memory of K and V."""
        self.dkv.consumer_wait(state)

    @gluon.jit
    def release_kv(self):
        """Key ranges: TMA has stored gradients, or zeros, from the memory of K and V."""
        mbarrier.arrive(self.kv.empty.index(0))

    @gluon.jit
    def send(self, first, second):
        """Store dS [keys, 64] of the first and of the second half of the queries in 16 bits, each half in the CTA that
        multiplies it. Half tiles: `first` has all queries. The bytes complete that CTA's barrier `landed`.
        """
        tile = self.exchange.tiles.index(0)
        if second is None:
            store_cluster(tile, first.to(tile.dtype), self.landed.index(0))
        else:
            both = gl.join(first.to(tile.dtype), second.to(tile.dtype)).permute((0, 2, 1))
            store_cluster(tile, both.reshape(tile.shape), self.landed.index(0))

    @gluon.jit
    def p_operand(self, traits: gl.constexpr):
        """P^T [keys, queries] as the left operand of dV."""
        if traits.half_tiles:
            return self.p.tiles.index(0)
        else:
            return self.tensor.p(traits)

    @gluon.jit
    def ds_operand(self, traits: gl.constexpr):
        """dS^T [keys, queries] as the left operand of dK."""
        if traits.half_tiles:
            return self.ds.tiles.index(0)
        else:
            return self.tensor.ds(traits)


@gluon.jit
def keys_by_queries(dtype: gl.constexpr, divided: gl.constexpr, traits: gl.constexpr):
    """Shared memory for a tile [keys, queries], of which the CTAs divide dimension `divided`."""
    BASIS: gl.constexpr = [[0, 1]] if divided == 1 else [[1, 0]]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([traits.block_n, ROWS], dtype, cga_layout=BASIS)
    return gl.allocate_shared_memory(dtype, [1, traits.block_n, ROWS], layout)


@gluon.jit
def of_products(tiles):
    """Operands: both CTAs fill them before a product, whose commit empties them in both."""
    return Pipeline(tiles, pair_barriers(1, 1, True), pair_barriers(1, 1, False), False)


@gluon.jit
def for_products(tiles):
    """Operands that the compute warps write to tensor memory or to `tiles`; another pipeline empties them."""
    return Pipeline(tiles, pair_barriers(1, 1, True), None, False)


@gluon.jit
def by_products():
    """Results in tensor memory, which another pipeline empties."""
    return Pipeline(None, pair_barriers(1, 1, False), None, False)


@gluon.jit
def tiles_over(tiles, desc):
    """The memory of a buffer as one of a descriptor's tiles; both ColumnParts."""
    if desc.tail is None:
        return ColumnParts(tile_over(tiles.main, desc.main), None)
    else:
        return ColumnParts(tile_over(tiles.main, desc.main), tile_over(tiles.tail, desc.tail))


@gluon.jit
def tile_over(memory, desc):
    return reinterpret(memory, desc.dtype, [1] + desc.block_shape, desc.layout)  # noqa: RUF005 (Triton has no *)
