"""A bar chart of `bench.cycles`: for each step, one bar for each unit."""

from __future__ import annotations

from pathlib import Path

from ..problem.target import Target
from .cycles import Cycles, table
from .plot import OURS

COLOURS = {"tensor": OURS, "exp": "#0072b2", "shared": "#009e73", "issue": "#e69f00"}


def save(target: Target, path: Path) -> Path:
    from matplotlib.figure import Figure  # instead of pyplot, which needs a window system and has global state

    rows = table(target)
    figure = Figure(figsize=(8, 0.62 * len(rows) + 1.2), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    for place, unit in enumerate(COLOURS):
        heights = [n + (place - 1.5) * 0.2 for n in range(len(rows))]
        axes.barh(heights, [_of(row.cycles, unit) for row in rows], 0.19, color=COLOURS[unit], label=unit)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("cycles of one multiprocessor, counted")
    predicted = "" if target.capability == 90 else ": predictions; no kernel here has run on a Blackwell GPU"
    figure.suptitle(f"{target.name} (sm_{target.capability}){predicted}", fontsize=10)  # wider than the axes
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return path


def _of(cycles: Cycles, unit: str) -> float:
    return cycles._asdict()[unit]
