"""Synchronisation through global memory: what atomics, strong loads and stores and fences hand on, by their scope.

A scope is the CTAs that an operation reaches: "cta" its own, "cluster" those of its cluster, "gpu" and "sys" all. Two
operations synchronise only if each is in the other's scope (PTX ISA, morally strong operations).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .memory import Clock, merge

if TYPE_CHECKING:
    from .agents import Cta, Partition
    from .memory import Memory

CTA, CLUSTER, GPU = range(3)
_LEVELS = dict(cta=CTA, cluster=CLUSTER, gpu=GPU, gl=GPU, sys=GPU)
_Domain = tuple[int, int]  # a level, and which CTA or cluster


def scope_of(order: str) -> tuple[str, str]:
    """The two parts of an order such as "acquire.cta". Without a scope it reaches the GPU.

    >>> scope_of("acquire.cta"), scope_of("relaxed")
    (('acquire', 'cta'), ('relaxed', 'gpu'))
    """
    semantics, _, scope = order.partition(".")
    return semantics, scope or "gpu"


def ctas_in_scope(cta: Cta, order: str) -> frozenset[int] | None:
    """The CTAs within an operation's scope, by index. None is all of them."""
    level = _LEVELS[scope_of(order)[1]]
    if level == GPU:
        return None
    return frozenset([cta.index] if level == CTA else [one.index for one in cta.cluster.ctas])


def _domains(p: Partition, level: int) -> list[_Domain]:
    """Whom an operation of this scope may synchronise with. A partition that is alone in its CTA, or a CTA alone in its
    cluster, needs no clock there.
    """
    found = [(GPU, 0)] if level == GPU else []
    if level >= CLUSTER and len(p.cta.cluster.ctas) > 1:
        found.append((CLUSTER, p.cta.cluster.ctas[0].index))
    if len(p.cta.partitions) > 1:
        found.append((CTA, p.cta.index))
    return found


class Released:
    """The clocks that were released in global memory, by address and by who may acquire them."""

    def __init__(self) -> None:
        self._clocks: dict[tuple[int, int], dict[_Domain, Clock]] = {}

    def clear(self) -> None:
        self._clocks.clear()

    def synchronise(
        self, p: Partition, memory: Memory, offsets: np.ndarray, order: str, reads: bool, writes: bool
    ) -> None:
        """A non-weak load, store or atomic at global addresses: acquires and releases clocks there.

        A relaxed access synchronises through fences (PTX ISA, release and acquire patterns). It acquires at the next
        `fence.acq_rel` and releases the clock of the last one. An atomic continues the release sequence of earlier
        releases; a store ends it.
        """
        semantics, scope = scope_of(order)
        acquires, releases = (semantics in (one, "acq_rel") for one in ("acquire", "release"))
        domains = _domains(p, _LEVELS[scope])
        for offset in np.unique(offsets).tolist():
            clocks = self._clocks.setdefault((memory.base, offset), {})
            if writes and not reads:
                clocks.clear()
            for domain in domains:
                released = clocks.setdefault(domain, {})
                if reads:
                    merge(p.vector_clock if acquires else p.observed[domain[0]], released)
                if writes:
                    merge(released, p.vector_clock if releases else p.fenced[domain[0]])
        if writes and releases:
            p.tick()

    def fence(self, p: Partition, scope: str) -> None:
        """fence.acq_rel or stronger: acquire what relaxed reads have seen. Later relaxed writes release this clock."""
        levels = range(_LEVELS[scope] + 1)
        for level in levels:
            merge(p.vector_clock, p.observed[level])
        for level in levels:
            p.fenced[level] = dict(p.vector_clock)
        p.tick()
