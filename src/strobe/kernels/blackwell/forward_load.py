"""The Blackwell forward's load warp: it finds work tiles, publishes them, and loads their Q, K and V by TMA."""

from ..device.dialect import gl, gluon, record
from ..device.forward_arguments import LaunchParams, ShapeParams
from ..device.forward_scheduler import TileScheduler, check_cu_seqlens
from ..device.pipeline import PipelineState
from .forward_memory import Pipelines, opaque, opaque_window


@record
class LoadState:
    """Where the load warp stands in each pipeline."""

    kv: PipelineState
    q: PipelineState
    work: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        return LoadState(PipelineState.start(traits.stages), PipelineState.start(1), PipelineState.start(2))


@record
class LoadWarp:
    """What the load warp works with; constant, as is every aggregate but those named State."""

    maps: gl.tuple  # InputMaps
    cu_seqlens: gl.tuple  # CuSeqlens
    pipes: Pipelines
    launch: gl.tuple  # LaunchParams
    workspace: gl.tuple  # Workspace
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        traits: gl.constexpr = self.traits
        num_tiles, counter = self.launch.num_tiles, self.workspace.tile_counter
        if traits.packed:
            check_cu_seqlens(self.cu_seqlens, self.launch, self.workspace.errors)
        state = LoadState.start(traits)
        scheduler = TileScheduler.start(counter, traits)
        more = gl.to_tensor(True)
        while more:
            more = scheduler.tile_index < num_tiles
            upcoming = scheduler
            if more:  # asked for now, needed after this tile: the counter's latency is hidden
                upcoming = scheduler.advance(num_tiles, counter, traits)
            work = self.current_work(scheduler)
            exists = work.is_valid
            if traits.has_block_lists and not traits.packed:
                shape = self.launch.shape
                exists = scheduler.tile_index < shape.batch * shape.heads * shape.num_m_blocks
            # the end is published here, too: after the loop, that kept a lane's index in a register of all roles
            if exists | (scheduler.tile_index >= num_tiles):
                state = self.load_work_tile(work.or_end(more), state)
            scheduler = upcoming

    @gluon.jit
    def current_work(self, scheduler):
        """The scheduler's tile, of which nothing is computed in front of all roles."""
        launch, shape = self.launch, self.launch.shape
        batch = opaque(shape.batch)
        shape = ShapeParams(
            batch, shape.heads, shape.seqlen_q, shape.seqlen_k, shape.num_m_blocks, shape.l2_heads, 0, 0, 0
        )
        launch = LaunchParams(launch.num_tiles, shape, opaque_window(launch.window), launch.softmax, launch.hooks)
        if self.traits.has_block_lists and not self.traits.packed:  # no list of a tile after the last, an end, is read
            last = batch * shape.heads * shape.num_m_blocks - 1
            scheduler = TileScheduler(scheduler.turn, gl.minimum(scheduler.tile_index, last), scheduler.row)
        return scheduler.get_current_work(self.cu_seqlens, None, launch, self.workspace.errors, self.traits)

    @gluon.jit
    def load_work_tile(self, work, state):
        """Publish a tile and load Q[0], K, Q[1], V of the first block, then K and V of each further block."""
        traits: gl.constexpr = self.traits
        pipes, maps, shape = self.pipes, self.maps, self.launch.shape
        pipes.work.publish_dense(state.work, work, traits)
        kv, q, work_state = state.kv, state.q, state.work.advance()
        blocks = work.blocks(self.launch, traits)
        if blocks.count > 0:
            q_rows, kv_rows = work.q_rows(shape, traits), work.kv_rows(0, shape, traits)
            pipes.q.producer_acquire(q)
            self.load_q(q.at(0), q_rows, work.m_start)
            kv = self.load_kv(maps.k, kv, kv_rows, blocks.n_block(0, traits))
            self.load_q(q.at(1), q_rows, work.m_start + traits.queries_per_consumer)
            q = q.advance()
            kv = self.load_kv(maps.v, kv, kv_rows, blocks.n_block(0, traits))
            for i in range(1, blocks.count):
                n_block = blocks.n_block(i, traits)
                kv = self.load_kv(maps.k, kv, kv_rows, n_block)
                kv = self.load_kv(maps.v, kv, kv_rows, n_block)
        return LoadState(kv, q, work_state)

    @gluon.jit
    def load_q(self, state, rows, m_start):
        self.pipes.q.producer_load(state, self.maps.q, rows, m_start, self.traits, self.traits.pack_gqa > 1)

    @gluon.jit
    def load_kv(self, desc, state, rows, n_block):
        """One block of K or V into the next stage. Returns the state after it."""
        self.pipes.kv.producer_acquire(state)
        self.pipes.kv.producer_load(state, desc, rows, n_block * self.traits.block_n, self.traits)
        return state.advance()


@gluon.jit
def load(maps, cu_seqlens, pipes, launch, workspace, traits: gl.constexpr):
    LoadWarp(maps, cu_seqlens, pipes, launch, workspace, traits).run()
