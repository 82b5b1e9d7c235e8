"""Captured Python numbers in a trace: what is computed from numbers alone is an expression, evaluated at each call.

A `Symbol` stands for a number. It is of the number's class for `isinstance`, and has its attributes. Arithmetic with
numbers gives another Symbol, arithmetic with a tensor turns it into an argument of the program. Whatever asks for the
value (a comparison, a hash, float(), str()) raises Refused, since the trace would hold the answer for one value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .program import COMPARISONS, FLOAT, INT, is_int32
from .rules import Refused


class Constant(NamedTuple):
    """A number in an expression. The text tells 2 from 2.0, and 0.0 from -0.0."""

    text: str
    value: int | float


# the path of a captured number, or (name of an operator, arguments)
Expression = str | Constant | tuple


class Symbols:
    """The Symbols of one trace, and the tensors without data that stand for them where they meet tensors."""

    def __init__(self, values: Mapping[str, int | float], known: Sequence[Expression] = ()) -> None:
        self.values = values
        self.expressions: list[Expression] = []
        self.tensors: list[Tensor] = []
        self.is_read = False
        for one in known:
            self.tensor(one, _value(one, values))

    def symbol(self, path: str) -> Symbol:
        return Symbol(self, path, self.values[path])

    def tensor(self, expression: Expression, value: int | float) -> Tensor:
        """The stand-in of an expression, which has this value now."""
        if expression not in self.expressions:
            dtype = torch.float32 if isinstance(value, float) else torch.int32
            self.tensors.append(torch.empty((), dtype=dtype, device="meta"))
            self.expressions.append(expression)
        return self.tensors[self.expressions.index(expression)]

    def refuse(self) -> Refused:
        """The error of a Symbol whose value is read. is_read tells of an error that the function caught."""
        self.is_read = True
        return Refused("reads the value of a captured number that changes", "")


def evaluated(
    expressions: Sequence[Expression], kinds: Sequence[str], values: Mapping[str, int | float]
) -> tuple[float, ...] | None:
    """The values of expressions, for numbers of these kinds in a program.

    None if the program does not hold for them, because of an integer of more than 32 bits, say. Captured numbers
    themselves are not checked.
    """
    found: list[float] = []
    for expression, kind in zip(expressions, kinds):
        if isinstance(expression, str):
            found.append(values[expression])
            continue
        try:
            value = _value(expression, values)
        except (ArithmeticError, TypeError, ValueError):
            return None
        if isinstance(value, float) is not (kind == FLOAT) or (kind == INT and not is_int32(value)):
            return None
        found.append(value)
    return tuple(found)


def _value(expression: Expression, values: Mapping[str, int | float]) -> Any:
    if isinstance(expression, str):
        return values[expression]
    if isinstance(expression, Constant):
        return expression.value
    name, *arguments = expression
    return _OPERATORS[name](*[_value(one, values) for one in arguments])


# the least value and the bits of integers that are narrower than positions
NARROW = {torch.uint8: (0, 255), torch.int8: (-128, 255), torch.int16: (-(2**15), 2**16 - 1)}


def as_tensors(argument: Any, dtype: torch.dtype | None = None) -> Any:
    """The argument of an operation with tensors in place of Symbols. dtype: of integers."""
    if type(argument) is Symbol:
        found = argument._tensor()
        return found if dtype is None or found.is_floating_point() else found.to(dtype)
    if type(argument) in (tuple, list):
        return type(argument)([as_tensors(one, dtype) for one in argument])
    return {name: as_tensors(one, dtype) for name, one in argument.items()} if type(argument) is dict else argument


def as_tensors_of(function: Callable, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a function of torch with tensors in place of Symbols. Like a Python number, an integer takes the
    dtype of narrower tensors, but for a comparison.
    """
    dtypes = {one.dtype for one in args if isinstance(one, Tensor)}
    is_compared = getattr(function, "__name__", "").strip("_") in COMPARISONS
    dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= NARROW.keys() and not is_compared else None
    return as_tensors(args, dtype), as_tensors(kwargs, dtype)


class Symbol:
    __slots__ = ("_expression", "_symbols", "_value")

    def __init__(self, symbols: Symbols, expression: Expression, value: int | float) -> None:
        self._symbols, self._expression, self._value = symbols, expression, value

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self._value)

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._value, name):
            raise self._symbols.refuse()
        raise AttributeError(f"'{type(self._value).__name__}' object has no attribute '{name}'")

    def _tensor(self) -> Tensor:
        return self._symbols.tensor(self._expression, self._value)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*as_tensors(args), **as_tensors(kwargs or {}))


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
_UNARY = ("neg", "pos", "abs", "invert")
_READS = (
    "bool", "int", "float", "complex", "index", "hash", "str", "repr", "format", "round", "trunc", "floor", "ceil",
    "divmod", "rdivmod",
)  # fmt: skip
_OPERATORS: dict[str, Callable[..., Any]] = {name: getattr(operator, f"__{name}__") for name in (*_BINARY, *_UNARY)}


def _applied(name: str, *arguments: Any) -> Any:
    """A Symbol, or a tensor if one argument is a tensor."""
    if any(isinstance(one, Tensor) for one in arguments):
        return _OPERATORS[name](*as_tensors_of(_OPERATORS[name], arguments, {})[0])
    symbols = next(one._symbols for one in arguments if type(one) is Symbol)
    values = [one._value if type(one) is Symbol else one for one in arguments]
    if not all(isinstance(one, (int, float)) for one in values):
        return NotImplemented
    expressions = [one._expression if type(one) is Symbol else Constant(repr(one), one) for one in arguments]
    return Symbol(symbols, (name, *expressions), _OPERATORS[name](*values))


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *others: _applied(name, self, *others)


def _reflected(name: str) -> Callable[..., Any]:
    return lambda self, other: _applied(name, other, self)


def _compared(name: str) -> Callable[..., Any]:
    def method(self: Symbol, other: Any) -> Any:
        if isinstance(other, Tensor):
            return getattr(operator, name)(self._tensor(), other)
        raise self._symbols.refuse()

    return method


def _read(self: Symbol, *_: Any) -> Any:
    raise self._symbols.refuse()


for _name in _UNARY:
    setattr(Symbol, f"__{_name}__", _forward(_name))
for _name in _BINARY:
    setattr(Symbol, f"__{_name}__", _forward(_name))
    setattr(Symbol, f"__r{_name}__", _reflected(_name))
for _name in COMPARISONS:
    setattr(Symbol, f"__{_name}__", _compared(_name))
for _name in _READS:
    setattr(Symbol, f"__{_name}__", _read)
