"""Gradients of captured tensors with `deterministic=True` on GPUs.

The kernels add to gradients of captured tensors by atomics, in the order in which programs finish. With
`deterministic=True` they add to integers (`mods.exact_sums`), for which the order does not matter, unless an element
gets one addition at most (`mods.one_addition`).

Of large tensors these integers would take much memory. Then the kernels get the score's gradient without additions. A
second pass, in torch operations, computes the gradient of the scores again for a block of batch entries and rows at a
time. It sums over all positions that no index depends on, and adds the rest by a sort. Its sums have a fixed order, so
that equal calls have equal bits.

Packed sequences are gathered into blocks as long as the longest sequence may be. The pass reads no offset on the host
if the call has max_seqlen_q and max_seqlen_k; else it waits for the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedProblem
from ..kernels.protocol import Backward
from ..mods import exact_sums
from ..mods.dropout import kept
from ..mods.evaluate import evaluate, inside
from ..mods.mask import MaskMod
from ..mods.one_addition import has_one_addition
from ..mods.program import Program
from ..mods.triton_functions import why_not_expanded
from ..problem import torch_private
from ..problem.call import Call, accumulator
from ..problem.mods import ONE_ADDITION, Mods, ModTexts
from ..problem.problem import Problem, texts_of
from ..selection.select import Choice

ONE_ADDITION["mods"] = has_one_addition
MOST_ELEMENTS = 1 << 24  # of a block's scores, over its entries and all heads


def check(call: Call) -> None:
    """Raises UnsupportedProblem for a deterministic call that needs this pass and has functions that it cannot
    evaluate.
    """
    texts, found = ModTexts() if call.mods is None else call.mods.texts, texts_of(call)
    if found is None or found.scattered == texts.scattered:
        return
    for text in texts.programs:
        if reason := why_not_expanded(Program.parse(text)):
            raise UnsupportedProblem(f"deterministic gradients of captured tensors: {reason}")


def are_apart(choice: Choice[Problem], mods: Mods) -> bool:
    """Whether a call's backward adds nothing to gradients of captured tensors, so that this pass must."""
    found, plan = choice.problem.mods, choice.backward
    is_shorter = found is not None and found.gradient != mods.texts.gradient
    return is_shorter and plan is not None and not plan.kernel.name.startswith("cpu.")  # which adds in a fixed order


def sums_of(choice: Choice[Problem], mods: Mods) -> list[Tensor | None]:
    """Zeros for the gradients of the score's tensors, as the kernel of the backward adds to them: integers of exact
    sums, or the accumulators' dtype.
    """
    wide, added = accumulator(choice.problem.dtype), mods.texts.scattered
    is_exact = _has_exact_sums(choice)
    zeros = lambda like: exact_sums.zeros(like) if is_exact else torch.zeros(like.shape, dtype=wide, device=like.device)
    return [zeros(tensor) if n in added else None for n, tensor in enumerate(mods.score_tensors)]


def totals(choice: Choice[Problem], mods: Mods, sums: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the score's tensors from what `sums_of` gave; None for one that has none."""
    found = [None if one is None else exact_sums.total(one) for one in sums] if _has_exact_sums(choice) else sums
    return [None if one is None else one.to(tensor.dtype) for one, tensor in zip(found, mods.score_tensors)]


def _has_exact_sums(choice: Choice[Problem]) -> bool:
    texts, plan = choice.problem.mods, choice.backward
    return texts is not None and texts.exact_sums and plan is not None and not plan.kernel.name.startswith("cpu.")


def add_ordered(problem: Problem, call: Call, mods: Mods, given: Backward, sums: Sequence[Tensor | None]) -> None:
    """Add the gradients of captured tensors to `sums`."""
    if problem.vacuous:
        return
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):  # products in float32
        _add(problem, call, mods, given, sums)


def _add(problem: Problem, call: Call, mods: Mods, given: Backward, sums: Sequence[Tensor | None]) -> None:
    program = Program.parse(mods.texts.gradient)
    captured, lie = (mods.score_tensors, mods.score_numbers), _rows_of(problem, call)
    for inputs, ds in _blocks(problem, call, mods, given, lie):
        results = iter(evaluate(program, inputs | {"grad": ds}, captured)[1:])
        for scatter in program.scatters:
            value, indices = next(results), [next(results) for _ in range(scatter.ndim)]
            target = sums[scatter.tensor]
            if target is not None:  # whatever the function gives for a score that a row does not see
                _add_at(target, indices, torch.where(ds == 0, 0.0, value.expand_as(ds)))
    if isinstance(lie, PackedRows):
        for scatter in program.scatters:
            target = sums[scatter.tensor]
            if target is not None:
                target += lie.if_kept


