"""The MMA warps of the Blackwell backward with a pair of CTAs. That of the first CTA issues every product, for both. In
the second CTA products, commits and waits for barriers of both do nothing, so that its warp runs through.

    prologue     S(0)  dP(0)  dV(0)
    mainloop     S(t)  dK(t-1)  dP(t)  dQ(t-1)  dV(t)
    epilogue     dK  dQ of the last step

    serial       S(t)  dP(t)  dV(t)  dK(t)  dQ(t)      where tensor memory does not hold S, dP and the gradients at once
"""

from ..device.dialect import gl, gluon, mbarrier, record, tcgen05_commit
from ..device.pipeline import PipelineState
from .backward_mma import product, tile_now, transposed_product
from .backward_work import WorkTile, of_role
from .pair_backward_memory import PairPipelines


@record
class PairMmaState:
    """Pipeline states of the MMA warp. All pipelines have one stage."""

    kv: PipelineState  # advances with each work tile that queries see
    step: PipelineState  # of every other pipeline


@record
class PairMmaWarp:
    """Pipelines of the MMA warp."""

    pipes: PairPipelines
    traits: gl.constexpr

    @gluon.jit
    def run(self, inputs, launch):
        traits: gl.constexpr = self.traits
        state = PairMmaState(PipelineState.start(1), PipelineState.start(1))
        if traits.key_ranges:
            row = gl.to_tensor(0)
            while row >= 0:
                work = WorkTile.of_program(row, inputs, launch, traits)
                steps = work.num_steps(traits)
                if work.is_valid & (steps > 0):
                    state = self.process_tile(steps, state)
                row = work.next_row
        else:
            steps = WorkTile.of_program(None, inputs, launch, traits).num_steps(traits)
            if steps > 0:
                self.process_tile(steps, state)

    @gluon.jit
    def process_tile(self, steps, state):
        """The products of a work tile that queries see. Returns the state after the work tile."""
        mbarrier.wait(self.pipes.kv.full.index(0), state.kv.phase)
        step_state = state.step
        if self.traits.serial:
            step_state = self.serial_mainloop(steps, step_state)
        else:
            step_state = self.mainloop(steps, step_state)
        tcgen05_commit(self.pipes.dkv.full.index(0))
        return PairMmaState(state.kv.advance(), step_state)

    @gluon.jit
    def mainloop(self, steps, state):
        pipes = self.pipes
        # prologue
        if self.traits.key_ranges:  # S is written over dQ of the previous work tile
            pipes.dq.producer_acquire(state)
        self.s_product(state)
        self.dp_product(state)
        pipes.p.consumer_wait(state)
        self.dv_product(state, False)
        # mainloop
        for step in range(1, steps):
            before = state
            state = state.advance()
            pipes.dq.producer_acquire(before)  # S is written over dQ of two steps before
            self.s_product(state)
            self.dk_product(before, step > 1)
            self.dp_product(state)
            pipes.p.consumer_wait(state)  # dQ is written over S
            self.dq_product(before)
            self.dv_product(state, True)
        # epilogue
        self.dk_product(state, steps > 1)
        pipes.dq.producer_acquire(state)
        self.dq_product(state)
        return state.advance()

    @gluon.jit
    def serial_mainloop(self, steps, state):
        pipes = self.pipes
        HALF_TILES: gl.constexpr = self.traits.half_tiles
        for step in range(steps):
            if not HALF_TILES:  # S is written over dQ of the step before
                pipes.dq.producer_acquire(state)
            self.s_product(state)
            if not HALF_TILES:  # dP is written over S
                pipes.p.consumer_wait(state)
            self.dp_product(state)
            if HALF_TILES:
                pipes.p.consumer_wait(state)
            self.dv_product(state, step > 0)
            self.dk_product(state, step > 0)
            if HALF_TILES:
                pipes.dq.producer_acquire(state)
            self.dq_product(state)
            state = state.advance()
        return state

    @gluon.jit
    def s_product(self, state):
        """S^T = K Q^T: [keys, d] x [d, queries]. P of the step before has been read: dV was issued before."""
        pipes = self.pipes
        pipes.q_rows.consumer_wait(state)
        transposed_product(tile_now(pipes.kv.k, 0), tile_now(pipes.q_rows.tiles, 0), pipes.tensor.s(self.traits))
        tcgen05_commit(pipes.q_rows.empty.index(0))
        tcgen05_commit(pipes.s.full.index(0))

    @gluon.jit
    def dp_product(self, state):
        """dP^T = V dO^T: [keys, d_v] x [d_v, queries]. dS of the step before has been read: dK was issued before."""
        pipes = self.pipes
        pipes.do_rows.consumer_wait(state)
        transposed_product(tile_now(pipes.kv.v, 0), tile_now(pipes.do_rows.tiles, 0), pipes.tensor.dp(self.traits))
        tcgen05_commit(pipes.do_rows.empty.index(0))
        tcgen05_commit(pipes.dp.full.index(0))

    @gluon.jit
    def dv_product(self, state, use_acc):
        """dV += P^T dO: [keys, queries] x [queries, d_v], P^T in tensor memory, or with half tiles in shared memory"""
        pipes = self.pipes
        pipes.do_columns.consumer_wait(state)
        p, dv = pipes.p_operand(self.traits), pipes.tensor.dv(self.traits)
        product(p, tile_now(pipes.do_columns.tiles, 0), dv, use_acc)
        tcgen05_commit(pipes.do_columns.empty.index(0))

    @gluon.jit
    def dk_product(self, state, use_acc):
        """dK += dS^T Q: [keys, queries] x [queries, d], dS^T in the same memory as P^T"""
        pipes = self.pipes
        pipes.q_columns.consumer_wait(state)
        pipes.ds.consumer_wait(state)
        ds, dk = pipes.ds_operand(self.traits), pipes.tensor.dk(self.traits)
        product(ds, tile_now(pipes.q_columns.tiles, 0), dk, use_acc)
        tcgen05_commit(pipes.q_columns.empty.index(0))

    @gluon.jit
    def dq_product(self, state):
        """dQ = dS K: [queries, keys] x [keys, d], dS of all 256 keys in shared memory"""
        pipes = self.pipes
        pipes.exchange.consumer_wait(state)
        ds = pipes.exchange.tiles.index(0).permute((1, 0))
        product(ds, tile_now(pipes.kv.columns, 0), pipes.tensor.dq(self.traits), False)
        tcgen05_commit(pipes.exchange.empty.index(0))
        tcgen05_commit(pipes.dq.full.index(0))


@gluon.jit
def mma(inputs, pipes, launch, traits: gl.constexpr):
    PairMmaWarp(pipes, traits).run(inputs, of_role(launch))
