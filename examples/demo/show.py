"""Terminal output of the demo."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .pace import Advance, Step, minutes
from .report import bytes_text, time_text


@contextmanager
def narrate(quiet: bool) -> Iterator[Step]:
    """Progress on standard error, one line per step with count and remaining time. `step(words, pieces, seconds)` ends
    the previous step.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:

        def finish() -> None:
            for task in progress.tasks:
                progress.update(task.id, total=max(1, task.completed), completed=max(1, task.completed))

        def step(words: str, pieces: int, seconds: float) -> Advance:
            finish()
            if not quiet and not console.is_terminal:  # without a terminal, print one line per step
                at_most = f" (at most {minutes(seconds)})" if 0 < seconds < inf else ""
                print(f"{words}{at_most}", file=sys.stderr, flush=True)
            task = progress.add_task(words, total=pieces)
            return lambda: progress.advance(task)

        yield step
        finish()


def summary(results: dict[str, Any], report: Path) -> None:
    console = Console()
    console.print(_embedding(results["embedding"]))
    console.print(_equality(results["embedding"]))
    console.print(_growing(results["growing"]))
    console.print(_masked(results["masked"]))
    console.print(f"[bold]report[/] {report.resolve()}", soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left")
    return table


def _embedding(text: dict[str, Any]) -> Table:
    table = _table(
        f"{text['timed_sentences']} sentences of {text['title']}", "way", "time", "peak memory", "tokens computed"
    )
    for way in text["ways"]:
        table.add_row(way["way"], time_text(way["ms"]), bytes_text(way["peak_bytes"]), f"{way['tokens_computed']:,}")
    return table


def _equality(text: dict[str, Any]) -> str:
    same = text["equality"]
    verdict = "[green]equal[/]" if same["equal"] else "[red]not equal[/]"
    agree = sum(query["same_as_eager"] for query in text["queries"])
    return (
        f"embeddings {verdict}: error against float64 {same['error_strobe']:.1e}, bound {same['bound']:.1e} (twice "
        f"eager's and a rounding); least cosine {same['least_cosine']:.8f}; same neighbours for {agree} of "
        f"{len(text['queries'])} questions\n"
    )


def _growing(rows: list[dict[str, Any]]) -> Table:
    table = _table("causal attention: time and peak memory of a call", "length", "strobe", "SDPA", "formula")
    for row in rows:
        table.add_row(f"{row['length']:,}", *(_cell(row, name) for name in ("strobe", "SDPA", "formula")))
    return table


def _masked(rows: list[dict[str, Any]]) -> Table:
    table = _table(f"masks at {rows[0]['length']:,} tokens", "mask", "pairs visible", "strobe", "SDPA")
    for row in rows:
        table.add_row(row["mask"], f"{row['visible']:.0%}", _cell(row, "strobe"), _cell(row, "SDPA"))
    return table


def _cell(row: dict[str, Any], name: str) -> str:
    if name not in row["ms"]:
        return "too large"
    return f"{time_text(row['ms'][name]):>7} {bytes_text(row['peak_bytes'][name]):>8}"
