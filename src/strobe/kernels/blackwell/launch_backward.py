"""Arguments and the three launches of the Blackwell backward, from a Plan and a Call."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import KernelFault
from ...problem.call import Call
from ...problem.problem import ALIGNMENT
from ..device.dialect import TensorDescriptor, gl
from ..device.persistent_launch import MOST_TILES, Launch, softmax_parameters
from ..device.tma import addressable, descriptor
from ..protocol import Backward, Plan, strides_of
from ..runtime import launcher
from ..runtime.launch_cache import CACHE, backward_addresses
from ..runtime.workspace import pieces_of
from . import backward
from .backward_arguments import LaunchParams, ShapeParams, SoftmaxParams, WindowParams
from .backward_preprocess import postprocess_kernel, preprocess_kernel
from .traits import REGISTERS

L2_BYTES = 32 << 20  # budget for queries, their gradients and dQ's sums of a section of heads


class RowTensors(NamedTuple):
    """Tensors of preprocess_kernel."""

    dout: Any
    out: Any
    lse: Any
    dlse: Any  # or None
    delta: Any  # output in rows
    stats: Any  # output in whole tiles: LSE of all rows, then -delta of all
    dq_sum: Any


class Strides(NamedTuple):
    """Of a tensor, in elements."""

    batch: Any
    row: Any
    head: Any


class RowStrides(NamedTuple):
    dout: Strides
    out: Strides


class RowShape(NamedTuple):
    """Sizes of the kernels that visit tiles of queries."""

    heads: Any
    seqlen_q: Any
    num_m_blocks: Any


class Views(NamedTuple):
    """Tensors that the main kernel moves by TMA."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    stats: Tensor
    dk: Tensor
    dv: Tensor


def run_backward(plan: Plan, call: Call, t: Backward, workspace: dict[str, Tensor]) -> None:
    stats, dq_sum = workspace["rows"], workspace["dq_sum"]
    dk, dv = addressable(t.dk), addressable(t.dv)
    dout = operand(t.dout, call)
    rows = RowTensors(dout, t.out, t.lse, t.dlse, t.delta, stats, dq_sum)
    key: tuple = ("rows", dout.stride(), t.out.stride(), t.dlse is None)
    launched = [launcher.start(plan, key, rows, lambda: preprocess_launch(plan, rows))]
    views = Views(call.q, call.k, call.v, dout, stats, dk, dv)
    key = (call.left, call.right, dout.stride(), dk.stride(), dv.stride())
    main = partial(main_launch, plan, call, views, dq_sum)
    launched += [launcher.start(plan, key, (*views, dq_sum), main)]
    launched += [
        launcher.start(plan, ("dq", t.dq.stride()), (dq_sum, t.dq), lambda: postprocess_launch(plan, dq_sum, t.dq))
    ]
    copied = dout is not t.dout
    for held, gradient in ((dk, t.dk), (dv, t.dv)):
        if held is not gradient:
            gradient.copy_(held)
            copied = True
    if not copied and all(gradient.is_contiguous() for gradient in (t.dq, t.dk, t.dv)):
        CACHE.insert_launch(plan, backward_addresses(call, t, pieces_of(workspace)), launcher.in_sequence(launched))


def operand(dout: Tensor, call: Call) -> Tensor:
    """dout in q's dtype with strides that TMA can address, copied only if necessary."""
    aligned = all(stride * dout.element_size() % ALIGNMENT == 0 and stride > 0 for stride in dout.stride()[:-1])
    if dout.dtype == call.q.dtype and aligned and dout.stride(-1) == 1 and dout.data_ptr() % ALIGNMENT == 0:
        return dout
    return addressable(torch.empty(dout.shape, dtype=call.q.dtype, device=dout.device)).copy_(dout)


def row_shape(plan: Plan) -> RowShape:
    problem = plan.problem
    seqlen_q = problem.layout.seqlen_q
    return RowShape(problem.heads_q, seqlen_q, -(-seqlen_q // plan.config.form.block_m))


def tiles_of_rows(plan: Plan) -> int:
    """Query tiles of all heads: programs of the kernels before and after the main one."""
    return counted(plan, plan.problem.layout.batch * plan.problem.heads_q * row_shape(plan).num_m_blocks)


def counted(plan: Plan, programs: int) -> int:
    if programs * plan.config.form.block_m * 2 >= MOST_TILES:
        raise KernelFault(f"{plan.kernel.name}: {programs} tiles are more than a launch can count; split the batch")
    return programs


def preprocess_launch(plan: Plan, tensors: RowTensors) -> Launch:
    strides = RowStrides(*(Strides(*strides_of(t, plan.problem)) for t in (tensors.dout, tensors.out)))
    arguments = (tensors, strides, row_shape(plan), plan.config.form)
    return Launch(preprocess_kernel, tiles_of_rows(plan), arguments, {"num_warps": 8})


def postprocess_launch(plan: Plan, dq_sum: Tensor, dq: Tensor) -> Launch:
    strides = Strides(*strides_of(dq, plan.problem))
    arguments = (dq_sum, dq, strides, row_shape(plan), plan.problem.scale, plan.config.form)
    return Launch(postprocess_kernel, tiles_of_rows(plan), arguments, {"num_warps": 8})


def main_launch(plan: Plan, call: Call, views: Views, dq_sum: Tensor) -> Launch:
    problem, form = plan.problem, plan.config.form
    batch, seqlen_q, seqlen_k = problem.layout
    num_n_blocks = -(-seqlen_k // form.block_n)
    heads_kv = batch * problem.heads_kv
    a_head = form.group * seqlen_q * (2 * (form.block_d + form.block_dv) + 4 * form.block_d)
    num_m_blocks = row_shape(plan).num_m_blocks
    l2_heads = section(heads_kv, L2_BYTES // max(1, a_head))
    shape = ShapeParams(batch, problem.heads_q, seqlen_q, seqlen_k, num_m_blocks, num_n_blocks, l2_heads)
    scale_log2, _ = softmax_parameters(problem)
    launch = LaunchParams(shape, WindowParams(call.left, call.right), SoftmaxParams(scale_log2, problem.scale))
    arguments = (*descriptors(views, form), dq_sum, launch, form)
    programs = counted(plan, heads_kv * num_n_blocks)
    return Launch(backward.backward_kernel, programs, arguments, {"num_warps": 4, "maxnreg": REGISTERS})


def section(heads: int, most: int) -> int:
    """Key heads of a section: the largest divisor of `heads` that is at most `most`.

    >>> section(24, 10), section(24, 0)
    (8, 1)
    """
    return next(n for n in range(max(1, min(heads, most)), 0, -1) if heads % n == 0)


def descriptors(views: Views, form: Any) -> tuple[TensorDescriptor, ...]:
    """As `backward_kernel` takes them."""
    m, n, d, dv_width = form.block_m, form.block_n, form.block_d, form.block_dv
    tiles = ((views.q, m, d), (views.k, n, d), (views.v, n, dv_width), (views.dout, m, dv_width))
    return (
        *(descriptor(*tile) for tile in tiles),
        row_descriptor(views.stats, m),
        descriptor(views.dk, n, d),
        descriptor(views.dv, n, dv_width),
    )


def row_descriptor(rows: Tensor, block: int) -> TensorDescriptor:
    layout: Any = gl.NVMMASharedLayout.get_default_for([block], gl.float32)
    return TensorDescriptor(rows, [rows.numel()], [1], [block], layout)
