"""`Program`: an expression over a score, positions and captured tensors, as a value.

A traced function becomes a Program. Its text is canonical, so equal functions have equal texts. The text travels
through ops as a string, belongs to the Problem, and identifies a compiled kernel.

    tensors f1             captured tensors: kind and number of dimensions
    numbers f              captured Python numbers that change between calls
    f input score
    i input h
    f load 0 1             tensor 0 at index node 1
    f add 0 2
    out 3

Kinds: f is the dtype of scores (float32, or float64 for float64 inputs), i is int32, l is int64, b is bool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

FLOAT, INT, LONG, BOOL = "f", "i", "l", "b"
RANK = {BOOL: 0, INT: 1, LONG: 2, FLOAT: 3}  # of type promotion
INPUTS = {"score": FLOAT, "grad": FLOAT, "b": INT, "h": INT, "q": INT, "k": INT, "diagonal": INT}
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")

Value = int | float | bool


class Node(NamedTuple):
    """One operation. args: earlier nodes. value: a constant, the name of an input or a `triton.jit` function, or the
    number of a tensor or number.
    """

    kind: str
    op: str
    args: tuple[int, ...] = ()
    value: Value | str | None = None

    @property
    def constant(self) -> Value:
        """The value of a "const"."""
        return cast(Value, self.value)

    @property
    def index(self) -> int:
        """The index of a "number" among the program's numbers, and of a "load" or "pointer" among its tensors."""
        return int(self.value or 0)


class Captured(NamedTuple):
    kind: str
    ndim: int

    def __str__(self) -> str:
        return f"{self.kind}{self.ndim}"


class Scatter(NamedTuple):
    """A gradient's addition of values to a captured tensor's gradient, at indices."""

    tensor: int
    ndim: int

    def __str__(self) -> str:
        return f"{self.tensor}:{self.ndim}"


