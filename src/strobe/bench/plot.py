"""Two plots of a run: bars (strobe and rivals per case) and a roofline plot (rates against device limits)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UnsupportedProblem
from .data import NORMAL
from .table import normal_and_worst, rival_tflops

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "#d1495b"
# Okabe and Ito's palette without its reds: colour-blind readers can distinguish the colours, and none resembles OURS
COLOURS = {
    "flash": "#0072b2", "cudnn": "#009e73", "efficient": "#56b4e9", "fa4": "#e69f00", "flex": "#cc79a7",
    "math": "#8c8c8c",
    "sdpa": "#0072b2", "sdpa_mask": "#56b4e9", "naive": "#b0b0b0", "self": "#e8a0a9",
}  # fmt: skip
NAMES = {
    "flash": "FlashAttention-2 (PyTorch)", "cudnn": "cuDNN", "efficient": "memory-efficient (PyTorch)",
    "fa4": "FlashAttention-4", "flex": "FlexAttention", "math": "math (PyTorch)", "sdpa": "SDPA (PyTorch)",
    "sdpa_mask": "SDPA with a mask tensor", "naive": "naive", "self": "strobe again",
}  # fmt: skip
EARLIER = ("#e8a0a9", "#b9818a", "#f3cdd2")  # other versions of strobe
_BAR_INCHES = 0.13
_POINT = 3.2  # half of a point's width on the page, in points as all that follows
_REACH = range(4, 80, 4)
# (distance, side, height by distance) of the places for a number: right, left, above and below, nearest first
_AROUND = [
    (reach, turn, lift) for reach in _REACH for turn, lift in ((1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
]
_FORMATS = (".png", ".svg", ".pdf")


def save(rows: Sequence[dict], path: Path) -> list[Path]:
    """Write the bars to `path` and the roofline plot to `NAME_roofline.png` for `NAME.png`. Returns both paths."""
    from matplotlib.figure import Figure  # instead of pyplot, which needs a window system and has global state

    if len({row.get("data", NORMAL) for row in rows}) > 1:
        rows = normal_and_worst(rows)
    written = []
    for name, draw, shown in (
        ("", _bars, [row for row in rows if row["tflops"] or row["rivals"]]),
        ("_roofline", _roofline, [row for row in rows if row["tflops"]]),
    ):
        if not shown:
            continue
        figure = Figure(layout="constrained", dpi=160)
        draw(figure, shown)
        target = path.with_stem(path.stem + name)
        figure.savefig(target)
        written.append(target)
    return written


def label(row: dict) -> str:
    """
    >>> label({"case": "d64_causal_8k", "data": "sharp16"}), label({"case": "d64_causal_8k"})
    ('d64_causal_8k, sharp16', 'd64_causal_8k')
    """
    family = row.get("data", NORMAL)
    return row["case"] if family == NORMAL else f"{row['case']}, {family}"


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check(path: Path) -> None:
    """Raise UnsupportedProblem if `save` cannot write this kind of file. Call it before measuring."""
    if not available():
        raise UnsupportedProblem('--plot needs matplotlib: pip install "strobe-attention[bench]"')
    if path.suffix not in _FORMATS:
        raise UnsupportedProblem(f"--plot: got {path.name}, expected a name that ends in {', '.join(_FORMATS)}")


def _bars(figure: Figure, rows: Sequence[dict]) -> None:
    met = dict.fromkeys(name for row in rows for name in row["rivals"])
    colours = COLOURS | dict(zip([name for name in met if name not in COLOURS], cycle(EARLIER)))
    names = [name for name in colours if name in met]
    bars, ticks, slot = [], [], 0
    for row in rows:
        rates = [("strobe", row["tflops"])] * bool(row["tflops"]) + [
            (name, rival_tflops(row, name)) for name in names if name in row["rivals"]
        ]
        ticks.append((slot + (len(rates) - 1) / 2, label(row)))
        bars += [(slot + place, name, rate) for place, (name, rate) in enumerate(rates)]
        slot += len(rates) + 1
    figure.set_size_inches(8, 1.3 + slot * _BAR_INCHES)
    axes = figure.add_subplot()
    farthest = max(rate for _, _, rate in bars)
    for name, colour in [("strobe", OURS), *((name, colours[name]) for name in names)]:
        mine = [(place, rate) for place, who, rate in bars if who == name]
        places, rates = zip(*mine) if mine else ((), ())
        axes.barh(places, rates, height=0.86, color=colour, label=NAMES.get(name, name))
    for place, name, rate in bars:
        weight = "bold" if name == "strobe" else "normal"
        axes.text(
            rate + 0.008 * farthest, place, f"{rate:.3g}", va="center", fontsize=6.5, weight=weight, color="#333333"
        )
    axes.set_yticks(*zip(*ticks))
    axes.set_ylim(slot - 1, -1)
    axes.set_xlim(0, 1.07 * farthest)
    axes.set_xlabel("TFLOP/s over visible pairs (longer is faster)")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=min(len(names) + 1, 4), frameon=False)
    figure.supxlabel(_where(rows), fontsize=7, color="#666666")


def _roofline(figure: Figure, rows: Sequence[dict]) -> None:
    from matplotlib.ticker import LogLocator

    figure.set_size_inches(9, 4 + 0.06 * len(rows))
    axes = figure.add_subplot(xscale="log", yscale="log")
    _roofs(axes, rows)
    rivals: list[tuple[float, float]] = []
    for number, row in enumerate(rows, 1):
        x, y = row["intensity"], row["tflops"]
        best = max((rival_tflops(row, name) or 0.0 for name in row["rivals"] if name != "self"), default=0.0)
        if best:
            rivals.append((x, best))
            axes.plot([x, x], [y, best], color="#cccccc", linewidth=0.8, zorder=2)
            axes.plot(x, best, "o", markersize=5, markerfacecolor="white", markeredgecolor=COLOURS["sdpa"], zorder=3)
        legend = f"{number:2d}  {label(row)}  {row['percent_of_ceiling']:.3g} %"
        axes.plot(x, y, "o", markersize=5, color=OURS, label=legend, zorder=4)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("FLOP per byte of inputs and outputs")
    axes.set_ylabel("TFLOP/s")
    axes.set_title("filled: strobe, hollow: the best rival", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    legend = dict(
        frameon=False, handlelength=0, handletextpad=0, markerscale=0, prop={"family": "monospace", "size": 6.5}
    )
    figure.legend(loc="outside right upper", title="percent of the ceiling", title_fontsize=8, **legend)
    figure.supxlabel(_where(rows), fontsize=7, color="#666666")
    figure.draw_without_rendering()  # places the axes, so that points have positions on the page
    _number(axes, [(row["intensity"], row["tflops"]) for row in rows], rivals)


def _number(axes: Axes, points: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> None:
    """Write the number of each of `points` at the nearest place that no number and no point covers."""
    scale = 72 / axes.figure.dpi
    centres = [(x * scale, y * scale) for x, y in axes.transData.transform(points)]
    hollow = [(x * scale, y * scale) for x, y in axes.transData.transform(others)] if others else []
    taken = [(x, y, _POINT, _POINT) for x, y in (*centres, *hollow)]
    for number, (point, (x, y)) in enumerate(zip(points, centres), 1):
        wide, tall = 2.2 * len(str(number)), 3.2  # half of the size of the text at 6.5 points
        places = [(x + turn * (reach + wide), y + reach * lift, wide, tall) for reach, turn, lift in _AROUND]
        free = next((place for place in places if not any(_touch(place, other) for other in taken)), places[0])
        taken.append(free)
        at = (free[0] - x, free[1] - y)
        leader = {"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            str(number), point, at, textcoords="offset points", ha="center", va="center", fontsize=6.5, color=OURS,
            zorder=5, arrowprops=leader if math.hypot(*at) > 14 else None,
        )  # fmt: skip


def _touch(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Whether two rectangles (centre x, y, half width, half height) overlap."""
    return abs(a[0] - b[0]) < a[2] + b[2] and abs(a[1] - b[1]) < a[3] + b[3]


