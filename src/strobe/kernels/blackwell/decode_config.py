"""What the Blackwell decode can run, with which tiles and splits. Imports no kernel language.

Tiles, splits and clusters are chosen as for the Hopper decode, whose choices were measured on an H200. On sm_100 an SM
has as much shared memory, and two programs fit as well.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from ...problem.decode import DecodeCall, DecodeProblem
from ...problem.problem import Problem
from ...problem.target import KIB, Target
from ..hopper.decode_config import CAPABILITY as HOPPER
from ..hopper.decode_config import DecodeConfig, DecodeTraits, HopperDecode, traits_of
from ..protocol import Forward, Plan
from ..runtime.batch_invariant import as_decode

CAPABILITIES = (100, 103)
# rows of the tallest tile of a forward with batch_invariant: 64 spilled up to 736 bytes (d128)
INVARIANT_ROWS = 32


@dataclass(frozen=True)
class BlackwellDecodeConfig(DecodeConfig):
    def __str__(self) -> str:
        return f"{super().__str__()}; has not run on a Blackwell GPU"


@dataclass(frozen=True)
class BlackwellDecodeTraits(DecodeTraits):
    @property
    def queries_as_rows(self) -> bool:
        return False

    @property
    def warps(self) -> int:
        return 4  # the fragments of mma.sync are those of wgmma for four warps, which share the rows


@dataclass(frozen=True)
class BlackwellInvariantTraits(DecodeTraits):
    """Compile-time constants of a forward with batch_invariant: those of the decode, with two stages."""

    packed: bool = False


@dataclass(frozen=True)
class BlackwellInvariantConfig:
    traits: BlackwellInvariantTraits

    def __str__(self) -> str:
        f = self.traits
        return (
            f"as a decode: block_m={f.block_m} block_n={f.block_n} stages={f.stages}, shared "
            f"{f.shared_bytes() / KIB:.0f} KiB; has not run on a Blackwell GPU"
        )


def invariant_config(problem: Problem) -> BlackwellInvariantConfig:
    traits = traits_of(as_decode(problem))
    most = INVARIANT_ROWS if max(traits.block_d, traits.block_dv) <= 128 else INVARIANT_ROWS // 2
    # the last two are unused here
    traits = replace(traits, stages=2, block_m=min(traits.block_m, most), partial_rows=0, same_strides=False)
    return BlackwellInvariantConfig(BlackwellInvariantTraits(**_values(traits), packed=problem.packed))


def _values(traits: DecodeTraits) -> dict[str, Any]:
    return {f.name: getattr(traits, f.name) for f in fields(traits) if f.init}


class BlackwellDecode(HopperDecode):
    name = "blackwell.decode"
    traits_kind = BlackwellDecodeTraits

    def why_not(self, problem: DecodeProblem, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability not in CAPABILITIES:
            return f"made for sm_{' and sm_'.join(map(str, CAPABILITIES))}; this target is {target.words}"
        # its loads, splits and merge are the Hopper decode's, and have the same limits
        return super().why_not(problem, replace(target, capability=HOPPER))

    def config(self, problem: DecodeProblem, target: Target) -> BlackwellDecodeConfig:
        chosen = super().config(problem, target)
        traits = BlackwellDecodeTraits(**_values(chosen.traits))
        return BlackwellDecodeConfig(traits, chosen.n_splits, chosen.split_size)

    def run(self, plan: Plan, call: DecodeCall, tensors: Forward, workspace: dict[str, Tensor]) -> None:
        from .launch_decode import run_decode

        run_decode(plan, call, tensors, workspace)


DECODE = BlackwellDecode()
