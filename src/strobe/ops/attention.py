"""The forward and backward ops: torch.library and autograd around a Choice. Imports no kernel language.

`Library.define`, `Library.impl` and an autograd.Function were the fastest pattern measured. The op's body runs directly
if no dispatcher is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..env import ENV
from ..errors import InvalidProblem, UnsupportedProblem
from ..kernels.protocol import Backward, Forward, Plan
from ..kernels.runtime import launch_errors
from ..kernels.runtime.launch_cache import CACHE, DIRECT, KEYWORDS, OP, backward_addresses, optional_addresses
from ..kernels.runtime.workspace import allocate, cut, empty_here, pieces
from ..problem import torch_private
from ..problem.call import FIELD_KINDS, OPTIONAL_TENSORS, SCALARS, Call, check, check_spans
from ..problem.problem import Problem
from ..problem.target import Target
from ..problem.torch_private import FakeTensor
from ..problem.torch_state import (
    distinct,
    in_autocasts_dtype,
    is_distributed,
    tangents,
    unseen_mode_active,
    wants_beneath,
    written_by_copy,
)
from ..selection.replay import launches_here, replay_backward, replay_forward
from ..selection.select import Choice, select
from . import fake, flops, vmap
from .fake import (
    check_apart,
    check_no_vmap,
    check_out,
    check_results,
    copied,
    forward_mode,
    functional,
    schema,
    written,
)

# ---------------------------------------------------------------- a call's Choice


def decide(call: Call) -> Choice[Problem]:
    """The Choice for a call. On a cache miss, it validates the arguments and calls `select`."""
    if isinstance(call.q, FakeTensor):
        return _select(call)
    tensors, rest = call.tensors_and_rest
    choice = CACHE.lookup(OP, tensors, rest)
    if choice is None:
        choice = _select(call)
        CACHE.insert(OP, tensors, rest, choice)
    return choice


def _select(call: Call) -> Choice[Problem]:
    return select(Problem.from_call(call), Target.of(call.q.device))


def _decide_with_grad(call: Call) -> Choice[Problem]:
    return decide(call.with_grad if wants_gradients(call) else call)


# ---------------------------------------------------------------- running it


def _launch(
    plan: Plan, call: Any, tensors: Forward | Backward | None, workspace: dict[str, Tensor] | None = None
) -> None:
    q = call[0]  # the first field of Call, DecodeCall and AppendCall is a tensor on the call's device
    if workspace is None:
        workspace = allocate(plan.buffers, q.device)
    if q.is_cuda and q.get_device() != torch_private.cuda_current_device():
        with torch.cuda.device(q.device):
            launch_errors.run(plan, call, tensors, workspace)
    else:
        launch_errors.run(plan, call, tensors, workspace)
    if ENV.sync and q.is_cuda:
        torch.cuda.synchronize(q.device)


def received(flat: tuple) -> Call:
    """An op's arguments as a Call with contiguous optional tensors. Kernels do not read the strides of these
    tensors."""
    call = Call(*flat)
    if call.plain:
        return call
    check_spans(call)
    if any(t is not None and t.layout != torch.strided for t in call.optionals):
        check(call)  # raises; the cache key omits the layout, so a lookup could hit
    optionals = (t if t is None else t.contiguous() for t in call.optionals)
    return Call._make((*call[: OPTIONAL_TENSORS.start], *optionals, *call[OPTIONAL_TENSORS.stop :]))


def write(choice: Choice[Problem], call: Call, out: Tensor, lse: Tensor) -> None:
    """Run the forward into `out` and `lse`, below autograd. The last dimension of out is contiguous; its other strides
    are free.
    """
    if not choice.problem.vacuous:
        _launch(choice.forward, call, Forward(out, lse))
        return
    out.zero_()  # no query, key or head: handled here, so that kernels never get tensors of size 0
    lse.fill_(-torch.inf) if call.sinks is None else lse.copy_(_per_head(call.sinks, call).expand_as(lse))


def forward_directly(call: Call, choice: Choice[Problem] | None = None) -> tuple[Tensor, Tensor]:
    """The body of the forward op: replays a cached launch if there is one."""
    choice = choice or decide(call)
    beside = () if call.plain else optional_addresses(call.optionals)
    return replay_forward(choice, *call[:3], beside) or _allocate_and_write(call, choice)


def _allocate_and_write(call: Call, choice: Choice[Problem]) -> tuple[Tensor, Tensor]:
    out, lse = [
        call.q.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in choice.problem.outputs
    ]
    write(choice, call, out, lse)
    return out, lse


def _forward_out(out: Tensor, *flat: Any) -> Tensor:
    call = received(flat)
    choice = decide(call)
    check_out(out, choice.problem.out_shapes[0], choice.problem.out_dtype, call.q)
    check_apart(out, (*call[:3], call.sinks), ("q", "k", "v", "sinks"))
    shape, strides, dtype = choice.problem.outputs[1]
    lse = call.q.new_empty_strided(shape, strides, dtype=dtype)
    write(choice, call, out, lse)
    written(out)
    return lse


def _backward(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = received(flat)
    choice = decide(call)
    check_results((dout, out, lse, dlse), [like[::2] for like in choice.problem.outputs], call.q)
    given = given_gradients(call, choice, (dout, out, lse, dlse))
    return given.dq, given.dk, given.dv, sinks_gradient(call, lse, given.delta)


def given_gradients(
    call: Call, choice: Choice[Problem], tensors: tuple[Tensor, Tensor, Tensor, Tensor | None]
) -> Backward:
    """dq, dk, dv and delta for tensors = (dout, out, lse, dlse). Replays a cached launch if the plan has one for these
    addresses.
    """
    dout, out, lse, dlse = tensors
    # kernels do not read the strides of lse and dlse; a hook may have changed lse's
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    plan, workspace = choice.backward, None
    launches = None if plan is None else launches_here(plan, call.q)
    if plan is None or launches is None:
        dq, dk, dv = (call.q.new_empty(shape) for shape in call.gradient_shapes)
        given = Backward(dout, out, lse, dlse, dq, dk, dv, lse.new_empty(lse.shape))
    else:
        dq, dk, dv = [empty_here(*kind) for kind in choice.problem.gradients]
        held = pieces(plan, choice.problem.lse_bytes)  # delta follows the workspace in the same allocation
        delta = held[0][plan.room :].view(lse.dtype).view(lse.shape)
        given = Backward(dout, out, lse, dlse, dq, dk, dv, delta)
        launch = launches.get(backward_addresses(call, given, held))
        if launch is not None and launch():
            return given
        workspace = cut(plan, held)
    write_gradients(choice, call, given, workspace)
    return given


def write_gradients(
    choice: Choice[Problem], call: Call, given: Backward, workspace: dict[str, Tensor] | None = None
) -> None:
    """Run the backward into dq, dk, dv and delta of `given`."""
    if choice.backward is None:
        raise InvalidProblem("needs_grad", call.needs_grad, "True", "give the backward op the arguments of its forward")
    if choice.problem.vacuous:
        for gradient in given[4:7]:
            gradient.zero_()
        given.delta.zero_() if given.dlse is None else given.delta.copy_(-given.dlse)
        return
    dout, out = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (given.dout, given.out))
    _launch(choice.backward, call, given._replace(dout=dout, out=out), workspace)


def sinks_gradient(call: Call, lse: Tensor, delta: Tensor) -> Tensor:
    """dsink = -sum exp(sink - lse) * delta, because a sink is an extra key with value 0."""
    if call.sinks is None:
        return lse.new_empty(0)
    most = torch.finfo(lse.dtype).max  # clamping avoids inf - inf = NaN: a sink of +inf has weight 1
    weight = torch.where(
        lse == -torch.inf,
        0.0,
        torch.exp(_per_head(call.sinks.to(lse.dtype).clamp(max=most), call) - lse.clamp(max=most)),
    )
    return -(weight * delta).sum(1 if call.packed else (0, 2)).to(call.sinks.dtype)


def _per_head(sinks: Tensor, call: Call) -> Tensor:
    return sinks[:, None] if call.packed else sinks[None, :, None]


# ---------------------------------------------------------------- registration with torch.library


LIBRARY = torch.library.Library("strobe", "DEF")
_FIELDS = schema(FIELD_KINDS, Call._field_defaults)
LIBRARY.define(f"forward({_FIELDS}) -> (Tensor, Tensor)")
LIBRARY.define(f"forward_out(Tensor(a!) out, {_FIELDS}) -> Tensor")
LIBRARY.define(
    f"backward(Tensor dout, Tensor out, Tensor lse, Tensor? dlse, {_FIELDS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
for _name, _body, _fake in (
    ("forward", lambda *flat: forward_directly(received(flat)), fake.forward),
    ("forward_out", _forward_out, fake.forward_out),
    ("backward", _backward, fake.backward),
):
    for _key in (
        "CompositeExplicitAutograd",
        "AutogradNestedTensor",
    ):  # any device or tensor kind: `check` and `select` raise
        LIBRARY.impl(_name, _body, _key)
    torch.library.register_fake(f"strobe::{_name}", _fake, lib=LIBRARY)
for _name in ("forward", "backward"):
    vmap.register(LIBRARY, _name)

FORWARD = torch.ops.strobe.forward.default
FORWARD_OUT = torch.ops.strobe.forward_out.default
BACKWARD = torch.ops.strobe.backward.default


# ---------------------------------------------------------------- autograd


class _TwiceRefused(torch.autograd.Function):
    """The backward op under create_graph=True. It returns first derivatives; a second derivative raises
    UnsupportedProblem.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return BACKWARD(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise UnsupportedProblem(
            "double backward: strobe has no second derivative; differentiate torch's math attention instead"
        )


def _save(ctx, call: Call, count: int, out: Tensor, lse: Tensor) -> None:
    ctx.save_for_backward(*call[:3], out, lse, *(() if call.plain else call.optionals))
    ctx.rest = call[SCALARS], call[OPTIONAL_TENSORS.stop :], count
    ctx.set_materialize_grads(False)


def _gradients(
    saved: Sequence[Tensor], rest: tuple, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of an op's arguments. saved: the context's saved tensors, which checkpointing lets a backward read
    only once.
    """
    q, k, v, out, lse, *optionals = saved
    scalars, longest, count = rest
    call = (Call(q, k, v, *scalars, *optionals, *longest) if optionals else Call(q, k, v, *scalars)).with_grad
    dout = torch.zeros_like(out) if dout is None else dout
    choice = CACHE.direct_choice(call, decide, dout, out, lse) if dlse is None and call.plain else None
    if choice is not None:
        given = given_gradients(call, choice, (dout, out, lse, None))
        return given.dq, given.dk, given.dv, *(None,) * (count - 3)
    flops.meet_counters()
    run = _TwiceRefused.apply if torch.is_grad_enabled() else BACKWARD
    dq, dk, dv, dsinks = run(dout, out, lse, dlse, *call.arguments)
    gradients: list[Tensor | None] = [None] * len(call)
    gradients[:3] = dq, dk, dv
    if call.sinks is not None:
        gradients[OPTIONAL_TENSORS.start] = dsinks
    return tuple(gradients[:count])


def gradients_of(call: Call, given: tuple[Tensor, Tensor, Tensor]) -> Sequence[Tensor | None]:
    """dq, dk and dv of a call. given: dout, out, lse."""
    dout, out, lse = given
    saved: list[Any] = [*call[:3], out, lse, *(() if call.plain else call.optionals)]
    return _gradients(saved, (call[SCALARS], call[OPTIONAL_TENSORS.stop : -1], 3), dout, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *flat):
        call = Call(*flat)
        choice = CACHE.direct_choice(call, decide) if call.plain else None
        out, lse = FORWARD(*flat) if choice is None else forward_directly(call, choice)
        _save(ctx, call, len(flat), out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx.saved_tensors, ctx.rest, dout, dlse)


class PlainEntry(NamedTuple):
    """A plain call without its tensors, and its Choice."""

    scalars: tuple  # Call[SCALARS], with needs_grad
    choice: Choice[Problem]

    @staticmethod
    def of(call: Call, choice: Choice[Problem]) -> PlainEntry:
        return PlainEntry(call.with_grad[SCALARS], choice)


class _Plain(torch.autograd.Function):
    """`_Attention` for a plain call with a cached Choice while no torch mode is active. It packs the non-tensor
    arguments into one and returns out without lse: `apply` drops from 11.9 to 7.7 us (on a CPU,
    `results/tuning.jsonl`).
    """

    @staticmethod
    def forward(ctx, q, k, v, entry):
        out, lse = _plain_forward(q, k, v, *entry)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.entry = entry
        return out

    @staticmethod
    def backward(ctx, dout):  # only compiled autograd calls this; the engine calls `_plain_gradients`
        return _gradients(ctx.saved_tensors, (ctx.entry.scalars, (), 4), dout, None)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, scalars: tuple, choice: Choice[Problem]) -> tuple[Tensor, Tensor]:
    return replay_forward(choice, q, k, v) or _allocate_and_write(Call(q, k, v, *scalars), choice)


def _plain_gradients(ctx, dout):
    """The backward of `_Plain` outside compiled autograd: replays the cached launch if there is one."""
    saved, scalars = ctx.saved_tensors, ctx.entry.scalars
    gradients = replay_backward(saved, dout, scalars)
    return (*gradients, None) if gradients else _gradients(saved, (scalars, (), 4), dout, None)


# Skips torch.autograd.Function.apply, which first unwraps dead torch.func wrappers. No guard matches such a tensor, so
# none arrives here
_apply_plain = torch_private.direct_apply(_Plain)
# The engine calls `_plain_gradients` directly: BackwardCFunction.apply first chooses between the names `backward` and
# `vjp`
torch_private.set_engine_backward(_Plain, _plain_gradients)


class _OutAlone(_Attention):
    """`_Attention` without lse, for torch.compile: it gives an unused lse a gradient of zeros, which costs a kernel
    and, as a plain tensor, does not mix with DTensors.
    """

    @staticmethod
    def forward(ctx, *flat):
        out, lse = FORWARD(*flat)
        _save(ctx, Call(*flat), len(flat), out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        return _gradients(ctx.saved_tensors, ctx.rest, dout, None)


class _AttentionUnderTransforms(torch.autograd.Function):
    """`_Attention` for torch.func, whose transforms require setup_context. setup_context costs 17 us more per call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*flat):
        return FORWARD(*flat)

    @staticmethod
    def jvp(ctx, *_):
        raise forward_mode()

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, Call(*inputs), len(inputs), *output)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx.saved_tensors, ctx.rest, dout, dlse)


