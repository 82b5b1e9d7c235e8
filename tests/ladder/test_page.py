"""The ladder's page in a real browser: it loads without errors, steps by keyboard and mouse, and its numbers are the
oracle's.

Chromium runs without a window; what it is to do, and what it then shows, is a script at the end of the page.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ladder.harness import RUNGS, page
from ladder.harness.command import main
from strobe import reference
from strobe.problem.call import Call

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TILES = page.SEQLEN // page.BLOCK
WATCH = """<script>
window.faults = [];
onerror = words => { faults.push(words); };
console.error = (...words) => { faults.push(words.join(" ")); };
</script>"""
TOOLS = """
const press = (key, times = 1) => {
  for (let i = 0; i < times; i++) dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
};
const number = id => Number(document.getElementById(id).dataset.v);
const text = id => document.getElementById(id).textContent;
const say = found => {
  const pre = document.createElement("pre");
  pre.id = "found";
  pre.textContent = JSON.stringify({found, faults});
  document.body.append(pre);
};
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "ladder.html"
    assert main(["page", "--out", str(path)]) == 0
    return path


@pytest.fixture
def browse(written, tmp_path):
    """browse(script, place) opens the page at #place, runs the script, and gives back what it said; no fault may have
    happened.
    """
    if CHROMIUM is None:
        pytest.skip("no Chromium here: make browser, or apt install chromium")

    def run(script: str, place: str = "", width: int = 1160, html: str | None = None) -> object:
        text = written.read_text() if html is None else html
        before, _, after = text.replace("<head>", f"<head>{WATCH}", 1).rpartition("</body>")
        text = f"{before}<script>{TOOLS}{script}</script></body>{after}"
        path = tmp_path / "driven.html"
        path.write_text(text)
        command = [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},900",
            "--virtual-time-budget=3000",
            "--dump-dom",
            f"file://{path}{place}",
        ]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        said = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
        assert said, dom[-2000:]
        told = json.loads(said[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
        assert told["faults"] == []
        return told["found"]

    return run


def test_it_is_one_file_that_asks_for_nothing_else(written):
    text = written.read_text()
    assert set(re.findall(r"https?://[^\s\"'<>)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe|script src)|@import|url\(|fetch\(|XMLHttpRequest", text)
    assert len(text) < 400_000 and "/*DATA*/" not in text


def test_results_after_all_tiles_are_the_oracles(browse):
    """Every mask and every tile of queries, reached by keys alone; the page's own arithmetic against attention in
    float64.
    """
    found = browse(f"""
    const all = {{}};
    for (let mask = 0; mask < {len(page.masks())}; mask++) {{
      press("ArrowUp", {TILES});
      for (let tile = 0; tile < {TILES}; tile++) {{
        press("End");
        const rows = [];
        for (let i = 0; i < {page.BLOCK}; i++) {{
          const out = [];
          for (let d = 0; d < {page.HEAD_DIM}; d++) out.push(number(`out-${{i}}-${{d}}`));
          rows.push({{out, lse: number(`lse-${{i}}`)}});
        }}
        all[location.hash] = rows;
        if (tile + 1 < {TILES}) press("ArrowDown");
      }}
      press("m");
    }}
    say(all);
    """)
    q, k, v = page.drawn()
    assert len(found) == len(page.masks()) * TILES
    for name, (_, mask) in page.masks().items():
        part = reference.forward(Call(q, k, v).with_mask(mask))
        for tile in range(TILES):
            rows = found[f"#sweep/{name}/{tile}/{TILES + 1}"]
            own = slice(tile * page.BLOCK, (tile + 1) * page.BLOCK)
            assert torch.allclose(
                torch.tensor([row["out"] for row in rows], dtype=torch.float64), part.out[0, own, 0], rtol=0, atol=1e-12
            )
            assert torch.allclose(
                torch.tensor([row["lse"] for row in rows], dtype=torch.float64), part.lse[0, 0, own], rtol=0, atol=1e-12
            )


def test_what_is_carried_between_tiles_is_what_the_keys_so_far_give(browse):
    """After each tile: largest + ln(sum) is the log-sum-exp over the keys that were visited, and a rescale is
    exp(before - after).
    """
    found = browse(
        f"""
    const steps = [];
    for (let n = 0; n <= {TILES}; n++) {{
      const rows = [];
      for (let i = 0; i < {page.BLOCK}; i++) {{
        rows.push([number(`max-${{i}}`), number(`sum-${{i}}`), number(`rescale-${{i}}`)]);
      }}
      steps.push({{rows, told: text("told")}});
      press("ArrowRight");
    }}
    say(steps);
    """,
        "#sweep/documents/2/0",
    )
    q, k, _ = page.drawn()
    seen = page.masks()["documents"][1].dense(page.SEQLEN, page.SEQLEN, torch.device("cpu"))[0]
    scores = torch.where(seen, page.HEAD_DIM**-0.5 * q[0, :, 0] @ k[0, :, 0].T, -torch.inf)[
        2 * page.BLOCK : 3 * page.BLOCK
    ]
    skipped = 0
    for step, shown in enumerate(found):
        for i, (largest, total, rescale) in enumerate(shown["rows"]):
            visited = scores[i, : step * page.BLOCK]
            if not (visited > -torch.inf).any():
                assert (largest, total) == (None, 0)  # JSON has no infinity
                continue
            assert largest == pytest.approx(float(visited.max()), abs=1e-12)
            assert largest + math.log(total) == pytest.approx(float(visited.logsumexp(0)), abs=1e-12)
            before = scores[i, : (step - 1) * page.BLOCK]
            if len(before) and (before > -torch.inf).any():
                assert rescale == pytest.approx(float((before.max() - visited.max()).exp()), abs=1e-12)
        skipped += "skipped" in shown["told"]
        empty = step > 0 and not (scores[:, (step - 1) * page.BLOCK : step * page.BLOCK] > -torch.inf).any()
        assert ("skipped" in shown["told"]) == bool(empty)
    assert skipped >= 1


def test_the_map_marks_the_tiles_that_are_skipped(browse):
    found = browse(
        """say([...document.querySelectorAll(".skipped")].map(line => line.dataset.tile));""", "#sweep/causal/3/0"
    )
    assert sorted(found) == [f"{m}-{n}" for m in range(TILES) for n in range(TILES) if n > m]


def test_mouse(browse):
    found = browse("""
    const places = [location.hash];
    const click = what => {
      document.querySelector(what).dispatchEvent(new MouseEvent("click", {bubbles: true}));
      places.push(location.hash);
    };
    const step = (view, n) => click(`#${view} .steps button:nth-of-type(${n})`);
    click('[data-mask="window"]'); step("sweep", 3); step("sweep", 4); step("sweep", 2);
    const queries = document.getElementById("queries");
    queries.value = "1";
    queries.dispatchEvent(new Event("change"));
    places.push(location.hash);
    click('#tab-timeline'); click('[data-rung="k6"]'); click('[data-event="7"]'); step("timeline", 3);
    say(places);
    """)
    last = TILES + 1
    expected = [
        "#sweep/causal/3/0",
        "#sweep/window/3/0",
        "#sweep/window/3/1",
        f"#sweep/window/3/{last}",
        f"#sweep/window/3/{last - 1}",
        "#sweep/window/1/0",
    ]
    assert found == [*expected, "#timeline/a/0", "#timeline/k6/0", "#timeline/k6/7", "#timeline/k6/8"]


def test_timelines_of_every_rung_and_a_step_for_every_event(browse, written):
    data = json.loads(re.search(r"const DATA = (.*);\n", written.read_text())[1])
    assert [one["name"] for one in data["timelines"]] == [name for name in RUNGS if name not in ("k1", "k2", "t")]
    roles = {one["name"]: set(one["rows"]) for one in data["timelines"]}
    assert {"load_partition", "mma_partition", "mma_partition#2", "TMA", "tensor core"} <= roles["k5"] & roles["k6"]
    found = browse("""
    const told = [];
    press("t");
    for (const timeline of DATA.timelines) {
      for (const event of timeline.events.slice(0, timeline.name === "k6" ? undefined : 3)) {
        told.push(text("event").includes(event[2]) && document.querySelectorAll(".event.now").length === 1);
        press("ArrowRight");
      }
      press("ArrowDown");
    }
    say(told);
    """)
    assert len(found) == sum(len(one["events"]) if one["name"] == "k6" else 3 for one in data["timelines"]) and all(
        found
    )


def test_play_and_pause(browse):
    found = browse("""
    press(" ");
    setTimeout(() => {
      press(" ");
      const there = location.hash;
      setTimeout(() => say([there, location.hash]), 500);
    }, 2500);
    """)
    assert found[0] == found[1] == "#sweep/causal/3/2"


@pytest.mark.parametrize("place", ["#sweep/causal/3/4", "#timeline/k6/30"])
def test_a_phone_scrolls_only_what_is_wide(browse, place, written):
    """360 pixels: the page itself is not wider; tables and bars scroll inside their frames."""
    inner = written.read_text().replace("<head>", f"<head>{WATCH}", 1).replace("&", "&amp;").replace('"', "&quot;")
    html = (
        '<!doctype html><head></head><body><iframe style="width:360px;height:800px;border:0" '
        f'srcdoc="{inner}"></iframe></body>'
    )
    found = browse(
        f"""
    const frame = document.querySelector("iframe");
    setTimeout(() => {{
      const inside = frame.contentWindow;
      inside.location.hash = "{place}";
      setTimeout(() => {{
        const root = inside.document.documentElement;
        say([inside.innerWidth, root.scrollWidth, inside.faults, inside.location.hash]);
      }}, 300);
    }}, 800);
    """,
        html=html,
    )
    inner_width, scroll_width, faults, there = found
    assert inner_width == 360 and scroll_width <= 360 and faults == [] and there == place


def test_a_page_that_cannot_be_written_says_so(capsys):
    assert main(["page", "--out", "/no/such/place/ladder.html"]) == 2
    assert "--out: got /no/such/place/ladder.html" in capsys.readouterr().err
