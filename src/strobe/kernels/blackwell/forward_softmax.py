"""The Blackwell forward's softmax warps: P[t] = exp2(S[t] - row_max), over S[t] in tensor memory.

Each query stage t has four of them. A thread owns a row, so row maxima and sums need no shuffles. It holds S in four
chunks of 32 columns (`Quarters`). The factors of O[t], and row sums and maxima at the end of a tile, go to the
correction warps through shared memory (`stats`).

Exponents are relative to a maximum log2_offset below the row's own. It is updated only where it grew by more than
rescale_threshold (`device.conditional_rescaling`). P and row_sum use the same maximum, so O / row_sum
is exact.
"""

from ..device.conditional_rescaling import conditional_max
from ..device.dialect import gl, gluon, record
from ..device.forward_hooks import ScoreMods, modify_scores
from ..device.forward_mask import AttentionMask, KeyBlock
from ..device.mask import hide_by_bits, interval_bits
from ..device.pack_gqa import queries_of
from ..device.pipeline import PipelineState
from ..device.softmax import exp2_by_fma
from .forward_memory import CHUNK, ROWS, Pipelines, chunk_layout, opaque_window


@record
class Quarters:
    """S [ROWS, 4 CHUNK] by columns, [ROWS, CHUNK] each."""

    first: gl.tensor
    second: gl.tensor
    third: gl.tensor
    fourth: gl.tensor

    @gluon.jit
    def load(s_tile):
        layout: gl.constexpr = chunk_layout(gl.float32)
        first, second = s_tile.slice(0, CHUNK).load(layout), s_tile.slice(CHUNK, CHUNK).load(layout)
        third, fourth = s_tile.slice(2 * CHUNK, CHUNK).load(layout), s_tile.slice(3 * CHUNK, CHUNK).load(layout)
        return Quarters(first, second, third, fourth)

    @gluon.jit
    def row_max(self):
        left = gl.maximum(gl.max(self.first, 1), gl.max(self.second, 1))
        right = gl.maximum(gl.max(self.third, 1), gl.max(self.fourth, 1))
        return gl.maximum(left, right)


@gluon.jit
def modify_tile(s_tile, block, mods, softmax, traits: gl.constexpr):
    """The hook for scores after Q K^T and before the mask: softcap, score_mod and mask_mod (`device.forward_hooks`).

    It works in tensor memory, a quarter after the other: a function of a whole row takes more registers than a thread
    has.
    """
    if traits.softcap or traits.score_mod is not None or traits.mask_mod is not None:
        layout: gl.constexpr = chunk_layout(gl.float32)
        for i in gl.static_range(4):
            quarter = s_tile.slice(i * CHUNK, CHUNK)
            keys = KeyBlock(block.n_start + i * CHUNK, block.is_full, None, None)
            s = modify_scores(quarter.load(layout), keys, mods, softmax, traits)
            quarter.store(gl.convert_layout(s, layout))


@gluon.jit
def apply_mask(s, n_start, mask, traits: gl.constexpr):
    """S with -inf where a row does not see the key. Each row and quarter has a word with a bit for each column."""
    layout: gl.constexpr = s.first.type.layout
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    row = queries_of(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), traits)
    stop = row * 0 + (mask.key_stop - n_start)
    if traits.mask.right:
        # bounded, so that LLVM computes nothing of it in front of all roles, in registers kept through all of them
        stop = gl.minimum(stop, row + gl.minimum(mask.window_stop - n_start, traits.block_n))
    first = row + gl.maximum(mask.window_start - n_start, -ROWS)
    return Quarters(
        mask_quarter(s.first, first, stop, column, 0, traits),
        mask_quarter(s.second, first, stop, column, 1, traits),
        mask_quarter(s.third, first, stop, column, 2, traits),
        mask_quarter(s.fourth, first, stop, column, 3, traits),
    )


@gluon.jit
def mask_quarter(s, first, stop, column, i: gl.constexpr, traits: gl.constexpr):
    return hide_by_bits(s, interval_bits(first - i * CHUNK, stop - i * CHUNK, traits.mask.left), column)


@record
class SoftmaxState:
    """Running row_max, in log2 units, and row_sum: [ROWS] float32."""

    row_max: gl.tensor
    row_sum: gl.tensor

    @gluon.jit
    def start():
        rows: gl.constexpr = gl.SliceLayout(1, chunk_layout(gl.float32))
        row_max = gl.full([ROWS], float("-inf"), gl.float32, rows)
        return SoftmaxState(row_max, gl.full([ROWS], 0.0, gl.float32, rows))

    @gluon.jit
    def new_max(self, s, softmax, traits: gl.constexpr):
        """The maximum that P of S is taken against."""
        new_max = gl.maximum(self.row_max, s.row_max() * softmax.scale_log2 - traits.log2_offset)
        return conditional_max(self.row_max, new_max, traits.rescale_threshold)


@record
class SoftmaxRoleState:
    """Where the softmax warps of a query stage stand in each pipeline."""

    s: PipelineState
    stats: PipelineState
    work: PipelineState

    @gluon.jit
    def start():
        return SoftmaxRoleState(PipelineState.start(1), PipelineState.start(1), PipelineState.start(2))


