"""Cycles of 64 keys in the Blackwell decode, counted from the kernel's own operands, beside those of tcgen05 products.

    python -m tools.proof.blackwell_decode_cycles            a table
    python -m tools.proof.blackwell_decode_cycles --json     one object a line

The simulator runs the kernel over four and over five tiles of keys. The difference of the two runs is one step: its
products, and the bytes that threads copy, store and load. The step takes at least as many cycles as the busiest unit,
or as many as its keys take from memory. Nothing here ran on a Blackwell GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NamedTuple
from unittest import mock

import torch

from strobe.bench.cycles import SHARED_BYTES, UNITS
from strobe.kernels.hopper import decode_config
from strobe.ops import decode as ops
from strobe.problem.cache import FP8
from strobe.problem.decode import DecodeCall
from strobe.problem.target import FAKES
from strobe.sim import Checks
from strobe.sim.tensor_core import TensorCores

from .simulate import on

TARGET = FAKES["B200"]
KEYS, WIDTH, WARPS = 64, 128, 4
ROWS = (8, 16, 32, 64)
FLOPS = UNITS[TARGET.capability].flops  # of tcgen05, a clock and multiprocessor
# Of mma.sync. Assumed: a quarter of tcgen05's. On an H200 it is about two thirds of wgmma's, 2,700 a clock.
MMA_SYNC_FLOPS = FLOPS // 4
CLOCK_GHZ = TARGET.peak_tflops * 1e3 / (TARGET.sm_count * FLOPS)
READ_BYTES = TARGET.peak_gbps / (TARGET.sm_count * CLOCK_GHZ)  # a clock: a multiprocessor's share of device memory


class Counts(NamedTuple):
    """What one program does: FLOPs of its products, bytes that it copies from the cache to shared memory, bytes of
    shared memory that threads store and load.
    """

    flops: int
    copied: int
    stored: int
    loaded: int

    def less(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(self, other)))


def counted(tiles: int, rows: int, bits: int) -> Counts:
    """One program over `tiles` tiles of keys, in the simulator. rows: query heads of one key head."""
    flops = 0
    issue = TensorCores.create_dot

    def noted(self: Any, a: Any, b: Any, c: Any, *rest: Any) -> Any:
        nonlocal flops
        flops += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return issue(self, a, b, c, *rest)

    k, v = (torch.ones(1, tiles * KEYS, 1, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    if bits == 8:
        k, v = k.to(FP8), v.to(FP8)
    length = torch.tensor([tiles * KEYS], dtype=torch.int32)
    q = torch.ones(1, 1, rows, WIDTH, dtype=torch.bfloat16)
    call = DecodeCall(q, k, v, length, right=0, kernel="blackwell.decode")
    alone = mock.patch.multiple(decode_config, cluster_size=lambda *_: 0, splits=lambda keys, *_: (1, keys))
    patched = mock.patch.object(TensorCores, "create_dot", noted)
    with alone, patched, on(TARGET, sms=1, checks=Checks(costs=True)) as run:
        ops.run(call)

    def total(what: str, where: str = "") -> int:
        return sum(row.bytes for row in run.costs.rows if row.what == what and where in row.where)

    # operand B is read by each warp
    loaded = total("shared load") + (WARPS - 1) * total("shared load", "columns_operand")
    return Counts(flops, total("global load", "copy_rows"), total("shared store"), loaded)


class Step(NamedTuple):
    """Cycles of KEYS keys on one multiprocessor. With tcgen05, K and V are operands in shared memory, where 8-bit ones
    lie a second time as float16.
    """

    rows: int
    bits: int
    read: float  # the keys' share of device memory
    tensor: float
    shared: float
    tcgen05_tensor: float
    tcgen05_shared: float

    @property
    def share(self) -> float:
        """Of the read ceiling, at most."""
        return min(1.0, self.read / max(self.tensor, self.shared))

    @property
    def tcgen05_share(self) -> float:
        return min(1.0, self.read / max(self.tcgen05_tensor, self.tcgen05_shared))


def step(rows: int, bits: int) -> Step:
    one = counted(5, rows, bits).less(counted(4, rows, bits))
    own = one.copied + one.stored + one.loaded  # cp.async writes what it copies
    weights = 2 * rows * KEYS
    operands = 2 * KEYS * 2 * WIDTH + 2 * rows * WIDTH + weights  # K and V, Q, P: each once
    widened = one.copied + 2 * one.copied if bits == 8 else 0  # read as 8 bits, written as 16
    return Step(
        rows,
        bits,
        one.copied / READ_BYTES,
        one.flops / MMA_SYNC_FLOPS,
        own / SHARED_BYTES,
        2 * one.flops / FLOPS,  # 64 keys are half of the rows that a product has
        (one.copied + weights + operands + widened) / SHARED_BYTES,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.proof.blackwell_decode_cycles")
    parser.add_argument("--json", action="store_true", help="print an object a line")
    as_json = parser.parse_args(arguments).json
    found = [step(rows, bits) for bits in (16, 8) for rows in ROWS]
    if as_json:
        for one in found:
            print(json.dumps(one._asdict() | {"share": one.share, "tcgen05_share": one.tcgen05_share}))
        return 0
    print("| bits | rows | read | tensor | shared | of the ceiling | tcgen05: tensor | shared | of the ceiling |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for one in found:
        own = f"{one.read:,.0f} | {one.tensor:,.0f} | {one.shared:,.0f} | {one.share:.0%}"
        other = f"{one.tcgen05_tensor:,.0f} | {one.tcgen05_shared:,.0f} | {one.tcgen05_share:.0%}"
        print(f"| {one.bits} | {one.rows} | {own} | {other} |")
    print(f"\nCycles of {KEYS} keys of {WIDTH} columns on a B200, counted. It has not run on a Blackwell GPU.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
