"""What the threads of one partition have stored to global memory (`Checks(threads=True)`)."""

from __future__ import annotations

import numpy as np

from .memory import Memory
from .report import Place


class Stores:
    """What the threads of one partition have stored to global memory since its last barrier."""

    def __init__(self) -> None:
        # for each storage: (byte offset -> thread) as sorted arrays, and the place of the store
        self._made: dict[int, list[tuple[np.ndarray, np.ndarray, Place]]] = {}

    def clear(self) -> None:
        self._made.clear()

    def add(self, memory: Memory, offsets: np.ndarray, threads: np.ndarray, place: Place) -> None:
        order = np.argsort(offsets, kind="stable")
        self._made.setdefault(id(memory), []).append((offsets[order], threads[order], place))

    def other(self, memory: Memory, offsets: np.ndarray, threads: np.ndarray) -> Place | None:
        """The place of a store by another thread to one of these offsets."""
        for places, owners, place in reversed(self._made.get(id(memory), [])):
            found = np.searchsorted(places, offsets)
            hit = (found < places.size) & (places[np.minimum(found, places.size - 1)] == offsets)
            if np.any(hit & (owners[np.minimum(found, places.size - 1)] != threads)):
                return place
        return None
