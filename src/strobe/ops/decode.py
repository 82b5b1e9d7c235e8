"""The ops of a KV cache: `decode` reads it, `append` writes it. They have schemas and fake kernels, but no autograd.
Imports no kernel language.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any, overload

import torch
from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem
from ..kernels.protocol import Forward
from ..kernels.runtime.launch_cache import CACHE, OP, decode_addresses
from ..kernels.runtime.workspace import cut, empty_here
from ..problem import decode
from ..problem.append import AppendCall, AppendProblem
from ..problem.append import check as check_append
from ..problem.cache import FP8
from ..problem.call import accumulator
from ..problem.decode import DecodeCall, DecodeProblem, refuse_gradients
from ..problem.memory_overlap import share_memory
from ..problem.paged import PagedCall
from ..problem.target import Target
from ..problem.torch_private import FakeTensor, is_any_autocast_enabled
from ..problem.torch_state import batched, is_distributed, written_by_copy
from ..selection.replay import launches_here
from ..selection.select import Choice, select
from . import vmap
from .attention import LIBRARY, _launch
from .fake import check_apart, check_no_vmap, check_out, copied, schema, writes_to, written

WHOLE = ("q", "k", "v", "k_new", "v_new")  # kernels read the strides of these; every other tensor must be contiguous


def decide(call: DecodeCall) -> Choice[DecodeProblem]:
    """The Choice for a call. On a cache miss, it validates the arguments and calls `select`."""
    return decided(call, DecodeProblem.from_call)


def decide_append(call: AppendCall) -> Choice[AppendProblem]:
    return decided(call, AppendProblem.from_call)


def decided(call: Any, problem_of: Callable[[Any], Any]) -> Choice:
    tensors, rest = call.tensors_and_rest
    cached = not isinstance(call[0], FakeTensor)
    choice = CACHE.lookup(OP, tensors, rest) if cached else None
    if choice is None:
        choice = select(problem_of(call), Target.of(call[0].device))
        if _scattered(call):  # kernels get contiguous copies: the caller's addresses do not identify their launches
            choice = replace(choice, forward=choice.forward.changed(replays=False))
        if cached:
            CACHE.insert(OP, tensors, rest, choice)
    return choice


def _received(call: Any) -> Any:
    """The call with contiguous small tensors. Kernels do not read the strides of these tensors."""
    return call._replace(**{name: tensor.contiguous() for name, tensor in _scattered(call).items()})


def _scattered(call: DecodeCall | PagedCall | AppendCall) -> dict[str, Tensor]:
    """The call's non-contiguous small tensors, by name. Small tensors are all but those in WHOLE."""
    small = (
        (name, field) for name, field in zip(call._fields, call) if isinstance(field, Tensor) and name not in WHOLE
    )
    return {
        name: tensor for name, tensor in small if tensor.layout == torch.strided and not tensor.is_contiguous()
    }  # `check` rejects sparse tensors


# ---------------------------------------------------------------- running it


def write(
    choice: Choice[Any], call: DecodeCall | PagedCall, t: Forward, workspace: dict[str, Tensor] | None = None
) -> None:
    if not choice.problem.vacuous:
        _launch(choice.forward, _received(call), t, workspace)


