"""What the portable kernels refuse, and their configs, without a launch."""

from __future__ import annotations

import pytest
import torch

from strobe.kernels.portable import kernel as portable
from strobe.kernels.portable.decode_config import DECODE
from strobe.kernels.runtime.batch_invariant import as_decode
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES


def problem_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> Problem:
    return Problem.from_call(Call(q, k, v, **options))


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_that_share_memory_are_not_addressed_by_tma(dtype, which):
    tensors = {name: torch.empty(1, 128, 2, 64, dtype=dtype) for name in "qkv"}
    assert portable.FORWARD.config(problem_of(**tensors), FAKES["H200"]).traits.tma
    tensors[which] = tensors[which][:, :1].expand(-1, 128, -1, -1)
    problem = problem_of(**tensors)
    backward = portable.BACKWARD.config(problem, FAKES["H200"])
    assert not any(
        one.tma for one in (portable.FORWARD.config(problem, FAKES["H200"]).traits, backward.keys, backward.queries)
    )


@pytest.mark.parametrize(
    "options", [{"scale": 1e39}, {"softcap": 1e50}, {"scale": 1e-60}, {"scale": 1e-30, "softcap": 1e30}], ids=str
)
def test_float64_scales_outside_float32_are_refused_by_name(options):
    q = torch.empty(1, 8, 2, 16, dtype=torch.float64)
    refused, plain, zero = (problem_of(q, q, q, **one) for one in (options, {}, {"scale": 0.0, "softcap": 5.0}))
    for kernel in (portable.FORWARD, portable.BACKWARD):
        assert "scale" in kernel.why_not(refused, FAKES["H200"])
        assert kernel.why_not(plain, FAKES["H200"]) is None and kernel.why_not(zero, FAKES["H200"]) is None
    assert "scale" in DECODE.why_not(as_decode(refused), FAKES["H200"])
    assert DECODE.why_not(as_decode(plain), FAKES["H200"]) is None
