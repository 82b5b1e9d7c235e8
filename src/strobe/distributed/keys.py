"""Scheme `keys`: each rank receives the keys that its rows may see, and computes its rows alone.

The forward runs a call per piece (`pieces`), or one for several (`run_calls`), first those over own keys alone, while
other keys arrive. If every row is in one piece, the pieces write the result. Otherwise they are partial results in
float32, merged in a fixed order, and sinks are added once, after the last merge. The backward runs the same calls with
the lse of whole rows, so that each gives its part of dq, dk and dv. Gradients of received keys return to their rank
(`key_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.protocol import Backward
from ..ops import attention as ops
from ..problem.call import Call, accumulator
from ..problem.mask import Mask
from ..problem.merge import Partial, merge, with_sinks
from ..problem.torch_state import unseen_mode_active
from .group import Transfer
from .key_gradients import KeyGradients
from .pieces import Piece, mask_of
from .plan import Plan
from .run_calls import RunOffsets, are_runs, runs_pay
from .runs import Run, Runs, offset, overlap, size, union

Options = tuple  # scale, softcap, deterministic, batch_invariant, kernel: the fields of Call in this order


class Keys(NamedTuple):
    """k and v of this rank's rows [B, local rows, H_kv, D], and a buffer of the keys of pieces that need others' keys.

    A row of the buffer [positions `held`, B, H_kv * (D + D_v)] holds k and v beside each other, and travels without a
    copy. Pieces over own keys alone read k and v in place.
    """

    k: Tensor
    v: Tensor
    own: Runs
    held: Runs
    buffer: Tensor | None

    @staticmethod
    def of(k: Tensor, v: Tensor, plan: Plan, held: Runs | None = None) -> Keys:
        """Room for the plan's keys. `exchange` fills it. held: the keys in the buffer, in place of the plan's."""
        held = plan.buffered if held is None else held
        width = k.shape[2] * (k.shape[3] + v.shape[3])
        buffer = k.new_empty((size(held), k.shape[0], width)) if held and held != plan.own_rows else None
        return Keys(k, v, plan.own_rows, held, buffer)

    def at(self, keys: Run) -> tuple[Tensor, Tensor]:
        """k [B, positions, H_kv, D] and v at these positions, which must all be held: views."""
        if self.is_own(keys):
            begin = offset(self.own, keys[0])
            rows = slice(begin, begin + keys[1] - keys[0])
            return self.k[:, rows], self.v[:, rows]
        return self.split(self._buffered(keys))

    def is_own(self, keys: Run) -> bool:
        """Whether k and v of these positions are read in place."""
        return any(start <= keys[0] and keys[1] <= stop for start, stop in self.own)

    def whole(self) -> tuple[Tensor, Tensor]:
        """k and v of all keys that are held: views."""
        return (self.k, self.v) if self.buffer is None else self.split(self.buffer)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the buffer as k and v [B, positions, H_kv, ...]: views."""
        heads, width = self.k.shape[2], self.k.shape[2] * self.k.shape[3]
        k, v = (part.transpose(0, 1).unflatten(2, (heads, -1)) for part in (rows[..., :width], rows[..., width:]))
        return k, v

    def exchange(self, plan: Plan) -> Transfer:
        """Send own keys to the ranks that need them, and receive those of others in place.

        Own keys that are sent but not in the buffer are copied first, and own keys enter the buffer once the transfer
        has been issued. So its kernel starts before a kernel of attention takes all SMs.
        """
        given, taken = plan.links
        sent = [run for runs in given for run in runs]
        is_buffered = self.buffer is not None and all(overlap((run,), self.held) == (run,) for run in sent)
        if is_buffered:
            self._fill()
        rows = self._buffered if is_buffered else self._joined
        leaving = [(rank, rows(run)) for rank, runs in enumerate(given) for run in runs]
        arriving = [(rank, self._buffered(run)) for rank, runs in enumerate(taken) for run in runs]
        in_one = self.k.device if plan.links_are_single and self.k.is_cuda else None
        transfer = Transfer(leaving, arriving, plan.ranks.keys, in_one)
        if not is_buffered:
            self._fill()
        return transfer

    def _fill(self) -> None:
        """Copy own keys into the buffer."""
        if self.buffer is not None:
            for run in overlap(self.own, self.held):
                for place, part in zip(self.split(self._buffered(run)), self.at(run)):
                    place.copy_(part)

    def _buffered(self, keys: Run) -> Tensor:
        begin = offset(self.held, keys[0])
        return cast("Tensor", self.buffer)[begin : begin + keys[1] - keys[0]]

    def _joined(self, keys: Run) -> Tensor:
        """Own k and v of these positions in a row of the buffer's form."""
        return torch.cat([part.transpose(0, 1).flatten(2) for part in self.at(keys)], -1)


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
    rows = Rows(plan, call[5:10], call.q, Keys.of(call.k, call.v, plan), call.sinks)
    launches = rows.together(plan.pieces.own) + rows.together(plan.pieces.rest)
    return [one for pieces in launches for one in (rows.forward_call(pieces), rows.backward_call(pieces))]


