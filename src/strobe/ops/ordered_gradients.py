"""Gradients of captured tensors in a fixed order, for `deterministic=True` on GPUs.

The kernels add to gradients of captured tensors by atomics, in the order in which programs finish. With
`deterministic=True` they get the score's gradient without these additions. A second pass, in torch operations, computes
the gradient of the scores again for a block of rows at a time. It sums over all positions that no index depends on, and
adds the rest by a sort. Its sums have a fixed order, so that equal calls have equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..kernels.protocol import Backward
from ..mods.evaluate import evaluate, inside
from ..mods.mask import MaskMod
from ..mods.program import Program
from ..problem.call import Call
from ..problem.mods import Mods
from ..problem.problem import Problem
from ..selection.select import Choice

MOST_ELEMENTS = 1 << 24  # of a block's scores, over all heads


def are_apart(choice: Choice[Problem], mods: Mods) -> bool:
    """Whether a call's backward adds nothing to gradients of captured tensors, so that this pass must."""
    found, plan = choice.problem.mods, choice.backward
    is_shorter = found is not None and found.gradient != mods.texts.gradient
    return is_shorter and plan is not None and not plan.kernel.name.startswith("cpu.")  # which adds in a fixed order


def add_ordered(problem: Problem, call: Call, mods: Mods, given: Backward, sums: Sequence[Tensor | None]) -> None:
    """Add the gradients of captured tensors to `sums`."""
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):  # products in float32
        _add(problem, call, mods, given, sums)


def _add(problem: Problem, call: Call, mods: Mods, given: Backward, sums: Sequence[Tensor | None]) -> None:
    program = Program.parse(mods.texts.gradient)
    captured = mods.score_tensors, mods.score_numbers
    for inputs, ds in _blocks(problem, call, mods, given):
        results = iter(evaluate(program, inputs | {"grad": ds}, captured)[1:])
        for scatter in program.scatters:
            value, indices = next(results), [next(results) for _ in range(scatter.ndim)]
            target = sums[scatter.tensor]
            if target is not None:  # whatever the function gives for a score that a row does not see
                _add_at(target, indices, torch.where(ds == 0, 0.0, value.expand_as(ds)))


def _blocks(problem: Problem, call: Call, mods: Mods, given: Backward) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Inputs of the functions and the gradient of modified scores, [H, rows, S_k], of a block of rows."""
    (batch, rows, heads, _), keys = call.q.shape, call.k.shape[1]
    position = lambda start, stop: torch.arange(start, stop, dtype=torch.int32, device=call.q.device)
    score_program = Program.parse(mods.texts.score)
    builtin = MaskMod.of(call.mask).whole.bind() if any(call.structure) else None
    step = max(1, MOST_ELEMENTS // max(1, heads * keys))
    for b in range(batch):
        k, v = (_per_query_head(tensor[b], heads) for tensor in (call.k, call.v))
        for start in range(0, rows, step):
            block = slice(start, min(start + step, rows))
            q, dout = (tensor[b, block].float().transpose(0, 1) for tensor in (call.q, given.dout))
            score = (q @ k.mT) * problem.scale
            if problem.softcap:
                score = problem.softcap * torch.tanh(score / problem.softcap)
            inputs = {
                "b": position(b, b + 1).view(1, 1, 1),
                "h": position(0, heads).view(-1, 1, 1),
                "q": position(start, block.stop).view(1, -1, 1),
                "k": position(0, keys).view(1, 1, -1),
                "diagonal": torch.full((), keys - rows, dtype=torch.int32, device=call.q.device),
                "score": score,
            }
            modified = evaluate(score_program, inputs, (mods.score_tensors, mods.score_numbers))[0].expand_as(score)
            seen = modified != -torch.inf
            if mods.texts.mask:
                mask = Program.parse(mods.texts.mask)
                seen = seen & evaluate(mask, inputs, (mods.mask_tensors, mods.mask_numbers))[0]
            if builtin is not None:
                seen = seen & evaluate(builtin.program, inputs, builtin[1:])[0]
            lse, delta = (tensor[b, :, block, None] for tensor in (given.lse, given.delta))
            p = torch.exp(modified - torch.where(lse == -torch.inf, 0.0, lse))
            yield inputs, torch.where(seen, p * (dout @ v.mT - delta), 0.0)


def _per_query_head(tensor: Tensor, heads: int) -> Tensor:
    """[S, H_kv, D] as float32 [H_q, S, D]."""
    return tensor.float().transpose(0, 1).repeat_interleave(heads // tensor.shape[1], 0)


def _add_at(target: Tensor, indices: Sequence[Tensor], value: Tensor) -> None:
    """target[indices] += value, in a fixed order."""
    if not indices:
        target += value.sum()
        return
    indices = [index.view((1,) * (value.dim() - index.dim()) + tuple(index.shape)) for index in indices]
    summed = [dim for dim in range(value.dim()) if all(index.shape[dim] == 1 for index in indices)]
    value = value.sum(summed, keepdim=True) if summed else value
    flat = torch.zeros((), dtype=torch.int64, device=value.device)
    for index, size, stride in zip(indices, target.shape, target.stride()):
        flat = flat + inside(index, size) * stride
    # on GPUs index_put_ sorts the indices, index_add_ uses atomics
    target.view(-1).index_put_((flat.expand(value.shape).flatten(),), value.flatten(), accumulate=True)
