"""What the simulated tests of the Hopper forward and backward share: the GPU they pose as, schedules, and bands."""

from __future__ import annotations

from dataclasses import replace

import torch

from strobe import mask as masks
from strobe.target import FAKES

PROGRAMS = 2
H200 = replace(FAKES["H200"], sm_count=PROGRAMS)
DTYPES = (torch.bfloat16, torch.float16)
SCHEDULES = (("eager", 0), ("lazy", 0), ("pct", 1))
NIGHTLY = [(mode, seed) for mode in ("eager", "lazy", "random", "pct") for seed in range(1 if mode in ("eager", "lazy") else 3)]


def two_of(n: int) -> tuple[tuple[str, int], ...]:
    """The schedules of case n on each commit; the others run nightly."""
    return SCHEDULES[0], SCHEDULES[1 + n % 2]


def band(left: int | None, right: int | None):
    return lambda case, device: masks.window(left, right)


CAUSAL = band(None, 0)
