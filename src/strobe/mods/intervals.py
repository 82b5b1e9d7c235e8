"""Interval arithmetic on a Program: between which bounds a result lies for whole ranges of positions.

A mask that is always true over a tile's rows and keys makes the tile full, one that is always false makes it empty. No
element is evaluated. Captured tensors may hold any value of their type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .program import BOOL, FLOAT, INT, LONG, Node, Program


class Interval(NamedTuple):
    """The numbers from low to high, both included. NaN is in every interval of floating-point values."""

    low: float
    high: float

    @property
    def single(self) -> bool:
        return self.low == self.high


UNKNOWN = Interval(-math.inf, math.inf)
MAYBE, ALWAYS, NEVER = Interval(0, 1), Interval(1, 1), Interval(0, 0)


def bounds(program: Program, inputs: Mapping[str, Interval], numbers: Sequence[float] = ()) -> list[Interval]:
    """The intervals of a program's results for inputs that lie in these intervals.

    >>> from .program import build
    >>> causal = build(lambda p: [p.compare("ge", p.input("q"), p.input("k"))])
    >>> bounds(causal, {"q": Interval(128, 255), "k": Interval(0, 127)})
    [Interval(low=1, high=1)]
    """
    found = node_bounds(program, inputs, numbers)
    return [found[one] for one in program.outputs]


def node_bounds(
    program: Program, inputs: Mapping[str, Interval], numbers: Sequence[float] | None = None
) -> list[Interval]:
    """The intervals of all nodes. numbers=None: captured numbers may have any value."""
    found: list[Interval] = []
    for node in program.nodes:
        found.append(
            _rule(node, [found[arg] for arg in node.args], [program.nodes[a] for a in node.args], inputs, numbers)
        )
    return found


def _rule(
    node: Node,
    args: list[Interval],
    sources: list[Node],
    inputs: Mapping[str, Interval],
    numbers: Sequence[float] | None,
) -> Interval:
    if node.op == "input":
        return inputs.get(str(node.value), UNKNOWN)
    if node.op == "number" and numbers is None:
        return UNKNOWN
    if node.op in ("const", "number"):
        value = float(node.constant if node.op == "const" else (numbers or ())[node.index])
        is_exact = node.kind != LONG or abs(value) <= _RANGES[LONG]
        return Interval(value, value) if is_exact and not math.isnan(value) else UNKNOWN
    if node.op == "load":
        return MAYBE if node.kind == BOOL else UNKNOWN
    if node.op in _COMPARE:
        if sources[0].kind == FLOAT:  # UNKNOWN may be NaN, which compares unequal to everything
            args = [_widened(arg) for arg in args]
        return MAYBE if UNKNOWN in args and sources[0].kind == FLOAT else _COMPARE[node.op](*args)
    if node.op == "cast":
        return _cast(node.kind, args[0], sources[0].kind)
    if node.op in _STEPS and node.kind == FLOAT:
        if not all(math.isfinite(end) for arg in args for end in arg):
            return UNKNOWN
        args = [_widened(arg) for arg in args]
    rule = _BOOLEAN_RULES.get(node.op, _RULES.get(node.op)) if node.kind == BOOL else _RULES.get(node.op)
    found = UNKNOWN if rule is None or (node.kind == FLOAT and UNKNOWN in args) else rule(*args)
    if math.isnan(found.low) or math.isnan(found.high):
        found = UNKNOWN
    if node.kind == BOOL:
        return found if rule is not None else MAYBE
    return _if_in_range(node.kind, found) if node.op in _ARITHMETIC else found


_STEPS = ("floor", "ceil", "floordiv", "mod")  # a rounded argument may give another step
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "neg", "abs", "not")  # may leave the range of their type
_RANGES = {INT: 2**31 - 1, LONG: 2**53 - 1, FLOAT: 3e38}  # below 2^53 the ends of an interval, in float64, are exact


def _if_in_range(kind: str, a: Interval) -> Interval:
    """UNKNOWN if numbers of this kind may wrap around or become infinite."""
    return a if max(abs(a.low), abs(a.high)) <= _RANGES[kind] else UNKNOWN


def _cast(kind: str, a: Interval, source: str) -> Interval:
    if source != FLOAT:
        return _if_in_range(kind, a)
    low, high = _widened(a)  # NaN and infinite numbers become any integer
    return _if_in_range(kind, Interval(_floor(low), -_floor(-high)))


def _widened(a: Interval) -> Interval:
    """The interval with room for the rounding of float32."""
    return Interval(
        *(end + sign * (1e-6 + 1e-5 * abs(end)) if math.isfinite(end) else end for end, sign in zip(a, (-1, 1)))
    )


def _floor(number: float) -> float:
    return math.floor(number) if math.isfinite(number) else number


def _compare_less(a: Interval, b: Interval) -> Interval:
    return ALWAYS if a.high < b.low else NEVER if a.low >= b.high else MAYBE


def _compare_equal(a: Interval, b: Interval) -> Interval:
    if a.single and a == b:
        return ALWAYS
    return NEVER if a.high < b.low or b.high < a.low else MAYBE


def _inverse(a: Interval) -> Interval:
    return Interval(1 - a.high, 1 - a.low)


_COMPARE: dict[str, Callable[[Interval, Interval], Interval]] = {
    "lt": _compare_less,
    "gt": lambda a, b: _compare_less(b, a),
    "le": lambda a, b: _inverse(_compare_less(b, a)),
    "ge": lambda a, b: _inverse(_compare_less(a, b)),
    "eq": _compare_equal,
    "ne": lambda a, b: _inverse(_compare_equal(a, b)),
}


def _corners(operation: Callable[[float, float], float]) -> Callable[[Interval, Interval], Interval]:
    def rule(a: Interval, b: Interval) -> Interval:
        values = [operation(x, y) for x in a for y in b]
        return UNKNOWN if any(math.isnan(value) for value in values) else Interval(min(values), max(values))

    return rule


def _floor_divided(a: Interval, b: Interval) -> Interval:
    if b.low <= 0 <= b.high or not all(map(math.isfinite, (*a, *b))):
        return UNKNOWN
    return _corners(lambda x, y: x // y)(a, b)


def _remainder(a: Interval, b: Interval) -> Interval:
    """Python's x % y for positive y: the same where no multiple of y lies between the ends of a."""
    if not b.single or b.low <= 0 or not math.isfinite(b.low):
        return UNKNOWN if b.low <= 0 else Interval(0, b.high)
    if all(map(math.isfinite, a)) and a.low // b.low == a.high // b.low:
        return Interval(a.low % b.low, a.high % b.low)
    return Interval(0, b.low)


