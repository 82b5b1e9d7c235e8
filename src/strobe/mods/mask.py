"""`MaskMod`: a mask with a Python function among its parts, and masks combined by | and ~."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from ..problem.call import FARTHEST
from ..problem.foreign_arguments import no_mask
from ..problem.mask import GENERAL, MOST_KEYS, Documents, Mask, Tile, TileKind
from . import extents
from .cache import TRACES
from .compiled import bind_compiled
from .evaluate import evaluate
from .intervals import ALWAYS, NEVER, Interval, bounds
from .program import BOOL, INT, Builder, Captured, Program, combined, inverted, kind_of
from .score import _checked, refuse_options
from .trace import MASK_INPUTS
from .triton_functions import checked_captures, expanded, is_triton_function, mask_program, split_captures

MOST_ELEMENTS = 1 << 22  # of a mask that is evaluated at once


class BoundMask(NamedTuple):
    """A mask's program with the tensors and numbers of one call."""

    program: Program
    tensors: tuple[Tensor, ...] = ()
    numbers: tuple[float, ...] = ()

    @property
    def text(self) -> str:
        return self.program.text


class BlockLists(NamedTuple):
    """Which blocks of keys each block of queries visits, in FlexAttention's form. Full blocks need no mask."""

    kv_num_blocks: Tensor  # int32 [B, H, M]
    kv_indices: Tensor  # int32 [B, H, M, N]; the first kv_num_blocks count
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    block_size: tuple[int, int]  # queries, keys


# ---------------------------------------------------------------- parts of a mask


class _Function(NamedTuple):
    function: Callable
    held: BoundMask | None = None  # when the mask was made: torch.compile takes it as it is

    def bind(self) -> BoundMask:
        if torch.compiler.is_compiling() and self.held is not None:
            return self.held
        if torch.compiler.is_dynamo_compiling():
            return _compiled(self.function)
        found = TRACES.bind(self.function, MASK_INPUTS)
        return BoundMask(found.trace.program, found.tensors, found.numbers)


def _compiled(function: Callable) -> BoundMask:
    bound = bind_compiled(function, False, is_score=False)
    return BoundMask(Program.parse(bound.text), bound.tensors, bound.numbers)


class _Bound(NamedTuple):
    """A part without a function: a built-in mask or a table of blocks."""

    bound: BoundMask
    batch: int | None = None  # of the tensors of a built-in mask
    axes: tuple[extents.Axes, ...] = ()  # of the tensors of a part that is one tensor
    documents: Documents | None = None

    def bind(self) -> BoundMask:
        return self.bound


def _built_in(mask: Mask) -> _Bound:
    return _Bound(_general(mask), next(iter(mask._batches), None), documents=mask.documents)


class _Combined(NamedTuple):
    op: str  # "and", "or"
    a: Any
    b: Any

    def bind(self) -> BoundMask:
        a, b = self.a.bind(), self.b.bind()
        return BoundMask(
            _combined_programs(self.op, a.program, b.program), a.tensors + b.tensors, a.numbers + b.numbers
        )


class _Inverse(NamedTuple):
    a: Any

    def bind(self) -> BoundMask:
        bound = self.a.bind()
        return bound._replace(program=_inverted(bound.program))


_combined_programs, _inverted = lru_cache(maxsize=256)(combined), lru_cache(maxsize=256)(inverted)
_Part = _Function | _Bound | _Combined | _Inverse


