"""Draw the figures of docs/how_it_works.md, boxes and arrows as SVG, and of plans of context parallelism.

python -m tools.site.figures docs/images        writes how_*.svg and plans_of_four.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .figure import BLUE, GREEN, GREY, ORANGE, PALE, STRONG, Figure
from .plan_figures import plans_of_four


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
    "plans_of_four": plans_of_four,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.site.figures", description="figures of docs/how_it_works.md")
    parser.add_argument("folder", type=Path, help="where they go: docs/images")
    folder = parser.parse_args(arguments).folder
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
