"""The kernels of a plan's calls, and their compilation before the first step, shared among the ranks.

Without it each rank compiles every kernel by itself, one after another, in the first step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.warmup import run_example
from ..problem.call import Call
from ..problem.keywords import options_of
from ..problem.problem import Problem
from ..problem.target import Target
from ..selection.select import select
from .group import groups_of
from .heads import Share
from .keys import empty_calls
from .plan import Plan
from .runs import size

MOST_THREADS = 4  # of a rank that compile at the same time


class Kernels(NamedTuple):
    """What distinguishes compiled kernels: their names and configs, and the parts of a problem that they depend on.
    Triton compiles integer arguments that are 1 or multiples of 16 apart from others.
    """

    names: tuple[str, ...]
    constants: str

    @staticmethod
    def of(problem: Problem, target: Target) -> Kernels:
        choice = select(problem, target)
        plans = [plan for plan in (choice.forward, choice.backward) if plan is not None]
        p, layout = problem, problem.layout
        numbers = *layout[1:], p.left, p.right, *(stride for strides in p.strides for stride in strides)
        sizes = [None if number is None else 1 if number == 1 else number % 16 == 0 for number in numbers]
        constants = [p.mask, p.sinks, p.softcap > 0, p.dtype, p.out_dtype, p.head_dim, p.head_dim_v, p.group, sizes]
        return Kernels(tuple(plan.kernel.name for plan in plans), repr([*constants, *[plan.config for plan in plans]]))


def problems(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, softcap: float | None = None,
    deterministic: bool | None = None, needs_grad: bool = True,
) -> list[Problem]:  # fmt: skip
    """The problems that this rank's kernels compute in a call of `attention` with these arguments: for `warmup`.

    >>> import strobe, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> plan = strobe.distributed.context_parallel().plan(strobe.causal(), seqlen=8, heads_q=2)
    >>> q = torch.empty(1, 8, 2, 16)
    >>> [str(problem) for problem in problems(plan, q, q, q, needs_grad=False)]
    ['B=1 S_q=8 S_k=8 H_q=2 H_kv=2 D=16 float32, causal, scale 0.25']
    >>> dist.destroy_process_group()

    Args:
        plan: a plan of this process. For a call with a mask of its own, `plan.for_mask(mask)`.
        q, k, v: local tensors of the call. Only their metadata is read.
        needs_grad: whether the backward runs, too.
        Other arguments: as in `attention`.
    """
    call = Call(q, k, v, -1, -1, *options_of(None, softcap, deterministic, False, None), sinks=sinks)
    if plan.heads_size > 1:
        share = Share.of(q.shape[2], k.shape[2], plan.heads_size)
        empty = lambda t, heads: t.new_empty((t.shape[0], size(plan.own_rows), heads, t.shape[3]))
        call = call._replace(q=empty(q, share.heads_q), k=empty(k, share.heads_kv), v=empty(v, share.heads_kv))
        call = call if sinks is None else call._replace(sinks=sinks[: share.heads_q])
    if plan.keys_size == 1:
        calls = [call.with_mask(plan.mask)._replace(needs_grad=needs_grad)]
    else:
        calls = [one for one in empty_calls(plan, call) if needs_grad or not one.needs_grad]
    return list(dict.fromkeys(map(Problem.from_call, calls)))


def warmup(several: Iterable[Problem], processes: Any = None) -> None:
    """Compile the kernels of all ranks' problems, each rank a part of them, and wait until all are compiled.

    >>> import strobe, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> plan = strobe.distributed.context_parallel().plan(strobe.causal(), seqlen=8, heads_q=2)
    >>> q = torch.empty(1, 8, 2, 16)
    >>> warmup(problems(plan, q, q, q))
    >>> dist.destroy_process_group()

    Other ranks find a kernel in Triton's cache on disk, so this saves time for the ranks of one host or of hosts that
    share a cache. Kernels that do not depend on a problem's sizes are compiled once for all sizes.

    Args:
        several: the problems of this rank. Ranks may have different ones.
        processes: the ranks, as in `context_parallel`. All must call this.
    """
    groups = groups_of(processes)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    target = Target.of(device)
    found: dict[Kernels, Problem] = {}
    for problem in several:
        found.setdefault(Kernels.of(problem, target), problem)
    place = 0
    for group in reversed(groups):
        lists: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, found, group=group)
        found = {kernels: problem for one in lists for kernels, problem in one.items()}
    for group in groups:
        place = place * dist.get_world_size(group) + dist.get_rank(group)
    count = 1
    for group in groups:
        count *= dist.get_world_size(group)
    mine = [found[kernels] for kernels in sorted(found)][place::count]
    threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // count))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda problem: _compile(problem, device), mine))
    for group in groups:
        dist.barrier(group)


def _compile(problem: Problem, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread starts with device 0
    run_example(problem, device)
