"""The Blackwell backward's compute warps: P^T and dS^T of each step, then dV and dK of the program's keys.

Eight warps, two warpgroups. A thread holds a key, and half of the queries of HALF columns. P and dS replace S and dP in
tensor memory, where a thread writes columns that threads of the other warpgroup have read. So all warps meet between.
"""

from ..device.dialect import (
    Value,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    record,
    tma_store_wait,
)
from ..device.mask import apply_mask
from ..device.pipeline import PipelineState
from ..device.tma import HeadRows, as_rows, store_part
from .backward_memory import HALF, ROWS, OutputMaps, Pipelines, compute_layout
from .backward_work import WorkTile, of_role


@record
class Halves:
    """A tile [keys, queries] in registers, HALF queries each."""

    first: Value
    second: Value

    @gluon.jit
    def load(tile):
        """From tensor memory."""
        layout: gl.constexpr = compute_layout(gl.float32)
        return Halves(tile.slice(0, HALF).load(layout), tile.slice(HALF, HALF).load(layout))

    @gluon.jit
    def store_tensor(self, tile):
        """To 16 bits in tensor memory."""
        layout: gl.constexpr = compute_layout(tile.dtype)
        tile.slice(0, HALF).store(gl.convert_layout(self.first.to(tile.dtype), layout))
        tile.slice(HALF, HALF).store(gl.convert_layout(self.second.to(tile.dtype), layout))

    @gluon.jit
    def store_shared(self, tile):
        """To 16 bits in shared memory."""
        tile.slice(0, HALF, dim=1).store(self.first.to(tile.dtype))
        tile.slice(HALF, HALF, dim=1).store(self.second.to(tile.dtype))


@record
class AttentionMask:
    """The queries [first, stop) that see each key, from query 0 on: [ROWS] int32, and what decides whether a tile has
    masked pairs.
    """

    first: Value
    stop: Value
    n_start: gl.tensor
    shift: gl.tensor  # S_k - S_q

    @gluon.jit
    def of_keys(n_start, launch, traits: gl.constexpr):
        shape, window = launch.shape, launch.window
        key = n_start + gl.arange(0, ROWS, gl.SliceLayout(1, compute_layout(gl.float32)))
        shift = shape.seqlen_k - shape.seqlen_q
        first, stop = key * 0, key * 0 + shape.seqlen_q
        if traits.mask.right:
            first = key - shift - window.right
        if traits.mask.left:
            stop = gl.minimum(stop, key - shift + window.left + 1)
        if not traits.even:
            stop = gl.where(key < shape.seqlen_k, stop, 0)
        return AttentionMask(first, stop, n_start, shift)

    @gluon.jit
    def is_partial(self, m_start, launch, traits: gl.constexpr):
        """Whether a query of the tile from m_start does not see all keys."""
        last_key, last_row = self.n_start + ROWS - 1, m_start + ROWS - 1
        partial = last_key >= launch.shape.seqlen_k
        if traits.mask.right:
            partial = partial | (last_key > m_start + self.shift + launch.window.right)
        if traits.mask.left:
            partial = partial | (self.n_start < last_row + self.shift - launch.window.left)
        return partial

    @gluon.jit
    def apply_mask(self, s, m_start, start: gl.constexpr, traits: gl.constexpr):
        """Scores of HALF queries from m_start + start on, -inf where a query does not see the key."""
        column = gl.arange(0, HALF, gl.SliceLayout(0, s.type.layout))[None, :]
        begin = m_start + start
        first, stop = (self.first - begin)[:, None], (self.stop - begin)[:, None]
        return apply_mask(s, column, first, stop, float("-inf"), traits.mask.right)


@record
class ComputeState:
    """Where the compute warps stand. `step` is the state of every pipeline of one stage."""

    q: PipelineState
    do: PipelineState
    step: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        q, do = PipelineState.start(traits.q_stages), PipelineState.start(traits.do_stages)
        return ComputeState(q, do, PipelineState.start(1))

    @gluon.jit
    def advance(self):
        return ComputeState(self.q.advance(), self.do.advance(), self.step.advance())


