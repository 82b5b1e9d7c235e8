"""Traces of functions that were met before. A function is traced once for each key of `captures.captured`.

A Python number in a closure is first a constant of the trace. When the same code comes back with another value, the
number becomes an argument of the kernel, so a value that changes at each step costs two traces and no recompilation.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem
from .captures import Captured, captured
from .program import is_int32
from .trace import Source, Trace, trace

MAX_FUNCTIONS = 1024
MAX_VALUES = 16  # traces of one function that differ in numbers which cannot be arguments


class Bound(NamedTuple):
    """A traced function with the tensors and numbers that it captures now."""

    trace: Trace
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]


class _Known:
    """The traces of one function by the values of its constant numbers."""

    def __init__(self) -> None:
        self.arguments: tuple[str, ...] = ()  # paths of numbers that are arguments
        self.constants: set[str] = set()  # paths of numbers that must be constants, because a trace reads their value
        self.last: dict[str, float] = {}
        self.traces: OrderedDict[Hashable, Trace] = OrderedDict()


class TraceCache:
    """Traces by function and by whether a gradient is part of them. `traced` counts the traces that were made."""

    def __init__(self) -> None:
        self.traced = 0
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._lock = threading.RLock()  # a function that is traced may make a mask or a score of its own

    def clear(self) -> None:
        with self._lock:
            self._known.clear()

    def bind(self, function: Callable, inputs: Sequence[str], gradient: bool = False) -> Bound:
        """The trace of a function, and what it captures now. Raises UnsupportedProblem if it cannot be traced."""
        now = captured(function)
        with self._lock:
            found = self._trace(function, now, (tuple(inputs), gradient))
        values = dict(now.numbers)
        numbers = tuple(values[path] for path in found.numbers)
        for number in numbers:
            if isinstance(number, int) and not is_int32(number):
                argument = "score_mod" if inputs[0] == "score" else "mask_mod"
                raise InvalidProblem(argument, number, "integers of at most 32 bits", "write it as a float")
        return Bound(found, tuple(now.tensors[n] for n in found.tensors), numbers)

    def _trace(self, function: Callable, now: Captured, how: tuple[Sequence[str], bool]) -> Trace:
        key = now.key, *how
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known()
            if len(self._known) > MAX_FUNCTIONS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        values = dict(now.numbers)
        changed = [
            path
            for path, value in values.items()
            if _differs(value, known.last.get(path, value))
            and path not in known.constants
            and path not in known.arguments
        ]
        for path in changed:
            arguments = (*known.arguments, path)
            try:
                self._insert(known, Source(function, now, arguments), how)
                known.arguments = arguments
            except UnsupportedProblem:  # for example range(n), which needs the value
                known.constants.add(path)
        known.last = values
        constants = tuple((path, repr(value)) for path, value in now.numbers if path not in known.arguments)
        if (known.arguments, constants) not in known.traces:
            self._insert(known, Source(function, now, known.arguments), how)
        return known.traces[known.arguments, constants]

    def _insert(self, known: _Known, source: Source, how: tuple[Sequence[str], bool]) -> None:
        self.traced += 1
        found = trace(source, *how)
        constants = tuple((path, repr(value)) for path, value in source.captured.numbers if path not in source.numbers)
        known.traces[source.numbers, constants] = found
        while len(known.traces) > MAX_VALUES:
            known.traces.popitem(last=False)


def _differs(one: float, other: float) -> bool:
    """Whether two numbers differ; NaN is equal to NaN here."""
    return one != other and (one == one or other == other)


TRACES = TraceCache()
