"""The timeline's pictures: valid JSON and XML, nothing lost or invented, readable by everyone."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from strobe.sim import timeline
from strobe.sim.timeline import COLOURS, MODELLED, MOST_BARS, Event, chrome_trace, save, svg, utilisation

HOSTILE = "<b> & \"row\" ]]> 'k'\x00\ud800"
SVG = "{http://www.w3.org/2000/svg}"


def event(start_ns, end_ns, row="mma_partition", kind="math", cta=0, name="exp2"):
    return Event(cta, row, kind, name, start_ns, end_ns, "forward.py:123 < forward.py:301")


def busy_run(ctas=3, count=40, seed=0):
    """Two partitions that never overlap themselves, and an engine with loads in flight at once; times are no whole
    numbers.
    """
    rng = random.Random(seed)
    events = []
    for cta in reversed(range(ctas)):
        for row in ("load_partition", "mma_partition"):
            now = 10.0 * cta
            for kind in rng.choices(list(COLOURS), k=count):
                end = now + rng.choice((0.0, 0.3, 7.25, 40 * rng.random()))
                events.append(event(now, end, row, kind, cta, f"{kind} x[{cta}]"))
                now = end + rng.choice((0.0, 0.4, 12.5))
        events += [event(20.0 * n, 20.0 * n + 70 * rng.random(), "TMA", "load", cta, "TMA load") for n in range(count)]
    rng.shuffle(events)
    return events


def total_ns(lanes_of_rows):
    totals = {}
    for row, lanes in lanes_of_rows.items():
        for one in (one for lane in lanes for one in lane):
            totals[row, one.kind] = totals.get((row, one.kind), 0.0) + one.end_ns - one.start_ns
    return totals


def bars(picture):
    """Kind, x, y, width and tooltip of each bar."""
    found = []
    for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        tooltip = rect.find(f"{SVG}title")
        if tooltip is not None:
            found.append((rect.get("class"), *(float(rect.get(name)) for name in ("x", "y", "width")), tooltip.text))
    return found


def words(picture):
    return [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


# ---------------------------------------------------------------- events


@pytest.mark.parametrize(
    "start, end", [(2.0, 1.0), (math.nan, 1.0), (0.0, math.nan), (0.0, math.inf), (-math.inf, 0.0)]
)
def test_an_event_ends_after_it_starts(start, end):
    with pytest.raises(ValueError, match=r"end_ns: got .* for 'exp2', expected a finite time"):
        event(start, end)


def test_an_event_is_of_a_known_kind():
    with pytest.raises(ValueError, match="kind: got 'nap' for 'exp2', expected one of load, store, mma"):
        event(0, 1, kind="nap")


# ---------------------------------------------------------------- the trace


def test_the_trace_holds_every_event_once():
    events = busy_run()
    trace = json.loads(chrome_trace(events, HOSTILE))
    assert trace["otherData"] == {"title": HOSTILE, "time": MODELLED}
    drawn = [record for record in trace["traceEvents"] if record["ph"] == "X"]
    got = sorted(
        (
            r["pid"] - 1,
            r["cat"],
            r["name"],
            round(1000 * r["ts"]),
            round(1000 * (r["ts"] + r["dur"])),
            r["args"]["where"],
        )
        for r in drawn
    )
    assert got == sorted((e.cta, e.kind, e.name, round(e.start_ns), round(e.end_ns), e.where) for e in events)


def test_slices_of_a_thread_are_in_order_and_apart():
    threads = {}
    for record in json.loads(chrome_trace(busy_run(), "run"))["traceEvents"]:
        if record["ph"] == "X":
            start, length = round(1000 * record["ts"]), round(1000 * record["dur"])
            assert length >= 0
            threads.setdefault((record["pid"], record["tid"]), []).append((start, start + length))
    assert len(threads) > 9  # the engine's loads overlap: more threads than rows
    assert all(one[1] <= other[0] for slices in threads.values() for one, other in pairwise(slices))


def test_processes_and_threads_are_named_and_numbered():
    places = [("tensor core", 4), ("tensor core", 4), ("TMA", 4), ("TMA", 0), ("tensor core", 0)]
    events = [event(n, n + 2, row, cta=cta) for n, (row, cta) in enumerate(places)]
    records = [record for record in json.loads(chrome_trace(events, "run"))["traceEvents"] if record["ph"] == "M"]
    told = {
        name: [(r["pid"], r.get("tid"), *r["args"].values()) for r in records if r["name"] == name]
        for name in {r["name"] for r in records}
    }
    assert told["process_name"] == [(1, None, "CTA 0"), (5, None, "CTA 4")]
    assert [(pid, name) for pid, _, name in told["thread_name"]] == [
        (1, "tensor core"), (1, "TMA"), (5, "tensor core"), (5, "tensor core (2)"), (5, "TMA"),
    ]  # fmt: skip
    numbers = [pid for pid, _, _ in told["process_name"]] + [tid for _, tid, _ in told["thread_name"]]
    assert 0 not in numbers and len(set(numbers)) == len(numbers)
    assert [tid for _, tid, _ in told["thread_sort_index"]] == sorted(tid for _, tid, _ in told["thread_name"])


# ---------------------------------------------------------------- the picture


def test_the_picture_holds_every_event_and_says_what_its_times_are():
    events = busy_run()
    picture = svg(events, "run")
    drawn = bars(picture)
    assert sorted(tooltip.split("\n")[0] for *_, tooltip in drawn) == sorted(one.name for one in events)
    assert all("forward.py:123" in tooltip and " ns long" in tooltip for *_, tooltip in drawn)
    said = words(picture)
    assert {MODELLED, "CTA 0", "CTA 1", "CTA 2", "TMA", "load_partition", "mma_partition", *COLOURS} <= set(said)
    assert not [text for text in said if "merged" in text]


def test_bars_lie_where_their_times_say():
    events = [
        event(100, 200, kind="mma"),
        event(200, 250, kind="wait"),
        event(250, 300, kind="math"),
        event(275, 300, kind="load"),
    ]
    (_, x0, y0, _, _), (_, x1, y1, _, _), (_, x2, y2, _, _), (_, x3, y3, _, _) = bars(svg(events, "run"))
    assert y0 == y1 == y2 < y3  # the one that overlaps has a lane of its own
    assert (x2 - x1) / (x1 - x0) == pytest.approx(0.5, abs=1e-3) and (x3 - x2) / (x1 - x0) == pytest.approx(
        0.25, abs=1e-3
    )


def test_a_bar_stays_inside_the_picture_and_off_its_neighbour():
    picture = svg(busy_run(), "run")
    right = float(ElementTree.fromstring(picture).get("viewBox").split()[2])
    lanes = {}
    for _, x, y, width, _ in bars(picture):
        assert x > 0 and x + width <= right
        lanes.setdefault(y, []).append((x, width))
    for lane in lanes.values():
        assert all(one[0] <= other[0] for one, other in pairwise(lane))
        assert all(
            one[0] + one[1] <= other[0] + 0.51 for one, other in pairwise(lane)
        )  # half a pixel keeps a short one visible


def test_names_stand_only_in_bars_that_have_room():
    long, short = event(0, 900, name="wgmma 64x128x64"), event(900, 901, name="fence_async_shared")
    said = words(svg([long, short], "run"))
    assert "wgmma 64x128x64" in said and "fence_async_shared" not in said
    assert timeline._fitting("12 merged: wgmma 64x128x64, ...", 12) == "12 merged"
    assert timeline._fitting("wgmma 64x128x64", 4) == ""


def test_texts_have_a_width_of_their_own_in_every_font():
    """A name in a bar ends before the bar does, and a row's name before its percentage."""
    picture = svg([event(0, 900, name="wgmma 64x128x64"), event(900, 1000, row="TMA", name="load")], "run")
    texts = [text for text in ElementTree.fromstring(picture).iter(f"{SVG}text") if text.get("textLength")]
    ends = {text.text: float(text.get("x")) + float(text.get("textLength")) for text in texts}
    assert set(ends) >= {"wgmma 64x128x64", "mma_partition", "TMA"}
    assert all(text.get("lengthAdjust") == "spacingAndGlyphs" for text in texts)
    (_, x, _, width, _), *_ = bars(picture)
    assert x < ends["wgmma 64x128x64"] <= x + width
    shares = [float(text.get("x")) for text in ElementTree.fromstring(picture).iter(f"{SVG}text") if text.text == "90%"]
    assert shares and ends["mma_partition"] + 4 * 6.6 < shares[0]


