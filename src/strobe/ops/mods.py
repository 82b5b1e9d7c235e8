"""The ops of calls with a custom score or mask: `strobe::mod_forward` and `strobe::mod_backward`.

A function travels through an op as the text of its program, and its captured tensors as a list. So a compiled graph
holds all that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedProblem
from ..mods.mask import MaskMod
from ..mods.program import Program
from ..mods.score import as_score_mod
from ..problem import torch_private
from ..problem.call import FIELD_KINDS, Call, Mods, ModTexts, accumulator, check_captured
from ..problem.mask import Mask
from ..problem.problem import Problem
from ..problem.torch_state import distinct, in_autocasts_dtype, tangents
from ..selection.select import Choice
from . import attention, fake
from .attention import LIBRARY, decide, wants_gradients, write, write_gradients
from .fake import forward_mode, schema

_TEXTS = "str score_mod, str score_mod_bwd, str mask_mod"
_CAPTURED = "Tensor[] score_tensors, Tensor[] mask_tensors, float[] score_numbers, float[] mask_numbers"
_FIELDS = schema(FIELD_KINDS, Call._field_defaults)
_COUNT = 7  # arguments of an op that describe the functions


def bind(call: Call, score: object, mask: Mask | None) -> Call:
    """The call with its custom score and mask: programs, and the tensors and numbers that the functions capture now.

    score: a ScoreMod, a function, or None. Of the mask only a function is read; the call has the built-in part.
    """
    if torch_private.are_functorch_transforms_active():
        raise UnsupportedProblem("score_mod or a mask function under torch.func: call attention outside the transform")
    call = in_autocasts_dtype(call)
    texts, tensors, numbers = ModTexts(), (), ()
    needs_grad = wants_gradients(call)
    if score is not None:
        modification = as_score_mod(score)
        bound = modification.bind(needs_grad)
        if not needs_grad and torch.is_grad_enabled() and any(t.requires_grad for t in bound.tensors):
            needs_grad, bound = True, modification.bind(True)
        tensors, numbers = bound.tensors, bound.numbers
        texts = ModTexts(bound.text, bound.gradient)
    mods = Mods(texts, tensors, (), numbers)
    if isinstance(mask, MaskMod):
        seen = mask.bind()
        texts = texts._replace(mask=seen.program.text)
        mods = mods._replace(texts=texts, mask_tensors=seen.tensors, mask_numbers=seen.numbers)
    call = call._replace(mods=mods, needs_grad=needs_grad)
    check_captured(call)  # here, since the dispatcher would take a list with a tensor of another device elsewhere
    return call


def attend(call: Call, score: object, mask: Mask | None, out: Tensor | None = None) -> tuple[Tensor, ...]:
    """out and lse of a call with or without a custom score and mask."""
    if score is None and not isinstance(mask, MaskMod):
        return attention.run(call, out, not call.partial)
    return run(bind(call, score, mask), out)


def choice(call: Call, score: object, mask: Mask | None) -> Choice[Problem]:
    """The Choice of a call with or without a custom score and mask."""
    if score is None and not isinstance(mask, MaskMod):
        return decide(attention.prepare(call))
    return decide(bind(call, score, mask))


def run(call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse of a call that `bind` made."""
    if out is not None:
        raise UnsupportedProblem("out= with score_mod or a mask function: leave out= out")
    mods = call.mods or Mods(ModTexts())
    if tangents((*call[:3], *mods.tensors)):
        raise forward_mode()
    if not call.needs_grad:
        return FORWARD(*_arguments(call))
    split = len(mods.score_tensors)
    flat = *mods.texts, mods.score_numbers, mods.mask_numbers
    rest = *mods.tensors, *call[:-1]
    rest = distinct(rest) if torch.compiler.is_compiling() else rest
    return _ModifiedAttention.apply(split, flat, len(mods.tensors), *rest)


def _arguments(call: Call) -> tuple:
    mods = call.mods or Mods(ModTexts())
    captured = list(mods.score_tensors), list(mods.mask_tensors), list(mods.score_numbers), list(mods.mask_numbers)
    return *mods.texts, *captured, *call[:-1]


def _received(flat: tuple) -> Call:
    """An op's arguments as a Call."""
    score, gradient, mask, *captured = flat[:_COUNT]
    mods = Mods(ModTexts(score, gradient, mask), *(tuple(one) for one in captured))
    return attention.received(flat[_COUNT:])._replace(mods=mods)


# ---------------------------------------------------------------- the ops


