"""What the Hopper decode can run, with which tiles and splits, and how. Imports no kernel language."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...problem.cache import FP8
from ...problem.call import DTYPES, FARTHEST
from ...problem.decode import DecodeCall, DecodeProblem
from ...problem.mask import NO_BOUND
from ...problem.problem import ALIGNMENT, Problem
from ...problem.target import KIB, Target
from ..protocol import Buffer, Cost, Forward, Plan, decode_cost, launches_clusters
from ..runtime import split_kv
from ..runtime.batch_invariant import as_decode
from ..runtime.compile_cache import Constants
from ..runtime.hook_constants import HookConstants, function_key
from ..runtime.mod_function import against_texts, mod_functions
from ..runtime.split_kv import Traits, splits
from ..runtime.tma_requirements import against_tools

CAPABILITY = 90
MOST_WIDTH = 256
# rows per tile; the last for head dimensions above 128, whose o would spill
LEAST_ROWS, MOST_ROWS, MOST_ROWS_WIDE = 8, 64, 32
LEAST_WIDTH, LEAST_WIDTH_V = 16, 64  # of products: columns of values are rows of wgmma
MOST_SHARED = 227 * KIB
RESERVED = KIB  # shared memory that the system takes per program
# numbers of partial results loaded at once: 128 registers per thread, or half if tiles need more themselves
PARTIAL_NUMBERS = 128 * 128
MOST_SPLITS_PER_LOAD = 32
MOST_CLUSTER, PORTABLE_CLUSTER = 16, 8  # programs per cluster: where 16 SMs form a GPC; on any Hopper GPU
# shared memory: available without opt-in; upper limit of the compiler's reductions
UNASKED, SCRATCH = 48 * KIB, 4 * KIB
MOST_CLUSTER_ROWS = 8  # rows whose partial results a cluster exchanges faster than global memory
# key tiles per program of a cluster, one program per SM; with more, twice as many programs are as fast (H200)
BLOCKS_PER_PROGRAM = 4
PROGRAMMATIC_LAUNCH = True  # programmatic dependent launch


class TileConfig(NamedTuple):
    block_n: int
    stages: int  # all but one are in flight


# The first of which two programs fit on an SM, else the first that fits: the fastest on an H200.
TILES = (TileConfig(64, 3), TileConfig(64, 2))
# of contiguous caches (see `streamed`); the sizes it was measured for
STREAMED, STREAMED_WIDTH, STREAMED_ROWS = TileConfig(128, 2), 128, 16
STREAMED_KEYS = 12_000  # keys per SM


@dataclass(frozen=True)
class DecodeTraits(Constants, Traits, HookConstants):
    """Compile-time constants of the decode. It has no __str__ of its own, because Triton identifies kernels by it."""

    block_m: int
    block_n: int
    stages: int
    fp8: bool  # 8-bit keys
    partial_rows: int  # rows per tile that can be queries
    same_strides: bool  # k and v have the same strides
    int32_offsets: bool  # offsets in k and v fit into 32 bits
    masks_queries: bool  # rows of a tile see different keys
    splits_per_load: int = 1  # splits whose partial results of a tile are loaded at once
    single: bool = False  # one split: nothing to combine
    in_order: bool = False  # splits are combined in order, as `invariant` processes them
    programmatic_launch: bool = False  # programmatic dependent launch
    # Splits per cluster, one program each, combined in shared memory. 0: splits are combined in global memory.
    cluster: int = 0
    # functions of the call (decode_hooks), and keys of their text, as in ForwardTraits
    score_mod: Any = None
    mask_mod: Any = None
    functions: tuple[str | None, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "functions", tuple(function_key(fn) for fn in (self.score_mod, self.mask_mod)))

    ragged: ClassVar[bool] = False  # packed queries, of another number for each sequence; see `paged_config`

    @property
    def warps(self) -> int:
        """Eight where a tile of 64 rows has two functions over 8-bit keys: each thread then has half as many scores.
        Other tiles are faster with four, although some spill, because two programs fit on an SM.

        Time with four warps, and with eight (H200, 64 sequences of 8k, of d256 32):
            16 tokens, alibi, 8-bit keys                  0.732 ms, 1.131 ms
            16 tokens, a tree and alibi, 8-bit keys       1.443 ms, 1.242 ms
            8 tokens, d256, a tree and alibi              0.601 ms, 0.626 ms
            the same, 8-bit keys                          0.395 ms, 0.693 ms
        """
        has_both = self.score_mod is not None and self.mask_mod is not None
        return 8 if has_both and self.fp8 and self.block_m == MOST_ROWS else 4

    @property
    def queries_as_rows(self) -> bool:
        """Whether queries are the rows of products (`decode_tall`), instead of keys. Not with `in_order`: the
        batch-invariant forward, whose bits a decode has, has keys as rows. Not with 8-bit keys: they are converted in
        registers, and wgmma reads only the operand that has the rows from there.
        """
        return self.block_m == MOST_ROWS and not (self.fp8 or self.in_order)

    @property
    def block_d(self) -> int:
        return padded(self.head_dim, LEAST_WIDTH)

    @property
    def block_dv(self) -> int:
        return padded(self.head_dim_v, LEAST_WIDTH_V)

    @property
    def same_offsets(self) -> bool:
        """Whether a key and its value have the same offset in k and v."""
        return self.same_strides and self.head_dim == self.head_dim_v and self.block_d == self.block_dv

    @property
    def itemsize(self) -> int:
        """Bytes per element of the cache."""
        return 1 if self.fp8 else 2

    @property
    def log2_offset(self) -> float:
        """log2 offset by which p may exceed 1: a float16 below 2^-14 loses bits (device.conditional_rescaling)."""
        return 14.0 if self.dtype == "float16" or self.fp8 else 0.0

    @property
    def accumulator(self) -> Any:
        import triton.language as tl

        return tl.float32

    @property
    def step(self) -> int:
        """Keys between consecutive tiles of a split."""
        return self.block_n * (self.cluster or 1)

    @property
    def sent_rows(self) -> int:
        """Rows that each program of a cluster sends, at least two."""
        return max(2, self.partial_rows)

    @property
    def inbox_bytes(self) -> int:
        """What a program of a cluster receives: its columns from all programs (as many numbers as one partial result),
        and all lse.
        """
        return 4 * self.sent_rows * (self.block_dv + self.cluster)

    def own_bytes(self) -> int:
        """Keys and values of all stages, q, and p, which may be in registers."""
        widths = self.block_d + (0 if self.queries_as_rows else self.block_n)
        return self.stages * self.block_n * (self.block_d + self.block_dv) * self.itemsize + 2 * self.block_m * widths

    def shared_bytes(self) -> int:
        """Own tiles, and in a cluster the receive buffer with its mbarrier."""
        return self.own_bytes() + (padded_to(self.inbox_bytes + 8, KIB) if self.cluster else 0)


@dataclass(frozen=True)
class InvariantTraits(DecodeTraits):
    """Compile-time constants of a forward with batch_invariant: those of the decode, with more rows."""

    packed: bool = False

    @property
    def warps(self) -> int:
        """Four for each of two halves of the rows, which share keys and values."""
        return 8

    def shared_bytes(self) -> int:
        """As in a decode, with a second p."""
        return super().shared_bytes() + 2 * self.block_m * self.block_n


@dataclass(frozen=True)
class InvariantConfig:
    traits: InvariantTraits

    def __str__(self) -> str:
        f = self.traits
        return (
            f"as a decode: block_m={f.block_m} block_n={f.block_n} stages={f.stages}, shared "
            f"{f.shared_bytes() / KIB:.0f} KiB"
        )


def invariant_config(problem: Problem) -> InvariantConfig:
    traits = traits_of(as_decode(problem))
    # the last two are unused here
    traits = replace(traits, stages=2, block_m=2 * traits.block_m, partial_rows=0, same_strides=False)
    return InvariantConfig(
        InvariantTraits(**{f.name: getattr(traits, f.name) for f in fields(traits) if f.init}, packed=problem.packed)
    )


@dataclass(frozen=True)
class DecodeConfig:
    traits: DecodeTraits
    n_splits: int
    split_size: int  # in keys

    def __str__(self) -> str:
        f = self.traits
        shares = f"{self.n_splits} splits of {self.split_size} keys" if self.n_splits > 1 else "one split"
        shares = f"{self.n_splits} splits by turns in a cluster" if f.cluster else shares
        return (
            f"block_m={f.block_m} block_n={f.block_n} stages={f.stages}, {shares}, shared "
            f"{f.shared_bytes() / KIB:.0f} KiB"
        )


def padded(width: int, least: int) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << (width - 1).bit_length())


def most_rows(head_dim: int, head_dim_v: int) -> int:
    """Rows of the tallest tile."""
    return MOST_ROWS if max(head_dim, head_dim_v) <= 128 else MOST_ROWS_WIDE


def padded_to(size: int, step: int) -> int:
    return -(-size // step) * step


def cluster_size(traits: DecodeTraits, blocks: int, tiles: int, sm_count: int) -> int:
    """Number of programs that split a tile's keys in a cluster, one per SM; 0 if there are too many keys.

    Time with a cluster, and combined through global memory (H200, 32/8 heads of 128):
        1 sequence of 512     4.0 us, 4.9 us
        1 sequence of 1024    4.8 us, 5.9 us
        1 sequence of 4096    9.0 us, 9.4 us
        2 sequences of 512    7.8 us, 5.4 us (clusters of 16, two programs per SM)
    and of 1 sequence of 1024, 2 to 16 tokens, cold pages of 16:
        8 rows                8.1 us, 9.1 us
        16 rows               15.5 us, 10.1 us
        64 rows               28.7 us, 22.7 us
    """
    if traits.partial_rows > MOST_CLUSTER_ROWS:
        return 0
    most = min(MOST_CLUSTER, padded(blocks, 1), 1 << (max(1, sm_count // max(1, tiles)).bit_length() - 1))
    for size in (most, min(most, PORTABLE_CLUSTER)):
        room = 2 if size > PORTABLE_CLUSTER else 1  # programs per SM: 16 then need at most 8 SMs
        shared = replace(traits, cluster=size).shared_bytes()
        # Triton's launcher requests more shared memory only if the kernel's own allocation needs it.
        fits = room * (shared + RESERVED) <= MOST_SHARED and (
            traits.own_bytes() > UNASKED or shared + SCRATCH <= UNASKED
        )
        if size > 1 and fits and -(-blocks // size) <= BLOCKS_PER_PROGRAM:
            return size
    return 0


def streamed(traits: DecodeTraits, problem: DecodeProblem, tiles: int, sm_count: int) -> bool:
    """Whether each SM reads so many keys, from whole contiguous sequences, that one program per SM with twice the tile
    and fewer bytes in flight is faster.

    With half as many keys it is equal or 1 % slower, because a last wave of whole sequences takes longer. Paged caches
    are 4 % slower.

    Time with, and without (H200, 32/8 heads of 128):
        64 sequences of 8192     473.7 us, 481.0 us
        128 sequences of 4096    477.2 us, 483.2 us
        32 sequences of 8192     240.7 us, 242.5 us
    """
    fits = (
        traits.block_d == traits.block_dv == STREAMED_WIDTH
        and traits.block_m <= STREAMED_ROWS
        and not (traits.fp8 or problem.paged or traits.in_order)
    )
    return fits and 2 * tiles >= 3 * sm_count and tiles * problem.capacity >= STREAMED_KEYS * sm_count


def most_splits_per_load(traits: DecodeTraits, n_splits: int) -> int:
    """Splits whose partial results fit into registers at once, at most `n_splits` (rounded up)."""
    numbers = PARTIAL_NUMBERS if traits.block_m <= 16 and traits.block_dv <= 128 else PARTIAL_NUMBERS // 2
    return max(1, min(padded(n_splits, 1), MOST_SPLITS_PER_LOAD, numbers // (traits.partial_rows * traits.block_dv)))


def furthest(problem: DecodeProblem) -> int:
    """The largest element offset in k or v."""
    layout: Any = problem.layout
    pages, rows = (layout.n_pages, layout.page_size) if problem.paged else (layout.batch, layout.seqlen_k)
    sizes = (max(pages, 1), max(rows, 1), problem.heads_kv)
    widest = max(problem.head_dim, problem.head_dim_v)
    return (
        max(sum((size - 1) * stride for size, stride in zip(sizes, strides)) for strides in problem.strides[1:])
        + widest
    )


def traits_of(problem: DecodeProblem, kind: type[DecodeTraits] | None = None) -> DecodeTraits:
    """The constants of a problem, of this kind (DecodeTraits), except what depends on the number of splits."""
    rows, layout = problem.group * problem.layout.seqlen_q, problem.layout
    most = most_rows(problem.head_dim, problem.head_dim_v)
    known = split_kv.traits(problem) | {
        "block_m": min(most, padded(rows, LEAST_ROWS)),
        "partial_rows": min(most, padded(rows, 1)),
        "fp8": problem.cache_dtype == FP8,
        "same_strides": problem.strides[1] == problem.strides[2],
        "int32_offsets": furthest(problem) < 2**31,
        "masks_queries": layout.seqlen_q > 1 and (problem.left, problem.right) != (NO_BOUND, NO_BOUND),
        "in_order": problem.batch_invariant,
    }
    if problem.mods is not None:
        functions = mod_functions(problem.mods)
        known |= {"score_mod": functions.score_mod, "mask_mod": functions.mask_mod}
    found = [(kind or DecodeTraits)(block_n=t.block_n, stages=t.stages, **known) for t in TILES]
    return next(f for n in (2, 1) for f in found if n * (f.shared_bytes() + RESERVED) <= MOST_SHARED)


class HopperDecode:
    name = "hopper.decode"
    traits_kind: ClassVar[type[DecodeTraits]] = DecodeTraits

    def why_not(self, problem: DecodeProblem, target: Target) -> str | None:
        if target.kind != "cuda" or target.capability != CAPABILITY:
            return f"made for sm_{CAPABILITY}; this target is {target.words}"
        if reason := against_texts(problem):
            return reason
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"float16 and bfloat16 queries only; these are {DTYPES[problem.dtype]}"
        if max(problem.head_dim, problem.head_dim_v) > MOST_WIDTH:
            return f"head dimensions up to {MOST_WIDTH}; this is {problem.head_dim}/{problem.head_dim_v}"
        if problem.alignment < ALIGNMENT or any(
            width * problem.cache_dtype.itemsize % ALIGNMENT for width in (problem.head_dim, problem.head_dim_v)
        ):
            return (
                f"copies {ALIGNMENT} bytes at a time: addresses, strides and rows of k and v must be whole multiples; "
                f"addresses and strides are multiples of {problem.alignment}, rows of {problem.head_dim} and "
                f"{problem.head_dim_v} numbers"
            )
        if problem.capacity >= FARTHEST:
            return f"sequences of fewer than 2^30 keys; these may hold {problem.capacity}"
        return against_tools()

    def config(self, problem: DecodeProblem, target: Target) -> DecodeConfig:
        traits = traits_of(problem, self.traits_kind)
        tiles = problem.layout.batch * problem.heads_kv * -(-problem.group * problem.layout.seqlen_q // traits.block_m)
        blocks = max(1, -(-problem.capacity // traits.block_n))
        if (
            not problem.batch_invariant
            and launches_clusters()
            and (cluster := cluster_size(traits, blocks, tiles, target.sm_count))
        ):
            return DecodeConfig(
                replace(traits, programmatic_launch=PROGRAMMATIC_LAUNCH, cluster=cluster),
                cluster,
                -(-blocks // cluster) * traits.block_n,
            )
        if streamed(traits, problem, tiles, target.sm_count):
            traits = replace(traits, block_n=STREAMED.block_n, stages=STREAMED.stages)
        slots = target.sm_count * (MOST_SHARED // (traits.shared_bytes() + RESERVED))
        slots = 0 if problem.batch_invariant else slots
        n_splits, split_size = splits(problem.capacity, tiles, traits.block_n, slots, traits.partial_rows)
        return DecodeConfig(
            replace(
                traits,
                programmatic_launch=PROGRAMMATIC_LAUNCH,
                splits_per_load=most_splits_per_load(traits, n_splits),
                single=n_splits == 1,
            ),
            n_splits,
            split_size,
        )

    def cost(self, problem: DecodeProblem) -> Cost:
        return decode_cost(problem)

    def workspace(self, problem: DecodeProblem, config: DecodeConfig) -> tuple[Buffer, ...]:
        traits, layout = config.traits, problem.layout
        if traits.single or traits.cluster:
            return ()
        programs = (
            layout.batch * problem.heads_kv * -(-layout.seqlen_q * problem.group // traits.block_m) * config.n_splits
        )
        return (
            Buffer("partials", (programs * traits.partial_rows * (traits.block_dv + 1),), torch.float32),
        )  # of o, then of lse

    def run(self, plan: Plan, call: DecodeCall, tensors: Forward, workspace: dict[str, Tensor]) -> None:
        from .launch_decode import run_decode

        run_decode(plan, call, tensors, workspace)


DECODE = HopperDecode()
