"""Arguments of `attention` and `attention_varlen` with a plan, as a call on local rows and a mask of all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem, wrong_type
from ..mods.mask import MaskMod
from ..problem.call import Call
from ..problem.foreign_arguments import no_mask
from ..problem.mask import NO_BOUND, Mask
from .attention import attend_plan
from .mods import Functions, builtin_part
from .packed import mask_of_offsets
from .plan import Plan


def attend(
    call: Call, plan: object, band: tuple[int, int], mask: Mask | None, out: Tensor | None, functions: Functions
) -> Tensor:
    """`attention` of local q, k and v [B, local rows, H, D] by a plan. All ranks of the plan must call it.

    call: without a mask. band: left and right as in a Call. mask: of the whole sequence. If neither band nor mask says
    anything, the plan's mask applies. out: must be None.
    """
    plan = _checked(plan, out)
    if mask is not None and not isinstance(mask, Mask):
        raise no_mask(mask)
    left, right = (None if bound == NO_BOUND else bound for bound in band)
    whole = Mask(left, right)
    asked = mask is not None or any(whole.structure)
    mask = (whole if mask is None else whole & mask) if asked else None
    if functions.are_any or isinstance(mask, MaskMod) or isinstance(plan.mask, MaskMod):
        return _uncompiled(call, plan, mask, functions)
    if not torch.compiler.is_compiling():
        return attend_plan(call, plan, mask)
    if mask is None or not any(mask.structure[2:]):
        from .compiled import attend_compiled

        return attend_compiled(call, plan, mask)
    return _uncompiled(call, plan, mask, functions)


def _uncompiled(call: Call, plan: Plan, mask: Mask | None, functions: Functions) -> Tensor:
    """Inside a compiled function the call breaks the graph."""
    if not torch.compiler.is_compiling():
        return attend_plan(call, plan, mask, functions)
    from .uncompiled import attend_uncompiled  # here, since the decorator imports torch's compiler, which loads Triton

    return cast("Callable[[Call, Plan, Mask | None, Functions], Tensor]", attend_uncompiled)(
        call, plan, mask, functions
    )


def attend_packed(
    call: Call,
    plan: object,
    band: tuple[int, int],
    mask: Mask | None,
    offsets: tuple[Tensor, Tensor | None],
    out: Tensor | None,
    functions: Functions,
) -> Tensor:
    """`attention_varlen` of local q, k and v [local rows, H, D] by a plan. offsets: of the whole packed tensor."""
    plan = _checked(plan, out)
    if functions.dropout is not None:
        raise UnsupportedProblem(
            "dropout_p of packed sequences with context_parallel: a weight's random number depends on its sequence and "
            "position there; call attention with strobe.documents"
        )
    if offsets[1] is not None and offsets[1] is not offsets[0]:
        raise InvalidProblem(
            "cu_seqlens_k", "other offsets than cu_seqlens_q", "the same", "leave it out with context_parallel"
        )
    if mask is not None and (not isinstance(mask, Mask) or any(builtin_part(mask).structure[2:])):
        raise UnsupportedProblem("mask of packed sequences with context_parallel: causal, window and mask_mod only")
    call = call._replace(q=call.q[None], k=call.k[None], v=call.v[None])
    documents = mask_of_offsets(plan, offsets[0])
    functions = functions._replace(are_packed=True)
    if mask is None and band == (NO_BOUND, NO_BOUND) and documents.documents is plan.mask.documents:
        return attend(call, plan, band, None, None, functions)[0]  # the plan's mask, as in `attention`
    return attend(call, plan, band, documents if mask is None else documents & mask, None, functions)[0]


def _checked(plan: object, out: Tensor | None) -> Plan:
    if not isinstance(plan, Plan):
        raise wrong_type(
            "context_parallel", plan, "a strobe.distributed.Plan", "make one with context_parallel(...).plan(...)"
        )
    if out is not None:
        raise UnsupportedProblem("out= with context_parallel: leave out= out")
    return plan
