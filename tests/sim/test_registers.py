"""Inline PTX sees a thread's registers as the layout gives them to it, and the lanes of a warp as they lie side by
side.
"""

import pytest
import torch

from strobe.kernels.device.dialect import gl, gluon
from strobe.sim import simulate


@gluon.jit
def largest_of_rows_kernel(x, out, columns: gl.constexpr):
    """Each element of a product's tile [64, columns] becomes the largest of its row, of its thread's registers and of
    the lanes that share it.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    at = (
        gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] * columns
        + gl.arange(0, columns, gl.SliceLayout(0, layout))[None, :]
    )
    count: gl.constexpr = columns // 2
    text: gl.constexpr = _largest(count)
    constraints: gl.constexpr = _constraints(count)
    gl.store(
        out + at,
        gl.inline_asm_elementwise(text, constraints, [gl.load(x + at)], dtype=gl.float32, is_pure=True, pack=count),
    )


@gluon.constexpr_function
def _largest(count):
    """A thread's registers are two elements of a row, two of the row eight below, and so on."""
    lines = [".reg .f32 top0, top1, other;"]
    for row in (0, 1):
        own = [i for i in range(count) if i // 2 % 2 == row]
        lines += [f"mov.f32 top{row}, ${count + own[0]};", *(f"max.f32 top{row}, top{row}, ${count + i};" for i in own)]
        lines += [
            f"shfl.sync.bfly.b32 other, top{row}, {lane}, 31, -1; max.f32 top{row}, top{row}, other;" for lane in (1, 2)
        ]
        lines += [f"mov.f32 ${i}, top{row};" for i in own]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _constraints(count):
    return ",".join(["=f"] * count + ["f"] * count)


@gluon.jit
def first_of_four_kernel(x, out, per_thread: gl.constexpr, pack: gl.constexpr):
    """Of each `pack` registers of a thread the first."""
    layout: gl.constexpr = gl.BlockedLayout([per_thread], [32], [4], [0])
    at = gl.arange(0, 128 * per_thread, layout)
    text: gl.constexpr = _first(pack)
    constraints: gl.constexpr = _constraints(pack)
    gl.store(
        out + at,
        gl.inline_asm_elementwise(text, constraints, [gl.load(x + at)], dtype=gl.float32, is_pure=True, pack=pack),
    )


@gluon.constexpr_function
def _first(pack):
    return " ".join(f"mov.f32 ${i}, ${pack};" for i in range(pack))


@gluon.jit
def pair_kernel(x, out):
    """A register of two 16-bit elements, of which the lower goes to both: they are a thread's neighbours, here of two
    rows.
    """
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [4, 8], [4, 1], [0, 1])
    at = gl.arange(0, 32, gl.SliceLayout(1, layout))[:, None] * 8 + gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    gl.store(
        out + at,
        gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [gl.load(x + at)], dtype=gl.int16, is_pure=True, pack=2
        ),
    )


def run(device, kernel, *arguments):
    if device == "cuda":
        kernel[(1,)](*arguments)
    else:
        with simulate("sm_90"):
            kernel[(1,)](*arguments)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [8, 64, 128])
def test_a_products_tile_lies_in_registers_as_wgmma_leaves_it(device, columns):
    x = torch.randn(64, columns, generator=torch.Generator().manual_seed(columns)).to(device)
    out = torch.full_like(x, float("nan"))
    run(device, largest_of_rows_kernel, x, out, columns)
    torch.testing.assert_close(out, x.amax(1, keepdim=True).expand_as(x), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_thread, pack", [(4, 4), (8, 4), (4, 1)])
def test_a_block_sees_registers_of_one_thread(device, per_thread, pack):
    x = torch.arange(128.0 * per_thread, device=device)
    out = torch.full_like(x, float("nan"))
    run(device, first_of_four_kernel, x, out, per_thread, pack)
    torch.testing.assert_close(out, x // pack * pack, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_registers_of_two_elements_hold_a_threads_neighbours(device):
    x = torch.arange(256, dtype=torch.int16, device=device).view(32, 8)
    out = torch.full_like(x, -1)
    run(device, pair_kernel, x, out)
    torch.testing.assert_close(out, x[::2].repeat_interleave(2, 0), rtol=0, atol=0)
