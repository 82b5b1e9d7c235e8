"""The Hopper kernels' answers: what they can run, with which tiles, and how. Imports no DSL until something runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...problem.call import Call
from ...problem.problem import Dense, Problem
from ...problem.target import KIB, Target
from ..protocol import Backward, Buffer, Cost, Forward, Plan, attention_cost, entries, keys_a_row, visible_pairs
from ..runtime import batch_invariant
from ..runtime.tma_requirements import (
    against_call,
    against_memory,
    against_spans,
    against_tools,
    has_spans,
    joined,
    query_tiles,
)
from .decode_config import DECODE as DECODE
from .decode_config import InvariantConfig, invariant_config
from .traits import ROWS, BackwardForm, BackwardTuning, Form, Tuning

CAPABILITY = 90
MOST_WIDTH = 256


@dataclass(frozen=True)
class ForwardConfig:
    form: Form

    def __str__(self) -> str:
        t = self.form.tuning
        where = "registers" if t.q_in_registers else "shared memory"
        heads = f" of {t.joined} heads" if t.joined > 1 else ""
        early = ", early weights" if self.form.early else ""
        return (
            f"block_m={t.block_m}{heads} block_n={t.block_n} stages={t.stages} q in {where}{early}, "
            f"shared {self.form.shared_bytes() / KIB:.0f} KiB"
        )


# (head dimensions, padded to what tiles hold) -> tiles; what fits, then what was fastest on an H200
TUNINGS = {
    (64, 64): Tuning(block_n=128, stages=3, consumers=3, under=False, ping_pong=True),
    (96, 96): Tuning(block_n=128, stages=2, consumers=2, q_in_registers=2, under=False, ping_pong=True, each=True),
    (128, 128): Tuning(block_n=128, stages=2, consumers=2, q_in_registers=1),
    (192, 128): Tuning(block_n=128, stages=2, consumers=2, q_in_registers=1, half_staged=True, ping_pong=True),
    (192, 192): Tuning(block_n=64, stages=3, consumers=2, q_in_registers=1, half_staged=True, ping_pong=True),
    (256, 128): Tuning(block_n=64, stages=2, consumers=2, ping_pong=True),
    (256, 256): Tuning(block_n=64, stages=2, consumers=2, q_in_registers=1, half_staged=True, ping_pong=True),
}
# in pieces, windows, documents and packed sequences, whose tiles end soon: of the speed of TUNINGS d64 window 1024 of
# 16k 1.045, of 4k 0.98, 16 documents of 16k 1.09, d128 packed 1.08, window of 16k 1.08, of 4k 1.00, documents 1.02
# (H200)
PIECES = {
    (64, 64): Tuning(block_n=64, stages=6, consumers=4, under=False, ping_pong=True),
    (128, 128): Tuning(block_n=64, stages=4, consumers=3, half_staged=True, under=False, ping_pong=True),
    (256, 256): Tuning(
        block_n=64, stages=2, consumers=2, half_staged=True, ping_pong=True
    ),  # documents spill with half of q in registers
}
# where early weights (`early`) gain; at 256 products alone are the limit. Of fewer keys a row than these, on average,
# verdicts cost more than they save: of the speed without causal 512 0.97 (d128), 0.99 (d64), 1k, of twice as many keys
# a row, 1.02 to 1.03, dense 512 1.04, 1.02 (H200)
EARLY = {(64, 64), (96, 96), (128, 128), (192, 128), (192, 192)}
EARLY_KEYS = 400
# for a softcap, whose tanh takes registers
CAPPED = {
    (64, 64): Tuning(block_n=64, stages=6, consumers=3, q_in_registers=1, under=False, ping_pong=True),
    (128, 128): Tuning(block_n=64, stages=4, consumers=2, q_in_registers=1),
    (192, 128): Tuning(block_n=64, stages=4, consumers=2, half_staged=True),
    (256, 256): PIECES[256, 256],
}
# of fewer keys a row, on average: d64 causal 512 1.05, 1k 1.12, 4k 1.05, 16k 1.00, dense 512 1.07, 4k 1.01, 16k 0.986;
# d128 causal 256 to 700 1.02 to 1.03, but 1,024 0.98 and dense 512 0.94 (H200)
FEW = {(64, 64): (4_000, PIECES[64, 64]), (128, 128): (400, CAPPED[128, 128])}


def tiled(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The key of TUNINGS, and of BACKWARD_TUNINGS, that a call's head dimensions are padded to."""
    return next(widths for widths in TUNINGS if widths[0] >= head_dim and widths[1] >= head_dim_v)


def tuning_of(problem: Problem) -> Tuning:
    widths = tiled(problem.head_dim, problem.head_dim_v)
    fewest, of_few = FEW.get(widths, (0, None))
    few = of_few if keys_a_row(problem) < fewest else None
    in_pieces = problem.packed or problem.mask.left or problem.mask.documents
    special = CAPPED.get(widths) if problem.softcap else few or (PIECES.get(widths) if in_pieces else None)
    return special or TUNINGS[widths]


