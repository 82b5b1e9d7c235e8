"""Lowers a graph of aten operations, as `record` makes it, to nodes of a Program.

A value of the graph is a node, a captured tensor with some of its dimensions indexed (`View`), or a short vector
(`Lanes`), which a loop over a captured dimension makes: its elements are computed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .program import BOOL, FLOAT, INT, Builder, Captured, Program, Scatter, is_int32, kind_of
from .record import CONSTANT, INPUT, TENSOR, UNFOUND, Graph, Node
from .rules import RULES, SAME, Number, Refused
from .symbols import NARROW

MOST_LANES = 256  # elements of a vector


class View(NamedTuple):
    """A captured tensor of which `indices` are given per dimension; None is a dimension that is left."""

    tensor: int
    indices: tuple[int | None, ...]
    sizes: tuple[int, ...]  # of the dimensions that are left


class Lanes(NamedTuple):
    """A vector or matrix of nodes, in row-major order."""

    nodes: tuple[int, ...]
    sizes: tuple[int, ...]


class Captures(NamedTuple):
    """Which captured tensors and numbers stand for which tensors of a trace."""

    tensors: Sequence[Tensor]  # on the meta device, in the order of the program
    numbers: Sequence[Tensor]


class Lowering:
    """Translates one graph. `values` are the results by node of the graph."""

    def __init__(self, graph: Graph, captures: Captures, names: Sequence[str]) -> None:
        self.captures = captures
        self.p = Builder(
            [Captured(kind_of(t.dtype), t.dim()) for t in captures.tensors],
            [kind_of(t.dtype) for t in captures.numbers],
        )
        self.values: dict[Node, Any] = {}
        self.outputs = graph.outputs
        unnamed = iter(names)
        for node in graph.nodes:
            if node.kind == INPUT:
                self.values[node] = self.p.input(next(unnamed))
            elif node.kind == CONSTANT:
                self.values[node] = self._constant(node.target)
            else:
                self.values[node] = self._captured(node.target) if node.kind == TENSOR else self._call(node)

    def _captured(self, tensor: Tensor) -> Any:
        for n, one in enumerate(self.captures.tensors):
            if one is tensor:
                return View(n, (None,) * tensor.dim(), tuple(tensor.shape))
        for n, one in enumerate(self.captures.numbers):
            if one is tensor:
                return self.p.number(kind_of(tensor.dtype), n)
        raise Refused(f"reads {UNFOUND}", "tensor")

    def _constant(self, tensor: Tensor) -> int:
        if tensor.dim() > 0:
            what = f"makes a tensor of shape {list(tensor.shape)}"
            raise Refused(f"{what}; make it before, and read it from a closure", "tensor")
        return self.p.const(tensor.item(), kind_of(tensor.dtype))

    # ------------------------------------------------------------ operands

    def operand(self, argument: Any) -> Any:
        """A node's number, Lanes, or View for an argument of the graph."""
        if isinstance(argument, Node):
            value = self.values[argument]
            if isinstance(value, View) and not value.sizes:
                return self.p.load(value.tensor, [i for i in value.indices if i is not None])
            return value
        if isinstance(argument, (bool, int, float)):
            return self.p.const(argument)
        raise Refused(f"takes {argument!r}", "operand")

    def scalar(self, argument: Any) -> int:
        found = self.operand(argument)
        if isinstance(found, int):
            return found
        raise Refused("takes a captured tensor of which no element is chosen by indices", "index")

    def lanes(self, argument: Any) -> Lanes | int:
        """A node, or the elements of a vector."""
        found = self.operand(argument)
        if not isinstance(found, View):
            return found
        count = 1
        for size in found.sizes:
            count *= size
        if count > MOST_LANES:
            raise Refused(f"uses {count} elements of a captured tensor at once; at most {MOST_LANES} work", "index")
        nodes = []
        for chosen in product(*map(range, found.sizes)):
            rest = iter(chosen)
            at = [self.p.const(next(rest), INT) if i is None else i for i in found.indices]
            nodes.append(self.p.load(found.tensor, at))
        return Lanes(tuple(nodes), found.sizes)

    # ------------------------------------------------------------ operations

    def _call(self, node: Node) -> Any:
        name = _name(node)
        if name == "index":
            return self._index(node)
        if name == "select":
            return self._select(node)
        if name in _REDUCTIONS:
            return self._reduce(name, node)
        if name in _SHAPES:
            return self._reshape(node)
        if name in SAME and isinstance(self.values.get(node.args[0]), View):
            return self.values[node.args[0]]
        rule = RULES.get(name)
        if rule is None:
            raise Refused(f"uses the operation {node.target}", name)
        kind = kind_of(node.value.dtype)
        arguments = [self._argument(argument) for argument in node.args]
        given = {key: self._argument(value) for key, value in node.kwargs.items()}
        widest = next((a for a in arguments if isinstance(a, Lanes)), None)
        sizes = tuple(node.value.shape)
        written = lambda one: self._narrowed(rule(self.p, kind, one, given), name, node.value.dtype)
        if widest is None:
            found = written(arguments)
            if node.value.numel() > MOST_LANES:
                raise Refused(f"makes a tensor of {node.value.numel()} elements", name)
            return Lanes((found,) * node.value.numel(), sizes) if sizes else found
        spread = [self._spread(a, sizes) if isinstance(a, Lanes) else a for a in arguments]
        count = len(next(a for a in spread if isinstance(a, Lanes)).nodes)
        each = [[a.nodes[n] if isinstance(a, Lanes) else a for a in spread] for n in range(count)]
        return Lanes(tuple(map(written, each)), sizes)

    def _narrowed(self, found: int, name: str, dtype: torch.dtype) -> int:
        """A result in fewer than 32 bits, which wraps around as torch's does."""
        if dtype not in NARROW or name in _IN_RANGE:
            return found
        low, most = NARROW[dtype]
        value = self.p.value(found)
        if value is not None:
            return self.p.const((int(value) - low & most) + low, INT)
        shifted = self.p.binary("sub", found, self.p.const(low), INT)
        rest = self.p.binary("and", shifted, self.p.const(most), INT)
        return self.p.binary("add", rest, self.p.const(low), INT)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return self.lanes(argument)
        return Number(argument) if isinstance(argument, (bool, int, float)) else argument

    def _spread(self, lanes: Lanes, sizes: tuple[int, ...]) -> Lanes:
        """Lanes broadcast to `sizes`."""
        numbers = torch.arange(len(lanes.nodes)).view(lanes.sizes).expand(sizes).flatten().tolist()
        return Lanes(tuple(lanes.nodes[n] for n in numbers), sizes)

    def _index(self, node: Any) -> Any:
        source, indices = self.values[node.args[0]], node.args[1]
        if not isinstance(source, View):
            raise Refused("indexes a computed value; only captured tensors can be indexed", "index")
        given = [None if index is None else self.scalar(index) for index in indices]
        if any(index is not None and self.p.kind(index) in (FLOAT, BOOL) for index in given):
            raise Refused("indexes a tensor by a value that is not an integer", "index")
        rest = iter([*given, *[None] * (len(source.sizes) - len(given))])
        filled = tuple(next(rest) if i is None else i for i in source.indices)
        sizes = [size for size, index in zip(source.sizes, [*given, *[None] * len(source.sizes)]) if index is None]
        return View(source.tensor, filled, tuple(sizes))

    def _select(self, node: Any) -> Any:
        source, dim, at = (self.values[node.args[0]], *node.args[1:])
        if isinstance(source, View) and isinstance(at, int):
            rest = [n for n, index in enumerate(source.indices) if index is None]
            chosen = rest[dim]
            at = at % source.sizes[dim] if source.sizes[dim] else 0
            filled = [self.p.const(at, INT) if n == chosen else i for n, i in enumerate(source.indices)]
            sizes = [size for n, size in enumerate(source.sizes) if n != dim % len(source.sizes)]
            return View(source.tensor, tuple(filled), tuple(sizes))
        lanes = self.lanes(node.args[0])
        if isinstance(lanes, Lanes) and isinstance(at, int):
            numbers = torch.arange(len(lanes.nodes)).view(lanes.sizes).select(dim, at)
            chosen_nodes = tuple(lanes.nodes[n] for n in numbers.flatten().tolist())
            return Lanes(chosen_nodes, tuple(numbers.shape)) if numbers.dim() else chosen_nodes[0]
        raise Refused("selects by a value that is computed", "select")

    def _reshape(self, node: Any) -> Any:
        """view, unsqueeze, expand and the like: of a scalar the scalar, of lanes lanes of another shape."""
        value = self.lanes(node.args[0])
        sizes = tuple(node.value.shape)
        if isinstance(value, int):
            count = node.value.numel()
            return value if not sizes else Lanes((value,) * count, sizes)
        numbers = torch.arange(len(value.nodes)).view(value.sizes)
        moved = node.target(numbers, *node.args[1:], **node.kwargs)
        nodes = tuple(value.nodes[n] for n in moved.flatten().tolist())
        return Lanes(nodes, sizes) if sizes else nodes[0]

    def _reduce(self, name: str, node: Any) -> Any:
        value = self.lanes(node.args[0])
        kind = kind_of(node.value.dtype)
        if isinstance(value, int):
            return self.p.cast(value, kind)
        numbers = torch.arange(len(value.nodes)).view(value.sizes)
        dims = node.args[1] if len(node.args) > 1 and node.args[1] is not None else list(range(numbers.dim()))
        dims = [dims] if isinstance(dims, int) else list(dims) or list(range(numbers.dim()))
        dims = [dim % numbers.dim() for dim in dims]
        kept = [dim for dim in range(numbers.dim()) if dim not in dims]
        groups = numbers.permute(*kept, *dims).reshape(-1, numbers.numel() // max(1, _count(numbers, kept))).tolist()
        operation = _REDUCTIONS[name]
        results = []
        for group in groups:
            nodes = [self.p.cast(value.nodes[n], kind) for n in group]
            if not nodes:
                raise Refused("reduces no element", name)
            results.append(reduce(lambda a, b: self.p.binary(operation, a, b, kind), nodes))
        sizes = tuple(node.value.shape)
        return Lanes(tuple(results), sizes) if sizes else results[0]


def _count(numbers: Tensor, dims: Sequence[int]) -> int:
    count = 1
    for dim in dims:
        count *= numbers.shape[dim]
    return count


def _name(node: Node) -> str:
    """The name of an aten operation without its overload; later uses of a tensor read what was written in place."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    return name if name.startswith("__") else name.removesuffix("_")


# operations whose result is in the range of their arguments
_IN_RANGE = (
    *SAME, "minimum", "maximum", "clamp", "remainder", "fmod", "sign", "sgn", "bitwise_and", "bitwise_or",
    "bitwise_xor", "__and__", "__or__", "__xor__", "bitwise_right_shift", "__rshift__",
)  # fmt: skip
_REDUCTIONS = {"sum": "add", "any": "or", "all": "and", "amax": "max", "amin": "min", "prod": "mul"}
_SHAPES = (
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t",
)  # fmt: skip


def lower(graph: Graph, captures: Captures, names: Sequence[str], kind: str) -> Program:
    """The Program of a traced function, whose one result is converted to `kind`."""
    lowering = Lowering(graph, captures, names)
    program = lowering.p.program([lowering.p.cast(lowering.scalar(lowering.outputs[0]), kind)])
    for node in program.nodes:
        if node.op == "const" and node.kind == INT and not is_int32(node.constant):
            raise Refused(f"holds the integer {node.constant}, which has more than 32 bits; write it as a float", "")
    return program


def lower_gradient(graph: Graph, captures: Captures, names: Sequence[str], loads: Sequence[int | None]) -> Program:
    """The Program of a gradient. The graph gives out dscore, then dload for each load, then the loaded values.

    loads: None for a load whose gradient is zero, else its position among the gradients.
    """
    lowering = Lowering(graph, captures, names)
    dscore, *rest = lowering.outputs
    found = [lowering.p.const(0.0) if dscore is None else lowering.p.cast(lowering.scalar(dscore), FLOAT)]
    scatters = []
    for gradient, loaded in zip(rest[: len(loads)], rest[len(loads) :]):
        if gradient is None:
            continue
        for view, value in _elements(lowering, loaded, gradient):
            scatters.append(Scatter(view.tensor, len(view.indices)))
            found += [lowering.p.cast(value, FLOAT), *(i for i in view.indices if i is not None)]
    return lowering.p.program(found, scatters)


def _elements(lowering: Lowering, loaded: Node, gradient: Node):
    """(View of one element, node of its gradient) for each element of a load."""
    view, values = lowering.values[loaded], lowering.lanes(gradient)
    if isinstance(values, int):
        return [(view, values)]
    found = []
    for value, chosen in zip(values.nodes, product(*map(range, values.sizes))):
        rest = iter(chosen)
        indices = tuple(lowering.p.const(next(rest), INT) if i is None else i for i in view.indices)
        found.append((View(view.tensor, indices, ()), value))
    return found
