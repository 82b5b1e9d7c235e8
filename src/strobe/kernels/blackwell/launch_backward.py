"""Arguments and the three launches of the Blackwell backward, from a Plan and a Call."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import KernelFault
from ...problem.call import Call
from ..device.backward_operands import operand, rising_offsets, rows_apart, writable
from ..device.dialect import TensorDescriptor, gl
from ..device.persistent_launch import MOST_TILES, Launch, softmax_parameters
from ..device.tma import DTYPES, descriptor
from ..protocol import Backward, Plan, entries, strides_of
from ..runtime import launcher
from ..runtime.launch_cache import CACHE, backward_addresses
from ..runtime.tma_requirements import query_tiles
from ..runtime.workspace import pieces_of
from . import backward
from .backward_arguments import KeyRangeTensors, LaunchParams, Pointers, ShapeParams, SoftmaxParams, WindowParams
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
    dq_semaphores: Any  # or None
    tile_counter: Any  # or None
    cu_seqlens_q: Any  # or None, as those that follow
    cu_seqlens_k: Any
    rising_q: Any  # copies of the offsets for the kernels that follow
    rising_k: Any


class Strides(NamedTuple):
    """Of a tensor, or of all entries and heads of a packed one, in elements."""

    batch: Any
    row: Any
    head: Any


class RowStrides(NamedTuple):
    dout: Strides
    out: Strides


class RowShape(NamedTuple):
    """Sizes of the kernels that visit tiles of queries."""

    heads: Any
    tokens: Any  # S_q or T_q
    batch: Any  # batch entries, or packed sequences
    num_m_blocks: Any  # of a head


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
    in_order = workspace.get("dq_semaphores"), workspace.get("counter")
    key_ranges = plan.config.traits.key_ranges
    dk, dv = writable(t.dk, key_ranges), writable(t.dv, key_ranges)
    dout = operand(t.dout, call, key_ranges)
    rising = rising_offsets(workspace)
    offsets = (call.cu_seqlens_q, call.cu_seqlens_k, *rising)
    rows = RowTensors(dout, t.out, t.lse, t.dlse, t.delta, stats, dq_sum, *in_order, *offsets)
    key: tuple = ("rows", dout.stride(), t.out.stride(), t.dlse is None)
    launched = [launcher.start(plan, key, rows, lambda: preprocess_launch(plan, rows))]
    views = Views(call.q, call.k, call.v, dout, stats, dk, dv)
    pointers = main_pointers(call, key_ranges, (dq_sum, *in_order), rising)
    moved = (*views, *pointers[:-1], *(pointers.ranges or ()))
    key = (call.left, call.right, dout.stride(), dk.stride(), dv.stride())
    launched += [launcher.start(plan, key, moved, partial(main_launch, plan, call, views, pointers))]
    sums = (dq_sum, t.dq, rising[0])
    launched += [launcher.start(plan, ("dq", t.dq.stride()), sums, lambda: postprocess_launch(plan, sums))]
    copied = dout is not t.dout
    for held, gradient in ((dk, t.dk), (dv, t.dv)):
        if held is not gradient:
            gradient.copy_(held)
            copied = True
    if not copied and all(gradient.is_contiguous() for gradient in (t.dq, t.dk, t.dv)):
        CACHE.insert_launch(plan, backward_addresses(call, t, pieces_of(workspace)), launcher.in_sequence(launched))


def main_pointers(call: Call, key_ranges: bool, sums: tuple[Any, Any, Any], rising: tuple[Any, Any]) -> Pointers:
    """sums: dQ's sum, its semaphores and the tile counter."""
    if not key_ranges:
        return Pointers(*sums, *rising, None)
    ranges = KeyRangeTensors(call.spans_q, call.spans_k, call.ids_q, call.ids_k, call.key_lengths, call.prefix)
    return Pointers(*sums, None, None, ranges)


def row_shape(plan: Plan) -> RowShape:
    problem = plan.problem
    num_m_blocks = query_tiles(problem, plan.config.traits.block_m)
    return RowShape(problem.heads_q, tokens(plan)[0], problem.layout.batch, num_m_blocks)


def tokens(plan: Plan) -> tuple[int, int]:
    """(S_q, S_k), or (T_q, T_k) of packed tensors."""
    layout: Any = plan.problem.layout
    return layout.tokens if plan.problem.packed else layout[1:3]


def tiles_of_rows(plan: Plan) -> int:
    """Query tiles of all heads: programs of the kernels before and after the main one."""
    return counted(plan, entries(plan.problem) * plan.problem.heads_q * row_shape(plan).num_m_blocks)


def counted(plan: Plan, programs: int) -> int:
    if programs * plan.config.traits.block_m * 2 >= MOST_TILES:
        raise KernelFault(f"{plan.kernel.name}: {programs} tiles are more than a launch can count; split the batch")
    return programs


def preprocess_launch(plan: Plan, tensors: RowTensors) -> Launch:
    strides = RowStrides(*(Strides(*strides_of(t, plan.problem)) for t in (tensors.dout, tensors.out)))
    arguments = (tensors, strides, row_shape(plan), plan.config.traits)
    return Launch(preprocess_kernel, tiles_of_rows(plan), arguments, {"num_warps": 8})


