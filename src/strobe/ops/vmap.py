"""vmap rules of the ops. The vmap dimension is folded into the batch if this is equivalent; else the op runs once per
entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedProblem
from ..problem.call import Call
from ..problem.decode import DecodeCall
from ..problem.paged import PagedCall

Op = Callable[..., Sequence[Tensor]]
GIVEN = ("dout", "out", "lse", "dlse")  # arguments of the backward op before those of the call
NAMES = {
    "forward": Call._fields,
    "backward": (*GIVEN, *Call._fields),
    "decode": DecodeCall._fields,
    "paged": PagedCall._fields,
}


def register(library: torch.library.Library, name: str) -> None:
    """Register the vmap rule of an op in NAMES. Without a rule, vmap runs the op once per entry and warns."""
    op = getattr(torch.ops.strobe, name).default

    def rule(info: Any, in_dims: Sequence[int | None], *flat: Any) -> tuple[tuple, tuple]:
        first = [argument if dim is None else _leading(argument, dim) for argument, dim in zip(flat, in_dims)]
        batched = [dim is not None for dim in in_dims]
        folded = _folded(name, first, batched, info.batch_size)
        return (
            _in_turn(op, first, batched, info.batch_size) if folded is None else _together(op, *folded, info.batch_size)
        )

    torch.library.register_vmap(f"strobe::{name}", rule, lib=library)


def _leading(tensor: Tensor, dim: int) -> Tensor:
    """The tensor with the vmap dimension first. It is copied if its last dimension is then not contiguous, as kernels
    require.
    """
    moved = tensor.movedim(dim, 0)
    return moved if moved.stride(-1) == 1 else moved.contiguous()


def _folded(name: str, flat: Sequence[Any], batched: Sequence[bool], size: int) -> tuple[list[Any], int] | None:
    """The arguments of one call over all entries, and the batch size per entry; None if no single call is
    equivalent."""
    shared = _shared(name, flat)
    if shared is None or any(many and field in shared for field, many in zip(NAMES[name], batched)):
        return None
    folds = [isinstance(argument, Tensor) and field not in shared for field, argument in zip(NAMES[name], flat)]
    wide = [a if not f or many else a.expand(size, *a.shape) for a, f, many in zip(flat, folds, batched)]
    if any(f and a.dim() < 2 for a, f in zip(wide, folds)):
        return None  # the call of a single entry then raises for the shape
    batches = {a.shape[1] for a, f in zip(wide, folds) if f}
    if len(batches) > 1:
        return None
    return [a.flatten(0, 1) if f else a for a, f in zip(wide, folds)], batches.pop()


def _shared(name: str, flat: Sequence[Any]) -> tuple[str, ...] | None:
    """The names of tensors without a batch dimension, which one call has only once; None if the op reduces over the
    batch or packs it.
    """
    if name == "paged":  # offsets count tokens
        return None
    if name == "decode":
        call = DecodeCall(*flat)
        return ("k_scale", "v_scale", "sinks") if call.page_table is None else ("k", "v", "k_scale", "v_scale", "sinks")
    call = Call(*flat[len(GIVEN) :] if name == "backward" else flat)
    if call.packed or (
        name == "backward" and call.sinks is not None
    ):  # offsets count tokens; dsinks sums over the batch
        return None
    return ("sinks",)


def _together(op: Op, folded: Sequence[Any], batch: int, size: int) -> tuple[tuple, tuple]:
    found = op(*folded)
    # without sinks, the backward returns an empty dsinks, which has no batch dimension
    parts = [one.dim() > 1 for one in found]
    parted = tuple(one.unflatten(0, (size, batch)) if part else one for one, part in zip(found, parts))
    return parted, tuple(0 if part else None for part in parts)


def _in_turn(op: Op, flat: Sequence[Any], batched: Sequence[bool], size: int) -> tuple[tuple, tuple]:
    if not size:
        raise UnsupportedProblem(
            "vmap over no entry of packed sequences, pages or sinks: leave the call out where there is none"
        )
    found = [op(*[argument[n] if many else argument for argument, many in zip(flat, batched)]) for n in range(size)]
    return tuple(torch.stack(parts) for parts in zip(*found)), (0,) * len(found[0])
