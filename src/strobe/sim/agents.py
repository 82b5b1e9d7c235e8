"""What acts inside a CTA: partitions (warps that run a function) and streams (queues of asynchronous work)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import greenlet
import numpy as np

from .budget import Budget
from .memory import Clock, Memory, merge
from .report import Place
from .stores import Stores


@dataclass(slots=True)
class Operation:
    """Asynchronous work in flight. `land` applies its effect; `ready_ns` is the modelled time at which it completes."""

    agent: str
    what: str
    where: Place
    land: Callable[[], None]
    ready_ns: float = 0.0


@dataclass(slots=True)
class Stream:
    """A queue that completes in order: wgmma groups, bulk stores, cp.async groups or tcgen05 work of one partition."""

    agent: str
    queue: deque[Operation] = field(default_factory=deque)
    issued: int = 0
    landed: int = 0
    where: Place = ()  # place of the last operation
    vector_clock: Clock = field(default_factory=dict)
    done_ns: float = 0.0  # modelled time at which the last operation landed

    def pop(self) -> Operation:
        operation = self.queue.popleft()
        self.landed, self.done_ns = self.landed + 1, operation.ready_ns
        return operation


class Barrier:
    """An mbarrier. A phase completes when it has all its arrivals and all its bytes (PTX ISA, mbarrier)."""

    __slots__ = (
        "arrivals",
        "copies",
        "count",
        "gathering",
        "latest",
        "missing",
        "missing_bytes",
        "name",
        "phase",
        "released",
        "since",
        "times",
        "valid",
        "waits",
    )

    def __init__(self, name: str, count: int, since: Clock):
        self.name, self.count, self.missing, self.missing_bytes, self.phase = name, count, count, 0, 0
        self.gathering: Clock = {}  # vector clock merged over the arrivals of this phase
        self.released: Clock = {}  # vector clock that a waiter acquires: all completed phases
        self.since = dict(since)  # clock of the initialisation
        self.waits: dict[str, tuple[int, Place]] = {}  # agents that saw the last phase complete: (clock, place)
        self.arrivals: dict[str, tuple[int, Place]] = {}  # who arrived, or which copy: (last phase, place)
        self.copies = 0  # TMA loads issued in this phase
        self.valid = True
        # modelled time of the latest arrival, and of the last two completions
        self.latest, self.times = 0.0, [0.0, 0.0]

    def passed(self, parity: int) -> bool:
        """mbarrier.try_wait.parity: the phase of this parity is over."""
        return self.phase & 1 != parity

    def is_after_completed(self, clock: Clock) -> bool:
        """Whether an agent with vector clock `clock` is ordered after every arrival of the completed phases."""
        return all(clock.get(agent, 0) >= known for agent, known in self.released.items())

    def unordered_waits(self) -> list[tuple[str, Place]]:
        """Waits for the last phase, as (agent, place), that the arrivals of this phase are not ordered after.

        Such a wait can miss its phase: the barrier may advance once more before the agent looks.
        """
        return [(agent, place) for agent, (clock, place) in self.waits.items() if self.gathering.get(agent, 0) < clock]

    def advance(self) -> bool:
        """Complete the phase if nothing is missing. Returns whether it did."""
        if self.missing or self.missing_bytes:
            return False
        self.waits = {}
        self.times[self.phase & 1] = self.latest
        self.phase += 1
        self.missing, self.copies = self.count, 0
        merge(self.released, self.gathering)
        self.gathering = {}
        return True

    def __str__(self) -> str:
        return f"phase {self.phase}: {self.missing} of {self.count} arrivals and {self.missing_bytes} bytes missing"


@dataclass
class NamedBarrier:
    """bar.sync and bar.arrive on one barrier number. It completes when enough threads have arrived (PTX ISA)."""

    threads: int = 0
    gathered: int = 0
    generation: int = 0
    gathering: Clock = field(default_factory=dict)
    released: Clock = field(default_factory=dict)
    latest: float = 0.0
    done_ns: float = 0.0


class Allocations:
    """The allocations of a partition inside loops. An allocation in a loop's body is one buffer, used by every turn."""

    def __init__(self) -> None:
        # for each running loop: (place, size) -> buffers allocated there, and how many this turn has used
        self._loops: list[dict[tuple[Place, str, int], _Buffers]] = []

    def enter_loop(self) -> None:
        self._loops.append({})

    def end_iteration(self) -> None:
        for buffers in self._loops[-1].values():
            buffers.used = 0

    def leave_loop(self, cta: Cta) -> None:
        for buffers in self._loops.pop().values():
            cta.budget.free(buffers.memories)

    def reused(self, place: Place, space: str, size: int) -> Memory | None:
        """The buffer that an earlier turn of the innermost loop allocated here."""
        buffers = self._loops[-1].get((place, space, size)) if self._loops else None
        if buffers is None or buffers.used == len(buffers.memories):
            return None
        buffers.used += 1
        return buffers.memories[buffers.used - 1]

    def add(self, place: Place, memory: Memory) -> None:
        if self._loops:
            buffers = self._loops[-1].setdefault((place, memory.space, len(memory.raw)), _Buffers())
            buffers.memories.append(memory)
            buffers.used += 1

    def free(self, memory: Memory) -> None:
        """The kernel itself deallocates a buffer: the end of the loop does not free it once more."""
        for buffers in (buffers for loop in self._loops for buffers in loop.values()):
            kept = [one for one in buffers.memories if one is not memory]
            if len(kept) < len(buffers.memories):
                buffers.memories, buffers.used = kept, buffers.used - 1