@pytest.mark.parametrize("cta", [0, 12345])
def test_the_heads_of_the_label_column_stand_apart(cta):
    picture = svg([event(0, 9, row="TMA", cta=cta)], "run")
    at = {text.text: float(text.get("x")) for text in ElementTree.fromstring(picture).iter(f"{SVG}text")}
    wide = 6.62  # a character of DejaVu Sans Mono at 11 pixels, bold too
    assert at[f"CTA {cta}"] + wide * len(f"CTA {cta}") + wide < at["busy"] - wide * len("busy")


@pytest.mark.parametrize(("count", "image", "page"), [(1, 960, 960), (12, 1080, 1080), (100, 1280, 9000)])
def test_a_picture_is_as_wide_as_its_events_need(tmp_path, count, image, page):
    events = [event(10 * n, 10 * n + 9) for n in range(count)]
    save(events, tmp_path / "run.html", "run")
    for picture, width in ((svg(events, "run"), image), ((tmp_path / "run.html").read_text(), page)):
        assert f'viewBox="0 0 {width} ' in picture and "max-width:100%" in picture


def test_a_long_row_is_shortened_and_told_in_full():
    picture = svg([event(0, 9, row="a_partition_with_a_very_long_name")], "run")
    (label,) = [text for text in ElementTree.fromstring(picture).iter(f"{SVG}text") if text.text.endswith("…")]
    assert (
        label.text == "a_partition_with_a_very…"
        and label.find(f"{SVG}title").text == "a_partition_with_a_very_long_name"
    )


