"""`context_parallel`: from processes, a scheme and a way of balancing to a `Plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidProblem, UnsupportedProblem, wrong_type
from ..problem.mask import Mask, as_int
from . import runs as run_lists
from .group import Ranks, groups_of
from .packed import documents_of, remember_offsets
from .plan import Plan, Settings, Sizes, bytes_of_heads, mask_key, read, rows_of
from .runs import Runs, size, union, without
from .visible import Visible, imbalance

SCHEMES = ("auto", "heads", "keys", "heads+keys")
BALANCES = ("auto", "contiguous", "head-tail", "tiles")
EVEN = 1.05  # max/mean up to which the simpler division of rows is taken
MOST_PLANS = 64


@dataclass(frozen=True)
class ContextParallel:
    """Processes and how they share attention. `context_parallel` makes it."""

    groups: tuple[Any, ...]  # one group, or a group that exchanges keys and one that exchanges heads
    scheme: str
    balance: str
    overlap: bool
    plans: dict[Any, Plan] = field(default_factory=dict, compare=False, repr=False)

    def plan(
        self, mask: Mask | None = None, *, seqlen: int, heads_q: int, heads_kv: int | None = None,
        head_dim: int = 128, batch: int = 1, dtype: torch.dtype = torch.bfloat16, rows: Sequence[Runs] | None = None,
    ) -> Plan:  # fmt: skip
        """Divide a sequence over the ranks. Every rank must ask for the same plan.

        Args:
            mask: the mask of the whole sequence; None is full. Its tensors are read once, which waits for their device.
            seqlen: positions of the whole sequence. Any number: ranks may hold different numbers of rows, or none.
            heads_q, heads_kv: heads of the model; under tensor parallel, of a process. heads_kv defaults to heads_q.
            head_dim, batch, dtype: for the choice of a scheme and for `explain` only.
            rows: for each rank its rows in place of a balance, as ascending intervals [start, stop) of positions.

        Returns a Plan, cached for equal arguments. Raises InvalidProblem for arguments that contradict each other and
        UnsupportedProblem for heads that do not divide over ranks.
        """
        mask = Mask() if mask is None else mask
        if not isinstance(mask, Mask):
            raise wrong_type("mask", mask, "a strobe mask or None", "make one with strobe.causal() or strobe.window()")
        heads_kv = heads_q if heads_kv is None else heads_kv
        for name, number in (("seqlen", seqlen), ("heads_q", heads_q), ("heads_kv", heads_kv)):
            if as_int(number) is None:
                raise wrong_type(name, number, "an int", "count the whole model's")
            if number < (0 if name == "seqlen" else 1):
                raise InvalidProblem(name, number, "a positive number", "count the whole model's")
        if heads_q % heads_kv:
            raise InvalidProblem("heads_kv", heads_kv, f"a divisor of heads_q = {heads_q}", "count the whole model's")
        sizes = Sizes(seqlen, heads_q, heads_kv, head_dim, head_dim, batch, dtype.itemsize)
        given = None if rows is None else self._given(rows, seqlen)
        key = sizes, mask_key(mask), given
        if key not in self.plans:
            while len(self.plans) >= MOST_PLANS:
                self.plans.pop(next(iter(self.plans)))
            self.plans[key] = self._plan(mask, sizes, given)
        return self.plans[key]

    def plan_varlen(self, cu_seqlens: Tensor, *, causal: bool = False, **sizes: Any) -> Plan:
        """The plan of packed sequences, for `attention_varlen`: `plan` of a mask of one document a sequence.

        cu_seqlens: int32 [n + 1], offsets of the whole packed tensor. `sizes`: the keywords of `plan`.
        """
        documents = documents_of(cu_seqlens, sizes["seqlen"])
        plan = self.plan(documents & Mask(right=0 if causal else None), **sizes)
        remember_offsets(plan, cu_seqlens, documents)
        return plan

    def _given(self, rows: Sequence[Runs], seqlen: int) -> tuple[Runs, ...]:
        """The rows of each rank as run lists that hold each position once."""
        found: tuple[Runs, ...] = tuple(
            tuple((int(start), int(stop)) for start, stop in runs if start < stop) for runs in rows
        )
        every = union(run for runs in found for run in runs)
        is_whole = every == union([(0, seqlen)]) and sum(map(size, found)) == seqlen
        ascending = all(before[1] <= after[0] for runs in found for before, after in pairwise(runs))
        group, *others = self.groups
        if others or len(rows) != dist.get_world_size(group):
            got = f"rows of {len(found)} ranks"
            raise InvalidProblem("rows", got, "those of each rank of one group", "leave it out")
        if not (is_whole and ascending):
            expected = f"each of {seqlen} positions on one rank, ascending"
            raise InvalidProblem("rows", "rows that overlap, are missing or descend", expected, "leave it out")
        return tuple(map(union, found))

    def _plan(self, mask: Mask, sizes: Sizes, given: tuple[Runs, ...] | None) -> Plan:
        visible = Visible.of(mask, sizes.seqlen)
        ranks, scheme, reason = self._ranks(visible, sizes, given)
        if given is not None and ranks.keys_size > 1:
            balance, groups = "given", given
        else:
            balance, groups = self._divide(visible, sizes.seqlen, ranks.keys_size)
        visible, needs, fingerprint = read(mask, sizes.seqlen, groups)
        settings = Settings(scheme, balance, self.overlap and ranks.keys_size > 1, reason)
        return Plan(
            sizes,
            settings,
            ranks.keys_size,
            ranks.heads_size,
            rows_of(groups, ranks.heads_size) if given is None else given,
            needs,
            fingerprint,
            mask,
            visible,
            ranks,
        )

    def _ranks(self, visible: Visible, sizes: Sizes, given: tuple[Runs, ...] | None) -> tuple[Ranks, str, str]:
        """The groups that exchange keys and heads, the scheme and the reason for it."""
        if len(self.groups) == 2:
            ranks = Ranks.of(*self.groups)
            _check_heads(sizes.heads_q, ranks.heads_size)
            return ranks, "heads+keys", "the mesh has two dimensions: keys, heads"
        group = self.groups[0]
        by_heads, by_keys = Ranks.of(None, group), Ranks.of(group, None)
        count = by_heads.heads_size
        if self.scheme == "keys":
            return by_keys, "keys", "asked for"
        if self.scheme == "heads":
            _check_heads(sizes.heads_q, count)
            return by_heads, "heads", "asked for"
        if sizes.heads_q % count:
            return by_keys, "keys", f"{sizes.heads_q} query heads do not divide over {count} ranks"
        rows = self._divide(visible, sizes.seqlen, count)[1] if given is None else given
        needs = [run_lists.union(keys for run in runs if (keys := visible.keys(run))) for runs in rows]
        keys = max(size(without(need, runs)) for need, runs in zip(needs, rows)) * sizes.key_bytes
        local = -(-sizes.seqlen // count)
        heads = bytes_of_heads(sizes, sizes.seqlen, local, count)
        reason = f"keys would move {keys / 2**20:.2f} MiB to a rank, heads {heads / 2**20:.2f}"
        return (by_keys, "keys", reason) if keys < heads else (by_heads, "heads", reason)

    def _divide(self, visible: Visible, seqlen: int, ranks: int) -> tuple[str, tuple[Runs, ...]]:
        """The name of a division and the rows of each rank that exchanges keys."""
        cost = visible.cost() if self.balance in ("auto", "tiles") else torch.zeros(0)
        made = {
            "contiguous": lambda: run_lists.contiguous(seqlen, ranks),
            "head-tail": lambda: run_lists.head_tail(seqlen, ranks),
            "tiles": lambda: run_lists.by_tiles(cost, ranks),
        }
        if self.balance != "auto":
            return self.balance, made[self.balance]()
        if ranks == 1:
            return "contiguous", made["contiguous"]()
        found = {name: make() for name, make in made.items()}
        uneven = {name: imbalance(cost, rows) for name, rows in found.items()}
        name = next((name for name in found if uneven[name] <= EVEN), None) or min(found, key=lambda name: uneven[name])
        return name, found[name]


def context_parallel(
    processes: Any = None, *, scheme: str = "auto", balance: str = "auto", overlap: bool = False
) -> ContextParallel:
    """Share the attention of long sequences over processes.

    >>> context_parallel(scheme="rings")
    Traceback (most recent call last):
    ...
    strobe.errors.InvalidProblem: scheme: got 'rings', expected one of auto, heads, keys, heads+keys; leave it out

    Args:
        processes: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes. A mesh of two dimensions
            (keys, heads) nests both schemes: its inner dimension exchanges heads.
        scheme: "heads" exchanges heads for rows, so that a rank has all rows of some heads. "keys" sends each rank the
            keys that its rows may see. "auto" takes the one that moves less.
        balance: how `keys` divides rows: "contiguous", "head-tail", or "tiles", by visited tiles. "auto" takes the
            first whose largest share is at most 1.05 times the mean.
        overlap: compute the part over own keys while other keys arrive, and merge the parts in float32. This pays if
            links are slow: merging reads and writes the float32 output several times.

    Returns a ContextParallel, whose `plan` makes a Plan. All processes must pass the same arguments.
    """
    for name, value, known in (("scheme", scheme, SCHEMES), ("balance", balance, BALANCES)):
        if value not in known:
            raise InvalidProblem(name, repr(value), f"one of {', '.join(known)}", "leave it out")
    groups = groups_of(processes)
    if len(groups) > 2:
        raise InvalidProblem(
            "processes", f"a mesh of {len(groups)} dimensions", "one or two", "take a part, mesh['cp']"
        )
    if (scheme == "heads+keys") != (len(groups) == 2) and scheme != "auto":
        raise InvalidProblem(
            "scheme", repr(scheme), "heads+keys exactly for a mesh of two dimensions", 'pass a mesh ("keys", "heads")'
        )
    return ContextParallel(tuple(groups), scheme, balance, overlap)


def _check_heads(heads: int, ranks: int) -> None:
    if heads % ranks:
        raise UnsupportedProblem(
            f"scheme heads: {heads} query heads do not divide over {ranks} ranks; use scheme='keys'"
        )
