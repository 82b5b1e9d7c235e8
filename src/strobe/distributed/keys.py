"""Scheme `keys`: each rank receives the keys that its rows may see, and computes its rows alone.

The forward runs a call per piece (`pieces`). If every row is in one piece, the pieces write the result. Otherwise they
are partial results in float32, merged in a fixed order, and sinks are added once, after the last merge. The backward
runs the same pieces with the lse of whole rows, so that each gives its part of dq, dk and dv. Gradients of received
keys return to their rank, which adds them in the order of ranks.
"""

from __future__ import annotations

from itertools import accumulate
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
from .runs import Run, Runs, offset, overlap, size

Options = tuple  # scale, softcap, deterministic, batch_invariant, kernel: the fields of Call in this order


class Keys(NamedTuple):
    """k and v at the positions `held`, as one buffer [B, positions, H_kv * D + H_kv * D_v]."""

    buffer: Tensor
    held: Runs
    heads: int
    width: int  # H_kv * D

    @staticmethod
    def local(k: Tensor, v: Tensor, held: Runs) -> Keys:
        return Keys(torch.cat([k.flatten(2), v.flatten(2)], 2), held, k.shape[2], k.shape[2] * k.shape[3])

    def at(self, keys: Run) -> tuple[Tensor, Tensor]:
        """k and v at these positions, which must all be held: views of the buffer."""
        return self.split(self.buffer[:, self.place(keys)])

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of rows [B, rows, width]."""
        k, v = rows[..., : self.width], rows[..., self.width :]
        return k.unflatten(2, (self.heads, -1)), v.unflatten(2, (self.heads, -1))

    def place(self, keys: Run) -> slice:
        begin = offset(self.held, keys[0])
        return slice(begin, begin + keys[1] - keys[0])


class KeyExchange:
    """The keys of other ranks on their way to this one."""

    def __init__(self, own: Keys, plan: Plan):
        self.own, self.plan = own, plan
        given, taken = plan.links
        buffer, batch = own.buffer, own.buffer.shape[0]
        parts = [buffer[:, own.place(run)] for runs in given for run in runs]
        # a part per run and target, each [B, rows, width]; flattened one after another
        send = torch.cat([part.flatten(0, 1) for part in parts]) if parts else buffer.flatten(0, 1)[:0]
        counts = [[batch * size(runs) for runs in side] for side in (given, taken)]
        self.exchange = Exchange(send, (counts[0], counts[1]), plan.ranks.keys)

    def wait(self) -> Keys:
        plan, own = self.plan, self.own
        received, batch = self.exchange.wait(), own.buffer.shape[0]
        all_keys = own._replace(
            buffer=own.buffer.new_empty((batch, size(plan.held), own.buffer.shape[2])), held=plan.held
        )
        for run in own.held:
            all_keys.buffer[:, all_keys.place(run)] = own.buffer[:, own.place(run)]
        for run, part in _parts(received, plan.links[1], batch):
            all_keys.buffer[:, all_keys.place(run)] = part
        return all_keys


def _parts(buffer: Tensor, links: tuple[Runs, ...], batch: int):
    """The runs of an exchanged buffer with their rows [B, rows, width], rank after rank."""
    runs = [run for one in links for run in one]
    for run, rows in zip(runs, buffer.split([batch * (stop - start) for start, stop in runs]) if runs else ()):
        yield run, rows.unflatten(0, (batch, -1))


def return_gradients(gradients: Keys, plan: Plan) -> Tensor:
    """The gradient of this rank's own keys [B, local rows, width]: what all ranks give, added in the order of ranks."""
    given, taken = plan.links
    buffer, batch = gradients.buffer, gradients.buffer.shape[0]
    parts = [buffer[:, gradients.place(run)].flatten(0, 1) for runs in taken for run in runs]
    send = torch.cat(parts) if parts else buffer.flatten(0, 1)[:0]
    counts = [[batch * size(runs) for runs in side] for side in (taken, given)]
    got = Exchange(send.contiguous(), (counts[0], counts[1]), plan.ranks.keys).wait()
    mine = plan.groups[plan.ranks.keys_rank]
    own = gradients._replace(buffer=buffer.new_zeros((batch, size(mine), buffer.shape[2])), held=mine)
    by_rank = iter(got.split([batch * size(runs) for runs in given]))
    for rank, runs in enumerate(given):
        rows = next(by_rank)
        if rank == plan.ranks.keys_rank:
            for run in mine:
                own.buffer[:, own.place(run)] += buffer[:, gradients.place(run)]
        for run, part in _parts(rows, (runs,), batch):
            own.buffer[:, own.place(run)] += part
    return own.buffer


