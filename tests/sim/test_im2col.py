"""im2col descriptors: which pixels a load gathers, and verdicts on kernels that copy by them (Triton 3.8)."""

import numpy as np
import pytest
import torch
from torch.nn import functional
from triton.experimental.gluon.nvidia import hopper

from strobe.kernels.device.dialect import TensorDescriptor, gl, gluon, mbarrier
from strobe.sim import simulate
from strobe.sim.im2col import Box, Im2Col
from strobe.sim.memory import Memory
from strobe.sim.values import Descriptor

has_im2col = hasattr(hopper, "TensorDescriptorIm2Col")
im2col = pytest.mark.skipif(not has_im2col, reason="im2col descriptors: Triton 3.8")
if has_im2col:
    from triton.experimental.gluon.language.nvidia.blackwell import tma

CHANNELS, SEEDS = 8, 2


def geometry(size, taps, stride, padding):
    """How many pixels the window visits in one dimension, and the corners of its box."""
    count = (size + 2 * padding - taps) // stride + 1
    return count, -padding, (count - 1) * stride + 1 - size - padding


def unfolded(x, taps, stride, padding):
    """A row for each output pixel of a convolution: [images x rows x columns, taps, channels]."""
    patches = functional.unfold(x.permute(0, 3, 1, 2), taps, padding=padding, stride=stride)
    return patches.reshape(len(x), x.shape[-1], taps[0] * taps[1], -1).permute(0, 3, 2, 1).flatten(0, 1)


# ---------------------------------------------------------------- pixels


@pytest.mark.parametrize("stride, padding, taps", [(1, 0, (3, 3)), (1, 1, (3, 3)), (2, 1, (3, 2)), (3, 2, (1, 5))])
def test_pixels_are_those_of_a_convolution(stride, padding, taps):
    """From each output pixel on, to the end of the second image and beyond it."""
    x = torch.arange(2 * 6 * 7 * CHANNELS, dtype=torch.float32).view(2, 6, 7, CHANNELS) + 1
    raw = x.numpy().reshape(-1).view(np.uint8)
    tensor = Descriptor(Memory("x", "global", raw, 4, True), x.numpy(), [16, CHANNELS], "fp32", False)
    (rows, top, low), (columns, left, right) = (
        geometry(size, tap, stride, padding) for size, tap in zip(x.shape[1:3], taps)
    )
    desc, want = Im2Col(tensor, Box([top, left], [low, right], [stride, stride])), unfolded(x, taps, stride, padding)
    assert len(want) == 2 * rows * columns
    for start in range(0, len(want), 5):
        image, y, at = start // (rows * columns), start // columns % rows, start % columns
        for tap in range(taps[0] * taps[1]):
            pixels = desc.pixels([image, y * stride + top, at * stride + left], divmod(tap, taps[1]), 16)
            got = torch.from_numpy(desc.fetch_pixels(pixels, range(4, 12)))
            inside = want[start : start + 16, tap, 4:]
            padded = functional.pad(inside, (0, 4, 0, 16 - len(inside)))
            assert torch.equal(got, padded)
            assert desc.source(pixels, range(4, 12)).nbytes == 4 * int((padded > 0).sum())


# ---------------------------------------------------------------- verdicts


@gluon.jit
def gather_kernel(x_desc, y_desc, off: gl.constexpr):
    """For each of 3 x 3 taps, the window's 64 pixels as a tile of y."""
    ring = gl.allocate_shared_memory(x_desc.dtype, [2, 64, 32], x_desc.layout)
    ready = mbarrier.allocate_mbarrier(batch=2)
    for slot in gl.static_range(2):
        mbarrier.init(ready.index(slot), count=1)
    for tap in range(9):
        slot = tap % 2
        if off != "store_wait":
            tma.store_wait(1)
        mbarrier.expect(ready.index(slot), x_desc.block_type.nbytes // (2 if off == "half" else 1))
        offsets = [(tap // 3).to(gl.int16), (tap % 3).to(gl.int16)]
        tma.async_load_im2col(x_desc, [0, -1, -1, 0], offsets, ready.index(slot), ring.index(slot))  # @load
        if off != "wait":
            mbarrier.wait(ready.index(slot), tap // 2 & 1)
        tma.async_store(y_desc, [tap * 64, 0], ring.index(slot))  # @store
    tma.store_wait(0)


def gather(off="", lower=(-1, -1)):
    x, y = torch.randn(1, 8, 8, 32), torch.full((9 * 64, 32), torch.nan)
    layout = gl.NVMMASharedLayout.get_default_for([64, 32], gl.float32)
    x_desc = hopper.TensorDescriptorIm2Col.from_tensor(
        x, [64, 32], layout, pixel_box_lower_corner=list(lower), pixel_box_upper_corner=[-1, -1]
    )
    gather_kernel[(1,)](x_desc, TensorDescriptor.from_tensor(y, [64, 32], layout), off)
    return y, unfolded(x, (3, 3), 1, 1).permute(1, 0, 2).reshape(9 * 64, 32)


@im2col
def test_a_gather(verdict):
    verdict(gather, seeds=SEEDS)
    with simulate("sm_90", "lazy"):
        got, want = gather()
    assert torch.equal(got, want)


@im2col
def test_a_gather_into_a_slot_that_a_store_reads(verdict):
    verdict(lambda: gather("store_wait"), ("race", "on ring", "TMA load into ring", "@load", "@store"), seeds=SEEDS)


@im2col
def test_a_gather_that_nobody_waits_for(verdict):
    reads = ("race", "on ring", "TMA store", "reads what is written by TMA load", "@load")
    late = ("unfinished", "TMA load into ring")
    again = ("race", "on ring", "TMA load into ring", "overwrites TMA load into ring")
    verdict(lambda: gather("wait"), reads, sometimes=(late, again, ("barrier", "ready")), seeds=SEEDS)


@im2col
def test_a_gather_of_more_bytes_than_expected(verdict):
    verdict(lambda: gather("half"), ("bytes", "ready"), sometimes=(("race", "ring"), ("deadlock",)), seeds=SEEDS)