@record
class ComputeWarps:
    """What the compute warps work with."""

    maps: OutputMaps
    pipes: Pipelines
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        traits: gl.constexpr = self.traits
        work = WorkTile.of_program(self.launch, traits)
        mask = AttentionMask.of_keys(work.n_start, self.launch, traits)
        steps = work.num_steps(traits)
        state = ComputeState.start(traits)
        for step in range(steps):
            m_start = work.query_tile(step, self.launch.shape, traits).m_start
            self.mainloop_step(m_start, mask, state)
            state = state.advance()
        self.epilogue(work, steps)

    @gluon.jit
    def mainloop_step(self, m_start, mask, state):
        pipes = self.pipes
        # P = exp2(scale S - LSE)
        pipes.q.consumer_wait(state.q)
        pipes.s.consumer_wait(state.step)
        p = self.probabilities(Halves.load(pipes.tensor.s()), m_start, mask, state)
        partition_barrier()  # both warpgroups have read S
        p.store_tensor(pipes.tensor.p())
        pipes.p.producer_commit(state.step)
        # dS = P (dP - delta)
        pipes.do.consumer_wait(state.do)
        pipes.dp.consumer_wait(state.step)
        ds = self.score_gradients(p, state)
        partition_barrier()  # both warpgroups have read dP
        ds.store_tensor(pipes.tensor.ds())
        ds.store_shared(pipes.ds.tiles)
        fence_async_shared()  # dS before dQ reads it, and LSE and delta before TMA overwrites them
        pipes.q.consumer_release(state.q)
        pipes.do.consumer_release(state.do)
        pipes.ds.producer_commit(state.step)

    @gluon.jit
    def probabilities(self, s, m_start, mask, state):
        traits: gl.constexpr = self.traits
        scale_log2 = self.launch.softmax.scale_log2
        if traits.masks:
            if mask.is_partial(m_start, self.launch, traits):
                first = mask.apply_mask(s.first, m_start, 0, traits)
                s = Halves(first, mask.apply_mask(s.second, m_start, HALF, traits))
        lse = self.pipes.q.stats.index(state.q.index)
        first = gl.exp2(s.first * scale_log2 - row_values(lse, 0)[None, :])
        return Halves(first, gl.exp2(s.second * scale_log2 - row_values(lse, HALF)[None, :]))

    @gluon.jit
    def score_gradients(self, p, state):
        layout: gl.constexpr = compute_layout(gl.float32)
        dp, delta = self.pipes.tensor.dp(), self.pipes.do.stats.index(state.do.index)
        first = p.first * (dp.slice(0, HALF).load(layout) + row_values(delta, 0)[None, :])
        return Halves(first, p.second * (dp.slice(HALF, HALF).load(layout) + row_values(delta, HALF)[None, :]))

    # ------------------------------------------------ dV and dK

    @gluon.jit
    def epilogue(self, work, steps):
        """dV, then scale dK, by TMA from the memory of V and K; zeros where no query sees the keys."""
        pipes, shape = self.pipes, self.launch.shape
        rows = HeadRows(work.batch, 0, shape.seqlen_k, work.head_kv, shape.heads // self.traits.group)
        if steps > 0:
            mbarrier.wait(pipes.dkv.full.index(0), 0)
        store_gradient(pipes.tensor.dv(self.traits), pipes.kv.v, 1.0, steps)
        store_gradient(pipes.tensor.dk(self.traits), pipes.kv.k, self.launch.softmax.scale, steps)
        fence_async_shared()
        partition_barrier()
        store_part(self.maps.dv, rows, work.n_start, 0, pipes.kv.v, False, self.traits)
        store_part(self.maps.dk, rows, work.n_start, 0, pipes.kv.k, False, self.traits)
        tma_store_wait(0)


@gluon.jit
def row_values(stats, start: gl.constexpr):
    """LSE or -delta of HALF queries, a value for each column of a tile [keys, queries]."""
    return stats.slice(start, HALF).load(gl.SliceLayout(0, compute_layout(gl.float32)))


@gluon.jit
def store_gradient(accumulator, tile, factor, steps):
    """An accumulator times a factor into shared memory, HALF columns at a time."""
    layout: gl.constexpr = compute_layout(gl.float32)
    WIDTH: gl.constexpr = accumulator.shape[1]
    out = as_rows(tile)
    for c in gl.static_range(WIDTH // HALF):
        columns = gl.full([ROWS, HALF], 0.0, gl.float32, layout)
        if steps > 0:
            columns = accumulator.slice(c * HALF, HALF).load(layout) * factor
        out.slice(c * HALF, HALF, dim=1).store(columns.to(tile.dtype))


@gluon.jit
def compute(maps, pipes, launch, traits: gl.constexpr):
    ComputeWarps(maps, pipes, of_role(launch), traits).run()
