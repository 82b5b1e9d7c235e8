"""Replay a launch at addresses that were used before. A kernel's own host code takes several times as long.

Autograd runs a backward on its own thread, which wakes up on another core. Host code costs more than twice as much
there as in a loop: 78 us instead of 27 us on an H200's host. The whole step takes 165 us. So the backward of a plain
call tries `replay_backward` first, which makes few function calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..env import ENV
from ..kernels.protocol import Plan
from ..kernels.runtime.launch_cache import CACHE, DIRECT, Replay, backward_addresses_of, forward_addresses
from ..kernels.runtime.workspace import empty_here, pieces
from ..problem import torch_private
from ..problem.call import Call
from ..problem.torch_state import unseen_mode_active
from .select import Choice


def launches_here(plan: Plan, q: Tensor) -> dict[tuple, Replay] | None:
    """The plan's launches by address; None if it has none, on another device than the current one, or under
    STROBE_SYNC.
    """
    launches = CACHE.launches.get(plan.number)
    return launches if launches and q.get_device() == torch_private.cuda_current_device() and not ENV.sync else None


def replay(plan: Plan, call: Call, out: Tensor, lse: Tensor) -> bool:
    """Replay the launch at these addresses. Returns False if there is none or it cannot be replayed."""
    launches = launches_here(plan, call.q)
    launch = launches.get(forward_addresses(call, out, lse)) if launches else None
    return launch is not None and launch()


def replay_forward(
    choice: Choice[Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beside: tuple = (),
) -> tuple[Tensor, Tensor] | None:
    """out and lse of a replayed launch; None if there is none. beside: what `forward_addresses` of a call that is not
    plain has behind those of q, k, v, out and lse.
    """
    launches = CACHE.launches.get(choice.forward.number)
    if not launches or ENV.sync or q.get_device() != torch_private.cuda_current_device():  # `launches_here`, inlined
        return None
    out, lse = [empty_here(*kind) for kind in choice.problem.outputs]
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()  # as `forward_addresses`
    launch = launches.get((*addresses, *beside))
    return (out, lse) if launch is not None and launch() else None


def replay_backward(saved: Sequence[Tensor], dout: Tensor, scalars: tuple) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk and dv of a plain call by a replayed launch; None if there is none. saved: q, k, v, out, lse. scalars:
    Call[SCALARS] of the call with needs_grad.
    """
    if unseen_mode_active(traced=False):
        return None
    q, k, v, out, lse = saved
    choice = CACHE.lookup(DIRECT, (q, k, v, dout, out, lse), scalars)
    if choice is None or not lse.is_contiguous():  # a hook may change lse: the launch then reads a copy of it
        return None
    launches = CACHE.launches.get(choice.backward.number)
    if not launches or ENV.sync or q.get_device() != torch_private.cuda_current_device():
        return None
    dq, dk, dv = [empty_here(*kind) for kind in choice.problem.gradients]
    held = pieces(choice.backward, choice.problem.lse_bytes)  # delta follows the workspace in the same allocation
    tensors = (q, k, v, dout, out, lse, None, dq, dk, dv, *held)
    launch = launches.get(backward_addresses_of(tensors, held[0].data_ptr() + choice.backward.room, dout, out))
    return (dq, dk, dv) if launch is not None and launch() else None