@record
class SoftmaxWarps:
    """What the softmax warps of query stage t work with."""

    t: gl.constexpr
    p_tile: gl.base_value  # P[t] in tensor memory
    pipes: Pipelines
    launch: gl.tuple  # LaunchParams
    traits: gl.constexpr

    @gluon.jit
    def run(self):
        pipes = self.pipes
        most_log2: gl.constexpr = 15.0 if self.p_tile.dtype == gl.float16 else 127.0
        gl.static_assert(
            self.traits.log2_offset + self.traits.rescale_threshold <= most_log2,
            "p may exceed the largest number of its type: lower log2_offset or rescale_threshold",
        )
        state = SoftmaxRoleState.start()
        while pipes.work.wait_published(state.work):
            work = pipes.work.receive(state.work, self.traits)
            pipes.work.consumer_release(state.work)
            state = SoftmaxRoleState(state.s, state.stats, state.work.advance())
            state = self.process_tile(work, state)

    @gluon.jit
    def process_tile(self, work, state):
        """P of every block of a tile, then row sums and maxima."""
        traits: gl.constexpr = self.traits
        window = opaque_window(self.launch.window)
        m_start = work.m_start + self.t * traits.queries_per_consumer
        mask = AttentionMask.of_rows(m_start, work.seqlen, window, traits)
        blocks = work.blocks(self.launch, traits)
        mods = None
        if traits.has_mods:
            mods = ScoreMods(work.entry(traits), work.head, m_start, 0, self.launch.hooks)
        softmax = SoftmaxState.start()
        for i in range(blocks.count):
            softmax, state = self.mainloop_step(i, blocks, mask, mods, softmax, state)
        stats_state = self.send_row_stats(softmax, state.stats)
        return SoftmaxRoleState(state.s, stats_state, state.work)

    @gluon.jit
    def mainloop_step(self, i, blocks, mask, mods, softmax, state):
        """P = softmax(S) of the i-th block. P's first three quarters are handed to the MMA warp before the last."""
        traits: gl.constexpr = self.traits
        pipes, scale_log2 = self.pipes, self.launch.softmax.scale_log2
        s_state, stats_state = state.s, state.stats
        pipes.s.consumer_wait(s_state.at(self.t))
        s_state = s_state.advance()
        s = self.load_scores(blocks.visit(i, traits), mask, mods)
        row_max = softmax.new_max(s, self.launch.softmax, traits)
        base = gl.where(row_max == float("-inf"), 0.0, row_max)
        rescale = gl.exp2(softmax.row_max - base)
        if i > 0:  # without acquire: s_full says that O[t] was multiplied into, so the factor before has been read
            pipes.stats.tiles.index(2 * self.t).store(rescale)
            pipes.stats.producer_commit(stats_state.at(self.t))
            stats_state = stats_state.advance()
        sum_first = self.store_p(s.first, 0, base, scale_log2)
        sum_second = self.store_p(s.second, 1, base, scale_log2)
        sum_third = self.store_p(s.third, 2, base, scale_log2)
        pipes.p.producer_commit(s_state.at(self.t))
        sum_fourth = self.store_p(s.fourth, 3, base, scale_log2)
        pipes.p_last.producer_commit(s_state.at(self.t))
        row_sum = softmax.row_sum * rescale + ((sum_first + sum_second) + (sum_third + sum_fourth))
        return SoftmaxState(row_max, row_sum), SoftmaxRoleState(s_state, stats_state, state.work)

    @gluon.jit
    def load_scores(self, block, mask, mods):
        """S[t] in registers, with -inf where a row does not see the key."""
        traits: gl.constexpr = self.traits
        s_tile = self.pipes.s.tiles.index(self.t)
        modify_tile(s_tile, block, mods, self.launch.softmax, traits)
        s = Quarters.load(s_tile)
        if traits.masks:
            if mask.is_partial(block, traits):
                s = apply_mask(s, block.n_start, mask, traits)
        return s

    @gluon.jit
    def store_p(self, s, quarter: gl.constexpr, base, scale_log2):
        """P = exp2(S - base) of a quarter, to tensor memory. Returns its row sums."""
        traits: gl.constexpr = self.traits
        x = s * scale_log2 - base[:, None]
        p = gl.exp2(x)
        if traits.by_fma:  # a column is a register of a thread, so a thread computes each column in one of the two ways
            column = gl.arange(0, CHUNK, gl.SliceLayout(0, s.type.layout))
            p = gl.where(((column * traits.by_fma) % CHUNK < traits.by_fma)[None, :], exp2_by_fma(x, traits.degree), p)
        layout: gl.constexpr = chunk_layout(self.p_tile.dtype)
        self.p_tile.slice(quarter * CHUNK, CHUNK).store(gl.convert_layout(p.to(self.p_tile.dtype), layout))
        return gl.sum(p, 1)

    @gluon.jit
    def send_row_stats(self, softmax, state):
        pipes = self.pipes
        pipes.stats.producer_acquire(state.at(self.t))
        pipes.stats.tiles.index(2 * self.t).store(softmax.row_sum)
        pipes.stats.tiles.index(2 * self.t + 1).store(softmax.row_max)
        pipes.stats.producer_commit(state.at(self.t))
        return state.advance()


@gluon.jit
def softmax(t: gl.constexpr, pipes, launch, traits: gl.constexpr):
    SoftmaxWarps(t, pipes.p_tile(t, traits), pipes, launch, traits).run()
