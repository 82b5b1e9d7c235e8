"""What the portable decode and append can run, with which tiles and splits, and how. Imports no kernel language."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...env import ENV
from ...problem.append import AppendCall, AppendProblem
from ...problem.cache import FP8
from ...problem.call import DTYPES, FARTHEST, MOST_SCALE
from ...problem.decode import DecodeCall, DecodeProblem
from ...problem.problem import Problem
from ...problem.target import KIB, Target
from ..protocol import Buffer, Cost, Forward, Plan, append_cost, decode_cost, no_triton
from ..runtime.batch_invariant import as_decode
from ..runtime.compile_cache import Constants
from ..runtime.hook_constants import HookConstants, function_key
from ..runtime.mod_function import against_texts, mod_functions
from ..runtime.split_kv import Traits, splits, traits
from .heuristics import Widths, padded

LEAST_CAPABILITY = 80
FIRST_FP8 = 89  # first capability with conversions of 8-bit floats; below it their bits are decoded
MOST_WIDTH = 256
LEAST_SCALE = 2.0**-96  # the last bits of smaller float64 lie below the smallest float32
# rows per tile; the last for head dimensions above 128, whose o would spill
LEAST_ROWS, MOST_ROWS, MOST_ROWS_WIDE = 16, 64, 32
INVARIANT_ROWS = 32  # batch_invariant: a constant, because it determines the bits
MOST_FOR_4_WARPS = 16 * KIB  # bytes of o: 32 registers per thread


class TileConfig(NamedTuple):
    block_n: int
    warps: int
    stages: int  # all but one are in flight


# The first that fits in shared memory is used. On an H200 the first was the fastest at most lengths and batches
# (bfloat16, 32/8 heads, d 128, Triton 3.6, CUDA graph; a prototype over dense caches), with one CTA and 128 KiB of keys
# in flight per SM. The others are not measured.
TILES = (
    TileConfig(128, 8, 3),
    TileConfig(128, 8, 2),
    TileConfig(64, 4, 3),
    TileConfig(64, 4, 2),
    TileConfig(32, 4, 3),
    TileConfig(32, 4, 2),
    TileConfig(16, 4, 1),
)
BROAD_TILES = TILES[2:]  # for D + D_v > 256: fewer registers for addresses
WIDE_TILES = TILES[4:]  # float32 and float64: products on CUDA cores, for correctness only


@dataclass(frozen=True)
class DecodeTraits(Constants, Traits, Widths, HookConstants):
    """Compile-time constants of the decode."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    storage: str  # of keys: "same" as q, "fp8", or "bits" if the target cannot convert fp8
    single: bool  # one split: nothing to combine
    in_order: bool  # splits are combined in order, as `invariant` processes them
    packed: bool = False  # for `invariant`
    # functions of the call (score_mods), and keys of their text
    score_mod: Any = None
    mask_mod: Any = None
    functions: tuple[str | None, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "functions", tuple(function_key(fn) for fn in (self.score_mod, self.mask_mod)))

    k_token_scale: ClassVar[bool] = False  # PagedTraits has these as fields
    v_token_scale: ClassVar[bool] = False

    @property
    def loop_stages(self) -> int:
        """Stages of the loop in Triton's counting. If each key has its own page id, ids are loaded as far ahead of keys
        as keys ahead of products.
        """
        gathered = self.page_size > 0 and self.page_size % self.block_n > 0
        return 2 * self.stages - 1 if gathered else self.stages

    @property
    def splits_per_load(self) -> int:
        """Splits whose partial results of a tile are loaded at once: 128 bytes per thread."""
        size = 8 if self.dtype == "float64" else 4
        return max(1, min(16, 128 * 32 * self.warps // (self.block_m * self.block_dv * size)))


@dataclass(frozen=True)
class DecodeConfig:
    traits: DecodeTraits
    n_splits: int
    split_size: int  # in keys

    def __str__(self) -> str:
        f = self.traits
        shares = f"{self.n_splits} splits of {self.split_size} keys" if self.n_splits > 1 else "one split"
        return f"block_m={f.block_m} block_n={f.block_n} warps={f.warps} stages={f.stages}, {shares}"


def traits_of(problem: DecodeProblem, target: Target) -> DecodeTraits:
    """The traits of a problem, except whether there is one split."""
    rows = problem.group * problem.layout.seqlen_q
    most = MOST_ROWS if max(problem.head_dim, problem.head_dim_v) <= 128 else MOST_ROWS_WIDE
    most = LEAST_ROWS if problem.dtype == torch.float64 else most  # limited by shared memory
    block_m = max(LEAST_ROWS, min(most, 1 << max(0, rows - 1).bit_length()))
    if problem.batch_invariant:  # products of another height use other instructions and give other sums
        block_m = min(most, INVARIANT_ROWS)
    tile = tile_of(problem, target, block_m)
    return DecodeTraits(
        block_m=block_m,
        block_n=tile.block_n,
        warps=8 if block_m * padded(problem.head_dim_v) * problem.lse_dtype.itemsize > MOST_FOR_4_WARPS else tile.warps,
        stages=tile.stages,
        storage=storage_of(problem, target),
        single=False,
        in_order=problem.batch_invariant,
        **traits(problem),
    )


def decode_config(problem: DecodeProblem, target: Target) -> DecodeConfig:
    fixed = traits_of(problem, target)
    if problem.mods is not None:
        functions = mod_functions(problem.mods)
        fixed = replace(fixed, score_mod=functions.score_mod, mask_mod=functions.mask_mod)
    tiles = problem.layout.batch * problem.heads_kv * -(-problem.group * problem.layout.seqlen_q // fixed.block_m)
    n_splits, split_size = splits(
        problem.capacity, tiles, fixed.block_n, 0 if problem.batch_invariant else target.sm_count
    )
    return DecodeConfig(replace(fixed, single=n_splits == 1), n_splits, split_size)


@dataclass(frozen=True)
class InvariantConfig:
    """Config of a forward with batch_invariant."""

    traits: DecodeTraits

    def __str__(self) -> str:
        f = self.traits
        return f"as a decode: block_m={f.block_m} block_n={f.block_n} warps={f.warps} stages={f.stages}"


def invariant_config(problem: Problem, target: Target) -> InvariantConfig:
    return InvariantConfig(replace(traits_of(as_decode(problem), target), packed=problem.packed))


def storage_of(problem: DecodeProblem, target: Target) -> str:
    if problem.cache_dtype != FP8:
        return "same"
    # Triton's interpreter does not convert fp8 either
    return "fp8" if target.capability >= FIRST_FP8 and not ENV.interpret else "bits"


def tile_of(problem: DecodeProblem, target: Target, block_m: int, tiles: tuple[TileConfig, ...] = TILES) -> TileConfig:
    """Keys and values per stage, q and the weights, and for 8-bit keys one converted tile of each.

    On sm_90, tiles of 64 rows use wgmma, which needs one stage more beside those in flight.
    """
    limit = (target.shared_bytes or 99 * KIB) - 2 * KIB
    width, itemsize = padded(problem.head_dim) + padded(problem.head_dim_v), problem.dtype.itemsize
    widened = 0 if problem.cache_dtype == problem.dtype else itemsize

    def shared_bytes(t: TileConfig) -> int:
        rows = block_m * (padded(problem.head_dim) + t.block_n) * itemsize
        stages = t.stages if block_m >= MOST_ROWS else max(1, t.stages - 1)
        return rows + t.block_n * width * (stages * problem.cache_dtype.itemsize + widened)

    known = WIDE_TILES if itemsize > 2 else BROAD_TILES if width > 256 else tiles
    return next((t for t in known if shared_bytes(t) <= limit), known[-1])


def _why_not(problem: DecodeProblem | AppendProblem, target: Target) -> str | None:
    if target.kind != "cuda" and not ENV.interpret:
        return f"needs a GPU of sm_{LEAST_CAPABILITY} or later; this target is {target.words}"
    if target.kind == "cuda" and target.capability < LEAST_CAPABILITY:
        return f"needs sm_{LEAST_CAPABILITY} or later; this target is sm_{target.capability}"
    if problem.capacity >= FARTHEST:
        return f"sequences of fewer than 2^30 keys; these may hold {problem.capacity}"
    return no_triton()


def against_interpreter(dtype: torch.dtype) -> str | None:
    """Why Triton's interpreter, if enabled, cannot run this dtype, or None (Triton 3.6, interpreter.create_dot)."""
    if ENV.interpret and dtype == torch.bfloat16:
        return (
            "Triton's interpreter (TRITON_INTERPRET) multiplies bfloat16 as integers; give float16 "
            "or float32, or unset it"
        )
    return None


def against_scale(problem: Problem | DecodeProblem) -> str | None:
    """Why launches, which pass a float64 as three float32, cannot pass the scale and softcap, or None."""
    scale, cap = abs(problem.scale) or 1.0, problem.softcap
    passed = (scale, cap, scale / cap) if cap else (scale,)
    if problem.dtype != torch.float64 or all(LEAST_SCALE <= number <= MOST_SCALE for number in passed):
        return None
    return f"float64 with scale, softcap and scale / softcap from {LEAST_SCALE:.3g} to {MOST_SCALE:g}, or scale 0"


class PortableDecode:
    name = "portable.decode"

    def why_not(self, problem: DecodeProblem, target: Target) -> str | None:
        widest = max(problem.head_dim, problem.head_dim_v)
        if widest > MOST_WIDTH:
            return f"head dimensions up to {MOST_WIDTH}; this is {widest}"
        if problem.dtype == torch.float64 and problem.cache_dtype == FP8 and target.kind == "cuda":
            return (
                "float64 over 8-bit keys: Triton compiles no product of float64 tiles that were converted; give "
                "queries in float32"
            )
        why_not = against_texts(problem) or against_interpreter(problem.dtype) or against_scale(problem)
        return why_not or _why_not(problem, target)

    def config(self, problem: DecodeProblem, target: Target) -> DecodeConfig:
        return decode_config(problem, target)

    def cost(self, problem: DecodeProblem) -> Cost:
        return decode_cost(problem)

    def workspace(self, problem: DecodeProblem, config: DecodeConfig) -> tuple[Buffer, ...]:
        if config.traits.single:
            return ()
        rows = problem.layout.batch * problem.layout.seqlen_q * problem.heads_q
        wide = problem.lse_dtype
        return Buffer("shares", (config.n_splits, rows, problem.head_dim_v), wide), Buffer(
            "lse_shares", (config.n_splits, rows), wide
        )

    def run(self, plan: Plan, call: DecodeCall, tensors: Forward, workspace: dict[str, Tensor]) -> None:
        from .launch_decode import run_decode

        run_decode(plan, call, tensors, workspace)


@dataclass(frozen=True)
class AppendTraits(Constants, Widths):
    """Compile-time constants of the append."""

    dtype: str
    eight_bits: bool
    head_dim: int
    head_dim_v: int
    paged: bool
    rotary_dim: int
    interleaved: bool
    packed: bool = False
    at_slots: bool = False
    k_token_scale: bool = False  # a scale for each key and head, which the append computes
    v_token_scale: bool = False


@dataclass(frozen=True)
class AppendConfig:
    traits: AppendTraits

    def __str__(self) -> str:
        return "one program a token and head"


class PortableAppend:
    name = "portable.append"

    def why_not(self, problem: AppendProblem, target: Target) -> str | None:
        return _why_not(problem, target)

    def config(self, problem: AppendProblem, target: Target) -> AppendConfig:
        widths = problem.head_dim, problem.head_dim_v
        rotary = problem.rotary_dim, problem.interleaved
        known = DTYPES[problem.dtype], problem.cache_dtype == FP8, *widths, problem.paged, *rotary, problem.packed
        return AppendConfig(AppendTraits(*known, problem.slots is not None, *problem.token_scales))

    def cost(self, problem: AppendProblem) -> Cost:
        return append_cost(problem)

    def workspace(self, problem: AppendProblem, config: AppendConfig) -> tuple[Buffer, ...]:
        return ()

    def run(self, plan: Plan, call: AppendCall, tensors: None, workspace: dict[str, Tensor]) -> None:
        from .launch_decode import run_append

        run_append(plan, call)


DECODE, APPEND = PortableDecode(), PortableAppend()
