"""Composable mask objects: which keys each query row may see.

Every mask is a band with at most three refinements. With d = i + S_k - S_q, the column on row i's diagonal
(bottom-right aligned), row i sees key j iff

    d - left <= j <= d + right          window; causal is right = 0
    and (j < prefix or j <= d)          prefix_causal
    and j < key_lengths[b]              key_lengths
    and ids_q[b, i] == ids_k[b, j] >= 0 documents

The first three lines define one interval of keys per row, and neither bound of the interval decreases from one row to
the next. Tile skipping relies on that alone. The *structure* of a mask says which bounds exist: it is hashable, part of
the Problem, and a constant of the compiled kernel. The bounds themselves are kernel arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from numbers import Integral
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import InvalidProblem, describe, wrong_type
from .torch_state import is_distributed

MOST_KEYS = 2**31 - 1  # the largest int32
NO_BOUND = -1  # an absent left or right bound in the flat encoding of a call


class TileKind(Enum):
    EMPTY = "empty"  # no row of the tile sees any of its keys: the tile is skipped
    FULL = "full"  # every row sees every key: no mask is computed
    PARTIAL = "partial"


class MaskStructure(NamedTuple):
    """The hashable half of a mask: which bounds it has."""

    left: bool = False
    right: bool = False
    prefix: bool = False
    key_lengths: bool = False
    documents: bool = False

    def __str__(self) -> str:
        return ", ".join(name for name, present in zip(self._fields, self) if present) or "full"


class Tile(NamedTuple):
    """Rows [m_start, m_stop) and keys [n_start, n_stop) of batch entry `batch_index`."""

    m_start: int
    m_stop: int
    n_start: int
    n_stop: int
    batch_index: int = 0


@dataclass(frozen=True, eq=False)
class Documents:
    """Document ids int32 [B, S], and for each position the end of its run and the matching positions of the other side.

    spans is int32 [B, S, 3] = (run_end, first, last + 1). It is computed on the ids' device without synchronisation.
    """

    ids_q: Tensor
    ids_k: Tensor
    spans_q: Tensor
    spans_k: Tensor

    @staticmethod
    def of(ids_q: Tensor, ids_k: Tensor) -> Documents:
        if is_distributed(ids_q) or is_distributed(ids_k):
            return _of_shards(ids_q, ids_k)
        return Documents(ids_q, ids_k, _spans(ids_q, ids_k), _spans(ids_k, ids_q))


GENERAL: dict[str, Callable[[Mask], Any]] = {}  # "mask": a mask as a mask function; mods.mask puts it here
_COUNT = (int, torch.SymInt)
_FIELDS = dict(left=_COUNT, right=_COUNT, prefix=(*_COUNT, Tensor), key_lengths=(Tensor,), documents=(Documents,))
_MAKERS = {
    "left": "window",
    "right": "window",
    "prefix": "prefix_causal",
    "key_lengths": "key_lengths",
    "documents": "documents",
}


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask, created by `causal`, `window`, `prefix_causal`, `documents` or `key_lengths`, and combined by `&`.

    >>> import strobe
    >>> (strobe.causal() & strobe.window(1, 0)).dense(4, 4)[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """

    left: int | None = None
    right: int | None = None
    prefix: int | Tensor | None = None
    key_lengths: Tensor | None = None
    documents: Documents | None = None

    def __post_init__(self) -> None:
        for name, kinds in _FIELDS.items():  # instead of vars(self), which torch 2.11 cannot trace
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, kinds):
                raise wrong_type(
                    f"mask {name}",
                    value,
                    " or ".join(kind.__name__ for kind in kinds),
                    f"make it with strobe.{_MAKERS[name]}",
                )
            if isinstance(value, int) and value < 0:
                raise InvalidProblem(
                    f"mask {name}", value, "a number of keys >= 0, or None", f"make it with strobe.{_MAKERS[name]}"
                )

    @property
    def structure(self) -> MaskStructure:
        return MaskStructure(*(getattr(self, name) is not None for name in MaskStructure._fields))

    def __bool__(self) -> bool:
        said = (
            "a test whether it is true",
            "& between masks, or `is None`",
            "write strobe.causal() & strobe.documents(ids), not and",
        )
        raise TypeError(describe("mask", *said))

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise wrong_type("mask", other, "a strobe mask", "join masks made by strobe.causal(), strobe.window(), ...")
        if self.documents is not None and other.documents is not None:
            raise InvalidProblem(
                "mask",
                "documents combined with documents",
                "at most one documents() in a mask",
                "give each pair of ids one new id",
            )
        combined = Mask(
            _least(self.left, other.left),
            _least(self.right, other.right),
            _least(self.prefix, other.prefix, "prefix"),
            _least(self.key_lengths, other.key_lengths, "key_lengths"),
            self.documents or other.documents,
        )
        first, *others = combined._batches or [0]
        if any(batch != first for batch in others):  # a set would specialize a compiled graph to its first batch size
            got = f"parts for batches of {' and '.join(map(str, sorted({first, *others})))}"
            raise InvalidProblem(
                "mask", got, "parts for one batch", "build prefixes, key lengths and ids for the same batch"
            )
        return combined

    def __or__(self, other: Mask) -> Mask:
        """A row sees a key if either mask admits it. Like `~`, it gives a mask function (`strobe.mask_mod`)."""
        return GENERAL["mask"](self) | other

    def __invert__(self) -> Mask:
        return ~GENERAL["mask"](self)

    @property
    def _batches(self) -> list[int]:
        """The batch size of each tensor in the mask."""
        ids = None if self.documents is None else self.documents.ids_q
        return [part.shape[0] for part in (self.prefix, self.key_lengths, ids) if isinstance(part, Tensor)]

    def simplified(self) -> Mask:
        """The same mask without redundant parts: a prefix has no effect beside a causal bound."""
        return replace(self, prefix=None) if self.right == 0 and self.prefix is not None else self

    def dense(self, seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu") -> Tensor:
        """The mask as bool [B, S_q, S_k], where B is 1 if all batch entries are equal. The oracle uses this form."""
        for side, length in (("q", seqlen_q), ("k", seqlen_k)):
            if as_int(length) is None:
                raise wrong_type(f"seqlen_{side}", length, "an int", "count the positions")
            if length < 0:
                raise InvalidProblem(f"seqlen_{side}", length, "a number >= 0", "count the positions")
            ids = None if self.documents is None else getattr(self.documents, f"ids_{side}")
            if ids is not None and ids.shape[1] != length:
                raise InvalidProblem(
                    f"seqlen_{side}",
                    length,
                    f"the {ids.shape[1]} positions of ids_{side}",
                    "pass the sizes of the mask",
                )
        device = device_here(device)
        row = torch.arange(seqlen_q, device=device)[:, None]
        key = torch.arange(seqlen_k, device=device)[None, :]
        return self.admits(row, key, seqlen_k - seqlen_q)

    def admits(self, row: Tensor, key: Tensor, diagonal: int, batch: slice = slice(None)) -> Tensor:
        """bool [B or 1, M, N] for rows [M, 1] and keys [1, N] of the batch entries `batch`. `diagonal` is S_k - S_q."""
        d = row + diagonal
        seen = torch.ones_like(row - key, dtype=torch.bool)[None]
        if self.left is not None:
            seen = seen & (key >= d - self.left)
        if self.right is not None:
            seen = seen & (key <= d + self.right)
        if self.prefix is not None:
            prefix = self.prefix[batch, None, None] if isinstance(self.prefix, Tensor) else self.prefix
            seen = seen & ((key < prefix) | (key <= d))
        if self.key_lengths is not None:
            seen = seen & (key < self.key_lengths[batch, None, None])
        if self.documents is not None:
            ids_q, ids_k = self.documents.ids_q[batch, row[:, 0], None], self.documents.ids_k[batch, None, key[0]]
            seen = seen & (ids_q == ids_k) & (ids_q >= 0)
        return seen

    def interval(self, row: int, seqlen_q: int, seqlen_k: int, batch_index: int = 0) -> tuple[int, int]:
        """Keys [first, stop) that `row` may see, ignoring documents. Neither bound decreases with `row`."""
        d = row + seqlen_k - seqlen_q
        first = 0 if self.left is None else max(0, d - self.left)
        stop = seqlen_k if self.right is None else min(seqlen_k, d + self.right + 1)
        if self.prefix is not None:
            stop = min(stop, max(_at(self.prefix, batch_index), d + 1))
        if self.key_lengths is not None:
            stop = min(stop, _at(self.key_lengths, batch_index))
        return first, stop

    def tile_kind(self, tile: Tile, seqlen_q: int, seqlen_k: int) -> TileKind:
        """EMPTY, FULL or PARTIAL, consistent with `dense`. It reads tensors, so it is for hosts and tests."""
        m_start, m_stop, n_start, n_stop, b = tile
        ids = None if self.documents is None else self.documents.ids_q
        entries = [len(t) for t in (self.prefix, self.key_lengths, ids) if isinstance(t, Tensor)]
        if b < 0 or any(b >= n for n in entries):
            raise InvalidProblem(
                "tile batch entry",
                b,
                f"one of the mask's {min(entries)}" if entries else "a number >= 0",
                "count them from 0",
            )
        m_stop, n_stop = min(m_stop, seqlen_q), min(n_stop, seqlen_k)
        if m_start >= m_stop or n_start >= n_stop:
            return TileKind.EMPTY
        kind = self._band_kind(Tile(m_start, m_stop, n_start, n_stop, b), seqlen_q, seqlen_k)
        if self.documents is None or kind is TileKind.EMPTY:
            return kind
        row = torch.arange(m_start, m_stop, device=self.documents.ids_q.device)[:, None]
        key = torch.arange(n_start, n_stop, device=self.documents.ids_q.device)[None, :]
        seen = self.admits(row, key, seqlen_k - seqlen_q, slice(b, b + 1))
        return TileKind.FULL if seen.all() else TileKind.PARTIAL if seen.any() else TileKind.EMPTY

    def _band_kind(self, tile: Tile, seqlen_q: int, seqlen_k: int) -> TileKind:
        m_start, m_stop, n_start, n_stop, b = tile
        last_first, _ = self.interval(m_stop - 1, seqlen_q, seqlen_k, b)
        _, first_stop = self.interval(m_start, seqlen_q, seqlen_k, b)
        if last_first <= n_start and first_stop >= n_stop:
            return TileKind.FULL
        # among the rows that reach the tile's first key, the topmost has the lowest `first`, so it decides
        low, high = m_start, m_stop
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if self.interval(middle, seqlen_q, seqlen_k, b)[1] > n_start else (middle + 1, high)
            )
        if low == m_stop:
            return TileKind.EMPTY
        first, stop = self.interval(low, seqlen_q, seqlen_k, b)
        return TileKind.PARTIAL if max(first, n_start) < min(stop, n_stop) else TileKind.EMPTY


