"""Scheme `keys`: each rank receives the keys that its rows may see, and computes its rows alone.

The forward runs a call per piece (`pieces`). If every row is in one piece, the pieces write the result. Otherwise they
are partial results in float32, merged in a fixed order, and sinks are added once, after the last merge. The backward
runs the same pieces with the lse of whole rows, so that each gives its part of dq, dk and dv. Gradients of received
keys return to their rank, which adds them to its own in the order of ranks.
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
from .group import Exchange
from .pieces import Piece, mask_of
from .plan import Plan
from .runs import Run, Runs, offset, overlap, size, union

Options = tuple  # scale, softcap, deterministic, batch_invariant, kernel: the fields of Call in this order


class Keys(NamedTuple):
    """k and v, or their gradients, at the positions `held`: one buffer [B, positions, H_kv * D + H_kv * D_v]."""

    buffer: Tensor
    held: Runs
    heads: int
    width: int  # H_kv * D

    @staticmethod
    def of(k: Tensor, v: Tensor, plan: Plan) -> Keys:
        """The keys that the plan lets this rank hold. Only its own are filled in."""
        width, both = k.shape[2] * k.shape[3], k.shape[2] * (k.shape[3] + v.shape[3])
        keys = Keys(k.new_empty((k.shape[0], size(plan.held), both)), plan.held, k.shape[2], width)
        begin = 0
        for run in plan.groups[plan.ranks.keys_rank]:
            own = slice(begin, begin + run[1] - run[0])
            for place, part in zip(keys.at(run), (k, v)):
                place.copy_(part[:, own])
            begin = own.stop
        return keys

    def gradients(self) -> Keys:
        """Zeros for the gradients of these keys, in float32 at least."""
        return self._replace(buffer=torch.zeros_like(self.buffer, dtype=accumulator(self.buffer.dtype)))

    def rows(self, keys: Run) -> Tensor:
        """The buffer at these positions, which must all be held: a view."""
        begin = offset(self.held, keys[0])
        return self.buffer[:, begin : begin + keys[1] - keys[0]]

    def at(self, keys: Run) -> tuple[Tensor, Tensor]:
        """k and v at these positions, which must all be held: views of the buffer."""
        return self.split(self.rows(keys))

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of rows [B, rows, width]."""
        k, v = rows[..., : self.width], rows[..., self.width :]
        return k.unflatten(2, (self.heads, -1)), v.unflatten(2, (self.heads, -1))


class KeyExchange:
    """Rows of keys, or of their gradients, on their way between ranks."""

    def __init__(self, keys: Keys, given: tuple[Runs, ...], taken: tuple[Runs, ...], plan: Plan):
        """given, taken: the positions whose rows go to each rank, and come from each rank."""
        self.taken, self.batch = taken, keys.buffer.shape[0]
        parts = [keys.rows(run).flatten(0, 1) for runs in given for run in runs]
        if len(parts) == 1:
            send = parts[0].contiguous()
        else:
            send = torch.cat(parts) if parts else keys.buffer.flatten(0, 1)[:0]
        counts = [[self.batch * size(runs) for runs in side] for side in (given, taken)]
        self.exchange = Exchange(send, (counts[0], counts[1]), plan.ranks.keys)

    def parts(self) -> Iterator[tuple[Run, Tensor]]:
        """Each run that has arrived with its rows [B, rows, width], in the order of ranks. Waits for them."""
        received = self.exchange.wait()
        runs = [run for one in self.taken for run in one]
        counts = [self.batch * (stop - start) for start, stop in runs]
        for run, rows in zip(runs, received.split(counts) if runs else ()):
            yield run, rows.unflatten(0, (self.batch, -1))


class AttendKeys(torch.autograd.Function):
    """Attention of this rank's rows over the keys of all ranks: out [B, local rows, H_q, D_v] in q's dtype."""

    @staticmethod
    def forward(ctx, plan: Plan, options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None):
        out, lse = Rows(plan, options, q, Keys.of(k, v, plan)).forward(sinks, v.shape[3])
        ctx.plan, ctx.options = plan, options
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        # keys are exchanged again: keeping those of other ranks would take the memory that context parallelism saves
        rows = Rows(ctx.plan, ctx.options, q, Keys.of(k, v, ctx.plan))
        dq, dkv = rows.backward(dout if dout.stride(-1) == 1 else dout.contiguous(), out, lse)
        dk, dv = (gradient.to(k.dtype) for gradient in dkv.split(_own_gradients(dkv, ctx.plan)))
        dsinks = None
        if sinks is not None:
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
            dsinks = ops.sinks_gradient(Call(q, k, v, sinks=sinks), lse, delta)
        return None, None, dq, dk, dv, dsinks


