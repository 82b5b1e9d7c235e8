"""The ops of calls with a custom score or mask or with dropout: `strobe::mod_forward`, `mod_backward`, `mod_decode`.

A function travels through an op as the text of its program, and its captured tensors as a list. So a compiled graph
holds all that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedProblem
from ..kernels.protocol import Forward
from ..kernels.runtime.launch_cache import CACHE, forward_addresses
from ..kernels.runtime.workspace import empty_here
from ..mods import extents
from ..mods.mask import MaskMod
from ..mods.score import BoundScore, as_score_mod
from ..problem import torch_private
from ..problem.call import FIELD_KINDS, Call, check_captured
from ..problem.decode import DecodeCall, refuse_gradients
from ..problem.mask import Mask
from ..problem.mods import Dropout, Mods, ModTexts, scattered
from ..problem.paged import PagedCall
from ..problem.problem import Problem
from ..problem.torch_state import distinct, in_autocasts_dtype, tangents, written_by_copy
from ..selection.replay import launches_here
from ..selection.select import Choice
from . import attention, decode, fake, flops, ordered_gradients
from .attention import LIBRARY, decide, given_gradients, wants_gradients, write
from .builtin_masks import simplified
from .cached_functions import COUNT, bind_functions, refuse_wrapped
from .fake import check_apart, check_no_vmap, check_out, copied, forward_mode, schema, written

_TEXTS = "str score_mod, str score_mod_bwd, str mask_mod"
_CAPTURED = "Tensor[] score_tensors, Tensor[] mask_tensors, float[] score_numbers, float[] mask_numbers"
_EXTRAS = "float dropout_p, Tensor? dropout_seed, bool max_scores"
_FIELDS = schema(FIELD_KINDS, Call._field_defaults)
_NEEDS_GRAD = Call._fields.index("needs_grad")
NOTHING = BoundScore("", "", (), ())  # of a call without a score or mask


def bind(
    call: Call, score: object, mask: Mask | None, dropout: Dropout | None = None, max_scores: bool = False,
    is_part: bool = False, has_out: bool = False,
) -> Call:  # fmt: skip
    """The call with its custom score and mask: programs, and the tensors and numbers that the functions capture now.

    score: a ScoreMod, a function, or None. Of the mask only a function is read; the call has the built-in part.
    is_part: the functions are those of a larger call. has_out: the result is written to a given tensor, so autocast
    casts nothing, as in torch.
    """
    if torch_private.are_functorch_transforms_active():
        raise UnsupportedProblem("score_mod or a mask function under torch.func: call attention outside the transform")
    if not has_out and torch_private.is_any_autocast_enabled():
        call = in_autocasts_dtype(call)
    needs_grad = wants_gradients(call)
    bound = seen = NOTHING
    sizes = extents.sizes_of(call)
    if score is not None:
        modification = as_score_mod(score)
        modification.check(sizes, is_part)
        bound = modification.bind(needs_grad)
        if not needs_grad and torch.is_grad_enabled() and any([t.requires_grad for t in bound.tensors]):
            needs_grad, bound = True, modification.bind(True)
    if isinstance(mask, MaskMod):
        mask.check(sizes, is_part)
        seen = mask.bind()
    texts = ModTexts(
        bound.text, bound.gradient, seen.text, dropout is not None, max_scores, call.cu_seqlens_q is not None
    )
    dropped = (0.0, None) if dropout is None else (dropout.p, dropout.seed_on(call.q.device))
    mods = Mods(texts, bound.tensors, seen.tensors, bound.numbers, seen.numbers, *dropped)
    call = Call._make((*call[:_NEEDS_GRAD], needs_grad, *call[_NEEDS_GRAD + 1 : -1], mods))
    if call.deterministic:
        ordered_gradients.check(call)
    check_captured(call)  # here, since the dispatcher would take a list with a tensor of another device elsewhere
    return call


def attend(
    call: Call, score: object, mask: Mask | None, out: Tensor | None = None, dropout: Dropout | None = None
) -> tuple[Tensor, ...]:
    """out and lse of a call with or without a custom score and mask."""
    if score is None and dropout is None and not isinstance(mask, MaskMod):
        return attention.run(call, out, not call.partial)
    return run_bound(bind(call, score, mask, dropout, has_out=out is not None), out)


def run_bound(call: Call, out: Tensor | None = None) -> tuple[Tensor, ...]:
    """out, lse and perhaps the greatest scores of a call that `bind` made."""
    # While compiling, the graph keeps the function; the op itself replaces built-in masks when it runs.
    if not torch.compiler.is_compiling():
        call = simplified(call)
        if call.mods is None:
            return attention.run(call, out, not call.partial)
    return run(call, out)


def choice(call: Call, score: object, mask: Mask | None, dropout: Dropout | None = None) -> Choice[Problem]:
    """The Choice of a call with or without a custom score and mask."""
    if score is None and dropout is None and not isinstance(mask, MaskMod):
        return decide(attention.prepare(call))
    return decide(simplified(bind(call, score, mask, dropout)))


def run(call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the greatest score of each row (empty if the call does not ask for it) of a call that `bind`
    made."""
    mods = call.mods or Mods(ModTexts())
    if out is None and not call.needs_grad:
        choice = CACHE.direct_choice(call, decide)
        if choice is not None:
            return run_directly(choice, call, mods)
    if tangents((*call[:3], *mods.tensors)):
        raise forward_mode()
    if out is not None:
        check_no_vmap(out, (*call[:3], *mods.tensors))
        refuse_wrapped(call, out)
        if call.needs_grad or out.requires_grad:
            raise UnsupportedProblem("out= with gradients: leave out= out, or call under torch.no_grad()")
        if written_by_copy(out):
            found = _dispatched(call)
            return *copied(out, found[:2], call.q), found[2]
        flops.meet_counters()
        return out, *FORWARD_OUT(out, *arguments(call))
    if not call.needs_grad:
        return _dispatched(call)
    counts = len(mods.score_tensors), len(mods.mask_tensors)
    constants = *mods.texts, mods.score_numbers, mods.mask_numbers, mods.dropout_p
    rest = *mods.tensors, mods.dropout_seed, *call[:-1]
    rest = distinct(rest) if torch.compiler.is_compiling() else rest
    return _ModifiedAttention.apply(counts, constants, *rest)


