"""Clusters: programs that run concurrently and access each other's shared memory, through inline PTX."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import DTypeLike

from .agents import Barrier, Cta, Operation
from .machine import Machine
from .memory import Actor, Memory, merge
from .pointers import Found
from .ptx_cluster import WITHIN
from .report import place_text

MOST_COUNTED = 2**20 - 1  # limit of an mbarrier's arrival and byte counts (PTX ISA)
SEND_NS = 400.0  # modelled latency from one SM to another


class Placed(Found):
    """Addresses known to lie in one memory."""

    __slots__ = ()
    memory: Memory


class Clusters:
    machine: Machine
    _record: Callable[..., None]
    _fetch: Callable[..., np.ndarray]
    _put: Callable[..., None]

    # ---- the cluster's barrier

    def cluster_arrive(self, release: bool) -> None:
        machine, p = self.machine, self.machine.current
        cta, cluster = p.cta, p.cta.cluster
        if p is not cta.partitions[0]:
            raise NotImplementedError(
                "barrier.cluster with warp_specialize: all threads must arrive, and the simulator models only one "
                "partition"
            )
        machine.preempt()
        if cta.arrived_generation is not None:
            self._report("barrier", f"CTA {cta.index} arrives at its cluster's barrier twice without a wait in between")
        cta.arrived_generation = cluster.generation
        merge(cluster.gathering, p.vector_clock if release else cta.initialised)
        p.tick()
        machine.progress += 1
        cluster.arrived, cluster.latest = cluster.arrived + 1, max(cluster.latest, p.time_ns)
        if cluster.arrived == len(cluster.ctas):
            merge(cluster.released, cluster.gathering)
            cluster.generation, cluster.arrived = cluster.generation + 1, 0

    def cluster_wait(self) -> None:
        machine, p = self.machine, self.machine.current
        cta, cluster = p.cta, p.cta.cluster
        if (generation := cta.arrived_generation) is None:
            self._report("barrier", f"CTA {cta.index} waits at its cluster's barrier without having arrived")
            return
        machine.preempt()
        machine.block(
            lambda: cluster.generation > generation,
            lambda: f"its cluster ({cluster.arrived} of {len(cluster.ctas)} programs there)",
        )
        merge(p.vector_clock, cluster.released)
        cta.arrived_generation, cta.cluster_started = None, True
        machine._until(cluster.latest, "wait cluster")

    # ---- shared memory by address

    def shared_symbol(self, name: str, size: int) -> int:
        """Address of an inline PTX variable, the same in every program. Each place that declares a name gets its own
        variable, because names of an inline block are local to it.
        """
        cta, key = self.machine.current.cta, (name, size, self.machine.place())
        if key not in cta.symbols:
            begin = max((start + len(memory.raw) for start, memory in cta.symbols.values()), default=1024)
            memory = self.machine.allocate("shared", size, size)
            memory.name, memory.named = name, True
            cta.symbols[key] = begin, memory
        return cta.symbols[key][0]

    def _shared(
        self, address: np.ndarray, mask: np.ndarray | None, size: int, what: str
    ) -> Iterator[tuple[Cta, Placed]]:
        """Each program whose memory an access touches, with the addresses that lie in it."""
        p = self.machine.current
        live = np.ones(address.shape, bool) if mask is None else np.asarray(mask, bool)
        owners, within = address >> WITHIN, address & (1 << WITHIN) - 1
        if np.any(address[live] % size):
            self._report("bounds", f"{what} of {size} bytes at an address that is not a multiple of {size}")
        for owner in np.unique(owners[live]).tolist():
            here = live & (owners == owner)
            if owner > len(p.cta.cluster.ctas):
                self._report("bounds", f"{what} names program {owner - 1} of a cluster of {len(p.cta.cluster.ctas)}")
                continue
            cta = p.cta.cluster.ctas[owner - 1] if owner else p.cta
            if cta is not p.cta:
                self._check_reach(cta, what)
            low, high = int(within[here].min()), int(within[here].max()) + size
            found = next(
                ((start, m) for start, m in cta.symbols.values() if start <= low and high <= start + len(m.raw)), None
            )
            if found is None:
                self._report(
                    "bounds", f"{what} at {low} to {high} of CTA {cta.index}'s shared memory, where no variable lies"
                )
                continue
            yield cta, Placed(found[1], within - found[0], here, size)

    def _check_reach(self, other: Cta, what: str) -> None:
        p = self.machine.current
        reaches = f"{what} by {p.name} of CTA {p.cta.index} reaches CTA {other.index}"
        if not p.cta.cluster_started:
            self._report("race", f"{reaches}, which may not have started: no cluster wait precedes it")
        if other.ended:
            self._report("race", f"{reaches}, which has ended")

    def _report(self, kind: str, text: str) -> None:
        where = self.machine.place()
        self.machine.report(kind, f"{text}, at {place_text(where)}", where, (text, where))

    def shared_load(self, address: np.ndarray, dtype: DTypeLike, mask: np.ndarray | None) -> np.ndarray:
        bits = np.zeros(address.shape, dtype)
        if np.any(address[slice(None) if mask is None else np.asarray(mask, bool)] >> WITHIN):
            self._report(
                "bounds",
                "ld.shared at an address from mapa; use ld.shared::cluster",
            )
        for _, found in self._shared(address, mask, np.dtype(dtype).itemsize, "ld.shared"):
            self._record([found], False, "ld.shared")
            bits[found.live] = self._fetch([found], found.offsets.shape, dtype, 0)[found.live]
        return bits

    # ---- mbarriers by address, and the transfers that complete on them

    def _barrier_at(self, address: int, cta: Cta | None = None) -> Barrier:
        if address % 8:
            self._report("bounds", f"an mbarrier at {address}, which is not a multiple of 8")
        return self.machine.barrier(address, f"mbarrier at {address}", cta)

    def shared_barrier(self, address: np.ndarray, count: int, expected: int | None, mask: np.ndarray | None) -> None:
        """Initialise the mbarrier with `count` arrivals (`expected` is None), or arrive and expect `expected` bytes."""
        machine, p = self.machine, self.machine.current
        live = np.ones(address.shape, bool) if mask is None else np.asarray(mask, bool)
        if max(count, expected or 0) > MOST_COUNTED:
            self._report(
                "barrier",
                (
                    f"an mbarrier is to count {count} arrivals and {expected or 0} bytes; it counts up to "
                    f"{MOST_COUNTED} of each"
                ),
            )
        for place, times in zip(*np.unique(address[live], return_counts=True)):
            if expected is None:
                if times > 1:
                    self._report("race", f"mbarrier at {place} is initialised by {times} threads at once")
                machine.init_barrier(int(place), f"mbarrier at {place}", count)
            else:
                machine.preempt()
                machine.arrive(
                    self._barrier_at(int(place)),
                    int(times),
                    p.vector_clock,
                    p.name,
                    machine.place(),
                    int(times) * expected,
                    p.time_ns,
                )
                p.tick()

    def shared_wait(self, address: int, parity: int, acquire: bool) -> None:
        vector_clock = self.machine.current.vector_clock
        before = dict(vector_clock)
        self.machine.wait(self._barrier_at(address), parity & 1)
        if not acquire:
            vector_clock.clear()
            vector_clock.update(before)

    def send(self, address: np.ndarray, values: list[np.ndarray], bell: np.ndarray, mask: np.ndarray | None) -> None:
        """st.async: write `values` to consecutive addresses later, then complete their bytes on mbarrier `bell`."""
        size = values[0].itemsize
        for cta, found in self._shared(address, mask, size * len(values), "st.async"):
            for place in np.unique(bell[found.live]).tolist():
                part = Placed(found.memory, found.offsets, found.live & (bell == place), found.size)
                if place >> WITHIN != (address[part.live] >> WITHIN)[0]:
                    self._report("bounds", "st.async to one program of the cluster, its mbarrier in another")
                self._send(cta, part, values, self._barrier_at(place & (1 << WITHIN) - 1, cta))

    def _send(self, cta: Cta, found: Placed, values: list[np.ndarray], barrier: Barrier) -> None:
        machine, p = self.machine, self.machine.current
        agent = f"st.async {barrier.copies} on {cta.index}/{barrier.name}"
        barrier.copies += 1
        number, vector_clock, phase, place = (
            machine.sequence(agent),
            dict(p.vector_clock),
            barrier.phase,
            machine.place(),
        )
        what = f"st.async into {found.memory.name}"
        offsets = found.offsets[found.live]
        actor = Actor(agent, number, {**vector_clock, agent: number}, "generic", what, place)
        machine.access(found.memory, found.memory.mask_at(offsets, found.size), True, actor)
        p.tick()
        released_clock = {agent: number}  # releases only the data sent, not the sender's earlier accesses
        operation = Operation(agent, what, place, lambda: None, p.time_ns + SEND_NS)
        size = found.size // len(values)
        whole = [np.broadcast_to(value, found.offsets.shape) for value in values]

        def land() -> None:
            for i, value in enumerate(whole):
                self._put([Found(found.memory, found.offsets + i * size, found.live, size)], value, value.dtype)
            machine.complete_bytes(barrier, found.size * len(offsets), released_clock, phase, operation)

        operation.land = land
        machine.launch(None, operation, cta)
