"""Cuts a call into pieces with one rule: row i of a piece sees exactly the keys first[i] <= j < stop[i].

A piece is one document of one batch entry, one packed sequence, or (with neither) all batch entries with the same mask.
It contains no rows of other sequences or documents and no keys beyond a length, so nothing outside affects its result.
Each of its rows sees a key. Neither bound decreases from one row to the next, as tile skipping requires. The rows of
non-contiguous documents are gathered, which keeps both properties.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidProblem
from ...problem.call import Call
from ...problem.mask import NO_BOUND
from ..runtime import error_flags

Index = slice | Tensor  # a slice (a view) of contiguous positions, else a sorted int64 tensor (a gather)
NOTHING = slice(0, 0)


class Piece(NamedTuple):
    entries: slice  # batch entries; packed tensors are a batch of one
    rows: Index
    keys: Index
    first: Tensor  # int64 [rows]
    stop: Tensor  # int64 [rows]
    diagonal: int = 0  # keys - rows of the whole sequence
    sequence: int | None = None  # of packed tensors; None: the batch entry is the sequence
    origin: tuple[int, int] = (0, 0)  # the sequence's first row and first key
    key_positions: Tensor | None = None  # of keys that were gathered; None: their positions in the tensors

    @property
    def n_rows(self) -> int:
        return self.first.shape[0]

    @property
    def n_keys(self) -> int:
        return _count(self.keys)

    @property
    def work(self) -> int:
        """Number of (row, visible key) pairs per head."""
        return int((self.stop - self.first).sum()) * (self.entries.stop - self.entries.start)


class Pieces(NamedTuple):
    pieces: list[Piece]
    broken: list[slice]  # rows of sequences longer than promised: NaN

    def cover_rows(self, batch: int, seqlen_q: int) -> bool:
        """Whether every row is in a piece (pieces are disjoint), so that nothing is left to fill."""
        return sum((p.entries.stop - p.entries.start) * p.n_rows for p in self.pieces) == batch * seqlen_q

    def cover_keys(self, batch: int, seqlen_k: int) -> bool:
        return sum((p.entries.stop - p.entries.start) * p.n_keys for p in self.pieces) == batch * seqlen_k


def as_batch(call: Call) -> Call:
    """The call with q, k and v as [B, S, H, D]. Packed tensors are a batch of one."""
    return call._replace(q=call.q[None], k=call.k[None], v=call.v[None]) if call.packed else call


def cut(call: Call) -> Pieces:
    """Cut a call into pieces.

    >>> q = torch.zeros(5, 1, 8); offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> call = Call(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, right=0)
    >>> [(p.rows, p.stop.tolist()) for p in cut(call).pieces]
    [(slice(0, 2, None), [1, 2]), (slice(2, 5, None), [1, 2, 3])]
    """
    broken: list[slice] = []
    found = _sequences(call, broken) if call.packed else _entries(call)
    return Pieces([piece for piece in found if piece is not None], broken)


# ---------------------------------------------------------------- packed


def _sequences(call: Call, broken: list[slice]) -> Iterator[Piece | None]:
    offsets_q = offsets_of("cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0])
    offsets_k = offsets_of("cu_seqlens_k", call.cu_seqlens_k, call.k.shape[0])
    bounds = zip(offsets_q, offsets_q[1:], offsets_k, offsets_k[1:])
    for sequence, (row, row_stop, key, key_stop) in enumerate(bounds):
        diagonal = (key_stop - key) - (row_stop - row) + key - row  # in positions of the packed tensors
        rows, keys = slice(row, row_stop), slice(key, key_stop)
        if call.max_seqlen_k != NO_BOUND and key_stop - key > call.max_seqlen_k:
            error_flags.report(call.q.device, error_flags.LONG_K)
            broken.append(rows)
            continue
        if call.max_seqlen_q != NO_BOUND and row_stop - row > call.max_seqlen_q:
            error_flags.report(call.q.device, error_flags.LONG_Q)
            rows = slice(row, row + call.max_seqlen_q)
            broken.append(slice(rows.stop, row_stop))
        piece = _piece(call, slice(0, 1), rows, keys, diagonal)
        if piece is not None:
            own = (key_stop - key) - (row_stop - row)
            yield piece._replace(diagonal=own, sequence=sequence, origin=(row, key))


def offsets_of(argument: str, offsets: Tensor | None, total: int) -> list[int]:
    """cu_seqlens as a list. Reading is free on the host, so invalid offsets raise here instead of being clamped."""
    values = [] if offsets is None else offsets.tolist()
    for n, (value, after) in enumerate(zip(values, [*values[1:], total])):
        if value < 0 or after < value:
            got = f"offset {n} = {value}" + (f", the next is {after}" if n + 1 < len(values) else "")
            raise InvalidProblem(
                argument, got, f"offsets that never fall, from 0 to at most {total}", "give the running sum of lengths"
            )
    return values


# ---------------------------------------------------------------- dense


def _entries(call: Call) -> Iterator[Piece | None]:
    batch, seqlen_q, seqlen_k = call.q.shape[0], call.q.shape[1], call.k.shape[1]
    lengths = _lengths(call, batch, seqlen_k)
    prefixes = [0] * batch if call.prefix is None else call.prefix.tolist()
    diagonal = seqlen_k - seqlen_q
    whole = lambda length: [(slice(0, seqlen_q), slice(0, length))]
    if call.ids_q is None and len({*lengths}) == 1 and len({*prefixes}) == 1:
        yield _piece(call, slice(0, batch), slice(0, seqlen_q), slice(0, lengths[0]), diagonal, prefixes[0])
        return
    for b, (length, prefix) in enumerate(zip(lengths, prefixes)):
        shares = (
            _documents(call.ids_q[b], call.ids_k[b, :length])
            if call.ids_q is not None and call.ids_k is not None
            else whole(length)
        )
        for rows, keys in shares:
            yield _piece(call, slice(b, b + 1), rows, keys, diagonal, prefix)


def _lengths(call: Call, batch: int, seqlen_k: int) -> list[int]:
    if call.key_lengths is None:
        return [seqlen_k] * batch
    lengths = call.key_lengths.clamp(0, seqlen_k)
    if not torch.equal(lengths, call.key_lengths):
        error_flags.report(call.q.device, error_flags.LENGTHS)
    return lengths.tolist()


def _documents(ids_q: Tensor, ids_k: Tensor) -> Iterator[tuple[Index, Index]]:
    """Rows and keys of each id that both sides contain."""
    keys_of = dict(_members(ids_k))
    for ident, rows in _members(ids_q):
        if ident in keys_of:
            yield _together(rows), _together(keys_of[ident])


def _members(ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Positions of each id except padding, in order."""
    ordered, where = ids.sort(stable=True)
    values, counts = ordered.unique_consecutive(return_counts=True)
    for ident, positions in zip(values.tolist(), where.split(counts.tolist())):
        if ident >= 0:
            yield ident, positions