def _dispatched(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """FORWARD through the dispatcher."""
    refuse_wrapped(call)
    flops.meet_counters()
    return FORWARD(*arguments(call))


def run_directly(choice: Choice[Problem], call: Call, mods: Mods) -> tuple[Tensor, Tensor, Tensor]:
    """The body of FORWARD without the dispatcher: a launch that was recorded at these addresses, if there is one."""
    launches = None if mods.texts.max_scores else launches_here(choice.forward, call.q)
    if not launches:
        return _allocate_and_write(choice, call)
    out, lse = [empty_here(*kind) for kind in choice.problem.outputs]
    launch = launches.get(forward_addresses(call, out, lse))
    if launch is not None and launch():
        return out, lse, lse.new_empty(0)
    return out, lse, _write(choice, call, out, lse)


def arguments(call: Call | DecodeCall | PagedCall) -> tuple:
    return *_flat(call.mods or Mods(ModTexts())), *call[:-1]


def _flat(mods: Mods) -> tuple:
    captured = list(mods.score_tensors), list(mods.mask_tensors), list(mods.score_numbers), list(mods.mask_numbers)
    return *mods.texts[:3], *captured, mods.dropout_p, mods.dropout_seed, mods.texts.max_scores


def mods_of(flat: tuple, packed: bool) -> Mods:
    """An op's first arguments as Mods."""
    score, gradient, mask, score_tensors, mask_tensors, score_numbers, mask_numbers, p, seed, max_scores = flat
    has_offsets = seed is not None and seed.numel() > 1
    texts = ModTexts(score, gradient, mask, seed is not None, max_scores, packed, has_offsets)
    captured = tuple(score_tensors), tuple(mask_tensors)
    return Mods(texts, *captured, tuple(score_numbers), tuple(mask_numbers), p, seed)


def _received(flat: tuple) -> Call:
    """An op's arguments as a Call."""
    call = attention.received(flat[COUNT:])
    return simplified(call._replace(mods=mods_of(flat[:COUNT], call.packed)))


# ---------------------------------------------------------------- the ops


def _forward(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _received(flat)
    return _allocate_and_write(decide(call), call)


def _allocate_and_write(choice: Choice[Problem], call: Call) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = [
        call.q.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in choice.problem.outputs
    ]
    return out, lse, _write(choice, call, out, lse)


def _forward_out(out: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    call = _received(flat)
    choice, mods = decide(call), call.mods or Mods(ModTexts())
    check_out(out, choice.problem.out_shapes[0], choice.problem.out_dtype, call.q)
    captured = [f"tensor {n} of score_mod or mask" for n in range(len(mods.tensors))]
    check_apart(out, (*call[:3], call.sinks, *mods.tensors), ("q", "k", "v", "sinks", *captured))
    shape, strides, dtype = choice.problem.outputs[1]
    lse = call.q.new_empty_strided(shape, strides, dtype=dtype)
    greatest = _write(choice, call, out, lse)
    written(out)
    return lse, greatest


def _write(choice: Choice[Problem], call: Call, out: Tensor, lse: Tensor) -> Tensor:
    """Run a forward. Returns the greatest score of each row; empty if the call does not ask for it."""
    mods = call.mods or Mods(ModTexts())
    if not mods.texts.max_scores:
        write(choice, call, out, lse)
        return lse.new_empty(0)
    greatest = torch.full_like(lse, -torch.inf)
    write(choice, call._replace(mods=mods._replace(max_scores=greatest)), out, lse)
    return greatest


def _backward(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """dq, dk, dv, dsinks, and a gradient for each of score_tensors; empty for one that needs none."""
    call = _received(flat)
    return _backward_of(decide(call), call, (dout, out, lse, dlse))


def _backward_of(
    found: Choice[Problem], call: Call, given: tuple[Tensor, Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    mods = call.mods or Mods(ModTexts())
    sums = ordered_gradients.sums_of(found, mods)
    if call.mods is not None:
        call = call._replace(mods=mods._replace(gradients=tuple(sums)))
    results = given_gradients(call, found, given)
    if ordered_gradients.are_apart(found, mods):
        ordered_gradients.add_ordered(found.problem, call, mods, results, sums)
    totals = ordered_gradients.totals(found, mods, sums)
    dcaptured = [call.q.new_empty(0) if total is None else total for total in totals]
    dsinks = attention.sinks_gradient(call, results.lse, results.delta)
    return results.dq, results.dk, results.dv, dsinks, dcaptured


def _fake_forward(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = fake.forward(*flat[COUNT:])
    return out, lse, torch.empty_like(lse) if flat[COUNT - 1] else lse.new_empty(0)


def _fake_forward_out(out: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    lse = fake.forward_out(out, *flat[COUNT:])
    return lse, torch.empty_like(lse) if flat[COUNT - 1] else lse.new_empty(0)


def _fake_backward(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    added = scattered(flat[1])
    captured = [t.new_empty(t.shape if n in added else (0,)) for n, t in enumerate(flat[3])]
    dq, dk, dv, dsinks = fake.backward(dout, out, lse, dlse, *flat[COUNT:])
    return dq, dk, dv, dsinks, captured


# ---------------------------------------------------------------- decode


def bind_decode(call: DecodeCall, score: object, mask: Mask | None) -> DecodeCall:
    return bind_functions(decode.prepare(call), score, mask)


def attend_decode(
    call: DecodeCall, score: object, mask: Mask | None, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """out and lse of a decode with or without a custom score and mask."""
    if score is None and mask is None:
        return decode.run(call, out, not call.partial)
    call = bind_decode(call, score, mask)
    if call.mods is None:
        return decode.run(call, out, not call.partial)
    choice = decode.direct(call, decode.decide, out)
    if choice is not None:
        return decode.attend(call, choice, not call.partial, out)
    refuse_wrapped(call, out)
    read = [*call.tensors, *(call.mods or Mods(ModTexts())).tensors]
    refuse_gradients(read if out is None else [*read, out], "decode")
    if out is None:
        return DECODE(*arguments(call))
    if written_by_copy(out):
        return copied(out, DECODE(*arguments(call)), call.q)
    return out, DECODE_OUT(out, *arguments(call))


def choice_decode(call: DecodeCall, score: object, mask: Mask | None) -> Choice:
    if score is None and mask is None:
        return decode.decide(decode.prepare(call))
    return decode.decide(bind_decode(call, score, mask))


def _decode_received(flat: tuple) -> DecodeCall:
    return DecodeCall(*flat[COUNT:])._replace(mods=mods_of(flat[:COUNT], False))


def _decode(*flat: Any) -> tuple[Tensor, Tensor]:
    call = _decode_received(flat)
    found = decode.decide(call)
    out, lse = (call.q.new_empty_strided(*like[:2], dtype=like[2]) for like in found.problem.outputs)
    decode.write(found, call, Forward(out, lse))
    return out, lse


def _decode_out(out: Tensor, *flat: Any) -> Tensor:
    call = _decode_received(flat)
    return decode.write_out(out, call, decode.decide(call))


def _fake_decode(*flat: Any) -> tuple[Tensor, Tensor]:
    return decode.decode_fake(*flat[COUNT:])


def _fake_decode_out(out: Tensor, *flat: Any) -> Tensor:
    return decode.decode_out_fake(out, *flat[COUNT:])


# ---------------------------------------------------------------- registration


EXTRA_ARGUMENTS = f"{_TEXTS}, {_CAPTURED}, {_EXTRAS}"
_DECODE_FIELDS = decode.fields(DecodeCall)
_GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor[])"
_BODIES: tuple[tuple[str, str, Callable, Callable], ...] = (
    ("mod_forward", f"({EXTRA_ARGUMENTS}, {_FIELDS}) -> (Tensor, Tensor, Tensor)", _forward, _fake_forward),
    (
        "mod_forward_out",
        f"(Tensor(a!) out, {EXTRA_ARGUMENTS}, {_FIELDS}) -> (Tensor, Tensor)",
        _forward_out,
        _fake_forward_out,
    ),
    (
        "mod_backward",
        f"(Tensor dout, Tensor out, Tensor lse, Tensor? dlse, {EXTRA_ARGUMENTS}, {_FIELDS}) -> {_GRADIENTS}",
        _backward,
        _fake_backward,
    ),
    ("mod_decode", f"({EXTRA_ARGUMENTS}, {_DECODE_FIELDS}) -> (Tensor, Tensor)", _decode, _fake_decode),
    (
        "mod_decode_out",
        f"(Tensor(a!) out, {EXTRA_ARGUMENTS}, {_DECODE_FIELDS}) -> Tensor",
        _decode_out,
        _fake_decode_out,
    ),
)
for _name, _schema, _body, _fake in _BODIES:
    LIBRARY.define(f"{_name}{_schema}")
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"strobe::{_name}", _fake, lib=LIBRARY)

FORWARD = torch.ops.strobe.mod_forward.default
FORWARD_OUT = torch.ops.strobe.mod_forward_out.default
BACKWARD = torch.ops.strobe.mod_backward.default
DECODE = torch.ops.strobe.mod_decode.default
DECODE_OUT = torch.ops.strobe.mod_decode_out.default


# ---------------------------------------------------------------- autograd


class _ModifiedAttention(torch.autograd.Function):
    """Autograd of a call with functions. rest: captured tensors of the score, then of the mask, the seed of dropout,
    and the call's fields.
    """

    @staticmethod
    def forward(ctx, counts, constants, *rest):
        call = _modified(counts, constants, rest)
        choice = CACHE.direct_choice(call, decide)
        if choice is None:
            out, lse, greatest = _dispatched(call)
        else:
            out, lse, greatest = run_directly(choice, call, call.mods or Mods(ModTexts()))
        ctx.save_for_backward(out, lse, *(one for one in rest if isinstance(one, Tensor)))
        ctx.plan = counts, constants, [None if isinstance(one, Tensor) else (one,) for one in rest]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(greatest)
        return out, lse, greatest

    @staticmethod
    def backward(ctx, dout, dlse, _dgreatest):
        counts, constants, plain = ctx.plan
        out, lse, *saved = ctx.saved_tensors
        held = iter(saved)
        rest = [next(held) if one is None else one[0] for one in plain]
        dout = torch.zeros_like(out) if dout is None else dout
        (*dqkv, dsinks), captured = gradients_of(counts, constants, (dout, out, lse, dlse), rest)
        gradients: list[Tensor | None] = [None] * len(rest)
        gradients[: len(captured)] = captured
        start = sum(counts) + 1
        gradients[start : start + 3] = dqkv
        sinks = start + Call._fields.index("sinks")
        gradients[sinks] = None if rest[sinks] is None else dsinks
        return None, None, *gradients


def gradients_of(
    counts: tuple[int, int], constants: tuple, given: tuple[Tensor, Tensor, Tensor, Tensor | None], rest: Sequence[Any]
) -> tuple[Sequence[Tensor], list[Tensor | None]]:
    """(dq, dk, dv, dsinks) and a gradient, or None, for each captured tensor of the score.

    counts, constants, rest: as `_ModifiedAttention` gets them. given: dout, out, lse, dlse.
    """
    run = _ModifiedTwiceRefused.apply if torch.is_grad_enabled() else _modified_gradients
    found = run(counts, constants, *given, *rest)
    added = scattered(constants[1])
    return found[:4], [one if n in added else None for n, one in enumerate(found[4:])]


def _modified_gradients(
    counts: tuple[int, int], constants: tuple, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dsinks, and the gradient of each captured tensor of the score."""
    call = _modified(counts, constants, rest)
    beside = (dout, out, lse) if dlse is None else (dout, out, lse, dlse)
    choice = CACHE.direct_choice(call, decide, *beside)
    if choice is None:
        flops.meet_counters()
        *found, captured = BACKWARD(dout, out, lse, dlse, *arguments(call))
    else:
        *found, captured = _backward_of(choice, call, (dout, out, lse, dlse))
    return *found, *captured


class _ModifiedTwiceRefused(torch.autograd.Function):
    """`_modified_gradients` under create_graph=True: a second derivative raises UnsupportedProblem."""

    @staticmethod
    def forward(ctx, *given):
        return _modified_gradients(*given)

    @staticmethod
    def backward(ctx, *_):
        raise UnsupportedProblem(
            "double backward: strobe has no second derivative of functions, masks of numbers or dropout; differentiate "
            "torch's FlexAttention instead, and scaled_dot_product_attention after sdpa.enable(masks=False), or within "
            "sdpa_kernel(SDPBackend.MATH)"
        )


def _modified(counts: tuple[int, int], constants: tuple, rest: Sequence[Any]) -> Call:
    *texts, score_numbers, mask_numbers, p = constants
    split, count = counts[0], sum(counts)
    seed, fields = rest[count], rest[count + 1 :]
    numbers = score_numbers, mask_numbers
    mods = Mods(ModTexts(*texts), tuple(rest[:split]), tuple(rest[split:count]), *numbers, p, seed)
    return Call(*fields)._replace(mods=mods)
