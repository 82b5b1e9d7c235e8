"""Spans of documents that no mask has, as who calls the ops by hand can give them: kernels on a GPU cut them, where
reading them would make the host wait.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from tests.kernels.hopper.hopper_cases import H200, runs

pytest.importorskip("triton")
from strobe.ops import attention as ops
from strobe.testing import Case
from tools.proof.simulate import on

CASE = Case("documents", 200, batch=2, heads=(1, 1), mask=runs((90, 20, 90)))
FORGED = {  # column of one row, and the number
    "run that ends where it begins": (0, 0),
    "run that ends before": (0, -(2**31)),
    "run that ends behind all": (0, 2**30),
    "first key before all": (1, -(2**30)),
    "first key behind all": (1, 2**30),
    "last key behind all": (2, 2**30),
    "last key before the first": (2, -5),
}


def _run(call, kernel):
    with on(H200) as run:
        leaves = [t.detach().requires_grad_() for t in call[:3]]
        out, _ = ops.run(call._replace(q=leaves[0], k=leaves[1], v=leaves[2], kernel=kernel))
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert run.reports == [] and all(name.endswith("kernel") for name in run.launches)
    return [t.detach() for t in (out, *grads)]


@lru_cache
def _right(kernel):
    return _run(_call(), kernel)


def _call():
    return CASE.build("cpu", torch.bfloat16, requires_grad=True, seed=3)


@pytest.mark.nightly_cases("hopper-run that ends *-spans_k")  # tiles of queries go on to the last key, one by one
@pytest.mark.parts(12, seed=3824444741)
@pytest.mark.parametrize("side", ("spans_q", "spans_k"))
@pytest.mark.parametrize("how", FORGED)
@pytest.mark.parametrize("kernel", ("hopper", "portable"))
def test_forged_spans_end_and_read_nothing_outside(kernel, how, side, monkeypatch):
    """Every run ends, the simulator sees no access outside a tensor, and the other batch entry is as it was."""
    monkeypatch.setattr(ops, "check_spans", lambda call: None)
    call = _call()
    spans = getattr(call, side).clone()
    column, number = FORGED[how]
    spans[1, :, column] = number
    forged = _run(call._replace(**{side: spans}), kernel)
    for mine, theirs in zip(forged, _right(kernel)):
        assert torch.equal(mine[0], theirs[0])