def _roofs(axes: Axes, rows: Sequence[dict]) -> None:
    """Draw the roof of each dtype: memory bandwidth up to the knee, peak FLOP/s beyond it."""
    roofs = list(dict.fromkeys((row["peak_tflops"], row["peak_gbps"], row["dtype"]) for row in rows))
    knees = [1e3 * tflops / gbps for tflops, gbps, _ in roofs]
    low = min([row["intensity"] for row in rows] + knees) / 4
    high = max([row["intensity"] for row in rows] + knees) * 4
    for (tflops, gbps, dtype), knee in zip(roofs, knees):
        axes.plot([low, knee, high], [low * gbps / 1e3, tflops, tflops], color="#444444", linewidth=1.2, zorder=1)
        axes.annotate(
            f"{dtype} {tflops:.3g} TFLOP/s", (knee, tflops), (8, -4), textcoords="offset points", va="top", fontsize=7.5
        )
    gbps = max(gbps for _, gbps, _ in roofs)
    axes.annotate(
        f"{gbps:.0f} GB/s",
        (low * 1.3, low * 1.3 * gbps / 1e3),
        (6, -8),
        textcoords="offset points",
        va="top",
        fontsize=7.5,
    )
    axes.set_xlim(low, high)
    highest = max(tflops for tflops, _, _ in roofs)
    axes.set_ylim(min([row["tflops"] / 2 for row in rows] + [highest / 5]), 1.4 * highest)


def _where(rows: Sequence[dict]) -> str:
    """Devices, versions, dates and commits of all rows; they may come from several runs."""
    all_of = lambda values: ", ".join(sorted(set(values)))
    torches, commits = all_of(row["torch"] for row in rows), all_of(row["commit"] or "unknown" for row in rows)
    return (
        f"{all_of(row['device'].split(', ')[0] for row in rows)} · torch {torches} · "
        f"{all_of(row['date'][:10] for row in rows)} · commit {commits}"
    )
