"""Launches repeated where they were launched before: a kernel's own host code costs several times as much.

    forward     the addresses of q, k, v, out and lse                         -> Plan.again
    backward    those of what autograd kept, dout, gradients and scratch      -> Plan.again, of tensors like those that Choice.met knows

Autograd runs a backward on a thread of its own, which wakes up on another core: there this costs more than twice what it does in a loop (of a
step's 165 us 78 for 27, an H200's host), so that a plain call's backward comes here before anything else is looked at, and by as few functions
as can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..env import ENV
from ..kernels.protocol import Plan, addresses, gradient_place
from ..kernels.runtime.workspace import empty_here, pieces
from ..problem.call import Call
from ..problem.torch_state import unseen_mode_active
from .choices import alike_to
from .select import Choice

MOST_MET = 4  # kinds of tensors that a Choice knows: gradients come in one or two


def repeats(plan: Plan, q: Tensor) -> bool:
    """Whether launches of a plan may be repeated as they were, here and now."""
    return bool(plan.again) and q.get_device() == torch._C._cuda_getDevice() and not ENV.sync


def launch_again(plan: Plan, call: Call, out: Tensor, lse: Tensor) -> bool:
    """Launch as at these addresses before, where the plan's kernel kept the way."""
    again = plan.again.get(addresses(call, out, lse)) if plan.again and repeats(plan, call.q) else None
    return again is not None and again()


def forward_again(choice: Choice[Any], q: Tensor, k: Tensor, v: Tensor, optionals: Sequence[Tensor | None] = ()) -> tuple[Tensor, Tensor] | None:
    """out and lse by a launch that is repeated; None where that cannot be. optionals: those of a call that is not plain."""
    plan: Any = choice.forward
    if not plan.again or ENV.sync or q.get_device() != torch._C._cuda_getDevice():  # `repeats`, said here: see above
        return None
    out, lse = [empty_here(*kind) for kind in choice.problem.outputs]
    place = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()  # `addresses`
    if optionals:
        place = *place, *[0 if tensor is None else tensor.data_ptr() for tensor in optionals]
    again = plan.again.get(place)
    return (out, lse) if again is not None and again() else None


def gradients_again(choice: Choice[Any], saved: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk and dv of a plain call by a launch that is repeated; None where that cannot be, as where a graph of them is wanted, which torch's guards
    do not tell. saved: q, k, v, out, lse."""
    if torch.is_grad_enabled() or unseen_mode_active(traced=False):
        return None
    q, k, v, out, lse = saved
    tensors = (q, k, v, dout, out, lse)
    plan: Any = choice.backward
    known = any([alike(*tensors) for alike in choice.met])
    if not known or not plan.again or ENV.sync or q.get_device() != torch._C._cuda_getDevice():
        return None
    dq, dk, dv = [empty_here(*kind) for kind in choice.problem.gradients]
    held = pieces(plan, choice.problem.lse_bytes)  # delta stands behind the scratch, in one piece of memory
    again = plan.again.get(gradient_place((*tensors, None, dq, dk, dv, *held), held[0].data_ptr() + plan.room, dout, out))
    return (dq, dk, dv) if again is not None and again() else None


def meet(choice: Choice[Any], tensors: Sequence[Tensor]) -> None:
    """Know tensors like these again: what a plain call's gradients were made of, all of which go by its Choice. Of an lse, the last, that a hook has
    laid out otherwise, they were made of a copy."""
    if tensors[-1].is_contiguous() and not any([alike(*tensors) for alike in choice.met]):
        alike = alike_to(tensors)
        choice.met[:] = [alike, *choice.met[: MOST_MET - 1]] if alike else []
