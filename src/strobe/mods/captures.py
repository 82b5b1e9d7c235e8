"""What a function reads beside its arguments: tensors, Python numbers and other functions, and what identifies it.

A function is identified by its code and by what it captures: of tensors the metadata, of numbers the type, of anything
else the value. So two closures of one code over other tensors are the same function, and are traced once.

Of a module or a class that a function names, the attributes count that the function's code names. An object that can
change without a trace of it here (an iterator) makes a key that equals no other.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

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


class SimpleValues(NamedTuple):
    """What a function captures, if these are tensors, constants and functions of the same kind."""

    key: tuple  # hashable, equal for equal constants; code and library functions by their id
    tensors: tuple[Tensor, ...]  # in the order of the key, repeated where captured twice
    held: tuple  # objects whose ids are in the key


def simple_values(function: Callable) -> SimpleValues | None:
    """What a function captures, in a quarter of the time of `captured`; None for a function that captures anything
    else, such as lists, objects or a user's module.

    >>> def window(width):
    ...     return lambda b, h, q, k: q - k < width
    >>> one, same, other = (simple_values(window(width)) for width in (3, 3, 5))
    >>> one.key == same.key, one.key == other.key
    (True, False)
    """
    constants: list[Any] = []
    tensors: list[Tensor] = []
    held: list[Any] = []
    if not _read_simple(function, constants, tensors, held, 0):
        return None
    return SimpleValues(tuple(constants), tuple(tensors), tuple(held))


_ABSENT = object()
_DEEPEST = 4  # functions within functions; deeper ones may be recursive


def _read_simple(function: Any, constants: list[Any], tensors: list[Tensor], held: list[Any], depth: int) -> bool:
    """Append what a function captures. Returns False for a function that is not simple."""
    if type(function) is not FunctionType or depth > _DEEPEST:
        return False
    if function.__defaults__ is not None or function.__kwdefaults__ is not None or function.__dict__:
        return False
    code, scope = function.__code__, function.__globals__
    held.append(code)
    constants.append(id(code))
    try:
        values = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # an empty cell
        return False
    for name in names_in(code):
        values.append(scope.get(name, _ABSENT))
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            tensors.append(value)
            constants.append(_ABSENT)
        elif kind is int or kind is float:
            constants.append((kind, value if value else repr(value)))  # 0.0 == -0.0
        elif value is _ABSENT or value is None or kind is bool or kind is str or kind is torch.dtype:
            constants.append((kind, value))
        elif _opaque.get(id(value)) is value:
            constants.append(id(value))
            held.append(value)
        elif is_opaque(value):
            if within(value, ()) is not value:  # a user's module or class
                return False
            if len(_opaque) >= _MOST_OPAQUE:
                _opaque.clear()
            _opaque[id(value)] = value
            constants.append(id(value))
            held.append(value)
        elif not _read_simple(value, constants, tensors, held, depth + 1):
            return False
    return True


_MOST_OPAQUE = 1024
_opaque: dict[int, Any] = {}  # modules, classes and functions of libraries that were met


class Namespace(NamedTuple):
    """A module, a class or a callable object, of which a function reads the attributes with these names."""

    real: Any
    names: tuple[str, ...]

    @property
    def kind(self) -> Hashable:
        """What its key holds beside the attributes. Two callable objects of one class are alike."""
        return _Same(self.real) if isinstance(self.real, (ModuleType, type)) else type(self.real)

    def parts(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of the attributes that it has; a static method as its function, a property as its getter."""
        if not isinstance(self.real, (ModuleType, type)):
            yield from _attributes_named(self.real, self.names)
            return
        for name in self.names:
            found = next((vars(one)[name] for one in _layers(self.real) if name in vars(one)), self)
            if found is not self:
                yield name, within(_undescribed(found), self.names)


