"""The calls by which a rank computes its rows: rectangles of rows and keys, each with a mask of the library.

A rank's rows are runs. Rows [a, b) over keys [lo, hi) are one call of strobe's kernels, because the mask of the whole
sequence is a mask of the library there too. A call's diagonal ends in the lower right corner, at row b and key hi, so
window bounds move by hi - b: left becomes left + hi - b, and right becomes right + b - hi. `Visible.seeing` trims a
rectangle to the rows and keys that see one another, and then neither bound is negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ..problem.mask import Documents, Mask
from .runs import Run, Runs, size, union
from .visible import Visible


class Piece(NamedTuple):
    """One call: rows [start, stop) over keys [start, stop), as positions of the whole sequence."""

    rows: Run
    keys: Run


def whole_rows(runs: Runs, visible: Visible, mask: Mask) -> tuple[Piece, ...]:
    """One piece a run, over all keys that the run sees; with a prefix up to two."""
    found = []
    for run in runs:
        keys = visible.keys(run)
        if keys is None:
            continue
        begin, end = run
        # the diagonal of prefix_causal cannot be moved, so a piece that it crosses ends at key `end`
        crossed = mask.prefix is not None and keys[1] > begin
        parts = [(keys[0], end), (end, keys[1])] if crossed else [keys]
        found += [_trimmed(run, part, visible, mask) for part in parts]
    return tuple(piece for piece in found if piece)


def by_arrival(runs: Runs, visible: Visible, mask: Mask) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The pieces of `whole_rows` that need keys of their own run alone, and the others.

    A run is cut where most of its rows see keys of the run alone, as with windows. Then these rows read k and v in
    place while a few keys arrive for the others.
    """
    parts = [(part, run) for run in runs for part in (_parted(run, visible) if mask.prefix is None else [run])]
    pieces = [(piece, run) for part, run in parts for piece in whole_rows((part,), visible, mask)]
    inside = [run[0] <= piece.keys[0] and piece.keys[1] <= run[1] for piece, run in pieces]
    own = tuple(piece for (piece, _), is_inside in zip(pieces, inside) if is_inside)
    return own, tuple(piece for (piece, _), is_inside in zip(pieces, inside) if not is_inside)


def _parted(run: Run, visible: Visible) -> list[Run]:
    """A run cut into rows that see keys before it, rows that see keys of the run alone, and rows that see keys after
    it. The whole run if those in the middle are under half of it.
    """
    first, stop = visible.first[slice(*run)], visible.stop[slice(*run)]
    seeing = stop > 0
    before = (seeing & (first < run[0])).nonzero()[:, 0]
    after = (seeing & (stop > run[1])).nonzero()[:, 0]
    begin = run[0] + int(before[-1]) + 1 if len(before) else run[0]
    end = run[0] + int(after[0]) if len(after) else run[1]
    if 2 * (end - begin) < run[1] - run[0]:
        return [run]
    return [part for part in ((run[0], begin), (begin, end), (end, run[1])) if part[0] < part[1]]


def own_keys(runs: Runs, visible: Visible, mask: Mask) -> tuple[Piece, ...]:
    """The pieces of each run over its own keys. They need no key of another rank."""
    return tuple(piece for run in runs if (piece := _trimmed(run, run, visible, mask)))


def other_keys(runs: Runs, visible: Visible, mask: Mask) -> tuple[Piece, ...]:
    """The pieces of each run over the keys before and after it."""
    found = []
    for run in runs:
        keys = visible.keys(run)
        if keys is not None:
            found += [
                _trimmed(run, (keys[0], min(keys[1], run[0])), visible, mask),
                _trimmed(run, (max(keys[0], run[1]), keys[1]), visible, mask),
            ]
    return tuple(piece for piece in found if piece)


def _trimmed(rows: Run, keys: Run, visible: Visible, mask: Mask) -> Piece | None:
    seen = visible.seeing(rows, keys)
    if seen is None:
        return None
    if mask.prefix is not None and keys[0] < rows[1] and keys[1] > rows[0]:  # the lower right corner must stay
        return Piece((seen[0][0], rows[1]), (seen[1][0], keys[1]))
    return Piece(*seen)


def mask_of(piece: Piece, mask: Mask) -> Mask:
    """The mask of the whole sequence as the mask of a piece. Runs on the mask's device without synchronization."""
    (begin, end), (low, high) = piece
    prefix, lengths = None, mask.key_lengths
    if lengths is not None:
        lengths = (lengths - low).clamp(min=0)
    if mask.prefix is not None and low >= end:  # beyond the diagonal, only the prefix is seen
        inside = (mask.prefix - low).clamp(min=0) if isinstance(mask.prefix, Tensor) else None
        if inside is not None:
            lengths = inside if lengths is None else inside.minimum(lengths)
    elif mask.prefix is not None and high > begin:
        inside = mask.prefix - low
        prefix = inside.clamp(min=0) if isinstance(inside, Tensor) else max(0, inside)
    documents = mask.documents
    if documents is not None:
        documents = Documents.of(documents.ids_q[:, begin:end].contiguous(), documents.ids_k[:, low:high].contiguous())
    left = None if mask.left is None else mask.left + high - end
    right = None if mask.right is None else mask.right + end - high
    return Mask(left, right, prefix, lengths, documents)


@dataclass(frozen=True)
class Pieces:
    """The calls of a rank, in the order in which they run."""

    own: tuple[Piece, ...]  # need no key of another rank: they run while keys are exchanged
    rest: tuple[Piece, ...]

    @cached_property
    def all(self) -> tuple[Piece, ...]:
        return self.own + self.rest

    @cached_property
    def rows_once(self) -> bool:
        """Whether no row is in two pieces, so that pieces give results and not parts of results."""
        return sum(stop - start for (start, stop), _ in self.all) == size(self._rows)

    def are_all_rows(self, runs: Runs) -> bool:
        """Whether each of these rows is in a piece."""
        return self._rows == runs

    def is_one(self, runs: Runs) -> bool:
        """Whether one piece has all of these rows."""
        return len(self.all) == 1 and self.are_all_rows(runs)

    @cached_property
    def _rows(self) -> Runs:
        return union(piece.rows for piece in self.all)

    @staticmethod
    def of(runs: Runs, visible: Visible, mask: Mask, own_first: bool) -> Pieces:
        if own_first:
            return Pieces(own_keys(runs, visible, mask), other_keys(runs, visible, mask))
        return Pieces(*by_arrival(runs, visible, mask))
