"""im2col descriptors: a TMA load that gathers the pixels of a convolution's window, row by row of its output.

The box of pixels reaches from the lower corner to the tensor's last pixel plus the upper corner, in each spatial
dimension. A load starts at a pixel and goes on in the order of memory, in steps of the element strides. Past the end of
the box it goes on at the lower corner of the next row, then of the next image. The offsets move every pixel after that.

Source: PTX ISA, tensor im2col mode; Triton's tutorial 13-conv-im2col.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .memory import Granules, Memory
from .values import Descriptor, to_bits

_OFFSET_BITS = 16  # of all offsets of an instruction


class Box(NamedTuple):
    """The spatial window of an im2col descriptor, without the dimensions of images and channels."""

    lower: Sequence[int]  # the first pixel
    upper: Sequence[int]  # of the last pixel, relative to the last one of the tensor
    steps: Sequence[int]  # between neighbouring pixels


class Source(NamedTuple):
    """What a load reads of global memory: the granules, and how many bytes."""

    mask: Granules
    nbytes: int


class Im2Col(Descriptor):
    """An im2col descriptor of a tensor [images, ..., rows, columns, channels]."""

    __slots__ = ("box", "tensor")

    def __init__(self, whole: Descriptor, box: Box):
        if not isinstance(whole.view, np.ndarray):
            raise NotImplementedError(f"an im2col descriptor of {whole.memory.name} that wraps")
        super().__init__(whole.memory, whole.view, whole.block, whole.elem, whole.nan)
        self.signed, self.box, self.tensor = whole.signed, box, whole.view

    def strange_offset(self, offsets: Sequence[int]) -> str:
        """Why the instruction cannot encode these offsets, empty if it can."""
        limit = 1 << _OFFSET_BITS // len(offsets)
        return (
            "" if all(0 <= one < limit for one in offsets) else f"offsets {list(offsets)} are not in [0, {limit - 1}]"
        )

    def pixels(self, start: Sequence[int], offsets: Sequence[int], count: int) -> np.ndarray:
        """The coordinates of `count` pixels from `start` on, [count, images and spatial dimensions].

        >>> memory = Memory("x", "global", np.zeros(32, np.uint8), 1, True)
        >>> tensor = Descriptor(memory, memory.raw.reshape(2, 4, 4, 1), [8, 1], "i8", False)
        >>> Im2Col(tensor, Box([-1, -1], [-1, -1], [1, 1])).pixels([0, 1, 2], [0, 0], 3).tolist()
        [[0, 1, 2], [0, 2, -1], [0, 2, 0]]
        """
        sizes = self.tensor.shape[1:-1]
        last = [size - 1 + beyond for size, beyond in zip(sizes, self.box.upper, strict=True)]
        at, found = list(start), np.empty((count, len(start)), np.int64)
        for i in range(count):
            found[i] = at
            for dim in range(len(last), 0, -1):
                at[dim] += self.box.steps[dim - 1]
                if at[dim] <= last[dim - 1]:
                    break
                at[dim] = self.box.lower[dim - 1]
            else:
                at[0] += 1
        found[:, 1:] += np.asarray(offsets)
        return found

    def fetch_pixels(self, pixels: np.ndarray, channels: range) -> np.ndarray:
        """The bits of these channels of each pixel, zero (or NaN) outside the tensor."""
        inside, stop = self._inside(pixels), min(channels.stop, self.tensor.shape[-1])
        fill = to_bits(np.float32(np.nan), self.elem) if self.nan else 0
        out = np.full((len(pixels), len(channels)), fill, self.tensor.dtype)
        start = max(channels.start, 0)
        if stop > start:
            where = tuple(pixels[inside].T)
            out[inside, start - channels.start : stop - channels.start] = self.tensor[where][:, start:stop]
        return out

    def source(self, pixels: np.ndarray, channels: range) -> Source:
        """What a load of these channels of each pixel reads."""
        return elements(self.memory, self.tensor, pixels[self._inside(pixels)], channels)

    def _inside(self, pixels: np.ndarray) -> np.ndarray:
        return np.all((pixels >= 0) & (pixels < np.asarray(self.tensor.shape[:-1])), axis=1)


def elements(memory: Memory, view: np.ndarray, rows: np.ndarray, columns: range) -> Source:
    """The part of a tensor's rows that lies in these columns. `rows` are coordinates without the last one."""
    columns = range(max(columns.start, 0), min(columns.stop, view.shape[-1]))
    if not len(rows) or not columns:
        return Source({}, 0)
    *steps, step = view.strides
    starts = view.__array_interface__["data"][0] - memory.base + rows @ np.asarray(steps, np.int64)
    offsets = np.add.outer(starts, np.asarray(columns, np.int64) * step)
    return Source(memory.mask_at(offsets, view.itemsize), offsets.size * view.itemsize)
