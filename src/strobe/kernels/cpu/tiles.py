"""What the tiled forward and backward share: chunks of heads, batched matrices, tiles, and scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...problem.problem import Problem
from ..protocol import away_from_0
from .pieces import Index, Piece, part

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


@dataclass(frozen=True)
class Config:
    """How a call runs. Path "torch_flash" uses torch's CPU kernel for pieces that it can run, and tiles otherwise."""

    path: str
    block_m: int  # queries per tile, for each query head that shares the key head
    block_n: int  # keys per tile
    n_heads: int  # key heads, over batch entries, per batched product
    fixed_tiles: bool = False  # padded tiles of one shape at fixed offsets: a row's bits depend only on its own keys

    def __post_init__(self) -> None:
        if self.path not in ("torch_flash", "tiled") or min(self.block_m, self.block_n, self.n_heads) < 1:
            raise ValueError(f"{self}: a path is torch_flash or tiled, and sizes are at least 1")

    @property
    def columns(self) -> int:
        """The multiple to which the forward pads head dimensions. With columns beyond whole vectors, a product of
        matrices adds in an order that depends on the row's place in the tile (MKL 2024.2, float32 and float64).
        """
        return 16 if self.fixed_tiles else 1

    def tile_elements(self, group: int) -> int:
        return self.n_heads * group * self.block_m * self.block_n


def wide(dtype: torch.dtype) -> torch.dtype:
    """dtype of scores, softmax state and accumulators."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------- matrices


class Chunk(NamedTuple):
    """Key heads `heads` of batch entries `entries` of a piece: N = entries * heads matrices."""

    entries: slice
    heads: slice
    group: int

    @property
    def heads_q(self) -> slice:
        return slice(self.heads.start * self.group, self.heads.stop * self.group)

    def read_rows(self, tensor: Tensor, index: Index, dtype: torch.dtype) -> Tensor:
        """[B, S, H_q, D] -> [N, group * rows, D]: rows of query heads that share a key head are concatenated."""
        part = tensor[self.entries, index, self.heads_q].unflatten(2, (-1, self.group))
        return part.permute(0, 2, 3, 1, 4).to(dtype).reshape(-1, self.group * part.shape[1], part.shape[-1])

    def read_keys(self, tensor: Tensor, index: Index, dtype: torch.dtype) -> Tensor:
        """[B, S, H_kv, D] -> [N, keys, D]; a view if no conversion is needed."""
        part = tensor[self.entries, index, self.heads].transpose(1, 2).to(dtype)
        return part.reshape(-1, *part.shape[2:])

    def read_values(self, tensor: Tensor, index: Index) -> Tensor:
        """[B, H_q, S] -> [N, group * rows, 1]."""
        return tensor[self.entries, self.heads_q, index].reshape(self.n, -1, 1)

    def write_rows(self, tensor: Tensor, index: Index, value: Tensor) -> None:
        parts = value.reshape(
            self.entries.stop - self.entries.start, -1, value.shape[-2] // self.group, value.shape[-1]
        )
        tensor[self.entries, index, self.heads_q] = parts.transpose(1, 2).to(tensor.dtype)

    def write_keys(self, tensor: Tensor, index: Index, value: Tensor) -> None:
        parts = value.unflatten(0, (self.entries.stop - self.entries.start, -1))
        tensor[self.entries, index, self.heads] = parts.transpose(1, 2).to(tensor.dtype)

    def write_values(self, tensor: Tensor, index: Index, value: Tensor) -> None:
        parts = value.reshape(self.entries.stop - self.entries.start, -1, value.shape[1] // self.group)
        tensor[self.entries, self.heads_q, index] = parts.to(tensor.dtype)

    @property
    def n(self) -> int:
        return (self.entries.stop - self.entries.start) * (self.heads.stop - self.heads.start)


def chunks(piece: Piece, heads: slice, group: int, most: int) -> Iterator[Chunk]:
    """These key heads of as many batch entries as `most` matrices allow, or some heads of a single entry."""
    count = heads.stop - heads.start
    n_entries, n_heads = max(1, most // count), min(count, most)
    for entry in range(piece.entries.start, piece.entries.stop, n_entries):
        entries = slice(entry, min(entry + n_entries, piece.entries.stop))
        for head in range(heads.start, heads.stop, n_heads):
            yield Chunk(entries, slice(head, min(head + n_heads, heads.stop)), group)


class Keys(NamedTuple):
    """Keys and values of a chunk's heads, read per tile as [N, keys, D]; fixed_tiles pads them with zeros. D and
    D_v are padded to multiples of `columns`.
    """

    chunk: Chunk
    piece: Piece
    tensors: tuple[Tensor, Tensor]
    dtype: torch.dtype
    columns: int = 1

    def read(self, at: slice) -> tuple[Tensor, Tensor]:
        missing = max(0, at.stop - self.piece.n_keys)
        k, v = (self.chunk.read_keys(t, part(self.piece.keys, at), self.dtype) for t in self.tensors)
        k, v = (padded(t, 2, self.columns) for t in (k, v))
        return (pad(k, (0, 0, 0, missing)), pad(v, (0, 0, 0, missing))) if missing else (k, v)


def padded(rows: Tensor, dim: int, multiple: int) -> Tensor:
    """The rows with zeros appended in a dimension up to a multiple of `multiple` (fixed_tiles)."""
    missing = -rows.shape[dim] % multiple
    return pad(rows, [0, 0] * (rows.dim() - 1 - dim) + [0, missing]) if missing else rows


# ---------------------------------------------------------------- tiles


class Block(NamedTuple):
    """Rows [start, stop) of a piece with bounds [rows, 1]; fixed_tiles repeats the last row's up to block_m."""

    start: int
    stop: int
    first: Tensor
    end: Tensor

    def index(self, piece: Piece) -> Index:
        return part(piece.rows, slice(self.start, self.stop))

    @property
    def pairs(self) -> int:
        """(row, key) pairs in its tiles."""
        return (self.stop - self.start) * int(self.end[-1] - self.first[0])


