"""Counters in a GPU's memory that are 0 between launches, because each launch leaves them so: nothing need be cleared
before one.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

from .workspace import persistent_zeros

RESERVE = 1 << 16  # int32, a device's: what captures are given of it stays theirs

_held: dict[
    tuple[int | None, int, int, int], Tensor
] = {}  # never let go of: a launch that is repeated knows only the address
_reserves: dict[int | None, tuple[Tensor, int]] = {}  # zeros, and how many are given away
_GIVING = Lock()  # two captures at once are given different ones


def zeros_on(device: torch.device, count: int) -> Tensor:
    """int32, at least `count`: of the current stream, whose launches follow each other, or of what that stream adds to
    one graph.

    A graph may be replayed on any stream, so it has counters of its own; they are zeros already, so it need not clear
    them.

    >>> zeros_on(torch.device("cpu"), 3).tolist()
    [0, 0, 0, 0]
    """
    size = 1 << max(0, count - 1).bit_length()
    if device.type != "cuda":
        return persistent_zeros(device, size)
    stream = torch.cuda.current_stream(device).cuda_stream
    capture = capture_of(stream) if torch.cuda.is_current_stream_capturing() else 0
    key = device.index, stream, capture, size
    known = _held.get(key)
    return known if known is not None else _new(device, key)


def _new(device: torch.device, key: tuple[int | None, int, int, int]) -> Tensor:
    """Counters for a key that was not met; the first of a device outside of a capture sets the reserve aside."""
    _, _, capture, size = key
    with _GIVING:
        if not capture and device.index not in _reserves:
            _reserves[device.index] = persistent_zeros(device, RESERVE), 0
        if key not in _held:
            _held[key] = _reserved(device, size) if capture else persistent_zeros(device, size)
        return _held[key]


def _reserved(device: torch.device, size: int) -> Tensor:
    """Zeros for a capture; cleared by each replay where none was set aside, as before the first launch outside of a
    capture.
    """
    zeros, used = _reserves.get(device.index, (None, 0))
    if zeros is None or used + size > RESERVE:
        return persistent_zeros(device, size)
    _reserves[device.index] = zeros, used + max(size, 8)  # a sector of its own
    return zeros[used : used + size]


def capture_of(stream: int) -> int:
    """The driver's number of the capture that a stream is in; no two captures of a process share one."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    error = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error or not number.value:
        raise RuntimeError(
            f"cuStreamGetCaptureInfo_v2 on a capturing stream: error {error}, capture {number.value}; expected a "
            "capture's number"
        )
    return number.value


@lru_cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
