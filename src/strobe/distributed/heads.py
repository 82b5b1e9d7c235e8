"""Scheme `heads`: an exchange before attention gives a rank all rows of some heads, one after it gives them back.

Rank r of n gets query heads [r H_q / n, (r + 1) H_q / n) and the key heads that these read; a key head that several
ranks need is sent to each of them. q, k and v travel in one buffer whose rows hold the features of all three, and
attention reads it in place. Source: DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .group import Exchange
from .plan import Plan
from .runs import positions, size


class Share(NamedTuple):
    """The heads of each rank."""

    ranks: int
    heads_q: int  # of a rank
    key_heads: tuple[int, ...]  # of all ranks, one after another; a rank has len(key_heads) / ranks

    @staticmethod
    def of(heads_q: int, heads_kv: int, ranks: int) -> Share:
        """One key head for each group of query heads. If a rank's query heads read unequal parts of key heads, it gets
        some key heads several times, so that its groups are equal.

        >>> Share.of(8, 2, 4), Share.of(12, 3, 2).key_heads
        (Share(ranks=4, heads_q=2, key_heads=(0, 0, 1, 1)), (0, 0, 1, 1, 2, 2))
        """
        mine, group = heads_q // ranks, heads_q // heads_kv
        step = gcd(mine, group)
        return Share(ranks, mine, tuple(head // group for head in range(0, heads_q, step)))

    @property
    def heads_kv(self) -> int:
        return len(self.key_heads) // self.ranks


class Order(NamedTuple):
    """How rows of [B, rows of all ranks] lie in a buffer that the ranks have filled one after another."""

    counts: list[int]  # rows of each rank, over the batch
    to_buffer: Tensor | None  # int64: for each row of the buffer its row in [B, S]; None if they lie alike
    from_buffer: Tensor | None

    @staticmethod
    def of(plan: Plan, batch: int, device: torch.device) -> Order:
        return plan.keep(("order", batch, device), lambda: Order._made(plan, batch, device))

    @staticmethod
    def _made(plan: Plan, batch: int, device: torch.device) -> Order:
        inner, first = plan.heads_size, plan.ranks.keys_rank * plan.heads_size
        parts = plan.rows[first : first + inner]
        whole = positions(plan.own_rows)
        place = [torch.searchsorted(whole, positions(runs)) for runs in parts]
        order = torch.cat([b * len(whole) + rows for rows in place for b in range(batch)] or [whole])
        alike = bool((order == torch.arange(len(order))).all())
        pair = (None, None) if alike else (order.to(device), order.argsort().to(device))
        return Order([batch * size(runs) for runs in parts], *pair)


class EnterHeads(torch.autograd.Function):
    """`enter` with its gradient."""

    @staticmethod
    def forward(ctx, plan: Plan, q: Tensor, k: Tensor, v: Tensor):
        ctx.plan, ctx.shapes = plan, (q.shape, k.shape, v.shape)
        return enter(plan, q, k, v)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, *enter_gradients(ctx.plan, ctx.shapes, gradients)


class LeaveHeads(torch.autograd.Function):
    """`leave` with its gradient."""

    @staticmethod
    def forward(ctx, plan: Plan, out: Tensor):
        ctx.plan = plan
        return leave(plan, out)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return None, leave_gradient(ctx.plan, gradient)


def enter(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """q, k, v [B, local rows, all heads, D] as [B, rows of all ranks, heads of this rank, D]: views of one buffer."""
    share, order = Share.of(q.shape[2], k.shape[2], plan.heads_size), Order.of(plan, q.shape[0], q.device)
    index = _head_index(plan, share, q.device)
    k, v = (t if len(share.key_heads) == t.shape[2] else t.index_select(2, index) for t in (k, v))
    got = _exchange_out(_by_rank((q, k, v), share.ranks), plan, order)
    widths = [t.shape[2] // share.ranks * t.shape[3] for t in (q, k, v)]
    parts = _rows(got, order.from_buffer, q.shape[0]).split(widths, -1)
    return tuple(part.unflatten(-1, (-1, t.shape[3])) for part, t in zip(parts, (q, k, v)))


def enter_gradients(plan: Plan, shapes: Sequence[torch.Size], gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of q, k and v of these shapes, from those of what `enter` returned."""
    batch = shapes[0][0]
    share, order = Share.of(shapes[0][2], shapes[1][2], plan.heads_size), Order.of(plan, batch, gradients[0].device)
    rows = torch.cat([g.flatten(2) for g in gradients], -1).flatten(0, 1)
    got = _exchange_back(rows if order.to_buffer is None else rows[order.to_buffer], plan, order)
    found = []
    for part, shape in zip(got.split([g.shape[2] * g.shape[3] for g in gradients], -1), shapes):
        heads = part.unflatten(-1, (-1, shape[3])).unflatten(1, shape[:2])  # [ranks, B, rows, heads of a rank, D]
        whole = heads.permute(1, 2, 0, 3, 4).flatten(2, 3)
        found.append(whole if whole.shape[2] == shape[2] else _summed(whole, share, shape[2]))
    return found


