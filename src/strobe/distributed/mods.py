"""Custom scores and masks under a plan: their functions get positions of the whole sequence and heads of the model.

A piece's kernel counts rows, keys and heads from its own first. So the programs add offsets to these inputs. Offsets
are numbers that a call passes, so that all pieces share a compiled kernel. Autograd joins the pieces.
"""

from __future__ import annotations

from functools import lru_cache, reduce

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ..mods.mask import MaskMod
from ..mods.program import INT, Node, Program
from ..ops import mods as ops_mods
from ..problem.call import Call, accumulator
from ..problem.mask import Mask
from ..problem.merge import Partial, merge, with_sinks
from ..problem.mods import Mods, ModTexts
from .group import Transfer
from .heads import EnterHeads, LeaveHeads
from .keys import Keys
from .pieces import mask_of
from .plan import Plan
from .runs import offset, size

OFFSETS = ("h", "q", "k")  # the inputs that get offsets, in the order of the numbers


@lru_cache(maxsize=256)
def moved(text: str, first: int) -> str:
    """A program whose inputs h, q and k have the numbers first, first + 1 and first + 2 added, and whose diagonal is 0,
    since queries and keys of a plan are as many.

    >>> print(moved("i input q\\nf cast 0\\nout 1", 0))
    numbers i i i
    i input q
    i number 1
    i add 0 1
    f cast 2
    out 3
    """
    program = Program.parse(text)
    nodes: list[Node] = []
    place: list[int] = []  # of each node of the program
    for node in program.nodes:
        if node.op == "input" and node.value in OFFSETS:
            nodes += [node, Node(INT, "number", (), first + OFFSETS.index(str(node.value)))]
            nodes.append(Node(INT, "add", (len(nodes) - 2, len(nodes) - 1)))
        elif node.op == "input" and node.value == "diagonal":
            nodes.append(Node(INT, "const", (), 0))
        else:
            nodes.append(node._replace(args=tuple(place[one] for one in node.args)))
        place.append(len(nodes) - 1)
    outputs = tuple(place[one] for one in program.outputs)
    numbers = (*program.numbers, *(INT for _ in OFFSETS))
    return program._replace(nodes=tuple(nodes), outputs=outputs, numbers=numbers).text


def _placed(call: Call, offsets: tuple[int, int, int]) -> Call:
    """The call with positions and heads from these on: offsets of heads, rows and keys."""
    mods = call.mods or Mods(ModTexts())
    counts = len(mods.score_numbers), len(mods.score_numbers), len(mods.mask_numbers)
    programs = [moved(text, count) if text else "" for text, count in zip(mods.texts[:3], counts)]
    texts = mods.texts._replace(score=programs[0], gradient=programs[1], mask=programs[2])
    added = tuple(map(float, offsets))
    more = {name: getattr(mods, name) + added for name in ("score_numbers", "mask_numbers")}
    return call._replace(mods=mods._replace(texts=texts, **more))


def attend_mods(call: Call, plan: Plan, mask: Mask | None, score: object) -> Tensor:
    """Attention of local rows. plan: of the mask without its function, which is read from `mask`."""
    q, k, v, sinks, head = *call[:3], call.sinks, 0
    if plan.heads_size > 1:
        heads = q.shape[2] // plan.heads_size
        head = plan.ranks.heads_rank * heads
        sinks = sinks if sinks is None else sinks[head : head + heads]
        q, k, v = EnterHeads.apply(plan, q, k, v)
    if plan.keys_size > 1:
        out = _over_keys(call._replace(q=q, k=k, v=v, sinks=sinks), plan, mask, score, head)
    else:
        inner = call._replace(q=q, k=k, v=v, sinks=sinks).with_mask(plan.mask)
        out = ops_mods.run(_placed(ops_mods.bind(inner, score, mask), (head, 0, 0)))[0]
    return LeaveHeads.apply(plan, out) if plan.heads_size > 1 else out


