"""Schemas and fake kernels of the ops, and the checks of their outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem
from ..problem.call import Call, accumulator, check
from ..problem.memory_overlap import overlaps_itself, share_memory
from ..problem.torch_private import lower_sym_storage_offset
from ..problem.torch_state import batched, functionalized


def schema(fields: dict[str, str], defaults: Mapping[str, object]) -> str:
    """The schema of an op's arguments, from the annotations and defaults of its call type (`Call`, `DecodeCall`,
    `AppendCall`).
    """
    kinds = {
        "Tensor | None": "Tensor?",
        "int": "SymInt",
        "float | None": "float?",
    }
    default = {name: "=" + repr(value).replace("'", '"') for name, value in defaults.items()}
    called = {"kernel": "wanted"}  # Inductor passes its own `kernel` together with an op's keywords
    return ", ".join(
        f"{kinds.get(kind, kind)} {called.get(name, name)}{default.get(name, '')}" for name, kind in fields.items()
    )


def forward(*flat: Any) -> tuple[Tensor, Tensor]:
    call = Call(*flat)
    check(call)
    q, wide = call.q, accumulator(call.q.dtype)
    lse_shape = (q.shape[1], q.shape[0]) if call.packed else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty((*q.shape[:-1], call.v.shape[-1]), dtype=wide if call.partial else q.dtype), q.new_empty(
        lse_shape, dtype=wide
    )


def forward_out(out: Tensor, *flat: Any) -> Tensor:
    like, lse = forward(*flat)
    check_out(out, tuple(like.shape), like.dtype, like)
    writes_to(out)
    return lse


def backward(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *flat: Any) -> tuple[Tensor, ...]:
    call = Call(*flat)
    check_results((dout, out, lse, dlse), [(tuple(like.shape), like.dtype) for like in forward(*flat)], call.q)
    dsinks = lse.new_empty(0) if call.sinks is None else torch.empty_like(call.sinks)
    return *(call.q.new_empty(shape) for shape in call.gradient_shapes), dsinks


def writes_to(tensor: Tensor) -> None:
    """Prepare Inductor for an op that writes to this tensor.

    Inductor calls sym_storage_offset for a view that an op writes to, such as one layer of a cache. torch 2.13 has no
    lowering of it (pytorch/pytorch#198068) and takes the offset for 0, so the op would write to the first layer. The
    fake kernel runs before lowering, so it registers one in time. If it cannot, the graph is guarded on the offset.
    """
    offset = tensor.storage_offset()
    if isinstance(offset, torch.SymInt) and not _lowered():
        int(offset)


_lowered = cache(lower_sym_storage_offset)


def check_apart(out: Tensor, inputs: Iterable[Tensor | None], names: Iterable[str]) -> None:
    """Raise if elements of out overlap each other or an input."""
    if overlaps_itself(out):
        raise InvalidProblem(
            "out", f"strides {out.stride()}", "memory of its own for each element", "allocate it with torch.empty"
        )
    for name, tensor in zip(names, inputs):
        if tensor is not None and share_memory(out, tensor):
            raise InvalidProblem(
                "out",
                f"memory that {name} lies in",
                "memory of its own",
                "allocate it with torch.empty, or leave it out",
            )


def check_no_vmap(out: Tensor, inputs: Iterable[Tensor]) -> None:
    """Raise if out or an input is batched by vmap, which has no rule for ops that write to an argument."""
    if batched((out, *inputs)):
        raise UnsupportedProblem("out= under vmap: leave out= out, which returns what vmap puts together")


def copied(out: Tensor, results: tuple[Tensor, Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the result to out, and return out and lse. Used if `torch_state.written_by_copy(out)` is true."""
    result, lse = results
    check_out(out, tuple(result.shape), result.dtype, q)
    return out.copy_(result), lse


def check_results(given: tuple[Tensor | None, ...], kinds: Sequence[Any], q: Tensor) -> None:
    """Raise if dout, out, lse or dlse do not fit this forward, because kernels index them by its shapes. kinds: (shape,
    dtype) of out and of lse.
    """
    for name, tensor, (shape, dtype) in zip(
        ("dout", "out", "lse", "dlse"), given, (kinds[0], kinds[0], kinds[1], kinds[1])
    ):
        if tensor is None:
            continue
        if tensor.layout != torch.strided:
            raise InvalidProblem(name, tensor.layout, "a strided (dense) tensor", "convert it with .to_dense()")
        if list(tensor.shape) != list(shape):
            raise InvalidProblem(
                name,
                f"shape {list(tensor.shape)}",
                f"{list(shape)}",
                "give the backward what belongs to this q, k and v",
            )
        if tensor.dtype != dtype:
            raise InvalidProblem(name, tensor.dtype, str(dtype), "give it in the dtype of the forward's result")
        if tensor.device != q.device:
            raise InvalidProblem(name, f"device {tensor.device}", f"q's device {q.device}", "move it beside q")


def written(tensor: Tensor) -> None:
    """Increment the tensor's version, as torch's in-place ops do, so that autograd detects a write to a saved
    tensor."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def functional(call: Call) -> bool:
    """Whether torch.func.functionalize is active. It has no rule for an autograd.Function, so a call with gradients
    raises.
    """
    if functionalized() and call.needs_grad:
        raise UnsupportedProblem(
            "gradients under torch.func.functionalize: leave it out; torch.compile makes a gradient's graph "
            "functional by itself"
        )
    return functionalized()


def forward_mode() -> UnsupportedProblem:
    """The error for a call with forward-mode tangents."""
    return UnsupportedProblem(
        "forward-mode derivatives: strobe has those of backward mode; use torch's math attention for others"
    )


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, q: Tensor) -> None:
    """Raise if out has another layout, shape, dtype or device than the result, or strides that kernels cannot write
    to."""
    if out.layout != torch.strided:
        raise InvalidProblem("out", out.layout, "a strided (dense) tensor", "allocate it with torch.empty")
    if list(out.shape) != list(shape):
        raise InvalidProblem(
            "out", f"shape {list(out.shape)}", f"{list(shape)}", "allocate it like q with v's head dimension"
        )
    if out.dtype != dtype:
        raise InvalidProblem("out", out.dtype, str(dtype), "allocate it in q's dtype")
    if out.device != q.device:
        raise InvalidProblem("out", f"device {out.device}", f"q's device {q.device}", "allocate it beside q")
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise InvalidProblem(
            "out", f"stride {out.stride(-1)} in the last dimension", "stride 1", "allocate it contiguous"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride())):
        raise InvalidProblem("out", f"strides {out.stride()}", "memory of its own for each element", "do not expand it")