def leave(plan: Plan, out: Tensor) -> Tensor:
    """out [B, rows of all ranks, heads of this rank, D_v] as [B, local rows, all heads, D_v]."""
    order = Order.of(plan, out.shape[0], out.device)
    rows = out.flatten(2).flatten(0, 1)
    got = _exchange_back(rows if order.to_buffer is None else rows[order.to_buffer], plan, order)
    heads = got.unflatten(-1, (-1, out.shape[3])).unflatten(1, (out.shape[0], plan.local_rows))
    return heads.permute(1, 2, 0, 3, 4).flatten(2, 3)


def leave_gradient(plan: Plan, gradient: Tensor) -> Tensor:
    """The gradient of what `leave` took."""
    order = Order.of(plan, gradient.shape[0], gradient.device)
    got = _exchange_out(_by_rank((gradient,), plan.heads_size), plan, order)
    return _rows(got, order.from_buffer, gradient.shape[0]).unflatten(-1, (-1, gradient.shape[3]))


def _by_rank(tensors: Sequence[Tensor], ranks: int) -> Tensor:
    """Tensors [B, S, H, D] as [ranks, B * S, width], where a row holds H / ranks heads of each. One copy of each."""
    batch, rows = tensors[0].shape[:2]
    widths = [t.shape[2] // ranks * t.shape[3] for t in tensors]
    found = tensors[0].new_empty((ranks, batch, rows, sum(widths)))
    for place, t in zip(found.split(widths, -1), tensors):
        place.unflatten(-1, (-1, t.shape[3])).copy_(t.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4))
    return found.flatten(1, 2)


def _exchange_out(send: Tensor, plan: Plan, order: Order) -> Tensor:
    """Rows of all ranks of the group, from [ranks, local rows, width], where rank r gets send[r]."""
    given = [send.shape[1]] * plan.heads_size
    return Exchange(send.flatten(0, 1).contiguous(), (given, order.counts), _group(plan)).wait()


def _exchange_back(rows: Tensor, plan: Plan, order: Order) -> Tensor:
    """[ranks, local rows, width] from the rows of all ranks of the group, each of which gets its rows of every rank."""
    mine = order.counts[plan.ranks.heads_rank]
    got = Exchange(rows.contiguous(), (order.counts, [mine] * plan.heads_size), _group(plan)).wait()
    return got.unflatten(0, (plan.heads_size, mine))


def _rows(buffer: Tensor, index: Tensor | None, batch: int) -> Tensor:
    rows = buffer if index is None else buffer[index]
    return rows.unflatten(0, (batch, -1)) if batch else rows[None][:0]


def _summed(gradients: Tensor, share: Share, heads: int) -> Tensor:
    """The gradient of each key head: the sum over the ranks that have it, in their order, in float32 at least."""
    wide = gradients.to(torch.promote_types(gradients.dtype, torch.float32))
    total = wide.new_zeros((*gradients.shape[:2], heads, gradients.shape[3]))
    for place, head in enumerate(share.key_heads):
        total[:, :, head] += wide[:, :, place]
    return total.to(gradients.dtype)


def _head_index(plan: Plan, share: Share, device: torch.device) -> Tensor:
    return plan.keep(("heads", share, device), lambda: torch.tensor(share.key_heads, device=device))


def _group(plan: Plan):
    return plan.ranks.heads
