"""The epilogue of the Blackwell forward, in two roles.

The correction warps rescale O in tensor memory between products, normalize it at the end of a tile, and write LSE. The
store warp writes O by TMA.
"""

from ..device.dialect import fence_async_shared, gl, gluon, record, tma_store_wait
from ..device.pack_gqa import load_sinks, queries_of
from ..device.pipeline import PipelineState
from ..device.seqlen import breaks_promise
from ..device.softmax import finish as normalizer_of
from ..device.tma import as_rows, store_part
from .forward_memory import CHUNK, ROWS, Pipelines, chunk_layout, opaque_window


@record
class CorrectionState:
    """Where the correction warps stand in each pipeline."""

    stats: PipelineState
    o: PipelineState
    out: PipelineState
    work: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        out, work = PipelineState.start(traits.out_stages), PipelineState.start(2)
        return CorrectionState(PipelineState.start(1), PipelineState.start(1), out, work)


@record
class CorrectionWarps:
    """Four warps for both query stages; a thread owns a row of each."""

    outputs: gl.tuple  # Outputs
    pipes: Pipelines
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        state = CorrectionState.start(self.traits)
        while self.pipes.work.wait_published(state.work):
            state = self.process_tile(state)

    @gluon.jit
    def process_tile(self, state):
        pipes, stats, o, out = self.pipes, state.stats, state.o, state.out
        num_n_blocks = pipes.work.receive(state.work, self.traits).num_n_blocks
        if num_n_blocks > 0:
            pipes.p.producer_commit(state.o.at(0))  # O of the tile before has been read
            pipes.p.producer_commit(state.o.at(1))
        for _ in range(1, num_n_blocks):
            for t in range(2):
                self.rescale_o(t, stats)
                pipes.p.producer_commit(stats.at(t))
            stats = stats.advance()
        work = pipes.work.receive(state.work, self.traits)  # read again: it takes no registers meanwhile
        pipes.work.consumer_release(state.work)
        work_state = state.work.advance()
        for t in range(2):
            out = self.epilogue(t, work, stats, o, out)
        stats = stats.advance()
        if work.num_n_blocks > 0:
            o = o.advance()
        return CorrectionState(stats, o, out, work_state)

    @gluon.jit
    def rescale_o(self, t, state):
        """O[t] *= rescale, unless every row has the factor 1."""
        pipes, o = self.pipes, self.pipes.o.tiles
        pipes.stats.consumer_wait(state.at(t))
        rescale = pipes.stats.tiles.index(2 * t).load(gl.SliceLayout(1, chunk_layout(gl.float32)))
        pipes.stats.consumer_release(state.at(t))
        needed = gl.max((rescale != 1.0).to(gl.int32), 0)
        if needed > 0:
            rescale_columns(o.main.index(t), rescale)
            if o.tail is not None:
                rescale_columns(o.tail.index(t), rescale)

    @gluon.jit
    def epilogue(self, t, work, stats_state, o_state, out_state):
        """LSE = ln 2 row_max + ln row_sum, and O[t] / row_sum to the store warp. Returns the next state of `out`."""
        traits: gl.constexpr = self.traits
        pipes, outputs, shape = self.pipes, self.outputs, self.launch.shape
        heads_q = shape.heads * traits.pack_gqa
        layout: gl.constexpr = gl.SliceLayout(1, chunk_layout(gl.float32))
        pipes.stats.consumer_wait(stats_state.at(t))
        row_sum = pipes.stats.tiles.index(2 * t).load(layout)
        row_max = pipes.stats.tiles.index(2 * t + 1).load(layout)
        pipes.stats.consumer_release(stats_state.at(t))
        row = gl.arange(0, ROWS, layout)
        query = work.m_start + t * traits.queries_per_consumer + queries_of(row, traits)
        head, exists = work.heads_of_rows(row, query, traits)
        window = opaque_window(self.launch.window)
        first, stop = work.seqlen.visible_keys(query, window, traits)
        sink = 0.0
        if traits.sinks:
            sink = load_sinks(outputs.sinks, head, exists, traits)
        is_empty = first >= stop
        if traits.hides_beyond_mask:
            is_empty = is_empty | (row_sum == 0)
        normalizer, lse = normalizer_of(row_max, row_sum, is_empty, sink, traits)
        if traits.packed:  # NaN shows rows and keys beyond what the caller promised
            broken = breaks_promise(query, work.seqlen.seqlen_k, self.launch.window)
            normalizer = gl.where(broken, float("nan"), normalizer)
            lse = gl.where(broken, float("nan"), lse)
        lse_rows = outputs.lse + (work.batch.to(gl.int64) * heads_q + head) * shape.seqlen_q + work.seqlen.offset_q
        gl.store(lse_rows + query, lse, mask=exists)
        if work.num_n_blocks > 0:
            pipes.o.consumer_wait(o_state.at(t))
        pipes.out.producer_acquire(out_state)
        self.normalize_o(t, out_state, normalizer, work.num_n_blocks)
        fence_async_shared()
        pipes.out.producer_commit(out_state)
        return out_state.advance()

    @gluon.jit
    def normalize_o(self, t, out_state, normalizer, num_n_blocks):
        o, out = self.pipes.o.tiles, self.pipes.out.tiles
        normalize_columns(o.main.index(t), out.main, out_state, normalizer, num_n_blocks)
        if o.tail is not None:
            normalize_columns(o.tail.index(t), out.tail, out_state, normalizer, num_n_blocks)


