"""Generates a page for each rung, and the measured tables in the rungs' docstrings, from results/ladder.jsonl.

A page has the rung's figures and its difference from the rung below.

    python -m ladder.harness.pages docs/generated/ladder       write the pages and their pictures (`make pages`)
    python -m ladder.harness.pages                             write the tables into the rungs' docstrings
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import FILES, RUNGS, Row, harness
from .harness import Rung, Size
from .plot import days, save

if TYPE_CHECKING:
    from strobe.sim.timeline import Event

RESULTS = Path("results/ladder.jsonl")
NOTHING = "nothing measured yet"
SHOWN = (1024, 8192, 16384)  # lengths in a docstring's table; the page has all
OVERVIEW, SHORTER = 8192, 4096
RIVALS = {"strobe": "strobe's forward", "flash": "FlashAttention-2, as PyTorch ships it", "flex": "FlexAttention"}
_MEASURED = re.compile(r"(?<=\nMeasured:\n\n).*?(?=\n\"\"\"\n)", re.DOTALL)
_HEADING = """\
# The rungs of the ladder

This page and those of the rungs are made from `ladder/` and `results/ladder.jsonl` by `make pages`.

| rung | idea | needs |
| --- | --- | --- |
"""
_PICTURES = {
    "rates.png": "TFLOP/s of every rung, at its longest length",
    "rates_length.png": "memory and time of every rung by length",
}


def measured(rows: Iterable[Row], name: str) -> list[Row]:
    """The newest timed row for each problem of a rung with its default Form."""
    found: dict[tuple, Row] = {}
    for row in rows:
        if row.get("rung") == name and row.get("ms") and not row["options"]:
            found[row["head_dim"], row["causal"], row["seqlen_k"]] = row
    return [found[key] for key in sorted(found)]


def plain_table(rows: list[Row]) -> str:
    """The table of a docstring, as plain text."""
    if not rows:
        return NOTHING
    lines = ["      D  mask       S_k        ms   TFLOP/s  % of ceiling"]
    for row in [row for row in rows if row["seqlen_k"] in SHOWN] or rows:
        mask = "causal" if row["causal"] else "dense"
        lines.append(
            f"    {row['head_dim']:3}  {mask:6} {row['seqlen_k']:7} {row['ms']:9.4g} {row['tflops']:9.4g} "
            f"{row['percent_of_ceiling'] or 0:13.3g}"
        )
    return "\n".join([*lines, "", f"on {_where(rows)}"])


def _where(rows: list[Row]) -> str:
    newest = rows[-1]
    return f"{newest['device'].split(':')[0]}, torch {newest['torch']}, Triton {newest['triton']}, {days(rows)}"


def with_table(source: str, rows: list[Row]) -> str:
    """A rung's source with its measured table updated."""
    return _MEASURED.sub(lambda _: plain_table(rows), source, count=1)


# ---------------------------------------------------------------- the pages


def index(rows: list[Row]) -> str:
    """The first page: all rungs, and what was measured of them."""
    rungs = [harness.load(name) for name in RUNGS]
    lines = [
        f"| [{rung.name}]({rung.name}.md) | {rung.idea} | sm_{rung.capability}{' and up' if rung.capability < 90 else ''} |"
        for rung in rungs
    ]
    return _HEADING + "\n".join([*lines, ""]) + overview(rows)


