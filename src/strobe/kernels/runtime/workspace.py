"""Memory for kernels: outputs, the workspace that they declare, and zeros that persist."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ...problem.torch_private import empty_strided_cuda
from ..protocol import Buffer, Plan

APART = 512  # bytes: torch's allocation granularity
empty_here = empty_strided_cuda  # (shape, strides, dtype) on the current GPU, in half the time of new_empty_strided


def scratch(buffers: Iterable[Buffer], device: torch.device) -> dict[str, Tensor]:
    return {buffer.name: _allocated(buffer, device) for buffer in buffers}


class Carved(dict[str, Tensor]):
    """A launch's workspace by name, cut from `pieces`, whose addresses identify it."""

    pieces: list[Tensor]


def pieces(plan: Plan, beyond: int = 0) -> list[Tensor]:
    """Memory for a plan's workspace on the current GPU: one uninitialised piece, followed by `beyond` bytes, and the
    filled buffers. Allocating one piece takes as long as one buffer.
    """
    size = plan.room + beyond
    held = [empty_here((size,), (1,), torch.uint8)] if size else []
    for buffer in plan.filled:
        place = f"cuda:{held[0].get_device()}" if held else "cuda"
        held.append(torch.full(buffer.shape, buffer.fill or 0.0, dtype=buffer.dtype, device=place))
    return held


def pieces_of(workspace: dict[str, Tensor]) -> Iterable[Tensor]:
    """The allocations of a workspace: the pieces it was cut from, or its tensors."""
    return workspace.pieces if isinstance(workspace, Carved) else workspace.values()


def carved(plan: Plan, pieces: list[Tensor]) -> Carved:
    """The workspace by name."""
    filled = iter(pieces[len(pieces) - len(plan.filled) :])
    workspace, offset = Carved(), 0
    for buffer in plan.buffers:
        if buffer.fill is None:
            size = math.prod(buffer.shape) * buffer.dtype.itemsize
            workspace[buffer.name] = pieces[0][offset : offset + size].view(buffer.dtype).view(buffer.shape)
            offset += _apart(size)
        else:
            workspace[buffer.name] = next(filled)
    workspace.pieces = pieces
    return workspace


def room(buffers: Iterable[Buffer]) -> int:
    """Bytes of all uninitialised buffers.

    >>> rows, counter = Buffer("rows", (3,), torch.float32), Buffer("counter", (1,), torch.int32)
    >>> room([rows, Buffer("sum", (9,), torch.float32, 0.0), counter])
    1024
    """
    return sum(_apart(math.prod(buffer.shape) * buffer.dtype.itemsize) for buffer in buffers if buffer.fill is None)


def _apart(size: int) -> int:
    """A size rounded up to the granularity of torch's allocator."""
    return -(-size // APART) * APART


def _allocated(buffer: Buffer, device: torch.device) -> Tensor:
    if buffer.fill is None:
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return torch.full(buffer.shape, buffer.fill, dtype=buffer.dtype, device=device)


def persistent_zeros(device: torch.device, count: int) -> Tensor:
    """Zeros int32 [count] for the rest of the process, valid on all streams and outside the caller's memory pool.

    During a capture they belong to the graph, and each replay clears them.

    Under torch.compile(mode="reduce-overhead"), the first run of a call allocates from a pool that may hold only its
    outputs at the end. The pool belongs to a thread, so another thread allocates.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            return torch.zeros(count, dtype=torch.int32, device=device)
    with ThreadPoolExecutor(1) as other:
        return other.submit(_synchronized_zeros, device, count).result()


def _synchronized_zeros(device: torch.device, count: int) -> Tensor:
    made = torch.zeros(count, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # once: launches on other streams do not wait for this one
    return made
