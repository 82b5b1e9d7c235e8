"""How far each contender's result is from attention in float64."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .. import reference
from ..call import Call
from .cases import Case, Inputs


def errors(case: Case, x: Inputs, outs: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """{contender: [largest error, root of the mean square]} over the root of the mean square of the exact result: query head 0 of batch entry 0.

    Empty for a backward, for packed sequences and on a CPU, whose tests hold each result to the contract anyway.
    """
    if case.backward or case.packed or x.q.device.type != "cuda":
        return {}
    one = Call(x.q[:1, :, :1], x.k[:1, :, :1], x.v[:1, :, :1], softcap=case.softcap)
    exact = reference.forward(one.with_mask(case.mask(None if x.ids is None else x.ids[:1]))).out
    size = exact.square().mean().sqrt()
    apart = {name: (out.detach()[:1, :, :1].double() - exact) / size for name, out in outs.items()}
    return {name: [float(f"{d.abs().max():.3g}"), float(f"{d.square().mean().sqrt():.3g}")] for name, d in apart.items()}
