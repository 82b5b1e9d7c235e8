"""Launching a forward whose programs walk tiles: what its tiles are, and how it is launched again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import KernelFault
from ...problem.call import Call
from ...problem.problem import Problem
from ..protocol import Forward, Plan, keys_a_row
from ..runtime import error_flags, launcher
from ..runtime.compile_cache import hash_callees_first
from ..runtime.launch_cache import CACHE, forward_addresses
from ..runtime.tma_requirements import has_spans, query_tiles
from ..runtime.workspace import zeros_on
from .tma import addressable

LOG2_E = 1.4426950408889634
L2_BYTES = 32 << 20  # of keys and values that stay while a section of heads is walked; an H200 has 50 MB
# where rows see few keys, on average, all memory is read while the longest tiles of a section are walked, and none while the others are: smaller
# sections spread that. Of the speed with 32 MiB d128 256 queries 1.09, 384 1.00, 512 1.16, 768 1.06, d96 512 1.07, d192 512 1.02, d64 512 1.01; of
# more keys d128 1k 1.02, 2k 1.00, d96 1k 0.97, d64 1k 0.96; at 256, where that is less than a tile for each SM, 512 0.98. With 12 MiB 512 1.17,
# but less of the others (H100)
FEW_KEYS, L2_BYTES_OF_FEW = 400, 16 << 20
# up to which sections pay, and twice as many of d128 without groups: of more, SMs that walk a head's tiles at the same time share its keys, and
# programs even out only within a section. Of the speed without causal 2k d128 1.19, d192 1.21, 192/128 1.20, d96 1.05, d256 0.99; 4k d128 1.01
# to 1.03, d192, d96 and d64 0.99, 192/128 1.00, d256 0.95; d128 8k 0.99 (H200)
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


Describe = Callable[[Plan, Call, Tensor, tuple[Tensor | None, ...]], Launch]  # a plan, a call, its out and pointers


def run(plan: Plan, call: Call, tensors: Forward, described: Describe, joined: bool = False) -> None:
    """Launch what `described` says; where the same was launched before, without asking again. `joined`: out leaves by `joined_descriptor`."""
    form: Any = plan.config.form
    out = addressable(tensors.out, joined)
    word = error_flags.word(call.q.device) if form.packed or call.key_lengths is not None else None
    offsets = (call.cu_seqlens_q, call.cu_seqlens_k)
    if has_spans(plan.problem.mask):
        offsets = (call.spans_q, call.spans_k, call.ids_q, call.ids_k, call.key_lengths, call.prefix)
    counter = zeros_on(call.q.device, 1) if form.counted else None
    pointers = (tensors.lse, call.sinks, *offsets, word, counter)
    key = (call.left, call.right, out.stride())
    launch = launcher.start(plan, key, (call.q, call.k, call.v, out, *pointers), lambda: described(plan, call, out, pointers))
    if out is not tensors.out:
        tensors.out.copy_(out)
    elif launch is not None and out.is_contiguous():
        CACHE.insert_launch(plan, forward_addresses(call, *tensors), launch.on_this_stream() if form.counted else launch)


def work_of(plan: Plan, call: Call) -> tuple:
    """(tiles in all, sizes, limits, numbers), as a kernel that walks them is told."""
    form: Any = plan.config.form
    problem = plan.problem
    layout: Any = problem.layout
    tuning, heads = form.tuning, problem.heads_kv * form.group  # a tile may hold all heads of a group
    tiles_m = query_tiles(problem, tuning.block_m)
    section = batch_heads = layout.batch * heads
    if form.packed:
        lengths, whole = layout.tokens, heads * tiles_m
    else:
        lengths = layout[1:]
        short = SHORT_QUERIES * (2 if (form.block_d, form.block_dv, form.group) == (128, 128, 1) else 1)
        uneven = (problem.mask.right or problem.mask.prefix) and not problem.mask.left
        if uneven and lengths[0] <= short and batch_heads * tiles_m > plan.target.sm_count:
            a_head = layout.seqlen_k * (form.block_d + form.block_dv) * call.k.element_size()
            few = keys_a_row(problem) < FEW_KEYS and form.block_d < 256
            stays = L2_BYTES_OF_FEW if few else L2_BYTES
            section = even_section(batch_heads // form.group, stays // max(1, a_head)) * form.group
        whole = -(-batch_heads // section) * section * tiles_m  # the last section may hold tiles that are none
    if whole >= MOST_TILES:
        raise KernelFault(f"{plan.kernel.name}: {whole} tiles of {tuning.block_m} queries are more than a launch can count; split the batch")
    sizes = (layout.batch, heads, *lengths, tiles_m, section)
    limits = (call.left, call.right, call.max_seqlen_q, call.max_seqlen_k)
    return whole, sizes, limits, softmax_parameters(problem)


def even_section(parts: int, most: int) -> int:
    """Parts to walk together, at most `most`: a divisor, if one is half as many, else about even shares, since programs even out only within a
    section. Of 33 parts 32 at a time the last one alone ends the launch."""
    most = max(1, min(parts, most))
    shares = -(-parts // most)
    return next((n for n in range(most, most // 2, -1) if parts % n == 0), -(-parts // max(1, shares)))


def softmax_parameters(problem: Problem) -> tuple[float, float]:
    """(scale_log2, softcap): the raw score is q k^T, or tanh(softcap * q k^T) where the call caps scores; it is worth scale_log2 in log2 units."""
    cap = problem.softcap
    return (cap * LOG2_E, problem.scale / cap) if cap else (problem.scale * LOG2_E, 0.0)
