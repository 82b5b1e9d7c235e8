"""Two plots of the ladder: the rate of every rung, and time and memory by length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from . import RUNGS, Row

_DENSE, _CAUSAL = "#0072b2", "#e69f00"
_MARKS = "os^vD<>pPX*hd8H"


def save(rows: Sequence[Row], path: Path) -> list[Path]:
    """Write `path` (TFLOP/s by rung, at each one's largest length) and NAME_length beside it. Returns the paths."""
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    timed, written = [row for row in rows if row.get("ms")], []
    for name, draw in (("", _rates), ("_length", _lengths)):
        figure = Figure(layout="constrained", dpi=160)
        draw(figure, timed)
        figure.supxlabel(_where(timed), fontsize=7, color="#666666")
        target = path.with_stem(path.stem + name)
        figure.savefig(target)
        written.append(target)
    return written


def _rates(figure: Any, rows: Sequence[Row]) -> None:
    names = [name for name in RUNGS if any(row["rung"] == name for row in rows)]
    widths = sorted({row["head_dim"] for row in rows})
    figure.set_size_inches(5.5 * len(widths), 1.5 + 0.42 * len(names))
    panels = figure.subplots(1, len(widths), squeeze=False)[0]
    for axes, width in zip(panels, widths):
        for shift, causal, colour in ((-0.2, False, _DENSE), (0.2, True, _CAUSAL)):
            for place, name in enumerate(names):
                own = [row for row in rows if (row["rung"], row["head_dim"], row["causal"]) == (name, width, causal)]
                if own:
                    rate = max(own, key=lambda row: row["seqlen_k"])["tflops"]
                    axes.barh(place + shift, rate, height=0.38, color=colour, label="causal" if causal else "dense")
                    axes.text(
                        rate,
                        place + shift,
                        f" {rate:.3g}" if rate < 1000 else f" {rate:.0f}",
                        va="center",
                        fontsize=6.5,
                    )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_title(f"head dimension {width}", fontsize=9)
        axes.set_xlabel("TFLOP/s over visible pairs")
        axes.spines[["top", "right", "left"]].set_visible(False)
    labels = dict(zip(*reversed(panels[0].get_legend_handles_labels())))
    figure.legend(labels.values(), labels.keys(), loc="outside upper center", ncols=2, frameon=False)


def _lengths(figure: Any, rows: Sequence[Row]) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab20"](range(20))
    figure.set_size_inches(10, 4.5)
    panels = figure.subplots(1, 2)
    width, causal = max(row["head_dim"] for row in rows), min(row["causal"] for row in rows)
    for axes, field, scale, label in (
        (panels[0], "ms", 1, "ms"),
        (panels[1], "peak_bytes", 1e6, "MB that a run allocates"),
    ):
        for colour, mark, name in zip(colours, cycle(_MARKS), RUNGS):
            own = sorted(
                (row["seqlen_k"], row[field] / scale)
                for row in rows
                if (row["rung"], row["head_dim"], row["causal"]) == (name, width, causal)
            )
            if own:
                axes.plot(*zip(*own), color=colour, marker=mark, markersize=4, linewidth=1, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("keys of a sequence, the batch always as many tokens")
        axes.set_title(f"{label} (D={width}, {'causal' if causal else 'dense'})", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)


def _where(rows: Sequence[Row]) -> str:
    newest = rows[-1]
    return (
        f"{newest['device'].split(', ')[0]} · torch {newest['torch']} · {days(rows)} · commit "
        f"{newest['commit'] or 'unknown'}"
    )


def days(rows: Sequence[Row]) -> str:
    """The dates of the measurements."""
    dates = [row["date"][:10] for row in rows]
    first, last = min(dates), max(dates)
    return first if first == last else f"{first} to {last}"