def attend(
    call: DecodeCall | PagedCall, choice: Choice[Any], alone: bool = False, given: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """out and lse. Replays a cached launch at these addresses if there is one: Triton's launcher takes longer than a
    short decode.

    alone: the caller ignores lse. lse then follows the workspace in the same allocation, and the returned lse may be
    None. given: out, which is checked unless the same launch has run at these addresses.
    """
    plan, problem = choice.forward, choice.problem
    kind, lse_kind = problem.outputs
    launches = launches_here(plan, call.q) if given is None or _is_like(given, kind) else None
    if launches is None:
        if given is not None:
            return given, write_out(given, call, choice)
        out, lse = (call.q.new_empty_strided(*like[:2], dtype=like[2]) for like in (kind, lse_kind))
        write(choice, call, Forward(out, lse))
        return out, lse
    out = empty_here(*kind) if given is None else given
    lse, size = None if alone else empty_here(*lse_kind), plan.room + alone * problem.lse_bytes
    held = [empty_here((size,), (1,), torch.uint8)] if size else []
    begin = held[0].data_ptr() if held else 0
    places = (out.data_ptr(), begin + plan.room if lse is None else lse.data_ptr(), *[begin] * bool(plan.room))
    launch = launches.get(decode_addresses(call, *places))
    if launch is None or not launch():
        lse = held[0][plan.room :].view(lse_kind[2]).view(lse_kind[0]) if lse is None else lse
        if given is not None:
            _check_given(given, call, problem)
        write(choice, call, Forward(out, lse), cut(plan, held if plan.room else []))
    if given is not None:
        written(given)
    return out, lse


def _is_like(out: Tensor, kind: tuple) -> bool:
    """Whether out has the shape, strides and dtype of a newly allocated output. kind: these three."""
    return out.shape == kind[0] and out.stride() == kind[1] and out.dtype == kind[2]


def _decode(*flat: Any) -> tuple[Tensor, Tensor | None]:
    call = DecodeCall(*flat)
    return attend(call, decide(call))


def _decode_out(out: Tensor, *flat: Any) -> Tensor:
    call = DecodeCall(*flat)
    return write_out(out, call, decide(call))


def write_out(out: Tensor, call: DecodeCall | PagedCall, choice: Choice[Any]) -> Tensor:
    """Write the result to `out` and return lse."""
    problem = choice.problem
    _check_given(out, call, problem)
    lse = call.q.new_empty(problem.out_shapes[1], dtype=problem.lse_dtype)
    write(choice, call, Forward(out, lse))
    written(out)
    return lse


def _check_given(out: Tensor, call: DecodeCall | PagedCall, problem: DecodeProblem) -> None:
    check_out(out, problem.out_shapes[0], problem.out_dtype, call.q)
    # out may be q itself: kernels read each row before they write it
    is_q = out.data_ptr() == call.q.data_ptr() and out.shape == call.q.shape and out.stride() == call.q.stride()
    read = (None if is_q else call.q, call.k, call.v, call.sinks, call.k_scale, call.v_scale)
    check_apart(
        out, read, ("q", "the cache's k", "the cache's v", "sinks", "the cache's k_scale", "the cache's v_scale")
    )


def _append(*flat: Any) -> None:
    call = AppendCall(*flat)
    _write_new(call, decide_append(call))


def _write_new(call: AppendCall, choice: Choice[AppendProblem]) -> None:
    if not choice.problem.vacuous:
        _check_written_apart(call)
        _check_new_apart(call)
        _launch(choice.forward, _received(call), None)
        for tensor in call.written:
            written(tensor)


def _appended(*flat: Any) -> tuple[Tensor, Tensor]:
    """Copies of the pools with the new keys and values: the functional form of `append`."""
    call = AppendCall(*flat)
    decide_append(call)
    _check_written_apart(call)
    k, v = call.k.clone(), call.v.clone()
    _append(*call._replace(k=k, v=v))
    return k, v


def _check_written_apart(call: AppendCall) -> None:
    """Raise if two tensors that `append` writes share memory. Checked on every call, because the key of the Choice does
    not contain addresses.
    """
    if share_memory(call.k, call.v):
        raise InvalidProblem(
            call.held.word("v"),
            "memory that keys lie in",
            "memory of its own",
            "append would write values over keys; copy one",
        )
    if len(call.written) < 3:
        return
    written_fields = [(call.held.word(name), getattr(call, name)) for name in ("k", "v", "k_scale", "v_scale")]
    fields_apart = [(word, field) for word, field in written_fields if field is not None and field.dim() > 1]
    for (first, one), (second, other) in combinations(fields_apart, 2):
        if share_memory(one, other):
            remedy = "give pools and scales memory of their own"
            raise InvalidProblem(second, f"memory that {first} lies in", "memory of its own", remedy)


def _check_new_apart(call: AppendCall) -> None:
    """Raise if k_new or v_new overlaps a pool. The overlap check takes 9 us, so it runs only for tensors with a common
    storage.
    """
    pools = [pool.untyped_storage().data_ptr() for pool in (call.k, call.v)]
    for name, new in (("k_new", call.k_new), ("v_new", call.v_new)):
        if new.untyped_storage().data_ptr() in pools and (share_memory(call.k, new) or share_memory(call.v, new)):
            raise InvalidProblem(
                name,
                "memory that the cache lies in",
                "memory of its own",
                "append could write there before it has read; clone it",
            )


# ---------------------------------------------------------------- schemas and fakes


def decode_fake(*flat: Any) -> tuple[Tensor, Tensor]:
    call = DecodeCall(*flat)
    decode.check(call)
    (batch, rows, heads, _), wide = call.q.shape, accumulator(call.q.dtype)
    out = call.q.new_empty((batch, rows, heads, call.v.shape[-1]), dtype=wide if call.partial else call.q.dtype)
    return out, call.q.new_empty((batch, heads, rows), dtype=wide)


def decode_out_fake(out: Tensor, *flat: Any) -> Tensor:
    like, lse = decode_fake(*flat)
    check_out(out, tuple(like.shape), like.dtype, like)
    writes_to(out)
    return lse


def _append_fake(*flat: Any) -> None:
    call = AppendCall(*flat)
    check_append(call)
    for tensor in call.written:
        writes_to(tensor)


def _appended_fake(*flat: Any) -> tuple[Tensor, Tensor]:
    call = AppendCall(*flat)
    check_append(call)
    return torch.empty_like(call.k), torch.empty_like(call.v)


def fields(kind: type[DecodeCall] | type[PagedCall] | type[AppendCall]) -> str:
    """The arguments of an op in its schema. The ops of `ops.mods` take the parts of `mods`."""
    words = {name: getattr(note, "__forward_arg__", note) for name, note in kind.__annotations__.items()}
    words.pop("mods", None)
    return schema(words, kind._field_defaults)


LIBRARY.define(f"decode({fields(DecodeCall)}) -> (Tensor, Tensor)")
LIBRARY.define(f"decode_out(Tensor(a!) out, {fields(DecodeCall)}) -> Tensor")
_APPEND = fields(AppendCall).replace("Tensor k,", "Tensor(a!) k,").replace("Tensor v,", "Tensor(b!) v,")
_SCALED = _APPEND.replace("Tensor? k_scale", "Tensor(c!)? k_scale").replace("Tensor? v_scale", "Tensor(d!)? v_scale")
LIBRARY.define(f"append({_APPEND}) -> ()")
LIBRARY.define(f"append_scaled({_SCALED}) -> ()")  # a scale for each key and head is written, too
LIBRARY.define(f"appended({fields(AppendCall)}) -> (Tensor, Tensor)")
for _name, _body, _fake in (
    ("decode", _decode, decode_fake),
    ("decode_out", _decode_out, decode_out_fake),
    ("append", _append, _append_fake),
    ("append_scaled", _append, _append_fake),
    ("appended", _appended, _appended_fake),
):
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"strobe::{_name}", _fake, lib=LIBRARY)
vmap.register(LIBRARY, "decode")

