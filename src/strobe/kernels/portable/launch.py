"""Arguments and launches of the portable forward and backward, from a Plan and a Call."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...errors import KernelFault
from ...problem.call import Call
from ...problem.decode import DecodeProblem
from ...problem.problem import ALIGNMENT, Packed, Problem
from ..device.dropout import DropoutParams
from ..device.forward_arguments import CuSeqlens, WindowParams
from ..protocol import Backward, Forward, Plan, away_from_0, entries, strides_of
from ..runtime import batch_invariant as shared
from ..runtime import error_flags
from ..runtime.compile_cache import hash_callees_first
from . import backward, batch_invariant, forward
from .arguments import (
    BlockListParams,
    DeltaStrides,
    DeltaTensors,
    DkDvStrides,
    DkDvTensors,
    DqStrides,
    DqTensors,
    ForwardStrides,
    ForwardTensors,
    HookParams,
    MaskTensors,
    ShapeParams,
    SoftmaxParams,
    Strides,
)
from .heuristics import TileConfig

LOG2E = 1.4426950408889634
DELTA_ROWS = 64
MOST_PROGRAMS = 2**31  # in the first grid dimension, the only one used here


def softmax_params(
    problem: Problem | DecodeProblem, gradients: bool = False, scale_log2: float | None = None
) -> SoftmaxParams:
    """The scale is positive: its sign is folded into q. A scale of 0 makes q itself 0. scale_log2: of scores that a
    score_mod changed.
    """
    scale, cap = abs(problem.scale) or 1.0, problem.softcap
    raw_log2, softcap = (cap * LOG2E, scale / cap) if cap else (scale * LOG2E, 0.0)
    raw_log2, softcap = away_from_0(raw_log2, problem.dtype), away_from_0(softcap, problem.dtype)
    return SoftmaxParams(
        parts(raw_log2 if scale_log2 is None else scale_log2), parts(softcap), parts(scale) if gradients else None
    )


def parts(value: float) -> tuple[float, float, float]:
    """Three float32 whose sum is the float64 `value`."""
    first = _float32(value)
    second = _float32(value - first)
    return first, second, _float32(value - first - second)


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


class Launch(NamedTuple):
    """A kernel with its grid, arguments and Triton options."""

    kernel: Any
    programs: int
    arguments: tuple
    options: dict[str, int]
    tma: bool = False

    def start(self) -> Any:
        """Launch. Returns the compiled kernel, or None if the launch is interpreted, simulated or recorded."""
        if self.programs >= MOST_PROGRAMS:
            raise KernelFault(
                f"{self.kernel.fn.__name__}: {self.programs} programs are more than a launch can hold; split the batch"
            )
        if self.tma:
            triton.set_allocator(_descriptor_memory)
        hash_callees_first(self.kernel)
        return self.kernel[(self.programs,)](*self.arguments, **self.options)


class ScoreModAux(NamedTuple):
    """What the functions of a call read: tensors, ints, floats. `gradient` is what score_mod_bwd reads."""

    score: tuple = ()
    mask: tuple = ()
    gradient: tuple = ()
    dropout: DropoutParams | None = None
    max_scores: Tensor | None = None  # written
    # counts and numbers of blocks (mask_blocks.shown_lists): for tiles of queries, and for tiles of keys
    lists_of_queries: tuple[Tensor, ...] | None = None
    lists_of_keys: tuple[Tensor, ...] | None = None


def _hooks(problem: Problem, traits: Any, aux: ScoreModAux | None) -> tuple[HookParams | None, float | None]:
    """(HookParams, the scale_log2 that scores have behind a score_mod)."""
    if not traits.has_mods:
        return None, None
    if traits.dtype == "float64":
        raise KernelFault(f"functions of scores compute in float32; the call is in {traits.dtype}")
    aux = aux or ScoreModAux()
    read = aux.score or None, aux.mask or None, aux.gradient or None
    hooks = HookParams(problem.softcap or abs(problem.scale) or 1.0, *read, aux.dropout)
    return hooks, None if traits.score_mod is None else LOG2E


def _with_lists(hooks: HookParams | None, traits: Any, lists: tuple[Tensor, ...] | None) -> HookParams | None:
    """The hooks with the lists of a kernel's tiles."""
    if traits.has_block_lists != (lists is not None):
        raise KernelFault("block lists are in the plan's traits or in the hooks, not in both")
    if hooks is None or lists is None:
        return hooks
    num_blocks, indices = lists
    batch, heads, tiles = num_blocks.shape
    strides = heads * tiles if batch > 1 else 0, tiles if heads > 1 else 0
    return hooks._replace(block_lists=BlockListParams(num_blocks, indices, *strides, tiles, indices.shape[-1]))


def forward_launches(plan: Plan, call: Call, tensors: Forward, aux: ScoreModAux | None = None) -> list[Launch]:
    traits, problem = plan.config.traits, plan.problem
    hooks, scale_log2 = _hooks(problem, traits, aux)
    hooks = _with_lists(hooks, traits, None if aux is None else aux.lists_of_queries)
    shape = _shape(problem, traits.block_m)
    arguments = (
        ForwardTensors(
            call.q, call.k, call.v, tensors.out, tensors.lse, call.sinks, None if aux is None else aux.max_scores
        ),
        _mask_tensors(call, call.spans_q, hooks),
        error_flags.word(call.q.device),
        forward_strides(problem, call, tensors),
        shape,
        WindowParams(call.left, call.right, call.max_seqlen_q, call.max_seqlen_k),
        softmax_params(problem, scale_log2=scale_log2),
        traits,
    )
    programs = shape.num_blocks * problem.heads_q * entries(problem)
    return [_launch(forward.forward_kernel, programs, arguments, traits.tile)]


