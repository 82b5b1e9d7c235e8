"""The Hopper decode's answers: what it can run, with which tiles and splits, and how. Imports no DSL until
something runs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem.cache import FP8
from ...problem.call import DTYPES, FARTHEST
from ...problem.decode import DecodeCall, DecodeProblem
from ...problem.mask import NO_BOUND
from ...problem.problem import ALIGNMENT, Problem
from ...problem.target import KIB, Target
from ..protocol import Buffer, Cost, Forward, Plan, decode_cost, launches_clusters
from ..runtime.batch_invariant import as_decode
from ..runtime.constants import Constants
from ..runtime.split_kv import Traits, splits, traits
from ..runtime.tma_requirements import against_tools

CAPABILITY = 90
MOST_WIDTH = 256
LEAST_ROWS, MOST_ROWS, MOST_ROWS_WIDE = (
    8,
    64,
    32,
)  # queries of a tile; the last for head dimensions beyond 128, whose o would spill
LEAST_WIDTH, LEAST_WIDTH_V = 16, 64  # as products take them: values' columns are wgmma's rows
MOST_SHARED = 227 * KIB
RESERVED = KIB  # of an SM's shared memory, for each program
JOINED_NUMBERS = (
    128 * 128
)  # of shares that are loaded at a time: 128 registers of each thread, half of it where tiles take more themselves
MOST_JOINED = 32
MOST_TOGETHER, ALWAYS_TOGETHER = (
    16,
    8,
)  # programs of a cluster: on parts of 16 SMs or more that are wired together; on any Hopper
UNASKED, SCRATCH = (
    48 * KIB,
    4 * KIB,
)  # of shared memory: what any kernel gets; what the compiler takes for reductions, at most
BLOCKS_TOGETHER = (
    4  # tiles of keys that programs of a cluster take, one an SM: of more, twice as many programs read as fast (H200)
)
EARLY = True  # launched to overlap the kernel before


class DecodeTuning(NamedTuple):
    block_n: int
    stages: int  # of which all but one are copies under way


# the first of which two programs fit on an SM, else the first that fits; what was fastest on an H200
# (docs/performance.md)
DECODE_TUNINGS = (DecodeTuning(64, 3), DecodeTuning(64, 2))
STREAMED, STREAMED_WIDTH, STREAMED_ROWS = (
    DecodeTuning(128, 2),
    128,
    16,
)  # of rows of keys that `streamed` is about; what it was measured for
STREAMED_KEYS = 12_000  # of an SM


@dataclass(frozen=True)
class DecodeForm(Constants, Traits):
    """All that the compiled kernel holds as constants; no __str__ of its own, since Triton tells kernels apart by
    it."""

    block_m: int
    block_n: int
    stages: int
    fp8: bool  # keys of 8 bits
    joined_rows: int  # of a tile, that can be queries
    one_stride: bool  # k and v have the same strides
    near: bool  # offsets in k and v fit in 32 bits
    banded: bool  # rows of a tile see different keys
    joined: int = 1  # splits whose shares of a tile are loaded at a time
    single: bool = False  # one split: nothing to join
    in_order: bool = False  # splits are joined one after the other, as `invariant` meets them
    early: bool = False  # launched to overlap the kernel before
    # splits that run together, a program each, and join their shares in shared memory; 0: they join in global memory
    cluster: int = 0

    @property
    def warps(self) -> int:
        return 4

    @property
    def block_d(self) -> int:
        return padded(self.head_dim, LEAST_WIDTH)

    @property
    def block_dv(self) -> int:
        return padded(self.head_dim_v, LEAST_WIDTH_V)

    @property
    def alike(self) -> bool:
        """Whether a key's number stands in k where its value's stands in v."""
        return self.one_stride and self.head_dim == self.head_dim_v and self.block_d == self.block_dv

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the cache."""
        return 1 if self.fp8 else 2

    @property
    def lift(self) -> float:
        """How far p may exceed 1, in log2 units: a float16 under 2^-14 loses bits (device.lagging)."""
        return 14.0 if self.dtype == "float16" or self.fp8 else 0.0

    @property
    def accumulator(self) -> Any:
        import triton.language as tl

        return tl.float32

    @property
    def step(self) -> int:
        """Keys from a split's tile to its next."""
        return self.block_n * (self.cluster or 1)

    @property
    def sent_rows(self) -> int:
        """Rows that come from each program of a cluster: two at a time."""
        return max(2, self.joined_rows)

    @property
    def inbox_bytes(self) -> int:
        """What comes to a program of a cluster: its columns from all, which are as many numbers as a share, and all
        log-sum-exps."""
        return 4 * self.sent_rows * (self.block_dv + self.cluster)

    def own_bytes(self) -> int:
        """Keys and values of all stages, q and p."""
        widths = self.block_d + self.block_dv
        return self.stages * self.block_n * widths * self.itemsize + 2 * self.block_m * (self.block_d + self.block_n)

    def shared_bytes(self) -> int:
        """An inbox with its mbarrier besides."""
        return self.own_bytes() + (padded_to(self.inbox_bytes + 8, KIB) if self.cluster else 0)


