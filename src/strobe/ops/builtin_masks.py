"""Replaces a mask function that is a built-in mask, in full or in part, by that mask.

The kernels of windows, prefixes and documents compute which keys a tile visits from the mask's numbers, evaluate no
function, and choose their tiles for the mask. `mods.recognize` finds the masks in the function's program. The tensors
of these masks are made on the device and kept while the captured tensors do not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import KernelFault
from ..kernels.device.mask_blocks import FEWEST_ELEMENTS
from ..mods.derived import DerivedTensors, identity_of
from ..mods.evaluate import evaluate
from ..mods.program import Program
from ..mods.recognize import Alike, Lengths, Limit, Recognized, Window, recognize, without_abs
from ..problem.call import NO_BOUND, Call
from ..problem.mask import Documents, Mask
from ..problem.mods import Mods

KEPT = DerivedTensors(1 << 28)
MOST_CALLS = 256
# key of a call -> (storages of what its mask captures, what `_taken` found, with weak references to tensors)
_calls: dict[tuple, tuple[list[StorageWeakRef], str, list[Any]]] = {}


def simplified(call: Call) -> Call:
    """The call with fewer or shorter functions of the same meaning."""
    return with_simpler_score(with_builtin_mask(call))


def with_builtin_mask(call: Call) -> Call:
    """The call with the built-in masks of its mask function in the call's own fields. A call without such masks is
    returned as it is. A call that needs no function any more has no `mods`. The result for a mask is kept while the
    tensors that it captures do not change.
    """
    mods = call.mods
    if mods is None or not mods.texts.mask or not _is_plain((call.q, *mods.mask_tensors)):
        return call
    if call.q.dim() != (3 if call.packed else 4) or call.k.dim() != call.q.dim():
        return call  # which `check` refuses
    key = _key_of(call)
    known = None if key is None else _calls.get(key)
    if known is not None and not any([storage.expired() for storage in known[0]]):
        fields = [one() if type(one) is weakref.ref else one for one in known[2]]
        if not any([one is None and type(kept) is weakref.ref for one, kept in zip(fields, known[2])]):
            return _replaced(call, mods, known[1], fields)
    found = _taken(call, mods)
    left_over = mods.texts.mask if found is call else "" if found.mods is None else found.mods.texts.mask
    fields = [getattr(found, name) for name in _MASK_FIELDS]
    if key is not None:
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in mods.mask_tensors]
        _calls[key] = storages, left_over, [weakref.ref(one) if isinstance(one, Tensor) else one for one in fields]
    return found


_MASK_FIELDS = ("left", "right", "prefix", "key_lengths", "ids_q", "ids_k", "spans_q", "spans_k")
_AT = [Call._fields.index(name) for name in _MASK_FIELDS]


def _key_of(call: Call) -> tuple | None:
    """Key of what `_taken` finds for a call. None for calls whose result is not kept: packed calls, calls that have
    built-in masks beside the function, calls in a CUDA graph, and tensors without a version.
    """
    mods = call.mods
    if mods is None or call.packed or call.prefix is not None or call.key_lengths is not None or call.ids_q is not None:
        return None
    identity = identity_of(mods.mask_tensors, call.q.device)
    if identity is None:
        return None
    sizes = call.q.shape[:2], call.k.shape[1], call.left, call.right, call.q.device
    return mods.texts.mask, mods.mask_numbers, identity, sizes, _may_have_ranges(call)


def _replaced(call: Call, mods: Mods, left_over: str, fields: Sequence[Any]) -> Call:
    if left_over == mods.texts.mask:
        return call
    values = list(call)
    for at, value in zip(_AT, fields):
        values[at] = value
    captured = (mods.mask_tensors, mods.mask_numbers) if left_over else ((), ())
    texts = mods.texts._replace(mask=left_over)
    values[-1] = _needed(mods._replace(texts=texts, mask_tensors=captured[0], mask_numbers=captured[1]))
    return Call._make(values)


def _taken(call: Call, mods: Mods) -> Call:
    if call.packed:  # positions count from each sequence's start, and the diagonal of equal lengths is 0
        if call.cu_seqlens_q is not call.cu_seqlens_k:
            return call
        lengths = Lengths(call.q.shape[0], call.k.shape[0], 0)
    else:
        lengths = Lengths(call.q.shape[1], call.k.shape[1], call.k.shape[1] - call.q.shape[1])
    found = recognize(mods.texts.mask, mods.mask_numbers, lengths, _may_have_ranges(call))
    if found.rest is not None and found.left is None and found.right is None:
        return call
    mask = _mask(call, found)
    if mask is None:  # a document is not one run of positions: take only the window
        found = recognize(mods.texts.mask, mods.mask_numbers, lengths, False)
        if found.left is None and found.right is None:
            return call
        mask = Mask(found.left, found.right)
    left_over = mods._replace(texts=mods.texts._replace(mask="" if found.rest is None else found.rest.text))
    if found.rest is None:
        left_over = left_over._replace(mask_tensors=(), mask_numbers=())
    return call._replace(mods=_needed(left_over)).with_mask(call.mask & mask)


def with_simpler_score(call: Call) -> Call:
    """The call with a score's program that is the same wherever the call's window shows keys (`recognize.without_abs`).

    Without |.| strobe.alibi costs two instructions less for each score.
    """
    mods = call.mods
    if mods is None or " abs " not in mods.texts.score or not _is_plain((call.q,)) or call.q.dim() != call.k.dim():
        return call
    if call.packed:
        lengths = Lengths(call.q.shape[0], call.k.shape[0], 0)
    else:
        lengths = Lengths(call.q.shape[1], call.k.shape[1], call.k.shape[1] - call.q.shape[1])
    left, right = (None if bound == NO_BOUND else bound for bound in (call.left, call.right))
    window = Window(left, right, call.packed and call.cu_seqlens_q is not call.cu_seqlens_k)
    shorter = lambda text: without_abs(text, mods.score_numbers, lengths, window) if text else ""
    texts = mods.texts._replace(score=shorter(mods.texts.score), gradient=shorter(mods.texts.gradient))
    return call._replace(mods=mods._replace(texts=texts))


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    return all([type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors])


def _needed(mods: Mods) -> Mods | None:
    has_some = mods.texts.score or mods.texts.mask or mods.texts.dropout or mods.texts.max_scores
    return mods if has_some else None


def _may_have_ranges(call: Call) -> bool:
    """Whether a prefix, key lengths or documents may be taken. No kernel of their gradients on Hopper is deterministic,
    and sums for captured gradients are longer without documents.
    """
    has_ranges = call.prefix is not None or call.key_lengths is not None or call.ids_q is not None
    ordered = call.deterministic and call.needs_grad
    sums = call.mods is not None and "scatters" in call.mods.texts.gradient
    return not (call.packed or has_ranges or ordered or sums)


def _mask(call: Call, found: Recognized) -> Mask | None:
    """The built-in mask. None if a document is not one run of positions, or if the host must not read whether it is."""
    mods = call.mods
    if mods is None:
        raise KernelFault("a mask without a function")
    mask = Mask(found.left, found.right)
    wanted = [found.prefix, *found.key_lengths]
    if not any(wanted) and found.documents is None:
        return mask
    identity = identity_of(mods.mask_tensors, call.q.device)
    key = mods.texts.mask, identity, mods.mask_numbers, tuple(call.q.shape[:2]), call.k.shape[1]

    def kept(name: str, make) -> tuple[Tensor, ...]:
        return make() if identity is None else KEPT.get((*key, name), mods.mask_tensors, make)

    if found.prefix is not None:
        prefix = found.prefix
        mask = mask & Mask(prefix=kept("prefix", lambda: (_limit(call, (prefix,)),))[0])
    if found.key_lengths:
        mask = mask & Mask(key_lengths=kept("key_lengths", lambda: (_limit(call, found.key_lengths),))[0])
    if found.documents is not None:
        alike = found.documents
        on_gpu = call.q.device.type != "cpu"
        if on_gpu and (identity is None or call.q.shape[1] * call.k.shape[1] < FEWEST_ELEMENTS):
            return None  # whether documents are runs is read once for each version of the ids
        tensors = kept("documents", lambda: _documents(call, alike))
        if not tensors:
            return None
        mask = mask & Mask(documents=Documents(*tensors))
    return mask


def _values(call: Call, program: Program, side: str) -> Tensor:
    """[B, S] of a program of b and the positions of one side, or [B, 1] of b."""
    device = call.q.device
    positions = lambda count: torch.arange(count, dtype=torch.int32, device=device)
    inputs = {"b": positions(call.q.shape[0])[:, None]}
    if side:
        inputs[side] = positions((call.q if side == "q" else call.k).shape[1])
    mods = call.mods
    captured = ((), ()) if mods is None else (mods.mask_tensors, mods.mask_numbers)
    count = inputs[side].shape[0] if side else 1
    return evaluate(program, inputs, captured)[0].expand(call.q.shape[0], count)


def _limit(call: Call, limits: Sequence[Limit]) -> Tensor:
    """int32 [B]: the least of the limits, between 0 and S_k."""
    found = torch.full(call.q.shape[:1], call.k.shape[1], dtype=torch.int64, device=call.q.device)
    for limit in limits:
        value = limit.shift
        if limit.value is not None:
            value = value + _values(call, limit.value, "")[:, 0].to(torch.int64)
        found = torch.minimum(found, torch.as_tensor(value, device=call.q.device))
    return found.clamp(min=0).to(torch.int32)


def _documents(call: Call, alike: Alike) -> tuple[Tensor, ...]:
    """The tensors of `Documents`; an empty tuple if a document is not one run of positions.

    A function's ids may be any integers, and `Documents` needs int32 ids from 0 on, so an id becomes its first index
    among all sorted ids. On a GPU the host waits for the result.
    """
    values = [_values(call, program, side) for program, side in ((alike.queries, "q"), (alike.keys, "k"))]
    ordered = torch.cat([value.to(torch.int64) for value in values], 1).sort(dim=1).values
    ids = [torch.searchsorted(ordered, value.to(torch.int64).contiguous()).to(torch.int32) for value in values]
    for n, (program, side) in enumerate(((alike.queries_if, "q"), (alike.keys_if, "k"))):
        if program is not None:
            ids[n] = torch.where(_values(call, program, side), ids[n], -1)
    scattered = [_runs(side) != _distinct(side) for side in ids]
    if bool(torch.stack(scattered).any()):
        return ()
    shared = ids[0].shape == ids[1].shape and alike.queries_if is alike.keys_if is None and _alike(alike)
    found = Documents.of(ids[0], ids[0] if shared else ids[1])
    return found.ids_q, found.ids_k, found.spans_q, found.spans_k


def _alike(documents: Alike) -> bool:
    """Whether ids of keys are those of queries."""
    nodes = [
        tuple(node._replace(value="q") if node.op == "input" and node.value == "k" else node for node in program.nodes)
        for program in (documents.queries, documents.keys)
    ]
    return nodes[0] == nodes[1]


def _runs(ids: Tensor) -> Tensor:
    return (ids[:, 1:] != ids[:, :-1]).sum()


def _distinct(ids: Tensor) -> Tensor:
    ordered = ids.sort(dim=1).values
    return (ordered[:, 1:] != ordered[:, :-1]).sum()