def postprocess_launch(plan: Plan, sums: tuple[Any, ...]) -> Launch:
    """sums: dQ's sum, dQ and cu_seqlens_q."""
    strides = Strides(*strides_of(sums[1], plan.problem))
    arguments = (*sums, strides, row_shape(plan), plan.problem.scale, plan.config.traits)
    return Launch(postprocess_kernel, tiles_of_rows(plan), arguments, {"num_warps": 8})


def main_launch(plan: Plan, call: Call, views: Views, pointers: Pointers) -> Launch:
    problem, traits = plan.problem, plan.config.traits
    seqlen_q, seqlen_k = tokens(plan)
    strides: tuple[int, ...] = ()
    if traits.key_ranges:  # the first entry represents all
        names = ("q", "dout", "k", "v", "dk", "dv")
        strides = tuple(rows_apart(plan, getattr(views, name)) for name in names)
        views = views._replace(**{name: getattr(views, name)[0] for name in names})
    num_n_blocks = -(-seqlen_k // traits.block_n)
    if problem.packed:
        num_n_blocks = seqlen_k // traits.block_n + problem.layout.batch + 2  # device.seqlen.find_sequence
    heads_kv = entries(problem) * problem.heads_kv
    a_head = traits.group * seqlen_q * (2 * (traits.block_d + traits.block_dv) + 4 * traits.block_d)
    blocks = (row_shape(plan).num_m_blocks, num_n_blocks, section(heads_kv, L2_BYTES // max(1, a_head)))
    shape = ShapeParams(problem.layout.batch, problem.heads_q, seqlen_q, seqlen_k, *blocks, *strides)
    softmax = SoftmaxParams(*softmax_parameters(problem), problem.scale)
    launch = LaunchParams(shape, WindowParams(call.left, call.right), softmax)
    programs = counted(plan, heads_kv * num_n_blocks)
    options = {"num_warps": 4, "maxnreg": REGISTERS}
    if traits.pair:
        from .pair_backward import backward_pair_kernel  # it needs words of Triton 3.9

        arguments = (*pair_descriptors(views, traits), pointers, launch, traits)
        return Launch(backward_pair_kernel, programs, arguments, options | {"num_ctas": 2})
    arguments = (*descriptors(views, traits), pointers, launch, traits)
    return Launch(backward.backward_kernel, programs, arguments, options)


def section(heads: int, most: int) -> int:
    """Key heads of a section: the largest divisor of `heads` that is at most `most`.

    >>> section(24, 10), section(24, 0)
    (8, 1)
    """
    return next(n for n in range(max(1, min(heads, most)), 0, -1) if heads % n == 0)


def descriptors(views: Views, traits: Any) -> tuple[TensorDescriptor | None, ...]:
    """As `backward_kernel` takes them: tiles of the main columns, then of the tail columns or None."""
    m, n = traits.block_m, traits.block_n
    d, dv = (traits.main_d, traits.tail_d), (traits.main_dv, traits.tail_dv)
    tiles = (
        (views.q, m, d),
        (views.k, n, d),
        (views.v, n, dv),
        (views.dout, m, dv),
        (views.dk, n, d),
        (views.dv, n, dv),
    )
    main = [descriptor(tensor, rows, widths[0]) for tensor, rows, widths in tiles]
    tail = [descriptor(tensor, rows, widths[1]) if widths[1] else None for tensor, rows, widths in tiles]
    return (*main[:4], row_descriptor(views.stats, m), *main[4:], *tail)


def pair_descriptors(views: Views, traits: Any) -> tuple[TensorDescriptor | None, ...]:
    """As `backward_pair_kernel` takes them: tiles of the main columns, then of the tail columns or None. A pair's CTAs
    divide the rows of a tile, or its columns.
    """
    m, n, dv = traits.block_m, traits.block_n, traits.block_dv
    by_rows, by_columns = -2, -1
    tiles = (
        (views.q, m, by_rows),
        (views.q, m, by_columns),
        (views.k, n, by_rows),
        (views.k, n, by_columns),
        (views.dk, n, by_rows),
    )
    main = [divided(descriptor(tensor, rows, traits.main_d), split) for tensor, rows, split in tiles]
    tail: list[TensorDescriptor | None] = [None] * len(tiles)
    if traits.tail_d:
        tail = [divided(descriptor(tensor, rows, traits.tail_d), split) for tensor, rows, split in tiles]
    return (
        *main[:4],
        divided(descriptor(views.v, n, dv), by_rows),
        divided(descriptor(views.dout, m, dv), by_rows),
        divided(descriptor(views.dout, m, dv), by_columns),
        divided(row_descriptor(views.stats, m), None),
        main[4],
        divided(descriptor(views.dv, n, dv), by_rows),
        *tail,
    )


def divided(described: TensorDescriptor, dimension: int | None) -> TensorDescriptor:
    """The same descriptor for a pair of CTAs, of which each gets half of a tile's `dimension`, or the whole tile."""
    block, dtype = described.block_shape, DTYPES[str(described.base.dtype)]
    basis = [0] * len(block)
    if dimension is not None:
        basis[dimension] = 1
    layout: Any = gl.NVMMASharedLayout.get_default_for(block, dtype, cga_layout=[basis])
    return replace(described, layout=layout)


def row_descriptor(rows: Tensor, block: int) -> TensorDescriptor:
    layout: Any = gl.NVMMASharedLayout.get_default_for([block], gl.float32)
    return TensorDescriptor(rows, [rows.numel()], [1], [block], layout)