class _Walk:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.numbers: list[tuple[str, int | float]] = []
        self._seen: dict[Hashable, int] = {}

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
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset((type(one), one) for one in value)
        identity = identity_of(value)
        if identity in self._seen:
            return "seen", self._seen[identity]
        self._seen[identity] = len(self._seen)
        parts = [(name, self.key(part, f"{path}.{name}")) for name, part in _parts(value)]
        if isinstance(value, Namespace):
            return ("namespace", value.kind, *parts)
        if isinstance(value, FunctionType):
            return ("function", value.__code__, *parts)
        if parts or isinstance(value, (MethodType, functools.partial, tuple, list, deque, dict)):
            return (type(value), *parts)
        return _memory(value) or (_Same(object()) if hasattr(type(value), "__next__") else _Same(value))

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


_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)
_LIBRARIES = ("torch", "numpy", "math", "builtins", "strobe", "enum", "typing")


def within(value: Any, names: tuple[str, ...]) -> Any:
    """A user's module, class or callable object as a Namespace of these names; any other value unchanged."""
    if not isinstance(value, (ModuleType, type)) and (not callable(value) or isinstance(value, _FUNCTIONS)):
        return value
    home = value.__name__ if isinstance(value, ModuleType) else _class_of(value).__module__
    is_foreign = home.partition(".")[0] in _LIBRARIES and not isinstance(value, torch.nn.Module)
    return value if is_foreign else Namespace(value, names)


def _class_of(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def identity_of(value: Any) -> Hashable:
    """A key that is equal for the same object. A Namespace is created at each visit, so its object and names count."""
    return (id(value.real), value.names) if isinstance(value, Namespace) else id(value)


def _layers(real: Any) -> Sequence[Any]:
    """Where the attributes of a module or a class are looked up, in this order."""
    if isinstance(real, ModuleType):
        return (real,)
    return [base for base in real.__mro__ if within(base, ()) is not base]


def _undescribed(attribute: Any) -> Any:
    if isinstance(attribute, (staticmethod, classmethod)):
        return attribute.__func__
    return attribute.fget if isinstance(attribute, property) else attribute


def _memory(value: object) -> Hashable:
    """Type and contents of an array, of numpy or of Python; None for any other object."""
    try:
        view = memoryview(cast(Any, value))  # raises TypeError for an object that is no array
    except (TypeError, ValueError, BufferError):
        return None
    return type(value), view.format, view.shape, view.tobytes()


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, part) of everything that may matter when the function or object is called."""
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            yield from [(name, within(cell.cell_contents, names_in(value.__code__)))] if is_filled(cell) else []
        for n, default in enumerate(value.__defaults__ or ()):
            yield f"default{n}", default
        yield from (value.__kwdefaults__ or {}).items()
        names = names_in(value.__code__)
        for name in names:
            if name in value.__globals__:
                yield name, within(value.__globals__[name], names)
            elif name in value.__dict__:
                yield name, value.__dict__[name]
    elif isinstance(value, Namespace):
        yield from value.parts()
    elif isinstance(value, MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
    elif isinstance(value, functools.partial):
        yield "function", value.func
        yield "arguments", value.args
        yield "keywords", value.keywords
    elif isinstance(value, (tuple, list, deque)):
        yield from ((str(n), one) for n, one in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(name), one) for name, one in value.items())
    else:
        yield from _attributes_named(value, None if _is_plain(value) else ())


def _attributes_named(value: Any, names: tuple[str, ...] | None) -> Iterator[tuple[str, Any]]:
    """(name, value) of an object's attributes that its class's methods name, or that are among `names` (None: all)."""
    own = dict.fromkeys(name for code in _codes(type(value)) for name in names_in(code))
    for name, one in attributes(value).items():
        if names is None or name in own or name in names:
            yield name, within(one, tuple(own))


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
    """What an object holds: its own attributes and slots, and of its class those that are neither methods nor
    properties.
    """
    held = dict(getattr(value, "__dict__", {}))
    if isinstance(value, torch.nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            held |= held.pop(group, {})
    for name in () if isinstance(value, Enum) else _shared_names(type(value)):
        if name not in held and hasattr(value, name):
            held[name] = getattr(value, name)
    return held


@functools.lru_cache(maxsize=256)
def _shared_names(kind: type) -> tuple[str, ...]:
    """The names of a class's slots, and of its attributes that are plain values."""
    layers = [vars(base) for base in _layers(kind)]
    slots = [one.get("__slots__", ()) for one in layers]
    found = dict.fromkeys(name for one in slots for name in ((one,) if isinstance(one, str) else one))
    for layer in layers:
        found |= dict.fromkeys(name for name, one in layer.items() if not hasattr(one, "__get__") and not callable(one))
    return tuple(name for name in found if not (name.startswith("__") and name.endswith("__")))


