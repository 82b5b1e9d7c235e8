"""Draws a simulated run as a Chrome trace for Perfetto, an SVG image or a page. Times are modelled.

events of a run -> rows (CTA, partition or engine) -> lanes (overlapping events of a row are in separate lanes) -> bars

This module computes where each bar and text goes; the Jinja templates in `templates/` write them as SVG and HTML.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2

# palette of Okabe and Ito, for colour-blind readers (jfly.uni-koeln.de/color): fill, text colour
COLOURS = {
    "load": ("#0072b2", "#ffffff"), "store": ("#d55e00", "#000000"), "mma": ("#009e73", "#000000"),
    "math": ("#e69f00", "#000000"),
    "sync": ("#cc79a7", "#000000"), "memory": ("#56b4e9", "#000000"), "wait": ("#dde1e6", "#3d444d"),
}  # fmt: skip
DARK = {"wait": ("#343b45", "#c6ced8")}  # kinds with other colours on a dark page
MODELLED = "modelled time, not measured"
MOST_BARS = 20_000

_MARGIN, _LINE, _GAP = 16, 18, 4
_NARROW, _WIDE, _WIDEST = 960, 1280, 16_000  # least width of a picture, most of an image, most that scrolls smoothly
_EVENT = 90  # pixels for an event of the fullest lane
_LABEL_CHAR, _BAR_CHAR = 6.6, 6.0  # widths of one character; textLength holds every font to them


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of the timeline.

    >>> Event(0, "TMA", "load", "k", 2.0, 1.0, "forward.py:123")
    Traceback (most recent call last):
    ...
    ValueError: end_ns: got 1.0 for 'k', expected a finite time at or after start_ns 2.0; an event ends after it starts
    """

    cta: int  # linear index of the CTA (program)
    row: str  # its partition or engine: "load_partition", "TMA"
    kind: str  # a key of COLOURS
    name: str  # "wgmma 64x128x64", "wait k_ready[1]"
    start_ns: float  # modelled time
    end_ns: float
    where: str  # "forward.py:123 < forward.py:301"

    def __post_init__(self) -> None:
        if self.kind not in COLOURS:
            raise ValueError(
                f"kind: got {self.kind!r} for {self.name!r}, expected one of {', '.join(COLOURS)}; choose the nearest"
            )
        if not -math.inf < self.start_ns <= self.end_ns < math.inf:
            expected = f"a finite time at or after start_ns {self.start_ns}"
            raise ValueError(
                f"end_ns: got {self.end_ns} for {self.name!r}, expected {expected}; an event ends after it starts"
            )


Row = tuple[int, str]
Lanes = list[list[Event]]


# ---------------------------------------------------------------- public functions


def chrome_trace(events: Iterable[Event], title: str, costs: str = "") -> str:
    """JSON for ui.perfetto.dev or chrome://tracing: one process per CTA and one thread per row, in order of appearance.

    Perfetto drops overlapping slices of a thread that do not nest (github.com/google/perfetto/issues/4280), so each
    lane is a thread. Its unit is whole nanoseconds: starts and ends are rounded, not lengths, so that adjacent slices
    do not overlap. Perfetto assigns process 0 to the idle task (issues/394) and treats a thread with its process's
    number as the main one, so no number is used twice.
    """
    rows = _rows(events)
    ctas = dict.fromkeys(cta for cta, _ in rows)
    records = []
    for cta in ctas:
        records += _named("process", {"pid": cta + 1}, f"CTA {cta}", cta)
    thread = max(ctas, default=0) + 1
    for (cta, row), lanes in rows.items():
        for depth, lane in enumerate(lanes, 1):
            thread += 1
            records += _named(
                "thread", {"pid": cta + 1, "tid": thread}, row if depth == 1 else f"{row} ({depth})", thread
            )
            records += [_complete(event, thread) for event in lane]
    about = {"title": title, "time": MODELLED} | ({"costs": costs} if costs else {})
    return json.dumps({"displayTimeUnit": "ns", "otherData": about, "traceEvents": records}, separators=(",", ":"))


