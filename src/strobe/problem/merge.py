"""Merging attention over disjoint sets of keys: for split KV, ring attention and common prefixes.

lse is the log of a softmax denominator. With lse = log(exp(lse_a) + exp(lse_b)), the merged output is
out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse).
"Online normalizer calculation for softmax" (arXiv 1805.02867), section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from .call import check_sinks


class Partial(NamedTuple):
    """Attention over a part of the keys: out [B, S_q, H_q, D_v] and lse [B, H_q, S_q]; packed: [T, H_q, D_v] and [H_q,
    T].

    Both are float32, or float64 for float64 inputs. A row that sees no key has out 0 and lse -inf.
    """

    out: Tensor
    lse: Tensor


def merge(a: Partial, b: Partial) -> Partial:
    """Merge two partial results into attention over the keys of both. Differentiable.

    >>> one = Partial(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> merge(one, Partial(3 * one.out, one.lse)).out.flatten().tolist()
    [2.0, 2.0]

    Merging x with a Partial that saw no key returns x bit for bit. Raises TypeError if an argument is not a Partial,
    and InvalidProblem if shapes, dtypes or devices differ.
    """
    _check("a", a)
    _check("b", b)
    for name, one, other in (("out", a.out, b.out), ("lse", a.lse, b.lse)):
        if one.shape != other.shape:
            raise InvalidProblem(
                "b",
                f"{name} of shape {list(other.shape)}",
                f"a's {list(one.shape)}",
                "merge results of the same queries",
            )
        if one.dtype != other.dtype:
            raise InvalidProblem("b", f"{name} in {other.dtype}", f"a's {one.dtype}", "merge results of one dtype")
        if one.device != other.device:
            raise InvalidProblem("b", f"{name} on {other.device}", f"a's {one.device}", "move both to one device")
    weight, keep = (_beside_out(_sigmoid_of_difference(x, y), a.out) for x, y in ((b.lse, a.lse), (a.lse, b.lse)))
    # interpolate from the side with the larger weight: from the other side, a large value of small weight would leave
    # its rounding error
    apart = a.out - b.out
    close = apart.isfinite()
    apart = torch.where(close, apart, torch.zeros_like(apart))
    combined = torch.where(weight <= 0.5, a.out - weight * apart, b.out + keep * apart)
    combined = torch.where(close, combined, a.out * keep + b.out * weight)  # infinities, and differences that overflow
    # if one side is empty, copy the other: adding 0 * x keeps the bits of finite values, but an infinity becomes NaN
    out = torch.where(weight == 0, a.out, torch.where(keep == 0, b.out, combined))
    return Partial(out, _log_sum(a.lse, b.lse))


def with_sinks(partial: Partial, sinks: Tensor) -> Partial:
    """Add one logit per head, sinks [H_q], to the softmax denominator. Apply it once, after the last merge.
    Differentiable.

    >>> whole = with_sinks(Partial(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)), torch.zeros(1))
    >>> whole.out.flatten().tolist(), round(whole.lse.item(), 4)
    ([0.5, 0.5], 0.6931)
    """
    _check("partial", partial)
    if not isinstance(sinks, Tensor):
        raise wrong_type("sinks", sinks, "a tensor [H_q]", "wrap it in torch.tensor(...)")
    check_sinks(sinks, partial.out.shape[-2])
    if sinks.device != partial.out.device:
        raise InvalidProblem(
            "sinks", f"device {sinks.device}", f"the partial's {partial.out.device}", "move both to one device"
        )
    logit = sinks.to(partial.lse.dtype)[:, None].expand_as(partial.lse)
    keep = _beside_out(_sigmoid_of_difference(partial.lse, logit), partial.out)
    return Partial(
        torch.where(keep == 0, torch.zeros_like(partial.out), partial.out * keep), _log_sum(partial.lse, logit)
    )


def _check(name: str, part: object) -> None:
    if not isinstance(part, Partial) or not isinstance(part.out, Tensor) or not isinstance(part.lse, Tensor):
        raise wrong_type(name, part, "a strobe.Partial of tensors", "use what strobe.partial_attention returns")
    heads_last = (*part.lse.shape[:-2], *part.lse.shape[:-3:-1])
    if part.out.dim() not in (3, 4) or tuple(part.out.shape[:-1]) != heads_last:
        got = f"out {list(part.out.shape)} and lse {list(part.lse.shape)}"
        raise InvalidProblem(
            name,
            got,
            "out [B, S, H, D] and lse [B, H, S], or [T, H, D] and [H, T]",
            "use what strobe.partial_attention returns",
        )
    for field, tensor in zip(part._fields, part):
        if not tensor.is_floating_point():
            raise InvalidProblem(
                name, f"{field} in {tensor.dtype}", "floating dtypes", "use what strobe.partial_attention returns"
            )


def _sigmoid_of_difference(x: Tensor, y: Tensor) -> Tensor:
    """exp(x) / (exp(x) + exp(y)); 0 where x is -inf, with a finite gradient."""
    empty = x == -torch.inf
    alone = ~empty & (y == -torch.inf)
    both = torch.where(empty | alone, torch.zeros_like(x), x - y)
    return torch.where(empty, torch.zeros_like(x), torch.where(alone, torch.ones_like(x), torch.sigmoid(both)))


def _log_sum(x: Tensor, y: Tensor) -> Tensor:
    """log(exp(x) + exp(y)); where one side is -inf, the other side bit for bit."""
    edge = (x == -torch.inf) | (y == -torch.inf)
    inside = torch.logaddexp(torch.where(edge, torch.zeros_like(x), x), torch.where(edge, torch.zeros_like(y), y))
    return torch.where(x == -torch.inf, y, torch.where(y == -torch.inf, x, inside))


def _beside_out(per_row: Tensor, out: Tensor) -> Tensor:
    """Transpose [B, H, S] or [H, T] so that it broadcasts with out, [B, S, H, D] or [T, H, D]."""
    return per_row.transpose(-1, -2).unsqueeze(-1).to(out.dtype)
