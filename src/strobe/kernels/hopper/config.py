"""The Hopper kernels' answers: what they can run, with which tiles, and how. Imports no DSL until something runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...call import DTYPES, Call, Dense
from ...knobs import KNOBS
from ...mask import MaskStructure
from ...problem import ALIGNMENT, Problem
from ...target import KIB, Target
from ..kernel import Buffer, Cost, Forward, Plan, attention_cost, no_triton

CAPABILITY = 90
MOST_WIDTH = 256
ROWS = 64  # of one consumer


@dataclass(frozen=True)
class Tuning:
    """Tile and roles of the forward; `o_over_q` stages o where q was, for head dimensions that leave no room for a buffer of its own."""

    block_n: int
    stages: int
    consumers: int
    q_in_registers: bool
    o_over_q: bool = False
    late_rescale: bool = False  # o is rescaled under the next scores' product
    ping_pong: bool = False  # consumers take turns at issuing products


@dataclass(frozen=True)
class Form:
    """All that a compiled kernel holds as constants; no __str__ of its own, since Triton tells kernels apart by it."""

    tuning: Tuning
    block_d: int
    block_dv: int
    group: int
    mask: MaskStructure
    softcap: bool
    sinks: bool
    even: bool  # S_k is a multiple of block_n

    @property
    def masks(self) -> bool:
        """Whether any tile may hold a hidden key; where none can, the loop has no code for masks, and is 120 instructions shorter."""
        return self.mask.left or self.mask.right or not self.even

    def shared_bytes(self) -> int:
        """q (and o) of all consumers, k and v of all stages, at 2 bytes, and the barriers."""
        t = self.tuning
        slots = 2 if t.consumers == 2 else 4
        o = 0 if t.o_over_q else slots * ROWS * self.block_dv
        return 2 * (slots * ROWS * self.block_d + o + t.stages * t.block_n * (self.block_d + self.block_dv)) + 8 * (2 * t.consumers + 4 * t.stages)


@dataclass(frozen=True)
class ForwardConfig:
    form: Form

    def __str__(self) -> str:
        t = self.form.tuning
        where = "registers" if t.q_in_registers else "shared memory"
        return (f"block_m={ROWS * t.consumers} block_n={t.block_n} stages={t.stages} q in {where}, "
                f"shared {self.form.shared_bytes() / KIB:.0f} KiB")  # fmt: skip


# (padded head dimensions) -> tiles; chosen by what fits, then by the prototypes' timings
TUNINGS = {
    (64, 64): Tuning(block_n=128, stages=3, consumers=3, q_in_registers=False, late_rescale=True, ping_pong=True),
    (128, 128): Tuning(block_n=128, stages=2, consumers=2, q_in_registers=True),
    (256, 128): Tuning(block_n=64, stages=2, consumers=2, q_in_registers=False),
    (256, 256): Tuning(block_n=64, stages=2, consumers=2, q_in_registers=False, o_over_q=True),
}


# for windows, whose few keys a row make tall tiles visit more than they use: d64 354 TFLOP/s for 305 with three consumers (H200, window 1024 of 16k)
WINDOWED = {(64, 64): Tuning(block_n=128, stages=3, consumers=2, q_in_registers=True)}


def tuning_of(problem: Problem) -> Tuning:
    widths = padded(problem.head_dim), padded(problem.head_dim_v)
    return (problem.mask.left and WINDOWED.get(widths)) or TUNINGS[widths]


def padded(width: int) -> int:
    return max(64, 1 << (width - 1).bit_length())


def _why_not(problem: Problem, target: Target) -> str | None:
    if target.kind != "cuda" or target.capability != CAPABILITY:
        return f"made for sm_{CAPABILITY}; this target is {f'sm_{target.capability}' if target.kind == 'cuda' else 'a CPU'}"
    return _shape(problem) or _mask(problem.mask) or _memory(problem) or _tools()


def _shape(problem: Problem) -> str | None:
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"float16 and bfloat16 only; this is {DTYPES[problem.dtype]}"
    if problem.out_dtype != problem.dtype:
        return f"writes out in q's dtype; a partial result of {DTYPES[problem.dtype]} is float32"
    if not isinstance(problem.layout, Dense):
        return f"dense layouts only; this is {type(problem.layout).__name__.lower()}"
    if (padded(problem.head_dim), padded(problem.head_dim_v)) not in TUNINGS:
        tiled = ", ".join(f"{width}/{width_v}" for width, width_v in TUNINGS)
        return f"has tiles for head dimensions (D/D_v, each padded to a power of two) {tiled}; this is {problem.head_dim}/{problem.head_dim_v}"
    if problem.scale <= 0:
        return f"needs a scale above 0; this is {problem.scale:g}"
    return None


def _mask(mask: MaskStructure) -> str | None:
    strange = [name for name in ("prefix", "key_lengths", "documents") if getattr(mask, name)]
    return f"full, causal and window masks only; this has {' and '.join(strange)}" if strange else None


def _memory(problem: Problem) -> str | None:
    """What TMA has against the way q, k and v lie in memory."""
    if problem.alignment < ALIGNMENT:
        return (f"TMA needs addresses and strides of q, k and v in multiples of {ALIGNMENT} bytes; these are multiples of {problem.alignment}: "
                "copy them, or pad the head dimension")  # fmt: skip
    layout: Any = problem.layout
    rows, keys = (layout.batch, layout.seqlen_q, problem.heads_q), (layout.batch, layout.seqlen_k, problem.heads_kv)
    for name, sizes, strides in zip("qkv", (rows, keys, keys), problem.strides):
        if any(size > 1 and stride == 0 for size, stride in zip(sizes, strides)):
            return f"TMA walks memory of its own in each dimension; {name} is expanded: give fewer key heads, or make it contiguous"
    return None


def _tools() -> str | None:
    if KNOBS.interpret:
        return "Triton's interpreter (TRITON_INTERPRET) does not know Gluon"
    return no_triton()


class HopperForward:
    name = "hopper.forward"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return _why_not(problem, target)

    def config(self, problem: Problem, target: Target) -> ForwardConfig:
        widths = padded(problem.head_dim), padded(problem.head_dim_v)
        tuning = tuning_of(problem)
        even = problem.layout.seqlen_k % tuning.block_n == 0  # type: ignore[union-attr]
        return ForwardConfig(Form(tuning, *widths, problem.group, problem.mask, bool(problem.softcap), problem.sinks, even))

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem)

    def workspace(self, problem: Problem, config: object) -> tuple[Buffer, ...]:
        return ()

    def run(self, plan: Plan, call: Call, tensors: Forward, workspace: dict[str, Tensor]) -> None:  # type: ignore[override]
        from .launch import run_forward

        run_forward(plan, call, tensors)


FORWARD: Any = HopperForward()