def early(problem: Problem) -> bool:
    """Whether weights come before maxima."""
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


class HopperForward:
    name = "hopper.forward"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if problem.batch_invariant:
            return DECODE.why_not(batch_invariant.as_decode(problem), target) or batch_invariant.against(problem)
        return _why_not(problem, target)

    def config(self, problem: Problem, target: Target) -> ForwardConfig | InvariantConfig:
        if problem.batch_invariant:
            return invariant_config(problem)
        tuning = tuning_of(problem)
        # in a window's tiles fewer queries, of more heads, see fewer keys: 0 to 9 % where there are as many tiles
        # (H200, windows of 128 to 4096)
        fewer = 0.0 if problem.mask.left else 0.1
        tuning = replace(tuning, joined=joined(problem, ROWS * tuning.consumers, ROWS, fewer))
        group = problem.group // tuning.joined
        even = not problem.packed and problem.layout.seqlen_k % tuning.block_n == 0  # type: ignore[union-attr]
        widths = tiled(problem.head_dim, problem.head_dim_v)
        counted = query_tiles(problem, tuning.block_m) * problem.heads_kv * group * entries(problem) > target.sm_count
        form = Form(
            tuning,
            *widths,
            group,
            problem.mask,
            bool(problem.softcap),
            problem.sinks,
            even,
            problem.packed,
            counted,
            early(problem),
        )
        return ForwardConfig(form)

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem)

    def workspace(self, problem: Problem, config: object) -> tuple[Buffer, ...]:
        return ()

    def run(self, plan: Plan, call: Call, tensors: Forward, workspace: dict[str, Tensor]) -> None:  # type: ignore[override]
        if plan.problem.batch_invariant:
            from .launch_decode import run_invariant as run
        else:
            from .launch_forward import run_forward as run
        run(plan, call, tensors)


FORWARD: Any = HopperForward()


# ---------------------------------------------------------------- backward


@dataclass(frozen=True)
class BackwardConfig:
    form: BackwardForm

    def __str__(self) -> str:
        t = self.form.tuning
        return (
            f"block_m={t.block_m} block_n={t.block_n} stages={t.stages}/{t.stages_do} dq added by "
            f"TMA{' in order' * self.form.ordered}, "
            f"{f'group of {self.form.group} in {self.form.splits}, ' * (self.form.splits > 1)}"
            f"shared {self.form.shared_bytes() / KIB:.0f} KiB"
        )


# (head dimensions, padded to what tiles hold) -> tiles of the backward: what fits without spills, then what was fastest
# on an H200. Three stages for two leave no room for form.bells: with those two are 1.002 to 1.008 of the speed at d128
# dense 4k to 16k, 0.995 at 512, d96 causal 512 1.008, 1k to 4k 1.02 to 1.03, 8k 1.003
BACKWARD_TUNINGS = {
    (64, 64): BackwardTuning(block_m=128, block_n=128, stages=2, stages_do=2, k_in_registers=True),
    (96, 96): BackwardTuning(block_m=64, block_n=128, stages=2, stages_do=2, k_in_registers=True, each=True),
    (128, 128): BackwardTuning(block_m=64, block_n=128, stages=2, stages_do=2, hides_weights=False),
    (192, 128): BackwardTuning(block_m=64, block_n=128, stages=2, stages_do=2, parts=2, roles=True),
    (192, 192): BackwardTuning(block_m=64, block_n=64, stages=3, stages_do=2),
    (256, 128): BackwardTuning(block_m=64, block_n=64, stages=3, stages_do=2, parts=2),
    (256, 256): BackwardTuning(block_m=64, block_n=64, stages=2, stages_do=1, parts=2),
}
BACKWARD_CAPPED = {
    (64, 64): BackwardTuning(block_m=64, block_n=128, stages=3, stages_do=3)
}  # for tanh's registers: 0 bytes of spills for 1340

# where a tile of keys takes so many steps or more, on average, a step multiplies dq of the step before; of fewer what
# is multiplied once more and last costs more: d128 dense 512 1.00, 1k 1.04, 2k and more 1.08, causal 512 0.96, 1k 0.97,
# 2k 1.01, 4k 1.04 of the speed, GQA 64/8 2k 1.02; d96 causal 1k and 2k 0.93, 8k 1.03 to 1.04, dense 8k 1.01; d64 dense
# 4k 1.00, 8k 1.01, 16k 1.03, causal 4k and 8k 0.99, 16k 1.02, but 8k 1.015 where programs take turns at dq (H200)
LAGGING_STEPS = {(64, 64): 48, (96, 96): 48, (128, 128): 12}
# scores begin at -lse over their scale with lags and, at 128, where later keys are hidden: d128 causal 1k 1.02, 4k
# 1.015, 8k 1.02, 16k 1.01, with lags 1.00 to 1.01, of documents 1.045, dense with lags 1.10, without 0.99; d96 with
# lags 1.015, without 0.98; d64 0.94 (H200)
BEGUN = {(96, 96), (128, 128)}
FINE = 2.0**100  # scales up to this, and from its inverse on, by which lse may be divided

