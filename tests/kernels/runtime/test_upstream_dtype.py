"""A float32 dO of narrow inputs: dP and delta read the same rounded dO.

The loss of `partial_attention` gives a float32 dO. A kernel multiplies dO, rounded to the dtype of q, with V. Where one
key has nearly the whole weight of its row, dP - delta nearly cancels, and a delta of the unrounded dO would leave the
rounding of dO in the difference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from strobe.problem.target import FAKES
from strobe.testing import Case
from tools.proof.simulate import on


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kernel, target", [("portable", "A100"), ("hopper.backward", "H200"), ("blackwell.backward", "B200")]
)
def test_one_key_with_nearly_all_weight(kernel, target, seed, judge):
    case = Case("one_key", seqlen_q=1, seqlen_k=15, heads=(1, 1), batch=1, head_dim=24, partial=True)
    call = case.build("cpu", torch.bfloat16, "negative", seed, requires_grad=True, kernel=kernel)
    with on(replace(FAKES[target], sm_count=2), "eager", 0) as run:
        judge(call, "negative", seed)
    assert run.reports == []
