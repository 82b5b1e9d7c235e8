"""Evaluates a translated kernel: the operators, calls and name rules of Triton's frontend, on values instead of IR.

The rules follow triton/compiler/code_generator.py of Triton 3.6: constants are folded, tensors go to the real semantic
layer, jit functions are entered, and builtins are called with `_semantic`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, FunctionType
from typing import Any, NoReturn

import numpy as np
from triton import language as tl
from triton.compiler.code_generator import BoundJITMethod, CodeGenerator, _apply_to_tuple_values
from triton.compiler.errors import CompileTimeAssertionFailure, UnsupportedLanguageConstruct
from triton.experimental.gluon import language as gl
from triton.language.core import _unwrap_if_constexpr as unwrapped
from triton.language.core import base_value, constexpr
from triton.runtime.jit import BoundConstexprFunction, ConstexprFunction, JITFunction

from .carried import Branch, Branches
from .loops import Loop
from .machine import KERNEL_CODE
from .translate import RETURNS_CONSTANTS, signature, translated
from .untaken import Untaken
from .values import Diverged, Value, tensor, unsigned

_NOWHERE = ast.AST()  # position of an error without a line of its own
_CONDITIONS = (bool, int, type(None))
_PYTHON: dict[object, Callable[..., object]] = {
    int: int,
    len: len,
    tl.static_print: print,
    gl.static_print: print,
}  # functions run on plain Python values
_STATIC_ASSERTS, _MAPS = (tl.static_assert, gl.static_assert), (tl.map_elementwise, gl.map_elementwise)
_BUILTINS = frozenset(id(value) for value in CodeGenerator.builtin_namespace.values())


@functools.lru_cache(None)
def _takes(fn: Callable) -> tuple[bool, bool]:
    parameters = inspect.signature(fn).parameters
    return "_semantic" in parameters, "_generator" in parameters


@functools.lru_cache(None)
def _is_builtin(fn: object) -> bool:
    return tl.core.is_builtin(fn)


@functools.lru_cache(None)
def _plain_builtin(fn: object) -> bool:
    """Whether `fn` is a builtin of the language that needs no special handling. Most calls in a kernel are."""
    return _is_builtin(fn) and fn not in (*_STATIC_ASSERTS, *_MAPS, *_PYTHON) and not hasattr(fn, "__self__")


# Most operations of a kernel are on int32 scalars (pipeline stages, loop counters). They bypass the semantic layer.
_SCALAR: dict[str, Callable[[int, int], Any]] = dict(
    __add__=operator.add, __sub__=operator.sub, __mul__=operator.mul, __and__=operator.and_, __or__=operator.or_,
    __xor__=operator.xor)  # fmt: skip
_DIVIDING = dict(__mod__=operator.mod, __floordiv__=operator.floordiv)  # equal to C's for positive numbers
_COMPARING = dict(
    __lt__=operator.lt,
    __le__=operator.le,
    __gt__=operator.gt,
    __ge__=operator.ge,
    __eq__=operator.eq,
    __ne__=operator.ne,
)
_FOLDED = {**_SCALAR, **_DIVIDING, **_COMPARING}  # two constants give a constant, by Python's rules


def _int32(value: object) -> int | None:
    """The value of an int32 scalar or a small constant. None for others, such as a whole array passed as a scalar."""
    if isinstance(value, tl.tensor):
        return int(value.handle._data) if value.type is tl.int32 and not np.ndim(value.handle._data) else None
    number = value.value if isinstance(value, constexpr) else None
    return number if type(number) is int and -(2**31) <= number < 2**31 else None


def _scalar_binary(method: str, left: Any, right: Any) -> Any:
    """`left method right` on int32 scalars, or None if the semantic layer must evaluate it."""
    a, b = _int32(left), _int32(right)
    if a is None or b is None:
        return None
    if method in _COMPARING:
        return tensor(Value(np.bool_(_COMPARING[method](a, b)), "i1"), tl.int1)
    compute = _SCALAR.get(method) or (_DIVIDING.get(method) if a >= 0 and b > 0 else None)
    if compute is None or not -(2**31) <= (result := compute(a, b)) < 2**31:
        return None
    return tensor(Value(np.int32(result), "i32"), tl.int32)


def _kernel_frame() -> FrameType | None:
    """The innermost kernel function on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame.f_code) not in KERNEL_CODE:
        frame = frame.f_back
    return frame


def _is_tensor(value: object) -> bool:
    return isinstance(value, tl.tensor)


def _settled(value: tl.tuple) -> bool:
    """Whether a tuple contains no constant, so that storing or returning it needs no conversion."""
    return all(
        _settled(part) if type(part) is tl.tuple else isinstance(part, base_value) and type(part) is not constexpr
        for part in value.values
    )


