"""Values in the simulator: NumPy data with an element type of the language, rounded as hardware rounds.

bfloat16 and fp8 values are held as float32 arrays of representable values. Memory holds their bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from triton import language as tl

from .formats import LARGEST, VALUES, bfloat16_bits, bfloat16_rounded, float8_bits, float8_rounded, from_bfloat16
from .memory import Granules, Memory, offsets_of
from .report import Place, place_text

if TYPE_CHECKING:
    from .machine import Machine

# element type -> NumPy type of computed values, NumPy type of the bits in memory
COMPUTED: dict[str, Any] = dict(
    i1=np.bool_,
    i8=np.int8,
    i16=np.int16,
    i32=np.int32,
    i64=np.int64,
    fp16=np.float16,
    bf16=np.float32,
    fp32=np.float32,
    fp64=np.float64,
    fp8e4nv=np.float32,
    fp8e5=np.float32,
)
STORED: dict[str, Any] = dict(COMPUTED, bf16=np.uint16, fp8e4nv=np.uint8, fp8e5=np.uint8, i1=np.uint8)
BYTES = {elem: np.dtype(stored).itemsize for elem, stored in STORED.items()}
_FAR = 2**33  # in bytes; no tensor here has a larger row stride, and a wrapping one of bytes is just below 2**34
UNSIGNED = {np.dtype(f"i{n}"): np.dtype(f"u{n}") for n in (1, 2, 4, 8)}


def is_pointer(elem: str) -> bool:
    return elem[0] == "*"


def unsigned(data: Any) -> Any:
    """Integers, all of which are carried as signed, reinterpreted as unsigned."""
    return data.view(UNSIGNED[data.dtype]) if data.dtype in UNSIGNED else data


def computed_type(elem: str) -> Any:
    return np.int64 if is_pointer(elem) else COMPUTED[elem]


def rounded(array: Any, elem: str) -> Any:
    """float32 data rounded to the nearest values of `elem`, ties to even. FP8 saturates (cvt.rn.satfinite)."""
    if elem != "bf16" and elem not in LARGEST:
        return array
    array = _odd(np.asarray(array)).astype(np.float32)
    if elem in LARGEST:
        return float8_rounded(np.clip(array, -LARGEST[elem], LARGEST[elem]), elem)
    if np.isnan(array).any():
        return from_bfloat16(bfloat16_bits(array))
    return bfloat16_rounded(array)


def _odd(array: np.ndarray) -> np.ndarray:
    """float64 rounded to odd in float32, so that a second rounding to fewer bits is correctly rounded."""
    if array.dtype != np.float64:
        return array
    near = array.astype(np.float32)
    away = np.where(array > near, np.float32(np.inf), np.float32(-np.inf))
    return np.where((near == array) | np.isnan(array) | (near.view(np.uint32) & 1 == 1), near, np.nextafter(near, away))


def saturated(x: np.ndarray, kind: np.dtype, is_wide: bool) -> np.ndarray:
    """Whole float64 numbers as integers, saturated. NaN gives 0. If `is_wide`, where source or target has 64 bits, it
    gives the integer whose highest bit alone is set (PTX ISA, cvt).

    >>> saturated(np.array([300.0, np.nan]), np.dtype(np.int8), False)
    array([127,   0], dtype=int8)
    """
    info, middle = np.iinfo(kind), float(1 << kind.itemsize * 8 - 1) if is_wide else 0.0
    x = np.where(np.isnan(x), -middle if info.min else middle, x)
    low, high = x <= info.min, x >= float(info.max)
    inside = np.where(low | high, 0.0, x).astype(kind)
    return np.where(low, kind.type(info.min), np.where(high, kind.type(info.max), inside))


def to_bits(array: Any, elem: str) -> np.ndarray:
    """Values of `elem` as their bits in memory."""
    if elem == "bf16":
        return bfloat16_bits(np.asarray(array, np.float32))
    if elem in LARGEST:
        array = np.asarray(array, np.float32)
        return float8_bits(array, elem).reshape(array.shape)
    return np.asarray(array).astype(STORED[elem], copy=False)


def from_bits(array: np.ndarray, elem: str) -> np.ndarray:
    """Bits in memory as values of `elem` (a copy)."""
    if elem == "bf16":
        return from_bfloat16(array)
    values = VALUES.get(elem)
    return array.astype(COMPUTED[elem]) if values is None else values[array]


def matrix(array: np.ndarray, elem: str) -> np.ndarray:
    """A tile's bits, with any strides, as the float32 operand of a product (float64 and integers keep their type)."""
    wanted = np.float32 if elem[0] != "i" and elem != "fp64" else COMPUTED[elem]
    return np.ascontiguousarray(from_bits(array, elem).astype(wanted, copy=False))


class Type:
    """What the semantic layer sees as an IR type: element type, shape, layout attribute."""

    __slots__ = ("elem", "layout", "shape")

    def __init__(self, elem: str, shape: Sequence[int] = (), layout: Any = None):
        self.elem, self.shape, self.layout = elem, list(shape), layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Type) and (self.elem, self.shape) == (other.elem, other.shape)