@dataclass(frozen=True)
class InvariantForm(DecodeForm):
    """Of a forward with the bits of a decode: its rows are the decode's but for their number."""

    packed: bool = False

    @property
    def warps(self) -> int:
        """Four for each of two halves of the rows, which share keys and values."""
        return 8

    def shared_bytes(self) -> int:
        """As of a decode with a second p."""
        return super().shared_bytes() + 2 * self.block_m * self.block_n


@dataclass(frozen=True)
class InvariantConfig:
    form: InvariantForm

    def __str__(self) -> str:
        f = self.form
        return (
            f"as a decode: block_m={f.block_m} block_n={f.block_n} stages={f.stages}, shared "
            f"{f.shared_bytes() / KIB:.0f} KiB"
        )


def invariant_config(problem: Problem) -> InvariantConfig:
    form = form_of(as_decode(problem))
    form = replace(
        form, stages=2, block_m=2 * form.block_m, joined_rows=0, one_stride=False
    )  # the last two mean nothing here
    return InvariantConfig(
        InvariantForm(**{field.name: getattr(form, field.name) for field in fields(form)}, packed=problem.packed)
    )


@dataclass(frozen=True)
class DecodeConfig:
    form: DecodeForm
    n_splits: int
    split_size: int  # keys

    def __str__(self) -> str:
        f = self.form
        shares = f"{self.n_splits} splits of {self.split_size} keys" if self.n_splits > 1 else "one split"
        shares = f"{self.n_splits} splits by turns in a cluster" if f.cluster else shares
        return (
            f"block_m={f.block_m} block_n={f.block_n} stages={f.stages}, {shares}, shared "
            f"{f.shared_bytes() / KIB:.0f} KiB"
        )


def padded(width: int, least: int) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << (width - 1).bit_length())


