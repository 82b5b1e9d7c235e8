"""Traces a Python function of a score and positions once, into a `Program`.

`record` writes down the function's operations on 0-d tensors of the meta device, which have no data. Captured tensors
are replaced by meta tensors of their shapes, so tracing reads no data and works for tensors of any device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import InvalidProblem, UnsupportedProblem
from .captures import Captured
from .lowering import Captures, Lowering, Refused, lower, lower_gradient
from .program import BOOL, FLOAT, INPUTS, Program
from .record import record
from .stand_ins import replaced
from .symbols import NARROW, Expression, Symbols, as_tensors_of
from .symbols import __name__ as SYMBOLS

SCORE_INPUTS = ("score", "b", "h", "q", "k")
MASK_INPUTS = ("b", "h", "q", "k")
_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError, AssertionError)


class Trace(NamedTuple):
    """A traced function."""

    program: Program
    tensors: tuple[int, ...]  # the program's tensors, as positions among the captured ones
    numbers: tuple[Expression, ...]  # those that the program reads when it runs
    gradient: Program | None = None  # of a score

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the numbers."""
        return self.program.numbers


class Source(NamedTuple):
    """A function to trace: what it captures, and the paths of numbers that become kernel arguments.

    is_symbolic=False: the numbers are tensors without data from the start, and the program's numbers are those alone.
    """

    function: Callable
    captured: Captured
    numbers: tuple[str, ...] = ()
    is_symbolic: bool = True

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)


def trace(source: Source, inputs: Sequence[str], gradient: bool = False) -> Trace:
    """Trace the function. inputs: SCORE_INPUTS or MASK_INPUTS. gradient: trace the gradient of a score, too.

    Raises UnsupportedProblem, naming the operation and the source line, for a function that has no translation.
    """
    is_score = inputs[0] == "score"
    stand_ins = _stand_ins(source)
    mode = _Recorder(source, stand_ins.tensors)
    returned: list[Any] = []

    with _refusals(source, mode):
        function = replaced(source.function, stand_ins.replacements)

        def checked(*positions: Tensor) -> Any:
            found = function(*positions)
            returned.append(found)
            return found if _kind_of(found, is_score) is None else True

        with torch.no_grad(), mode:
            graph = record(checked, _examples(inputs), stand_ins.symbols.tensors)
        if stand_ins.symbols.is_read:
            raise stand_ins.symbols.refuse()
        program = lower(graph, stand_ins.captures, inputs, FLOAT if is_score else BOOL)
    wrong = _kind_of(returned[0], is_score)
    if wrong is not None:
        got, argument = f"{source.name}, which returns {wrong}", "score_mod" if is_score else "mask_mod"
        expected = "a function that returns a score" if is_score else "a function that returns torch.bool"
        raise InvalidProblem(argument, got, expected, _REMEDIES[is_score])
    derivative = None
    if gradient and is_score:
        stand_ins = _stand_ins(source, stand_ins.symbols.expressions)
        derivative = _gradient(source, inputs, stand_ins)
    return _compact(program, derivative, stand_ins.symbols.expressions)


_REMEDIES = {
    True: "return one number; a function that says which keys are seen goes to mask=strobe.mask_mod(function)",
    False: "compare, as in `ids[kv_idx] != 0`; a function of numbers that are added to scores goes to score_mod=",
}


def _kind_of(returned: Any, is_score: bool) -> str | None:
    """What a function returned, if a score (a mask) is something else."""
    is_number = isinstance(returned, (bool, int, float, Tensor))
    is_bool = returned.dtype == torch.bool if isinstance(returned, Tensor) else isinstance(returned, bool)
    if is_number and is_bool is not is_score:
        return None
    return str(returned.dtype) if isinstance(returned, Tensor) else type(returned).__name__


