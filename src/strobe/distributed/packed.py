"""Packed sequences under a plan: they are documents of one batch entry, since queries and keys lie alike."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import wrong_type
from ..problem.mask import Documents, Mask, as_int32
from .plan import Plan


def documents_of(cu_seqlens: Tensor, seqlen: int) -> Mask:
    """The sequences of a packed tensor as documents of one batch entry. Runs on the offsets' device."""
    if not isinstance(cu_seqlens, Tensor):
        raise wrong_type("cu_seqlens", cu_seqlens, "an int32 tensor [n + 1]", "give the running sum of lengths")
    ends = as_int32(cu_seqlens)
    place = torch.arange(seqlen, device=ends.device, dtype=torch.int32)
    ids = torch.searchsorted(ends.contiguous(), place, right=True).to(torch.int32) - 1
    ids = (
        torch.where((place < ends[:1]) | (place >= ends[-1:]), -1, ids)[None] if len(ends) > 1 else place[None] * 0 - 1
    )
    return Mask(documents=Documents.of(ids, ids))


def mask_of_offsets(plan: Plan, cu_seqlens: Tensor) -> Mask:
    """The documents of these offsets. Those of `plan_varlen` are kept, and so is what the plan read of them."""
    kept = plan.offsets.get(_key(cu_seqlens)) if isinstance(cu_seqlens, Tensor) else None
    if kept is None:
        documents = documents_of(cu_seqlens, plan.sizes.seqlen)
        remember_offsets(plan, cu_seqlens, documents)
        return documents
    return kept[1]


def remember_offsets(plan: Plan, cu_seqlens: Tensor, documents: Mask) -> None:
    plan.offsets[_key(cu_seqlens)] = cu_seqlens, documents  # the tensor too, so that its id stays its own


def _key(cu_seqlens: Tensor) -> tuple:
    return id(cu_seqlens), version_of(cu_seqlens)


def version_of(tensor: Tensor) -> int | tuple[int, ...]:
    """What changes when other numbers are written to the tensor. Inference tensors have no version: theirs are their
    numbers, and reading them waits for the device.
    """
    return tuple(tensor.flatten().tolist()) if tensor.is_inference() else tensor._version
