"""What a function reads beside its arguments: tensors, Python numbers and other functions, and what identifies it.

A function is identified by its code and by what it captures: of tensors the metadata, of numbers the type, of anything
else the value. So two closures of one code over other tensors are the same function, and are traced once.

Of a module or a class that a function names, the attributes count that the function's code names, and of an object the
methods, with what these read. An object that can change without a trace of it here (an iterator, a dictionary's view)
makes a key that equals no other.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NoneType,
)
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

Names = tuple[str, ...]  # of globals and attributes in code that may read a value
CALL = "__call__"  # among Names: the value may be called
# marks in a path: an attribute of a base that a subclass overrides, one of a class that the object hides, and one of a
# function
OVERRIDDEN, HIDDEN, OWN = " of ", " in the class", " of the function itself"


class Captured(NamedTuple):
    """What one function captures at one moment."""

    key: Hashable
    tensors: tuple[Tensor, ...]  # each once
    numbers: tuple[tuple[str, int | float], ...]  # (path, value)
    lasts: bool = True  # False with an iterator or an array among the captures, which may change at each call


def captured(function: Callable) -> Captured:
    """What a function, method, partial or callable object captures.

    >>> def window(width):
    ...     return lambda b, h, q, k: q - k < width
    >>> one, other = captured(window(3)), captured(window(5))
    >>> one.key == other.key, [value for _, value in one.numbers]
    (True, [3])
    """
    walk = _Walk()
    key = walk.key(function, "", (CALL,))
    return Captured(key, tuple(walk.tensors), tuple(walk.numbers), walk.lasts)


class _Walk:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.numbers: list[tuple[str, int | float]] = []
        self.lasts = True
        self._seen: dict[Hashable, int] = {}

    def key(self, value: Any, path: str, names: Names) -> Hashable:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if _changes_unseen(value):
            self.lasts = False
            return _Same(object())
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if OVERRIDDEN in path or isinstance(value, Enum):  # code may compare an enumeration's number by `is`
                return type(value), repr(value)
            self.numbers.append((path, value))
            return type(value)
        if value is None or isinstance(value, (bool, str, bytes, torch.dtype, torch.device, CodeType)):
            return value
        if is_opaque(value) and not has_named_parts(value):
            return _Same(value)
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset((type(one), one) for one in value)
        identity = identity_of(value, names)
        if identity in self._seen:
            return "seen", self._seen[identity]
        self._seen[identity] = len(self._seen)
        held = tuple([(name, self.key(part, f"{path}.{name}", its)) for name, part, its in parts_of(value, names)])
        if has_named_parts(value):
            return "named", _Same(value), held
        if isinstance(value, FunctionType):
            return "function", value.__code__, held
        if held or isinstance(value, (MethodType, functools.partial, tuple, list, deque, dict)):
            return type(value), held
        contents, is_iterator = _memory(value), hasattr(type(value), "__next__")
        self.lasts = self.lasts and contents is None and not is_iterator
        return contents or _Same(object() if is_iterator else value)

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


_VIEWS = (type({}.keys()), type({}.values()), type({}.items()), MappingProxyType, weakref.ref, ContextVar)
_BUILT_IN = (int, float, str, bytes, tuple, list, deque, dict, set, frozenset)


def _changes_unseen(value: Any) -> bool:
    """Whether a key cannot show that it has changed: a view of another object, a function that keeps results, an object
    of a class that derives from a built-in type and has attributes.
    """
    if isinstance(value, (*_VIEWS, functools._lru_cache_wrapper)):
        return True
    held = getattr(value, "__dict__", None) if isinstance(value, _BUILT_IN) and not isinstance(value, Enum) else None
    return bool(held) and held is not value  # a dictionary whose items are its attributes


def is_opaque(value: object) -> bool:
    """Whether it is known by its identity alone: a module, a class, or a function of a library."""
    if isinstance(value, BOUND):
        return not is_bound(value)
    return isinstance(value, (ModuleType, type)) or _is_library(value)


BOUND = (BuiltinFunctionType, MethodWrapperType)


def is_bound(function: Any) -> bool:
    """Whether a built-in function is the method of an object, such as the `get` of a dictionary."""
    return not isinstance(function.__self__, (ModuleType, type, NoneType))


def _is_library(value: object) -> bool:
    """Whether it is a function of torch or of Python that captures nothing. torch makes closures of users' functions,
    too: and_masks, PagedAttention.get_mask_mod.
    """
    if not isinstance(value, FunctionType) or value.__closure__ is not None:
        return False
    home = value.__globals__.get("__name__") or ""  # functools.wraps copies __module__
    return home.partition(".")[0] in ("torch", "math", "builtins")


_FUNCTIONS = (FunctionType, MethodType, *BOUND, functools.partial)
_CONTAINERS = (tuple, list, deque, dict)
_LIBRARIES = ("torch", "numpy", "math", "builtins", "strobe", "enum", "typing")


def has_named_parts(value: object) -> bool:
    """Whether it is a user's module or class, of which those attributes count that code names."""
    if not isinstance(value, (ModuleType, type)):
        return False
    home = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return home.partition(".")[0] not in _LIBRARIES


