"""The tiles of a mask that are skipped, run without a mask, or run with one, as computed by the mask object."""

from __future__ import annotations

from collections import Counter
from typing import Any

from strobe.problem.mask import Mask, Tile, TileKind

LETTERS = {TileKind.EMPTY: ".", TileKind.FULL: "#", TileKind.PARTIAL: "+"}


def tile_map(mask: Mask, length: int, tile: int) -> list[str]:
    """One string per row of tiles: '.' skipped, '#' whole, '+' masked.

    >>> import strobe
    >>> tile_map(strobe.causal(), 4, 2)
    ['+.', '#+']
    """
    starts = range(0, length, tile)
    return [
        "".join(LETTERS[mask.tile_kind(Tile(m, m + tile, n, n + tile), length, length)] for n in starts) for m in starts
    ]


def tile_maps(masks: dict[str, Mask], length: int, tile: int) -> list[dict[str, Any]]:
    """
    >>> import strobe
    >>> tile_maps({"causal": strobe.causal()}, 4, 2)[0]["share"]
    {'skipped': 0.25, 'whole': 0.25, 'masked': 0.5}
    """
    found = []
    for name, mask in masks.items():
        rows = tile_map(mask, length, tile)
        count = Counter("".join(rows))
        share = {
            word: count[letter] / len(rows) ** 2 for word, letter in (("skipped", "."), ("whole", "#"), ("masked", "+"))
        }
        found.append({"mask": name, "length": length, "tile": tile, "rows": rows, "share": share})
    return found
