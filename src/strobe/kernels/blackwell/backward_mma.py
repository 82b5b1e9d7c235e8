"""The Blackwell backward's MMA warp: it issues every product. Keys are rows of S^T, dP^T, dV and dK.

    prologue     S(0)  dP(0)  dV(0)
    mainloop     S(t)  dK(t-1)  dQ(t-1)  dP(t)  dV(t)
    epilogue     dK  dQ of the last step

    serial       S(t)  dP(t)  dV(t)  dK(t)  dQ(t)      where tensor memory does not hold S, dP and the gradients at once

Products of one warp run in order, and tcgen05_commit completes a barrier once the products issued before have finished.
"""

from ..device.dialect import gl, gluon, mbarrier, record, tcgen05_commit, tcgen05_mma, zero_of_turn
from ..device.pipeline import PipelineState
from .backward_memory import Pipelines, rows_at
from .backward_work import WorkTile, of_role


@record
class MmaState:
    """Pipeline states of the MMA warp. `step` is that of every pipeline of one stage, except `kv`."""

    kv: PipelineState  # advances with each work tile that queries see
    q: PipelineState
    do: PipelineState
    step: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        q, do = PipelineState.start(traits.q_stages), PipelineState.start(traits.do_stages)
        return MmaState(PipelineState.start(1), q, do, PipelineState.start(1))

    @gluon.jit
    def advance(self):
        return MmaState(self.kv, self.q.advance(), self.do.advance(), self.step.advance())

    @gluon.jit
    def after_tile(self):
        return MmaState(self.kv.advance(), self.q, self.do, self.step)


@record
class MmaWarp:
    """Pipelines of the MMA warp."""

    pipes: Pipelines
    traits: gl.constexpr

    @gluon.jit
    def run(self, inputs, launch):
        traits: gl.constexpr = self.traits
        state = MmaState.start(traits)
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
        if self.traits.serial:
            state = self.serial_mainloop(steps, state)
        else:
            state = self.mainloop(steps, state)
        tcgen05_commit(self.pipes.dkv.full.index(0))
        return state.after_tile()

    @gluon.jit
    def mainloop(self, steps, state):
        # prologue
        self.s_product(state)
        if self.traits.key_ranges:  # dP is written over dQ of the previous work tile
            self.pipes.dq.producer_acquire(state.step)
        self.dp_product(state)
        self.dv_product(state, False)
        # mainloop
        for step in range(1, steps):
            before = state
            state = state.advance()
            self.s_product(state)
            self.dk_product(before, step > 1)
            self.dq_product(before)
            self.pipes.dq.producer_acquire(state.step)  # dP is written over dQ of the step before
            self.dp_product(state)
            self.dv_product(state, True)
        # epilogue
        self.dk_product(state, steps > 1)
        self.dq_product(state)
        return state.advance()

    @gluon.jit
    def serial_mainloop(self, steps, state):
        for step in range(steps):
            self.pipes.dq.producer_acquire(state.step)  # S is written over dQ of the step before
            self.s_product(state)
            self.pipes.p.consumer_wait(state.step)  # dP is written over S
            self.dp_product(state)
            self.dv_product(state, step > 0)
            self.dk_product(state, step > 0)
            self.dq_product(state)
            state = state.advance()
        return state

    @gluon.jit
    def s_product(self, state):
        """S^T = K Q^T: [keys, d] x [d, queries]. P of the step before has been read: dV was issued before."""
        pipes, q = self.pipes, state.q
        pipes.q.consumer_wait(q)
        transposed_product(
            tile_now(pipes.kv.k, 0),
            tile_now(pipes.q.tiles, q.index),
            pipes.tensor.s(self.traits),
        )
        tcgen05_commit(pipes.s.full.index(0))

    @gluon.jit
    def dp_product(self, state):
        """dP^T = V dO^T: [keys, d_v] x [d_v, queries]"""
        pipes, do = self.pipes, state.do
        pipes.do.consumer_wait(do)
        transposed_product(
            tile_now(pipes.kv.v, 0),
            tile_now(pipes.do.tiles, do.index),
            pipes.tensor.dp(self.traits),
        )
        tcgen05_commit(pipes.dp.full.index(0))

    @gluon.jit
    def dv_product(self, state, use_acc):
        """dV += P^T dO: [keys, queries] x [queries, d_v], P^T in tensor memory"""
        pipes, do = self.pipes, state.do
        if not self.traits.serial:
            pipes.p.consumer_wait(state.step)
        product(
            pipes.tensor.p(self.traits),
            tile_now(pipes.do.tiles, do.index),
            pipes.tensor.dv(self.traits),
            use_acc,
        )
        tcgen05_commit(pipes.do.empty.index(do.index))

    @gluon.jit
    def dk_product(self, state, use_acc):
        """dK += dS^T Q: [keys, queries] x [queries, d], dS^T in tensor memory"""
        pipes, q = self.pipes, state.q
        pipes.ds.consumer_wait(state.step)
        product(
            pipes.tensor.ds(self.traits),
            tile_now(pipes.q.tiles, q.index),
            pipes.tensor.dk(self.traits),
            use_acc,
        )
        tcgen05_commit(pipes.q.empty.index(q.index))

    @gluon.jit
    def dq_product(self, state):
        """dQ = dS K: [queries, keys] x [keys, d], dS in shared memory. It is written over dS^T, which dK has read."""
        pipes = self.pipes
        product(pipes.ds.tiles.permute((1, 0)), tile_now(pipes.kv.k, 0), pipes.tensor.dq(self.traits), False)
        tcgen05_commit(pipes.dq.full.index(0))


@gluon.jit
def tile_now(tiles, index):
    """A stage's tile, whose address is computed in this step. Otherwise LLVM keeps the descriptors of all operands
    in registers over all steps, and they spill: up to 496 bytes with columns in two parts, 404 under Triton 3.9.
    """
    return rows_at(tiles, index + zero_of_turn())


@gluon.jit
def transposed_product(a, b, acc):
    """acc = A B^T, where A and B have their columns in two parts."""
    tcgen05_mma(a.main, b.main.permute((1, 0)), acc, use_acc=False)
    if a.tail is not None:
        tcgen05_mma(a.tail, b.tail.permute((1, 0)), acc, use_acc=True)


@gluon.jit
def product(a, b, acc, use_acc):
    """acc = A B, or acc += A B, where B and acc have their columns in two parts."""
    tcgen05_mma(a, b.main, acc.main, use_acc=use_acc)
    if b.tail is not None:
        tcgen05_mma(a, b.tail, acc.tail, use_acc=use_acc)


@gluon.jit
def mma(inputs, pipes, launch, traits: gl.constexpr):
    MmaWarp(pipes, traits).run(inputs, of_role(launch))