DECODE = torch.ops.strobe.decode.default
DECODE_OUT = torch.ops.strobe.decode_out.default
APPEND = torch.ops.strobe.append.default
APPEND_SCALED = torch.ops.strobe.append_scaled.default
APPENDED = torch.ops.strobe.appended.default


# ---------------------------------------------------------------- entry points


def direct(call: Any, decide: Callable[[Any], Choice], out: Tensor | None) -> Choice | None:
    """The Choice of a call that writes to `out` and needs no dispatcher, or None."""
    if not isinstance(call.q, Tensor):
        return None
    return CACHE.direct_choice(call, decide, *([] if out is None else [out]))


def prepare(call: DecodeCall) -> DecodeCall:
    """The call as the op takes it: q is cast to autocast's dtype if the cache has this dtype or float8_e4m3fn."""
    q = autocast_queries(call.q, call.k)
    return call if q is call.q else call._replace(q=q)


def autocast_queries(q: Tensor, k: Tensor) -> Tensor:
    """q in autocast's dtype, if it is enabled and the cache has this dtype or float8_e4m3fn; else q itself."""
    if isinstance(q, Tensor) and is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        if q.is_floating_point() and q.dtype != torch.float64 and k.dtype in (dtype, FP8):
            return q.to(dtype)
    return q


@overload
def run(call: DecodeCall, out: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
@overload
def run(call: DecodeCall, out: Tensor | None, alone: bool) -> tuple[Tensor, Tensor | None]: ...
def run(call: DecodeCall, out: Tensor | None = None, alone: bool = False) -> tuple[Tensor, Tensor | None]:
    """out and lse of a call. The op's body runs directly if no dispatcher is needed. alone: the caller ignores lse."""
    choice = direct(call, decide, out)
    if choice is not None:
        return attend(call, choice, alone, out)
    call = prepare(call)
    refuse_gradients(call.tensors if out is None else [*call.tensors, out], "decode")
    if is_distributed(call.q):
        from . import sharding  # at the first DTensor

        sharding.teach()
    if out is not None:
        check_no_vmap(out, call.tensors)
        if written_by_copy(out):
            return copied(out, DECODE(*call[:-1]), call.q)
        return out, DECODE_OUT(out, *call[:-1])
    return DECODE(*call[:-1])


def append(call: AppendCall) -> None:
    """Write k_new and v_new to the pools; in place, or by a copy if `written_by_copy` requires it."""
    choice = CACHE.direct_choice(call, decide_append) if isinstance(call.k_new, Tensor) else None
    if choice is not None:
        _write_new(call, choice)
        return
    refuse_gradients(call.tensors, "append")
    if batched(call.tensors):
        raise UnsupportedProblem(
            "append under vmap: its batch entries are sequences already; append to all of them at once"
        )
    if is_distributed(call.k):
        from . import sharding

        call = sharding.own_append(call)
    if not any(written_by_copy(tensor) for tensor in call.written):
        (APPEND_SCALED if len(call.written) > 2 else APPEND)(*call)
        return
    if len(call.written) > 2:
        raise UnsupportedProblem("append with a scale for each key and head to tensors that are written by copy")
    for pool, grown in zip((call.k, call.v), APPENDED(*call)):
        pool.copy_(grown)
