"""Finds uses of None in code that this run does not reach, but that Triton compiles.

Triton compiles both sides of a branch on a runtime value, and the body of a loop that may run no iteration. A pointer
that is None there (`if is_scaled: tl.load(scale)`) fails to compile, whatever the value. The simulator runs one side.

The check reports only uses that certainly fail: those of parameters and their fields. It skips branches nested in that
code, because their conditions may be constants.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from triton.language.core import constexpr

from .machine import Machine
from .report import place_text

_POINTED = ("load", "store", "atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min", "atomic_or",
            "atomic_xchg", "atomic_xor")  # fmt: skip
_BRANCHES = (ast.If, ast.IfExp, ast.BoolOp)


class Use(NamedTuple):
    """An expression that does not compile if a parameter, or the field of one that `path` names, is None."""

    parameter: str
    path: tuple[str, ...]
    line: int
    text: str


def uses(code: Iterable[ast.AST], parameters: frozenset[str]) -> list[Use]:
    """The uses in statements or expressions. `parameters` are those that the function never assigns.

    >>> code = ast.parse("x = tl.load(scale + 1) + tl.load(at.k)").body
    >>> [(use.parameter, use.path) for use in uses(code, frozenset({"scale", "at"}))]
    [('at', ('k',)), ('scale', ()), ('at', ())]
    """
    found: list[Use] = []
    waiting = list(code)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, _BRANCHES):
            continue
        for part in _needed(node):
            if (chain := _chain(part)) and chain[0] in parameters:
                found.append(Use(chain[0], tuple(chain[1:]), getattr(part, "lineno", 0), ast.unparse(node)))
        waiting += ast.iter_child_nodes(node)
    return found


def _needed(node: ast.AST) -> list[ast.expr]:
    """The parts of an expression that may not be None."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        return [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _POINTED:
        return node.args[:1]
    return []


def _chain(node: ast.AST) -> list[str]:
    """The names of `a.b.c`; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        return [*owner, node.attr] if (owner := _chain(node.value)) else []
    return [node.id] if isinstance(node, ast.Name) else []


class Untaken:
    """The uses in the two sides of a branch. Of a loop, the first side is the body, and the second empty."""

    def __init__(self, then: list[Use], otherwise: list[Use]):
        self._sides = {True: then, False: otherwise}
        self.names = sorted({use.parameter for use in [*then, *otherwise]})

    def __bool__(self) -> bool:
        return bool(self.names)

    def check(self, machine: Machine, side: bool, values: Sequence[Any]) -> None:
        """Report a None that the side uses, which is not run. `values` are those of `names`."""
        key = (id(self), side, *map(id, values))
        if key in machine.looked_at:
            return
        machine.looked_at.add(key)
        given = dict(zip(self.names, values, strict=True))
        for use in self._sides[side]:
            if name := _none(given[use.parameter], use):
                code, _ = (place := machine.place())[0]
                place = ((code, use.line), *place[1:])
                machine.report(
                    "compiler",
                    f"{name} is None in `{use.text}`, which this run does not reach, but which Triton compiles, "
                    f"because the condition is a runtime value: ask `{name} is not None` too, in a condition of its "
                    f"own, or make the condition a constexpr; at {place_text(place)}",
                    place,
                    (name, place),
                )


def _none(value: Any, use: Use) -> str:
    """The name of what is None on the way to the use's expression, or ""."""
    name = use.parameter
    for field in (*use.path, None):
        value = value.value if isinstance(value, constexpr) else value
        if value is None:
            return name
        if field is None or not hasattr(value, field):
            return ""
        value, name = getattr(value, field), f"{name}.{field}"
    return ""
