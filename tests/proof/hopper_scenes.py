"""The Hopper forward at sizes that wrap every ring and give a program several tiles: scenes whose synchronisations are taken away.

Inside `simulate` a scene returns out and lse, made by the family's own launch code for an H200 of two SMs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from strobe import mask as masks
from strobe import ops
from strobe.proof.simulate import posing
from strobe.target import FAKES
from strobe.testing import Case

H200 = replace(FAKES["H200"], sm_count=2)
CAUSAL = lambda case, device: masks.causal()


def _forward(seqlen_q: int, seqlen_k: int, head_dim: int, **options) -> tuple[Tensor, ...]:
    call = Case("scene", seqlen_q, seqlen_k, batch=1, heads=(2, 2), head_dim=head_dim, **options).build("cpu", torch.bfloat16, kernel="hopper")
    with posing(H200):
        return ops.run(call)


def forward_d128() -> tuple[Tensor, ...]:
    """Two consumers, q in registers, a buffer of its own for o; no more key blocks than stages: only the waits for q hold the next q back."""
    return _forward(384, 256, 128)


def forward_d64_causal() -> tuple[Tensor, ...]:
    """Three consumers, q in shared memory."""
    return _forward(384, 512, 64, mask=CAUSAL)


def forward_d256() -> tuple[Tensor, ...]:
    """o staged where q was."""
    return _forward(256, 192, 256)


class Scene(NamedTuple):
    """A name, the GPU it is for, what runs it, the file whose statements are mutated, and whether its sums must have an order."""

    name: str
    target: str
    run: Callable[..., tuple[Tensor, ...]]
    file: str
    ordered: bool = False


FORWARD = "../../src/strobe/kernels/hopper/forward.py"
SCENES = tuple(Scene(run.__name__, "sm_90", run, FORWARD) for run in (forward_d128, forward_d64_causal, forward_d256))
