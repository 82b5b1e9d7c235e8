"""Attention of this rank's rows by a plan: agreement of the ranks, then the exchange of heads around that of keys."""

from __future__ import annotations

from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem
from ..mods.mask import MaskMod
from ..ops import attention as ops
from ..ops import mods as ops_mods
from ..problem.call import DTYPES, Call, check
from ..problem.mask import Mask
from ..problem.mods import Dropout
from ..problem.torch_state import in_autocasts_dtype
from .agreement import ERROR, Description, check_agreement, described_error
from .heads import EnterHeads, LeaveHeads
from .keys import AttendKeys
from .mods import Functions, attend_mods, builtin_part
from .plan import Plan

PLAIN = Functions()


def attend_plan(call: Call, plan: Plan, mask: Mask | None, functions: Functions = PLAIN) -> Tensor:
    """mask: in place of the plan's, or None."""
    call, whole = in_autocasts_dtype(call), plan.mask if mask is None else mask
    if functions.are_any or isinstance(whole, MaskMod):
        plan = plan.for_mask(builtin_part(whole))
        mods = ops_mods.bind(call, functions.score, whole, is_part=True).mods
        agree(call, plan, f"{mods and mods.texts}{described(functions.dropout, call.q.is_cuda)}")
        return attend_mods(call, plan, whole, functions.shared(plan, call.q.device))
    if mask is not None:
        plan = plan.for_mask(mask)
    agree(call, plan)
    q, k, v, sinks = *call[:3], call.sinks
    if plan.heads_size > 1:
        sinks = sinks if sinks is None else sinks[own_heads(plan, q.shape[2])]
        q, k, v = EnterHeads.apply(plan, q, k, v)
    if plan.keys_size > 1:
        out = AttendKeys.apply(plan, call[5:10], q, k, v, sinks)
    else:
        out = ops.run(call._replace(q=q, k=k, v=v, sinks=sinks).with_mask(plan.mask), None, True)[0]
    return LeaveHeads.apply(plan, out) if plan.heads_size > 1 else out


def described(dropout: Dropout | None, on_gpu: bool) -> str:
    """The text by which ranks compare their dropout. On a GPU it leaves out the seed: each new text is compared, which
    waits for the device, and training has a new seed in each step.
    """
    if dropout is None:
        return ""
    seed = "" if on_gpu or isinstance(dropout.seed, Tensor) else f", seed {dropout.seed}"
    return f", dropout_p {dropout.p}{seed}"


def own_heads(plan: Plan, heads_q: int) -> slice:
    """The query heads that this rank computes."""
    heads = heads_q // plan.heads_size
    return slice(plan.ranks.heads_rank * heads, (plan.ranks.heads_rank + 1) * heads)


def agree(call: Call, plan: Plan, functions: str = "") -> None:
    """Raise on every rank if a rank's call is invalid, or differs from those of others. functions: what tells custom
    scores and masks apart.

    On a CPU in every call. On a GPU comparing waits for the device, so only the first call with these sizes compares.
    """
    text, error = described_error(lambda: _check_local(call, plan))
    mine = {ERROR: text, **_described(call, plan), "functions": functions}
    key = tuple(mine.values())
    if call.q.is_cuda and (key in plan.agreed or (error is not None and plan.agreed)):
        if error is not None:
            raise error
        return
    if plan.ranks.levels:
        try:
            check_agreement(mine, plan.ranks, call.q.device)
        except InvalidProblem as other:
            if error is not None:
                raise error from other
            raise
    if error is not None:
        raise error
    if plan.keys_size > 1 and call.batch_invariant:
        raise UnsupportedProblem("batch_invariant with an exchange of keys: use context_parallel(scheme='heads')")
    if call.q.is_cuda:
        plan.agreed.add(key)


def _check_local(call: Call, plan: Plan) -> None:
    check(call)
    s = plan.sizes
    for name, rows in (("q", call.q.shape[1]), ("k", call.k.shape[1])):
        if rows != plan.local_rows:
            raise InvalidProblem(name, f"{rows} rows", f"the plan's {plan.local_rows} on this rank", "use plan.shard")
    for name, heads, planned in (("q", call.q.shape[2], s.heads_q), ("k", call.k.shape[2], s.heads_kv)):
        if heads != planned:
            raise InvalidProblem(name, f"{heads} heads", f"the plan's {planned}", "make a plan for these heads")
    mask, batch = plan.mask, call.q.shape[0]
    ids = None if mask.documents is None else mask.documents.ids_q
    for name, part in (("prefix", mask.prefix), ("key_lengths", mask.key_lengths), ("documents", ids)):
        if isinstance(part, Tensor) and part.shape[0] != batch:
            raise InvalidProblem(
                f"mask {name}", f"{part.shape[0]} batch entries", f"q's {batch}", "build the mask for this batch"
            )


def _described(call: Call, plan: Plan) -> Description:
    sizes = lambda t: f"{t.shape[0]} x {t.shape[2]} heads x {t.shape[3]} {DTYPES[t.dtype]}"
    described = {name: sizes(t) if t.dim() == 4 and t.dtype in DTYPES else "" for name, t in zip("qkv", call[:3])}
    return {
        "plan": plan.summary,
        "mask": f"{plan.mask.structure} {plan.fingerprint}",
        **described,
        "sinks": "none" if call.sinks is None else f"{list(call.sinks.shape)} {call.sinks.dtype}",
        "options": f"scale {call.scale}, softcap {call.softcap}, {call[7:10]}",
    }
