"""Arguments and the three launches of the Hopper backward, from a Plan and a Call: their names, and what they hold."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import triton
from torch import Tensor

from ...errors import KernelFault
from ...problem.call import Call
from ...problem.problem import Problem
from ..device import mask_blocks
from ..device.backward_operands import operand, rising_offsets, rows_apart, writable
from ..device.dialect import TensorDescriptor, gl
from ..device.persistent_launch import LOG2_E, MOST_TILES, Launch, even_section, softmax_parameters
from ..device.tma import addressable, descriptor
from ..protocol import Backward, Plan, entries, strides_of
from ..runtime import launcher
from ..runtime.launch_cache import CACHE, backward_addresses
from ..runtime.tma_requirements import query_tiles
from ..runtime.workspace import pieces_of
from . import backward
from .backward_preprocess import convert_dq_kernel, convert_kernel, rows_kernel
from .traits import ROWS

# budget for queries, their gradients and dq's sums of a section of heads; an H200 has 50 MB
L2_BYTES = 32 << 20
CONVERTED_ROWS = 32  # rows per program of convert_kernel, which only copies


# ---------------------------------------------------------------- arguments of the kernels


class ShapeParams(NamedTuple):
    """Sizes, int32."""

    batch: Any  # batch entries, or packed sequences
    heads: Any  # query heads
    seqlen_q: Any  # or all packed query tokens
    seqlen_k: Any
    num_m_blocks: Any  # tiles of queries of a head
    num_n_blocks: Any  # tiles of keys of a head
    l2_head_parts: Any  # parts of heads that are processed together, so that their queries stay in L2
    # key ranges: rows between the starts of batch entries
    stride_q: Any = None
    stride_do: Any = None
    stride_k: Any = None
    stride_v: Any = None
    stride_dk: Any = None
    stride_dv: Any = None


class WindowParams(NamedTuple):
    """Bounds of the mask relative to the diagonal, int32."""

    left: Any
    right: Any


class SoftmaxParams(NamedTuple):
    """Float32. The raw score is q k^T, or tanh(softcap * q k^T) with a cap."""

    scale_log2: Any  # value of a raw score in log2 units
    softcap: Any  # scale / cap
    scale: Any  # of dQ and dK
    score_scale: Any = None  # score_mod: natural units of a raw score of 1; scale_log2 is then log2(e)


class QueryBlockLists(NamedTuple):
    """The blocks of queries that see each block of keys, as FlexAttention's BlockMask has them. int32, contiguous.

    Masks hold in partial blocks. A full block promises that all of its rows see all of its keys.
    """

    q_num_blocks: Any  # [B or 1, H or 1, N]: how many partial blocks; packed: a row for each sequence
    q_indices: Any  # [B or 1, H or 1, N, M]: their numbers
    full_q_num_blocks: Any = None  # the same of full blocks
    full_q_indices: Any = None


class QueryBlockListParams(NamedTuple):
    """QueryBlockLists for the kernel, and the strides of q_num_blocks: 0 where entries or heads share their lists."""

    q_num_blocks: Any
    q_indices: Any
    full_q_num_blocks: Any
    full_q_indices: Any
    stride_batch: Any
    stride_head: Any
    most_blocks: Any  # M
    num_n_blocks: Any  # N


class HookParams(NamedTuple):
    """What the call's functions read: pointers and numbers, or None. And its block lists."""

    score_aux: Any
    mask_aux: Any
    gradient_aux: Any  # of score_mod_bwd
    block_lists: QueryBlockListParams | None


class LaunchParams(NamedTuple):
    """All scalars of the main kernel, and what the call's functions read."""

    num_tiles: Any  # of keys
    shape: ShapeParams
    window: WindowParams
    softmax: SoftmaxParams
    hooks: HookParams | None = None


class KeyRangeTensors(NamedTuple):
    """Tensors that define the key ranges of each batch entry's rows (`device.key_ranges`)."""

    spans_q: Any
    spans_k: Any
    ids_q: Any
    ids_k: Any
    key_lengths: Any
    prefixes: Any


class Pointers(NamedTuple):
    """Tensors of the main kernel that TMA does not move; None where the call has none."""

    dq_sum: Any
    dq_semaphores: (
        Any  # work tiles that have added to a tile of dQ; dq_zeroed_ahead: that have zeroed a share of a part of heads
    )
    tile_counter: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    ranges: Any  # KeyRangeTensors


class RowTensors(NamedTuple):
    """Tensors of rows_kernel."""

    dout: Any
    out: Any
    lse: Any
    dlse: Any  # or None
    delta: Any  # output in rows
    stats: Any  # output in whole tiles: LSE of all rows, then -delta of all
    dq_sum: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    rising_q: Any  # copies of the offsets for the kernels that follow
    rising_k: Any
    dq_semaphores: Any
    tile_counter: Any


