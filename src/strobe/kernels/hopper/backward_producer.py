"""The Hopper backward's producer warp: it finds tiles of keys, publishes them, and loads what the consumers multiply.

    publish  --work tile-------------------> consumers, store warps
    load_kv  --K, V of the tile------------> kv      once per work tile
    load_m_block  --Q, LSE-----------------> q       once per step
                  --dO, delta--------------> do

Documents: tiles of queries lie where they do without documents, since dQ's sum and the statistics of rows lie tile by
tile. A tile that also has rows of other documents lands on `landed`, a barrier of the producer's own. The producer
masks such rows, whatever they hold: Q and dO become 0, LSE infinite, so that their P is 0, and delta 0. Only then does
it commit the tile.

    barrier        arrivals     complete when
    landed[s]      2            Q and LSE, dO and delta of a tile with foreign rows have landed; for other tiles at once
"""

from ..device.dialect import Value, fence_async_shared, gl, gluon, mbarrier, partition_barrier, record, tma_load
from ..device.pipeline import PipelineState
from ..device.seqlen import first_key
from ..device.tma import from_row, load_part, of_head
from ..device.zero_foreign_rows import is_own_row, zero_foreign_rows
from .backward_mainloop import Pipelines, do_state_of
from .backward_scheduler import TileScheduler


@record
class InputMaps:
    """TMA descriptors; ColumnParts of them for Q, K, V and dO."""

    q: Value
    k: Value
    v: Value
    do: Value
    stats: Value  # LSE of all rows, then -delta of all


@record
class CuSeqlens:
    """Offsets of packed sequences; None in other layouts."""

    q: Value
    k: Value


@record
class LoadedRows:
    """Where a work tile's rows are in the tensors that the producer reads."""

    q: gl.tuple  # HeadRows
    do: gl.tuple
    k: gl.tuple
    v: gl.tuple
    first_delta: gl.tensor  # tiles of queries of all heads: so many tiles of LSE come before those of delta

    @gluon.jit
    def of_work(work, cu_seqlens, shape, traits: gl.constexpr):
        q, do = work.q_rows(shape.stride_q, shape, traits), work.q_rows(shape.stride_do, shape, traits)
        num_keys = work.seqlen.num_keys
        k = work.k_rows(shape.stride_k, num_keys, shape, traits)
        v = work.k_rows(shape.stride_v, num_keys, shape, traits)
        if traits.runs:  # dK and dV of a run lie elsewhere
            k_start = first_key(cu_seqlens.k, work.sequence + 1, shape.batch, k.offset, True)
            k, v = from_row(k, k_start), from_row(v, k_start)
        return LoadedRows(q, do, k, v, shape.heads * shape.num_m_blocks * (1 if traits.packed else shape.batch))


@record
class ProducerState:
    """Where the producer stands in each pipeline."""

    work: PipelineState
    kv: PipelineState
    q: PipelineState
    do: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        work, kv = PipelineState.start(1), PipelineState.start(traits.kv_stages)
        return ProducerState(work, kv, PipelineState.start(traits.q_stages), PipelineState.start(traits.do_stages))


