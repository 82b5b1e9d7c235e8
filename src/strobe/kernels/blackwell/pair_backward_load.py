"""The load and relay warps of the Blackwell backward with a pair of CTAs; each CTA has one of each.

load: K and V of the CTA's keys, half of K's columns of all keys; then of each step
    half of Q's rows with LSE, half of dO's rows, half of dO's columns with -delta, half of Q's columns

Serial products: Q's rows and columns share a buffer. S has read the rows before the columns are loaded, and dK has read
the columns before the next step's rows are. With half tiles dO's rows and columns share one, too: dP has read the rows
before the columns are loaded, and dV, which comes before dK, the columns before the next rows are.

Documents: in a tile with rows of other documents, each part completes `rows_landed`, a barrier that only the load warp
waits for. The warp masks the other documents' rows as `backward_load` does, then commits the part. There are six parts
a step, an even number, so the first part of every such tile completes phase 0.

relay: dS of both CTAs comes into a CTA's shared memory by ordinary stores, and completes `landed`. The relay warp
orders these stores before products, which read shared memory asynchronously, and tells the first CTA, whose MMA warp
issues dQ for both.
"""

from ..device.dialect import fence_async_shared, gl, gluon, mbarrier, partition_barrier, record, reinterpret, tma_load
from ..device.pipeline import PipelineState
from ..device.zero_foreign_rows import ROWS_PER_STEP, is_own_row
from .backward_memory import ROWS, load_parts
from .backward_work import ProgramInputs, WorkTile, of_role
from .pair_backward_memory import PairInputMaps, PairPipelines


@record
class PairLoadState:
    """Pipeline states of the load warp."""

    kv: PipelineState  # key ranges: advances with each work tile
    stats: PipelineState
    step: PipelineState  # of every pipeline of one stage, except `kv`

    @gluon.jit
    def start(traits: gl.constexpr):
        return PairLoadState(PipelineState.start(1), PipelineState.start(traits.q_stages), PipelineState.start(1))


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
        state = PairLoadState.start(traits)
        if traits.key_ranges:
            row = gl.to_tensor(0)
            while row >= 0:
                work = WorkTile.of_program(row, self.inputs, self.launch, traits)
                if work.is_valid:
                    state = self.load_work_tile(work, state)
                row = work.next_row
        else:
            self.load_work_tile(WorkTile.of_program(None, self.inputs, self.launch, traits), state)

    @gluon.jit
    def load_work_tile(self, work, state):
        """Load K and V of a work tile, and its tiles of queries. Returns the state after the work tile."""
        traits: gl.constexpr = self.traits
        steps = work.num_steps(traits)
        if traits.key_ranges:
            mbarrier.wait(self.pipes.kv.empty.index(0), state.kv.phase ^ 1)
            if steps > 0:
                self.load_kv(work)
            else:  # compute stores zeros from the memory of K and V
                mbarrier.arrive(self.pipes.dkv.full.index(0))
        elif steps > 0:
            self.load_kv(work)
        stats, step_state = state.stats, state.step
        for step in range(steps):
            self.load_queries(work, step, stats, step_state)
            stats, step_state = stats.advance(), step_state.advance()
        return PairLoadState(state.kv.advance(), stats, step_state)

    @gluon.jit
    def load_kv(self, work):
        traits: gl.constexpr = self.traits
        maps, kv, shape = self.maps, self.pipes.kv, self.launch.shape
        full, num_keys = kv.full.index(0), work.seqlen.num_keys
        mbarrier.expect(full, 2 * traits.cta_keys * (2 * traits.block_d + traits.block_dv))
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
        if traits.serial:  # dK of the step before has read Q's columns, which lie in the same memory
            pipes.q_columns.producer_acquire(state)
        else:
            pipes.q_rows.producer_acquire(state)
        self.load_tile(pipes.q_rows, maps.q, q_rows, work, queries, True, 0)
        self.load_stats(pipes.q, stats, stat, work, queries, float("inf"), 1)
        if not traits.half_tiles:  # half tiles: dV of the step before has read dO's columns, because dK comes after it
            pipes.do_rows.producer_acquire(state)
        self.load_tile(pipes.do_rows, maps.do, do_rows, work, queries, True, 0)
        if traits.half_tiles:  # dP of this step has read dO's rows
            mbarrier.wait(pipes.do_rows.empty.index(0), state.phase)
        else:
            pipes.do_columns.producer_acquire(state)
        self.load_tile(pipes.do_columns, maps.do_columns, do_rows, work, queries, False, 1)
        self.load_stats(pipes.do, stats, stat + tiles * traits.block_m, work, queries, 0.0, 0)
        if traits.serial:  # S of this step has read Q's rows
            mbarrier.wait(pipes.q_rows.empty.index(0), state.phase)
        else:
            pipes.q_columns.producer_acquire(state)
        self.load_tile(pipes.q_columns, maps.q_columns, q_rows, work, queries, False, 1)

    @gluon.jit
    def load_tile(self, pipe, desc, rows, work, queries, by_rows: gl.constexpr, phase: gl.constexpr):
        """Load a tile of which each CTA gets its part. `phase` is that of `rows_landed`."""
        traits: gl.constexpr = self.traits
        full, tile = pipe.full.index(0), pipe.tiles.index(0)
        if traits.mask.documents:
            if work.rows.has_foreign_rows(queries.m_block):
                landed = self.pipes.rows_landed.index(0)
                load_on(landed, desc, rows, queries.m_start, tile, traits)
                mbarrier.wait(landed, phase)
                own = work.rows.own(work.batch, work.seqlen.seqlen_q, self.inputs.ranges)
                zero_foreign_part(tile.main, queries.m_start, own, by_rows)
                if tile.tail is not None:
                    zero_foreign_part(tile.tail, queries.m_start, own, by_rows)
                commit_masked(full)
            else:
                load_on(full, desc, rows, queries.m_start, tile, traits)
        else:
            load_on(full, desc, rows, queries.m_start, tile, traits)

    @gluon.jit
    def load_stats(self, pipe, state, stat, work, queries, masked: gl.constexpr, phase: gl.constexpr):
        """Load LSE or -delta, with the value `masked` in rows of other documents."""
        traits: gl.constexpr = self.traits
        full, values = pipe.full.index(state.index), pipe.stats.index(state.index)
        if traits.mask.documents:
            if work.rows.has_foreign_rows(queries.m_block):
                landed = self.pipes.rows_landed.index(0)
                load_values(landed, self.maps.stats, stat, values)
                mbarrier.wait(landed, phase)
                own = work.rows.own(work.batch, work.seqlen.seqlen_q, self.inputs.ranges)
                layout: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0], cga_layout=[[0]])
                kept = is_own_row(queries.m_start + gl.arange(0, ROWS, layout), own)
                values.store(gl.where(kept, values.load(layout), masked))
                commit_masked(full)
            else:
                load_values(full, self.maps.stats, stat, values)
        else:
            load_values(full, self.maps.stats, stat, values)


