"""The demo's results as a self-contained HTML page: no script, and no external font or image."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import Any

import jinja2

from .figures import cycles_picture, growth, length_text, tile_picture

Results = dict[str, Any]


def page(results: Results) -> str:
    """The page for the results of `run.measure`: `report.html.jinja`, with the figures and the headline numbers."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("examples.demo", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        time=time_text,
        bytes=bytes_text,
        short=_short,
        length_text=length_text,
        thousands=lambda number: f"{number:,}",
        percent=lambda share: f"{share:.0%}",
    )
    css = (files("examples.demo") / "page.css").read_text(encoding="utf-8")
    return environment.get_template("report.html.jinja").render(
        results, css=css, headline=_headline(results), figures=_figures(results)
    )


def _headline(results: Results) -> Results:
    """The numbers of the cards at the top."""
    text = results["embedding"]
    ours, padded = _way(text, "strobe"), _way(text, "SDPA, padded")
    both = [row for row in results["growing"] if "formula" in row["peak_bytes"]][-1]
    causal = next(entry for entry in results["tiles"] if entry["mask"] == "6 documents, causal")
    return {
        "saved": 1 - ours["tokens_computed"] / padded["tokens_computed"],
        "less_memory": both["peak_bytes"]["formula"] / max(1, both["peak_bytes"]["strobe"]),
        "compared_length": both["length"],
        "skipped": causal["share"]["skipped"],
    }


def _way(text: Results, start: str) -> Results:
    return next(way for way in text["ways"] if way["way"].startswith(start))


def _figures(results: Results) -> Results:
    """The figures as SVG text."""
    rows = results["growing"]
    return {
        "time": growth(rows, "ms", "time of one call", time_text),
        "memory": growth(rows, "peak_bytes", "peak memory of one call", bytes_text),
        "tiles": [tile_picture(entry["rows"], escape(entry["mask"])) for entry in results["tiles"]],
        "cycles": [cycles_picture(rows, name) for name, rows in results["cycles"].items()],
    }


def _short(sentence: str, most: int = 170) -> str:
    """
    >>> _short("a few words too many", most=10)
    'a few …'
    """
    return sentence if len(sentence) <= most else sentence[:most].rsplit(" ", 1)[0] + " …"


def time_text(ms: float) -> str:
    """
    >>> time_text(0.0421), time_text(7.3), time_text(68.3), time_text(1234.5)
    ('42 us', '7.3 ms', '68 ms', '1.2 s')
    """
    if ms < 1:
        return f"{ms * 1e3:.0f} us"
    if ms >= 1000:
        return f"{ms / 1e3:.1f} s" if ms < 10_000 else f"{ms / 1e3:.0f} s"
    return f"{ms:.1f} ms" if ms < 10 and ms != round(ms) else f"{ms:.0f} ms"


def bytes_text(count: float) -> str:
    """
    >>> bytes_text(512), bytes_text(3 * 2**20), bytes_text(1.5 * 2**30)
    ('512 B', '3 MiB', '1.5 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.2g} {unit}" if count < 10 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
