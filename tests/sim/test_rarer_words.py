"""Words of the language that few kernels use: a small kernel for each, and the line of what the simulator lacks."""

from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, tensor
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma_scaled,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged, store_ragged

from strobe.kernels.device.dialect import tmem_reg_layout
from strobe.sim import formats, simulate
from tests.sim.ptx_calls import one

MODES = ["eager", "lazy", "pct"]


# ---------------------------------------------------------------- programs in clusters, dependent launches


@triton.jit
def doubled_kernel(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) * 2)


def test_a_program_of_several_ctas():
    x, out = torch.randn(512), torch.empty(512)
    with simulate("sm_90"):
        doubled_kernel[(2,)](x, out, 256, num_ctas=2)
    assert torch.equal(out, 2 * x)


@gluon.jit
def gluon_kernel(out):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out + at, at)


def test_without_a_cga_layout_every_cta_holds_all_elements():
    out = torch.zeros(128, dtype=torch.int32)
    with simulate():
        gluon_kernel[(1,)](out, num_ctas=2)
    assert torch.equal(out, torch.arange(128, dtype=torch.int32))


@triton.jit
def dependent_kernel(x, out, SIZE: tl.constexpr):
    gdc_wait()
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + 1)
    gdc_launch_dependents()


def test_programmatic_dependent_launches():
    x, between, out = torch.randn(64), torch.empty(64), torch.empty(64)
    with simulate("sm_90"):
        dependent_kernel[(1,)](x, between, 64, launch_pdl=True)
        dependent_kernel[(1,)](between, out, 64, launch_pdl=True)
    assert torch.equal(out, x + 1 + 1)


# ---------------------------------------------------------------- ragged descriptors


@triton.jit
def ragged_kernel(source, target, start, length, ROWS: tl.constexpr):
    store_ragged(target, start, length, [0, 0], load_ragged(source, start, length, [0, 0]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float16], ids=str)
def test_ragged_descriptors(dtype):
    source = torch.randint(-3, 4, (24, 32)).to(dtype)
    target = torch.zeros(24, 32).to(dtype)
    descriptors = [create_ragged_descriptor(one, [16, 32]) for one in (source, target)]
    with simulate("sm_90"):
        ragged_kernel[(1,)](*descriptors, 5, 9, 16)
    expected = torch.zeros(24, 32)
    expected[5:14] = source[5:14].float()
    assert torch.equal(target.float(), expected)


# ---------------------------------------------------------------- formats of four bits


def test_pairs_of_e2m1_are_packed_by_ptx():
    x = np.float32([0, -0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 6, 100, -100, np.inf, np.nan, -1.5, 4])
    nearest = np.float32([0, 0, 0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, 6, -6, 6, 6, -1.5, 4])
    text = "{ .reg .b8 two; cvt.rn.satfinite.e2m1x2.f32 two, $1, $2; mov.b32 $0, {two, two, two, two}; }"
    packed = one(text, x, np.float32([1.5] * len(x)), to=np.uint32)
    low, high = formats.E2M1[packed & 15], formats.E2M1[packed >> 4 & 15]
    assert (low == 1.5).all() and np.array_equal(high, nearest) and np.array_equal(packed & 255, packed >> 24)


def test_pairs_of_e2m1_are_widened_by_ptx():
    codes = np.arange(256, dtype=np.uint32)
    text = "{ .reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, $1; cvt.rn.f16x2.e2m1x2 $0, a; }"
    halves = one(text, codes, to=np.uint32).view(np.float16).reshape(-1, 2)
    assert np.array_equal(halves[:, 0], formats.E2M1[codes & 15]) and np.array_equal(
        halves[:, 1], formats.E2M1[codes >> 4]
    )


@pytest.mark.parametrize("name", ["min", "max"])
def test_xorsign_gives_the_product_of_the_signs(name):
    a, b = np.float32([1, -1, 2, -3, 0.5]), np.float32([2, 2, -1, -4, -0.0])
    got = one(f"{name}.xorsign.abs.f32 $0, $1, $2;", a, b)
    chosen = getattr(np, f"{name}imum")(abs(a), abs(b))
    assert np.array_equal(got, np.copysign(chosen, a) * np.copysign(1, b))


