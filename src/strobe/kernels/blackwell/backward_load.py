"""The Blackwell backward's load warp: K and V of the program's keys, then Q with LSE and dO with -delta of each step.

    K, Q(0), V, dO(0), then Q(t), dO(t)

Documents: tiles of queries begin at the same rows as without documents, because dQ's sum, LSE and delta are stored tile
by tile. A tile with rows of other documents completes `landed`, barriers that only the load warp waits for. The warp
masks the other documents' rows: Q, dO and delta become 0, and LSE becomes infinite, so that P is 0. Then the warp
commits the tile.
"""

from ..device.dialect import fence_async_shared, gl, gluon, mbarrier, partition_barrier, record
from ..device.pipeline import PipelineState
from ..device.zero_foreign_rows import is_own_row, zero_foreign_rows
from .backward_memory import ROWS, InputMaps, Pipelines, load_parts
from .backward_work import ProgramInputs, WorkTile, of_role


@record
class LoadState:
    """Pipeline states of the load warp."""

    kv: PipelineState  # advances with each work tile that queries see
    q: PipelineState
    do: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        q, do = PipelineState.start(traits.q_stages), PipelineState.start(traits.do_stages)
        return LoadState(PipelineState.start(1), q, do)


@record
class LoadWarp:
    """Arguments and pipelines of the load warp."""

    maps: InputMaps
    inputs: ProgramInputs
    pipes: Pipelines
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        traits: gl.constexpr = self.traits
        state = LoadState.start(traits)
        if traits.key_ranges:
            row = gl.to_tensor(0)
            while row >= 0:
                work = WorkTile.of_program(row, self.inputs, self.launch, traits)
                if work.is_valid:
                    state = self.load_work_tile(work, state)
                row = work.next_row
        else:
            work = WorkTile.of_program(None, self.inputs, self.launch, traits)
            self.load_work_tile(work, state)

    @gluon.jit
    def load_work_tile(self, work, state):
        """Load K and V of a work tile, and its tiles of queries. Returns the state after the work tile."""
        traits: gl.constexpr = self.traits
        steps = work.num_steps(traits)
        kv, q, do = state.kv, state.q, state.do
        if steps > 0:
            if traits.key_ranges:
                mbarrier.wait(self.pipes.kv.empty.index(0), kv.phase ^ 1)
            self.load_kv(work)
            kv = kv.advance()
        for step in range(steps):
            self.load_queries(work, step, q, do)
            q, do = q.advance(), do.advance()
        return LoadState(kv, q, do)

    @gluon.jit
    def load_kv(self, work):
        traits: gl.constexpr = self.traits
        maps, kv, shape = self.maps, self.pipes.kv, self.launch.shape
        full, num_keys = kv.full.index(0), work.seqlen.num_keys
        mbarrier.expect(full, 2 * ROWS * (traits.block_d + traits.block_dv))
        keys = work.k_rows(shape.stride_k, num_keys, shape, traits)
        load_parts(maps.k, keys, work.n_start, full, kv.k.index(0), traits)
        values = work.k_rows(shape.stride_v, num_keys, shape, traits)
        load_parts(maps.v, values, work.n_start, full, kv.v.index(0), traits)

    @gluon.jit
    def load_queries(self, work, step, q, do):
        """Q with LSE and dO with -delta of a step."""
        traits: gl.constexpr = self.traits
        pipes = self.pipes
        queries = work.query_tile(step, self.launch.shape, traits)
        q_full, do_full = pipes.q.full.index(q.index), pipes.do.full.index(do.index)
        if traits.mask.documents:
            landed = pipes.landed.index(q.index)
            if work.rows.has_foreign_rows(queries.m_block):
                self.load_rows(work, queries, q, do, landed, landed)
                mbarrier.wait(landed, q.phase)
                self.mask_foreign_rows(work, queries.m_start, q, do)
                mbarrier.arrive(q_full)
                mbarrier.arrive(do_full)
            else:
                mbarrier.arrive(landed, count=2)
                self.load_rows(work, queries, q, do, q_full, do_full)
        else:
            self.load_rows(work, queries, q, do, q_full, do_full)

    @gluon.jit
    def load_rows(self, work, queries, q, do, q_full, do_full):
        traits: gl.constexpr = self.traits
        pipes, maps, shape = self.pipes, self.maps, self.launch.shape
        rows = work.q_rows(queries.head, shape.stride_q, shape, traits)
        stat = queries.index * traits.block_m
        pipes.q.producer_load(q, maps.q, maps.stats, rows, queries.m_start, stat, q_full, traits.block_d, traits)
        rows = work.q_rows(queries.head, shape.stride_do, shape, traits)
        tiles = shape.heads * shape.num_m_blocks  # of LSE, which come before those of delta
        if not traits.packed:
            tiles = tiles * shape.batch
        stat += tiles * traits.block_m
        pipes.do.producer_load(do, maps.do, maps.stats, rows, queries.m_start, stat, do_full, traits.block_dv, traits)

    @gluon.jit
    def mask_foreign_rows(self, work, m_start, q_state, do_state):
        """Mask rows of other documents, as preprocess_kernel masks rows that see no key, in a tile that has landed."""
        q, do = self.pipes.q, self.pipes.do
        lse, delta = q.stats.index(q_state.index), do.stats.index(do_state.index)
        own = work.rows.own(work.batch, work.seqlen.seqlen_q, self.inputs.ranges)
        layout: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0])
        kept = is_own_row(m_start + gl.arange(0, ROWS, layout), own)
        lse.store(gl.where(kept, lse.load(layout), float("inf")))
        delta.store(gl.where(kept, delta.load(layout), 0.0))
        zero_foreign_parts(q.tiles.index(q_state.index), m_start, own)
        zero_foreign_parts(do.tiles.index(do_state.index), m_start, own)
        fence_async_shared()
        partition_barrier()  # all lanes have written before one arrives


@gluon.jit
def zero_foreign_parts(tile, m_start, own):
    zero_foreign_rows(tile.main, m_start, own)
    if tile.tail is not None:
        zero_foreign_rows(tile.tail, m_start, own)


@gluon.jit
def load(maps, inputs, pipes, launch, traits: gl.constexpr):
    LoadWarp(maps, inputs, pipes, of_role(launch), traits).run()
