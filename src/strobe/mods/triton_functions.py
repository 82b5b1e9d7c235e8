"""`@triton.jit` functions as scores and masks: a node of a Program that calls the function.

    f pointer 0                              the address of captured tensor 0
    f triton jit_1a2b3c4d 1 2 3 4 5 0 6      a call: score, b, h, q, k, then what the function captures

The node holds a name, under which this module finds the function. `emit` writes an import of that name, so that the
kernel calls the function itself. Where a program is evaluated without Triton, `expanded` replaces the call by the
reference, a function of torch operations.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem, wrong_type
from .captures import captured
from .program import BOOL, FLOAT, INT, BoundScore, Builder, Captured, Node, Program, kind_of
from .trace import MASK_INPUTS, SCORE_INPUTS, Source, Trace, trace

Capture = Tensor | int | float
_PARAMETERS = {"score": "score", "grad": "dscore", "b": "b", "h": "h", "q": "q_idx", "k": "kv_idx"}


class TritonFunction(NamedTuple):
    """A function of triton.jit. reference: the same as a program of its inputs and of all captures, or None."""

    function: Any
    inputs: tuple[str, ...]
    reference: Program | None

    @property
    def title(self) -> str:
        return self.function.fn.__qualname__

    @property
    def source(self) -> str | None:
        """Triton's hash of the function and of all that it calls; None in the interpreter."""
        return getattr(self.function, "cache_key", None)

    def is_same(self, other: TritonFunction) -> bool:
        equal = self.function is other.function or (self.source is not None and self.source == other.source)
        return equal and self[1:] == other[1:]


_FUNCTIONS: dict[str, TritonFunction] = {}


def __getattr__(name: str) -> Any:
    """The function of a name, for the import that `emit` writes."""
    if name not in _FUNCTIONS:
        raise AttributeError(name)
    return _FUNCTIONS[name].function


def is_triton_function(value: object) -> bool:
    """Whether it is a function of `triton.jit`. Does not import Triton.

    >>> is_triton_function(lambda score, b, h, q_idx, kv_idx: score)
    False
    """
    names = {(kind.__module__, kind.__name__) for kind in type(value).__mro__}
    return not names.isdisjoint(
        (("triton.runtime.jit", "JITFunction"), ("triton.runtime.interpreter", "InterpretedFunction"))
    )


class TritonScore:
    """A score by a `triton.jit` function. Its derivative is that of `reference` unless `backward` is given."""

    def __init__(self, function: Any, captures: Sequence[Capture], backward: Any, reference: Callable | None) -> None:
        _check("score_mod", function, SCORE_INPUTS, captures)
        if backward is not None:
            _check("backward", backward, ("grad", *SCORE_INPUTS), captures)
        self.function, self.backward, self.reference, self.captures = function, backward, reference, captures
        self._derivatives: dict[tuple[bool, ...], Program] = {}
        traced = None if reference is None else _traced(reference, SCORE_INPUTS, captures)
        self.tensors, self.numbers = split_captures(captures)
        self._text = _call(function, SCORE_INPUTS, captures, traced, FLOAT).text

    def bind(self, gradient: bool) -> BoundScore:
        return BoundScore(self._text, self._derivative().text if gradient else "", self.tensors, self.numbers)

    @property
    def has_derivative(self) -> bool:
        return self.backward is not None or self.reference is not None

    def _derivative(self) -> Program:
        title = self.function.fn.__qualname__
        if not self.has_derivative:
            raise UnsupportedProblem(
                f"{title} is a triton.jit function without a derivative; pass backward=, a triton.jit function "
                "(dscore, score, b, h, q_idx, kv_idx, *captures), or reference=, the same as a function of torch "
                "operations"
            )
        learned = tuple([tensor.requires_grad for tensor in self.tensors])
        if self.backward is not None and any(learned):
            raise UnsupportedProblem(
                f"{title}: backward= gives no gradients of captured tensors; detach them, or leave backward= out and "
                "pass reference=, the same as a function of torch operations"
            )
        if learned not in self._derivatives:
            found = None
            if self.reference is not None:
                found = _traced(self.reference, SCORE_INPUTS, self.captures, True)
            if self.backward is not None:
                found = _call(self.backward, ("grad", *SCORE_INPUTS), self.captures, found, FLOAT)
            if found is not None:
                self._derivatives[learned] = found
        return self._derivatives[learned]


