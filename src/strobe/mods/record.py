"""Records the aten operations of a function on tensors without data, as a graph that `lowering` reads.

A dispatch mode records the arguments and the result of each operation below autograd. That takes 0.05 ms an operation;
make_fx, whose graphs hold more, takes 0.4 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem.torch_private import RecordingMode
from .rules import Refused

INPUT, TENSOR, CONSTANT, CALL = "input", "tensor", "constant", "call"


UNFOUND = (
    "a tensor where strobe does not find it, for example in a set or by a computed name; read it from a closure or an "
    "attribute"
)


class Node:
    """A value of a graph. `target` is the aten operation of a CALL, and the tensor of a TENSOR, which was there before,
    and of a CONSTANT, which the function made from numbers.
    """

    __slots__ = ("args", "kind", "kwargs", "target", "value")

    def __init__(self, kind: str, target: Any, args: tuple, kwargs: dict[str, Any], value: Any) -> None:
        self.kind, self.target, self.args, self.kwargs, self.value = kind, target, args, kwargs, value


class Graph(NamedTuple):
    """Nodes in the order of their computation, without those that no output needs."""

    nodes: list[Node]
    outputs: Sequence[Any]  # Nodes; other objects are what the function returned


def record(function: Callable, examples: Sequence[Tensor], made: Sequence[Tensor] = ()) -> Graph:
    """The graph of function(*examples). made: tensors that are made meanwhile and count as captured ones.

    >>> import torch
    >>> graph = record(lambda x, y: x + 2 * y, [torch.empty((), device="meta")] * 2)
    >>> [str(node.target) if node.kind == CALL else node.kind for node in graph.nodes]
    ['input', 'input', 'aten.mul.Tensor', 'aten.add.Tensor']
    """
    examples = [one.clone() if any(one is other for other in examples[:n]) else one for n, one in enumerate(examples)]
    recorder = _Recorder()
    for example in examples:
        recorder.add(Node(INPUT, None, (), {}, example), example)
    with recorder:
        found = function(*examples)
    for node in recorder.nodes:
        if any(node.value is one for one in made):
            node.kind, node.target, node.args, node.kwargs = TENSOR, node.value, (), {}
    outputs = found if isinstance(found, (tuple, list)) else (found,)
    outputs = [recorder.node_of(one) if isinstance(one, Tensor) else one for one in outputs]
    return Graph(_needed(recorder.nodes, outputs), outputs)


class _Recorder(RecordingMode):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self._last: dict[int, Node] = {}  # by id of a tensor, which its node keeps alive
        self._stale: dict[int, str] = {}  # operation that wrote to the tensor's memory through another tensor, by id

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten.lift_fresh.default:  # torch.tensor(3.0)
            self.node_of(args[0], CONSTANT)
        given, named = self._as_nodes(args), {name: self._as_nodes(one) for name, one in kwargs.items()}
        result = _result(function, args, kwargs)
        if function is torch.ops.aten._local_scalar_dense.default and given[0].kind == TENSOR:
            raise Refused(f"reads the value of {UNFOUND}", "item")
        if function._schema.is_mutable:
            self._mark_stale(function, result)
        node = Node(CALL, function, given, named, result)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.add(node, tensor)
        return result

    def _as_nodes(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self.node_of(argument)
        if isinstance(argument, (tuple, list)):
            return type(argument)(map(self._as_nodes, argument))
        return argument

    def _mark_stale(self, function: Any, written: Any) -> None:
        """Other tensors in the memory that an in-place operation wrote: their nodes do not have its result."""
        if isinstance(written, Tensor):
            memory = written.untyped_storage()._cdata
            for node in self.nodes:
                for other in node.value if isinstance(node.value, (tuple, list)) else (node.value,):
                    is_other = isinstance(other, Tensor) and other is not written
                    if is_other and other.untyped_storage()._cdata == memory:
                        self._stale[id(other)] = str(function)

    def add(self, node: Node, tensor: Tensor) -> None:
        """Let later reads of the tensor read this node. An operation in place replaces the tensor's node."""
        if not self.nodes or self.nodes[-1] is not node:
            self.nodes.append(node)
        self._last[id(tensor)] = node

    def node_of(self, tensor: Tensor, kind: str = TENSOR) -> Node:
        if id(tensor) in self._stale:
            operation = self._stale[id(tensor)]
            name = operation.removeprefix("aten.").partition(".")[0].removesuffix("_")
            raise Refused(f"reads a tensor after {operation} wrote to a view of it", name)
        known = self._last.get(id(tensor))
        if known is None:
            known = Node(kind, tensor, (), {}, tensor)
            self.add(known, tensor)
        return known


