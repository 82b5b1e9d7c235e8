"""The load and relay warps of the Blackwell backward with a pair of CTAs; each CTA has one of each.

load: K and V of the CTA's keys, half of K's columns of all keys; then of each step
    half of Q's rows with LSE, half of dO's rows, half of dO's columns with -delta, half of Q's columns

relay: dS of both CTAs comes into a CTA's shared memory by ordinary stores, and completes `landed`. The relay warp
orders these stores before products, which read shared memory asynchronously, and tells the first CTA, whose MMA warp
issues dQ for both.
"""

from ..device.dialect import fence_async_shared, gl, gluon, mbarrier, record
from ..device.pipeline import PipelineState
from .backward_memory import ROWS, load_parts
from .backward_work import ProgramInputs, WorkTile, of_role
from .pair_backward_memory import BYTES, PairInputMaps, PairPipelines, load_tile


@record
class PairLoadWarp:
    """Arguments and pipelines of the load warp."""

    maps: PairInputMaps
    inputs: ProgramInputs
    pipes: PairPipelines
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        traits: gl.constexpr = self.traits
        work = WorkTile.of_program(None, self.inputs, self.launch, traits)
        steps = work.num_steps(traits)
        if steps > 0:
            self.load_kv(work)
        stats, state = PipelineState.start(traits.q_stages), PipelineState.start(1)
        for step in range(steps):
            self.load_queries(work, step, stats, state)
            stats, state = stats.advance(), state.advance()

    @gluon.jit
    def load_kv(self, work):
        traits: gl.constexpr = self.traits
        maps, kv, shape = self.maps, self.pipes.kv, self.launch.shape
        full, num_keys = kv.full.index(0), work.seqlen.num_keys
        mbarrier.expect(full, 2 * ROWS * (2 * traits.block_d + traits.block_dv))
        keys = work.k_rows(shape.stride_k, num_keys, shape, traits)
        load_parts(maps.k, keys, work.n_start, full, kv.k.index(0), traits)
        values = work.k_rows(shape.stride_v, num_keys, shape, traits)
        load_parts(maps.v, values, work.n_start, full, kv.v.index(0), traits)
        load_parts(maps.k_columns, keys, work.n_start, full, kv.columns.index(0), traits)

    @gluon.jit
    def load_queries(self, work, step, stats, state):
        """Q, LSE, dO and -delta of a step. `stats` is the state of LSE and -delta."""
        traits: gl.constexpr = self.traits
        pipes, maps, shape = self.pipes, self.maps, self.launch.shape
        queries = work.query_tile(step, shape, traits)
        stat = queries.index * traits.block_m
        tiles = shape.heads * shape.num_m_blocks  # of LSE, which come before those of delta
        if not traits.packed:
            tiles = tiles * shape.batch
        q_rows = work.q_rows(queries.head, shape.stride_q, shape, traits)
        do_rows = work.q_rows(queries.head, shape.stride_do, shape, traits)
        load_tile(pipes.q_rows, state, maps.q, q_rows, queries.m_start, traits)
        pipes.q.producer_load(stats, maps.stats, stat)
        load_tile(pipes.do_rows, state, maps.do, do_rows, queries.m_start, traits)
        load_tile(pipes.do_columns, state, maps.do_columns, do_rows, queries.m_start, traits)
        pipes.do.producer_load(stats, maps.stats, stat + tiles * traits.block_m)
        load_tile(pipes.q_columns, state, maps.q_columns, q_rows, queries.m_start, traits)


@gluon.jit
def load(maps, inputs, pipes, launch, traits: gl.constexpr):
    PairLoadWarp(maps, inputs, pipes, of_role(launch), traits).run()


@gluon.jit
def relay(inputs, pipes, launch, traits: gl.constexpr):
    steps = WorkTile.of_program(None, inputs, of_role(launch), traits).num_steps(traits)
    state, landed = PipelineState.start(1), pipes.landed.index(0)
    for _ in range(steps):
        pipes.exchange.producer_acquire(state)
        mbarrier.expect(landed, BYTES)
        mbarrier.wait(landed, state.phase)
        fence_async_shared()
        pipes.exchange.producer_commit(state)
        state = state.advance()
