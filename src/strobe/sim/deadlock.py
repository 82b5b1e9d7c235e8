"""Explains a deadlock: who waits for what, who arrived there before and what they do now, each barrier's state."""

from __future__ import annotations

from collections.abc import Iterable

from .agents import Barrier, Cta, Partition
from .report import place_text

_LISTED = 12  # barriers whose state is listed


def explain(ctas: list[Cta]) -> str:
    """The text of the report. CTAs that wait alike are listed as one."""
    stuck = [(cta, p) for cta in ctas for p in cta.partitions if not p.done and p.blocked]
    waiting = [(cta, p) for cta, p in stuck if p.waits_for() != "its partitions"]
    alike: dict[tuple[str, str, str], list[int]] = {}
    for cta, p in waiting:
        alike.setdefault((p.name, p.waits_for(), place_text(p.where)), []).append(cta.index)
    lines = [
        f"{name}{_of(indices) if len(ctas) > 1 else ''} waits for {what} at {where}"
        for (name, what, where), indices in alike.items()
    ]
    lines += dict.fromkeys(line for cta, p in waiting for line in _cause(cta, p))
    lines += _states(ctas[:1])
    return "every partition waits and nothing is in flight:\n  " + "\n  ".join(lines)


def _of(indices: list[int]) -> str:
    return f" of CTA{'s' * (len(indices) > 1)} {', '.join(map(str, indices[:8]))}{', ...' * (len(indices) > 8)}"


def _cause(cta: Cta, waiting: Partition) -> Iterable[str]:
    """Who has arrived on the barrier in this phase, and who in earlier ones alone, with what those do now."""
    barrier = waiting.waits_on
    if barrier is None:
        return
    if not barrier.arrivals:
        yield f"{barrier.name}: nobody has arrived since its initialisation"
    for who, (phase, where) in barrier.arrivals.items():
        if phase < barrier.phase:
            yield f"{barrier.name}: {who} arrived last in phase {phase}, at {place_text(where[:1])}; {_now(cta, who)}"
        else:
            yield f"{barrier.name}: {who} has arrived in this phase, at {place_text(where[:1])}"


def _now(cta: Cta, who: str) -> str:
    """Where an agent is that has not arrived. A copy has an issuer, not a place of its own."""
    partition = next((p for p in cta.partitions if p.name == who), None)
    if partition is None:
        return "no such copy is in flight"
    if partition.done:
        return "it has ended"
    return f"now it waits for {partition.waits_for()}"


def _states(ctas: list[Cta]) -> Iterable[str]:
    """The state of one CTA's barriers, by their variables' names."""
    barriers: list[Barrier] = [barrier for cta in ctas for barrier in cta.barriers.values() if barrier.valid]
    shown = [f"{barrier.name} in {barrier}" for barrier in barriers[:_LISTED]]
    more = f"; and {len(barriers) - _LISTED} more" if len(barriers) > _LISTED else ""
    if shown:
        yield f"barriers of CTA {ctas[0].index}: {'; '.join(shown)}{more}"