def _over_keys(call: Call, plan: Plan, mask: Mask | None, score: object, head: int) -> Tensor:
    q, (k, v), own = call.q, HoldKeys.apply(plan, call.k, call.v), plan.own_rows
    rows_once, found = plan.pieces.rows_once, []
    for piece in plan.pieces.all:
        begin, low = offset(own, piece.rows[0]), offset(plan.held, piece.keys[0])
        rows = slice(begin, begin + piece.rows[1] - piece.rows[0])
        keys = slice(low, low + piece.keys[1] - piece.keys[0])
        part = call._replace(
            q=q[:, rows], k=k[:, keys], v=v[:, keys], sinks=call.sinks if rows_once else None, partial=not rows_once
        )
        bound = ops_mods.bind(part.with_mask(mask_of(piece, plan.mask)), score, mask)
        found.append((rows, ops_mods.run(_placed(bound, (head, piece.rows[0], piece.keys[0])))[:2]))
    if not found:  # zeros that depend on the tensors: the backward of each rank must exchange gradients
        return q.new_zeros((*q.shape[:3], v.shape[3])) + sum(t[:, :0].sum() for t in (q, k, v))
    around = lambda rows: (rows.start, q.shape[1] - rows.stop)  # rows before and after a piece
    if rows_once:
        whole = [pad(out, (0, 0, 0, 0, *around(rows))) for rows, (out, _) in found]
        return torch.stack(whole).sum(0) if len(whole) > 1 else whole[0]
    parts = [
        Partial(pad(out, (0, 0, 0, 0, *around(rows))), pad(lse, around(rows), value=-torch.inf))
        for rows, (out, lse) in found
    ]
    total = reduce(merge, parts)
    return (total if call.sinks is None else with_sinks(total, call.sinks)).out.to(q.dtype)


class HoldKeys(torch.autograd.Function):
    """k and v [B, held positions, H_kv, ...] of all keys that this rank holds once they have been exchanged."""

    @staticmethod
    def forward(ctx, plan: Plan, k: Tensor, v: Tensor):
        ctx.plan = plan
        keys = Keys.of(k, v, plan, plan.held)
        keys.exchange(plan).wait()
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in keys.whole())

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        plan, mine = ctx.plan, ctx.plan.ranks.keys_rank
        rows = [gradient.transpose(0, 1).flatten(2).contiguous() for gradient in gradients]
        given_keys, taken_keys = plan.links
        cut = lambda tensor, run: tensor[offset(plan.held, run[0]) :][: run[1] - run[0]]
        given = [
            (rank, cut(part, run)) for rank, runs in enumerate(taken_keys) for run in runs for part in rows
        ]  # what came is given back
        room = [
            (rank, run, [part.new_empty((run[1] - run[0], *part.shape[1:])) for part in rows])
            for rank, runs in enumerate(given_keys)
            for run in runs
        ]
        Transfer(given, [(rank, part) for rank, _, parts in room for part in parts], plan.ranks.keys).wait()
        room += [(mine, run, [cut(part, run) for part in rows]) for run in plan.own_rows]
        found = []
        for which, part in enumerate(rows):
            shape = size(plan.own_rows), *part.shape[1:]
            total = part.new_zeros(shape, dtype=accumulator(part.dtype))
            for _, run, parts in sorted(room, key=lambda one: one[0]):  # in the order of ranks
                begin = offset(plan.own_rows, run[0])
                total[begin : begin + run[1] - run[0]] += parts[which]
            whole = total.to(part.dtype).transpose(0, 1)
            found.append(whole.unflatten(2, gradients[which].shape[2:]))
        return None, *found


def builtin_part(mask: Mask) -> Mask:
    """The mask without its function."""
    if not isinstance(mask, MaskMod):
        return mask
    return Mask(mask.left, mask.right, mask.prefix, mask.key_lengths, mask.documents)