def _gradient(source: Source, inputs: Sequence[str], stand_ins: _StandIns) -> Program:
    """The gradient of the score and of captured tensors, by autograd on the function."""
    wanted = [
        one.requires_grad_() for one, real in zip(stand_ins.tensors, source.captured.tensors) if real.requires_grad
    ]
    mode = _Recorder(source, stand_ins.tensors)
    found: list[bool] = []
    with _refusals(source, mode):
        function = replaced(source.function, stand_ins.replacements)

    def joint(grad: Tensor, score: Tensor, *positions: Tensor):
        mode.loads.clear()
        with torch.enable_grad():
            score = score.detach().requires_grad_()
            out = function(score, *positions)
            total = out.sum() if isinstance(out, Tensor) and out.requires_grad else None
        leaves = [score, *(leaf for _, leaf in mode.loads), *wanted]
        gradients: Sequence[Tensor | None] = (None,) * len(leaves)
        if total is not None:
            # a hook gives grad to out, since autograd.grad imports sympy if it gets grad as an argument
            out.register_hook(lambda _: grad.to(out.dtype).expand(out.shape))
            gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        found[:] = [one is not None for one in gradients[1:]]
        return [*gradients, *(raw for raw, _ in mode.loads), *wanted]

    names = ("grad", *inputs)
    with _refusals(source, mode):
        with mode:
            graph = record(joint, _examples(names), stand_ins.symbols.tensors)
        loads = [n if one else None for n, one in enumerate(found)]
        return lower_gradient(graph, stand_ins.captures, names, loads)


# ---------------------------------------------------------------- stand-ins


class _StandIns(NamedTuple):
    tensors: tuple[Tensor, ...]
    symbols: Symbols
    replacements: dict[Any, Any]

    @property
    def captures(self) -> Captures:
        return Captures(self.tensors, self.symbols.tensors)


def _stand_ins(source: Source, known: Sequence[Expression] = ()) -> _StandIns:
    """Meta tensors for the captured tensors, and Symbols for the numbers that become arguments. known: expressions of
    an earlier trace, which keep their order.
    """
    tensors = tuple(torch.empty(t.shape, dtype=_dtype(t.dtype), device="meta") for t in source.captured.tensors)
    values = dict(source.captured.numbers)
    symbols = Symbols(values, known)
    of_path = symbols.symbol if source.is_symbolic else lambda path: symbols.tensor(path, values[path])
    by_id: dict[Any, Any] = {id(real): one for real, one in zip(source.captured.tensors, tensors)}
    return _StandIns(tensors, symbols, by_id | {path: of_path(path) for path in source.numbers})


