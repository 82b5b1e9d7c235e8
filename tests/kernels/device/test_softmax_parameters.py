"""What Hopper and Blackwell launches pass of scale and softcap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strobe.problem.call import Call
from strobe.problem.problem import Problem

pytest.importorskip("triton")

from strobe.kernels.device import persistent_launch
from strobe.kernels.hopper import launch_decode


@pytest.mark.parametrize("scale, softcap", [(1e-60, 0.0), (-1e-60, 0.0), (1e-40, 0.0), (1e-9, 1e-46)])
def test_neither_rounds_to_0(scale, softcap):
    """0 times a masked score of -inf would be NaN."""
    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16)
    problem = replace(Problem.from_call(Call(q, q, q)), scale=scale, softcap=softcap)
    for scale_log2, cap in (persistent_launch.softmax_parameters(problem), launch_decode.softmax_parameters(problem)):
        assert abs(torch.tensor(scale_log2).item()) >= 2.0**-126 and bool(cap) == bool(softcap)
    assert (persistent_launch.softmax_parameters(problem)[0] < 0) == (scale < 0)
    assert launch_decode.softmax_parameters(replace(problem, scale=0.0, softcap=0.0))[0] > 0
