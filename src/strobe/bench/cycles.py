"""Which unit of a multiprocessor limits attention: cycles of each unit for one tile.

    strobe bench roofline --target B200

Cycles are counted, not measured: operations of each product, operands read from shared memory, exponentials, and
instructions of the softmax. A step takes at least as long as its busiest unit. Figures for Blackwell are predictions:
strobe's kernel has not run on a Blackwell GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..errors import InvalidProblem
from ..problem.target import FAKES, Target

SHARED_BYTES = 128  # bytes of shared memory a clock
LANES = 128  # lanes issued a clock: four issue slots of one warp each
BYTES, SUM_BYTES = 2, 4  # of an operand's element, and of a float32 sum
WARPGROUP, LANES_OF_PRODUCT = 64, 128  # rows of one wgmma, and of one CTA's tcgen05 product


class Unit(NamedTuple):
    """The throughput of one multiprocessor, a clock."""

    flops: int  # of dense 16-bit products
    exps: int
    # True: accumulators and first operands need no shared memory; second operands are read once per 128 rows, not 64
    tensor_memory: bool


UNITS = {90: Unit(4096, 16, False), 100: Unit(8192, 16, True), 103: Unit(8192, 32, True)}


class Product(NamedTuple):
    """A product with m x n results, summed over k. a_shared: the first operand a is read from shared memory; else
    reading it is free.
    """

    m: int
    n: int
    k: int
    a_shared: bool = True

    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def shared_bytes(self, unit: Unit, ctas: int) -> float:
        """Bytes read from shared memory. If two CTAs share a product, each reads half of b.

        On Hopper, two warpgroups that split the rows each read all of b; two that split b each read all of a."""
        a, b = self.m * self.k * BYTES * self.a_shared, self.n * self.k * BYTES
        if unit.tensor_memory:
            return a + b * -(-self.m // LANES_OF_PRODUCT) / ctas
        return a + b * (self.m // WARPGROUP) if self.m > WARPGROUP else 2 * a + b


class Pass(NamedTuple):
    """One step of a forward or backward: products, exponentials, other shared memory traffic, instructions."""

    products: tuple[Product, ...]
    exps: int
    moved_bytes: int  # written to and read from shared memory by threads and by reductions
    loaded_bytes: int  # written by TMA
    instructions: float  # per score


class Cycles(NamedTuple):
    """Cycles of each unit for one step. `loads` are TMA's writes to shared memory, which published counts leave out."""

    tensor: float
    exp: float
    shared: float
    issue: float
    loads: float

    @property
    def binds(self) -> str:
        """The name of the busiest unit; `loads` do not count."""
        named = {"tensor": self.tensor, "exp": self.exp, "shared": self.shared, "issue": self.issue}
        return max(named, key=lambda name: named[name])

    @property
    def busiest(self) -> float:
        """Cycles of the busiest unit; `loads` do not count."""
        return getattr(self, self.binds)


# multiply-add, exponential, add, half a three-way maximum, half a conversion (compiled for sm_100 at d128)
SCORE_INSTRUCTIONS = 4.0
# extra for exp by multiply-adds, besides the polynomial: clamp, 3 adds, shift-add, multiply; minus the exponential
BY_FMA_INSTRUCTIONS = 5.0
DEGREE = 3  # of the polynomial for bfloat16: its number of multiply-adds


def forward(rows: int = 128, keys: int = 128, width: int = 128, width_v: int = 0) -> Pass:
    """The forward of one tile of queries and one tile of keys. Weights come from tensor memory or registers."""
    width_v = width_v or width
    products = (Product(rows, keys, width), Product(rows, width_v, keys, a_shared=False))
    return Pass(products, rows * keys, 0, keys * (width + width_v) * BYTES, SCORE_INSTRUCTIONS)


def backward(
    rows: int = 128, keys: int = 128, width: int = 128, width_v: int = 0, dq_through_shared: bool = True
) -> Pass:
    """The backward of one tile, with keys as the rows of scores. dv and dk read weights and dS without shared memory.

    dq reads dS from shared memory. TMA adds dq to global memory from shared memory, unless threads add it from
    registers, as strobe's Blackwell backward does."""
    width_v = width_v or width
    products = (
        Product(keys, rows, width), Product(keys, rows, width_v),  # s, dp
        Product(keys, width_v, rows, a_shared=False), Product(keys, width, rows, a_shared=False),  # dv, dk
        Product(rows, width, keys),  # dq
    )  # fmt: skip
    moved = rows * keys * BYTES  # ds written
    if dq_through_shared:
        moved += 2 * rows * width * SUM_BYTES  # dq written and read
    return Pass(products, rows * keys, moved, rows * (width + width_v) * BYTES, SCORE_INSTRUCTIONS + 3)


