"""A swizzled tile wider than its swizzle lies block by block: its pieces of eight rows are the same to the simulator
and to the compiler.
"""

import re
from functools import reduce
from operator import xor

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from strobe.kernels.device.dialect import reinterpret
from strobe.sim import simulate
from strobe.sim.layouts import Layouts
from tests.sim.places import PLACES, launch
from tools.proof.compile import offline

ROWS = gl.constexpr(64)
PIECE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
BLOCK = gl.constexpr(64)
SOME = (
    [(128, piece) for piece in (0, 1, 7, 8, 15)]
    + [(256, piece) for piece in (8, 31)]
    + [(64, piece) for piece in (0, 3)]
)


@gluon.jit
def held(width: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    return gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, ROWS, width], layout)


@gluon.jit
def positions(width: gl.constexpr, layout: gl.constexpr):
    return (
        gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None] * width
        + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    )


@gluon.jit
def by_slices(x, out, width: gl.constexpr, row: gl.constexpr, column: gl.constexpr):
    tile = held(width).index(1).reshape([ROWS, width])
    tile.slice(row, 8, dim=0).slice(column, BLOCK, dim=1).store(gl.load(x + positions(width, PIECE)))


@gluon.jit
def by_pieces(x, out, width: gl.constexpr, piece: gl.constexpr):
    pieces = reinterpret(
        held(width).index(1), gl.bfloat16, [ROWS * width // (8 * BLOCK), 8, BLOCK], gl.NVMMASharedLayout(128, 16, 2)
    )
    pieces.index(piece).store(gl.load(x + positions(width, PIECE)))


@gluon.jit
def all_pieces(x, out, width: gl.constexpr):
    """x [64, width] through slices in, through pieces out, one behind the other."""
    smem = held(width)
    for row in gl.static_range(0, ROWS, 8):
        for column in gl.static_range(0, width, BLOCK):
            tile = smem.index(1).reshape([ROWS, width])
            tile.slice(row, 8, dim=0).slice(column, BLOCK, dim=1).store(
                gl.load(x + row * width + column + positions(width, PIECE))
            )
    COUNT: gl.constexpr = ROWS * width // (8 * BLOCK)
    pieces = reinterpret(smem.index(1), gl.bfloat16, [COUNT, 8, BLOCK], gl.NVMMASharedLayout(128, 16, 2))
    for piece in range(COUNT):
        gl.store(out + piece * (8 * BLOCK) + positions(BLOCK, PIECE), pieces.index(piece).load(PIECE))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_pieces_are_rows_of_a_block_of_columns(width, place):
    x, out = (
        torch.arange(64 * width).remainder(251).to(torch.bfloat16),
        torch.full((64 * width,), float("nan"), dtype=torch.bfloat16),
    )
    launch(place, all_pieces, x, out, width, num_warps=1)
    assert torch.equal(out.view(-1, 8, 64), x.view(8, 8, width // 64, 64).permute(2, 0, 1, 3).reshape(-1, 8, 64))


@pytest.mark.parametrize("width, piece", SOME)
def test_pieces_lie_where_the_compiler_has_those_rows_and_columns(width, piece):
    row, column = piece % 8 * 8, piece // 8 * 64
    x = torch.empty(1, dtype=torch.bfloat16)
    assert stored(by_pieces, x, width, piece) == stored(by_slices, x, width, row, column)


def stored(kernel, x, *constants):
    """The places in shared memory that a kernel stores to, each from the same register on."""
    with offline(90):
        ptx = kernel.warmup(x, x, *constants, grid=(1,), num_warps=1).asm["ptx"]
    found = re.findall(r"st\.shared\S*\s+\[%r\d+(?:\+(\d+))?\]", ptx)
    assert found
    return found


@gluon.jit
def pieces_of_two_ctas(x, out, width: gl.constexpr, basis: gl.constexpr, pieces: gl.constexpr):
    """x [128, width], which two CTAs divide, through registers in, through pieces of both out."""
    registers: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0], cga_layout=[basis])
    row = gl.arange(0, 128, gl.SliceLayout(1, registers))[:, None]
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, width], gl.bfloat16, cga_layout=[basis])
    tile = gl.allocate_shared_memory(gl.bfloat16, [128, width], tile_layout)
    tile.store(gl.load(x + row * width + gl.arange(0, width, gl.SliceLayout(0, registers))[None, :]))
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [1, 1, 1], [2, 1, 0], cga_layout=[[1, 0, 0]])
    pieces_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3, cga_layout=[[1, 0, 0]])
    cut = reinterpret(tile, gl.bfloat16, [pieces, 2, 8, 64], pieces_layout)
    plane: gl.constexpr = gl.SliceLayout(2, layout)
    cta = gl.arange(0, 2, gl.SliceLayout(1, plane))[:, None]
    place = (cta * 8 + gl.arange(0, 8, gl.SliceLayout(0, plane))[None, :])[:, :, None] * 64
    place = place + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(0, layout)))[None, :][None, :, :]
    for piece in range(pieces):
        gl.store(out + piece * 1024 + place, cut.index(piece).load(layout))


