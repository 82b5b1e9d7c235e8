"""`ScoreMod`: a function that changes scores, and the ready-made ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from ..problem.mask import Mask
from . import extents
from .cache import TRACES
from .captures import arity
from .compiled import bind_compiled
from .program import FLOAT, INT, BoundScore, Builder, Captured, Program, Scatter, kind_of
from .trace import SCORE_INPUTS
from .triton_functions import TritonScore, checked_captures, is_triton_function

_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class ScoreMod:
    """A score modification, created by `score_mod`, `alibi`, `relative_bias` or `bias`.

    It holds the function, or the program of a ready-made one. A call of attention binds it to the tensors that the
    function captures at that moment.
    """

    def __init__(
        self,
        function: Callable | None,
        programs: tuple[str, str, str] = ("", "", ""),
        tensors: Sequence[Tensor] = (),
        axes: Sequence[extents.Axes] = (),
        triton: TritonScore | None = None,
    ):
        self.function = function
        self._triton = triton
        self._programs = programs
        self._tensors = tuple(tensors)
        self._axes = axes
        self._bound: BoundScore | None = None

    def __repr__(self) -> str:
        function = self.function if self._triton is None else self._triton.function.fn
        name = getattr(function, "__qualname__", "") or "ready-made"
        return f"ScoreMod({name})"

    def bind(self, gradient: bool) -> BoundScore:
        """The programs and what they capture now. gradient: the gradient's program is needed."""
        if self._triton is not None:
            if torch.compiler.is_compiling() and self._bound is not None and (self._bound.gradient or not gradient):
                return self._bound
            return self._triton.bind(gradient)
        if self.function is None:
            text, derivative, derivative_alone = self._programs
            adds = any([tensor.requires_grad for tensor in self._tensors])  # now, not when this was made
            chosen = derivative if adds else derivative_alone
            return BoundScore(text, chosen if gradient else "", self._tensors, ())
        if torch.compiler.is_compiling() and self._bound is not None:
            return self._bound
        if torch.compiler.is_dynamo_compiling():
            return bind_compiled(self.function, gradient)
        found = TRACES.bind(self.function, SCORE_INPUTS, gradient)
        derivative = found.trace.gradient
        return BoundScore(found.trace.program.text, derivative.text if derivative else "", found.tensors, found.numbers)

    @property
    def ready_made(self) -> tuple[tuple[str, ...], tuple[Tensor, ...]] | None:
        """The programs and the tensors of a ready-made score; None for a score with a function."""
        return (self._programs, self._tensors) if self.function is None and self._triton is None else None

    def check(self, sizes: Mapping[str, int], is_part: bool = False) -> None:
        """Raises InvalidProblem if the tensor of a ready-made score is not of a call's sizes (`extents.check`)."""
        if self.function is None:
            extents.check("score_mod", self._tensors, self._axes, sizes, is_part)

    def held(self) -> ScoreMod:
        """This modification, traced now with its gradient. torch.compile then takes the trace and captures as they
        are."""
        if self._triton is not None:
            self._bound = self.bind(self._triton.has_derivative)
        elif self.function is not None:
            self._bound = self.bind(True)
        return self


def score_mod(
    function: Callable,
    *,
    captures: Sequence[Tensor | int | float] = (),
    backward: Callable | None = None,
    reference: Callable | None = None,
) -> ScoreMod:
    """A function of a score and of positions, (score, b, h, q_idx, kv_idx) -> score, as an object.

    >>> import strobe
    >>> q = torch.randn(1, 4, 2, 16)
    >>> distance = strobe.score_mod(lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx).abs())
    >>> strobe.attention(q, q, q, score_mod=distance).shape
    torch.Size([1, 4, 2, 16])

    `attention` takes the bare function, too. The object is traced at once, so errors are raised here, and torch.compile
    takes it as it is. The score is multiplied by `scale` and, with a softcap, capped. b is the batch entry (the
    sequence of packed tensors), h the query head, q_idx and kv_idx the positions in the sequence, all int32.

    Captured tensors that require gradients get them. Indices outside a captured tensor are clamped, negative ones count
    from its end. Raises UnsupportedProblem for a function that has no translation, naming the operation.

    The function may also be one of `@triton.jit`, which the kernels call as it is. The other arguments are for it:

    Args:
        captures: tensors and numbers that it gets after kv_idx, a tensor as its address. It checks indices itself.
        backward: its derivative, a `@triton.jit` function (dscore, score, b, h, q_idx, kv_idx, *captures) -> dscore.
        reference: the same as a function of torch operations. CPUs run it. Without `backward` its derivative is used,
            which includes the gradients of captured tensors.
    """
    if is_triton_function(function):
        made = TritonScore(function, checked_captures(captures), backward, reference)
        return ScoreMod(None, triton=made).held()
    refuse_options(function, captures=captures, backward=backward, reference=reference)
    return ScoreMod(_checked(function, "score_mod", 5)).held()


