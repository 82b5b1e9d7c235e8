"""Memory for kernels: their workspace, zeros that persist, and counters that are zero between launches."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

from ...problem.torch_private import empty_strided_cuda
from ..protocol import Buffer, Plan

GRANULARITY = 512  # bytes; torch's allocator places blocks at multiples of it
empty_here = empty_strided_cuda  # (shape, strides, dtype) on the current GPU, in half the time of new_empty_strided


def allocate(buffers: Iterable[Buffer], device: torch.device) -> dict[str, Tensor]:
    """A workspace: a tensor for each buffer, by name."""
    return {buffer.name: _allocated(buffer, device) for buffer in buffers}


class Workspace(dict[str, Tensor]):
    """A workspace cut from few allocations, `pieces`. The addresses of the pieces determine those of all buffers."""

    pieces: list[Tensor]


def pieces(plan: Plan, beyond: int = 0) -> list[Tensor]:
    """Memory for a plan's workspace on the current GPU: one piece for all uninitialized buffers, which costs as much as
    one buffer, and one for each filled buffer. The first piece has `beyond` more bytes at its end.
    """
    size = plan.room + beyond
    held = [empty_here((size,), (1,), torch.uint8)] if size else []
    for buffer in plan.filled:
        place = f"cuda:{held[0].get_device()}" if held else "cuda"
        held.append(torch.full(buffer.shape, buffer.fill or 0.0, dtype=buffer.dtype, device=place))
    return held


def pieces_of(workspace: dict[str, Tensor]) -> Iterable[Tensor]:
    """The allocations behind a workspace."""
    return workspace.pieces if isinstance(workspace, Workspace) else workspace.values()


def cut(plan: Plan, pieces: list[Tensor]) -> Workspace:
    """The workspace by name, in memory from `pieces(plan)`."""
    filled = iter(pieces[len(pieces) - len(plan.filled) :])
    workspace, offset = Workspace(), 0
    for buffer in plan.buffers:
        if buffer.fill is None:
            size = math.prod(buffer.shape) * buffer.dtype.itemsize
            workspace[buffer.name] = pieces[0][offset : offset + size].view(buffer.dtype).view(buffer.shape)
            offset += _rounded(size)
        else:
            workspace[buffer.name] = next(filled)
    workspace.pieces = pieces
    return workspace


def room(buffers: Iterable[Buffer]) -> int:
    """Bytes of all uninitialized buffers, each rounded up to GRANULARITY.

    >>> rows, total = Buffer("rows", (3,), torch.float32), Buffer("sum", (9,), torch.float32, 0.0)
    >>> room([rows, total, Buffer("counter", (1,), torch.int32)])
    1024
    """
    return sum(_rounded(math.prod(buffer.shape) * buffer.dtype.itemsize) for buffer in buffers if buffer.fill is None)


def _rounded(size: int) -> int:
    return -(-size // GRANULARITY) * GRANULARITY


def _allocated(buffer: Buffer, device: torch.device) -> Tensor:
    if buffer.fill is None:
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return torch.full(buffer.shape, buffer.fill, dtype=buffer.dtype, device=device)


def persistent_zeros(device: torch.device, count: int) -> Tensor:
    """int32 [count] for the rest of the process, valid on all streams and outside the caller's memory pool.

    Within a capture they belong to the graph, and each replay clears them.

    The first run of a call under torch.compile(mode="reduce-overhead") allocates from a pool that may hold nothing but
    the call's outputs when the run ends. Such a pool belongs to a thread, so another thread allocates.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            return torch.zeros(count, dtype=torch.int32, device=device)
    with ThreadPoolExecutor(1) as other:
        return other.submit(_synchronized_zeros, device, count).result()


def _synchronized_zeros(device: torch.device, count: int) -> Tensor:
    made = torch.zeros(count, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # once, so that launches on other streams need not wait
    return made


# ---------------------------------------------------------------- counters

RESERVE = 1 << 16  # int32 per device, from which captures get counters that they keep

_counters: dict[tuple[int | None, int, int, int], Tensor] = {}  # never freed: a replayed launch holds only the address
_reserves: dict[int | None, tuple[Tensor, int]] = {}  # zeros, and how many of them are in use
_RESERVING = Lock()  # two captures at the same time get different counters


def zeros_on(device: torch.device, count: int) -> Tensor:
    """int32 counters, at least `count`, that are 0 between launches because each launch resets them.

    They belong to the current stream, whose launches run in order, or to the part of a graph that is captured on it. A
    graph may be replayed on any stream, so it has counters of its own.

    >>> zeros_on(torch.device("cpu"), 3).tolist()
    [0, 0, 0, 0]
    """
    size = 1 << max(0, count - 1).bit_length()
    if device.type != "cuda":
        return persistent_zeros(device, size)
    stream = torch.cuda.current_stream(device).cuda_stream
    capture = capture_of(stream) if torch.cuda.is_current_stream_capturing() else 0
    key = device.index, stream, capture, size
    known = _counters.get(key)
    return known if known is not None else _new(device, key)


def _new(device: torch.device, key: tuple[int | None, int, int, int]) -> Tensor:
    """Counters for a new key. The first call on a device outside a capture allocates the reserve."""
    _, _, capture, size = key
    with _RESERVING:
        if not capture and device.index not in _reserves:
            _reserves[device.index] = persistent_zeros(device, RESERVE), 0
        if key not in _counters:
            _counters[key] = _reserved(device, size) if capture else persistent_zeros(device, size)
        return _counters[key]


def _reserved(device: torch.device, size: int) -> Tensor:
    """Counters for a capture. Without a reserve, i.e. before the first launch outside a capture, each replay of the
    graph clears them.
    """
    zeros, used = _reserves.get(device.index, (None, 0))
    if zeros is None or used + size > RESERVE:
        return persistent_zeros(device, size)
    _reserves[device.index] = zeros, used + max(size, 8)  # at least one 32-byte sector
    return zeros[used : used + size]


def capture_of(stream: int) -> int:
    """The driver's number of the capture that a stream is in; unique within a process."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    error = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error or not number.value:
        found = f"error {error}, capture {number.value}"
        raise RuntimeError(f"cuStreamGetCaptureInfo_v2 on a capturing stream: {found}; expected a capture's number")
    return number.value


@lru_cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
