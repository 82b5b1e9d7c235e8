"""Custom scores and masks, and dropout, in the tiles of the CPU kernel.

A tile of scores is [N, group * rows, keys]. Programs run on it as [entries, heads, group, rows, keys], with positions
unbroadcast, so a term of the rows alone is computed once a row. Scores are in natural units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mods.dropout import kept
from ...mods.evaluate import evaluate, inside
from ...mods.mask import BoundMask, kind_by_intervals
from ...mods.program import Program
from ...problem.call import Call
from ...problem.decode import DecodeCall
from ...problem.mask import TileKind
from ...problem.mods import Mods
from ..protocol import Plan
from .pieces import Index, part, positions
from .tiles import LOG2_E, Block, Keys, Tile, wide

EMPTY = TileKind.EMPTY


class ModifiedBlock(NamedTuple):
    """The custom score and mask of a block of rows."""

    mods: Mods
    inputs: dict[str, Tensor]  # all but the score and the keys
    keys: Keys
    shape: tuple[int, int, int, int]  # entries, heads, group, rows
    dtype: torch.dtype

    @staticmethod
    def of(plan: Plan, call: Call | DecodeCall, keys: Keys, block: Block) -> ModifiedBlock | None:
        """None for a call without custom scores and masks."""
        if call.mods is None:
            return None
        chunk, piece = keys.chunk, keys.piece
        count = plan.config.block_m if plan.config.fixed_tiles else block.stop - block.start
        entries = torch.arange(chunk.entries.start, chunk.entries.stop, dtype=torch.int32)
        heads = torch.arange(chunk.heads_q.start, chunk.heads_q.stop, dtype=torch.int32).view(1, -1, chunk.group, 1, 1)
        if piece.sequence is not None:
            entries = torch.tensor([piece.sequence], dtype=torch.int32)
        inputs = {
            "b": entries.view(-1, 1, 1, 1, 1),
            "h": heads,
            "q": _at(block.index(piece), piece.origin[0], count).clamp(min=0)[:, None],  # as on GPUs: before key 0
            "diagonal": torch.tensor(piece.diagonal, dtype=torch.int32),
        }
        shape = entries.shape[0], chunk.heads.stop - chunk.heads.start, chunk.group, count
        return ModifiedBlock(call.mods, inputs, keys, shape, wide(plan.problem.dtype))

    def seen(self, tile: Tile) -> Tensor | TileKind | None:
        """The custom mask of a tile as a bool tensor that broadcasts to 5 dimensions. EMPTY: no row sees any of its
        keys. None: all rows see all keys.
        """
        if not self.mods.texts.mask:
            return None
        inputs = self._with_keys(tile)
        bound = BoundMask(Program.parse(self.mods.texts.mask), self.mods.mask_tensors, self.mods.mask_numbers)
        ends = {name: (int(value.min()), int(value.max())) for name, value in inputs.items()}
        rows, keys = (range(ends[name][0], ends[name][1] + 1) for name in ("q", "k"))
        kind = kind_by_intervals(bound, ends["b"], ends["h"], rows, keys, ends["diagonal"][0])
        if kind is not None:
            return EMPTY if kind is EMPTY else None
        (seen,) = evaluate(bound.program, inputs, bound[1:], self.dtype)
        return seen if seen.any() else EMPTY

    def change(self, s: Tensor, tile: Tile, seen: Any) -> None:
        """Modify and mask the scores of a tile in place, and convert them to log2 units."""
        if self.mods.texts.score:
            inputs = self._with_keys(tile) | {"score": self._view(s)}
            program = Program.parse(self.mods.texts.score)
            (found,) = evaluate(program, inputs, (self.mods.score_tensors, self.mods.score_numbers), self.dtype)
            self._view(s).copy_(found)
        s.mul_(LOG2_E)
        if seen is not None:
            self._view(s).masked_fill_(~seen, -torch.inf)

    def differentiate(self, ds: Tensor, raw: Tensor, tile: Tile, seen: Any) -> Tensor:
        """The gradient of the scores before the modification, from that after it. Adds to captured tensors' gradients.

        Elements that a row does not see have gradient 0, whatever the function gives there.
        """
        hidden = tile.hidden
        if seen is not None:
            hidden = ~seen if hidden is None else hidden | ~seen
            self._view(ds).masked_fill_(~seen, 0.0)
        if not self.mods.texts.gradient:
            return ds
        program = Program.parse(self.mods.texts.gradient)
        inputs = self._with_keys(tile) | {"score": self._view(raw), "grad": self._view(ds)}
        found, *rest = evaluate(program, inputs, (self.mods.score_tensors, self.mods.score_numbers), self.dtype)
        self._scatter(program, rest, hidden, ds.shape[-1])
        found = found.expand(*self.shape, ds.shape[-1])
        if hidden is not None:
            found = found.masked_fill(hidden, 0.0)
        return found.reshape(ds.shape).clone() if hidden is None else found.reshape(ds.shape)

    def drop(self, weights: Tensor, tile: Tile) -> Tensor:
        """Weights, or their gradient, with 0 where dropout drops them and times 1 / (1 - p) elsewhere."""
        if self.mods.dropout_seed is None:
            return weights
        inputs, p = self._with_keys(tile), self.mods.dropout_p
        places = [inputs[name] for name in ("b", "h", "q", "k")]
        seed, *offsets = self.mods.dropout_seed
        for n, offset in enumerate(offsets, 1):
            places[n] = places[n] + offset
        found = kept(seed, p, *places).expand(*self.shape, weights.shape[-1])
        return torch.where(found, self._view(weights) * (1.0 / (1.0 - p)), 0.0).view_as(weights)

    def _scatter(self, program: Program, rest: Sequence[Tensor], hidden: Tensor | None, n_keys: int) -> None:
        results = iter(rest)
        for scatter in program.scatters:
            value, indices = next(results), [next(results) for _ in range(scatter.ndim)]
            target = self.mods.gradients[scatter.tensor]
            if target is None:
                continue
            value = value.expand(*self.shape, n_keys)
            if hidden is not None:
                value = value.masked_fill(hidden, 0.0)
            _add_at(target, indices, value)

    def _view(self, s: Tensor) -> Tensor:
        return s.view(*self.shape, s.shape[-1])

    def _with_keys(self, tile: Tile) -> dict[str, Tensor]:
        piece, count = self.keys.piece, tile.keys.stop - tile.keys.start
        at = part(piece.keys, tile.keys)
        if piece.key_positions is not None:
            at = piece.key_positions[at]
        return self.inputs | {"k": _at(at, piece.origin[1], count)}


def _at(index: Index, origin: int, count: int) -> Tensor:
    """int32 positions in the sequence. With fixed tiles, the last is repeated up to `count`."""
    found = (positions(index) - origin).to(torch.int32)
    missing = count - found.shape[0]
    return torch.cat([found, found[-1:].expand(missing)]) if missing else found


def _add_at(target: Tensor, indices: Sequence[Tensor], value: Tensor) -> None:
    """target[indices] += value. First sums over the dimensions that no index depends on, so that a gradient per head is
    one sum and a gradient per row a sum over keys. The order of additions is fixed.
    """
    if not indices:
        target += value.sum()
        return
    indices = [index.view((1,) * (value.dim() - index.dim()) + tuple(index.shape)) for index in indices]
    summed = [dim for dim in range(value.dim()) if all(index.shape[dim] == 1 for index in indices)]
    value = value.sum(summed, keepdim=True) if summed else value
    flat = torch.zeros((), dtype=torch.int64)
    for index, size, stride in zip(indices, target.shape, target.stride()):
        flat = flat + inside(index, size) * stride
    # index_add_ of one dimension is sequential on CPUs
    target.view(-1).index_add_(0, flat.expand(value.shape).flatten(), value.flatten())
