"""Run a Program in torch ops on tensors that broadcast: the CPU kernel's custom scores and masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .program import BOOL, COMPARISONS, FLOAT, INT, Program
from .triton_functions import expanded

Operand = Tensor | int | float | bool
_DTYPES = {INT: torch.int32, "l": torch.int64, BOOL: torch.bool}

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in (
        "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh",
        "sigmoid", "erf", "floor", "ceil", "trunc", "round",
    )
}  # fmt: skip
_UNARY["not"] = torch.bitwise_not
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.true_divide,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "fmod": torch.fmod,
    "pow": torch.pow,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    **{name: getattr(torch, name) for name in COMPARISONS},
}


def dtype_of(kind: str, wide: torch.dtype) -> torch.dtype:
    """The dtype of a kind's elements where scores are `wide`."""
    return wide if kind == FLOAT else _DTYPES[kind]


def evaluate(
    program: Program,
    inputs: Mapping[str, Tensor],
    captured: tuple[Sequence[Tensor], Sequence[float]] = ((), ()),
    wide: torch.dtype = torch.float32,
) -> list[Tensor]:
    """The results of a program. Shapes broadcast as they are needed: a result may have sizes of 1.

    inputs: tensors by name. captured: (tensors, numbers). wide: the dtype of scores. Raises UnsupportedProblem for a
    `triton.jit` function without a reference.

    >>> from .program import build
    >>> program = build(lambda p: [p.compare("ge", p.input("q"), p.input("k"))])
    >>> position = torch.arange(3, dtype=torch.int32)
    >>> evaluate(program, {"q": position[:, None], "k": position[None, :]})[0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    program = expanded(program)
    tensors, numbers = captured
    device = next(iter(inputs.values())).device
    values: list[Tensor] = []
    for node in program.nodes:
        args = [values[arg] for arg in node.args]
        dtype = dtype_of(node.kind, wide)
        if node.op == "input":
            value = inputs[str(node.value)].to(dtype)
        elif node.op == "const":
            value = torch.full((), node.constant, dtype=dtype, device=device)
        elif node.op == "number":
            value = torch.full((), numbers[int(node.value or 0)], dtype=dtype, device=device)
        elif node.op == "load":
            value = load(tensors[int(node.value or 0)], args).to(dtype)
        elif node.op == "cast":
            value = args[0].to(dtype)
        elif node.op == "where":
            value = torch.where(*args)
        elif node.op in _UNARY:
            value = _UNARY[node.op](args[0])
        else:
            value = _BINARY[node.op](args[0], args[1])
        values.append(value)
    return [values[one] for one in program.outputs]


def load(tensor: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Elements of a captured tensor. Indices below 0 count from the end; indices outside are clamped.

    >>> load(torch.arange(4), [torch.tensor([0, -1, 7])]).tolist()
    [0, 3, 3]
    """
    if not indices:
        return tensor
    return tensor[tuple(inside(index, size) for index, size in zip(indices, tensor.shape))]


def inside(index: Tensor, size: int) -> Tensor:
    """int64 indices in [0, size), by the rule of `load`."""
    index = index.long()
    return torch.where(index < 0, index + size, index).clamp(0, max(0, size - 1))