def prepare(call: Call) -> Call:
    """The call as the ops take it: cast to autocast's dtype, with needs_grad set if a gradient is needed."""
    return with_needed_grad(in_autocasts_dtype(call) if torch_private.is_any_autocast_enabled() else call)


def with_needed_grad(call: Call) -> Call:
    """The call with needs_grad set if a gradient is needed. The first call with a DTensor registers the sharding
    rules."""
    if is_distributed(call.q):
        from . import sharding

        sharding.teach()
    wanted = wants_gradients(call) or (torch.is_grad_enabled() and wants_beneath((*call[:3], call.sinks)))
    return call.with_grad if wanted else call


def wants_gradients(call: Call) -> bool:
    """Whether requires_grad of a tensor of the call asks for gradients. vmap's wrappers hide it: see
    `torch_state.wants_beneath`.
    """
    q, k, v = call[:3]
    asked = (
        q.requires_grad or k.requires_grad or v.requires_grad or (call.sinks is not None and call.sinks.requires_grad)
    )
    return asked and torch.is_grad_enabled()


def run(call: Call, out: Tensor | None = None, out_alone: bool = False) -> tuple[Tensor, ...]:
    """out and lse of a call, by the path that its gradients, transforms and autocast require. out_alone: the caller
    ignores lse.
    """
    if out is None:
        choice = CACHE.direct_choice(call, _decide_with_grad, graded=out_alone)
        if choice is not None and not choice.problem.needs_grad:
            return forward_directly(call, choice)
        if choice is not None and out_alone:
            return (_apply_plain(*call[:3], PlainEntry.of(call, choice)),)
    call = prepare(call) if out is None else with_needed_grad(call)  # as in torch, autocast skips ops with out=
    if tangents(call.tensors_and_rest[0]):
        raise forward_mode()
    flops.meet_counters()
    if out is not None:
        check_no_vmap(out, call.tensors_and_rest[0])
        if call.needs_grad or out.requires_grad:
            raise UnsupportedProblem("out= with gradients: leave out= out, or call under torch.no_grad()")
        if written_by_copy(out):
            return copied(out, FORWARD(*call.arguments), call.q)
        return out, FORWARD_OUT(out, *call.arguments)
    if torch_private.are_functorch_transforms_active() and not functional(call):
        return _AttentionUnderTransforms.apply(*call.arguments)
    if not call.needs_grad:
        return FORWARD(*call.arguments)
    if not torch.compiler.is_compiling():
        return _Attention.apply(*call.arguments)
    arguments = distinct(call.arguments)
    return (_OutAlone.apply(*arguments),) if out_alone else _Attention.apply(*arguments)


def run_keywords(q: Tensor, k: Tensor, v: Tensor, keywords: tuple, deterministic: bool | None) -> Tensor | None:
    """out of a plain call by the cache entry of its keywords, (causal, scale) and `deterministic`; None on a miss."""
    if unseen_mode_active():
        return None
    keywords = *keywords, torch_private.get_deterministic_algorithms() if deterministic is None else deterministic
    entry: PlainEntry | None = CACHE.lookup(KEYWORDS, (q, k, v), keywords)
    if entry is None:
        return None
    return _apply_plain(q, k, v, entry) if entry.choice.problem.needs_grad else _plain_forward(q, k, v, *entry)[0]


def insert_keywords(call: Call, keywords: tuple) -> None:
    """Insert the Choice of a plain call under its keywords too, for `run_keywords`."""
    choice = None if unseen_mode_active() else CACHE.lookup(DIRECT, *call.tensors_and_rest)
    if choice is not None:
        CACHE.insert(KEYWORDS, call[:3], (*keywords, call.deterministic), PlainEntry.of(call, choice))
