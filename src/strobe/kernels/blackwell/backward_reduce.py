"""The Blackwell backward's reduce warps: they add dQ of each step to its float32 sum in global memory.

`backward_dq` has the order of the sum, `pair_backward_reduce` what is different in a pair of CTAs.

Deterministic: work tiles add to a tile of dQ one by one (`backward_work`). A semaphore for each tile of dQ counts them.
"""

from ..device.dialect import Value, gl, gluon, partition_barrier, record
from ..device.pipeline import PipelineState
from .backward_dq import add_rows, kept_rows
from .backward_memory import CHUNK, ROWS, reduce_layout
from .backward_work import ProgramInputs, WorkTile, of_role
from .pair_backward_reduce import add_pair, meet_pair


@record
class ReduceWarps:
    """Arguments and pipelines of the reduce warps."""

    dq_sum: gl.tensor
    semaphores: Value  # deterministic: number of work tiles that have added to each tile of dQ; else None
    inputs: ProgramInputs
    pipes: Value  # Pipelines, or PairPipelines
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        traits: gl.constexpr = self.traits
        state = PipelineState.start(1)
        if traits.key_ranges:
            row = gl.to_tensor(0)
            while row >= 0:
                work = WorkTile.of_program(row, self.inputs, self.launch, traits)
                if work.is_valid:
                    state = self.process_tile(work, state)
                row = work.next_row
        else:
            work = WorkTile.of_program(None, self.inputs, self.launch, traits)
            self.process_tile(work, state)

    @gluon.jit
    def process_tile(self, work, state):
        """Add dQ of all steps of a work tile. Returns the state after the work tile."""
        traits: gl.constexpr = self.traits
        for step in range(work.num_steps(traits)):
            self.add_step(work, work.query_tile(step, self.launch.shape, traits), state)
            state = state.advance()
        return state

    @gluon.jit
    def add_step(self, work, queries, state):
        traits: gl.constexpr = self.traits
        pipes = self.pipes
        own = None
        if traits.mask.documents:
            own = work.rows.own(work.batch, work.seqlen.seqlen_q, self.inputs.ranges)
        sums = self.dq_sum + queries.index.to(gl.int64) * (ROWS * traits.block_d)
        if traits.deterministic:
            self.dq_semaphore_acquire(work, queries)
        if traits.pair:
            add_pair(pipes, sums, queries.m_start, own, state, traits)
        else:
            kept = None
            if traits.mask.documents:
                kept = kept_rows(queries.m_start, own, reduce_layout())
            pipes.dq.consumer_wait(state)
            dq = pipes.tensor.dq(traits)
            for c in gl.static_range(traits.main_d // CHUNK):
                add_columns(dq.main, sums, c * CHUNK, 0, kept)
            for c in gl.static_range(traits.tail_d // CHUNK):
                add_columns(dq.tail, sums, c * CHUNK, traits.main_d, kept)
            pipes.dq.consumer_release(state)
        if traits.deterministic:
            self.dq_semaphore_release(queries)

    @gluon.jit
    def dq_semaphore_acquire(self, work, queries):
        """Wait until all earlier work tiles have added to a tile of dQ. These are the work tiles with later keys that
        the last row of the tile sees. In reversed sections they are the work tiles with earlier keys.
        """
        traits: gl.constexpr = self.traits
        last_row = queries.m_start + traits.block_m - 1
        _, stop_key = work.seqlen.visible_keys(last_row, self.launch.window, traits)
        ahead = stop_key - 1 - work.n_start
        if traits.reversed_sections > 0:
            ahead = gl.where(work.from_last == 1, work.n_start, ahead)
        before = ahead // traits.block_n
        while gl.atomic_add(self.semaphores + queries.index, 0, sem="acquire") != before:
            pass

    @gluon.jit
    def dq_semaphore_release(self, queries):
        if self.traits.pair:
            meet_pair()
        else:
            partition_barrier()  # all threads have added before one counts
        gl.atomic_add(self.semaphores + queries.index, 1, sem="release")


@gluon.jit
def add_columns(dq_tile, sums, start: gl.constexpr, offset: gl.constexpr, kept):
    """sums += dQ of CHUNK columns of a part that begins at column `offset`; sums points at the tile's sum."""
    dq = dq_tile.slice(start, CHUNK).load(reduce_layout())
    add_rows(sums, dq, offset + start, kept)


@gluon.jit
def reduce(dq_sum, semaphores, inputs, pipes, launch, traits: gl.constexpr):
    ReduceWarps(dq_sum, semaphores, inputs, pipes, of_role(launch), traits).run()