@gluon.jit
def rescale_columns(o_tile, rescale):
    """A part of O times the factor of each row, CHUNK columns at a time."""
    layout: gl.constexpr = chunk_layout(gl.float32)
    WIDTH: gl.constexpr = o_tile.shape[1]
    for c in gl.static_range(WIDTH // CHUNK):
        columns = o_tile.slice(c * CHUNK, CHUNK)
        columns.store(columns.load(layout) * rescale[:, None])


@gluon.jit
def normalize_columns(o_tile, buffers, state, normalizer, num_n_blocks):
    """A part of O times each row's normalizer into its buffer in shared memory; zeros where no product wrote O."""
    layout: gl.constexpr = chunk_layout(gl.float32)
    WIDTH: gl.constexpr = o_tile.shape[1]
    buffer = as_rows(buffers.index(state.index))
    for c in gl.static_range(WIDTH // CHUNK):
        columns = gl.full([ROWS, CHUNK], 0.0, gl.float32, layout)
        if num_n_blocks > 0:
            columns = o_tile.slice(c * CHUNK, CHUNK).load(layout) * normalizer[:, None]
        buffer.slice(c * CHUNK, CHUNK, dim=1).store(columns.to(buffers.dtype))


@gluon.jit
def correction(outputs, pipes, launch, traits: gl.constexpr):
    CorrectionWarps(outputs, pipes, launch, traits).run()


@record
class StoreState:
    """Where the store warp stands in each pipeline."""

    out: PipelineState
    work: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        return StoreState(PipelineState.start(traits.out_stages), PipelineState.start(2))


@record
class StoreWarp:
    """Writes O from shared memory, while the next tile is computed."""

    o_map: gl.base_value  # ColumnParts of TMA descriptors
    pipes: Pipelines
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        pipes = self.pipes
        state = StoreState.start(self.traits)
        while pipes.work.wait_published(state.work):
            work = pipes.work.receive(state.work, self.traits)
            pipes.work.consumer_release(state.work)
            state = StoreState(state.out, state.work.advance())
            state = self.store_tile(work, state)

    @gluon.jit
    def store_tile(self, work, state):
        traits: gl.constexpr = self.traits
        PACK_GQA: gl.constexpr = traits.pack_gqa > 1
        COLUMNS: gl.constexpr = self.o_map.main.block_shape[-1]
        pipes, desc, out = self.pipes, self.o_map, state.out
        rows = work.o_rows(self.launch.shape)
        for t in gl.static_range(2):
            pipes.out.consumer_wait(out)
            m_start = work.m_start + t * traits.queries_per_consumer
            store_part(desc.main, rows, m_start, 0, pipes.out.tiles.main.index(out.index), PACK_GQA, traits)
            if desc.tail is not None:
                store_part(desc.tail, rows, m_start, COLUMNS, pipes.out.tiles.tail.index(out.index), PACK_GQA, traits)
            tma_store_wait(0)
            pipes.out.consumer_release(out)
            out = out.advance()
        return StoreState(out, state.work)


@gluon.jit
def store(o_map, pipes, launch, traits: gl.constexpr):
    StoreWarp(o_map, pipes, launch, traits).run()
