"""The ops: torch.library schemas, fake kernels, FLOP formulas and autograd around a Choice. Imports no DSL.

Pattern measured fastest (CPU, torch 2.11): `Library.define` + `impl`, a thin autograd.Function outside, and the raw
overload where nothing needs a gradient. An op's implementation finds its Choice in a dictionary keyed by the call's raw
metadata: building and hashing a Problem costs tens of microseconds, the key about five.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .errors import InvalidProblem, UnsupportedProblem
from .kernels.kernel import Backward, Buffer, Forward, Plan
from .knobs import KNOBS
from .mask import NO_BOUND
from .problem import ALIGNMENT, FIELD_KINDS, OPTIONAL_TENSORS, Call, Problem, check
from .select import Choice, select
from .target import Target

_N_TENSORS = 3 + len(OPTIONAL_TENSORS)
_NO_OPTIONALS = (None,) * len(OPTIONAL_TENSORS)
_MOST_CHOICES = 4096  # lengths that change each step would otherwise grow the dictionary for ever
_choices: dict[tuple, Choice] = {}


# ---------------------------------------------------------------- a call's Choice


def decide(call: Call) -> Choice:
    """The Choice for a call: door and select the first time, one dictionary lookup after that."""
    key = _raw_key(call)
    choice = _choices.get(key)
    if choice is None:
        if len(_choices) >= _MOST_CHOICES:
            _choices.clear()
        choice = _choices[key] = select(Problem.from_call(call), Target.of(call.q.device))
    return choice


def _raw_key(call: Call) -> tuple:
    q, k, v = call[:3]
    optionals = call[3:_N_TENSORS]
    if optionals != _NO_OPTIONALS:
        optionals = tuple(None if t is None else (t.shape, t.dtype, t.device) for t in optionals)
    return (
        q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % ALIGNMENT,
        k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % ALIGNMENT,
        v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % ALIGNMENT,
        optionals, call[_N_TENSORS:],
    )  # fmt: skip


# ---------------------------------------------------------------- running it


def _launch(plan: Plan, call: Call, tensors: Forward | Backward) -> None:
    workspace = {buffer.name: _allocate(buffer, call.q.device) for buffer in plan.buffers}
    if call.q.is_cuda and call.q.device.index != torch.cuda.current_device():
        with torch.cuda.device(call.q.device):
            plan.kernel.run(plan, call, tensors, workspace)
    else:
        plan.kernel.run(plan, call, tensors, workspace)
    if KNOBS.sync and call.q.is_cuda:
        torch.cuda.synchronize(call.q.device)


def _allocate(buffer: Buffer, device: torch.device) -> Tensor:
    if buffer.fill is None:
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return torch.full(buffer.shape, buffer.fill, dtype=buffer.dtype, device=device)


def _keys_of(call: Call) -> int:
    return call.k.shape[0] if call.packed else call.k.shape[1]


def _forward_into(out: Tensor, call: Call, choice: Choice) -> Tensor:
    problem = choice.problem
    lse = torch.empty(problem.out_shapes[1], dtype=problem.lse_dtype, device=call.q.device)
    if out.numel() == 0:
        return lse
    if _keys_of(call) == 0:  # no key at all: said here once, so that no kernel meets a tensor of size 0
        out.zero_()
        return lse.fill_(-torch.inf) if call.sinks is None else lse.copy_(_per_head(call.sinks, call).expand_as(lse))
    _launch(choice.forward, call, Forward(out, lse))
    return lse


def _forward(*flat: Any) -> tuple[Tensor, Tensor]:
    call = Call(*flat)
    choice = decide(call)
    out = torch.empty(choice.problem.out_shapes[0], dtype=choice.problem.out_dtype, device=call.q.device)
    return out, _forward_into(out, call, choice)


def _forward_out(out: Tensor, *flat: Any) -> Tensor:
    call = Call(*flat)
    choice = decide(call)
    _check_out(out, choice.problem.out_shapes[0], choice.problem.out_dtype, call)
    return _forward_into(out, call, choice)


def _backward(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *flat: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Call(*flat)
    choice = decide(call)
    assert choice.backward is not None  # needs_grad stands in the call
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in call[:3])
    delta = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    if out.numel() == 0 or _keys_of(call) == 0:
        for grad in (dq, dk, dv):
            grad.zero_()
        delta.zero_() if dlse is None else delta.copy_(-dlse)
    else:
        _launch(choice.backward, call, Backward(dout, out, lse, dlse, dq, dk, dv, delta))
    return dq, dk, dv, _sinks_gradient(call, lse, delta)


def _sinks_gradient(call: Call, lse: Tensor, delta: Tensor) -> Tensor:
    """dsink = -sum exp(sink - lse) * delta: the sink is one more key whose value is 0."""
    if call.sinks is None:
        return lse.new_empty(0)
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(_per_head(call.sinks.to(lse.dtype), call) - lse))
    return -(weight * delta).sum(1 if call.packed else (0, 2)).to(call.sinks.dtype)


def _per_head(sinks: Tensor, call: Call) -> Tensor:
    return sinks[:, None] if call.packed else sinks[None, :, None]


def _check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, call: Call) -> None:
    if list(out.shape) != list(shape):
        raise InvalidProblem("out", f"shape {list(out.shape)}", f"{list(shape)}", "allocate it like q with v's head dimension")
    if out.dtype != dtype:
        raise InvalidProblem("out", out.dtype, str(dtype), "allocate it in q's dtype")
    if out.device != call.q.device:
        raise InvalidProblem("out", f"device {out.device}", f"q's device {call.q.device}", "allocate it beside q")
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise InvalidProblem("out", f"stride {out.stride(-1)} in the last dimension", "stride 1", "allocate it contiguous")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride())):
        raise InvalidProblem("out", f"strides {out.stride()}", "memory of its own for each element", "do not expand it")


# ---------------------------------------------------------------- schemas, fakes, FLOPs


def _schema() -> str:
    kinds = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "int": "SymInt", "float": "float", "float | None": "float?", "bool": "bool", "str": "str"}
    return ", ".join(f"{kinds[kind]} {name}" for name, kind in FIELD_KINDS.items())


def _forward_fake(*flat: Any) -> tuple[Tensor, Tensor]:
    call = Call(*flat)
    check(call)
    wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    out = call.q.new_empty((*call.q.shape[:-1], call.v.shape[-1]), dtype=wide if call.partial else call.q.dtype)
    return out, call.q.new_empty(_lse_shape(call), dtype=wide)


def _forward_out_fake(out: Tensor, *flat: Any) -> Tensor:
    like, lse = _forward_fake(*flat)
    _check_out(out, tuple(like.shape), like.dtype, Call(*flat))
    return lse


def _backward_fake(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *flat: Any) -> tuple[Tensor, ...]:
    call = Call(*flat)
    dsinks = lse.new_empty(0) if call.sinks is None else torch.empty_like(call.sinks)
    return *(t.new_empty(t.shape) for t in call[:3]), dsinks


def _lse_shape(call: Call) -> tuple[int, ...]:
    if call.packed:
        return (call.q.shape[1], call.q.shape[0])
    return (call.q.shape[0], call.q.shape[2], call.q.shape[1])


LIBRARY = torch.library.Library("strobe", "DEF")
LIBRARY.define(f"forward({_schema()}) -> (Tensor, Tensor)")
LIBRARY.define(f"forward_out(Tensor(a!) out, {_schema()}) -> Tensor")
LIBRARY.define(f"backward(Tensor dout, Tensor out, Tensor lse, Tensor? dlse, {_schema()}) -> (Tensor, Tensor, Tensor, Tensor)")
for _name, _body, _fake in (
    ("forward", _forward, _forward_fake),
    ("forward_out", _forward_out, _forward_out_fake),
    ("backward", _backward, _backward_fake),
):
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _body, _key)
    torch.library.register_fake(f"strobe::{_name}", _fake, lib=LIBRARY)

FORWARD = torch.ops.strobe.forward.default
FORWARD_OUT = torch.ops.strobe.forward_out.default
BACKWARD = torch.ops.strobe.backward.default


def _pairs(q_shape, k_shape, flat: tuple) -> int:
    """Query-key pairs with no mask, as torch counts its own attention; packed: as if all sequences were of one length."""
    if len(q_shape) == 4:
        return q_shape[0] * q_shape[2] * q_shape[1] * k_shape[1]
    n = max(1, flat[Call._fields.index("cu_seqlens_q") - 3][0] - 1)
    return q_shape[1] * q_shape[0] * k_shape[0] // n


@register_flop_formula(torch.ops.strobe.forward)
def _forward_flops(q_shape, k_shape, v_shape, *flat, out_shape=None, **_) -> int:
    return 2 * _pairs(q_shape, k_shape, flat) * (q_shape[-1] + v_shape[-1])


@register_flop_formula(torch.ops.strobe.backward)
def _backward_flops(dout_shape, o_shape, lse_shape, dlse_shape, q_shape, k_shape, v_shape, *flat, out_shape=None, **_) -> int:
    return 2 * _pairs(q_shape, k_shape, flat) * (3 * q_shape[-1] + 2 * v_shape[-1])


# ---------------------------------------------------------------- autograd


class _TwiceRefused(torch.autograd.Function):
    """The backward op where a graph of the gradients is wanted: it runs, and differentiating it again says what is missing."""

    @staticmethod
    def forward(ctx, *arguments):
        return BACKWARD(*arguments)

    @staticmethod
    def backward(ctx, *_):
        raise UnsupportedProblem("double backward: strobe has no second derivative; differentiate torch's math attention instead")


def _gradients(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    out, lse = saved[-2:]
    call = Call(*saved[:-2], *ctx.flat)
    dout = torch.zeros_like(out) if dout is None else dout
    dout = dout if dout.stride(-1) == 1 or dout.shape[-1] == 1 else dout.contiguous()
    run = _TwiceRefused.apply if torch.is_grad_enabled() else BACKWARD
    dq, dk, dv, dsinks = run(dout, out, lse, dlse, *call)
    return dq, dk, dv, None if call.sinks is None else dsinks, *(None,) * (len(call) - 4)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *flat):
        out, lse = FORWARD(*flat)
        ctx.save_for_backward(*flat[:_N_TENSORS], out, lse)
        ctx.flat = flat[_N_TENSORS:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse)


class _AttentionUnderTransforms(torch.autograd.Function):
    """The same for torch.func, whose transforms want setup_context (it costs 17 us more, so only there)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*flat):
        return FORWARD(*flat)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:_N_TENSORS], *output)
        ctx.flat = inputs[_N_TENSORS:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse)


