"""Launching a forward whose programs process several tiles: how many tiles there are, and cached launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import KernelFault
from ...problem.call import Call
from ...problem.problem import Problem
from ..protocol import Forward, Plan, away_from_0, keys_a_row
from ..runtime import error_flags, launcher
from ..runtime.compile_cache import hash_callees_first
from ..runtime.launch_cache import CACHE, Replay, forward_addresses
from ..runtime.tma_requirements import has_spans, query_tiles
from ..runtime.workspace import zeros_on
from .tma import addressable

LOG2_E = 1.4426950408889634
# Keys and values of the heads that are processed together (a section) stay in L2; an H200 has 50 MB.
L2_BYTES = 32 << 20
# If rows see few keys, the longest tiles of a section do most loads, and memory idles during the others. Smaller
# sections spread the loads. Speed with 16 MiB relative to 32 MiB (H100):
#
#     queries       256    384    512    768     1k     2k
#     d128          1.09   1.00   1.16   1.06   1.02   1.00
#     d96                         1.07          0.97
#     d192                        1.02
#     d64                         1.01          0.96
FEW_KEYS, L2_BYTES_OF_FEW = 400, 16 << 20
# Sections help up to this many queries, and up to twice as many for d128 without groups. With more, SMs that process
# tiles of one head at the same time share its keys anyway, and programs balance their work only within a section. Speed
# with sections relative to without, causal (H200):
#
#     queries       d64    d96    d128   192/128   d192   d256
#     2k                   1.05   1.19   1.20      1.21   0.99
#     4k            0.99   0.99   1.02   1.00      0.99   0.95
#     8k                          0.99
SHORT_QUERIES = 2048
MOST_TILES = 2**31  # a tile's number is an int32


class Launch(NamedTuple):
    kernel: Any
    programs: int
    arguments: tuple
    options: dict[str, int]
    cluster: int = 1  # programs that run together: of `programs` clusters

    def start(self) -> Any:
        """The compiled kernel; None where the launch is simulated or only noted."""
        hash_callees_first(self.kernel)
        if self.cluster > 1:
            return launcher.in_clusters(self.cluster, self.programs, self.kernel, self.arguments, self.options)
        return self.kernel[(self.programs,)](*self.arguments, **self.options)


class LaunchTensors(NamedTuple):
    """Tensors that a persistent forward reads and writes besides q, k, v and out."""

    lse: Tensor | None
    sinks: Tensor | None
    ranges: tuple[Tensor | None, ...]  # cu_seqlens of q and k, or the fields of KeyRangeTensors
    errors: Tensor | None
    tile_counter: Tensor | None


Describe = Callable[[Plan, Call, Tensor, LaunchTensors], Launch]  # a plan, a call, its out and the rest
Keep = Callable[[Replay | None], Replay | None]


def run(
    plan: Plan, call: Call, tensors: Forward, described: Describe, pack_gqa: bool = False, read: tuple = (),
    keep: Keep | None = None,
) -> None:  # fmt: skip
    """Launch what `described` returns, or a cached launch with the same key.

    pack_gqa: out is stored by `pack_gqa_descriptor`. read: what the launch reads for the call's functions: tensors, and
    numbers, which are part of the launch's key. keep: turns the recorded launch into a replay that checks inputs
    which are not among the call's addresses.
    """
    traits: Any = plan.config.traits
    out = addressable(tensors.out, pack_gqa)
    word = error_flags.word(call.q.device) if traits.packed or call.key_lengths is not None else None
    ranges: tuple = (call.cu_seqlens_q, call.cu_seqlens_k)
    if has_spans(plan.problem.mask):
        ranges = (call.spans_q, call.spans_k, call.ids_q, call.ids_k, call.key_lengths, call.prefix)
    counter = zeros_on(call.q.device, 1) if traits.counted else None
    rest = LaunchTensors(tensors.lse, call.sinks, ranges, word, counter)
    key: tuple = (call.left, call.right, out.stride())
    addressed = (call.q, call.k, call.v, out, tensors.lse, call.sinks, *ranges, word, counter)
    if read:
        key += tuple([launcher.kind_of(value) for value in read])
        addressed += tuple([value for value in read if isinstance(value, Tensor)])
    launch = launcher.start(plan, key, addressed, lambda: described(plan, call, out, rest))
    if out is not tensors.out:
        tensors.out.copy_(out)
    elif launch is not None and out.is_contiguous():
        launch = launch.on_this_stream() if traits.counted else launch
        CACHE.insert_launch(plan, forward_addresses(call, *tensors), launch if keep is None else keep(launch))


def work_of(plan: Plan, call: Call) -> tuple:
    """(number of tiles, fields of ShapeParams, of WindowParams, of SoftmaxParams) of a launch."""
    traits: Any = plan.config.traits
    problem = plan.problem
    layout: Any = problem.layout
    tuning, heads = traits.tuning, problem.heads_kv * traits.group  # a tile may hold all heads of a group
    tiles_m = query_tiles(problem, tuning.block_m)
    section = batch_heads = layout.batch * heads
    if traits.packed:
        lengths, whole = layout.tokens, heads * tiles_m
    else:
        lengths = layout[1:]
        short = SHORT_QUERIES * (2 if (traits.block_d, traits.block_dv, traits.group) == (128, 128, 1) else 1)
        uneven = (problem.mask.right or problem.mask.prefix) and not problem.mask.left
        if uneven and lengths[0] <= short and batch_heads * tiles_m > plan.target.sm_count:
            a_head = layout.seqlen_k * (traits.block_d + traits.block_dv) * call.k.element_size()
            few = keys_a_row(problem) < FEW_KEYS and traits.block_d < 256
            stays = L2_BYTES_OF_FEW if few else L2_BYTES
            section = even_section(batch_heads // traits.group, stays // max(1, a_head)) * traits.group
        whole = -(-batch_heads // section) * section * tiles_m  # the last section may hold tiles that are none
    if whole >= MOST_TILES:
        raise KernelFault(
            f"{plan.kernel.name}: {whole} tiles of {tuning.block_m} queries are more than a launch can count; "
            "split the batch"
        )
    sizes = (layout.batch, heads, *lengths, tiles_m, section)
    limits = (call.left, call.right, call.max_seqlen_q, call.max_seqlen_k)
    return whole, sizes, limits, softmax_parameters(problem)


def even_section(parts: int, most: int) -> int:
    """The parts of a section: the largest divisor of `parts` in (most / 2, most], else about equal shares. 33 parts in
    sections of 32 would leave a last section of one part, in which most programs idle.

    >>> even_section(33, 32), even_section(64, 48)
    (17, 32)
    """
    most = max(1, min(parts, most))
    shares = -(-parts // most)
    return next((n for n in range(most, most // 2, -1) if parts % n == 0), -(-parts // max(1, shares)))


def softmax_parameters(problem: Problem) -> tuple[float, float]:
    """(scale_log2, softcap). The raw score is q k^T, or tanh(softcap * q k^T) with a cap; times scale_log2 it is in
    log2 units.
    """
    cap = problem.softcap
    found = (cap * LOG2_E, problem.scale / cap) if cap else (problem.scale * LOG2_E, 0.0)
    return away_from_0(found[0], problem.dtype), away_from_0(found[1], problem.dtype)
