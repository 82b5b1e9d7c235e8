"""Verdicts on copies: TMA stores, reductions and loads, cp.async groups; `off` names the piece of synchronisation that
is missing.
"""

import pytest
import torch
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from strobe.kernels.device.dialect import (
    TensorDescriptor,
    cp_async_commit,
    cp_async_load,
    cp_async_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_drain,
    tma_store_wait,
)
from strobe.sim import simulate

ROWS, COLUMNS = gl.constexpr(8), gl.constexpr(32)
BLOCK = [ROWS.value, COLUMNS.value]


@gluon.constexpr_function
def registers():
    return gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])


@gluon.jit
def filled(value):
    return gl.full([ROWS, COLUMNS], value, gl.float32, registers())


@gluon.jit
def places(start):
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, registers()))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, registers()))
    return (start + rows)[:, None] * COLUMNS + columns[None, :]


def descriptor(tensor):
    return TensorDescriptor.from_tensor(tensor, BLOCK, gl.NVMMASharedLayout.get_default_for(BLOCK, gl.float32))


def nans(tiles):
    return torch.full((tiles * ROWS.value, COLUMNS.value), float("nan"))


def tiles_of(*values):
    return torch.tensor(values).repeat_interleave(ROWS.value)[:, None].expand(-1, COLUMNS.value).float()


# ---------------------------------------------------------------- TMA stores


@gluon.jit
def store_kernel(out_desc, out, off: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], out_desc.layout)
    tile.store(filled(1.0))  # @first
    if off != "fence":
        fence_async_shared()
    tma_store(out_desc, [0, 0], tile)  # @store-first
    if off != "wait":
        tma_store_wait(0)
    tile.store(filled(2.0))  # @second
    fence_async_shared()
    tma_store(out_desc, [8, 0], tile)  # @store-second
    if off == "twice":
        tma_store(out_desc, [0, 0], tile)  # @twice
    if off != "exit":
        tma_store_wait(0)
    if off == "drained":
        tma_store_drain()
    if off == "read back" or off == "drained":
        gl.store(out + places(16), gl.load(out + places(0)))  # @back


def store(off=""):
    out = nans(3)
    store_kernel[(1,)](descriptor(out), out, off, num_warps=4)
    if off in ("", "drained"):
        assert torch.equal(out[:16], tiles_of(1, 2)) and (off == "" or torch.equal(out[16:], out[:8]))


STORE = {
    "": [],
    "drained": [],
    "fence": [("fence", "on tile: TMA store from tile", "@store-first", "store to tile by main", "@first")],
    "wait": [
        ("race", "on tile: store to tile by main", "@second", "what is read by TMA store from tile", "@store-first")
    ],
    "exit": [
        (
            "unfinished",
            "main ends without having waited for its last 1 TMA store operation(s), the last at",
            "@store-second",
        )
    ],
    "read back": [("race", "on out_desc: load by main", "@back", "written by TMA store from tile", "@store-first")],
    "twice": [("race", "on out_desc: TMA store from tile", "@twice", "overwrites TMA store from tile", "@store-first")],
}


@pytest.mark.parametrize("off", STORE)
def test_a_store(verdict, off):
    verdict(lambda: store(off), *STORE[off])


@gluon.jit
def store_ring_kernel(out_desc, pending: gl.constexpr, slot: gl.constexpr, left: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [3, ROWS, COLUMNS], out_desc.layout)
    for i in gl.static_range(3):
        tile.index(i).store(filled(i * 1.0))
    fence_async_shared()
    for i in gl.static_range(3):
        tma_store(out_desc, [i * ROWS, 0], tile.index(i))  # @ring-store
    tma_store_wait(pending)
    tma_store_wait(3)  # a weaker wait takes nothing back
    tile.index(slot).store(filled(9.0))  # @ring-overwrite
    tma_store_wait(left)


