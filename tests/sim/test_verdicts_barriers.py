"""Verdicts on mbarriers and named barriers: a ring of TMA loads whose synchronisation is bent one piece at a time;
`off` names the piece.
"""

import pytest
import torch

from strobe.kernels.device.dialect import TensorDescriptor, gl, gluon, mbarrier, tma_load
from strobe.sim import simulate

ROWS, COLUMNS = gl.constexpr(8), gl.constexpr(32)
TILES, STAGES = gl.constexpr(5), gl.constexpr(2)
LAST = gl.constexpr(4)


@gluon.jit
def load_partition(x_desc, ring, off: gl.constexpr):
    tile, ready, free = ring
    for i in gl.static_range(TILES):
        stage: gl.constexpr = i % STAGES
        if off != "wait free" or i != LAST:
            mbarrier.wait(free.index(stage), (i // STAGES + 1) % 2)  # @wait-free
        size: gl.constexpr = x_desc.block_type.nbytes
        if i == LAST and off == "half":
            mbarrier.expect(ready.index(stage), size // 2)
        elif i == LAST and off == "double":
            mbarrier.expect(ready.index(stage), size * 2)
        elif i != LAST or off != "expect":
            mbarrier.expect(ready.index(stage), size)  # @expect
        tma_load(x_desc, [i * ROWS, 0], ready.index(stage), tile.index(stage))  # @load
    if off == "wait at exit":
        mbarrier.expect(ready.index(STAGES), x_desc.block_type.nbytes)
        tma_load(x_desc, [0, 0], ready.index(STAGES), tile.index(STAGES))  # @left


@gluon.jit
def sum_partition(out, ring, number: gl.constexpr, off: gl.constexpr):
    tile, ready, free = ring
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for i in gl.static_range(TILES):
        stage: gl.constexpr = i % STAGES
        if off == "parity" and i == LAST and number == 1:
            mbarrier.wait(ready.index(stage), 1)  # @parity
        elif off != "wait ready" or i != LAST or number != 1:
            mbarrier.wait(ready.index(stage), i // STAGES % 2)  # @wait-ready
        total += tile.index(stage).load(layout)  # @use
        if i + STAGES < TILES and (
            off != "arrive" or number != 1 or i != 0
        ):  # nobody waits for the last tiles: they are not freed
            mbarrier.arrive(free.index(stage))  # @arrive
        if off == "arrive twice" and number == 1 and i == 0:
            mbarrier.arrive(free.index(stage))  # @again
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    gl.store(out + number * ROWS * COLUMNS + rows[:, None] * COLUMNS + columns[None, :], total)


@gluon.jit
def ring_kernel(x_desc, out, off: gl.constexpr):
    tile = gl.allocate_shared_memory(
        gl.float32, [STAGES + 1, ROWS, COLUMNS], x_desc.layout
    )  # the last one is not of the ring
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=2 if off == "ready + 1" else 1)
        mbarrier.init(free.index(stage), count=3 if off == "free + 1" else 1 if off == "free - 1" else 2)
    mbarrier.init(ready.index(STAGES), count=1)
    ring = (tile, ready, free)
    gl.warp_specialize(
        [
            (sum_partition, (out, ring, 0, off)),
            (sum_partition, (out, ring, 1, off)),
            (load_partition, (x_desc, ring, off)),
        ],
        [4, 1],
        [64, 24],
    )


def ring(off=""):
    x = torch.arange(TILES.value * ROWS.value * COLUMNS.value).float().reshape(-1, COLUMNS.value)
    block = [ROWS.value, COLUMNS.value]
    x_desc = TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, gl.float32))
    out = torch.full((2, *block), float("nan"))
    ring_kernel[(1,)](x_desc, out, off, num_warps=4)
    if not off:
        assert torch.equal(out, x.view(TILES.value, *block).sum(0).expand(2, -1, -1))


def test_a_right_ring_is_silent(verdict):
    verdict(ring)


USE = ("load of tile[0] by sum_partition#2", "@use", "TMA load into tile[0]", "@load")
NOT_ORDERED = ("not ordered after the end of the previous phase",)
TOO_LATE = ("not ordered after the wait of sum_partition", "may come too late")
RING = {
    "wait ready": [("race", "on tile", *USE)],
    "arrive": [
        (
            "deadlock",
            "load_partition waits for parity 0 of free[0] (phase 0: 1 of 2 arrivals and 0 bytes missing)",
            "@wait-free",
            "sum_partition waits for parity 1 of ready[0]",
            "sum_partition#2 waits for parity 1 of ready[0]",
            "@wait-ready",
        )
    ],
    "expect": [
        (
            "deadlock",
            "sum_partition waits for parity 0 of ready[0] (phase 2: 1 of 1 arrivals and -1024 bytes missing)",
            "@wait-ready",
        )
    ],
    "half": [("bytes", "phase 2 of ready[0]", "TMA load into tile[0]", "@load")],
    "double": [
        (
            "deadlock",
            "sum_partition waits for parity 0 of ready[0] (phase 2: 0 of 1 arrivals and 1024 bytes missing)",
            "@wait-ready",
        )
    ],
    "ready + 1": [
        ("deadlock", "sum_partition waits for parity 0 of ready[0] (phase 0: 1 of 2 arrivals", "@wait-ready")
    ],
    "free + 1": [("deadlock", "load_partition waits for parity 0 of free[0] (phase 0: 1 of 3 arrivals", "@wait-free")],
    "wait at exit": [("unfinished", "the CTA ends without having waited for TMA load into tile[2]", "@left")],
}


@pytest.mark.parametrize("off", RING)
def test_each_piece_of_a_ring(verdict, off):
    verdict(lambda: ring(off), *RING[off])


TILE = ("load of tile[", "by sum_partition", "@use", "TMA load into tile[", "@load")
MISSED = ("deadlock", "sum_partition", "waits for parity", "of ready[", "@wait-ready")


def test_a_producer_that_does_not_wait(verdict):
    """It overwrites a tile that may not be loaded or read yet. A reader that comes too late misses a phase and waits
    for ever.
    """
    certain = [
        ("race", "on tile", "TMA load into tile[0]", "@load"),
        ("barrier", "ready[0]", "load_partition", "@expect"),
    ]
    late = [("race", "on tile", *TILE), ("barrier", "a phase of ready[0] ends", *TOO_LATE, "@wait-ready"), MISSED]
    verdict(lambda: ring("wait free"), *certain, sometimes=late)


def test_a_flipped_parity(verdict):
    """On time, the wait passes at once and the tile is read too early. Late, it waits for a phase that never comes."""
    early = [("race", "on tile", *USE), ("barrier", "a phase of ready[0] ends", *TOO_LATE, "@parity")]
    late = [("deadlock", "sum_partition#2 waits for parity 1 of ready[0] (phase 3:", "@parity")]
    verdict(lambda: ring("parity"), sometimes=(*early, *late))


@pytest.mark.parametrize("off, mark", [("free - 1", "@arrive"), ("arrive twice", "@again")])
def test_a_tile_freed_by_one_consumer_of_two(verdict, off, mark):
    """One consumer's arrivals free the tile for both. The other, on time, arrives in a phase it knows nothing of; late,
    it misses its tile.
    """
    on_time = [
        ("barrier", "arrives on free[", *NOT_ORDERED, mark),
        ("barrier", "arrives on free[", *NOT_ORDERED, "@arrive"),
        ("barrier", "load_partition", "ready[", "@expect"),
        ("barrier", "a phase of", "may come too late"),
        ("race", "on tile", *TILE),
        ("race", "on tile", "overwrites TMA load into tile[", "@load"),
    ]
    verdict(
        lambda: ring(off),
        sometimes=(*on_time, MISSED, ("deadlock", "load_partition waits for parity", "of free[", "@wait-free")),
    )


# ---------------------------------------------------------------- one barrier's life


@gluon.jit
def arrive_partition(bar, off: gl.constexpr):
    mbarrier.arrive(bar)  # @other-arrives


@gluon.jit
def init_partition(bar, off: gl.constexpr):
    if off == "init elsewhere":
        mbarrier.init(bar, count=1)  # @init
    if off != "init elsewhere":
        mbarrier.wait(bar, 0)  # @other-waits


@gluon.jit
def life_kernel(off: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if off == "used before":
        mbarrier.arrive(bar)  # @before
    if off == "count 0":
        mbarrier.init(bar, count=0)  # @zero
    elif off != "init elsewhere":
        mbarrier.init(bar, count=1)
    if off == "over":
        mbarrier.arrive(bar, count=2)  # @over
    if off == "bytes":
        mbarrier.expect(bar, 64)
    if off == "dead":
        mbarrier.invalidate(bar)
        mbarrier.arrive(bar)  # @dead
    if off == "" or off == "init elsewhere":
        gl.warp_specialize([(init_partition, (bar, off)), (arrive_partition, (bar, off))], [4], [64])


LIFE = {
    "": [],
    "used before": [("barrier", "main uses bar, which is not initialised", "@before")],
    "count 0": [("barrier", "main initialises bar with a count of 0", "@zero")],
    "over": [("barrier", "bar gets more arrivals than its count of 1", "by main", "@over")],
    "bytes": [("bytes", "when the CTA ends bar expects 64 bytes that were never copied")],
    "dead": [("barrier", "main uses bar, which is not initialised", "@dead")],
}


@pytest.mark.parametrize("off", LIFE)
def test_the_life_of_a_barrier(verdict, off):
    verdict(lambda: life_kernel[(1,)](off, num_warps=4), *LIFE[off])


def test_a_barrier_made_beside_its_use(verdict):
    """Who comes first decides whether the use finds a barrier at all; right it is in no order."""
    used = [
        ("barrier", "arrive_partition uses bar, which is not initialised", "@other-arrives"),
        ("race", "arrive_partition uses bar without being ordered after its initialisation", "@other-arrives"),
    ]
    verdict(lambda: life_kernel[(1,)]("init elsewhere", num_warps=4), sometimes=used)


@gluon.jit
def run_ahead_partition(bar):
    mbarrier.arrive(bar)
    mbarrier.arrive(bar)  # @ahead


@gluon.jit
def follow_partition(bar):
    mbarrier.wait(bar, 0)  # @follow


@gluon.jit
def ahead_kernel():
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(follow_partition, (bar,)), (run_ahead_partition, (bar,))], [4], [64])


