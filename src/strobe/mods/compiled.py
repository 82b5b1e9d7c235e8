"""Functions inside torch.compile: traced while the graph is compiled, with what they capture read by the graph.

Dynamo calls `_plan` with the function itself and takes its text as a constant. The tensors and numbers that the
function captures are then looked up step by step in code that Dynamo follows, so that each gets its own guard: a graph
sees a tensor that is bound anew, and a changed number compiles a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedProblem
from ..problem.torch_private import constant_while_compiling
from .cache import TRACES
from .captures import attributes, captured, is_filled, names_in
from .trace import MASK_INPUTS, SCORE_INPUTS

_PART, _ITEM, _STEP, _VALUE = "\x1c", "\x1d", "\x1e", "\x1f"


class BoundScore(NamedTuple):
    """A score's programs with the tensors and numbers of one call. Empty texts: there is none."""

    text: str
    gradient: str
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]


def bind_compiled(function: Callable, gradient: bool, is_score: bool = True) -> BoundScore:
    """The programs of a function and what it captures, inside torch.compile."""
    text, derivative, tensors, numbers, known = _plan(function, gradient, is_score).split(_PART)
    for one in known.split(_ITEM) if known else ():
        steps, value = one.split(_VALUE)
        if _follow(function, steps) != float(value):  # a guard: the program may hold the number
            raise UnsupportedProblem("a number that score_mod or a mask captures has changed while it was compiled")
    read = tuple([_follow(function, steps) for steps in tensors.split(_ITEM)]) if tensors else ()
    return BoundScore(text, derivative, read, tuple(map(float, numbers.split(_ITEM))) if numbers else ())


def _follow(value: Any, steps: str) -> Any:
    for step in steps.split(_STEP):
        kind, name = step[0], step[1:]
        if kind == "c":
            value = value.__closure__[int(name)].cell_contents
        elif kind == "g":
            value = value.__globals__[name]
        elif kind == "i":
            value = value[int(name)]
        else:
            value = getattr(value, name)
    return value


@constant_while_compiling
def _plan(function: Callable, gradient: bool, is_score: bool) -> str:
    """Text of the function's program and of its gradient's, places of captured tensors, values of the program's
    numbers, and the places and values of all numbers that the function captures.
    """
    bound = TRACES.bind(function, SCORE_INPUTS if is_score else MASK_INPUTS, gradient)
    values = captured(function).numbers
    places = dict(_places(function, "", (), set()))
    if any(one not in places for one in (*map(id, bound.tensors), *(path for path, _ in values))):
        name = getattr(function, "__qualname__", type(function).__name__)
        how = f"strobe.{'score' if is_score else 'mask'}_mod({name})"
        raise UnsupportedProblem(f"{name} captures values that torch.compile does not see; make {how} before compiling")
    return _PART.join((
        bound.trace.program.text,
        bound.trace.gradient.text if bound.trace.gradient else "",
        _ITEM.join(places[id(tensor)] for tensor in bound.tensors),
        _ITEM.join(map(repr, bound.numbers)),
        _ITEM.join(f"{places[path]}{_VALUE}{value!r}" for path, value in values),
    ))  # fmt: skip


def _places(value: Any, path: str, steps: Sequence[str], met: set[int]) -> Iterator[tuple[int | str, str]]:
    """(id of a tensor or path of a number, steps) of what a function captures. Paths are those of `captured`."""
    if isinstance(value, Tensor):
        yield id(value), _STEP.join(steps)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, _STEP.join(steps)
    elif id(value) not in met:
        met.add(id(value))
        for name, step, part in _parts(value):
            yield from _places(part, f"{path}.{name}", (*steps, step), met)


def _parts(value: Any) -> Iterator[tuple[str, str, Any]]:
    """(name, step, part)"""
    if isinstance(value, FunctionType):
        for n, (name, cell) in enumerate(zip(value.__code__.co_freevars, value.__closure__ or ())):
            yield from [(name, f"c{n}", cell.cell_contents)] if is_filled(cell) else []
        for name in names_in(value.__code__):
            if name in value.__globals__:
                yield name, f"g{name}", value.__globals__[name]
    elif isinstance(value, MethodType):
        yield "self", "a__self__", value.__self__
        yield "function", "a__func__", value.__func__
    elif isinstance(value, (tuple, list)):
        yield from ((str(n), f"i{n}", one) for n, one in enumerate(value))
    elif isinstance(value, torch.nn.Module) or not (callable(value) or isinstance(value, (type, dict, str, bytes))):
        yield from ((name, f"a{name}", one) for name, one in attributes(value).items())
