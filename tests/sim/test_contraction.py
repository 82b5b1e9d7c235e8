"""Products that a GPU's compiler fuses into the sum behind them: reported where the result changes, or computed so."""

import pytest
import torch
import triton
import triton.language as tl

from strobe.sim import Checks, simulate
from tests.sim.places import PLACES, launch

LOOK = Checks(contraction=True)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sink_kernel(scores, sink, out, COLUMNS: tl.constexpr, SHAPE: tl.constexpr):
    """The sink's weight before it is divided: its difference to the maximum is a product minus itself."""
    at = tl.arange(0, COLUMNS)
    largest = tl.load(sink) * LOG2E
    row = tl.load(scores + at)
    maximum = tl.maximum(tl.max(row, 0) * LOG2E, largest)
    share = tl.exp2(tl.load(sink) * LOG2E - maximum) if SHAPE == "scalar" else 0.0
    if SHAPE == "block":
        share = tl.max(tl.exp2((tl.load(sink + at * 0) * LOG2E) - maximum), 0)
    tl.store(out + at, row * 0 + share)


def weight(sink: float, shape: str, **options) -> tuple[torch.Tensor, list]:
    scores, out = torch.linspace(-1, 1, 16), torch.full([16], torch.nan)
    with simulate("sm_90", check=False, **options) as run:
        sink_kernel[(1,)](scores, torch.tensor([sink]), out, 16, shape)
    return out, run.reports


@pytest.mark.parametrize("shape", ["scalar", "block"])
def test_a_product_minus_itself_is_its_rounding_error_when_fused(shape):
    """At a sink of 1e10 the error is more than 128, and its power of two is infinite or zero."""
    sink = 1.1e10
    out, reports = weight(sink, shape)
    assert reports == [] and torch.equal(out, torch.ones(16))
    out, (report,) = weight(sink, shape, checks=LOOK)
    assert report.kind == "contraction" and "give 0 with two roundings and " in report.text
    assert "at test_contraction.py:" in report.text and torch.equal(out, torch.ones(16))
    out, reports = weight(sink, shape, fuse=True)
    assert reports == [] and (out.isinf() | (out == 0)).all()


@pytest.mark.parametrize("shape", ["scalar", "block"])
def test_ordinary_numbers_are_no_finding(shape):
    out, reports = weight(1.7, shape, checks=LOOK)
    assert reports == []
    fused, _ = weight(1.7, shape, fuse=True)
    torch.testing.assert_close(fused, out, rtol=1e-6, atol=0)


@triton.jit
def sums_kernel(x, y, z, out, KIND: tl.constexpr):
    at = tl.arange(0, 64)
    a, b, c = tl.load(x + at), tl.load(y + at), tl.load(z + at)
    if KIND == "a * b + c":
        r = a * b + c
    elif KIND == "c + a * b":
        r = c + a * b
    elif KIND == "a * b - c":
        r = a * b - c
    elif KIND == "c - a * b":
        r = c - a * b
    elif KIND == "a * b + a * c":
        r = a * b + a * c
    else:
        r = tl.sum(a * b, 0) + c
    tl.store(out + at, r)


FUSED = {
    "a * b + c": lambda a, b, c: a * b + c, "c + a * b": lambda a, b, c: a * b + c,
    "a * b - c": lambda a, b, c: a * b - c, "c - a * b": lambda a, b, c: c - a * b,
    "a * b + a * c": lambda a, b, c: a * b + (a * c).float().double(),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", FUSED)
def test_which_sums_are_fused(kind, place):
    """As on a GPU: each pattern is rounded once, also where the product is on the right."""
    x, y, z = (torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    out = torch.empty(64)
    if place == "simulator":
        with simulate("sm_90", fuse=True):
            sums_kernel[(1,)](x, y, z, out, kind)
    else:
        launch(place, sums_kernel, x, y, z, out, kind)
    once = FUSED[kind](x.double(), y.double(), z.double()).float()
    assert torch.equal(out, once)
    plain = torch.empty(64)
    with simulate("sm_90"):
        sums_kernel[(1,)](x, y, z, plain, kind)
    assert not torch.equal(plain, once)


def test_a_reduction_between_product_and_sum_is_not_fused():
    x, y, z = torch.randn(3, 64)
    out, plain = torch.empty(2, 64)
    for target, fuse in ((out, True), (plain, False)):
        with simulate("sm_90", fuse=fuse):
            sums_kernel[(1,)](x, y, z, target, "sum")
    assert torch.equal(out, plain)