class Program(NamedTuple):
    """Nodes in an order in which arguments come first, and the nodes that are its results.

    >>> program = build(lambda p: [p.add(p.input("score"), p.mul(p.number(FLOAT, 0), p.cast(p.input("q"), FLOAT)))])
    >>> print(program.text)
    numbers f
    f input score
    f number 0
    i input q
    f cast 2
    f mul 1 3
    f add 0 4
    out 5
    >>> Program.parse(program.text) == program
    True
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    tensors: tuple[Captured, ...] = ()
    numbers: tuple[str, ...] = ()
    scatters: tuple[Scatter, ...] = ()  # of a gradient; its results are dscore, then (value, *indices) of each scatter

    @property
    def text(self) -> str:
        """The program as text, which `parse` reads. A repeated call looks the text up by id: hashing a program takes
        10 us.
        """
        if torch.compiler.is_compiling():
            return _text(self)
        known = _TEXTS.get(id(self))
        if known is None or known[0] is not self:
            if len(_TEXTS) >= MOST_TEXTS:
                _TEXTS.clear()
            known = _TEXTS[id(self)] = self, _text(self)
        return known[1]

    @staticmethod
    def parse(text: str) -> Program:
        return _parse(text)

    def reads(self, name: str) -> bool:
        """Whether it reads this input, for example "score" or "diagonal"."""
        return any(node.op == "input" and node.value == name for node in self.nodes)


class BoundScore(NamedTuple):
    """The programs of a score and of its gradient, and the tensors and numbers of one call. Empty text: no program."""

    text: str
    gradient: str
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]


def kind_of(dtype: torch.dtype) -> str:
    """The kind of a tensor's elements.

    >>> kind_of(torch.bfloat16), kind_of(torch.int8), kind_of(torch.int64)
    ('f', 'i', 'l')
    """
    if dtype.is_floating_point:
        return FLOAT
    return BOOL if dtype == torch.bool else LONG if dtype == torch.int64 else INT


# ---------------------------------------------------------------- text

MOST_TEXTS = 1024
_TEXTS: dict[int, tuple[Program, str]] = {}  # by id of a program, which the entry keeps alive


@lru_cache(maxsize=1024)
def _text(program: Program) -> str:
    lines = []
    if program.tensors:
        lines.append("tensors " + " ".join(map(str, program.tensors)))
    if program.numbers:
        lines.append("numbers " + " ".join(program.numbers))
    if program.scatters:
        lines.append("scatters " + " ".join(map(str, program.scatters)))
    for node in program.nodes:
        value = () if node.value is None else (repr(node.value) if node.op == "const" else str(node.value),)
        lines.append(" ".join((node.kind, node.op, *value, *map(str, node.args))))
    return "\n".join((*lines, "out " + " ".join(map(str, program.outputs))))


@lru_cache(maxsize=1024)
def _parse(text: str) -> Program:
    tensors: tuple[Captured, ...] = ()
    numbers: tuple[str, ...] = ()
    scatters: tuple[Scatter, ...] = ()
    nodes: list[Node] = []
    outputs: tuple[int, ...] = ()
    for line in text.split("\n"):
        head, *rest = line.split(" ")
        if head == "tensors":
            tensors = tuple(Captured(one[0], int(one[1:])) for one in rest)
        elif head == "numbers":
            numbers = tuple(rest)
        elif head == "scatters":
            scatters = tuple(Scatter(*map(int, one.split(":"))) for one in rest)
        elif head == "out":
            outputs = tuple(map(int, rest))
        else:
            nodes.append(_parse_node(head, rest[0], rest[1:]))
    return Program(tuple(nodes), outputs, tensors, numbers, scatters)


def _parse_node(kind: str, op: str, rest: Sequence[str]) -> Node:
    if op == "const":
        text = rest[0]
        value: Value = text == "True" if kind == BOOL else float(text) if kind == FLOAT else int(text)
        return Node(kind, op, (), value)
    if op == "input":
        return Node(kind, op, (), rest[0])
    if op in ("load", "pointer", "number"):
        return Node(kind, op, tuple(map(int, rest[1:])), int(rest[0]))
    if op == "triton":  # triton_functions
        return Node(kind, op, tuple(map(int, rest[1:])), rest[0])
    return Node(kind, op, tuple(map(int, rest)))


# ---------------------------------------------------------------- building


class Builder:
    """Builds a Program. Each method returns a node's number. Equal nodes are one node, and constants are folded."""

    def __init__(self, tensors: Sequence[Captured] = (), numbers: Sequence[str] = ()) -> None:
        self.nodes: list[Node] = []
        self.tensors = list(tensors)
        self.numbers = list(numbers)
        self._known: dict[Node | tuple[Node, str], int] = {}

    def node(self, kind: str, op: str, args: tuple[int, ...] = (), value: Value | str | None = None) -> int:
        one = Node(kind, op, args, value)
        # 0.0 == -0.0 and 1 == True are equal, but not one constant
        known = (one, repr(value)) if op == "const" else one
        if known not in self._known:
            self._known[known] = len(self.nodes)
            self.nodes.append(one)
        return self._known[known]

    def kind(self, at: int) -> str:
        return self.nodes[at].kind

    def value(self, at: int) -> Value | None:
        """The value of a constant, else None."""
        node = self.nodes[at]
        return node.constant if node.op == "const" else None

    def input(self, name: str) -> int:
        return self.node(INPUTS[name], "input", (), name)

    def const(self, value: Value, kind: str | None = None) -> int:
        if kind is None:
            kind = BOOL if isinstance(value, bool) else FLOAT if isinstance(value, float) else INT
        value = bool(value) if kind == BOOL else float(value) if kind == FLOAT else int(value)
        return self.node(kind, "const", (), value)

    def number(self, kind: str, index: int) -> int:
        while len(self.numbers) <= index:
            self.numbers.append(kind)
        return self.node(kind, "number", (), index)

    def load(self, tensor: int, indices: Iterable[int]) -> int:
        return self.node(self.tensors[tensor].kind, "load", tuple(indices), tensor)

    def cast(self, at: int, kind: str) -> int:
        node = self.nodes[at]
        if node.kind == kind:
            return at
        if node.op == "const":
            value = node.constant
            whole = kind != FLOAT and isinstance(value, float)
            if not (whole and not math.isfinite(value)):
                return self.const(value != 0 if kind == BOOL else value, kind)
        if kind == BOOL:
            return self.compare("ne", at, self.const(0, node.kind))
        return self.node(kind, "cast", (at,))

    def unary(self, op: str, at: int) -> int:
        value = self.value(at)
        if value is not None and op == "neg":
            return self.const(-value, self.kind(at))
        if op == "not":
            if value is not None and self.kind(at) == BOOL:
                return self.const(not value)
            if self.nodes[at].op == "not":
                return self.nodes[at].args[0]
        if op == "neg" and self.nodes[at].op == "neg":
            return self.nodes[at].args[0]
        return self.node(self.kind(at), op, (at,))

    def binary(self, op: str, a: int, b: int, kind: str) -> int:
        """An operation of two values that are first converted to `kind`."""
        a, b = self.cast(a, kind), self.cast(b, kind)
        op = _OF_BOOLS.get(op, op) if kind == BOOL else op
        x, y = self.value(a), self.value(b)
        if x is not None and y is not None:
            folded = _fold(op, x, y, kind)
            if folded is not None:
                return self.const(folded, kind)
        neutral = self._neutral(op, (a, x), (b, y))
        return self.node(kind, op, (a, b)) if neutral is None else neutral

    def _neutral(self, op: str, left: tuple[int, Value | None], right: tuple[int, Value | None]) -> int | None:
        """The other operand of x + 0, x * 1, x & True and the like; None for others."""
        (a, x), (b, y) = left, right
        same = lambda value, neutral: value is not None and value == neutral
        if op in ("and", "or") and self.kind(a) == BOOL:
            if a == b:
                return a
            for value, other, own in ((x, b, a), (y, a, b)):
                if value is not None:
                    return other if value is (op == "and") else own
        if op == "add" and (same(x, 0) or same(y, 0)):
            return b if same(x, 0) else a
        if (op == "sub" and same(y, 0)) or (op in ("mul", "div", "floordiv") and self.kind(a) != BOOL and same(y, 1)):
            return a if op != "floordiv" or self.kind(a) != FLOAT else None
        return b if op == "mul" and same(x, 1) else None

    def compare(self, op: str, a: int, b: int) -> int:
        kind = max((self.kind(a), self.kind(b)), key=RANK.__getitem__)
        a, b = self.cast(a, kind), self.cast(b, kind)
        x, y = self.value(a), self.value(b)
        if x is not None and y is not None:
            return self.const(_COMPARE[op](x, y), BOOL)
        return self.node(BOOL, op, (a, b))

    def where(self, condition: int, a: int, b: int, kind: str) -> int:
        condition, a, b = self.cast(condition, BOOL), self.cast(a, kind), self.cast(b, kind)
        value = self.value(condition)
        if a == b or value is not None:
            return a if a == b or value else b
        return self.node(kind, "where", (condition, a, b))

    # arithmetic on scores, in short
    def add(self, a: int, b: int) -> int:
        return self.binary("add", a, b, FLOAT)

    def sub(self, a: int, b: int) -> int:
        return self.binary("sub", a, b, FLOAT)

    def mul(self, a: int, b: int) -> int:
        return self.binary("mul", a, b, FLOAT)

    def div(self, a: int, b: int) -> int:
        return self.binary("div", a, b, FLOAT)

    def call(self, op: str, at: int) -> int:
        """A function of a score: exp, tanh, ..."""
        return self.unary(op, self.cast(at, FLOAT))

    def insert(self, program: Program, tensors: int = 0, numbers: int = 0, inputs: dict[str, int] | None = None):
        """Append another program, whose captured tensors and numbers are counted from `tensors` and `numbers`.

        Returns its results' nodes. inputs: nodes that replace its inputs by name.
        """
        at: list[int] = []
        for node in program.nodes:
            if node.op == "input" and inputs and node.value in inputs:
                at.append(inputs[str(node.value)])
                continue
            value = node.value
            if node.op in ("load", "pointer", "number"):
                value = node.index + (numbers if node.op == "number" else tensors)
            at.append(self.node(node.kind, node.op, tuple(at[arg] for arg in node.args), value))
        return [at[output] for output in program.outputs]

    def program(self, outputs: Sequence[int], scatters: Sequence[Scatter] = ()) -> Program:
        """The Program of these results, without nodes that they do not need, in the order of their first use."""
        order: dict[int, int] = {}
        kept: list[Node] = []
        for output in outputs:
            stack = [(output, False)]
            while stack:
                at, ready = stack.pop()
                if at in order:
                    continue
                node = self.nodes[at]
                if ready:
                    order[at] = len(kept)
                    kept.append(node._replace(args=tuple(order[arg] for arg in node.args)))
                else:
                    stack += [(at, True), *((arg, False) for arg in reversed(node.args))]
        captured = tuple(self.tensors), tuple(self.numbers)
        return Program(tuple(kept), tuple(order[at] for at in outputs), *captured, tuple(scatters))


