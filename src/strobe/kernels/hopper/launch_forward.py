"""Arguments and launch of the Hopper forward, from a Plan and a Call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import KernelFault
from ...problem.call import Call
from ...problem.problem import Problem
from ..device import mask_blocks, persistent_launch
from ..device.dialect import TensorDescriptor
from ..device.forward_arguments import (
    BlockListParams,
    BlockLists,
    ForwardHooks,
    HookParams,
    KeyRangeTensors,
    LaunchParams,
    Pointers,
    ShapeParams,
    SoftmaxParams,
    WindowParams,
)
from ..device.persistent_launch import LOG2_E, Launch, LaunchTensors, work_of
from ..device.tma import describing, descriptor
from ..protocol import Forward, Plan
from ..runtime.tma_requirements import entries_apart
from . import forward
from .traits import ROWS


def run_forward(plan: Plan, call: Call, tensors: Forward, hooks: ForwardHooks | None = None) -> None:
    """Launch the forward. `hooks` has what the functions and the block lists of the plan's traits read."""
    traits = plan.config.traits
    out = tensors.out
    if (traits.block_lists is None) != (hooks is None or hooks.block_lists is None):
        raise KernelFault(f"{plan.kernel.name}: block lists are in the plan's traits or in the hooks, not in both")
    if traits.key_ranges:
        call, tensors = end_to_end(call, tensors)
    describe = forward_launch if hooks is None else partial(forward_launch, hooks=hooks)
    read = () if hooks is None else (*hooks.score_aux, *hooks.mask_aux, *(hooks.block_lists or ()))
    keep = None
    if hooks is not None and hooks.block_lists is not None:
        keep = partial(mask_blocks.while_kept, call=call, lists=hooks.block_lists)
    persistent_launch.run(plan, call, tensors, describe, traits.tuning.pack_gqa > 1, read, keep)
    if traits.key_ranges and tensors.out.data_ptr() != out.data_ptr():
        out.copy_(tensors.out.view(out.shape))


def end_to_end(call: Call, tensors: Forward) -> tuple[Call, Forward]:
    """q, k, v and out with batch entries end to end, as descriptors for key ranges need them. Of q, k and v only the
    first entry is passed, with `apart`; out is a new tensor if it has gaps between entries.
    """
    q, k, v, out = call.q, call.k, call.v, tensors.out
    if out.shape[0] > 1 and out.stride(0) != out.shape[1] * out.stride(1):
        out = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    return call._replace(q=q[0], k=k[0], v=v[0]), tensors._replace(out=out.flatten(0, 1))


def apart(problem: Problem) -> tuple[int, ...]:
    """Rows between the end of one batch entry and the start of the next, for q, k and v."""
    layout: Any = problem.layout
    lengths = (layout.seqlen_q, layout.seqlen_k, layout.seqlen_k)
    if layout.batch <= 1:
        return (0, 0, 0)
    return tuple(
        (entries_apart(layout.batch, strides) or 0) - length for length, strides in zip(lengths, problem.strides)
    )


def forward_launch(
    plan: Plan, call: Call, out: Tensor, rest: LaunchTensors, hooks: ForwardHooks | None = None
) -> Launch:
    traits = plan.config.traits
    num_tiles, sizes, limits, softmax = work_of(plan, call)
    shape = ShapeParams(*sizes, *(apart(plan.problem) if traits.key_ranges else ()))
    parameters = SoftmaxParams(*softmax)
    if traits.score_mod is not None:
        parameters = SoftmaxParams(LOG2_E, parameters.softcap, parameters.scale_log2 / LOG2_E)
    described = None if hooks is None else hook_params(hooks, traits)
    launch = LaunchParams(num_tiles, shape, WindowParams(*limits), parameters, described)
    arguments = (*descriptors(call, out, traits), pointers(rest, traits.key_ranges), launch, traits)
    options = {"num_warps": 4, "maxnreg": traits.launch_registers}
    return Launch(forward.forward_kernel, min(plan.target.sm_count, num_tiles), arguments, options)


def hook_params(hooks: ForwardHooks, traits: Any) -> HookParams:
    lists = None if hooks.block_lists is None else block_list_params(hooks.block_lists, traits)
    return HookParams(hooks.score_aux or None, hooks.mask_aux or None, lists)


def block_list_params(lists: BlockLists, traits: Any) -> BlockListParams:
    """Raises KernelFault if a tile packs heads that have lists of their own, or if traits and lists disagree."""
    entries, heads, blocks = lists.kv_num_blocks.shape
    if heads > 1 and traits.pack_gqa > 1:
        raise KernelFault(
            f"block lists of {heads} heads in tiles of {traits.pack_gqa} heads; with_hooks(per_head=True)"
        )
    full = lists.full_kv_num_blocks is not None
    if full != traits.has_full_blocks:
        raise KernelFault(f"full blocks: the traits say {traits.has_full_blocks}, the lists {full}")
    strides = (heads * blocks if entries > 1 else 0, blocks if heads > 1 else 0)
    most = [0 if indices is None else indices.shape[-1] for indices in (lists.kv_indices, lists.full_kv_indices)]
    return BlockListParams(*lists, *strides, most[0], most[1], blocks)


def pointers(rest: LaunchTensors, key_ranges: bool) -> Pointers:
    if key_ranges:
        ranges = KeyRangeTensors(*rest.ranges)
        return Pointers(rest.lse, rest.sinks, None, None, ranges, rest.errors, rest.tile_counter)
    cu_seqlens_q, cu_seqlens_k = rest.ranges
    return Pointers(rest.lse, rest.sinks, cu_seqlens_q, cu_seqlens_k, None, rest.errors, rest.tile_counter)


def descriptors(call: Call, out: Tensor, traits: Any) -> tuple[TensorDescriptor | None, ...]:
    """Descriptors of q, k, v and out: tiles of the first columns, then tiles of the rest."""
    queries = describing(traits.tuning)
    tiles = (
        (queries, call.q, ROWS, traits.block_d, traits.tail_d),
        (descriptor, call.k, traits.tuning.block_n, traits.block_d, traits.tail_d),
        (descriptor, call.v, traits.tuning.block_n, traits.block_dv, traits.tail_dv),
        (queries, out, ROWS, traits.block_dv, traits.tail_dv),
    )
    narrow = (1, 1, 1, 2 if traits.tuning.half_staged else 1)
    first = (view(tensor, rows, (width - rest) // n) for (view, tensor, rows, width, rest), n in zip(tiles, narrow))
    return *first, *(view(tensor, rows, rest) if rest else None for view, tensor, rows, _, rest in tiles)
