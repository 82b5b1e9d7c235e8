"""Cycles of a step of the Blackwell backward, counted from the kernel's own operands, and the speed that they predict.

    python -m tools.proof.blackwell_cycles            a table
    python -m tools.proof.blackwell_cycles --json     one object

The simulator runs the kernel over two and over three tiles of queries. The difference of the two runs is one step: its
products, with their shapes and the places of their operands, and the bytes that threads write to shared memory and add
to global memory. `strobe.bench.cycles` turns them into cycles. Nothing here ran on a Blackwell GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton

from strobe import reference
from strobe.bench.cycles import SCORE_INSTRUCTIONS, SUM_BYTES, Cycles, Pass, Product, cycles
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.problem.target import FAKES
from strobe.sim import Checks
from strobe.sim.shared import SharedMemory
from strobe.sim.tensor_core import TensorCores

from .simulate import on

ROWS = 128
CAPABILITY = 100
TARGET = FAKES["B200"]
PEAK = TARGET.peak_tflops  # of dense 16-bit products
# TFLOP/s of FlashAttention-4 on a B200, d128 dense, 8k (Dao-AILab/flash-attention, pull request 2280)
PUBLISHED = {"one CTA": 1248, "pair": 1360}
# the same with deterministic gradients
ORDERED = {"one CTA": 980, "pair": 1167}


class Counts(NamedTuple):
    """Products and bytes of the backward's main kernel."""

    products: Counter  # of Product
    stored: int  # bytes that threads write to shared memory
    added: int  # bytes that threads add to global memory
    loaded: int  # bytes that TMA writes to shared memory

    def less(self, other: Counts) -> Counts:
        return Counts(
            self.products - other.products,
            self.stored - other.stored,
            self.added - other.added,
            self.loaded - other.loaded,
        )


