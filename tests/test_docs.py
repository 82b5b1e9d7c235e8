"""The examples in README.md and docs/ run: blocks with prompts as doctests, the others as they stand; a page shares its names."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
WITH_EXAMPLES = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_examples_run(page: Path):
    names: dict = {}
    for block in BLOCK.finditer(page.read_text()):
        code, line = block[1], page.read_text()[: block.start()].count("\n") + 1
        if ">>>" not in code:
            exec(compile("\n" * line + code, str(page), "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
        told: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.append, clear_globs=False)
        assert not result.failed, "".join(told)
        names = test.globs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in LINK.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        assert not path.startswith("http"), target
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", place.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, target


def test_the_readme_has_examples():
    assert len(BLOCK.findall((ROOT / "README.md").read_text())) >= 3


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_published_figures_stand_in_the_results(page: str):
    """A table row "forward CASE | strobe | FA2 | cuDNN | FlexAttention" quotes one measured row, to the TFLOP/s."""
    measured = {}
    for direction in ("forward", "backward"):
        for line in (ROOT / "results" / f"{direction}.jsonl").read_text().splitlines():
            row = json.loads(line)
            rivals = [f"{row['flops'] / row['rivals'][name] / 1e9:.0f}" if name in row["rivals"] else "-" for name in ("flash", "cudnn", "flex")]
            measured.setdefault(f"{direction} {row['case']}", []).append([f"{row['tflops']:.0f}", *rivals])
    quoted = re.findall(r"^\| ((?:forward|backward) \S+) \| (.+) \|$", (ROOT / page).read_text(), re.MULTILINE)
    assert quoted
    for case, cells in quoted:
        figures = cells.split(" | ")
        assert any(figures == row[: len(figures)] for row in measured[case]), (case, figures)
