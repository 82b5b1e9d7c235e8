"""The way of dK and dV back to the ranks that hold the keys.

Pieces of a rank give gradients of overlapping ranges of keys. Where several pieces overlap, the rank adds them first,
so that it sends one part of each position. Parts travel in the dtype of the keys. Their owner adds them in the order of
ranks, in float32 at least, so that results are the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..problem.call import accumulator
from .group import Transfer
from .plan import Plan
from .runs import Run, layers, offset, overlap, size

Pair = tuple[Tensor, Tensor]  # of k and of v: [positions, B, H_kv * D] and [positions, B, H_kv * D_v]


class KeyGradients:
    """The gradients that a rank's pieces give, and those of its own keys."""

    def __init__(self, plan: Plan, heads: int, like: Pair):
        """heads: key heads. like: tensors with the batch, widths, dtype and device of the gradients."""
        self.plan, self.heads, self.like = plan, heads, like
        self.pieces: list[Pair] = []

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """The gradients of the next piece: [B, keys, H_kv, D] and [B, keys, H_kv, D_v]."""
        dk, dv = (part.transpose(0, 1).flatten(2).contiguous() for part in (dk, dv))
        self.pieces.append((dk, dv))

    def exchange(self) -> tuple[Tensor, Tensor]:
        """dk and dv of own keys [B, local rows, H_kv, ...], once all pieces are added. All ranks must call it."""
        plan, mine = self.plan, self.plan.ranks.keys_rank
        sums = [(run, self._sum(run, several)) for run, several in plan.key_layers[mine]]
        given: list[tuple[int, Tensor]] = []
        taken: list[tuple[int, Tensor]] = []
        parts: list[tuple[Run, Pair]] = []  # dk and dv of own keys that each rank computed, by rank
        for rank, owned in enumerate(plan.groups):
            if rank != mine:
                cut = [(run, _part(run, whole, pair)) for whole, pair in sums for run in overlap((whole,), owned)]
                given += [(rank, tensor) for _, pair in cut for tensor in pair]
            for run, _ in plan.key_layers[rank]:
                for part in overlap((run,), plan.own_rows):
                    if rank == mine:
                        whole, pair = next(one for one in sums if one[0] == run)
                        parts.append((part, _part(part, whole, pair)))
                        continue
                    room = (one.new_empty((part[1] - part[0], *one.shape[1:])) for one in self.like)
                    parts.append((part, (next(room), next(room))))
                    taken += [(rank, tensor) for tensor in parts[-1][1]]
        Transfer(given, taken, plan.ranks.keys).wait()
        wide = self._covering()
        dk, dv = (
            self._total([(run, pair[which]) for run, pair in parts], self.like[which], wide and wide[which])
            for which in (0, 1)
        )
        return dk, dv

    def _covering(self) -> Pair | None:
        """The gradients of own keys that one piece gives, as views, if a piece covers them all."""
        own = self.plan.own_rows
        for piece, pair in zip(self.plan.pieces.all, self.pieces):
            if len(own) == 1 and piece.keys[0] <= own[0][0] and own[0][1] <= piece.keys[1]:
                return _part(own[0], piece.keys, pair)
        return None

    def _sum(self, run: Run, several: Sequence[int]) -> Pair:
        """The sum of these pieces at the positions of a run that lies in all of them."""
        keys = [piece.keys for piece in self.plan.pieces.all]
        pairs = [_part(run, keys[number], self.pieces[number]) for number in several]
        return _added([pair[0] for pair in pairs]), _added([pair[1] for pair in pairs])

    def _total(self, parts: list[tuple[Run, Tensor]], like: Tensor, wide: Tensor | None) -> Tensor:
        """The sums of parts over own positions, as [B, local rows, H_kv, width].

        wide: a part that covers all own positions, or None. Sums are written into it, so that positions that are in no
        other part are not copied.
        """
        own, found = self.plan.own_rows, layers([run for run, _ in parts])
        cut = [
            (run, _added([_rows(run, parts[number][0], parts[number][1]) for number in several]))
            for run, several in found
        ]
        if len(cut) == 1 and size(own) == cut[0][0][1] - cut[0][0][0]:
            total = cut[0][1]
        else:
            is_whole = sum(stop - start for (start, stop), _ in cut) == size(own)
            allocate = like.new_empty if is_whole else like.new_zeros
            total = allocate((size(own), *like.shape[1:])) if wide is None else wide
            for run, rows in cut:
                begin = offset(own, run[0])
                place = total[begin : begin + len(rows)]
                if place.data_ptr() != rows.data_ptr():  # of `wide` itself
                    place.copy_(rows)
        return total.transpose(0, 1).unflatten(2, (self.heads, -1))


def _rows(run: Run, whole: Run, rows: Tensor) -> Tensor:
    return rows[run[0] - whole[0] : run[1] - whole[0]]


def _part(run: Run, whole: Run, pair: Pair) -> Pair:
    return _rows(run, whole, pair[0]), _rows(run, whole, pair[1])


def _added(parts: Sequence[Tensor]) -> Tensor:
    """The sum in this order, rounded once."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        return parts[0] + parts[1]  # PyTorch adds numbers of 16 bits in float32 and rounds the sum
    total = torch.add(parts[0].to(accumulator(parts[0].dtype)), parts[1])
    for part in parts[2:]:
        total += part
    return total.to(parts[0].dtype)