class Tile(NamedTuple):
    keys: slice  # keys of the piece
    hidden: Tensor | None  # bool [rows, keys]; None if every row sees every key


def blocks(piece: Piece, config: Config) -> Iterator[Block]:
    for start in range(0, piece.n_rows, config.block_m):
        stop = min(start + config.block_m, piece.n_rows)
        first, end = piece.first[start:stop, None], piece.stop[start:stop, None]
        if config.fixed_tiles:
            first, end = (
                torch.cat([bound, bound[-1:].expand(config.block_m - (stop - start), 1)]) for bound in (first, end)
            )
        yield Block(start, stop, first, end)


def tiles(block: Block, config: Config) -> Iterator[Tile]:
    """The tiles from the first visible key of any row to the last. All others are empty and skipped."""
    lowest, highest = int(block.first[0]), int(block.end[-1])
    last_first, first_end = int(block.first[-1]), int(block.end[0])
    start = lowest - lowest % config.block_n if config.fixed_tiles else lowest
    for key in range(start, highest, config.block_n):
        stop = key + config.block_n if config.fixed_tiles else min(key + config.block_n, highest)
        hidden = None
        if key < last_first or stop > first_end:
            position = torch.arange(key, stop)
            hidden = (position < block.first) | (position >= block.end)
        yield Tile(slice(key, stop), hidden)


def hide(matrix: Tensor, tile: Tile, value: float) -> None:
    """Set masked elements of the matrix [N, group * rows, keys] to `value`."""
    if tile.hidden is not None:
        matrix.view(matrix.shape[0], -1, *tile.hidden.shape).masked_fill_(tile.hidden, value)


class Scores(NamedTuple):
    """Turns products of q and k into scores in log2 units. torch's exp2 takes 0.25 ns per element for any input, its
    exp up to 20 ns if it underflows (AVX-512, one thread, torch 2.13).
    """

    factor: float
    cap: float  # softcap * log2(e); 0: none

    @staticmethod
    def of(problem: Problem) -> Scores:
        """In log2 units, or in natural units for a problem with a custom score or mask."""
        unit = LOG2_E if problem.mods is None else 1.0
        factor = problem.scale / problem.softcap if problem.softcap else problem.scale * unit
        return Scores(away_from_0(factor, problem.dtype), away_from_0(problem.softcap * unit, problem.dtype))

    def write(self, s: Tensor, q: Tensor, k: Tensor) -> None:
        if self.factor:
            s.baddbmm_(q, k.transpose(1, 2), beta=0, alpha=self.factor)
        else:  # a factor of 0 in the product would drop NaN
            torch.bmm(q, k.transpose(1, 2), out=s).mul_(0.0)
        if self.cap:
            s.tanh_().mul_(self.cap)