def mask_program(function: Any, captures: Sequence[Capture], reference: Callable | None) -> Program:
    """The program of a mask by a `triton.jit` function."""
    _check("mask_mod", function, MASK_INPUTS, captures)
    traced = None if reference is None else _traced(reference, MASK_INPUTS, captures)
    return _call(function, MASK_INPUTS, captures, traced, BOOL)


def checked_captures(captures: object) -> tuple[Capture, ...]:
    """The captures of a `triton.jit` function as a tuple, if they are tensors and numbers."""
    if not isinstance(captures, (tuple, list)):
        raise wrong_type("captures", captures, "a tuple of tensors and numbers", "write (tensor,) for one alone")
    for one in captures:
        if isinstance(one, bool) or not isinstance(one, (Tensor, int, float)):
            raise wrong_type("captures", one, "tensors, ints and floats", "convert it to one of them")
    return tuple(captures)


def split_captures(captures: Sequence[Capture]) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """(tensors, numbers) of captures."""
    tensors = tuple([one for one in captures if isinstance(one, Tensor)])
    return tensors, tuple([one for one in captures if not isinstance(one, Tensor)])


def _check(name: str, function: Any, inputs: Sequence[str], captures: Sequence[Capture]) -> None:
    """Raises unless the function is one of `triton.jit` that takes these arguments."""
    is_gluon = any(kind.__name__ == "GluonJITFunction" for kind in type(function).__mro__)
    if is_gluon or not is_triton_function(function):
        raise wrong_type(name, function, "a function of triton.jit", "decorate it with @triton.jit")
    names = list(inspect.signature(function.fn).parameters)
    wanted = ", ".join(_PARAMETERS[one] for one in inputs)
    if len(names) != len(inputs) + len(captures):
        raise InvalidProblem(
            name,
            f"a function of {len(names)} arguments ({', '.join(names)})",
            f"{len(inputs) + len(captures)}: {wanted}, and one for each of the {len(captures)} captures",
            "pass what it reads beside positions as captures=(...)",
        )


# ---------------------------------------------------------------- programs


def _kind(number: float) -> str:
    return FLOAT if isinstance(number, float) else INT


def _captured_kinds(captures: Sequence[Capture]) -> tuple[list[Captured], list[str]]:
    tensors, numbers = split_captures(captures)
    return [Captured(kind_of(t.dtype), t.dim()) for t in tensors], [_kind(one) for one in numbers]


def _call(
    function: Any, inputs: tuple[str, ...], captures: Sequence[Capture], reference: Program | None, kind: str
) -> Program:
    """The program that calls a function on its inputs and captures."""
    p = Builder(*_captured_kinds(captures))
    arguments = [p.input(name) for name in inputs]
    tensors = numbers = 0
    for one in captures:
        if isinstance(one, Tensor):
            arguments.append(p.node(kind_of(one.dtype), "pointer", (), tensors))
            tensors += 1
        else:
            arguments.append(p.number(_kind(one), numbers))
            numbers += 1
    name = _named(TritonFunction(function, inputs, reference))
    return p.program([p.node(kind, "triton", tuple(arguments), name)])


def _named(entry: TritonFunction) -> str:
    """The name of a function with its reference, which is the same in every process."""
    function = entry.function.fn
    text = entry.source or f"{function.__module__}.{function.__qualname__}\n{inspect.getsource(function)}"
    reference = None if entry.reference is None else entry.reference.text
    name = f"jit_{zlib.crc32(repr((text, entry.inputs, reference)).encode()):08x}"
    while not _FUNCTIONS.setdefault(name, entry).is_same(entry):
        name += "_"
    return name


