"""What the Hopper kernels can run, with which tiles, and how. Imports no kernel language until something runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...problem.call import Call
from ...problem.problem import Dense, Problem
from ...problem.target import KIB, Target
from ..device import mask_blocks
from ..protocol import (
    Backward,
    Buffer,
    Cost,
    Forward,
    Plan,
    attention_cost,
    fills_tiles,
    keys_a_row,
    visible_pairs,
)
from ..runtime import batch_invariant
from ..runtime.hook_constants import ListedBlocks
from ..runtime.mod_function import against_texts, loads_by_key, mod_aux, mod_functions
from ..runtime.tma_requirements import (
    against_call,
    against_memory,
    against_spans,
    against_tools,
    has_spans,
    query_tiles,
)
from .backward_with_hooks import against_lists, backward_with_hooks
from .decode_config import DECODE as DECODE
from .decode_config import InvariantConfig, invariant_config
from .forward_config import EARLY, EARLY_KEYS, forward_traits
from .paged_config import PAGED as PAGED
from .traits import ROWS, BackwardTileConfig, BackwardTraits, ForwardTraits, Tuning

CAPABILITY = 90
MOST_WIDTH = 256


@dataclass(frozen=True)
class ForwardConfig:
    traits: ForwardTraits

    def __str__(self) -> str:
        t = self.traits.tuning
        where = "registers" if t.q_in_registers else "shared memory"
        heads = f" of {t.pack_gqa} heads" if t.pack_gqa > 1 else ""
        early = ", early weights" if self.traits.early else ""
        return (
            f"block_m={t.block_m}{heads} block_n={t.block_n} stages={t.stages} q in {where}{early}, "
            f"{'block lists, ' * self.traits.has_block_lists}"
            f"shared {self.traits.shared_bytes() / KIB:.0f} KiB"
        )


# (padded head dimensions) -> tiles: those that fit, then the fastest on an H200
TUNINGS = {
    (64, 64): Tuning(block_n=128, stages=3, consumers=3, softmax_overlaps_pv=False, ping_pong=True),
    (96, 96): Tuning(
        block_n=128,
        stages=2,
        consumers=2,
        q_in_registers=2,
        softmax_overlaps_pv=False,
        ping_pong=True,
        release_per_thread=True,
    ),
    (128, 128): Tuning(block_n=128, stages=2, consumers=2, q_in_registers=1),
    (192, 128): Tuning(block_n=128, stages=2, consumers=2, q_in_registers=1, half_staged=True, ping_pong=True),
    (192, 192): Tuning(block_n=64, stages=3, consumers=2, q_in_registers=1, half_staged=True, ping_pong=True),
    (256, 128): Tuning(block_n=64, stages=2, consumers=2, ping_pong=True),
    (256, 256): Tuning(block_n=64, stages=2, consumers=2, q_in_registers=1, half_staged=True, ping_pong=True),
}
# for windows, documents and packed sequences, whose tiles have few key blocks.
# speed relative to TUNINGS (H200):
#   d64    window of 1024: 1.045x at 16k, 0.98x at 4k; 16 documents of 16k: 1.09x
#   d128   packed: 1.08x; window: 1.08x at 16k, 1.00x at 4k; documents: 1.02x
SHORT_RANGE_TUNINGS = {
    (64, 64): Tuning(block_n=64, stages=6, consumers=4, softmax_overlaps_pv=False, ping_pong=True),
    (128, 128): Tuning(block_n=64, stages=4, consumers=3, half_staged=True, softmax_overlaps_pv=False, ping_pong=True),
    (256, 256): Tuning(
        block_n=64, stages=2, consumers=2, half_staged=True, ping_pong=True
    ),  # with half of q in registers, documents spill
}
# with a softcap, because tanh takes registers
SOFTCAP_TUNINGS = {
    (64, 64): Tuning(block_n=64, stages=6, consumers=3, q_in_registers=1, softmax_overlaps_pv=False, ping_pong=True),
    (128, 128): Tuning(block_n=64, stages=4, consumers=2, q_in_registers=1),
    (192, 128): Tuning(block_n=64, stages=4, consumers=2, half_staged=True),
    (256, 256): SHORT_RANGE_TUNINGS[256, 256],
}
# (below this many keys per row on average, tiles).
# speed relative to TUNINGS (H200):
#   d64    causal: 1.05x at 512, 1.12x at 1k, 1.05x at 4k, 1.00x at 16k; dense: 1.07x at 512, 1.01x at 4k, 0.986x at 16k
#   d128   causal: 1.02x to 1.03x at 256 to 700, 0.98x at 1024; dense: 0.94x at 512
FEW_KEYS_TUNINGS = {(64, 64): (4_000, SHORT_RANGE_TUNINGS[64, 64]), (128, 128): (400, SOFTCAP_TUNINGS[128, 128])}


def tiled(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The key of TUNINGS, and of BACKWARD_TUNINGS, for a call's head dimensions."""
    return next(widths for widths in TUNINGS if widths[0] >= head_dim and widths[1] >= head_dim_v)