def is_int32(value: Value) -> bool:
    """Whether an integer fits the 32 bits that positions and numbers have in kernels."""
    return -(2**31) <= value < 2**31


def build(write: Callable[[Builder], Sequence[int]], tensors: Sequence[Captured] = ()) -> Program:
    builder = Builder(tensors)
    return builder.program(write(builder))


def combined(op: str, a: Program, b: Program) -> Program:
    """The program `a op b` of two masks. Captures of b are counted after a's."""
    builder = Builder((*a.tensors, *b.tensors), (*a.numbers, *b.numbers))
    (left,), (right,) = builder.insert(a), builder.insert(b, len(a.tensors), len(a.numbers))
    return builder.program([builder.binary(op, left, right, BOOL)])


def inverted(a: Program) -> Program:
    """The program `not a` of a mask."""
    builder = Builder(a.tensors, a.numbers)
    return builder.program([builder.unary("not", builder.insert(a)[0])])


# torch's sum of bools is "or", their product "and". Kernels add bools modulo 2.
_OF_BOOLS = {"add": "or", "max": "or", "mul": "and", "min": "and"}

_COMPARE: dict[str, Callable[[Value, Value], bool]] = {
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
}


def _fold(op: str, x: Value, y: Value, kind: str) -> Value | None:
    """The value of an operation of two constants; None where it is left to the kernel."""
    if kind == BOOL:
        return {"and": x and y, "or": x or y, "xor": x != y}.get(op)
    if kind == FLOAT and not (math.isfinite(x) and math.isfinite(y)):
        return None
    try:
        if op == "div" and y == 0:
            return None
        result = {
            "add": lambda: x + y,
            "sub": lambda: x - y,
            "mul": lambda: x * y,
            "div": lambda: x / y,
            "pow": lambda: _power(x, y),
        }.get(op, lambda: None)()
    except OverflowError:
        return None
    inside = kind == FLOAT or result is None or -(2**31) <= result < 2**31
    return result if inside else None


def _power(x: Value, y: Value) -> float:
    """torch.pow of finite numbers."""
    try:
        return math.pow(x, y)
    except ValueError:  # 0 to a negative power, or a negative number to one that is not an integer
        return math.inf if x == 0 else math.nan