def svg(
    events: Iterable[Event], title: str, ctas: Collection[int] | None = None, span_ns: tuple[float, float] | None = None
) -> str:
    """A self-contained image of the run, optionally only of `ctas` and of the times `span_ns` = (from, to).

    It is 960 to 1280 pixels wide, as its events need, and shrinks to the width of its page. The percentage beside a
    row is the busy (not waiting) fraction of the times shown. Above MOST_BARS bars, neighbours are merged and the
    image says so.
    """
    return _render("timeline.svg.jinja", _draw(list(events), title, ctas, span_ns, _WIDE), title)


def save(events: Iterable[Event], path: str | Path, title: str, costs: str = "") -> None:
    """Write `path` in the format of its suffix: .json a trace, .svg an image, .html a page.

    The page shows all of the run in the window, or scrolls through it, has `costs` below, and opens its trace in
    Perfetto.
    """
    events, path = list(events), Path(path)
    if path.suffix == ".json":
        text = chrome_trace(events, title, costs)
    elif path.suffix == ".svg":
        text = svg(events, title)
    elif path.suffix == ".html":
        trace = chrome_trace(events, title, costs).replace("</", "<\\/")  # no tag may end the script that holds it
        long, whole = (_draw(events, title, None, None, width) for width in (_WIDEST, _WIDE))
        text = _render("timeline.html.jinja", long, title, whole=whole, costs=costs, trace=trace)
    else:
        remedy = ".json opens in Perfetto, the others in a browser"
        raise ValueError(f"path: got {path.name}, expected a name that ends in .json, .svg or .html; {remedy}")
    path.write_text(text, encoding="utf-8")


def utilisation(events: Iterable[Event]) -> dict[Row, float]:
    """The busy (not waiting) fraction of the whole run, for each row.

    >>> work = Event(0, "TMA", "load", "load", 0.0, 30.0, "")
    >>> wait = Event(0, "softmax", "wait", "wait", 0.0, 30.0, "")
    >>> utilisation([work, wait, Event(0, "softmax", "math", "exp2", 30.0, 40.0, "")])
    {(0, 'TMA'): 0.75, (0, 'softmax'): 0.25}
    """
    rows = _rows(events)
    start, end = _span(rows)
    return {row: _busy_ns(lanes, start, end) / (end - start) for row, lanes in rows.items()}


# ---------------------------------------------------------------- rows, lanes, bars


def _rows(events: Iterable[Event]) -> dict[Row, Lanes]:
    """The lanes of every row. CTAs are ordered by number, rows by the first appearance of their name in the run."""
    found: dict[Row, list[Event]] = {}
    order: dict[str, int] = {}
    for event in events:
        order.setdefault(event.row, len(order))
        found.setdefault((event.cta, event.row), []).append(event)
    return {row: _lanes(found[row]) for row in sorted(found, key=lambda row: (row[0], order[row[1]]))}


def _lanes(events: list[Event]) -> Lanes:
    """Distribute overlapping events to lanes, each to the first free one. A lane is ordered by time."""
    lanes: Lanes = []
    taken: list[tuple[float, int]] = []
    free: list[int] = []
    for event in sorted(events, key=lambda event: (event.start_ns, event.end_ns)):
        while taken and taken[0][0] <= event.start_ns:
            heappush(free, heappop(taken)[1])
        if not free:
            free.append(len(lanes))
            lanes.append([])
        lane = heappop(free)
        lanes[lane].append(event)
        heappush(taken, (event.end_ns, lane))
    return lanes


def _span(rows: dict[Row, Lanes]) -> tuple[float, float]:
    """(first start, last end), never equal."""
    lanes = [lane for lanes in rows.values() for lane in lanes]
    start = min((lane[0].start_ns for lane in lanes), default=0.0)
    end = max((lane[-1].end_ns for lane in lanes), default=0.0)
    return start, end if end > start else start + 1.0