def tuning_of(problem: Problem) -> Tuning:
    widths = tiled(problem.head_dim, problem.head_dim_v)
    fewest, of_few = FEW_KEYS_TUNINGS.get(widths, (0, None))
    few = of_few if keys_a_row(problem) < fewest else None
    in_pieces = (problem.packed and not problem.runs) or problem.mask.left or problem.mask.documents
    special = (
        SOFTCAP_TUNINGS.get(widths)
        if problem.softcap
        else few or (SHORT_RANGE_TUNINGS.get(widths) if in_pieces else None)
    )
    return special or TUNINGS[widths]


def early(problem: Problem) -> bool:
    """Whether optimistic softmax is used: weights are computed before the row maximum is known."""
    widths = tiled(problem.head_dim, problem.head_dim_v)
    return widths in EARLY and keys_a_row(problem) >= EARLY_KEYS


def _why_not(problem: Problem, target: Target) -> str | None:
    if target.kind != "cuda" or target.capability != CAPABILITY:
        return f"made for sm_{CAPABILITY}; this target is {target.words}"
    return _against(problem)


def _against(problem: Problem) -> str | None:
    if max(problem.head_dim, problem.head_dim_v) > MOST_WIDTH:
        return f"head dimensions up to {MOST_WIDTH}; this is {problem.head_dim}/{problem.head_dim_v}"
    return against_call(problem) or against_memory(problem) or against_spans(problem) or against_tools()


# tiles for block lists, whose blocks are multiples of 128 rows and keys as a rule: two consumers with 64 rows each
BLOCK_LIST_TUNINGS = {
    (64, 64): Tuning(block_n=128, stages=3, consumers=2, softmax_overlaps_pv=False, ping_pong=True),
    **{widths: tuning for widths, tuning in TUNINGS.items() if tuning.consumers == 2},
}


def with_64_keys(traits: ForwardTraits) -> ForwardTraits:
    """Traits of tiles of 64 keys, for functions that load values for each key, which take registers.

    Bytes spilled in tiles of 128 and of 64 keys (d128): documents 548, 0; those of strobe.testing.mods 968, 328;
    mla_rope 1,872, 212. With block lists, which skip mask_mod in full blocks: documents 0, 0; 704, 40.
    """
    tuning = SOFTCAP_TUNINGS.get((traits.block_d, traits.block_dv), traits.tuning)
    return replace(traits, tuning=replace(tuning, pack_gqa=traits.tuning.pack_gqa))


LIST_BLOCK_SIZE = (128, 128)  # queries and keys of the forward's listed blocks