# ---------------------------------------------------------------- bounds


def _piece(call: Call, entries: slice, rows: Index, keys: Index, diagonal: int, prefix: int = 0) -> Piece | None:
    """The piece of these rows and keys, without rows that see no key; None if none is left.

    Positions refer to whole tensors: row r is on column r + diagonal.
    """
    n_keys = _count(keys)
    if n_keys == 0 or _count(rows) == 0:
        return None
    column = positions(rows) + diagonal
    first = torch.zeros_like(column) if call.left == NO_BOUND else _keys_before(column - call.left, keys)
    stop = torch.full_like(column, n_keys) if call.right == NO_BOUND else _keys_before(column + call.right + 1, keys)
    if call.prefix is not None:
        reach = _keys_before(torch.full_like(column, prefix), keys)
        stop = torch.minimum(stop, torch.maximum(reach, _keys_before(column + 1, keys)))
    seeing = first < stop
    if not seeing.all():
        rows, first, stop = _together(positions(rows)[seeing]), first[seeing], stop[seeing]
    return Piece(entries, rows, keys, first, stop, diagonal) if first.shape[0] else None


def _keys_before(position: Tensor, keys: Index) -> Tensor:
    """For each position, the number of `keys` before it."""
    if isinstance(keys, slice):
        return (position - keys.start).clamp(0, keys.stop - keys.start)
    return torch.searchsorted(keys, position)


def _together(positions: Tensor) -> Index:
    """Sorted positions, as a slice if they are contiguous."""
    if positions.shape[0] == 0:
        return NOTHING
    start, stop = int(positions[0]), int(positions[-1]) + 1
    return slice(start, stop) if stop - start == positions.shape[0] else positions


def part(index: Index, at: slice) -> Index:
    """The positions `at` of an index. A slice is clipped to its end."""
    if isinstance(index, slice):
        return slice(index.start + at.start, min(index.start + at.stop, index.stop))
    return index[at]


def positions(index: Index) -> Tensor:
    return torch.arange(index.start, index.stop) if isinstance(index, slice) else index


def _count(index: Index) -> int:
    return index.stop - index.start if isinstance(index, slice) else index.shape[0]
