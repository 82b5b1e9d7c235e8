"""How aten operations are written as nodes of a Program: one rule for each operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .program import BOOL, COMPARISONS, FLOAT, Builder


class Refused(Exception):
    """The function does something that has no translation: (what, the name of the operation)."""

    def __init__(self, what: str, operation: str) -> None:
        super().__init__(what)
        self.operation = operation


class Number(NamedTuple):
    """A Python number among the arguments of an operation. An int alone is a node."""

    value: int | float | bool


MOST_MULTIPLIED = 64  # the largest exponent of a power that is written as products
SAME = ("detach", "clone", "alias", "lift_fresh_copy", "lift_fresh", "contiguous")

# ---------------------------------------------------------------- rules: (builder, kind, arguments, keywords) -> node

Rule = Callable[[Builder, str, list, Mapping[str, Any]], int]


def _as_node(p: Builder, argument: Any) -> int:
    return p.const(argument.value) if isinstance(argument, Number) else argument


def _unary(op: str) -> Rule:
    return lambda p, kind, a, _: p.unary(op, p.cast(_as_node(p, a[0]), kind))


def _binary(op: str) -> Rule:
    return lambda p, kind, a, _: p.binary(op, _as_node(p, a[0]), _as_node(p, a[1]), kind)


def _compare(op: str) -> Rule:
    return lambda p, kind, a, _: p.compare(op, _as_node(p, a[0]), _as_node(p, a[1]))


def _added(sign: str, swapped: bool = False) -> Rule:
    def rule(p: Builder, kind: str, a: list, given: Mapping[str, Any]) -> int:
        x, y = (_as_node(p, one) for one in (reversed(a[:2]) if swapped else a[:2]))
        alpha = given.get("alpha", a[2] if len(a) > 2 else Number(1))
        scaled = y if alpha == Number(1) else p.binary("mul", y, _as_node(p, alpha), kind)
        if swapped and alpha != Number(1):
            scaled, x = y, p.binary("mul", x, _as_node(p, alpha), kind)
        return p.binary(sign, x, scaled, kind)

    return rule


def _divided(p: Builder, kind: str, a: list, given: Mapping[str, Any]) -> int:
    x, y = _as_node(p, a[0]), _as_node(p, a[1])
    mode = given.get("rounding_mode")
    if mode is None:
        return p.binary("div", x, y, FLOAT)
    if mode == "floor":
        return p.binary("floordiv", x, y, kind)
    if kind == FLOAT:
        return p.unary("trunc", p.div(x, y))
    # truncation of integers: (x - fmod(x, y)) / y is exact
    return p.binary("floordiv", p.binary("sub", x, p.binary("fmod", x, y, kind), kind), y, kind)


def _where(p: Builder, kind: str, a: list, _: Mapping[str, Any]) -> int:
    condition, x, y = (_as_node(p, one) for one in a[:3])
    return p.where(condition, x, y, kind)


def _masked_fill(p: Builder, kind: str, a: list, _: Mapping[str, Any]) -> int:
    x, condition, value = (_as_node(p, one) for one in a[:3])
    return p.where(condition, value, x, kind)


def _clamped(low: int | None, high: int | None) -> Rule:
    """low, high: where the bounds stand among the arguments."""

    def rule(p: Builder, kind: str, a: list, given: Mapping[str, Any]) -> int:
        x = p.cast(_as_node(p, a[0]), kind)
        for at, name, op in ((low, "min", "max"), (high, "max", "min")):
            bound = given.get(name) if at is None or at >= len(a) else a[at]
            if bound is not None:
                x = p.binary(op, x, _as_node(p, bound), kind)
        return x

    return rule


def _power(p: Builder, kind: str, a: list, _: Mapping[str, Any]) -> int:
    x, y = _as_node(p, a[0]), _as_node(p, a[1])
    exponent = p.value(y)
    least = -MOST_MULTIPLIED if kind == FLOAT else 0
    if exponent is not None and least <= exponent <= MOST_MULTIPLIED and exponent == int(exponent):
        power = _multiplied(p, p.cast(x, kind), abs(int(exponent)), kind)
        return power if exponent >= 0 else p.div(p.const(1.0), power)
    if kind != FLOAT:
        raise Refused(f"raises integers to a power that is not a constant from 0 to {MOST_MULTIPLIED}", "pow")
    if exponent in (0.5, -0.5):
        return p.unary("sqrt" if exponent == 0.5 else "rsqrt", p.cast(x, FLOAT))
    return p.binary("pow", x, y, FLOAT)


def _multiplied(p: Builder, x: int, exponent: int, kind: str) -> int:
    """x to the power of an integer >= 0, by squares."""
    power = p.const(1, kind)
    while exponent:
        power = p.binary("mul", power, x, kind) if exponent & 1 else power
        x, exponent = p.binary("mul", x, x, kind), exponent >> 1
    return power


def _rounded(op: str) -> Rule:
    def rule(p: Builder, kind: str, a: list, given: Mapping[str, Any]) -> int:
        if given.get("decimals", a[1] if len(a) > 1 else Number(0)) != Number(0):
            raise Refused("rounds to a number of decimals", op)
        x = p.cast(_as_node(p, a[0]), kind)
        return p.unary(op, x) if kind == FLOAT else x

    return rule


def _sign(p: Builder, kind: str, a: list, _: Mapping[str, Any]) -> int:
    x, zero = p.cast(_as_node(p, a[0]), kind), p.const(0, kind)
    negative = p.where(p.compare("lt", x, zero), p.const(-1, kind), p.binary("mul", x, zero, kind), kind)
    return p.where(p.compare("gt", x, zero), p.const(1, kind), negative, kind)


def _constant(value: Callable[[list, Mapping[str, Any]], Any]) -> Rule:
    def rule(p: Builder, kind: str, a: list, given: Mapping[str, Any]) -> int:
        found = value(a, given)
        return p.cast(_as_node(p, found), kind)

    return rule


def _floating(write: Callable[..., int], count: int) -> Rule:
    """A function of `count` scores, written with a Builder, and of the Python numbers that follow."""

    def rule(p: Builder, kind: str, a: list, given: Mapping[str, Any]) -> int:
        nodes = [p.cast(_as_node(p, one), FLOAT) for one in a[:count]]
        rest = [one.value if isinstance(one, Number) else one for one in a[count:]]
        return write(p, *nodes, *rest, **{k: v.value if isinstance(v, Number) else v for k, v in given.items()})

    return rule


def _gelu(p: Builder, x: int, approximate: str = "none") -> int:
    return p.mul(p.mul(p.const(0.5), x), p.add(p.const(1.0), _gelu_bell(p, x, approximate)))


def _gelu_bell(p: Builder, x: int, approximate: str) -> int:
    if approximate == "tanh":
        cube = p.mul(p.mul(x, x), x)
        return p.call("tanh", p.mul(p.const(_ROOT_2_PI), p.add(x, p.mul(p.const(0.044715), cube))))
    return p.call("erf", p.mul(x, p.const(2**-0.5)))


def _gelu_backward(p: Builder, grad: int, x: int, approximate: str = "none") -> int:
    bell = _gelu_bell(p, x, approximate)
    half = p.mul(p.const(0.5), p.add(p.const(1.0), bell))
    if approximate == "tanh":
        inner = p.mul(p.const(_ROOT_2_PI), p.add(p.const(1.0), p.mul(p.const(3 * 0.044715), p.mul(x, x))))
        slope = p.mul(p.sub(p.const(1.0), p.mul(bell, bell)), inner)
        return p.mul(grad, p.add(half, p.mul(p.mul(p.const(0.5), x), slope)))
    density = p.mul(p.const(_ROOT_2_PI / 2), p.call("exp", p.mul(p.const(-0.5), p.mul(x, x))))
    return p.mul(grad, p.add(half, p.mul(x, density)))


_ROOT_2_PI = 0.7978845608028654  # sqrt(2 / pi)


def _silu_backward(p: Builder, grad: int, x: int) -> int:
    s = p.call("sigmoid", x)
    return p.mul(grad, p.mul(s, p.add(p.const(1.0), p.mul(x, p.sub(p.const(1.0), s)))))


def _softplus(p: Builder, x: int, beta: float = 1.0, threshold: float = 20.0) -> int:
    scaled = p.mul(x, p.const(float(beta)))
    soft = p.div(p.call("log1p", p.call("exp", scaled)), p.const(float(beta)))
    return p.where(p.compare("gt", scaled, p.const(float(threshold))), x, soft, FLOAT)


def _softplus_backward(p: Builder, grad: int, x: int, beta: float, threshold: float) -> int:
    scaled = p.mul(x, p.const(float(beta)))
    soft = p.mul(grad, p.call("sigmoid", scaled))
    return p.where(p.compare("gt", scaled, p.const(float(threshold))), grad, soft, FLOAT)


def _log_sigmoid(p: Builder, x: int) -> int:
    soft = p.call("log1p", p.call("exp", p.unary("neg", p.call("abs", x))))
    return p.sub(p.binary("min", x, p.const(0.0), FLOAT), soft)


def _threshold_backward(p: Builder, grad: int, x: int, threshold: float) -> int:
    return p.where(p.compare("gt", x, p.const(float(threshold))), grad, p.const(0.0), FLOAT)


RULES: dict[str, Rule] = {
    **{
        name: _unary(name)
        for name in (
            "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh",
            "sigmoid", "erf",
        )
    },
    **{name: _rounded(name) for name in ("floor", "ceil", "trunc", "round")},
    **{name: _compare(name) for name in COMPARISONS},
    **{
        name: _binary(op)
        for name, op in {
            "mul": "mul", "floor_divide": "floordiv", "remainder": "mod", "fmod": "fmod", "minimum": "min",
            "maximum": "max", "bitwise_and": "and", "bitwise_or": "or",
            "bitwise_xor": "xor", "__and__": "and", "__or__": "or", "__xor__": "xor", "bitwise_left_shift": "shl",
            "bitwise_right_shift": "shr", "__lshift__": "shl", "__rshift__": "shr", "logical_and": "and",
            "logical_or": "or", "logical_xor": "xor",
        }.items()
    },
    "add": _added("add"),
    "sub": _added("sub"),
    "rsub": _added("sub", swapped=True),
    "div": _divided,
    "true_divide": _divided,
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamped(1, 2),
    "clamp_min": _clamped(1, None),
    "clamp_max": _clamped(None, 1),
    "pow": _power,
    "sign": _sign,
    "sgn": _sign,
    "logical_not": lambda p, kind, a, _: p.unary("not", p.cast(_as_node(p, a[0]), BOOL)),
    "bitwise_not": _unary("not"),
    "isnan": lambda p, kind, a, _: p.compare("ne", _as_node(p, a[0]), _as_node(p, a[0])),
    "tan": _floating(lambda p, x: p.div(p.call("sin", x), p.call("cos", x)), 1),
    "reciprocal": _floating(lambda p, x: p.div(p.const(1.0), x), 1),
    "relu": lambda p, kind, a, _: p.binary("max", _as_node(p, a[0]), p.const(0, kind), kind),
    "gelu": _floating(_gelu, 1),
    "silu": _floating(lambda p, x: p.mul(x, p.call("sigmoid", x)), 1),
    "softplus": _floating(_softplus, 1),
    "tanh_backward": _floating(lambda p, g, y: p.mul(g, p.sub(p.const(1.0), p.mul(y, y))), 2),
    "sigmoid_backward": _floating(lambda p, g, y: p.mul(g, p.mul(y, p.sub(p.const(1.0), y))), 2),
    "gelu_backward": _floating(_gelu_backward, 2),
    "silu_backward": _floating(_silu_backward, 2),
    "softplus_backward": _floating(_softplus_backward, 2),
    "threshold_backward": _floating(_threshold_backward, 2),
    **{
        name: lambda p, kind, a, _: p.cast(_as_node(p, a[0]), kind)
        for name in (*SAME, "_to_copy")
    },
    **{name: _constant(lambda a, given: Number(0)) for name in ("zeros_like", "new_zeros", "zeros")},
    **{name: _constant(lambda a, given: Number(1)) for name in ("ones_like", "new_ones", "ones")},
    **{name: _constant(lambda a, given: a[1]) for name in ("full", "full_like")},
    "new_full": _constant(lambda a, given: a[2]),
    "scalar_tensor": _constant(lambda a, given: a[0]),
    "fill": _constant(lambda a, given: a[1]),
}  # fmt: skip