@pytest.mark.parametrize("slot", range(3))
@pytest.mark.parametrize("pending", range(4))
def test_store_wait_counts_stores(verdict, pending, slot):
    """store_wait(n) is through with all but the last n stores."""

    def start():
        out = nans(3)
        store_ring_kernel[(1,)](descriptor(out), pending, slot, 0, num_warps=4)
        assert slot + pending > 2 or torch.equal(out, tiles_of(0, 1, 2))

    label = f"tile[{slot}]"
    early = [
        (
            "race",
            f"on tile: store to {label} by main",
            "@ring-overwrite",
            f"what is read by TMA store from {label}",
            "@ring-store",
        )
    ]
    verdict(start, *(early if slot + pending > 2 else []), seeds=5)


@pytest.mark.parametrize("left", (1, 2))
def test_stores_left_at_the_end_are_counted(verdict, left):
    def start():
        store_ring_kernel[(1,)](descriptor(nans(3)), 2, 0, left, num_warps=4)

    verdict(start, ("unfinished", f"its last {left} TMA store operation(s), the last at", "@ring-store"), seeds=5)


@gluon.jit
def reduce_kernel(out_desc, out, off: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], out_desc.layout)
    tile.store(filled(1.0))  # @ones
    if off != "fence":
        fence_async_shared()
    tma_reduce_add(out_desc, [0, 0], tile)  # @add
    tma_reduce_add(out_desc, [0, 0], tile)  # @add-again
    if off != "wait":
        tma_store_wait(0)
    if off == "wait":
        tile.store(filled(2.0))  # @overwrite-sum
        tma_store_wait(0)
    if off == "beside":
        gl.atomic_add(out + places(0), filled(1.0))
    if off == "store":
        gl.store(out + places(0), filled(0.0))  # @plain


REDUCE = {
    "": [],
    "beside": [],
    "fence": [
        ("fence", "on tile: TMA reduce-add from tile", mark, "store to tile by main", "@ones")
        for mark in ("@add", "@add-again")
    ],
    "wait": [("race", "store to tile", "@overwrite-sum", "read by TMA reduce-add", "@add-again")],
    "store": [("race", "on out_desc: store by main", "@plain", "overwrites TMA reduce-add", "@add-again")],
}


@pytest.mark.parametrize("off", REDUCE)
def test_additions_may_meet(verdict, off):
    """TMA additions and atomics to one place are in no order and need none; a plain store among them does."""

    def start():
        out = torch.zeros(BLOCK)
        reduce_kernel[(1,)](descriptor(out), out, off, num_warps=4)
        assert off not in ("", "beside") or torch.equal(out, torch.full(BLOCK, 3.0 if off else 2.0))

    verdict(start, *REDUCE[off])


# ---------------------------------------------------------------- TMA loads


@gluon.jit
def load_kernel(x, x_desc, out, off: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLUMNS], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    if off == "changed" or off == "global fence" or off == "shared fence":
        gl.store(x + places(0), filled(5.0))  # @change
    if off == "global fence":
        gl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    if off == "shared fence":
        fence_async_shared()
    size: gl.constexpr = x_desc.block_type.nbytes
    mbarrier.expect(bar, size if off == "one" else 2 * size)
    tma_load(x_desc, [0, 0], bar, tile.index(0))  # @load-first
    tma_load(x_desc, [8, 0], bar, tile.index(0 if off == "same tile" else 1))  # @load-second
    if off == "early":
        gl.store(x + places(0), filled(0.0))  # @early
    if off != "no wait":
        mbarrier.wait(bar, 0)  # @wait-both
    if off == "overwrite":
        tile.index(0).store(filled(0.0))  # @overwrite
        mbarrier.expect(bar, size)
        tma_load(x_desc, [0, 0], bar, tile.index(0))  # @reload
        mbarrier.wait(bar, 1)
    gl.store(out + places(0), tile.index(0).load(registers()) + tile.index(1).load(registers()))  # @use


def load(off=""):
    x, out = torch.rand(16, COLUMNS.value), nans(1)
    expected = x[:8] + x[8:]
    load_kernel[(1,)](x, descriptor(x), out, off, num_warps=4)
    assert off or torch.equal(out, expected)


