"""The figure of docs/guides/context_parallel_plans.md: three plans of four processes, drawn from these plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

import strobe
from strobe.distributed import Plan, context_parallel
from strobe.distributed.runs import Runs, without

from .figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, STRONG, Figure

RANKS, SEQLEN = 4, 65536
COLORS = BLUE, GREEN, ORANGE, PURPLE
LEFT, WIDTH, BAR, STEP = 60, 560, 16, 22  # of the bars, in pixels
MIB = 2**20


@contextmanager
def processes(count: int) -> Iterator[None]:
    """A process group of so many ranks without their processes: plans need no exchange."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plans() -> dict[str, Plan]:
    """64k positions, 64 query heads and 8 key heads of 128, causal, by keys."""
    ends = torch.tensor([9000, 14500, 30000, 35000, 47000, 49500, 62000, SEQLEN])
    ids = torch.searchsorted(ends, torch.arange(SEQLEN), right=True).int()[None]
    masks = {
        "causal": strobe.causal(),
        "window of 1,024": strobe.window(1023, 0),
        "eight documents of 2k to 15k": strobe.causal() & strobe.documents(ids),
    }
    with processes(RANKS):
        parallel = context_parallel(scheme="keys")
        return {name: parallel.plan(mask, seqlen=SEQLEN, heads_q=64, heads_kv=8) for name, mask in masks.items()}


def plans_of_four() -> Figure:
    found = plans()
    figure = Figure(860, 46 + len(found) * (RANKS * STEP + 50))
    for n, (name, color) in enumerate((("rows of the process", STRONG[BLUE]), ("keys that it receives", BLUE))):
        figure.parts.append(_bar(LEFT + 190 * n, 8, 16, color, STRONG[BLUE]))
        figure.text(LEFT + 190 * n + 88, 21, name, size=12)
    for column, head in ((660, "rows"), (735, "received"), (815, "tiles / mean")):
        figure.text(column, 21, head, size=12, fill=GREY)
    top = 46
    for name, plan in found.items():
        figure.text(LEFT + WIDTH / 2, top + 8, f"{name}: {plan.settings.balance}", weight="600")
        for rank in range(RANKS):
            _process(figure, plan, rank, top + 18 + STEP * rank)
        top += RANKS * STEP + 50
    return figure


def _process(figure: Figure, plan: Plan, rank: int, top: int) -> None:
    own, color = plan.rows[rank], COLORS[rank]
    figure.text(28, top + 13, f"rank {rank}", size=12, fill=STRONG[color])
    figure.parts.append(_bar(LEFT, top, WIDTH, "#fff", "#cfd8dc"))
    for runs, fill in ((without(plan.needs[rank], own), color), (own, STRONG[color])):
        figure.parts += [_bar(_place(a), top, _place(b) - _place(a), fill, STRONG[color]) for a, b in runs]
    cost = plan.visible.cost()
    mean = float(cost.sum()) / RANKS
    for column, text in (
        (660, f"{sum(b - a for a, b in own):,}"),
        (735, f"{plan.bytes_received[rank] / MIB:.1f} MiB"),
        (815, f"{_tiles(cost, own) / mean:.2f}"),
    ):
        figure.text(column, top + 13, text, size=12, fill=INK)


def _tiles(cost: torch.Tensor, runs: Runs) -> float:
    return sum(float(cost[start:stop].sum()) for start, stop in runs)


def _place(position: int) -> float:
    return LEFT + WIDTH * position / SEQLEN


def _bar(x: float, y: float, width: float, fill: str, stroke: str) -> str:
    place = f'x="{x:.1f}" y="{y:g}" width="{max(width, 1.0):.1f}" height="{BAR}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="0.8"/>'
