"""Arguments and the three launches of the Hopper backward, from a Plan and a Call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from ...errors import KernelFault
from ...problem.call import Call
from ...problem.problem import ALIGNMENT, Problem
from ..device.dialect import TensorDescriptor, gl
from ..device.persistent_launch import MOST_TILES, Launch, even_section, softmax_parameters
from ..device.tma import addressable, descriptor
from ..protocol import Backward, Plan, entries, strides_of
from ..runtime import launcher
from ..runtime.launch_cache import CACHE, backward_addresses
from ..runtime.tma_requirements import MOST_ROWS, entries_apart, query_tiles
from ..runtime.workspace import pieces_of
from . import backward
from .backward_preprocess import convert_dq_kernel, convert_kernel, rows_kernel
from .traits import ROWS

# budget for queries, their gradients and dq's sums of a section of heads; an H200 has 50 MB
L2_BYTES = 32 << 20
CONVERTED_ROWS = 32  # rows per program of convert_kernel, which only copies


def run_backward(plan: Plan, call: Call, t: Backward, workspace: dict[str, Tensor]) -> None:
    rows, dq_sum, counter, turns = workspace["rows"], workspace["dq_sum"], workspace["counter"], workspace.get("turns")
    sums = {name: workspace[f"{name}_sum"].transpose(-3, -2) for name in ("dk", "dv") if f"{name}_sum" in workspace}
    spans = plan.config.form.spans
    dk, dv = sums.get("dk", writable(t.dk, spans)), sums.get("dv", writable(t.dv, spans))
    dq = addressable(t.dq) if plan.config.form.finishes else t.dq
    dout = operand(t.dout, call, spans)
    pointers = (t.dout, t.out, t.lse, t.dlse, t.delta, rows, dq_sum, call.cu_seqlens_q, turns, counter)
    key = ("rows", t.dout.stride(), t.dout.dtype, t.out.stride(), t.dlse is None)
    launched = [launcher.start(plan, key, pointers, lambda: rows_launch(plan, pointers))]
    views = (call.q, call.k, call.v, dout, rows, dk, dv, dq, dq_sum)
    offsets = (
        (call.spans_q, call.spans_k, call.ids_q, call.ids_k, call.key_lengths, call.prefix)
        if spans
        else (call.cu_seqlens_q, call.cu_seqlens_k)
    )
    others = (turns, *offsets, counter)
    strides = (dout.stride(), dk.stride(), dv.stride(), dq.stride())
    main = partial(main_launch, plan, call, views, offsets, turns, counter)
    launched += [launcher.start(plan, (call.left, call.right, *strides), (*views, *others), main)]
    if not makes_dq(plan):
        pointers_dq = (dq_sum, dq, call.cu_seqlens_q, turns)
        launched += [launcher.start(plan, ("dq", dq.stride()), pointers_dq, lambda: dq_launch(plan, pointers_dq))]
    copied = dout is not t.dout
    for name, held, gradient in (("dq", dq, t.dq), ("dk", dk, t.dk), ("dv", dv, t.dv)):
        if name in sums:
            key, convert = (name, gradient.stride()), partial(convert_launch, plan, name, held, gradient)
            launched += [launcher.start(plan, key, (held, gradient), convert)]
        elif held is not gradient:
            gradient.copy_(held)
            copied = True
    if not copied and all(gradient.is_contiguous() for gradient in (t.dq, t.dk, t.dv)):
        CACHE.insert_launch(plan, backward_addresses(call, t, pieces_of(workspace)), launcher.in_sequence(launched))


def rows_launch(plan: Plan, pointers: tuple[Any, ...]) -> Launch:
    strides = tuple(strides_of(t, plan.problem) for t in pointers[:2])
    unit = -1.0 / softmax_parameters(plan.problem)[0] if plan.config.form.begun else 1.0
    _, tiles_n, section = parts_of_heads(plan)
    # 0 otherwise, so that kernels are not compiled per length
    cleared = (section, tiles_n) if plan.config.form.clears else (0, 0)
    return Launch(
        rows_kernel,
        tiles_of_rows(plan),
        (pointers, strides, (*row_sizes(plan), *cleared), unit, plan.config.form),
        {"num_warps": 4},
    )


def makes_dq(plan: Plan) -> bool:
    """Whether the main kernel computes all of dq: with form.collects, if each query tile has one that sees a key."""
    problem, form = plan.problem, plan.config.form
    if not form.collects:
        return False
    _, seqlen_q, seqlen_k = problem.layout
    beyond = problem.right if problem.mask.right else seqlen_q
    return min(form.tuning.block_m, seqlen_q) + seqlen_k - seqlen_q + beyond > 0 and seqlen_k > 0


def dq_launch(plan: Plan, pointers: tuple[Any, ...]) -> Launch:
    strides = strides_of(pointers[1], plan.problem)
    arguments = (*pointers, strides, row_sizes(plan), plan.problem.scale, plan.config.form)
    return Launch(convert_dq_kernel, tiles_of_rows(plan), arguments, {"num_warps": 4})


def row_sizes(plan: Plan) -> tuple[int, ...]:
    problem = plan.problem
    return (
        problem.heads_q,
        tokens(problem)[0],
        problem.layout.batch,
        query_tiles(problem, plan.config.form.tuning.block_m),
    )


def tiles_of_rows(plan: Plan) -> int:
    """Query tiles of all heads: programs of the kernels before and after the main one."""
    return counted(plan, plan.problem.heads_q * entries(plan.problem) * row_sizes(plan)[-1])


def convert_launch(plan: Plan, name: str, held: Tensor, gradient: Tensor) -> Launch:
    problem, form = plan.problem, plan.config.form
    count, heads, width = gradient.shape[-3:]
    scale, block = (1.0, form.block_dv) if name == "dv" else (problem.scale, form.block_d)
    strides = (strides_of(held, problem), strides_of(gradient, problem))
    arguments = (
        (held, gradient),
        strides,
        (heads, count),
        scale,
        held.shape[-1],
        width,
        triton.next_power_of_2(block),
        CONVERTED_ROWS,
    )
    programs = counted(plan, heads * entries(problem) * -(-count // CONVERTED_ROWS))
    return Launch(convert_kernel, programs, arguments, {"num_warps": 4})


def main_launch(
    plan: Plan, call: Call, views: tuple[Tensor, ...], offsets: tuple, turns: Tensor | None, counter: Tensor
) -> Launch:
    form = plan.config.form
    problem, tuning = plan.problem, form.tuning
    q, k, v, dout, rows, dk, dv, dq, dq_sum = views
    apart: tuple[int, ...] = ()
    if form.spans:  # the first entry represents all
        apart = tuple(rows_apart(t) or 0 for t in (q, dout, k, v, dk, dv))
        q, k, v, dout, dk, dv = q[0], k[0], v[0], dout[0], dk[0], dv[0]
    batch, (seqlen_q, seqlen_k) = problem.layout.batch, tokens(problem)
    parts, tiles_n, section = parts_of_heads(plan)
    if rows.numel() >= MOST_TILES:
        raise KernelFault(
            f"{plan.kernel.name}: {rows.numel()} values per row exceed the range of int32; split the batch"
        )
    by_rows, by_rows_v = (tuning.block_m, form.first_d), (tuning.block_m, form.first_dv)
    by_keys, by_keys_v = (tuning.block_n, form.first_d), (tuning.block_n, form.first_dv)
    rests = (
        (q, tuning.block_m, form.rest_d),
        (k, tuning.block_n, form.rest_d),
        (v, tuning.block_n, form.rest_dv),
        (dout, tuning.block_m, form.rest_dv),
        (dk, tuning.block_n, form.rest_d),
        (dv, tuning.block_n, form.rest_dv),
    )
    described = (
        descriptor(q, *by_rows),
        descriptor(k, *by_keys),
        descriptor(v, *by_keys_v),
        descriptor(dout, *by_rows_v),
        row_descriptor(rows, tuning.block_m),
        descriptor(dk, *by_keys),
        descriptor(dv, *by_keys_v),
        line_descriptor(dq_sum, form.dq_lines),
        *(descriptor(t, n, width) if width else None for t, n, width in rests),
        descriptor(dq, ROWS, ROWS) if form.finishes else None,
    )
    sizes = (batch, problem.heads_q, seqlen_q, seqlen_k, query_tiles(problem, tuning.block_m), tiles_n, section, *apart)
    tiles = counted(plan, parts * tiles_n)
    work = (tiles, sizes, (call.left, call.right), (*softmax_parameters(problem), problem.scale))
    arguments = (*described, dq_sum, turns, counter, offsets, work, form)
    programs = min(plan.target.sm_count, tiles)
    return Launch(backward.backward_kernel, programs, arguments, {"num_warps": 4, "maxnreg": 168})


def parts_of_heads(plan: Plan) -> tuple[int, int, int]:
    """(parts of heads, key tiles per part, parts per section)."""
    form = plan.config.form
    problem, block_n = plan.problem, form.tuning.block_n
    seqlen_q, seqlen_k = tokens(problem)
    tiles_n = seqlen_k // block_n + problem.layout.batch + 2 if form.packed else -(-seqlen_k // block_n)
    parts = problem.heads_kv * entries(problem) * form.splits
    a_part = form.members * seqlen_q * (2 * (form.block_d + form.block_dv) + 4 * form.block_d)
    return (
        parts,
        tiles_n,
        even_section(parts, min(L2_BYTES // max(1, a_part), filling(plan.target.sm_count, tiles_n, form))),
    )


SHORT = 5  # key tiles


def filling(sm_count: int, tiles_n: int, form: Any) -> int:
    """Parts of heads per section: about one key tile per SM.

    Speed (H200): 512 x 32 is 1.04x as fast as with twice as many, GQA 64/8 2k with half as many only 0.90x. Twice as
    many are used in two cases. Ordered programs with long steps are then further apart: d64 causal 1.004x to 1.006x at
    4k to 16k, d128 0.993x to 0.999x. With few programs the last one waits for the others: 512 x 32 1.025x, 256 x 64
    1.09x, d64 512 1.21x, d128 768 0.985x, 1k 0.98x.
    """
    apart = form.ordered and form.by_rows
    waits = form.collects and (form.by_rows or tiles_n <= SHORT)
    return max(1, sm_count // max(1, tiles_n)) * (2 if apart or waits else 1)


def counted(plan: Plan, programs: int) -> int:
    if programs >= MOST_TILES:
        raise KernelFault(f"{plan.kernel.name}: {programs} programs are more than a launch can count; split the batch")
    return programs


def tokens(problem: Problem) -> tuple[int, int]:
    """(S_q, S_k), or (T_q, T_k) of packed tensors."""
    return problem.layout.tokens if problem.packed else problem.layout[1:3]


def operand(dout: Tensor, call: Call, spans: bool) -> Tensor:
    """dout in q's dtype with strides that TMA can address, copied only if necessary."""
    aligned = all(stride * dout.element_size() % ALIGNMENT == 0 and stride > 0 for stride in dout.stride()[:-1])
    if (
        dout.dtype == call.q.dtype
        and aligned
        and dout.data_ptr() % ALIGNMENT == 0
        and (not spans or rows_apart(dout) is not None)
    ):
        return dout
    return addressable(torch.empty(dout.shape, dtype=call.q.dtype, device=dout.device)).copy_(dout)


def writable(gradient: Tensor, spans: bool) -> Tensor:
    """`addressable`; with key ranges, also with a batch stride that is a multiple of the row stride."""
    held = addressable(gradient)
    return (
        held
        if not spans or rows_apart(held) is not None
        else addressable(torch.empty(held.shape, dtype=held.dtype, device=held.device))
    )


def rows_apart(tensor: Tensor) -> int | None:
    """Batch stride in rows. None if it is not a multiple of the row stride or exceeds TMA's limit."""
    apart = entries_apart(tensor.shape[0], tensor.stride())
    return None if apart is None or apart * tensor.shape[0] > MOST_ROWS else apart


def row_descriptor(rows: Tensor, block: int) -> TensorDescriptor:
    layout: Any = gl.NVMMASharedLayout.get_default_for([block], gl.float32)
    return TensorDescriptor(rows, [rows.numel()], [1], [block], layout)


def line_descriptor(dq_sum: Tensor, lines: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(dq_sum, [dq_sum.numel() // 256, 256], [256, 1], [lines, 256], layout)