def test_hostile_text_leaves_the_picture_well_formed():
    safe = HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    events = [Event(0, HOSTILE, "load", HOSTILE, 0.0, 9.0, HOSTILE)]
    picture = svg(events, HOSTILE)
    assert safe in words(picture)
    ((*_, tooltip),) = bars(picture)
    assert tooltip.startswith(safe) and tooltip.endswith(safe)
    assert json.loads(chrome_trace(events, HOSTILE))["traceEvents"][-1]["name"] == HOSTILE


def test_ctas_and_span_choose_what_is_shown():
    events = [
        event(0, 1000, cta=0),
        event(0, 460, cta=1, name="early"),
        event(500, 600, cta=1, name="middle"),
        event(700, 1000, cta=1, name="late"),
    ]
    picture = svg(events, "run", ctas=[1], span_ns=(450.0, 550.0))
    early, middle = bars(picture)
    assert (
        early[-1].startswith("early")
        and "0.0 to 460.0 ns, 460.0 ns long" in early[-1]
        and middle[-1].startswith("middle")
    )
    assert middle[3] / early[3] == pytest.approx(5, rel=0.05)  # 10 and 50 ns of them are inside
    said = words(picture)
    assert "CTA 1" in said and "CTA 0" not in said and "60%" in said and "500 ns" in said
    with pytest.raises(ValueError, match=r"ctas: got 7, expected CTAs of the run \(0, 1\)"):
        svg(events, "run", ctas=[1, 7])
    with pytest.raises(ValueError, match=r"span_ns: got \(5, 5\), expected \(from, to\)"):
        svg(events, "run", span_ns=(5, 5))


@pytest.mark.parametrize("length, unit", [(3e-3, "ns"), (7, "ns"), (1234.5, "ns"), (50_000, "us"), (3e9, "us")])
def test_ticks_are_round_and_few(length, unit):
    picture = svg([event(0.0, length)], "run")
    ticks = [text for text in words(picture) if re.fullmatch(rf"[\d,.]+ {unit}", text)]
    values = [float(text.split()[0].replace(",", "")) for text in ticks]
    step = values[1] - values[0]
    assert 4 <= len(ticks) <= 13 and values[0] == 0
    assert all(other - one == pytest.approx(step) for one, other in pairwise(values))
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5)


# ---------------------------------------------------------------- merging


@pytest.mark.parametrize("most", [1, 30, 200])
def test_merging_keeps_the_time_of_each_kind_in_each_row(most):
    rows = timeline._rows(busy_run(count=200))
    span = timeline._span(rows)
    merged, column = timeline._merge(rows, span, most)
    floor = sum(len({one.kind for one in lane}) for lanes in rows.values() for lane in lanes)
    assert (
        timeline._count(merged) <= max(most, 2 * floor) and column > 0
    )  # the last event may start at the very end: a column of its own
    before, after = total_ns(rows), total_ns(merged)
    assert before.keys() == after.keys()
    assert all(after[key] == pytest.approx(before[key], abs=1e-6) for key in before)
    for lane in (lane for lanes in merged.values() for lane in lanes):
        assert all(one.end_ns <= other.start_ns + 1e-6 for one, other in pairwise(lane))
        assert lane[-1].end_ns <= span[1] + 1e-6


def test_kinds_of_a_column_lie_side_by_side_from_its_first_start():
    lane = [
        event(1, 3, kind="mma", name="a"),
        event(3, 4, kind="wait"),
        event(6, 9, kind="mma"),
        event(11, 30, kind="mma", name="b"),
    ]
    merged = [(one.kind, one.name, one.start_ns, one.end_ns) for one in timeline._in_columns(lane, 0.0, 10.0)]
    assert merged == [("mma", "2 merged: a, ...", 1, 6), ("wait", "exp2", 6, 7), ("mma", "b", 11, 30)]


def test_few_events_are_left_as_they_are():
    rows = timeline._rows(busy_run())
    assert timeline._merge(rows, timeline._span(rows), MOST_BARS) == (rows, 0.0)


