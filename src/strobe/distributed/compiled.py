"""The ops of context-parallel attention in compiled functions, without graph breaks.

An op takes a plan by its number and bounds as integers: graphs hold no other objects. Exchanges run inside the op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidProblem
from ..ops import attention as ops
from ..problem.call import Call, accumulator
from ..problem.mask import NO_BOUND, Mask
from ..problem.torch_state import distinct, in_autocasts_dtype
from .attention import agree, own_heads
from .heads import Share, enter, enter_gradients, leave, leave_gradient
from .keys import Keys, Rows
from .plan import PLANS, Plan
from .runs import size

PLANS_MASK = -2  # as a bound: the plan's mask applies


def attend_compiled(call: Call, plan: Plan, mask: Mask | None) -> Tensor:
    """mask: of bounds alone, in place of the plan's, or None."""
    call = in_autocasts_dtype(call)
    left, right = PLANS_MASK, PLANS_MASK
    if mask is not None:
        left, right = (NO_BOUND if bound is None else bound for bound in (mask.left, mask.right))
    tensors = distinct((*call[:3], call.sinks))
    return FORWARD(*tensors, plan.number, left, right, *call[5:10])[0]


def _plan(number: int, left: int, right: int) -> Plan:
    plan = PLANS.get(number)
    if plan is None:
        raise InvalidProblem("context_parallel", f"plan {number}", "a plan that exists", "keep a reference to the plan")
    if left == PLANS_MASK:
        return plan
    return plan.for_mask(Mask(left=None if left == NO_BOUND else left, right=None if right == NO_BOUND else right))


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """out, lse, and what the backward reads if heads were exchanged: q, k, v and out of this rank's heads."""
    plan, options = _plan(*rest[:3]), rest[3:]
    agree(Call(q, k, v, -1, -1, *options, sinks=sinks), plan)
    with torch.no_grad():
        if plan.heads_size == 1:
            out, lse = _inner(plan, options, (q, k, v), sinks)
            return out, lse, *(q.new_empty(0) for _ in range(4))
        inner = enter(plan, q, k, v)
        out, lse = _inner(plan, options, inner, _own(plan, q, sinks))
        return leave(plan, out), lse, *(t.clone() for t in inner), out


def _inner(plan: Plan, options: tuple, qkv: tuple[Tensor, ...], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v = qkv
    if plan.keys_size > 1:
        return Rows(plan, options, q, Keys.of(k, v, plan), sinks).forward(v.shape[3])
    call = Call(q, k, v, -1, -1, *options, sinks=sinks).with_mask(plan.mask).with_grad
    return ops.FORWARD(*call.arguments)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, inner: list[Tensor],
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    plan, options = _plan(*rest[:3]), rest[3:]
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    with torch.no_grad():
        if plan.heads_size == 1:
            *found, dsinks = _inner_gradients(plan, options, (q, k, v, sinks), (dout, out, lse))
        else:
            given = leave_gradient(plan, dout), inner[3], lse
            part = *inner[:3], _own(plan, q, sinks)
            *found, dpart = _inner_gradients(plan, options, part, given)
            found = enter_gradients(plan, (q.shape, k.shape, v.shape), found)
            dsinks = None if sinks is None else torch.zeros_like(sinks)
            if dsinks is not None:
                dsinks[own_heads(plan, q.shape[2])] = dpart
    return *(t.contiguous() for t in found), q.new_empty(0) if dsinks is None else dsinks


def _inner_gradients(plan: Plan, options: tuple, tensors: tuple, given: tuple[Tensor, Tensor, Tensor]) -> tuple:
    q, k, v, sinks = tensors
    if plan.keys_size > 1:
        return Rows(plan, options, q, Keys.of(k, v, plan), sinks).backward(*given)
    call = Call(q, k, v, -1, -1, *options, sinks=sinks).with_mask(plan.mask).with_grad
    return ops.BACKWARD(*given, None, *call.arguments)


def _own(plan: Plan, q: Tensor, sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks[own_heads(plan, q.shape[2])]


# ---------------------------------------------------------------- registration


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    plan = _plan(*rest[:3])
    (batch, local, heads_q, head_dim), head_dim_v = q.shape, v.shape[3]
    rows = size(plan.own_rows)
    heads = heads_q // plan.heads_size
    out = q.new_empty((batch, local, heads_q, head_dim_v))
    lse = q.new_empty((batch, heads, rows), dtype=accumulator(q.dtype))
    if plan.heads_size == 1:
        return out, lse, *(q.new_empty(0) for _ in range(4))
    keys = Share.of(heads_q, k.shape[2], plan.heads_size).heads_kv
    shapes = (heads, head_dim), (keys, head_dim), (keys, head_dim_v), (heads, head_dim_v)
    return out, lse, *(q.new_empty((batch, rows, *shape)) for shape in shapes)


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    return *(t.new_empty(t.shape) for t in (q, k, v)), q.new_empty(0) if sinks is None else torch.empty_like(sinks)


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sinks"
_REST = (
    "int plan, int left, int right, float? scale, float softcap, bool deterministic, bool batch_invariant, str kernel"
)
LIBRARY = torch.library.Library("strobe", "FRAGMENT")
LIBRARY.define(f"context_forward({_TENSORS}, {_REST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
LIBRARY.define(
    f"context_backward(Tensor dout, {_TENSORS}, Tensor out, Tensor lse, Tensor[] inner, {_REST}) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
for _name, _body, _fake in (
    ("context_forward", _forward, _fake_forward),
    ("context_backward", _backward, _fake_backward),
):
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"strobe::{_name}", _fake, lib=LIBRARY)
FORWARD = torch.ops.strobe.context_forward.default
BACKWARD = torch.ops.strobe.context_backward.default


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, *rest = inputs
    ctx.rest, ctx.has_sinks = rest, sinks is not None
    ctx.save_for_backward(q, k, v, *([sinks] if sinks is not None else []), *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple:
    q, k, v, *others = ctx.saved_tensors
    sinks = others.pop(0) if ctx.has_sinks else None
    out, lse, *inner = others
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = BACKWARD(dout, q, k, v, sinks, out, lse, inner, *ctx.rest)
    return dq, dk, dv, dsinks if ctx.has_sinks else None, *(None for _ in ctx.rest)


torch.library.register_autograd("strobe::context_forward", _gradients, setup_context=_setup, lib=LIBRARY)