def _product(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def _monotone(function: Callable[[float], float]) -> Callable[[Interval], Interval]:
    def rule(a: Interval) -> Interval:
        return Interval(function(a.low), function(a.high)) if all(map(math.isfinite, a)) else UNKNOWN

    return rule


def _absolute(a: Interval) -> Interval:
    low = 0.0 if a.low <= 0 <= a.high else min(abs(a.low), abs(a.high))
    return Interval(low, max(abs(a.low), abs(a.high)))


def _shifted(a: Interval, b: Interval) -> Interval:
    if not b.single or not 0 <= b.low < 31 or not all(map(math.isfinite, a)):
        return UNKNOWN
    return Interval(int(a.low) >> int(b.low), int(a.high) >> int(b.low))


def _either(condition: Interval, a: Interval, b: Interval) -> Interval:
    if condition.single:
        return a if condition.low else b
    return Interval(min(a.low, b.low), max(a.high, b.high))


def _and(a: Interval, b: Interval) -> Interval:
    """Of bools exact. Of integers that are not negative, between 0 and the smaller."""
    if a.low < 0 or b.low < 0:
        return UNKNOWN
    return Interval(min(a.low, b.low) if max(a.high, b.high) <= 1 else 0, min(a.high, b.high))


def _or(a: Interval, b: Interval) -> Interval:
    is_bool = min(a.low, b.low) >= 0 and max(a.high, b.high) <= 1
    return Interval(max(a.low, b.low), max(a.high, b.high)) if is_bool else UNKNOWN


def _complement(a: Interval) -> Interval:
    """~a of integers: -1 - a."""
    return Interval(-1 - a.high, -1 - a.low)


def _exclusive(a: Interval, b: Interval) -> Interval:
    """a ^ b of integers."""
    if not (a.single and b.single and math.isfinite(a.low) and math.isfinite(b.low)):
        return UNKNOWN
    value = int(a.low) ^ int(b.low)
    return Interval(value, value)


def _differing(a: Interval, b: Interval) -> Interval:
    """a ^ b of bools."""
    return _inverse(_compare_equal(a, b)) if a.single and b.single else MAYBE


_RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: Interval(a.low + b.low, a.high + b.high),
    "sub": lambda a, b: Interval(a.low - b.high, a.high - b.low),
    "mul": _corners(_product),
    "floordiv": _floor_divided,
    "mod": _remainder,
    "min": lambda a, b: Interval(min(a.low, b.low), min(a.high, b.high)),
    "max": lambda a, b: Interval(max(a.low, b.low), max(a.high, b.high)),
    "neg": lambda a: Interval(-a.high, -a.low),
    "abs": _absolute,
    "floor": _monotone(math.floor),
    "ceil": _monotone(math.ceil),
    "shr": _shifted,
    "where": _either,
    "and": _and,
    "or": _or,
    "not": _complement,
    "xor": _exclusive,
}
_BOOLEAN_RULES: dict[str, Callable[..., Interval]] = {"not": _inverse, "xor": _differing}
