"""The simulated machine: CTAs in flight, a seeded scheduler, barriers, and the checks that produce reports.

This file knows nothing of Triton. A copy or a product takes effect only when the scheduler lands it. Modes: `eager`
lands it at once; `lazy` only when every partition waits; `random` draws among everything that can happen; `pct` follows
random priorities with random change points (Burckhardt et al., ASPLOS 2010); `timed` follows modelled time.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from types import CodeType
from typing import Any, cast

import greenlet
import numpy as np

from .agents import Barrier, Cluster, Cta, NamedBarrier, Operation, Partition, Stream
from .checks import USUAL, Checks
from .costs import Costs
from .coverage import Coverage
from .deadlock import explain
from .memory import Access, Actor, Clock, Granules, Memory, merge
from .options import MODES as MODES
from .report import Place, Reports, Stop, place_text
from .scopes import Released
from .timeline import Event

# code of kernel functions, whose frames are named in reports; by id, since hashing code reads all of it
KERNEL_CODE: dict[int, CodeType] = {}
MAX_STEPS = 5_000_000
# (kind of report, later access writes, earlier access writes) -> how the later access relates to the earlier one
_RELATION = {
    ("race", True, True): "overwrites", ("race", True, False): "overwrites what is read by",
    ("race", False, True): "reads what is written by",
    ("order", True, True): "adds to what is added to by",
    **{("fence", *writes): "follows" for writes in ((True, True), (True, False), (False, True))},
}  # fmt: skip
_REASON = {
    "race": "; the two are unordered",
    "order": "; their order is not fixed: the sum of floating-point numbers differs from run to run",
    "fence": " through another proxy; fence_async_shared is missing in between",
}
MOST_WARPS = 32  # of a CTA, on all targets
SPINS = 1000  # identical weak reads in a row that count as a spin loop

_NOBODY = cast(Partition, None)  # the current partition while no kernel code runs


class Machine:
    def __init__(
        self, mode: str, seed: int, sms: int, limits: dict[str, int], reports: Reports, checks: Checks = USUAL
    ):
        self.mode, self.random, self.sms, self.limits, self.reports = mode, random.Random(seed), sms, limits, reports
        self.checks = checks
        self.storages: list[Memory] = []
        self.coverage = Coverage(self.report)  # of the tensors of a launch
        self.wrapped: dict[str, str] = {}  # operations on int32 that overflowed in this launch, by place
        self.costs = Costs()
        self.looked_at: set[tuple[object, ...]] = set()  # branches whose other side was looked at in this launch
        # whether the compiler puts fences between a partition's own stores and its TMA and tcgen05 (Triton 3.8)
        self.compiler_fences = False
        self.fuse = False  # whether a product and the sum that follows it are rounded once
        self.loaded_pointers = False  # whether the kernel made pointers from numbers, so that they point anywhere
        self.events: list[Event] = []
        self.stats: dict[str, int] = {"ctas": 0, "steps": 0, "accesses": 0, "landed": 0}
        self.current: Partition = _NOBODY  # set whenever kernel code runs
        self.hub: Any = None  # the scheduler's greenlet
        self.ctas: list[Cta] = []
        self.max_steps = MAX_STEPS
        self.deadline, self.out_of_time = math.inf, False  # of `time.monotonic`
        self.entered: dict[int, Any] = {}  # jit functions that ran, by id
        self.lines: set[tuple[str, int]] | None = None  # (file, line) of each call of kernel code, if wanted
        self.progress = 0  # counts changes that a spinning partition might see
        self._waiting: Iterator[tuple[int, tuple[int, int, int]]] = iter(())  # programs that have not started
        self._priorities: dict[str, float] = {}
        self._sequence: dict[str, int] = {}
        self._released = Released()  # clocks that atomics released

    def begin_launch(self) -> None:
        """Forget the arguments of the launch before."""
        self.storages, self.loaded_pointers = [], False
        self.most_shared, self.most_warps = 0, self.warps  # of a CTA of this launch
        self.coverage, self.wrapped, self.looked_at = Coverage(self.report), {}, set()

    # ---- current place and findings

    def place(self) -> Place:
        """The kernel functions on the stack, innermost first."""
        found = []
        frame = sys._getframe(1)
        while frame is not None and len(found) < 4:
            if id(frame.f_code) in KERNEL_CODE:
                found.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        partition = self.current
        return (*found, *partition.origin) if partition else tuple(found)

    def report(self, kind: str, text: str, where: Place | None = None, key: tuple = ()) -> None:
        self.reports.add(kind, text, place_text(self.place() if where is None else where), key)

    # ---- memory

    def access(self, memory: Memory, mask: Granules, write: bool, actor: Actor) -> None:
        """Record an access and report its faults."""
        self.stats["accesses"] += 1
        memory.last_access = self.stats["accesses"]
        if memory.space == "global" and actor.proxy == "generic" and not write:
            self._spins(memory, mask, actor)
        else:
            self.current.last_read = ()
        earlier, unwritten = memory.touch(mask, write, actor)
        if self.checks.coverage and memory.space == "global":
            self.coverage.access(memory, mask, write, actor, earlier)
        if not self.checks.happens_before:
            return
        if unwritten:
            text = (
                f"{actor.what} by {_who(actor)} reads {memory.name}, {_part(unwritten, mask)} "
                f"of which was never written, at {place_text(actor.where)}"
            )
            self.report("uninitialised", text, actor.where, (memory.name, actor.where))
        for access, shared in earlier.items():
            if kind := self._fault(access, actor):
                here, there = (f"{who.what} by {_who(who)} at {place_text(who.where)}" for who in (actor, access.actor))
                text = f"on {memory.name}{memory.home}: {here} {_RELATION[kind, write, access.write]} {there}"
                text += _REASON[kind]
                key = (memory.name, actor.where, access.actor.where, write, access.write)
                if kind == "race" and write and access.write and actor.repeats and not self.reports.knows(kind, key):
                    text += "; both write the same values" * actor.repeats(shared)
                self.report(kind, text, actor.where, key)

    def _fault(self, earlier: Access, actor: Actor) -> str:
        """The kind of report for two accesses to one place, at least one of them a write, or "" for none."""
        if earlier.actor.reaches(actor) and actor.reaches(earlier.actor):  # no race, but the order of adds may matter
            ordered = not (self.checks.atomic_order and earlier.actor.adds and actor.adds) or earlier.ordered_before(
                actor
            )
            return "" if ordered else "order"
        if not earlier.ordered_before(actor):
            return "race"
        return "fence" if self._unfenced(earlier, actor) else ""

    def _unfenced(self, earlier: Access, actor: Actor) -> bool:
        """Whether the async proxy follows a generic access without a fence. After a generic read this counts only if
        `read_fences` is set.
        """
        if self.compiler_fences and earlier.actor.agent == self.current.agent and not actor.what.startswith("wgmma"):
            return False
        crosses = (
            actor.proxy.startswith("async") and earlier.actor.generic and (earlier.write or self.checks.read_fences)
        )
        return crosses and not earlier.fenced_before(actor)

    def touch(self, memory: Memory, mask: Granules, write: bool, what: str) -> None:
        """An access by the running partition's own instructions."""
        p = self.current
        proxy = "tensor" if memory.space == "tensor" else "generic"
        self.access(memory, mask, write, Actor(p.agent, p.clock, p.vector_clock, proxy, what, self.place()))

    def _spins(self, memory: Memory, mask: Granules, actor: Actor) -> None:
        """Detect a loop that only repeats a weak read of one global value. Then let others run first."""
        p, seen = self.current, (memory.name, mask, actor.where, self.progress)
        p.repeats = p.repeats + 1 if p.last_read == seen else 0
        p.last_read = seen
        if p.repeats >= SPINS:
            text = (
                f"{p.name} reads {memory.name} repeatedly by a plain load, which need not see other agents' writes: "
                f"read it by a volatile or acquiring load; at {place_text(actor.where)}"
            )
            self.report("deadlock", text, actor.where, (memory.name, actor.where))
            self.poll(seen)

    def fence(self, spaces: tuple[str, ...], cluster: bool = False) -> None:
        """A proxy fence. With `cluster` it covers shared memory of all CTAs of the cluster."""
        p = self.current
        ctas = p.cta.cluster.ctas if cluster else [p.cta]
        for memory in [*(memory for cta in ctas for memory in cta.memories), *self.storages]:
            if memory.space in spaces:
                memory.fence(p.agent, p.clock, p.vector_clock)
        p.tick()

    def allocate(self, space: str, size: int, charge: int) -> Memory:
        cta, place, allocations = self.current.cta, self.place(), self.current.allocations
        if reused := allocations.reused(place, space, size):
            cta.budget.allocate_again(reused)
            if len(cta.cluster.ctas) == 1:  # in a cluster other CTAs may have copied to it already
                reused.clear(contents=not cta.in_flight())
            return reused
        memory = cta.allocate(space, size, self.current.name)
        cta.budget.add(memory, charge, self.limits[space], place, self.stats["accesses"])
        cta.most_shared = max(cta.most_shared, cta.budget.used("shared"))
        allocations.add(place, memory)
        return memory

    def _check_budget(self, cta: Cta) -> None:
        for excess in cta.budget.excesses:
            if (used := excess.in_use()) > self.limits[excess.space]:
                unit = "bytes" if excess.space == "shared" else "columns"
                text = (
                    f"{used} {unit} of {excess.space} memory are in use with this allocation of {excess.charge}; "
                    f"the target has {self.limits[excess.space]}; at {place_text(excess.place)}"
                )
                self.report("budget", text, excess.place, (excess.space,))

    def check_warps(self, warps: int, what: str) -> None:
        if warps > MOST_WARPS:
            self.report("budget", f"{what}: a CTA has at most {MOST_WARPS} warps, which is {32 * MOST_WARPS} threads")

    # ---- mbarriers

    def barrier(self, address: int, name: str, cta: Cta | None = None) -> Barrier:
        """The initialised barrier at an address. An uninitialised one is reported and created; the run continues."""
        p = self.current
        found = (cta or p.cta).barriers.get(address)
        if found is None or not found.valid:
            self.report("barrier", f"{p.name} uses {name}, which is not initialised, at {place_text(self.place())}")
            found = (cta or p.cta).barriers[address] = Barrier(name, 1, p.vector_clock)
        elif self.checks.happens_before and any(
            p.vector_clock.get(agent, 0) < clock for agent, clock in found.since.items()
        ):
            self.report(
                "race",
                f"{p.name} uses {name} without being ordered after its initialisation, at {place_text(self.place())}",
            )
        return found

    def init_barrier(self, address: int, name: str, count: int) -> None:
        p = self.current
        if count < 1:
            self.report(
                "barrier",
                (
                    f"{p.name} initialises {name} with a count of {count}; it must be 1 or more; at "
                    f"{place_text(self.place())}"
                ),
            )
        p.cta.barriers[address] = Barrier(name, max(count, 1), p.vector_clock)
        p.tick()

    def arrive(
        self,
        barrier: Barrier,
        count: int,
        vector_clock: Clock,
        who: str,
        where: Place,
        expect: int = 0,
        time_ns: float = 0.0,
    ) -> None:
        """Arrivals by `who`, issued at `where`. Waiters acquire `vector_clock`."""
        self.progress += 1
        if self.checks.happens_before and not barrier.is_after_completed(vector_clock):
            self.report(
                "barrier",
                f"{who} arrives on {barrier.name} at {place_text(where)}, not ordered after the end of "
                "the previous phase: the arrival may count for that phase or for the next",
                where,
                (barrier.name, "early", where),
            )
        merge(barrier.gathering, vector_clock)
        barrier.arrivals[who] = barrier.phase, where
        barrier.missing -= count
        barrier.missing_bytes += expect
        barrier.latest = max(barrier.latest, time_ns)
        if barrier.missing < 0:
            self.report("barrier", f"{barrier.name} gets more arrivals than its count of {barrier.count} in one phase, "
                        f"the last by {who}, at {place_text(where)}", where, (barrier.name, where))  # fmt: skip
            barrier.missing = 0
        self._settle(barrier)

    def complete_bytes(
        self, barrier: Barrier, size: int, vector_clock: Clock, phase: int, operation: Operation
    ) -> None:
        """Complete the bytes of a copy that was issued in `phase` of the barrier."""
        self.progress += 1
        merge(barrier.gathering, vector_clock)
        barrier.arrivals[operation.what] = barrier.phase, operation.where
        barrier.missing_bytes -= size
        barrier.latest = max(barrier.latest, operation.ready_ns)
        if (barrier.missing == 0 and barrier.missing_bytes < 0) or barrier.phase != phase:
            self._too_many_bytes(
                barrier, phase, f"{operation.what} issued at {place_text(operation.where)}", operation.where
            )
        self._settle(barrier)

    def _too_many_bytes(self, barrier: Barrier, phase: int, culprit: str, where: Place) -> None:
        self.report("bytes", f"more bytes than expected are copied in phase {phase} of {barrier.name} ({culprit}): "
                    "the phase completes before the copy", where, (barrier.name,))  # fmt: skip

    def _settle(self, barrier: Barrier) -> None:
        if barrier.missing == 0 and barrier.missing_bytes < 0:
            self._too_many_bytes(barrier, barrier.phase, f"arrival at {place_text(self.place())}", self.place())
            barrier.missing_bytes = 0
        if self.checks.happens_before and not barrier.missing and not barrier.missing_bytes:
            for agent, place in barrier.unordered_waits():
                self.report(
                    "barrier",
                    f"a phase of {barrier.name} ends, not ordered after the wait of {agent.partition('/')[2]} for the "
                    f"previous phase, at {place_text(place)}: that wait may come too late and miss it",
                    place,
                    (barrier.name, place),
                )
        barrier.advance()

    def wait(self, barrier: Barrier, parity: int) -> None:
        p = self.current
        self.preempt()
        p.waits_on = barrier
        self.block(lambda: barrier.passed(parity), lambda: f"parity {parity} of {barrier.name} ({barrier})")
        p.waits_on = None
        merge(p.vector_clock, barrier.released)
        barrier.waits[p.agent] = p.clock, self.place()
        self._until(barrier.times[parity], f"wait {barrier.name}")

    def named_barrier(self, number: int, threads: int, wait: bool) -> None:
        """bar.sync (`wait`) or bar.arrive by all threads of the running partition."""
        p = self.current
        bar = p.cta.named_barriers.setdefault(number, NamedBarrier())
        self.preempt()
        if bar.gathered and bar.threads != threads:
            both = f"{threads} and with {bar.threads} threads"
            self.report(
                "barrier", f"named barrier {number} is used with {both} in one round, at {place_text(self.place())}"
            )
        bar.threads, generation = threads, bar.generation
        bar.gathered += 32 * p.warps
        bar.latest = max(bar.latest, p.time_ns)
        merge(bar.gathering, p.vector_clock)
        p.tick()
        self.progress += 1
        if bar.gathered > threads:
            self.report(
                "barrier",
                (
                    f"named barrier {number} gets {bar.gathered} threads, more than its {threads}, at "
                    f"{place_text(self.place())}"
                ),
            )
        if bar.gathered >= threads:
            bar.generation, bar.gathered, bar.released, bar.gathering = bar.generation + 1, 0, bar.gathering, {}
            bar.done_ns, bar.latest = bar.latest, 0.0
        if wait:
            missing = lambda: f"named barrier {number} ({bar.gathered} of {bar.threads} threads there)"
            self.block(lambda: bar.generation > generation, missing)
            merge(p.vector_clock, bar.released)
            self._until(bar.done_ns, f"wait barrier {number}")

    # ---- asynchronous work

    def launch(self, stream: Stream | None, operation: Operation, cta: Cta | None = None) -> None:
        """Issue work to a stream, which completes in order, or (stream None) to the unordered loads of a CTA."""
        cta = cta or self.current.cta
        if stream is None:
            cta.loads.append(operation)
        else:
            stream.queue.append(operation)
            stream.where = operation.where
        if self.mode == "eager":
            self._land(cta, stream, operation, everything=True)
        else:
            self.preempt()

    def _land(self, cta: Cta, stream: Stream | None, operation: Operation, everything: bool = False) -> None:
        if stream is None:
            cta.loads.remove(operation)
            self._effect(operation)
            return
        while stream.queue:
            self._effect(stream.pop())
            if not everything:
                break

    def _effect(self, operation: Operation) -> None:
        self.stats["landed"] += 1
        self.progress += 1
        operation.land()

    def drain(self, stream: Stream, pending: int, wait_name: str) -> None:
        """Wait until at most `pending` operations of the stream are in flight."""
        p = self.current
        upto = stream.issued - pending
        self.preempt()
        if self.mode == "timed" and stream.landed < upto:
            self.block(lambda: stream.landed >= upto, lambda: wait_name)
        while stream.queue and stream.landed < upto:
            self._effect(stream.pop())
        self._until(stream.done_ns if stream.landed >= upto else 0.0, wait_name)
        if upto > p.vector_clock.get(stream.agent, 0):
            p.vector_clock[stream.agent] = upto

    def sequence(self, agent: str) -> int:
        """The next sequence number of an engine that several agents share."""
        self._sequence[agent] = self._sequence.get(agent, 0) + 1
        return self._sequence[agent]

    # ---- global synchronisation

    def threads_meet(self) -> None:
        """The threads of the running partition pass a barrier: one of the kernel, or one that the compiler inserts."""
        self.current.stored.clear()

    def synchronise(self, memory: Memory, offsets: np.ndarray, order: str, reads: bool, writes: bool) -> None:
        """A non-weak load, store or atomic at global addresses. `order` may end in its scope, such as ".cta"."""
        self._released.synchronise(self.current, memory, offsets, order, reads, writes)

    def thread_fence(self, scope: str = "gpu") -> None:
        """fence.acq_rel or stronger."""
        self._released.fence(self.current, scope)

    def poll(self, seen: tuple) -> None:
        """A read whose value other CTAs may change. An equal second read without progress in between blocks."""
        p, seen = self.current, (*seen, self.place())
        self.preempt(always=True)
        if p.poll == (seen, self.progress):
            since = self.progress
            self.block(
                lambda: self.progress != since, lambda: "a value in global memory that nothing changes (spin loop)"
            )
        p.poll = (seen, self.progress)

    # ---- scheduling

    def preempt(self, always: bool = False) -> None:
        """A scheduling point: another partition may run first."""
        if self.mode == "timed":
            self._spend_math()
        elif not always and (self.mode in ("eager", "lazy") or (self.mode == "pct" and self.random.random() > 0.25)):
            return
        self._yield()

    def block(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        p = self.current
        while not ready():
            p.blocked, p.waits_for = ready, waits_for
            self._yield()
        p.blocked = None

    def _until(self, ns: float, name: str) -> None:
        """Advance the running partition's modelled time to `ns`."""
        p = self.current
        if self.mode == "timed" and ns > p.time_ns:
            self.event(p.name, "wait", name, p.time_ns, ns)
            p.time_ns = ns

    def _yield(self) -> None:
        p = self.current
        p.where = self.place()
        self.hub.switch()
        self.current = p

    def fork(self, bodies: list[tuple[str, int, Callable[[], object]]]) -> Any:
        """warp_specialize: run each (name, warps, body) concurrently, the first on the caller's warps. Returns the
        first body's result when all have returned.
        """
        me, hub, begin = self.current, self.hub, self.stats["accesses"]
        self.threads_meet()
        me.tick()
        place = self.place()
        workers = [Partition(me.cta, name, warps, me.vector_clock, place, hub, body) for name, warps, body in bodies]
        workers[0].share_queues(me)
        warps = self.warps + -(-sum(w.warps for w in workers[1:]) // 4) * 4
        self.most_warps = max(self.most_warps, warps)
        self.check_warps(warps, f"with these partitions a CTA has {warps} warps, at {place_text(place)}")
        for worker in workers:
            worker.time_ns = me.time_ns
        me.cta.partitions.extend(workers)
        self.block(lambda: all(w.done for w in workers), lambda: "its partitions")
        for worker in workers:
            merge(me.vector_clock, worker.vector_clock)
            me.time_ns = max(me.time_ns, worker.time_ns)
        for worker in workers[1:]:
            self._check_left(worker)
        me.cta.budget.hold(begin, self.stats["accesses"])
        me.open_copies = workers[0].open_copies
        me.tick()
        return workers[0].result

    def _check_left(self, worker: Partition) -> None:
        for stream, verb in ((worker.wgmma, "wgmma"), (worker.stores, "TMA store"), (worker.copies, "cp.async")):
            unwaited = (
                stream.issued
                - worker.vector_clock.get(stream.agent, 0)
                + (len(worker.open_copies) if stream is worker.copies else 0)
            )
            if unwaited > 0 and self.checks.happens_before:
                text = (
                    f"{worker.name} ends without having waited for its last {unwaited} {verb} operation(s), the "
                    f"last at {place_text(stream.where)}"
                )
                self.report("unfinished", text, stream.where, (worker.name, verb))

    def run_grid(self, grid: tuple[int, int, int], body: Callable[[], object], cluster_size: int = 1) -> None:
        """Run `body` once per program of the grid, with `sms` programs in flight, or one cluster if that is more."""
        self.hub = greenlet.getcurrent()
        self._released.clear()
        programs = self._waiting = self._programs(grid)
        self.ctas = []
        try:
            while True:
                while len(self.ctas) + cluster_size <= max(self.sms, cluster_size) and (
                    members := list(islice(programs, cluster_size))
                ):
                    cluster = Cluster([self._start(*program, body) for program in members])
                    self.ctas += cluster.ctas
                    for rank, cta in enumerate(cluster.ctas):
                        cta.cluster, cta.rank = cluster, rank
                if not self.ctas:
                    break
                self._step()
            self.coverage.report()
        finally:
            self._kill()
            self.hub, self.current = None, _NOBODY
            for storage in self.storages:
                storage.forget()

    def take_program(self, ctas: int = 1) -> tuple[int, int, int] | None:
        """The position of the next program's first CTA, which then does not start; None if all have started."""
        taken = list(islice(self._waiting, ctas))
        return taken[0][1] if taken else None

    def _programs(self, grid: tuple[int, int, int]) -> Iterator[tuple[int, tuple[int, int, int]]]:
        for index in range(grid[0] * grid[1] * grid[2]):
            yield index, (index % grid[0], index // grid[0] % grid[1], index // (grid[0] * grid[1]))

    def _start(self, index: int, position: tuple[int, int, int], body: Callable[[], object]) -> Cta:
        self.stats["ctas"] += 1
        cta = Cta(index, position)
        cta.partitions.append(Partition(cta, "main", self.warps, {}, (), self.hub, body))
        return cta

    warps = 4  # warps of a CTA's main partition; the launch sets it
    most_shared, most_warps = 0, 4

    def _step(self) -> None:
        self.stats["steps"] += 1
        if self.stats["steps"] > self.max_steps:
            self.report("deadlock", f"no end after {self.max_steps} scheduler steps", ())
            raise Stop
        self.check_time()
        runnable = [p for cta in self.ctas for p in cta.partitions if p.runnable()]
        flying = [(cta, stream, op) for cta in self.ctas for stream, op in cta.in_flight()]
        chosen = self._choose(runnable, flying)
        if isinstance(chosen, Partition):
            self.current = chosen
            chosen.greenlet.switch()
            if chosen.done:
                self.progress += 1
                if chosen is chosen.cta.partitions[0]:
                    self._finish(chosen.cta)
            self.current = _NOBODY
        elif chosen:
            self._land(*chosen)
        else:
            self._deadlock()

    def check_time(self) -> None:
        """End the run if its deadline is over. Called after each scheduler step and each iteration of a loop."""
        if time.monotonic() > self.deadline:
            self.out_of_time = True
            self.report("deadlock", "no end within the time limit", ())
            raise Stop

    def _choose(self, runnable: list[Partition], flying: list[tuple[Cta, Stream | None, Operation]]) -> Any:
        if self.mode in ("eager", "lazy"):
            return (
                runnable[0]
                if len(runnable) == 1
                else self.random.choice(runnable or flying)
                if runnable or flying
                else None
            )
        everything = [*runnable, *flying]
        if not everything:
            return None
        if self.mode == "random":
            return self.random.choice(everything)
        if self.mode == "timed":
            return min(everything, key=lambda one: one.time_ns if isinstance(one, Partition) else one[2].ready_ns)
        return max(
            everything, key=lambda one: self._priority(one.agent if isinstance(one, Partition) else one[2].agent)
        )

    def _priority(self, agent: str) -> float:
        if agent not in self._priorities or self.random.random() < 0.03:
            self._priorities[agent] = self.random.random()
        return self._priorities[agent]

    def _deadlock(self) -> None:
        stuck = [p for cta in self.ctas for p in cta.partitions if not p.done and p.blocked]
        self.report("deadlock", explain(self.ctas), stuck[0].where if stuck else ())
        raise Stop

    def _finish(self, cta: Cta) -> None:
        """The CTA has executed its last instruction: work still in flight is a fault."""
        main = cta.partitions[0]
        self.most_shared = max(self.most_shared, cta.most_shared)
        self.current = main
        self._check_budget(cta)
        self._check_left(main)
        if self.checks.happens_before:
            self._check_writes(cta, main)
        while flying := cta.in_flight():
            self._land(cta, *flying[0])
        if self.checks.happens_before:
            self._check_bytes(cta)
        if cta.arrived_generation is not None:
            self.report("unfinished", f"CTA {cta.index} ends without having waited at its cluster's barrier")
        cta.ended = True
        self.ctas.remove(cta)

    def _check_writes(self, cta: Cta, main: Partition) -> None:
        last = Actor("", 0, main.vector_clock, "", "", ())
        for memory in cta.memories:
            for access in memory.writes:
                write = access.actor
                if write.agent.startswith(("TMA load", "tcgen05", "st.async")) and not access.ordered_before(last):
                    text = f"the CTA ends without having waited for {write.what}, issued at {place_text(write.where)}"
                    self.report("unfinished", text, write.where, (memory.name, write.where))

    def _check_bytes(self, cta: Cta) -> None:
        for barrier in cta.barriers.values():
            if barrier.valid and barrier.missing_bytes:
                fault = "bytes that were never copied" if barrier.missing_bytes > 0 else "bytes less than were copied"
                text = f"when the CTA ends {barrier.name} expects {abs(barrier.missing_bytes)} {fault}"
                self.report("bytes", text, (), (barrier.name,))

    def _kill(self) -> None:
        for cta in self.ctas:
            for partition in cta.partitions:
                if partition.greenlet and not partition.greenlet.dead:
                    partition.greenlet.throw(greenlet.GreenletExit)
        self.ctas = []

    # ---- modelled time

    def spend(self, ns: float) -> None:
        self.current.math_ns += ns

    def _spend_math(self) -> None:
        """Record the arithmetic since the last synchronisation as one bar on the SM's cores, which partitions share."""
        p = self.current
        if p.math_ns:
            start, p.time_ns = self.occupy("cores", p.time_ns, p.math_ns)
            self.event(p.name, "math", "math", start, p.time_ns)
            p.math_ns = 0.0

    def occupy(self, unit: str, ready_ns: float, ns: float) -> tuple[float, float]:
        """Reserve an exclusive unit of the SM. Returns (start, end)."""
        busy = self.current.cta.busy_ns
        start = max(ready_ns, busy.get(unit, 0.0)) if self.mode == "timed" else ready_ns
        busy[unit] = start + ns
        return start, start + ns

    def event(self, row: str, kind: str, name: str, start_ns: float, end_ns: float) -> None:
        if self.mode == "timed":
            self.events.append(
                Event(self.current.cta.index, row, kind, name, start_ns, end_ns, place_text(self.place()))
            )


def _who(actor: Actor) -> str:
    cta, _, name = actor.agent.partition("/")
    return f"{name} of CTA {cta}" if cta.isdigit() else actor.agent


def _part(unwritten: int, mask: Granules) -> str:
    touched = sum(bits.bit_count() for bits in mask.values())
    return "all" if unwritten == touched else f"{100 * unwritten / touched:.0f} %"
