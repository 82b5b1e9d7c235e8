"""Real text for the demo: "Alice's Adventures in Wonderland" by Lewis Carroll (1832-1898), first printed in 1865.

In the public domain. alice.txt is the Millennium Fulcrum edition 2.9 that Project Gutenberg made, in the form that
compressors are measured on as `alice29.txt` of the Canterbury Corpus; only line ends and blanks before them are
changed.
"""

from __future__ import annotations

import re
from importlib.resources import files

TITLE = "Alice's Adventures in Wonderland, Lewis Carroll (1865)"
FEWEST_WORDS = 5

# questions in other words than the book's
QUERIES = (
    "a cat that fades away until only its smile is left",
    "falling down a deep hole",
    "a game played with live animals as mallets and balls",
    "time stands still at tea",
    "the queen wants people beheaded",
    "someone is accused of stealing pastry",
)

_TITLE = re.compile(r"CHAPTER [IVX]+\n\s*\n.*\n")
_END = re.compile(r"(?<=[.!?])['\")]*\s+(?=[`'\"(]*[A-Z])")


def sentences() -> list[str]:
    """The book's sentences in order; titles, ornaments and what is shorter than five words left out.

    >>> sentences()[0][:56]
    'Alice was beginning to get very tired of sitting by her '
    """
    text = _TITLE.sub("", (files(__name__) / "alice.txt").read_text(encoding="ascii"))
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text[text.index("Alice was beginning") :]):
        whole = re.sub(r"-\n\s*", "-", paragraph.strip())
        found += _END.split(re.sub(r"\s+", " ", whole))
    return [s for s in (s.strip(" *") for s in found) if len(s.split()) >= FEWEST_WORDS]
