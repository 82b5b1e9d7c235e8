"""The ops of packed queries over a KV cache: `paged`, and `paged_out`, which writes to a given tensor. They have
schemas and fake kernels, but no autograd. Imports no kernel language.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from ..problem.call import accumulator
from ..problem.decode import refuse_gradients
from ..problem.paged import PagedCall, PagedProblem, check
from ..problem.torch_state import is_distributed, written_by_copy
from ..selection.select import Choice
from . import vmap
from .attention import LIBRARY
from .decode import attend, autocast_queries, decided, direct, fields, write_out
from .fake import check_no_vmap, check_out, copied, writes_to


def decide(call: PagedCall) -> Choice[PagedProblem]:
    """The Choice for a call. On a cache miss, it validates the arguments and calls `select`."""
    return decided(call, PagedProblem.from_call)


def _paged(*flat: Any) -> tuple[Tensor, Tensor | None]:
    call = PagedCall(*flat)
    return attend(call, decide(call))


def _paged_out(out: Tensor, *flat: Any) -> Tensor:
    call = PagedCall(*flat)
    return write_out(out, call, decide(call))


# ---------------------------------------------------------------- schemas and fake kernels


def paged_fake(*flat: Any) -> tuple[Tensor, Tensor]:
    call = PagedCall(*flat)
    check(call)
    (total, heads, _), wide = call.q.shape, accumulator(call.q.dtype)
    out = call.q.new_empty((total, heads, call.v.shape[-1]), dtype=wide if call.partial else call.q.dtype)
    return out, call.q.new_empty((heads, total), dtype=wide)


def paged_out_fake(out: Tensor, *flat: Any) -> Tensor:
    like, lse = paged_fake(*flat)
    check_out(out, tuple(like.shape), like.dtype, like)
    writes_to(out)
    return lse


LIBRARY.define(f"paged({fields(PagedCall)}) -> (Tensor, Tensor)")
LIBRARY.define(f"paged_out(Tensor(a!) out, {fields(PagedCall)}) -> Tensor")
for _name, _body, _fake in (("paged", _paged, paged_fake), ("paged_out", _paged_out, paged_out_fake)):
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"strobe::{_name}", _fake, lib=LIBRARY)
vmap.register(LIBRARY, "paged")

PAGED = torch.ops.strobe.paged.default
PAGED_OUT = torch.ops.strobe.paged_out.default


# ---------------------------------------------------------------- entry points


def prepare(call: PagedCall) -> PagedCall:
    """The call as the op takes it: q is cast to autocast's dtype if the cache has this dtype or float8_e4m3fn."""
    return call._replace(q=autocast_queries(call.q, call.k))


@overload
def run(call: PagedCall, out: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
@overload
def run(call: PagedCall, out: Tensor | None, alone: bool) -> tuple[Tensor, Tensor | None]: ...
def run(call: PagedCall, out: Tensor | None = None, alone: bool = False) -> tuple[Tensor, Tensor | None]:
    """out and lse of a call. The op's body runs directly if no dispatcher is needed. alone: the caller ignores lse."""
    choice = direct(call, decide, out)
    if choice is not None:
        return attend(call, choice, alone, out)
    call = prepare(call)
    refuse_gradients(call.tensors if out is None else [*call.tensors, out], "attention_paged")
    if is_distributed(call.q):
        from . import sharding  # at the first DTensor

        sharding.teach()
    if out is not None:
        check_no_vmap(out, call.tensors)
        if written_by_copy(out):
            return copied(out, PAGED(*call[:-1]), call.q)
        return out, PAGED_OUT(out, *call[:-1])
    return PAGED(*call[:-1])