def _result(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on meta tensors.

    On meta tensors torch runs most operations in Python, and the first one imports Dynamo and sympy, which takes
    seconds. So operations on small tensors run on ones on the CPU, for the result's dtype and shape.
    """
    is_index = function is torch.ops.aten.index.Tensor
    found = _indexed(*args) if is_index else _on_ones(function, args, kwargs)
    return function(*args, **kwargs) if found is None else found


def _on_ones(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """A meta tensor like the result on ones. None if the operation is not small, fails or gives no tensor."""
    if not _is_small(function, [*args, *kwargs.values()]):
        return None
    try:
        found = function(*map(_ones, args), **{name: _ones(one) for name, one in kwargs.items()})
    except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError):
        return None  # the same operation on meta tensors raises the error
    if not isinstance(found, Tensor):
        return None
    return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="meta")


# operations whose shapes or effects depend on values
_ON_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
_MOST_ELEMENTS = 4096


def _is_small(function: Any, given: Sequence[Any]) -> bool:
    """Whether a call makes a new tensor from small meta tensors, with a shape that does not depend on their values."""
    schema, tensors = function._schema, [one for one in given if isinstance(one, Tensor)]
    if schema.is_mutable or any(one.alias_info is not None for one in schema.returns):
        return False
    if any(isinstance(one, torch.device) or _holds_tensors(one) for one in given):
        return False
    is_small = all(one.numel() <= _MOST_ELEMENTS for one in tensors)
    return is_small and any(one.is_meta for one in tensors) and _ON_VALUES.isdisjoint(function.tags)


def _holds_tensors(argument: Any) -> bool:
    return isinstance(argument, (tuple, list)) and any(isinstance(one, Tensor) for one in argument)


def _ones(argument: Any) -> Any:
    is_meta = isinstance(argument, Tensor) and argument.is_meta
    return torch.ones(argument.shape, dtype=argument.dtype, device="cpu") if is_meta else argument


def _indexed(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """tensor[indices], for integers that index the first dimensions."""
    for one in indices:
        if one is None or one.dtype not in (torch.int32, torch.int64):
            return None
    if not tensor.is_meta or len(indices) > tensor.dim() or 0 in tensor.shape:
        return None
    scalar = torch.ones((), device="cpu")
    shape = torch.broadcast_tensors(*[scalar.expand(one.shape) for one in indices if one is not None])[0].shape
    return torch.empty((*shape, *tensor.shape[len(indices) :]), dtype=tensor.dtype, device="meta")


def _needed(nodes: list[Node], outputs: Sequence[Any]) -> list[Node]:
    """The inputs, and the nodes on which outputs depend."""
    wanted = {id(one) for one in outputs if isinstance(one, Node)}
    kept = []
    for node in reversed(nodes):
        if node.kind == INPUT or id(node) in wanted:
            kept.append(node)
            wanted |= set(map(id, _nodes_in((*node.args, *node.kwargs.values()))))
    return kept[::-1]


def _nodes_in(arguments: Sequence[Any]) -> Iterator[Node]:
    for one in arguments:
        if isinstance(one, Node):
            yield one
        elif isinstance(one, (tuple, list)):
            yield from _nodes_in(one)
