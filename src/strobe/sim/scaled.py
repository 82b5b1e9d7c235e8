"""Block-scaled products (`tl.dot_scaled`): operands of 4 to 16 bits, with one scale for a run of elements along K."""

from __future__ import annotations

from typing import Any

import numpy as np

from .formats import e2m1_pair
from .machine import Machine
from .values import COMPUTED, Value, from_bits, rounded, unsigned


def unpacked(data: np.ndarray, axis: int) -> np.ndarray:
    """Bytes of two e2m1 numbers each, the lower half first along `axis`, as float32.

    >>> unpacked(np.array([[0x21, 0xF7]], np.uint8), 1)
    array([[ 0.5,  1. ,  6. , -6. ]], dtype=float32)
    """
    halves = np.stack(e2m1_pair(data), axis=axis % data.ndim + 1)
    shape = list(data.shape)
    shape[axis] *= 2
    return halves.reshape(shape)


def scales(data: np.ndarray, elem: str) -> np.ndarray:
    """Scales as float32: bytes are powers of two (e8m0, 255 is NaN), others are numbers already.

    >>> scales(np.array([127, 130, 255], np.uint8), "i8")
    array([ 1.,  8., nan], dtype=float32)
    """
    if elem != "i8":
        return np.asarray(data, np.float32)
    raw = unsigned(np.asarray(data))
    powers = np.ldexp(np.float32(1), np.minimum(raw, 254).astype(np.int32) - 127)
    return np.where(raw == 255, np.float32(np.nan), powers)


_FORMATS = {"E4M3": "fp8e4nv", "E5M2": "fp8e5"}  # Triton's names of the formats -> types; e2m1 is two in a byte


class ScaledProducts:
    machine: Machine

    def create_dot_scaled(
        self,
        a: Value,
        a_scale: Value | None,
        a_format: object,
        b: Value,
        b_scale: Value | None,
        b_format: object,
        *rest: Any,
    ) -> Value:
        _, a_k_pack, b_k_pack, acc = rest
        left = operand(a, a_scale, -1 if a_k_pack else -2)
        right = operand(b, b_scale, -2 if b_k_pack else -1, is_right=True)
        result = np.matmul(left, right) + acc.data
        return Value(np.asarray(rounded(result, acc.elem)).astype(COMPUTED[acc.elem], copy=False), acc.elem, acc.layout)


def operand(value: Value, scale: Value | None, packed_axis: int, is_right: bool = False) -> np.ndarray:
    """An operand in float32, multiplied by its scales [rows, K / run] ([columns, K / run] of the right operand)."""
    data = np.asarray(value.data)
    wide = unpacked(unsigned(data), packed_axis) if value.elem == "i8" else np.asarray(data, np.float32)
    if scale is None:
        return np.ascontiguousarray(wide)
    factors = scales(np.asarray(scale.data), scale.elem)
    if is_right:
        factors = np.swapaxes(factors, -1, -2)
    axis = -2 if is_right else -1
    return np.ascontiguousarray(wide * np.repeat(factors, wide.shape[axis] // factors.shape[axis], axis))


def in_format(data: np.ndarray, elem: str, form: object) -> Value:
    """An operand's tile in the format that a block-scaled product of tcgen05 names: bytes may hold any of them."""
    name = _FORMATS.get(str(form).rpartition(".")[2])
    if elem == "i8" and name is not None:
        return Value(from_bits(unsigned(data), name), name)
    return Value(data, elem)