@dataclass
class _Buffers:
    memories: list[Memory] = field(default_factory=list)
    used: int = 0


class Partition:
    """Warps that run one function: the kernel itself ("main") or one entry of warp_specialize."""

    def __init__(
        self,
        cta: Cta,
        name: str,
        warps: int,
        vector_clock: Clock,
        origin: Place,
        hub: greenlet.greenlet,
        body: Callable[[], object],
    ):
        self.cta, self.name, self.warps, self.origin = cta, name, warps, origin
        self.agent = f"{cta.index}/{name}"
        self.vector_clock = dict(vector_clock)
        self.vector_clock[self.agent] = self.vector_clock.get(self.agent, 0) + 1
        self.blocked: Callable[[], bool] | None = None  # returns whether the partition may continue
        self.waits_for: Callable[[], str] = lambda: "nothing"
        self.waits_on: Barrier | None = None  # the mbarrier that it waits for
        self.where: Place = origin
        self.done, self.result = False, None
        stream = lambda kind: Stream(f"{kind} of {self.agent}")
        self.wgmma, self.tcgen05, self.copies = stream("wgmma"), stream("tcgen05"), stream("cp.async")
        self.stores, self.store_writes = stream("TMA store read"), stream("TMA store write")
        self.allocations = Allocations()
        self.stored = Stores()
        self.open_copies: list[Callable[[], None]] = []  # cp.async operations not yet committed to a group
        self.poll: tuple | None = None  # last value seen by an atomic or volatile read; detects spin loops
        self.last_read: tuple = ()  # last weak read of global memory
        self.repeats = 0  # how often that read was repeated with no other access in between
        self.exchanges = 0  # tensors whose parts have changed their CTA
        # by scope (strobe.sim.scopes): clocks released where relaxed atomics have read, acquired at the next fence; and
        # the clock at the last fence, which relaxed atomics release
        self.observed: list[Clock] = [{}, {}, {}]
        self.fenced: list[Clock] = [{}, {}, {}]
        self.time_ns = self.math_ns = 0.0
        self.greenlet = greenlet.greenlet(self._run, parent=hub)
        self._body = body

    def share_queues(self, other: Partition) -> None:
        """Run on the warps of `other` and share its queues, so that either partition may wait for them."""
        self.wgmma, self.tcgen05, self.copies, self.stores, self.store_writes = other.streams
        self.open_copies = other.open_copies

    def _run(self) -> None:
        self.result = self._body()
        self.done = True

    @property
    def streams(self) -> tuple[Stream, ...]:
        return self.wgmma, self.tcgen05, self.copies, self.stores, self.store_writes

    def tick(self) -> None:
        """Start a new epoch: nobody's current clock covers what this partition does from here on."""
        self.vector_clock[self.agent] += 1

    @property
    def clock(self) -> int:
        return self.vector_clock[self.agent]

    def runnable(self) -> bool:
        return not self.done and (self.blocked is None or self.blocked())


