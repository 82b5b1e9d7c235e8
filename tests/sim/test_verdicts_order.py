"""Verdicts on the order of floating-point adds: asked for by `Checks(atomic_order=True)`, by kernels that give the same
bits in every run.
"""

import pytest
import torch

from strobe.kernels.device.dialect import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    tma_reduce_add,
    tma_store_drain,
    tma_store_wait,
)
from strobe.sim import Checks

ORDERED = Checks(atomic_order=True)
SIZE = gl.constexpr(128)
ROWS, COLUMNS = gl.constexpr(8), gl.constexpr(32)
BLOCK = [ROWS.value, COLUMNS.value]


@gluon.jit
def index():
    return gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def tile_kernel(sum_desc, turn, off: gl.constexpr):
    """Each CTA adds its tile: in turn, or whenever it comes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(
        gl.float32, [ROWS, COLUMNS], sum_desc.layout, gl.full([ROWS, COLUMNS], 1.0, gl.float32, layout)
    )
    fence_async_shared()
    if off != "free":
        while gl.atomic_add(turn, 0, sem="relaxed" if off == "acquire" else "acquire") != gl.program_id(0):
            pass
    tma_reduce_add(sum_desc, [0, 0], tile)  # @add
    if off == "read only":
        tma_store_wait(0)
    else:
        tma_store_drain()
    gl.atomic_add(turn, 1, sem="relaxed" if off == "release" else "release")


def add_tiles(off):
    total, turn = torch.zeros(BLOCK), torch.zeros(1, dtype=torch.int32)
    desc = TensorDescriptor.from_tensor(total, BLOCK, gl.NVMMASharedLayout.get_default_for(BLOCK, gl.float32))
    tile_kernel[(4,)](desc, turn, off, num_warps=4)
    assert torch.equal(total, torch.full(BLOCK, 4.0))


UNORDERED = (
    "order",
    "on sum_desc: TMA reduce-add from tile by",
    "@add",
    "adds to what is added to by TMA reduce-add",
    "their order is not fixed",
)


@pytest.mark.parametrize("off", ["", "free", "acquire", "release", "read only"])
def test_tiles_added_in_turn(verdict, off):
    verdict(lambda: add_tiles(off), *([UNORDERED] if off else []), checks=ORDERED, seeds=5)
    verdict(lambda: add_tiles(off), seeds=2)  # nobody asks for an order


@gluon.jit
def add_kernel(total, ticket, turn, off: gl.constexpr):
    if off == "turns":
        while gl.atomic_add(turn, 0, sem="acquire") != gl.program_id(0):
            pass
    gl.atomic_add(
        ticket + index() // 4, gl.full([SIZE], 1, gl.int32, index().type.layout)
    )  # whole numbers have one sum
    if off == "red":
        where = (total + index()).to(gl.int64)
        gl.inline_asm_elementwise(
            "red.global.add.f32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,f",
            [where, index().to(gl.float32)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )  # @red
    elif off == "largest":
        gl.atomic_max(total + index(), gl.full([SIZE], 1.0, gl.float32, index().type.layout))  # a maximum has no order
    elif off == "one place":
        if gl.program_id(0) == 0:
            gl.atomic_add(total + index() // 2, gl.full([SIZE], 1.0, gl.float32, index().type.layout))  # @within
    else:
        gl.atomic_add(total + index(), gl.full([SIZE], 1.0, gl.float32, index().type.layout))  # @atomic
    gl.atomic_add(turn, 1, sem="release")


ADDS = {
    "turns": [],
    "largest": [],
    "free": [
        ("order", "on total: atomic by main of CTA", "@atomic", "adds to what is added to by atomic by main of CTA")
    ],
    "red": [("order", "on total: red.add by main of CTA", "adds to what is added to by red.add by main of CTA")],
    "one place": [("order", "on total: atomic by main", "@within", "adds several elements to one place")],
}


@pytest.mark.parametrize("off", ADDS)
def test_adds_by_atomics(verdict, off):
    def start():
        add_kernel[(3,)](
            torch.zeros(SIZE.value),
            torch.zeros(32, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            off,
            num_warps=4,
        )

    verdict(start, *ADDS[off], checks=ORDERED, seeds=5)
    verdict(start, seeds=2)