def _busy_ns(lanes: Lanes, start_ns: float, end_ns: float) -> float:
    """Time in [start_ns, end_ns] during which at least one lane is not waiting."""
    busy, reached = 0.0, start_ns
    for event in sorted(
        (event for lane in lanes for event in lane if event.kind != "wait"), key=lambda event: event.start_ns
    ):
        end = min(event.end_ns, end_ns)
        busy += max(0.0, end - max(event.start_ns, reached))
        reached = max(reached, end)
    return busy


def _merge(rows: dict[Row, Lanes], span_ns: tuple[float, float], most: int) -> tuple[dict[Row, Lanes], float]:
    """The same time of each kind in at most `most` bars (but at least one per lane and kind), and the column width, 0
    if nothing was merged.
    """
    start, end = span_ns
    merged, column = rows, 0.0
    while _count(merged) > most and column < end - start:
        column = 2 * column or (end - start) / most
        merged = {row: [_in_columns(lane, start, column) for lane in lanes] for row, lanes in rows.items()}
    return merged, column


def _in_columns(lane: list[Event], origin_ns: float, column_ns: float) -> list[Event]:
    """Merge the events of one kind that start in one column into a bar of their total length, side by side."""
    bars: list[Event] = []
    for _, column in groupby(lane, key=lambda event: (event.start_ns - origin_ns) // column_ns):
        kinds: dict[str, list[Event]] = {}
        events = list(column)
        for event in events:
            kinds.setdefault(event.kind, []).append(event)
        if len(kinds) == len(events):
            bars += events
            continue
        at = events[0].start_ns
        for same in kinds.values():
            end = at + sum(event.end_ns - event.start_ns for event in same)
            name = same[0].name if len(same) == 1 else f"{len(same)} merged: {same[0].name}, ..."
            bars.append(replace(same[0], name=name, start_ns=at, end_ns=end))
            at = end
    return bars


def _count(rows: dict[Row, Lanes]) -> int:
    return sum(len(lane) for lanes in rows.values() for lane in lanes)


# ---------------------------------------------------------------- the trace


def _named(what: str, who: dict[str, int], name: str, place: int) -> list[dict]:
    """The two records that name a process or thread and set its position."""
    about = {"name": name, "sort_index": place}
    return [{"ph": "M", **who, "name": f"{what}_{key}", "args": {key: value}} for key, value in about.items()]


def _complete(event: Event, thread: int) -> dict:
    start, end = round(event.start_ns), round(event.end_ns)
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.kind,
        "pid": event.cta + 1,
        "tid": thread,
        **times,
        "args": {"where": event.where},
    }


# ---------------------------------------------------------------- the image


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps modelled time to horizontal position."""

    start_ns: float
    end_ns: float
    left: float
    right: float

    def x(self, time_ns: float) -> float:
        inside = min(max(time_ns, self.start_ns), self.end_ns)
        return self.left + (inside - self.start_ns) / (self.end_ns - self.start_ns) * (self.right - self.left)


@dataclass(frozen=True, slots=True)
class _Text:
    """A text of this width in every font: browsers substitute fonts, some of them wider, so the template fixes it."""

    text: str
    width: float
    y: float = 0.0


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the head, or an entry of the legend."""

    text: str
    x: float
    y: float
    style: str = "key"


@dataclass(frozen=True, slots=True)
class _Bar:
    kind: str
    x: float
    y: float
    width: float
    height: float
    tooltip: str
    text: _Text | None  # the part of the event's name that fits into the bar


@dataclass(frozen=True, slots=True)
class _DrawnRow:
    name: str
    label: _Text  # the name, shortened
    busy: str
    y: float  # of the label
    bars: list[_Bar]


@dataclass(frozen=True, slots=True)
class _Tick:
    x: float
    label: str  # empty where it would pass the right edge


@dataclass(frozen=True, slots=True)
class _DrawnCTA:
    number: int
    top: float
    bottom: float
    ticks: list[_Tick]
    rows: list[_DrawnRow]