@dataclass
class Meeting:
    """A barrier among the same partition of all CTAs of a cluster, which the compiler builds of mbarriers."""

    arrived: int = 0
    generation: int = 0
    gathering: Clock = field(default_factory=dict)
    released: Clock = field(default_factory=dict)


@dataclass
class Cluster:
    """Programs that run concurrently and access each other's shared memory, with their barrier.cluster (PTX ISA)."""

    ctas: list[Cta]
    generation: int = 0
    arrived: int = 0  # programs that have arrived at the barrier
    gathering: Clock = field(default_factory=dict)
    released: Clock = field(default_factory=dict)
    latest: float = 0.0
    # tensors whose parts change their CTA, by the number of the exchange and by rank
    exchanged: dict[tuple[str, int], dict[int, np.ndarray]] = field(default_factory=dict)
    meetings: dict[str, Meeting] = field(default_factory=dict)  # by the partition's name


class Cta:
    """One program of the grid: its partitions, memories, barriers and loads in flight."""

    def __init__(self, index: int, position: tuple[int, int, int]):
        self.index, self.position = index, position
        self.partitions: list[Partition] = []
        self.loads: list[Operation] = []  # TMA loads; they land in any order
        self.memories: list[Memory] = []
        self.barriers: dict[int, Barrier] = {}
        self.named_barriers: dict[int, NamedBarrier] = {}
        self.budget = Budget()
        self.most_shared = 0  # bytes in use at once
        self.busy_ns: dict[str, float] = {}  # modelled time until which a unit is busy: tensor core, TMA, cores
        self.cluster: Cluster = Cluster([self])
        self.rank = 0  # in its cluster
        self.by_key: dict[tuple[str, int], Memory] = {}  # memories by who allocates them, and its how many-th they are
        self.allocated: dict[str, int] = {}  # by each partition's name
        self.has_new_barriers = False  # whether mbarriers have been initialised since the cluster's last barrier
        self.initialised: Clock = {}  # clock of the last fence.mbarrier_init
        # barrier generation at which this CTA arrived and has not waited yet
        self.arrived_generation: int | None = None
        self.cluster_started = self.ended = False  # whether it knows that its cluster has started; whether it is over
        # variables of inline PTX in shared memory: (address, memory)
        self.symbols: dict[tuple, tuple[int, Memory]] = {}

    def allocate(self, space: str, size: int, owner: str) -> Memory:
        raw = np.full(size, 0xFF, np.uint8)  # bytes 0xFF are NaN in float32, float16, bfloat16, e4m3 and e5m2
        granule = 4 if space == "tensor" or size <= 4096 else 16
        memory = Memory(f"{space}#{len(self.memories)}", space, raw, granule, initialised=False)
        self.memories.append(memory)
        if len(self.cluster.ctas) > 1:
            memory.home = f" of CTA {self.index}"
        self.allocated[owner] = self.allocated.get(owner, 0) + 1
        memory.key = owner, self.allocated[owner]
        self.by_key[memory.key] = memory
        return memory

    def in_flight(self) -> list[tuple[Stream | None, Operation]]:
        flying: list[tuple[Stream | None, Operation]] = [(None, load) for load in self.loads]
        streams = {stream.agent: stream for p in self.partitions for stream in p.streams if stream.queue}
        return flying + [(stream, stream.queue[0]) for stream in streams.values()]
