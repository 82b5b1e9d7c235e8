"""The runner of other projects' kernels: what it makes of a case."""

import pytest
import torch
import triton
import triton.language as tl

from strobe.sim import cuda_on_cpu
from tests.peers.simulate_corpus import run


@triton.jit
def copied_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


def copied(size: int, shift: float = 0.0):
    x, out = torch.ones(size, device="cuda"), torch.zeros(size, device="cuda")
    copied_kernel[(1,)](x, out, 8)
    return out, x + shift


def missing():
    raise NotImplementedError("the simulator does not know the operation waltz")


def refused():
    raise KeyError("a fault of their host code")


def broken():
    copied(8)
    raise KeyError("a fault behind a launch")


@pytest.mark.parametrize(
    "function, outcome, reported",
    [
        (lambda: copied(8), "right", 0),
        (lambda: copied(8, shift=0.5), "wrong", 0),
        (lambda: copied(4), "right", 2),
        (lambda: None, "right", 0),
        (missing, "unsupported", 0),
        (broken, "failed", 0),
        (refused, "refused", 0),
        (lambda: (torch.tensor([torch.nan, torch.inf, 1.0]),) * 2, "right", 0),
        (lambda: (torch.tensor([torch.nan, 1.0]), torch.tensor([2.0, 1.0])), "wrong", 0),
        (lambda: (True, False), "wrong", 0),
        (lambda: (torch.ones(1), torch.ones(3)), "wrong", 0),
    ],
)
def test_outcomes(function, outcome, reported):
    with cuda_on_cpu("sm_90"):
        row = run("a case", function, "sm_90", 1e-3)
    assert (row["outcome"], len(row["reports"])) == (outcome, reported)
    assert ("why" in row) == (outcome in ("unsupported", "failed", "refused"))