class Strides(NamedTuple):
    """Of a tensor, or of all entries and heads of a packed one, in elements."""

    batch: Any
    row: Any
    head: Any


class RowStrides(NamedTuple):
    dout: Strides
    out: Strides


class RowShape(NamedTuple):
    """Sizes of the kernels that walk tiles of queries."""

    heads: Any
    tokens: Any  # S_q or T_q
    batch: Any  # batch entries, or packed sequences
    num_m_blocks: Any  # of a head


class ZeroedParts(NamedTuple):
    """dq_zeroed_ahead: parts of heads whose sums rows_kernel zeroes, and tiles of keys of a part; else 0."""

    head_parts: Any
    num_n_blocks: Any


class ConvertTensors(NamedTuple):
    """Tensors of convert_kernel."""

    sums: Any
    grad: Any


class ConvertStrides(NamedTuple):
    sums: Strides
    grad: Strides


class ConvertShape(NamedTuple):
    heads: Any
    tokens: Any


class BackwardHooks(NamedTuple):
    """What a call's functions read (tensors, ints, floats), and its block lists. gradient_aux: of score_mod_bwd."""

    score_aux: tuple = ()
    mask_aux: tuple = ()
    gradient_aux: tuple = ()
    block_lists: QueryBlockLists | None = None

    @property
    def read(self) -> tuple:
        return *self.score_aux, *self.mask_aux, *self.gradient_aux, *(self.block_lists or ())

    @property
    def params(self) -> HookParams:
        """score_mod and score_mod_bwd share a tuple where one's begins with the other's: registers hold its values
        once.
        """
        score, gradient = self.score_aux, self.gradient_aux
        shorter, longer = sorted((score, gradient), key=len)
        if all(a is b for a, b in zip(shorter, longer)):
            score = gradient = longer
        gradient = None if gradient is score else gradient or None
        return HookParams(score or None, self.mask_aux or None, gradient, self._list_params)

    @property
    def _list_params(self) -> QueryBlockListParams | None:
        if self.block_lists is None:
            return None
        entries, heads, blocks = self.block_lists.q_num_blocks.shape
        strides = (heads * blocks if entries > 1 else 0, blocks if heads > 1 else 0)
        return QueryBlockListParams(*self.block_lists, *strides, self.block_lists.q_indices.shape[-1], blocks)


# ---------------------------------------------------------------- launches


def run_backward(
    plan: Plan, call: Call, t: Backward, workspace: dict[str, Tensor], hooks: BackwardHooks | None = None
) -> None:
    """Launch the backward. `hooks` has what the functions of the plan's traits read."""
    traits = plan.config.traits
    lists = None if hooks is None else hooks.block_lists
    if (traits.has_block_lists, traits.has_full_blocks) != (
        lists is not None,
        bool(lists and lists.full_q_indices is not None),
    ):
        raise KernelFault(f"{plan.kernel.name}: block lists are in the plan's traits or in the hooks, not in both")
    stats, dq_sum, counter = workspace["rows"], workspace["dq_sum"], workspace["counter"]
    semaphores = workspace.get("dq_semaphores")
    sums = {name: workspace[f"{name}_sum"].transpose(-3, -2) for name in ("dk", "dv") if f"{name}_sum" in workspace}
    dk, dv = sums.get("dk", writable(t.dk, traits.key_ranges)), sums.get("dv", writable(t.dv, traits.key_ranges))
    dq = addressable(t.dq) if traits.dq_written_directly else t.dq
    dout = operand(t.dout, call, traits.key_ranges)
    rising = rising_offsets(workspace)
    offsets = (call.cu_seqlens_q, call.cu_seqlens_k, *rising)
    rows = RowTensors(dout, t.out, t.lse, t.dlse, t.delta, stats, dq_sum, *offsets, semaphores, counter)
    key = ("rows", dout.stride(), t.out.stride(), t.dlse is None)
    launched = [launcher.start(plan, key, rows, lambda: rows_launch(plan, rows))]
    views = Views(call.q, call.k, call.v, dout, stats, dk, dv, dq, dq_sum)
    pointers = main_pointers(call, traits.key_ranges, (dq_sum, semaphores, counter), rising)
    moved = (*views, *(tensor for tensor in pointers[1:-1]), *(pointers.ranges or ()))
    key = (call.left, call.right, dout.stride(), dk.stride(), dv.stride(), dq.stride())
    if hooks is not None:
        moved += tuple([value for value in hooks.read if isinstance(value, Tensor)])
        key += tuple([launcher.kind_of(value) for value in hooks.read])
    main = partial(main_launch, plan, call, views, pointers, hooks)
    launched += [launcher.start(plan, key, moved, main)]
    if not makes_dq(plan):
        pointers_dq = (dq_sum, dq, rising[0], semaphores)
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
        replay = launcher.in_sequence(launched)
        if lists is not None:
            replay = mask_blocks.while_kept(replay, call, (lists.q_num_blocks, lists.full_q_num_blocks))
        CACHE.insert_launch(plan, backward_addresses(call, t, pieces_of(workspace)), replay)


