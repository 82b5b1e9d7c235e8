"""What a function reads beside its arguments: tensors, Python numbers and other functions, and what identifies it.

A function is identified by its code and by what it captures: of tensors the metadata, of numbers the type, of anything
else the value. So two closures of one code over other tensors are the same function, and are traced once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

Replacements = Mapping[Any, Any]  # by id of a tensor, or by path of a number


class Captured(NamedTuple):
    """What one function captures at one moment."""

    key: Hashable
    tensors: tuple[Tensor, ...]  # each once
    numbers: tuple[tuple[str, int | float], ...]  # (path, value)


def captured(function: Callable) -> Captured:
    """What a function, method, partial or callable object captures.

    >>> def window(width):
    ...     return lambda b, h, q, k: q - k < width
    >>> one, other = captured(window(3)), captured(window(5))
    >>> one.key == other.key, [value for _, value in one.numbers]
    (True, [3])
    """
    walk = _Walk()
    key = walk.key(function, "")
    return Captured(key, tuple(walk.tensors), tuple(walk.numbers))


class _Walk:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.numbers: list[tuple[str, int | float]] = []
        self._seen: dict[int, int] = {}

    def key(self, value: Any, path: str) -> Hashable:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self.numbers.append((path, value))
            return type(value)
        if value is None or isinstance(value, (bool, str, bytes, torch.dtype, torch.device, CodeType)):
            return value
        if is_opaque(value):
            return _Same(value)
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        parts = [(name, self.key(part, f"{path}.{name}")) for name, part in _parts(value)]
        if isinstance(value, FunctionType):
            return ("function", value.__code__, *parts)
        if parts or isinstance(value, (MethodType, functools.partial, tuple, list, dict)):
            return (type(value), *parts)
        return _Same(value)

    def _tensor(self, tensor: Tensor) -> Hashable:
        at = next((n for n, one in enumerate(self.tensors) if one is tensor), None)
        if at is None:
            at = len(self.tensors)
            self.tensors.append(tensor)
        return "tensor", at, tensor.dtype, tuple(tensor.shape), tensor.requires_grad, tensor.device.type


class _Same:
    """A key of an object that equals only the object itself. It keeps the object alive, so its id stays its own."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def is_opaque(value: object) -> bool:
    """Whether it is known by its identity alone: a module, a class, or a function of a library."""
    return isinstance(value, (ModuleType, BuiltinFunctionType, type)) or _is_library(value)


def _is_library(value: object) -> bool:
    """Whether it is a function of torch or of Python that captures nothing. torch makes closures of users' functions,
    too: and_masks, PagedAttention.get_mask_mod.
    """
    module = getattr(value, "__module__", None) or ""
    return (
        isinstance(value, FunctionType)
        and value.__closure__ is None
        and module.partition(".")[0] in ("torch", "math", "builtins")
    )


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, part) of everything that may matter when the function or object is called."""
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            yield from [(name, cell.cell_contents)] if is_filled(cell) else []
        for n, default in enumerate(value.__defaults__ or ()):
            yield f"default{n}", default
        yield from (value.__kwdefaults__ or {}).items()
        for name in names_in(value.__code__):
            if name in value.__globals__:
                yield name, value.__globals__[name]
    elif isinstance(value, MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
    elif isinstance(value, functools.partial):
        yield "function", value.func
        yield "arguments", value.args
        yield "keywords", value.keywords
    elif isinstance(value, (tuple, list)):
        yield from ((str(n), one) for n, one in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(name), one) for name, one in value.items())
    else:
        names = set().union(*(names_in(code) for code in _codes(type(value))))
        yield from ((name, one) for name, one in attributes(value).items() if name in names or _is_plain(value))


def is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def names_in(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function's code and in the functions that it defines."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= dict.fromkeys(names_in(constant))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _codes(kind: type) -> tuple[CodeType, ...]:
    """The code of a class's own methods."""
    functions = [one for base in kind.__mro__ if base.__module__ != "builtins" for one in vars(base).values()]
    return tuple(one.__code__ for one in functions if isinstance(one, FunctionType) and not _is_library(one))


def _is_plain(value: object) -> bool:
    """Whether it is a record without methods of its own, whose fields a function reads directly."""
    return not callable(value)


def attributes(value: object) -> dict[str, Any]:
    held = dict(getattr(value, "__dict__", {}))
    if isinstance(value, torch.nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            held |= held.pop(group, {})
    return held


# ---------------------------------------------------------------- the same function over stand-ins


def replaced(value: Any, replacements: Replacements, path: str = "", made: dict[int, Any] | None = None) -> Any:
    """The function with captured tensors and numbers replaced. Nothing of the original is written to."""
    made = {} if made is None else made
    if isinstance(value, Tensor):
        return replacements.get(id(value), value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return replacements.get(path, value)
    if id(value) in made:
        return made[id(value)]
    if value is None or isinstance(value, (str, bytes)) or is_opaque(value):
        return value
    if isinstance(value, FunctionType):
        return _replaced_function(value, replacements, path, made)
    made[id(value)] = value
    parts = {name: replaced(part, replacements, f"{path}.{name}", made) for name, part in _parts(value)}
    if all(part is old for part, (_, old) in zip(parts.values(), _parts(value))):
        return value
    if isinstance(value, MethodType):
        return MethodType(parts["function"], parts["self"])
    if isinstance(value, functools.partial):
        return functools.partial(parts["function"], *parts["arguments"], **parts["keywords"])
    if isinstance(value, (tuple, list)):
        return type(value)(parts.values()) if not hasattr(value, "_fields") else type(value)(*parts.values())  # type: ignore
    return {name: parts[str(name)] for name in value} if isinstance(value, dict) else _StandIn(value, parts)


def _replaced_function(function: FunctionType, replacements: Replacements, path: str, made: dict[int, Any]) -> Any:
    code = function.__code__
    cells = [CellType() for _ in code.co_freevars]
    scope = dict(function.__globals__)
    copy = FunctionType(code, scope, function.__name__, None, tuple(cells))
    made[id(function)] = copy  # before its parts, so that a function may call itself
    within = lambda name, part: replaced(part, replacements, f"{path}.{name}", made)
    for name, own, cell in zip(code.co_freevars, cells, function.__closure__ or ()):
        if is_filled(cell):
            own.cell_contents = within(name, cell.cell_contents)
    defaults = function.__defaults__
    copy.__defaults__ = defaults and tuple(within(f"default{n}", one) for n, one in enumerate(defaults))
    copy.__kwdefaults__ = {name: within(name, one) for name, one in (function.__kwdefaults__ or {}).items()}
    for name in names_in(code):
        if name in scope:
            scope[name] = within(name, scope[name])
    return copy


class _StandIn:
    """An object with some attributes replaced, and its class's methods bound to the stand-in."""

    def __init__(self, real: object, parts: Mapping[str, Any]) -> None:
        self._real, self._parts_by_name = real, parts

    def __getattr__(self, name: str) -> Any:
        parts, real = self.__dict__["_parts_by_name"], self.__dict__["_real"]
        if name in parts:
            return parts[name]
        method = getattr(type(real), name, None)
        return MethodType(method, self) if isinstance(method, FunctionType) else getattr(real, name)

    def __call__(self, *arguments: Any) -> Any:
        method = "forward" if isinstance(self.__dict__["_real"], torch.nn.Module) else "__call__"
        return getattr(self, method)(*arguments)


def arity(function: Callable) -> Sequence[str]:
    """The names of a function's positional parameters."""
    from inspect import Parameter, signature

    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature(function).parameters.values() if p.kind in kinds and p.default is p.empty]
