"""Counts of what a kernel costs in memory (`Checks(costs=True)`): sectors, bank conflicts, bytes, occupancy.

A request is one load or store instruction of a warp, and a sector is 32 bytes. Nsight Compute counts them as
`l1tex__t_requests` and `l1tex__t_sectors`. Gluon's layouts say which thread holds which element. Plain Triton's
compiler chooses layouts later: the counts assume that each access gets the vectors that its own addresses allow, of up
to 16 bytes, along the dimension in which they are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .layouts import Layouts
from .options import MOST_CTAS, MOST_WARPS, REGISTERS, SHARED_KIB
from .report import Place, place_text

SECTOR, LANES, VECTOR = 32, 32, 16
_RESERVED = (
    1024  # bytes of shared memory that the driver reserves for each CTA (CUDA C++ Programming Guide, from sm_80 on)
)
_REGISTER_UNIT = 8  # a thread gets a multiple of this


@dataclass
class Cost:
    """One statement's accesses of one kind, summed over the launch.

    Attributes:
        what: "global load", "global store", "global atomic", "shared load", "shared store", "TMA load" and so on.
        where: the statement's place.
        bytes: of active elements.
        requests: instructions of warps that access global memory; 0 for other kinds.
        sectors: of 32 bytes, global memory only.
        conflicts: extra passes over the banks of shared memory for each instruction, as Triton's compiler counts them.
    """

    what: str
    where: str
    bytes: int = 0
    requests: int = 0
    sectors: int = 0
    conflicts: int = 0

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def used(self) -> float:
        """The part of the sectors' bytes that active elements use."""
        return self.bytes / (SECTOR * self.sectors) if self.sectors else 0.0

    def __str__(self) -> str:
        parts = [f"{self.what} of {self.bytes:,} bytes"]
        if self.sectors:
            parts.append(f"{self.requests:,} requests of {self.sectors_per_request:.1f} sectors, {self.used:.0%} used")
        if self.conflicts:
            parts.append(f"{self.conflicts} bank conflicts an instruction")
        return f"{', '.join(parts)}, at {self.where}"


