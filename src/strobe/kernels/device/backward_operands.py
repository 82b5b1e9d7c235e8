"""What the backwards of Hopper and Blackwell read and write: tensors that TMA can address, and offsets that rise."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import KernelFault
from ...problem.call import Call
from ...problem.problem import ALIGNMENT
from ..protocol import Plan
from ..runtime.tma_requirements import MOST_ROWS, entries_apart
from .tma import addressable


def operand(dout: Tensor, call: Call, key_ranges: bool) -> Tensor:
    """dout in q's dtype with strides that TMA can address, copied only if necessary."""
    aligned = all(stride * dout.element_size() % ALIGNMENT == 0 and stride > 0 for stride in dout.stride()[:-1])
    aligned = aligned and dout.stride(-1) == 1 and dout.data_ptr() % ALIGNMENT == 0
    if dout.dtype == call.q.dtype and aligned and (not key_ranges or batch_stride(dout) is not None):
        return dout
    return addressable(torch.empty(dout.shape, dtype=call.q.dtype, device=dout.device)).copy_(dout)


def writable(gradient: Tensor, key_ranges: bool) -> Tensor:
    """`addressable`; with key ranges, also with a batch stride that is a multiple of the row stride."""
    held = addressable(gradient)
    if not key_ranges or batch_stride(held) is not None:
        return held
    return addressable(torch.empty(held.shape, dtype=held.dtype, device=held.device))


def batch_stride(tensor: Tensor) -> int | None:
    """In rows. None if it is not a multiple of the row stride, or if the last row is beyond TMA's limit."""
    entries, length = tensor.shape[:2]
    apart = entries_apart(entries, tensor.stride())
    return None if apart is None or length + (entries - 1) * apart > MOST_ROWS else apart


def rows_apart(plan: Plan, tensor: Tensor) -> int:
    """`batch_stride` of a tensor that the kernel addresses. Float32 sums of dK and dV may be too large for it."""
    apart = batch_stride(tensor)
    if apart is None:
        raise KernelFault(f"{plan.kernel.name}: a batch of more than {MOST_ROWS} rows, TMA's limit; split the batch")
    return apart


def rising_offsets(workspace: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Where the first kernel copies cu_seqlens_q and cu_seqlens_k (`device.seqlen.write_rising_offsets`); None without
    packed sequences.
    """
    offsets = workspace.get("offsets")
    return (None, None) if offsets is None else (offsets[0], offsets[1:])
