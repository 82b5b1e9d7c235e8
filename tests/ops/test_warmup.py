"""`warmup` of calls, with functions and without: a later call compiles nothing, which its launches' sources show."""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.problem.target import FAKES

pytest.importorskip("triton")

from tools.proof.compile import recording, source_of
from tools.proof.simulate import posing

A100, H200 = FAKES["A100"], FAKES["H200"]


def _sources(jobs) -> set[str]:
    return {source_of(job.kernel, job.target.capability, job.arguments, job.options) for job in jobs}


def _drawn(rows, heads, width=64, grad=False):
    shapes = ((1, rows, n, width) for n in heads)
    return [torch.randn(shape).bfloat16().requires_grad_(grad) for shape in shapes]


def _alone(table):
    return {"score_mod": strobe.relative_bias(table), "causal": True}


def _with_mask(table):
    odd = strobe.mask_mod(lambda b, h, q, k: (q * k) % 5 != 3)
    return {"score_mod": lambda s, b, h, q, k: s * 0.5 + table[h, (q - k).clamp(0, 8)], "mask": odd & strobe.causal()}


def _listed(table):
    """A mask over so many pairs that lists of its blocks are made."""
    return {"mask": strobe.mask_mod(lambda b, h, q, k: ((q // 128) * (k // 128)) % 5 != 3)}


def _dropped(table):
    return {"dropout_p": 0.1, "dropout_seed": 3, "mask": strobe.mask_mod(lambda b, h, q, k: (q * k) % 7 != 3)}


def _plain(table):
    return {"causal": True}


CASES = {
    "plain": (A100, 200, _plain),
    "plain on Hopper": (H200, 200, _plain),
    "portable": (A100, 200, _alone),
    "portable, mask": (A100, 200, _with_mask),
    "portable, dropout": (A100, 200, _dropped),
    "hopper": (H200, 200, _alone),
    "hopper, mask": (H200, 200, _with_mask),
    "hopper, lists": (H200, 1536, _listed),
}


@pytest.mark.parametrize("name", CASES)
def test_a_later_call_compiles_nothing(name):
    target, rows, make = CASES[name]
    table = torch.rand(4, 9).requires_grad_()
    options, tensors = make(table), _drawn(rows, (4, 2, 2), grad=True)
    named = {key: value for key, value in options.items() if key != "dropout_seed"}
    functions = {key: value for key, value in options.items() if key in ("score_mod", "mask")}
    with posing(target):
        problem = strobe.explain(*tensors, **named).problem
        assert problem.needs_grad and (problem.mods is None) is (make is _plain)
        with recording(target) as before:
            strobe.warmup([problem], "cpu", **functions)
        with recording(target) as after:
            strobe.attention(*_drawn(rows, (4, 2, 2), grad=True), **options).sum().backward()
    assert _sources(after) and _sources(after) <= _sources(before)
    with posing(target), recording(target) as others:  # a number of a function's own compiles another kernel
        scaled = lambda s, b, h, q, k: s * 3.0
        strobe.attention(*_drawn(rows, (4, 2, 2), grad=True), **options | {"score_mod": scaled}).sum().backward()
    assert not _sources(others) <= _sources(before)


def test_packed_sequences():
    offsets = torch.tensor([0, 90, 200], dtype=torch.int32)
    slopes, options = torch.rand(4), {"cu_seqlens_q": offsets, "causal": True}
    score = strobe.alibi(slopes)
    q, k, v = (t[0] for t in _drawn(200, (4, 2, 2)))
    with posing(H200):
        problem = strobe.explain_varlen(q, k, v, **options, score_mod=score).problem
        with recording(H200) as before:
            strobe.warmup([problem], "cpu", score_mod=score)
        with recording(H200) as after:
            strobe.attention_varlen(q, k, v, **options, score_mod=score)
    assert _sources(after) and _sources(after) <= _sources(before)


@pytest.mark.parametrize("paged", (False, True))
def test_decode_and_paged(paged):
    cache = strobe.DenseCache(*_drawn(64, (2, 2)), seqlens=torch.tensor([40], dtype=torch.int32))
    score, mask = strobe.alibi(torch.rand(4)), strobe.mask_mod(lambda b, h, q, k: (q + k) % 3 > 0)
    options = {"score_mod": score, "mask": mask, "kernel": "portable"}
    q = _drawn(1, (4,))[0]
    if paged:
        q, options = q[0], options | {"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32)}
    explain, run = (strobe.explain_paged, strobe.attention_paged) if paged else (
        strobe.explain_decode, strobe.attention_decode)  # fmt: skip
    with posing(A100):
        problem = explain(q, cache, **options).problem
        with recording(A100) as before:
            strobe.warmup([problem], "cpu", score_mod=score, mask=mask)
        with recording(A100) as after:
            run(q, cache, **options)
    assert _sources(after) and _sources(after) <= _sources(before)


def test_functions_that_are_missing_or_others():
    tensors, score = _drawn(20, (4, 2, 2)), strobe.alibi(torch.rand(4))
    seen = strobe.mask_mod(lambda b, h, q, k: (q * k) % 5 != 3)
    with_score = strobe.explain(*tensors, score_mod=score).problem
    with_mask = strobe.explain(*tensors, mask=seen).problem
    strobe.warmup([with_score, with_mask], "cpu", score_mod=score, mask=seen)
    with pytest.raises(strobe.InvalidProblem, match="pass score_mod= to warmup"):
        strobe.warmup([with_score], "cpu")
    with pytest.raises(strobe.InvalidProblem, match="pass mask= to warmup"):
        strobe.warmup([with_mask], "cpu", score_mod=score)
    with pytest.raises(strobe.InvalidProblem, match="pass those that explain was given"):
        strobe.warmup([with_score], "cpu", score_mod=lambda s, b, h, q, k: s * 2)


def test_a_mask_that_runs_as_a_built_in_one_needs_no_function():
    tensors = _drawn(20, (4, 2, 2))
    near = strobe.mask_mod(lambda b, h, q, k: (q - k).abs() < 5)
    problem = strobe.explain(*tensors, mask=near).problem
    assert problem.mods is None
    strobe.warmup([problem], "cpu")
    strobe.warmup([problem], "cpu", mask=near)
