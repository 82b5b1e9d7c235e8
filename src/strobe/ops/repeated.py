"""Calls of `attention` with functions that were made before.

A repeated call reads what its functions capture (`mods.simple_captures.values_of`) and looks up an Entry in the
LaunchCache: by the functions' code and constants, the keywords, and the metadata of all tensors. The entry replaces
the Call, `mods.bind`, `builtin_masks.simplified` and the search for a Choice: 6 us instead of 27 us on a CPU. With
gradients, autograd gets the call as one argument instead of 40.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.runtime.launch_cache import (
    CACHE,
    DIRECT,
    FUNCTIONS,
    addresses_of_captures,
    addresses_of_mods,
    backward_addresses_of,
    optional_addresses,
)
from ..kernels.runtime.workspace import empty_here, pieces
from ..mods.mask import MaskMod
from ..mods.score import ScoreMod
from ..mods.simple_captures import values_of
from ..mods.triton_functions import is_triton_function
from ..problem import torch_private
from ..problem.call import OPTIONAL_TENSORS, SCALARS, Call
from ..problem.mask import Mask
from ..problem.mods import Mods, ModTexts
from ..problem.problem import Problem
from ..problem.torch_state import unseen_mode_active
from ..selection.replay import launches_here, replay_forward
from ..selection.select import Choice
from . import attention, mods, ordered_gradients
from .builtin_masks import simplified


class Reading(NamedTuple):
    """What the functions of a call capture now."""

    key: tuple  # of functions and keywords; code by its id
    held: tuple  # objects whose ids are in the key
    tensors: tuple[Tensor, ...]  # of the score, then of the mask
    score_tensors: int


def read(
    score: object, mask: Mask | None, causal: bool, scale: float | None, deterministic: bool | None
) -> Reading | None:
    """What a score and a mask capture; None if they are of a kind that is not looked up here."""
    if deterministic is None:
        deterministic = torch_private.get_deterministic_algorithms()
    score_key: tuple = ()
    mask_key: tuple = ()
    held: tuple = ()
    tensors: tuple[Tensor, ...] = ()
    if score is not None:
        found = score.ready_made if type(score) is ScoreMod else None
        if found is not None:
            score_key, tensors = found
        else:
            function = score.function if type(score) is ScoreMod else score
            if type(function) is not FunctionType and (not callable(function) or is_triton_function(function)):
                return None
            values = values_of(function)
            if values is None:
                return None
            score_key, tensors, held = values
    count = len(tensors)
    if type(mask) is MaskMod:
        function = mask.only_function
        values = None if function is None else values_of(function)
        if values is None:
            return None
        mask_key = (mask.left, mask.right, *values.key)
        tensors, held = tensors + values.tensors, held + values.held
    elif mask is not None:
        return None
    return Reading((causal, scale, deterministic, score_key, mask_key), held, tensors, count)


class Watched(NamedTuple):
    """A captured tensor from whose contents something was computed."""

    position: int
    tensor: weakref.ref[Tensor]
    version: int
    address: int  # `tensor.data = other` changes no version

    def is_same(self, captured: Sequence[Tensor]) -> bool:
        now = captured[self.position]
        return self.tensor() is now and now._version == self.version and now.data_ptr() == self.address


class Entry(NamedTuple):
    """A call with functions without its tensors, and its Choice."""

    held: tuple  # keeps alive what the key has the ids of
    choice: Choice[Problem]
    scalars: tuple  # Call[SCALARS] of the simplified call
    longest: tuple  # its fields behind the optional tensors
    optionals: tuple  # its optional tensors, which stand for a mask function: weak references, or None
    texts: ModTexts | None  # None: built-in masks stand for the only function
    score_at: tuple[int, ...]  # positions among the captured tensors
    mask_at: tuple[int, ...]
    numbers: tuple[tuple[float, ...], tuple[float, ...]]
    watched: tuple[Watched, ...]  # what gave `optionals`
    stream: int  # on which `optionals` were computed
    rest: tuple  # Call.tensors_and_rest's second part
    is_ordered: bool  # ops.ordered_gradients computes these

    @staticmethod
    def of(call: Call, reading: Reading, choice: Choice[Problem]) -> Entry | None:
        """call: the simplified call. None if `reading` does not hold all that it reads."""
        captured, modified = reading.tensors, call.mods or Mods(ModTexts())
        position = {id(tensor): n for n, tensor in enumerate(captured)}
        if any(id(tensor) not in position for tensor in modified.read):
            return None
        is_derived = any(tensor is not None for tensor in call.optionals)
        masks = list(enumerate(captured))[reading.score_tensors :] if is_derived else []
        if any(tensor.is_inference() for _, tensor in masks):
            return None
        return Entry(
            reading.held,
            choice,
            call[SCALARS],
            call[OPTIONAL_TENSORS.stop : -1],
            tuple(None if tensor is None else weakref.ref(tensor) for tensor in call.optionals) if is_derived else (),
            None if call.mods is None else call.mods.texts,
            tuple(position[id(tensor)] for tensor in modified.score_tensors),
            tuple(position[id(tensor)] for tensor in modified.mask_tensors),
            (modified.score_numbers, modified.mask_numbers),
            tuple(Watched(n, weakref.ref(tensor), tensor._version, tensor.data_ptr()) for n, tensor in masks),
            _stream_of(call.q),
            call.tensors_and_rest[1],
            choice.backward is not None and ordered_gradients.are_apart(choice, modified),
        )

    def current_optionals(self, q: Tensor, captured: Sequence[Tensor]) -> Sequence[Tensor | None] | None:
        """The optional tensors; None if they belong to other contents or to another stream."""
        if not self.optionals:
            return _NO_OPTIONALS
        if not all([one.is_same(captured) for one in self.watched]):
            return None
        if self.stream != _stream_of(q) or (q.is_cuda and torch_private.cuda_is_capturing()):
            return None
        optionals = [None if one is None else one() for one in self.optionals]
        if any([now is None and one is not None for now, one in zip(optionals, self.optionals)]):
            return None
        return optionals

    def replayed(
        self, q: Tensor, k: Tensor, v: Tensor, captured: Sequence[Tensor], optionals: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor] | None:
        """out and lse by a launch that has run at these addresses; None without one."""
        beside = optional_addresses(optionals) if self.optionals else ()
        if self.texts is not None:
            mask_tensors = [captured[n] for n in self.mask_at]
            read = [captured[n] for n in self.score_at] + mask_tensors
            numbers = *self.numbers[0], *self.numbers[1], _WITHOUT_MORE.dropout_p
            of_mods = addresses_of_captures(read, mask_tensors, (_WITHOUT_MORE.max_scores,), numbers)
            beside = *(beside or _NO_ADDRESSES), *of_mods
        return replay_forward(self.choice, q, k, v, beside)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, captured: Sequence[Tensor], optionals: Sequence[Tensor | None]
    ) -> Call:
        """The simplified call of these tensors."""
        modified = None
        if self.texts is not None:
            tensors = tuple([captured[n] for n in self.score_at]), tuple([captured[n] for n in self.mask_at])
            modified = Mods(self.texts, *tensors, *self.numbers)
        return Call._make((q, k, v, *self.scalars, *optionals, *self.longest, modified))


_NO_OPTIONALS = (None,) * len(Call._fields[OPTIONAL_TENSORS])
_NO_ADDRESSES = optional_addresses(_NO_OPTIONALS)
_WITHOUT_MORE = Mods(ModTexts())  # dropout and max_scores do not come here


def _stream_of(q: Tensor) -> int:
    return torch_private.cuda_current_raw_stream(q.get_device()) if q.is_cuda else 0


def run(q: Tensor, k: Tensor, v: Tensor, reading: Reading) -> Tensor | None:
    """out of a call that was made before; None on a miss."""
    if unseen_mode_active():
        return None
    tensors = (q, k, v, *reading.tensors)
    entry: Entry | None = CACHE.lookup(FUNCTIONS, tensors, reading.key)
    optionals = None if entry is None else entry.current_optionals(q, reading.tensors)
    if entry is None or optionals is None:
        return None
    return (
        _apply(entry, optionals, *tensors)
        if entry.choice.problem.needs_grad
        else _forward(entry, optionals, tensors)[0]
    )


def attend(call: Call, score: object, mask: Mask | None, reading: Reading) -> Tensor:
    """out of a call that `run` did not find, which it finds from now on."""
    bound = mods.bind(call, score, mask)
    out = mods.run_bound(bound)[0]
    if bound.q is call.q and not unseen_mode_active():  # autocast replaces q
        _insert(simplified(bound), reading)
    return out


def _insert(call: Call, reading: Reading) -> None:
    if not call.whole:
        return
    with torch.no_grad():  # `_Repeated` computes gradients
        choice = CACHE.direct_choice(call, attention.decide)
    entry = None if choice is None else Entry.of(call, reading, choice)
    if entry is not None:
        CACHE.insert(FUNCTIONS, (*call[:3], *reading.tensors), reading.key, entry)


def _forward(entry: Entry, optionals: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse. tensors: q, k, v and what the functions capture."""
    q, k, v, *captured = tensors
    replayed = entry.replayed(q, k, v, captured, optionals)
    if replayed is not None:
        return replayed
    call = entry.call(q, k, v, captured, optionals)
    if call.mods is None:
        return attention.forward_directly(call, entry.choice)
    return mods.run_directly(entry.choice, call, call.mods)[:2]


