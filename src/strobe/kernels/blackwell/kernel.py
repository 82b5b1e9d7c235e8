"""What the Blackwell kernels can run, with which tiles, and how. Imports no kernel language until something runs.

They have not run on a Blackwell GPU. They were verified in the simulator, by compilation, and by counting cycles.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from ...problem.call import Call, Dense
from ...problem.problem import Problem
from ...problem.target import Target
from ..device import mask_blocks
from ..protocol import Backward, Buffer, Cost, Forward, Plan, against_mods, attention_cost, entries, fills_tiles
from ..runtime import batch_invariant
from ..runtime.hook_constants import ListedBlocks
from ..runtime.mod_function import against_texts, mod_functions
from ..runtime.tma_requirements import (
    against_call,
    against_mask,
    against_memory,
    against_spans,
    against_tools,
    has_spans,
    qheads_per_tile,
    query_tiles,
)
from .backward_traits import BackwardConfig, BackwardTileConfig, BackwardTraits
from .decode_config import DECODE as DECODE
from .decode_config import BlackwellInvariantConfig, invariant_config
from .traits import ROWS, STAGES_Q, ForwardConfig, ForwardTraits, TileConfig

CAPABILITIES = (100, 103)
# (padded head dimensions) -> stages that fit in shared memory
TILE_CONFIGS = {
    (64, 64): TileConfig(stages=6, out_stages=2, registers=(192, 40)),
    (96, 96): TileConfig(stages=4, out_stages=2),
    (128, 128): TileConfig(stages=3, out_stages=2, registers=(192, 40)),
    (192, 128): TileConfig(stages=2, out_stages=1),
}
# Degree of the exp2 polynomial. Rounding p to bfloat16 errs 20 times as much as degree 3; rounding to float16 only
# about twice as much. lse is not rounded and has the polynomial's error.
DEGREES = {"torch.float16": 5, "torch.bfloat16": 3}
# (capability, head dimensions, whether a mask limits keys) -> by_fma per degree; 0 for others. sm_103 has twice the exp
# units, and at 192/128 products take longer than exponentials. d64: the optimum of `bench.cycles`. d128: leaves the exp
# unit a quarter of its time.
BY_FMA = {
    (100, (64, 64), False): {3: 8, 5: 7},
    (100, (64, 64), True): {3: 8, 5: 7},
    (100, (96, 96), False): {3: 8, 5: 7},
    (100, (96, 96), True): {3: 8, 5: 7},
    (100, (128, 128), False): {3: 8, 5: 8},
    (100, (128, 128), True): {3: 8, 5: 8},
}
# log2 offset: a float16 p below 2^-14 loses bits. Of the 15 powers of two up to its largest value, 7 raise p and 8 are
# used by the rescale threshold.
LOG2_OFFSETS = {"torch.float16": 7.0, "torch.bfloat16": 0.0}


def tiled(head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """The key of TILE_CONFIGS for a call's head dimensions, or None if no tile is wide enough."""
    return next((widths for widths in TILE_CONFIGS if widths[0] >= head_dim and widths[1] >= head_dim_v), None)


def listed_blocks(tuning: TileConfig) -> ListedBlocks:
    """Sizes of the blocks in a call's lists. A tile's queries lie in one of them."""
    return ListedBlocks(max(tuning.block_m, mask_blocks.BLOCK), tuning.block_n, True)


def _needs_tensor_memory(target: Target) -> str:
    return f"needs tensor memory (sm_{', sm_'.join(map(str, CAPABILITIES))}); this target is {target.words}"


def _against_widths(problem: Problem) -> str | None:
    if tiled(problem.head_dim, problem.head_dim_v):
        return None
    return (
        "head dimensions up to 128, or 192 with values of at most 128: tensor memory holds two tiles of scores and "
        f"two of o; this is {problem.head_dim}/{problem.head_dim_v}"
    )


