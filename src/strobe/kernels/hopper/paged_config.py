"""What the Hopper decode can run of packed queries over a cache. Imports no kernel language."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from ...problem.mask import NO_BOUND
from ...problem.paged import PagedCall, PagedProblem
from ...problem.target import Target
from ..protocol import Forward, Plan
from .decode_config import DecodeConfig, DecodeTraits, HopperDecode

MOST_TOKENS = 16  # of a sequence: those for which the decode is as fast as memory


@dataclass(frozen=True)
class PagedTraits(DecodeTraits):
    """Compile-time constants of the decode for packed queries."""

    ragged: bool = True  # type: ignore[misc]  # a ClassVar in DecodeTraits


class HopperPaged(HopperDecode):
    name = "hopper.paged"

    def why_not(self, problem: PagedProblem, target: Target) -> str | None:  # type: ignore[override]
        reason = super().why_not(problem, target)
        if reason is not None:
            return reason
        if not 0 < problem.max_seqlen_q <= MOST_TOKENS:
            promised = "nothing is" if problem.max_seqlen_q == NO_BOUND else f"{problem.max_seqlen_q} are"
            return f"made for sequences of 1 to {MOST_TOKENS} new tokens; by max_seqlen_q {promised} promised"
        if problem.batch_invariant:
            return "with batch_invariant one kernel computes every mix of sequences: portable.paged"
        if True in problem.token_scales:
            return "runs no scales of keys and heads"
        return None

    def config(self, problem: PagedProblem, target: Target) -> DecodeConfig:  # type: ignore[override]
        config = super().config(problem, target)
        traits = PagedTraits(**{f.name: getattr(config.traits, f.name) for f in fields(config.traits)})
        return DecodeConfig(traits, config.n_splits, config.split_size)

    def run(self, plan: Plan, call: PagedCall, tensors: Forward, workspace: dict[str, Tensor]) -> None:  # type: ignore[override]
        from .launch_paged import run_paged

        run_paged(plan, call, tensors, workspace)


PAGED = HopperPaged()