def cycles(step: Pass, capability: int, ctas: int = 1, by_fma: float = 0.0, degree: int = DEGREE) -> Cycles:
    """The cycles of each unit. `by_fma` is the fraction of exponentials computed by a polynomial of `degree`.

    >>> cycles(forward(), 100)[:3]
    (1024.0, 1024.0, 768.0)
    >>> cycles(backward(), 100)[:3], cycles(backward(), 100, ctas=2)[2]
    ((2560.0, 1024.0, 3328.0), 2688.0)
    """
    unit = UNITS[capability]
    shared = sum(product.shared_bytes(unit, ctas) for product in step.products) + step.moved_bytes
    issued = step.exps * (step.instructions + by_fma * (BY_FMA_INSTRUCTIONS + degree))
    return Cycles(
        sum(product.flops() for product in step.products) / unit.flops, step.exps * (1 - by_fma) / unit.exps,
        shared / SHARED_BYTES, issued / LANES,
        step.loaded_bytes / SHARED_BYTES,
    )  # fmt: skip


class Row(NamedTuple):
    """A line of the table: a step with its tile, and the remedies applied (2 CTAs, exponentials by multiply-adds)."""

    name: str
    ctas: int
    by_fma: float
    cycles: Cycles

    @property
    def ceiling(self) -> float:
        """The fraction of the tensor cores' peak that is reachable given the busiest unit."""
        return self.cycles.tensor / self.cycles.busiest


def _best_share(step: Pass, capability: int) -> float:
    """The fraction of exponentials by multiply-adds, in 1/32 steps, that minimises the busiest unit's cycles."""
    shares = [n / 32 for n in range(17)]
    return min(shares, key=lambda share: (max(cycles(step, capability, 1, share)[:4]), share))


def table(target: Target) -> list[Row]:
    """Rows for the kernels' tiles on `target`: each step plain, and on Blackwell also with each remedy.

    Raises InvalidProblem for a target without UNITS.

    >>> [row.cycles.binds for row in table(FAKES["H200"])][:2]
    ['tensor', 'tensor']
    """
    if target.capability not in UNITS:
        known = ", ".join(name for name, fake in FAKES.items() if fake.capability in UNITS)
        raise InvalidProblem("--target", target.name, f"one of {known}", "cycles are counted for these alone")
    hopper = target.capability == 90
    steps: dict[str, Pass] = {}
    for name, widths in {"d64": (64, 64), "d128": (128, 128), "d192/128": (192, 128)}.items():
        rows = (192 if widths[0] == 64 else 128) if hopper else 128
        steps[f"forward {name} {rows}x128"] = forward(rows, 128, *widths)
    steps["forward d128 256x128"] = forward(256)
    for name, width in {"d64": 64, "d128": 128}.items():
        steps[f"backward {name} {64 if hopper else 128}x128"] = backward(64 if hopper else 128, 128, width)
    found = []
    for name, step in steps.items():
        found.append(Row(name, 1, 0.0, cycles(step, target.capability)))
        share = 0.0 if hopper else _best_share(step, target.capability)
        if share:
            found.append(Row(f"{name}, exponentials shared", 1, share, cycles(step, target.capability, 1, share)))
        if not hopper and "d128" in name:
            found.append(Row(f"{name}, 2 CTAs", 2, 0.0, cycles(step, target.capability, 2)))
    return found


def show(target: Target, write: Callable[..., None]) -> None:
    """Print the table with `write`, which is `bench.table.show`."""
    head = ["step", "tensor", "exp", "shared", "issue", "TMA writes", "by multiply-adds", "binds", "at most"]
    lines = [
        [
            row.name,
            *(f"{count:.0f}" for count in row.cycles),
            f"{row.by_fma:.0%}",
            row.cycles.binds,
            f"{row.ceiling:.0%} of peak",
        ]
        for row in table(target)
    ]
    predicted = "" if target.capability == 90 else "; predictions, of kernels that have not run on a Blackwell GPU"
    write(head, lines, f"{target.name} (sm_{target.capability}): cycles of one multiprocessor for one step{predicted}")