def with_hooks(
    traits: ForwardTraits,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_size: tuple[int, int] | None = None,
    has_full: bool = False,
    per_head: bool = False,
) -> ForwardTraits:
    """Traits of a forward that calls functions on its scores, or visits lists of key blocks (device.forward_hooks).

    block_size: (queries, keys) of a listed block. per_head: the lists have a head dimension above 1.
    A mask_mod without lists does not use optimistic softmax, because each step looks for row maxima anyway.
    Raises ValueError if no tile divides the blocks.
    """
    if block_size is None:
        early = traits.early and mask_mod is None
        return replace(traits, early=early, score_mod=score_mod, mask_mod=mask_mod)
    lists = ListedBlocks(*block_size, has_full)
    pack_gqa = 1 if per_head else traits.tuning.pack_gqa
    candidates = [
        replace(tuning, block_n=block_n, pack_gqa=packed)
        for packed in dict.fromkeys((pack_gqa, 1))
        for tuning in (traits.tuning, BLOCK_LIST_TUNINGS[traits.block_d, traits.block_dv])
        for block_n in (tuning.block_n, 64)
    ]
    tuning = next((t for t in candidates if not (block_size[0] % t.block_m or block_size[1] % t.block_n)), None)
    if tuning is None or traits.mask.documents:
        why = "documents" if traits.mask.documents else f"blocks of {block_size[0]} queries and {block_size[1]} keys"
        raise ValueError(f"block lists of the Hopper forward: {why} are not supported")
    group = traits.group * traits.tuning.pack_gqa // tuning.pack_gqa
    even = traits.even if tuning.block_n <= traits.block_n else False
    return replace(
        traits,
        tuning=tuning,
        group=group,
        even=even,
        counted=True,  # tiles differ in cost
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_lists=lists,
    )


class HopperForward:
    name = "hopper.forward"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if reason := against_texts(problem):
            return reason
        if problem.batch_invariant:
            return DECODE.why_not(batch_invariant.as_decode(problem), target) or batch_invariant.against(problem)
        return _why_not(problem, target)

    def config(self, problem: Problem, target: Target) -> ForwardConfig | InvariantConfig:
        if problem.batch_invariant:
            return invariant_config(problem)
        widths = tiled(problem.head_dim, problem.head_dim_v)
        traits = forward_traits(problem, target, tuning_of(problem), widths, early(problem))
        if problem.mods is not None:
            functions, lists = mod_functions(problem.mods), mask_blocks.sizes_of(problem)
            size, per_head = (None, False) if lists is None else (LIST_BLOCK_SIZE, lists.heads > 1)
            if loads_by_key(problem.mods) > (0 if lists is None else 1):
                traits = with_64_keys(traits)
            traits = with_hooks(traits, functions.score_mod, functions.mask_mod, size, lists is not None, per_head)
        return ForwardConfig(traits)

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem)

    def workspace(self, problem: Problem, config: object) -> tuple[Buffer, ...]:
        return ()

    def run(self, plan: Plan, call: Call, tensors: Forward, workspace: dict[str, Tensor]) -> None:
        if plan.problem.batch_invariant:
            from .launch_decode import run_invariant

            run_invariant(plan, call, tensors)
        else:
            from .launch_forward import BlockLists, ForwardHooks, run_forward

            hooks = None
            if call.mods is not None:
                hooks = ForwardHooks(*mod_aux(plan.problem, call)[:2])
                if plan.config.traits.has_block_lists:
                    lists = mask_blocks.forward_lists(plan.problem, call, LIST_BLOCK_SIZE)
                    hooks = hooks._replace(block_lists=BlockLists(*lists))
            run_forward(plan, call, tensors, hooks)


FORWARD = HopperForward()


# ---------------------------------------------------------------- backward


@dataclass(frozen=True)
class BackwardConfig:
    traits: BackwardTraits

    def __str__(self) -> str:
        t = self.traits.tuning
        return (
            f"block_m={t.block_m} block_n={t.block_n} stages={t.stages}/{t.stages_do} dq added by "
            f"TMA{' in order' * self.traits.deterministic}, "
            f"{f'group of {self.traits.group} in {self.traits.group_splits}, ' * (self.traits.group_splits > 1)}"
            f"{'block lists, ' * self.traits.has_block_lists}"
            f"shared {self.traits.shared_bytes() / KIB:.0f} KiB"
        )