# ---------------------------------------------------------------- the same function over stand-ins


def bare(value: Any) -> Any:
    return value.real if isinstance(value, Namespace) else value


def replaced(value: Any, replacements: Replacements, path: str = "", made: dict[Hashable, Any] | None = None) -> Any:
    """The function with captured tensors and numbers replaced. Nothing of the original is written to."""
    made = {} if made is None else made
    if isinstance(value, Tensor):
        return replacements.get(id(value), value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return replacements.get(path, value)
    identity = identity_of(value)
    if identity in made:
        return made[identity]
    if value is None or isinstance(value, (str, bytes)) or is_opaque(value):
        return value
    if isinstance(value, FunctionType):
        return _replaced_function(value, replacements, path, made)
    real = bare(value)
    made[identity] = real
    old = dict(_parts(value))
    parts = {name: replaced(part, replacements, f"{path}.{name}", made) for name, part in old.items()}
    if all(part is bare(old[name]) for name, part in parts.items()):
        return real
    if isinstance(value, Namespace):
        return _StandIn(real, parts)
    if isinstance(value, MethodType):
        return MethodType(parts["function"], parts["self"])
    if isinstance(value, functools.partial):
        return functools.partial(parts["function"], *parts["arguments"], **parts["keywords"])
    if isinstance(value, (tuple, list, deque)):
        return type(value)(parts.values()) if not hasattr(value, "_fields") else type(value)(*parts.values())  # type: ignore
    return {name: parts[str(name)] for name in value} if isinstance(value, dict) else _StandIn(value, parts)


def _replaced_function(
    function: FunctionType, replacements: Replacements, path: str, made: dict[Hashable, Any]
) -> FunctionType:
    code, parts = function.__code__, dict(_parts(function))
    cells = [CellType() for _ in code.co_freevars]
    scope = dict(function.__globals__)
    copy = FunctionType(code, scope, function.__name__, None, tuple(cells))
    made[id(function)] = copy  # before its parts, so that a function may call itself
    new = {name: replaced(part, replacements, f"{path}.{name}", made) for name, part in parts.items()}
    for name, own, cell in zip(code.co_freevars, cells, function.__closure__ or ()):
        if is_filled(cell):
            own.cell_contents = new[name]
    defaults = function.__defaults__
    copy.__defaults__ = defaults and tuple(new[f"default{n}"] for n in range(len(defaults)))
    copy.__kwdefaults__ = {name: new[name] for name in function.__kwdefaults__ or {}}
    copy.__dict__.update(function.__dict__)
    for name in names_in(code):
        if name in scope:
            scope[name] = new[name]
        elif name in copy.__dict__:
            copy.__dict__[name] = new[name]
    if all(new[name] is bare(old) for name, old in parts.items()):
        made[id(function)] = function
    return made[id(function)]


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
        if isinstance(self.__dict__["_real"], type):
            return self.__dict__["_real"](*arguments)
        method = "forward" if isinstance(self.__dict__["_real"], torch.nn.Module) else "__call__"
        return getattr(self, method)(*arguments)


def arity(function: Callable) -> Sequence[str]:
    """The names of a function's positional parameters."""
    from inspect import Parameter, signature

    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature(function).parameters.values() if p.kind in kinds and p.default is p.empty]