# ---------------------------------------------------------------- where rows lie


class Block(NamedTuple):
    """Batch entries, or packed sequences, and rows of each."""

    entries: slice
    rows: slice


class DenseRows:
    """Rows of dense tensors."""

    def __init__(self, call: Call) -> None:
        self.entries, self.longest_q, self.longest_k = call.q.shape[0], call.q.shape[1], call.k.shape[1]
        self.diagonal = torch.full((), self.longest_k - self.longest_q, dtype=torch.int32, device=call.q.device)

    def of_queries(self, tensor: Tensor, block: Block) -> Tensor:
        """[entries, rows, H, D] of a tensor of queries."""
        return tensor[block]

    def of_keys(self, tensor: Tensor, block: Block) -> Tensor:
        return tensor[block.entries]

    def of_stats(self, tensor: Tensor, block: Block) -> Tensor:
        """[entries, H, rows, 1] of lse or delta."""
        return tensor[block.entries, :, block.rows, None]

    def diagonals(self, block: Block) -> Tensor:
        """S_k - S_q, which broadcasts to [entries, H, rows, keys]."""
        return self.diagonal

    def exist(self, inputs: dict[str, Tensor], block: Block) -> Tensor | None:
        """Which pairs of a query and a key exist; None: all."""
        return None


@dataclass
class PackedRows:
    """Rows of packed sequences. Blocks are as long as the longest sequence; rows that do not exist repeat others."""

    starts: tuple[Tensor, Tensor]  # of queries and keys, [sequences]
    lengths: tuple[Tensor, Tensor]
    longest_q: int
    longest_k: int
    if_kept: Tensor  # 0, or NaN if a sequence has more queries than promised, whose gradients this pass does not see

    @staticmethod
    def of(call: Call, offsets: tuple[Tensor, Tensor], longest: tuple[int | None, int | None]) -> PackedRows:
        """longest: the promised lengths, or None where the host must read them."""
        totals = call.q.shape[0], call.k.shape[0]
        ends = [one.clamp(0, total).long() for one, total in zip(offsets, totals)]
        lengths = tuple([one.diff().clamp(min=0) for one in ends])
        if None in longest and call.q.is_cuda and torch_private.cuda_is_capturing():
            raise UnsupportedProblem(
                "deterministic gradients of captured tensors over packed sequences in a CUDA graph: pass max_seqlen_q "
                "and max_seqlen_k, since the host cannot read the lengths"
            )
        promised = [most if most is None else min(most, total) for most, total in zip(longest, totals)]
        read = [int(one.max()) if most is None else most for one, most in zip(lengths, promised)]
        if_kept = torch.where((lengths[0] > read[0]).any(), torch.nan, 0.0)
        return PackedRows((ends[0][:-1], ends[1][:-1]), (lengths[0], lengths[1]), read[0], read[1], if_kept)

    @property
    def entries(self) -> int:
        return self.starts[0].shape[0]

    def of_queries(self, tensor: Tensor, block: Block) -> Tensor:
        return tensor[self._index(0, block.entries, block.rows, tensor.shape[0])]

    def of_keys(self, tensor: Tensor, block: Block) -> Tensor:
        return tensor[self._index(1, block.entries, slice(0, self.longest_k), tensor.shape[0])]

    def of_stats(self, tensor: Tensor, block: Block) -> Tensor:
        index = self._index(0, block.entries, block.rows, tensor.shape[1])
        return tensor[:, index].transpose(0, 1)[..., None]

    def diagonals(self, block: Block) -> Tensor:
        return (self.lengths[1] - self.lengths[0])[block.entries].int().view(-1, 1, 1, 1)

    def exist(self, inputs: dict[str, Tensor], block: Block) -> Tensor | None:
        queries, keys = (one[block.entries].view(-1, 1, 1, 1) for one in self.lengths)
        return (inputs["q"] < queries) & (inputs["k"] < keys)

    def _index(self, side: int, entries: slice, rows: slice, total: int) -> Tensor:
        """[entries, rows], of rows of the packed tensor."""
        starts = self.starts[side][entries, None]
        return (starts + torch.arange(rows.start, rows.stop, device=starts.device)).clamp(max=total - 1)


