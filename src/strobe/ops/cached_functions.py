"""Binds a custom score and mask to a call over a KV cache: programs, and what they capture now. Refuses wrapped tensors
beside functions.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor
from torch.nn import Parameter

from ..errors import UnsupportedProblem
from ..mods.mask import MaskMod
from ..mods.score import as_score_mod
from ..problem.cache import Held
from ..problem.call import FARTHEST, Call, check_captured
from ..problem.decode import DecodeCall
from ..problem.mask import NO_BOUND, Mask
from ..problem.mods import Mods, ModTexts
from ..problem.paged import PagedCall
from ..problem.torch_state import batched, is_distributed

COUNT = 10  # arguments of an op that describe the functions and the dropout
CacheCall = TypeVar("CacheCall", DecodeCall, PagedCall)


def bind_functions(call: CacheCall, score: object, mask: Mask | None) -> CacheCall:
    """A call over a cache with a custom score and a mask. The mask's `left` and `right` become the call's own, so that
    kernels skip blocks of keys. The rest of the mask is a function. Gradients are refused, so there is none.
    """
    mods = Mods(ModTexts())
    # positions are those of the cache, and lengths are on the device
    is_shaped = call.seqlens.dim() == 1 and call.q.dim() > 1  # else the call is refused when it is decided
    sizes = {"b": call.seqlens.shape[0], "h": call.q.shape[-2], "q": 0, "k": 0} if is_shaped else None
    if score is not None:
        modification = as_score_mod(score)
        if sizes is not None:
            modification.check(sizes)
        bound = modification.bind(False)
        mods = mods._replace(texts=ModTexts(bound.text), score_tensors=bound.tensors, score_numbers=bound.numbers)
    if isinstance(mask, MaskMod):
        if sizes is not None:
            mask.check(sizes)
        call = call._replace(left=_least(call.left, mask.left), right=_least(call.right, mask.right))
        part = mask.within_bounds
        if part is not None:
            seen = part.bind()
            texts = mods.texts._replace(mask=seen.program.text)
            mods = mods._replace(texts=texts, mask_tensors=seen.tensors, mask_numbers=seen.numbers)
    if not mods.texts.programs:
        return call
    call = call._replace(mods=mods)
    check_captured(call)
    return call


def _least(bound: int, other: int | None) -> int:
    """The tighter of a call's bound and a mask's."""
    if other is None:
        return bound
    return min(other, FARTHEST) if bound == NO_BOUND else min(bound, other)


def refuse_wrapped(call: Call | DecodeCall | PagedCall, out: Tensor | None = None) -> None:
    """Raise UnsupportedProblem if a tensor of a call that the dispatcher runs is a DTensor or batched by vmap. The ops
    with functions have rules for neither.
    """
    mods = call.mods or Mods(ModTexts())
    texts, has_dropout = mods.texts, mods.dropout_seed is not None
    word = "score_mod" if texts.score else "mask" if texts.mask else "dropout_p" if has_dropout else "max_scores"
    named: dict[str, object] = {**call._asdict(), "out": out}
    named |= {f"tensor {n} that score_mod or mask captures": tensor for n, tensor in enumerate(mods.tensors)}
    tensors = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}
    for name, tensor in tensors.items():
        if type(tensor) is not Parameter and is_distributed(tensor):  # Dynamo cannot read the module of Parameter
            got, remedy = name, "call it on local tensors (DTensor.to_local), where heads and positions begin at 0"
            if isinstance(call, Call):
                remedy += ", or share a sequence by strobe.distributed.context_parallel"
            elif name in Held._fields:
                got = call.held.word(name)
            raise UnsupportedProblem(f"{word} with DTensors: {got} is one; {remedy}")
    if batched([*tensors.values()]):
        raise UnsupportedProblem(f"{word} under vmap: make one call outside of it, with the entries as a batch")