@dataclass(frozen=True, eq=False)
class MaskMod(Mask):
    """A mask with a part that is a function of positions; the other fields are those of `Mask`, and both must admit.

    >>> import strobe
    >>> even = strobe.mask_mod(lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)
    >>> (strobe.causal() & even).dense(3, 3)[0].int().tolist()
    [[1, 0, 0], [1, 0, 0], [1, 0, 1]]
    >>> (~strobe.causal() | even).dense(2, 2)[0].int().tolist()
    [[1, 1], [1, 0]]
    """

    part: Any = None

    @staticmethod
    def of(mask: Mask) -> MaskMod:
        """A built-in mask as a mask function. A MaskMod is returned as it is."""
        return mask if isinstance(mask, MaskMod) else MaskMod(part=_built_in(mask))

    @staticmethod
    def from_block_mask(block_mask: Any) -> MaskMod:
        """The mask of a torch.nn.attention.flex_attention.BlockMask: its lists of blocks and its mask_mod."""
        return MaskMod(part=_from_block_mask(block_mask))

    @property
    def only_function(self) -> Callable | None:
        """The function of a mask that is one function, perhaps within a window; None for another mask."""
        has_tensors = self.prefix is not None or self.key_lengths is not None or self.documents is not None
        return self.part.function if type(self.part) is _Function and not has_tensors else None

    @property
    def whole(self) -> Any:
        """All of the mask as one part."""
        return self._joined(self.left, self.right)

    @property
    def within_bounds(self) -> Any:
        """All of the mask but `left` and `right`, as one part; None if there is no more."""
        return self._joined(None, None)

    def _joined(self, left: int | None, right: int | None) -> Any:
        base = Mask(left, right, self.prefix, self.key_lengths, self.documents)
        if not any(base.structure):
            return self.part
        return _Combined("and", _built_in(base), self.part)

    def bind(self) -> BoundMask:
        """The function's program and what it captures now, without the built-in part of the mask."""
        return self.part.bind()

    def check(self, sizes: Mapping[str, int], is_part: bool = False) -> None:
        """Raises InvalidProblem if tensors, prefixes, lengths or documents of the mask are not of a call's sizes."""
        for part in _tensor_parts(self.part):
            extents.check("mask", part.bound.tensors, part.axes, sizes, is_part)
            if not (part.axes or is_part):
                extents.check_built_in(part.batch, part.documents, sizes)

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return super().__and__(other)  # raises
        plain = [Mask(m.left, m.right, m.prefix, m.key_lengths, m.documents) for m in (self, other)]
        base = plain[0] & plain[1]
        part = _Combined("and", self.part, other.part) if isinstance(other, MaskMod) else self.part
        return MaskMod(base.left, base.right, base.prefix, base.key_lengths, base.documents, part)

    __rand__ = __and__

    def __or__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise wrong_type("mask", other, "a strobe mask", "join masks of strobe.causal(), strobe.mask_mod(), ...")
        return MaskMod(part=_Combined("or", self.whole, MaskMod.of(other).whole))

    __ror__ = __or__

    def __invert__(self) -> Mask:
        return MaskMod(part=_Inverse(self.whole))

    def dense(
        self, seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu", batch: int | None = None,
        heads: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The mask as bool [B, S_q, S_k], or [B, H, S_q, S_k] if heads is given.

        batch and heads are needed if the function depends on them.
        """
        return torch.cat(list(self._rows((seqlen_q, seqlen_k), (batch, heads), device)), -2)

    def tile_kind(self, tile: Tile, seqlen_q: int, seqlen_k: int, head: int = 0) -> TileKind:
        """EMPTY, FULL or PARTIAL for one head. Elements are evaluated only if interval arithmetic cannot decide."""
        bound = _evaluable(self.whole.bind())
        m_start, m_stop, n_start, n_stop, b = tile
        rows, keys = range(m_start, min(m_stop, seqlen_q)), range(n_start, min(n_stop, seqlen_k))
        if not rows or not keys:
            return TileKind.EMPTY
        kind = kind_by_intervals(bound, (b, b), (head, head), rows, keys, seqlen_k - seqlen_q)
        if kind is not None:
            return kind
        scalar = lambda value: torch.tensor(value, dtype=torch.int32)
        seen = evaluate(
            bound.program,
            {
                "b": scalar(b), "h": scalar(head), "diagonal": scalar(seqlen_k - seqlen_q),
                "q": torch.arange(rows.start, rows.stop, dtype=torch.int32)[:, None],
                "k": torch.arange(keys.start, keys.stop, dtype=torch.int32)[None, :],
            },
            ([t.cpu() for t in bound.tensors], bound.numbers),
        )[0]  # fmt: skip
        return TileKind.FULL if seen.all() else TileKind.PARTIAL if seen.any() else TileKind.EMPTY

    def block_lists(
        self,
        seqlen_q: int,
        seqlen_k: int,
        device: torch.device | str = "cpu",
        sizes: tuple[int | None, int | None] = (None, None),
        block_size: tuple[int, int] = (128, 128),
    ) -> BlockLists:
        """The blocks of keys that each block of queries visits. sizes: (batch, heads), if the function depends on them.

        >>> import strobe
        >>> lists = strobe.mask_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).block_lists(256, 256)
        >>> lists.kv_num_blocks[0, 0].tolist(), lists.full_kv_num_blocks[0, 0].tolist()
        ([1, 1], [0, 1])
        """
        block_q, block_k = block_size
        partial, full = [], []
        for seen in self._rows((seqlen_q, seqlen_k), sizes, device, block_q):
            seen = seen if seen.dim() == 4 else seen[:, None]
            pad = -seqlen_k % block_k
            every = torch.nn.functional.pad(seen, (0, pad), value=True).unflatten(-1, (-1, block_k)).all(-1).all(-2)
            some = torch.nn.functional.pad(seen, (0, pad), value=False).unflatten(-1, (-1, block_k)).any(-1).any(-2)
            partial.append(some & ~every)
            full.append(every)
        found: list[Tensor] = []
        for blocks in (torch.stack(partial, 2), torch.stack(full, 2)):
            found.append(blocks.sum(-1, dtype=torch.int32))
            found.append(blocks.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices.to(torch.int32))
        return BlockLists(found[0], found[1], found[2], found[3], block_size)

    def _rows(
        self, lengths: tuple[int, int], sizes: tuple[int | None, int | None], device: torch.device | str,
        block: int | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """bool [B, (H,) rows, S_k] for each block of rows."""
        bound = _evaluable(self.whole.bind())
        (seqlen_q, seqlen_k), (batch, heads) = lengths, sizes
        for name, size, what in (("b", batch, "batch"), ("h", heads, "heads")):
            if size is None and bound.program.reads(name) and not (name == "b" and _one_batch(self)):
                raise InvalidProblem(what, None, "a number, since the mask's function reads it", f"pass {what}=")
        count, positions = _one_batch(self) or batch or 1, lambda n: torch.arange(n, dtype=torch.int32, device=device)
        if block is None:
            block = max(1, MOST_ELEMENTS // max(1, count * (heads or 1) * seqlen_k))
        tensors = [tensor.to(device) for tensor in bound.tensors]
        for start in range(0, max(1, seqlen_q), block):
            stop = min(start + block, seqlen_q)
            inputs = {
                "b": positions(count)[:, None, None, None],
                "h": positions(heads or 1)[:, None, None],
                "q": torch.arange(start, stop, dtype=torch.int32, device=device)[:, None],
                "k": positions(seqlen_k),
                "diagonal": torch.tensor(seqlen_k - seqlen_q, dtype=torch.int32, device=device),
            }
            seen = evaluate(bound.program, inputs, (tensors, bound.numbers))[0]
            seen = seen.expand(count, heads or 1, stop - start, seqlen_k)
            yield seen if heads else seen[:, 0]


def kind_by_intervals(
    bound: BoundMask, b: tuple[int, int], h: tuple[int, int], rows: range, keys: range, diagonal: int
) -> TileKind | None:
    """The kind of a tile if interval arithmetic decides it. b, h: the first and last entry and head."""
    inputs = {
        "b": Interval(*b),
        "h": Interval(*h),
        "q": Interval(rows[0], rows[-1]),
        "k": Interval(keys[0], keys[-1]),
        "diagonal": Interval(diagonal, diagonal),
    }
    (found,) = bounds(bound.program, inputs, bound.numbers)
    return TileKind.FULL if found == ALWAYS else TileKind.EMPTY if found == NEVER else None


def mask_mod(
    function: Callable | Any, *, captures: Sequence[Tensor | int | float] = (), reference: Callable | None = None
) -> MaskMod:
    """A function of positions, (b, h, q_idx, kv_idx) -> bool, as a mask. True: the query sees the key.

    >>> import strobe
    >>> q = torch.randn(1, 6, 2, 16)
    >>> near = strobe.mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= 2 + h)
    >>> strobe.attention(q, q, q, mask=strobe.causal() & near).shape
    torch.Size([1, 6, 2, 16])

    The mask combines with others by &, | and ~. b is the batch entry (the sequence of packed tensors), h the query
    head, q_idx and kv_idx the positions in the sequence, counted from 0, all int32. The function is traced at once;
    tensors that it captures are read when attention runs. A BlockMask of torch's FlexAttention is taken, too, and a
    bool tensor [B, H_q, S_q, S_k]: any size may be 1, and leading dimensions may be left out.
    A function that is a window, a prefix, key lengths or documents runs as that mask (`strobe.explain` shows it). For
    documents on a GPU, the host checks once for each version of the ids whether every document is one run.
    Raises UnsupportedProblem for a function that has no translation, naming the operation.

    The function may also be one of `@triton.jit`. Then captures are the tensors and numbers that it gets after kv_idx,
    a tensor as its address, and reference is the same as a function of torch operations, for CPUs and for `dense`.
    """
    if is_triton_function(function):
        given = checked_captures(captures)
        return MaskMod(part=_Bound(BoundMask(mask_program(function, given, reference), *split_captures(given))))
    refuse_options(function, captures=captures, reference=reference)
    if hasattr(function, "kv_num_blocks") and hasattr(function, "mask_mod"):
        return MaskMod.from_block_mask(function)
    if isinstance(function, Tensor):
        return MaskMod(part=_from_tensor(function))
    checked = _checked(function, "mask_mod", 4)
    return MaskMod(part=_Function(checked, _Function(checked).bind()))


def _evaluable(bound: BoundMask) -> BoundMask:
    """The mask with references in place of `triton.jit` functions, so that it reads what they read."""
    return bound._replace(program=expanded(bound.program))


def _one_batch(mask: MaskMod) -> int | None:
    """The batch size of the built-in tensors of a mask, None without any."""
    return next(iter(mask._batches), None) or _batch_of(mask.part)


def _batch_of(part: Any) -> int | None:
    if isinstance(part, _Bound):
        return part.batch
    return next(filter(None, map(_batch_of, part)), None) if isinstance(part, (_Combined, _Inverse)) else None


def _tensor_parts(part: Any) -> Iterator[_Bound]:
    """The parts without a function."""
    if isinstance(part, _Bound):
        yield part
    elif isinstance(part, _Combined):
        yield from _tensor_parts(part.a)
        yield from _tensor_parts(part.b)
    elif isinstance(part, _Inverse):
        yield from _tensor_parts(part.a)


# ---------------------------------------------------------------- built-in masks as programs


def _general(mask: Mask) -> BoundMask:
    """A built-in mask as a program of b, q, k and the diagonal. Bounds are numbers, so windows share a program."""
    tensors: list[Tensor] = []
    numbers: list[float] = []
    p = Builder()

    def captured(tensor: Tensor) -> int:
        tensors.append(tensor)
        p.tensors.append(Captured(kind_of(tensor.dtype), tensor.dim()))
        return len(tensors) - 1

    def number(value: int) -> int:
        numbers.append(min(value, MOST_KEYS))
        return p.number(INT, len(numbers) - 1)

    b, q, k = p.input("b"), p.input("q"), p.input("k")
    diagonal, seen = p.binary("add", q, p.input("diagonal"), INT), p.const(True)
    for bound, sign, within in ((mask.left, "sub", "ge"), (mask.right, "add", "le")):
        if bound is not None:
            end = p.binary(sign, diagonal, number(min(bound, FARTHEST)), INT)  # does not wrap around
            seen = p.binary("and", seen, p.compare(within, k, end), BOOL)
    if mask.prefix is not None:
        prefix = p.load(captured(mask.prefix), [b]) if isinstance(mask.prefix, Tensor) else number(mask.prefix)
        either = p.binary("or", p.compare("lt", k, prefix), p.compare("le", k, diagonal), BOOL)
        seen = p.binary("and", seen, either, BOOL)
    if mask.key_lengths is not None:
        seen = p.binary("and", seen, p.compare("lt", k, p.load(captured(mask.key_lengths), [b])), BOOL)
    if mask.documents is not None:
        # loads clamp positions, so those beyond the ids, which a cache may have, read the -1 behind them
        sides = (mask.documents.ids_q, q), (mask.documents.ids_k, k)
        ids = [p.load(captured(torch.nn.functional.pad(one, (0, 1), value=-1)), [b, at]) for one, at in sides]
        same = p.binary("and", p.compare("eq", *ids), p.compare("ge", ids[0], p.const(0)), BOOL)
        seen = p.binary("and", seen, same, BOOL)
    return BoundMask(p.program([seen]), tuple(tensors), tuple(numbers))


GENERAL["mask"] = MaskMod.of


def _from_tensor(seen: Tensor) -> _Part:
    """bool [B, H_q, S_q, S_k], or its last dimensions."""
    if seen.dtype != torch.bool:
        raise InvalidProblem("mask_mod", seen.dtype, "torch.bool", "compare it, or add numbers by strobe.bias")
    if not 1 <= seen.dim() <= 4:
        got, expected = f"shape {list(seen.shape)}", "[B, H_q, S_q, S_k], or its last dimensions"
        raise InvalidProblem("mask_mod", got, expected, "reshape or slice it")
    ones = tuple([size == 1 for size in seen.shape])
    batch = seen.shape[0] if seen.dim() == 4 and seen.shape[0] > 1 else None
    return _Bound(BoundMask(_element(kind_of(seen.dtype), ones), (seen,)), batch, (extents.axes_of(seen),))


@lru_cache(maxsize=64)
def _element(kind: str, ones: tuple[bool, ...]) -> Program:
    """The element of a tensor [B, H, S_q, S_k], or of its last dimensions. ones: whether each dimension has size 1."""
    p = Builder([Captured(kind, len(ones))])
    names = ("b", "h", "q", "k")[4 - len(ones) :]
    return p.program([p.load(0, [p.const(0) if one else p.input(name) for name, one in zip(names, ones)])])


# ---------------------------------------------------------------- torch's BlockMask


def lengths_of(block_mask: Any) -> tuple[int, int] | None:
    """The queries and keys that a BlockMask is for. None: torch's mask of no effect, one block of 2^30 for any."""
    return None if min(block_mask.BLOCK_SIZE) >= 1 << 30 else tuple(block_mask.seq_lengths)