class Views(NamedTuple):
    """Tensors that the main kernel moves by TMA; dk and dv may be float32 sums."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    stats: Tensor
    dk: Tensor
    dv: Tensor
    dq: Tensor
    dq_sum: Tensor


def main_pointers(call: Call, key_ranges: bool, sums: tuple[Any, Any, Any], rising: tuple[Any, Any]) -> Pointers:
    """sums: dQ's sum, its semaphores and the tile counter."""
    if not key_ranges:
        return Pointers(*sums, *rising, None)
    ranges = KeyRangeTensors(call.spans_q, call.spans_k, call.ids_q, call.ids_k, call.key_lengths, call.prefix)
    return Pointers(*sums, None, None, ranges)


def rows_launch(plan: Plan, tensors: RowTensors) -> Launch:
    problem, traits = plan.problem, plan.config.traits
    strides = RowStrides(*(Strides(*strides_of(t, problem)) for t in (tensors.dout, tensors.out)))
    unit = -1.0 / softmax_parameters(problem)[0] if traits.lse_folded else 1.0
    _, num_n_blocks, section = parts_of_heads(plan)
    # 0 otherwise, so that kernels are not compiled per length
    zeroed = ZeroedParts(section, num_n_blocks) if traits.dq_zeroed_ahead else ZeroedParts(0, 0)
    arguments = (tensors, strides, row_shape(plan), zeroed, unit, traits)
    return Launch(rows_kernel, tiles_of_rows(plan), arguments, {"num_warps": 4})


def makes_dq(plan: Plan) -> bool:
    """Whether the main kernel computes all of dq: with traits.dq_last_writer_converts, if each query tile has one that
    sees a key.
    """
    problem, traits = plan.problem, plan.config.traits
    if not traits.dq_last_writer_converts:
        return False
    _, seqlen_q, seqlen_k = problem.layout
    beyond = problem.right if problem.mask.right else seqlen_q
    return min(traits.block_m, seqlen_q) + seqlen_k - seqlen_q + beyond > 0 and seqlen_k > 0


def dq_launch(plan: Plan, pointers: tuple[Any, ...]) -> Launch:
    strides = Strides(*strides_of(pointers[1], plan.problem))
    arguments = (*pointers, strides, row_shape(plan), plan.problem.scale, plan.config.traits)
    return Launch(convert_dq_kernel, tiles_of_rows(plan), arguments, {"num_warps": 4})


def row_shape(plan: Plan) -> RowShape:
    problem = plan.problem
    num_m_blocks = query_tiles(problem, plan.config.traits.block_m)
    return RowShape(problem.heads_q, tokens(problem)[0], problem.layout.batch, num_m_blocks)


def tiles_of_rows(plan: Plan) -> int:
    """Query tiles of all heads: programs of the kernels before and after the main one."""
    return counted(plan, plan.problem.heads_q * entries(plan.problem) * row_shape(plan).num_m_blocks)


