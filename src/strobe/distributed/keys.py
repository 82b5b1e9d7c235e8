"""Scheme `keys`: each rank receives the keys that its rows may see, and computes its rows alone.

The forward runs a call per piece (`pieces`). If every row is in one piece, the pieces write the result. Otherwise they
are partial results in float32, merged in a fixed order, and sinks are added once, after the last merge. The backward
runs the same pieces with the lse of whole rows, so that each gives its part of dq, dk and dv. Gradients of received
keys return to their rank (`key_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops import attention as ops
from ..problem.call import Call, accumulator
from ..problem.mask import Mask
from ..problem.merge import Partial, merge, with_sinks
from .group import Transfer
from .key_gradients import KeyGradients
from .pieces import Piece, mask_of
from .plan import Plan
from .runs import Run, Runs, offset, overlap, size, union

Options = tuple  # scale, softcap, deterministic, batch_invariant, kernel: the fields of Call in this order


class Keys(NamedTuple):
    """k and v at the positions `held`: [positions, B, H_kv * D] and [positions, B, H_kv * D_v].

    If a rank holds its own keys alone, they are views of k and v. Otherwise they are parts of one buffer, whose rows
    travel without a copy.
    """

    k: Tensor
    v: Tensor
    held: Runs
    heads: int
    buffer: Tensor | None

    @staticmethod
    def empty(k: Tensor, v: Tensor, plan: Plan) -> Keys:
        """Room for the keys that the plan lets this rank hold."""
        batch, _, heads, head_dim = k.shape
        buffer = k.new_empty((size(plan.held), batch, heads * (head_dim + v.shape[3])))
        width = heads * head_dim
        return Keys(buffer[..., :width], buffer[..., width:], plan.held, heads, buffer)

    @staticmethod
    def of(k: Tensor, v: Tensor, plan: Plan) -> Keys:
        """The keys that the plan lets this rank hold. Only its own are filled in."""
        if plan.held == plan.own_rows:
            return Keys(k.transpose(0, 1).flatten(2), v.transpose(0, 1).flatten(2), plan.held, k.shape[2], None)
        keys, begin = Keys.empty(k, v, plan), 0
        for run in plan.own_rows:
            own = slice(begin, begin + run[1] - run[0])
            for place, part in zip(keys.at(run), (k, v)):
                place.copy_(part[:, own])
            begin = own.stop
        return keys

    def rows(self, keys: Run) -> Tensor:
        """k and v of these positions, which must all be held, beside each other: contiguous, a view where it can be."""
        if self.buffer is None:
            return torch.cat([_slice(part, self.held, keys) for part in (self.k, self.v)], -1)
        return _slice(self.buffer, self.held, keys)

    def at(self, keys: Run) -> tuple[Tensor, Tensor]:
        """k [B, positions, H_kv, D] and v at these positions, which must all be held: views."""
        k, v = (_slice(part, self.held, keys).transpose(0, 1).unflatten(2, (self.heads, -1)) for part in self[:2])
        return k, v

    def exchange(self, plan: Plan) -> Transfer:
        """Send own keys to the ranks that need them, and receive those of others in place."""
        given, taken = (
            [(rank, self.rows(run)) for rank, runs in enumerate(side) for run in runs] for side in plan.links
        )
        return Transfer(given, taken, plan.ranks.keys)


def _slice(rows: Tensor, held: Runs, keys: Run) -> Tensor:
    begin = offset(held, keys[0])
    return rows[begin : begin + keys[1] - keys[0]]


class AttendKeys(torch.autograd.Function):
    """Attention of this rank's rows over the keys of all ranks: out [B, local rows, H_q, D_v] in q's dtype."""

    @staticmethod
    def forward(ctx, plan: Plan, options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None):
        out, lse = Rows(plan, options, q, Keys.of(k, v, plan), sinks).forward(v.shape[3])
        ctx.plan, ctx.options = plan, options
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        # keys are exchanged again: keeping those of other ranks would take the memory that context parallelism saves
        rows = Rows(ctx.plan, ctx.options, q, Keys.of(k, v, ctx.plan), sinks)
        return None, None, *rows.backward(dout if dout.stride(-1) == 1 else dout.contiguous(), out, lse)


def empty_calls(plan: Plan, call: Call) -> list[Call]:
    """The calls that compute this rank's rows, forward and backward, on uninitialized tensors.

    call: on this rank's q, k and v, without a mask. Their contents are not read.
    """
    rows = Rows(plan, call[5:10], call.q, Keys.empty(call.k, call.v, plan), call.sinks)
    return [one for piece in plan.pieces.all for one in (rows.forward_call(piece), rows.backward_call(piece))]


class Rows:
    """The calls of this rank's rows q [B, local rows, H_q, D], forward and backward."""

    def __init__(self, plan: Plan, options: Options, q: Tensor, keys: Keys, sinks: Tensor | None):
        self.plan, self.options, self.q, self.keys, self.sinks = plan, options, q, keys, sinks
        self.pieces = plan.pieces

    def _arriving(self) -> Iterator[Piece]:
        """Each piece, once its keys are there. Own pieces are launched while other keys arrive."""
        transfer = self.keys.exchange(self.plan)
        yield from self.pieces.own
        transfer.wait()
        yield from self.pieces.rest

    def _place(self, piece: Piece) -> slice:
        begin = offset(self.plan.own_rows, piece.rows[0])
        return slice(begin, begin + piece.rows[1] - piece.rows[0])

    def _call(self, piece: Piece) -> Call:
        k, v = self.keys.at(piece.keys)
        sinks = self.sinks if self.pieces.rows_once else None
        return Call(self.q[:, self._place(piece)], k, v, -1, -1, *self.options, sinks=sinks).with_mask(
            self._mask(piece)
        )

    def forward_call(self, piece: Piece) -> Call:
        return self._call(piece)._replace(partial=not self.pieces.rows_once)

    def backward_call(self, piece: Piece) -> Call:
        return self._call(piece).with_grad

    def _mask(self, piece: Piece) -> Mask:
        """The mask of a piece. Documents of a piece are kept: their ids never change."""
        whole = self.plan.mask
        if whole.documents is None:
            return mask_of(piece, whole)
        return self.plan.keep(("mask", piece), lambda: mask_of(piece, whole))

    def forward(self, head_dim_v: int) -> tuple[Tensor, Tensor]:
        """out and lse of the rows."""
        q, sinks, pieces, dtype = self.q, self.sinks, self.pieces, accumulator(self.q.dtype)
        allocate = torch.empty if pieces.are_all_rows(self.plan.own_rows) else torch.zeros
        out = allocate((*q.shape[:3], head_dim_v), dtype=q.dtype if pieces.rows_once else dtype, device=q.device)
        shape = q.shape[0], q.shape[2], q.shape[1]
        if pieces.rows_once:
            if pieces.is_one(self.plan.own_rows):
                (piece,) = self._arriving()
                return out, ops.run(self.forward_call(piece), out)[1]
            lse = q.new_full(shape, -torch.inf, dtype=dtype)
            if sinks is not None:
                lse.copy_(sinks.to(dtype)[None, :, None].expand_as(lse))
            for piece in self._arriving():
                rows = self._place(piece)
                lse[:, :, rows] = ops.run(self.forward_call(piece), out[:, rows])[1]
            return out, lse
        lse = q.new_full(shape, -torch.inf, dtype=dtype)
        written: Runs = ()
        for piece in self._arriving():
            rows, part = self._place(piece), Partial(*ops.run(self.forward_call(piece)))
            if overlap(written, (piece.rows,)):
                part = merge(Partial(out[:, rows], lse[:, :, rows]), part)
            out[:, rows], lse[:, :, rows] = part
            written = union((*written, piece.rows))
        whole = Partial(out, lse) if sinks is None else with_sinks(Partial(out, lse), sinks)
        return whole.out.to(q.dtype), whole.lse

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of q, k, v and sinks. dout, out and lse are those of whole rows."""
        pieces, q = self.pieces, self.q
        dtype = q.dtype if pieces.rows_once else accumulator(q.dtype)
        is_one = pieces.is_one(self.plan.own_rows)
        allocate = torch.empty if pieces.rows_once and pieces.are_all_rows(self.plan.own_rows) else torch.zeros
        dq = allocate((0,) if is_one else q.shape, dtype=dtype, device=q.device)
        gradients = KeyGradients(self.plan, self.keys.heads, (self.keys.k, self.keys.v))
        dsinks: list[Tensor] = []
        for piece in self._arriving():
            rows, call = self._place(piece), self.backward_call(piece)
            given = dout[:, rows], out[:, rows], lse[:, :, rows].contiguous(), None
            dq_part, dk, dv, dsinks_part = ops.BACKWARD(*given, *call.arguments)
            if is_one:
                dq = dq_part
            elif pieces.rows_once:
                dq[:, rows] = dq_part
            else:
                dq[:, rows].add_(dq_part)
            dsinks.append(dsinks_part)
            gradients.add(dk, dv)
        dk, dv = gradients.exchange()
        if self.sinks is None:
            return dq.to(q.dtype), dk, dv, None
        if not pieces.rows_once:  # pieces saw no sinks, since a row is in several
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
            dsinks = [ops.sinks_gradient(Call(q, q, q, sinks=self.sinks), lse, delta)]
        total = torch.zeros_like(self.sinks, dtype=lse.dtype)
        for part in dsinks:
            total += part
        return dq.to(q.dtype), dk, dv, total.to(self.sinks.dtype)