# (padded head dimensions) -> tiles of the backward: those that fit without spills, then the fastest on an H200. A third
# stage leaves no shared memory for per-thread mbarriers (traits.ds_per_thread_arrive).
# speed of two stages with per-thread mbarriers relative to three without (H200):
#   d128   dense: 1.002x to 1.008x at 4k to 16k, 0.995x at 512
#   d96    causal: 1.008x at 512, 1.02x to 1.03x at 1k to 4k, 1.003x at 8k
BACKWARD_TUNINGS = {
    (64, 64): BackwardTileConfig(block_m=128, block_n=128, stages=2, stages_do=2, k_in_registers=True),
    (96, 96): BackwardTileConfig(
        block_m=64, block_n=128, stages=2, stages_do=2, k_in_registers=True, release_per_thread=True
    ),
    (128, 128): BackwardTileConfig(block_m=64, block_n=128, stages=2, stages_do=2, masks_p=False),
    (192, 128): BackwardTileConfig(block_m=64, block_n=128, stages=2, stages_do=2, dq_passes=2, split_products=True),
    (192, 192): BackwardTileConfig(block_m=64, block_n=64, stages=3, stages_do=2),
    (256, 128): BackwardTileConfig(block_m=64, block_n=64, stages=3, stages_do=2, dq_passes=2),
    (256, 256): BackwardTileConfig(block_m=64, block_n=64, stages=2, stages_do=1, dq_passes=2),
}
# for tanh's registers: spills drop from 1340 to 0 bytes
BACKWARD_CAPPED = {(64, 64): BackwardTileConfig(block_m=64, block_n=128, stages=3, stages_do=3)}

# From this many steps per key tile on average, a step computes dQ of the previous step (dq_deferred). With fewer steps,
# the extra product at the end costs more than it gains.
# speed relative to dQ in its own step (H200):
#   d128   dense: 1.00x at 512, 1.04x at 1k, 1.08x from 2k; causal: 0.96x at 512, 0.97x at 1k, 1.01x at 2k, 1.04x at 4k;
#          GQA 64/8: 1.02x at 2k
#   d96    causal: 0.93x at 1k and 2k, 1.03x to 1.04x at 8k; dense: 1.01x at 8k
#   d64    dense: 1.00x at 4k, 1.01x at 8k, 1.03x at 16k; causal: 0.99x at 4k and 8k, 1.02x at 16k;
#          deterministic causal: 1.015x at 8k
DEFERRED_DQ_STEPS = {(64, 64): 48, (96, 96): 48, (128, 128): 12}
# Head dimensions whose accumulator of S starts at -LSE / scale (lse_folded): with dq_deferred, and at 128 if causal.
# speed relative to subtracting LSE afterwards (H200):
#   d128   causal: 1.02x at 1k, 1.015x at 4k, 1.02x at 8k, 1.01x at 16k; with dq_deferred 1.00x to 1.01x;
#          documents: 1.045x; dense: 1.10x with dq_deferred, 0.99x without
#   d96    1.015x with dq_deferred, 0.98x without
#   d64    0.94x
LSE_FOLDED = {(96, 96), (128, 128)}
FINE = 2.0**100  # lse may be divided by scales from 1 / FINE to FINE

STORED_KEYS = {(64, 64): 1200, (96, 96): 1200, (128, 128): 1200}  # keys per row on average


