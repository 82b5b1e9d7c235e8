"""The examples in README.md and docs/ run: blocks with prompts as doctests, the others as they stand; a page shares its
names.
"""

from __future__ import annotations

import doctest
import json
import pkgutil
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch

import strobe
from tools.site.markdown import rewrite

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = DOCS / "generated"  # git ignores it; tests/tools/test_pages.py looks at these pages
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
SITE = sorted(page for page in DOCS.rglob("*.md") if GENERATED not in page.parents)
PAGES = [*TOP, *SITE]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# a block may stand in a tab of the site, four columns to the right; a title says what it needs
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
RUNS, NEEDS_CUDA, COMPILES = "python", 'python title="needs CUDA"', 'python title="needs CUDA and torchrun"'
OWN = "https://github.com/strobe-attention"
# README's links are absolute, because a package index shows it too
HERE = re.compile(
    r"https://(?:github\.com/strobe-attention/strobe/(?:blob|tree)|raw\.githubusercontent\.com/strobe-attention/strobe)/main/(.+)"
)
NO_CODE = {"text", "bash", "diff"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)  # a launch there, kernel[grid](x), reads like a link
WITH_EXAMPLES = [page for page in PAGES if "```python" in page.read_text()]


def _name(page: Path) -> str:
    return page.relative_to(DOCS if DOCS in page.parents else ROOT).as_posix()


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=_name)
def test_examples_run(page: Path):
    names: dict = {"__name__": page.stem}
    torch.manual_seed(0)  # as good as any, and the same on each run
    text = page.read_text()
    for block in FENCE.finditer(text):
        runs = block["info"] == RUNS or (block["info"] == NEEDS_CUDA and torch.cuda.is_available())
        if not runs and block["info"] != COMPILES and block["info"] != NEEDS_CUDA:
            continue
        code, line = textwrap.dedent(block["code"]), text[: block.start()].count("\n") + 1
        if ">>>" not in code:
            compiled = compile("\n" * line + code, str(page), "exec")
            if runs:
                exec(compiled, names)
            continue
        test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
        told: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.append, clear_globs=False)
        assert not result.failed, "".join(told)
        names = test.globs


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_runs_or_says_what_it_is(page: Path):
    infos = {block["info"] for block in FENCE.finditer(page.read_text())}
    assert infos <= {RUNS, NEEDS_CUDA, COMPILES, *NO_CODE}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path):
    for target in LINK.findall(CODE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            own = page in SITE and target.startswith(OWN)
            assert not own, f"{target}: name the file, and tools/site makes the URL of it"
            inside = HERE.match(path)
            if not inside:
                continue
            place = ROOT / inside[1]
        else:
            place = (page.parent / path).resolve() if path else page
        made = GENERATED in place.parents  # by `make pages`
        assert made or place.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", place.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, target


# ---------------------------------------------------------------- the site


NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


def test_the_nav_names_every_page():
    named = re.findall(r"(\S+\.md)$", re.sub(" +#.*", "", NAV), re.MULTILINE)
    at_root = {"contributing.md", "changelog.md"}  # tools/site/markdown.py says where these come from
    assert len(named) == len(set(named))
    for pattern in (name for name in named if name not in at_root):
        assert "generated" in pattern or list(DOCS.glob(pattern)), pattern
    missing = [_name(page) for page in SITE if not any(page.relative_to(DOCS).match(name) for name in named)]
    assert missing == []


def test_the_site_finds_what_links_outside_the_documentation():
    for page in SITE:
        text = rewrite(page.read_text(), _name(page), "https://host/repo")
        outside = [target for target in LINK.findall(CODE.sub("", text)) if ":" not in target]
        for target in outside:
            path = target.partition("#")[0]
            place = (page.parent / path).resolve() if path else page
            assert place.is_relative_to(DOCS), f"{_name(page)}: {target}"


@pytest.mark.parametrize("page", SITE, ids=_name)
def test_a_page_has_at_most_two_thousand_words(page: Path):
    words = [word for word in page.read_text().split() if any(map(str.isalnum, word))]
    assert len(words) <= 2000
    if page.parent.name == "guides":
        assert len(words) <= 900


def test_the_guides_name_every_example():
    guides = "".join(page.read_text() for page in [*(DOCS / "guides").glob("*.md"), DOCS / "transformers.md"])
    shared = {"gpt.py"}  # the model of several examples
    for example in (ROOT / "examples").glob("*.py"):
        assert example.name in shared or f"examples/{example.name})" in guides, example.name


def test_the_reference_documents_every_public_name():
    documented = {
        name
        for page in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }
    modules = ("flash_attn", "flash_attn_interface", "cute", "integrations.sdpa", "integrations.transformers", "sim")
    assert {f"strobe.{name}" for name in strobe.__all__} <= documented
    assert {f"strobe.{module}" for module in (*modules, "integrations.flash_attn", "testing")} <= documented
    for name in documented:
        assert pkgutil.resolve_name(name) is not None


def test_the_readme_is_short_and_renders_on_a_package_index():
    text = (ROOT / "README.md").read_text()
    assert [target for target in LINK.findall(CODE.sub("", text)) if not HERE.match(target.partition("#")[0])] == []
    assert len(text.splitlines()) <= 150 and "make test" in text


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


def test_published_speeds_of_functions_stand_in_the_results():
    """A line "| CASE | ..." of the guide: forward and backward TFLOP/s of strobe, a built-in option, FlexAttention
    and its FLASH backend.
    """
    measured = {}
    for line in (ROOT / "results/mods.jsonl").read_text().splitlines():
        row = json.loads(line)
        measured[row["case"]] = row
    page = (DOCS / "guides/functions_to_copy.md").read_text().split("\n## Measured\n")[1]
    lines = re.findall(r"^\| (?!case)([a-z0-9_]+) \| (.*) \|$", page, re.MULTILINE)
    assert {name for name, _ in lines} == {case.rsplit("_", 1)[0] for case in measured}
    for name, cells in lines:
        expected = []
        for contender in ("strobe", "built_in", "flex", "flex_flash"):
            rates = []
            for direction in ("forward", "backward"):
                row = measured.get(f"{name}_{direction}", {"rivals": {}, "ms": None})
                ms = row["ms"] if contender == "strobe" else row["rivals"].get(contender)
                rates.append(f"{row['flops'] / ms / 1e9:.0f}" if ms else "-")
            expected.append(", ".join(rates))
        assert cells.split(" | ") == expected, name
