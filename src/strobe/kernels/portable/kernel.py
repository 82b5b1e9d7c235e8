"""What the portable kernels can run, with which tiles, and how. Imports no kernel language until something runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...env import ENV
from ...problem.call import DTYPES, Call
from ...problem.mask import MaskStructure
from ...problem.problem import Problem
from ...problem.target import KIB, Target
from ..device import mask_blocks
from ..protocol import Backward, Buffer, Cost, Forward, Plan, attention_cost, no_triton
from ..runtime import batch_invariant
from ..runtime.compile_cache import Constants
from ..runtime.hook_constants import HookConstants, ListedBlocks, function_key
from ..runtime.mod_function import against_texts, mod_aux, mod_functions
from .decode_config import APPEND as APPEND
from .decode_config import DECODE as DECODE
from .decode_config import InvariantConfig, against_interpreter, against_scale, invariant_config
from .heuristics import TileConfig, Widths, backward_tiles, forward_tile
from .paged_config import PAGED as PAGED

if TYPE_CHECKING:
    from .launch import ScoreModAux

LEAST_CAPABILITY = 80
MOST_WIDTH = 256
LEAST_TILE = 16  # smallest side of a product


@dataclass(frozen=True)
class KernelTraits(Constants, Widths, HookConstants):
    """Compile-time constants: tile sizes and what kind of problem it is, but not its lengths."""

    tile: TileConfig
    dtype: str
    head_dim: int
    head_dim_v: int
    group: int
    mask: MaskStructure
    softcap: bool
    sinks: bool
    packed: bool
    sign: int  # sign of the scale
    # functions of the call (score_mods), and keys of their text: Triton identifies a function by its name alone
    score_mod: Any = None
    mask_mod: Any = None
    score_mod_bwd: Any = None
    dropout: bool = False
    max_scores: bool = False
    block_lists: ListedBlocks | None = None  # of the tile's size
    runs: bool = False  # over shared keys
    functions: tuple[str | None, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        functions = (self.score_mod, self.mask_mod, self.score_mod_bwd)
        object.__setattr__(self, "functions", tuple(function_key(fn) for fn in functions))

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return self.tile.block_m

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        return self.tile.block_n

    @property
    def stages(self) -> int:
        return self.tile.stages

    @property
    def tma(self) -> bool:
        return self.tile.tma

    # It has no __str__ of its own: Triton identifies compiled kernels by the text of their constants, which must
    # include every field.


@dataclass(frozen=True)
class ForwardConfig:
    traits: KernelTraits

    def __str__(self) -> str:
        return _words(self.traits)


@dataclass(frozen=True)
class BackwardConfig:
    """Configs of the backward's two main kernels."""

    keys: KernelTraits
    queries: KernelTraits

    def __str__(self) -> str:
        return f"dk, dv: {_words(self.keys)}; dq: {_words(self.queries)}"


def _words(traits: KernelTraits) -> str:
    tile, more = traits.tile, " TMA" * traits.tile.tma + " block lists" * traits.has_block_lists
    return f"block_m={tile.block_m} block_n={tile.block_n} warps={tile.warps} stages={tile.stages}{more}"


def _traits(problem: Problem, tile: TileConfig) -> KernelTraits:
    return KernelTraits(
        tile=tile,
        dtype=DTYPES[problem.dtype],
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        group=problem.group,
        mask=problem.mask,
        softcap=bool(problem.softcap),
        sinks=problem.sinks,
        packed=problem.packed,
        sign=(problem.scale > 0) - (problem.scale < 0),
        dropout=problem.mods is not None and problem.mods.dropout,
        max_scores=problem.mods is not None and problem.mods.max_scores,
        runs=problem.runs,
    )


def _why_not(problem: Problem, target: Target) -> str | None:
    if target.kind != "cuda" and not ENV.interpret:
        return f"needs a GPU of sm_{LEAST_CAPABILITY} or later; this target is {target.words}"
    if target.kind == "cuda" and target.capability < LEAST_CAPABILITY:
        return f"needs sm_{LEAST_CAPABILITY} or later; this target is sm_{target.capability}"
    if reason := against_interpreter(problem.dtype) or against_scale(problem):
        return reason
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > MOST_WIDTH:
        return f"head dimensions up to {MOST_WIDTH}; this is {widest}"
    return against_texts(problem, drops=True) or no_triton()


def forward_with_mods(config: ForwardConfig, score_mod: Any = None, mask_mod: Any = None) -> ForwardConfig:
    """The config of a forward that calls functions on its scores (score_mods)."""
    return ForwardConfig(replace(config.traits, score_mod=score_mod, mask_mod=mask_mod))


def _with_8_warps(tile: TileConfig) -> TileConfig:
    """Functions take registers: with 4 warps the kernel of dk and dv spills 236 to 1,076 bytes of a thread (d128, sm_80
    and sm_90), and with 8 up to 88.
    """
    return replace(tile, warps=8) if tile.block_m * tile.block_n >= 64 * 64 else tile


