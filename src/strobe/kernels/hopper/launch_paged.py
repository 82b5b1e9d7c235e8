"""Arguments and launches of packed queries over a cache, from a Plan and a call.

Few tokens a sequence: other_rows_kernel writes the rows of no sequence, then the decode runs. Otherwise the forward
runs. If the plan has a decode, it runs the sequences of few tokens, and the forward skips these. If the plan has a copy
of 8-bit keys, copy_keys_kernel fills it, a forward over the copy runs the sequences in it, and the other skips these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from ...problem.mask import NO_BOUND
from ...problem.paged import PagedCall
from ...problem.problem import ALIGNMENT
from ..device.dialect import TensorDescriptor
from ..device.forward_arguments import (
    CacheParams,
    CacheTensors,
    HookParams,
    LaunchParams,
    Pointers,
    PoolStrides,
    ShapeParams,
    SoftmaxParams,
    WindowParams,
)
from ..device.persistent_launch import LOG2_E, Launch, softmax_parameters
from ..device.tma import addressable, describing, descriptor
from ..protocol import Forward, Plan
from ..runtime import error_flags, launcher
from ..runtime.launch_cache import CACHE, Replay, decode_addresses
from ..runtime.tma_requirements import query_tiles
from ..runtime.workspace import pieces_of, zeros_on
from . import forward
from .copied_keys import CopySizes, CopyTensors, copy_keys_kernel
from .copy_config import KeyCopy
from .decode_arguments import DecodeTensors
from .decode_config import padded
from .launch_decode import decode_launch, hooks_of, partials_of
from .paged_rows import other_rows_kernel
from .prefill_config import MOST_TOKENS, as_packed, of_few, rows_apart
from .traits import ROWS, ForwardTraits

MOST_COLUMNS = 64  # of a box: those of a swizzle
WORD = 4  # bytes
COPIES_AN_SM = 16  # programs of 4 warps that copy keys


def run_few(plan: Plan, call: PagedCall, t: Forward, workspace: dict[str, Tensor]) -> None:
    moving, kinds, decode = _decode(plan, call, t, workspace)
    others = _start(plan, "others", moving, t, lambda: other_rows_launch(plan, decode()))
    _insert(plan, call, t, workspace, _in_turn([others, _start_decode(plan, moving, kinds, decode, t)]))


def run_mixed(plan: Plan, call: PagedCall, t: Forward, workspace: dict[str, Tensor]) -> None:
    config = plan.config
    overwrites_q = t.out.data_ptr() == call.q.data_ptr()
    # A tile that is redone reads q after the first attempt has written out.
    if call.q.data_ptr() % ALIGNMENT or (overwrites_q and any(one.can_redo for one in config.forwards)):
        call, plan = call._replace(q=call.q.clone()), plan._replace(replays=False)
    packs = [traits.pack_gqa > 1 for traits in config.forwards]
    aligned = t._replace(out=addressable(t.out, any(packs)))
    launches, is_copied = [], None
    if config.copy is not None:
        tensors = copy_tensors(call, workspace)
        is_copied = tensors.is_copied
        word = error_flags.word(call.q.device)
        launches.append(
            _start(plan, "copy", (call.q, *tensors, word), t, lambda: copy_launch(plan, call, tensors, word))
        )
        of_copy = plan._replace(problem=config.copy.problem, config=replace(config, traits=config.copy.forward))
        launches.append(_start_forward(of_copy, over_copy(call, tensors), aligned, is_copied))
    launches.append(_start_forward(plan, call, aligned, is_copied))
    if aligned.out is not t.out:
        t.out.copy_(aligned.out)
    if config.decode is not None:
        few = plan._replace(problem=of_few(plan.problem), config=config.decode)
        moving, kinds, decode = _decode(few, call, t, workspace)
        launches.append(_start_decode(few, moving, kinds, decode, t))
    # A replay that a later launch refuses is followed by all launches, which would read what the first has written.
    can_run_twice = len(launches) == 1 or not overwrites_q
    if plan.replays and aligned.out is t.out and can_run_twice:
        _insert(plan, call, t, workspace, _in_turn(launches))


def _start_forward(plan: Plan, call: PagedCall, t: Forward, is_copied: Tensor | None) -> Replay | None:
    """Launch the forward. is_copied: which sequences have a copy of their keys; None without a copy."""
    traits: ForwardTraits = plan.config.traits
    word = error_flags.word(call.q.device)
    counter = zeros_on(call.q.device, 1) if traits.counted else None
    hooks, read = hooks_of(plan, call)
    moving = (*call.about, t.out, t.lse, word, counter, is_copied, *read.tensors)
    describe = partial(prefill_launch, plan, call, *t, counter, hooks, is_copied)
    launch = _start(plan, "forward over a copy" if traits.in_copy else "forward", moving, t, describe, read.kinds)
    return launch if counter is None or launch is None else launch.on_this_stream()


def copy_tensors(call: PagedCall, workspace: dict[str, Tensor]) -> CopyTensors:
    return CopyTensors(
        call.k, call.v, call.page_table, call.seqlens, call.k_start, call.cu_seqlens_q, call.k_scale,
        *[workspace[name] for name in CopyTensors._fields[-5:]],
    )  # fmt: skip


def over_copy(call: PagedCall, tensors: CopyTensors) -> PagedCall:
    """The call with the copy for its cache."""
    cache = {"page_table": tensors.copy_table, "seqlens": tensors.key_counts, "k_start": None}
    return call._replace(k=tensors.k_copy, v=tensors.v_copy, **cache)


def copy_launch(plan: Plan, call: PagedCall, tensors: CopyTensors, word: Tensor) -> Launch:
    copy: KeyCopy = plan.config.copy
    problem, layout = plan.problem, plan.problem.layout
    max_pages, num_pages = (layout.max_pages, layout.n_pages) if problem.paged else (0, 0)
    k_strides, v_strides = (PoolStrides(*strides_in(pool, 1)) for pool in (call.k, call.v))
    sizes = CopySizes(
        layout.batch, problem.total_q, problem.heads_kv, problem.capacity, max_pages, num_pages,
        tensors.copy_table.shape[1], copy.least_tokens, copy.tiles, call.left, k_strides, v_strides,
    )  # fmt: skip
    units = 2 * problem.heads_kv
    programs = units * min(copy.tiles, max(1, COPIES_AN_SM * plan.target.sm_count // units))
    return Launch(copy_keys_kernel, programs, (tensors, sizes, word, copy.traits), {"num_warps": 4})


def _decode(
    plan: Plan, call: PagedCall, t: Forward, workspace: dict[str, Tensor]
) -> tuple[tuple[Tensor | None, ...], tuple, Callable[[], Launch]]:
    """(tensors that the decode reads and writes, kinds of values that its functions read, a function that describes
    its launch).
    """
    word, partials = error_flags.word(call.q.device), partials_of(plan, workspace, call.q.device)
    hooks, read = hooks_of(plan, call)
    about = (call.q, call.k, call.v, call.page_table, call.seqlens, call.k_start)
    tensors = DecodeTensors(*about, t.out, t.lse, call.sinks, call.cu_seqlens_q, hooks)
    moving = (*tensors[:-1], call.k_scale, call.v_scale, *partials, word, *read.tensors)
    return moving, read.kinds, partial(decode_launch, plan, call, tensors, partials, word)


def _start_decode(plan: Plan, moving: tuple, kinds: tuple, decode: Callable[[], Launch], t: Forward) -> Replay | None:
    launch, traits = _start(plan, "decode", moving, t, decode, kinds), plan.config.traits
    if launch is not None and not (traits.single or traits.cluster):  # counters of the current stream
        return launch.on_this_stream()
    return launch


def _start(
    plan: Plan, name: str, moving: tuple, t: Forward, describe: Callable[[], Launch], kinds: tuple = ()
) -> launcher.RecordedLaunch | None:
    """The first of `moving` is q. The key has its strides, because it may be a copy (`run_mixed`)."""
    return launcher.start(plan, (name, moving[0].stride(), t.out.stride(), *kinds), moving, describe)


def _insert(plan: Plan, call: PagedCall, t: Forward, workspace: dict[str, Tensor], replay: Replay | None) -> None:
    if t.out.is_contiguous():
        written = [tensor.data_ptr() for tensor in (*t, *pieces_of(workspace))]
        CACHE.insert_launch(plan, decode_addresses(call, *written), replay)


def _in_turn(launches: Sequence[Replay | None]) -> Replay | None:
    """A replay of all launches; None if one was not recorded. All but the last may run twice: launches leave counters
    at 0.
    """
    recorded = [launch for launch in launches if launch is not None]
    if len(recorded) < len(launches):
        return None
    return recorded[0] if len(recorded) == 1 else lambda: all(launch() for launch in recorded)


def other_rows_launch(plan: Plan, decode: Launch) -> Launch:
    """The launch for rows that `decode` does not write."""
    problem = plan.problem
    tensors, _, _, word, strides, shape = decode.arguments[:6]
    unused = dict.fromkeys(("q", "k", "v", "page_table", "seqlens", "k_start", "hooks"))
    arguments = (
        tensors._replace(**unused), word, strides.out, shape, problem.heads_q, problem.head_dim_v,
        padded(problem.head_dim_v, 1),
    )  # fmt: skip
    return Launch(other_rows_kernel, problem.total_q, arguments, {"num_warps": 1})


def prefill_launch(
    plan: Plan, call: PagedCall, out: Tensor, lse: Tensor, counter: Tensor | None, hooks: HookParams | None,
    is_copied: Tensor | None,
) -> Launch:  # fmt: skip
    """The forward of the sequences that no other launch of the plan runs."""
    traits: ForwardTraits = plan.config.traits
    problem = plan.problem
    layout, heads = problem.layout, problem.heads_kv * traits.group
    tiles_m = query_tiles(as_packed(problem), traits.block_m)
    shape = ShapeParams(layout.batch, heads, problem.total_q, problem.capacity, tiles_m, heads)
    window = WindowParams(call.left, call.right, call.max_seqlen_q, NO_BOUND)
    pages = (layout.max_pages, layout.n_pages) if problem.paged else (0, 0)
    few_tokens = 0 if plan.config.decode is None else MOST_TOKENS
    cache = CacheParams(*pages, *rows_apart(problem), few_tokens)
    softmax = SoftmaxParams(*softmax_parameters(as_packed(problem)))
    if traits.score_mod is not None:
        softmax = SoftmaxParams(LOG2_E, softmax.softcap, softmax.scale_log2 / LOG2_E)
    scales = {"k_scale": call.k_scale, "v_scale": call.v_scale}
    tensors = CacheTensors(call.page_table, call.seqlens, call.k_start, **scales, is_copied=is_copied)
    if traits.converts_keys:
        cache = CacheParams(*pages, 0, 0, few_tokens, *[PoolStrides(*strides_in(t, WORD)) for t in (call.k, call.v)])
        tensors = tensors._replace(k=call.k, v=call.v)
    launch = LaunchParams(heads * tiles_m, shape, window, softmax, hooks, cache)
    word = error_flags.word(call.q.device)
    pointers = Pointers(lse, call.sinks, call.cu_seqlens_q, None, None, word, counter, tensors)
    arguments = (*descriptors(call, out, traits), pointers, launch, traits)
    programs = min(plan.target.sm_count, heads * tiles_m)
    return Launch(forward.forward_kernel, programs, arguments, {"num_warps": 4, "maxnreg": traits.launch_registers})


def strides_in(pool: Tensor, unit: int) -> list[int]:
    """Strides of an 8-bit cache's pages, rows and heads in units of some bytes; 0 along dimensions of size 1."""
    return [stride // unit if size > 1 else 0 for size, stride in zip(pool.shape[:3], pool.stride())]


def descriptors(call: PagedCall, out: Tensor, traits: ForwardTraits) -> tuple[TensorDescriptor | None, ...]:
    """Descriptors of q, k, v and out: tiles of the first columns, then tiles of the rest. Those of k and v are of
    boxes, and None for 8-bit keys.
    """
    queries, halves = describing(traits.tuning), 2 if traits.tuning.half_staged else 1
    box = lambda pool, columns: (
        descriptor(pool[0], traits.box_rows, min(columns, MOST_COLUMNS))
        if columns and not traits.converts_keys
        else None
    )
    first = (
        queries(call.q, ROWS, traits.main_d),
        box(call.k, traits.main_d),
        box(call.v, traits.main_dv),
        queries(out, ROWS, traits.main_dv // halves),
    )
    last = (
        queries(call.q, ROWS, traits.tail_d) if traits.tail_d else None,
        box(call.k, traits.tail_d),
        box(call.v, traits.tail_dv),
        queries(out, ROWS, traits.tail_dv) if traits.tail_dv else None,
    )
    return *first, *last