class _Saved(NamedTuple):
    """What the tensors that a forward saved for its backward are: out, lse, q, k, v, the optional tensors, captures."""

    entry: Entry
    optionals: tuple[bool, ...]  # which are there
    captured: tuple[int, ...]  # positions of those that a backward reads. Not a mask's ids, which `optionals` replace
    count: int  # of all captured tensors


class _Repeated(torch.autograd.Function):
    """Autograd of a call that was made before. It returns out alone."""

    @staticmethod
    def forward(ctx, entry, optionals, *tensors):
        out, lse = _forward(entry, optionals, tensors)
        q, k, v, *captured = tensors
        kept = tuple(dict.fromkeys((*entry.score_at, *entry.mask_at)))
        given = [one for one in optionals if one is not None]
        ctx.save_for_backward(out, lse, q, k, v, *given, *[captured[n] for n in kept])
        ctx.saved = _Saved(entry, tuple([one is not None for one in optionals]), kept, len(captured))
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, dout):  # only compiled autograd calls this; the engine calls `_gradients`
        return _gradients(ctx, dout)


def _gradients(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    saved: _Saved = ctx.saved
    entry = saved.entry
    out, lse, q, k, v, *others = ctx.saved_tensors
    rest = iter(others)
    optionals = [next(rest) if one else None for one in saved.optionals]
    captured = dict(zip(saved.captured, rest))
    results = out, lse, torch.zeros_like(out) if dout is None else dout
    found = _replayed(entry, (q, k, v), captured, optionals, results)
    if found is None:
        found = _computed(entry, (q, k, v), captured, optionals, results)
    of_inputs, of_captured = found
    gradients: list[Tensor | None] = [None, None, *of_inputs, *[None] * saved.count]
    for n, gradient in zip(entry.score_at, of_captured):
        gradients[5 + n] = gradient
    return tuple(gradients)


_Found = tuple[Sequence["Tensor | None"], Sequence["Tensor | None"]]  # gradients of q, k, v, and of the score's tensors


def _computed(
    entry: Entry, inputs: tuple, captured: Mapping[int, Tensor], optionals: Sequence[Tensor | None], results: tuple
) -> _Found:
    out, lse, dout = results
    fields: tuple = (*inputs, *entry.scalars, *optionals, *entry.longest)
    if entry.texts is None:
        call = Call(*fields)
        choice = None if torch.is_grad_enabled() else CACHE.direct_choice(call, attention.decide, dout, out, lse)
        if choice is None:
            return attention.gradients_of(call, (dout, out, lse)), ()
        computed = attention.given_gradients(call, choice, (dout, out, lse, None))
        return (computed.dq, computed.dk, computed.dv), ()
    read = [captured[n] for n in (*entry.score_at, *entry.mask_at)]
    counts, constants = (len(entry.score_at), len(entry.mask_at)), (*entry.texts, *entry.numbers, 0.0)
    found, of_captured = mods.gradients_of(counts, constants, (dout, out, lse, None), (*read, None, *fields))
    return found[:3], of_captured


def _replayed(
    entry: Entry, inputs: tuple, captured: Mapping[int, Tensor], optionals: Sequence[Tensor | None], results: tuple
) -> _Found | None:
    """`_computed` by a launch that has run at these addresses; None without one. As `selection.replay_backward`."""
    if torch.is_grad_enabled() or entry.is_ordered or unseen_mode_active(traced=False):
        return None
    out, lse, dout = results
    score_tensors = tuple([captured[n] for n in entry.score_at])
    mask_tensors = tuple([captured[n] for n in entry.mask_at])
    given = [one for one in optionals if one is not None]
    choice = CACHE.lookup(DIRECT, (*inputs, *given, *score_tensors, *mask_tensors, dout, out, lse), entry.rest)
    launches = None if choice is None else launches_here(choice.backward, inputs[0])
    if choice is None or not launches or not lse.is_contiguous():
        return None
    gradients = [empty_here(*kind) for kind in choice.problem.gradients]
    held = pieces(choice.backward, choice.problem.lse_bytes)  # delta follows the workspace in the same allocation
    modified = entry.texts and Mods(entry.texts, score_tensors, mask_tensors, *entry.numbers)
    sums = () if modified is None else tuple(ordered_gradients.sums_of(choice, modified))
    modified = modified and modified._replace(gradients=sums)
    tensors = (*inputs, dout, out, lse, None, *gradients, *held, *(optionals if modified or given else ()))
    addresses = backward_addresses_of(tensors, held[0].data_ptr() + choice.backward.room, dout, out)
    launch = launches.get((*addresses, *addresses_of_mods(modified)))
    if launch is None or not launch():
        return None
    return gradients, () if modified is None else ordered_gradients.totals(choice, modified, sums)


_apply = torch_private.direct_apply(_Repeated)
torch_private.set_engine_backward(_Repeated, _gradients)