def _own_gradients(gradients: Keys, plan: Plan) -> Tensor:
    """The gradient of this rank's own keys [B, local rows, width]: its own part, and those of other ranks in order."""
    given, taken = plan.links
    for run, part in KeyExchange(gradients, taken, given, plan).parts():
        gradients.rows(run).add_(part)
    own = [gradients.rows(run) for run in plan.groups[plan.ranks.keys_rank]]
    return own[0] if len(own) == 1 else torch.cat(own, 1) if own else gradients.buffer[:, :0]


class Rows:
    """The calls of this rank's rows q [B, local rows, H_q, D], forward and backward."""

    def __init__(self, plan: Plan, options: Options, q: Tensor, keys: Keys):
        self.plan, self.options, self.q, self.keys = plan, options, q, keys
        self.runs = plan.groups[plan.ranks.keys_rank]
        self.exchange = KeyExchange(keys, *plan.links, plan)

    def _pieces(self) -> Iterator[Piece]:
        """Each piece, once its keys are there. Waits for keys of other ranks when own pieces have been launched."""
        yield from self.plan.pieces.own
        for run, part in self.exchange.parts():
            self.keys.rows(run).copy_(part)
        yield from self.plan.pieces.rest

    def _place(self, piece: Piece) -> slice:
        begin = offset(self.runs, piece.rows[0])
        return slice(begin, begin + piece.rows[1] - piece.rows[0])

    def _call(self, piece: Piece, partial: bool) -> Call:
        k, v = self.keys.at(piece.keys)
        call = Call(self.q[:, self._place(piece)], k, v, -1, -1, *self.options)
        return call._replace(partial=partial).with_mask(self._mask(piece))

    def _mask(self, piece: Piece) -> Mask:
        """The mask of a piece. Documents of a piece are kept: their ids never change."""
        whole, prepared = self.plan.mask, self.plan.prepared
        if whole.documents is None:
            return mask_of(piece, whole)
        key = "mask", piece
        if key not in prepared:
            prepared[key] = mask_of(piece, whole)
        return prepared[key]

    def forward(self, sinks: Tensor | None, head_dim_v: int) -> tuple[Tensor, Tensor]:
        """out and lse of the rows."""
        q, dtype, pieces = self.q, accumulator(self.q.dtype), self.plan.pieces
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
        allocate = torch.empty if pieces.are_all_rows(self.runs) else torch.zeros
        out = allocate((*q.shape[:3], head_dim_v), dtype=q.dtype if pieces.rows_once else dtype, device=q.device)
        if pieces.rows_once:
            if sinks is not None:
                lse.copy_(sinks.to(dtype)[None, :, None].expand_as(lse))
            for piece in self._pieces():
                rows, call = self._place(piece), self._call(piece, False)
                call = call if sinks is None else call._replace(sinks=sinks)
                lse[:, :, rows] = ops.run(call, out[:, rows])[1]
            return out, lse
        written: Runs = ()
        for piece in self._pieces():
            rows, part = self._place(piece), Partial(*ops.run(self._call(piece, True)))
            if overlap(written, (piece.rows,)):
                part = merge(Partial(out[:, rows], lse[:, :, rows]), part)
            out[:, rows], lse[:, :, rows] = part
            written = union((*written, piece.rows))
        whole = Partial(out, lse) if sinks is None else with_sinks(Partial(out, lse), sinks)
        return whole.out.to(q.dtype), whole.lse

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Keys]:
        """dq, and dk and dv of all held keys in float32 at least. dout, out and lse are those of whole rows."""
        pieces = self.plan.pieces
        allocate = torch.empty if pieces.rows_once and pieces.are_all_rows(self.runs) else torch.zeros
        dtype = self.q.dtype if pieces.rows_once else accumulator(self.q.dtype)
        dq = allocate(self.q.shape, dtype=dtype, device=self.q.device)
        dkv = self.keys.gradients()
        for piece in self._pieces():
            rows, call = self._place(piece), self._call(piece, False).with_grad
            given = dout[:, rows], out[:, rows], lse[:, :, rows].contiguous(), None
            dq_part, *parts, _ = ops.BACKWARD(*given, *call.arguments)
            if pieces.rows_once:
                dq[:, rows] = dq_part
            else:
                dq[:, rows].add_(dq_part)
            for gradient, part in zip(dkv.at(piece.keys), parts):
                gradient.add_(part)
        return dq.to(self.q.dtype), dkv