def _rows_of(problem: Problem, call: Call) -> DenseRows | PackedRows:
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return DenseRows(call)
    longest = getattr(problem.layout, "max_seqlen_q", None), getattr(problem.layout, "max_seqlen_k", None)
    return PackedRows.of(call, (call.cu_seqlens_q, call.cu_seqlens_k), longest)


# ---------------------------------------------------------------- the gradient of scores


def _blocks(
    problem: Problem, call: Call, mods: Mods, given: Backward, lie: DenseRows | PackedRows
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Inputs of the functions and the gradient of modified scores, [entries, H, rows, keys], of a block."""
    heads, device = problem.heads_q, call.q.device
    position = lambda start, stop: torch.arange(start, stop, dtype=torch.int32, device=device)
    score_program = Program.parse(mods.texts.score)
    mask = Program.parse(mods.texts.mask) if mods.texts.mask else None
    builtin = MaskMod.of(call.mask).whole.bind() if any(call.structure) else None
    for block in _parts(lie.entries, lie.longest_q, heads * lie.longest_k):
        q, dout = (lie.of_queries(tensor, block).float().transpose(1, 2) for tensor in (call.q, given.dout))
        k, v = (_per_query_head(lie.of_keys(tensor, block), heads) for tensor in (call.k, call.v))
        score = (q @ k.mT) * problem.scale
        if problem.softcap:
            score = problem.softcap * torch.tanh(score / problem.softcap)
        inputs = {
            "b": position(block.entries.start, block.entries.stop).view(-1, 1, 1, 1),
            "h": position(0, heads).view(1, -1, 1, 1),
            "q": position(block.rows.start, block.rows.stop).view(1, 1, -1, 1),
            "k": position(0, lie.longest_k).view(1, 1, 1, -1),
            "diagonal": lie.diagonals(block),
            "score": score,
        }
        modified = evaluate(score_program, inputs, (mods.score_tensors, mods.score_numbers))[0].expand_as(score)
        seen = modified != -torch.inf
        if mask is not None:
            seen = seen & evaluate(mask, inputs, (mods.mask_tensors, mods.mask_numbers))[0]
        if builtin is not None:
            seen = seen & evaluate(builtin.program, inputs, builtin[1:])[0]
        exist = lie.exist(inputs, block)
        seen = seen if exist is None else seen & exist
        lse, delta = (lie.of_stats(tensor, block) for tensor in (given.lse, given.delta))
        p = torch.exp(modified - torch.where(lse == -torch.inf, 0.0, lse))
        yield inputs, torch.where(seen, p * (_dropped(dout @ v.mT, inputs, mods) - delta), 0.0)


def _parts(entries: int, rows: int, row_elements: int) -> Iterator[Block]:
    """Blocks of at most MOST_ELEMENTS: of several entries, or of some rows of one."""
    step = min(rows, max(1, MOST_ELEMENTS // max(1, row_elements)))
    count = max(1, MOST_ELEMENTS // max(1, row_elements * rows))
    for entry in range(0, entries if rows else 0, count):
        for start in range(0, rows, step):
            yield Block(slice(entry, min(entry + count, entries)), slice(start, min(start + step, rows)))


def _dropped(dp: Tensor, inputs: dict[str, Tensor], mods: Mods) -> Tensor:
    """The gradient of weights, of which dropout passes what it kept."""
    if mods.dropout_seed is None:
        return dp
    seed, *offsets = mods.dropout_seed.unbind()
    places = [inputs[name] for name in ("b", "h", "q", "k")]
    for n, offset in enumerate(offsets, 1):
        places[n] = places[n] + offset
    return torch.where(kept(seed, mods.dropout_p, *places), dp * (1.0 / (1.0 - mods.dropout_p)), 0.0)


def _per_query_head(tensor: Tensor, heads: int) -> Tensor:
    """[entries, S, H_kv, D] as float32 [entries, H_q, S, D]."""
    return tensor.float().transpose(1, 2).repeat_interleave(heads // tensor.shape[2], 1)


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
