"""The Blackwell backward's MMA warp: it issues every product. Keys are rows of S^T, dP^T, dV and dK.

    prologue     S(0)  dP(0)  dV(0)
    mainloop     S(t)  dK(t-1)  dQ(t-1)  dP(t)  dV(t)
    epilogue     dK  dQ of the last step

Products of one warp run in order, and tcgen05_commit completes a barrier once the products issued before have finished.
"""

from ..device.dialect import gl, gluon, mbarrier, record, tcgen05_commit, tcgen05_mma
from ..device.pipeline import PipelineState
from ..device.tma import as_rows
from .backward_memory import Pipelines
from .backward_work import WorkTile, of_role


@record
class MmaState:
    """Where the MMA warp stands. `step` is the state of every pipeline of one stage."""

    q: PipelineState
    do: PipelineState
    step: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        q, do = PipelineState.start(traits.q_stages), PipelineState.start(traits.do_stages)
        return MmaState(q, do, PipelineState.start(1))

    @gluon.jit
    def advance(self):
        return MmaState(self.q.advance(), self.do.advance(), self.step.advance())


@record
class MmaWarp:
    """What the MMA warp works with."""

    pipes: Pipelines
    traits: gl.constexpr

    @gluon.jit
    def run(self, steps):
        pipes = self.pipes
        if steps > 0:
            state = MmaState.start(self.traits)
            mbarrier.wait(pipes.kv.full.index(0), 0)
            # prologue
            self.s_product(state)
            self.dp_product(state)
            self.dv_product(state, False)
            # mainloop
            for step in range(1, steps):
                before = state
                state = state.advance()
                self.s_product(state)
                self.dk_product(before, step > 1)
                self.dq_product(before)
                pipes.dq.producer_acquire(state.step)  # dP is written over dQ of the step before
                self.dp_product(state)
                self.dv_product(state, True)
            # epilogue
            self.dk_product(state, steps > 1)
            self.dq_product(state)
            tcgen05_commit(pipes.dkv.full.index(0))

    @gluon.jit
    def s_product(self, state):
        """S^T = K Q^T: [keys, d] x [d, queries]. P of the step before has been read: dV was issued before."""
        pipes, q = self.pipes, state.q
        pipes.q.consumer_wait(q)
        queries = as_rows(pipes.q.tiles.index(q.index))
        tcgen05_mma(as_rows(pipes.kv.k), queries.permute((1, 0)), pipes.tensor.s(), use_acc=False)
        tcgen05_commit(pipes.s.full.index(0))

    @gluon.jit
    def dp_product(self, state):
        """dP^T = V dO^T: [keys, d_v] x [d_v, queries]"""
        pipes, do = self.pipes, state.do
        pipes.do.consumer_wait(do)
        gradients = as_rows(pipes.do.tiles.index(do.index))
        tcgen05_mma(as_rows(pipes.kv.v), gradients.permute((1, 0)), pipes.tensor.dp(), use_acc=False)
        tcgen05_commit(pipes.dp.full.index(0))

    @gluon.jit
    def dv_product(self, state, use_acc):
        """dV += P^T dO: [keys, queries] x [queries, d_v], P^T in tensor memory"""
        pipes, do = self.pipes, state.do
        pipes.p.consumer_wait(state.step)
        tcgen05_mma(
            pipes.tensor.p(), as_rows(pipes.do.tiles.index(do.index)), pipes.tensor.dv(self.traits), use_acc=use_acc
        )
        tcgen05_commit(pipes.do.empty.index(do.index))

    @gluon.jit
    def dk_product(self, state, use_acc):
        """dK += dS^T Q: [keys, queries] x [queries, d], dS^T in tensor memory"""
        pipes, q = self.pipes, state.q
        pipes.ds.consumer_wait(state.step)
        tcgen05_mma(
            pipes.tensor.ds(), as_rows(pipes.q.tiles.index(q.index)), pipes.tensor.dk(self.traits), use_acc=use_acc
        )
        tcgen05_commit(pipes.q.empty.index(q.index))

    @gluon.jit
    def dq_product(self, state):
        """dQ = dS K: [queries, keys] x [keys, d], dS in shared memory. It is written over dS^T, which dK has read."""
        pipes = self.pipes
        tcgen05_mma(pipes.ds.tiles.permute((1, 0)), as_rows(pipes.kv.k), pipes.tensor.dq(self.traits), use_acc=False)
        tcgen05_commit(pipes.dq.full.index(0))


@gluon.jit
def mma(pipes, launch, traits: gl.constexpr):
    work = WorkTile.of_program(of_role(launch), traits)
    MmaWarp(pipes, traits).run(work.num_steps(traits))
