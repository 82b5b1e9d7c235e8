"""Verdicts on views of shared and tensor memory: parts that reach past a buffer, and slots that do not exist."""

import pytest
import torch

from strobe.kernels.device.dialect import TensorMemoryLayout, allocate_tensor_memory, gl, gluon, mbarrier, warpgroup_mma
from strobe.sim import simulate

SIZE = gl.constexpr(64)


@gluon.constexpr_function
def registers():
    return gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])


@gluon.constexpr_function
def plain(rank):
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])


# ---------------------------------------------------------------- past a buffer


@gluon.jit
def slice_kernel(out, start: gl.constexpr, length: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.int32, [SIZE, SIZE], plain(2))
    row = gl.arange(0, SIZE, gl.SliceLayout(1, registers()))
    column = gl.arange(0, SIZE, gl.SliceLayout(0, registers()))
    tile.store(row[:, None] * SIZE + column[None, :])
    part = tile.slice(start, length)  # @slice
    part.store(part.load(registers()) + 1)
    rows = gl.arange(0, length, gl.SliceLayout(1, registers()))
    gl.store(out + rows[:, None] * SIZE + column[None, :], part.load(registers()))


@pytest.mark.parametrize("start, length, moved", [(32, 32, 32), (48, 32, 32), (64, 16, 48), (-16, 16, 0)])
def test_a_slice_past_its_buffer(verdict, start, length, moved):
    """It is moved back into the buffer, so that the kernel goes on."""
    expected = ("bounds", f"a slice of shape [{length}, 64] from [{start}, 0] on of tile", "[64, 64]", "@slice")

    def run():
        out = torch.zeros(length, SIZE.value, dtype=torch.int32)
        slice_kernel[(1,)](out, start, length, num_warps=4)
        whole = torch.arange(SIZE.value**2, dtype=torch.int32).reshape(-1, SIZE.value)
        assert torch.equal(out, whole[moved : moved + length] + 1)

    verdict(run, *([expected] if start != moved else []), seeds=2)


def test_a_slice_that_is_longer_than_its_buffer(verdict):
    def run():
        slice_kernel[(1,)](torch.zeros(128, SIZE.value, dtype=torch.int32), 0, 128, num_warps=4)

    verdict(run, ("bounds", "a slice of shape [128, 64] from [0, 0] on of tile", "@slice"), seeds=2)


@gluon.jit
def columns_kernel(start: gl.constexpr, length: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, length], [32, 1], [4, 1], [0, 1])
    accumulator = allocate_tensor_memory(gl.float32, [128, SIZE], TensorMemoryLayout(block=[128, SIZE], col_stride=1))
    part = accumulator.slice(start, length)  # @columns
    part.store(gl.full([128, length], 1.0, gl.float32, layout))
    part.load(layout)


@pytest.mark.parametrize("start, length", [(32, 32), (48, 32), (32, 64)])
def test_columns_past_tensor_memory(verdict, start, length):
    expected = ("bounds", f"a slice of shape [128, {length}] from [0, {start}] on of accumulator", "@columns")
    verdict(
        lambda: columns_kernel[(1,)](start, length, num_warps=4),
        *([expected] if start + length > SIZE.value else []),
        target="sm_100",
        seeds=2,
    )


# ---------------------------------------------------------------- of a slot that a ring has not


@gluon.jit
def viewed(slot, how: gl.constexpr):
    if how == "permute":
        return slot.permute((1, 0))
    elif how == "slice":
        return slot.slice(0, 32)
    elif how == "reshape":
        return slot.reshape((32, 128))
    elif how == "reinterpret":
        return slot._reinterpret(gl.int32, [SIZE, SIZE], plain(2))
    elif how == "slice, permute":
        return slot.slice(32, 32).permute((1, 0))
    else:
        return slot


@gluon.jit
def slot_kernel(slot, how: gl.constexpr, use: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.int32, [2, SIZE, SIZE], plain(2))
    view = viewed(ring.index(slot), how)
    if use:
        view.store(gl.full(view.shape, 1, gl.int32, registers()))  # @view


@pytest.mark.parametrize("slot", (1, 2))
@pytest.mark.parametrize("how", ("", "permute", "slice", "reshape", "reinterpret", "slice, permute"))
def test_a_view_of_a_slot_that_a_ring_has_not(verdict, how, slot):
    """It may be named, it may not be used."""
    expected = ("bounds", "slot 2 of ring, which has 2")
    verdict(lambda: slot_kernel[(1,)](slot, how, False, num_warps=4), seeds=1)
    verdict(lambda: slot_kernel[(1,)](slot, how, True, num_warps=4), *([expected] if slot == 2 else []), seeds=1)


@gluon.jit
def predicated_kernel(slot, pred: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [2, 2, 1], mbarrier.MBarrierLayout())
    for row in gl.static_range(2):
        for column in gl.static_range(2):
            mbarrier.init(bars.index(row).index(column), count=1)
    mbarrier.arrive(bars.index(slot).index(0), pred=pred)


def test_an_arrival_that_is_switched_off_does_not_look(verdict):
    verdict(lambda: predicated_kernel[(1,)](2, False, num_warps=4), seeds=1)
    verdict(lambda: predicated_kernel[(1,)](2, True, num_warps=4), ("bounds", "slot 2 of bars"), seeds=1)


@gluon.jit
def tensor_slot_kernel(slot):
    layout: gl.constexpr = gl.BlockedLayout([1, 32], [32, 1], [4, 1], [0, 1])
    ring = allocate_tensor_memory(gl.float32, [2, 128, SIZE], TensorMemoryLayout(block=[128, SIZE], col_stride=1))
    part = ring.index(slot).slice(0, 32)
    part.store(gl.full([128, 32], 1.0, gl.float32, layout))


def test_columns_of_a_slot_that_a_ring_has_not(verdict):
    verdict(
        lambda: tensor_slot_kernel[(1,)](2, num_warps=4),
        ("bounds", "slot 2 of ring, which has 2"),
        target="sm_100",
        seeds=1,
    )


@gluon.jit
def product_kernel(slot):
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, SIZE], gl.float16)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    ring = gl.allocate_shared_memory(gl.float16, [2, SIZE, SIZE], shared)
    warpgroup_mma(ring.index(slot), ring.index(0), gl.zeros([SIZE, SIZE], gl.float32, layout), is_async=False)


def test_an_operand_in_a_slot_that_a_ring_has_not():
    with simulate("sm_90", check=False) as run:
        product_kernel[(1,)](2, num_warps=4)
    assert ("bounds", True) in [(report.kind, "slot 2 of ring" in report.text) for report in run.reports]
