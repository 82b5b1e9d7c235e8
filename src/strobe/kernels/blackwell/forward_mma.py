"""The Blackwell forward's MMA warp: it issues every product, for two query stages t in turn.

    prologue     S[0] = Q[0] K^T    S[1] = Q[1] K^T
    mainloop     O[0] += P[0] V     S[0] = Q[0] K'^T    O[1] += P[1] V    S[1] = Q[1] K'^T
    epilogue     O[0] += P[0] V     O[1] += P[1] V

K' is the next block's K. Products of one warp run in order. So P[t] has been read before S[t] of the next block is
written over it, and O[t] is complete once s_full[t] completes for scores issued after it.
"""

from ..device.dialect import gl, gluon, record, tcgen05_commit, tcgen05_mma
from ..device.pipeline import PipelineState
from ..device.tma import as_rows
from .forward_memory import Pipelines, opaque


@record
class MmaState:
    """Where the MMA warp stands in each pipeline."""

    kv: PipelineState
    q: PipelineState
    p: PipelineState
    work: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        kv, q = PipelineState.start(traits.stages), PipelineState.start(1)
        return MmaState(kv, q, PipelineState.start(1), PipelineState.start(2))


@record
class MmaWarp:
    """What the MMA warp works with. tcgen05_commit releases a stage once the products issued before have finished."""

    pipes: Pipelines
    stages_q: gl.tensor  # 2
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        pipes = self.pipes
        state = MmaState.start(self.traits)
        while pipes.work.wait_published(state.work):
            num_n_blocks = pipes.work.receive(state.work, self.traits).num_n_blocks
            pipes.work.consumer_release(state.work)
            state = MmaState(state.kv, state.q, state.p, state.work.advance())
            if num_n_blocks > 0:
                state = self.process_tile(num_n_blocks, state)

    @gluon.jit
    def process_tile(self, num_n_blocks, state):
        pipes = self.pipes
        k, q, p = state.kv, state.q, state.p
        self.prologue(q, k)
        q = q.advance()
        for i in range(1, num_n_blocks):
            k = self.mainloop_step(i, k, p)
            p = p.advance()
        tcgen05_commit(pipes.q.empty.index(0))
        v = k.advance()
        self.epilogue(num_n_blocks, v, p)
        return MmaState(v.advance(), q, p.advance(), state.work)

    @gluon.jit
    def prologue(self, q, k):
        pipes = self.pipes
        pipes.kv.consumer_wait(k)
        for t in range(self.stages_q):
            pipes.q.consumer_wait(q.at(t))
            # S[t] = Q[t] K^T
            self.qk_product(t, k)
        tcgen05_commit(pipes.kv.empty.index(k.index))

    @gluon.jit
    def mainloop_step(self, i, k, p):
        """V of the block whose K lies at `k`, and K of the next block. Returns the state of that K."""
        pipes = self.pipes
        v = k.advance()
        k = v.advance()
        pipes.kv.consumer_wait(v)
        for t in range(self.stages_q):
            # O[t] += P[t] V
            self.pv_product(t, v, p, i > 1)
            if t == 0:
                pipes.kv.consumer_wait(k)
            else:
                tcgen05_commit(pipes.kv.empty.index(v.index))
            # S[t] = Q[t] K^T
            self.qk_product(t, k)
        tcgen05_commit(pipes.kv.empty.index(k.index))
        return k

    @gluon.jit
    def epilogue(self, num_n_blocks, v, p):
        pipes = self.pipes
        pipes.kv.consumer_wait(v)
        for t in range(self.stages_q):
            # O[t] += P[t] V
            self.pv_product(t, v, p, num_n_blocks > 1)
            tcgen05_commit(pipes.o.full.index(t))
        tcgen05_commit(pipes.kv.empty.index(v.index))

    @gluon.jit
    def qk_product(self, t, k):
        """S[t] = Q[t] K^T, in flight: [rows, d] x [d, block_n], a product for each part of d. Completes s_full."""
        pipes = self.pipes
        q_tiles, k_tiles, s = pipes.q.tiles, pipes.kv.tiles, pipes.s.tiles
        k_main = as_rows(k_tiles.main.index(k.index))
        tcgen05_mma(as_rows(q_tiles.main.index(t)), k_main.permute((1, 0)), s.index(t), use_acc=False)
        if q_tiles.tail is not None:
            k_tail = as_rows(k_tiles.tail.index(k.index))
            tcgen05_mma(as_rows(q_tiles.tail.index(t)), k_tail.permute((1, 0)), s.index(t), use_acc=True)
        tcgen05_commit(pipes.s.full.index(t))

    @gluon.jit
    def pv_product(self, t, v, p, use_acc):
        """O[t] += P[t] V, in flight. The last quarter of P may come later than the first three, which are products of
        two shapes: 64 and 32 keys.
        """
        QUARTER: gl.constexpr = self.traits.block_n // 4
        p_tile = self.pipes.p_tile(t, self.traits)
        self.pipes.p.consumer_wait(p.at(t))
        self.pv_product_of_keys(p_tile, v, t, 0, 2 * QUARTER, use_acc)
        self.pv_product_of_keys(p_tile, v, t, 2 * QUARTER, QUARTER, True)
        self.pipes.p_last.consumer_wait(p.at(t))
        self.pv_product_of_keys(p_tile, v, t, 3 * QUARTER, QUARTER, True)

    @gluon.jit
    def pv_product_of_keys(self, p_tile, v, t, start: gl.constexpr, keys: gl.constexpr, use_acc):
        """O[t] += P V over `keys` keys from `start`, a product for each part of O's columns."""
        v_tiles, o = self.pipes.kv.tiles, self.pipes.o.tiles
        p = p_tile.slice(start, keys)
        tcgen05_mma(p, as_rows(v_tiles.main.index(v.index)).slice(start, keys), o.main.index(t), use_acc=use_acc)
        if o.tail is not None:
            tcgen05_mma(p, as_rows(v_tiles.tail.index(v.index)).slice(start, keys), o.tail.index(t), use_acc=use_acc)


@gluon.jit
def mma(pipes, traits: gl.constexpr):
    # loops over query stages stay loops: unrolled, the addresses of 60 products fill the role's registers
    MmaWarp(pipes, opaque(2), traits).run()
