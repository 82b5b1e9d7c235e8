"""Draw the figures of docs/how_it_works.md, boxes and arrows as SVG, and of plans of context parallelism.

python -m tools.site.figures docs/images        writes how_*.svg and plans_of_four.svg
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

INK, GREY = "#263238", "#607d8b"
BLUE, GREEN, ORANGE, PURPLE, PALE = "#e3f2fd", "#e8f5e9", "#fff3e0", "#f3e5f5", "#eceff1"
STRONG = {BLUE: "#1565c0", GREEN: "#2e7d32", ORANGE: "#e65100", PURPLE: "#6a1b9a", PALE: "#546e7a"}


class Figure:
    """An SVG of a fixed size; coordinates are pixels from the top left."""

    def __init__(self, width: int, height: int):
        self.size = width, height
        self.parts: list[str] = []

    def box(self, at: tuple[int, int, int, int], title: str, *lines: str, color: str = BLUE) -> None:
        """A box at (x, y, width, height) with a title and lines of text below it."""
        x, y, width, height = at
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{color}" stroke="{STRONG[color]}"/>'
        )
        top = y + (height - 17 * len(lines)) / 2 + 5
        self.text(x + width / 2, top, title, weight="600", fill=STRONG[color])
        for index, line in enumerate(lines):
            self.text(x + width / 2, top + 17 * (index + 1), line, size=12)

    def text(self, x: float, y: float, text: str, size: int = 13, weight: str = "400", fill: str = INK) -> None:
        style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="middle"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>')

    def arrow(self, *points: tuple[int, int], label: str = "", dashed: bool = False) -> None:
        """A line through the points with a head at the last, and a label above the middle of its first segment."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{GREY}" stroke-width="1.6"{dash} marker-end="url(#head)"/>'
        )
        if label:
            (x0, y0), (x1, y1) = points[:2]
            self.text((x0 + x1) / 2, (y0 + y1) / 2 - 6, label, size=11, fill=GREY)

    def svg(self) -> str:
        width, height = self.size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{GREY}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif">{head}'
            f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def call() -> Figure:
    figure = Figure(860, 210)
    steps = (
        ("attention()", "keywords"),
        ("Call", "flat tuple"),
        ("Problem", "no data"),
        ("select", "why not?"),
        ("Plan", "kernel, config"),
        ("launch", ""),
    )
    for index, (title, line) in enumerate(steps):
        x, width = 10 + 142 * index, 120
        color = ORANGE if title == "select" else GREEN if title in ("Plan", "launch") else BLUE
        figure.box((x, 30, width, 62), title, *([line] if line else []), color=color)
        if index:
            figure.arrow((x - 22, 61), (x - 1, 61))
    figure.box(
        (152, 140, 546, 50),
        "LaunchCache",
        "earlier selections by keywords and metadata, earlier launches by addresses",
        color=PALE,
    )
    figure.arrow((70, 92), (70, 165), (151, 165), dashed=True)
    figure.arrow((698, 165), (780, 165), (780, 93), dashed=True)
    figure.text(740, 157, "replay", size=11, fill=GREY)
    figure.text(104, 157, "warm call", size=11, fill=GREY)
    return figure


def tiles() -> Figure:
    figure = Figure(560, 300)
    side, left, top = 34, 90, 40
    for row in range(6):
        for column in range(10):
            diagonal = column * 64 - (row * 64 + 4 * 64)  # a tile is 64 x 64; there are four more tiles of keys
            kind = PALE if diagonal > 0 else ORANGE if diagonal == 0 else GREEN
            figure.parts.append(
                f'<rect x="{left + side * column}" y="{top + side * row}" width="{side - 3}" height="{side - 3}" '
                f'rx="3" fill="{kind}" stroke="{STRONG[kind]}" stroke-opacity="0.5"/>'
            )
    figure.arrow((left, 28), (left + 10 * side - 6, 28))
    figure.text(left + 170, 20, "keys", size=12, fill=GREY)
    figure.text(45, 145, "queries", size=12, fill=GREY)
    for index, (kind, words) in enumerate(
        ((GREEN, "full: no mask"), (ORANGE, "partial: masked"), (PALE, "empty: skipped"))
    ):
        x = 90 + 150 * index
        figure.parts.append(
            f'<rect x="{x}" y="262" width="18" height="18" rx="3" fill="{kind}" stroke="{STRONG[kind]}"/>'
        )
        figure.text(x + 75, 276, words, size=12)
    return figure