def test_a_phase_that_ends_before_the_last_was_seen(verdict):
    """The wait is in time, and said to be so by luck; or it is too late, and hangs. Both happen."""
    lucky = (
        "barrier",
        "a phase of bar ends, not ordered after the wait of follow_partition",
        "@follow",
        "may come too late and miss it",
    )
    late = ("deadlock", "follow_partition waits for parity 0 of bar (phase 2:", "@follow")
    verdict(ahead_kernel_once, sometimes=(lucky, late))
    kinds = set()
    for seed in range(20):
        with simulate("sm_90", "random", seed, check=False) as run:
            ahead_kernel_once()
        kinds |= {report.kind for report in run.reports}
    assert kinds == {"barrier", "deadlock"}


def ahead_kernel_once():
    ahead_kernel[(1,)](num_warps=4)


# ---------------------------------------------------------------- named barriers


@gluon.jit
def named(instruction: gl.constexpr):
    gl.inline_asm_elementwise(instruction + "; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def write_partition(note, out, off: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index = gl.arange(0, 128, layout)
    note.store(index)  # @write
    if off == "arrive":
        named("bar.arrive 1, 256")
    elif off == "many":
        named("bar.sync 1, 128")
        named("bar.sync 1, 192")  # @many
    elif off != "no barrier" and off != "no writer":
        named("bar.sync 1, 256")  # @writer


@gluon.jit
def read_partition(note, out, off: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if off == "count":
        named("bar.sync 1, 288")  # @count
    elif off == "number":
        named("bar.sync 2, 256")  # @number
    elif off != "no barrier" and off != "no reader" and off != "many":
        named("bar.sync 1, 256")  # @reader
    if off == "many":
        named("bar.sync 2, 128")
    value = note.load(layout)  # @read
    gl.store(out + gl.arange(0, 128, layout), value)


@gluon.jit
def named_kernel(out, off: gl.constexpr):
    note = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(write_partition, (note, out, off)), (read_partition, (note, out, off))], [4], [64])


