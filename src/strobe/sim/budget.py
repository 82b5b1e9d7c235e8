"""How much shared and tensor memory one program has in use at once.

The compiler puts a buffer where another one was whose last use is over. An allocation that exceeds the target's memory
is therefore judged at the end of the program, when it is known which of the other buffers were used after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .memory import Memory
from .report import Place


class Excess(NamedTuple):
    """An allocation with which more memory is reserved than the target has."""

    space: str
    charge: int  # bytes, or columns of tensor memory
    place: Place
    time: int  # accesses of the launch before it
    others: dict[Memory, int]  # the buffers reserved besides, and their charges

    def in_use(self) -> int:
        """What the program uses at once here. A buffer that nothing ever accessed counts as used."""
        return self.charge + sum(
            charge for memory, charge in self.others.items() if not memory.last_access or memory.last_access > self.time
        )


class Budget:
    """The buffers of one program, and the allocations that exceed a limit."""

    def __init__(self) -> None:
        self.charges: dict[Memory, int] = {}
        self.excesses: list[Excess] = []

    def used(self, space: str) -> int:
        return sum(charge for memory, charge in self.charges.items() if memory.space == space)

    def add(self, memory: Memory, charge: int, limit: int, place: Place, time: int) -> None:
        others = {other: size for other, size in self.charges.items() if other.space == memory.space}
        if charge + sum(others.values()) > limit:
            self.excesses.append(Excess(memory.space, charge, place, time, others))
        self.charges[memory] = charge

    def free(self, memories: Sequence[Memory]) -> None:
        for memory in memories:
            self.charges.pop(memory, None)

    def allocate_again(self, memory: Memory) -> None:
        """An allocation in a loop's body comes again: until here its buffer was used up to its last access."""
        for excess in self.excesses:
            if memory in excess.others and 0 < memory.last_access <= excess.time:
                del excess.others[memory]

    def hold(self, since: int, now: int) -> None:
        """The partitions of a warp_specialize are over: what they accessed was reserved for all of it."""
        for memory in self.charges:
            if memory.last_access > since:
                memory.last_access = now
