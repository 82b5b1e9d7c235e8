"""Errors of each contender's result against attention in float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import reference
from ..problem.call import Call
from .cases import Case, Inputs

_MOST_SCORES = 2**30  # per key head: the float64 computation needs several matrices of this size


def errors(case: Case, x: Inputs, outs: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """{contender: [largest error, RMS error]} of the output in batch entry 0 and query head 0, divided by the RMS of
    the exact output.

    Empty for a backward, for packed sequences, and on a CPU, where tests already compare each result with the oracle.
    """
    if case.backward or case.packed or x.q.device.type != "cuda":
        return {}
    exact = reference.forward(_part(case, x, 0, slice(1), slice(1))).out
    size = exact.square().mean().sqrt()
    apart = {name: (out.detach()[:1, :, :1].double() - exact) / size for name, out in outs.items()}
    return {
        name: [float(f"{d.abs().max():.3g}"), float(f"{d.square().mean().sqrt():.3g}")] for name, d in apart.items()
    }


def distances(case: Case, x: Inputs, results: Mapping[str, tuple[Tensor, ...]]) -> dict[str, float]:
    """{contender: norm of the error of its output or gradients, divided by the exact norm}; the worst over tensors,
    batch entries and heads.

    Gradients are sums of P (dP - delta), which cancel if one key has all the weight. The rounding of the output shifts
    delta, so every kernel has an error of about one rounding of P dP. So the exact norm is replaced by the norm of the
    gradients without delta, if that is larger. Empty for packed sequences, and if a head has more than _MOST_SCORES
    scores.
    """
    group = case.heads_q // case.groups
    if case.packed or group * case.seqlen**2 > _MOST_SCORES:
        return {}
    worst = dict.fromkeys(results, 0.0)
    for entry in range(case.batch):
        for head in range(case.groups):
            queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
            exact, norms = _exact(case, x, entry, queries, keys)
            for name, result in results.items():
                mine = (
                    t.detach()[entry : entry + 1, :, part].double() for t, part in zip(result, (queries, keys, keys))
                )
                found = [(one - right).norm() / norm for one, right, norm in zip(mine, exact, norms)]
                worst[name] = max(worst[name], float(torch.stack(found).nan_to_num(torch.inf).max()))
    return worst


def _exact(case: Case, x: Inputs, entry: int, queries: slice, keys: slice) -> tuple[list[Tensor], list[Tensor]]:
    """The exact output or gradients of one key head, and the norms to divide errors by."""
    one = _part(case, x, entry, queries, keys)
    out = reference.forward(one).out
    if not case.backward:
        return [out], [out.norm()]
    dout = x.dout[entry : entry + 1, :, queries]
    delta = (dout.double() * out).sum(-1).transpose(1, 2)
    exact = list(reference.backward(one, dout)[:3])
    return exact, [torch.maximum(a.norm(), b.norm()) for a, b in zip(exact, reference.backward(one, dout, delta)[:3])]


def _part(case: Case, x: Inputs, entry: int, queries: slice, keys: slice) -> Call:
    batch = slice(entry, entry + 1)
    q, k, v = x.q.detach()[batch, :, queries], x.k.detach()[batch, :, keys], x.v.detach()[batch, :, keys]
    return Call(q, k, v, softcap=case.softcap).with_mask(case.mask(None if x.ids is None else x.ids[batch]))