class BlackwellForward:
    name = "blackwell.forward"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability not in CAPABILITIES:
            return _needs_tensor_memory(target)
        if problem.batch_invariant:
            return (
                against_texts(problem)
                or against_mods(problem)
                or DECODE.why_not(batch_invariant.as_decode(problem), target)
                or batch_invariant.against(problem)
            )
        return (
            against_texts(problem)
            or _against_runs(problem)
            or _against_widths(problem)
            or against_call(problem)
            or against_mask(problem.mask)
            or against_memory(problem)
            or against_tools()
        )

    def config(self, problem: Problem, target: Target) -> ForwardConfig | BlackwellInvariantConfig:
        if problem.batch_invariant:
            return invariant_config(problem)
        widths = tiled(problem.head_dim, problem.head_dim_v)
        if widths is None:
            raise ValueError(_against_widths(problem))
        lists = None if problem.mods is None else mask_blocks.sizes_of(problem)
        tuning = TILE_CONFIGS[widths]
        if lists is None or lists.heads == 1:  # a tile has one list
            tuning = replace(tuning, pack_gqa=qheads_per_tile(problem, ROWS * STAGES_Q, ROWS))
        group = problem.group // tuning.pack_gqa
        even = fills_tiles(problem, tuning.block_n)
        uneven = problem.packed or problem.mask.left or problem.mask.right  # some tiles see fewer keys
        counted = (
            uneven
            and query_tiles(problem, tuning.block_m) * problem.heads_kv * group * entries(problem) > target.sm_count
        )
        options = (bool(problem.softcap), problem.sinks, even, problem.packed, counted)
        degree = DEGREES[str(problem.dtype)]
        by_fma = BY_FMA.get((target.capability, widths, problem.mask.left or problem.mask.right), {}).get(degree, 0)
        traits = ForwardTraits(
            tuning, *widths, group, problem.mask, *options, by_fma, degree, LOG2_OFFSETS[str(problem.dtype)]
        )
        if problem.mods is not None:
            score_mod, mask_mod = mod_functions(problem.mods)[:2]
            listed = None if lists is None else listed_blocks(tuning)
            traits = replace(traits, score_mod=score_mod, mask_mod=mask_mod, block_lists=listed)
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
            from .launch import run_forward

            run_forward(plan, call, tensors)


FORWARD = BlackwellForward()


# (padded head dimensions) -> tiles of the backward
BACKWARD_TILE_CONFIGS = {
    (64, 64): BackwardTileConfig(),
    (96, 96): BackwardTileConfig(),
    (128, 128): BackwardTileConfig(),
    (192, 128): BackwardTileConfig(q_stages=1),
    (256, 256): BackwardTileConfig(),  # of a pair alone
}
PAIR_STAGES = 2  # of LSE and of delta: tiles have one
# registers of compute, and of mma, load and relay, in a pair: those that spilled least
PAIR_REGISTERS = {(128, 128): (184, 56), (192, 128): (184, 56), (256, 256): (152, 64)}
# registers of mma and load with dq added in order, because semaphores take registers of reduce: it spilled 16 bytes
# before, 0 now
ORDERED_ONE_WARP = 40


class BlackwellBackward:
    name = "blackwell.backward"
    widths: tuple[tuple[int, int], ...] = ((64, 64), (96, 96), (128, 128), (192, 128))

    def against_widths(self, problem: Problem) -> str:
        """Why the kernel has no tile for a problem's head dimensions."""
        return (
            "head dimensions up to 128, or 192 with values of at most 128: tensor memory holds dk and dv; this is "
            f"{problem.head_dim}/{problem.head_dim_v}"
        )

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability not in CAPABILITIES:
            return _needs_tensor_memory(target)
        if has_spans(problem.mask) and _ordered(problem):
            return "no deterministic gradients with prefixes, key lengths or documents"
        if backward_tiled(problem) not in self.widths:
            return self.against_widths(problem)
        written = replace(problem, out_dtype=problem.dtype)  # the backward can read partial results
        return (
            _against_functions(problem)
            or _against_runs(problem)
            or against_call(written)
            or against_memory(problem)
            or against_spans(problem)
            or against_tools()
            or _against_slices(problem)
        )

    def config(self, problem: Problem, target: Target) -> BackwardConfig:
        widths = backward_tiled(problem)
        if widths is None:
            raise ValueError(f"no tile for head dimensions {problem.head_dim}/{problem.head_dim_v}")
        even = not has_spans(problem.mask) and fills_tiles(problem, ROWS)
        tuning, head_dims = BACKWARD_TILE_CONFIGS[widths], (problem.head_dim, problem.head_dim_v)
        options = (problem.group, problem.mask, bool(problem.softcap), even, problem.packed)
        if _ordered(problem):
            tuning = replace(tuning, registers=(tuning.registers[0], ORDERED_ONE_WARP))
        ordered = _ordered(problem), _reversed_sections(problem)
        return BackwardConfig(BackwardTraits(tuning, *widths, *head_dims, *options, *ordered))

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem, backward=True)

    def workspace(self, problem: Problem, config: BackwardConfig) -> tuple[Buffer, ...]:
        """LSE and -delta of each row in whole tiles, and dQ's float32 sum. Deterministic: a semaphore for each tile of
        dQ, and the counter of programs. preprocess_kernel zeroes all but `rows`.
        """
        traits = config.traits
        tiles = (entries(problem), problem.heads_q, query_tiles(problem, traits.block_m))
        buffers = [
            Buffer("rows", (2, *tiles, traits.block_m), torch.float32),
            Buffer("dq_sum", (*tiles, traits.block_m * traits.block_d), torch.float32),
        ]
        if traits.deterministic:
            buffers += [Buffer("dq_semaphores", tiles, torch.int32), Buffer("counter", (1,), torch.int32)]
        if problem.packed:
            buffers.append(Buffer("offsets", (2, problem.layout.batch + 1), torch.int32))
        return tuple(buffers)

    def run(self, plan: Plan, call: Call, tensors: Backward, workspace: dict[str, Tensor]) -> None:
        from .launch_backward import run_backward

        run_backward(plan, call, tensors, workspace)


