"""An extension of griffe: docstrings of this repository as Markdown.

A doctest becomes a fenced block, and the path of a page a link. The parameter `others`, which only refuses unknown
keywords, leaves the signature.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension  # pyright: ignore[reportMissingImports]

_DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
_PAGE = re.compile(r"\bdocs/(\w+\.md)\b")
_DIRECTIVE = re.compile(r" +# doctest: [+\w, ]+$", re.MULTILINE)


def fenced(text: str) -> str:
    r"""The docstring with each doctest in a block of its own.

    >>> fenced("Add.\n\n>>> 1 + 1\n2\n\nExact.")
    'Add.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nExact.'
    """
    text = _PAGE.sub(r"[\g<0>](../\1)", text)  # the reference is in docs/api
    return _DOCTEST.sub(lambda found: f"```pycon\n{_DIRECTIVE.sub('', found[0])}\n```", text)


class Docstrings(Extension):
    """What griffe calls for each object that it has read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_function(self, *, func: Any, **_: Any) -> None:
        if "others" in func.parameters:
            del func.parameters["others"]