def refuse_options(function: object, **options: object) -> None:
    """Raises InvalidProblem for options of `triton.jit` functions beside another function."""
    for name, value in options.items():
        if value is not None and value != ():
            got = f"a value beside {getattr(function, '__qualname__', type(function).__name__)}"
            raise InvalidProblem(
                name, got, "a function of triton.jit", "leave it out: a closure holds what a function reads"
            )


def as_score_mod(given: object) -> ScoreMod:
    """A ScoreMod from a ScoreMod or a function."""
    if isinstance(given, ScoreMod):
        return given
    if is_triton_function(given):
        return score_mod(given)  # type: ignore[arg-type]
    return ScoreMod(_checked(given, "score_mod", 5))


def _checked(function: object, name: str, count: int) -> Callable:
    """The function if it takes `count` arguments."""
    if type(function) is FunctionType and function.__defaults__ is None:  # inspect.signature takes 15 us
        code = function.__code__
        if code.co_argcount == count and not code.co_kwonlyargcount and not code.co_flags & _VARIADIC:
            return function
    words = "(score, b, h, q_idx, kv_idx) -> score" if count == 5 else "(b, h, q_idx, kv_idx) -> bool"
    if not callable(function) or isinstance(function, (Tensor, type)):
        remedy = "pass a Python function of torch operations"
        if count == 5 and isinstance(function, Tensor):
            remedy = "to add its elements to scores, give strobe.bias(tensor)"
        if isinstance(function, Mask):
            remedy = "it is a mask already; give it to mask="
        raise wrong_type(name, function, f"a function {words}", remedy)
    try:
        names = arity(function)
    except ValueError:  # a builtin without a signature
        return function
    if len(names) != count and not _takes_any(function):
        got = f"a function of {len(names)} argument{'s' * (len(names) != 1)} ({', '.join(names)})"
        raise InvalidProblem(name, got, f"{count}: {words}", _other(function, count, names))
    return function


def _takes_any(function: Callable) -> bool:
    from inspect import Parameter, signature

    return any(p.kind is Parameter.VAR_POSITIONAL for p in signature(function).parameters.values())


def _other(function: Callable, count: int, names: Sequence[str]) -> str:
    if getattr(function, "__module__", None) == __name__:
        return f"call it: strobe.{function.__name__}({', '.join(names)})"
    if len(names) == 9 - count:
        return "give it to strobe.mask_mod and mask=" if count == 5 else "give it to score_mod="
    return "give it these arguments alone; a closure holds the rest"


# ---------------------------------------------------------------- ready-made


def alibi(slopes: Tensor) -> ScoreMod:
    """ALiBi (arXiv 2108.12409): subtract slopes[h] * |i + S_k - S_q - j| from the score of row i and key j.

    >>> import strobe
    >>> q = torch.randn(1, 4, 8, 16)
    >>> slopes = 2.0 ** -torch.arange(1.0, 9)
    >>> strobe.attention(q, q, q, causal=True, score_mod=strobe.alibi(slopes)).shape
    torch.Size([1, 4, 8, 16])

    slopes [H_q], one per query head, or [B, H_q]. They get gradients if they require them.
    """
    _tensor("slopes", slopes, (1, 2), "[H_q] or [B, H_q]")
    p = Builder([Captured(kind_of(slopes.dtype), slopes.dim())])
    at = [p.input("h")] if slopes.dim() == 1 else [p.input("b"), p.input("h")]
    distance = p.unary("neg", p.call("abs", p.cast(_diagonal_distance(p), FLOAT)))
    return _added(p, distance, at, slopes, ("b", "h")[2 - slopes.dim() :])


