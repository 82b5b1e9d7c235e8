"""Print rows: rich tables and progress bars on a terminal if rich is installed, else plain text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TypeVar

from .data import NORMAL

Item = TypeVar("Item")


def pretty() -> bool:
    """Whether standard output is a terminal and rich is installed."""
    return sys.stdout.isatty() and find_spec("rich") is not None


def show(headers: Sequence[str], lines: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a table with numbers aligned at the right.

    >>> show(["case", "ms"], [["dense", 1.5], ["causal", 12.25]])
    case      ms
    dense    1.5
    causal  12.2
    """
    cells = [[number(cell) for cell in line] for line in lines]
    right = [all(isinstance(line[i], (int, float, type(None))) for line in lines) for i in range(len(headers))]
    if pretty():
        _rich(headers, cells, right, title)
        return
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]
    for row in ([[title]] if title else []) + [list(headers), *cells]:
        print("  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right)).rstrip())


def number(cell: object) -> str:
    """A cell as text: floats with three significant digits below 1000, rounded to integers above; "-" for None.

    >>> number(0.01234), number(25212.3), number(None)
    ('0.0123', '25212', '-')
    """
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:.0f}"
    return "-" if cell is None else str(cell)


def _rich(headers: Sequence[str], cells: list[list[str]], right: list[bool], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, header_style="bold")
    for header, numeric in zip(headers, right):
        table.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))  # Text, so that rich does not read brackets in a config as markup
    Console().print(table)


def follow(items: Sequence[Item], words: str) -> Iterator[Item]:
    """Yield the items, with a progress bar on standard error if that is a terminal and rich is installed."""
    if not (sys.stderr.isatty() and find_spec("rich") is not None):
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, words, console=Console(stderr=True), transient=True)


def bench(rows: Iterable[dict]) -> None:
    """Print the table of a run: strobe's ms, TFLOP/s and percent of the ceiling, each rival's TFLOP/s, and the best
    rival's time over strobe's.

    With several families of inputs it shows the normal one and the worst. Lines below name the cases that a rival did
    not run, with reasons, and cases with a wide spread.
    """
    rows = list(rows)
    families = {row.get("data", NORMAL) for row in rows}
    shown = normal_and_worst(rows) if len(families) > 1 else rows
    names = list(dict.fromkeys(name for row in rows for name in row["rivals"]))
    headers = [
        "case",
        *(["data"] if families != {NORMAL} else []),
        "kernel",
        "ms",
        "TFLOP/s",
        "% ceiling",
        *names,
        "vs best",
    ]
    lines = [_line(row, names) for row in shown]
    if families == {NORMAL}:
        lines = [[case, *rest] for case, _, *rest in lines]
    show(headers, lines, f"{rows[0]['device']} (rivals in TFLOP/s)" if rows else "")
    refusals: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row["refused"].items():
            refusals.setdefault((name, reason), []).append(row["case"])
    for (name, reason), cases in refusals.items():
        print(f"{name} did not run {', '.join(cases)}: {reason}")
    for row in rows:
        low, high = row["spread"].get("strobe", (0.0, 0.0))
        if row["ms"] and (high - low) > 0.1 * row["ms"]:
            print(f"noisy: {row['case']}: half of strobe's rounds lie between {number(low)} and {number(high)} ms")


def _line(row: dict, names: list[str]) -> list[object]:
    theirs = [rival_tflops(row, name) for name in names]
    return [
        row["case"],
        row.get("data", NORMAL),
        row["kernel"],
        row["ms"],
        row["tflops"],
        row["percent_of_ceiling"],
        *theirs,
        row["ratio"],
    ]


def normal_and_worst(rows: Iterable[dict]) -> list[dict]:
    """For each case the row with normal inputs, then the other family's row with the smallest ratio to the best rival.

    >>> rows = [{"case": "a", "direction": "forward", "data": name, "ratio": ratio} for name, ratio in
    ...         (("normal", 1.1), ("sharp4", 1.0), ("sharp16", 0.9))]
    >>> [row["data"] for row in normal_and_worst(rows)]
    ['normal', 'sharp16']
    """
    cases: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        cases.setdefault((row["case"], row["direction"]), []).append(row)
    found = []
    for same in cases.values():
        normal = [row for row in same if row.get("data", NORMAL) == NORMAL]
        others = [row for row in same if row not in normal]
        found += normal + sorted(others, key=lambda row: row["ratio"] or 0.0)[:1]
    return found


def rival_tflops(row: dict, name: str) -> float | None:
    """A rival's TFLOP/s, with our FLOP count; None if it did not run."""
    return row["flops"] / row["rivals"][name] / 1e9 if name in row["rivals"] else None
