"""Block pointers of plain Triton: `tl.make_block_ptr`, `tl.advance`, and loads and stores through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from triton._C.libtriton import ir

from .values import BYTES, Value


class BlockPointer:
    """A window of a strided tensor: the base pointer, the tensor's shape and strides, and the block's place in it."""

    __slots__ = ("base", "block", "offsets", "shape", "strides")

    def __init__(self, base: Value, shape: list[int], strides: list[int], offsets: list[int], block: Sequence[int]):
        self.base, self.shape, self.strides, self.offsets, self.block = base, shape, strides, offsets, list(block)

    @property
    def elem(self) -> str:
        return self.base.elem[1:]

    def set_loc(self, *_: object) -> None: ...
    def get_loc(self) -> None: ...

    def _along(self, dim: int) -> np.ndarray:
        """The block's coordinates along one dimension, shaped to broadcast."""
        shape = [1] * len(self.block)
        shape[dim] = self.block[dim]
        return (self.offsets[dim] + np.arange(self.block[dim], dtype=np.int64)).reshape(shape)

    def addresses(self) -> Value:
        steps = [stride * BYTES[self.elem] for stride in self.strides]
        where = sum(self._along(dim) * step for dim, step in enumerate(steps))
        return Value(np.broadcast_to(self.base.data + where, self.block), self.base.elem)

    def inside(self, dims: Sequence[int]) -> Value | None:
        """Which elements lie in the tensor, by the dimensions that are checked; None if none is."""
        if not len(dims):
            return None
        mask = np.ones(self.block, bool)
        for dim in dims:
            mask &= (self._along(dim) >= 0) & (self._along(dim) < self.shape[dim])
        return Value(mask, "i1")


class BlockPointers:
    create_masked_load: Callable[..., Value]
    create_masked_store: Callable[..., None]

    def create_make_block_ptr(
        self,
        base: Value,
        shape: list[Value],
        strides: list[Value],
        offsets: list[Value],
        block: Sequence[int],
        order: Sequence[int],
    ) -> BlockPointer:
        size, step, start = ([one.scalar for one in values] for values in (shape, strides, offsets))
        return BlockPointer(base, size, step, start, block)

    def create_advance(self, pointer: BlockPointer, steps: list[Value]) -> BlockPointer:
        offsets = [at + step.scalar for at, step in zip(pointer.offsets, steps, strict=True)]
        return BlockPointer(pointer.base, pointer.shape, pointer.strides, offsets, pointer.block)

    def create_tensor_pointer_load(
        self, pointer: BlockPointer, checked: Sequence[int], padding: object, *options: object
    ) -> Value:
        mask, other = pointer.inside(checked), None
        if padding == ir.PADDING_OPTION.PAD_NAN:
            other = Value(np.full(pointer.block, np.nan), pointer.elem)
        return self.create_masked_load(pointer.addresses(), mask, other, *options)

    def create_tensor_pointer_store(
        self, pointer: BlockPointer, value: Value, checked: Sequence[int], *options: object
    ) -> None:
        self.create_masked_store(pointer.addresses(), value, pointer.inside(checked), *options)
