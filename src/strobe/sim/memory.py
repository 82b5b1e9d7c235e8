"""Memory with a shadow of its last accesses, so that unordered accesses are found under every schedule.

Happens-before is decided by vector clocks (FastTrack: Flanagan and Freund, PLDI 2009, section 3). An access by agent
`a` at clock `c` is ordered before an agent whose vector clock has at least `c` for `a`. Accesses are stored as bit sets
of granules, so one record covers a whole tile and a check is one `and` of two integers.

Global tensors are cut into pages of granules. An access looks only at the pages that it touches, so its cost does not
depend on the size of the tensor or on how many programs accessed other parts of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from .report import Place

Clock = dict[str, int]
Granules = dict[int, int]  # page -> bit set of granules in it
PAGE = 4096  # granules in a page of a global tensor


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
    # of a store: whether these granules already hold what it writes
    repeats: Callable[[Granules], bool] | None = None
    scope: frozenset[int] | None = None  # of an atomic: indices of the CTAs within its scope; None: all

    def reaches(self, other: Actor) -> bool:
        """Whether both are atomics, and the other one's CTA is within this one's scope."""
        return self.atomic and other.atomic and (self.scope is None or other.cta in self.scope)

    @property
    def cta(self) -> int:
        """The index of its CTA: agents are named "0/main", and streams "TMA store of 0/main"."""
        return int(self.agent.rpartition(" ")[2].partition("/")[0])

    @property
    def atomic(self) -> bool:
        return self.proxy.endswith("atomic")

    @property
    def generic(self) -> bool:
        return self.proxy in ("generic", "atomic")


@dataclass(slots=True, eq=False)
class Access:
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
        self.page = PAGE if space == "global" else -(-len(raw) // granule) + 1
        self.written: int | None = None if initialised else 0  # granules of page 0 that were written; None: all
        self.pages: dict[int, _Page] = {}
        self.named = False
        self.home = ""  # " of CTA 1" in a cluster
        self.key: tuple[str, int] = "", 0  # equal in all CTAs of a cluster for the same buffer of the kernel
        self.last_access = 0  # the number of accesses in the launch up to the last one to it
        self._masks: dict[tuple, Granules] = {}

    def mask_of(self, view: np.ndarray) -> Granules:
        """The granules that a NumPy view of this memory touches."""
        interface = view.__array_interface__
        key = (interface["data"][0], view.shape, view.strides, view.itemsize)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = self.mask_at(offsets_of(interface["data"][0] - self.base, view), view.itemsize)
        return mask

    def mask_at(self, offsets: np.ndarray, size: int) -> Granules:
        """The granules of elements of `size` bytes at byte `offsets`."""
        if not offsets.size:
            return {}
        offsets = offsets.reshape(-1)
        parts = [(offsets + step) // self.granule for step in (*range(0, size, self.granule), size - 1)]
        granules = parts[0] if all(np.array_equal(parts[0], part) for part in parts[1:]) else np.concatenate(parts)
        return _bit_sets(granules, self.page)

    def touch(self, mask: Granules, write: bool, actor: Actor) -> tuple[dict[Access, Granules], int]:
        """Record an access. Returns the earlier accesses that it conflicts with, each with the granules they share, and
        the number of granules that it reads and nobody wrote.
        """
        made, pages = Access(actor, actor.clock, write), self.pages
        conflicts: dict[Access, Granules] = {}
        for number, bits in mask.items():
            page = pages.get(number)
            if page is None:
                page = pages[number] = _Page()
            page.touch(number, bits, write, made, conflicts)
        unwritten = 0
        if self.written is not None and mask:
            if write:
                self.written |= mask[0]
            else:
                unwritten = (mask[0] & ~self.written).bit_count()
        return conflicts, unwritten

    @property
    def writes(self) -> list[Access]:
        """The writes that nothing has overwritten."""
        return list(dict.fromkeys(access for page in self.pages.values() for access, _ in page.writes))

    def fence(self, agent: str, clock: int, vector_clock: Clock) -> None:
        """A proxy fence by `agent`: it covers every access ordered before it, for all agents ordered after it."""
        for page in self.pages.values():
            for access, _ in chain(page.writes, *page.reads.values()):
                if access.actor.generic and vector_clock.get(access.actor.agent, 0) >= access.clock:
                    access.fences.setdefault(agent, clock)

    def clear(self, contents: bool) -> None:
        """A buffer that a loop's body allocates again: nothing is written. With `contents` it holds NaN again, which
        work in flight must not see.
        """
        self.written = 0
        if contents:
            self.raw[...] = 0xFF

    def forget(self) -> None:
        """Order everything so far before everything to come (a kernel has ended)."""
        self.pages = {}


class _Page:
    """The accesses to one page that are still recorded, each with its granules. Reads are kept by agent and proxy, so
    that the reads of other programs cost nothing.
    """

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.writes: list[tuple[Access, int]] = []
        self.reads: dict[tuple[str, str], list[tuple[Access, int]]] = {}

    def touch(self, number: int, bits: int, write: bool, made: Access, conflicts: dict[Access, Granules]) -> None:
        """Record `made` on the granules `bits`, and add the accesses that it conflicts with to `conflicts`."""
        for access, own in self.writes:
            if own & bits:
                shared = conflicts.setdefault(access, {})
                shared[number] = shared.get(number, 0) | own & bits
        actor = made.actor
        if write:
            for access, own in chain.from_iterable(self.reads.values()):
                if own & bits:
                    shared = conflicts.setdefault(access, {})
                    shared[number] = shared.get(number, 0) | own & bits
            spare = actor if actor.atomic else None
            self.writes = _without(self.writes, bits, spare)
            self.reads = {key: kept for key, reads in self.reads.items() if (kept := _without(reads, bits, spare))}
            self.writes.append((made, bits))
        else:
            key = (actor.agent, actor.proxy)
            reads = self.reads.get(key)
            # a later read by the same agent replaces an earlier one of the same granules
            self.reads[key] = [*(read for read in reads if read[1] & ~bits), (made, bits)] if reads else [(made, bits)]


def _without(accesses: list[tuple[Access, int]], bits: int, spare: Actor | None) -> list[tuple[Access, int]]:
    """The accesses still recorded after a write. An atomic keeps those of other agents' atomics."""
    kept = []
    for entry in accesses:
        access, own = entry
        if not own & bits or (spare and access.actor.atomic and access.actor.agent != spare.agent):
            kept.append(entry)
        elif left := own & ~bits:
            kept.append((access, left))
    return kept


def _bit_sets(granules: np.ndarray, page: int) -> Granules:
    """Numbers of granules as bit sets by page."""
    low, high = int(granules.min()), int(granules.max())
    first, last = low // page, high // page
    if last - first < 16:  # close together: one array of flags over all these pages
        flags = np.zeros((last - first + 1) * page, np.uint8)
        flags[granules - first * page] = 1
        packed = np.packbits(flags.reshape(-1, page), axis=1, bitorder="little")
        return {
            first + number: bits
            for number, row in enumerate(packed)
            if (bits := int.from_bytes(row.tobytes(), "little"))
        }
    ordered = np.unique(granules)
    numbers, starts = np.unique(ordered // page, return_index=True)
    found = {}
    for number, own in zip(numbers.tolist(), np.split(ordered, starts[1:]), strict=True):
        flags = np.zeros(page, np.uint8)
        flags[own - number * page] = 1
        found[number] = int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
    return found


def offsets_of(start: int, view: np.ndarray) -> np.ndarray:
    """The byte offsets of a view's elements, in its order, if the first is at `start`."""
    offsets = np.array([start], np.int64)
    for size, stride in zip(view.shape, view.strides, strict=True):
        offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return offsets
