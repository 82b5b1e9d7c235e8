"""Runs problems once on zeros, so that their kernels are compiled: `strobe.warmup`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from ..mods.mask import checked_mask
from ..problem.call import Call
from ..problem.decode import DecodeProblem
from ..problem.mask import Mask
from ..problem.mods import Dropout, ModTexts
from ..problem.paged import PagedProblem
from ..problem.problem import Problem
from . import attention, decode, mods, mods_paged, paged


class _Cached(NamedTuple):
    """The functions that run a call over a cache."""

    run: Callable[[Any], Any]  # without functions of scores and masks
    bind: Callable[..., Any]  # adds functions to a call
    operator: Callable[..., Any]  # runs a call with functions


def run_example(problem: Any, device: torch.device, score: object = None, mask: Mask | None = None) -> None:
    """Run a problem once on zeros. score, mask: the functions of a problem that has some.

    Raises InvalidProblem if they are missing or not the problem's, TypeError for a value that is not a problem.
    """
    if isinstance(problem, PagedProblem):
        how = _Cached(paged.run, mods_paged.bind, mods_paged.PAGED)
        _run_cached(problem, device, score, checked_mask(mask), how)
    elif isinstance(problem, DecodeProblem):
        how = _Cached(decode.run, mods.bind_decode, mods.DECODE)
        _run_cached(problem, device, score, checked_mask(mask), how)
    elif isinstance(problem, Problem):
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            _run_attention(problem, device, score, mask)
    else:
        raise wrong_type("problems", problem, "strobe.Problem values", "take them from strobe.explain(...).problem")


def _run_attention(problem: Problem, device: torch.device, score: object, mask: Mask | None) -> None:
    texts = problem.mods
    if texts is None:
        call = problem.example(device)
        _differentiate(problem, call, attention.run(call))
        return
    score, mask = _functions(texts, score, mask)
    example = replace(problem, mods=None).example(device)
    dropout = Dropout(0.5, 0) if texts.dropout else None
    call = mods.simplified(mods.bind(example, score, mask, dropout, texts.max_scores))
    _check_same(texts, Problem.from_call(call).mods)
    _differentiate(problem, call, mods.run(call)[:2])


def _differentiate(problem: Problem, call: Call, results: Sequence[Tensor]) -> None:
    """Run the backward without a gradient of lse and, if the call may be a partial one, with it."""
    if not problem.needs_grad:
        return
    for count in (1, 2) if problem.out_dtype.itemsize > 2 else (1,):
        zeros = [torch.zeros_like(result) for result in results[:count]]
        torch.autograd.grad(results[:count], call[:3], zeros, retain_graph=True)


def _run_cached(
    problem: DecodeProblem | PagedProblem, device: torch.device, score: object, mask: Mask | None, how: _Cached
) -> None:
    if problem.mods is None:
        how.run(problem.example(device))
        return
    call = replace(problem, mods=None).example(device)
    call = how.bind(call, *_functions(problem.mods, score, mask))
    _check_same(problem.mods, None if call.mods is None else call.mods.texts)
    how.operator(*mods.arguments(call))


def _functions(texts: ModTexts, score: object, mask: Mask | None) -> tuple[object, Mask | None]:
    """The functions that a problem has. A mask that runs as a built-in one is no function of the problem."""
    for name, text, given in (("score_mod", texts.score, score), ("mask", texts.mask, mask)):
        if text and given is None:
            raise InvalidProblem(name, None, "the function of the problem's call", f"pass {name}= to warmup")
    return score if texts.score else None, mask if texts.mask else None


def _check_same(texts: ModTexts, found: ModTexts | None) -> None:
    if found != texts:
        got, wanted = "none" if found is None else str(found), f"the functions of the problem, {texts}"
        raise InvalidProblem("score_mod or mask", got, wanted, "pass those that explain was given")
