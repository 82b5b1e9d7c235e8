"""Blocks of plain Triton: block pointers, gather and scatter by descriptors, block-scaled products."""

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.tools.tensor_descriptor import TensorDescriptor

from strobe.sim import simulate
from tests.sim.places import PLACES, launch


@triton.jit
def transposed_kernel(x, out, rows, columns, BLOCK: tl.constexpr, PADDING: tl.constexpr, CHECKED: tl.constexpr):
    """out = x.T by block pointers, a column of blocks a program, padding where a block leaves x."""
    at = tl.program_id(0) * BLOCK
    source = tl.make_block_ptr(x, (rows, columns), (columns, 1), (0, at), (BLOCK, BLOCK), (1, 0))
    target = tl.make_block_ptr(out, (columns, rows), (rows, 1), (at, 0), (BLOCK, BLOCK), (1, 0))
    for _ in range(0, rows, BLOCK):
        value = tl.load(source, boundary_check=CHECKED, padding_option=PADDING)
        tl.store(target, tl.trans(value * 2), boundary_check=(0, 1))
        source = tl.advance(source, (BLOCK, 0))
        target = tl.advance(target, (0, BLOCK))


@pytest.mark.parametrize("place", PLACES)
def test_block_pointers(place):
    x = torch.randn(40, 24)
    out = torch.full([24, 40], torch.nan)
    launch(place, transposed_kernel, x, out, 40, 24, 16, "zero", (0, 1), grid=(2,))
    assert torch.equal(out, 2 * x.T)


@triton.jit
def padded_kernel(x, out, columns, BLOCK: tl.constexpr, PADDING: tl.constexpr):
    source = tl.make_block_ptr(x, (columns,), (1,), (-4,), (BLOCK,), (0,))
    value = tl.load(source, boundary_check=(0,), padding_option=PADDING)
    tl.store(out + tl.arange(0, BLOCK), value)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("padding, fill", [("zero", 0.0), ("nan", torch.nan)])
def test_padding_of_a_block_pointer(place, padding, fill):
    x, out = torch.arange(1.0, 8.0), torch.full([16], 9.0)
    launch(place, padded_kernel, x, out, 7, 16, padding)
    expected = torch.full([16], fill)
    expected[4:11] = x
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=0, atol=0)


def test_a_block_pointer_that_is_not_checked_leaves_its_tensor():
    x, out = torch.randn(40, 24), torch.zeros(24, 40)
    with simulate("sm_90", check=False) as run:
        transposed_kernel[(2,)](x, out, 40, 24, 16, "", (1,))
    (report,) = run.reports
    assert report.kind == "bounds" and "global load leaves x" in report.text


# ---------------------------------------------------------------- gather and scatter


@triton.jit
def gathered_kernel(table, out, rows, BACK: tl.constexpr, column):
    at = tl.arange(0, 8)
    wanted = tl.load(rows + at)
    if BACK:
        value = tl.load(out + at[:, None] * 16 + tl.arange(0, 16)[None, :])
        table.scatter(value, wanted, column)
    else:
        tl.store(out + at[:, None] * 16 + tl.arange(0, 16)[None, :], table.gather(wanted, column))


@pytest.mark.parametrize("column", [0, 16, 24])
def test_gather(column):
    table, out = torch.randn(20, 32), torch.full([8, 16], torch.nan)
    rows = torch.tensor([3, 19, 0, 3, 25, 7, 11, 4], dtype=torch.int32)
    with simulate("sm_100"):
        gathered_kernel[(1,)](TensorDescriptor.from_tensor(table, [1, 16]), out, rows, False, column)
    padded = torch.nn.functional.pad(table, (0, 16, 0, 16))
    assert torch.equal(out, padded[rows.long(), column : column + 16])


def test_scatter():
    table, value = torch.zeros(20, 32), torch.randn(8, 16)
    rows = torch.tensor([3, 19, 0, 5, 25, 7, 11, 4], dtype=torch.int32)
    with simulate("sm_100"):
        gathered_kernel[(1,)](TensorDescriptor.from_tensor(table, [1, 16]), value, rows, True, 16)
    expected = torch.zeros(36, 48)
    expected[rows.long(), 16:32] = value
    assert torch.equal(table, expected[:20, :32])


