"""Verdicts on memory itself: shared by partitions, never written, out of bounds, too much of it."""

import pytest
import torch

from strobe.kernels.device.dialect import (
    TensorDescriptor,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_load,
    tma_store,
    tma_store_wait,
)
from strobe.sim import simulate

SIZE = gl.constexpr(128)


@gluon.constexpr_function
def registers(warps=4):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def plain():
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


# ---------------------------------------------------------------- between partitions


@gluon.jit
def left_partition(note, bars, out, off: gl.constexpr):
    index = gl.arange(0, SIZE, registers())
    note.store(index)  # @left
    if off != "arrive":
        mbarrier.arrive(bars.index(0))
    if off == "both":
        note.store(index + 1)  # @left-again
    if off == "reused":
        mbarrier.wait(bars.index(1), 0)
        note.store(index + 1)


@gluon.jit
def right_partition(note, bars, out, off: gl.constexpr):
    index = gl.arange(0, SIZE, registers())
    if off != "wait" and off != "arrive":
        mbarrier.wait(bars.index(0), 0)
    if off == "writes" or off == "both":
        note.store(index)  # @right-writes
    value = note.load(registers())  # @right
    gl.store(out + index, value)
    if off == "reused":
        mbarrier.arrive(bars.index(1))


@gluon.jit
def share_kernel(out, off: gl.constexpr):
    note = gl.allocate_shared_memory(gl.int32, [SIZE], plain())
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    gl.warp_specialize([(left_partition, (note, bars, out, off)), (right_partition, (note, bars, out, off))], [4], [64])
    if off == "joined":
        gl.store(out + gl.arange(0, SIZE, registers()), note.load(registers()))  # all partitions have returned


READ = ("on note", "load of note by right_partition", "@right", "store to note by left_partition", "@left")
SHARED = {
    "": [],
    "writes": [],
    "reused": [],
    "joined": [],
    "wait": [("race", *READ)],
    "arrive": [("race", *READ)],
    "both": [
        ("race", "on note", "store to note by left_partition", "@left-again", mark)
        for mark in ("@right-writes", "@right")
    ],
}


@pytest.mark.parametrize("off", SHARED)
def test_what_partitions_share(verdict, off):
    """Read before it is written, it was not yet written. Of two overlapping writes the second alone is what a later
    read meets.
    """

    def start():
        out = torch.full((SIZE.value,), -1, dtype=torch.int32)
        share_kernel[(1,)](out, off, num_warps=4)
        assert SHARED[off] or torch.equal(out, torch.arange(SIZE.value, dtype=torch.int32))

    early = [("uninitialised", "load of note by right_partition", "@right")]
    if off == "both":
        verdict(start, sometimes=tuple(SHARED[off]))
    else:
        verdict(start, *SHARED[off], sometimes=early if SHARED[off] else ())


@gluon.jit
def either_partition(note, value: gl.constexpr):
    note.store(gl.full([SIZE], value, gl.int32, registers()))  # @either


@gluon.jit
def twice_kernel(apart: gl.constexpr):
    note = gl.allocate_shared_memory(gl.int32, [2, SIZE], plain())
    gl.warp_specialize(
        [(either_partition, (note.index(0), 1)), (either_partition, (note.index(1 if apart else 0), 2))], [4], [64]
    )


def test_two_partitions_that_write_one_buffer(verdict):
    verdict(lambda: twice_kernel[(1,)](True, num_warps=4))
    both = ("race", "on note", "store to note[0] by either_partition", "overwrites", "either_partition#2", "@either")
    verdict(lambda: twice_kernel[(1,)](False, num_warps=4), both)


# ---------------------------------------------------------------- never written


@gluon.jit
def unwritten_kernel(out, off: gl.constexpr):
    index = gl.arange(0, SIZE, registers())
    tile = gl.allocate_shared_memory(gl.int32, [2, SIZE], plain())
    if off == "part":
        half: gl.constexpr = SIZE // 2
        tile.index(0).slice(0, half).store(gl.arange(0, half, registers()))
    elif off != "all":
        tile.index(0).store(index)
    gl.store(out + index, tile.index(1 if off == "other slot" else 0).load(registers()))  # @unwritten