@gluon.jit
def load_on(barrier, desc, rows, row, tile, traits: gl.constexpr):
    if desc.tail is None:
        mbarrier.expect(barrier, desc.main.block_type.nbytes // 2)
    else:
        mbarrier.expect(barrier, (desc.main.block_type.nbytes + desc.tail.block_type.nbytes) // 2)
    load_parts(desc, rows, row, barrier, tile, traits)


@gluon.jit
def load_values(barrier, desc, stat, values):
    mbarrier.expect(barrier, 4 * ROWS)
    tma_load(desc, [stat], barrier, values)


@gluon.jit
def commit_masked(full):
    fence_async_shared()
    partition_barrier()  # all lanes have written before one arrives
    mbarrier.arrive(full)


@gluon.jit
def zero_foreign_part(tile, row, own, by_rows: gl.constexpr):
    """`zero_foreign_rows` of a tile that the CTAs divide by rows or by columns. `row` is the tile's first row."""
    LOCAL_ROWS: gl.constexpr = tile.shape[-2] // 2 if by_rows else tile.shape[-2]
    FIRST_OF_SECOND: gl.constexpr = LOCAL_ROWS if by_rows else 0  # the second CTA's first row
    LOCAL_COLUMNS: gl.constexpr = tile.shape[-1] if by_rows else tile.shape[-1] // 2
    COLUMNS: gl.constexpr = min(LOCAL_COLUMNS, tile.layout.swizzle_byte_width // 2)
    BLOCKS: gl.constexpr = LOCAL_COLUMNS // COLUMNS
    PIECES: gl.constexpr = LOCAL_ROWS // ROWS_PER_STEP
    LANES: gl.constexpr = [1, 256 // COLUMNS, COLUMNS // 8]
    PIECE: gl.constexpr = [2, ROWS_PER_STEP, COLUMNS]  # [CTAs, rows, columns]
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], LANES, [1, 1, 1], [2, 1, 0], cga_layout=[[1, 0, 0]])
    memory_layout: gl.constexpr = gl.NVMMASharedLayout(2 * COLUMNS, 16, 3, cga_layout=[[1, 0, 0]])
    pieces = reinterpret(tile, tile.dtype, [BLOCKS * PIECES] + PIECE, memory_layout)  # noqa: RUF005 (Triton has no *)
    plane: gl.constexpr = gl.SliceLayout(2, layout)
    cta = gl.arange(0, PIECE[0], gl.SliceLayout(1, plane))[:, None]
    line = row + cta * FIRST_OF_SECOND + gl.arange(0, ROWS_PER_STEP, gl.SliceLayout(0, plane))[None, :]
    for i in range(PIECES):
        kept = is_own_row(line + i * ROWS_PER_STEP, own)
        for block in range(BLOCKS):
            piece = pieces.index(block * PIECES + i)
            piece.store(gl.where(kept[:, :, None], piece.load(layout), 0.0))


@gluon.jit
def load(maps, inputs, pipes, launch, traits: gl.constexpr):
    PairLoadWarp(maps, inputs, pipes, of_role(launch), traits).run()


# ------------------------------------------------ relay


@gluon.jit
def relay(inputs, pipes, launch, traits: gl.constexpr):
    launch = of_role(launch)
    state = PipelineState.start(1)
    if traits.key_ranges:
        row = gl.to_tensor(0)
        while row >= 0:
            work = WorkTile.of_program(row, inputs, launch, traits)
            if work.is_valid:
                state = relay_steps(work.num_steps(traits), pipes, state, traits)
            row = work.next_row
    else:
        relay_steps(WorkTile.of_program(None, inputs, launch, traits).num_steps(traits), pipes, state, traits)


@gluon.jit
def relay_steps(steps, pipes, state, traits: gl.constexpr):
    BYTES: gl.constexpr = traits.block_n * ROWS  # of dS that a CTA gets: all keys, half of the queries, 16 bits
    landed = pipes.landed.index(0)
    for _ in range(steps):
        pipes.exchange.producer_acquire(state)
        mbarrier.expect(landed, BYTES)
        mbarrier.wait(landed, state.phase)
        fence_async_shared()
        pipes.exchange.producer_commit(state)
        state = state.advance()
    return state
