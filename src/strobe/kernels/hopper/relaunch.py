"""Launching a compiled kernel again without Triton's argument processing, which costs more than a short kernel runs.

Triton binds and specialises every argument of every call, constants included. A plan fixes all of them but the addresses: the first launch
goes through Triton and leaves the compiled kernel here; later ones give its launcher the same arguments with new addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from ...problem import ALIGNMENT

MOST = 4096  # kernels kept; more distinct calls than this begin anew


class View:
    """What Triton's launcher reads of a tensor descriptor."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int]):
        self.base, self.shape, self.strides, self.padding = base, shape, strides, "zero"


class Known(NamedTuple):
    compiled: Any
    programs: int
    views: tuple[tuple[list[int], list[int]], ...]  # shape and strides of each descriptor; the tensors themselves are not kept
    rest: tuple[Any, ...]  # all that is no tensor
    owner: object  # kept, so that its id in the key stays taken


_KNOWN: dict[Hashable, Known] = {}


def start(owner: object, key: Hashable, views: Sequence[Tensor], pointers: Sequence[Tensor | None], first: Callable[[], Any]) -> None:
    """Launch what `first()` describes: a Launch whose arguments are descriptors of `views`, then `pointers`, then numbers.

    The same object `owner` (a plan) and an equal `key` must mean the same numbers, shapes, strides and dtypes; alignments of pointers are
    looked at here.
    """
    if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:  # a profiler wants Triton's own launch
        first().start()
        return
    device = views[0].device.index
    key = (id(owner), key, device, *(p is None or p.data_ptr() % ALIGNMENT == 0 for p in pointers))
    known = _KNOWN.get(key)
    if known is None:
        launch = first()
        compiled = launch.start()
        if compiled is not None:  # a simulated launch compiles nothing
            if len(_KNOWN) >= MOST:
                _KNOWN.clear()
            numbers = launch.arguments[len(views) + 1 :]
            shapes = tuple(view and (view.shape, view.strides) for view in launch.arguments[: len(views)])
            _KNOWN[key] = Known(compiled, launch.programs, shapes, numbers, owner)
        return
    kernel = known.compiled
    stream = torch.cuda.current_stream(device).cuda_stream
    described = [View(base, *shape) if base is not None else None for base, shape in zip(views, known.views)]
    kernel.run(known.programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *described, pointers, *known.rest)