def forward_into(out: Tensor, call: Call) -> Tensor:
    """lse of a call without gradients. Writes out, some of the rows of a tensor."""
    if unseen_mode_active():  # a mode looks for the op
        return ops.run(call, out)[1]
    call = ops.received(call.arguments)
    choice = ops.decide(call)
    shape, strides, dtype = choice.problem.outputs[1]
    lse = call.q.new_empty_strided(shape, strides, dtype=dtype)
    ops.write(choice, call, out, lse)
    return lse


def backward_into(
    dq: Tensor, tensors: tuple[Tensor, Tensor, Tensor, None], call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """dk, dv and the gradient of sinks of a call, by its backward of tensors = (dout, out, lse, None). Writes dq.

    dq: some of the rows of a tensor. The op would return them in a tensor of their own.
    """
    if unseen_mode_active():  # a mode looks for the op
        found = ops.BACKWARD(*tensors, *call.arguments)
        dq.copy_(found[0])
        return found[1:]
    call = ops.received(call.arguments)
    dk, dv = (call.k.new_empty(shape) for shape in call.gradient_shapes[1:])
    given = Backward(*tensors, dq, dk, dv, torch.empty_like(tensors[2]))
    ops.write_gradients(ops.decide(call), call, given)
    return given.dk, given.dv, ops.sinks_gradient(call, tensors[2], given.delta)


class Rows:
    """The calls of this rank's rows q [B, local rows, H_q, D], forward and backward."""

    def __init__(self, plan: Plan, options: Options, q: Tensor, keys: Keys, sinks: Tensor | None):
        self.plan, self.options, self.q, self.keys, self.sinks = plan, options, q, keys, sinks
        self.pieces = plan.pieces

    def together(self, pieces: tuple[Piece, ...]) -> list[tuple[Piece, ...]]:
        """The pieces of each launch."""
        if len(pieces) > 1 and self.pieces.rows_once and runs_pay(self.q):
            plan = self.plan
            if plan.keep(("are runs", pieces), lambda: are_runs(pieces, plan.own_rows, plan.mask)):
                return [pieces]
        return [(piece,) for piece in pieces]

    def _arriving(self) -> Iterator[tuple[Piece, ...]]:
        """The pieces of each launch, once their keys are there. Own pieces are launched while other keys arrive."""
        transfer = self.keys.exchange(self.plan)
        yield from self.together(self.pieces.own)
        transfer.wait()
        yield from self.together(self.pieces.rest)

    def _place(self, pieces: tuple[Piece, ...]) -> slice:
        begin = offset(self.plan.own_rows, pieces[0].rows[0])
        return slice(begin, begin + sum(stop - start for (start, stop), _ in pieces))

    def _call(self, pieces: tuple[Piece, ...]) -> Call:
        q, sinks = self.q[:, self._place(pieces)], self.sinks if self.pieces.rows_once else None
        if len(pieces) == 1:
            call = Call(q, *self.keys.at(pieces[0].keys), -1, -1, *self.options, sinks=sinks)
            return call.with_mask(self._mask(pieces[0]))
        is_own = self.keys.is_own(pieces[0].keys)
        k, v = (self.keys.k, self.keys.v) if is_own else self.keys.whole()
        held = self.keys.own if is_own else self.keys.held
        offsets = self.plan.keep(("runs", pieces, q.device), lambda: RunOffsets.of(pieces, held, q.device))
        call = Call(q[0], k[0], v[0], -1, -1, *self.options, sinks=sinks).with_mask(self._mask(pieces[0]))
        return call._replace(**offsets._asdict())

    def forward_call(self, pieces: tuple[Piece, ...]) -> Call:
        return self._call(pieces)._replace(partial=not self.pieces.rows_once)

    def backward_call(self, pieces: tuple[Piece, ...]) -> Call:
        return self._call(pieces).with_grad

    def _mask(self, piece: Piece) -> Mask:
        """The mask of a piece. Documents of a piece are kept: their ids never change."""
        whole = self.plan.mask
        if whole.documents is None:
            return mask_of(piece, whole)
        return self.plan.keep(("mask", piece), lambda: mask_of(piece, whole))

    def forward(self, head_dim_v: int) -> tuple[Tensor, Tensor]:
        """out and lse of the rows."""
        q, sinks, pieces, dtype = self.q, self.sinks, self.pieces, accumulator(self.q.dtype)
        # merging a piece keeps what out holds in a row that has seen no key
        allocate = torch.empty if pieces.rows_once and pieces.are_all_rows(self.plan.own_rows) else torch.zeros
        out = allocate((*q.shape[:3], head_dim_v), dtype=q.dtype if pieces.rows_once else dtype, device=q.device)
        shape = q.shape[0], q.shape[2], q.shape[1]
        if pieces.rows_once:
            lse = q.new_empty(shape, dtype=dtype)
            if not pieces.are_all_rows(self.plan.own_rows):
                lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks.to(dtype)[None, :, None].expand_as(lse))
            for several in self._arriving():
                rows, call = self._place(several), self.forward_call(several)
                found = forward_into(out[0, rows] if call.packed else out[:, rows], call)
                if rows == slice(0, shape[2]):
                    lse = found.view(shape)
                else:
                    lse[:, :, rows] = found
            return out, lse
        lse = q.new_full(shape, -torch.inf, dtype=dtype)
        written: Runs = ()
        for several in self._arriving():
            (piece,), rows, part = several, self._place(several), Partial(*ops.run(self.forward_call(several)))
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
        k, v = self.keys.k, self.keys.v
        like = (
            k.new_empty((0, k.shape[0], k.shape[2] * k.shape[3])),
            v.new_empty((0, v.shape[0], v.shape[2] * v.shape[3])),
        )
        gradients = KeyGradients(self.plan, k.shape[2], like)
        dsinks: list[Tensor] = []
        for several in self._arriving():
            rows, call = self._place(several), self.backward_call(several)
            given = dout[:, rows], out[:, rows], lse[:, :, rows].contiguous(), None
            if call.packed:
                packed = given[0][0], given[1][0], given[2][0], None
                dk, dv, dsinks_part = backward_into(dq[0, rows], packed, call)
            elif pieces.rows_once and not is_one:
                dk, dv, dsinks_part = backward_into(dq[:, rows], given, call)
            else:
                dq_part, dk, dv, dsinks_part = ops.BACKWARD(*given, *call.arguments)
                if is_one:
                    dq = dq_part
                else:
                    dq[:, rows].add_(dq_part)
            dsinks.append(dsinks_part)
            lengths = [stop - start for _, (start, stop) in several]
            for part in zip(dk.split(lengths, -3), dv.split(lengths, -3)):
                gradients.add(*(t[None] if call.packed else t for t in part))
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
