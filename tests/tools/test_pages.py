"""`make pages`: pages made from recorded results, and the committed pages that lead to them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ladder.harness import FILES, RUNGS, harness, pages
from tools.proof import record

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def _written(folder: Path, monkeypatch) -> Path:
    monkeypatch.chdir(ROOT)
    record.main([str(folder / "compiled.md")])
    pages.main([str(folder / "ladder")])
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Timelines of one rung only, without the simulator."""
    monkeypatch.setattr(pages, "timelines", lambda: iter([("k5", "<svg/>")]))


def test_every_page_is_written_and_its_links_lead_somewhere(tmp_path, monkeypatch, undrawn):
    folder = _written(tmp_path / "docs" / "generated", monkeypatch)
    assert {page.name for page in (folder / "ladder").glob("*.md")} == {"index.md", *(f"{name}.md" for name in RUNGS)}
    for page in folder.rglob("*.md"):
        place = ROOT / "docs" / "generated" / page.relative_to(folder)  # links to committed files lead from there
        for target in LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)):
            assert (page.parent / target).exists() or (place.parent / target).resolve().exists(), f"{page}: {target}"


def test_the_page_of_compiled_kernels_has_every_recorded_row(tmp_path, monkeypatch, undrawn):
    text = (_written(tmp_path, monkeypatch) / "compiled.md").read_text()
    tables = {block.split(":")[0]: block for block in text.split("\n## ")}
    for row in record.read(ROOT / record.RESULTS):
        assert f"| {row['case']} | " in tables[f"{row['family']}.{row['kernel']}"] and record.in_short(row) in text


def test_a_rungs_page_has_its_figures_difference_and_timeline(tmp_path, monkeypatch, undrawn):
    folder = _written(tmp_path, monkeypatch) / "ladder"
    text = (folder / "k5.md").read_text()
    for part in ("](k5.svg)", "## The difference from k4_2", "```diff", "| 128 | causal |"):
        assert part in text
    assert (folder / "rates.png").exists() and (folder / "rates_length.png").exists()
    assert ".svg" not in (folder / "k6.md").read_text()


@pytest.mark.nightly
def test_timelines_are_drawn_for_every_rung_with_warps_of_its_own(tmp_path, monkeypatch):
    folder = _written(tmp_path, monkeypatch) / "ladder"
    assert {picture.stem for picture in folder.glob("*.svg")} == set(RUNGS) - {"k1", "k2", "t"}


def test_the_committed_page_of_the_ladder_lists_the_rungs():
    text = (ROOT / "docs" / "ladder.md").read_text()
    listed = re.findall(r"^\| \[(\w+)\]\(\.\./ladder/(\w+)\.py\) \| (.*) \| sm_(\d+)", text, re.MULTILINE)
    rungs = [harness.load(name) for name in RUNGS]
    assert listed == [(rung.name, FILES[rung.name], rung.idea, str(rung.capability)) for rung in rungs]