def relative_bias(table: Tensor) -> ScoreMod:
    """Add table[h, m + n] to a score, where n = j - (i + S_k - S_q) is the key's distance from the row's diagonal.

    >>> import strobe
    >>> q = torch.randn(1, 4, 2, 16)
    >>> table = torch.zeros(2, 2 * 8 + 1, requires_grad=True)   # distances -8 to 8
    >>> strobe.attention(q, q, q, score_mod=strobe.relative_bias(table)).sum().backward()
    >>> table.grad.shape
    torch.Size([2, 17])

    table is [H_q, 2 m + 1] or, for all heads, [2 m + 1]. Greater distances take the table's ends. The table
    has gradients if it requires them.
    """
    _tensor("table", table, (1, 2), "[H_q, 2 m + 1] or [2 m + 1]")
    if table.shape[-1] % 2 == 0:
        raise InvalidProblem("table", f"{table.shape[-1]} distances", "an odd number, 2 m + 1", "count -m to m")
    most = table.shape[-1] // 2
    p = Builder([Captured(kind_of(table.dtype), table.dim())])
    distance = p.unary("neg", _diagonal_distance(p))
    bounded = p.binary("min", p.binary("max", distance, p.const(-most), INT), p.const(most), INT)
    column = p.binary("add", bounded, p.const(most), INT)
    heads = ["h"] * (table.dim() - 1)
    return _added(p, None, [*map(p.input, heads), column], table, (*heads, None))


def bias(tensor: Tensor) -> ScoreMod:
    """Add tensor[b, h, i, j] to the score of row i and key j.

    >>> import strobe
    >>> q = torch.randn(2, 4, 8, 16)
    >>> strobe.attention(q, q, q, score_mod=strobe.bias(torch.randn(1, 8, 4, 4))).shape
    torch.Size([2, 4, 8, 16])

    tensor is [B, H_q, S_q, S_k]; any size may be 1, and leading dimensions may be left out: [S_q, S_k]. It gets
    gradients if it requires them.
    """
    _tensor("tensor", tensor, (1, 2, 3, 4), "[B, H_q, S_q, S_k], or its last dimensions")
    p = Builder([Captured(kind_of(tensor.dtype), tensor.dim())])
    names = ("b", "h", "q", "k")[4 - tensor.dim() :]
    at = [p.const(0) if size == 1 else p.input(name) for name, size in zip(names, tensor.shape)]
    return _added(p, None, at, tensor, extents.axes_of(tensor))


def _diagonal_distance(p: Builder) -> int:
    """i + S_k - S_q - j."""
    row = p.binary("add", p.input("q"), p.input("diagonal"), INT)
    return p.binary("sub", row, p.input("k"), INT)


def _added(p: Builder, factor: int | None, at: Sequence[int], tensor: Tensor, axes: extents.Axes) -> ScoreMod:
    """score + factor * tensor[at], and its gradient with and without the tensor's. axes: of the tensor."""
    loaded = p.load(0, at)
    term = loaded if factor is None else p.mul(factor, loaded)
    program = p.program([p.add(p.input("score"), term)])
    grad = p.input("grad")
    value = grad if factor is None else p.mul(factor, grad)
    gradient, gradient_alone = p.program([grad, value, *at], [Scatter(0, len(at))]), p.program([grad])
    return ScoreMod(None, (program.text, gradient.text, gradient_alone.text), (tensor,), (axes,))


def _tensor(name: str, tensor: object, ranks: Sequence[int], shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise wrong_type(name, tensor, f"a tensor {shape}", "pass a torch.Tensor")
    if tensor.dim() not in ranks:
        raise InvalidProblem(name, f"shape {list(tensor.shape)}", shape, "reshape or slice it")
    if not tensor.is_floating_point():
        raise InvalidProblem(name, tensor.dtype, "a floating dtype", f"convert it with {name}.float()")


__all__ = ["BoundScore", "Program", "ScoreMod", "alibi", "as_score_mod", "bias", "relative_bias", "score_mod"]