class Value:
    """A tensor or scalar in registers. `pending` is the wgmma that has not finished computing it, `product` the factors
    of a product, for strobe.sim.contraction.
    """

    __slots__ = ("_data", "elem", "layout", "pending", "product")

    def __init__(self, data: Any, elem: str, layout: object = None, pending: Pending | None = None):
        self._data, self.elem, self.layout, self.pending = data, elem, layout, pending
        self.product: Any = None

    @property
    def data(self) -> Any:
        if self.pending is not None:
            self.pending.report_use()
            self.pending = None
        return self._data

    def raw(self) -> Any:
        """The data for the next wgmma of a chain, which need not wait."""
        return self._data

    def set_data(self, data: Any) -> None:
        self._data = data

    @property
    def scalar(self) -> Any:
        return self.data.item() if hasattr(self.data, "item") else self.data

    def set_loc(self, *_: object) -> None: ...
    def get_loc(self) -> None: ...

    def get_type(self) -> Type:
        return Type(self.elem, np.shape(self._data), self.layout)


_SHAPES: dict[tuple[int, ...], tuple[Any, Any]] = {}


def tensor(handle: Any, type: Any) -> tl.tensor:
    """`tl.tensor(handle, type)` with shared shape objects, which are slow to create."""
    made = object.__new__(tl.tensor)
    shape = tuple(type.shape) if type.is_block() else ()
    if shape not in _SHAPES:
        whole = tl.tensor(handle, type)
        _SHAPES[shape] = whole.shape, whole.numel
    made.handle, made.type, made.dtype = handle, type, type.scalar
    made.shape, made.numel = _SHAPES[shape]
    return made


class Diverged(Exception):
    """A branch on an array passed as a scalar diverges: the elements `taken` take it, the others do not."""

    def __init__(self, taken: np.ndarray):
        super().__init__("elements of one tensor take a branch differently")
        self.taken = taken


class Pending:
    """The wgmma that computes a value. The value may be used only as returned by the wait that covers it."""

    __slots__ = ("agent", "machine", "number", "place")

    def __init__(self, machine: Machine, agent: str, number: int, place: Place):
        self.machine, self.agent, self.number, self.place = machine, agent, number, place

    def report_use(self) -> None:
        p = self.machine.current
        covered = p.vector_clock.get(self.agent, 0) >= self.number
        why = (
            "did not pass through the deps of the wait that covers it"
            if covered
            else "no warpgroup_mma_wait has covered"
        )
        what = f"an accumulator that {why}" if covered else f"an accumulator that {why} yet"
        here = self.machine.place()
        text = f"{p.name} uses {what}, at {place_text(here)}; issued at {place_text(self.place)}"
        self.machine.report("wgmma", text, here, (here, self.place))


class Window:
    """A memory descriptor: a view of shared or tensor memory."""

    __slots__ = ("elem", "memory", "named", "type", "view")

    def __init__(self, memory: Memory, view: Any, elem: str, type: Type):  # view: an array, Pieces or Reordered
        self.memory, self.view, self.elem, self.type = memory, view, elem, type
        self.named = ""  # of a CTA's part: the whole buffer's label

    @property
    def address(self) -> int:
        return self.view.__array_interface__["data"][0]

    @property
    def mask(self) -> Granules:
        """The granules of memory that it covers."""
        return self.view.mask(self.memory) if isinstance(self.view, Reordered) else self.memory.mask_of(self.view)

    def bits(self) -> np.ndarray:
        """Its elements now."""
        return self.view.read() if isinstance(self.view, Reordered) else self.view

    @property
    def label(self) -> str:
        """The variable that holds it, with the slot of a buffer array: `k_smem[1]`."""
        if self.named:
            return self.named
        size = max(self.view.nbytes, 1)
        slot = (self.address - self.memory.base) // size
        return self.memory.name + (f"[{slot}]" if len(self.memory.raw) > size else "")

    def set_loc(self, *_: object) -> None: ...
    def get_loc(self) -> None: ...