def invariant_launch(plan: Plan, call: Call, tensors: Forward) -> Launch:
    """A forward that gives each row the bits of its decode."""
    traits, problem = plan.config.traits, plan.problem
    arguments = (
        ForwardTensors(call.q, call.k, call.v, tensors.out, tensors.lse, call.sinks),
        CuSeqlens(call.cu_seqlens_q, call.cu_seqlens_k),
        error_flags.word(call.q.device),
        forward_strides(problem, call, tensors),
        shared.sizes_of(problem, traits.block_m),
        WindowParams(call.left, call.right, call.max_seqlen_q, call.max_seqlen_k),
        softmax_params(problem),
        traits,
    )
    options = {"num_warps": traits.warps, "num_stages": traits.stages}
    return Launch(batch_invariant.invariant_kernel, shared.programs(problem, traits.block_m), arguments, options)


def backward_launches(plan: Plan, call: Call, t: Backward, aux: ScoreModAux | None = None) -> list[Launch]:
    """The launch of delta, then those of dk and dv, and of dq, which are independent of each other."""
    traits_k, traits_q = plan.config.keys, plan.config.queries
    hooks, scale_log2 = _hooks(plan.problem, traits_k, aux)
    hooks_k = _with_lists(hooks, traits_k, None if aux is None else aux.lists_of_keys)
    hooks_q = _with_lists(hooks, traits_q, None if aux is None else aux.lists_of_queries)
    problem, batch = plan.problem, entries(plan.problem)
    dout = _operand(t.dout, call)
    q, k, v, do, dq, dk, dv = (_strides(x, problem) for x in (call.q, call.k, call.v, dout, t.dq, t.dk, t.dv))
    num_rows = t.lse.shape[-1]
    delta = (
        DeltaTensors(dout, t.out, t.lse, t.dlse, t.delta),
        DeltaStrides(do, _strides(t.out, problem)),
        (problem.heads_q, num_rows),
        traits_q,
        DELTA_ROWS,
    )
    read = (call.q, call.k, call.v, dout, t.lse, t.delta)
    word, window = error_flags.word(call.q.device), WindowParams(call.left, call.right, None, None)
    softmax = softmax_params(problem, True, scale_log2)
    shape_k, shape_q = _shape(problem, traits_k.block_n, of_keys=True), _shape(problem, traits_q.block_m)
    keys = (
        DkDvTensors(*read, t.dk, t.dv),
        _mask_tensors(call, call.spans_k, hooks_k),
        word,
        DkDvStrides(q, k, v, do, dk, dv),
        shape_k,
        window,
        softmax,
        traits_k,
    )
    queries = (
        DqTensors(*read, t.dq),
        _mask_tensors(call, call.spans_q, hooks_q),
        word,
        DqStrides(q, k, v, do, dq),
        shape_q,
        window,
        softmax,
        traits_q,
    )
    return [
        Launch(backward.delta_kernel, -(-num_rows // DELTA_ROWS) * problem.heads_q * batch, delta, {}),
        _launch(backward.keys_kernel, shape_k.num_blocks * problem.heads_kv * batch, keys, traits_k.tile),
        _launch(backward.queries_kernel, shape_q.num_blocks * problem.heads_q * batch, queries, traits_q.tile),
    ]


def start(launches: list[Launch]) -> None:
    for launch in launches:
        launch.start()


def _launch(kernel: Any, programs: int, arguments: tuple, tile: TileConfig) -> Launch:
    return Launch(kernel, programs, arguments, {"num_warps": tile.warps, "num_stages": tile.stages}, tile.tma)


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for TMA descriptors that programs create, from torch's allocator, so that graphs capture it."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _operand(dout: Tensor, call: Call) -> Tensor:
    """dout in q's dtype with strides that TMA can address, copied only if necessary."""
    aligned = all(stride * dout.element_size() % ALIGNMENT == 0 and stride > 0 for stride in dout.stride()[:-1])
    if dout.dtype == call.q.dtype and aligned and dout.data_ptr() % ALIGNMENT == 0:
        return dout
    return torch.empty(dout.shape, dtype=call.q.dtype, device=dout.device).copy_(dout)


def _strides(tensor: Tensor, problem: Problem) -> Strides:
    return Strides(*strides_of(tensor, problem))


def forward_strides(problem: Problem, call: Call, tensors: Forward) -> ForwardStrides:
    return ForwardStrides(*(_strides(t, problem) for t in (call.q, call.k, call.v, tensors.out)))


def _shape(problem: Problem, block: int, of_keys: bool = False) -> ShapeParams:
    """Sizes for tiles of `block` queries, or of keys."""
    layout: Any = problem.layout
    if isinstance(layout, Packed):
        total = layout.total_k if of_keys else layout.total_q
        num_blocks = total // block + layout.batch + 2
        return ShapeParams(problem.heads_q, layout.total_q, layout.total_k, layout.batch, num_blocks)
    length = layout.seqlen_k if of_keys else layout.seqlen_q
    return ShapeParams(problem.heads_q, layout.seqlen_q, layout.seqlen_k, layout.batch, -(-length // block))


def _mask_tensors(call: Call, ranges: Tensor | None, hooks: HookParams | None) -> MaskTensors:
    return MaskTensors(
        call.cu_seqlens_q, call.cu_seqlens_k, call.prefix, call.key_lengths, call.ids_k, call.ids_q, ranges, hooks
    )
