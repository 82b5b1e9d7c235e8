"""`Plan`: which rows each rank holds, which keys it needs from whom, what that moves, and how evenly work is shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidProblem, wrong_type
from ..problem.mask import Mask
from . import runs as run_lists
from .group import Ranks
from .pieces import Pieces
from .runs import Run, Runs, cut, layers, offset, overlap, size, union, without
from .visible import Visible, imbalance

LINK, PEAK = 350e9, 700e12  # bytes/s of NVLink and FLOP/s of a forward on one H200, for `explain`
MOST_MASKS = 128  # that a plan keeps beside its own
WIDTH = 64  # characters of the picture in `explain`


NUMBERS = count(1)
PLANS: WeakValueDictionary[int, Plan] = WeakValueDictionary()  # by number: ops of compiled functions take no objects


class Sizes(NamedTuple):
    """The sizes of q, k and v of the whole sequence. The batch, head dimensions and bytes serve estimates only."""

    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int = 128
    head_dim_v: int = 128
    batch: int = 1
    itemsize: int = 2

    @property
    def key_bytes(self) -> int:
        """Bytes of k and v per position."""
        return self.batch * self.heads_kv * (self.head_dim + self.head_dim_v) * self.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of q and of the output per position."""
        return self.batch * self.heads_q * (self.head_dim + self.head_dim_v) * self.itemsize


