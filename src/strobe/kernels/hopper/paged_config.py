"""What the Hopper kernels can run of packed queries over a cache: sequences of few tokens by the decode, others by the
forward. Imports no kernel language.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from ...problem.paged import PagedCall, PagedProblem
from ...problem.target import KIB, Target
from ..protocol import Buffer, Forward, Plan
from .copy_config import KeyCopy, key_copy
from .decode_config import DecodeConfig, DecodeTraits, HopperDecode
from .prefill_config import MOST_TOKENS, against_prefill, is_few, of_few, prefill_traits
from .traits import ForwardTraits

LEAST_CAPACITY = 2048  # keys of a sequence, for `runs_faster_in_forward`


@dataclass(frozen=True)
class PagedTraits(DecodeTraits):
    """Compile-time constants of the decode for packed queries."""

    ragged: bool = True  # type: ignore[misc]  # a ClassVar in DecodeTraits


@dataclass(frozen=True)
class MixedConfig:
    """The forward for sequences of more than MOST_TOKENS new tokens, and the decode for the others. Without a decode,
    the forward runs all. With a copy of 8-bit keys, another forward runs the sequences that are copied.
    """

    traits: ForwardTraits
    decode: DecodeConfig | None
    copy: KeyCopy | None = None

    @property
    def forwards(self) -> tuple[ForwardTraits, ...]:
        """Traits of each forward that is launched."""
        return (self.traits,) if self.copy is None else (self.copy.forward, self.traits)

    def __str__(self) -> str:
        t = self.traits.tuning
        heads = f" of {t.pack_gqa} heads" if t.pack_gqa > 1 else ""
        tiles = f"block_m={t.block_m}{heads} block_n={t.block_n} stages={t.stages}"
        keys = "8-bit keys converted" if self.traits.converts_keys else f"{self.traits.box_rows} keys a copy"
        boxes = f", {keys}, shared {self.traits.shared_bytes() / KIB:.0f} KiB"
        few = f"; up to {MOST_TOKENS} tokens: {self.decode}" if self.decode else ""
        copied = f"; {self.copy}" if self.copy else ""
        return tiles + boxes + copied + few


def mixed_config(problem: PagedProblem, target: Target, decode: DecodeConfig | None) -> MixedConfig:
    copy = key_copy(problem, target)
    return MixedConfig(prefill_traits(problem, target, None if copy is None else False), decode, copy)


def runs_faster_in_forward(problem: PagedProblem, decode: DecodeConfig, target: Target) -> bool:
    """Whether the tiles of a key head's rows, which all read its keys, are fewer in the forward than in the decode.
    Only for what was measured: long caches, no functions.

    Time of the decode, and of the forward (H200, 64 sequences of 8192, 16 tokens, one process):
        8 query heads a key head, d128            0.856 ms, 0.522 ms
        16 query heads a key head, d128           1.630 ms, 1.062 ms
        8 query heads a key head, 8-bit keys      1.109 ms, 0.753 ms
        4 query heads a key head, d256            0.972 ms, 0.499 ms (32 sequences)
    """
    tokens, group = problem.layout.seqlen_q, problem.group
    tiles = -(-group * tokens // decode.traits.block_m)
    if decode.n_splits > 1 or tiles == 1 or problem.mods is not None or problem.capacity < LEAST_CAPACITY:
        return False
    if against_prefill(problem, target) is not None:
        return False
    tuning = prefill_traits(problem, target).tuning
    return group // tuning.pack_gqa * -(-tokens // tuning.block_m) < tiles


class HopperPaged(HopperDecode):
    name = "hopper.paged"

    def why_not(self, problem: PagedProblem, target: Target) -> str | None:  # type: ignore[override]
        reason = super().why_not(problem, target)
        if reason is not None:
            return reason
        if problem.batch_invariant:
            return "with batch_invariant one kernel computes every mix of sequences: portable.paged"
        if True in problem.token_scales:
            return "runs no scales of keys and heads"
        if is_few(problem):
            return None
        longest = f"sequences of more than {MOST_TOKENS} new tokens, which max_seqlen_q does not rule out: "
        reason = against_prefill(problem, target)
        return reason and longest + reason

    def config(self, problem: PagedProblem, target: Target) -> DecodeConfig | MixedConfig:  # type: ignore[override]
        if not is_few(problem):
            decode = self.config(of_few(problem), target)
            # Decodes of unsplit keys are as fast in the forward, and in one launch they overlap with prefills.
            splits = problem.layout.batch > 1 and isinstance(decode, DecodeConfig) and decode.n_splits > 1
            return mixed_config(problem, target, decode if splits else None)  # type: ignore[arg-type]
        config = super().config(problem, target)
        if runs_faster_in_forward(problem, config, target):
            return mixed_config(problem, target, None)
        traits = PagedTraits(**{f.name: getattr(config.traits, f.name) for f in fields(config.traits) if f.init})
        return DecodeConfig(traits, config.n_splits, config.split_size)

    def workspace(self, problem: PagedProblem, config: DecodeConfig | MixedConfig) -> tuple[Buffer, ...]:  # type: ignore[override]
        decode = config.decode if isinstance(config, MixedConfig) else config
        copied = config.copy.buffers() if isinstance(config, MixedConfig) and config.copy else ()
        return copied + (() if decode is None else super().workspace(of_few(problem), decode))

    def run(self, plan: Plan, call: PagedCall, tensors: Forward, workspace: dict[str, Tensor]) -> None:  # type: ignore[override]
        from .launch_paged import run_few, run_mixed

        run = run_mixed if isinstance(plan.config, MixedConfig) else run_few
        run(plan, call, tensors, workspace)


PAGED = HopperPaged()
