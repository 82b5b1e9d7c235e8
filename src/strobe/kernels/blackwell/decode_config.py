"""What the Blackwell decode can run, with which tiles and splits. Imports no kernel language.

Tiles, splits and clusters are chosen as for the Hopper decode, whose choices were measured on an H200. On sm_100 an SM
has as much shared memory, and two programs fit as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ...problem.decode import DecodeCall, DecodeProblem
from ...problem.target import Target
from ..hopper.decode_config import CAPABILITY as HOPPER
from ..hopper.decode_config import DecodeConfig, HopperDecode
from ..protocol import Forward, Plan, against_mods

CAPABILITIES = (100, 103)


@dataclass(frozen=True)
class BlackwellDecodeConfig(DecodeConfig):
    def __str__(self) -> str:
        return f"{super().__str__()}; has not run on a Blackwell GPU"


class BlackwellDecode(HopperDecode):
    name = "blackwell.decode"

    def why_not(self, problem: DecodeProblem, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability not in CAPABILITIES:
            return f"made for sm_{' and sm_'.join(map(str, CAPABILITIES))}; this target is {target.words}"
        if problem.batch_invariant:
            return "batch_invariant=True: the forward here has no bits in common with a decode; the portable one has"
        if reason := against_mods(problem):
            return reason
        # its loads, splits and merge are the Hopper decode's, and have the same limits
        return super().why_not(problem, replace(target, capability=HOPPER))

    def config(self, problem: DecodeProblem, target: Target) -> BlackwellDecodeConfig:
        chosen = super().config(problem, target)
        return BlackwellDecodeConfig(chosen.traits, chosen.n_splits, chosen.split_size)

    def run(self, plan: Plan, call: DecodeCall, tensors: Forward, workspace: dict[str, Tensor]) -> None:
        from .launch_decode import run_decode

        run_decode(plan, call, tensors, workspace)


DECODE = BlackwellDecode()