def run(call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse of a call, through whichever path its gradients, transforms and autocast ask for."""
    kind = call.q.device.type
    if torch.is_autocast_enabled(kind):
        call = _autocast(call, torch.get_autocast_dtype(kind))
    if type(call.q) is not Tensor:
        _shard(call.q)
    wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in call[:4])
    if wants_grad:
        call = call._replace(needs_grad=True)
    if out is not None:
        if wants_grad or out.requires_grad:
            raise UnsupportedProblem("out= with gradients: leave out= out, or call under torch.no_grad()")
        return out, FORWARD_OUT(out, *call)
    if torch._C._are_functorch_transforms_active():
        return _AttentionUnderTransforms.apply(*call)  # type: ignore[return-value]
    return _Attention.apply(*call) if wants_grad else FORWARD(*call)  # type: ignore[return-value]


def _autocast(call: Call, dtype: torch.dtype) -> Call:
    q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in call[:3])
    return call._replace(q=q, k=k, v=v)


# ---------------------------------------------------------------- DTensor

_sharded = False


def _shard(tensor: Tensor) -> None:
    """Teach DTensor to shard the ops by batch or by heads, when the first DTensor comes by (the import costs 300 ms)."""
    global _sharded
    if _sharded or not type(tensor).__module__.startswith("torch.distributed.tensor"):
        return
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def placements(call: Call) -> list[tuple[list, list]]:
        """(outputs, call's tensors) a rule: all replicated, heads apart, and for dense layouts the batch apart."""
        heads, lse_heads = (Shard(1), Shard(0)) if call.packed else (Shard(2), Shard(1))
        rest = [None] * (len(call) - _N_TENSORS)

        def tensors(qkv, sinks, others):
            present = [sinks] + [others] * (_N_TENSORS - 4)
            return [qkv] * 3 + [None if t is None else p for t, p in zip(call[3:_N_TENSORS], present)] + rest

        rules = [([Replicate(), Replicate()], tensors(Replicate(), Replicate(), Replicate()))]
        rules.append(([heads, lse_heads], tensors(heads, Shard(0), Replicate())))
        if not call.packed:
            rules.append(([Shard(0), Shard(0)], tensors(Shard(0), Replicate(), Shard(0))))
        return rules

    @register_sharding(FORWARD)
    def _forward_sharding(*flat):
        return placements(Call(*flat))

    @register_sharding(BACKWARD)
    def _backward_sharding(dout, out, lse, dlse, *flat):
        call = Call(*flat)
        rules = []
        for (whole, per_row), inputs in placements(call):
            if call.sinks is not None and whole == Shard(0) and not call.packed:
                continue  # each shard would hold a part of dsinks: a sum that no placement of a custom rule may leave pending
            dsinks = Replicate() if call.sinks is None else inputs[3]
            rules.append(([*inputs[:3], dsinks], [whole, whole, per_row, None if dlse is None else per_row, *inputs]))
        return rules

    _sharded = True
