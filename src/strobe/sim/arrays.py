"""Arguments of kernels: torch tensors, if torch is installed, and NumPy arrays in `Array`. Nothing here needs torch."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import sys
from typing import Any, NamedTuple

import numpy as np
from triton import language as tl

from .formats import VALUES as FLOAT8_VALUES
from .formats import bfloat16_bits, float8_bits, from_bfloat16

_FLOAT8 = {"fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"}


def torch_if_installed() -> Any:
    """The torch module, or None where it is not installed."""
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch


def is_tensor(value: object) -> bool:
    """Whether this is a torch tensor. There is none before torch is imported."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


class Array:
    """A NumPy array as an argument of a kernel, where torch is not installed or not wanted.

    >>> x = Array(np.zeros((2, 3), np.float32))
    >>> x.shape, x.stride(), str(x.dtype)
    ((2, 3), (3, 1), 'fp32')
    >>> Array.of([1.0, 1.001], tl.bfloat16).numpy()
    array([1., 1.], dtype=float32)

    The kernel reads and writes the array's own memory. A store to a read-only array raises ValueError. NumPy has no
    bfloat16 and no FP8: `Array.of(numbers, dtype)` makes an array of their bits, and `numpy()` gives the numbers as
    float32. TensorDescriptor takes it as its base.
    """

    def __init__(self, base: np.ndarray, dtype: tl.dtype | None = None):
        self.base, self.dtype = base, dtype or _dtype_of(base.dtype)
        if base.dtype.itemsize * 8 != max(8, self.dtype.primitive_bitwidth):
            bits = self.dtype.primitive_bitwidth
            raise ValueError(
                f"Array: got {base.dtype} for {self.dtype}, expected an array whose elements have {bits} bits"
            )
        self.shape = base.shape

    @staticmethod
    def of(numbers: Any, dtype: tl.dtype) -> Array:
        """An array of these numbers, rounded to a type of Triton."""
        if str(dtype) == "bf16":
            return Array(bfloat16_bits(np.asarray(numbers, np.float32)), dtype)
        if str(dtype) in _FLOAT8:
            return Array(float8_bits(np.asarray(numbers, np.float32), str(dtype)), dtype)
        wanted = {"int1": "bool"}.get(str(dtype), str(dtype).replace("fp", "float"))
        return Array(np.ascontiguousarray(numbers, wanted), dtype)

    def numpy(self) -> np.ndarray:
        """The numbers: the array itself, or a float32 copy of bfloat16 and FP8."""
        if str(self.dtype) == "bf16":
            return from_bfloat16(self.base)
        values = FLOAT8_VALUES.get(str(self.dtype))
        return self.base if values is None else values[self.base]

    def data_ptr(self) -> int:
        return self.base.__array_interface__["data"][0]

    def stride(self, dim: int | None = None) -> Any:
        strides = tuple(stride // self.base.itemsize for stride in self.base.strides)
        return strides if dim is None else strides[dim]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.base.ndim

    def numel(self) -> int:
        return self.base.size

    def element_size(self) -> int:
        return self.base.itemsize

    def is_contiguous(self) -> bool:
        return bool(self.base.flags.c_contiguous)

    def __len__(self) -> int:
        return len(self.base)


def _dtype_of(dtype: np.dtype) -> tl.dtype:
    found = getattr(tl, "int1" if dtype == np.dtype(bool) else str(dtype), None)
    if not isinstance(found, tl.dtype):
        raise TypeError(f"Array: Triton has no type for NumPy's {dtype}; give the dtype")
    return found


class Given(NamedTuple):
    """Where a tensor lies: the bytes of its storage, its first element as an offset into them, and its shape."""

    raw: np.ndarray
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    itemsize: int
    about: str  # dtype and shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def given(name: str, value: Any) -> Given:
    """The memory of a torch tensor, an Array or a NumPy array. Raises TypeError for a tensor that is not on the CPU."""
    if is_tensor(value):
        return _of_tensor(name, value)
    array = value.base if isinstance(value, Array) else value
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    low = root.__array_interface__["data"][0]
    low += sum(min(0, (size - 1) * stride) for size, stride in zip(root.shape, root.strides, strict=True))
    reach = sum((size - 1) * abs(stride) for size, stride in zip(root.shape, root.strides, strict=True))
    size = reach + root.itemsize if root.size else 0
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * max(size, 1)).from_address(low))[:size]
    raw.flags.writeable = root.flags.writeable
    first = array.__array_interface__["data"][0]
    return Given(raw, first - low, array.shape, array.strides, array.itemsize, f"{array.dtype}{list(array.shape)}")


def _of_tensor(name: str, tensor: Any) -> Given:
    storage = tensor.untyped_storage()
    if storage.device.type != "cpu":
        raise TypeError(
            f"{name}: got a tensor on {tensor.device}, expected one on the CPU: the simulator reads its memory directly"
        )
    torch: Any = sys.modules["torch"]
    size = tensor.element_size()
    return Given(
        torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),
        tensor.storage_offset() * size,
        tuple(tensor.shape),
        tuple(stride * size for stride in tensor.stride()),
        size,
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
    )


def is_array(value: object) -> bool:
    """Whether `given` takes it."""
    return isinstance(value, (Array, np.ndarray)) or is_tensor(value)


def as_numbers(value: Any) -> np.ndarray:
    """A tensor or an array as float64, for comparisons."""
    if is_tensor(value):
        torch: Any = sys.modules["torch"]
        return value.detach().to(torch.float64).numpy()
    return np.asarray(value.numpy() if isinstance(value, Array) else value, np.float64)


def copied(value: Any) -> Any:
    """A copy with memory of its own."""
    if is_tensor(value):
        return value.clone()
    return Array(value.base.copy(), value.dtype) if isinstance(value, Array) else value.copy()
