"""The Blackwell backward's compute warps: P^T and dS^T of each step, then dV and dK of the program's keys.

Eight warps, two warpgroups. A thread holds one key and half of the queries in HALF columns. P and dS replace S and dP
in tensor memory. A thread writes columns that the other warpgroup reads, so all warps synchronize before they write.
With half tiles (`BackwardTraits`) a thread holds one key and 32 queries, and P and dS go to shared memory.
"""

from ..device.dialect import (
    Value,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    record,
    reinterpret,
    tma_store_wait,
)
from ..device.mask import apply_mask
from ..device.pipeline import PipelineState
from ..device.softmax import tanh
from ..device.tma import ColumnParts, store_part
from .backward_memory import HALF, ROWS, OutputMaps, compute_layout, rows_at
from .backward_work import ProgramInputs, WorkTile, of_role
from .forward_memory import opaque

ALL: gl.constexpr = gl.constexpr(2**31 - 1)  # above every query's position


@record
class Halves:
    """A tile [keys, queries] in registers, HALF queries each. Half tiles: all queries are in `first`."""

    first: Value
    second: Value  # half tiles: None

    @gluon.jit
    def load(tile, traits: gl.constexpr):
        """From tensor memory."""
        layout: gl.constexpr = compute_layout(gl.float32, traits.part_columns, traits)
        if traits.half_tiles:
            return Halves(tile.load(layout), None)
        else:
            return Halves(tile.slice(0, HALF).load(layout), tile.slice(HALF, HALF).load(layout))

    @gluon.jit
    def store_tensor(self, tile, traits: gl.constexpr):
        """To 16 bits in tensor memory."""
        layout: gl.constexpr = compute_layout(tile.dtype, HALF, traits)
        tile.slice(0, HALF).store(gl.convert_layout(self.first.to(tile.dtype), layout))
        tile.slice(HALF, HALF).store(gl.convert_layout(self.second.to(tile.dtype), layout))

    @gluon.jit
    def store_shared(self, tile):
        """To 16 bits in shared memory."""
        if self.second is None:
            tile.store(self.first.to(tile.dtype))
        else:
            tile.slice(0, HALF, dim=1).store(self.first.to(tile.dtype))
            tile.slice(HALF, HALF, dim=1).store(self.second.to(tile.dtype))


@record
class AttentionMask:
    """The queries [first, stop) that see each key, counted from query 0: [keys] int32. In tiles of queries that begin
    before `whole_from` or after `whole_to`, some query does not see all keys of the work tile.
    """

    first: Value
    stop: Value
    whole_from: gl.tensor
    whole_to: gl.tensor

    @gluon.jit
    def of_tile(work, launch, traits: gl.constexpr):
        seqlen, window = work.seqlen, launch.window
        KEYS: gl.constexpr = traits.block_n
        layout: gl.constexpr = compute_layout(gl.float32, traits.part_columns, traits)
        key = work.n_start + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
        last_key = work.n_start + KEYS - 1
        shift = seqlen.seqlen_k - seqlen.seqlen_q
        first, stop = key * 0, key * 0 + seqlen.seqlen_q
        whole_from, whole_to = shift * 0, shift * 0 + ALL
        if traits.mask.prefix:
            first = gl.where(key < seqlen.prefix, 0, key - shift)
            whole_from = gl.where(last_key < seqlen.prefix, 0, last_key - shift)
        if traits.mask.right:
            beyond_right = key - shift - window.right
            first = gl.maximum(first, beyond_right) if traits.mask.prefix else beyond_right
            whole_from = gl.maximum(whole_from, last_key - shift - window.right)
        if traits.mask.left:
            stop = gl.minimum(stop, key - shift + window.left + 1)
            whole_to = work.n_start - shift + window.left - (ROWS - 1)
        if not traits.even:
            stop = gl.where(key < seqlen.num_keys, stop, 0)
            whole_to = gl.where(last_key < seqlen.num_keys, whole_to, -1)
        return AttentionMask(first, stop, whole_from, whole_to)

    @gluon.jit
    def is_partial(self, m_start):
        """Whether a query of the tile from m_start does not see all keys."""
        return (m_start < self.whole_from) | (m_start > self.whole_to)

    @gluon.jit
    def apply_mask(self, x, masked, m_start, start: gl.constexpr, traits: gl.constexpr):
        """x of queries from m_start + start on, with the value `masked` where a query does not see the key."""
        column = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
        begin = m_start + start
        first, stop = (self.first - begin)[:, None], (self.stop - begin)[:, None]
        return apply_mask(x, column, first, stop, masked, traits.mask.right or traits.mask.prefix)


