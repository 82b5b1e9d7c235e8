"""What common functions capture, read in a quarter of the time of `captures.captured`, for calls that are repeated.

Closures, methods, layers and partials are read here if they hold tensors, constants and functions of the same kind. Any
other function is read by `captures`.
"""

from __future__ import annotations

import functools
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from .captures import (
    CALL,
    OF_LAYERS,
    captured,
    has_named_parts,
    is_opaque,
    layers,
    names_in,
    operators,
    slots,
)


class Values(NamedTuple):
    """What a function captures, with the values of its numbers."""

    key: tuple  # hashable, equal for equal values; code, classes and library functions may be there by their id
    tensors: tuple[Tensor, ...]
    held: tuple  # objects whose ids are in the key


def values_of(function: Callable) -> Values | None:
    """What a function captures now. None for a function that captures an iterator or an array: a key of it is of one
    call, or long.

    >>> def window(width):
    ...     return lambda b, h, q, k: q - k < width
    >>> one, same, other = (values_of(window(width)) for width in (3, 3, 5))
    >>> one.key == same.key, one.key == other.key
    (True, False)
    """
    reader = _Reader()
    if reader.reads(function):
        return Values(tuple(reader.constants), tuple(reader.tensors), tuple(reader.held))
    found = captured(function)
    if not found.lasts:
        return None
    return Values((found.key, *[(path, value or repr(value)) for path, value in found.numbers]), found.tensors, ())


_ABSENT = object()
_DEEPEST = 4  # functions within functions; deeper ones may be recursive


class _Reader:
    """Each method returns False for what is not simple; what was read then counts for nothing."""

    def __init__(self) -> None:
        self.constants: list[Any] = []  # in the order of reading, with _ABSENT for a tensor
        self.tensors: list[Tensor] = []
        self.held: list[Any] = []

    def reads(self, function: Any) -> bool:
        kind = type(function)
        if kind is FunctionType:
            return self.function(function, _DEEPEST)
        if kind is MethodType:
            return self.object(function.__self__, function.__func__)
        if kind is functools.partial:
            self.constants.append((len(function.args), *function.keywords))
            values = (*function.args, *function.keywords.values())
            return self.reads(function.func) and self.values(values, 0)
        return self.object(function, None)

    def function(self, function: Any, depth: int) -> bool:
        """depth: how many functions may lie within each other."""
        if type(function) is not FunctionType or depth < 0:
            return False
        if function.__defaults__ is not None or function.__kwdefaults__ is not None or function.__dict__:
            return False
        code, scope = function.__code__, function.__globals__
        self.held.append(code)
        self.constants.append(id(code))
        try:
            values = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # an empty cell
            return False
        for name in names_in(code):
            values.append(scope.get(name, _ABSENT))
        return self.values(values, depth)

    def values(self, values: Iterable[Any], depth: int) -> bool:
        constants, held = self.constants, self.held
        for value in values:
            kind = type(value)
            if kind is Tensor or kind is torch.nn.Parameter:
                self.tensors.append(value)
                constants.append(_ABSENT)
            elif kind is int or kind is float:
                constants.append((kind, value or repr(value)))  # 0.0 == -0.0
            elif value is _ABSENT or value is None or kind is bool or kind is str or kind is torch.dtype:
                constants.append((kind, value))
            elif _opaque.get(id(value)) is value:
                constants.append(id(value))
                held.append(value)
            elif is_opaque(value):
                if has_named_parts(value):
                    return False
                if len(_opaque) >= _MOST_OPAQUE:
                    _opaque.clear()
                _opaque[id(value)] = value
                constants.append(id(value))
                held.append(value)
            elif not self.function(value, depth - 1):
                return False
        return True

    def object(self, value: Any, called: Any) -> bool:
        """An object of a user's class, such as a layer, of which the method `called` runs; None: its own call."""
        kind = type(value)
        classes = [vars(base) for base in layers(kind)]
        if not classes or not (called is None or type(called) is FunctionType):
            return False
        plan, state = _plan(kind, called, tuple([tuple(held) for held in classes])), getattr(value, "__dict__", None)
        if plan is None or state is None:
            return False
        groups = [state]
        if plan.is_layer:
            if any([state.get(hooks) for hooks in OF_LAYERS]):
                return False
            groups += [state["_parameters"], state["_buffers"], state["_modules"]]
        self.constants.append(id(kind))
        self.held.append(kind)
        for method in plan.methods:
            if not method.is_current() or not self.function(method.function, 0):
                return False
        parts = []
        for name in plan.names:
            for group in groups:
                if name in group:
                    parts.append(group[name])
                    break
            else:
                parts.append(_ABSENT)
        return self.values(parts, 0)


class _Method(NamedTuple):
    attributes: Mapping[str, Any]  # of the class that holds it
    name: str
    function: FunctionType
    code: CodeType

    def is_current(self) -> bool:
        """Whether the class still holds it, with the same code."""
        return self.attributes.get(self.name) is self.function and self.function.__code__ is self.code


class _Plan(NamedTuple):
    """What a method of a class reads."""

    methods: tuple[_Method, ...]  # the method, and those that it may call
    names: tuple[str, ...]  # of attributes of the object: all that a method of the class names
    is_layer: bool


@functools.lru_cache(maxsize=256)
def _plan(kind: type, called: FunctionType | None, attributes: tuple) -> _Plan | None:
    """None for a class whose objects are read by `captures`: with slots, operators, properties, other descriptors,
    values of the class itself, a base that is no user's, attributes whose names are computed.

    attributes: the names in each user's class among its bases, so that a class that changes has another plan.
    """
    bases = layers(kind)
    if type(kind) not in (type, ABCMeta) or any([base not in (*bases, *_BASES) for base in kind.__mro__]):
        return None
    classes, is_layer = [vars(base) for base in bases], issubclass(kind, torch.nn.Module)
    functions = [one for held in classes for one in held.values() if type(one) is FunctionType]
    every = dict.fromkeys([name for one in functions for name in names_in(one.__code__)])
    if slots(kind) or operators(kind, False) or not _COMPUTED.isdisjoint(every):
        return None
    if is_layer and any(CALL in held for held in classes):
        return None
    names = dict.fromkeys(("forward" if is_layer else CALL, *(names_in(called.__code__) if called else ())))
    waiting = list(names)
    methods = [
        _Method(held, name, called, called.__code__)
        for held in classes
        for name, one in held.items()
        if called is not None and one is called
    ]
    if called is not None and not methods:
        return None
    while waiting:
        name = waiting.pop()
        for held in classes:
            if name in held:
                one = held[name]
                if type(one) is not FunctionType:
                    return None
                methods.append(_Method(held, name, one, one.__code__))
                further = [each for each in names_in(one.__code__) if each not in names]
                names |= dict.fromkeys(further)
                waiting += further
    return _Plan(tuple(methods), tuple(names | every), is_layer)


_BASES = (object, torch.nn.Module, Generic)
_COMPUTED = frozenset(("getattr", "vars", "__dict__", "__getattribute__", "getattr_static", "attrgetter"))
_MOST_OPAQUE = 1024
_opaque: dict[int, Any] = {}  # modules, classes and functions of libraries that were met