@record
class Producer:
    """What the producer works with; constant, as is every aggregate but those named State."""

    maps: InputMaps
    cu_seqlens: CuSeqlens
    ranges: gl.tuple | gl.constexpr  # KeyRangeTensors or None
    pipes: Pipelines
    landed: Value
    launch: gl.tuple  # LaunchParams
    tile_counter: Value
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        traits: gl.constexpr = self.traits
        state = ProducerState.start(traits)
        scheduler = TileScheduler.start(self.tile_counter, traits)
        while scheduler.tile_index < self.launch.num_tiles:
            work = scheduler.get_current_work(self.cu_seqlens, self.ranges, self.launch, traits)
            if work.is_valid:
                state = self.load_work_tile(work, state)
            scheduler = scheduler.advance_after(work, self.tile_counter, traits)
        self.pipes.work.publish_end(state.work, scheduler.tile_index)

    @gluon.jit
    def load_work_tile(self, work, state):
        """Publish a tile of keys; load its K and V and, step by step, its tiles of queries. Returns the state after
        it.
        """
        traits: gl.constexpr = self.traits
        self.pipes.work.publish(state.work, work, traits)
        state = ProducerState(state.work.advance(), state.kv, state.q, state.do)
        rows = LoadedRows.of_work(work, self.cu_seqlens, self.launch.shape, traits)
        steps = work.num_steps(traits)
        if traits.kv_stages == 2:  # the other stage is free long before
            self.load_kv(work, rows, state.kv)
        for step in range(gl.minimum(steps, 1)):
            state = self.load_m_block(work, rows, step, state)
        if traits.kv_stages == 1:  # Q's stage is free sooner than that of K and V, which the last step before reads
            self.load_kv(work, rows, state.kv)
        state = ProducerState(state.work, state.kv.advance(), state.q, state.do)
        for step in range(1, steps):
            state = self.load_m_block(work, rows, step, state)
        return state

    @gluon.jit
    def load_kv(self, work, rows, state):
        """K and V of a work tile."""
        traits: gl.constexpr = self.traits
        kv = self.pipes.kv
        full = kv.kv_full.index(state.index)
        mbarrier.wait(kv.kv_empty.index(state.index), state.phase ^ 1)
        mbarrier.expect(full, 2 * traits.block_n * (traits.block_d + traits.block_dv))
        head = work.head_kv(traits)
        self.load_tile(self.maps.k, of_head(rows.k, head), work.n_start, full, kv.k.index(state.index))
        self.load_tile(
            self.maps.v, of_head(rows.v, head), work.n_start, full, kv.v.index(kv.v_index(state.index, traits))
        )

    @gluon.jit
    def load_m_block(self, work, rows, step, state):
        """Q with LSE and dO with delta of a step. Returns the state after it."""
        traits: gl.constexpr = self.traits
        pipes = self.pipes
        queries = work.query_tile(step, self.launch.shape, traits)
        q, do = state.q, do_state_of(state.q, state.do, traits)
        q_full, do_full = pipes.q.full.index(q.index), pipes.do.full.index(do.index)
        if traits.mask.documents:
            landed = self.landed.index(q.index)
            if work.rows.has_foreign_rows(queries.m_block):
                self.load_rows(queries, rows, q, do, landed, landed)
                mbarrier.wait(landed, q.phase)
                self.mask_foreign_rows(work, queries.m_start, q, do)
                mbarrier.arrive(q_full)
                mbarrier.arrive(do_full)
            else:
                mbarrier.arrive(landed, count=2)
                self.load_rows(queries, rows, q, do, q_full, do_full)
        else:
            self.load_rows(queries, rows, q, do, q_full, do_full)
        return ProducerState(state.work, state.kv, state.q.advance(), state.do.advance())

    @gluon.jit
    def load_rows(self, queries, rows, q, do, q_full, do_full):
        """A tile of queries into stages q and do, once they are free. Its bytes complete q_full and do_full."""
        traits: gl.constexpr = self.traits
        pipes, maps = self.pipes, self.maps
        mbarrier.wait(pipes.q.empty.index(q.index), q.phase ^ 1)
        mbarrier.expect(q_full, traits.block_m * (2 * traits.block_d + 4))
        self.load_tile(maps.q, of_head(rows.q, queries.head), queries.m_start, q_full, pipes.q.tiles.index(q.index))
        tma_load(maps.stats, [queries.index * traits.block_m], q_full, pipes.q.stat(q.index))
        if not traits.split_by_keys:
            mbarrier.wait(pipes.do.empty.index(do.index), do.phase ^ 1)
        mbarrier.expect(do_full, traits.block_m * (2 * traits.block_dv + 4))
        self.load_tile(
            maps.do, of_head(rows.do, queries.head), queries.m_start, do_full, pipes.do.tiles.index(do.index)
        )
        tma_load(maps.stats, [(rows.first_delta + queries.index) * traits.block_m], do_full, pipes.do.stat(do.index))

    @gluon.jit
    def load_tile(self, desc, rows, row, full, tile):
        load_part(desc.main, rows, row, 0, full, tile.main, False, self.traits)
        if desc.tail is not None:
            load_part(desc.tail, rows, row, desc.main.block_shape[-1], full, tile.tail, False, self.traits)

    @gluon.jit
    def mask_foreign_rows(self, work, m_start, q_state, do_state):
        """Mask rows of other documents, as rows_kernel masks rows that see no key, in a tile of queries that has
        landed.
        """
        q, do, rows = self.pipes.q, self.pipes.do, work.rows
        lse, delta = q.stat(q_state.index), do.stat(do_state.index)
        own = (
            rows.q_start,
            rows.q_stop,
            rows.document,
            self.ranges.ids_q + work.batch.to(gl.int64) * work.seqlen.seqlen_q,
        )
        layout: gl.constexpr = gl.BlockedLayout([lse.shape[0] // 32], [32], [1], [0])
        kept = is_own_row(m_start + gl.arange(0, lse.shape[0], layout), own)
        lse.store(gl.where(kept, lse.load(layout), float("-inf") if self.traits.lse_folded else float("inf")))
        delta.store(gl.where(kept, delta.load(layout), 0.0))
        self.zero_foreign_rows_of(q.tiles.index(q_state.index), m_start, own)
        self.zero_foreign_rows_of(do.tiles.index(do_state.index), m_start, own)
        fence_async_shared()
        partition_barrier()  # all lanes have written before one arrives

    @gluon.jit
    def zero_foreign_rows_of(self, tile, m_start, own):
        zero_foreign_rows(tile.main, m_start, own)
        if tile.tail is not None:
            zero_foreign_rows(tile.tail, m_start, own)


@gluon.jit
def producer(maps, cu_seqlens, ranges, pipes, landed, launch, tile_counter, traits: gl.constexpr):
    Producer(maps, cu_seqlens, ranges, pipes, landed, launch, tile_counter, traits).run()
