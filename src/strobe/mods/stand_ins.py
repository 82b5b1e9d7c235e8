"""A function over stand-ins: a copy that reads other tensors and numbers in place of those that it captures.

Copies are of the same kinds, so what Python does with them is what it does with the originals: an object's copy is an
instance of its class, or of a class derived from it if methods or attributes of the class are replaced. A layer's
copy runs its hooks.
"""

from __future__ import annotations

import functools
from abc import ABCMeta
from collections import deque
from collections.abc import Hashable, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .captures import (
    BOUND,
    CALL,
    HIDDEN,
    OVERRIDDEN,
    OWN,
    Names,
    definitions,
    has_named_parts,
    identity_of,
    is_filled,
    is_opaque,
    key_name,
    layers,
    names_in,
    parts_of,
    slots,
)
from .rules import Refused

Replacements = Mapping[Any, Any]  # by id of a tensor, or by path of a number
_GROUPS = ("_parameters", "_buffers", "_modules")  # where a layer holds attributes


def replaced(
    value: Any,
    replacements: Replacements,
    path: str = "",
    made: dict[Hashable, Any] | None = None,
    names: Names = (CALL,),
) -> Any:
    """The function with captured tensors and numbers replaced. Nothing of the original is written to.

    Raises Refused, or an error of Python, for an object that cannot be copied.
    """
    made = {} if made is None else made
    if isinstance(value, Tensor):
        return replacements.get(id(value), value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return replacements.get(path, value)
    if value is None or isinstance(value, (str, bytes)) or (is_opaque(value) and not has_named_parts(value)):
        return value
    identity = identity_of(value, names)
    if identity in made:
        return made[identity]
    if isinstance(value, FunctionType):
        return _replaced_function(value, replacements, path, made)
    made[identity] = value
    old = list(parts_of(value, names))
    new = {name: replaced(part, replacements, f"{path}.{name}", made, its) for name, part, its in old}
    changed = {name: new[name] for name, part, _ in old if new[name] is not part}
    if CALL in names and isinstance(value, torch.nn.Module):
        changed |= _refusal_of_layer(value)
    if changed:
        made[identity] = _rebuilt(value, new, changed)
    return made[identity]


def _rebuilt(value: Any, new: Mapping[str, Any], changed: Mapping[str, Any]) -> Any:
    """A copy of a value with these parts."""
    if isinstance(value, ModuleType):
        return _Module(value, changed)
    if isinstance(value, type):
        return _derived(value, changed)
    if isinstance(value, MethodType):
        return MethodType(new["function"], new["self"])
    if isinstance(value, BOUND):
        return getattr(new["self"], value.__name__)
    if isinstance(value, functools.partial):
        return functools.partial(new["function"], *new["arguments"], **new["keywords"])
    if isinstance(value, dict):
        return {key: new[key_name(key)] for key in value}
    if isinstance(value, torch.Size):  # holds integers alone
        return tuple(new.values())
    if isinstance(value, (tuple, list, deque)):
        return type(value)(new.values()) if not hasattr(value, "_fields") else type(value)(*new.values())  # type: ignore
    return _copied(value, changed)


def _replaced_function(
    function: FunctionType, replacements: Replacements, path: str, made: dict[Hashable, Any]
) -> FunctionType:
    code = function.__code__
    cells = [CellType() for _ in code.co_freevars]
    scope = dict(function.__globals__)
    copy = FunctionType(code, scope, function.__name__, None, tuple(cells))
    made[id(function)] = copy  # before its parts, so that a function may call itself
    old = list(parts_of(function, ()))
    new = {name: replaced(part, replacements, f"{path}.{name}", made, its) for name, part, its in old}
    for name, own, cell in zip(code.co_freevars, cells, function.__closure__ or ()):
        if is_filled(cell):
            own.cell_contents = new.get(name, cell.cell_contents)
    defaults = function.__defaults__
    copy.__defaults__ = defaults and tuple(new[f"default{n}"] for n in range(len(defaults)))
    copy.__kwdefaults__ = {name: new[name] for name in function.__kwdefaults__ or {}}
    copy.__dict__.update(function.__dict__)
    for name in names_in(code):
        if name in scope:
            scope[name] = new[name]
    for name in copy.__dict__:
        copy.__dict__[name] = new[f"{name}{OWN}"]
    if all(new[name] is part for name, part, _ in old):
        made[id(function)] = function
    return made[id(function)]


class _Module(ModuleType):
    """A Python module of which some attributes are replaced."""

    def __init__(self, real: ModuleType, changed: Mapping[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update({**vars(real), **changed})


def _copied(real: Any, changed: Mapping[str, Any]) -> Any:
    """A copy of an object, with some attributes and methods replaced."""
    kind, held = type(real), dict(getattr(real, "__dict__", {}))
    of_layer = {group: dict(held[group]) for group in _GROUPS if isinstance(real, torch.nn.Module)}
    own = {name for group in (held, *of_layer.values()) for name in group} | set(slots(kind))
    of_class = {name: one for name, one in changed.items() if name not in own}
    if of_class or hasattr(kind, "__del__"):  # a copy must not free what the original holds
        kind = _derived(kind, {name.removesuffix(HIDDEN): one for name, one in of_class.items()})
    copy = object.__new__(kind)
    for group in (held, *of_layer.values()):
        group.update({name: changed[name] for name in group if name in changed})
    if held:
        copy.__dict__.update({**held, **of_layer})
    for name in slots(kind):
        if hasattr(real, name):
            object.__setattr__(copy, name, changed.get(name, getattr(real, name)))
    return copy


def _derived(kind: type, changed: Mapping[str, Any]) -> type:
    """A class derived from a user's class, with some attributes replaced. A function replaces a method's."""
    if type(kind) not in (type, ABCMeta) or any("__init_subclass__" in vars(one) for one in layers(kind)):
        raise Refused(
            f"reads tensors or numbers in {kind.__qualname__}, a class that acts when a class is derived from it; "
            "read them from a closure",
            "",
        )
    found, _ = definitions(kind, tuple(changed))
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    if hasattr(kind, "__del__"):
        body["__del__"] = lambda self: None
    # an overridden attribute stays: super() looks it up in the original base
    body |= {name: _described(found.get(name), one, name) for name, one in changed.items() if OVERRIDDEN not in name}
    return _Derived(kind.__name__, (kind,), body)


class _Derived(ABCMeta):
    """The type of classes in place of users' classes: isinstance asks for the user's."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__mro__[1])


def _described(attribute: Any, new: Any, name: str) -> Any:
    """The replaced function as the kind of method that the attribute was."""
    if isinstance(attribute, (staticmethod, classmethod, property)):
        return type(attribute)(new)
    if isinstance(attribute, functools.cached_property):
        made = functools.cached_property(new)
        made.__set_name__(type(made), name)
        return made
    return new


def _refusal_of_layer(layer: torch.nn.Module) -> dict[str, Any]:
    """For a layer whose call does more than its code and the hooks of its forward: __call__, which raises Refused."""
    what = ""
    if layer._backward_hooks or layer._backward_pre_hooks:
        what = "hooks of its backward; remove them"
    if "parametrizations" in layer._modules:
        what = "parametrizations; make it a plain layer by torch.nn.utils.parametrize.remove_parametrizations"

    def refused(self: object, *_: object) -> None:
        raise Refused(f"calls {type(layer).__qualname__}, a layer with {what}", "")

    return {CALL: refused} if what else {}