class Interpreter:
    """The frontend as one partition sees it. The semantic layer knows it as the generator."""

    def __init__(self, semantic: Any, caller_context: object = None):
        self.semantic, self.builder, self.caller_context = semantic, semantic.builder, caller_context

    def inside(self, caller_context: object) -> Interpreter:
        """The same interpreter for a partition with another number of warps."""
        return self if caller_context is None else Interpreter(self.semantic, caller_context)

    # ---- names, constants, attributes

    def undefined(self, message: str) -> NoReturn:
        raise NameError(message)

    def refused(self, message: str) -> NoReturn:
        raise UnsupportedLanguageConstruct(None, _NOWHERE, message)

    def format(self, template: str, value: object) -> str:
        return template.format(unwrapped(value))

    def concatenated(self, *parts: str) -> str:
        return "".join(parts)

    def static(self, value: object) -> constexpr:
        return constexpr(value)

    def attribute(self, owner: object, name: str) -> Any:
        if name == "T" and _is_tensor(owner):
            return self.semantic.permute(owner, (1, 0))
        if isinstance(owner, constexpr) and name not in ("value", "type"):
            owner = owner.value
        found = getattr(owner, name)
        if isinstance(found, JITFunction) and isinstance(owner, base_value):
            return BoundJITMethod(owner, found)
        return found

    # ---- operators

    def binary(self, method: str, left: object, right: object) -> Any:
        if type(left) is constexpr and type(right) is constexpr and method in _FOLDED:
            return constexpr(_FOLDED[method](left.value, right.value))
        if isinstance(left, tl.tensor) or isinstance(right, tl.tensor):
            quick = _scalar_binary(method, left, right)
            if quick is not None:
                return quick
        if isinstance(left, tl.tensor):
            return getattr(left, method)(right, _semantic=self.semantic)
        if isinstance(right, tl.tensor):
            reverse = re.sub(r"__(.*)__", r"__r\1__", method)
            return getattr(right, reverse)(left, _semantic=self.semantic)
        if not isinstance(left, (constexpr, tl.tuple)) and isinstance(right, constexpr):
            left = constexpr(left)
        found = getattr(left, method) if isinstance(left, constexpr) else self.attribute(left, method)
        return self.call(found, [right], {})

    def unary(self, method: str, operand: object) -> Any:
        if isinstance(operand, tl.tensor):
            return getattr(operand, method)(_semantic=self.semantic)
        if not hasattr(operand, method) and method == "__not__":
            return constexpr(not operand)
        return getattr(operand, method)()

    def same(self, left: object, right: object, wanted: bool) -> constexpr:
        return constexpr((unwrapped(left) is unwrapped(right)) == wanted)

    def logical(self, method: str, *later: Callable[[], object]) -> Any:
        """`and` / `or`: constants short-circuit; tensors are combined element-wise."""
        tensors, value = [], None
        for operand in later:
            value = operand()
            if _is_tensor(value):
                tensors.append(value)
            elif bool(value) == (method == "logical_or"):
                return value
        while len(tensors) >= 2:
            right = tensors.pop()
            tensors.append(self.binary(method, tensors.pop(), right))
        return tensors[0] if tensors else value

    def tuple(self, *elements: object) -> tl.tuple:
        return tl.tuple(list(elements))

    def elements(self, value: object) -> Iterable:
        if not isinstance(value, tl.tuple):
            raise TypeError(f"expected a tuple, got {type(value).__name__}")
        return value.values

    def slice(self, low: object, high: object, step: object) -> object:
        return tl.slice(low, high, step)

    def subscript(self, owner: Any, index: object) -> Any:
        if type(owner) is tl.tuple and type(index) is constexpr:
            return owner.values[index.value]
        if isinstance(owner, base_value):
            method: Any = getattr(owner, "__getitem__")  # noqa: B009
            return self.call(method, [owner, index] if isinstance(method, JITFunction) else [index], {})
        return owner[index]

    # ---- conditions and loops

    def truth(self, condition: Any, branch: Branch | None = None, untaken: Untaken | None = None, *names: Any) -> bool:
        if _is_tensor(condition):
            if branch is not None:
                branch.runtime = True
            if condition.type.is_block() and condition.numel.value != 1:
                return self.refused("Boolean value of Tensor with more than one value is ambiguous")
            taken = self._decided(condition.handle.data)
            if untaken is not None:
                untaken.check(self.builder.machine, not taken, names)
            return taken
        condition = unwrapped(condition)
        if type(condition) not in _CONDITIONS:
            raise TypeError(
                f"`if` conditionals can only accept bool, int, None or a scalar tensor, not {type(condition).__name__}"
            )
        return bool(condition)

    @staticmethod
    def _decided(data: Any) -> bool:
        if np.size(data) == 1:
            return bool(np.all(data))
        if np.all(data) or not np.any(data):  # a scalar function mapped over arrays: all elements agree
            return bool(np.all(data))
        raise Diverged(np.asarray(data, bool))

    def choose(
        self,
        condition: object,
        then: Callable[[], object],
        otherwise: Callable[[], object],
        untaken: Untaken | None = None,
        *names: Any,
    ) -> Any:
        chosen = then() if self.truth(condition, None, untaken, *names) else otherwise()
        if not _is_tensor(condition):
            return chosen
        chosen = self.semantic.to_tensor(chosen)
        value = chosen.handle  # the frontend makes a new value, the result of its `if`
        return tensor(Value(value._data, value.elem, value.layout, value.pending), chosen.type)

    def while_condition(self, condition: object, untaken: Untaken | None = None, *names: Any) -> bool:
        condition = condition.condition if isinstance(condition, tl.condition) else condition
        if not _is_tensor(condition):
            return self.refused("`while` needs a scalar tensor as its condition, not a constant")
        goes_on = self.truth(condition)
        if untaken is not None and not goes_on:
            untaken.check(self.builder.machine, True, names)
        return goes_on

    def loop(
        self,
        branches: Branches,
        kind: Any,
        arguments: list[Any],
        keywords: dict[str, Any],
        untaken: Untaken | None = None,
        *names: Any,
    ) -> Iterator[Any]:
        kind = unwrapped(kind)
        if kind is tl.static_range:
            bounds = kind(*arguments, **keywords)
            yield from map(constexpr, range(bounds.start.value, bounds.end.value, bounds.step.value))
            return
        if kind is tl.range:
            bounds = kind(*arguments, **keywords)
            low, high, step = bounds.start, bounds.end, bounds.step
        elif kind is range:
            low, high, step = (*(arguments if len(arguments) > 1 else [constexpr(0), *arguments]), constexpr(1))[:3]
        else:
            raise TypeError("only range, tl.range and static_range can be iterated over")
        bounds = self._bounds(self.semantic.to_tensor(low), self.semantic.to_tensor(high), step)
        if bounds is None:
            return
        if untaken is not None and not bounds[1]:
            untaken.check(self.builder.machine, True, names)
        yield from self._counted(branches, *bounds)

    def _bounds(self, low: Any, high: Any, step: Any) -> tuple[Any, range] | None:
        """The type of a runtime loop's induction variable, the common type of its bounds, and its numbers."""
        static, step = not _is_tensor(step), self.semantic.to_tensor(step)
        if any(bound.type.is_block() or not bound.dtype.is_int() for bound in (low, high, step)):
            raise TypeError(
                f"For loop bounds and step must all be int scalars, are ({low.type}, {high.type}, {step.type})"
            )
        promote = self.semantic.integer_promote_impl
        kind = promote(promote(low.dtype, high.dtype), step.dtype)
        wrapped = unsigned if kind.is_int_unsigned() else lambda data: data
        bounds = [int(wrapped(self.semantic.cast(bound, kind).handle.data)) for bound in (low, high, step)]
        if bounds[2] == 0 or (bounds[2] < 0 and not static):
            self.builder.report(
                "assert", f"a loop's step is {bounds[2]}; a step that is not a constant must be positive"
            )
            return None
        return kind, range(*bounds)

    def _counted(self, branches: Branches, kind: Any, numbers: range) -> Iterator[tl.tensor]:
        elem = kind.to_ir(self.builder).elem
        loop = Loop(self.builder.machine, _kernel_frame(), branches, len(numbers))
        try:
            for index in numbers:
                yield tensor(self.builder.integer(index, elem), kind)
                loop.end_iteration()
        finally:  # a `break` too
            loop.end()

    def while_iterations(self, branches: Branches) -> Iterator[None]:
        """The iterations of a `while` loop, which evaluates its own condition."""
        loop = Loop(self.builder.machine, _kernel_frame(), branches)
        try:
            while True:
                yield
                loop.end_iteration()
        finally:
            loop.end()

    @contextlib.contextmanager
    def context(
        self, kind: Callable[..., AbstractContextManager], arguments: list[object], keywords: dict[str, object]
    ) -> Iterator[object]:
        manager = kind(*arguments, _semantic=self.semantic, **keywords)
        with manager as entered:
            yield entered

    # ---- assignment and return

    def assign(self, name: str | None, value: object) -> object:
        if isinstance(value, tl.tensor):
            return value
        stored = self._stored(value)
        self.builder.name_memory(name, stored)
        return stored

    def _stored(self, value: object) -> object:
        if isinstance(value, tl.tuple):
            return value if _settled(value) else _apply_to_tuple_values(value, self._stored)
        value = unwrapped(value)
        if value is None or isinstance(value, (base_value, tl.dtype, tl.tuple)):
            return value
        return self.semantic.to_tensor(value)

    def returned(self, value: object) -> object:
        if isinstance(value, tl.tuple):
            return value if _settled(value) else _apply_to_tuple_values(value, self.returned)
        if RETURNS_CONSTANTS and unwrapped(value) is None:
            return value
        if isinstance(value, (constexpr, int, float)):
            return self.semantic.to_tensor(value)
        return value

    def device_assert(self, condition: object, message: str) -> None:
        tl.device_assert(condition, message, _semantic=self.semantic)

    # ---- calls

    def call(self, fn: Any, arguments: list[object], keywords: dict[str, object]) -> Any:
        fn = fn.value if isinstance(fn, constexpr) else fn
        if (lines := self.builder.machine.lines) is not None:
            frame = sys._getframe(1)
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        if type(fn) is FunctionType and _plain_builtin(fn):
            return self._call_builtin(fn, arguments, keywords)
        if isinstance(fn, (BoundJITMethod, BoundConstexprFunction)):
            arguments, fn = [fn.__self__, *arguments], fn.__func__
        if isinstance(fn, JITFunction):
            return self.call_JitFunction(fn, arguments, keywords)
        if fn in _STATIC_ASSERTS:
            return self._static_assert(*arguments)
        if fn in _MAPS:
            return self.semantic.map_function(self, *arguments, **keywords)
        owner = getattr(fn, "__self__", None)
        if _hashable(fn) and fn in _PYTHON:
            plain = {name: unwrapped(value) for name, value in keywords.items()}
            return constexpr(_PYTHON[fn](*map(unwrapped, arguments), **plain))
        if isinstance(fn, ConstexprFunction) or isinstance(owner, base_value) or (_hashable(fn) and _is_builtin(fn)):
            return self._call_builtin(fn, arguments, keywords)
        if id(fn) in _BUILTINS or owner is not None:
            arguments = [unwrapped(argument) for argument in arguments]
        result = fn(*arguments, **keywords)
        if isinstance(result, (tuple, tl.tuple)):
            return (
                _apply_to_tuple_values(result, self._constant)
                if hasattr(result, "_fields") or isinstance(result, tl.tuple)
                else result
            )
        return self._constant(result)

    @staticmethod
    def _constant(value: object) -> object:
        return value if isinstance(value, base_value) else constexpr(value)

    def _call_builtin(self, fn: Any, arguments: list[object], keywords: dict[str, object]) -> object:
        plain = fn.__call__ if isinstance(fn, ConstexprFunction) else fn
        semantic, generator = _takes(getattr(plain, "__func__", plain))
        if semantic:
            keywords = {**keywords, "_semantic": self.semantic}
        if generator:
            keywords = {**keywords, "_generator": self}
        result = fn(*arguments, **keywords)
        return tl.tuple(result) if isinstance(result, tuple) else result

    @staticmethod
    def _static_assert(condition: object, message: object = "") -> None:
        passed = unwrapped(condition)
        if not isinstance(passed, bool):
            raise NotImplementedError("static_assert: the condition is not a constant")
        if not passed:
            raise CompileTimeAssertionFailure(None, _NOWHERE, str(unwrapped(message)))

    def call_JitFunction(
        self, fn: JITFunction, args: Iterable[object], kwargs: dict[str, object], caller_context: object = None
    ) -> Any:
        """Enter a device function. The semantic layer calls its generator by this name."""
        self.builder.machine.entered[id(fn)] = fn
        values = bind(fn, list(args), kwargs)
        return translated(fn)(self.inside(caller_context), *values)


def bind(fn: JITFunction, arguments: list[object], keywords: dict[str, object]) -> list[base_value]:
    """The arguments of a device function in parameter order; constants become constexpr."""
    parameters = signature(fn).parameters
    if len(arguments) == len(parameters) and not keywords:
        values = arguments
    else:
        bound = signature(fn).bind(*arguments, **keywords)
        bound.apply_defaults()
        values = [bound.arguments[name] for name in parameters]
    return [value if isinstance(value, base_value) else _wrapped(value) for value in values]


def _wrapped(value: object) -> tl.tuple | constexpr:
    if isinstance(value, tuple):
        return tl.tuple([_wrapped(item) if not isinstance(item, base_value) else item for item in value])
    return constexpr(value)


def _hashable(fn: object) -> bool:
    return getattr(type(fn), "__hash__", None) is not None and callable(fn)