LOAD = {
    "": [],
    "no wait": [
        ("race", "on tile: load of tile[0] by main", "@use", "written by TMA load into tile[0]", "@load-first"),
        ("race", "on tile: load of tile[1] by main", "@use", "written by TMA load into tile[1]", "@load-second"),
        ("unfinished", "without having waited for TMA load into tile[0]", "@load-first"),
        ("unfinished", "without having waited for TMA load into tile[1]", "@load-second"),
    ],
    "same tile": [
        ("race", "TMA load into tile[0]", "@load-second", "overwrites TMA load into tile[0]", "@load-first"),
        ("uninitialised", "load of tile[1] by main", "@use"),
    ],
    "early": [("race", "on x: store by main", "@early", "read by TMA load into tile[0]", "@load-first")],
    "overwrite": [("fence", "on tile: TMA load into tile[0]", "@reload", "store to tile[0] by main", "@overwrite")],
    "changed": [("fence", "on x: TMA load into tile[0]", "@load-first", "store by main", "@change")],
    "shared fence": [("fence", "on x: TMA load into tile[0]", "@load-first", "store by main", "@change")],
    "global fence": [],
}


@pytest.mark.parametrize("off", LOAD)
def test_a_load(verdict, off):
    verdict(lambda: load(off), *LOAD[off])


def test_two_loads_where_one_is_expected(verdict):
    """The phase ends with whichever lands first: the other one is not waited for."""
    lost = [
        ("race", "on tile", "load of tile", "@use", "TMA load into tile"),
        ("unfinished", "without having waited for TMA load into tile"),
    ]
    verdict(lambda: load("one"), ("bytes", "bar"), *lost)


@gluon.jit
def late_kernel(x_desc):
    tile = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLUMNS], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    tma_load(x_desc, [0, 0], bar, tile.index(0))  # @late-first
    tma_load(x_desc, [8, 0], bar, tile.index(1))  # @late-second
    mbarrier.wait(bar, 0)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    mbarrier.wait(bar, 1)


def test_a_load_that_lands_in_the_phase_after_its_own(verdict):
    """The bytes are right in sum, but either load may end the first phase. Eagerly the second one is issued after it:
    nothing wrong shows.
    """
    told = set()
    for mode in ("lazy", "pct", "eager"):
        with simulate("sm_90", mode, check=False) as run:
            late_kernel[(1,)](descriptor(torch.rand(16, COLUMNS.value)), num_warps=4)
        told.add((mode, *((report.kind, "phase 0 of bar" in report.text) for report in run.reports)))
    assert ("lazy", ("bytes", True)) in told and ("eager",) in told


# ---------------------------------------------------------------- cp.async