# ---------------------------------------------------------------- block-scaled products

M, N, K = 32, 16, 64
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@triton.jit
def scaled_kernel(
    a, a_scale, b, b_scale, out, A: tl.constexpr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    a_k: tl.constexpr = K // 2 if A == "e2m1" else K
    b_k: tl.constexpr = K // 2 if B == "e2m1" else K
    rows, columns, runs = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    left = tl.load(a + rows[:, None] * a_k + tl.arange(0, a_k)[None, :])
    right = tl.load(b + tl.arange(0, b_k)[:, None] * N + columns[None, :])
    left_scale = tl.load(a_scale + rows[:, None] * (K // 32) + runs[None, :])
    right_scale = None
    if b_scale is not None:
        right_scale = tl.load(b_scale + columns[:, None] * (K // 32) + runs[None, :])
    total = tl.dot_scaled(left, left_scale, A, right, right_scale, B)
    tl.store(out + rows[:, None] * N + columns[None, :], total)


def operand(rows: int, columns: int, kind: str, packed: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An operand as it is stored, and as numbers."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "e2m1":
        codes = torch.randint(16, (rows, columns), generator=draw)
        low, high = (codes[:, i::2] if packed == 1 else codes[i::2] for i in (0, 1))
        return (low | high << 4).to(torch.uint8), E2M1[codes]
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}[kind]
    numbers = torch.randn(rows, columns, generator=draw).to(dtype)
    return numbers, numbers.float()


@pytest.mark.parametrize(
    "left, right, scaled",
    [("e2m1", "e2m1", True), ("e4m3", "e5m2", True), ("e2m1", "bf16", False), ("e4m3", "e2m1", True)],
)
def test_a_scaled_product(left, right, scaled):
    (a, wide_a), (b, wide_b) = operand(M, K, left, 1, 0), operand(K, N, right, 0, 1)
    draw = torch.Generator().manual_seed(2)
    a_scale, b_scale = (torch.randint(120, 134, (rows, K // 32), generator=draw) for rows in (M, N))
    out = torch.full([M, N], torch.nan)
    with simulate("sm_100"):
        scaled_kernel[(1,)](
            a, a_scale.to(torch.uint8), b, b_scale.to(torch.uint8) if scaled else None, out, left, right, M, N, K
        )
    wide_a = wide_a * torch.exp2(a_scale - 127.0).repeat_interleave(32, 1)
    wide_b = wide_b * torch.exp2(b_scale - 127.0).repeat_interleave(32, 1).T if scaled else wide_b
    wide_a, wide_b = wide_a.double(), wide_b.double()
    error = (out.double() - wide_a @ wide_b).abs()
    assert (error <= K * 2.0**-24 * (wide_a.abs() @ wide_b.abs())).all()  # of a sum of K products in float32


def test_an_operation_that_is_not_known_names_its_line(monkeypatch):
    monkeypatch.delattr("strobe.sim.scaled.ScaledProducts.create_dot_scaled")
    a, scale, out = (
        torch.zeros(M, K // 2, dtype=torch.uint8),
        torch.zeros(M, K // 32, dtype=torch.uint8),
        torch.zeros(M, N),
    )
    b = torch.zeros(K, N, dtype=torch.bfloat16)
    place = r"operation dot_scaled, at test_block_operations.py:\d+ scaled_kernel"
    with pytest.raises(NotImplementedError, match=place), simulate("sm_100"):
        scaled_kernel[(1,)](a, scale, b, None, out, "e2m1", "bf16", M, N, K)


@triton.jit
def flipped_kernel(x, out):
    at = tl.arange(0, 8)
    tl.store(out + at, tl.flip(tl.load(x + at)))


def test_a_flip_without_a_dimension_is_refused_as_triton_refuses_it():
    with pytest.raises(CompilationError):
        source = ASTSource(flipped_kernel, {"x": "*fp32", "out": "*fp32"}, {})
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    with pytest.raises(TypeError, match="'int' and 'NoneType'"), simulate("sm_90"):
        flipped_kernel[(1,)](torch.ones(8), torch.ones(8))