@dataclass(frozen=True, slots=True)
class _Drawing:
    """All that the templates write. Positions are in pixels from the top left corner."""

    name: str  # for screen readers
    width: int
    height: str
    left: float  # where the bars begin
    right: float
    margin: float
    labels_end: str
    head: list[_Line]
    legend: list[_Line]
    ctas: list[_DrawnCTA]


def _draw(
    events: list[Event], title: str, ctas: Collection[int] | None, span_ns: tuple[float, float] | None, widest: int
) -> _Drawing:
    rows = _rows(_of(events, ctas))
    start, end = _window(rows, span_ns)
    shown = {
        row: [[event for event in lane if event.end_ns >= start and event.start_ns <= end] for lane in lanes]
        for row, lanes in rows.items()
    }
    bars, column = _merge(shown, (start, end), MOST_BARS)
    width = _width(shown, widest)
    left = _MARGIN + _LABEL_CHAR * max((len(text) for cta, row in rows for text in _left_of(cta, row)), default=0) + 8
    scale = _Scale(start, end, left, width - _MARGIN)
    head = _head(title, _facts(shown, bars, column, scale))
    legend = _legend(head[-1].y)
    y = legend[-1].y + _LINE
    drawn: list[_DrawnCTA] = []
    for cta, group in groupby(bars.items(), key=lambda item: item[0][0]):
        top, y = y, y + _LINE + _GAP
        drawn_rows: list[_DrawnRow] = []
        for row, lanes in group:
            height = max(4.0, min(16.0, 72.0 / len(lanes)))
            busy = f"{100 * _busy_ns(shown[row], start, end) / (end - start):.0f}%"
            label = _Text(_short(row[1]), len(_short(row[1])) * _LABEL_CHAR)
            lane_bars = [bar for n, lane in enumerate(lanes) for bar in _bars(lane, scale, y + n * height, height)]
            drawn_rows.append(_DrawnRow(row[1], label, busy, y + height * len(lanes) / 2 + 4, lane_bars))
            y += height * len(lanes) + _GAP
        drawn.append(_DrawnCTA(cta, top, y, _ticks(scale), drawn_rows))
        y += _LINE / 2
    name, height = f"{title} ({MODELLED})", f"{y + _MARGIN / 2:.0f}"
    return _Drawing(name, width, height, left, scale.right, _MARGIN, f"{y:.0f}", head, legend, drawn)


def _left_of(cta: int, row: str) -> tuple[str, str]:
    """The widest texts beside a row's bars and above them."""
    return f"{_short(row)}  100%", f"CTA {cta}  busy"


def _width(rows: dict[Row, Lanes], widest: int) -> int:
    """_EVENT pixels for each event of the fullest lane, within limits."""
    fullest = max((len(lane) for lanes in rows.values() for lane in lanes), default=0)
    return min(max(_NARROW, _EVENT * fullest), widest)


def _of(events: list[Event], ctas: Collection[int] | None) -> list[Event]:
    if ctas is None:
        return events
    there = {event.cta for event in events}
    missing = sorted(set(ctas) - there)
    if missing:
        among = ", ".join(map(str, sorted(there))) or "none, for there are no events"
        raise ValueError(f"ctas: got {missing[0]}, expected CTAs of the run ({among}); leave it out for all")
    return [event for event in events if event.cta in ctas]


def _window(rows: dict[Row, Lanes], span_ns: tuple[float, float] | None) -> tuple[float, float]:
    start, end = _span(rows) if span_ns is None else span_ns
    if not -math.inf < start < end < math.inf:
        raise ValueError(
            f"span_ns: got {span_ns}, expected (from, to) in nanoseconds with from before to; leave it out for the "
            "whole run"
        )
    return start, end


def _facts(shown: dict[Row, Lanes], bars: dict[Row, Lanes], column_ns: float, scale: _Scale) -> list[str]:
    """The facts that a reader needs to interpret the image."""
    ctas, count = len({cta for cta, _ in shown}), _count(shown)
    unit, per = _unit(scale)
    span = f"{scale.start_ns / per:,.1f} to {scale.end_ns / per:,.1f} {unit}"
    facts = [MODELLED, f"{count:,} events in {ctas} {'CTA' if ctas == 1 else 'CTAs'}, {span}" if count else "no events"]
    if column_ns:
        facts.append(
            f"drawn as {_count(bars):,} bars: within {column_ns:,.1f} ns, those of one kind are merged, their "
            "order is lost"
        )
    return facts


