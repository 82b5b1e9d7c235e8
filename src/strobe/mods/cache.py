"""Traces of functions that were met before. A function is traced once for each key of `captures.captured`.

A Python number in a closure is first a constant of the trace. When the same code comes back with another value, the
number becomes an argument of the kernel, so a value that changes at each step costs two traces and no recompilation.
It stays a constant, and each value has a trace of its own, if the function reads its value: to branch, to index a
list, to count. `Symbol` notices that, and the two traces are compared where they must agree.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem
from .captures import captured
from .evaluate import evaluate
from .program import is_int32
from .symbols import evaluated
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
            found, numbers = self._find(Source(function, now), (tuple(inputs), gradient))
        for number in numbers:
            if isinstance(number, int) and not is_int32(number):
                argument = "score_mod" if inputs[0] == "score" else "mask_mod"
                raise InvalidProblem(argument, number, "integers of at most 32 bits", "write it as a float")
        return Bound(found, tuple(now.tensors[n] for n in found.tensors), numbers)

    def _find(self, source: Source, how: _How) -> tuple[Trace, tuple[float, ...]]:
        """The trace of a function, and the values of its numbers."""
        key = source.captured.key, *how
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known()
            if len(self._known) > MAX_FUNCTIONS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        values = dict(source.captured.numbers)
        changed = [
            path
            for path, value in values.items()
            if _differs(value, known.last.get(path, value))
            and path not in known.constants
            and path not in known.arguments
        ]
        if changed:
            self._promote(known, source, how, changed)
        known.last = values
        if known.arguments:
            try:
                found = self._trace(known, source._replace(numbers=known.arguments), how)
            except UnsupportedProblem:  # other constants, with which it reads the value of an argument
                found = None
            numbers = None if found is None else evaluated(found.numbers, found.kinds, values)
            if found is not None and numbers is not None:
                return found, numbers
        return self._trace(known, source, how), ()

    def _promote(self, known: _Known, source: Source, how: _How, changed: Sequence[str]) -> None:
        """Make arguments of numbers that changed, if the function computes with them alone."""
        before, constants = known.arguments, set(known.constants)
        for path in changed:
            arguments = (*known.arguments, path)
            try:
                self._trace(known, source._replace(numbers=arguments), how)
                known.arguments = arguments
            except UnsupportedProblem:  # for example range(n), which needs the value
                known.constants.add(path)
        if known.arguments == before:
            return
        found = self._trace(known, source._replace(numbers=known.arguments), how)
        values, tensors = dict(source.captured.numbers), source.captured.tensors
        others = [path for path in values if path not in known.arguments and _differs(values[path], known.last[path])]
        old = known.traces.get(_key(source.captured.numbers, before, known.last))
        if others or old is None or evaluated(found.numbers, found.kinds, known.last) is None:
            old, known_values = self._trace(known, source._replace(numbers=before), how), values
        else:
            known_values = known.last
        if not _agree(found, old, known_values, tensors):  # for example `n if type(n) is float else 1.0`
            known.constants = constants | set(changed)
            known.arguments = before

    def _trace(self, known: _Known, source: Source, how: _How) -> Trace:
        key = _key(source.captured.numbers, source.numbers)
        if key not in known.traces:
            self.traced += 1
            known.traces[key] = trace(source, *how)
            while len(known.traces) > MAX_VALUES:
                known.traces.popitem(last=False)
        return known.traces[key]


_How = tuple[Sequence[str], bool]  # the names of the inputs, and whether a gradient is traced


def _key(
    numbers: Sequence[tuple[str, float]], arguments: tuple[str, ...], values: Mapping[str, float] | None = None
) -> Hashable:
    """What a trace is found by: its arguments, and the other numbers, with these values or their own."""
    return arguments, tuple(
        [(path, repr(one if values is None else values[path])) for path, one in numbers if path not in arguments]
    )


def _agree(one: Trace, other: Trace, values: Mapping[str, float], tensors: Sequence[Tensor]) -> bool:
    """Whether two traces of a function give the same at positions and scores drawn at random.

    Elements of a captured tensor are one number here, so that no data of it is read.
    """
    generator = torch.Generator().manual_seed(0)
    small, large = (torch.randint(0, most, (4, 64), generator=generator) for most in (8, 1 << 15))
    positions = torch.where(torch.arange(64) % 2 == 0, small, large)
    at = {name: positions[n] for n, name in enumerate(("b", "h", "q", "k"))}
    at["score"] = torch.randn(64, generator=generator, dtype=torch.float64)
    results = []
    for found in (one, other):
        numbers = evaluated(found.numbers, found.kinds, values)
        if numbers is None:
            return False
        held = [_sample(tensors[n], n) for n in found.tensors]
        results += evaluate(found.program, at, (held, numbers), torch.float64)
    return torch.allclose(*[one.double().expand(64) for one in results], rtol=1e-9, equal_nan=True)


def _sample(tensor: Tensor, n: int) -> Tensor:
    return torch.tensor(n + 1.25, dtype=tensor.dtype).expand([max(1, size) for size in tensor.shape])


def _differs(one: float, other: float) -> bool:
    """Whether two numbers differ; NaN is equal to NaN here."""
    return one != other and (one == one or other == other)


TRACES = TraceCache()