def backward_with_mods(
    config: BackwardConfig, score_mod: Any = None, mask_mod: Any = None, score_mod_bwd: Any = None, dq_bwd: Any = None
) -> BackwardConfig:
    """The config of a backward that calls functions on its scores.

    The kernel of dk and dv calls score_mod_bwd, which may add to gradients of what it reads. The kernel of dq calls
    dq_bwd, which must not. If dq_bwd is None, score_mod_bwd adds nothing, and both kernels call it.
    """
    keys, queries = (
        replace(traits, score_mod=score_mod, mask_mod=mask_mod, tile=_with_8_warps(traits.tile))
        for traits in (config.keys, config.queries)
    )
    return BackwardConfig(
        replace(keys, score_mod_bwd=score_mod_bwd), replace(queries, score_mod_bwd=dq_bwd or score_mod_bwd)
    )


def with_block_lists(traits: KernelTraits, problem: Problem, target: Target) -> KernelTraits:
    """Traits of a kernel whose tiles visit the blocks that the call's mask_mod shows (`device.mask_blocks`), if the
    call has lists and tiles are whole blocks of them. Triton's interpreter does not run the kernel that makes lists.
    """
    size = traits.block_m, traits.block_n
    if target.kind != "cuda" or any([side % mask_blocks.BLOCK for side in size]) or not mask_blocks.sizes_of(problem):
        return traits
    return replace(traits, block_lists=ListedBlocks(*size, has_full=False))


def _lists(plan: Plan, call: Call, traits: KernelTraits, of_keys: bool = False) -> tuple[Tensor, ...] | None:
    if traits.block_lists is None:
        return None
    return mask_blocks.shown_lists(plan.problem, call, (traits.block_m, traits.block_n), of_keys)


def _aux(plan: Plan, call: Call) -> ScoreModAux:
    """What the functions of a call and its dropout read."""
    from .launch import ScoreModAux

    mods = call.mods
    if mods is None:
        return ScoreModAux()
    dropout = None
    if mods.dropout_seed is not None:
        from ..device.dropout import DropoutParams

        offsets = mods.dropout_seed if mods.texts.dropout_offsets else None
        dropout = DropoutParams(mods.dropout_seed, mods.dropout_p, 1.0 / (1.0 - mods.dropout_p), offsets)
    return ScoreModAux(*mod_aux(plan.problem, call), dropout, mods.max_scores)


class PortableForward:
    name = "portable.forward"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return _why_not(problem, target)

    def config(self, problem: Problem, target: Target) -> ForwardConfig | InvariantConfig:
        if problem.batch_invariant and batch_invariant.against(problem) is None:
            return invariant_config(problem, target)
        config = ForwardConfig(_traits(problem, forward_tile(problem, target)))
        if problem.mods is None:
            return config
        config = forward_with_mods(config, *mod_functions(problem.mods)[:2])
        return ForwardConfig(with_block_lists(config.traits, problem, target))

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem)

    def workspace(self, problem: Problem, config: object) -> tuple[Buffer, ...]:
        return ()

    def run(self, plan: Plan, call: Call, tensors: Forward, workspace: dict[str, Tensor]) -> None:
        from .launch import forward_launches, invariant_launch, start

        if isinstance(plan.config, InvariantConfig):
            start([invariant_launch(plan, call, tensors)])
        else:
            aux = _aux(plan, call)._replace(lists_of_queries=_lists(plan, call, plan.config.traits))
            start(forward_launches(plan, call, tensors, aux))


class PortableBackward:
    name = "portable.backward"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        reason = _why_not(problem, target)
        if (
            reason is None
            and min(side for tile in backward_tiles(problem, target) for side in (tile.block_m, tile.block_n))
            < LEAST_TILE
        ):
            reason = (
                f"gradients in {DTYPES[problem.dtype]} at these head dimensions need tiles of {LEAST_TILE} x "
                f"{LEAST_TILE}, "
            )
            reason += f"which exceed this target's {target.shared_bytes // KIB} KiB of shared memory"
        return reason

    def config(self, problem: Problem, target: Target) -> BackwardConfig:
        config = BackwardConfig(*(_traits(problem, tile) for tile in backward_tiles(problem, target)))
        if problem.mods is None:
            return config
        config = backward_with_mods(config, *mod_functions(problem.mods, not problem.mask.documents))
        return BackwardConfig(*(with_block_lists(one, problem, target) for one in (config.keys, config.queries)))

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem, backward=True)

    def workspace(self, problem: Problem, config: object) -> tuple[Buffer, ...]:
        return ()

    def run(self, plan: Plan, call: Call, tensors: Backward, workspace: dict[str, Tensor]) -> None:
        from .launch import backward_launches, start

        of_queries = _lists(plan, call, plan.config.queries)
        of_keys = _lists(plan, call, plan.config.keys, of_keys=True)
        aux = _aux(plan, call)._replace(lists_of_queries=of_queries, lists_of_keys=of_keys)
        start(backward_launches(plan, call, tensors, aux))


FORWARD = PortableForward()
BACKWARD = PortableBackward()