class AttendKeys(torch.autograd.Function):
    """Attention of this rank's rows over the keys of all ranks: out [B, local rows, H_q, D_v] in q's dtype."""

    @staticmethod
    def forward(ctx, plan: Plan, options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None):
        rows = Rows(plan, options, q)
        own = Keys.local(k, v, plan.groups[plan.ranks.keys_rank])
        exchange = KeyExchange(own, plan)
        out, lse = rows.forward(own, exchange, sinks)
        ctx.plan, ctx.options = plan, options
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        plan = ctx.plan
        rows = Rows(plan, ctx.options, q)
        own = Keys.local(k, v, plan.groups[plan.ranks.keys_rank])
        exchange = KeyExchange(own, plan)  # again: keeping the keys of other ranks would cost the memory that is saved
        dq, dkv = rows.backward(own, exchange, (dout, out, lse))
        dk, dv = (gradient.to(k.dtype) for gradient in dkv.split(return_gradients(dkv, plan)))
        dsinks = None
        if sinks is not None:
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
            dsinks = ops.sinks_gradient(Call(q, k, v, sinks=sinks), lse, delta)
        return None, None, dq, dk, dv, dsinks


class Rows:
    """The calls of this rank's rows q [B, local rows, H_q, D], forward and backward."""

    def __init__(self, plan: Plan, options: Options, q: Tensor):
        self.plan, self.options, self.q = plan, options, q
        self.runs = plan.groups[plan.ranks.keys_rank]
        pieces = plan.pieces
        self.rows_once = not pieces.own and _disjoint([piece.rows for piece in pieces.rest])

    def _stages(self, own: Keys, exchange: KeyExchange):
        """Each piece with the keys that it reads. Waits for keys of other ranks once own pieces have been launched."""
        for piece in self.plan.pieces.own:
            yield piece, own
        keys = exchange.wait()
        for piece in self.plan.pieces.rest:
            yield piece, keys

    def _place(self, piece: Piece) -> slice:
        begin = offset(self.runs, piece.rows[0])
        return slice(begin, begin + piece.rows[1] - piece.rows[0])

    def _call(self, piece: Piece, keys: Keys, partial: bool) -> Call:
        k, v = keys.at(piece.keys)
        call = Call(self.q[:, self._place(piece)], k, v, -1, -1, *self.options, partial)
        return call.with_mask(self._mask(piece))

    def _mask(self, piece: Piece) -> Mask:
        """The mask of a piece. Documents of a piece are kept: their ids never change."""
        whole, prepared = self.plan.mask, self.plan.prepared
        if whole.documents is None:
            return mask_of(piece, whole)
        key = "mask", piece
        if key not in prepared:
            prepared[key] = mask_of(piece, whole)
        return prepared[key]

    def forward(self, own: Keys, exchange: KeyExchange, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        q, (_, v_like) = self.q, own.at((0, 0))
        shape, dtype = (*q.shape[:3], v_like.shape[3]), accumulator(q.dtype)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
        if self.rows_once:
            if sinks is not None:
                lse.copy_(sinks.to(dtype)[None, :, None].expand_as(lse))
            out = q.new_zeros(shape)
            for piece, keys in self._stages(own, exchange):
                rows, call = self._place(piece), self._call(piece, keys, False)
                part = ops.run(call if sinks is None else call._replace(sinks=sinks))
                out[:, rows], lse[:, :, rows] = part
            return out, lse
        whole = Partial(q.new_zeros(shape, dtype=dtype), lse)
        written: Runs = ()
        for piece, keys in self._stages(own, exchange):
            rows, part = self._place(piece), Partial(*ops.run(self._call(piece, keys, True)))
            place = ((rows.start, rows.stop),)
            if overlap(written, place):
                part = merge(Partial(whole.out[:, rows], whole.lse[:, :, rows]), part)
            whole.out[:, rows], whole.lse[:, :, rows] = part
            written += place
        whole = whole if sinks is None else with_sinks(whole, sinks)
        return whole.out.to(q.dtype), whole.lse

    def backward(self, own: Keys, exchange: KeyExchange, results: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Keys]:
        """dq, and dk and dv of all held keys in float32 at least. results: dout, out and lse of whole rows."""
        (dout, out, lse), dtype = results, accumulator(self.q.dtype)
        dq = torch.zeros_like(self.q, dtype=self.q.dtype if self.rows_once else dtype)
        held = self.plan.held
        shape = own.buffer.shape[0], size(held), own.buffer.shape[2]
        dkv = own._replace(buffer=own.buffer.new_zeros(shape, dtype=dtype), held=held)
        for piece, keys in self._stages(own, exchange):
            rows, call = self._place(piece), self._call(piece, keys, False).with_grad
            given = dout[:, rows], out[:, rows], lse[:, :, rows].contiguous(), None
            dq_part, dk_part, dv_part, _ = ops.BACKWARD(*given, *call.arguments)
            dk, dv = dkv.at(piece.keys)
            dq[:, rows] += dq_part
            dk += dk_part
            dv += dv_part
        return dq.to(self.q.dtype), dkv


def _disjoint(rows: list[Run]) -> bool:
    ends = list(accumulate((stop for _, stop in sorted(rows)), max, initial=0))
    return all(start >= end for (start, _), end in zip(sorted(rows), ends))
