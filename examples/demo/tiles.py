"""Which tiles of a mask are skipped, which run without a mask and which with one: asked of the mask itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

from strobe.problem.mask import Mask, Tile, TileKind

LETTERS = {TileKind.EMPTY: ".", TileKind.FULL: "#", TileKind.PARTIAL: "+"}


def tile_map(mask: Mask, length: int, tile: int) -> list[str]:
    """One string a row of tiles: '.' skipped, '#' whole, '+' masked.

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
