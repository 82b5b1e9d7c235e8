"""Host time of a call before its kernel starts: tensors of one element and a kernel that does nothing.

It also measures SDPA on 64 keys, where torch's own kernel runs with and without strobe.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter_ns
from typing import cast

import torch
import torch.nn.functional as functional

from .. import flash_attn
from ..compat import sdpa
from ..interface import attention as interface
from ..kernels.protocol import Kernel
from ..kernels.runtime.launch_cache import CACHE, OP
from ..ops import attention as ops
from ..problem import keywords
from ..problem.call import Call
from ..problem.problem import Problem
from ..problem.target import Target
from ..selection.select import select

ROUNDS, CALLS = 15, 300


def measure() -> dict[str, float]:
    """Microseconds of each part of a call: the minimum over interleaved rounds, since disturbances only add time.

    >>> print(*sorted(measure()))
    call call_causal decide first_time flash_attn keywords op sdpa sdpa_64 sdpa_strobe sdpa_strobe_64

        keywords        keywords to a Call
        decide          look up the Choice of a Call seen before
        op              the whole op, through the dispatcher
        call            the whole `strobe.attention`, which bypasses the dispatcher; call_causal: with causal=True
        first_time      describe and select a Problem not seen before
        flash_attn      `strobe.flash_attn.flash_attn_func`
        sdpa            torch's scaled_dot_product_attention, including its kernel
        sdpa_strobe     the same function after `strobe.integrations.sdpa.enable()`
        sdpa_64, sdpa_strobe_64   both with 64 keys, where no check for lost NaN is needed: torch's kernel can drop NaN
                                  only with fewer keys than a vector holds
    """
    q, k, v = (torch.randn(1, 1, 1, 1) for _ in range(3))
    rows = torch.randn(1, 1, 64, 1)
    call = Call(q, k, v)
    parts = {
        "keywords": lambda: interface._dense(
            q, k, v, False, None, None, None, keywords.options_of(None, None, None, False, None)
        ),
        "decide": lambda: ops.decide(call),
        "op": lambda: ops.FORWARD(q, k, v),
        "call": lambda: interface.attention(q, k, v),
        "call_causal": lambda: interface.attention(q, k, v, causal=True),
        "first_time": lambda: select(Problem.from_call(call), Target.of(q.device)),
        "flash_attn": lambda: flash_attn.flash_attn_func(q, k, v),
        "sdpa": lambda: functional.scaled_dot_product_attention(q, k, v),
        "sdpa_strobe": lambda: functional.scaled_dot_product_attention(q, k, v),
        "sdpa_64": lambda: functional.scaled_dot_product_attention(rows, rows, rows),
        "sdpa_strobe_64": lambda: functional.scaled_dot_product_attention(rows, rows, rows),
    }
    around = {"sdpa_strobe": sdpa.enable, "sdpa_strobe_64": sdpa.enable}

    def one_round_us(name: str) -> float:
        with around.get(name, nullcontext)():
            return _one_round_us(parts[name])

    with torch.no_grad(), _idle_kernel(call, call._replace(right=0)):
        times = {name: [one_round_us(name) for _ in range(2)] for name in parts}  # the first rounds warm up
        for _ in range(ROUNDS):
            for name in parts:
                times[name].append(one_round_us(name))
    return {name: round(min(seen[2:]), 2) for name, seen in times.items()}


def _one_round_us(part: Callable[[], object]) -> float:
    begin = perf_counter_ns()
    for _ in range(CALLS):
        part()
    return (perf_counter_ns() - begin) / CALLS / 1000


class _Idle:
    name = "idle.forward"

    def run(self, *_: object) -> None:
        pass


@contextmanager
def _idle_kernel(*calls: Call):
    """Within the block, the given calls run a kernel that does nothing."""
    decided = [ops.decide(call) for call in calls]
    with CACHE.emptied():
        for call, choice in zip(calls, decided):
            plan = choice.forward.changed(kernel=cast(Kernel, _Idle()), buffers=())
            CACHE.insert(OP, *call.tensors_and_rest, replace(choice, forward=plan))
        yield
