"""Memory for what kernels write: outputs and the scratch that they declare."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

from .kernel import Buffer

empty_here = _empty_strided_cuda  # (shape, strides, dtype) on the current GPU, in half the time of new_empty_strided


def scratch(buffers: Iterable[Buffer], device: torch.device) -> dict[str, Tensor]:
    return {buffer.name: _allocated(buffer, device) for buffer in buffers}


def scratch_here(buffers: Iterable[Buffer], device: torch.device) -> dict[str, Tensor]:
    """The same where `device` is the current GPU."""
    return {buffer.name: fresh(buffer.shape, buffer.dtype) if buffer.fill is None else _allocated(buffer, device) for buffer in buffers}


def _allocated(buffer: Buffer, device: torch.device) -> Tensor:
    if buffer.fill is None:
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return torch.full(buffer.shape, buffer.fill, dtype=buffer.dtype, device=device)


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """torch.empty on the current GPU. A torch.Size would not do."""
    return empty_here(shape, rows_apart(shape), dtype)


@lru_cache(maxsize=1024)
def rows_apart(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor.

    >>> rows_apart((2, 3, 4)), rows_apart((2, 0, 5))
    ((12, 4, 1), (5, 5, 1))
    """
    return tuple(accumulate(reversed([max(1, size) for size in shape[1:]]), int.__mul__, initial=1))[::-1]
