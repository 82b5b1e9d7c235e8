"""Which keys a mask lets each row see, read on the host once per plan, and what they cost.

Without documents a row sees an interval of keys; documents narrow the interval to the span of the row's own document.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..problem.mask import Mask
from .runs import Run, Runs

TILE = 128  # rows and keys of a tile, by which work is counted


class Visible(NamedTuple):
    """For each row the first key that it may see and one past the last, over all batch entries. int64 [S] on the CPU.

    A row that sees no key has first = S and stop = 0.
    """

    first: Tensor
    stop: Tensor

    @staticmethod
    def of(mask: Mask, seqlen: int) -> Visible:
        """Reads the mask's tensors, which waits for their device."""
        row = torch.arange(seqlen)[None]
        first, stop = torch.zeros_like(row), torch.full_like(row, seqlen)
        if mask.left is not None:
            first = (row - mask.left).clamp(min=0)
        if mask.right is not None:
            stop = (row + mask.right + 1).clamp(max=seqlen)
        if mask.prefix is not None:
            prefix = mask.prefix.cpu()[:, None] if isinstance(mask.prefix, Tensor) else torch.tensor([[mask.prefix]])
            stop = torch.minimum(stop, torch.maximum(prefix, row + 1))
        if mask.key_lengths is not None:
            stop = torch.minimum(stop, mask.key_lengths.cpu()[:, None])
        if mask.documents is not None:
            _, span_first, span_stop = mask.documents.spans_q.cpu().long().unbind(2)
            first, stop = torch.maximum(first, span_first), torch.minimum(stop, span_stop)
        empty = first >= stop
        first, stop = torch.where(empty, seqlen, first), torch.where(empty, 0, stop)
        return Visible(first.amin(0) if len(first) else row[0] * 0 + seqlen, stop.amax(0) if len(stop) else row[0] * 0)

    def keys(self, rows: Run) -> Run | None:
        """The interval of keys that some of these rows may see, or None."""
        first, stop = self.first[slice(*rows)], self.stop[slice(*rows)]
        if not len(first) or int(stop.max()) == 0:
            return None
        return int(first.min()), int(stop.max())

    def seeing(self, rows: Run, keys: Run) -> tuple[Run, Run] | None:
        """The part of a rectangle outside of which nothing is seen: (rows, keys), or None if nothing is."""
        first, stop = self.first[slice(*rows)], self.stop[slice(*rows)]
        seen = ((first < keys[1]) & (stop > keys[0])).nonzero()[:, 0]
        if not len(seen) or keys[0] >= keys[1]:
            return None
        begin, end = int(seen[0]), int(seen[-1]) + 1
        low, high = int(first[begin:end].min()), int(stop[begin:end].max())
        return (rows[0] + begin, rows[0] + end), (max(keys[0], low), min(keys[1], high))

    def cost(self) -> Tensor:
        """Tiles of keys that each row visits, float64 [S]: the rows of a tile visit all keys that one of them sees."""
        seqlen = len(self.first)
        tile = min(TILE, max(1, seqlen // 64))
        tiles = -(-seqlen // tile)
        pad = tiles * tile - seqlen
        first = torch.nn.functional.pad(self.first, (0, pad), value=seqlen).view(tiles, tile).amin(1)
        stop = torch.nn.functional.pad(self.stop, (0, pad)).view(tiles, tile).amax(1)
        visited = (-(-stop // tile) - first // tile).clamp(min=0).double()
        return visited.repeat_interleave(tile)[:seqlen]


def imbalance(cost: Tensor, ranks: tuple[Runs, ...]) -> float:
    """The largest cost of a rank divided by the mean. 1.0 if nothing is seen."""
    summed = torch.nn.functional.pad(cost.cumsum(0), (1, 0))
    loads = [sum(float(summed[stop] - summed[start]) for start, stop in runs) for runs in ranks]
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