UNWRITTEN = {
    "": "",
    "all": "reads tile, all of which was never written",
    "part": "reads tile, 50 % of which was never written",
    "other slot": "all of which was never written",
}


@pytest.mark.parametrize("off", UNWRITTEN)
def test_shared_memory_that_nothing_wrote(verdict, off):
    slot = "tile[1]" if off == "other slot" else "tile[0]"
    expected = [("uninitialised", f"load of {slot} by main", UNWRITTEN[off], "@unwritten")] if off else []
    verdict(
        lambda: unwritten_kernel[(1,)](torch.empty(SIZE.value, dtype=torch.int32), off, num_warps=4), *expected, seeds=3
    )


# ---------------------------------------------------------------- out of bounds


@gluon.jit
def bounds_kernel(x, out, shift, limit, masked: gl.constexpr, read: gl.constexpr):
    index = gl.arange(0, SIZE, registers()) + shift
    mask = (index >= 0) & (index < limit)
    if read:
        value = gl.load(x + index, mask=mask, other=0.0) if masked else gl.load(x + index)  # @read
        gl.store(out + gl.arange(0, SIZE, registers()), value)
    else:
        value = gl.load(out + gl.arange(0, SIZE, registers()))
        gl.store(x + index, value, mask=mask) if masked else gl.store(x + index, value)  # @write


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("shift, before, after", [(0, 0, 0), (-3, 3, 0), (2, 0, 2)])
def test_global_bounds(verdict, shift, before, after, read):
    """Both ends; lanes that a mask switches off are nowhere."""
    outside = f"{before} elements before its start, {after} past its end, of 128" if shift else ""

    def start(masked):
        x, out = torch.rand(SIZE.value), torch.rand(SIZE.value)
        given = x.clone()
        bounds_kernel[(1,)](x, out, shift, SIZE.value, masked, read, num_warps=4)
        inside = slice(max(0, -shift), SIZE.value - max(0, shift))
        moved = slice(max(0, shift), SIZE.value - max(0, -shift))
        assert torch.equal(out[inside], given[moved]) if read else torch.equal(x[moved], out[inside])

    verdict(lambda: start(True), seeds=2)
    verb, mark = ("load", "@read") if read else ("store", "@write")
    expected = [("bounds", f"global {verb} leaves x ({outside})", mark)] if outside else []
    verdict(lambda: start(False), *expected, seeds=2)


@gluon.jit
def slot_kernel(slot, pred: gl.constexpr, write: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.int32, [2, SIZE], plain())
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    mbarrier.arrive(bars.index(slot), pred=pred)  # @slot-arrive
    if write:
        tile.index(slot).store(gl.arange(0, SIZE, registers()))  # @slot-store


@pytest.mark.parametrize("slot", (-1, 0, 1, 2))
def test_a_slot_that_a_ring_has_not(verdict, slot):
    """It may be named, it may not be used."""
    bad = not 0 <= slot < 2
    arrive, store = (
        ("bounds", f"slot {slot} of bars, which has 2", "@slot-arrive"),
        ("bounds", f"slot {slot} of tile, which has 2", "@slot-store"),
    )
    verdict(lambda: slot_kernel[(1,)](slot, False, False, num_warps=4), seeds=2)
    verdict(lambda: slot_kernel[(1,)](slot, True, False, num_warps=4), *([arrive] if bad else []), seeds=2)
    verdict(lambda: slot_kernel[(1,)](slot, False, True, num_warps=4), *([store] if bad else []), seeds=2)


# ---------------------------------------------------------------- descriptors

ROWS, COLUMNS = gl.constexpr(8), gl.constexpr(32)


@gluon.jit
def descriptor_kernel(x, out_desc, rows, stride, offset):
    layout: gl.constexpr = out_desc.layout
    desc = tma.make_tensor_descriptor(x + offset, [rows, 32], [stride, 1], [ROWS, COLUMNS], layout)  # @made
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, desc.block_type.nbytes)
    tma_load(desc, [4, 0], bar, tile)
    mbarrier.wait(bar, 0)
    tma_store(out_desc, [4, 0], tile)
    tma_store_wait(0)