class Occupancy(NamedTuple):
    """How many CTAs of a kernel fit on a multiprocessor, by what each takes.

    >>> str(Occupancy.of("kernel", 90, 100 * 1024, 8, 0))
    'kernel: 2 CTAs, 16 of 64 warps on a multiprocessor; limited by 102,400 bytes of shared memory'
    """

    kernel: str
    ctas: int
    warps: int
    most_warps: int
    limit: str

    @staticmethod
    def of(kernel: str, capability: int, shared: int, warps: int, registers: int) -> Occupancy:
        """registers: of a thread, 0 if not known: what the compiler gives out is not simulated."""
        whole = (SHARED_KIB[capability] + 1) * 1024
        limits = {
            f"{shared:,} bytes of shared memory": whole // (shared + _RESERVED),
            f"{warps} warps": MOST_WARPS[capability] // warps,
            "the number of CTAs": MOST_CTAS[capability],
        }
        if registers:
            given = -(-registers // _REGISTER_UNIT) * _REGISTER_UNIT
            limits[f"{registers} registers a thread"] = REGISTERS // (given * LANES * warps)
        limit = min(limits, key=lambda name: limits[name])
        return Occupancy(kernel, limits[limit], limits[limit] * warps, MOST_WARPS[capability], limit)

    def __str__(self) -> str:
        many = f"{self.ctas} CTA{'s' * (self.ctas != 1)}, {self.warps} of {self.most_warps} warps"
        return f"{self.kernel}: {many} on a multiprocessor; limited by {self.limit}"


@dataclass
class Costs:
    """What a run cost in memory. Empty without `Checks(costs=True)`.

    Attributes:
        rows: one for each statement and kind of access, the most bytes first.
        occupancy: one for each launch of a different kernel or size.
    """

    occupancy: list[Occupancy] = field(default_factory=list)
    _rows: dict[tuple[str, Place], Cost] = field(default_factory=dict)

    @property
    def rows(self) -> list[Cost]:
        return sorted(self._rows.values(), key=lambda row: -row.bytes)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes by kind of access, such as "global load"."""
        found: dict[str, int] = {}
        for row in self.rows:
            found[row.what] = found.get(row.what, 0) + row.bytes
        return found

    def add(self, what: str, place: Place, size: int, requests: int = 0, sectors: int = 0, conflicts: int = 0) -> None:
        row = self._rows.get((what, place))
        if row is None:
            row = self._rows[what, place] = Cost(what, place_text(place))
        row.bytes += size
        row.requests += requests
        row.sectors += sectors
        row.conflicts = max(row.conflicts, conflicts)

    def launched(self, occupancy: Occupancy) -> None:
        if occupancy not in self.occupancy:
            self.occupancy.append(occupancy)

    def __str__(self) -> str:
        total = ", ".join(f"{what} {size:,}" for what, size in self.bytes.items())
        return "\n".join([f"bytes: {total}" if total else "no access", *map(str, self.rows), *map(str, self.occupancy)])


# ---------------------------------------------------------------- requests and sectors of global memory


def requests(addresses: np.ndarray, live: np.ndarray, size: int, held: np.ndarray, every_warp: bool) -> tuple[int, int]:
    """(requests, sectors) of one access.

    addresses, live: of the tensor's elements, flat.
    size: bytes of an element.
    held: [warps, lanes, registers], the element that each register of each thread holds.
    every_warp: whether warps that hold the same elements as another make requests too, as they do for loads.
    """
    if not every_warp:
        held = held[np.sort(np.unique(held[:, 0, 0], return_index=True)[1])]
    at, active = addresses[held], live[held]
    width = _width(at, active, size)
    at, active = at[..., ::width], active[..., ::width]
    sectors = np.where(active, at // SECTOR, -1).swapaxes(1, 2).reshape(-1, held.shape[1])
    # a vector that begins in a sector ends in it: it is aligned to its size, 16 bytes at most
    ordered = np.sort(sectors, axis=1)
    fresh = np.ones(ordered.shape, bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    fresh &= ordered >= 0
    return int((ordered[:, -1] >= 0).sum()), int(fresh.sum())


def _width(at: np.ndarray, active: np.ndarray, size: int) -> int:
    """Elements that one instruction of a thread moves: contiguous, aligned, and all active or none."""
    width = 1
    while 2 * width * size <= VECTOR and at.shape[-1] % (2 * width) == 0:
        groups = at.reshape(*at.shape[:-1], -1, 2 * width)
        masks = active.reshape(groups.shape)
        steps = groups[..., :1] + size * np.arange(2 * width)
        whole = masks.all(-1)
        if not (np.all(whole | ~masks.any(-1)) and np.all((groups == steps).all(-1) | ~whole)):
            break
        if np.any((groups[..., 0] % (2 * width * size) != 0) & whole):
            break
        width *= 2
    return width


def held_by_layout(layouts: Layouts, shape: tuple[int, ...], layout: object) -> np.ndarray:
    """[warps, lanes, registers] of a Gluon layout. Registers that hold an element once more make no request."""
    return layouts.answer(("held", shape, id(layout)), lambda: _held(layouts, shape, layout))


def _held(layouts: Layouts, shape: tuple[int, ...], layout: object) -> np.ndarray:
    linear = layouts.builder.to_linear_layout(layout, list(shape))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    parts = []
    for bases in (linear.warp_bases, linear.lane_bases, [base for base in linear.reg_bases if any(base)]):
        places = np.zeros(1, np.int64)
        for base in bases:
            step = sum(x * stride for x, stride in zip(base, strides, strict=True))
            places = np.concatenate([places, places ^ step])
        parts.append(places)
    warps, lanes, registers = parts
    return warps[:, None, None] ^ lanes[None, :, None] ^ registers[None, None, :]


def held_by_default(addresses: np.ndarray, size: int, warps: int) -> np.ndarray:
    """[warps, lanes, registers] as Triton's coalescing pass lays a tensor out."""
    shape = addresses.shape or (1,)
    places = np.arange(math.prod(shape)).reshape(shape)
    fastest = _fastest(addresses.reshape(shape), size)
    places = np.moveaxis(places, fastest, -1).reshape(-1)
    threads = LANES * warps
    vector = max(1, min(VECTOR // size, shape[fastest], places.size // threads))
    at = np.moveaxis(addresses.reshape(shape), fastest, -1).reshape(-1)
    while vector > 1 and not _vectors(at, size, vector):
        vector //= 2
    if places.size < threads * vector:  # threads beyond the tensor hold its elements once more
        places = np.tile(places, -(-threads * vector // places.size))[: threads * vector]
    places = places.reshape(-1, threads, vector)
    return places.swapaxes(0, 1).reshape(warps, LANES, -1)


def _vectors(at: np.ndarray, size: int, vector: int) -> bool:
    """Whether each run of `vector` elements is contiguous and aligned to its size."""
    runs = at.reshape(-1, vector)
    return bool(np.all(runs == runs[:, :1] + size * np.arange(vector)) and np.all(runs[:, 0] % (vector * size) == 0))


def _fastest(addresses: np.ndarray, size: int) -> int:
    """The dimension along which addresses are contiguous, or else the last."""
    for dim in reversed(range(addresses.ndim)):
        if addresses.shape[dim] > 1 and np.all(np.diff(addresses, axis=dim) == size):
            return dim
    return addresses.ndim - 1


def total(rows: Iterable[Cost], what: str) -> Cost:
    """The sum of the rows of one kind of access, or of all kinds that begin with this."""
    made = Cost(what, "")
    for row in rows:
        if row.what.startswith(what):
            made.bytes, made.requests = made.bytes + row.bytes, made.requests + row.requests
            made.sectors, made.conflicts = made.sectors + row.sectors, max(made.conflicts, row.conflicts)
    return made
