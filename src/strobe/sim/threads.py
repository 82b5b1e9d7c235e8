"""Faults among the threads of one program: elements of one store that meet, and global memory read back.

A program of Triton is one agent of the simulator. In two cases its threads do not run as one. Of several elements that
one store puts into one place, any may win. And a value that one thread stores to global memory may reach another thread
only after a barrier of the program, which the compiler does not insert for global memory. `Checks(threads=True)` looks
for the second: Gluon's layouts say which thread holds an element; in plain Triton its place in the tensor stands for
the thread.
"""

from __future__ import annotations

import numpy as np

from .layouts import Layouts
from .machine import Machine
from .memory import Memory
from .report import place_text


def clashing(offsets: np.ndarray, bits: np.ndarray) -> int | None:
    """The first offset that two elements with different bits go to, or None.

    >>> clashing(np.array([0, 4, 8, 4]), np.array([1, 2, 3, 2]))
    >>> clashing(np.array([0, 4, 8, 4]), np.array([1, 2, 3, 9]))
    4
    """
    if offsets.size < 2 or np.all(offsets[1:] > offsets[:-1]):
        return None
    order = np.argsort(offsets, kind="stable")
    places, values = offsets[order], bits[order]
    differ = (places[1:] == places[:-1]) & (values[1:] != values[:-1])
    return int(places[1:][differ][0]) if differ.any() else None


def threads_of(layouts: Layouts, shape: tuple[int, ...], layout: object) -> np.ndarray:
    """The thread that holds each element of a tensor, flat. Without a layout, the element's place.

    A scalar is stored by one thread, and read by all.
    """
    size = int(np.prod(shape, initial=1))
    owners = layouts.owners(shape, layout) if layout is not None else None
    return np.arange(size) if owners is None else owners


def check_read_back(machine: Machine, memory: Memory, offsets: np.ndarray, threads: np.ndarray, what: str) -> None:
    """Report a load of what another thread of this partition has stored since the partition's last barrier."""
    p, place = machine.current, machine.place()
    stored = p.stored.other(memory, offsets, threads)
    if stored is not None:
        machine.report(
            "race",
            f"on {memory.name}: {what} by {p.name} of CTA {p.cta.index} at {place_text(place)} reads what another "
            f"thread of it stores at {place_text(stored)}; no barrier of the program lies between them "
            "(tl.debug_barrier, gl.thread_barrier)",
            place,
            (memory.name, "threads", place, stored),
        )
