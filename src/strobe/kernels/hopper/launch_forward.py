"""Arguments and launch of the Hopper forward, from a Plan and a Call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...problem.call import Call
from ...problem.problem import Problem
from ..device import persistent_launch
from ..device.dialect import TensorDescriptor
from ..device.forward_arguments import KeyRangeTensors, LaunchParams, Pointers, ShapeParams, SoftmaxParams, WindowParams
from ..device.persistent_launch import Launch, work_of
from ..device.tma import describing, descriptor
from ..protocol import Forward, Plan
from ..runtime.tma_requirements import entries_apart
from . import forward
from .traits import ROWS


def run_forward(plan: Plan, call: Call, tensors: Forward) -> None:
    form = plan.config.form
    out = tensors.out
    if form.spans:
        call, tensors = end_to_end(call, tensors)
    persistent_launch.run(plan, call, tensors, forward_launch, form.tuning.joined > 1)
    if form.spans and tensors.out.data_ptr() != out.data_ptr():
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


def forward_launch(plan: Plan, call: Call, out: Tensor, pointers: tuple[Tensor | None, ...]) -> Launch:
    form = plan.config.form
    num_tiles, sizes, limits, softmax = work_of(plan, call)
    shape = ShapeParams(*sizes, *(apart(plan.problem) if form.spans else ()))
    launch = LaunchParams(num_tiles, shape, WindowParams(*limits), SoftmaxParams(*softmax))
    registers = {2: 168, 3: 128, 4: 96}[form.tuning.consumers]  # registers per thread before setmaxnreg moves them
    arguments = (*descriptors(call, out, form), named(pointers, form.spans), launch, form)
    return Launch(
        forward.forward_kernel, min(plan.target.sm_count, num_tiles), arguments, {"num_warps": 4, "maxnreg": registers}
    )


def named(pointers: tuple[Tensor | None, ...], key_ranges: bool) -> Pointers:
    """The pointers of `persistent_launch.run` by name."""
    lse, sinks, *offsets, errors, tile_counter = pointers
    if key_ranges:
        return Pointers(lse, sinks, None, None, KeyRangeTensors(*offsets), errors, tile_counter)
    cu_seqlens_q, cu_seqlens_k = offsets
    return Pointers(lse, sinks, cu_seqlens_q, cu_seqlens_k, None, errors, tile_counter)


def descriptors(call: Call, out: Tensor, form: Any) -> tuple[TensorDescriptor | None, ...]:
    """Descriptors of q, k, v and out: tiles of the first columns, then tiles of the rest."""
    queries = describing(form.tuning)
    tiles = (
        (queries, call.q, ROWS, form.block_d, form.rest_d),
        (descriptor, call.k, form.tuning.block_n, form.block_d, form.rest_d),
        (descriptor, call.v, form.tuning.block_n, form.block_dv, form.rest_dv),
        (queries, out, ROWS, form.block_dv, form.rest_dv),
    )
    narrow = (1, 1, 1, 2 if form.tuning.half_staged else 1)
    first = (view(tensor, rows, (width - rest) // n) for (view, tensor, rows, width, rest), n in zip(tiles, narrow))
    return *first, *(view(tensor, rows, rest) if rest else None for view, tensor, rows, _, rest in tiles)
