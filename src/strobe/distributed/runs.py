"""Which rows of a sequence each rank holds, as runs: sorted disjoint intervals [start, stop) of positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import torch
from torch import Tensor

Run = tuple[int, int]
Runs = tuple[Run, ...]
BLOCKS_PER_RANK = 8  # `by_tiles` cuts the rows of a rank into this many blocks: a rank has at most as many runs


def union(runs: Iterable[Run]) -> Runs:
    """The positions of all runs, as sorted disjoint runs. Adjacent runs become one.

    >>> union([(4, 6), (0, 2), (2, 3), (5, 5)])
    ((0, 3), (4, 6))
    """
    found: list[Run] = []
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)


def overlap(a: Runs, b: Runs) -> Runs:
    """The positions that are in both.

    >>> overlap(((0, 4), (6, 9)), ((2, 7),))
    ((2, 4), (6, 7))
    """
    return union((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)


def without(a: Runs, b: Runs) -> Runs:
    """The positions of a that are not in b.

    >>> without(((0, 9),), ((2, 3), (5, 7)))
    ((0, 2), (3, 5), (7, 9))
    """
    for start, stop in b:
        a = tuple(part for x in a for part in ((x[0], min(x[1], start)), (max(x[0], stop), x[1])) if part[0] < part[1])
    return a


def layers(spans: Sequence[Run]) -> tuple[tuple[Run, tuple[int, ...]], ...]:
    """Disjoint runs in order, each with the numbers of the spans that it lies in. Together they are all spans.

    >>> layers([(0, 4), (2, 6)])
    (((0, 2), (0,)), ((2, 4), (0, 1)), ((4, 6), (1,)))
    """
    edges = sorted({edge for span in spans for edge in span})
    found = []
    for start, stop in pairwise(edges):
        holding = tuple(number for number, span in enumerate(spans) if span[0] <= start and stop <= span[1])
        if holding:
            found.append(((start, stop), holding))
    return tuple(found)


def size(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def offset(runs: Runs, position: int) -> int:
    """How many positions of the runs come before `position`."""
    return sum(max(0, min(stop, position) - start) for start, stop in runs)


def positions(runs: Runs) -> Tensor:
    """The positions of the runs, int64 on the CPU."""
    return torch.cat([torch.arange(start, stop) for start, stop in runs] or [torch.arange(0)])


def cut(runs: Runs, parts: int) -> tuple[Runs, ...]:
    """The positions in order, cut into parts whose sizes differ by at most one.

    >>> cut(((0, 2), (4, 7)), 2)
    (((0, 2), (4, 5)), ((5, 7),))
    """
    total, found, begin = size(runs), [], 0
    for part in range(parts):
        end, before, mine = begin + (total + parts - 1 - part) // parts, 0, []
        for start, stop in runs:
            mine.append((start + max(0, begin - before), min(stop, start + end - before)))
            before += stop - start
        found.append(union(mine))
        begin = end
    return tuple(found)


def contiguous(seqlen: int, ranks: int) -> tuple[Runs, ...]:
    """One run a rank.

    >>> contiguous(5, 2)
    (((0, 3),), ((3, 5),))
    """
    return cut(union([(0, seqlen)]), ranks)


def head_tail(seqlen: int, ranks: int) -> tuple[Runs, ...]:
    """2 n chunks; rank r holds chunks r and 2 n - 1 - r, which together see as many causal keys on every rank.

    >>> head_tail(8, 2)
    (((0, 2), (6, 8)), ((2, 6),))
    """
    chunks = contiguous(seqlen, 2 * ranks)
    return tuple(union((*chunks[rank], *chunks[2 * ranks - 1 - rank])) for rank in range(ranks))


def by_tiles(cost: Tensor, ranks: int) -> tuple[Runs, ...]:
    """Blocks of rows, dealt so that ranks see about as many tiles and hold as many blocks: the costliest block first,
    to the rank with the least cost that still has room.

    cost: [S], of each row.

    >>> by_tiles(torch.tensor([1.0, 1, 2, 4]), 2)
    (((1, 2), (3, 4)), ((0, 1), (2, 3)))
    """
    seqlen = len(cost)
    block = max(1, -(-seqlen // (BLOCKS_PER_RANK * ranks)))
    blocks = [(start, min(seqlen, start + block)) for start in range(0, seqlen, block)]
    summed = torch.nn.functional.pad(cost.cumsum(0), (1, 0)).tolist()
    costs = [summed[stop] - summed[start] for start, stop in blocks]
    most = -(-len(blocks) // ranks)
    loads: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    held: list[list[Run]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(blocks)), key=lambda index: (-costs[index], index)):
        load, rank = heappop(loads)
        held[rank].append(blocks[index])
        if len(held[rank]) < most:
            heappush(loads, (load + costs[index], rank))
    return tuple(map(union, held))