def full() -> Mask:
    """Every row sees every key.

    >>> full().structure == MaskStructure()
    True
    """
    return Mask()


def causal() -> Mask:
    """Row i sees key j iff j <= i + S_k - S_q (bottom-right aligned).

    >>> causal().dense(2, 5)[0].sum(1).tolist(), causal().dense(5, 2)[0].sum(1).tolist()
    ([4, 5], [0, 0, 0, 1, 2])
    """
    return Mask(right=0)


def window(left: int | None, right: int | None) -> Mask:
    """Row i sees keys i + S_k - S_q - left to i + S_k - S_q + right, inclusive. None or a negative number is unbounded.

    >>> window(0, 0).dense(3, 3)[0].int().tolist()
    [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    return Mask(_bound("window left", left), _bound("window right", right))


def prefix_causal(n: int | Tensor) -> Mask:
    """Every row sees the first n keys, and later keys causally. n is an int or int32 [B].

    >>> prefix_causal(2).dense(3, 3)[0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    if isinstance(n, Tensor):
        return Mask(prefix=_int32("prefix_causal n", n, 1))
    length = as_int(n)
    if length is None:
        raise wrong_type(
            "prefix_causal n", n, "an int or an int32 tensor [B]", "give the number of keys every row sees"
        )
    if length < 0:
        raise InvalidProblem("prefix_causal n", n, "a number of keys >= 0", "use strobe.causal() for no prefix")
    return Mask(prefix=length)


def documents(ids_q: Tensor, ids_k: Tensor | None = None) -> Mask:
    """A row sees the keys of its own document. ids are int32 [B, S]; -1 is padding, which neither sees nor is seen.

    The ids are read now: writing to them later does not change the mask. A CUDA graph that is replayed with other ids
    must create the mask inside the graph.

    >>> documents(torch.tensor([[0, 0, 1, -1]], dtype=torch.int32)).dense(4, 4)[0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    ids_q = _integers("documents ids_q", ids_q, 2)
    ids_k = ids_q if ids_k is None else _integers("documents ids_k", ids_k, 2)
    if ids_q.shape[0] != ids_k.shape[0]:
        raise InvalidProblem(
            "documents ids_k", f"batch {ids_k.shape[0]}", f"ids_q's batch {ids_q.shape[0]}", "give both for one batch"
        )
    if ids_q.device != ids_k.device:
        raise InvalidProblem(
            "documents ids_k", ids_k.device, f"ids_q's device {ids_q.device}", "move both to one device"
        )
    return Mask(documents=Documents.of(*_own_ids(ids_q, ids_k)))


def key_lengths(lengths: Tensor) -> Mask:
    """Keys from lengths[b] on are masked. lengths are int32 [B].

    >>> key_lengths(torch.tensor([2, 0], dtype=torch.int32)).dense(1, 3).int().tolist()
    [[[1, 1, 0]], [[0, 0, 0]]]
    """
    return Mask(key_lengths=_int32("key_lengths", lengths, 1))


def device_here(device: torch.device | str) -> torch.device:
    """A device of this machine with its index. Raises InvalidProblem if there is no such device."""
    try:
        return torch.empty(0, device=device).device
    except (
        RuntimeError,
        TypeError,
        AssertionError,
    ) as cause:  # a CPU build of torch raises AssertionError for "cuda"
        raise InvalidProblem(
            "device", repr(device), "a device of this machine", 'name one, such as "cpu" or "cuda:0"'
        ) from cause


def as_int(number: object) -> int | None:
    """An integer as int (a SymInt unchanged), or None for any other value, including bool.

    >>> as_int(3), as_int(True), as_int(3.0)
    (3, None, None)
    """
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt, Integral)):
        return None
    return cast(int, number) if isinstance(number, (int, torch.SymInt)) else int(number)


def _bound(side: str, bound: int | None) -> int | None:
    number = as_int(bound)
    if number is None and bound is not None:
        raise wrong_type(side, bound, "an int or None", "count keys on either side of the diagonal, None for no bound")
    return None if number is None or number < 0 else number


def check_strided(argument: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise InvalidProblem(argument, tensor.layout, "a strided (dense) tensor", "convert it with .to_dense()")


def as_int32(tensor: Tensor) -> Tensor:
    """An int64 tensor as int32, the dtype that kernels read; other dtypes are unchanged.

    >>> as_int32(torch.tensor([3, 2**40])).tolist()
    [3, 2147483647]

    Values beyond int32 are clamped, and kernels report them as out of range.
    """
    return tensor.clamp(-(2**31), 2**31 - 1).to(torch.int32) if tensor.dtype == torch.int64 else tensor


def _own_ids(ids_q: Tensor, ids_k: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of ids in int32. An int64 id may lie beyond int32, so it becomes its rank among those of both sides."""
    both = [ids_q] if ids_k is ids_q else [ids_q, ids_k]
    if all(ids.dtype == torch.int32 for ids in both) or any(map(is_distributed, both)):
        own = [as_int32(ids).clone(memory_format=torch.contiguous_format) for ids in both]
    else:
        ordered = torch.cat([ids.long() for ids in both], 1).sort(1).values
        ranks = [torch.searchsorted(ordered, ids.long().contiguous()) for ids in both]
        own = [rank.to(torch.int32).masked_fill(ids < 0, -1) for rank, ids in zip(ranks, both)]
    return own[0], own[-1]


def _int32(argument: str, tensor: Tensor, rank: int) -> Tensor:
    return as_int32(_integers(argument, tensor, rank))


def _integers(argument: str, tensor: Tensor, rank: int) -> Tensor:
    shape = "[B]" if rank == 1 else "[B, S]"
    if not isinstance(tensor, Tensor):
        raise wrong_type(
            argument, tensor, f"an int32 tensor {shape}", "wrap it in torch.tensor(..., dtype=torch.int32)"
        )
    check_strided(argument, tensor)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise InvalidProblem(argument, tensor.dtype, "torch.int32", "convert it with .to(torch.int32)")
    if tensor.dim() != rank:
        raise InvalidProblem(argument, f"shape {list(tensor.shape)}", shape, f"give {rank} dimension{'s' * (rank > 1)}")
    return tensor


def _least(a: int | Tensor | None, b: int | Tensor | None, name: str = "") -> Any:
    """The tighter of two upper bounds, each an int, a tensor or None."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape != b.shape or a.device != b.device):
        got, expected = (f"{list(one.shape)} on {one.device}" for one in (b, a))
        raise InvalidProblem(
            f"mask {name}", got, f"{expected}, like the other mask", "give both for the same batch entries"
        )
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=min(b, MOST_KEYS))
    return b.clamp(max=min(a, MOST_KEYS)) if isinstance(b, Tensor) else min(a, b)


def _at(value: int | Tensor, batch_index: int) -> int:
    return int(value[batch_index]) if isinstance(value, Tensor) else value


def _of_shards(ids_q: Any, ids_k: Any) -> Documents:
    """Documents of DTensors: each process computes the spans of its own batch entries."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for name, ids in (("ids_q", ids_q), ("ids_k", ids_k)):
        if not isinstance(ids, DTensor):
            raise wrong_type(
                f"documents {name}", ids, "a DTensor, as the other side's ids are", "give it to distribute_tensor"
            )
        if any(placement not in (Replicate(), Shard(0)) for placement in ids.placements):
            remedy = "redistribute them: which positions belong together is found on each process"
            raise InvalidProblem(f"documents {name}", f"placements {ids.placements}", "Replicate() or Shard(0)", remedy)
    mesh, placements = ids_q.device_mesh, ids_q.placements
    own = Documents.of(ids_q.to_local(), ids_k.redistribute(mesh, placements).to_local())
    whole = lambda spans, ids: DTensor.from_local(
        spans, mesh, placements, shape=torch.Size((*ids.shape, 3)), stride=(3 * ids.shape[1], 3, 1)
    )
    return Documents(ids_q, ids_k, whole(own.spans_q, ids_q), whole(own.spans_k, ids_k))


def _spans(ids: Tensor, other: Tensor) -> Tensor:
    batch, length = ids.shape
    if length == 0 or other.shape[1] == 0:
        nothing = torch.zeros(batch, length, 3, dtype=torch.int32, device=ids.device)
        nothing[:, :, 0] = length
        return nothing
    position = torch.arange(1, length + 1, device=ids.device).expand(batch, length)
    ends = torch.where(ids != torch.cat([ids[:, 1:], ids[:, -1:] + 1], 1), position, length)
    run_end = ends.flip(1).cummin(1).values.flip(1)
    ordered, where = other.sort(dim=1, stable=True)
    begin, end = torch.searchsorted(ordered, ids), torch.searchsorted(ordered, ids, right=True)
    alone = (begin == end) | (ids < 0)
    first = where.gather(1, begin.clamp(max=other.shape[1] - 1)).masked_fill(alone, 0)
    stop = (where.gather(1, (end - 1).clamp(min=0)) + 1).masked_fill(alone, 0)
    return torch.stack([run_end, first, stop], 2).to(torch.int32)
