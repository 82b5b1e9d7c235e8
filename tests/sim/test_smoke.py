"""The simulator at a glance, under any version of Triton: one Gluon kernel that is full of its words, one plain Triton
kernel, one fault.
"""

import pytest
import torch
import triton
from triton import language as tl
from triton.compiler.code_generator import CodeGenerator

from strobe.sim import simulate
from tests.specimens import matmul, scenes


@triton.jit
def add_rows_kernel(x, out, columns, shift, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + at, mask=at < columns, other=0.0)
    for _ in range(2):
        value += tl.sum(value, 0)
    tl.store(out + row * columns + at + shift, value, mask=at < columns)


@triton.jit
def sum_and_maximum(values, WITH_MAXIMUM: tl.constexpr):
    if WITH_MAXIMUM:
        return tl.sum(values, 0), tl.max(values, 0)
    else:
        return tl.sum(values, 0), None


@triton.jit
def reduced_kernel(x, out, WITH_MAXIMUM: tl.constexpr, BLOCK: tl.constexpr):
    total, maximum = sum_and_maximum(tl.load(x + tl.arange(0, BLOCK)), WITH_MAXIMUM)
    if maximum is not None:
        total += maximum
    tl.store(out, total)


@pytest.mark.parametrize("mode", ["eager", "lazy", "pct"])
def test_smoke_gluon(mode):
    """TMA, mbarriers, wgmma: loads late and early."""
    with simulate("sm_90", mode):
        (got,) = scenes.hopper_matmul()
    want = matmul.reference(*scenes._matrices("cpu", 72, 136, 512))
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-2, atol=2e-2)


def test_smoke_triton():
    x, out = torch.arange(60.0).view(3, 20) % 7 - 3, torch.empty(3, 20)  # small integers: sums are exact
    with simulate("sm_80"):
        add_rows_kernel[(3,)](x, out, 20, 0, BLOCK=32)
    once = x + x.sum(1, keepdim=True)
    # what lies beyond the columns is summed too: it holds the first sum in each of its 12 places
    total = once.sum(1, keepdim=True) + 12 * x.sum(1, keepdim=True)
    assert torch.equal(out, once + total)


def test_smoke_fault():
    x, out = torch.randn(3, 20), torch.empty(3, 20)
    with simulate("sm_80", check=False) as run:
        add_rows_kernel[(3,)](x, out, 20, 1, BLOCK=32)
    assert [report.kind for report in run.reports] == ["bounds"] and "test_smoke.py:21" in run.reports[0].text


@pytest.mark.skipif(not hasattr(CodeGenerator, "decide_return_type"), reason="None among several results: Triton 3.7")
@pytest.mark.parametrize("with_maximum, result", [(True, 35.0), (False, 28.0)])
def test_smoke_none_among_results(with_maximum, result):
    """Triton compiles one of the two returns. Its attention example returns None where it has no maximum."""
    out = torch.empty(1)
    with simulate("sm_80"):
        reduced_kernel[(1,)](torch.arange(8.0), out, with_maximum, BLOCK=8)
    assert out.item() == result