def _head(title: str, facts: Sequence[str]) -> list[_Line]:
    """Title and facts, in a column narrow enough for a phone."""
    titles = textwrap.wrap(title, 40) or [""]
    first = 10 + 20 * len(titles)  # the last line of the title
    return [
        *(_Line(line, _MARGIN, 10 + 20 * n, "title") for n, line in enumerate(titles, 1)),
        *(_Line(fact, _MARGIN, first + _LINE * n, "fact quiet") for n, fact in enumerate(facts, 1)),
    ]


def _legend(above: float) -> list[_Line]:
    """A sample of each kind's colour, four to a line."""
    return [_Line(kind, _MARGIN + 90 * (n % 4), above + 20 * (1 + n // 4)) for n, kind in enumerate(COLOURS)]


def _ticks(scale: _Scale) -> list[_Tick]:
    unit, per = _unit(scale)
    rough = 96 * (scale.end_ns - scale.start_ns) / (scale.right - scale.left)  # a tick every 96 to 240 pixels
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
    digits = max(0, -math.floor(math.log10(step / per)))
    ticks: list[_Tick] = []
    for number in range(math.ceil(scale.start_ns / step), math.floor(scale.end_ns / step) + 1):
        x, label = scale.x(number * step), f"{number * step / per:,.{digits}f} {unit}"
        ticks.append(_Tick(x, label if x + _LABEL_CHAR * len(label) + 4 <= scale.right else ""))
    return ticks


def _unit(scale: _Scale) -> tuple[str, float]:
    return ("ns", 1.0) if scale.end_ns - scale.start_ns < 5000 else ("us", 1000.0)


def _short(row: str) -> str:
    return row if len(row) <= 24 else row[:23] + "…"


def _bars(lane: list[Event], scale: _Scale, y: float, height: float) -> list[_Bar]:
    bars: list[_Bar] = []
    for event in lane:
        x, length = scale.x(event.start_ns), scale.x(event.end_ns) - scale.x(event.start_ns)
        drawn = length - 0.8 if length > 3 else max(length, 0.5)  # a gap to the next bar; short bars stay visible
        name = _fitting(event.name, (drawn - 6) / _BAR_CHAR) if height >= 12 else ""
        text = _Text(name, len(name) * _BAR_CHAR, y + height / 2 + 3) if name else None
        bars.append(_Bar(event.kind, x, y, drawn, height - 1 if height > 6 else height, _tooltip(event), text))
    return bars


def _fitting(name: str, room: float) -> str:
    """The longest prefix of whole words of the name that fits into `room`."""
    while len(name) > room:
        name = name.rpartition(" ")[0].rstrip(":,")
        if not name:
            break
    return name


def _tooltip(event: Event) -> str:
    times = f"{event.start_ns:,.1f} to {event.end_ns:,.1f} ns, {event.end_ns - event.start_ns:,.1f} ns long"
    return "\n".join(filter(None, (event.name, f"{event.kind}, {times}", event.where)))


# ---------------------------------------------------------------- the templates


def _render(template: str, drawing: _Drawing, title: str, **more: str | _Drawing) -> str:
    made = _templates().get_template(template)
    return made.render(drawing=drawing, title=title, colours=COLOURS, dark=DARK, **more)


@cache
def _templates() -> jinja2.Environment:
    """Every text is escaped, and an unknown name is an error. Jinja is imported here: only a picture needs it."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=_representable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["px"] = lambda pixels, digits=1: f"{pixels:.{digits}f}"
    return environment


def _representable(value: object) -> object:
    """Characters that XML cannot represent are replaced; the template escapes markup."""
    if type(value) is str:
        return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", value)
    return value
