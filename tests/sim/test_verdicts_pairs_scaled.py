"""Verdicts on block-scaled products of two CTAs (Triton 3.8): each CTA has half of A's rows with their scales, half of
B, and all of B's scales. `off` names the synchronisation that is left out.
"""

import pytest
import torch
from triton.experimental.gluon.language.nvidia import blackwell

from strobe.kernels.device.dialect import TensorDescriptor, gl, gluon, mbarrier
from strobe.sim import formats, simulate

if not hasattr(blackwell, "async_store"):
    pytest.skip("barriers of two CTAs: Triton 3.8", allow_module_level=True)

from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
    tma,
)

from .test_verdicts_multicta import noticed

M, N, K, TILES = 256, 128, 128, 5
A_ROWS, B_COLUMNS, ALL = [[1, 0]], [[1, 0]], [[0, 0]]


@gluon.jit
def scales_of(smem, ROWS: gl.constexpr, RUNS: gl.constexpr):
    """Scales in the order that tcgen05.cp wants as a matrix."""
    smem = smem.reshape((smem.shape[1], smem.shape[2], 32, 4, 4))
    return smem.permute((0, 3, 2, 1, 4)).reshape((ROWS, RUNS))


@gluon.jit
def load_role(descs, rings, ready, empty, tiles, off: gl.constexpr):
    for i in range(tiles):
        slot = i % 2
        if off != "empty":
            mbarrier.wait(empty.index(slot), i // 2 & 1 ^ 1)
        if off != "expect":
            mbarrier.expect(
                ready.index(slot),
                descs[0].nbytes_per_cta + descs[1].nbytes_per_cta + descs[2].nbytes_per_cta + descs[3].nbytes_per_cta,
            )
        k: gl.constexpr = descs[0].block_shape[1]
        tma.async_load(descs[0], [0, i * k], ready.index(slot), rings[0].index(slot))
        tma.async_load(descs[1], [0, i * k], ready.index(slot), rings[1].index(slot))
        tma.async_load(descs[2], [0, 0, i, 0, 0], ready.index(slot), rings[2].index(slot))
        tma.async_load(descs[3], [0, 0, i, 0, 0], ready.index(slot), rings[3].index(slot), multicast=True)


@gluon.jit
def mma_role(rings, d, ready, empty, done, tiles, FORM: gl.constexpr, off: gl.constexpr):
    ROWS: gl.constexpr = rings[0].shape[1]
    COLUMNS: gl.constexpr = rings[1].shape[1]
    a_layout: gl.constexpr = TensorMemoryScalesLayout(cga_layout=[[1, 0]])
    b_layout: gl.constexpr = TensorMemoryScalesLayout(cga_layout=[[0, 0]])
    for i in range(tiles):
        slot = i % 2
        if off != "ready":
            mbarrier.wait(ready.index(slot), i // 2 & 1)
        a_scale = allocate_tensor_memory(gl.uint8, [ROWS, 4], a_layout)
        b_scale = allocate_tensor_memory(gl.uint8, [COLUMNS, 4], b_layout)
        tcgen05_copy(scales_of(rings[2].index(slot), ROWS, 4), a_scale)
        tcgen05_copy(scales_of(rings[3].index(slot), COLUMNS, 4), b_scale)
        right = rings[1].index(slot).permute((1, 0))
        tcgen05_mma_scaled(rings[0].index(slot), right, d, a_scale, b_scale, FORM, FORM, use_acc=i != 0)
        tcgen05_commit(empty.index(slot))
    if off != "commit":
        tcgen05_commit(done)


@gluon.jit
def epilogue_role(d_desc, d, out, done, off: gl.constexpr):
    if off != "done":
        mbarrier.wait(done, 0)
    out.store(d.load())
    tma.async_store(d_desc, [0, 0], out)
    tma.store_wait(0)


@gluon.jit
def scaled_pair_kernel(
    a_desc, b_desc, a_scale_desc, b_scale_desc, d_desc, tiles, FORM: gl.constexpr, off: gl.constexpr
):
    a = gl.allocate_shared_memory(gl.uint8, [2, d_desc.block_shape[0], a_desc.block_shape[1]], a_desc.layout)
    b = gl.allocate_shared_memory(gl.uint8, [2, d_desc.block_shape[1], b_desc.block_shape[1]], b_desc.layout)
    a_scale = gl.allocate_shared_memory(gl.uint8, [2, 1, d_desc.block_shape[0] // 128, 1, 2, 256], a_scale_desc.layout)
    b_scale = gl.allocate_shared_memory(gl.uint8, [2, 1, d_desc.block_shape[1] // 128, 1, 2, 256], b_scale_desc.layout)
    out = gl.allocate_shared_memory(gl.float32, d_desc.block_shape, d_desc.layout)
    layout: gl.constexpr = TensorMemoryLayout((128, d_desc.block_shape[1]), 1, cga_layout=[(1, 0)], two_ctas=True)
    d = allocate_tensor_memory(gl.float32, d_desc.block_shape, layout)
    ready = mbarrier.allocate_mbarrier(batch=2, two_ctas=True)
    empty = mbarrier.allocate_mbarrier(batch=2)
    done = mbarrier.allocate_mbarrier()
    for slot in gl.static_range(2):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    mbarrier.init(done, count=1)
    rings = (a, b, a_scale, b_scale)
    gl.warp_specialize(
        [
            (epilogue_role, (d_desc, d, out, done, off)),
            (load_role, ((a_desc, b_desc, a_scale_desc, b_scale_desc), rings, ready, empty, tiles, off)),
            (mma_role, (rings, d, ready, empty, done, tiles, FORM, off)),
        ],
        [1, 1],
        [24, 24],
    )


def descriptor(tensor, block, cga, elem=gl.uint8):
    layout = gl.NVMMASharedLayout.get_default_for(block, elem, cga_layout=cga)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def packed_scales(scales):
    """[rows, runs] bytes as the blocks of 128 x 4 scales that tcgen05.cp reads: [1, rows/128, runs/4, 2, 256]."""
    rows, runs = scales.shape
    blocks = scales.reshape(rows // 128, 4, 32, runs // 4, 4).permute(0, 3, 2, 1, 4)
    return blocks.reshape(1, rows // 128, runs // 4, 2, 256).contiguous()


def scales_descriptor(scales, cga):
    block = [1, scales.shape[0] // 128, 1, 2, 256]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=5, cga_layout=cga)
    return TensorDescriptor.from_tensor(packed_scales(scales), block, layout)


def drawn(rows, form, generator):
    """A random operand [rows, K x TILES] as bytes, its scales, and its numbers."""
    width = K * TILES
    if form == "e2m1":
        packed = torch.randint(0, 256, (rows, width // 2), generator=generator).to(torch.uint8)
        halves = torch.stack([packed & 15, packed >> 4], -1).reshape(rows, width)
        numbers = torch.from_numpy(formats.E2M1)[halves.long()]
    else:
        eight = torch.randn(rows, width, generator=generator).to(torch.float8_e4m3fn)
        packed, numbers = eight.view(torch.uint8), eight.float()
    scales = torch.randint(124, 130, (rows, width // 32), generator=generator).to(torch.uint8)
    return packed, scales, numbers * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)


def multiply(off="", form="e4m3"):
    generator = torch.Generator().manual_seed(0)
    (a, a_scale, left), (b, b_scale, right) = (drawn(rows, form, generator) for rows in (M, N))
    d, width = torch.full((M, N), torch.nan), K // (2 if form == "e2m1" else 1)
    scaled_pair_kernel[(1,)](
        descriptor(a, [M, width], A_ROWS),
        descriptor(b, [N, width], B_COLUMNS),
        scales_descriptor(a_scale, [[0, 1, 0, 0, 0]]),
        scales_descriptor(b_scale, [[0, 0, 0, 0, 0]]),
        descriptor(d, [M, N], A_ROWS, gl.float32),
        TILES,
        form,
        off,
        num_warps=4,
        num_ctas=2,
    )
    return d, left @ right.T


@pytest.mark.parametrize("form", ["e4m3", "e2m1"])
@pytest.mark.parametrize("mode", ["eager", "lazy", "pct"])
def test_a_pair_multiplies(form, mode):
    with simulate("sm_100", mode):
        got, want = multiply(form=form)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_a_pair_has_no_report(verdict):
    verdict(multiply, seeds=1, target="sm_100")


@pytest.mark.parametrize(
    "off, words",
    [
        ("empty", ("race: on", "TMA load into", "overwrites")),
        ("ready", ("uninitialised", "tcgen05.cp read of")),
        ("expect", ("deadlock", "mma_role of CTA 0 waits for parity 0 of ready[0] of CTA 0")),
        ("commit", ("deadlock", "epilogue_role of CTA 1 waits for parity 0 of done of CTA 1")),
        ("done", ("uninitialised", "load of d by epilogue_role of CTA 1")),
    ],
)
def test_a_pair_without(off, words):
    noticed(multiply, off, *words, target="sm_100", seeds=1)
