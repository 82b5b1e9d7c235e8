"""Which elements of its outputs a launch writes: never, or more than once (`Checks(coverage=True)`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from .arrays import Given
from .memory import Access, Actor, Granules, Memory
from .report import Place, place_text


class Written:
    """What a launch did to one storage: granules stored to once and again, and whether anything was read."""

    def __init__(self) -> None:
        self.once: Granules = {}
        self.again: Granules = {}
        self.read = False
        self.places: tuple[Place, Place] = ((), ())  # of the first store to an element that had been stored to

    def access(self, mask: Granules, write: bool, actor: Actor, earlier: Iterable[Access]) -> None:
        if not write:
            self.read = True
            return
        for page, bits in mask.items():
            known = self.once.get(page, 0)
            if known & bits and not actor.atomic:
                self.again[page] = self.again.get(page, 0) | known & bits
                before = next((access.actor.where for access in earlier if access.write), ())
                self.places = self.places if self.places[1] else (before, actor.where)
            self.once[page] = known | bits


class Coverage:
    """The tensors given to a launch, and what it wrote of each."""

    def __init__(self, report: Callable[[str, str, Place], None]):
        self._report = report
        self._outputs: list[tuple[str, Memory, Given]] = []
        self._written: dict[int, Written] = {}

    def add(self, name: str, memory: Memory, tensor: Given) -> None:
        self._outputs.append((name, memory, tensor))

    def access(self, memory: Memory, mask: Granules, write: bool, actor: Actor, earlier: Iterable[Access]) -> None:
        self._written.setdefault(id(memory), Written()).access(mask, write, actor, earlier)

    def report(self) -> None:
        """Report each tensor that the launch wrote and did not read: elements left out, and elements written twice."""
        for name, memory, tensor in self._outputs:
            written = self._written.get(id(memory))
            if written is None or not written.once or written.read:
                continue
            granules = _offsets(tensor) // memory.granule
            if (missing := ~_flags(written.once, memory, granules)).any():
                self._tell(f"{_count(missing)} of {name} are never written; {_first(missing, tensor)}", ())
            if (again := _flags(written.again, memory, granules)).any():
                before, after = written.places
                text = f"{_count(again)} of {name} are written more than once; {_first(again, tensor)}"
                self._tell(f"{text}, at {place_text(before)} and at {place_text(after)}", after)

    def _tell(self, text: str, where: Place) -> None:
        self._report("coverage", text, where)


def _offsets(tensor: Given) -> np.ndarray:
    """The byte offset of each element in the tensor's storage."""
    offsets = np.full(tensor.shape, tensor.offset, np.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True)):
        offsets += (np.arange(size) * stride).reshape([-1 if i == dim else 1 for i in range(len(tensor.shape))])
    return offsets


def _flags(sets: Granules, memory: Memory, granules: np.ndarray) -> np.ndarray:
    """For each of these granules, whether it is in the bit sets."""
    flags = np.zeros((-(-len(memory.raw) // memory.granule) // memory.page + 1, memory.page), bool)
    for page, bits in sets.items():
        packed = np.frombuffer(bits.to_bytes(memory.page // 8, "little"), np.uint8)
        flags[page] = np.unpackbits(packed, bitorder="little")
    return flags.reshape(-1)[granules]


def _count(chosen: np.ndarray) -> str:
    return f"{int(chosen.sum()):,} of {chosen.size:,} elements"


def _first(chosen: np.ndarray, tensor: Given) -> str:
    place = np.unravel_index(int(np.argmax(chosen)), tensor.shape) if tensor.shape else ()
    return f"the first is {list(map(int, place))} of {list(tensor.shape)}"