@gluon.jit
def widened_kernel(x, out, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    packed = gl.load(x + rows * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :])
    wide = gl.fp4_to_fp(packed, gl.bfloat16, axis=1)
    columns = gl.arange(0, 2 * COLUMNS, gl.SliceLayout(0, wide.type.layout))[None, :]
    rows_wide = gl.arange(0, ROWS, gl.SliceLayout(1, wide.type.layout))[:, None]
    gl.store(out + rows_wide * (2 * COLUMNS) + columns, wide)


def test_e2m1_becomes_bfloat16():
    x, out = torch.arange(256).to(torch.uint8).view(8, 32), torch.empty(8, 64, dtype=torch.bfloat16)
    with simulate("sm_100"):
        widened_kernel[(1,)](x, out, 8, 32)
    halves = torch.stack([x & 15, x >> 4], -1).reshape(8, 64)
    assert torch.equal(out.float(), torch.from_numpy(formats.E2M1)[halves.long()])


@gluon.jit
def scaled_kernel(
    a, b, a_scale, b_scale, out, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, PACK: gl.constexpr,
    FORM: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """out = (a * a_scale) @ (b * b_scale): b is [K, N], with one scale for 32 elements along K."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    k = gl.arange(0, K // PACK, gl.SliceLayout(0, wide))
    a_smem = gl.allocate_shared_memory(gl.uint8, [M, K // PACK], shared)
    b_smem = gl.allocate_shared_memory(gl.uint8, [N, K // PACK], shared)
    a_smem.store(gl.load(a + gl.arange(0, M, gl.SliceLayout(1, wide))[:, None] * (K // PACK) + k[None, :]))
    b_smem.store(gl.load(b + gl.arange(0, N, gl.SliceLayout(1, wide))[:, None] * (K // PACK) + k[None, :]))
    fence()
    scales: gl.constexpr = TensorMemoryScalesLayout()
    a_tmem = allocate_tensor_memory(gl.uint8, [M, K // 32], scales)
    b_tmem = allocate_tensor_memory(gl.uint8, [N, K // 32], scales)
    a_regs: gl.constexpr = tmem_reg_layout(gl.uint8, (M, K // 32), scales, 4)
    b_regs: gl.constexpr = tmem_reg_layout(gl.uint8, (N, K // 32), scales, 4)
    a_rows = gl.arange(0, M, gl.SliceLayout(1, a_regs))[:, None] * (K // 32)
    b_rows = gl.arange(0, N, gl.SliceLayout(1, b_regs))[:, None] * (K // 32)
    a_tmem.store(gl.load(a_scale + a_rows + gl.arange(0, K // 32, gl.SliceLayout(0, a_regs))[None, :]))
    b_tmem.store(gl.load(b_scale + b_rows + gl.arange(0, K // 32, gl.SliceLayout(0, b_regs))[None, :]))
    layout: gl.constexpr = TensorMemoryLayout([M, N], col_stride=1)
    acc = allocate_tensor_memory(gl.float32, [M, N], layout)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=1)
    tcgen05_mma_scaled(a_smem, b_smem.permute((1, 0)), acc, a_tmem, b_tmem, FORM, FORM, use_acc=False)
    tcgen05_commit(done)
    if WAITS:
        mbarrier.wait(done, 0)
    regs: gl.constexpr = tmem_reg_layout(gl.float32, (M, N), layout, 4)
    rows = gl.arange(0, M, gl.SliceLayout(1, regs))[:, None] * N
    gl.store(out + rows + gl.arange(0, N, gl.SliceLayout(0, regs))[None, :], acc.load(regs))


@builtin
def fence(_semantic=None):
    _semantic.builder.create_fence_async_shared(False)


def scaled_arguments(form: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    m, n, k = 128, 64, 128
    generator = torch.Generator().manual_seed(0)
    exponents = [torch.randint(125, 130, (rows, k // 32), generator=generator).to(torch.uint8) for rows in (m, n)]
    factors = [torch.exp2(one.float() - 127).repeat_interleave(32, 1) for one in exponents]
    if form == "e2m1":
        packed = [torch.randint(0, 256, (rows, k // 2), generator=generator).to(torch.uint8) for rows in (m, n)]
        halves = [torch.stack([one & 15, one >> 4], -1).reshape(len(one), k).long() for one in packed]
        numbers = [torch.from_numpy(formats.E2M1)[one] for one in halves]
    else:
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[form]
        numbers = [torch.randn(rows, k, generator=generator).to(dtype) for rows in (m, n)]
        packed = [one.view(torch.uint8) for one in numbers]
    left, right = (one.float() * factor for one, factor in zip(numbers, factors, strict=True))
    return [*packed, *exponents, torch.full([m, n], torch.nan)], left @ right.T


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["e2m1", "e4m3", "e5m2"])
def test_block_scaled_products_of_tcgen05(form, mode):
    arguments, expected = scaled_arguments(form)
    with simulate("sm_100", mode):
        scaled_kernel[(1,)](*arguments, 128, 64, 128, 2 if form == "e2m1" else 1, form, True)
    torch.testing.assert_close(arguments[-1], expected, rtol=1e-5, atol=1e-5)


def test_a_block_scaled_product_that_nobody_waits_for():
    arguments, _ = scaled_arguments("e4m3")
    with simulate("sm_100", check=False) as run:
        scaled_kernel[(1,)](*arguments, 128, 64, 128, 1, "e4m3", False)
    assert any(report.kind == "race" and "tcgen05.mma" in report.text for report in run.reports)
    with simulate("sm_90", check=False) as run:
        scaled_kernel[(1,)](*arguments, 128, 64, 128, 1, "e4m3", True)
    assert any(report.kind == "target" and "tcgen05_mma_scaled" in report.text for report in run.reports)


# ---------------------------------------------------------------- cluster launch control (in the language since 3.7)


@builtin
def try_cancel(answer, barrier, _semantic=None):
    _semantic.builder.create_clc_try_cancel(answer.handle, barrier.handle)


@builtin
def taken_program(answer, _semantic=None):
    """(whether a program was taken over, its number)"""
    builder = _semantic.builder
    loaded = builder.create_clc_load_result(answer.handle)
    number = tensor(builder.create_clc_get_program_id(loaded, 0), gl.int32)
    return tensor(builder.create_clc_is_canceled(loaded), gl.int1), number


@gluon.jit
def stolen_kernel(out, owner, WAITS: gl.constexpr):
    """Each program marks its number, then takes over programs that have not started."""
    answer = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mine = gl.program_id(0)
    number, goes_on, phase = mine, True, 0
    while goes_on:
        gl.atomic_add(out + number, 1)
        gl.store(owner + number, mine)
        mbarrier.expect(ready, 16)
        try_cancel(answer, ready)
        if WAITS:
            mbarrier.wait(ready, phase)
        phase ^= 1
        goes_on, number = taken_program(answer)


@pytest.mark.parametrize("mode", MODES)
def test_programs_that_have_not_started_are_taken_over(mode):
    out, owner = torch.zeros(9, dtype=torch.int32), torch.full([9], -1, dtype=torch.int32)
    with simulate("sm_100", mode, sms=3) as run:
        stolen_kernel[(9,)](out, owner, True)
    assert out.tolist() == [1] * 9 and set(owner.tolist()) <= set(range(9))
    assert run.stats["ctas"] == len(set(owner.tolist())) < 9


def test_an_answer_that_nobody_waits_for_is_reported():
    with simulate("sm_100", check=False) as run:
        stolen_kernel[(5,)](torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), False)
    assert "race" in {report.kind for report in run.reports}
    assert any("CLC answer into answer" in report.text for report in run.reports)


# ---------------------------------------------------------------- what the simulator lacks


@builtin
def unheard_of(_semantic=None):
    _semantic.builder.create_tcgen07_mma()


@gluon.jit
def lacking_kernel():
    unheard_of()  # here


def test_what_is_not_known_is_reported_with_its_line():
    with pytest.raises(NotImplementedError) as raised, simulate("sm_100"):
        lacking_kernel[(1,)]()
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# here"))
    assert "tcgen07_mma" in str(raised.value) and f"test_rarer_words.py:{line} lacking_kernel" in str(raised.value)
