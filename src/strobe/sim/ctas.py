"""Gluon kernels of several CTAs (`num_ctas` above 1): each CTA's part of a buffer, barriers of several CTAs, data that
changes its CTA.

A buffer lies in every CTA of the cluster at the same offset. `own` is the part that the running CTA has; `of_cta` is
the same buffer in another CTA. A layout whose CGA bases are zero gives several CTAs the same part: the first of them
leads. An mbarrier of such a layout lies in its leader alone; the others arrive there and do not wait.

Source: Triton 3.9, BarrierOpToLLVM.cpp, MMAv5.cpp, LoadStoreOpToLLVM.cpp, and the PTX of small kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import shares
from .agents import Barrier, Cta, Meeting, Operation
from .layouts import Layouts
from .machine import Machine
from .memory import Actor, merge
from .shares import Part, Share, common
from .values import COMPUTED, Reordered, Type, Value, Window, from_bits, is_pointer, to_bits

SEND_NS = 400.0  # modelled latency from one SM to another


class Ctas:
    machine: Machine
    layouts: Layouts
    ctas: int  # of a program
    two_ctas: bool  # whether the kernel's tcgen05 instructions work for pairs of CTAs
    inits_by_hand: bool  # whether the kernel itself orders the initialisation of mbarriers (Triton before 3.8)
    window: Callable[[Any], Window]
    cluster_arrive: Callable[[bool], None]
    cluster_wait: Callable[[], None]
    _check_reach: Callable[[Cta, str], None]
    report: Callable[[str, str], None]

    @property
    def rank(self) -> int:
        return self.machine.current.cta.rank

    # ---- parts

    def share(self, window: Window) -> Share:
        return shares.of_memory(self.layouts, window.view.shape, window.type.layout[0])

    def own(self, window: Window) -> Window:
        """The running CTA's part of a buffer."""
        return window if self.ctas == 1 else self._part(window, self.rank)

    def _part(self, window: Window, rank: int) -> Window:
        share = self.share(window)
        if share.whole:
            return window
        part = Window(window.memory, window.view[share.part(rank)], window.elem, window.type)
        part.named = window.label
        return part

    def of_cta(self, window: Window, rank: int, what: str) -> Window | None:
        """The same buffer in another CTA of the cluster. Waits until that CTA has come to the buffer's allocation,
        which on hardware takes no instruction. None, with a report, if the CTA has ended.
        """
        p = self.machine.current
        if rank == p.cta.rank:
            return window
        other = p.cta.cluster.ctas[rank]
        self._check_reach(other, what)
        key = window.memory.key
        if key not in other.by_key and not other.ended:
            self.machine.block(
                lambda: key in other.by_key or other.ended, lambda: f"{window.label} of CTA {other.index}"
            )
        memory = other.by_key.get(key)
        if memory is None:
            return None
        tile: Any = window.view.tile if isinstance(window.view, Reordered) else window.view
        there: Any = np.ndarray(tile.shape, tile.dtype, memory.raw, window.address - window.memory.base, tile.strides)
        view = window.view.moved(there) if isinstance(window.view, Reordered) else there
        made = Window(memory, view, window.elem, window.type)
        made.named = f"{window.label} of CTA {other.index}"
        return made

    def own_of_cta(self, window: Window, rank: int, what: str) -> Window | None:
        """Another CTA's part of a buffer, in that CTA."""
        there = self.of_cta(window, rank, what)
        return None if there is None else self._part(there, rank)

    def part_of_tensor(self, value: Value) -> Part:
        """The running CTA's part of a tensor."""
        return shares.of_registers(self.layouts, np.shape(value.raw()), value.layout).part(self.rank)

    def held(self, shape: tuple[int, ...], layout: object, leads: bool = False) -> np.ndarray | None:
        """Which elements of a tensor the running CTA holds, None for all. With `leads`, those that it stores: of CTAs
        that hold the same elements, the first one does.
        """
        if self.ctas == 1:
            return None
        share = shares.of_registers(self.layouts, shape, layout)
        if leads and not share.leads(self.rank):
            return np.zeros(shape, bool)
        return None if share.whole else share.mask(self.rank)

    def _own_bits(self, value: Value, bits: np.ndarray, window: Window) -> tuple[np.ndarray, Window]:
        """What the running CTA stores to a buffer: its part of the bits, and of the buffer."""
        part = self.share(window).part(self.rank)
        if not shares.of_registers(self.layouts, bits.shape, value.layout).holds(self.rank, part):
            bits = to_bits(self.gathered(value, bits.shape), window.elem)
        return bits[part], self.own(window)

    def _read_parts(self, ty: Type, window: Window) -> Value:
        """A load: the running CTA's own part, or also those of others where the tensor's layout asks for them."""
        machine, shape = self.machine, tuple(window.view.shape)
        want = shares.of_registers(self.layouts, shape, ty.layout).part(self.rank)
        share = self.share(window)
        inside = common(want, share.part(self.rank)) == want
        data = np.full(shape, self.foreign(window.elem))
        meets = not inside and self._may_meet("a load of another CTA's shared memory")
        if meets:
            self.meet()
        for rank in [self.rank] if inside else range(self.ctas):
            part = common(want, share.part(rank))
            if part is not None and (inside or share.leads(rank)):
                there = self.of_cta(window, rank, "load")
                if there is not None:
                    piece = Window(there.memory, there.view[part], window.elem, window.type)
                    machine.touch(piece.memory, piece.mask, False, f"load of {there.label}")
                    data[part] = from_bits(piece.bits(), window.elem)
        if meets:
            self.meet()
        machine.preempt()
        return Value(data, window.elem, ty.layout)

    # ---- data that changes its CTA

    def _may_meet(self, what: str) -> bool:
        """Whether the compiler has a barrier of the cluster here. Triton before 3.8 has none inside warp_specialize."""
        p = self.machine.current
        if p is p.cta.partitions[0] or not self.inits_by_hand:
            return True
        self.report("compiler", f"{what} inside warp_specialize, where this Triton has no barrier of the cluster")
        return False

    def gathered(self, value: Value, shape: tuple[int, ...]) -> np.ndarray:
        """The whole tensor, with every CTA's part. The compiler puts barriers of the cluster around the exchange."""
        p, data = self.machine.current, np.array(value.data)
        if not self._may_meet("a tensor whose elements change their CTA"):
            return data
        cluster = p.cta.cluster
        share = shares.of_registers(self.layouts, shape, value.layout)
        parts = cluster.exchanged.setdefault((p.name, p.exchanges), {})
        parts[self.rank] = data
        self.meet()
        for rank in range(self.ctas):
            if share.leads(rank):
                data[share.part(rank)] = parts[rank][share.part(rank)]
        self.meet()
        p.exchanges += 1
        return data

    def from_first(self, value: Value) -> Value:
        """A tensor or scalar that the first of the CTAs with the same part has computed."""
        shape = tuple(np.shape(value.raw()))
        if not shares.of_registers(self.layouts, shape, value.layout).free:
            return value
        data = self.gathered(value, shape)
        return Value(data if data.ndim else data[()], value.elem, value.layout)

    def whole_along(self, value: Value, axis: int) -> bool:
        """Whether each CTA holds all elements along an axis."""
        if self.ctas == 1 or value.layout is None:
            return True
        share = shares.of_registers(self.layouts, np.shape(value.raw()), value.layout)
        return not any(basis[axis] for basis in share.bases)

    def converted(self, value: Value, layout: object) -> np.ndarray:
        """The data of a tensor whose layout changes: gathered if a CTA gets elements of another one."""
        shape = np.shape(value.raw())
        if self.ctas > 1 and value.layout is not None and shape:
            have = shares.of_registers(self.layouts, shape, value.layout)
            want = shares.of_registers(self.layouts, shape, layout)
            if any((want.mask(rank) & ~have.mask(rank)).any() for rank in range(self.ctas)):
                return self.gathered(value, shape)
        return value.data

    # ---- barriers of the cluster

    def meet(self) -> None:
        """A barrier of the cluster, of the kernel or put in by the compiler."""
        self.create_cluster_barrier()

    def create_cluster_barrier(self, relaxed: bool = False) -> None:
        p, machine = self.machine.current, self.machine
        if p is p.cta.partitions[0]:
            self.cluster_arrive(not relaxed)
            return self.cluster_wait()
        meeting = p.cta.cluster.meetings.setdefault(p.name, Meeting())
        machine.preempt()
        generation = meeting.generation
        merge(meeting.gathering, {} if relaxed else p.vector_clock)
        meeting.arrived += 1
        p.tick()
        machine.progress += 1
        if meeting.arrived == self.ctas:
            merge(meeting.released, meeting.gathering)
            meeting.generation, meeting.arrived = generation + 1, 0
        machine.block(
            lambda: meeting.generation > generation,
            lambda: f"{p.name} of its cluster ({meeting.arrived} of {self.ctas} CTAs there)",
        )
        merge(p.vector_clock, meeting.released)
        return None

    def create_cluster_arrive(self, relaxed: bool = False) -> None:
        self.cluster_arrive(not relaxed)

    def create_cluster_wait(self) -> None:
        self.cluster_wait()

    def create_fence_mbarrier_init_release_cluster(self) -> None:
        """The next arrival at the cluster's barrier shows the initialised mbarriers to the other CTAs."""
        p = self.machine.current
        p.cta.initialised = dict(p.vector_clock)

    def after_inits(self) -> None:
        """The compiler's barrier of the cluster between the kernel's mbarrier.init and the first use of a barrier."""
        p = self.machine.current
        if self.ctas > 1 and p.cta.has_new_barriers and not self.inits_by_hand and p is p.cta.partitions[0]:
            p.cta.has_new_barriers = False
            self.meet()

    # ---- mbarriers

    def leader(self, window: Window) -> int:
        """The rank of the CTA in which an mbarrier lies."""
        return self.rank if self.ctas == 1 else self.rank & ~self.share(window).free

    def barrier_of(self, window: Window, rank: int, what: str) -> Barrier | None:
        """The mbarrier at the same offset in a CTA of the cluster."""
        self.after_inits()
        there = self.of_cta(window, rank, what)
        if there is None:
            return None
        return self.machine.barrier(there.address, self.barrier_name(window, rank), self._cta(rank))

    def barrier_name(self, window: Window, rank: int) -> str:
        return window.label if self.ctas == 1 else f"{window.label} of CTA {self._cta(rank).index}"

    def _cta(self, rank: int) -> Cta:
        return self.machine.current.cta.cluster.ctas[rank]

    def arrive_from(self, window: Window, count: int, expect: int, from_cta: int | None) -> None:
        """An arrival at the barrier's leader. With `from_cta`, CTAs without further bits in their rank arrive at the
        barriers of all that differ from them in these bits alone.
        """
        p, machine = self.machine.current, self.machine
        if from_cta is None:
            ranks = [self.leader(window)]
        else:
            bits = self.ctas - 1 & ~from_cta
            ranks = [] if self.rank & bits else shares.peers(self.rank, bits, self.ctas)
        for rank in ranks:
            if barrier := self.barrier_of(window, rank, "mbarrier.arrive"):
                who = p.name if rank == self.rank else f"{p.name} of CTA {p.cta.index}"
                machine.arrive(barrier, count, p.vector_clock, who, machine.place(), expect, p.time_ns)
        p.tick()

    # ---- stores into another CTA

    def create_async_shared_store(self, target: Any, value: Value, bar: Any) -> None:
        """st.async of a tensor: each element goes to the CTA in whose part of `target` it lies, and its bytes complete
        on that CTA's barrier.
        """
        target, bar = self.window(target), self.window(bar)
        machine, shape = self.machine, tuple(np.shape(value.raw()))
        machine.threads_meet()
        have = shares.of_registers(self.layouts, shape, value.layout)
        want = self.share(target)
        bits = to_bits(value.data, target.elem)
        for rank in range(self.ctas):
            part = common(have.part(self.rank), want.part(rank))
            if part is None or (have.holds(rank, part) and rank != self.rank) or not self._sends(have, rank, part):
                continue
            there = self.of_cta(target, rank, "async_store")
            home = rank & ~self.share(bar).free
            barrier = self.barrier_of(bar, home, "async_store")
            if there is not None and barrier is not None:
                self._send_part(there, part, bits[part], barrier, self._cta(home))
        machine.current.tick()

    def _sends(self, have: Share, rank: int, part: Part) -> bool:
        """Whether this CTA sends a part that others may hold, too. A receiver that holds it keeps its own."""
        return rank == self.rank or have.leads(self.rank)

    def _send_part(self, there: Window, part: Part, bits: np.ndarray, barrier: Barrier, home: Cta) -> None:
        machine, p = self.machine, self.machine.current
        agent = f"st.async {barrier.copies} of {p.agent} on {barrier.name}"
        barrier.copies += 1
        number, clock, phase, place = machine.sequence(agent), dict(p.vector_clock), barrier.phase, machine.place()
        what, view = f"async_store into {there.label}", there.view[part]
        actor = Actor(agent, number, {**clock, agent: number}, "generic", what, place)
        machine.access(there.memory, there.memory.mask_of(view), True, actor)
        operation = Operation(agent, what, place, lambda: None, p.time_ns + SEND_NS)

        def land() -> None:
            view[...] = bits
            # releases only the data sent, not the sender's earlier accesses
            machine.complete_bytes(barrier, view.nbytes, {agent: number}, phase, operation)

        operation.land = land
        machine.launch(None, operation, None if home.ended else home)

    def foreign(self, elem: str) -> Any:
        """What a tensor holds where a CTA has no element."""
        kind = np.dtype(np.int64 if is_pointer(elem) else COMPUTED[elem])
        return kind.type(np.nan if kind.kind == "f" else 1)
