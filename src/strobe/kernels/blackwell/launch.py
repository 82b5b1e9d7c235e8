"""Arguments and launch of the Blackwell forward, from a Plan and a Call."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...problem.call import Call
from ..device import mask_blocks, persistent_launch
from ..device.forward_arguments import (
    BlockListParams,
    BlockLists,
    ForwardHooks,
    HookParams,
    LaunchParams,
    Pointers,
    ShapeParams,
    SoftmaxParams,
    WindowParams,
)
from ..device.persistent_launch import LOG2_E, Launch, LaunchTensors, work_of
from ..device.tma import describing, descriptor
from ..protocol import Forward, Plan
from ..runtime.mod_function import mod_aux
from . import forward
from .traits import REGISTERS, ROWS


def run_forward(plan: Plan, call: Call, tensors: Forward) -> None:
    traits, hooks, keep = plan.config.traits, hooks_of(plan, call), None
    read = () if hooks is None else (*hooks.score_aux, *hooks.mask_aux, *(hooks.block_lists or ()))
    if hooks is not None and hooks.block_lists is not None:
        keep = partial(mask_blocks.while_kept, call=call, lists=hooks.block_lists)
    describe = partial(forward_launch, hooks=hooks)
    persistent_launch.run(plan, call, tensors, describe, traits.tuning.pack_gqa > 1, read, keep)


def hooks_of(plan: Plan, call: Call) -> ForwardHooks | None:
    """What the functions of a call read, and its block lists."""
    if call.mods is None:
        return None
    listed, hooks = plan.config.traits.block_lists, ForwardHooks(*mod_aux(plan.problem, call)[:2])
    if listed is None:
        return hooks
    lists = mask_blocks.forward_lists(plan.problem, call, (listed.block_q, listed.block_kv))
    return hooks._replace(block_lists=BlockLists(*lists))


def hook_params(hooks: ForwardHooks) -> HookParams:
    lists = hooks.block_lists
    if lists is None:
        return HookParams(hooks.score_aux or None, hooks.mask_aux or None, None)
    entries, heads, blocks = lists.kv_num_blocks.shape
    strides = heads * blocks if entries > 1 else 0, blocks if heads > 1 else 0
    most = [0 if indices is None else indices.shape[-1] for indices in (lists.kv_indices, lists.full_kv_indices)]
    params = BlockListParams(*lists, *strides, most[0], most[1], blocks)
    return HookParams(hooks.score_aux or None, hooks.mask_aux or None, params)


def forward_launch(
    plan: Plan, call: Call, out: Tensor, rest: LaunchTensors, hooks: ForwardHooks | None = None
) -> Launch:
    traits = plan.config.traits
    num_tiles, sizes, limits, softmax = work_of(plan, call)
    parameters, described = SoftmaxParams(*softmax), None if hooks is None else hook_params(hooks)
    if traits.score_mod is not None:  # whose scores are in natural units
        parameters = SoftmaxParams(LOG2_E, parameters.softcap, parameters.scale_log2 / LOG2_E)
    launch = LaunchParams(num_tiles, ShapeParams(*sizes), WindowParams(*limits), parameters, described)
    cu_seqlens_q, cu_seqlens_k = rest.ranges
    pointers = Pointers(rest.lse, rest.sinks, cu_seqlens_q, cu_seqlens_k, None, rest.errors, rest.tile_counter)
    queries = describing(traits.tuning)
    tiles = (
        (queries, call.q, ROWS, traits.block_d, traits.tail_d),
        (descriptor, call.k, traits.tuning.block_n, traits.block_d, traits.tail_d),
        (descriptor, call.v, traits.tuning.block_n, traits.block_dv, traits.tail_dv),
        (queries, out, ROWS, traits.block_dv, traits.tail_dv),
    )
    first = (view(tensor, rows, width - tail) for view, tensor, rows, width, tail in tiles)
    last = (view(tensor, rows, tail) if tail else None for view, tensor, rows, _, tail in tiles)
    arguments = (*first, *last, pointers, launch, traits)
    return Launch(
        forward.forward_kernel, min(plan.target.sm_count, num_tiles), arguments, {"num_warps": 4, "maxnreg": REGISTERS}
    )
