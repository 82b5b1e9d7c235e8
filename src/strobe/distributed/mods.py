"""Custom scores and masks, and dropout, under a plan: they get positions of the whole sequence and heads of the model.

A piece's kernel counts rows, keys and heads from its own first. So the programs and dropout's random numbers add
offsets to them. Offsets are numbers that a call passes, so that all pieces share a compiled kernel. Autograd joins the
pieces. Packed sequences are documents, whose functions look up the sequence of a row and its first position.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ..mods.mask import MaskMod
from ..mods.program import INT, Captured, Node, Program
from ..ops import mods as ops_mods
from ..problem.call import Call, accumulator
from ..problem.mask import Documents, Mask
from ..problem.merge import Partial, merge, with_sinks
from ..problem.mods import Dropout, Mods, ModTexts
from .group import Transfer
from .heads import EnterHeads, LeaveHeads
from .keys import Keys
from .pieces import mask_of
from .plan import Plan
from .runs import offset, size

OFFSETS = ("h", "q", "k")  # the inputs that get offsets, in the order of the numbers


class Sequences(NamedTuple):
    """For each position of a packed tensor: the index of its sequence, and the first position of this sequence.
    int32 [S].
    """

    index: Tensor
    start: Tensor

    @staticmethod
    def of(documents: Documents) -> Sequences:
        """Those of a packed tensor's documents. A position outside of every sequence is hidden, so its entries do not
        matter.
        """
        return Sequences(documents.ids_q[0].clamp(min=0), documents.spans_q[0, :, 1].contiguous())


class Functions(NamedTuple):
    """The custom score and the dropout of a call."""

    score: object = None  # a score_mod, or None
    dropout: Dropout | None = None
    are_packed: bool = False  # of packed sequences: they get a position's sequence and its place there

    @property
    def are_any(self) -> bool:
        return self.score is not None or self.dropout is not None

    def shared(self, plan: Plan, device: torch.device) -> Functions:
        """With one seed on all ranks: a seed that is drawn is that of the first rank."""
        if self.dropout is None:
            return self
        seed = self.dropout.seed_on(device)
        if self.dropout.seed is None:
            for group in plan.ranks.levels:
                dist.broadcast(seed, group=group, group_src=0)
        return self._replace(dropout=self.dropout._replace(seed=seed))


@lru_cache(maxsize=256)
def moved(text: str, first: int, tensors: int | None = None) -> str:
    """A program whose inputs h, q and k have the numbers first, first + 1 and first + 2 added, and whose diagonal is 0,
    since queries and keys of a plan are as many.

    tensors: with packed sequences the number of captured tensors, which `Sequences` follow.

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

    def added(op: str, *args: int, value: int | str | None = None) -> int:
        nodes.append(Node(INT, op, args, value))
        return len(nodes) - 1

    def whole(name: str) -> int:
        """The head of the model, or the position in the whole sequence."""
        return added("add", added("input", value=name), added("number", value=first + OFFSETS.index(name)))

    for node in program.nodes:
        name = str(node.value)
        if node.op != "input" or name not in (*OFFSETS, "b", "diagonal") or (name == "b" and tensors is None):
            nodes.append(node._replace(args=tuple(place[one] for one in node.args)))
        elif name == "diagonal":
            added("const", value=0)
        elif name == "b":
            added("load", whole("q"), value=tensors)
        elif tensors is None or name == "h":
            whole(name)
        else:
            position = whole(name)
            added("sub", position, added("load", position, value=(tensors or 0) + 1))
        place.append(len(nodes) - 1)
    outputs = tuple(place[one] for one in program.outputs)
    numbers = (*program.numbers, *(INT for _ in OFFSETS))
    captured = (*program.tensors, *(() if tensors is None else (Captured(INT, 1),) * 2))
    return program._replace(nodes=tuple(nodes), outputs=outputs, numbers=numbers, tensors=captured).text


def _placed(call: Call, offsets: tuple[int, int, int], plan: Plan, are_packed: bool) -> Call:
    """The call with positions and heads from these on: offsets of heads, rows and keys."""
    documents, sequences = plan.mask.documents, None
    if are_packed and documents is not None:
        sequences = plan.keep("sequences", lambda: Sequences.of(documents))
    mods = call.mods or Mods(ModTexts())
    numbers = len(mods.score_numbers), len(mods.score_numbers), len(mods.mask_numbers)
    tensors = len(mods.score_tensors), len(mods.score_tensors), len(mods.mask_tensors)
    programs = [
        moved(text, number, None if sequences is None else tensor) if text else ""
        for text, number, tensor in zip(mods.texts[:3], numbers, tensors)
    ]
    texts = mods.texts._replace(score=programs[0], gradient=programs[1], mask=programs[2])
    more: dict[str, Any] = {
        name: (*getattr(mods, name), *map(float, offsets)) for name in ("score_numbers", "mask_numbers")
    }
    for name, text in (("score_tensors", texts.score), ("mask_tensors", texts.mask)):
        more[name] = (*getattr(mods, name), *(sequences if sequences is not None and text else ()))
    if mods.dropout_seed is not None:
        device = mods.dropout_seed.device
        added = plan.keep(("dropout", offsets, device), lambda: torch.tensor(offsets, device=device))
        more["dropout_seed"], texts = torch.cat([mods.dropout_seed, added]), texts._replace(dropout_offsets=True)
    return call._replace(mods=mods._replace(texts=texts, **more))


def attend_mods(call: Call, plan: Plan, mask: Mask | None, functions: Functions) -> Tensor:
    """Attention of local rows. plan: of the mask without its function, which is read from `mask`."""
    q, k, v, sinks, head = *call[:3], call.sinks, 0
    if plan.heads_size > 1:
        heads = q.shape[2] // plan.heads_size
        head = plan.ranks.heads_rank * heads
        sinks = sinks if sinks is None else sinks[head : head + heads]
        q, k, v = EnterHeads.apply(plan, q, k, v)
    if plan.keys_size > 1:
        out = _over_keys(call._replace(q=q, k=k, v=v, sinks=sinks), plan, mask, functions, head)
    else:
        inner = call._replace(q=q, k=k, v=v, sinks=sinks).with_mask(plan.mask)
        bound = ops_mods.bind(inner, functions.score, mask, functions.dropout, is_part=True)
        out = ops_mods.run(_placed(bound, (head, 0, 0), plan, functions.are_packed))[0]
    return LeaveHeads.apply(plan, out) if plan.heads_size > 1 else out


def _over_keys(call: Call, plan: Plan, mask: Mask | None, functions: Functions, head: int) -> Tensor:
    q, (k, v), own = call.q, HoldKeys.apply(plan, call.k, call.v), plan.own_rows
    rows_once, found = plan.pieces.rows_once, []
    for piece in plan.pieces.all:
        begin, low = offset(own, piece.rows[0]), offset(plan.held, piece.keys[0])
        rows = slice(begin, begin + piece.rows[1] - piece.rows[0])
        keys = slice(low, low + piece.keys[1] - piece.keys[0])
        part = call._replace(
            q=q[:, rows], k=k[:, keys], v=v[:, keys], sinks=call.sinks if rows_once else None, partial=not rows_once
        )
        part = part.with_mask(mask_of(piece, plan.mask))
        bound = ops_mods.bind(part, functions.score, mask, functions.dropout, is_part=True)
        placed = _placed(bound, (head, piece.rows[0], piece.keys[0]), plan, functions.are_packed)
        found.append((rows, ops_mods.run(placed)[:2]))
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
        ]  # gradients of received keys return to their rank
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