def test_a_crowded_picture_is_merged_and_says_so():
    events = [event(3.0 * n, 3.0 * n + 2, kind=("mma", "wait")[n % 2]) for n in range(MOST_BARS + 1000)]
    picture = svg(events, "run")
    drawn = bars(picture)
    assert 500 < len(drawn) <= MOST_BARS
    (told,) = [text for text in words(picture) if "are merged" in text]
    assert told.startswith(f"drawn as {len(drawn):,} bars: within ")
    lengths = [float(re.search(r"([\d,.]+) ns long", tooltip)[1].replace(",", "")) for *_, tooltip in drawn]
    assert sum(lengths) == pytest.approx(2.0 * len(events))


# ---------------------------------------------------------------- busy shares


def test_utilisation_counts_time_once_and_waits_not_at_all():
    events = [
        event(0, 40, "TMA", "load"), event(10, 50, "TMA", "load"), event(60, 70, "TMA", "store"),
        event(0, 90, "softmax", "wait"), event(90, 100, "softmax", "sync"), event(5, 9, "idle", "wait", cta=1),
    ]  # fmt: skip
    assert utilisation(events) == {(0, "TMA"): 0.6, (0, "softmax"): 0.1, (1, "idle"): 0.0}


def test_utilisation_of_no_time_is_nothing():
    assert utilisation([]) == {}
    assert utilisation([event(5, 5)]) == {(0, "mma_partition"): 0.0}


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("events", [[], [event(5, 5)], busy_run()], ids=["none", "no time", "some"])
def test_files_are_written_by_their_suffix(tmp_path, events):
    for suffix in ("json", "svg", "html"):
        save(iter(events), tmp_path / f"run.{suffix}", "a < b")
    assert len([r for r in json.loads((tmp_path / "run.json").read_text())["traceEvents"] if r["ph"] == "X"]) == len(
        events
    )
    assert len(bars((tmp_path / "run.svg").read_text())) == len(events)
    page = (tmp_path / "run.html").read_text()
    assert page.startswith("<!doctype html>") and "<title>a &lt; b</title>" in page and "overflow-x:auto" in page
    assert len(bars(page[page.index("<svg") : page.index("</svg>") + 6])) == len(events)
    assert not re.findall(r"(?:src|href)=|url\(|@import", page)  # nothing to fetch
    assert MODELLED in page


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"path: got run\.png, expected a name that ends in \.json, \.svg or \.html"):
        save([], tmp_path / "run.png", "run")
    assert list(tmp_path.iterdir()) == []


def test_jinja_is_imported_for_a_picture_alone(tmp_path):
    code = (
        "import sys; from strobe.sim.timeline import save\n"
        "for suffix in ('json', 'svg'): save([], f'run.{suffix}', 'run'); print('jinja2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


# ---------------------------------------------------------------- colours


def linear(colour):
    colour = "#" + "".join(2 * digit for digit in colour[1:]) if len(colour) == 4 else colour
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour):
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour)))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# What a reader without one kind of cone sees, on linear RGB: Machado, Oliveira and Fernandes (2009), severity 1
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}  # fmt: skip


def lab(colour, eye):
    seen = [min(max(sum(w * part for w, part in zip(row, linear(colour))), 0), 1) for row in eye]
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (sum(w * part for w, part in zip(row, seen)) / top for row, top in zip(matrix, white))
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_a_picture_has_the_colours_of_its_kinds_light_and_dark():
    style = next(ElementTree.fromstring(svg([event(0, 9)], "run")).iter(f"{SVG}style")).text
    light, _, dark = style.partition("@media (prefers-color-scheme:dark){")
    rules = lambda part: dict(re.findall(r"\.([\w-]+)\{fill:(#\w+)\}", part))
    expected = lambda kinds: {name: c for kind, pair in kinds.items() for name, c in zip((kind, f"on-{kind}"), pair)}
    assert expected(COLOURS).items() <= rules(light).items()
    assert expected(timeline.DARK).items() <= rules(dark).items()


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_kinds_are_told_apart_by_every_eye(eye, dark):
    fills = {kind: fill for kind, (fill, _) in COLOURS.items()}
    if dark:
        fills |= {kind: fill for kind, (fill, _) in timeline.DARK.items()}
    apart = {
        pair: math.dist(lab(fills[pair[0]], EYES[eye]), lab(fills[pair[1]], EYES[eye]))
        for pair in combinations(fills, 2)
    }
    nearest = min(apart, key=apart.get)
    assert apart[nearest] >= 12, f"{nearest}: {apart[nearest]:.1f}"  # CIE76; 2.3 is just noticeable side by side


def test_names_can_be_read_on_their_bars():
    for kind, (fill, ink) in (*COLOURS.items(), *timeline.DARK.items()):
        assert contrast(fill, ink) >= 4.5, kind
