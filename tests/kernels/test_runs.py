"""Packed runs of queries over shared keys (`problem.call.Call`): CPU and portable kernels, and what is refused."""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.errors import InvalidProblem
from strobe.kernels.blackwell import kernel as blackwell
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from tests.kernels.run_cases import RUN_CASES, assert_runs


@pytest.mark.parametrize("name", RUN_CASES)
def test_runs_over_shared_keys(name, device, kernel):
    assert_runs(RUN_CASES[name].build(device, torch.float32, kernel))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", RUN_CASES)
def test_runs_in_hopper_kernels(name, head_dim, deterministic):
    case = RUN_CASES[name]._replace(head_dim=head_dim)
    assert_runs(case.build("cuda", torch.bfloat16, "hopper")._replace(deterministic=deterministic))


def test_the_text_of_a_problem_counts_runs():
    call = RUN_CASES["head_tail"].build("cpu", torch.float32)
    assert str(Problem.from_call(call).layout) == "runs=2 T_q=140 T_k=350 max_seqlen_q=70"
    assert Problem.from_call(Problem.from_call(call).example(torch.device("cpu"))).layout.runs


def test_what_runs_are_refused_with():
    call = RUN_CASES["head_tail"].build("cpu", torch.bfloat16)
    with pytest.raises(InvalidProblem, match="batch_invariant"):
        Problem.from_call(call._replace(batch_invariant=True))
    problem = Problem.from_call(call)
    for kernel in (blackwell.FORWARD, blackwell.BACKWARD):
        assert "shared keys" in (kernel.why_not(problem, FAKES["B200"]) or "")
    offsets = call.cu_seqlens_q, call.cu_seqlens_k
    with pytest.raises(InvalidProblem, match="cu_seqlens_k"):
        strobe.attention_varlen(call.q, call.k, call.v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