def named_barrier(off=""):
    out = torch.full((128,), -1, dtype=torch.int32)
    named_kernel[(1,)](out, off, num_warps=4)
    if off in ("", "arrive"):
        assert torch.equal(out, torch.arange(128, dtype=torch.int32))


NOTE = ("race", "on note", "store to note by write_partition", "@write", "load of note by read_partition", "@read")
EARLY = ("uninitialised", "load of note by read_partition", "@read")
NAMED = {
    "": [],
    "arrive": [],
    "no writer": [("deadlock", "read_partition waits for named barrier 1 (128 of 256 threads there)", "@reader")],
    "no reader": [
        ("deadlock", "write_partition waits for named barrier 1 (128 of 256 threads there)", "@writer"),
        NOTE,
    ],
    "number": [
        (
            "deadlock",
            "write_partition waits for named barrier 1 (128 of 256 threads there)",
            "@writer",
            "read_partition waits for named barrier 2 (128 of 256 threads there)",
            "@number",
        )
    ],
    "no barrier": [NOTE],
    "many": [("deadlock", "write_partition waits for named barrier 1 (128 of 192 threads there)", "@many"), NOTE],
    "count": [("barrier", "named barrier 1 is used with", "288", "256", "threads in one round")],
}


@pytest.mark.parametrize("off", NAMED)
def test_named_barriers(verdict, off):
    """What is read before it is written was not yet written; with two counts, which one holds depends on who comes
    last.
    """
    later = {"no reader": [EARLY], "no barrier": [EARLY], "many": [EARLY], "count": [("deadlock", "named barrier 1")]}
    verdict(lambda: named_barrier(off), *NAMED[off], sometimes=later.get(off, ()))
