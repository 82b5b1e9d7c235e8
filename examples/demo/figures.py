"""The report's figures as SVG that takes the page's colours and font: plots by matplotlib, tile maps directly."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

# placeholder colours that matplotlib writes; the page's CSS variables replace them
INK, LINE = "#010101", "#020202"
SERIES = {"strobe": "#030303", "SDPA": "#040404", "formula": "#050505"}
VARIABLES = {
    INK: "var(--ink)",
    LINE: "var(--line)",
    **{colour: f"var(--{name.lower()})" for name, colour in SERIES.items()},
}
MARKERS = {"strobe": "o", "SDPA": "s", "formula": "^"}

UNITS = {"tensor": "#030303", "exp": "#040404", "shared": "#050505", "issue": "#b07cc6"}

CELLS = {"#": "whole", "+": "masked"}


def growth(rows: list[dict[str, Any]], quantity: str, title: str, unit: Callable[[float], str]) -> str:
    """Curves over sequence length, both axes logarithmic. `quantity` is "ms" or "peak_bytes"."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    figure = Figure(figsize=(5.0, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, colour in SERIES.items():
        points = [(row["length"], row[quantity][name]) for row in rows if name in row[quantity]]
        if points:
            axes.loglog(*zip(*points), color=colour, marker=MARKERS[name], markersize=5, linewidth=2, label=name)
    lengths = [row["length"] for row in rows]
    axes.set_title(title, color=INK, fontsize=12, loc="left", pad=12)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: length_text(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(base=16 if quantity == "peak_bytes" else 10, numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: unit(y)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("sequence length", color=INK, fontsize=11)
    axes.tick_params(colors=INK, labelsize=11, length=0, which="both")
    axes.grid(True, color=LINE, linewidth=0.8)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.legend(frameon=False, labelcolor=INK, fontsize=11)
    return _inline(figure, title)


def cycles_picture(rows: list[dict[str, Any]], title: str) -> str:
    """A bar of each unit's cycles, per pass."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 0.55 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, (unit, colour) in enumerate(UNITS.items()):
        axes.barh(
            [n + (place - 1.5) * 0.2 for n in range(len(rows))],
            [row[unit] for row in rows],
            0.19,
            color=colour,
            label=unit,
        )
    axes.set_yticks(range(len(rows)), [row["pass"] for row in rows])
    axes.invert_yaxis()
    axes.set_title(f"cycles of a step on {title}", color=INK, fontsize=12, loc="left", pad=12)
    axes.tick_params(colors=INK, labelsize=9, length=0, which="both")
    axes.xaxis.grid(True, color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    return _inline(figure, f"cycles of a step on {title}, by unit")


def tile_picture(rows: list[str], label: str) -> str:
    """A tile map with one unit square per tile; a run of equal tiles is one rectangle.

    >>> tile_picture(["+.", "#+"], "causal").count("<rect")
    4
    """
    size = len(rows)
    parts = [f'<rect class="skipped" width="{size}" height="{size}"/>']
    for y, row in enumerate(rows):
        x = 0
        for letter, run in groupby(row):
            width = len(list(run))
            if letter in CELLS:
                parts.append(f'<rect class="{CELLS[letter]}" x="{x}" y="{y}" width="{width}" height="1"/>')
            x += width
    return f'<svg class="tiles" viewBox="0 0 {size} {size}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def length_text(length: float) -> str:
    """
    >>> length_text(256), length_text(16384)
    ('256', '16k')
    """
    return f"{length / 1024:g}k" if length >= 1024 else f"{length:g}"


def _inline(figure: Any, label: str) -> str:
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "strobe"}):
        figure.savefig(
            written,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    svg = written.getvalue()
    # HTML knows both names, and nothing in the page may look like a link
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg") :])
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", svg)
    svg = re.sub(r'<svg width="[^"]*" height="[^"]*"|<svg height="[^"]*"', "<svg", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
