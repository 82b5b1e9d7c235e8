"""Several pieces of a rank as one call: packed runs of rows over keys that they share (`problem.call.Call`).

One launch balances the tiles of all runs over the SMs, and no key is copied for it: runs read the ranges of one tensor
that their rows see. dK and dV of each run have rows of their own, so `key_gradients` adds them in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem.mask import Mask
from ..problem.target import Target
from .pieces import Piece, mask_of
from .runs import Runs, offset

# Blackwell's kernels have no runs. On an H200 one launch took 0.96 to 1.02 of the time of two, for causal runs of 4k or
# 8k rows and 64/8 heads of 128. Tests ran on the same GPU meanwhile.
CAPABILITY = 90


class RunOffsets(NamedTuple):
    """Where the rows and keys of runs lie: arguments of a Call."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor  # [2, n + 1]
    max_seqlen_q: int
    max_seqlen_k: int

    @staticmethod
    def of(pieces: Sequence[Piece], held: Runs, device: torch.device) -> RunOffsets:
        """held: the positions of the tensor's keys."""
        rows, keys = ([run[1] - run[0] for run in side] for side in zip(*pieces))
        starts = [offset(held, piece.keys[0]) for piece in pieces]
        sums = lambda lengths: torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        cu_seqlens_k = torch.stack([sums(keys), torch.tensor([*starts, 0], dtype=torch.int32)])
        return RunOffsets(sums(rows).to(device), cu_seqlens_k.to(device), max(rows), sum(keys))


def are_runs(pieces: Sequence[Piece], own: Runs, mask: Mask) -> bool:
    """Whether one call can have these pieces: their rows follow each other, their keys are all own or all in the
    buffer, and the mask has the same bounds for each of them, and no tensors.
    """
    if len(pieces) < 2 or mask.prefix is not None or mask.key_lengths is not None or mask.documents is not None:
        return False
    stops = [offset(own, piece.rows[1]) for piece in pieces]
    follows = all(offset(own, piece.rows[0]) == stop for piece, stop in zip(pieces[1:], stops))
    sides = {any(run[0] <= piece.keys[0] and piece.keys[1] <= run[1] for run in own) for piece in pieces}
    bounds = {(one.left, one.right) for one in (mask_of(piece, mask) for piece in pieces)}
    return follows and len(sides) == len(bounds) == 1


def runs_pay(q: Tensor) -> bool:
    """Whether rows q [B, S, H, D] are computed in one launch. Packed tensors have no batch."""
    return q.shape[0] == 1 and q.is_cuda and Target.of(q.device).capability == CAPABILITY