class HopperBackward:
    name = "hopper.backward"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability != CAPABILITY:
            return _why_not(problem, target)
        if reason := against_texts(problem):
            return reason
        if has_spans(problem.mask) and _ordered(problem):
            return "no deterministic gradients with prefixes, key lengths or documents"
        return _against(_written(problem))

    def config(self, problem: Problem, target: Target) -> BackwardConfig:
        head_dims = problem.head_dim, problem.head_dim_v
        widths = tiled(*head_dims)
        ordered = _ordered(problem)
        capped = BACKWARD_CAPPED.get(widths) if problem.softcap else None
        tuning = capped or BACKWARD_TUNINGS[widths]
        even = not has_spans(problem.mask) and fills_tiles(problem, tuning.block_n)
        splits = 1 if ordered or widths[0] != widths[1] else _splits(problem, target, tuning)
        stores = ordered or _dq_first_writer_stores(problem, splits, widths, tuning)
        defers = _defers_dq(problem, splits, widths, tuning, ordered)
        folds = (
            widths in LSE_FOLDED
            and (defers or _folds_lse(problem, widths))
            and not problem.softcap
            and 1 / FINE < problem.scale < FINE
        )
        constants = (
            problem.group,
            problem.mask,
            bool(problem.softcap),
            even,
            problem.packed,
            ordered,
            splits,
            stores,
            defers,
            folds,
        )
        traits = BackwardTraits(tuning, *widths, *head_dims, *constants)
        added = {
            "dq_zeroed_ahead": _dq_zeroed_ahead(problem, traits),
            "dq_written_directly": _dq_written_directly(problem, traits),
            "reversed_sections": _last_sections(problem, traits),
            "runs": problem.runs,
        }
        config = BackwardConfig(replace(traits, **added))
        if problem.mods is not None:
            functions = mod_functions(problem.mods, not problem.mask.documents)[:3]
            lists = mask_blocks.sizes_of(problem)
            per_head = lists is not None and lists.heads > 1
            listed = lists is not None and against_lists(config.traits, per_head) is None
            traits = backward_with_hooks(config.traits, *functions, listed, has_full=listed, per_head=per_head)
            config = BackwardConfig(traits)
        return config

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem, backward=True)

    def workspace(self, problem: Problem, config: BackwardConfig) -> tuple[Buffer, ...]:
        """lse and delta per row in the main kernel's layout, dq's float32 sum, the tile counter, semaphores for dq, and
        sums of dk and dv.

        The first kernel zeroes the counter, the semaphores and, if dq is zeroed ahead, the first part of its sum.
        """
        traits = config.traits
        heads = (problem.heads_q,) if problem.packed else (problem.layout.batch, problem.heads_q)
        tiles = query_tiles(problem, traits.tuning.block_m)
        rows = Buffer("rows", (2, *heads, tiles * traits.tuning.block_m), torch.float32)
        dq_sum = Buffer("dq_sum", (*heads, tiles, traits.tuning.block_m * traits.block_d), torch.float32)
        buffers = [rows, dq_sum, Buffer("counter", (1,), torch.int32)]
        if traits.dq_first_writer_stores or traits.dq_written_directly:
            buffers.append(Buffer("dq_semaphores", (*heads, tiles), torch.int32))
        elif traits.dq_zeroed_ahead:
            buffers.append(
                Buffer("dq_semaphores", (heads[0], problem.heads_q // traits.heads_per_program), torch.int32)
            )
        if problem.packed:
            rows_of_offsets = 3 if problem.runs else 2
            buffers.append(Buffer("offsets", (rows_of_offsets, problem.layout.batch + 1), torch.int32))
        if traits.group_splits > 1:
            layout = problem.layout
            keys = layout.seqlen_k if isinstance(layout, Dense) else layout.tokens[1]
            widths = {"dk_sum": traits.dk_width, "dv_sum": traits.dv_width}
            buffers += [
                Buffer(name, (*heads[:-1], problem.heads_kv, keys, width), torch.float32, 0.0)
                for name, width in widths.items()
            ]
        return tuple(buffers)

    def run(self, plan: Plan, call: Call, tensors: Backward, workspace: dict[str, Tensor]) -> None:
        from .launch_backward import BackwardHooks, QueryBlockLists, run_backward

        hooks, traits = None, plan.config.traits
        if call.mods is not None:
            hooks = BackwardHooks(*mod_aux(plan.problem, call))
            if traits.has_block_lists:
                lists = mask_blocks.backward_lists(plan.problem, call, (traits.block_m, traits.block_n))
                hooks = hooks._replace(block_lists=QueryBlockLists(*lists))
        run_backward(plan, call, tensors, workspace, hooks)


LONG_PROGRAM = 64  # steps of the longest program, beyond which float32 sums of dk and dv cost little


def _dq_first_writer_stores(problem: Problem, splits: int, widths: tuple[int, int], tuning: BackwardTileConfig) -> bool:
    """Whether the first key tile that reaches a dq tile stores it and the others wait, so that nothing zeroes dq's sum.

    This is faster if rows see few keys and key tiles arrive one after the other. Dense tiles arrive together. If a
    program processes several causal heads, shorter tiles of the second head arrive first.

        speed relative to a sum zeroed by an earlier kernel (H200):
            dense 4k             0.96x
            GQA 64/8 causal 2k   0.88x
            d128 causal          1.11x at 512, 1.06x at 1k, 1.02x at 2k, 1.01x at 4k, 0.96x at 16k
            d64 causal           1.04x at 512, 1.03x at 1k, 1.00x at 2k, 0.99x at 4k, 0.96x at 16k
            windows              1.08x to 1.11x of 256, 1.03x of 1024, 0.99x of 2048, 0.91x to 1.00x of 4096
            d192 causal 8k       0.70x
        speed relative to a sum zeroed ahead (H100):
            d128 causal          1.28x at 512, 1.12x at 1k, 1.00x at 2.5k, 0.99x at 3k, 0.97x to 0.99x at 4k
            d64 causal 2k        1.01x
            window of 1024       1.01x to 1.03x
    """
    mask = problem.mask
    apart = mask.right and (mask.left or splits == problem.group)
    return (
        (apart or _one_tile(problem, tuning))
        and not has_spans(mask)
        and keys_a_row(problem) <= STORED_KEYS.get(widths, 0)
    )


def _one_tile(problem: Problem, tuning: BackwardTileConfig) -> bool:
    """Whether all keys of a batch entry are in one tile."""
    return isinstance(problem.layout, Dense) and problem.layout.seqlen_k <= tuning.block_n


CLEARED_KEYS = 600  # keys per row on average, from which a key tile has time to zero its part


def _dq_zeroed_ahead(problem: Problem, traits: BackwardTraits) -> bool:
    """Whether programs zero dq's sum ahead of use, instead of an earlier kernel.

    Not if consumers split the products, where adds to dq limit memory anyway (d192 1.003x, d256 1.000x). Not if steps
    keep addresses in registers, because ptxas then finds 3 % too few (d64 dense 4k 0.97x). Not for few keys.

        speed relative to zeroing in an earlier kernel (H100):
            dense             1.00x at 512, 1.01x at 1k, 1.02x at 2k
            GQA 64/8 causal   0.95x at 512, 0.965x at 1k, 1.02x at 2k
    """
    suits = (
        traits.split_by_keys
        and traits.rematerializes
        and not (traits.dq_first_writer_stores or traits.packed or traits.key_ranges)
    )
    return suits and keys_a_row(problem) >= CLEARED_KEYS


# Keys per row on average, from which too few queries see a single key tile. Only these have dq parts of 64 columns.
FINISHED_KEYS = {(64, 64): 400, (128, 128): 600}


def _dq_written_directly(problem: Problem, traits: BackwardTraits) -> bool:
    """Whether dq of queries that see only the first key tile is written directly instead of summed in memory.

    Steps that compute the previous step's dq (traits.dq_deferred) have no registers for it.

        speed relative to summing all of dq (H200):
            d128 causal   1.47x at 128, 1.12x at 256, 1.07x at 512, 1.03x at 1k
            d64 causal    1.10x at 256, 1.03x at 512, 1.00x at 1k
    """
    may = problem.mask.right or problem.packed or _one_tile(problem, traits.tuning)
    suits = (
        traits.split_by_keys
        and traits.dq.part_columns(0) == ROWS
        and not (traits.key_ranges or traits.dq_deferred or traits.mask.left)
    )
    return (
        may
        and suits
        and not _dq_zeroed_ahead(problem, traits)
        and keys_a_row(problem) < FINISHED_KEYS.get((traits.block_d, traits.block_dv), 0)
    )


def _last_sections(problem: Problem, traits: BackwardTraits) -> int:
    """Sections of causal heads in which dq is added from the first keys to the last, in deterministic backwards.

    Two for grouped heads: GQA 64/8 causal 8k is 1.20x as fast as with none (1.10x with one section), 16k 1.105x
    (1.125x) (H200). None with batch_invariant, where a head's gradients must not depend on the number of heads.
    """
    causal = problem.mask.right and not problem.mask.left and not problem.packed
    if not (traits.deterministic and causal) or problem.batch_invariant:
        return 0
    return 2 if traits.heads_per_program > 1 else 1


def _defers_dq(
    problem: Problem, splits: int, widths: tuple[int, int], tuning: BackwardTileConfig, ordered: bool
) -> bool:
    """Whether a step computes dq of the previous step, so that the two consumers need not run in lockstep."""
    if widths not in DEFERRED_DQ_STEPS or problem.mask.documents or problem.softcap:
        return False
    if problem.packed and problem.batch_invariant:  # lengths of other sequences must not change the order of sums
        return False
    keys = problem.layout.tokens[1]
    steps = problem.group // splits * visible_pairs(problem) / (keys * tuning.block_m) if keys else 0.0
    return steps * (2 if ordered and widths == (64, 64) else 1) >= DEFERRED_DQ_STEPS[widths]


def _folds_lse(problem: Problem, widths: tuple[int, int]) -> bool:
    """Whether the score accumulator starts at -lse even without traits.dq_deferred."""
    return widths == (128, 128) and problem.mask.right


def _splits(problem: Problem, target: Target, tuning: BackwardTileConfig) -> int:
    """Number of programs that share the heads of a group: enough to fill the SMs, or twice that if programs differ in
    cost, so that the longest does not dominate. Programs also differ in cost if a window has at least as many keys
    as there are rows, as at a border of context parallelism.

    Each program adds to dk and dv in float32 memory, so more programs pay off only if they are long. GQA 64/8 causal
    (H200): at 8k 550 TFLOP/s with four, 526 with two, 426 with one; at 2k 426 with four and 399 with eight. Programs of
    documents have unknown lengths.
    """
    layout: Any = problem.layout
    tiles = (
        layout.total_k // tuning.block_n + layout.batch
        if problem.packed
        else layout.batch * -(-layout.seqlen_k // tuning.block_n)
    )
    steps = (layout.total_q // max(1, layout.batch) if problem.packed else layout.seqlen_q) // tuning.block_m
    mask = problem.mask
    clipped = mask.left and not problem.packed and problem.left >= layout.seqlen_q  # a window that is a triangle
    uneven = problem.packed or mask.right != mask.left or clipped
    may_be_more = uneven and not problem.mask.documents
    divisors = [n for n in range(1, problem.group + 1) if problem.group % n == 0]
    enough = lambda wanted: next((n for n in divisors if tiles * problem.heads_kv * n >= wanted), problem.group)
    least, most = (
        enough(2 * target.sm_count if uneven else target.sm_count * 3 // 4),
        enough(8 * target.sm_count if may_be_more else 1),
    )
    return max(n for n in divisors if n == least or (least < n <= most and problem.group // n * steps >= LONG_PROGRAM))


def _ordered(problem: Problem) -> bool:
    return problem.deterministic or problem.batch_invariant


def _written(problem: Problem) -> Problem:
    """The problem with an out dtype that the forward can write. The backward can read partial results."""
    return replace(problem, out_dtype=problem.dtype)


BACKWARD = HopperBackward()