class Pieces:
    """A swizzled tile [rows, columns] in memory order: blocks of columns, cut into pieces [n, fewer rows, block]. Where
    CTAs divide the rows, or the columns (`by_columns`), each cuts its own: [n, CTAs, fewer rows, block].
    """

    def __init__(self, tile: np.ndarray, shape: tuple[int, ...], by_columns: bool = False):
        self.tile, self.shape, self.by_columns = tile, shape, by_columns
        self.nbytes, self.__array_interface__ = tile.nbytes, tile.__array_interface__

    def __getitem__(self, piece: int) -> np.ndarray:
        *ctas, rows, width = self.shape[1:]
        if self.by_columns:
            tile = self.tile.reshape(len(self.tile), *ctas, -1).swapaxes(0, 1)
        else:
            tile = self.tile.reshape(*ctas, -1, self.tile.shape[-1])
        block, part = divmod(piece, tile.shape[-2] // rows)
        return tile[..., part * rows : (part + 1) * rows, block * width : (block + 1) * width]


class Reordered:
    """A read-only view of a buffer whose elements have no strides, such as a transposed view that is reshaped. `part`
    selects some of its elements.
    """

    def __init__(self, tile: np.ndarray, shape: Sequence[int], part: tuple[slice, ...] = ()):
        self.tile, self.whole, self.part = tile, tuple(shape), part
        self.shape = np.empty(self.whole, bool)[part].shape
        self.nbytes, self.__array_interface__ = math.prod(self.shape) * tile.itemsize, tile.__array_interface__

    def __getitem__(self, part: tuple[slice, ...]) -> Reordered:
        if self.part:
            raise NotImplementedError("a part of a part of a reordered view")
        return Reordered(self.tile, self.whole, part)

    def read(self) -> np.ndarray:
        return self.tile.reshape(self.whole)[self.part]

    def moved(self, tile: np.ndarray) -> Reordered:
        """The same view of another buffer."""
        return Reordered(tile, self.whole, self.part)

    def mask(self, memory: Memory) -> Granules:
        """The granules that its elements touch."""
        if not self.part:
            return memory.mask_of(self.tile)
        starts = offsets_of(self.tile.__array_interface__["data"][0] - memory.base, self.tile)
        return memory.mask_at(starts.reshape(self.whole)[self.part], self.tile.itemsize)


def wraps(strides: list[int], size: int) -> bool:
    """Whether a descriptor's addresses are meant to wrap around. It then addresses a run of rows anywhere, which ends
    where a coordinate ends.

    TMA adds coordinates times strides modulo 2**64, and Triton's ragged descriptors (triton.tools.ragged_tma) rely on
    it: a dimension whose stride is 2**34 elements minus one row's stride moves 2**30 rows back, so that rows end at
    coordinate 2**30 wherever they begin.
    """
    return any(stride * size >= _FAR for stride in strides)


class WrappedView:
    """Global memory seen through a wrapping descriptor: parts are located by address and stay in the storage."""

    def __init__(self, machine: Machine, memory: Memory, address: int, shape: list[int], strides: list[int], elem: str):
        self.machine, self.memory, self.address, self.shape, self.elem = machine, memory, address, tuple(shape), elem
        self.steps = tuple(stride * BYTES[elem] for stride in strides)

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        return self._find(part)[0]

    def __setitem__(self, part: tuple[slice, ...], bits: np.ndarray) -> None:
        view, inside = self._find(part)
        if inside:
            view[...] = bits

    def _find(self, part: tuple[slice, ...]) -> tuple[np.ndarray, bool]:
        """(view of the part, whether it lies in the storage). If not, that is reported and the storage's first element
        is used throughout.
        """
        sizes = tuple(s.stop - s.start for s in part)
        stored = np.dtype(STORED[self.elem])
        if 0 in sizes:
            return np.empty(sizes, stored), True
        first = (self.address + sum(s.start * step for s, step in zip(part, self.steps, strict=True))) % 2**64
        steps = tuple(step if size > 1 else stored.itemsize for size, step in zip(sizes, self.steps, strict=True))
        last = first + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) + stored.itemsize
        if self.memory.base <= first and last <= self.memory.end:
            whole = self.memory.raw[first - self.memory.base : last - self.memory.base].view(stored)
            return np.lib.stride_tricks.as_strided(whole, sizes, steps), True
        self.machine.report(
            "bounds",
            f"a TMA copy of {list(sizes)} elements begins at byte {first - self.memory.base} and ends at "
            f"{last - self.memory.base} of {self.memory.name}, which has {len(self.memory.raw)}, at "
            f"{place_text(self.machine.place())}",
        )
        return np.lib.stride_tricks.as_strided(
            self.memory.raw[: stored.itemsize].view(stored), sizes, (0,) * len(sizes)
        ), False

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(STORED[self.elem])


class Descriptor:
    """A TMA descriptor: a strided window of global memory, and the block that one copy moves."""

    __slots__ = ("block", "elem", "memory", "nan", "signed", "view")

    def __init__(self, memory: Memory, view: np.ndarray | WrappedView, block: list[int], elem: str, nan: bool):
        self.memory, self.view, self.block, self.elem, self.nan = memory, view, block, elem, nan
        self.signed = True  # of integers, for min and max

    def set_loc(self, *_: object) -> None: ...
    def get_loc(self) -> None: ...

    def inside(self, corner: list[int], block: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the block at `corner` that lies in the tensor, as slices of the tensor and of the block."""
        source, target = [], []
        for start, size, length in zip(corner, self.view.shape, block, strict=True):
            low = min(max(start, 0), size)
            high = max(min(start + length, size), low)
            source.append(slice(low, high))
            target.append(slice(low - start, high - start))
        return tuple(source), tuple(target)

    def fetch(self, corner: list[int], block: list[int]) -> np.ndarray:
        """The block's bits, zero (or NaN) outside the tensor."""
        source, target = self.inside(corner, block)
        fill = to_bits(np.float32(np.nan), self.elem) if self.nan else 0
        out = np.full(block, fill, self.view.dtype)
        out[target] = self.view[source]
        return out
