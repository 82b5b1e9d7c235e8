"""The Hopper kernels' answers: what they can run, with which tiles, and how. Imports no DSL until something runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...call import Call
from ...mask import MaskStructure
from ...problem import Problem
from ...target import KIB, Target
from .. import invariant
from ..kernel import Backward, Buffer, Cost, Forward, Plan, attention_cost, entries, visible_pairs
from ..tma import against_call, against_memory, against_spans, against_tools, fold_of, has_spans, joined, query_tiles, rest
from .decode_config import DECODE as DECODE
from .decode_config import MOST_SHARED, InvariantConfig, invariant_config

CAPABILITY = 90
MOST_WIDTH = 256
ROWS = 64  # of one consumer
BOARD_BYTES = 64  # of the backward: a tile's numbers
ROUNDING = 512  # more than alignment adds to what a backward's program asks for


@dataclass(frozen=True)
class Tuning:
    """Tile and roles of the forward."""

    block_n: int
    stages: int
    consumers: int
    q_in_registers: int = 0  # of q's parts
    half_staged: bool = False  # o leaves through a buffer of half its first part, where tiles leave no room for more
    # all weights are made under the product of those before; else ptxas waits for it sooner: d192 dense 8k 690 TFLOP/s for 636, d256 causal 16k
    # 687 for 615 (H200); where exponentials are the limit it loses: d64 causal 4k 400 for 408
    under: bool = True
    ping_pong: bool = False  # consumers take turns at issuing products
    joined: int = 1  # query heads that a tile holds, of a query each in rows that follow each other: one, or all that share a key head

    @property
    def fold(self) -> int:
        """Rows of a tile that a query takes."""
        return fold_of(self.joined)

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return ROWS * self.consumers // self.fold


class InParts:
    """Columns of tiles in two parts: products take powers of two."""

    block_d: int
    block_dv: int

    @property
    def rest_d(self) -> int:
        """Columns of q and k beyond their first part."""
        return rest(self.block_d)

    @property
    def first_d(self) -> int:
        return self.block_d - self.rest_d

    @property
    def rest_dv(self) -> int:
        return rest(self.block_dv)

    @property
    def first_dv(self) -> int:
        return self.block_dv - self.rest_dv


@dataclass(frozen=True)
class Form(InParts):
    """All that a compiled kernel holds as constants; no __str__ of its own, since Triton tells kernels apart by it."""

    tuning: Tuning
    block_d: int
    block_dv: int
    group: int  # heads that share a key head and have tiles of their own
    mask: MaskStructure
    softcap: bool
    sinks: bool
    even: bool  # S_k is a multiple of block_n
    packed: bool
    counted: bool  # programs take tiles from a counter
    early: bool  # weights before maxima

    @property
    def spans(self) -> bool:
        """Whether rows of a batch entry see different spans of keys: device.spans."""
        return has_spans(self.mask)

    @property
    def wraps(self) -> bool:
        """Whether TMA's views wrap: device.views."""
        return self.packed or self.spans

    @property
    def returns(self) -> bool:
        """Whether a tile may be done again."""
        return self.early or self.mask.documents

    @property
    def masks(self) -> bool:
        """Whether any tile may hold a hidden key; where none can, the loop has no code for masks."""
        return self.mask.left or self.mask.right or self.spans or not self.even

    @property
    def own_queries(self) -> int:
        """Queries of one consumer."""
        return ROWS // self.tuning.fold

    @property
    def slots(self) -> int:
        """Tiles of q that shared memory is laid out for: a power of two."""
        return 2 if self.tuning.consumers == 2 else 4

    def shared_bytes(self) -> int:
        """q (and o) of all consumers, k and v of all stages, at 2 bytes, the barriers, the board of two tiles' numbers, and verdicts on them."""
        t = self.tuning
        o = self.slots * ROWS * (self.first_dv // (1 + t.half_staged) + self.rest_dv)
        tiles = 2 * (self.slots * ROWS * self.block_d + o + t.stages * t.block_n * (self.block_d + self.block_dv))
        return tiles + 8 * (2 * t.consumers + (4 + self.mask.documents) * t.stages + 4) + 128 + 2048 * self.returns


@dataclass(frozen=True)
class ForwardConfig:
    form: Form

    def __str__(self) -> str:
        t = self.form.tuning
        where = "registers" if t.q_in_registers else "shared memory"
        heads = f" of {t.joined} heads" if t.joined > 1 else ""
        early = ", early weights" if self.form.early else ""
        return (f"block_m={t.block_m}{heads} block_n={t.block_n} stages={t.stages} q in {where}{early}, "
                f"shared {self.form.shared_bytes() / KIB:.0f} KiB")  # fmt: skip


# (head dimensions, padded to what tiles hold) -> tiles; what fits, then what was fastest on an H200
TUNINGS = {
    (64, 64): Tuning(block_n=128, stages=3, consumers=3, under=False, ping_pong=True),
    (96, 96): Tuning(block_n=128, stages=2, consumers=2, q_in_registers=2, under=False, ping_pong=True),
    (128, 128): Tuning(block_n=128, stages=2, consumers=2, q_in_registers=1),
    (192, 128): Tuning(block_n=128, stages=2, consumers=2, q_in_registers=1, half_staged=True, ping_pong=True),
    (192, 192): Tuning(block_n=64, stages=3, consumers=2, q_in_registers=1, half_staged=True, ping_pong=True),
    (256, 128): Tuning(block_n=64, stages=2, consumers=2, ping_pong=True),
    (256, 256): Tuning(block_n=64, stages=2, consumers=2, half_staged=True, ping_pong=True),
}
# for windows and documents: four consumers and 64 keys, for three and 64 (windows) or 128: d64 window 1024 of 16k 1.045 of the speed, of 4k 0.98,
# 16 documents of 16k 1.09 (H200)
WINDOWED = {(64, 64): Tuning(block_n=64, stages=6, consumers=4, under=False, ping_pong=True)}
# where early weights (`early`) gain; at 256 products alone are the limit. Of fewer keys a row than these, on average, verdicts cost
# more than they save: d128 causal 0.96 of the speed at 512, 0.99 at 1,024, grouped 1.04 at 2,048, of half as many keys a row (H200)
EARLY = {(64, 64), (96, 96), (128, 128), (192, 128), (192, 192)}
EARLY_KEYS = 640
# for a softcap, whose tanh takes registers
CAPPED = {
    (64, 64): Tuning(block_n=64, stages=6, consumers=3, q_in_registers=1, under=False, ping_pong=True),
    (128, 128): Tuning(block_n=64, stages=4, consumers=2, q_in_registers=1),
    (192, 128): Tuning(block_n=64, stages=4, consumers=2, half_staged=True),
}
# of fewer keys a row, on average: d64 causal 512 1.05, 1k 1.12, 4k 1.05, 16k 1.00, dense 512 1.07, 4k 1.01, 16k 0.986; d128 causal 256 to 700 1.02 to
# 1.03, but 1,024 0.98 and dense 512 0.94 (H200)
FEW = {(64, 64): (12_000, WINDOWED[64, 64]), (128, 128): (400, CAPPED[128, 128])}


def tiled(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The key of TUNINGS, and of BACKWARD_TUNINGS, that a call's head dimensions are padded to."""
    return next(widths for widths in TUNINGS if widths[0] >= head_dim and widths[1] >= head_dim_v)


def tuning_of(problem: Problem) -> Tuning:
    widths = tiled(problem.head_dim, problem.head_dim_v)
    bounded = problem.mask.left or problem.mask.documents
    special = CAPPED.get(widths) if problem.softcap else WINDOWED.get(widths) if bounded else None
    fewest, of_few = FEW.get(widths, (0, None))
    return special or (of_few if keys_a_row(problem) < fewest else None) or TUNINGS[widths]


def keys_a_row(problem: Problem) -> float:
    """Keys that a query sees, on average; of packed sequences as if all were of one length."""
    rows = problem.layout.tokens[0]
    return visible_pairs(problem) / rows if rows else 0.0


def early(problem: Problem) -> bool:
    """Whether weights come before maxima."""
    widths = tiled(problem.head_dim, problem.head_dim_v)
    return widths in EARLY and keys_a_row(problem) >= EARLY_KEYS


def _why_not(problem: Problem, target: Target) -> str | None:
    if target.kind != "cuda" or target.capability != CAPABILITY:
        return f"made for sm_{CAPABILITY}; this target is {f'sm_{target.capability}' if target.kind == 'cuda' else 'a CPU'}"
    return _against(problem)


def _against(problem: Problem) -> str | None:
    if max(problem.head_dim, problem.head_dim_v) > MOST_WIDTH:
        return f"head dimensions up to {MOST_WIDTH}; this is {problem.head_dim}/{problem.head_dim_v}"
    return (against_call(problem) or against_memory(problem) or against_spans(problem)
            or against_tools())  # fmt: skip


class HopperForward:
    name = "hopper.forward"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if problem.batch_invariant:
            return DECODE.why_not(invariant.as_decode(problem), target) or invariant.against(problem)
        return _why_not(problem, target)

    def config(self, problem: Problem, target: Target) -> ForwardConfig | InvariantConfig:
        if problem.batch_invariant:
            return invariant_config(problem)
        tuning = tuning_of(problem)
        # in a window's tiles fewer queries, of more heads, see fewer keys: 0 to 9 % where there are as many tiles (H200, windows of 128 to 4096)
        fewer = 0.0 if problem.mask.left else 0.1
        tuning = replace(tuning, joined=joined(problem, ROWS * tuning.consumers, ROWS, fewer))
        group = problem.group // tuning.joined
        even = not problem.packed and problem.layout.seqlen_k % tuning.block_n == 0  # type: ignore[union-attr]
        widths = tiled(problem.head_dim, problem.head_dim_v)
        counted = query_tiles(problem, tuning.block_m) * problem.heads_kv * group * entries(problem) > target.sm_count
        form = Form(tuning, *widths, group, problem.mask, bool(problem.softcap), problem.sinks, even, problem.packed, counted, early(problem))
        return ForwardConfig(form)

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem)

    def workspace(self, problem: Problem, config: object) -> tuple[Buffer, ...]:
        return ()

    def run(self, plan: Plan, call: Call, tensors: Forward, workspace: dict[str, Tensor]) -> None:  # type: ignore[override]
        if plan.problem.batch_invariant:
            from .launch_decode import run_invariant as run
        else:
            from .launch import run_forward as run
        run(plan, call, tensors)


FORWARD: Any = HopperForward()


# ---------------------------------------------------------------- backward


@dataclass(frozen=True)
class BackwardTuning:
    """Tile and rings of the backward: two consumers walk block_m queries a step, over 64 keys each or over the same 64 or 128."""

    block_m: int
    block_n: int
    stages: int  # of q
    stages_do: int
    parts: int = 1  # in which a tile of dq goes through shared memory where one consumer makes all of it
    k_in_registers: bool = False
    roles: bool = False  # of 128 keys too, one consumer makes weights, ds and dv, the other dq and dk
    hides_weights: bool = True


@dataclass(frozen=True)
class BackwardForm(InParts):
    """All that the backward's kernels hold as constants; no __str__ of its own, since Triton tells kernels apart by it."""

    tuning: BackwardTuning
    block_d: int
    block_dv: int
    head_dim: int
    head_dim_v: int
    group: int
    mask: MaskStructure
    softcap: bool
    even: bool  # S_k is a multiple of block_n
    packed: bool
    ordered: bool = False  # tiles of keys take turns to add to a tile of dq, the last that it sees first; programs then take the last keys first
    splits: int = 1  # programs among which the heads of a group are divided
    first_stores: bool = False  # the first tile of keys to come to a tile of dq stores, so that nothing clears dq's sum; the others wait for that
    lags: bool = False  # a step multiplies dq of the step before
    begun: bool = False  # scores begin at -lse over their scale

    @property
    def spans(self) -> bool:
        """Whether rows of a batch entry see different spans of keys: backward_spans."""
        return has_spans(self.mask)

    @property
    def wraps(self) -> bool:
        """Whether TMA's views wrap: device.views."""
        return self.packed or self.spans

    @property
    def members(self) -> int:
        """Query heads that a program walks."""
        return self.group // self.splits

    @property
    def dk_width(self) -> int:
        """Columns of dk's float32 sum: as many as give rows of whole 16 bytes."""
        return whole_lines(self.head_dim)

    @property
    def dv_width(self) -> int:
        return whole_lines(self.head_dim_v)

    @property
    def halves(self) -> bool:
        """Each consumer takes half of the keys; else one makes weights, ds and dv, the other dq and dk: backward_roles."""
        return self.tuning.block_n == 2 * ROWS and not self.tuning.roles

    @property
    def two_tiles(self) -> bool:
        """128 keys, for which ds is two tiles of 64, where one consumer makes weights."""
        return self.tuning.block_n == 2 * ROWS and self.tuning.roles

    def has_dk(self, consumer: int) -> bool:
        return self.halves or consumer == 1

    def has_dv(self, consumer: int) -> bool:
        return self.halves or consumer == 0

    @property
    def rest_dq(self) -> int:
        """dq's columns: where they pass through shared memory in two parts, the rest is half of them unless q has its own."""
        return self.rest_d or (self.block_d // 2 if self.tuning.parts == 2 else 0)

    @property
    def first_dq(self) -> int:
        return self.block_d - self.rest_dq

    @property
    def places(self) -> int:
        """Those of dq that are handed over each by itself: one a consumer, of 64 keys one a unit."""
        return 2 if self.halves else self.dq_slot

    @property
    def by_rows(self) -> bool:
        """A share is 64 of the tile's queries, not some of dq's columns; a step then takes them 64 by 64."""
        return self.tuning.block_m == 2 * ROWS

    def share_columns(self, consumer: int) -> int:
        if self.by_rows:
            return self.block_d
        return (self.first_dq, self.rest_dq)[consumer] if self.rest_dq else self.first_dq // 2

    def share_column(self, consumer: int) -> int:
        """A share's first column."""
        return 0 if self.by_rows else consumer * self.share_columns(0)

    def share_unit(self, consumer: int) -> int:
        """A share's first unit."""
        return consumer if self.by_rows else self.share_column(consumer) // self.dq_unit

    @property
    def dq_unit(self) -> int:
        """Columns of 64 rows of dq that TMA adds at once."""
        if not self.halves:
            return ROWS // 2 if self.two_tiles else ROWS
        return self.rest_dq or (self.first_dq if self.by_rows else self.first_dq // 2)

    def dq_units_written(self) -> int:
        """Units, of all rows of a tile, that hold columns of dq: head dimensions may be padded by whole ones."""
        return -(-self.head_dim // self.dq_unit)

    def dq_width(self, unit: int) -> int:
        """Columns of a unit that are dq's."""
        return min(self.dq_unit, self.head_dim - unit * self.dq_unit)

    def dq_units(self) -> int:
        """Units of a tile of dq."""
        return self.block_d // self.dq_unit * (self.tuning.block_m // ROWS)

    @property
    def dq_slot(self) -> int:
        """Units from one slot of dq's channel to the next: where there are two, a power of two, as the shape of a slot must be."""
        units = self.dq_units() // self.tuning.parts
        return units if self.stores == 1 else 1 << (units - 1).bit_length()

    @property
    def stores(self) -> int:
        """Warps that add dq, each every other tile where a turn is passed once the add stands in memory: that is longer than a step (deterministic
        d128 causal 8k 512 TFLOP/s for 467, H200)."""
        return 2 if self.ordered and self.halves else 1

    @property
    def reckons(self) -> bool:
        """Whether steps reckon addresses anew (backward_steps.tile_now): d128 dense, which then has room for form.lags, 1.07 to 1.09 of the speed,
        d256, whose programs then take tile after tile, 1.00 to 1.02, d64 causal 1.01, window 1.06, but dense without lags 0.99 (H200)."""
        return self.masks or self.lags or not self.by_rows

    @property
    def registers(self) -> tuple[int, int]:
        """A consumer's, and those of warps that load and store: who loads documents spills with 24 (with 40 d96 1.01, d128 1.003, H200)."""
        return (232, 40) if self.mask.documents and not (self.softcap or self.by_rows or self.two_tiles) else (240, 24)

    @property
    def hides_weights(self) -> bool:
        """A hidden key's weight is made 0, behind the exponentials; else its score -inf, before them, which takes fewer registers."""
        return self.tuning.hides_weights and not (self.lags and self.by_rows)

    @property
    def dq_lines(self) -> int:
        """Lines of 256 numbers that a unit takes."""
        return ROWS * self.dq_unit // 256

    @property
    def products_d(self) -> int:
        """Products issued one by one, for each of s and dk."""
        return 2 if self.rest_d else 1

    @property
    def products_dv(self) -> int:
        return 2 if self.rest_dv else 1

    @property
    def masks(self) -> bool:
        """Whether any tile may hold a hidden key."""
        return self.mask.left or self.mask.right or not self.even

    @property
    def key_places(self) -> int:
        """Tiles of keys, and of values, that shared memory holds: of two, the next comes under the steps of the one before. Where later keys are
        hidden: d64 causal 4k and 8k 1.007, 16k 1.015 of the speed, d96 1.003, d64 dense 0.995 (H200)."""
        walks = self.halves and self.splits == 1 and self.mask.right and not self.spans
        return 2 if walks and self._shared_bytes(2) + ROUNDING <= MOST_SHARED else 1

    def shared_bytes(self) -> int:
        return self._shared_bytes(self.key_places)

    def _shared_bytes(self, key_places: int) -> int:
        """k, v, q and do of all stages and ds at 2 bytes, weights on their way, dq, lse and delta at 4, the barriers, and a tile's numbers."""
        t = self.tuning
        rings = t.block_m * (t.stages * (2 * self.block_d + 4) + t.stages_do * (2 * self.block_dv + 4))
        keys = 2 * t.block_n * key_places * (self.block_d + self.block_dv)
        handed = t.block_m * ROWS * 2 * (4 if self.halves else 2 * t.stages if self.two_tiles else 1)
        of_keys = 2 + 2 * key_places + 3 * (self.splits > 1 or self.two_tiles) + t.stages * self.mask.documents
        of_ds = 4 * (1 + self.lags) if self.halves else t.stages if self.two_tiles else 1
        barriers = 2 * t.stages + (2 - self.halves) * t.stages_do + of_keys + of_ds + 2 * self.stores * self.places
        return rings + keys + handed + self.stores * 1024 * self.dq_slot * self.dq_lines + 8 * barriers + BOARD_BYTES


@dataclass(frozen=True)
class BackwardConfig:
    form: BackwardForm

    def __str__(self) -> str:
        t = self.form.tuning
        return (f"block_m={t.block_m} block_n={t.block_n} stages={t.stages}/{t.stages_do} dq added by TMA{' in order' * self.form.ordered}, "
                f"{f'group of {self.form.group} in {self.form.splits}, ' * (self.form.splits > 1)}"
                f"shared {self.form.shared_bytes() / KIB:.0f} KiB")  # fmt: skip


# (head dimensions, padded to what tiles hold) -> tiles of the backward: what fits without spills, then what was fastest on an H200
BACKWARD_TUNINGS = {
    (64, 64): BackwardTuning(block_m=128, block_n=128, stages=2, stages_do=2, k_in_registers=True),
    (96, 96): BackwardTuning(block_m=64, block_n=128, stages=3, stages_do=3, k_in_registers=True),
    (128, 128): BackwardTuning(block_m=64, block_n=128, stages=3, stages_do=3, hides_weights=False),
    (192, 128): BackwardTuning(block_m=64, block_n=128, stages=2, stages_do=2, parts=2, roles=True),
    (192, 192): BackwardTuning(block_m=64, block_n=64, stages=3, stages_do=2),
    (256, 128): BackwardTuning(block_m=64, block_n=64, stages=3, stages_do=2, parts=2),
    (256, 256): BackwardTuning(block_m=64, block_n=64, stages=2, stages_do=1, parts=2),
}
# where later keys are hidden: d128 causal 8k 553 TFLOP/s for 539, though dense 16k 555 for 590 (H200, medians of three runs); and where
# programs take turns, since dq's second tile takes the room
BACKWARD_TIGHT = {(128, 128): BackwardTuning(block_m=64, block_n=128, stages=2, stages_do=2, hides_weights=False)}
BACKWARD_CAPPED = {(64, 64): BackwardTuning(block_m=64, block_n=128, stages=3, stages_do=3)}  # for tanh's registers: 0 bytes of spills for 1340

# where a tile of keys takes so many steps or more, on average, a step multiplies dq of the step before; of fewer what is multiplied once more and
# last costs more: d128 dense 512 1.00, 1k 1.04, 2k and more 1.08, causal 512 0.96, 1k 0.97, 2k 1.01, 4k 1.04 of the speed, GQA 64/8 2k 1.02; d96
# causal 1k and 2k 0.93, 8k 1.03 to 1.04, dense 8k 1.01; d64 dense 4k 1.00, 8k 1.01, 16k 1.03, causal 4k and 8k 0.99, 16k 1.02, but 8k 1.015 where
# programs take turns at dq (H200)
LAGGING_STEPS = {(64, 64): 48, (96, 96): 48, (128, 128): 12}
# scores begin at -lse over their scale with lags and, at 128, where later keys are hidden: d128 causal 1k 1.02, 4k 1.015, 8k 1.02, 16k 1.01, with
# lags 1.00 to 1.01, of documents 1.045, dense with lags 1.10, without 0.99; d96 with lags 1.015, without 0.98; d64 0.94 (H200)
BEGUN = {(96, 96), (128, 128)}
FINE = 2.0**100  # scales up to this, and from its inverse on, by which lse may be divided

STORED_KEYS = {(64, 64): 1200, (96, 96): 1200, (128, 128): 2400}  # a row, on average, up to which the first tile stores


class HopperBackward:
    name = "hopper.backward"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability != CAPABILITY:
            return _why_not(problem, target)
        if has_spans(problem.mask) and _ordered(problem):
            return "gradients under prefixes, key lengths and documents without turns at dq only; this asks for deterministic ones"
        return _against(_written(problem))

    def config(self, problem: Problem, target: Target) -> BackwardConfig:
        head_dims = problem.head_dim, problem.head_dim_v
        widths = tiled(*head_dims)
        ordered = _ordered(problem)
        capped = BACKWARD_CAPPED.get(widths) if problem.softcap else None
        smaller = BACKWARD_TIGHT.get(widths) if problem.mask.right or ordered else None
        tuning = capped or smaller or BACKWARD_TUNINGS[widths]
        even = not problem.packed and not has_spans(problem.mask) and problem.layout.seqlen_k % tuning.block_n == 0  # type: ignore[union-attr]
        splits = 1 if ordered or widths[0] != widths[1] else _splits(problem, target, tuning)
        stores = ordered or _first_stores(problem, splits, widths)
        lags = _lags(problem, splits, widths, tuning, ordered)
        begun = widths in BEGUN and (lags or _begins(problem, widths)) and not problem.softcap and 1 / FINE < problem.scale < FINE
        constants = problem.group, problem.mask, bool(problem.softcap), even, problem.packed, ordered, splits, stores, lags, begun
        return BackwardConfig(BackwardForm(tuning, *widths, *head_dims, *constants))

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem, backward=True)

    def workspace(self, problem: Problem, config: BackwardConfig) -> tuple[Buffer, ...]:
        """lse and delta of each row as the main kernel reads them; dq's sum, the counter and turns, which the first kernel sets to 0; sums of dk
        and dv."""
        form = config.form
        heads = (problem.heads_q,) if problem.packed else (problem.layout.batch, problem.heads_q)
        tiles = query_tiles(problem, form.tuning.block_m)
        rows = Buffer("rows", (2, *heads, tiles * form.tuning.block_m), torch.float32)
        dq_sum = Buffer("dq_sum", (*heads, tiles, form.tuning.block_m * form.block_d), torch.float32)
        buffers = [rows, dq_sum, Buffer("counter", (1,), torch.int32)]
        if form.first_stores:
            buffers.append(Buffer("turns", (*heads, tiles), torch.int32))
        if form.splits > 1:
            keys = problem.layout.total_k if problem.packed else problem.layout.seqlen_k  # type: ignore[union-attr]
            widths = {"dk_sum": form.dk_width, "dv_sum": form.dv_width}
            buffers += [Buffer(name, (*heads[:-1], problem.heads_kv, keys, width), torch.float32, 0.0) for name, width in widths.items()]
        return tuple(buffers)

    def run(self, plan: Plan, call: Call, tensors: Backward, workspace: dict[str, Tensor]) -> None:  # type: ignore[override]
        from .launch_backward import run_backward

        run_backward(plan, call, tensors, workspace)


LONG_PROGRAM = 64  # steps of the longest, of which its sums in float32 memory are a small part


def whole_lines(width: int) -> int:
    """A row of this many float32 numbers, made whole units of 16 bytes."""
    return -(-width // 4) * 4


def _first_stores(problem: Problem, splits: int, widths: tuple[int, int]) -> bool:
    """Whether clearing dq's sum takes longer than waiting for the first tile of keys: where rows see few keys, and tiles come one after the other.

    Dense ones come together, and of causal heads that a program walks in turn the shorter tiles come first to the second: dense 4k 0.96 of the speed,
    GQA 64/8 causal 2k 0.88. d128 causal 512 1.11, 1k 1.06, 2k 1.02, 4k 1.01, 16k 0.96; d64 1.04, 1.03, 1.00, 0.99, 0.96; windows of 256, 1,024,
    2,048 and 4,096 1.08 to 1.11, 1.03, 0.99, 0.91 to 1.00; d192 causal 8k 0.70 (H200).
    """
    mask = problem.mask
    apart = mask.right and (mask.left or splits == problem.group)
    return apart and not has_spans(mask) and keys_a_row(problem) <= STORED_KEYS.get(widths, 0)


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
    """Programs to divide a group among: enough to fill the SMs, twice as many where the costs of programs differ, lest the longest decide.

    Each adds its share of dk and dv in float32 memory, so more are wanted only of long programs: GQA 64/8 causal at 8k 550 TFLOP/s in four
    parts, 526 in two, 426 in one; at 2k 426 in four and 399 in eight (H200). How long those of documents are nobody knows here.
    """
    layout: Any = problem.layout
    tiles = layout.total_k // tuning.block_n + layout.batch if problem.packed else layout.batch * -(-layout.seqlen_k // tuning.block_n)
    steps = (layout.total_q // max(1, layout.batch) if problem.packed else layout.seqlen_q) // tuning.block_m
    uneven = problem.packed or problem.mask.right != problem.mask.left
    may_be_more = uneven and not problem.mask.documents
    divisors = [n for n in range(1, problem.group + 1) if problem.group % n == 0]
    enough = lambda wanted: next((n for n in divisors if tiles * problem.heads_kv * n >= wanted), problem.group)
    least, most = enough(2 * target.sm_count if uneven else target.sm_count * 3 // 4), enough(8 * target.sm_count if may_be_more else 1)
    return max(n for n in divisors if n == least or (least < n <= most and problem.group // n * steps >= LONG_PROGRAM))


def _ordered(problem: Problem) -> bool:
    return problem.deterministic or problem.batch_invariant


def _written(problem: Problem) -> Problem:
    """The problem whose out the forward writes: a partial one it cannot, but the backward can read it."""
    return replace(problem, out_dtype=problem.dtype)


BACKWARD: Any = HopperBackward()
