"""The simulator at a glance, under any version of Triton: one Gluon kernel that is full of its words, one plain Triton
kernel, one fault.
"""

import pytest
import torch
import triton
from triton import language as tl

from strobe.sim import simulate
from tests.specimens import matmul, scenes


@triton.jit
def add_rows_kernel(x, out, columns, shift, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + at, mask=at < columns, other=0.0)
    for _ in range(2):
        value += tl.sum(value, 0)
    tl.store(out + row * columns + at + shift, value, mask=at < columns)


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
    assert [report.kind for report in run.reports] == ["bounds"] and "test_smoke.py:20" in run.reports[0].text