def overview(rows: list[Row]) -> str:
    """All rungs and rivals at one length, one process per kind of problem, and the 8-bit errors. Empty without rows."""
    timed = [row for row in rows if row.get("rung") in (*RUNGS, *RIVALS) and row.get("ms") and not row["options"]]
    columns = [_Column(timed, width, causal) for width in (64, 128) for causal in (False, True)]
    shown = [row for column in columns for row in column.together]
    if not shown:
        return ""
    lines = [
        "\n## All rungs\n",
        (
            f"TFLOP/s at {OVERVIEW:,} queries and keys (decode: one query, GB/s by the model), with strobe's "
            "forward and PyTorch's kernels for comparison."
        ),
        (
            "The numbers of a column were timed alternately in one process, as CUDA graphs (k1 and decode: as launches). "
            "Numbers in italics come from another process, whose clocks may differ; numbers in brackets are at"
        ),
        f"{SHORTER:,}.\n",
        f"| | {' | '.join(column.head for column in columns)} |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, label in [*((name, f"[{name}]({name}.md)") for name in RUNGS), *RIVALS.items()]:
        if any(cells := [column.cell(name) for column in columns]):
            lines.append(f"| {label} | {' | '.join(cell or '-' for cell in cells)} |")
    lines += [f"\n{_where(sorted(shown, key=lambda row: row['date']))}.\n"]
    lines += [f"![{text}]({name})\n" for name, text in _PICTURES.items()]
    errors = {row["method"]: row["rmse"] for row in rows if row.get("rmse")}
    if errors:
        told = "; ".join(f"{method} {rmse:.3g}" for method, rmse in errors.items())
        lines += [
            (
                "Root mean square errors against float64 where 0.1 % of the entries are large (`python -m ladder "
                f"--outliers`): {told}.\n"
            )
        ]
    return "\n".join(lines)


class _Column:
    """One kind of problem: rows of the process that timed most of its rungs (the newest of several), and the newest
    rows of the others.
    """

    def __init__(self, timed: list[Row], width: int, causal: bool):
        self.head = f"D {width}, {'causal' if causal else 'dense'}"
        own = [row for row in timed if (row["head_dim"], row["causal"]) == (width, causal)]
        # rows of a process have the same date
        rungs = Counter(row["date"] for row in own if row["seqlen_k"] == OVERVIEW and row["rung"] in RUNGS)
        process = max(rungs, key=lambda date: (rungs[date], date), default=None)
        self.together = [row for row in own if row["date"] == process and row["seqlen_k"] == OVERVIEW]
        self.newest = {(row["rung"], row["seqlen_k"]): row for row in sorted(own, key=lambda row: row["date"])}

    def cell(self, name: str) -> str:
        """A row timed in the common process, else at another time, else with fewer keys; empty if there is none."""
        own = next((row for row in self.together if row["rung"] == name), None)
        if own:
            return f"{_rate(own):.4g}"
        if other := self.newest.get((name, OVERVIEW)):
            return f"*{_rate(other):.4g}*"
        shorter = self.newest.get((name, SHORTER))
        return f"({_rate(shorter):.4g})" if shorter else ""


def _rate(row: Row) -> float:
    return row["gbps" if row["rung"] in RUNGS and harness.load(row["rung"]).queries else "tflops"]


def section(rung: Rung, rows: list[Row], timeline: str = "") -> str:
    """A rung's page: idea, cost model, code difference, figures, `timeline` (name of the image), next bottleneck."""
    doc = inspect.cleandoc(importlib.import_module(f"ladder.{FILES[rung.name]}").__doc__ or "")
    told, _, limits = doc.partition("\nMeasured:\n")[0].partition("What limits it:")
    _, _, told = told.partition("\n\n")
    parts = [
        f"# {rung.name}\n",
        f"**{rung.idea[0].upper() + rung.idea[1:]}.** [The file](../../../ladder/{FILES[rung.name]}.py)\n",
        prose(told),
    ]
    parts += [
        f"## What changed from {rung.below}\n" if rung.below else "## The kernels\n",
        difference(rung),
    ]
    parts += ["## Figures\n", table(measured(rows, rung.name)), counted(rows, rung.name)]
    if timeline:
        parts += [
            f"Modelled time of one program, as the simulator draws it:\n\n![what the warps of {rung.name} "
            f"do]({timeline})\n"
        ]
    parts += ["## What limits it\n", prose(limits.strip())]
    above = [harness.load(name) for name in RUNGS if harness.load(name).below == rung.name]
    parts += (
        [f"Next: {'; '.join(f'[{next_.name}]({next_.name}.md), {next_.idea}' for next_ in above)}.\n"] if above else []
    )
    return "\n".join(parts)


def prose(text: str) -> str:
    """The text as Markdown: blocks laid out in columns become code blocks."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines, columns = block.split("\n"), False
        for line in lines:
            laid_out = line.startswith("  ") or bool(re.search(r"\S   +\S", line))
            if laid_out != columns or not found or (line is lines[0] and not laid_out):
                if columns and not laid_out:
                    found.append("```\n")
                if laid_out:
                    found.append(
                        ("\n" if found and found[-1].strip() and not found[-1].endswith("\n\n") else "") + "```text"
                    )
                columns = laid_out
            found.append(line)
        found.append("```\n" if columns else "")
    return "\n".join(found).replace("```\n\n\n", "```\n\n")


def difference(rung: Rung) -> str:
    """The functions that carry the idea, next to the same functions of the rung below."""
    mine = importlib.import_module(f"ladder.{FILES[rung.name]}")
    if not rung.below:
        return "```py\n" + "\n\n".join(_source(mine, name) for name in rung.shows) + "\n```\n"
    theirs = importlib.import_module(f"ladder.{FILES[rung.below]}")
    lines: list[str] = []
    for name in rung.shows:
        before = _source(theirs, name).split("\n") if hasattr(theirs, name) else []
        after = _source(mine, name).split("\n")
        for line in list(difflib.unified_diff(before, after, n=2, lineterm=""))[2:]:
            lines.append(f"@@ {name} @@" if line.startswith("@@") else line)
    return "```diff\n" + "\n".join(lines) + "\n```\n"


def _source(module: Any, name: str) -> str:
    shown = getattr(module, name)
    while not (inspect.isfunction(shown) or inspect.isclass(shown)):  # a jit function, or an autotuned one
        shown = shown.fn
    return inspect.getsource(shown).strip("\n")


def table(rows: list[Row]) -> str:
    if not rows:
        return f"{NOTHING.capitalize()}.\n"
    lines = [
        "| D | mask | S_k | ms | TFLOP/s | % of ceiling | GB by the model | MB allocated |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        sizes = f"{row['model_bytes'] / 1e9:.3g} | {row['peak_bytes'] / 1e6:.3g}"
        figures = f"{row['ms']:.4g} | {row['tflops']:.4g} | {row['percent_of_ceiling'] or 0:.3g} | {sizes}"
        lines.append(
            f"| {row['head_dim']} | {'causal' if row['causal'] else 'dense'} | {row['seqlen_k']} | {figures} |"
        )
    return "\n".join([*lines, "", f"{_where(rows)}.", ""])


def counted(rows: list[Row], name: str) -> str:
    """The hardware counters of the newest profiled run, as a sentence."""
    row = next((row for row in reversed(rows) if row.get("rung") == name and row.get("counters")), None)
    if row is None:
        return ""
    seen = row["counters"]
    waits = ", ".join(
        [
            f"{reason.replace('_', ' ')} {share:.0f} %"
            for reason, share in seen["warps"].items()
            if reason != "selected"
        ][:4]
    )
    return (
        f"Counted (D {row['head_dim']}, {'causal' if row['causal'] else 'dense'}, S_k {row['seqlen_k']}, ncu): "
        f"{seen['dram_bytes'] / 1e9:.3g} GB from and to DRAM, {seen['l2_bytes'] / 1e9:.3g} GB through L2 "
        f"({row.get('model_bytes', 0) / 1e9:.3g} by the model); tensor cores busy {seen['tensor_percent']:.0f} % of "
        f"the time, issue slots {seen['issue_percent']:.0f} %, shared memory {seen['shared_percent']:.0f} %; "
        f"{seen['bank_conflicts'] / 1e6:.3g} M bank conflicts; warps wait for: {waits}.\n"
    )


# ---------------------------------------------------------------- files


def timed_runs() -> Iterator[tuple[Rung, list[Event]]]:
    """Every Gluon rung with one program's modelled timeline, over five tiles of keys or enough to reuse its buffers."""
    for name in RUNGS:
        if name in ("k1", "k2", "t"):
            continue  # a single partition without overlap
        rung = harness.load(name)
        size = Size(1, 1 if rung.queries else 128, 256 if name[:2] in ("a", "k3") else 640, 1, 1, 128, causal=False)
        _, run = harness.simulated(rung, size, {}, "timed")
        yield rung, [event for event in run.events if event.cta == 0]


def timelines() -> Iterator[tuple[str, str]]:
    """(name, image) of each timeline."""
    from strobe.sim.timeline import svg

    for rung, events in timed_runs():
        yield rung.name, svg(events, f"{rung.name}: {rung.idea}")


def read(path: Path = RESULTS) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def write(folder: Path, rows: list[Row]) -> None:
    """Write the pages and their pictures into a folder. Simulates the rungs to draw their timelines: a minute."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {f"{name}.svg": picture for name, picture in timelines()}
    for name, picture in drawn.items():
        (folder / name).write_text(picture)
    for name in RUNGS:
        timeline = f"{name}.svg" if f"{name}.svg" in drawn else ""
        (folder / f"{name}.md").write_text(section(harness.load(name), rows, timeline))
    timed = [row for name in RUNGS for row in measured(rows, name)]
    save(timed, folder / "rates.png")
    (folder / "index.md").write_text(index(rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m ladder.harness.pages", description="Pages and tables of the ladder.")
    parser.add_argument(
        "folder", type=Path, nargs="?", help="folder of the pages; without it, the docstrings are updated"
    )
    folder, rows = parser.parse_args(argv).folder, read()
    if folder:
        write(folder, rows)
        return
    for name in RUNGS:
        path = Path(__file__).parents[1] / f"{FILES[name]}.py"
        path.write_text(with_table(path.read_text(), measured(rows, name)))


if __name__ == "__main__":
    main()