def counted(tiles: int, width: int, width_v: int, ctas: int = 1) -> Counts:
    """One tile of keys and `tiles` tiles of queries through the simulator. With `ctas` 2, what one CTA of a pair does;
    it needs Triton 3.9.
    """
    products: Counter = Counter()
    sent: list[int] = []
    issue, send = TensorCores.create_tcgen05_mma, SharedMemory.create_async_shared_store

    def noted(self: Any, a: Any, b: Any, d: Any, *rest: Any, **options: Any) -> None:
        left, result = self.window(a), self.window(d)
        (m, n), k = result.view.shape, left.view.shape[-1]
        if self.machine.current.cta.rank == 0:  # the second CTA of a pair issues nothing
            products[Product(m // ctas, n, k, left.memory.space == "shared")] += 1
        issue(self, a, b, d, *rest, **options)

    def noted_sent(self: Any, target: Any, value: Any, bar: Any) -> None:
        sent.append(2 * self.window(target).view.size // ctas)  # this CTA's part of a tensor of 16-bit numbers
        send(self, target, value, bar)

    sizes = ((tiles * ROWS, width), (ctas * ROWS, width), (ctas * ROWS, width_v))
    q, k, v = (torch.ones(1, rows, 1, columns, dtype=torch.bfloat16) for rows, columns in sizes)
    name = "blackwell.backward" if ctas == 1 else "blackwell.backward_pair"
    call = Call(q, k, v, kernel=name, needs_grad=True)
    out, lse = reference.forward(call)
    patched = mock.patch.object(TensorCores, "create_tcgen05_mma", noted)
    patched_sent = mock.patch.object(SharedMemory, "create_async_shared_store", noted_sent)
    with patched, patched_sent, on(TARGET, sms=1, checks=Checks(costs=True)) as run:
        ops.BACKWARD(torch.ones_like(out).to(q.dtype), out.to(q.dtype), lse.float(), None, *call.arguments)
    bytes_of = lambda what, file: sum(row.bytes for row in run.costs.rows if row.what == what and file in row.where)
    stored = bytes_of("shared store", "backward_compute") + sum(sent)
    added, loaded = bytes_of("global atomic", "backward_reduce"), bytes_of("TMA load", "backward_")
    return Counts(products, stored // ctas, added // ctas, loaded // ctas)


class Way(NamedTuple):
    """One way to run a step, with its cycles."""

    name: str
    built: bool
    cycles: Cycles

    @property
    def bound(self) -> float:
        """TFLOP/s of dense attention if the busiest unit never waits."""
        return PEAK * self.cycles.tensor / self.cycles.busiest

    def waiting(self, published: float) -> float:
        """Cycles of a step in which the busiest unit waited at a published speed."""
        return PEAK * self.cycles.tensor / published - self.cycles.busiest


def ways(width: int = ROWS, width_v: int = ROWS) -> list[Way]:
    """A step as this kernel runs it, and as FlashAttention-4's do: dQ through shared memory, by one CTA or a pair."""
    step = counted(3, width, width_v).less(counted(2, width, width_v))
    products = tuple(step.products.elements())
    weights = next(p.m * p.k for p in products if not p.a_shared)  # P, the left operand of dV: an exponential each
    if step.added != ROWS * width * SUM_BYTES:
        raise ValueError(f"a step adds {step.added} bytes of dq; expected {ROWS * width * SUM_BYTES}")
    through_shared = step.stored + 2 * step.added  # written by threads, and read by TMA
    passes = {
        "one CTA, dQ from registers": (True, step.stored, 1),
        "one CTA": (False, through_shared, 1),
        "pair": (False, through_shared, 2),
    }
    found = [
        Way(name, built, cycles(Pass(products, weights, moved, step.loaded, SCORE_INSTRUCTIONS + 3), CAPABILITY, ctas))
        for name, (built, moved, ctas) in passes.items()
    ]
    return found + ([own_pair()] if has_pairs() and (width, width_v) == (ROWS, ROWS) else [])


def has_pairs() -> bool:
    """Whether this Triton has the words of the kernel with a pair of CTAs."""
    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def own_pair() -> Way:
    """A step of one CTA of strobe's pair, from its own operands."""
    step = counted(3, ROWS, ROWS, 2).less(counted(2, ROWS, ROWS, 2))
    if step.added != ROWS // 2 * ROWS * SUM_BYTES:
        raise ValueError(f"a step adds {step.added} bytes of dq in a CTA; expected {ROWS // 2 * ROWS * SUM_BYTES}")
    products = tuple(step.products.elements())
    done = Pass(products, ROWS * ROWS, step.stored, step.loaded, SCORE_INSTRUCTIONS + 3)
    return Way("pair, dQ from registers", True, cycles(done, CAPABILITY, 2))


def rows(found: list[Way]) -> Iterator[dict[str, Any]]:
    """A row for each way, with the published speed where there is one."""
    for way in found:
        published = PUBLISHED.get(way.name)
        yield {
            "way": way.name,
            "built": way.built,
            "tensor": way.cycles.tensor,
            "shared": way.cycles.shared,
            "exp": way.cycles.exp,
            "bound_tflops": round(way.bound),
            "published_tflops": published,
            "waiting_cycles": round(way.waiting(published)) if published else None,
        }


def predicted(found: list[Way]) -> tuple[float, float]:
    """TFLOP/s of this kernel at d128 dense: the busiest unit waits as long as in FlashAttention-4's kernels, of which
    one waits less than the other.
    """
    own, others = found[0], [way for way in found if way.name in PUBLISHED]
    waits = [way.waiting(PUBLISHED[way.name]) for way in others]
    flops = PEAK * own.cycles.tensor
    low, high = (flops / (own.cycles.busiest + wait) for wait in (max(waits), min(waits)))
    return low, high


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.proof.blackwell_cycles")
    parser.add_argument("--json", action="store_true", help="print one object")
    as_json = parser.parse_args(arguments).json
    found = ways()
    shown, plain = list(rows(found)), predicted(found)
    ordered = [speed * ORDERED["one CTA"] / PUBLISHED["one CTA"] for speed in plain]
    if as_json:
        speeds = {"predicted_tflops": [*map(round, plain)], "predicted_deterministic_tflops": [*map(round, ordered)]}
        print(json.dumps({"rows": shown, **speeds, "peak_tflops": PEAK}))
        return 0
    print("| way | tensor | shared | exp | TFLOP/s at most | published | cycles waiting |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in shown:
        cells = [f"{row[name]:,.0f}" if row[name] else "" for name in list(row)[2:]]
        print(f"| {row['way']} | {' | '.join(cells)} |")
    print(f"\nThis kernel, d128 dense, predicted: {plain[0]:,.0f} to {plain[1]:,.0f} TFLOP/s;")
    print(f"deterministic {ordered[0]:,.0f} to {ordered[1]:,.0f}. It has not run on a Blackwell GPU.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
