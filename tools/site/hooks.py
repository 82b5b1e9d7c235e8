"""Hooks of MkDocs: pages that stand at the root of the repository, links to its files, anchors as GitHub makes them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # MkDocs loads this file by its path

from mkdocs.exceptions import PluginError  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]
from pymdownx.slugs import slugify  # pyright: ignore[reportMissingImports]

from tools.site.markdown import AT_ROOT, DOCS, ROOT, BrokenLink, rewrite

_CELL_CODE = re.compile(r"(?<=<code>)[^<]{24,}(?=</code>[^\n]*</td>)")


def project_url(name: str) -> str:
    """A URL of [project.urls] in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'^{name} *= *"([^"]+)"', text.partition("[project.urls]")[2], re.MULTILINE)
    if found is None:
        raise PluginError(f"pyproject.toml: [project.urls] has no {name}")
    return found[1].rstrip("/")


def on_config(config: Any) -> Any:
    config.repo_url = project_url("Repository")
    config.site_url = project_url("Documentation") + "/"
    config.repo_name = config.repo_url.removeprefix("https://github.com/")
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    config.nav = [expanded(entry) for entry in config.nav]
    return config


def expanded(entry: Any) -> Any:
    """An entry of nav with each pattern, such as lab/20*.md, replaced by the pages that match it and are not named."""
    if isinstance(entry, dict):
        return {title: expanded(below) for title, below in entry.items()}
    if not isinstance(entry, list):
        return entry
    named = {next(iter(one.values())) if isinstance(one, dict) else one for one in entry}
    found: list[Any] = []
    for one in entry:
        if not isinstance(one, str) or "*" not in one:
            found.append(expanded(one))
            continue
        pages = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.glob(one), key=place)]
        found += [{title_of(page): page} for page in pages if page not in named]
    return found


def place(page: Path) -> tuple[int, str]:
    """The key that sorts pages of a folder: their order in its index, else by name."""
    index = page.with_name("index.md")
    text = index.read_text(encoding="utf-8") if index.exists() else ""
    return text.find(f"({page.name})"), page.name


def title_of(page: str) -> str:
    """The heading of a page: behind the date in its name, before the idea of a rung."""
    text = (DOCS / page).read_text(encoding="utf-8")
    heading = text.partition("\n")[0].removeprefix("# ")
    dated = re.match(r"\d{4}-\d\d-\d\d", Path(page).name)
    if dated:
        return f"{dated[0]} {heading}"
    idea = re.search(r"^\*\*([^:,*]+)", text, re.MULTILINE) if heading == Path(page).stem else None
    return f"{heading}: {idea[1].rstrip('.')}" if idea else heading


def on_files(files: Any, config: Any) -> Any:
    for page, file in AT_ROOT.items():
        files.append(File.generated(config, page, content=file.read_text(encoding="utf-8")))
    return files


# search ranks by words alone: lab notes are long and use every term, so they would stand before the guides
BOOSTS = {
    r"(lab|upstream|generated)/|blackwell_|simulator_|performance|compiled|results_tables|house": 0.1,
    r"guides/|questions|masks|install": 3.0,
}


def on_page_content(html: str, **_: Any) -> str:
    """Long names in cells of tables may break behind a slash, a colon or an underscore."""
    return _CELL_CODE.sub(lambda code: re.sub(r"(/|::|_)(?=\w)", r"\1<wbr>", code[0]), html)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    for pattern, boost in BOOSTS.items():
        if re.match(pattern, page.file.src_uri):
            page.meta.setdefault("search", {"boost": boost})
    try:
        return rewrite(markdown, page.file.src_uri, project_url("Repository"))
    except BrokenLink as broken:
        raise PluginError(str(broken)) from broken