def _traced(reference: Callable, inputs: tuple[str, ...], captures: Sequence[Capture], gradient: bool = False) -> Any:
    """The program of a reference over all captures, or its derivative's."""
    held = tuple(captures)
    if inputs[0] == "score":
        function = lambda score, b, h, q_idx, kv_idx: reference(score, b, h, q_idx, kv_idx, *held)
    else:
        function = lambda b, h, q_idx, kv_idx: reference(b, h, q_idx, kv_idx, *held)
    function.__qualname__ = getattr(reference, "__qualname__", "reference")
    now = captured(function)
    tensors = split_captures(held)[0]
    is_number = [not isinstance(one, Tensor) for one in held]
    at = {f".held.{n}": sum(is_number[:n]) for n, one in enumerate(is_number) if one}
    if any(all(one is not tensor for tensor in tensors) for one in now.tensors):
        raise InvalidProblem(
            "reference", "a function that captures other tensors", "a function of its arguments alone",
            "pass the tensors in captures=",
        )  # fmt: skip
    source = Source(function, now, tuple(path for path, _ in now.numbers if path in at), is_symbolic=False)
    found: Trace = trace(source, inputs, gradient)
    at_tensor = [next(n for n, one in enumerate(tensors) if one is now.tensors[place]) for place in found.tensors]
    places = {"load": at_tensor, "number": [at[str(path)] for path in found.numbers]}
    program = found.gradient if gradient and found.gradient else found.program
    nodes = tuple([n._replace(value=places[n.op][n.index]) if n.op in places else n for n in program.nodes])
    scatters = tuple([one._replace(tensor=at_tensor[one.tensor]) for one in program.scatters])
    kinds = _captured_kinds(held)
    return Program(nodes, program.outputs, tuple(kinds[0]), tuple(kinds[1]), scatters)


# ---------------------------------------------------------------- without Triton


def why_not_expanded(program: Program) -> str | None:
    """Why a program cannot be evaluated without Triton, or None."""
    for node in program.nodes:
        if node.op == "triton":
            entry = _FUNCTIONS.get(str(node.value))
            if entry is None:
                return f"{node.value} is a triton.jit function that this process has not made; make its score or mask"
            if entry.reference is None:
                return (
                    f"{entry.title} is a triton.jit function, which GPUs alone run; pass reference=, the same as a "
                    "function of torch operations"
                )
    return None


def expanded(program: Program) -> Program:
    """The program with references in place of `triton.jit` functions. Raises UnsupportedProblem if one is missing."""
    return _expanded(program) if any([node.op == "triton" for node in program.nodes]) else program


@lru_cache(maxsize=256)
def _expanded(program: Program) -> Program:
    reason = why_not_expanded(program)
    if reason is not None:
        raise UnsupportedProblem(reason)
    p = Builder(program.tensors, program.numbers)
    at: list[int] = []
    for node in program.nodes:
        args = tuple([at[arg] for arg in node.args])
        at.append(_inlined(p, node, args) if node.op == "triton" else p.node(node.kind, node.op, args, node.value))
    return p.program([at[output] for output in program.outputs], program.scatters)


def _inlined(p: Builder, call: Node, args: Sequence[int]) -> int:
    """The reference of a call on the call's arguments."""
    entry = _FUNCTIONS[str(call.value)]
    if entry.reference is None:
        raise UnsupportedProblem(f"{entry.title} has no reference")
    inputs, captures = dict(zip(entry.inputs, args)), args[len(entry.inputs) :]
    pointers = [p.nodes[at].index for at in captures if p.nodes[at].op == "pointer"]
    numbers = [at for at in captures if p.nodes[at].op != "pointer"]
    at: list[int] = []
    for node in entry.reference.nodes:
        own = tuple([at[arg] for arg in node.args])
        if node.op == "input":
            at.append(inputs[str(node.value)])
        elif node.op == "number":
            at.append(numbers[node.index])
        elif node.op == "load":
            at.append(p.node(node.kind, node.op, own, pointers[node.index]))
        else:
            at.append(p.node(node.kind, node.op, own, node.value))
    return at[entry.reference.outputs[0]]