def identity_of(value: Any, names: Names) -> Hashable:
    """A key that is equal for the same object with the same parts. Names choose parts of all but functions and of
    objects and containers that hold simple values alone.
    """
    if isinstance(value, _FUNCTIONS):
        return id(value)
    if isinstance(value, _CONTAINERS):
        held = value.values() if isinstance(value, dict) else value
        return (id(value), ()) if all(map(_is_simple, held)) else (id(value), names)
    if not has_named_parts(value) and not callable(value) and all(map(_is_simple, attributes(value).values())):
        names = tuple([name for name in names if hasattr(type(value), name)])
    return id(value), names


def _is_simple(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, Tensor, torch.dtype))


def _memory(value: object) -> Hashable:
    """Type and contents of an array, of numpy or of Python; None for any other object."""
    try:
        view = memoryview(cast(Any, value))  # raises TypeError for an object that is no array
    except (TypeError, ValueError, BufferError):
        return None
    return type(value), view.format, view.shape, view.tobytes()


def parts_of(value: Any, names: Names) -> Iterator[tuple[str, Any, Names]]:
    """(name, part, names in code that may read the part) of everything that may matter when a function is called, or
    when code with these names reads an object.
    """
    if isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, ModuleType):
        yield from ((name, vars(value)[name], names) for name in names if name in vars(value))
    elif isinstance(value, type):
        yield from ((label, undescribed(one), names) for label, one in definitions(value, names)[0].items())
    elif isinstance(value, MethodType):
        inner = _names_of(value.__func__, names)
        yield "self", value.__self__, inner
        yield "function", value.__func__, inner
    elif isinstance(value, BOUND):
        yield "self", value.__self__, names
        yield "name", value.__name__, ()
    elif isinstance(value, functools.partial):
        inner = _names_of(value.func, names)
        yield "function", value.func, names
        yield "arguments", value.args, inner
        yield "keywords", value.keywords, inner
    elif isinstance(value, dict):
        yield from ((key_name(key), one, names) for key, one in value.items())
    elif isinstance(value, _CONTAINERS):
        yield from ((str(n), one, names) for n, one in enumerate(value))
    else:
        yield from _parts_of_object(value, names)


def _names_of(function: Any, names: Names) -> Names:
    return reads(function) if isinstance(function, FunctionType) else names


def key_name(key: object) -> str:
    """A dictionary's key as a part of a path: 1 and "1" are two keys."""
    return key if isinstance(key, str) else f"{type(key).__name__} {key!r}"


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any, Names]]:
    code, scope, own = function.__code__, function.__globals__, function.__dict__
    found = [
        (name, cell.cell_contents)
        for name, cell in zip(code.co_freevars, function.__closure__ or ())
        if is_filled(cell) and name != "__class__"  # which super() reads
    ]
    found += [(f"default{n}", default) for n, default in enumerate(function.__defaults__ or ())]
    found += (function.__kwdefaults__ or {}).items()
    for name in names_in(code):
        if name in scope:
            found.append((name, scope[name]))
    found += [(f"{name}{OWN}", one) for name, one in own.items()]
    has_objects = any([not (_is_simple(one) or (is_opaque(one) and not has_named_parts(one))) for _, one in found])
    names = reads(function) if has_objects else ()
    yield from ((name, one, names) for name, one in found)


def _parts_of_object(value: Any, names: Names) -> Iterator[tuple[str, Any, Names]]:
    """Of a callable object the attributes that its methods or `names` name, of a record all, of a container of torch.nn
    its members; and the methods.
    """
    kind = type(value)
    found, named = definitions(kind, (*names, *operators(kind, CALL in names)))
    own = _names_in_methods(kind) | named
    is_called, readers, held = callable(value), tuple(own), attributes(value)
    members = {**value._parameters, **value._modules} if isinstance(value, _OF_MEMBERS) else {}
    for name, one in held.items():
        if not is_called or name in own or name in members or (name in OF_LAYERS and one):
            yield name, one, readers
    for label, one in found.items():
        if label not in held or label in getattr(value, "__dict__", ()):
            yield f"{label}{HIDDEN}" if label in held else label, undescribed(one), readers


_nn = torch.nn
_OF_MEMBERS = (_nn.Sequential, _nn.ModuleList, _nn.ModuleDict, _nn.ParameterList, _nn.ParameterDict)  # read by number
# of a layer; a call reads them
OF_LAYERS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def definitions(kind: type, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, None]]:
    """Attributes of a user's class: those with these names, and with the names in the code of methods among them. And
    all these names.

    An attribute of a base that a subclass overrides has the base's name in its own. Only super() reads it, from the
    class itself, so a number in it stays a constant.
    """
    found: dict[str, Any] = {}
    met, bases = dict.fromkeys(names), [(base.__qualname__, vars(base)) for base in layers(kind)]
    waiting = deque(met if bases else ())
    while waiting:
        name = waiting.popleft()
        for base, held in bases:
            if name in held and not isinstance(held[name], _SLOTS):
                found[f"{name}{OVERRIDDEN}{base}" if name in found else name] = held[name]
                further = [one for one in _names_of(undescribed(held[name]), ()) if one not in met]
                met.update(dict.fromkeys(further))
                waiting += further
    return found, met


