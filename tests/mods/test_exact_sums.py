"""Exact sums of float32 numbers, against sums in rational arithmetic."""

from __future__ import annotations

from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from strobe.kernels.device.exact_sums import add_exactly
from strobe.mods import exact_sums
from strobe.problem.mods import MOST_EXACT_SUMS
from strobe.problem.target import FAKES
from tools.proof.simulate import on


@triton.jit
def add_kernel(sums, step, stride, values, COUNT: tl.constexpr, GROUPS: tl.constexpr):
    """Each program adds COUNT numbers, in turn to each of GROUPS sums."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    add_exactly(sums + (at % GROUPS) * stride, step, tl.load(values + at))


@pytest.fixture(params=(True, False), ids=("at once", "slot by slot"), autouse=True)
def at_once(request, monkeypatch):
    """As for small tensors, and for large ones or in a CUDA graph."""
    if not request.param:
        monkeypatch.setattr(exact_sums, "MOST_AT_ONCE", 0)


def _summed(values: Tensor, groups: int, seed: int = 0, device: str = "cpu") -> Tensor:
    sums = exact_sums.zeros(torch.empty(groups, device=device))
    with on(FAKES["H200"], "random", seed) if device == "cpu" else nullcontext():
        add_kernel[(len(values) // 128,)](sums, sums.stride(1), sums.stride(0), values.to(device), 128, groups)
    return sums.cpu()


def _values(count: int, seed: int, exponents: tuple[int, int]) -> Tensor:
    """Numbers of both signs whose exponents are uniform in a range."""
    draw = torch.Generator().manual_seed(seed)
    exponent = torch.randint(*exponents, (count,), generator=draw)
    return torch.ldexp(torch.rand(count, generator=draw, dtype=torch.float64) * 2 - 1, exponent).float()


@pytest.mark.parametrize(("device", "count"), (("cpu", 512), pytest.param("cuda", 1 << 16, marks=pytest.mark.gpu)))
@pytest.mark.parametrize("exponents", ((-149, 128), (-149, -120), (-3, 3), (100, 128)))
def test_the_sum_is_exact_and_its_rounding_bounded(exponents, device, count):
    values = _values(count, 1, exponents)
    values[:4] = torch.tensor([2.0**-149, -(2.0**-126), 0.0, -0.0])
    sums = _summed(values, 4, device=device)
    assert torch.equal(sums, _summed(values, 4, seed=3, device=device))
    for n, rounded in enumerate(exact_sums.total(sums).tolist()):
        added = [Fraction(one) for one in values[n::4].tolist()]
        held = sum(int(one) * Fraction(2) ** (31 * i - 149) for i, one in enumerate(sums[n, :9].tolist()))
        assert held == sum(added)
        if abs(held) >= 2**128:
            assert abs(rounded) == torch.inf and (rounded > 0) == (held > 0)
            continue
        bound = abs(held) / 2**24 + sum(map(abs, added)) / 2**49 + Fraction(2) ** -150
        assert abs(Fraction(rounded) - held) <= bound


def test_terms_that_cancel_leave_the_smallest():
    """In float32 one order of 4 gives 0."""
    values = torch.zeros(128)
    values[:4] = torch.tensor([3e38, 1e-44, -3e38, 1.0])
    values[60:63] = torch.tensor([1e30, -1.0, -1e30])
    assert exact_sums.total(_summed(values, 1)).tolist() == [torch.tensor(1e-44).item()]


def test_infinities_and_nan():
    values = torch.ones(128)
    values[8:13] = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.inf, 1.0])
    values[12 + 8] = -torch.inf
    values[3 + 8 * 4] = 5.0
    found = exact_sums.total(_summed(values, 8))
    assert found[:5].isfinite().tolist() == [False, False, False, False, False]
    assert found[0] == torch.inf and found[1] == -torch.inf and found[2].isnan() and found[3] == torch.inf
    assert found[4] == -torch.inf and found[5:].tolist() == [16.0] * 3
    both = torch.zeros(128)
    both[:2] = torch.tensor([torch.inf, -torch.inf])
    assert exact_sums.total(_summed(both, 1)).isnan().all()


def test_the_largest_sum_overflows_to_infinity_as_float32_does():
    values = torch.full((128,), 3e38)
    assert exact_sums.total(_summed(values, 1)).tolist() == [torch.inf]


def test_offsets_of_slots_have_32_bits():
    """As `add_exactly` computes them, of the largest tensors that have exact sums."""
    assert exact_sums.SLOTS * MOST_EXACT_SUMS < 2**31
    assert all((p * 2115) >> 16 == p // exact_sums.BITS for p in range(255))
