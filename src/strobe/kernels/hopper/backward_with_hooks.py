"""What the backward's traits become with functions of scores and lists of blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..runtime.hook_constants import ListedBlocks
from .traits import BackwardTraits


def backward_with_hooks(
    traits: BackwardTraits,
    score_mod: Any = None,
    mask_mod: Any = None,
    score_mod_bwd: Any = None,
    listed: bool = False,
    has_full: bool = False,
    per_head: bool = False,
) -> BackwardTraits:
    """Traits of a backward that calls functions on its scores (device.backward_hooks), or visits lists of blocks.

    listed: block lists of (block_m, block_n), with or without full blocks. per_head: the lists have a head dimension
    above 1, so that programs do not share heads. Raises ValueError for calls that have none.

    score_mod_bwd may be None if score_mod adds a term that does not depend on the score, and nothing that it reads gets
    a gradient. The accumulator of S cannot begin at -LSE where score_mod changes the scores.
    """
    hooks = {"score_mod": score_mod, "mask_mod": mask_mod, "score_mod_bwd": score_mod_bwd}
    traits = replace(traits, lse_folded=traits.lse_folded and score_mod is None, **hooks)
    if listed:
        if reason := against_lists(traits, per_head):
            raise ValueError(f"block lists of the Hopper backward: {reason}")
        traits = replace(
            traits,
            block_lists=ListedBlocks(traits.block_m, traits.block_n, has_full),
            group_splits=traits.group if per_head else traits.group_splits,
            dq_first_writer_stores=False,  # these count on tiles of keys that come in order
            dq_written_directly=False,
        )
    return traits


def against_lists(traits: BackwardTraits, per_head: bool) -> str | None:
    """Why a backward visits no lists of blocks, or None."""
    if traits.key_ranges:
        return "documents, prefixes and key lengths have none"
    if traits.deterministic:
        return "deterministic gradients count on tiles of keys in order"
    if per_head and traits.group > 1 and traits.block_d != traits.block_dv:
        return f"heads of {traits.block_d}/{traits.block_dv} columns that share a key head have one list"
    return None
