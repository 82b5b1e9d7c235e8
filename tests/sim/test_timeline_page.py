"""The page of a timeline in a browser: it fits the window, scrolls at full size, and hands its trace to Perfetto."""

import json
import re
import shutil
import subprocess

import pytest

from strobe.sim.timeline import Event, chrome_trace, save

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVENTS = [Event(0, "load_partition", "load", f"</script><b>{n}", 10.0 * n, 10.0 * n + 9, "x.py:1") for n in range(400)]

# stands in for Perfetto's page: it answers PING with PONG, and notes what it gets
PERFETTO = """<script>
window.open = site => { window.asked = site; return window; };
window.postMessage = (message, site) => {
  if (message === "PING") dispatchEvent(new MessageEvent("message", {data: "PONG", source: window}));
  else window.got = new TextDecoder().decode(message.perfetto.buffer);
};
addEventListener("load", () => {
  const width = id => Math.round(document.querySelector(id + " svg").getBoundingClientRect().width);
  const before = [width("#whole"), width("main"), document.documentElement.scrollWidth];
  document.getElementById("size").click();
  const after = [width("#whole"), width("main"), document.documentElement.scrollWidth];
  document.getElementById("perfetto").click();
  setTimeout(() => {
    const output = document.createElement("output");
    output.textContent = JSON.stringify({before, after, inner: innerWidth, asked, got});
    document.body.append(output);
  }, 300);
});
</script>"""


def opened(folder, width: int) -> dict:
    """What the page says in a window of this width after its buttons were pressed."""
    if BROWSER is None:
        pytest.skip("no Chromium here")
    path = folder / "run.html"
    save(EVENTS, path, "run", "bytes: none")
    path.write_text(path.read_text().replace("<body>", "<body>" + PERFETTO))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},700",
         "--virtual-time-budget=3000", f"--user-data-dir={path.parent / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    found = re.search(r"<output>(.*)</output>", done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> dict:
    return opened(tmp_path_factory.mktemp("page"), 900)


def test_all_of_the_run_fits_the_window_at_first(state):
    assert state["before"] == [state["inner"], 0, state["inner"]]


def test_the_full_size_scrolls_within_its_pane(state):
    whole, main, page = state["after"]
    assert whole == 0 and main > 4 * state["inner"] and page == state["inner"]


def test_perfetto_gets_the_trace(state):
    assert state["asked"] == "https://ui.perfetto.dev"
    assert json.loads(state["got"]) == json.loads(chrome_trace(EVENTS, "run", "bytes: none"))


def test_no_text_ends_the_script_that_holds_the_trace(tmp_path):
    save(EVENTS, tmp_path / "run.html", "</script>")
    page = (tmp_path / "run.html").read_text()
    held = re.search(r'<script type="application/json" id="trace">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(held) == json.loads(chrome_trace(EVENTS, "</script>"))
    assert page.count("</script>") == 2


@pytest.mark.nightly
def test_a_narrow_window_begins_at_full_size(tmp_path):
    """On a phone the fitted picture would be too small to read."""
    state = opened(tmp_path, 500)
    whole, main, page = state["before"]
    assert whole == 0 and main > 2 * state["inner"] and page == state["inner"] < 720
    assert state["after"] == [state["inner"], 0, state["inner"]]
