"""How far each contender's result is from attention in float64, on the first key head of the first batch entry."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import reference
from ..call import Call
from .cases import Case, Inputs

_MOST_SCORES = 2**30  # of the heads that are looked at: float64 needs a few matrices of them


def errors(case: Case, x: Inputs, outs: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """{contender: [largest error, root of the mean square]} of query head 0, over the root of the mean square of the exact result.

    Empty for a backward, for packed sequences and on a CPU, whose tests hold each result to the contract anyway.
    """
    if case.backward or case.packed or x.q.device.type != "cuda":
        return {}
    exact = reference.forward(_first(case, x, 1)).out
    size = exact.square().mean().sqrt()
    apart = {name: (out.detach()[:1, :, :1].double() - exact) / size for name, out in outs.items()}
    return {name: [float(f"{d.abs().max():.3g}"), float(f"{d.square().mean().sqrt():.3g}")] for name, d in apart.items()}


def distances(case: Case, x: Inputs, results: Mapping[str, tuple[Tensor, ...]]) -> dict[str, float]:
    """{contender: distance of its output or gradients from float64, over the norm of the exact one}, the worst of its tensors.

    Gradients are sums of P (dP - delta), which cancel where one key takes all weight. A rounded output shifts delta by its own rounding, so each
    kernel errs by a rounding of P dP: the norm is that of the gradients without delta, where it is larger. Empty for packed sequences, and where one
    head has too many scores.
    """
    group = case.heads_q // case.groups
    if case.packed or group * case.seqlen**2 > _MOST_SCORES:
        return {}
    one = _first(case, x, group)
    out = reference.forward(one).out
    exact, norms, heads = [out], [out.norm()], [group]
    if case.backward:
        dout = x.dout[:1, :, :group]
        delta = (dout.double() * out).sum(-1).transpose(1, 2)
        exact, heads = list(reference.backward(one, dout)[:3]), [group, 1, 1]
        norms = [torch.maximum(a.norm(), b.norm()) for a, b in zip(exact, reference.backward(one, dout, delta)[:3])]
    return {
        name: max(float((mine.detach()[:1, :, :n].double() - right).norm() / norm) for mine, right, norm, n in zip(result, exact, norms, heads))
        for name, result in results.items()
    }


def _first(case: Case, x: Inputs, heads: int) -> Call:
    q, k, v = x.q.detach()[:1, :, :heads], x.k.detach()[:1, :, :1], x.v.detach()[:1, :, :1]
    return Call(q, k, v, softcap=case.softcap).with_mask(case.mask(None if x.ids is None else x.ids[:1]))
