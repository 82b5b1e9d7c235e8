"""Two partial results over disjoint keys make one: the identity that split keys, rings and prefixes rest on.

With lse the log of each side's denominator, out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse), where
lse = log(exp(lse_a) + exp(lse_b)). "Online normalizer calculation for softmax" (arXiv 1805.02867), section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .errors import InvalidProblem, wrong_type


class Partial(NamedTuple):
    """out [B, S_q, H_q, D_v] float32 (float64 for float64), lse [B, H_q, S_q]; packed: [T, H_q, D_v] and [H_q, T].

    A row that saw no key has out 0 and lse -inf.
    """

    out: Tensor
    lse: Tensor


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both; differentiable. merge(empty, x) is x to the bit.

    >>> one = Partial(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> merge(one, Partial(3 * one.out, one.lse)).out.flatten().tolist()
    [2.0, 2.0]

    Raises TypeError for anything but two Partials and InvalidProblem where their shapes differ.
    """
    for name, part in (("a", a), ("b", b)):
        if not isinstance(part, tuple) or len(part) != 2 or not all(isinstance(t, Tensor) for t in part):
            raise wrong_type(name, part, "a strobe.Partial", "use what strobe.partial_attention returns")
    if a.out.shape != b.out.shape or a.lse.shape != b.lse.shape:
        got = f"out {list(b.out.shape)} and lse {list(b.lse.shape)}"
        raise InvalidProblem("b", got, f"a's {list(a.out.shape)} and {list(a.lse.shape)}", "merge results of the same queries")
    share = _sigmoid_of_difference(b.lse, a.lse)
    weight = _beside_out(share, a.out)
    # where one side is empty the other is taken whole: 0 * x would keep its bits but turn an infinity into NaN
    out = torch.where(weight == 0, a.out, torch.where(weight == 1, b.out, a.out - weight * (a.out - b.out)))
    return Partial(out, _log_sum(a.lse, b.lse))


def with_sinks(partial: Partial, sinks: Tensor) -> Partial:
    """One more logit a head [H_q] in the denominator, applied once, after all merging; differentiable.

    >>> whole = with_sinks(Partial(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)), torch.zeros(1))
    >>> whole.out.flatten().tolist(), round(whole.lse.item(), 4)
    ([0.5, 0.5], 0.6931)
    """
    heads = partial.out.shape[-2]
    if not isinstance(sinks, Tensor):
        raise wrong_type("sinks", sinks, "a tensor [H_q]", "wrap it in torch.tensor(...)")
    if list(sinks.shape) != [heads]:
        raise InvalidProblem("sinks", f"shape {list(sinks.shape)}", f"[{heads}], one logit a query head", "expand or slice it")
    logit = sinks.to(partial.lse.dtype)[:, None].expand_as(partial.lse)
    keep = _beside_out(_sigmoid_of_difference(partial.lse, logit), partial.out)
    return Partial(torch.where(keep == 0, torch.zeros_like(partial.out), partial.out * keep), _log_sum(partial.lse, logit))


def _sigmoid_of_difference(x: Tensor, y: Tensor) -> Tensor:
    """exp(x) / (exp(x) + exp(y)), 0 where x is -inf; its gradient is finite there too."""
    empty = x == -torch.inf
    alone = ~empty & (y == -torch.inf)
    both = torch.where(empty | alone, torch.zeros_like(x), x - y)
    return torch.where(empty, torch.zeros_like(x), torch.where(alone, torch.ones_like(x), torch.sigmoid(both)))


def _log_sum(x: Tensor, y: Tensor) -> Tensor:
    """log(exp(x) + exp(y)); the other side, to the bit, where one is -inf."""
    edge = (x == -torch.inf) | (y == -torch.inf)
    inside = torch.logaddexp(torch.where(edge, torch.zeros_like(x), x), torch.where(edge, torch.zeros_like(y), y))
    return torch.where(x == -torch.inf, y, torch.where(y == -torch.inf, x, inside))


def _beside_out(per_row: Tensor, out: Tensor) -> Tensor:
    """[B, H, S] or [H, T] laid beside out's [B, S, H, D] or [T, H, D]."""
    return per_row.transpose(-1, -2).unsqueeze(-1).to(out.dtype)
