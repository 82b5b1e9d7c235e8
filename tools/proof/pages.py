"""Write a table into a page of the documentation, between two markers."""

from __future__ import annotations

from pathlib import Path

from strobe.errors import InvalidProblem


def fill(path: Path, name: str, text: str) -> None:
    """Replace the text between `<!-- name: begin -->` and `<!-- name: end -->` by `text`. Raises InvalidProblem unless
    both occur once.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = path.read_text() if path.is_file() else ""
    if page.count(begin) != 1 or page.count(end) != 1:
        raise InvalidProblem(
            "--table", path, f"a page with one line {begin} and one line {end}", "put them where the table belongs"
        )
    before, after = page.partition(begin)[0], page.partition(end)[2]
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
