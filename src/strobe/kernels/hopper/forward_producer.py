"""The Hopper forward's producer: it finds work tiles, publishes them to the consumers, and loads their Q, K and V.

A document's keys may lie among keys of other documents. When such a tile is redone, its V lands on a barrier of the
producer's own. The producer zeroes rows of other documents (`device.zero_foreign_rows`) before it hands V to the
consumers.

The keys of an 8-bit cache are converted to q's dtype by a producer of four warps (`device.converted_keys`), from
staging buffers (`device.staged_keys`) or, in wide tiles, from registers. Its warps meet between a wait for an empty
stage and what fills it. Otherwise a slow warp could miss a phase of the barrier.
"""

from ..device.cached_keys import CachedKeys, tell_lost_boxes, write_lost_boxes
from ..device.converted_keys import ConvertedKeys, row_pages
from ..device.dialect import (
    Value,
    cp_async_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    record,
)
from ..device.forward_scheduler import (
    TileScheduler,
    WorkTilePipeline,
    cached_work_tile,
    check_cu_seqlens,
    count_cached_tiles,
)
from ..device.key_ranges import PURE
from ..device.pipeline import Pipeline, PipelineState
from ..device.tile_redo import RedoRequest
from ..device.zero_foreign_rows import zero_foreign_rows
from .traits import STAGING_STAGES as _STAGING_STAGES

STAGING_STAGES: gl.constexpr = gl.constexpr(_STAGING_STAGES)


@record
class Pipelines:
    """Every pipeline of the kernel."""

    work: WorkTilePipeline
    q: Pipeline
    k: Pipeline
    v: Pipeline
    v_landed: gl.shared_memory_descriptor  # documents: barriers of the producer's own, on which V of a redo lands
    lost_boxes: Value  # pages: words with the lost boxes of each stage of K (device.cached_keys); else None
    staging: Value  # StagingBuffers of 8-bit keys, or None


@record
class ProducerState:
    """Where the producer stands in each pipeline."""

    k: PipelineState
    v: PipelineState
    q: PipelineState
    work: PipelineState
    staging: Value  # PipelineState of the staging buffers, or None

    @gluon.jit
    def start(traits: gl.constexpr):
        k, v = PipelineState.start(traits.stages), PipelineState.start(traits.stages)
        staging = None
        if traits.stages_keys:
            staging = PipelineState.start(STAGING_STAGES)
        return ProducerState(k, v, PipelineState.start(1), PipelineState.start(2), staging)


