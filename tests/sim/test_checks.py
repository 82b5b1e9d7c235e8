"""Checks that are off by default: what a launch writes, integers that wrap around, hints that are false."""

import json

import pytest
import torch
import triton
import triton.language as tl

from strobe.sim import Checks, Report, simulate
from strobe.sim.command import run as command


def reports(check: str, start) -> list[Report]:
    """What a run reports with the check; without it, nothing is."""
    with simulate("sm_90", "eager"):
        start()
    with simulate("sm_90", "eager", check=False, checks=Checks(**{check: True})) as run:
        start()
    return run.reports


# ---------------------------------------------------------------- coverage


@triton.jit
def rows_kernel(x, out, rows, stride, BLOCK: tl.constexpr, STEP: tl.constexpr):
    at = tl.program_id(0) * STEP + tl.arange(0, BLOCK)[:, None]
    where = at * stride + tl.arange(0, 32)[None, :]
    tl.store(out + where, tl.load(x + where, mask=at < rows), mask=at < rows)


def rows(step: int, programs: int, out: torch.Tensor | None = None):
    x = torch.randn(100, 32)
    out = torch.full_like(x, torch.nan) if out is None else out
    return lambda: rows_kernel[(programs,)](x, out, 100, out.stride(0), 16, step)


def test_a_launch_that_writes_each_element_once():
    assert reports("coverage", rows(16, 7)) == []


def test_elements_that_are_never_written():
    (report,) = reports("coverage", rows(16, 5))
    assert report.kind == "coverage"
    assert report.text == "640 of 3,200 elements of out are never written; the first is [80, 0] of [100, 32]"


@triton.jit
def overlapping_kernel(out, blocks, BLOCK: tl.constexpr, STEP: tl.constexpr):
    for i in range(blocks):
        tl.store(out + i * STEP + tl.arange(0, BLOCK), i)


def test_elements_that_are_written_twice():
    (report,) = reports("coverage", lambda: overlapping_kernel[(1,)](torch.full([4, 16], -1), 5, 16, 12))
    place = "test_checks.py:52 overlapping_kernel"
    assert report.text == (
        "16 of 64 elements of out are written more than once; the first is [0, 12] of [4, 16], "
        f"at {place} and at {place}"
    )


def test_a_view_is_covered_by_itself():
    """Rows of 32 in rows of 40: the gaps belong to nobody."""
    whole = torch.full([100, 40], torch.nan)
    x = torch.randn(100, 40)
    start = lambda: rows_kernel[(7,)](x, whole[:, :32], 100, 40, 16, 16)
    assert reports("coverage", start) == []
    assert whole[:, 32:].isnan().all()


@triton.jit
def in_place_kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + 1)
    tl.atomic_add(x + at, 1.0)


def test_a_tensor_that_is_read_too_is_no_output():
    assert reports("coverage", lambda: in_place_kernel[(1,)](torch.zeros(32), 16)) == []


# ---------------------------------------------------------------- integers of 32 bits


@triton.jit
def far_kernel(x, out, stride):
    row = tl.program_id(0) + tl.arange(0, 4)
    tl.store(out + tl.arange(0, 4), tl.load(x + row * stride))


def test_an_address_out_of_bounds_names_the_product_that_overflowed():
    x, out = torch.zeros(16), torch.zeros(4)
    with simulate("sm_90", check=False) as run:
        far_kernel[(1,)](x, out, 2**30)
    (report,) = run.reports
    assert report.kind == "bounds" and "; a product of int32 overflows at test_checks.py:90 far_kernel" in report.text
    with simulate("sm_90", check=False) as run:
        far_kernel[(1,)](x, out, 100)
    assert "overflows" not in run.reports[0].text


@triton.jit
def wrapped_kernel(out, start):
    at = tl.arange(0, 4)
    tl.store(out + at, (at + start) * 2)


def test_an_integer_that_wraps():
    out = torch.zeros(4, dtype=torch.int32)
    (report,) = reports("overflow", lambda: wrapped_kernel[(1,)](out, 2**30 - 2))
    assert report.kind == "assert" and "int32 overflow detected for operation mul" in report.text
    assert out.tolist() == [2**31 - 4, 2**31 - 2, -(2**31), -(2**31) + 2]
    assert reports("overflow", lambda: wrapped_kernel[(1,)](out, 7)) == []