@gluon.jit
def corner_kernel(x_desc, out_desc, row, column, write: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    tma_load(x_desc, [0 if write != "" else row, 0 if write != "" else column], bar, tile)  # @from
    mbarrier.wait(bar, 0)
    if write == "store":
        tma_store(out_desc, [row, column], tile)  # @to
    elif write == "add":
        tma_reduce_add(out_desc, [row, column], tile)  # @onto
    tma_store_wait(0)


@pytest.mark.parametrize("write, line", [("", "@from"), ("store", "@to"), ("add", "@onto")])
@pytest.mark.parametrize("row, column", [(0, 0), (3, 4), (0, 2), (0, -2), (-1, 0), (0, -4), (100, 0)])
def test_where_a_copy_may_begin(verdict, row, column, write, line):
    """An H200 stops with an illegal instruction at an innermost coordinate off 16 bytes, and where a store begins
    before the tensor.
    """

    def start():
        x, out = torch.ones(2 * ROWS.value, 2 * COLUMNS.value), torch.zeros(2 * ROWS.value, 2 * COLUMNS.value)
        corner_kernel[(1,)](descriptor(x), descriptor(out), row, column, write, num_warps=4)

    odd, before = column % 4, bool(write) and min(row, column) < 0
    why = "is not a multiple of 16 bytes" if odd else "a store may not start before the tensor"
    verdict(start, *([("bounds", f"the block at [{row}, {column}]", why, line)] if odd or before else []), seeds=2)


@gluon.jit
def copy_kernel(x, out, pending: gl.constexpr, off: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [3, ROWS, COLUMNS], layout)
    for i in gl.static_range(3):
        cp_async_load(tile.index(i), x + places(i * ROWS))  # @copy
        if off != "commit" or i != 2:
            cp_async_commit()
    if off == "overwrite":
        tile.index(2).store(filled(0.0))  # @copy-overwrite
    cp_async_wait(pending)
    used: gl.constexpr = 0 if off == "first" else 2
    value = tile.index(used).load(registers())  # @copied
    if off != "leave":
        cp_async_wait(0)
    gl.store(out + places(0), value)


def copy(pending=0, off="", expected=None):
    x, out = torch.rand(24, COLUMNS.value), nans(1)
    copy_kernel[(1,)](x, out, pending, off, num_warps=4)
    assert expected is None or torch.equal(out, x[8 * expected :][:8])


@pytest.mark.parametrize(
    "pending, off, expected", [(0, "", 2), (0, "first", 0), (1, "first", 0), (2, "first", 0), (0, "leave", 2)]
)
def test_cp_async_is_waited_for_by_groups(verdict, pending, off, expected):
    verdict(lambda: copy(pending, off, expected), target="sm_80")


COPIED = {
    "too few": (1, "", [("race", "load of tile[2] by main", "@copied", "cp.async into tile[2]", "@copy")]),
    "first too few": (3, "first", [("race", "load of tile[0] by main", "@copied", "cp.async into tile[0]", "@copy")]),
    "no commit": (
        0,
        "commit",
        [
            ("race", "load of tile[2] by main", "@copied", "cp.async into tile[2]", "@copy"),
            (
                "unfinished",
                "main ends without having waited for its last 1 cp.async operation(s), the last at",
                "@copy",
            ),
        ],
    ),
    "overwrite": (
        0,
        "overwrite",
        [("race", "store to tile[2] by main", "@copy-overwrite", "cp.async into tile[2]", "@copy")],
    ),
    "left": (
        2,
        "leave",
        [
            ("race", "load of tile[2] by main", "@copied", "cp.async into tile[2]", "@copy"),
            ("unfinished", "main ends without having waited for its last 2 cp.async operation(s)"),
        ],
    ),
}


@pytest.mark.parametrize("case", COPIED)
def test_cp_async_not_waited_for(verdict, case):
    pending, off, expected = COPIED[case]
    verdict(lambda: copy(pending, off), *expected, target="sm_80")


@gluon.jit
def source_kernel(x, out, off: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    cp_async_load(tile, x + places(0))  # @source-copy
    cp_async_commit()
    if off != "late":
        cp_async_wait(0)
    gl.store(x + places(0), filled(7.0))  # @source-store
    cp_async_wait(0)
    gl.store(out + places(0), tile.load(registers()))


def test_the_source_of_cp_async_is_read_until_the_wait(verdict):
    def start(off):
        x, out = torch.rand(BLOCK), nans(1)
        before = x.clone()
        source_kernel[(1,)](x, out, off, num_warps=4)
        assert off or torch.equal(out, before)

    verdict(lambda: start(""), target="sm_80")
    race = ("race", "on x: store by main", "@source-store", "is read by cp.async into tile", "@source-copy")
    verdict(lambda: start("late"), race, target="sm_80")


def test_the_source_of_cp_async_is_read_late():
    x, out = torch.rand(BLOCK), nans(1)
    with simulate("sm_80", mode="lazy", check=False):
        source_kernel[(1,)](x, out, "late", num_warps=4)
    assert torch.equal(out, torch.full_like(out, 7.0))


@gluon.jit
def copy_partition(x, out, tile, bar, off: gl.constexpr):
    cp_async_load(tile, x + places(0))  # @announced
    if off == "plain arrive":
        mbarrier.arrive(bar)  # @plain-arrive
        cp_async_commit()
        cp_async_wait(0)
    elif off == "counted":
        async_copy.mbarrier_arrive(bar, increment_count=False)  # @noinc
    else:
        async_copy.mbarrier_arrive(bar)
        mbarrier.arrive(bar)
    if off != "plain arrive":
        cp_async_wait(0)


@gluon.jit
def use_partition(x, out, tile, bar, off: gl.constexpr):
    mbarrier.wait(bar, 0)  # @announced-wait
    gl.store(out + places(0), tile.load(registers()))  # @announced-use


@gluon.jit
def announce_kernel(x, out, count: gl.constexpr, off: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=count)
    gl.warp_specialize(
        [(copy_partition, (x, out, tile, bar, off)), (use_partition, (x, out, tile, bar, off))], [4], [64]
    )


ANNOUNCED = {
    "": (1, []),  # each thread adds itself to the count, so one arrival is left to make
    "counted": (128, []),  # all threads of four warps arrive
    "plain arrive": (
        1,
        [("race", "on tile", "load of tile by use_partition", "@announced-use", "cp.async into tile", "@announced")],
    ),
}


@pytest.mark.parametrize("off", ANNOUNCED)
def test_cp_async_tells_a_barrier(verdict, off):
    count, expected = ANNOUNCED[off]

    def start():
        x, out = torch.rand(BLOCK), nans(1)
        announce_kernel[(1,)](x, out, count, off, num_warps=4)
        assert expected or torch.equal(out, x)

    verdict(start, *expected, target="sm_80")


def test_cp_async_arrivals_are_counted_by_threads(verdict):
    def start(count):
        announce_kernel[(1,)](torch.rand(BLOCK), nans(1), count, "counted", num_warps=4)

    verdict(
        lambda: start(129),
        ("deadlock", "use_partition waits for parity 0 of bar (phase 0: 1 of 129 arrivals", "@announced-wait"),
        target="sm_80",
    )
    verdict(
        lambda: start(1),
        ("barrier", "bar gets more arrivals than its count of 1", "cp.async of copy_partition", "@noinc"),
        target="sm_80",
    )


# ---------------------------------------------------------------- work that outlives a partition


@gluon.jit
def begin_partition(out_desc, x, tile, copied, off: gl.constexpr):
    if off == "":
        cp_async_wait(0)  # what the kernel began
    tile.store(copied.load(registers()))  # @outlived-copy
    fence_async_shared()
    tma_store(out_desc, [0, 0], tile)  # @outlived-store


@gluon.jit
def idle_partition():
    pass


@gluon.jit
def outlive_kernel(out_desc, x, off: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], out_desc.layout)
    copied = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    cp_async_load(copied, x + places(0))  # @began
    cp_async_commit()
    if off == "worker":
        cp_async_wait(0)
        gl.warp_specialize([(idle_partition, ()), (begin_partition, (out_desc, x, tile, copied, off))], [4], [64])
    else:
        gl.warp_specialize([(begin_partition, (out_desc, x, tile, copied, off)), (idle_partition, ())], [4], [64])
    cp_async_wait(0)
    tma_store_wait(0)


OUTLIVED = {
    "": [],
    "wait": [
        ("race", "on copied: load of copied by begin_partition", "@outlived-copy", "cp.async into copied", "@began")
    ],
    "worker": [
        (
            "unfinished",
            "begin_partition ends without having waited for its last 1 TMA store operation(s)",
            "@outlived-store",
        )
    ],
}


@pytest.mark.parametrize("off", OUTLIVED)
def test_the_first_partition_goes_on_from_the_kernel(verdict, off):
    """It runs on the kernel's own warps, so either may wait for what the other began. No other partition may."""

    def start():
        x, out = torch.rand(BLOCK), nans(1)
        outlive_kernel[(1,)](descriptor(out), x, off, num_warps=4)
        assert off or torch.equal(out, x)

    verdict(start, *OUTLIVED[off])


@gluon.jit
def leave_partition(out_desc, tile, ready):
    mbarrier.wait(ready, 0)
    tma_store(out_desc, [0, 0], tile)
    tma_store_wait(0)


@gluon.jit
def fence_often_partition(tile, ready):
    tile.store(filled(1.0))
    fence_async_shared()
    mbarrier.arrive(ready)
    for _ in range(12):
        fence_async_shared()


@gluon.jit
def fence_often_kernel(out_desc):
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    gl.warp_specialize([(fence_often_partition, (tile, ready)), (leave_partition, (out_desc, tile, ready))], [1], [24])


def test_a_fence_is_not_forgotten_for_those_after_it(verdict):
    """Whoever waits knows the first of thirteen fences alone."""

    def start():
        out = torch.empty(BLOCK)
        fence_often_kernel[(1,)](
            TensorDescriptor.from_tensor(out, BLOCK, gl.NVMMASharedLayout.get_default_for(BLOCK, gl.float32)),
            num_warps=4,
        )

    verdict(start)
