"""Arguments and launch of the Hopper decode, and of forwards with batch_invariant, from a Plan and a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import KernelFault
from ...problem.call import Call, Paged
from ...problem.decode import DecodeCall, DecodeProblem
from ...problem.paged import PagedCall, PagedProblem
from ...problem.problem import Problem
from .. import protocol
from ..device.forward_arguments import HookParams, WindowParams
from ..device.persistent_launch import LOG2_E, MOST_TILES, Launch
from ..protocol import Forward, Plan, away_from_0
from ..runtime import batch_invariant, error_flags, launcher
from ..runtime.launch_cache import CACHE, forward_addresses
from ..runtime.mod_function import mod_aux
from ..runtime.split_kv import insert_launch
from ..runtime.workspace import zeros_on
from . import decode, decode_tall
from .batch_invariant import invariant_kernel
from .decode_arguments import (
    CuSeqlens,
    DecodeShape,
    DecodeSoftmax,
    DecodeTensors,
    DecodeWindow,
    InvariantTensors,
    KeyScales,
    Partials,
    RowStrides,
    Strides,
)


def partials_of(plan: Plan, workspace: dict[str, Tensor], device: torch.device) -> Partials:
    traits = plan.config.traits
    if traits.single or traits.cluster:
        return Partials(None, None)
    tiles = plan.problem.layout.batch * plan.problem.heads_kv * row_tiles(plan)
    return Partials(workspace["partials"], zeros_on(device, tiles))


def run_decode(plan: Plan, call: DecodeCall, t: Forward, workspace: dict[str, Tensor], kernel: Any = None) -> None:
    """Launch a decode. `kernel` takes the arguments of decode_kernel; None: the Hopper decode of the plan's tiles."""
    partials = partials_of(plan, workspace, call.q.device)
    word = error_flags.word(call.q.device)
    hooks, read = hooks_of(plan, call)
    tensors = DecodeTensors(
        call.q, call.k, call.v, call.page_table, call.seqlens, call.k_start, t.out, t.lse, call.sinks, None, hooks
    )
    moving = (*tensors[:-1], call.k_scale, call.v_scale, *partials, word, *read.tensors)
    key = (t.out.stride(), *read.kinds)
    launch = launcher.start(plan, key, moving, lambda: decode_launch(plan, call, tensors, partials, word, kernel))
    insert_launch(plan, call, t, workspace, launch)


class HookReads(NamedTuple):
    """What functions of a call read, for `launcher.start`: its tensors, and its part of the key."""

    tensors: tuple[Tensor, ...] = ()
    kinds: tuple = ()


def hooks_of(plan: Plan, call: DecodeCall | PagedCall) -> tuple[HookParams | None, HookReads]:
    if call.mods is None:
        return None, HookReads()
    score, mask, _ = mod_aux(plan.problem, call)
    values = (*score, *mask)
    tensors = tuple([value for value in values if isinstance(value, Tensor)])
    return HookParams(score or None, mask or None, None), HookReads(tensors, tuple(map(launcher.kind_of, values)))


def run_invariant(plan: Plan, call: Call, t: Forward, kernel: Any = invariant_kernel) -> None:
    """Launch a forward that gives each row the bits of its decode. `kernel` takes the arguments of invariant_kernel."""
    word = error_flags.word(call.q.device)
    tensors = InvariantTensors(call.q, call.k, call.v, t.out, t.lse, call.sinks)
    cu_seqlens = CuSeqlens(call.cu_seqlens_q, call.cu_seqlens_k)
    key = (call.left, call.right, call.max_seqlen_q, call.max_seqlen_k, t.out.stride())
    launch = launcher.start(
        plan,
        key,
        (*tensors, *cu_seqlens, word),
        lambda: invariant_launch(plan, call, tensors, cu_seqlens, word)._replace(kernel=kernel),
    )
    if launch is not None and t.out.is_contiguous():
        CACHE.insert_launch(plan, forward_addresses(call, *t), launch)


def invariant_launch(plan: Plan, call: Call, tensors: InvariantTensors, cu_seqlens: CuSeqlens, word: Tensor) -> Launch:
    problem, traits = plan.problem, plan.config.traits
    moved = (tensors.q, tensors.k, tensors.v, tensors.out)
    strides = Strides(*(RowStrides(*protocol.strides_of(x, problem)) for x in moved))
    window = WindowParams(call.left, call.right, call.max_seqlen_q, call.max_seqlen_k)
    count = batch_invariant.programs(problem, traits.block_m)
    if count >= MOST_TILES:
        raise KernelFault(f"{plan.kernel.name}: {count} programs are more than a launch can hold; split the batch")
    arguments = (
        tensors,
        cu_seqlens,
        word,
        strides,
        batch_invariant.sizes_of(problem, traits.block_m),
        window,
        DecodeSoftmax(*softmax_parameters(problem)),
        traits,
    )
    return Launch(invariant_kernel, count, arguments, {"num_warps": traits.warps})


def row_tiles(plan: Plan) -> int:
    return -(-plan.problem.layout.seqlen_q * plan.problem.group // plan.config.traits.block_m)


def decode_launch(
    plan: Plan,
    call: DecodeCall | PagedCall,
    tensors: DecodeTensors,
    partials: Partials,
    word: Tensor,
    kernel: Any = None,
) -> Launch:
    problem, config, n_tiles = plan.problem, plan.config, row_tiles(plan)
    layout = problem.layout
    pages = (layout.n_pages, layout.max_pages) if isinstance(layout, Paged) else (0, 0)
    splits = (config.n_splits, config.split_size)
    packed = (layout.batch, problem.total_q) if isinstance(problem, PagedProblem) else (None, None)
    shape = DecodeShape(layout.seqlen_q, problem.heads_kv, problem.capacity, *pages, *splits, n_tiles, *packed)
    rows = lambda x: RowStrides(*(x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])))
    strides = Strides(*(rows(x) for x in (call.q, call.k, call.v, tensors.out)))
    arguments = (
        tensors,
        KeyScales(call.k_scale, call.v_scale),
        partials,
        word,
        strides,
        shape,
        DecodeWindow(call.left, call.right),
        DecodeSoftmax(*softmax_parameters(problem)),
        config.traits,
    )
    cluster = config.traits.cluster or 1
    programs = layout.batch * problem.heads_kv * n_tiles * config.n_splits // cluster
    return Launch(
        kernel or (decode_tall if config.traits.queries_as_rows else decode).decode_kernel,
        programs,
        arguments,
        {"num_warps": config.traits.warps, "launch_pdl": config.traits.programmatic_launch},
        cluster,
    )


def softmax_parameters(problem: DecodeProblem | Problem) -> tuple[float, float]:
    """(scale_log2, softcap), both at least 0. A raw score is q k^T, or tanh(softcap * q k^T) with a cap; times
    scale_log2 it is in log2 units.
    """
    scale, cap = abs(problem.scale) or 1.0, problem.softcap
    found = (cap * LOG2_E, scale / cap) if cap else (scale * LOG2_E, 0.0)
    return away_from_0(found[0], problem.dtype), away_from_0(found[1], problem.dtype)
