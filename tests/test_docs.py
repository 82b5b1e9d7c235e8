"""The examples in README.md and docs/ run: blocks with prompts as doctests, the others as they stand; a page shares its
names.
"""

from __future__ import annotations

import doctest
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = sorted([*TOP, *DOCS.glob("*.md"), *(DOCS / "lab").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)  # a launch there, kernel[grid](x), reads like a link
WITH_EXAMPLES = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_examples_run(page: Path):
    names: dict = {}
    torch.manual_seed(0)  # as good as any, and the same on each run
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
    for target in LINK.findall(CODE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        assert not path.startswith("http"), target
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", place.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, target


def test_the_readme_has_examples():
    assert len(BLOCK.findall((ROOT / "README.md").read_text())) >= 3


SIMULATOR = ROOT / "docs" / "simulator.md"


def test_the_simulators_page_names_every_kind_and_mode():
    from strobe.sim import KINDS
    from strobe.sim.machine import MODES

    assert re.findall(r"^\| `(\w+)` \|", SIMULATOR.read_text(), re.MULTILINE) == [*MODES, *KINDS]


def test_the_simulators_commands_print_what_its_page_shows(tmp_path, monkeypatch, capsys):
    from strobe.cli.main import main

    text = SIMULATOR.read_text()
    (tmp_path / "double.py").write_text(BLOCK.search(text)[1])
    monkeypatch.chdir(tmp_path)
    sessions = [
        one
        for block in re.findall(r"^```text\n(\$ .*?)^```", text, re.DOTALL | re.MULTILINE)
        for one in block.split("$ strobe ")[1:]
    ]
    for command, *shown in map(str.splitlines, sessions):
        main(shlex.split(command))
        told = [" ".join(re.sub("[│┃]", " ", line).split()) for line in capsys.readouterr().out.splitlines()]
        missing = [line for line in shown if not any(one.startswith(" ".join(line.split())) for one in told)]
        assert shown and not missing, f"{command}: {missing} is not in {told}"
    assert len(sessions) == 4


COLUMNS = {"FA2 (PyTorch)": "flash", "cuDNN": "cudnn", "FlexAttention": "flex", "FlashAttention-4": "fa4"}


@pytest.mark.parametrize("page", ["README.md", "docs/performance_portable.md", "docs/results_tables.md"])
def test_published_figures_stand_in_the_results(page: str):
    """A table "| case | strobe | rivals |" quotes one measured row a line, "forward CASE" or "forward CASE DATA", to
    the TFLOP/s.
    """
    lines = [f"results/{direction}.jsonl" for direction in ("forward", "backward")]
    measured = [json.loads(line) for name in lines for line in (ROOT / name).read_text().splitlines()]
    quoted, header = 0, []
    for line in (ROOT / page).read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        if cells[:2] == ["case", "strobe"]:
            header = [COLUMNS.get(cell, cell) for cell in cells[2:]]
        words = cells[0].split()
        direction, case, family = [*words, "normal"][:3] if len(words) in (2, 3) else ("", "", "")
        if direction not in ("forward", "backward") or len(cells) != 2 + len(header):
            continue
        rows = [
            row
            for row in measured
            if (row["direction"], row["case"], row.get("data", "normal")) == (direction, case, family)
        ]
        figures = [
            [row["tflops"], *(row["flops"] / row["rivals"].get(name, float("inf")) / 1e9 for name in header)]
            for row in rows
        ]
        assert cells[1:] in [[f"{figure:.0f}" if figure else "-" for figure in row] for row in figures], line
        quoted += 1
    assert quoted >= 4


def test_published_decode_figures_stand_in_the_results():
    """A line "decode CASE" of docs/performance.md: microseconds of the Hopper kernel over pages and rows, of the
    portable kernel, of rivals.
    """
    measured = [json.loads(line) for line in (ROOT / "results/decode.jsonl").read_text().splitlines()]
    lines = re.findall(r"^\| decode (\w+) \| (.*) \|$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE)
    assert len(lines) == 9
    for case, cells in lines:
        ours, portable = (
            [row for row in measured if row["case"] == case and row["kernel"] == kernel]
            for kernel in ("hopper.decode", "portable.decode")
        )
        over_rows = next(
            (row["dense_ms"] for row in reversed(ours) if row.get("dense_ms")), None
        )  # of a run of its own
        figures = (
            ours[-1]["ms"],
            over_rows,
            portable[-1]["ms"],
            *(ours[-1]["rivals"].get(name) for name in ("cudnn", "fa4")),
        )
        assert cells.split(" | ") == [f"{1000 * figure:.1f}" if figure else "-" for figure in figures], case
