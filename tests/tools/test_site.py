"""tools/site: what the documentation site makes of pages, docstrings and figures; `make docs` builds it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tools.site import figures
from tools.site.markdown import BrokenLink, rewrite

ROOT = Path(__file__).parents[2]
HOST = "https://host/repo"


def test_the_committed_figures_are_those_that_the_tool_draws(tmp_path):
    figures.main([str(tmp_path)])
    drawn = sorted(path.name for path in tmp_path.iterdir())
    images = ROOT / "docs" / "images"
    assert drawn == sorted(path.name for pattern in ("how_*.svg", "plans_*.svg") for path in images.glob(pattern))
    for name in drawn:
        assert (tmp_path / name).read_text() == (ROOT / "docs" / "images" / name).read_text(), name


@pytest.mark.parametrize(
    ("page", "link", "made"),
    [
        ("index.md", "masks.md#joined", "masks.md#joined"),
        ("index.md", "../CONTRIBUTING.md", "contributing.md"),
        ("guides/training.md", "../masks.md", "../masks.md"),
        ("guides/training.md", "../../examples/train_gpt.py", f"{HOST}/blob/main/examples/train_gpt.py"),
        ("guides/training.md", "../../examples", f"{HOST}/tree/main/examples"),
        ("contributing.md", "docs/house.md#rules", "house.md#rules"),
        ("contributing.md", "src/strobe/env.py", f"{HOST}/blob/main/src/strobe/env.py"),
        ("index.md", "https://elsewhere/x.md", "https://elsewhere/x.md"),
    ],
)
def test_links_lead_to_pages_or_to_the_repository(page, link, made):
    assert rewrite(f"[a]({link})", page, HOST) == f"[a]({made})"


def test_a_link_to_nothing_is_an_error():
    with pytest.raises(BrokenLink, match=r"docs/index\.md: there is no \.\./none\.py"):
        rewrite("[a](../none.py)", "index.md", HOST)


def test_code_keeps_its_brackets_and_sessions_lose_their_directives():
    code = "```python\n>>> f[1](2)  # doctest: +SKIP\n3\n\n```"
    assert rewrite(code, "index.md", HOST) == "```pycon\n>>> f[1](2)\n3\n```"
    launch = "```python\nkernel[grid](x)\n```"
    assert rewrite(launch, "index.md", HOST) == launch
    words = "it runs as `kernel[grid](...)`, as\n`a wrapped\nf[1](2)` and "
    linked = f"{words}[`env`]({HOST}/blob/main/pyproject.toml)"
    assert rewrite(f"{words}[`env`](pyproject.toml)", "changelog.md", HOST) == linked


def test_patterns_of_the_nav_stand_for_pages_in_their_order(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    hooks = importlib.import_module("tools.site.hooks")
    monkeypatch.setattr(hooks, "DOCS", tmp_path)
    for name, text in {
        "index.md": "[b](b.md), [a](a.md)",
        "a.md": "# a\n\n**Waiting: for bytes.**",
        "b.md": "# Title",
        "2026-01-02-x.md": "# Note",
    }.items():
        (tmp_path / name).write_text(text)
    assert hooks.expanded(["index.md", "2*.md"]) == ["index.md", {"2026-01-02 Note": "2026-01-02-x.md"}]
    assert hooks.expanded([{"All": "index.md"}, "[ab]*.md"]) == [
        {"All": "index.md"},
        {"Title": "b.md"},
        {"a: Waiting": "a.md"},
    ]


def test_a_doctest_in_a_docstring_is_a_block_and_a_path_a_link():
    pytest.importorskip("griffe", reason="the extra docs is not installed")
    docstrings = importlib.import_module("tools.site.docstrings")
    text = "Add.\n\n>>> f()  # doctest: +SKIP\n2\n\nSee docs/masks.md."
    assert docstrings.fenced(text) == "Add.\n\n```pycon\n>>> f()\n2\n```\n\nSee [docs/masks.md](../masks.md)."