STORED_KEYS = {(64, 64): 1200, (96, 96): 1200, (128, 128): 1200}  # a row, on average, up to which the first tile stores


class HopperBackward:
    name = "hopper.backward"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability != CAPABILITY:
            return _why_not(problem, target)
        if has_spans(problem.mask) and _ordered(problem):
            return (
                "gradients under prefixes, key lengths and documents without turns at dq only; this asks for "
                "deterministic ones"
            )
        return _against(_written(problem))

    def config(self, problem: Problem, target: Target) -> BackwardConfig:
        head_dims = problem.head_dim, problem.head_dim_v
        widths = tiled(*head_dims)
        ordered = _ordered(problem)
        capped = BACKWARD_CAPPED.get(widths) if problem.softcap else None
        tuning = capped or BACKWARD_TUNINGS[widths]
        even = not problem.packed and not has_spans(problem.mask) and problem.layout.seqlen_k % tuning.block_n == 0  # type: ignore[union-attr]
        splits = 1 if ordered or widths[0] != widths[1] else _splits(problem, target, tuning)
        stores = ordered or _first_stores(problem, splits, widths, tuning)
        lags = _lags(problem, splits, widths, tuning, ordered)
        begun = (
            widths in BEGUN
            and (lags or _begins(problem, widths))
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
            lags,
            begun,
        )
        form = BackwardForm(tuning, *widths, *head_dims, *constants)
        added = {
            "clears": _clears(problem, form),
            "finishes": _finishes(problem, form),
            "last_sections": _last_sections(problem, form),
        }
        return BackwardConfig(replace(form, **added))

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem, backward=True)

    def workspace(self, problem: Problem, config: BackwardConfig) -> tuple[Buffer, ...]:
        """lse and delta of each row as the main kernel reads them; dq's sum, or of what is cleared ahead the first of
        it, the counter and turns, which the first kernel sets to 0; sums of dk and dv.
        """
        form = config.form
        heads = (problem.heads_q,) if problem.packed else (problem.layout.batch, problem.heads_q)
        tiles = query_tiles(problem, form.tuning.block_m)
        rows = Buffer("rows", (2, *heads, tiles * form.tuning.block_m), torch.float32)
        dq_sum = Buffer("dq_sum", (*heads, tiles, form.tuning.block_m * form.block_d), torch.float32)
        buffers = [rows, dq_sum, Buffer("counter", (1,), torch.int32)]
        if form.first_stores or form.finishes:
            buffers.append(Buffer("turns", (*heads, tiles), torch.int32))
        elif form.clears:
            buffers.append(Buffer("turns", (heads[0], problem.heads_q // form.members), torch.int32))
        if form.splits > 1:
            keys = problem.layout.total_k if problem.packed else problem.layout.seqlen_k  # type: ignore[union-attr]
            widths = {"dk_sum": form.dk_width, "dv_sum": form.dv_width}
            buffers += [
                Buffer(name, (*heads[:-1], problem.heads_kv, keys, width), torch.float32, 0.0)
                for name, width in widths.items()
            ]
        return tuple(buffers)

    def run(self, plan: Plan, call: Call, tensors: Backward, workspace: dict[str, Tensor]) -> None:  # type: ignore[override]
        from .launch_backward import run_backward

        run_backward(plan, call, tensors, workspace)


LONG_PROGRAM = 64  # steps of the longest, of which its sums in float32 memory are a small part


def _first_stores(problem: Problem, splits: int, widths: tuple[int, int], tuning: BackwardTuning) -> bool:
    """Whether the first tile of keys to come to a tile of dq stores, so that nothing clears dq's sum: where rows see
    few keys, and tiles come one after the other; the others wait for it.

    Dense ones come together, and of causal heads that a program walks in turn the shorter tiles come first to the
    second. Of the speed with sums cleared by the kernel before dense 4k 0.96, GQA 64/8 causal 2k 0.88, d128 causal 512
    1.11, 1k 1.06, 2k 1.02, 4k 1.01, 16k 0.96; d64 1.04, 1.03, 1.00, 0.99, 0.96; windows of 256, 1,024, 2,048 and 4,096
    1.08 to 1.11, 1.03, 0.99, 0.91 to 1.00; d192 causal 8k 0.70 (H200). Of that with sums cleared ahead d128 causal 512
    1.28, 1k 1.12, 2.5k 1.00, 3k 0.99, 4k 0.97 to 0.99, d64 2k 1.01, a window of 1,024 1.01 to 1.03 (H100).
    """
    mask = problem.mask
    apart = mask.right and (mask.left or splits == problem.group)
    return (
        (apart or _one_tile(problem, tuning))
        and not has_spans(mask)
        and keys_a_row(problem) <= STORED_KEYS.get(widths, 0)
    )


def _one_tile(problem: Problem, tuning: BackwardTuning) -> bool:
    """Whether all keys of a batch entry are in one tile."""
    return isinstance(problem.layout, Dense) and problem.layout.seqlen_k <= tuning.block_n


CLEARED_KEYS = 600  # a row, on average, from which a tile of keys has time for its share of the zeros


def _clears(problem: Problem, form: BackwardForm) -> bool:
    """Whether programs clear dq's sum ahead, for the kernel before them.

    Not by roles, where adds to dq bind memory anyway (d192 1.003, d256 1.000 of the speed), nor where steps keep
    addresses in registers, of which ptxas then finds 3 % too few (d64 dense 4k 0.97), nor of few keys: dense 512 1.00,
    1k 1.01, 2k 1.02, GQA 64/8 causal 512 0.95, 1k 0.965, 2k 1.02 (H100).
    """
    suits = form.halves and form.reckons and not (form.first_stores or form.packed or form.spans)
    return suits and keys_a_row(problem) >= CLEARED_KEYS


# a row, on average, from which queries that see one tile of keys alone are too few; of other widths shares of dq have
# not 64 columns
FINISHED_KEYS = {(64, 64): 400, (128, 128): 600}


def _finishes(problem: Problem, form: BackwardForm) -> bool:
    """Whether dq of queries that see keys of one tile alone, the first, is written at once, and not summed in memory.
    Of the speed without d128 causal 128 runs at 1.47, 256 at 1.12, 512 at 1.07, 1k at 1.03, d64 256 at 1.10, 512 at
    1.03, 1k at 1.00 (H200). Steps that multiply dq of the step before have no room for it.
    """
    may = problem.mask.right or problem.packed or _one_tile(problem, form.tuning)
    suits = form.halves and form.share_columns(0) == ROWS and not (form.spans or form.lags or form.mask.left)
    return (
        may
        and suits
        and not _clears(problem, form)
        and keys_a_row(problem) < FINISHED_KEYS.get((form.block_d, form.block_dv), 0)
    )


def _last_sections(problem: Problem, form: BackwardForm) -> int:
    """Sections of causal heads in which turns go from the first keys to the last: two where heads are grouped (GQA 64/8
    causal 8k 1.20 of the speed for 1.10 with one, 16k 1.105 for 1.125, H200). None where a head's gradients must not
    depend on how many there are.
    """
    causal = problem.mask.right and not problem.mask.left and not problem.packed
    if not (form.ordered and causal) or problem.batch_invariant:
        return 0
    return 2 if form.members > 1 else 1


def _lags(problem: Problem, splits: int, widths: tuple[int, int], tuning: BackwardTuning, ordered: bool) -> bool:
    """Whether a step multiplies dq of the step before, so that the two consumers need not be in step."""
    if widths not in LAGGING_STEPS or problem.mask.documents or problem.softcap:
        return False
    keys = problem.layout.tokens[1]
    steps = problem.group // splits * visible_pairs(problem) / (keys * tuning.block_m) if keys else 0.0
    return steps * (2 if ordered and widths == (64, 64) else 1) >= LAGGING_STEPS[widths]


def _begins(problem: Problem, widths: tuple[int, int]) -> bool:
    """Whether scores begin at -lse even without lags."""
    return widths == (128, 128) and problem.mask.right


def _splits(problem: Problem, target: Target, tuning: BackwardTuning) -> int:
    """Programs to divide a group among: enough to fill the SMs, twice as many where the costs of programs differ, lest
    the longest decide.

    Each adds its share of dk and dv in float32 memory, so more are wanted only of long programs: GQA 64/8 causal at 8k
    550 TFLOP/s in four parts, 526 in two, 426 in one; at 2k 426 in four and 399 in eight (H200). How long those of
    documents are nobody knows here.
    """
    layout: Any = problem.layout
    tiles = (
        layout.total_k // tuning.block_n + layout.batch
        if problem.packed
        else layout.batch * -(-layout.seqlen_k // tuning.block_n)
    )
    steps = (layout.total_q // max(1, layout.batch) if problem.packed else layout.seqlen_q) // tuning.block_m
    uneven = problem.packed or problem.mask.right != problem.mask.left
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
    """The problem whose out the forward writes: a partial one it cannot, but the backward can read it."""
    return replace(problem, out_dtype=problem.dtype)


BACKWARD: Any = HopperBackward()