def _forward(*flat: Any) -> tuple[Tensor, Tensor]:
    call = _received(flat)
    found = decide(call)
    out, lse = [
        call.q.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in found.problem.outputs
    ]
    write(found, call, out, lse)
    return out, lse


def _backward(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """dq, dk, dv, dsinks, and a gradient for each of score_tensors; empty for one that needs none."""
    call = _received(flat)
    found = decide(call)
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    mods = call.mods or Mods(ModTexts())
    sums = _zeros(call, mods)
    call = call._replace(mods=mods._replace(gradients=tuple(sums)))
    given = attention.Backward(dout, out, lse, dlse, *[t.new_empty(t.shape) for t in (*call[:3], lse)])
    write_gradients(found, call, given)
    dcaptured = [
        call.q.new_empty(0) if total is None else total.to(tensor.dtype)
        for total, tensor in zip(sums, mods.score_tensors)
    ]
    dsinks = attention.sinks_gradient(call, lse, given.delta)
    return given.dq, given.dk, given.dv, dsinks, dcaptured


def _zeros(call: Call, mods: Mods) -> list[Tensor | None]:
    wide = accumulator(call.q.dtype)
    scattered = _scattered(mods.texts.gradient)
    return [
        torch.zeros(tensor.shape, dtype=wide, device=tensor.device) if n in scattered else None
        for n, tensor in enumerate(mods.score_tensors)
    ]


def _scattered(gradient: str) -> tuple[int, ...]:
    """The numbers of the captured tensors that a gradient's program adds to."""
    return tuple(scatter.tensor for scatter in Program.parse(gradient).scatters) if gradient else ()


def _fake_forward(*flat: Any) -> tuple[Tensor, Tensor]:
    return fake.forward(*flat[_COUNT:])


def _fake_backward(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    scattered = _scattered(flat[1])
    captured = [t.new_empty(t.shape if n in scattered else (0,)) for n, t in enumerate(flat[3])]
    dq, dk, dv, dsinks = fake.backward(dout, out, lse, dlse, *flat[_COUNT:])
    return dq, dk, dv, dsinks, captured


LIBRARY.define(f"mod_forward({_TEXTS}, {_CAPTURED}, {_FIELDS}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"mod_backward(Tensor dout, Tensor out, Tensor lse, Tensor? dlse, {_TEXTS}, {_CAPTURED}, {_FIELDS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor[])"
)
_BODIES: tuple[tuple[str, Callable, Callable], ...] = (
    ("mod_forward", _forward, _fake_forward),
    ("mod_backward", _backward, _fake_backward),
)
for _name, _body, _fake in _BODIES:
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"strobe::{_name}", _fake, lib=LIBRARY)

FORWARD = torch.ops.strobe.mod_forward.default
BACKWARD = torch.ops.strobe.mod_backward.default


class _ModifiedAttention(torch.autograd.Function):
    """Autograd of a call with functions. Captured tensors of the score come first among the arguments."""

    @staticmethod
    def forward(ctx, split, flat, count, *rest):
        tensors, fields = rest[:count], rest[count:]
        call = _modified(split, flat, tensors, fields)
        out, lse = FORWARD(*_arguments(call))
        ctx.save_for_backward(out, lse, *(one for one in rest if isinstance(one, Tensor)))
        ctx.plan = split, flat, count, [None if isinstance(one, Tensor) else (one,) for one in rest]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if torch.is_grad_enabled():
            raise UnsupportedProblem("double backward: strobe has no second derivative of score_mod")
        split, flat, count, plain = ctx.plan
        out, lse, *saved = ctx.saved_tensors
        held = iter(saved)
        rest = [next(held) if one is None else one[0] for one in plain]
        call = _modified(split, flat, rest[:count], rest[count:])
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, dsinks, captured = BACKWARD(dout, out, lse, dlse, *_arguments(call))
        gradients: list[Tensor | None] = [None] * len(rest)
        scattered = _scattered(flat[1])
        for n, one in enumerate(captured):
            gradients[n] = one if n in scattered else None
        gradients[count : count + 3] = dq, dk, dv
        if call.sinks is not None:
            gradients[count + Call._fields.index("sinks")] = dsinks
        return None, None, None, *gradients


def _modified(split: int, flat: tuple, tensors: Sequence[Tensor], fields: Sequence[Any]) -> Call:
    *texts, score_numbers, mask_numbers = flat
    mods = Mods(ModTexts(*texts), tuple(tensors[:split]), tuple(tensors[split:]), score_numbers, mask_numbers)
    return Call(*fields)._replace(mods=mods)
