"""The Blackwell forward's answers: what it can run, with which tiles, and how. Imports no DSL until something runs.

It has not run on a Blackwell GPU: what is known of it was shown by the simulator, by compiling it, and by counting cycles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...problem.call import Call
from ...problem.mask import MaskStructure
from ...problem.problem import Problem
from ...problem.target import KIB, Target
from ..protocol import Buffer, Cost, Forward, Plan, attention_cost, entries
from ..runtime.constants import Constants
from ..runtime.tma_requirements import against_call, against_mask, against_memory, against_tools, fold_of, joined, query_tiles, rest

CAPABILITIES = (100, 103)
ROWS = 128  # of one query stage: the lanes of tensor memory
STAGES_Q = 2  # query stages, whose softmaxes take turns with their products
TENSOR_COLUMNS = 512  # of tensor memory, 32 bits wide
REGISTERS = 128  # a thread, of the 64 Ki of an SM: 16 warps with the one that Triton adds


@dataclass(frozen=True)
class Tuning:
    """Tile and rings of the forward."""

    stages: int  # of the ring that keys and values share
    out_stages: int  # buffers through which tiles of o leave
    block_n: int = 128
    registers: tuple[int, int] = (184, 48)  # of a thread of softmax, and of mma, load and store; correct has what they leave: see `registers_of`
    threshold: float = 8.0  # o is rescaled where a row's maximum grows by more, in log2 units
    joined: int = 1  # query heads that a tile holds, of a query each in rows that follow each other: one, or all that share a key head

    @property
    def fold(self) -> int:
        """Rows of a tile that a query takes."""
        return fold_of(self.joined)

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return ROWS * STAGES_Q // self.fold

    def registers_of(self) -> dict[str, int]:
        """Each role's registers a thread: 8 warps of softmax, 4 of one warp each (one of them idle), 4 of correct."""
        softmax, few = self.registers
        return {"softmax": softmax, "mma": few, "load": few, "store": few, "correct": (16 * REGISTERS - 8 * softmax - 4 * few) // 4}


@dataclass(frozen=True)
class Form(Constants):
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
    counted: bool  # programs take tiles from a counter, since tiles differ in cost; else each takes those that stand apart by their number
    by_fma: int  # of each 32 weights, those whose exponentials multiply-adds compute
    degree: int  # of their polynomial
    lift: float  # p reaches up to 2^lift where a maximum is new, and up to 2^(lift + threshold) where it lags

    @property
    def wraps(self) -> bool:
        """Whether TMA's views wrap: device.views."""
        return self.packed

    @property
    def masks(self) -> bool:
        """Whether any tile may hold a hidden key; where none can, the loop has no code for masks."""
        return self.mask.left or self.mask.right or not self.even

    @property
    def own_queries(self) -> int:
        """Queries that walk keys by themselves: both query stages walk the same."""
        return self.tuning.block_m

    @property
    def stage_queries(self) -> int:
        """Queries of a query stage."""
        return ROWS // self.tuning.fold

    @property
    def rest_d(self) -> int:
        """Columns of q and k beyond their first part: shapes are powers of two."""
        return rest(self.block_d)

    @property
    def rest_dv(self) -> int:
        return rest(self.block_dv)

    def shared_bytes(self) -> int:
        """q, the ring of k and v, and o at 2 bytes; the mailboxes at 4, the barriers, and the board of two tiles' numbers."""
        t = self.tuning
        widest = max(self.block_d - self.rest_d, self.block_dv - self.rest_dv) + max(self.rest_d, self.rest_dv)
        tiles = 2 * (STAGES_Q * ROWS * self.block_d + t.stages * t.block_n * widest + t.out_stages * ROWS * self.block_dv)
        return tiles + 4 * 2 * STAGES_Q * ROWS + 8 * (8 * STAGES_Q + 2 * t.stages + 2 * t.out_stages + 4) + 64

    def tensor_columns(self) -> int:
        """s (p lies over it) and o of both query stages in float32."""
        return STAGES_Q * (self.tuning.block_n + self.block_dv)


@dataclass(frozen=True)
class ForwardConfig:
    form: Form

    def __str__(self) -> str:
        t = self.form.tuning
        registers = ", ".join(f"{role} {count}" for role, count in t.registers_of().items())
        by_fma = f", {self.form.by_fma} of 32 exponentials by multiply-adds of degree {self.form.degree}" if self.form.by_fma else ""
        order = "tiles from a counter" if self.form.counted else "tiles in turn"
        heads = f" of {t.joined} heads" if t.joined > 1 else ""
        return (f"block_m={t.block_m}{heads} block_n={t.block_n} stages={t.stages}, {order}, shared {self.form.shared_bytes() / KIB:.0f} KiB, "
                f"{self.form.tensor_columns()} columns of tensor memory{by_fma}, registers {registers}; has not run on a Blackwell GPU")  # fmt: skip


# (head dimensions, padded to what tiles hold) -> rings, as shared memory allows
TUNINGS = {
    (64, 64): Tuning(stages=6, out_stages=2, registers=(192, 40)),
    (96, 96): Tuning(stages=4, out_stages=2),
    (128, 128): Tuning(stages=3, out_stages=2, registers=(192, 40)),
    (192, 128): Tuning(stages=2, out_stages=1),
}
# bfloat16 rounds p by twenty times what degree 3 errs, float16 by little more than twice; lse, which is not rounded, errs as the polynomial does
DEGREES = {"torch.float16": 5, "torch.bfloat16": 3}
# (capability, head dimensions, whether a mask bounds keys) -> by_fma for each degree; 0 elsewhere: sm_103 has twice the exp units, and at 192/128
# products take longer than exponentials. What `bench.cycles` finds best at d64; at d128 it leaves the exp unit a quarter of its time.
BY_FMA = {
    (100, (64, 64), False): {3: 8, 5: 7}, (100, (64, 64), True): {3: 8, 5: 7},
    (100, (96, 96), False): {3: 8, 5: 7}, (100, (96, 96), True): {3: 8, 5: 7},
    (100, (128, 128), False): {3: 8, 5: 8}, (100, (128, 128), True): {3: 8, 5: 8},
}  # fmt: skip
# a float16 p below 2^-14 loses bits: of the 15 powers of two up to its largest, 7 raise p and 8 are the threshold's
LIFTS = {"torch.float16": 7.0, "torch.bfloat16": 0.0}


def tiled(head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """The key of TUNINGS that a call's head dimensions are padded to; None where tiles hold no such width."""
    return next((widths for widths in TUNINGS if widths[0] >= head_dim and widths[1] >= head_dim_v), None)


def _against_widths(problem: Problem) -> str | None:
    if tiled(problem.head_dim, problem.head_dim_v):
        return None
    return (f"head dimensions up to 128, or 192 with values of at most 128: tensor memory holds two tiles of scores and two of o; "
            f"this is {problem.head_dim}/{problem.head_dim_v}")  # fmt: skip


class BlackwellForward:
    name = "blackwell.forward"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability not in CAPABILITIES:
            return f"needs tensor memory (sm_{', sm_'.join(map(str, CAPABILITIES))}); this target is {target.words}"
        if problem.batch_invariant:
            return "batch_invariant=True gives rows the bits of a decode, and this family has none"
        return _against_widths(problem) or against_call(problem) or against_mask(problem.mask) or against_memory(problem) or against_tools()

    def config(self, problem: Problem, target: Target) -> ForwardConfig:
        widths = tiled(problem.head_dim, problem.head_dim_v)
        if widths is None:
            raise ValueError(_against_widths(problem))
        tuning = replace(TUNINGS[widths], joined=joined(problem, ROWS * STAGES_Q, ROWS))
        group = problem.group // tuning.joined
        even = not problem.packed and problem.layout.seqlen_k % tuning.block_n == 0  # type: ignore[union-attr]
        uneven = problem.packed or problem.mask.left or problem.mask.right  # some tiles see fewer keys than others
        counted = uneven and query_tiles(problem, tuning.block_m) * problem.heads_kv * group * entries(problem) > target.sm_count
        options = (bool(problem.softcap), problem.sinks, even, problem.packed, counted)
        degree = DEGREES[str(problem.dtype)]
        by_fma = BY_FMA.get((target.capability, widths, problem.mask.left or problem.mask.right), {}).get(degree, 0)
        return ForwardConfig(Form(tuning, *widths, group, problem.mask, *options, by_fma, degree, LIFTS[str(problem.dtype)]))

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem)

    def workspace(self, problem: Problem, config: object) -> tuple[Buffer, ...]:
        return ()

    def run(self, plan: Plan, call: Call, tensors: Forward, workspace: dict[str, Tensor]) -> None:  # type: ignore[override]
        from .launch import run_forward

        run_forward(plan, call, tensors)


FORWARD: Any = BlackwellForward()