def cut_by_two_ctas(width: int, basis: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """x [128, width], and the pieces of both CTAs."""
    pytest.importorskip("triton", minversion="3.9")
    pieces = width // 8
    x, out = torch.arange(128 * width).remainder(251).reshape(128, width).bfloat16(), torch.zeros(pieces, 2, 8, 64)
    out = out.bfloat16()
    with simulate("sm_100"):
        pieces_of_two_ctas[(1,)](x, out, width, basis, pieces, num_warps=1, num_ctas=2)
    return x, out


def test_each_of_two_ctas_cuts_its_own_rows_into_pieces():
    """Piece n of CTA c is rows 8 (n % 8) of its 64 rows, in block n // 8 of the columns."""
    x, out = cut_by_two_ctas(128, (1, 0))
    assert torch.equal(out, x.reshape(2, 8, 8, 2, 64).permute(3, 1, 0, 2, 4).reshape(16, 2, 8, 64))


def test_each_of_two_ctas_cuts_its_own_columns_into_pieces():
    """Piece n of CTA c is rows 8 (n % 16), in block n // 16 of its 128 columns."""
    x, out = cut_by_two_ctas(256, (0, 1))
    assert torch.equal(out, x.reshape(16, 8, 2, 2, 64).permute(3, 0, 2, 1, 4).reshape(32, 2, 8, 64))


@pytest.mark.parametrize("basis", [(1, 0), (0, 1)])
def test_the_compiler_has_the_pieces_of_each_cta_in_the_same_place(basis):
    """An offset in a CTA's memory holds the same element as a tile and as pieces."""
    pytest.importorskip("triton", minversion="3.9")
    width, by_rows = 256, basis == (1, 0)
    tile = placed((128, width), gl.NVMMASharedLayout.get_default_for([128, width], gl.bfloat16, cga_layout=[basis]))
    piece = placed((2, 8, 64), gl.NVMMASharedLayout(128, 16, 3, cga_layout=[(1, 0, 0)]))
    pieces_of_a_block = 8 if by_rows else 16
    for offset in range(0, 64 * width, 8):
        number, within = divmod(offset, 8 * 64)
        block, rows = divmod(number, pieces_of_a_block)
        for cta in range(2):
            held_by, row, column = piece(within, cta)
            expected = [rows * 8 + row, block * 64 + column]
            expected[0 if by_rows else 1] += cta * (64 if by_rows else width // 2)
            assert held_by == cta and tile(offset, cta) == tuple(expected)


def placed(shape, layout):
    """(offset, CTA) -> the element there, by the compiler's linear layout of shared memory."""
    layouts = Layouts(100, 1, 2)  # it owns what its builder uses
    builder = layouts.builder
    linear = builder.to_linear_layout(layout._to_ir(builder), list(shape))

    def element(offset: int, cta: int) -> tuple[int, ...]:
        bases = [basis for bit, basis in enumerate(linear.offset_bases) if offset >> bit & 1]
        bases += linear.block_bases[:1] * cta
        return tuple(reduce(xor, steps, 0) for steps in zip(*bases, [0] * len(shape)))

    return element