@triton.jit
def total_kernel(x, out, BLOCK: tl.constexpr):
    """The sum of the columns of [BLOCK, 4] numbers."""
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, 4)
    tl.store(out + columns, tl.sum(tl.load(x + rows[:, None] * 4 + columns[None, :]), 0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
def test_a_sum_that_wraps(dtype):
    out = torch.zeros(4, dtype=dtype)
    x = torch.tensor([2**30, 2**30, 1, 0] * 4 if dtype == torch.int32 else [2**31, 2**30, 1, 0] * 4, dtype=dtype)
    (report,) = reports("overflow", lambda: total_kernel[(1,)](x, out, 4))
    assert report.kind == "assert" and "int32 overflow detected for operation" in report.text
    assert "test_checks.py:" in report.text and "total_kernel" in report.text
    assert reports("overflow", lambda: total_kernel[(1,)](x.int() // 4, out.int(), 4)) == []


def test_a_sum_counts_by_its_result():
    """2**30 + 2**30 - 2**30 is no overflow, in whatever order the GPU adds."""
    x, out = torch.tensor([2**30, 2**30, -(2**30), -5], dtype=torch.int32).repeat_interleave(4), torch.zeros(4).int()
    assert reports("overflow", lambda: total_kernel[(1,)](x, out, 4)) == []
    assert out.tolist() == [2**30 - 5] * 4


@triton.jit
def dot_kernel(a, b, start, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    square = at[:, None] * SIZE + at[None, :]
    total = tl.full([SIZE, SIZE], 0, tl.int32) + tl.load(start)
    tl.store(out + square, tl.dot(tl.load(a + square), tl.load(b + square), total, out_dtype=tl.int32))


@pytest.mark.parametrize("start, wraps", [(2**31 - 1 - 32 * 127**2, False), (2**31 - 32 * 127**2, True)])
def test_a_product_of_matrices_that_wraps(start, wraps):
    a, out = torch.full((32, 32), 127, dtype=torch.int8), torch.zeros(32, 32, dtype=torch.int32)
    start = torch.tensor([start], dtype=torch.int32)
    found = reports("overflow", lambda: dot_kernel[(1,)](a, a, start, out, 32))
    assert [report.kind for report in found] == ["assert"] * wraps
    assert all("int32 overflow detected for operation dot" in report.text for report in found)
    assert out[0, 0] == (-(2**31) if wraps else 2**31 - 1)


# ---------------------------------------------------------------- hints


@triton.jit
def hinted_kernel(x, out, start, KIND: tl.constexpr):
    at = tl.arange(0, 16)
    index = start + at
    if KIND == "multiple":
        index = tl.multiple_of(index, 8)
    elif KIND == "contiguous":
        index = tl.max_contiguous(index % 12, 16)
    elif KIND == "constant":
        index = tl.max_constancy(index // 4, 4)
    elif KIND == "scalar":
        index = tl.multiple_of(start, 4) + at
    else:
        tl.store(out + at, tl.load(tl.multiple_of(x + index, 16)))
    tl.store(out + at, tl.load(x + index))


HINTS = [
    ("multiple", 8, ""),
    ("multiple", 4, "tl.multiple_of([8]) is false: a run begins at 4"),
    ("contiguous", 3, "tl.max_contiguous([16]) is false: 0 follows 11"),
    ("constant", 8, ""),
    ("constant", 2, "tl.max_constancy([4]) is false: 1 follows 0"),
    ("scalar", 12, ""),
    ("scalar", 6, "tl.multiple_of([4]) is false: 6"),
    ("pointer", 4, ""),
    ("pointer", 3, "tl.multiple_of([16]) is false: a run begins at"),
]


@pytest.mark.parametrize("kind, start, expected", HINTS, ids=[f"{kind}-{start}" for kind, start, _ in HINTS])
def test_hints(kind, start, expected):
    found = reports("hints", lambda: hinted_kernel[(1,)](torch.zeros(64), torch.zeros(16), start, kind))
    assert [report.kind for report in found] == ["assert"] * bool(expected)
    assert not expected or expected in found[0].text


# ---------------------------------------------------------------- the command


def test_the_command_takes_checks_by_name(capsys):
    arguments = [f"{__file__}::wrapped_kernel", "i32[4]", str(2**30), "--mode", "eager", "--json"]
    assert command(arguments) == 0
    capsys.readouterr()
    assert command([*arguments, "--check", "overflow", "--check", "hints"]) == 1
    assert [report["kind"] for report in json.loads(capsys.readouterr().out)["reports"]] == ["assert"]
