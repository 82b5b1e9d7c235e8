"""Scans along a long axis: the same results as one element after another, in few steps."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from strobe.sim import Checks, simulate


@triton.jit
def recurrence(a, x, b, y):
    """x <- b * x + y, as pairs of (decay, state). Their order matters."""
    return a * b, b * x + y


@triton.jit
def scanned_kernel(decay, x, out, SIZE: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(decay + at), tl.load(x + at)
    _, state = tl.associative_scan((a, b), 0, recurrence, reverse=REVERSE)
    tl.store(out + at, state)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", [64, 128, 1024])
def test_a_recurrence_keeps_its_order(size, reverse):
    decay, x = torch.rand(size, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
    out = torch.empty(size, dtype=torch.float64)
    with simulate("sm_90"):
        scanned_kernel[(1,)](decay, x, out, size, reverse)
    state, expected = 0.0, []
    for i in reversed(range(size)) if reverse else range(size):
        state = decay[i].item() * state + x[i].item()
        expected.append(state)
    expected = torch.tensor(expected[::-1] if reverse else expected, dtype=torch.float64)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@triton.jit
def summed_kernel(x, out, SIZE: tl.constexpr, KIND: tl.constexpr):
    at = tl.arange(0, SIZE)
    value = tl.load(x + at)
    if KIND == "sum":
        value = tl.cumsum(value, 0)
    elif KIND == "product":
        value = tl.cumprod(value, 0)
    else:
        value = tl.cumsum(value.to(tl.uint32, bitcast=True), 0).to(tl.int32, bitcast=True)
    tl.store(out + at, value)


@pytest.mark.parametrize("kind", ["sum", "product", "unsigned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_sums_and_products(kind, dtype):
    if kind == "unsigned" and dtype is torch.float32:
        pytest.skip("a cast of float32 is no number")
    x = torch.randn(2048).to(dtype) if dtype.is_floating_point else torch.randint(-(2**31), 2**31, (2048,), dtype=dtype)
    out = torch.empty_like(x)
    with simulate("sm_90"):
        summed_kernel[(1,)](x, out, 2048, kind)
    expected = (np.cumprod if kind == "product" else np.cumsum)(x.numpy(), dtype=x.numpy().dtype)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6)


def test_a_long_scan_combines_few_times(monkeypatch):
    """1,024 elements in 10 steps, not in 1,023."""
    from strobe.sim.semantics import Triton

    calls = []
    combine = Triton._combine
    monkeypatch.setattr(Triton, "_combine", lambda self, *a: calls.append(1) or combine(self, *a))
    with simulate("sm_90"):
        scanned_kernel[(1,)](torch.rand(1024), torch.randn(1024), torch.empty(1024), 1024, False)
    assert len(calls) == 10


@pytest.mark.parametrize("size", [16, 1024])
def test_sums_that_overflow_are_reported(size):
    x = torch.full((size,), 2**30, dtype=torch.int32)
    with simulate("sm_90", check=False, checks=Checks(overflow=True)) as run:
        summed_kernel[(1,)](x, torch.empty_like(x), size, "sum")
    assert {report.kind for report in run.reports} == {"assert"} and "overflow" in run.reports[0].text
    with simulate("sm_90"):
        summed_kernel[(1,)](x, torch.empty_like(x), size, "sum")