def _dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which a captured tensor is traced: the one its elements have when they are loaded."""
    if dtype.is_floating_point:
        return torch.float32
    return dtype if dtype in (torch.bool, torch.int64, *NARROW) else torch.int32


def _examples(names: Sequence[str]) -> list[Tensor]:
    floating = lambda name: INPUTS[name] == FLOAT
    return [torch.empty((), dtype=torch.float32 if floating(name) else torch.int32, device="meta") for name in names]


def _compact(program: Program, derivative: Program | None, numbers: Sequence[Expression]) -> Trace:
    """The programs with only the tensors and numbers that they use."""
    programs = [one for one in (program, derivative) if one is not None]
    used = lambda op: sorted({int(n.value or 0) for one in programs for n in one.nodes if n.op == op})
    scattered = {scatter.tensor for one in programs for scatter in one.scatters}
    kept, kept_numbers = sorted({*used("load"), *scattered}), used("number")
    tensors, scalars = ({old: new for new, old in enumerate(olds)} for olds in (kept, kept_numbers))

    def renumbered(one: Program) -> Program:
        at = lambda node: {"load": tensors, "number": scalars}.get(node.op)
        nodes = [n if (table := at(n)) is None else n._replace(value=table[int(n.value or 0)]) for n in one.nodes]
        scatters = tuple(scatter._replace(tensor=tensors[scatter.tensor]) for scatter in one.scatters)
        kinds = program.numbers if derivative is None else derivative.numbers
        captures = tuple(one.tensors[n] for n in kept), tuple(kinds[n] for n in kept_numbers)
        return Program(tuple(nodes), one.outputs, *captures, scatters)

    gradient = None if derivative is None else renumbered(derivative)
    return Trace(renumbered(program), tuple(kept), tuple(numbers[n] for n in kept_numbers), gradient)


# ---------------------------------------------------------------- what a trace records


class _Recorder(TorchFunctionMode):
    """Turns tensor[index, ...] into an indexing operation, and remembers the source line of each call.

    Without it, torch would read the value of an index that is a 0-d tensor. loads: (element, its stand-in that takes a
    gradient) for each element of a captured tensor that wants gradients.
    """

    def __init__(self, source: Source, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.loads: list[tuple[Tensor, Tensor]] = []
        self.lines: dict[str, str] = {}
        self.last = ("", "")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", str(function))
        line = "" if name == "__get__" else _user_line()
        if line:
            self.last = (name, line)
            self.lines[name.strip("_")] = line
        args, kwargs = as_tensors_of(function, args, kwargs or {})
        if function is not Tensor.__getitem__:
            return function(*args, **kwargs)
        tensor, index = args
        with torch.no_grad():
            element = _index(tensor, index if isinstance(index, tuple) else (index,))
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return element
        leaf = element.detach().requires_grad_()
        self.loads.append((element, leaf))
        return leaf


def _index(tensor: Tensor, index: tuple) -> Tensor:
    """tensor[index], where an index may be a 0-d tensor, an int, or a full slice."""
    if not any(isinstance(one, Tensor) for one in index):
        return tensor[index]
    if any(one is Ellipsis for one in index):
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (tensor.dim() - len(index) + 1), *index[at + 1 :])
    for dim in reversed(range(len(index))):
        one = index[dim]
        if isinstance(one, int) and not isinstance(one, bool):
            tensor = tensor.select(dim, one)
        elif not isinstance(one, Tensor) and one != slice(None):
            raise Refused(f"indexes a tensor by {one!r}; integers, positions and ':' work", "getitem")
    kept = [one for one in index if isinstance(one, Tensor) or one == slice(None)]
    # aten takes int8 for no index, and uint8 for a mask
    kept = [one.int() if isinstance(one, Tensor) and one.dtype in NARROW else one for one in kept]
    return torch.ops.aten.index(tensor, [one if isinstance(one, Tensor) else None for one in kept])


def _user_line() -> str:
    """ "file:line" of the innermost frame of the traced function; empty for a call that torch makes by itself."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "") != __name__:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] != "torch" and name != SYMBOLS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextmanager
def _refusals(source: Source, mode: _Recorder) -> Iterator[None]:
    """Turns what goes wrong in a trace into an UnsupportedProblem that names the operation and the line."""
    try:
        yield
    except Refused as refused:
        line = mode.lines.get(refused.operation.strip("_"), mode.last[1])
        raise UnsupportedProblem(_message(source, str(refused), line)) from None
    except _ERRORS as error:
        name, line = mode.last
        what = f"fails in a trace, at {name or 'its start'}: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
        if name in ("item", "__bool__", "__int__", "__float__", "__index__", "tolist"):
            what = f"reads the value of a position or score ({name}), as an `if` does; use torch.where"
        raise UnsupportedProblem(_message(source, what, line)) from error


def _message(source: Source, what: str, line: str) -> str:
    at = f", at {line}" if line else ""
    return (
        f"{source.name} {what}{at}; a score or mask is elementwise: arithmetic, comparisons, torch.where, exp, tanh "
        "and the like, and captured tensors indexed by b, h, q_idx and kv_idx"
    )


__all__ = ["MASK_INPUTS", "SCORE_INPUTS", "Lowering", "Source", "Trace", "trace"]
