"""Whether the tensors of ready-made scores and masks are as large as a call.

A function's own indices are clamped to its tensors. strobe.bias, strobe.alibi, masks made from tensors and tables of
blocks are indexed by the positions themselves, so a tensor that is too small is a mistake. So is one of more heads or
batch entries than the call, for example the slopes of all heads where a process holds some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ..errors import InvalidProblem
from ..problem.call import Call
from ..problem.mask import Documents

MEANING = {"b": "batch entries", "h": "query heads", "q": "queries", "k": "keys"}


class Blocks(NamedTuple):
    """An axis of a table of blocks, behind whose last block there is an empty one."""

    name: str  # of MEANING
    size: int  # positions of a block
    made_for: int | None = None  # positions of a BlockMask, whose last block may end behind them


Axis = str | Blocks | None  # a position of MEANING
Axes = tuple[Axis, ...]  # for each dimension of a tensor what indexes it, if a position does


def axes_of(tensor: Tensor) -> Axes:
    """The axes of a tensor [B, H_q, S_q, S_k], or of its last dimensions. A dimension of size 1 is broadcast.

    >>> import torch
    >>> axes_of(torch.zeros(4, 1, 8))
    ('h', None, 'k')
    """
    names = ("b", "h", "q", "k")[4 - tensor.dim() :]
    return tuple([None if size == 1 else name for name, size in zip(names, tensor.shape)])


def check(
    argument: str, tensors: Sequence[Tensor], axes: Sequence[Axes], sizes: Mapping[str, int], is_part: bool = False
) -> None:
    """Raises InvalidProblem if a tensor has fewer elements than a call has positions, or more heads or batch entries.
    sizes: by the names of `MEANING`. is_part: the call is a part of the one that the tensors are for, so they may have
    more.
    """
    for tensor, names in zip(tensors, axes):
        for dim, axis in enumerate(names):
            if axis is None:
                continue
            if isinstance(axis, Blocks):
                _check_blocks(argument, tensor.shape[dim] - 1, axis, sizes[axis.name])
                continue
            name, count = axis, tensor.shape[dim]
            wanted, is_exact = sizes[name], name in ("b", "h") and not is_part
            if count < wanted or (is_exact and count > wanted):
                got = f"a tensor of shape {list(tensor.shape)}, whose dimension {dim} counts {MEANING[name]}"
                expected = f"{'' if is_exact else 'at least '}{wanted}, the {MEANING[name]} of the call"
                remedy = "make the tensor as large as the call" + "; a dimension of size 1 is broadcast" * (
                    tensor.dim() > 2
                )
                raise InvalidProblem(argument, got, expected, remedy)


def check_built_in(batch: int | None, documents: Documents | None, sizes: Mapping[str, int]) -> None:
    """Raises InvalidProblem if prefixes, lengths or ids are for another batch, or ids for other lengths. A call of
    packed queries or over a cache has no lengths to compare.
    """
    if batch is not None and batch != sizes["b"]:
        got, remedy = f"prefixes, key lengths or ids of {batch} batch entries", "make it for this batch"
        raise InvalidProblem("mask", got, f"{sizes['b']}, the batch entries of the call", remedy)
    if documents is not None and sizes["q"] and sizes["k"]:
        found, wanted = (documents.ids_q.shape[1], documents.ids_k.shape[1]), (sizes["q"], sizes["k"])
        if found != wanted:
            got = f"documents' ids of {found[0]} queries and {found[1]} keys"
            raise InvalidProblem(
                "mask", got, f"{wanted[0]} and {wanted[1]}, those of the call", "build the mask for this call's shapes"
            )


def _check_blocks(argument: str, count: int, axis: Blocks, wanted: int) -> None:
    if axis.made_for is not None and axis.made_for < wanted:
        got, needed = f"a BlockMask for {axis.made_for} {MEANING[axis.name]}", f"one for the call's {wanted}"
        raise InvalidProblem(argument, got, needed, "make it for the lengths of the call")
    if count * axis.size < wanted:
        got = f"lists of {count} blocks of {axis.size} {MEANING[axis.name]}"
        needed = f"at least {-(-wanted // axis.size)} blocks for the call's {wanted} {MEANING[axis.name]}"
        remedy = "pass num_kv_blocks=" if axis.name == "k" else "pass a count and a row of numbers for each block"
        raise InvalidProblem(argument, got, needed, remedy)


def sizes_of(call: Call) -> dict[str, int]:
    """How many positions of each kind a call has: no queries and keys of packed calls, whose sequences have their
    own.
    """
    if call.q.dim() != (3 if call.packed else 4) or call.k.dim() != call.q.dim():  # which `check` refuses
        return dict.fromkeys(MEANING, 0)
    if call.cu_seqlens_q is not None:
        return {"b": call.cu_seqlens_q.shape[0] - 1, "h": call.q.shape[1], "q": 0, "k": 0}
    return {"b": call.q.shape[0], "h": call.q.shape[2], "q": call.q.shape[1], "k": call.k.shape[1]}
