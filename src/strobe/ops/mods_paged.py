"""The ops of packed queries over a cache with a custom score or mask: `strobe::mod_paged`, `mod_paged_out`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.protocol import Forward
from ..problem.decode import refuse_gradients
from ..problem.mask import Mask
from ..problem.mods import Mods, ModTexts
from ..problem.paged import PagedCall
from ..problem.torch_state import written_by_copy
from ..selection.select import Choice
from . import decode, paged
from .attention import LIBRARY
from .cached_functions import COUNT, bind_functions, refuse_wrapped
from .fake import copied
from .mods import EXTRA_ARGUMENTS, arguments, mods_of


def attend(
    call: PagedCall, score: object, mask: Mask | None, out: Tensor | None = None, alone: bool = False
) -> tuple[Tensor, Tensor | None]:
    """out and lse of a call with or without a custom score and mask. alone: the caller ignores lse."""
    if score is None and mask is None:
        return paged.run(call, out, alone)
    call = bind(call, score, mask)
    if call.mods is None:
        return paged.run(call, out, alone)
    choice = decode.direct(call, paged.decide, out)
    if choice is not None:
        return decode.attend(call, choice, alone, out)
    refuse_wrapped(call, out)
    read = [*call.tensors, *(call.mods or Mods(ModTexts())).tensors]
    refuse_gradients(read if out is None else [*read, out], "attention_paged")
    if out is None:
        return PAGED(*arguments(call))
    if written_by_copy(out):
        return copied(out, PAGED(*arguments(call)), call.q)
    return out, PAGED_OUT(out, *arguments(call))


def choice(call: PagedCall, score: object, mask: Mask | None) -> Choice:
    if score is None and mask is None:
        return paged.decide(paged.prepare(call))
    return paged.decide(bind(call, score, mask))


def bind(call: PagedCall, score: object, mask: Mask | None) -> PagedCall:
    return bind_functions(paged.prepare(call), score, mask)


def _received(flat: tuple) -> PagedCall:
    return PagedCall(*flat[COUNT:])._replace(mods=mods_of(flat[:COUNT], False))


def _paged(*flat: Any) -> tuple[Tensor, Tensor]:
    call = _received(flat)
    found = paged.decide(call)
    out, lse = (call.q.new_empty_strided(*like[:2], dtype=like[2]) for like in found.problem.outputs)
    decode.write(found, call, Forward(out, lse))
    return out, lse


def _paged_out(out: Tensor, *flat: Any) -> Tensor:
    call = _received(flat)
    return decode.write_out(out, call, paged.decide(call))


def _fake(*flat: Any) -> tuple[Tensor, Tensor]:
    return paged.paged_fake(*flat[COUNT:])


def _fake_out(out: Tensor, *flat: Any) -> Tensor:
    return paged.paged_out_fake(out, *flat[COUNT:])


_FIELDS = f"{EXTRA_ARGUMENTS}, {decode.fields(PagedCall)}"
LIBRARY.define(f"mod_paged({_FIELDS}) -> (Tensor, Tensor)")
LIBRARY.define(f"mod_paged_out(Tensor(a!) out, {_FIELDS}) -> Tensor")
for _name, _body, _fake_body in (("mod_paged", _paged, _fake), ("mod_paged_out", _paged_out, _fake_out)):
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"strobe::{_name}", _fake_body, lib=LIBRARY)

PAGED = torch.ops.strobe.mod_paged.default
PAGED_OUT = torch.ops.strobe.mod_paged_out.default
