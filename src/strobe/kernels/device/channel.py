"""Rings of shared memory between warps: barriers, and where each side of a ring stands."""

from .dialect import aggregate, arrive_each, gl, gluon, mbarrier


@aggregate
class Position:
    """Where one side of a ring stands: its stage, and the parity of the phase it waits for next."""

    stage: gl.tensor
    parity: gl.tensor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, stage, parity, stages):
        self.stage = stage
        self.parity = parity
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def next(self):
        if self.stages == 1:  # a stage that stands still takes no register: d128's packed causal backward 164 bytes of spills to 0
            return Position(self.stage, self.parity ^ 1, self.stages)
        last = self.stage + 1 == self.stages
        return Position(gl.where(last, 0, self.stage + 1), gl.where(last, self.parity ^ 1, self.parity), self.stages)

    @gluon.jit
    def before(self):
        """The position that this one is next to. Of a first position it is one whose phase counts as done on a new barrier."""
        first = self.stage == 0
        return Position(gl.where(first, self.stages - 1, self.stage - 1), gl.where(first, self.parity ^ 1, self.parity), self.stages)


@gluon.jit
def ring_start(stages: gl.constexpr):
    """The consumer's first position. The producer waits for the other parity, whose phase counts as done on a new barrier."""
    return Position(gl.to_tensor(0), gl.to_tensor(0), stages)


@gluon.jit
def ring(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` barriers of `arrivals` arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def release(barrier, each: gl.constexpr):
    """Say that a stage has been read, by products: once for all warps, which meet at a barrier of their own before, or by each thread. What
    ordinary loads have read must have been used by then."""
    if each:
        arrive_each(barrier, increment_count=False)
    else:
        mbarrier.arrive(barrier)