@record
class Producer:
    """What the producer works with; constant, as is every aggregate but those named State."""

    maps: gl.tuple  # InputMaps
    cu_seqlens: gl.tuple  # CuSeqlens
    ranges: gl.tuple | gl.constexpr  # KeyRangeTensors or None
    cache: gl.tuple | gl.constexpr  # CacheTensors or None
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
        if traits.cached:
            num_tiles = count_cached_tiles(self.cu_seqlens.q, self.cache, self.launch, traits)
        state = ProducerState.start(traits)
        scheduler = TileScheduler.start(counter, traits)
        redo = RedoRequest.none()
        while (scheduler.tile_index < num_tiles) | (redo.pending > 0):
            upcoming = scheduler
            if not traits.key_ranges:
                if redo.pending == 0:  # asked for now, needed after this tile: the counter's latency is hidden
                    upcoming = scheduler.advance(num_tiles, counter, traits)
            work = self.current_work(scheduler, redo, num_tiles)
            if work.is_valid:
                if traits.stages_keys:
                    state = self.load_staged_tile(work, redo, state)
                elif traits.converts_keys:
                    state = self.load_converted_tile(work, redo, state)
                elif traits.cached:
                    state = self.load_cached_tile(work, redo, state)
                else:
                    state = self.load_work_tile(work, redo, state)
            if traits.key_ranges:
                if redo.pending == 0:
                    scheduler = scheduler.advance_after(work, num_tiles, counter, traits)
            else:
                scheduler = upcoming
            if traits.can_redo:
                redo = self.pipes.work.poll_redo(state.work, scheduler.tile_index < num_tiles, traits)
        self.pipes.work.publish_end(state.work, scheduler.turn)

    @gluon.jit
    def current_work(self, scheduler, redo, num_tiles):
        if self.traits.can_redo:
            if redo.pending > 0:
                work = self.pipes.work.take_redo(redo, self.traits)
            else:
                work = self.scheduled_work(scheduler, num_tiles)
        else:
            work = self.scheduled_work(scheduler, num_tiles)
        return work

    @gluon.jit
    def scheduled_work(self, scheduler, num_tiles):
        traits: gl.constexpr = self.traits
        cu_seqlens, launch, errors = self.cu_seqlens, self.launch, self.workspace.errors
        if traits.cached:
            return cached_work_tile(scheduler.tile_index, num_tiles, cu_seqlens, self.cache, launch, errors, traits)
        else:
            return scheduler.get_current_work(cu_seqlens, self.ranges, launch, errors, traits)

    @gluon.jit
    def load_work_tile(self, work, redo, state):
        """Publish a tile and load its Q, K and V, K one block ahead of V. Returns the state after it."""
        traits: gl.constexpr = self.traits
        CONSUMERS: gl.constexpr = traits.consumers
        maps, pipes, shape = self.maps, self.pipes, self.launch.shape
        pipes.work.publish(state.work, work, redo, traits)
        slot, work_state = state.work.index, state.work.advance()
        q_rows = work.q_rows(shape, traits)
        k_rows, v_rows = work.kv_rows(shape.gap_k, shape, traits), work.kv_rows(shape.gap_v, shape, traits)
        blocks = work.blocks(self.launch, traits)
        k, v = state.k, state.v
        for consumer in gl.static_range(CONSUMERS):
            q = state.q.at(consumer)
            pipes.q.producer_acquire(q)
            pipes.q.producer_load(
                q, maps.q, q_rows, work.consumer_m_start(consumer, slot, traits), traits, traits.pack_gqa > 1
            )
            if consumer == 0:
                if blocks.count > 0:  # the first keys before the other consumers' queries
                    k = self.load_k(k, k_rows, blocks.n_block(0, traits))
        zero_foreign = False
        if traits.mask.documents:
            zero_foreign = (work.document != PURE) & (redo.pending > 0)
        for i in range(blocks.count):
            n_block = blocks.n_block(i, traits)
            if i + 1 < blocks.count:
                k = self.load_k(k, k_rows, blocks.n_block(i + 1, traits))
            if traits.mask.documents:
                if zero_foreign & (i > 0):  # V of the block before, which has landed meanwhile
                    self.zero_foreign_rows(v.previous(), work, blocks.n_block(i - 1, traits))
            v = self.load_v(v, v_rows, n_block, zero_foreign)
        if traits.mask.documents:
            if zero_foreign & (blocks.count > 0):
                self.zero_foreign_rows(v.previous(), work, blocks.n_block(blocks.count - 1, traits))
        return ProducerState(k, v, state.q.advance(), work_state, state.staging)

    @gluon.jit
    def load_cached_tile(self, work, redo, state):
        """`load_work_tile` for keys in a cache. Page ids are read one block ahead, and K and V use the same ids.
        Otherwise their latency would stall the loads: the tensor cores take 0.9 us a block.
        """
        traits: gl.constexpr = self.traits
        CONSUMERS: gl.constexpr = traits.consumers
        maps, pipes, shape, block_n = self.maps, self.pipes, self.launch.shape, traits.block_n
        pipes.work.publish(state.work, work, redo, traits)
        slot, work_state = state.work.index, state.work.advance()
        q_rows = work.q_rows(shape, traits)
        keys = CachedKeys.of_tile(work, self.cache, self.launch, self.workspace.errors, traits)
        blocks = work.blocks(self.launch, traits)
        k, v = state.k, state.v
        pages = keys.pages(blocks.n_block(0, traits) * block_n, traits)
        next_pages = keys.pages(blocks.n_block(1, traits) * block_n, traits)
        for consumer in gl.static_range(CONSUMERS):
            q = state.q.at(consumer)
            pipes.q.producer_acquire(q)
            pipes.q.producer_load(
                q, maps.q, q_rows, work.consumer_m_start(consumer, slot, traits), traits, traits.pack_gqa > 1
            )
            if consumer == 0:
                if blocks.count > 0:  # the first keys before the other consumers' queries
                    k = self.load_cached_k(k, keys, pages, blocks.n_block(0, traits) * block_n)
        for i in range(blocks.count):
            pages_ahead = keys.pages(blocks.n_block(i + 2, traits) * block_n, traits)
            if i + 1 < blocks.count:
                k = self.load_cached_k(k, keys, next_pages, blocks.n_block(i + 1, traits) * block_n)
            v = self.load_cached_v(v, keys, pages, blocks.n_block(i, traits) * block_n)
            pages, next_pages = next_pages, pages_ahead
        return ProducerState(k, v, state.q.advance(), work_state, state.staging)

    @gluon.jit
    def load_cached_k(self, state, keys, pages, n_start):
        traits: gl.constexpr = self.traits
        pipe = self.pipes.k
        lost = keys.lost_boxes(pages, traits)
        rows = keys.box_rows(pages, n_start, self.launch.cache.k_step, traits)
        pipe.producer_acquire(state)
        if traits.has_pages:
            tell_lost_boxes(self.pipes.lost_boxes, state, lost, self.workspace.errors)
        keys.load(pipe, state, self.maps.k, n_start, rows, lost, traits)
        return state.advance()

    @gluon.jit
    def load_cached_v(self, state, keys, pages, n_start):
        traits: gl.constexpr = self.traits
        pipe = self.pipes.v
        lost = keys.lost_boxes(pages, traits)
        rows = keys.box_rows(pages, n_start, self.launch.cache.v_step, traits)
        pipe.producer_acquire(state)
        keys.load(pipe, state, self.maps.v, n_start, rows, lost, traits)
        return state.advance()

    @gluon.jit
    def load_staged_tile(self, work, redo, state):
        """`load_cached_tile` for 8-bit keys. Words are copied to staging buffers STAGING_STAGES blocks ahead, and page
        ids are read one block before.
        """
        traits: gl.constexpr = self.traits
        pipes = self.pipes
        pipes.work.publish(state.work, work, redo, traits)
        keys = CachedKeys.of_tile(work, self.cache, self.launch, self.workspace.errors, traits)
        keys_k, keys_v = ConvertedKeys.of_k(keys, self.cache, traits), ConvertedKeys.of_v(keys, self.cache, traits)
        blocks = work.blocks(self.launch, traits)
        k, v, staging = state.k, state.v, state.staging
        n_start, next_start = self.n_start_or_none(blocks, 0), self.n_start_or_none(blocks, 1)
        pages, next_pages = row_pages(keys, n_start, traits), row_pages(keys, next_start, traits)
        box_pages = keys.pages(n_start, traits)
        pipes.staging.copy(staging, keys_k, keys_v, pages, n_start, traits)
        pipes.staging.copy(staging.advance(), keys_k, keys_v, next_pages, next_start, traits)
        pages = row_pages(keys, self.n_start_or_none(blocks, STAGING_STAGES), traits)
        self.load_queries(work, state)
        for i in range(blocks.count):
            self.convert_staged(k, v, staging, keys_k, keys_v, box_pages)
            ahead = i + STAGING_STAGES
            pipes.staging.copy(staging, keys_k, keys_v, pages, self.n_start_or_none(blocks, ahead), traits)
            pages = row_pages(keys, self.n_start_or_none(blocks, ahead + 1), traits)
            box_pages = keys.pages(self.n_start_or_none(blocks, i + 1), traits)
            k, v, staging = k.advance(), v.advance(), staging.advance()
        cp_async_wait(0)  # zeros after the tile's last block, before the next tile's words take their place
        return ProducerState(k, v, state.q.advance(), state.work.advance(), staging)

    @gluon.jit
    def convert_staged(self, k, v, staging, keys_k, keys_v, box_pages):
        """Fill a stage of K and one of V from a staging buffer, which then is empty. K is committed before V's stage is
        free: a consumer that skips blocks holds V of the first block until it has K of the block after them.
        """
        pipes = self.pipes
        cp_async_wait(STAGING_STAGES - 1)
        partition_barrier()  # what other threads have copied
        k_words, v_words = pipes.staging.load(staging, self.traits)
        self.store_converted(pipes.k, k, keys_k, k_words, box_pages)
        self.store_converted(pipes.v, v, keys_v, v_words, None)

    @gluon.jit
    def load_queries(self, work, state):
        """Q of all consumers, by a producer of several warps."""
        traits: gl.constexpr = self.traits
        CONSUMERS: gl.constexpr = traits.consumers
        q_rows = work.q_rows(self.launch.shape, traits)
        for consumer in gl.static_range(CONSUMERS):
            q = state.q.at(consumer)
            m_start = work.consumer_m_start(consumer, state.work.index, traits)
            self.pipes.q.producer_acquire(q)
            partition_barrier()
            self.pipes.q.producer_load(q, self.maps.q, q_rows, m_start, traits, traits.pack_gqa > 1)

    @gluon.jit
    def load_converted_tile(self, work, redo, state):
        """`load_cached_tile` for 8-bit keys in wide tiles. Page ids are read two blocks ahead. Registers hold the words
        of K or those of V: each is loaded when the other is in shared memory.
        """
        traits: gl.constexpr = self.traits
        pipes = self.pipes
        pipes.work.publish(state.work, work, redo, traits)
        keys = CachedKeys.of_tile(work, self.cache, self.launch, self.workspace.errors, traits)
        keys_k, keys_v = ConvertedKeys.of_k(keys, self.cache, traits), ConvertedKeys.of_v(keys, self.cache, traits)
        blocks = work.blocks(self.launch, traits)
        k, v = state.k, state.v
        n_start, next_start = self.n_start_or_none(blocks, 0), self.n_start_or_none(blocks, 1)
        box_pages, pages = keys.pages(n_start, traits), row_pages(keys, n_start, traits)
        next_pages = row_pages(keys, next_start, traits)
        k_words = keys_k.load(pages, n_start, traits)
        self.load_queries(work, state)
        for i in range(blocks.count):
            next_start = self.n_start_or_none(blocks, i + 1)
            pages_ahead = row_pages(keys, self.n_start_or_none(blocks, i + 2), traits)
            k = self.store_converted(pipes.k, k, keys_k, k_words, box_pages)
            v_words = keys_v.load(pages, self.n_start_or_none(blocks, i), traits)
            box_pages = keys.pages(next_start, traits)
            v = self.store_converted(pipes.v, v, keys_v, v_words, None)
            k_words = keys_k.load(next_pages, next_start, traits)
            pages, next_pages = next_pages, pages_ahead
        return ProducerState(k, v, state.q.advance(), state.work.advance(), state.staging)

    @gluon.jit
    def n_start_or_none(self, blocks, i):
        """The first key of the tile's block i; after its last block, a tile before the sequence."""
        block_n = self.traits.block_n
        return gl.where(i < blocks.count, blocks.n_block(i, self.traits) * block_n, -block_n)

    @gluon.jit
    def store_converted(self, pipe, state, keys, words, box_pages):
        """Fill a stage of K or V with the words of its block. box_pages: page ids of K's boxes; None for V."""
        traits: gl.constexpr = self.traits
        pipe.producer_acquire(state)
        if traits.has_pages:
            if box_pages is not None:
                lost = keys.keys.lost_boxes(box_pages, traits)
                write_lost_boxes(self.pipes.lost_boxes, state, lost, self.workspace.errors)
        keys.store(pipe.tiles.index(state.index), words)
        fence_async_shared()
        partition_barrier()  # all threads have written before one arrives
        pipe.producer_commit(state)
        return state.advance()

    @gluon.jit
    def load_k(self, state, rows, n_block):
        self.pipes.k.producer_acquire(state)
        self.pipes.k.producer_load(state, self.maps.k, rows, n_block * self.traits.block_n, self.traits)
        return state.advance()

    @gluon.jit
    def load_v(self, state, rows, n_block, zero_foreign):
        """One block of V. With documents, v_landed completes a phase in any case, so that it has the phase of the
        pipeline.
        """
        pipes, block_n = self.pipes, self.traits.block_n
        pipes.v.producer_acquire(state)
        if self.traits.mask.documents:
            if zero_foreign:
                pipes.v.producer_load_on(pipes.v_landed, state, self.maps.v, rows, n_block * block_n, self.traits)
            else:
                mbarrier.arrive(pipes.v_landed.index(state.index))
                pipes.v.producer_load(state, self.maps.v, rows, n_block * block_n, self.traits)
        else:
            pipes.v.producer_load(state, self.maps.v, rows, n_block * block_n, self.traits)
        return state.advance()

    @gluon.jit
    def zero_foreign_rows(self, state, work, n_block):
        """Zero the rows of other documents in a block of V that has landed, and hand it to the consumers."""
        v = self.pipes.v
        mbarrier.wait(self.pipes.v_landed.index(state.index), state.phase)
        own = (0, work.seqlen.num_keys, work.document, self.ranges.ids_k + work.seqlen.offset_k)
        tile = v.tiles.index(state.index)
        zero_foreign_rows(tile.main, n_block * self.traits.block_n, own)
        if tile.tail is not None:
            zero_foreign_rows(tile.tail, n_block * self.traits.block_n, own)
        fence_async_shared()
        partition_barrier()  # all lanes have written before one arrives
        v.producer_commit(state)


@gluon.jit
def producer(maps, cu_seqlens, ranges, cache, pipes, launch, workspace, traits: gl.constexpr):
    Producer(maps, cu_seqlens, ranges, cache, pipes, launch, workspace, traits).run()
