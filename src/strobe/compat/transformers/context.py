"""transformers models under context parallelism: their attention functions run by a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ...distributed import Plan
from ...errors import UnsupportedProblem, describe, wrong_type
from ...problem.mask import Mask
from .layer_mask import SDPA, Band, LayerMask

_active: list[Plan] = []  # of nested blocks; not a context variable, since checkpointing calls layers in other threads


@contextmanager
def context_parallel(plan: Plan) -> Iterator[None]:
    """Run models with attn_implementation="strobe" on this process's rows of a sequence, within the `with` block.

    >>> with context_parallel(plan):  # doctest: +SKIP
    ...     loss = model(
    ...         input_ids=plan.shard(ids), position_ids=plan.positions(ids.device)[None],
    ...         labels=plan.shard(ids), shift_labels=plan.shard(shifted), use_cache=False,
    ...     ).loss
    ...     loss.backward()

    Each layer keeps its own window and sinks. Documents and key lengths come from the plan's mask, since position_ids
    of local rows do not tell them. The block contains the backward, in which checkpointing calls layers again. Padding
    masks, caches and chunked layers are refused. Each process has a part of each weight's gradient: sum them.
    """
    if not isinstance(plan, Plan):
        raise wrong_type("plan", plan, "a strobe.distributed.Plan", "make one with context_parallel(...).plan(...)")
    _active.append(plan)
    try:
        yield
    finally:
        _active.pop()


def active_plan() -> Plan | None:
    return _active[-1] if _active else None


def planned_mask(
    band: Band | None, is_chunked: bool, attention_mask: Tensor | None, seqlens: tuple[int, int]
) -> LayerMask:
    """The LayerMask of local rows: the band alone. seqlens: local rows and keys."""
    if band is None or is_chunked:
        raise UnsupportedProblem(describe("mask", "chunks or a function", "causal, window or full layers", SDPA))
    if seqlens[0] != seqlens[1]:
        got, remedy = f"{seqlens[0]} rows and {seqlens[1]} keys", "pass use_cache=False"
        raise UnsupportedProblem(describe("past_key_values", got, "none under context_parallel", remedy))
    if attention_mask is not None and not bool(attention_mask.all()):
        remedy = "make the plan with strobe.key_lengths or documents, and leave attention_mask out"
        raise UnsupportedProblem(describe("attention_mask", "a padding mask", "None under context_parallel", remedy))
    return LayerMask(band, seqlens[1])


def mask_of_plan(plan: Plan) -> Mask:
    """What the plan's mask says beside a band."""
    return Mask(documents=plan.mask.documents, key_lengths=plan.mask.key_lengths)
