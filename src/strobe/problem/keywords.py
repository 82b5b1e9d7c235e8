"""Checks of the keywords that the public attention functions share."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from .call import FARTHEST
from .mask import NO_BOUND, as_int
from .mask import window as window_mask
from .mods import Dropout

Window = tuple[int | None, int | None]
Options = tuple[float | None, float, bool, bool, str]  # scale, softcap, deterministic, batch_invariant, kernel


def band(causal: bool, window: Window | None) -> tuple[int, int]:
    """The bounds (left, right) of keys around a row's diagonal. NO_BOUND is no bound."""
    if not isinstance(causal, bool):
        raise wrong_type("causal", causal, "a bool", "pass True or False")
    if window is None:
        return NO_BOUND, 0 if causal else NO_BOUND
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise wrong_type("window", window, "a pair (left, right) or None", "use None inside the pair for no bound")
    mask = window_mask(*window)
    left, right = (NO_BOUND if bound is None else min(bound, FARTHEST) for bound in (mask.left, mask.right))
    return left, 0 if causal else right


def as_length(name: str, bound: int | None) -> int:
    if bound is None:
        return NO_BOUND
    length = as_int(bound)
    if length is None:
        raise wrong_type(name, bound, "an int or None", "give a Python int, so that nothing waits for the device")
    if length < 0:
        raise InvalidProblem(name, bound, "a number >= 0 or None", "leave it out where there is no bound")
    return min(length, FARTHEST)


def options_of(
    scale: float | None, softcap: float | None, deterministic: bool | None, batch_invariant: bool, kernel: str | None
) -> Options:
    if softcap is not None and not _number("softcap", softcap) > 0:
        raise InvalidProblem("softcap", softcap, "a number > 0 or None", "leave it out for none")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    elif not isinstance(deterministic, bool):
        raise wrong_type("deterministic", deterministic, "a bool or None", "pass True or False")
    if not isinstance(batch_invariant, bool):
        raise wrong_type("batch_invariant", batch_invariant, "a bool", "pass True or False")
    if kernel is not None and not isinstance(kernel, str):
        raise wrong_type(
            "kernel", kernel, "a str or None", 'name a family ("portable") or a kernel ("portable.forward")'
        )
    scale = None if scale is None else _number("scale", scale)
    return scale, 0.0 if softcap is None else _number("softcap", softcap), deterministic, batch_invariant, kernel or ""


def _number(name: str, number: float) -> float:
    if isinstance(number, bool) or not isinstance(number, (float, int, Real, torch.SymFloat, torch.SymInt)):
        raise wrong_type(name, number, "a number or None", "give a Python float")
    try:
        return float(number)
    except OverflowError:
        raise InvalidProblem(name, "an int beyond every float", "a finite number", "give a Python float") from None


def dropout_of(p: float, seed: int | Tensor | None, q: Tensor, batch_invariant: bool = False) -> Dropout | None:
    """The Dropout of these keywords; None for a probability of 0."""
    p = _number("dropout_p", p)
    # float32 rounds more to 1, for which kernels drop nothing. Under torch.compile a global float would compile twice.
    if not 0 <= p < 1 - 2.0**-25:
        raise InvalidProblem("dropout_p", p, "a number from 0 to 1, below 1 in float32", "give the share to drop")
    if p == 0:
        return None
    if batch_invariant:
        raise InvalidProblem("dropout_p", p, "0 with batch_invariant=True", "drop weights in training alone")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            got = f"{seed.dtype} {list(seed.shape)}"
            raise InvalidProblem("dropout_seed", got, "int64 [1]", "make it with torch.tensor([seed])")
        if isinstance(q, Tensor) and seed.device != q.device:
            raise InvalidProblem("dropout_seed", f"device {seed.device}", f"q's device {q.device}", "move it there")
    elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise wrong_type("dropout_seed", seed, "an int, int64 [1] or None", "give a Python int")
    elif seed is not None and not -(2**63) <= seed < 2**63:
        raise InvalidProblem("dropout_seed", seed, "an int of 64 bits", "reduce it modulo 2**63")
    return Dropout(p, seed)


def output_tensor(out: Tensor) -> Tensor:
    if not isinstance(out, Tensor):
        raise wrong_type("out", out, "a tensor or None", "allocate it like q")
    return out
