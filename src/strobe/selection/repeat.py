"""Repeat a launch at addresses that were used before. A kernel's own host code takes several times as long.

    forward     Plan.again, keyed by the addresses of q, k, v, out and lse
    backward    Plan.again, keyed by the addresses of saved tensors, dout, gradients and workspace; the tensors must
                match a guard in Choice.met

Autograd runs a backward on its own thread, which wakes up on another core. Host code costs more than twice as much
there as in a loop: 78 us instead of 27 us on an H200's host. The whole step takes 165 us. So a plain call's backward
tries `gradients_again` first, which makes few function calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..env import ENV
from ..kernels.protocol import Plan, addresses, gradient_place
from ..kernels.runtime.workspace import empty_here, pieces
from ..problem import torch_private
from ..problem.call import Call
from ..problem.torch_state import unseen_mode_active
from .choices import alike_to
from .select import Choice

MOST_MET = 4  # guards per Choice: gradients have one or two kinds of strides and dtypes


def repeats(plan: Plan, q: Tensor) -> bool:
    """Whether a plan has launches to repeat, on the current device and without STROBE_SYNC."""
    return bool(plan.again) and q.get_device() == torch_private.cuda_current_device() and not ENV.sync


def launch_again(plan: Plan, call: Call, out: Tensor, lse: Tensor) -> bool:
    """Repeat the launch at these addresses. Returns False if the plan has none or it cannot be repeated."""
    again = plan.again.get(addresses(call, out, lse)) if plan.again and repeats(plan, call.q) else None
    return again is not None and again()


def forward_again(
    choice: Choice[Any], q: Tensor, k: Tensor, v: Tensor, optionals: Sequence[Tensor | None] = ()
) -> tuple[Tensor, Tensor] | None:
    """out and lse of a repeated launch; None if it cannot be repeated. optionals: Call.optionals of a call that is not
    plain.
    """
    plan: Any = choice.forward
    # `repeats`, inlined to save time
    if not plan.again or ENV.sync or q.get_device() != torch_private.cuda_current_device():
        return None
    out, lse = [empty_here(*kind) for kind in choice.problem.outputs]
    place = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()  # as `protocol.addresses`
    if optionals:
        place = *place, *[0 if tensor is None else tensor.data_ptr() for tensor in optionals]
    again = plan.again.get(place)
    return (out, lse) if again is not None and again() else None


def gradients_again(choice: Choice[Any], saved: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk and dv of a plain call by a repeated launch; None if it cannot be repeated. saved: q, k, v, out, lse.

    A backward with create_graph=True is not repeated. Guards do not detect it, so grad mode is checked here.
    """
    if torch.is_grad_enabled() or unseen_mode_active(traced=False):
        return None
    q, k, v, out, lse = saved
    tensors = (q, k, v, dout, out, lse)
    plan: Any = choice.backward
    known = any([alike(*tensors) for alike in choice.met])
    if not known or not plan.again or ENV.sync or q.get_device() != torch_private.cuda_current_device():
        return None
    dq, dk, dv = [empty_here(*kind) for kind in choice.problem.gradients]
    held = pieces(plan, choice.problem.lse_bytes)  # delta follows the workspace in the same allocation
    again = plan.again.get(
        gradient_place((*tensors, None, dq, dk, dv, *held), held[0].data_ptr() + plan.room, dout, out)
    )
    return (dq, dk, dv) if again is not None and again() else None


def meet(choice: Choice[Any], tensors: Sequence[Tensor]) -> None:
    """Insert a guard for the tensors (q, k, v, dout, out, lse) of a plain call's backward into its Choice.

    If a hook made lse non-contiguous, the launch used a copy of lse, so no guard is inserted.
    """
    if tensors[-1].is_contiguous() and not any([alike(*tensors) for alike in choice.met]):
        alike = alike_to(tensors)
        choice.met[:] = [alike, *choice.met[: MOST_MET - 1]] if alike else []
