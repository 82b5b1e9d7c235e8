"""Cluster launch control (sm_100): a running program takes over one that has not started (`clc.try_cancel`).

The answer is 16 bytes in shared memory, and an mbarrier gets these bytes when it has come.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .agents import Barrier, Cta, Operation
from .machine import Machine
from .memory import Actor
from .shared import Where
from .values import Value, Window

ANSWER_NS = 500.0  # modelled time from a request to its answer
_TAKEN = 1 << 62


class LaunchControl:
    machine: Machine
    window: Callable[[Where], Window]
    ctas: int
    rank: int
    of_cta: Callable[[Window, int, str], Window | None]
    barrier_of: Callable[[Window, int, str], Barrier | None]

    def create_clc_try_cancel(self, result: Where, bar: Where) -> None:
        """In a cluster the first CTA asks, and every CTA gets the answer, with its bytes on its own barrier."""
        target, bar = self.window(result), self.window(bar)
        if self.ctas > 1 and self.rank:
            return
        answer: list[tuple[int, int, int]] = []
        for rank in range(self.ctas) if self.ctas > 1 else [self.rank]:
            there = self.of_cta(target, rank, "clc.try_cancel")
            if there is not None and (barrier := self.barrier_of(bar, rank, "clc.try_cancel")):
                self._answer(there, barrier, answer, self.machine.current.cta.cluster.ctas[rank])

    def _answer(self, target: Window, barrier: Barrier, answer: list[tuple[int, int, int]], home: Cta) -> None:
        machine, p = self.machine, self.machine.current
        agent = f"CLC answer {barrier.copies} on {home.index}/{barrier.name}"
        barrier.copies += 1
        number, clock, phase, place = machine.sequence(agent), dict(p.vector_clock), barrier.phase, machine.place()
        what = f"CLC answer into {target.label}"
        mask = target.memory.mask_of(target.view)
        machine.access(target.memory, mask, True, Actor(agent, number, clock, "async", what, place))
        p.tick()
        released = {**clock, agent: number}
        operation = Operation(agent, what, place, lambda: None, p.time_ns + ANSWER_NS)

        def land() -> None:
            if not answer:
                answer.append(machine.take_program(self.ctas) or (0, 0, -1))
            x, y, z = answer[0]
            words = np.array([_TAKEN | x if z >= 0 else 0, y | max(z, 0) << 32], np.int64)
            target.view[...] = words.view(target.view.dtype).reshape(target.view.shape)
            machine.complete_bytes(barrier, 16, released, phase, operation)

        operation.land = land
        machine.launch(None, operation, p.cta if home.ended else home)

    def create_clc_load_result(self, source: Where) -> Value:
        source = self.window(source)
        self.machine.touch(source.memory, source.mask, False, f"load of {source.label}")
        return Value(np.ascontiguousarray(source.view).reshape(-1).view(np.int64).copy(), "i64")

    def create_clc_is_canceled(self, answer: Value) -> Value:
        return Value(np.bool_(answer.data[0] & _TAKEN != 0), "i1")

    def create_clc_get_program_id(self, answer: Value, dim: int) -> Value:
        low, high = int(answer.data[0]) & 0x7FFFFFFF, int(answer.data[1])
        return Value(np.int32((low // self.ctas, high & 0x7FFFFFFF, high >> 32)[dim]), "i32")
