"""Draw published rows: strobe beside FlashAttention-4 and cuDNN, on normal numbers and on the worst family of inputs.

    python -m tools.results_plot docs/images        writes results_h200.svg and results_h100.svg

The rows are those of results/forward.jsonl and results/backward.jsonl. The worst family of a case is the one with the
smallest ratio to the better rival (`bench.table.normal_and_worst`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from strobe.bench.data import NORMAL
from strobe.bench.plot import COLOURS, NAMES, OURS
from strobe.bench.table import normal_and_worst, rival_tflops

ROOT = Path(__file__).parents[1]
CARDS = ("H200", "H100")
DIRECTIONS = ("forward", "backward")
RIVALS = ("fa4", "cudnn")
CASES = {
    "d64_causal_8k": "d64, causal",
    "d128_dense_8k": "d128",
    "d128_causal_8k": "d128, causal",
    "d256_causal_8k": "d256, causal",
}

_BAR, _GROUP, _LEFT, _TOP, _HEIGHT, _PANEL = 14, 104, 40, 84, 210, 460
_MOST = 800.0  # TFLOP/s at the upper edge
_STYLE = """
text{font:12px system-ui,sans-serif;fill:#1f2328} .n{font-size:10px} .q{fill:#59636e} .t{font-weight:600;font-size:14px}
.page{fill:#fff} .grid{stroke:#d8dce1}
@media (prefers-color-scheme:dark){text{fill:#e6e9ed} .q{fill:#9aa4b0} .page{fill:#14171c} .grid{stroke:#3a424d}}
"""


class Bar(NamedTuple):
    who: str  # "strobe" or a rival
    data: str  # family of inputs
    tflops: float


def published(card: str, direction: str) -> list[dict]:
    """The last row of each case and family on this card that has both rivals."""
    lines = (ROOT / "results" / f"{direction}.jsonl").read_text().splitlines()
    last: dict[tuple[str, str], dict] = {}
    for row in map(json.loads, lines):
        if f"{card}" in row["device"].split(":")[0] and row["tflops"] and set(RIVALS) <= row["rivals"].keys():
            last[row["case"], row.get("data", NORMAL)] = row
    return list(last.values())


def bars(rows: Sequence[dict], case: str) -> list[Bar]:
    """Two bars, normal and worst, for strobe and for each rival."""
    found = []
    for row in normal_and_worst([row for row in rows if row["case"] == case]):
        family = row.get("data", NORMAL)
        found.append(Bar("strobe", family, row["tflops"]))
        found += [Bar(name, family, rate) for name in RIVALS if (rate := rival_tflops(row, name))]
    who = ("strobe", *RIVALS)
    return sorted(found, key=lambda bar: who.index(bar.who))  # sorted is stable: normal stays before worst


def picture(card: str) -> str:
    """An SVG image with one panel for each direction."""
    of = {direction: published(card, direction) for direction in DIRECTIONS}
    width, bottom = 2 * _PANEL, _TOP + _HEIGHT
    dates = sorted({row["date"][:10] for rows in of.values() for row in rows})
    versions = next(row["versions"] for row in reversed(of["forward"]) if row.get("versions"))
    title = f"Attention on one {card}, bfloat16, 8,192 tokens: TFLOP/s over visible pairs"
    parts = [_text(16, 26, title, "t"), *_legend()]
    for place, direction in enumerate(DIRECTIONS):
        parts += _panel(direction, of[direction], place * _PANEL)
    where = (
        f"{', '.join(dates)}; FlashAttention-4 {versions['fa4']}, cuDNN {_cudnn(versions['cudnn'])}; "
        f"worst: the inputs, named below a case, on which strobe is slowest beside the better rival"
    )
    parts.append(_text(16, bottom + 58, where, "n q"))
    size = f'viewBox="0 0 {width} {bottom + 70}" width="{width}" height="{bottom + 70}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join(
        [head, f"<style>{_STYLE}</style>", '<rect class="page" width="100%" height="100%"/>', *parts, "</svg>\n"]
    )


def _panel(direction: str, rows: list[dict], left: int) -> list[str]:
    bottom = _TOP + _HEIGHT
    parts = [_text(left + _LEFT, _TOP - 12, direction, "t")]
    for rate in range(0, int(_MOST) + 1, 200):
        y = bottom - rate / _MOST * _HEIGHT
        parts.append(f'<path class="grid" d="M{left + _LEFT} {y:.1f}h{_PANEL - _LEFT - 12}"/>')
        parts.append(_text(left + _LEFT - 6, y + 4, str(rate), "n q", "end"))
    for place, (case, name) in enumerate(CASES.items()):
        drawn = bars(rows, case)
        at = left + _LEFT + 8 + place * _GROUP
        for number, bar in enumerate(drawn):
            x, tall = at + number * _BAR, bar.tflops / _MOST * _HEIGHT
            y, faint = bottom - tall, "" if bar.data == NORMAL else ' opacity="0.5"'
            colour = OURS if bar.who == "strobe" else COLOURS[bar.who]
            parts.append(
                f'<rect x="{x}" y="{y:.1f}" width="{_BAR - 2}" height="{tall:.1f}" fill="{colour}"{faint}/>'
                f'<text class="n" transform="translate({x + 9} {y - 4:.1f}) rotate(-90)">{bar.tflops:.0f}</text>'
            )
        middle = at + len(drawn) * _BAR / 2
        parts.append(_text(middle, bottom + 16, name, "", "middle"))
        parts.append(
            _text(middle, bottom + 30, ", ".join({b.data: 0 for b in drawn if b.data != NORMAL}), "n q", "middle")
        )
    return parts


def _legend() -> list[str]:
    parts, x = [], 16
    for who, colour in (("strobe", OURS), *((name, COLOURS[name]) for name in RIVALS)):
        for opacity, data in ((1, "normal"), (0.5, "worst")):
            parts.append(f'<rect x="{x}" y="40" width="12" height="12" fill="{colour}" opacity="{opacity}"/>')
            name = f"{NAMES.get(who, who)}, {data}"
            parts.append(_text(x + 17, 50, name))
            x += 34 + 7 * len(name)
    return parts


def _cudnn(number: str) -> str:
    """
    >>> _cudnn("91900")
    '9.19'
    """
    return f"{int(number) // 10000}.{int(number) // 100 % 100}"


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "") -> str:
    end = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{end}>{escape(text)}</text>'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.results_plot", description="Draw the published rows.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    for card in CARDS:
        (folder / f"results_{card.lower()}.svg").write_text(picture(card))
    return 0


if __name__ == "__main__":
    sys.exit(main())