def hopper_forward() -> Figure:
    figure = Figure(860, 270)
    figure.box((10, 95, 120, 80), "global memory", "q, k, v", color=PALE)
    figure.box((190, 95, 140, 80), "load_partition", "1 warp, TMA", color=ORANGE)
    figure.box(
        (390, 30, 170, 210), "shared memory", "q of each consumer", "ring of k stages", "ring of v stages", color=BLUE
    )
    for index, y in enumerate((30, 150)):
        figure.box(
            (630, y, 220, 90),
            f"mma_partition {index}",
            "4 warps, 64 queries",
            "S = Q K^T, softmax, O += P V",
            color=GREEN,
        )
    figure.arrow((130, 135), (189, 135))
    figure.arrow((330, 125), (389, 125), label="full")
    figure.arrow((389, 155), (331, 155), label="empty", dashed=True)
    figure.arrow((560, 65), (629, 65), label="full")
    figure.arrow((629, 95), (561, 95), label="empty", dashed=True)
    figure.arrow((560, 185), (629, 185), label="full")
    figure.arrow((629, 215), (561, 215), label="empty", dashed=True)
    figure.arrow((740, 121), (740, 149))
    figure.arrow((755, 149), (755, 121))
    figure.text(805, 139, "ping-pong", size=11, fill=GREY)
    return figure


def hopper_backward() -> Figure:
    figure = Figure(860, 290)
    figure.box((10, 30, 150, 70), "row sums", "delta = rowsum(dO O)", color=PALE)
    figure.box((10, 180, 150, 80), "load_partition", "1 warp, TMA", "K, V; Q, dO in a ring", color=ORANGE)
    figure.box((240, 30, 220, 95), "consumer 0", "S, P, dP, dS of its keys", "dV, dK in registers", color=GREEN)
    figure.box((240, 165, 220, 95), "consumer 1", "S, P, dP, dS of its keys", "dV, dK in registers", color=GREEN)
    figure.box((540, 95, 130, 100), "store_partition", "1 warp, TMA", "adds dQ,", "writes dK, dV", color=ORANGE)
    figure.box((730, 30, 120, 80), "dQ sum", "float32", color=PALE)
    figure.box((730, 180, 120, 80), "convert", "dQ = scale * sum", color=PALE)
    figure.arrow((85, 100), (85, 179))
    figure.arrow((160, 212), (200, 212), (200, 78), (239, 78))
    figure.arrow((200, 212), (239, 212))
    figure.arrow((340, 126), (340, 164))
    figure.arrow((360, 164), (360, 126))
    figure.text(385, 149, "dS", size=11, fill=GREY)
    figure.arrow((460, 78), (500, 78), (500, 130), (539, 130))
    figure.arrow((460, 212), (500, 212), (500, 160), (539, 160))
    figure.arrow((670, 125), (700, 125), (700, 70), (729, 70))
    figure.arrow((790, 110), (790, 179))
    return figure


def decode() -> Figure:
    figure = Figure(860, 230)
    figure.text(60, 58, "keys of one", size=12, fill=GREY)
    figure.text(60, 74, "sequence", size=12, fill=GREY)
    for index in range(4):
        x = 130 + 130 * index
        figure.box((x, 30, 120, 60), f"pages, split {index}", "by page table", color=PALE)
        figure.box((x, 130, 120, 70), f"program {index}", "S = K q^T", "O = V^T P", color=GREEN)
        figure.arrow((x + 60, 90), (x + 60, 129))
    figure.box((700, 130, 150, 70), "merge by lse", "the last program", "to finish", color=ORANGE)
    figure.arrow((640, 165), (699, 165))
    figure.text(390, 222, "each writes its part: out in float32, and lse", size=11, fill=GREY)
    return figure


FIGURES = {
    "how_call": call,
    "how_tiles": tiles,
    "how_hopper_forward": hopper_forward,
    "how_hopper_backward": hopper_backward,
    "how_decode": decode,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.site.figures", description="figures of docs/how_it_works.md")
    parser.add_argument("folder", type=Path, help="where they go: docs/images")
    folder = parser.parse_args(arguments).folder
    from .plan_figures import plans_of_four

    for name, draw in {**FIGURES, "plans_of_four": plans_of_four}.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