def padded_to(size: int, step: int) -> int:
    return -(-size // step) * step


def together(form: DecodeForm, blocks: int, tiles: int, sm_count: int) -> int:
    """How many programs split a tile's keys in a cluster, one an SM; 0 where keys are too many for that.

    One sequence of 1,024 keys takes 4.8 us for 5.9 with shares in global memory, of 512 4.0 for 4.9, of 4,096 9.0 for
    9.4; but two of 512 in clusters of 16, two programs an SM, 7.8 for 5.4 (H200, 32 and 8 heads of 128).
    """
    most = min(MOST_TOGETHER, padded(blocks, 1), 1 << (max(1, sm_count // max(1, tiles)).bit_length() - 1))
    for size in (most, min(most, ALWAYS_TOGETHER)):
        room = 2 if size > ALWAYS_TOGETHER else 1  # of programs an SM, so that 16 need no more than 8 SMs
        shared = replace(form, cluster=size).shared_bytes()
        # where a kernel's own memory does not ask for more than is given without asking, Triton's launcher does not
        # ask, whatever lies beside it
        fits = room * (shared + RESERVED) <= MOST_SHARED and (form.own_bytes() > UNASKED or shared + SCRATCH <= UNASKED)
        if size > 1 and fits and -(-blocks // size) <= BLOCKS_TOGETHER:
            return size
    return 0


def streamed(form: DecodeForm, problem: DecodeProblem, tiles: int, sm_count: int) -> bool:
    """Whether an SM reads so many keys, of whole sequences in rows, that it is faster with one program of twice the
    tile, fewer bytes under way.

    64 sequences of 8,192 keys take 473.7 us for 481.0, 128 of 4,096 477.2 for 483.2, 32 of 8,192 240.7 for 242.5, where
    half as many level or lose 1 %: a last wave of whole sequences is longer with one program an SM. Pages lose 4 %
    (H200, 32 and 8 heads of 128).
    """
    fits = (
        form.block_d == form.block_dv == STREAMED_WIDTH
        and form.block_m <= STREAMED_ROWS
        and not (form.fp8 or problem.paged or form.in_order)
    )
    return fits and 2 * tiles >= 3 * sm_count and tiles * problem.capacity >= STREAMED_KEYS * sm_count


def joined(form: DecodeForm, n_splits: int) -> int:
    """What registers hold of a tile's shares; no more than there are."""
    numbers = JOINED_NUMBERS if form.block_m <= 16 and form.block_dv <= 128 else JOINED_NUMBERS // 2
    return max(1, min(padded(n_splits, 1), MOST_JOINED, numbers // (form.joined_rows * form.block_dv)))


def furthest(problem: DecodeProblem) -> int:
    """The largest offset of a number in k or v."""
    layout: Any = problem.layout
    pages, rows = (layout.n_pages, layout.page_size) if problem.paged else (layout.batch, layout.seqlen_k)
    sizes = (max(pages, 1), max(rows, 1), problem.heads_kv)
    widest = max(problem.head_dim, problem.head_dim_v)
    return (
        max(sum((size - 1) * stride for size, stride in zip(sizes, strides)) for strides in problem.strides[1:])
        + widest
    )


def form_of(problem: DecodeProblem) -> DecodeForm:
    """All of its form that splits have no part in."""
    rows, layout = problem.group * problem.layout.seqlen_q, problem.layout
    most = MOST_ROWS if max(problem.head_dim, problem.head_dim_v) <= 128 else MOST_ROWS_WIDE
    known = traits(problem) | {
        "block_m": min(most, padded(rows, LEAST_ROWS)),
        "joined_rows": min(most, padded(rows, 1)),
        "fp8": problem.cache_dtype == FP8,
        "one_stride": problem.strides[1] == problem.strides[2],
        "near": furthest(problem) < 2**31,
        "banded": layout.seqlen_q > 1 and (problem.left, problem.right) != (NO_BOUND, NO_BOUND),
        "in_order": problem.batch_invariant,
    }
    forms = [DecodeForm(block_n=t.block_n, stages=t.stages, **known) for t in DECODE_TUNINGS]
    return next(f for n in (2, 1) for f in forms if n * (f.shared_bytes() + RESERVED) <= MOST_SHARED)


class HopperDecode:
    name = "hopper.decode"

    def why_not(self, problem: DecodeProblem, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability != CAPABILITY:
            return f"made for sm_{CAPABILITY}; this target is {target.words}"
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"float16 and bfloat16 queries only; these are {DTYPES[problem.dtype]}"
        if max(problem.head_dim, problem.head_dim_v) > MOST_WIDTH:
            return f"head dimensions up to {MOST_WIDTH}; this is {problem.head_dim}/{problem.head_dim_v}"
        if problem.alignment < ALIGNMENT or any(
            width * problem.cache_dtype.itemsize % ALIGNMENT for width in (problem.head_dim, problem.head_dim_v)
        ):
            return (
                f"copies {ALIGNMENT} bytes at a time: addresses, strides and rows of k and v must be whole "
                "multiples; addresses and strides are "
                f"multiples of {problem.alignment}, rows of {problem.head_dim} and {problem.head_dim_v} numbers"
            )
        if problem.capacity >= FARTHEST:
            return f"sequences of fewer than 2^30 keys; these may hold {problem.capacity}"
        return against_tools()

    def config(self, problem: DecodeProblem, target: Target) -> DecodeConfig:
        form = form_of(problem)
        tiles = problem.layout.batch * problem.heads_kv * -(-problem.group * problem.layout.seqlen_q // form.block_m)
        blocks = max(1, -(-problem.capacity // form.block_n))
        if (
            not problem.batch_invariant
            and launches_clusters()
            and (cluster := together(form, blocks, tiles, target.sm_count))
        ):
            return DecodeConfig(
                replace(form, early=EARLY, cluster=cluster), cluster, -(-blocks // cluster) * form.block_n
            )
        if streamed(form, problem, tiles, target.sm_count):
            form = replace(form, block_n=STREAMED.block_n, stages=STREAMED.stages)
        slots = target.sm_count * (MOST_SHARED // (form.shared_bytes() + RESERVED))
        n_splits, split_size = splits(problem.capacity, tiles, form.block_n, 0 if problem.batch_invariant else slots)
        return DecodeConfig(
            replace(form, early=EARLY, joined=joined(form, n_splits), single=n_splits == 1), n_splits, split_size
        )

    def cost(self, problem: DecodeProblem) -> Cost:
        return decode_cost(problem)

    def workspace(self, problem: DecodeProblem, config: DecodeConfig) -> tuple[Buffer, ...]:
        form, layout = config.form, problem.layout
        if form.single or form.cluster:
            return ()
        programs = (
            layout.batch * problem.heads_kv * -(-layout.seqlen_q * problem.group // form.block_m) * config.n_splits
        )
        return (
            Buffer("shares", (programs * form.joined_rows * (form.block_dv + 1),), torch.float32),
        )  # of o, then of lse

    def run(self, plan: Plan, call: DecodeCall, tensors: Forward, workspace: dict[str, Tensor]) -> None:
        from .launch_decode import run_decode

        run_decode(plan, call, tensors, workspace)


DECODE: Any = HopperDecode()
