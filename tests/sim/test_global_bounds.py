"""Global accesses that a GPU stops at: misaligned, or through the pointer of a tensor without elements."""

import pytest
import torch
import triton
from triton import language as tl

from strobe.sim import simulate


@triton.jit
def misaligned(x, out, start, live, what: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    there = (x + tl.where(i < live, start, 4)).to(tl.pointer_type(tl.int32)) + i
    if what == "load":
        tl.store(out + i, tl.load(there))
    elif what == "masked load":
        tl.store(out + i, tl.load(there, mask=i >= live, other=0))
    elif what == "store":
        tl.store(there, i)
    else:
        tl.atomic_add(there, i)


@pytest.mark.parametrize("what", ("load", "masked load", "store", "atomic"))
def test_a_misaligned_access_is_reported(what):
    with simulate("sm_90", check=False) as run:
        misaligned[(1,)](torch.zeros(64, dtype=torch.uint8), torch.zeros(8, dtype=torch.int32), 1, 3, what, 8)
    text = f"bounds: global {what} of 4 bytes at an address that is 1 modulo 4 (3 of 8 elements are misaligned)"
    assert [str(report).partition(", at ")[0] for report in run.reports] == [text] * (what != "masked load")


@triton.jit
def from_to(x, out, n: tl.constexpr):
    tl.store(out + tl.arange(0, n), tl.load(x + tl.arange(0, n)))


@pytest.mark.parametrize(
    "x, out, names", [(0, 16, ["x"]), (16, 0, ["out"]), (0, 0, ["x or out", "x or out"]), (16, 16, [])]
)
def test_a_tensor_without_elements(x, out, names):
    with simulate("sm_90", check=False) as run:
        from_to[(1,)](torch.zeros(x), torch.zeros(out), 16)
    assert [report.text.partition(" (")[0].partition("leaves ")[2] for report in run.reports] == names
    assert all(report.kind == "bounds" and "16 past its end, of 16" in report.text for report in run.reports)


@triton.jit
def from_a_number(address, n: tl.constexpr):
    there = address.to(tl.pointer_type(tl.float32)) + tl.arange(0, n)
    tl.store(there, tl.load(there))


def test_a_launch_without_tensors():
    with simulate("sm_90", check=False) as run:
        from_a_number[(1,)](64, 16)
    assert [(report.kind, "leaves every tensor (the launch has none)" in report.text) for report in run.reports] == [
        ("bounds", True)
    ] * 2
