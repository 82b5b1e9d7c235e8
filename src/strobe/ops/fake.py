"""What the ops say of themselves and of their results without running: schemas, and kernels of fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem
from ..problem.call import Call, accumulator, check
from ..problem.memory_overlap import overlaps_itself, share_memory
from ..problem.torch_state import batched, functionalized


def schema(fields: dict[str, str], defaults: dict[str, Any]) -> str:
    """A kind of call, its annotations in torch's words."""
    kinds = {
        "Tensor | None": "Tensor?",
        "int": "SymInt",
        "float | None": "float?",
    }
    default = {name: "=" + repr(value).replace("'", '"') for name, value in defaults.items()}
    called = {"kernel": "wanted"}  # inductor has a `kernel` of its own beside an op's keywords
    return ", ".join(f"{kinds.get(kind, kind)} {called.get(name, name)}{default.get(name, '')}" for name, kind in fields.items())


def forward(*flat: Any) -> tuple[Tensor, Tensor]:
    call = Call(*flat)
    check(call)
    q, wide = call.q, accumulator(call.q.dtype)
    lse_shape = (q.shape[1], q.shape[0]) if call.packed else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty((*q.shape[:-1], call.v.shape[-1]), dtype=wide if call.partial else q.dtype), q.new_empty(lse_shape, dtype=wide)


def forward_out(out: Tensor, *flat: Any) -> Tensor:
    like, lse = forward(*flat)
    check_out(out, tuple(like.shape), like.dtype, like)
    writes_to(out)
    return lse


def backward(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *flat: Any) -> tuple[Tensor, ...]:
    call = Call(*flat)
    check_results((dout, out, lse, dlse), [(tuple(like.shape), like.dtype) for like in forward(*flat)], call.q)
    dsinks = lse.new_empty(0) if call.sinks is None else torch.empty_like(call.sinks)
    return *(t.new_empty(t.shape) for t in call[:3]), dsinks


def writes_to(tensor: Tensor) -> None:
    """A compiled op writes to this tensor: whose offset in its storage, where it is symbolic, Inductor has to be taught."""
    if isinstance(tensor.storage_offset(), torch.SymInt):
        _teach_offsets()


@cache
def _teach_offsets() -> None:
    """Of a part of a tensor, such as one layer's cache, that an op writes to, Inductor asks the offset by a call that it has no lowering of (torch
    2.13; pytorch/pytorch#198068), and takes it for 0: the first layer's cache would be written to. It is told before it begins."""
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    offset = torch.ops.aten.sym_storage_offset.default
    if offset not in lowerings:

        @register_lowering(offset)
        def lowered(_: Any) -> Any:
            found = V.graph.current_node.meta["val"]
            return found.node.expr if isinstance(found, torch.SymInt) else found


def check_apart(out: Tensor, inputs: Iterable[Tensor | None], names: Iterable[str]) -> None:
    """That each element of out has memory of its own, and that nothing is read where it is written."""
    if overlaps_itself(out):
        raise InvalidProblem("out", f"strides {out.stride()}", "memory of its own for each element", "allocate it with torch.empty")
    for name, tensor in zip(names, inputs):
        if tensor is not None and share_memory(out, tensor):
            raise InvalidProblem("out", f"memory that {name} lies in", "memory of its own", "allocate it with torch.empty, or leave it out")


def check_no_vmap(out: Tensor, inputs: Iterable[Tensor]) -> None:
    """That none of them is many, to vmap, which has no rule for what is written where it is told."""
    if batched((out, *inputs)):
        raise UnsupportedProblem("out= under vmap: leave out= out, which returns what vmap puts together")


def copied(out: Tensor, results: tuple[Tensor, Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    """out with a result copied to it, and lse, where `dispatch.written_by_copy` says so."""
    result, lse = results
    check_out(out, tuple(result.shape), result.dtype, q)
    return out.copy_(result), lse


def check_results(given: tuple[Tensor | None, ...], kinds: Sequence[Any], q: Tensor) -> None:
    """Refuse dout, out, lse or dlse of another forward: kernels read them by this one's shapes. kinds: shape and dtype of its out and of its lse."""
    for name, tensor, (shape, dtype) in zip(("dout", "out", "lse", "dlse"), given, (kinds[0], kinds[0], kinds[1], kinds[1])):
        if tensor is None:
            continue
        if tensor.layout != torch.strided:
            raise InvalidProblem(name, tensor.layout, "a strided (dense) tensor", "convert it with .to_dense()")
        if list(tensor.shape) != list(shape):
            raise InvalidProblem(name, f"shape {list(tensor.shape)}", f"{list(shape)}", "give the backward what belongs to this q, k and v")
        if tensor.dtype != dtype:
            raise InvalidProblem(name, tensor.dtype, str(dtype), "give it in the dtype of the forward's result")
        if tensor.device != q.device:
            raise InvalidProblem(name, f"device {tensor.device}", f"q's device {q.device}", "move it beside q")


def written(tensor: Tensor) -> None:
    """Tell autograd that a kernel has written to a tensor, as torch's own in-place ops do: who saved it for a backward is then told so."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def functional(call: Call) -> bool:
    """Whether an op is called under torch.func.functionalize, which has no rule for an autograd.Function."""
    if functionalized() and call.needs_grad:
        raise UnsupportedProblem(
            "gradients under torch.func.functionalize: leave it out; torch.compile makes a gradient's graph functional by itself"
        )
    return functionalized()


def forward_mode() -> UnsupportedProblem:
    return UnsupportedProblem("forward-mode derivatives: strobe has those of backward mode; use torch's math attention for others")


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, q: Tensor) -> None:
    if out.layout != torch.strided:
        raise InvalidProblem("out", out.layout, "a strided (dense) tensor", "allocate it with torch.empty")
    if list(out.shape) != list(shape):
        raise InvalidProblem("out", f"shape {list(out.shape)}", f"{list(shape)}", "allocate it like q with v's head dimension")
    if out.dtype != dtype:
        raise InvalidProblem("out", out.dtype, str(dtype), "allocate it in q's dtype")
    if out.device != q.device:
        raise InvalidProblem("out", f"device {out.device}", f"q's device {q.device}", "allocate it beside q")
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise InvalidProblem("out", f"stride {out.stride(-1)} in the last dimension", "stride 1", "allocate it contiguous")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride())):
        raise InvalidProblem("out", f"strides {out.stride()}", "memory of its own for each element", "do not expand it")