@record
class ComputeState:
    """Pipeline states of the compute warps. `step` is that of every pipeline of one stage, except `dkv`."""

    dkv: PipelineState  # advances with each work tile that queries see; of a pair, with each one
    q: PipelineState
    do: PipelineState
    step: PipelineState

    @gluon.jit
    def start(traits: gl.constexpr):
        q, do = PipelineState.start(traits.q_stages), PipelineState.start(traits.do_stages)
        return ComputeState(PipelineState.start(1), q, do, PipelineState.start(1))

    @gluon.jit
    def advance(self):
        return ComputeState(self.dkv, self.q.advance(), self.do.advance(), self.step.advance())

    @gluon.jit
    def after_tile(self):
        return ComputeState(self.dkv.advance(), self.q, self.do, self.step)


@record
class Weights:
    """P^T, and the factor `slope` in dS = slope (dP - delta): P^T, or P^T (1 - tanh^2) with a softcap."""

    p: Halves
    slope: Halves


@record
class ComputeWarps:
    """Arguments and pipelines of the compute warps."""

    maps: OutputMaps
    inputs: ProgramInputs
    pipes: Value  # Pipelines, or PairPipelines
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        traits: gl.constexpr = self.traits
        state = ComputeState.start(traits)
        if traits.key_ranges:
            row = gl.to_tensor(0)
            while row >= 0:
                work = WorkTile.of_program(row, self.inputs, self.launch, traits)
                if work.is_valid:
                    state = self.process_tile(work, state)
                row = work.next_row
        else:
            work = WorkTile.of_program(None, self.inputs, self.launch, traits)
            if traits.packed:
                if work.is_valid:
                    self.process_tile(work, state)
            else:
                self.process_tile(work, state)

    @gluon.jit
    def process_tile(self, work, state):
        """All steps of a work tile, then its dV and dK. Returns the state after the work tile."""
        traits: gl.constexpr = self.traits
        mask = AttentionMask.of_tile(work, self.launch, traits)
        steps = work.num_steps(traits)
        for step in range(steps):
            m_start = work.query_tile(step, self.launch.shape, traits).m_start
            self.mainloop_step(m_start, mask, state)
            state = state.advance()
        if steps > 0:
            self.pipes.dkv.consumer_wait(state.dkv)
            self.store_gradients(work)
            state = state.after_tile()
        else:
            if traits.pair and traits.key_ranges:  # the load warp has acquired the memory of K and V
                self.pipes.acquire_kv(state.dkv)
                state = state.after_tile()
            self.store_zeros(work)
        return state

    @gluon.jit
    def mainloop_step(self, m_start, mask, state):
        traits: gl.constexpr = self.traits
        pipes = self.pipes
        # P = exp2(scale S - LSE)
        pipes.q.consumer_wait(state.q)
        pipes.s.consumer_wait(state.step)
        weights = self.probabilities(Halves.load(pipes.tensor.s(traits), traits), m_start, mask, state)
        if traits.half_tiles:  # S comes after the products of the step before, which have read P and dS
            weights.p.store_shared(pipes.p.tiles.index(0))
            fence_async_shared()
        else:
            partition_barrier()  # both warpgroups have read S
            weights.p.store_tensor(pipes.tensor.p(traits), traits)
        pipes.p.producer_commit(state.step)
        # dS = P (dP - delta)
        pipes.do.consumer_wait(state.do)
        pipes.dp.consumer_wait(state.step)
        ds = self.score_gradients(weights.slope, state)
        if traits.half_tiles:
            ds.store_shared(pipes.ds.tiles.index(0))
        else:
            partition_barrier()  # both warpgroups have read dP
            ds.store_tensor(pipes.tensor.ds(traits), traits)
            if not traits.pair:
                ds.store_shared(pipes.ds.tiles)
        fence_async_shared()  # dS before dQ reads it, and LSE and delta before TMA overwrites them
        pipes.q.consumer_release(state.q)
        pipes.do.consumer_release(state.do)
        if traits.pair:  # dQ of the step before runs before dK, so dK waits no longer for this
            pipes.acquire_exchange(state.step)
        pipes.ds.producer_commit(state.step)
        if traits.pair:
            pipes.send(ds.first, ds.second)

    @gluon.jit
    def probabilities(self, s, m_start, mask, state):
        """Weights of a step from its raw scores."""
        traits: gl.constexpr = self.traits
        lse = self.pipes.q.stats.index(state.q.index)
        is_partial = False
        if traits.masks:
            is_partial = mask.is_partial(m_start)
        if traits.softcap:
            p, slope = self.capped_weights(s.first, m_start, mask, is_partial, lse, 0)
            p_second, slope_second = None, None
            if s.second is not None:
                p_second, slope_second = self.capped_weights(s.second, m_start, mask, is_partial, lse, HALF)
            return Weights(Halves(p, p_second), Halves(slope, slope_second))
        else:
            scale_log2 = self.launch.softmax.scale_log2
            first = s.first * scale_log2 - row_values(lse, 0, traits)[None, :]
            if s.second is None:
                if traits.masks:
                    if is_partial:  # after LSE, which is NaN for a row of NaN
                        first = mask.apply_mask(first, float("-inf"), m_start, 0, traits)
                p = Halves(gl.exp2(first), None)
                return Weights(p, p)
            else:
                second = s.second * scale_log2 - row_values(lse, HALF, traits)[None, :]
                if traits.masks:
                    if is_partial:  # see above
                        first = mask.apply_mask(first, float("-inf"), m_start, 0, traits)
                        second = mask.apply_mask(second, float("-inf"), m_start, HALF, traits)
                p = Halves(gl.exp2(first), gl.exp2(second))
                return Weights(p, p)

    @gluon.jit
    def capped_weights(self, s, m_start, mask, is_partial, lse, start: gl.constexpr):
        """(P in 16 bits, slope) of a part of the queries with a softcap. Each half is computed by itself: the scores, P
        and the slope of both halves would not fit in registers.
        """
        traits: gl.constexpr = self.traits
        softmax = self.launch.softmax
        capped = tanh(s * softmax.softcap)
        s = capped
        if traits.masks and not traits.masks_p:  # -inf minus an LSE of NaN is NaN; other orders spill
            if is_partial:
                s = mask.apply_mask(s, float("-inf"), m_start, start, traits)
        p = gl.exp2(s * softmax.scale_log2 - row_values(lse, start, traits)[None, :])
        if traits.masks and traits.masks_p:
            if is_partial:
                p = mask.apply_mask(p, 0.0, m_start, start, traits)
        # min returns a number where tanh is NaN: the slope of hidden keys stays 0
        return p.to(self.maps.dk.main.dtype), p * (1.0 - gl.minimum(capped * capped, 1.0))

    @gluon.jit
    def score_gradients(self, slope, state):
        """dS = slope (dP - delta); `Weights` defines slope."""
        traits: gl.constexpr = self.traits
        layout: gl.constexpr = compute_layout(gl.float32, traits.part_columns, traits)
        dp, delta = self.pipes.tensor.dp(traits), self.pipes.do.stats.index(state.do.index)
        if traits.half_tiles:
            return Halves(slope.first * (dp.load(layout) + row_values(delta, 0, traits)[None, :]), None)
        else:
            first = slope.first * (dp.slice(0, HALF).load(layout) + row_values(delta, 0, traits)[None, :])
            second = slope.second * (dp.slice(HALF, HALF).load(layout) + row_values(delta, HALF, traits)[None, :])
            return Halves(first, second)

    # ------------------------------------------------ dV and dK

    @gluon.jit
    def store_gradients(self, work):
        """dV, then scale dK, by TMA from the memory of V and K."""
        traits: gl.constexpr = self.traits
        pipes = self.pipes
        store_gradient(pipes.tensor.dv(traits), rows_at(pipes.kv.v, 0), 1.0, traits)
        store_gradient(pipes.tensor.dk(traits), rows_at(pipes.kv.k, 0), self.launch.softmax.scale, traits)
        fence_async_shared()
        partition_barrier()
        store_parts(self.maps.dv, self.dv_rows(work), work.n_start, pipes.kv.v.index(0), traits)
        store_parts(self.maps.dk, self.dk_rows(work), work.n_start, pipes.kv.k.index(0), traits)
        tma_store_wait(0)
        if traits.key_ranges:
            mbarrier.arrive(pipes.kv.empty.index(0))

    @gluon.jit
    def store_zeros(self, work):
        """Zero gradients of keys that no query sees. The load warp may be loading the next K and V. TMA therefore
        stores the zeros from the memory of dS, which the previous work tile's products have read. A pair stores them
        from the memory of K and V, which its load warp has acquired and not filled.
        """
        traits: gl.constexpr = self.traits
        ds = self.pipes.ds.tiles
        if traits.pair:
            store_zero_parts(rows_at(self.pipes.kv.v, 0), traits)
            store_zero_parts(rows_at(self.pipes.kv.k, 0), traits)
        else:
            ds.store(gl.full([ROWS, ROWS], 0.0, ds.dtype, gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])))
        fence_async_shared()
        partition_barrier()
        if traits.pair:
            store_parts(self.maps.dv, self.dv_rows(work), work.n_start, self.pipes.kv.v.index(0), traits)
            store_parts(self.maps.dk, self.dk_rows(work), work.n_start, self.pipes.kv.k.index(0), traits)
        else:
            store_parts(self.maps.dv, self.dv_rows(work), work.n_start, parts_over(ds, self.maps.dv), traits)
            store_parts(self.maps.dk, self.dk_rows(work), work.n_start, parts_over(ds, self.maps.dk), traits)
        tma_store_wait(0)
        if traits.pair and traits.key_ranges:
            self.pipes.release_kv()

    @gluon.jit
    def dv_rows(self, work):
        """Rows of dV. `opaque`: coordinates are computed after the mainloop and take no registers in it."""
        shape = self.launch.shape
        return work.k_rows(shape.stride_dv, opaque(work.num_keys_written), shape, self.traits)

    @gluon.jit
    def dk_rows(self, work):
        shape = self.launch.shape
        return work.k_rows(shape.stride_dk, opaque(work.num_keys_written), shape, self.traits)


