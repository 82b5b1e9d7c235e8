"""Rewrite the repository's Markdown for the site: links that leave docs/, and blocks of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
AT_ROOT = {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}  # page: its source
_FENCE = re.compile(r"^(?P<fence>```+)(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE)
# code is matched first, because `kernel[grid](x)` is no link
_LINK = re.compile(r"(?P<ticks>`+)(?:[^`\n]|\n(?!\n))+(?P=ticks)|\]\((?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_DIRECTIVE = re.compile(r" +# doctest: [+\w, ]+$", re.MULTILINE)


class BrokenLink(ValueError):
    """A link of a page leads to no file of the repository."""


def source(page: str) -> Path:
    """The file that a page of the site is made from. `page` is its path below docs/.

    >>> source("changelog.md").name, source("guides/training.md").relative_to(DOCS).as_posix()
    ('CHANGELOG.md', 'guides/training.md')
    """
    return AT_ROOT.get(page, DOCS / page)


def rewrite(text: str, page: str, repository: str) -> str:
    """The Markdown of a page as the site needs it.

    >>> rewrite("[a](../src/strobe/env.py), [b](masks.md#combine)", "house.md", "https://host/repo")
    '[a](https://host/repo/blob/main/src/strobe/env.py), [b](masks.md#combine)'
    """
    return "".join(
        _block(piece) if piece.startswith("```") else _LINK.sub(lambda link: _link(link, page, repository), piece)
        for piece in _pieces(text)
    )


def _pieces(text: str) -> Iterator[str]:
    """The text cut before and after each fenced block."""
    start = 0
    for block in _FENCE.finditer(text):
        yield text[start : block.start()]
        yield block[0]
        start = block.end()
    yield text[start:]


def _block(block: str) -> str:
    """A fenced block. Python with prompts is highlighted as a session, without the directives for doctest."""
    match = _FENCE.match(block)
    if match is None or not match["info"].startswith("python") or ">>> " not in match["code"]:
        return block
    info = "pycon" + match["info"].removeprefix("python")
    return f"{match['fence']}{info}\n{_DIRECTIVE.sub('', match['code']).rstrip()}\n{match['fence']}"


def _link(link: re.Match[str], page: str, repository: str) -> str:
    path, anchor = link["path"], link["anchor"] or ""
    if path is None or ":" in path:  # code or a URL
        return link[0]
    target = (source(page).parent / path).resolve()
    inside = next((name for name, file in AT_ROOT.items() if file == target), None)
    if inside is None and DOCS in target.parents:
        inside = target.relative_to(DOCS).as_posix()
    if inside is not None:
        return f"]({relpath(inside, Path(page).parent)}{anchor})"
    if not target.exists() or ROOT not in target.parents:
        raise BrokenLink(f"{source(page).relative_to(ROOT)}: there is no {path}")
    kind = "tree" if target.is_dir() else "blob"
    return f"]({repository}/{kind}/main/{target.relative_to(ROOT).as_posix()}{anchor})"
