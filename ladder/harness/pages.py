"""Generates the pages of the course, one a rung, and the measured tables in the rungs' docstrings.

A page says what is new, shows the lines that matter, a timeline, the measured gain and an exercise (course.py), and
then the rung's cost model, its difference from the rung below and all figures from results/ladder.jsonl.

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
from typing import TYPE_CHECKING

from . import FILES, RUNGS, Row, course, harness
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
# The course

Fifteen kernels, from attention as the formula says it to 8-bit tensor cores. Each page has one new idea, the lines of
the kernel that carry it, a timeline, the measured gain over the rung below, and an exercise that needs no GPU unless
it says so. Run a rung with `python -m ladder NAME`. These pages are made from `ladder/` and `results/ladder.jsonl`.

| rung | idea | below | gain at D 128, dense | needs |
| --- | --- | --- | ---: | --- |
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
    lines: list[str] = []
    for rung in map(harness.load, RUNGS):
        found = [] if rung.queries else course.gains(rows, rung.name, rung.below)
        ratio = next((f"{one.ratio:.2f}" for one in found if (one.head_dim, one.causal) == (128, False)), "-")
        needs = f"sm_{rung.capability}{' and up' if rung.capability < 90 else ''}"
        lines.append(f"| [{rung.name}]({rung.name}.md) | {rung.idea} | {rung.below or '-'} | {ratio} | {needs} |")
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
    return "\n".join([*lines, errors(rows)])


def errors(rows: list[Row]) -> str:
    """The errors of 8-bit methods on inputs with outliers, as a sentence. Empty without rows."""
    newest = {row["method"]: row["rmse"] for row in rows if row.get("rmse")}
    if not newest:
        return ""
    told = "; ".join(f"{method} {rmse:.3g}" for method, rmse in newest.items())
    return (
        "\nRoot mean square errors against float64 where 0.1 % of the entries are large (`python -m ladder "
        f"--outliers`): {told}.\n"
    )


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
    """A rung's page: the lesson, then the details. `timeline` is the name of its image."""
    doc = inspect.cleandoc(importlib.import_module(f"ladder.{FILES[rung.name]}").__doc__ or "")
    idea, _, limits = doc.partition("\nMeasured:\n")[0].partition("What limits it:")
    _, _, idea = idea.partition("\n\n")
    limits = limits.strip()
    lesson, file = course.LESSONS[rung.name], f"ladder/{FILES[rung.name]}.py"
    place = RUNGS.index(rung.name)
    parts = [
        f"# {rung.name}\n\n**{rung.idea[0].upper() + rung.idea[1:]}.**\n",
        f"Rung {place + 1} of {len(RUNGS)} · [{file}](../../../{file}) · {_neighbours(place)}\n",
        f"## What is new\n\n{lesson.new}\n",
        f"## The lines that matter\n\n{course.lines_that_matter(rung.name)}",
    ]
    if timeline:
        parts += [
            "## Timeline\n\nModelled time of one program in the simulator: a line for each warp or group of warps, and "
            f"one for each unit it uses.\n\n[![what the warps of {rung.name} do]({timeline})]({timeline})\n"
        ]
    parts += ["## Measured gain\n", gain(rung, rows)]
    parts += [f"## What limits it\n\n{prose(limits[0].upper() + limits[1:])}", f"## Exercise\n\n{lesson.exercise}\n"]
    parts += [f"## The idea and its costs\n\n{prose(idea)}"]
    parts += [f"## The difference from {rung.below}\n" if rung.below else "## The kernels\n", difference(rung)]
    parts += ["## All figures\n", table(measured(rows, rung.name)), counted(rows, rung.name)]
    return "\n".join(parts)


def _neighbours(place: int) -> str:
    """Links to the rungs before and after one in the course."""
    before, after = RUNGS[max(0, place - 1) : place], RUNGS[place + 1 : place + 2]
    links = [f"before: [{name}]({name}.md)" for name in before] + [f"next: [{name}]({name}.md)" for name in after]
    return " · ".join(links)


def gain(rung: Rung, rows: list[Row]) -> str:
    """What the rung gains over the rung below, or its own rate where the two cannot be compared."""
    if rung.below and not rung.queries:
        compared = course.gain_table(course.gains(rows, rung.name, rung.below), rung.name, rung.below)
        return (compared or f"{NOTHING.capitalize()}.\n") + (errors(rows) if rung.weights.itemsize == 1 else "")
    own = [row for row in measured(rows, rung.name) if row["seqlen_k"] == OVERVIEW]
    if not own:
        return f"{NOTHING.capitalize()}.\n"
    best, unit = max(own, key=_rate), "GB/s by the model" if rung.queries else "TFLOP/s"
    why = f"one query per sequence does not compare with {rung.below}" if rung.below else "nothing is below it"
    return (
        f"{_rate(best):,.4g} {unit} at {OVERVIEW:,} keys, D {best['head_dim']}, "
        f"{'causal' if best['causal'] else 'dense'}: {best['percent_of_ceiling'] or 0:.3g} % of the ceiling "
        f"({_where(own)}). There is no gain to show: {why}.\n"
    )


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
        return "```py\n" + "\n\n".join(course.source(mine, name) for name in rung.shows) + "\n```\n"
    theirs = importlib.import_module(f"ladder.{FILES[rung.below]}")
    lines: list[str] = []
    for name in rung.shows:
        before = course.source(theirs, name).split("\n") if hasattr(theirs, name) else []
        after = course.source(mine, name).split("\n")
        for line in list(difflib.unified_diff(before, after, n=2, lineterm=""))[2:]:
            lines.append(f"@@ {name} @@" if line.startswith("@@") else line)
    return "```diff\n" + "\n".join(lines) + "\n```\n"


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