def _from_block_mask(given: Any) -> _Part:
    full = None if given.full_kv_num_blocks is None else (given.full_kv_num_blocks, given.full_kv_indices)
    inner = None if given.mask_mod is None else _Function(given.mask_mod, _Function(given.mask_mod).bind())
    widths = [indices.shape[-1] for indices in (given.kv_indices, given.full_kv_indices) if indices is not None]
    blocks = max(*widths, -(-given.seq_lengths[1] // given.BLOCK_SIZE[1]))  # the lists may be narrower than the keys
    partial = given.kv_num_blocks, given.kv_indices
    return part_of_lists(partial, full, given.BLOCK_SIZE, inner, blocks, lengths_of(given))


def part_of_lists(
    partial: tuple[Tensor, Tensor], full: tuple[Tensor, Tensor] | None, block_size: tuple[int, int], inner: Any,
    num_kv_blocks: int | None, made_for: tuple[int, int] | None = None,
) -> _Part:  # fmt: skip
    """A full block, or a partial block and `inner`, by a table of the blocks' kinds: 0 empty, 1 partial, 2 full.

    partial, full: counts [B, H, M] and numbers [B, H, M, N] of blocks. A call's rows and keys must be in the table's
    blocks, and at most made_for. Where only the device knows lengths, the table's last row and column are empty.
    """
    table = _listed(*partial, num_kv_blocks).to(torch.int8)
    if full is not None:
        table = torch.where(_listed(*full, num_kv_blocks), 2, table).to(torch.int8)
    table = torch.nn.functional.pad(table, (0, 1, 0, 1))
    p = Builder([Captured(INT, 4)])
    at = [p.const(0) if size == 1 else p.input(name) for size, name in zip(table.shape[:2], ("b", "h"))]
    blocks = [extents.Blocks(*axis) for axis in zip(("q", "k"), block_size, made_for or (None, None))]
    at += [p.binary("floordiv", p.input(axis.name), p.const(axis.size), INT) for axis in blocks]
    kind, axes = p.load(0, at), (*extents.axes_of(table)[:2], *blocks)
    listed = lambda value: _Bound(BoundMask(p.program([p.compare("eq", kind, p.const(value))]), (table,)), axes=(axes,))
    seen = listed(1) if inner is None else _Combined("and", listed(1), inner)
    return seen if full is None else _Combined("or", listed(2), seen)


def _listed(counts: Tensor, indices: Tensor, num_blocks: int | None) -> Tensor:
    """bool [B, H, M, num_blocks]: whether a block is among the first `counts` indices."""
    count = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    spare = indices.shape[-1] if num_blocks is None else num_blocks
    # indices beyond the count, and blocks that are not there (FlexAttention's pages have number -1), go to a column
    # that is cut off
    listed = torch.where(count & (indices >= 0) & (indices < spare), indices.long(), spare)
    table = listed.new_zeros((*indices.shape[:-1], spare + 1), dtype=torch.bool)
    return table.scatter(-1, listed, listed >= 0)[..., :spare]  # out of place, and no number: for torch.func.vmap


def checked_mask(mask: Mask | None) -> MaskMod | None:
    """A mask of a call over a cache, whose kernels know the bounds of `causal` and `window`; other built-in masks are
    functions of positions there.
    """
    if mask is None:
        return None
    if not isinstance(mask, Mask):
        raise no_mask(mask)
    if isinstance(mask, MaskMod):
        return mask
    other = replace(mask, left=None, right=None)
    return MaskMod(mask.left, mask.right, part=MaskMod.of(other).part if any(other.structure) else None)
