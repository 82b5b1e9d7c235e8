"""What the simulated tests of the Hopper forward and backward share: the GPU they pose as, schedules, and bands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from strobe.problem import mask as masks
from strobe.problem.target import FAKES
from strobe.testing import FAMILIES

PROGRAMS = 2
H200 = replace(FAKES["H200"], sm_count=PROGRAMS)
DTYPES = (torch.bfloat16, torch.float16)
SCHEDULES = (("eager", 0), ("lazy", 0), ("pct", 1))
NIGHTLY = [
    (mode, seed) for mode in ("eager", "lazy", "random", "pct") for seed in range(1 if mode in ("eager", "lazy") else 3)
]


def in_turn(n: int, family: str) -> list[tuple[torch.dtype, tuple[str, int]]]:
    """Three nightly runs (dtype, schedule) of case n with inputs of a family. Over its families a case meets every
    schedule, and over the cases every schedule meets both dtypes.
    """
    first = 3 * FAMILIES.index(family)
    return [(DTYPES[run % 2], NIGHTLY[(n + run) % len(NIGHTLY)]) for run in range(first, first + 3)]


def two_of(n: int) -> tuple[tuple[str, int], ...]:
    """The schedules of case n on each commit; the others run nightly."""
    return SCHEDULES[0], SCHEDULES[1 + n % 2]


def alternating_schedules(names: Iterable[str]) -> list:
    """Parameters `name, schedule`: each case under two kinds of schedule, one on each commit, the other nightly.
    Which of the two runs on each commit alternates from case to case.
    """
    found = []
    for n, name in enumerate(names):
        on_each_commit = two_of(n)[n // 2 % 2]
        for schedule in two_of(n):
            marks = () if schedule == on_each_commit else pytest.mark.nightly
            found.append(pytest.param(name, schedule, id=f"{name}-{schedule[0]}", marks=marks))
    return found


def band(left: int | None, right: int | None):
    return lambda case, device: masks.window(left, right)


CAUSAL = band(None, 0)
WITHOUT_BOUND = (3e38, torch.inf, -torch.inf, 0.5)  # sinks


def runs(
    lengths: tuple[int, ...],
    ids: tuple[int, ...] = (),
    lengths_k: tuple[int, ...] = (),
    ids_k: tuple[int, ...] = (),
    also=None,
):
    """Documents of so many rows each, numbered unless `ids` says whose they are; of keys the same, unless told. Every
    other batch entry has them from the last to the first. also: a mask that they are joined with.
    """

    def row(lengths, ids):
        ids = torch.tensor(ids or range(len(lengths)), dtype=torch.int32)
        return ids.repeat_interleave(torch.tensor(lengths))

    def build(case, device):
        q, k = row(lengths, ids), row(lengths_k or lengths, ids_k or ids)
        assert (len(q), len(k)) == (case.seqlen_q, case.keys)
        sides = [torch.stack([t if b % 2 == 0 else t.flip(0) for b in range(case.batch)]).to(device) for t in (q, k)]
        mask = masks.documents(sides[0]) if not lengths_k and not ids_k else masks.documents(*sides)
        return mask if also is None else mask & also(case, device)

    return build


def key_lengths(*lengths: int, also=None):
    """A mask with one key length per batch entry; `lengths` repeat if there are more entries."""

    def build(case, device):
        mask = masks.key_lengths(
            torch.tensor([lengths[b % len(lengths)] for b in range(case.batch)], dtype=torch.int32, device=device)
        )
        return mask if also is None else mask & also(case, device)

    return build


def prefix(*lengths: int, also=None):
    """A mask with one prefix length per batch entry; `lengths` repeat if there are more entries."""

    def build(case, device):
        mask = masks.prefix_causal(
            torch.tensor([lengths[b % len(lengths)] for b in range(case.batch)], dtype=torch.int32, device=device)
        )
        return mask if also is None else mask & also(case, device)

    return build