DESCRIBED = {
    "inside": (8, 32, 0, []),
    "too many rows": (
        9,
        32,
        0,
        [
            (
                "bounds",
                "a tensor descriptor of shape [9, 32], strides [32, 1] reaches 128 bytes past the end of x",
                "@made",
            )
        ],
    ),
    "shifted": (8, 32, 4, [("bounds", "reaches 16 bytes past the end of x", "@made")]),
    "odd address": (4, 32, 1, [("bounds", "a tensor descriptor at address 4 modulo 16", "@made")]),
    "odd stride": (4, 33, 0, [("bounds", "strides [33, 1] of 4 bytes: TMA needs multiples of 16 bytes", "@made")]),
}


@pytest.mark.parametrize("case", DESCRIBED)
def test_descriptors(verdict, case):
    """Beyond its tensor a descriptor loads zeros and stores nothing; it must itself lie in its tensor, on multiples of
    16 bytes.
    """
    rows, stride, offset, expected = DESCRIBED[case]
    block = [ROWS.value, COLUMNS.value]

    def start():
        x, out = torch.rand(block), torch.full((16, COLUMNS.value), float("nan"))
        out_desc = TensorDescriptor.from_tensor(out[:8], block, gl.NVMMASharedLayout.get_default_for(block, gl.float32))
        descriptor_kernel[(1,)](x, out_desc, rows, stride, offset, num_warps=4)
        if not expected:
            assert torch.equal(out[4:8], x[4:]) and out[:4].isnan().all() and out[8:].isnan().all()

    verdict(start, *expected, seeds=2)


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_a_target_has_some_operations(target):
    block = [8, COLUMNS.value]
    x, out = torch.rand(block), torch.empty(block)
    with simulate(target, check=False) as run:
        out_desc = TensorDescriptor.from_tensor(out, block, gl.NVMMASharedLayout.get_default_for(block, gl.float32))
        descriptor_kernel[(1,)](x, out_desc, 8, COLUMNS.value, 0, num_warps=4)
    strange = ["copy_global_to_local", "copy_local_to_global", "store_wait"] if target in ("sm_80", "sm_89") else []
    assert [(report.kind, report.text.split()[0]) for report in run.reports] == [
        ("target", f"async_tma_{name}") for name in strange
    ]
    assert torch.equal(out[4:], x[4:])  # it is simulated all the same


# ---------------------------------------------------------------- budgets


@gluon.jit
def budget_kernel(kib: gl.constexpr, over: gl.constexpr):
    gl.allocate_shared_memory(gl.int8, [kib - 1, 1024], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    gl.allocate_shared_memory(gl.int8, [1024], plain())
    if over:
        gl.allocate_shared_memory(gl.int8, [16], plain())  # @more


@gluon.jit
def idle_partition():
    pass


@gluon.jit
def crowd_kernel(warps: gl.constexpr):
    gl.warp_specialize([(idle_partition, ()), (idle_partition, ())], [warps], [24])  # @crowd


@pytest.mark.parametrize("warps, partition", [(16, 0), (32, 0), (64, 0), (4, 16), (16, 16), (32, 1)])
def test_a_cta_has_at_most_32_warps(verdict, warps, partition):
    """The compiler fills up the warps of a kernel's further partitions to a multiple of four."""
    expected = []
    if warps > 32:
        expected = [("budget", "idle_partition is launched with 64 warps: a CTA has at most 32 warps, which is 1024")]
    elif warps == 32 and partition:
        expected = [("budget", "with these partitions a CTA has 36 warps", "@crowd", "at most 32 warps")]
    kernel, constants = (crowd_kernel, (partition,)) if partition else (idle_partition, ())
    verdict(lambda: kernel[(1,)](*constants, num_warps=warps), *expected, seeds=1)


@pytest.mark.parametrize(
    "target, kib", [("sm_90", 227), ("sm_100", 227), ("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_120", 99)]
)
def test_shared_memory_has_a_limit(verdict, target, kib):
    verdict(lambda: budget_kernel[(1,)](kib, False, num_warps=4), target=target, seeds=1)
    over = (
        f"{kib * 1024 + 16} bytes of shared memory are in use with this allocation of 16; the target has {kib * 1024}"
    )
    verdict(lambda: budget_kernel[(1,)](kib, True, num_warps=4), ("budget", over, "@more"), target=target, seeds=1)