def backward_tiled(problem: Problem) -> tuple[int, int] | None:
    """The key of BACKWARD_TILE_CONFIGS for a problem's head dimensions, or None if no tile is wide enough."""
    sizes = problem.head_dim, problem.head_dim_v
    return next((w for w in BACKWARD_TILE_CONFIGS if w[0] >= sizes[0] and w[1] >= sizes[1]), None)


def _against_slices(problem: Problem) -> str | None:
    """Why Triton cannot address the tiles in tensor memory, or None. Triton 3.8 takes slices only at multiples of their
    width. At 192/128, S and dP overlap by half, so one of them is at no such multiple.
    """
    if backward_tiled(problem) == (192, 128) and import_module("triton").__version__.startswith("3.8"):
        return "Triton 3.8 cannot address the tensor memory of 192/128; 3.6, 3.7 and 3.9 can"
    return None


def _ordered(problem: Problem) -> bool:
    return problem.deterministic or problem.batch_invariant


def _reversed_sections(problem: Problem) -> int:
    """Sections of causal heads in which dq is added from the first keys to the last: as many as in the Hopper backward,
    where they were measured. None with batch_invariant: a head's gradients must not depend on the number of heads.
    """
    causal = problem.mask.right and not problem.mask.left and not problem.packed
    if not (problem.deterministic and causal) or problem.batch_invariant:
        return 0
    return 2 if problem.group > 1 else 1


def _against_runs(problem: Problem) -> str | None:
    return "no runs of queries over shared keys: one call for each run" if problem.runs else None


def _against_functions(problem: Problem) -> str | None:
    """Why a kernel without hooks cannot run a problem's functions, by name, or None."""
    if problem.mods is None:
        return None
    return "drops no weights (dropout_p)" if problem.mods.dropout else against_mods(problem)


class BlackwellBackwardPair(BlackwellBackward):
    """The backward with a pair of CTAs, which share tiles of 256 keys, or of 128 at head dimension 256."""

    name = "blackwell.backward_pair"
    widths = (128, 128), (192, 128), (256, 256)

    def against_widths(self, problem: Problem) -> str:
        return (
            f"a pair of CTAs has tiles for head dimensions 97 to 256; this is {problem.head_dim}/{problem.head_dim_v}"
        )

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return super().why_not(problem, target) or _against_pair(problem)

    def config(self, problem: Problem, target: Target) -> BackwardConfig:
        traits = super().config(problem, target).traits
        compute, one_warp = PAIR_REGISTERS[traits.block_d, traits.block_dv]
        registers = compute, ORDERED_ONE_WARP if traits.deterministic else one_warp
        tuning = replace(traits.tuning, q_stages=PAIR_STAGES, do_stages=PAIR_STAGES, registers=registers)
        traits = replace(traits, tuning=tuning, pair=True)
        even = not has_spans(problem.mask) and fills_tiles(problem, traits.block_n)
        return BackwardConfig(replace(traits, even=even))


def _against_pair(problem: Problem) -> str | None:
    """Why a pair of CTAs cannot run what one CTA can, or None."""
    version = import_module("triton").__version__
    if tuple(map(int, version.split(".")[:2])) < (3, 9):
        return f"a pair of CTAs needs Triton 3.9; this is {version}"
    if isinstance(problem.layout, Dense) and problem.layout.seqlen_k <= ROWS:
        if backward_tiled(problem) in BACKWARD.widths:
            return f"one CTA holds all {problem.layout.seqlen_k} keys"
    return None


BACKWARD = BlackwellBackward()
BACKWARD_PAIR = BlackwellBackwardPair()
