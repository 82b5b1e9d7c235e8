"""Cluster launch control (sm_100): a running program takes over one that has not started (`clc.try_cancel`).

The answer is 16 bytes in shared memory, and an mbarrier gets these bytes when it has come.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .agents import Barrier, Operation
from .machine import Machine
from .memory import Actor
from .shared import Where
from .values import Value, Window

ANSWER_NS = 500.0  # modelled time from a request to its answer
_TAKEN = 1 << 62


class LaunchControl:
    machine: Machine
    window: Callable[[Where], Window]
    _barrier: Callable[[Where], Barrier]

    def create_clc_try_cancel(self, result: Where, bar: Where) -> None:
        machine, p, target, barrier = self.machine, self.machine.current, self.window(result), self._barrier(bar)
        agent = f"CLC answer {barrier.copies} on {p.cta.index}/{barrier.name}"
        barrier.copies += 1
        number, clock, phase, place = machine.sequence(agent), dict(p.vector_clock), barrier.phase, machine.place()
        what = f"CLC answer into {target.label}"
        mask = target.memory.mask_of(target.view)
        machine.access(target.memory, mask, True, Actor(agent, number, clock, "async", what, place))
        p.tick()
        released = {**clock, agent: number}
        operation = Operation(agent, what, place, lambda: None, p.time_ns + ANSWER_NS)

        def land() -> None:
            x, y, z = machine.take_program() or (0, 0, -1)
            words = np.array([_TAKEN | x if z >= 0 else 0, y | max(z, 0) << 32], np.int64)
            target.view[...] = words.view(target.view.dtype).reshape(target.view.shape)
            machine.complete_bytes(barrier, 16, released, phase, operation)

        operation.land = land
        machine.launch(None, operation)

    def create_clc_load_result(self, source: Where) -> Value:
        source = self.window(source)
        self.machine.touch(source.memory, source.view, False, f"load of {source.label}")
        return Value(np.ascontiguousarray(source.view).reshape(-1).view(np.int64).copy(), "i64")

    def create_clc_is_canceled(self, answer: Value) -> Value:
        return Value(np.bool_(answer.data[0] & _TAKEN != 0), "i1")

    def create_clc_get_program_id(self, answer: Value, dim: int) -> Value:
        low, high = int(answer.data[0]) & 0x7FFFFFFF, int(answer.data[1])
        return Value(np.int32((low, high & 0x7FFFFFFF, high >> 32)[dim]), "i32")