def operators(kind: type, is_called: bool) -> Names:
    """The names of methods that no code names: operators, and what a call of the object runs."""
    found = [
        name
        for base in layers(kind)
        for name, one in vars(base).items()
        if name.startswith("__") and name.endswith("__") and name not in _NO_OPERATORS
        if name != CALL and isinstance(one, FunctionType)
    ]
    return (*found, "forward") if is_called and issubclass(kind, torch.nn.Module) else tuple(found)


_SLOTS = (MemberDescriptorType, GetSetDescriptorType)
_NO_OPERATORS = frozenset(
    (
        "__init__", "__new__", "__post_init__", "__del__", "__init_subclass__", "__set_name__", "__repr__", "__str__",
        "__hash__", "__eq__", "__ne__", "__setattr__", "__delattr__", "__dir__", "__sizeof__", "__reduce__",
        "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__class_getitem__",
        "__replace__", "__annotate__", "__annotate_func__",
    )
)  # fmt: skip


@functools.lru_cache(maxsize=256)
def layers(kind: type) -> tuple[type, ...]:
    """A user's class and its bases that are users', in the order of look-up."""
    return tuple([base for base in kind.__mro__ if has_named_parts(base)])


def undescribed(attribute: Any) -> Any:
    """The function of a method of any kind; another attribute unchanged."""
    if isinstance(attribute, (staticmethod, classmethod)):
        return attribute.__func__
    if isinstance(attribute, property):
        return attribute.fget
    return attribute.func if isinstance(attribute, functools.cached_property) else attribute


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


def reads(function: FunctionType) -> Names:
    """The names in a function's code and in that of functions and methods within its reach, which may get what it
    reads.
    """
    found: dict[str, None] = {}
    waiting: list[Any] = [function]
    met: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in met or _is_simple(one):
            continue
        met.add(id(one))
        if isinstance(one, FunctionType) and not _is_library(one):
            found |= dict.fromkeys(names_in(one.__code__))
        waiting += _within_reach(one)
    return *found, CALL


def _within_reach(value: Any) -> list[Any]:
    """What a function or a method may call, and what may be the object of a method that it calls."""
    if isinstance(value, FunctionType):
        if _is_library(value):
            return []
        names, scope = names_in(value.__code__), value.__globals__
        reached = [scope[name] for name in names if name in scope]
        reached += [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        reached += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for module in [one for one in reached if isinstance(one, ModuleType) and has_named_parts(one)]:
            reached += [vars(module)[name] for name in names if name in vars(module)]
        return reached
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, _CONTAINERS):
        return list(value.values()) if isinstance(value, dict) else list(value)
    if isinstance(value, (ModuleType, type)):
        return []
    methods = [undescribed(one) for base in layers(type(value)) for one in vars(base).values()]
    own = [one for one in getattr(value, "__dict__", {}).values() if isinstance(one, (*_FUNCTIONS, *_CONTAINERS))]
    return [one for one in methods if isinstance(one, FunctionType)] + (own if methods else [])


@functools.lru_cache(maxsize=256)
def _codes(kind: type) -> tuple[CodeType, ...]:
    """The code of a class's own methods."""
    functions = [one for base in kind.__mro__ if base.__module__ != "builtins" for one in vars(base).values()]
    return tuple(one.__code__ for one in functions if isinstance(one, FunctionType) and not _is_library(one))


@functools.lru_cache(maxsize=256)
def _names_in_methods(kind: type) -> dict[str, None]:
    return dict.fromkeys(name for code in _codes(kind) for name in names_in(code))


def attributes(value: object) -> dict[str, Any]:
    """What an object holds: its own attributes and slots, and of its class those that are neither methods nor
    properties.
    """
    held = dict(getattr(value, "__dict__", {}))
    if isinstance(value, torch.nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            held |= held.pop(group, {})
    for name in () if isinstance(value, Enum) else (*slots(type(value)), *_shared_names(type(value))):
        if name not in held and hasattr(value, name):
            held[name] = getattr(value, name)
    return held


@functools.lru_cache(maxsize=256)
def _shared_names(kind: type) -> Names:
    """The names of a class's attributes that are plain values."""
    every = [vars(base) for base in layers(kind)]
    names = [name for one in every for name, value in one.items() if not (hasattr(value, "__get__") or callable(value))]
    return tuple(name for name in dict.fromkeys(names) if not (name.startswith("__") and name.endswith("__")))


@functools.lru_cache(maxsize=256)
def slots(kind: type) -> Names:
    return tuple(
        name for base in layers(kind) for name, one in vars(base).items() if isinstance(one, MemberDescriptorType)
    )


def arity(function: Callable) -> Sequence[str]:
    """The names of a function's positional parameters."""
    from inspect import Parameter, signature

    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature(function).parameters.values() if p.kind in kinds and p.default is p.empty]
