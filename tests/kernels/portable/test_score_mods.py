"""Functions of scores in the portable kernels, forward and backward, against float64: on the simulator, or with
TRITON_INTERPRET=1 in Triton's interpreter.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.kernels.hopper.hopper_cases import CAUSAL, band, key_lengths, runs

pytest.importorskip("triton")

import triton
import triton.language as tl

from strobe.env import ENV
from strobe.errors import KernelFault
from strobe.kernels.portable import kernel as portable
from strobe.kernels.portable.launch import ScoreModAux, backward_launches, forward_launches, start
from strobe.kernels.protocol import Backward, Forward, Plan
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES, Target
from strobe.testing import Case
from tests.kernels.score_mod_oracle import Mods, exact, judge
from tools.proof.simulate import on


@triton.jit
def alibi(score, b, h, q_idx, kv_idx, aux):
    return score + tl.load(aux[0] + h) * (kv_idx - q_idx)


@triton.jit
def identity_bwd(dscore, score, b, h, q_idx, kv_idx, aux):
    return dscore


@triton.jit
def squared(score, b, h, q_idx, kv_idx, aux):
    """Every index shows in the score, and the slope depends on the score."""
    return score * score * aux[0] + 0.5 * b - 0.3 * h + 0.01 * (q_idx % 50) * ((kv_idx % 7) - 3)


@triton.jit
def squared_bwd(dscore, score, b, h, q_idx, kv_idx, aux):
    return dscore * 2.0 * score * aux[0]


@triton.jit
def bias(score, b, h, q_idx, kv_idx, aux):
    """aux: bias [H, S_q, S_k], its first two strides, S_q, S_k; for the gradient also a float32 sum of its shape."""
    rows, keys = tl.minimum(q_idx, aux[3] - 1), tl.minimum(kv_idx, aux[4] - 1)
    return score + tl.load(aux[0] + h * aux[1] + rows * aux[2] + keys)


@triton.jit
def bias_bwd(dscore, score, b, h, q_idx, kv_idx, aux):
    inside = (q_idx < aux[3]) & (kv_idx < aux[4])
    tl.atomic_add(aux[5] + h * aux[1] + q_idx * aux[2] + kv_idx, dscore, mask=inside)
    return dscore


@triton.jit
def hide_odd_rows(score, b, h, q_idx, kv_idx, aux):
    return tl.where(q_idx % 2 == 1, float("-inf"), score)


@triton.jit
def every_third(b, h, q_idx, kv_idx, aux):
    return (kv_idx + q_idx + h) % 3 == 0


SCORES = {
    "alibi": (alibi, identity_bwd),
    "squared": (squared, squared_bwd),
    "hide_odd_rows": (hide_odd_rows, identity_bwd),
    "every_third": (None, None),
    "squared+every_third": (squared, squared_bwd),
}


def torch_alibi(slopes: Tensor, s, b, h, q, k):
    return s + slopes.double()[h] * (k - q)


def torch_squared(s, b, h, q, k):
    return s * s * 0.25 + 0.5 * b - 0.3 * h + 0.01 * (q % 50) * ((k % 7) - 3)


def mods_of(name: str, heads: int, device: str = "cpu") -> Mods:
    score, _, mask = name.partition("+")
    mods = Mods(score_mod=SCORES[name][0])
    if score == "alibi":
        slopes = torch.tensor([2.0 ** -(h + 1) for h in range(heads)], device=device)
        mods.score_aux, mods.score = (slopes,), partial(torch_alibi, slopes)
    if score == "squared":
        mods.score_aux, mods.score = (0.25,), torch_squared
    if score == "hide_odd_rows":
        mods.score = lambda s, b, h, q, k: torch.where(q % 2 == 1, -torch.inf, s)
    if "every_third" in (score, mask):
        mods.mask_mod, mods.mask = every_third, lambda b, h, q, k: (k + q + h) % 3 == 0
    return mods


def _case(name: str, seqlen_q: int = 70, seqlen_k: int | None = 90, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, **{"head_dim": 16, "batch": 1, "heads": (2, 1)} | options)


CASES = {
    "alibi_causal": (_case("alibi_causal", 90, None, mask=CAUSAL), "alibi"),
    "squared": (_case("squared", batch=2), "squared"),
    "squared_window": (_case("squared_window", 90, None, mask=band(20, 10)), "squared"),
    "squared_softcap": (_case("squared_softcap", softcap=2.0), "squared"),
    "squared_negative": (_case("squared_negative", scale=-0.3), "squared"),
    "hide_odd_rows": (_case("hide_odd_rows"), "hide_odd_rows"),
    "hide_odd_rows_sinks": (_case("hide_odd_rows_sinks", sinks=True), "hide_odd_rows"),
    "every_third": (_case("every_third", heads=(2, 2)), "every_third"),
    "both_causal": (_case("both_causal", 90, None, mask=CAUSAL), "squared+every_third"),
    "varlen": (_case("varlen", lengths_q=(40, 0, 1, 30), lengths_k=(50, 3, 20, 30), outside=(3, 5)), "squared"),
    "documents": (_case("documents", 80, None, mask=runs((30, 1, 49), also=CAUSAL)), "alibi"),
    "key_lengths": (_case("key_lengths", batch=2, mask=key_lengths(50, 7)), "squared"),
}
DTYPE = torch.float16  # the interpreter does not multiply bfloat16


def running(target: Target):
    return nullcontext() if ENV.interpret else on(target)


def run(
    call: Call, mods: Mods, target: Target, bwd: tuple = (None, None), gradient_aux: tuple = (), dout=None
) -> tuple[Forward, Backward | None]:
    """The kernels that select would have, with functions. bwd: score_mod_bwd, and the function of the kernel of dQ."""
    problem, aux = Problem.from_call(call), ScoreModAux(mods.score_aux, mods.mask_aux, gradient_aux)
    config = portable.forward_with_mods(portable.FORWARD.config(problem, target), mods.score_mod, mods.mask_mod)
    shapes, made = problem.out_shapes, partial(torch.empty, device=call.q.device)
    found = Forward(made(shapes[0], dtype=call.q.dtype), made(shapes[1], dtype=problem.lse_dtype))
    start(forward_launches(Plan(portable.FORWARD, problem, target, config, ()), call, found, aux))
    if dout is None:
        return found, None
    plain = portable.BACKWARD.config(problem, target)
    backward = portable.backward_with_mods(plain, mods.score_mod, mods.mask_mod, *bwd)
    gradients = (torch.empty_like(t) for t in call[:3])
    tensors = Backward(dout, found.out, found.lse, None, *gradients, torch.empty_like(found.lse))
    start(backward_launches(Plan(portable.BACKWARD, problem, target, backward, ()), call, tensors, aux))
    return found, tensors


def assert_gradients(tensors: Backward, call: Call, mods: Mods) -> None:
    leaves = [t.detach().double().requires_grad_() for t in call[:3]]
    out, _, _ = exact(call._replace(q=leaves[0], k=leaves[1], v=leaves[2]), mods)
    wanted = torch.autograd.grad(out, leaves, tensors.dout.double(), materialize_grads=True)
    for name, grad, right in zip("qkv", (tensors.dq, tensors.dk, tensors.dv), wanted):
        error = float((grad.double() - right).norm() / right.norm())
        assert error <= 3e-3, f"d{name}: {error:.1e} beyond rounding"


@pytest.mark.parametrize("name", CASES)
def test_functions_of_scores(name):
    case, functions = CASES[name]
    mods = mods_of(functions, case.heads[0])
    call = case.build("cpu", DTYPE, "normal", 5, kernel="portable")._replace(needs_grad=False)
    dout = torch.randn(Problem.from_call(call).out_shapes[0], generator=torch.Generator().manual_seed(3)).to(DTYPE)
    target = FAKES[("H200", "A100")[list(CASES).index(name) % 2]]
    with running(target):
        found, tensors = run(call, mods, target, (SCORES[functions][1], None), mods.score_aux, dout)
    judge(found, call, mods)
    assert_gradients(tensors, call, mods)
    with pytest.raises(AssertionError, match=r"times the allowance|rows without keys"):
        judge(found, call, Mods())
    if functions != "alibi":  # a bias alone leaves the derivative alone
        with pytest.raises(AssertionError, match="beyond rounding"):
            assert_gradients(tensors, call, Mods())


def test_gradient_of_a_bias():
    """score_mod_bwd adds to it in the kernel of dK and dV alone."""
    call = _case("bias").build("cpu", DTYPE, "normal", 5, kernel="portable")._replace(needs_grad=False)
    table = torch.randn(2, 70, 90, generator=torch.Generator().manual_seed(7))
    aux, sums = (table, *table.stride()[:2], 70, 90), torch.zeros_like(table)
    mods = Mods(bias, aux, score=lambda s, b, h, q, k: s + table.double()[h, q, k])
    dout = torch.randn(call.q.shape, generator=torch.Generator().manual_seed(3)).to(DTYPE)
    with running(FAKES["A100"]):
        found, tensors = run(call, mods, FAKES["A100"], (bias_bwd, identity_bwd), (*aux, sums), dout)
    judge(found, call, mods)
    assert_gradients(tensors, call, mods)
    leaf = table.double().requires_grad_()
    out, _, _ = exact(call, replace(mods, score=lambda s, b, h, q, k: s + leaf[h, q, k]))
    (wanted,) = torch.autograd.grad(out, leaf, dout.double())
    assert float((sums - wanted).norm() / wanted.norm()) <= 3e-3


def test_float64_is_refused():
    call = _case("double").build("cpu", torch.float64, kernel="portable")._replace(needs_grad=False)
    with pytest.raises(KernelFault, match="float32"):
        run(call, mods_of("squared", 2), FAKES["A100"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("name", CASES)
def test_functions_of_scores_on_a_gpu(name, dtype):
    case, functions = CASES[name]
    case = replace(case, seqlen_q=5 * case.seqlen_q, seqlen_k=case.seqlen_k and 5 * case.seqlen_k)
    if case.mask is not None and functions == "alibi" and "documents" in name:
        case = CASES[name][0]  # its mask has lengths of its own
    mods, target = mods_of(functions, case.heads[0], "cuda"), Target.of(torch.device("cuda"))
    call = case.build("cuda", dtype, "normal", 5)._replace(needs_grad=False)
    dout = torch.randn(Problem.from_call(call).out_shapes[0], device="cuda").to(dtype)
    found, tensors = run(call, mods, target, (SCORES[functions][1], None), mods.score_aux, dout)
    judge(found, call, mods)
    if dtype != torch.bfloat16:  # whose rounding is 8 times float16's
        assert_gradients(tensors, call, mods)