@gluon.jit
def row_values(stats, start: gl.constexpr, traits: gl.constexpr):
    """LSE or -delta of a part of the queries, a value for each column of a tile [keys, queries]."""
    COLUMNS: gl.constexpr = traits.part_columns
    return stats.slice(start, COLUMNS).load(gl.SliceLayout(0, compute_layout(gl.float32, COLUMNS, traits)))


@gluon.jit
def store_gradient(accumulator, tile, factor, traits: gl.constexpr):
    """An accumulator times a factor into shared memory, both ColumnParts."""
    store_columns(accumulator.main, tile.main, factor, traits)
    if accumulator.tail is not None:
        store_columns(accumulator.tail, tile.tail, factor, traits)


@gluon.jit
def store_zero_parts(tile, traits: gl.constexpr):
    store_tile_of_zeros(tile.main, traits)
    if tile.tail is not None:
        store_tile_of_zeros(tile.tail, traits)


@gluon.jit
def store_tile_of_zeros(tile, traits: gl.constexpr):
    layout: gl.constexpr = compute_layout(gl.float32, tile.shape[1], traits)
    tile.store(gl.full(tile.shape, 0.0, tile.dtype, layout))


@gluon.jit
def store_columns(accumulator, tile, factor, traits: gl.constexpr):
    """An accumulator times a factor into shared memory, at most HALF columns at a time. Half tiles: all columns, 64 a
    thread.
    """
    if traits.half_tiles:
        columns = accumulator.load(compute_layout(gl.float32, accumulator.shape[1], traits)) * factor
        tile.store(columns.to(tile.dtype))
    else:
        WIDTH: gl.constexpr = min(accumulator.shape[1], HALF)
        layout: gl.constexpr = compute_layout(gl.float32, WIDTH, traits)
        for c in gl.static_range(accumulator.shape[1] // WIDTH):
            columns = accumulator.slice(c * WIDTH, WIDTH).load(layout) * factor
            tile.slice(c * WIDTH, WIDTH, dim=1).store(columns.to(tile.dtype))


@gluon.jit
def parts_over(memory, desc):
    """The beginning of a tile's memory as a tile of each of a descriptor's ColumnParts."""
    if desc.tail is None:
        return ColumnParts(first_block(memory, desc.main), None)
    else:
        return ColumnParts(first_block(memory, desc.main), first_block(memory, desc.tail))


@gluon.jit
def first_block(memory, desc):
    BLOCKS: gl.constexpr = memory.numel * 2 // desc.block_type.nbytes
    return reinterpret(memory, desc.dtype, [BLOCKS] + desc.block_shape, desc.layout).index(0)  # noqa: RUF005 (Triton has no *)


@gluon.jit
def store_parts(desc, rows, row, tile, traits: gl.constexpr):
    store_part(desc.main, rows, row, 0, tile.main, False, traits)
    if desc.tail is not None:
        store_part(desc.tail, rows, row, desc.main.block_shape[-1], tile.tail, False, traits)


@gluon.jit
def compute(maps, inputs, pipes, launch, traits: gl.constexpr):
    ComputeWarps(maps, inputs, pipes, of_role(launch), traits).run()