def convert_launch(plan: Plan, name: str, held: Tensor, gradient: Tensor) -> Launch:
    problem, traits = plan.problem, plan.config.traits
    count, heads, width = gradient.shape[-3:]
    scale, block = (1.0, traits.block_dv) if name == "dv" else (problem.scale, traits.block_d)
    strides = ConvertStrides(*(Strides(*strides_of(tensor, problem)) for tensor in (held, gradient)))
    arguments = (
        ConvertTensors(held, gradient),
        strides,
        ConvertShape(heads, count),
        scale,
        held.shape[-1],
        width,
        triton.next_power_of_2(block),
        CONVERTED_ROWS,
    )
    programs = counted(plan, heads * entries(problem) * -(-count // CONVERTED_ROWS))
    return Launch(convert_kernel, programs, arguments, {"num_warps": 4})


def main_launch(plan: Plan, call: Call, views: Views, pointers: Pointers, hooks: BackwardHooks | None = None) -> Launch:
    problem, traits = plan.problem, plan.config.traits
    strides: tuple[int, ...] = ()
    if traits.key_ranges:  # the first entry represents all
        apart = (views.q, views.dout, views.k, views.v, views.dk, views.dv)
        strides = tuple(rows_apart(plan, t) for t in apart)
        views = views._replace(**{name: getattr(views, name)[0] for name in ("q", "k", "v", "dout", "dk", "dv")})
    if views.stats.numel() >= MOST_TILES:
        raise KernelFault(
            f"{plan.kernel.name}: {views.stats.numel()} values per row exceed the range of int32; split the batch"
        )
    parts, num_n_blocks, section = parts_of_heads(plan)
    blocks = (query_tiles(problem, traits.block_m), num_n_blocks, section)
    shape = ShapeParams(problem.layout.batch, problem.heads_q, *tokens(problem), *blocks, *strides)
    tiles = counted(plan, parts * num_n_blocks)
    softmax = SoftmaxParams(*softmax_parameters(problem), problem.scale)
    if traits.score_mod is not None:
        softmax = softmax._replace(scale_log2=LOG2_E, score_scale=softmax.scale_log2 / LOG2_E)
    params = None if hooks is None else hooks.params
    launch = LaunchParams(tiles, shape, WindowParams(call.left, call.right), softmax, params)
    programs = min(plan.target.sm_count, tiles)
    arguments = (*descriptors(views, traits), pointers, launch, traits)
    return Launch(backward.backward_kernel, programs, arguments, {"num_warps": 4, "maxnreg": 168})


def descriptors(views: Views, traits: Any) -> tuple[TensorDescriptor | None, ...]:
    """As `backward_kernel` takes them: tiles of the main columns, of the tail columns (None where there are none), and
    of dQ if it is written directly.
    """
    m, n = traits.block_m, traits.block_n
    tails = (
        (views.q, m, traits.tail_d), (views.k, n, traits.tail_d), (views.v, n, traits.tail_dv),
        (views.dout, m, traits.tail_dv), (views.dk, n, traits.tail_d), (views.dv, n, traits.tail_dv),
    )  # fmt: skip
    return (
        descriptor(views.q, m, traits.main_d),
        descriptor(views.k, n, traits.main_d),
        descriptor(views.v, n, traits.main_dv),
        descriptor(views.dout, m, traits.main_dv),
        row_descriptor(views.stats, m),
        descriptor(views.dk, n, traits.main_d),
        descriptor(views.dv, n, traits.main_dv),
        line_descriptor(views.dq_sum, traits.dq.lines),
        *(descriptor(t, rows, width) if width else None for t, rows, width in tails),
        descriptor(views.dq, ROWS, ROWS) if traits.dq_written_directly else None,
    )


def parts_of_heads(plan: Plan) -> tuple[int, int, int]:
    """(parts of heads, key tiles per part, parts per section)."""
    traits = plan.config.traits
    problem, block_n = plan.problem, traits.block_n
    seqlen_q, seqlen_k = tokens(problem)
    tiles_n = seqlen_k // block_n + problem.layout.batch + 2 if traits.packed else -(-seqlen_k // block_n)
    parts = problem.heads_kv * entries(problem) * traits.group_splits
    a_part = traits.heads_per_program * seqlen_q * (2 * (traits.block_d + traits.block_dv) + 4 * traits.block_d)
    return (
        parts,
        tiles_n,
        even_section(parts, min(L2_BYTES // max(1, a_part), filling(plan.target.sm_count, tiles_n, traits))),
    )


SHORT = 5  # key tiles


def filling(sm_count: int, tiles_n: int, traits: Any) -> int:
    """Parts of heads per section: about one key tile per SM.

    Speed (H200): 512 x 32 is 1.04x as fast as with twice as many, GQA 64/8 2k with half as many only 0.90x. Twice as
    many are used in two cases. Ordered programs with long steps are then further apart: d64 causal 1.004x to 1.006x at
    4k to 16k, d128 0.993x to 0.999x. With few programs the last one waits for the others: 512 x 32 1.025x, 256 x 64
    1.09x, d64 512 1.21x, d128 768 0.985x, 1k 0.98x.
    """
    apart = traits.deterministic and traits.dq.by_rows
    waits = traits.dq_last_writer_converts and (traits.dq.by_rows or tiles_n <= SHORT)
    return max(1, sm_count // max(1, tiles_n)) * (2 if apart or waits else 1)


def counted(plan: Plan, programs: int) -> int:
    if programs >= MOST_TILES:
        raise KernelFault(f"{plan.kernel.name}: {programs} programs are more than a launch can count; split the batch")
    return programs


def tokens(problem: Problem) -> tuple[int, int]:
    """(S_q, S_k), or (T_q, T_k) of packed tensors."""
    return problem.layout.tokens if problem.packed else problem.layout[1:3]


def row_descriptor(rows: Tensor, block: int) -> TensorDescriptor:
    layout: Any = gl.NVMMASharedLayout.get_default_for([block], gl.float32)
    return TensorDescriptor(rows, [rows.numel()], [1], [block], layout)


def line_descriptor(dq_sum: Tensor, lines: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(dq_sum, [dq_sum.numel() // 256, 256], [256, 1], [lines, 256], layout)
