"""Pipelines of tiles in shared memory between warps, with the verbs of CUTLASS's PipelineTmaAsync, and barriers alone.

    producer                                        consumer
    pipe.producer_acquire(state)     empty[i]       pipe.consumer_wait(state)      full[i]
    pipe.producer_load(state, ...)   full[i]        ... products read pipe.tiles
    state = state.advance()                         pipe.consumer_release(state)   empty[i]
                                                    state = state.advance()

A Pipeline is constant. A PipelineState says where one side stands; loops carry states, never pipelines.
"""

from .dialect import Value, aggregate, arrive_each, gl, gluon, mbarrier, record
from .tma import load_part


@record
class PipelineState:
    """Stage and phase of one side of a pipeline. Consumers wait for `phase`. Producers wait for the other phase, which
    counts as complete on a new barrier.
    """

    index: gl.tensor
    phase: gl.tensor
    stages: gl.constexpr

    @gluon.jit
    def start(stages: gl.constexpr):
        return PipelineState(gl.to_tensor(0), gl.to_tensor(0), stages)

    @gluon.jit
    def advance(self):
        # With one stage the index is a constant and takes no register: d128 packed causal backward spilled 164 bytes.
        if self.stages == 1:
            return PipelineState(self.index, self.phase ^ 1, self.stages)
        wraps = self.index + 1 == self.stages
        return PipelineState(
            gl.where(wraps, 0, self.index + 1), gl.where(wraps, self.phase ^ 1, self.phase), self.stages
        )

    @gluon.jit
    def previous(self):
        """The state that advances to this one."""
        first = self.index == 0
        return PipelineState(
            gl.where(first, self.stages - 1, self.index - 1), gl.where(first, self.phase ^ 1, self.phase), self.stages
        )

    @gluon.jit
    def at(self, index):
        """The same phase at stage `index`, for a pipeline with a stage for each consumer."""
        return PipelineState(gl.to_tensor(index), self.phase, self.stages)


@record
class Pipeline:
    """Stages of tiles. producer_load fills them by TMA; where a role fills them, it calls producer_commit."""

    tiles: Value  # ColumnParts, one buffer, or None where the full barrier alone matters
    full: gl.shared_memory_descriptor
    empty: Value  # barriers, or None where another pipeline already says that the stage may be filled
    release_per_thread: gl.constexpr

    @gluon.jit
    def create(tiles, stages: gl.constexpr, release_arrivals: gl.constexpr, release_per_thread: gl.constexpr = False):
        return Pipeline(tiles, ring(stages, 1), ring(stages, release_arrivals), release_per_thread)

    @gluon.jit
    def producer_acquire(self, state):
        mbarrier.wait(self.empty.index(state.index), state.phase ^ 1)

    @gluon.jit
    def producer_load(self, state, desc, rows, row, traits: gl.constexpr, pack_gqa: gl.constexpr = False):
        """Copy the tile that begins at `row` of HeadRows. The bytes that land complete full[i], so TMA needs no
        producer_commit.
        """
        self.producer_load_on(self.full, state, desc, rows, row, traits, pack_gqa)

    @gluon.jit
    def producer_load_on(self, barriers, state, desc, rows, row, traits: gl.constexpr, pack_gqa: gl.constexpr = False):
        """`producer_load` whose bytes complete another barrier: the producer waits for the tile, and commits later."""
        barrier = barriers.index(state.index)
        if desc.tail is None:
            mbarrier.expect(barrier, desc.main.block_type.nbytes)
        else:
            mbarrier.expect(barrier, desc.main.block_type.nbytes + desc.tail.block_type.nbytes)
        tile = self.tiles.index(state.index)
        load_part(desc.main, rows, row, 0, barrier, tile.main, pack_gqa, traits)
        if desc.tail is not None:
            load_part(desc.tail, rows, row, desc.main.block_shape[-1], barrier, tile.tail, pack_gqa, traits)

    @gluon.jit
    def producer_commit(self, state):
        """For a tile that did not complete full[i] by its bytes."""
        mbarrier.arrive(self.full.index(state.index))

    @gluon.jit
    def consumer_wait(self, state):
        mbarrier.wait(self.full.index(state.index), state.phase)

    @gluon.jit
    def consumer_release(self, state):
        """Once for all warps, which meet before, or by each thread: only products have read the tile."""
        release(self.empty.index(state.index), self.release_per_thread)

    @gluon.jit
    def skip(self, state):
        """Pass over a tile that this consumer does not read, in step with the others."""
        self.consumer_wait(state)
        self.consumer_release(state)


@gluon.jit
def ring(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` mbarriers of `arrivals` arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@aggregate
class Ring:
    """Some of the barriers of one allocation (`rings`)."""

    barriers: gl.shared_memory_descriptor
    first: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, barriers, first):
        self.barriers = barriers
        self.first = gl.constexpr(first)

    @gluon.jit
    def index(self, i):
        return self.barriers.index(self.first + i)


@gluon.jit
def rings(sizes: gl.constexpr, together: gl.constexpr):
    """Barriers for each of `sizes`, (count, arrivals), of which some may have count 0.

    With `together` they have one allocation. Warps of other roles are then passed one address for all, where each
    allocation takes 16 bytes of shared memory. But Triton synchronizes all warps of a partition between two barriers
    of one allocation, so barriers of the mainloop are best by themselves. With all barriers of a backward together,
    d64 dense ran at 0.976 of the speed, d128 causal at 0.994 to 0.997, d96 at 0.99 to 1.03 (H100).
    """
    found = ()
    if together:
        TOTAL: gl.constexpr = _before(sizes, None)
        barriers = gl.allocate_shared_memory(gl.int64, [TOTAL, 1], mbarrier.MBarrierLayout())
        for n in gl.static_range(len(sizes)):
            found = found + (_part(barriers, _before(sizes, n), sizes[n][0], sizes[n][1]),)  # noqa: RUF005 (no * here)
    else:
        for n in gl.static_range(len(sizes)):
            if sizes[n][0]:
                found = found + (ring(sizes[n][0], sizes[n][1]),)  # noqa: RUF005
            else:
                found = found + (found[0],)  # noqa: RUF005
    return found


@gluon.jit
def _part(barriers, first: gl.constexpr, count: gl.constexpr, arrivals: gl.constexpr):
    part = Ring(barriers, first)
    for i in gl.static_range(count):
        mbarrier.init(part.index(i), count=arrivals)
    return part


@gluon.constexpr_function
def _before(sizes, n):
    """Barriers of the first n sizes, or of all."""
    return sum(count for count, _ in sizes[:n])


@gluon.jit
def release(barrier, each: gl.constexpr):
    """Signal that products have read a stage: once for all warps, which synchronize before, or by each thread. What
    ordinary loads have read must have been used by then.
    """
    if each:
        arrive_each(barrier, increment_count=False)
    else:
        mbarrier.arrive(barrier)
