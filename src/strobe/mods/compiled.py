"""Functions inside torch.compile: traced while the graph is compiled. The graph reads the tensors that they capture.

Dynamo calls `_plan` with the function itself and takes its text as a constant. `bind_compiled` then looks up each value
that the function captures, step by step, in code that Dynamo follows, so Dynamo guards each value. A graph reads a
tensor that replaces a captured one. Any other value that changes (a number, a bool, a string, a function) compiles
another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedProblem
from ..problem.torch_private import constant_while_compiling
from .cache import TRACES
from .captures import CALL, Names, attributes, captured, has_named_parts, identity_of, is_filled, is_opaque, parts_of
from .program import BoundScore
from .trace import MASK_INPUTS, SCORE_INPUTS

_CHANGED = "a value that score_mod or a mask captures has changed while it was compiled"
_PART, _ITEM, _STEP, _VALUE = "\x1c", "\x1d", "\x1e", "\x1f"


def bind_compiled(function: Callable, gradient: bool, is_score: bool = True) -> BoundScore:
    """The programs, tensors and numbers of a function inside torch.compile."""
    text, derivative, tensors, numbers, known, constants, functions = _plan(function, gradient, is_score).split(_PART)
    # the comparisons are guards: the program may hold these values
    for one in known.split(_ITEM) if known else ():
        steps, value = one.split(_VALUE)
        now, then = _follow(function, steps), _number(value)
        if now != then and (now == now or then == then):  # NaN is not equal to itself
            raise UnsupportedProblem(_CHANGED)
    for one in constants.split(_ITEM) if constants else ():
        steps, value = one.split(_VALUE)
        if repr(_follow(function, steps)) != value:
            raise UnsupportedProblem(_CHANGED)
    for steps in functions.split(_ITEM) if functions else ():
        if _follow(function, steps).__code__ is None:
            raise UnsupportedProblem(_CHANGED)
    read = tuple([_follow(function, steps) for steps in tensors.split(_ITEM)]) if tensors else ()
    return BoundScore(text, derivative, read, tuple(map(float, numbers.split(_ITEM))) if numbers else ())


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _follow(value: Any, steps: str) -> Any:
    for step in steps.split(_STEP):
        kind, name = step[0], step[1:]
        if kind == "c":
            value = value.__closure__[int(name)].cell_contents
        elif kind == "g":
            value = value.__globals__[name]
        elif kind == "i":
            value = value[int(name)]
        elif kind == "k":
            value = value[name]
        else:
            value = getattr(value, name)
    return value


@constant_while_compiling
def _plan(function: Callable, gradient: bool, is_score: bool) -> str:
    """The texts of the function's program and of its gradient's, places of captured tensors, values of the program's
    numbers, places and values of all captured numbers, those of other captured constants, and places of captured
    functions.
    """
    bound = TRACES.bind(function, SCORE_INPUTS if is_score else MASK_INPUTS, gradient)
    values = captured(function).numbers
    found = list(_captures((function, (CALL,)), "", (), set()))
    tensors = {id(value): place for _, place, value in found if isinstance(value, Tensor)}
    numbers = {path: place for path, place, _ in found}
    if any(id(one) not in tensors for one in bound.tensors) or any(path not in numbers for path, _ in values):
        name = getattr(function, "__qualname__", type(function).__name__)
        how = f"strobe.{'score' if is_score else 'mask'}_mod({name})"
        raise UnsupportedProblem(f"{name} captures values that torch.compile does not see; make {how} before compiling")
    is_constant = lambda value: value is None or isinstance(value, (bool, str, torch.dtype))
    return _PART.join((
        bound.trace.program.text,
        bound.trace.gradient.text if bound.trace.gradient else "",
        _ITEM.join(tensors[id(tensor)] for tensor in bound.tensors),
        _ITEM.join(map(repr, bound.numbers)),
        _ITEM.join(f"{numbers[path]}{_VALUE}{value!r}" for path, value in values),
        _ITEM.join(f"{place}{_VALUE}{value!r}" for _, place, value in found if is_constant(value)),
        _ITEM.join(place for _, place, value in found if place and isinstance(value, FunctionType)),
    ))  # fmt: skip


def _captures(
    read: tuple[Any, Names], path: str, steps: Sequence[str], met: set[Hashable]
) -> Iterator[tuple[str, str, Any]]:
    """(path, place, value) of a function and of all that it captures. Paths are those of `captured`; a place is the
    text of steps that `_follow` reads. read: a value, and names in the code that reads it.
    """
    value, names = read
    if is_opaque(value) and not has_named_parts(value):
        return
    is_leaf = value is None or isinstance(value, (Tensor, int, float, str, torch.dtype))
    identity = None if is_leaf else identity_of(value, names)
    if is_leaf or identity not in met:
        yield path, _STEP.join(steps), value
    if not is_leaf and identity not in met:
        met.add(identity)
        for name, part, its in parts_of(value, names):
            for step in _steps(value, name, part):
                yield from _captures((part, its), f"{path}.{name}", (*steps, *step), met)


def _steps(value: Any, name: str, part: Any) -> Iterator[tuple[str, ...]]:
    """The steps from a value to its part of this name, if Dynamo can follow them."""
    if isinstance(value, FunctionType):
        for n, (own, cell) in enumerate(zip(value.__code__.co_freevars, value.__closure__ or ())):
            if own == name and is_filled(cell) and cell.cell_contents is part:
                yield (f"c{n}",)
                return
        if value.__globals__.get(name, value) is part:
            yield (f"g{name}",)
    elif isinstance(value, MethodType):
        yield (f"a__{'func' if name == 'function' else name}__",)
    elif isinstance(value, (tuple, list)):
        yield (f"i{name}",)
    elif isinstance(value, dict):
        if name in value and value[name] is part:
            yield (f"k{name}",)
    elif isinstance(value, (ModuleType, type)):
        if getattr(value, name, value) is part:  # a property's getter is nothing that Dynamo can look up
            yield (f"a{name}",)
    elif attributes(value).get(name, value) is part:
        yield (f"a{name}",)
    elif getattr(type(value), name, value) is part:
        yield "a__class__", f"a{name}"
