"""Arguments and launches of the portable decode and append, from a Plan and a call on a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...problem.append import AppendCall
from ...problem.call import Paged
from ...problem.decode import DecodeCall
from ..protocol import Forward, Plan
from ..runtime import error_flags, launcher
from ..runtime.split_kv import insert_launch
from ..runtime.workspace import zeros_on
from . import append, decode
from .launch import Launch, softmax_params


def run_decode(plan: Plan, call: DecodeCall, t: Forward, workspace: dict[str, Tensor]) -> None:
    """A single launch. With several splits, the last program of a tile to finish combines them."""
    problem, form = plan.problem, plan.config.traits
    tiles = problem.layout.batch * problem.heads_kv * -(-problem.layout.seqlen_q * problem.group // form.block_m)
    shares = (
        (None, None, None)
        if form.single
        else (workspace["shares"], workspace["lse_shares"], zeros_on(call.q.device, tiles))
    )
    word = error_flags.word(call.q.device)
    tensors = (call.q, call.k, call.v, call.page_table, call.seqlens, call.k_start, t.out, t.lse, call.sinks)
    moving = (*tensors, call.k_scale, call.v_scale, *shares, word)
    launch = launcher.start(plan, t.out.stride(), moving, lambda: decode_launch(plan, call, tensors, shares, word))
    insert_launch(plan, call, t, workspace, launch)


def decode_launch(plan: Plan, call: DecodeCall, tensors: tuple, shares: tuple, word: Tensor) -> Launch:
    problem, config = plan.problem, plan.config
    form, layout = config.traits, problem.layout
    k, v = (_stored(pool, form.storage == "bits") for pool in (call.k, call.v))
    n_tiles = -(-layout.seqlen_q * problem.group // form.block_m)
    pages = (layout.n_pages, layout.max_pages) if isinstance(layout, Paged) else (0, 0)
    sizes = (layout.seqlen_q, problem.heads_kv, problem.capacity, *pages, config.n_splits, config.split_size, n_tiles)
    strides = tuple(x.stride()[:3] for x in (call.q, k, v, tensors[6]))
    arguments = (
        (call.q, k, v, *tensors[3:]), (call.k_scale, call.v_scale), shares, word, strides, sizes,
        (call.left, call.right), softmax_params(problem), form,
    )  # fmt: skip
    programs = layout.batch * problem.heads_kv * n_tiles * config.n_splits
    return Launch(decode.decode_kernel, programs, arguments, {"num_warps": form.warps, "num_stages": form.stages})


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
        word,
    )
    launcher.start(plan, "append", moving, lambda: append_launch(plan, call, word))


def append_launch(plan: Plan, call: AppendCall, word: Tensor) -> Launch:
    problem, form = plan.problem, plan.config.traits
    layout = problem.layout
    k, v = (_stored(pool, form.eight_bits) for pool in (call.k, call.v))
    angles: tuple[Any, ...] = (
        (0, 0, 0)
        if call.cos is None or call.sin is None
        else (call.cos.stride(0), call.sin.stride(0), call.cos.shape[0])
    )
    strides = (*(x.stride()[:3] for x in (call.k_new, call.v_new, k, v)), angles)
    pages = (layout.n_pages, layout.max_pages) if isinstance(layout, Paged) else (0, 0)
    sizes = (layout.seqlen_q, problem.heads_kv, problem.capacity, problem.page_size, *pages)
    arguments = (
        (call.k_new, call.v_new, call.seqlens, call.page_table), (k, v), (call.k_scale, call.v_scale),
        (call.cos, call.sin),
        word, strides, sizes, form,
    )  # fmt: skip
    return Launch(append.append_kernel, layout.batch * layout.seqlen_q * problem.heads_kv, arguments, {"num_warps": 1})


def _stored(pool: Tensor, as_bytes: bool) -> Tensor:
    return pool.view(torch.uint8) if as_bytes else pool
