"""Which part of a tensor or of a memory descriptor belongs to which CTA of a cluster (`num_ctas` above 1 in Gluon).

Every CTA of a cluster runs the whole kernel. A tensor keeps its whole shape in each of them, but only the CTA's own
share holds meaningful numbers: the rest is NaN (1 for integers), so that a use of it shows. A buffer exists once in
each CTA, also with its whole shape, and the CTA's own share is the part that it has on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from triton.language.core import _unwrap_if_constexpr as unwrapped

from .layouts import Layouts

Part = tuple[slice, ...]
_CGA_ARGUMENT = {  # position of the CGA layout among the arguments of the builder's functions
    "get_nvmma_shared_layout": 4,
    "get_swizzled_shared_layout": 4,
    "get_tensor_memory_layout": 2,
    "get_tensor_memory_scales_layout": 0,
}
_BLOCK_ARGUMENT = {"get_shared_linear_layout": 1}  # block bases in elements, as in a linear layout


class Share:
    """How the bits of a CTA's rank choose a part of a shape. `bases[i]` is bit i's step in each dimension, in elements;
    a bit without a step is free: CTAs that differ in it alone hold the same part.

    >>> share = Share((4, 8), ((2, 0), (0, 0)))
    >>> share.part(1), share.free, share.size
    ((slice(2, 4, None), slice(0, 8, None)), 2, 2)
    """

    def __init__(self, shape: tuple[int, ...], bases: tuple[tuple[int, ...], ...]):
        self.shape, self.bases = shape, bases
        self.free = sum(1 << bit for bit, basis in enumerate(bases) if not any(basis))
        self.size = 1 << (len(bases) - self.free.bit_count())  # parts that the shape is cut into
        self._masks: dict[int, np.ndarray] = {}

    @property
    def whole(self) -> bool:
        """Whether every CTA holds all of it."""
        return self.size == 1

    def part(self, rank: int) -> Part:
        """The part of a CTA as slices. Raises NotImplementedError if it is not one block."""
        start, length = [0] * len(self.shape), list(self.shape)
        for bit, basis in enumerate(self.bases):
            for dim, step in enumerate(basis):
                if step:
                    length[dim] //= 2
                    start[dim] |= step * (rank >> bit & 1)
        if any(step and step < length[dim] for basis in self.bases for dim, step in enumerate(basis)):
            raise NotImplementedError(f"a layout that deals elements of shape {list(self.shape)} to CTAs in turn")
        return tuple(slice(first, first + size) for first, size in zip(start, length, strict=True))

    def mask(self, rank: int) -> np.ndarray:
        """Which elements a CTA holds."""
        if rank not in self._masks:
            held = np.ones(self.shape, bool)
            for bit, basis in enumerate(self.bases):
                for dim, step in enumerate(basis):
                    if step:
                        index = np.arange(self.shape[dim]) // step & 1
                        side = (index == (rank >> bit & 1)).reshape([-1 if d == dim else 1 for d in range(len(basis))])
                        held = held & side
            self._masks[rank] = held
        return self._masks[rank]

    def holds(self, rank: int, part: Part) -> bool:
        """Whether a CTA holds all of a part."""
        return bool(self.mask(rank)[part].all())

    def leads(self, rank: int) -> bool:
        """Whether a CTA is the first of those that hold the same part."""
        return not rank & self.free

    def group(self, rank: int) -> list[int]:
        """The CTAs that hold the same part as this one."""
        return peers(rank, self.free, 1 << len(self.bases))


def peers(rank: int, bits: int, ctas: int) -> list[int]:
    """The ranks that differ from `rank` in the given bits at most.

    >>> peers(2, 1, 4), peers(0, 0, 2)
    ([2, 3], [0])
    """
    return [other for other in range(ctas) if not (other ^ rank) & ~bits]


def common(one: Part, other: Part) -> Part | None:
    """The part that two parts have in common, None if they have none."""
    both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(each.start >= each.stop for each in both) else both


def of_registers(layouts: Layouts, shape: Sequence[int], layout: object) -> Share:
    """The share of a tensor's layout. Without a layout (a scalar) every CTA holds all of it."""
    bits = layouts.num_ctas.bit_length() - 1

    def ask() -> Share:
        if layout is None or not len(shape):
            return _whole(tuple(shape), bits)
        bases = layouts.builder.to_linear_layout(layout, list(shape)).block_bases
        return Share(tuple(shape), _single(shape, bases, bits))

    return layouts.answer(("share of registers", tuple(shape), id(layout)), ask)


def of_memory(layouts: Layouts, shape: Sequence[int], layout: object) -> Share:
    """The share of a memory descriptor's layout. Dimensions before the layout's own are those of a buffer array."""
    bits = layouts.num_ctas.bit_length() - 1

    def ask() -> Share:
        name, arguments = layouts.attributes.arguments_of(layout)
        if name in _BLOCK_ARGUMENT:
            bases = [list(basis) for basis in arguments[_BLOCK_ARGUMENT[name]]]
        else:
            bases = _in_elements(shape, _cga_bases(name, arguments, bits))
        lead = [0] * (len(shape) - (len(bases[0]) if bases else 0))
        return Share(tuple(shape), _single(shape, [[*lead, *basis] for basis in bases], bits))

    return layouts.answer(("share of memory", tuple(shape), id(layout)), ask)


def _whole(shape: tuple[int, ...], bits: int) -> Share:
    return Share(shape, ((0,) * len(shape),) * bits)


def _cga_bases(name: str, arguments: tuple, bits: int) -> list[list[int]]:
    if name not in _CGA_ARGUMENT:
        raise NotImplementedError(f"{name.removeprefix('get_')} among the CTAs of a cluster")
    cga = arguments[_CGA_ARGUMENT[name]]
    if cga is None:
        return [[0, 0]] * bits
    if cga and isinstance(cga[0], int):  # Triton 3.6 gives tensor memory the number of splits of each dimension
        return [[1 << bit, 0] for bit in range(cga[0].bit_length() - 1)] + [
            [0, 1 << bit] for bit in range(cga[1].bit_length() - 1)
        ]
    constant = cast("Callable[[object], Any]", unwrapped)  # a kernel's list holds constants
    return [[int(constant(step)) for step in constant(basis)] for basis in cga]


def _in_elements(shape: Sequence[int], bases: list[list[int]]) -> list[list[int]]:
    """Bases that count CTAs, as steps in elements of the trailing dimensions."""
    if not bases:
        return bases
    sizes = list(shape)[len(shape) - len(bases[0]) :]
    splits = [1 << sum(basis[dim] != 0 for basis in bases) for dim in range(len(sizes))]
    return [[step * size // split for step, size, split in zip(basis, sizes, splits, strict=True)] for basis in bases]


def _single(shape: Sequence[int], bases: Sequence[Sequence[int]], bits: int) -> tuple[tuple[int, ...], ...]:
    found = [tuple(basis) for basis in bases] or [(0,) * len(shape)] * bits
    if any(sum(step != 0 for step in basis) > 1 or any(step & step - 1 for step in basis) for basis in found):
        raise NotImplementedError(f"a CGA layout of shape {list(shape)} with the bases {found}")
    return tuple(found)
