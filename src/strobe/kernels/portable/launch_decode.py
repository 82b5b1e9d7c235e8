"""Arguments and launches of the portable decode and append, from a Plan and a call on a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...problem.append import AppendCall
from ...problem.call import Paged
from ...problem.decode import DecodeCall
from ..device.forward_arguments import WindowParams
from ..protocol import Forward, Plan
from ..runtime import error_flags, launcher
from ..runtime.mod_function import mod_aux
from ..runtime.split_kv import insert_launch
from ..runtime.workspace import zeros_on
from . import append, decode
from .arguments import (
    AppendShape,
    AppendStrides,
    AppendTensors,
    Caches,
    DecodeShape,
    DecodeTensors,
    ForwardStrides,
    HookParams,
    PerKeyHead,
    RotaryStrides,
    RotaryTables,
    SplitWorkspace,
    Strides,
)
from .launch import Launch, softmax_params


def run_decode(plan: Plan, call: DecodeCall, t: Forward, workspace: dict[str, Tensor]) -> None:
    """A single launch. With several splits, the last program of a tile to finish combines them."""
    problem, traits = plan.problem, plan.config.traits
    tiles = problem.layout.batch * problem.heads_kv * _num_m_blocks(plan)
    splits = SplitWorkspace(None, None, None)
    if not traits.single:
        splits = SplitWorkspace(workspace["shares"], workspace["lse_shares"], zeros_on(call.q.device, tiles))
    word = error_flags.word(call.q.device)
    tensors = DecodeTensors(
        call.q, call.k, call.v, call.page_table, call.seqlens, call.k_start, t.out, t.lse, call.sinks
    )
    if call.mods is not None:  # what functions read is not among `moving`
        score, mask, _ = mod_aux(problem, call)
        hooks = HookParams(1.0, score or None, mask or None, None)
        decode_launch(plan, call, tensors._replace(hooks=hooks), splits, word).start()
        return
    moving = (*tensors, call.k_scale, call.v_scale, *splits, word)
    launch = launcher.start(plan, t.out.stride(), moving, lambda: decode_launch(plan, call, tensors, splits, word))
    insert_launch(plan, call, t, workspace, launch)


def decode_launch(plan: Plan, call: DecodeCall, tensors: DecodeTensors, splits: SplitWorkspace, word: Tensor) -> Launch:
    problem, config = plan.problem, plan.config
    traits, layout = config.traits, problem.layout
    k, v = (stored(pool, traits.storage == "bits") for pool in (call.k, call.v))
    num_m_blocks = _num_m_blocks(plan)
    arguments = (
        tensors._replace(k=k, v=v),
        PerKeyHead(call.k_scale, call.v_scale),
        splits,
        word,
        ForwardStrides(*(strides_of(x) for x in (call.q, k, v, tensors.out))),
        DecodeShape(
            layout.seqlen_q,
            problem.heads_kv,
            problem.capacity,
            *pages_of(layout),
            config.n_splits,
            config.split_size,
            num_m_blocks,
        ),
        WindowParams(call.left, call.right, None, None),
        softmax_params(problem),
        traits,
    )
    programs = layout.batch * problem.heads_kv * num_m_blocks * config.n_splits
    return Launch(decode.decode_kernel, programs, arguments, {"num_warps": traits.warps, "num_stages": traits.stages})


def run_append(plan: Plan, call: AppendCall) -> None:
    word = error_flags.word(call.k.device)
    moving = (
        call.k_new,
        call.v_new,
        call.k,
        call.v,
        call.seqlens,
        call.page_table,
        call.k_scale,
        call.v_scale,
        call.cos,
        call.sin,
        call.cu_seqlens_q,
        word,
    )
    launcher.start(plan, "append", moving, lambda: append_launch(plan, call, word))


def append_launch(plan: Plan, call: AppendCall, word: Tensor) -> Launch:
    problem, traits = plan.problem, plan.config.traits
    layout = problem.layout
    k, v = (stored(pool, traits.eight_bits) for pool in (call.k, call.v))
    rotary = RotaryStrides(0, 0, 0)
    if call.cos is not None and call.sin is not None:
        rotary = RotaryStrides(call.cos.stride(0), call.sin.stride(0), call.cos.shape[0])
    batch = layout.batch if problem.packed and problem.slots is None else None
    arguments = (
        AppendTensors(call.k_new, call.v_new, call.seqlens, call.page_table, call.cu_seqlens_q),
        Caches(k, v),
        PerKeyHead(call.k_scale, call.v_scale),
        RotaryTables(call.cos, call.sin),
        word,
        AppendStrides(_new_strides(call.k_new), _new_strides(call.v_new), strides_of(k), strides_of(v), rotary),
        AppendShape(
            layout.seqlen_q,
            problem.heads_kv,
            problem.capacity,
            problem.page_size,
            *pages_of(layout),
            batch,
        ),
        traits,
    )
    return Launch(append.append_kernel, problem.tokens * problem.heads_kv, arguments, {"num_warps": 1})


def stored(pool: Tensor, as_bytes: bool) -> Tensor:
    return pool.view(torch.uint8) if as_bytes else pool


def strides_of(tensor: Tensor) -> Strides:
    return Strides(*tensor.stride()[:3])


def _new_strides(tensor: Tensor) -> Strides:
    """Of new keys or values, packed or not."""
    return strides_of(tensor) if tensor.dim() == 4 else Strides(0, *tensor.stride()[:2])


def pages_of(layout: Any) -> tuple[int, int]:
    """(pages in the cache, most pages of a sequence)."""
    return (layout.n_pages, layout.max_pages) if isinstance(layout, Paged) else (0, 0)


def _num_m_blocks(plan: Plan) -> int:
    return -(-plan.problem.layout.seqlen_q * plan.problem.group // plan.config.traits.block_m)