class Settings(NamedTuple):
    """How a plan was asked for."""

    scheme: str  # "heads", "keys" or "heads+keys"
    balance: str  # "contiguous", "head-tail" or "tiles"
    own_first: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """A division of one sequence and one mask over ranks. Equal plans are equal on every rank, and hash alike.

    `ContextParallel.plan` makes it. The tensors of its mask must not be written to afterwards.
    """

    sizes: Sizes
    settings: Settings
    keys_size: int  # ranks that exchange keys
    heads_size: int  # ranks that exchange heads
    rows: tuple[Runs, ...]  # of each rank
    needs: tuple[Runs, ...]  # of each rank of a `keys` group: the keys that its rows may see
    fingerprint: str  # of the mask and the keys that each row may see
    mask: Mask = field(compare=False, repr=False)
    visible: Visible = field(compare=False, repr=False)
    ranks: Ranks = field(compare=False, repr=False)

    # What this process keeps; a plan made by `for_mask` starts without it. `masks`, the oldest first, and `agreed`, the
    # calls that ranks have compared, are the same on all ranks, which make the same calls. The others may differ.
    number: int = field(init=False, compare=False, repr=False, default_factory=lambda: next(NUMBERS))
    masks: dict[tuple, Plan] = field(init=False, compare=False, repr=False, default_factory=dict)
    agreed: set[tuple[str, ...]] = field(init=False, compare=False, repr=False, default_factory=set)
    offsets: dict[tuple, tuple[Tensor, Mask]] = field(init=False, compare=False, repr=False, default_factory=dict)
    prepared: dict[Any, Any] = field(init=False, compare=False, repr=False, default_factory=dict)  # see `keep`

    def __post_init__(self) -> None:
        PLANS[self.number] = self

    # ------------------------------------------------------------ tensors

    @cached_property
    def local_rows(self) -> int:
        """The number of rows that this rank holds."""
        return size(self.rows[self.ranks.rank])

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor of the whole sequence, along `dim`. Differentiable."""
        if tensor.shape[dim] != self.sizes.seqlen:
            raise InvalidProblem(
                "tensor", f"{tensor.shape[dim]} rows in dimension {dim}", f"the plan's {self.sizes.seqlen}", "pass dim"
            )
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in self.rows[self.ranks.rank]]
        if len(parts) == 1:
            return parts[0].contiguous()
        return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0).contiguous()

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """The position of each local row in the sequence, int64 [local_rows]: for rotary embeddings."""
        return run_lists.positions(self.rows[self.ranks.rank]).to(device)

    @torch.no_grad()
    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The tensor of the whole sequence, on every rank. All ranks must call it. Has no gradient."""
        if tensor.shape[dim] != self.local_rows:
            raise InvalidProblem(
                "tensor", f"{tensor.shape[dim]} rows in dimension {dim}", f"this rank's {self.local_rows}", "pass dim"
            )
        first = tensor.movedim(dim, 0)
        most = max(map(size, self.rows))
        padded = first.new_zeros((most, *first.shape[1:]))
        padded[: len(first)] = first
        for group in self.ranks.levels:
            parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, padded.contiguous(), group=group)
            padded = torch.cat(parts)
        whole = first.new_empty((self.sizes.seqlen, *first.shape[1:]))
        for rank, runs in enumerate(self.rows):
            begin = rank * most
            for start, stop in runs:
                whole[start:stop] = padded[begin : begin + stop - start]
                begin += stop - start
        return whole.movedim(0, dim)

    def for_mask(self, mask: Mask) -> Plan:
        """The plan of another mask over the same rows, for models whose layers have different masks. Reads the mask's
        tensors the first time. Of all masks the newest 128 are kept."""
        if not isinstance(mask, Mask):
            raise wrong_type("mask", mask, "a strobe mask", "make one with strobe.causal(), strobe.window(), ...")
        key = mask_key(mask)
        if key == mask_key(self.mask):
            return self
        if key not in self.masks:
            visible, needs, fingerprint = read(mask, self.sizes.seqlen, self.groups)
            self.masks[key] = replace(self, mask=mask, visible=visible, needs=needs, fingerprint=fingerprint)
            if len(self.masks) > MOST_MASKS:
                self._drop_oldest_mask()
        return self.masks[key]

    def _drop_oldest_mask(self) -> None:
        """And the offsets of packed sequences whose documents are in no mask that stays."""
        del self.masks[next(iter(self.masks))]
        kept = {id(plan.mask.documents) for plan in (self, *self.masks.values())}
        for key, (_, documents) in list(self.offsets.items()):
            if id(documents.documents) not in kept:
                del self.offsets[key]

    # ------------------------------------------------------------ what the schemes need

    @cached_property
    def summary(self) -> str:
        """What ranks compare: the scheme, the numbers of rows and heads, and a digest of who holds which rows."""
        s, rows = self.settings, " + ".join(str(size(runs)) for runs in self.rows)
        order = "own keys first" if s.own_first else "keys at once"
        held = sha256(repr(self.rows).encode()).hexdigest()[:8]
        heads = f"{self.sizes.heads_q} and {self.sizes.heads_kv} heads"
        return f"{s.scheme}, {s.balance}, {order}, {rows} rows ({held}), {heads}"

    @cached_property
    def groups(self) -> tuple[Runs, ...]:
        """The rows of each rank of a `keys` group: those of all ranks that exchange heads with it."""
        inner = self.heads_size
        return tuple(
            union(run for runs in self.rows[rank * inner : (rank + 1) * inner] for run in runs)
            for rank in range(self.keys_size)
        )

    @cached_property
    def held(self) -> Runs:
        """The keys that this rank holds once keys have been exchanged."""
        return union((*self.groups[self.ranks.keys_rank], *self.needs[self.ranks.keys_rank]))

    @cached_property
    def buffered(self) -> Runs:
        """The keys that this rank copies or receives into a buffer: those of pieces that need keys of other ranks."""
        received = without(self.needs[self.ranks.keys_rank], self.own_rows)
        return union((*(piece.keys for piece in self.pieces.rest), *received))

    def sent(self, source: int, target: int) -> Runs:
        """The keys that rank `source` of a `keys` group sends to rank `target`."""
        if source == target:
            return ()
        groups = self.groups
        return overlap(without(self.needs[target], groups[target]), groups[source])

    @cached_property
    def links(self) -> tuple[tuple[Runs, ...], tuple[Runs, ...]]:
        """The keys that this rank sends to each rank of its `keys` group, and those that it receives from each."""
        mine = self.ranks.keys_rank
        given = tuple(self.sent(mine, other) for other in range(self.keys_size))
        return given, tuple(self.sent(other, mine) for other in range(self.keys_size))

    @cached_property
    def links_are_single(self) -> bool:
        """Whether keys are exchanged, and no rank of a `keys` group sends two runs to another one."""
        counts = [len(self.sent(one, other)) for one in range(self.keys_size) for other in range(self.keys_size)]
        return max(counts) == 1

    @property
    def own_rows(self) -> Runs:
        """The rows of this rank's heads group: those that this rank computes, for some of the heads."""
        return self.groups[self.ranks.keys_rank]

    @cached_property
    def pieces(self) -> Pieces:
        """The calls of this rank."""
        return self._pieces[self.ranks.keys_rank]

    @cached_property
    def _pieces(self) -> tuple[Pieces, ...]:
        """The calls of each rank of a `keys` group."""
        return tuple(Pieces.of(runs, self.visible, self.mask, self.settings.own_first) for runs in self.groups)

    @cached_property
    def key_layers(self) -> tuple[tuple[tuple[Run, tuple[int, ...]], ...], ...]:
        """For each rank of a `keys` group the keys of its pieces: disjoint runs and the numbers of their pieces."""
        return tuple(layers([piece.keys for piece in pieces.all]) for pieces in self._pieces)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once. Tensors are ready on every stream."""
        if key not in self.prepared:
            made = make()
            if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()
            self.prepared[key] = made
        return self.prepared[key]

    # ------------------------------------------------------------ what it costs

    @property
    def balance(self) -> float:
        """The most tiles of a rank divided by the mean over ranks; 1.0 is even. Ranks that exchange heads share."""
        return imbalance(self.visible.cost(), self.groups)

    @property
    def bytes_received(self) -> tuple[int, ...]:
        """The bytes that each rank receives in a forward."""
        return tuple(
            bytes_of_keys(self, rank // self.heads_size) // self.heads_size
            + bytes_of_heads(self.sizes, size(self.groups[rank // self.heads_size]), size(runs), self.heads_size)
            for rank, runs in enumerate(self.rows)
        )

    @property
    def efficiency(self) -> float:
        """The estimated speed of a rank relative to one GPU, without overlap. It assumes 700 TFLOP/s and 350 GB/s.

        Forward of `keys` on four H200, causal: 0.98 estimated and 0.97 measured at 16,384 positions a GPU, and 0.96 for
        both at 8,192.
        """
        s = self.sizes
        seen = float((self.visible.stop - self.visible.first).clamp(min=0).sum())
        flops = 2 * s.batch * s.heads_q * (s.head_dim + s.head_dim_v) * seen / len(self.rows)
        compute = flops / PEAK
        if not compute:
            return 1.0
        return compute / (compute * self.balance + max(self.bytes_received) / LINK)

    def explain(self) -> str:
        """The plan as text: scheme and reason, balance, bytes, and a picture of rows and keys.

        In the picture a line is a rank and a column a part of the sequence: `#` rows that the rank holds, `.` keys that
        it receives. The numbers of a rank follow: its rows, and what it receives in a forward.
        """
        s, received = self.sizes, self.bytes_received
        lines = [
            f"S={s.seqlen} H_q={s.heads_q} H_kv={s.heads_kv}, {len(self.rows)} ranks",
            f"scheme {self.settings.scheme} ({self.keys_size} x {self.heads_size}): {self.settings.reason}",
            f"rows {self.settings.balance}, tiles max/mean {self.balance:.3f}",
            f"a forward receives at most {max(received) / 2**20:.2f} MiB a rank, {sum(received) / 2**20:.2f} in all",
            f"expected share of one GPU's speed: {self.efficiency:.2f}",
        ]
        for rank, runs in enumerate(self.rows):
            needs = without(self.needs[rank // self.heads_size], runs) if self.keys_size > 1 else ()
            mark = lambda column, needs=needs, runs=runs: self._mark(column, runs, needs)
            held = f"{size(runs)} rows, {received[rank] / 2**20:.2f} MiB"
            lines.append(f"{rank:4} |{''.join(map(mark, range(min(WIDTH, s.seqlen))))}| {held}")
        return "\n".join(lines)

    def _mark(self, column: int, runs: Runs, needs: Runs) -> str:
        columns = min(WIDTH, self.sizes.seqlen)
        part = ((column * self.sizes.seqlen // columns, (column + 1) * self.sizes.seqlen // columns),)
        return "#" if overlap(part, runs) else "." if overlap(part, needs) else " "

    def __str__(self) -> str:
        return self.explain()


def read(mask: Mask, seqlen: int, groups: tuple[Runs, ...]) -> tuple[Visible, tuple[Runs, ...], str]:
    """What a mask lets rows see, the keys that each group of rows needs, and a fingerprint of both."""
    documents = mask.documents
    if documents is not None and (documents.ids_q.shape[1] != seqlen or documents.ids_k.shape[1] != seqlen):
        got = f"{documents.ids_q.shape[1]} and {documents.ids_k.shape[1]} positions"
        raise InvalidProblem("mask documents", got, f"the plan's {seqlen} positions", "give ids of the whole sequence")
    visible = Visible.of(mask, seqlen)
    needs = tuple(union(keys for run in runs if (keys := visible.keys(run))) for runs in groups)
    text = sha256(repr((mask.structure, mask.left, mask.right)).encode())
    for tensor in (*visible, *_tensors(mask)):
        text.update(repr(tuple(tensor.shape)).encode() + tensor.cpu().contiguous().numpy().tobytes())
    return visible, needs, text.hexdigest()[:16]


def _tensors(mask: Mask) -> list[Tensor]:
    ids = () if mask.documents is None else (mask.documents.ids_q, mask.documents.ids_k)
    return [part for part in (mask.prefix, mask.key_lengths, *ids) if isinstance(part, Tensor)]


def mask_key(mask: Mask) -> tuple:
    """What tells masks apart: numbers by value, tensors by identity. A plan keeps its mask, so no id is used again."""
    parts = mask.prefix, mask.key_lengths, mask.documents
    return mask.left, mask.right, *(part if part is None or isinstance(part, int) else (id(part),) for part in parts)


def bytes_of_keys(plan: Plan, rank: int) -> int:
    """The bytes of k and v that a rank of a `keys` group receives."""
    return size(without(plan.needs[rank], plan.groups[rank])) * plan.sizes.key_bytes


def bytes_of_heads(sizes: Sizes, rows: int, local: int, ranks: int) -> int:
    """The bytes of q, k, v and the output that a rank receives, which exchanges heads of `rows` rows. Key heads are
    sent to each rank whose query heads read them."""
    if ranks == 1:
        return 0
    copies = max(1.0, ranks / sizes.heads_kv) if sizes.heads_kv else 1.0
    q_and_keys = sizes.batch * sizes.heads_q * sizes.head_dim * sizes.itemsize + sizes.key_bytes * copies
    out = sizes.batch * sizes.heads_q * sizes.head_dim_v * sizes.itemsize
    return int((rows - local) * q_and_keys / ranks + local * out * (ranks - 1) / ranks)


def rows_of(groups: tuple[Runs, ...], heads_size: int) -> tuple[Runs, ...]:
    """The rows of each rank: those of a group, in order, over the ranks that exchange heads."""
    return tuple(part for runs in groups for part in cut(runs, heads_size))


__all__ = ["Plan", "Settings", "Sizes", "bytes_of_heads", "mask_key", "offset", "read", "rows_of"]
