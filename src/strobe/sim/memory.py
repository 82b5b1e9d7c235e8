"""Memory with a shadow of its last accesses, so that unordered accesses are found under every schedule.

Happens-before is decided by vector clocks (FastTrack: Flanagan and Freund, PLDI 2009, section 3). An access by agent
`a` at clock `c` is ordered before an agent whose vector clock has at least `c` for `a`. Accesses are stored as bit sets
of granules, so one record covers a whole tile and a check is one `and` of two integers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .report import Place

Clock = dict[str, int]


def merge(into: Clock, other: Clock) -> None:
    """Join the vector clock `other` into `into`."""
    for agent, clock in other.items():
        if into.get(agent, 0) < clock:
            into[agent] = clock


@dataclass(slots=True)
class Actor:
    """Who accesses memory: an agent, its clock, its vector clock of all others, and the proxy."""

    agent: str
    clock: int
    vector_clock: Clock
    proxy: str  # "generic", "async" or "tensor"; "atomic" (through the generic proxy) or "async atomic"
    what: str
    where: Place
    adds: bool = False  # floating-point atomic adds: their order decides the last bits of the sum

    @property
    def atomic(self) -> bool:
        return self.proxy.endswith("atomic")

    @property
    def generic(self) -> bool:
        return self.proxy in ("generic", "atomic")


@dataclass(slots=True)
class Access:
    mask: int
    actor: Actor
    clock: int
    write: bool
    fences: dict[str, int] = field(default_factory=dict)  # each agent's first proxy fence after this access

    def ordered_before(self, actor: Actor) -> bool:
        return actor.vector_clock.get(self.actor.agent, 0) >= self.clock

    def fenced_before(self, actor: Actor) -> bool:
        """Whether a proxy fence lies between this access and `actor`, on either side of the synchronisation."""
        return any(actor.vector_clock.get(agent, 0) >= clock for agent, clock in self.fences.items())


class Memory:
    """One allocation of shared or tensor memory, or the storage of one global tensor."""

    def __init__(self, name: str, space: str, raw: np.ndarray, granule: int, initialised: bool):
        self.name, self.space, self.raw, self.granule = name, space, raw, granule
        self.base = raw.__array_interface__["data"][0]
        self.end = self.base + len(raw)
        self.granules = -(-len(raw) // granule) + 1
        self.written = (1 << self.granules) - 1 if initialised else 0
        self.writes: list[Access] = []
        self.reads: list[Access] = []
        self.named = False
        self._masks: dict[tuple, int] = {}

    def mask_of(self, view: np.ndarray) -> int:
        """The granules that a NumPy view of this memory touches."""
        interface = view.__array_interface__
        key = (interface["data"][0], view.shape, view.strides, view.itemsize)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = self.mask_at(_offsets(interface["data"][0] - self.base, view), view.itemsize)
        return mask

    def mask_at(self, offsets: np.ndarray, size: int) -> int:
        """The granules of elements of `size` bytes at byte `offsets`."""
        bits = np.zeros(self.granules, np.uint8)
        for step in range(0, size, self.granule):
            bits[(offsets + step) // self.granule] = 1
        bits[(offsets + (size - 1)) // self.granule] = 1
        return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")

    def touch(self, mask: int, write: bool, actor: Actor) -> tuple[list[Access], int]:
        """Record an access. Returns the earlier accesses it conflicts with, and the granules read but never written."""
        conflicts = [access for access in self.writes if access.mask & mask]
        if write:
            conflicts += [access for access in self.reads if access.mask & mask]
            spare = actor if actor.atomic else None
            self.writes, self.reads = _without(self.writes, mask, spare), _without(self.reads, mask, spare)
            unwritten, self.written = 0, self.written | mask
            self.writes.append(Access(mask, actor, actor.clock, True))
        else:
            unwritten = mask & ~self.written
            self.reads = [read for read in self.reads if not _superseded(read, mask, actor)]
            self.reads.append(Access(mask, actor, actor.clock, False))
        return conflicts, unwritten

    def fence(self, agent: str, clock: int, vector_clock: Clock) -> None:
        """A proxy fence by `agent`: it covers every access ordered before it, for all agents ordered after it."""
        for access in self.writes + self.reads:
            if access.actor.generic and vector_clock.get(access.actor.agent, 0) >= access.clock:
                access.fences.setdefault(agent, clock)

    def forget(self) -> None:
        """Order everything so far before everything to come (a kernel has ended)."""
        self.writes, self.reads = [], []


def _without(accesses: list[Access], mask: int, spare: Actor | None) -> list[Access]:
    """The accesses still recorded after a write. An atomic keeps those of other agents' atomics."""
    kept = []
    for access in accesses:
        if not (spare and access.actor.atomic and access.actor.agent != spare.agent):
            access.mask &= ~mask
        if access.mask:
            kept.append(access)
    return kept


def _superseded(read: Access, mask: int, actor: Actor) -> bool:
    """Whether a later read of the same granules by the same agent replaces the earlier read."""
    return read.actor.agent == actor.agent and read.actor.proxy == actor.proxy and not read.mask & ~mask


def _offsets(start: int, view: np.ndarray) -> np.ndarray:
    offsets = np.array([start], np.int64)
    for size, stride in zip(view.shape, view.strides, strict=True):
        offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return offsets
