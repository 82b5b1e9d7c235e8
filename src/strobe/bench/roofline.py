"""FLOPs and bytes of a case, and the least time in which a device could do them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch

from ..kernels.protocol import Cost, Kernel, attention_cost
from ..problem.call import Dense
from ..problem.problem import Problem
from ..problem.target import Target
from .cases import Case, Inputs

_TRIES = 5  # take the best: other processes only lower the measured rate
_MATMUL = 2048
_COPY_BYTES = 256 * 2**20  # larger than any last-level cache


def cost(case: Case, x: Inputs, kernel: Kernel | None = None) -> Cost:
    """FLOPs and bytes of the case as `kernel` counts them (default: `attention_cost`). FLOPs cover exactly the pairs
    that the mask admits.

    A Problem does not contain the lengths of documents, because their ids are on the device. The case has them, so each
    document is counted as a dense problem.
    """
    count = kernel.cost if kernel else partial(attention_cost, backward=case.backward)
    problem = Problem.from_call(case.call(x))
    whole = count(problem)
    if not case.lengths:
        return whole
    alone = replace(problem, mask=problem.mask._replace(documents=False))
    flops = sum(count(replace(alone, layout=Dense(case.batch, length, length))).flops for length in case.lengths)
    return whole._replace(flops=flops)


def ceiling(device: torch.device, dtype: torch.dtype) -> Target:
    """The device's Target with its peaks for `dtype`: the datasheet's for 16-bit dtypes on a GPU, else measured once.

    >>> ceiling(torch.device("cpu"), torch.float32).peak_tflops > 0
    True
    """
    target = Target.of(device)
    if target.peak_tflops and dtype in (torch.float16, torch.bfloat16):
        return target
    return replace(target, peak_tflops=_matmul_tflops(device, dtype), peak_gbps=target.peak_gbps or _copy_gbps(device))


def percent(cost: Cost, target: Target, ms: float) -> float:
    """The least possible time as a percentage of `ms`; 100 is the roofline.

    >>> from strobe.problem.target import FAKES
    >>> round(percent(Cost(989e9, 1.0), FAKES["H200"], 2.0))
    50
    """
    return 100 * cost.ceiling_ms(target)[0] / ms


def tflops(cost: Cost, ms: float) -> float:
    """
    >>> tflops(Cost(2e12, 0.0), 4.0)
    500.0
    """
    return cost.flops / ms / 1e9


@lru_cache
def _matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The measured rate of a matrix product. For 16-bit dtypes it is at least float32's: a CPU without 16-bit
    instructions multiplies bfloat16 slower than float32, and a kernel may convert.
    """
    a, b = (torch.ones(_MATMUL, _MATMUL, dtype=dtype, device=device) for _ in range(2))
    own = 2 * _MATMUL**3 / _best_seconds(lambda: a @ b, device) / 1e12
    return own if dtype.itemsize >= 4 else max(own, _matmul_tflops(device, torch.float32))


@lru_cache
def _copy_gbps(device: torch.device) -> float:
    source = torch.ones(_COPY_BYTES, dtype=torch.int8, device=device)
    sink = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_seconds(lambda: sink.copy_(source), device) / 1e9


def _best_seconds(function: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = []
    for _ in range(1 + _TRIES):
        wait()
        start = time.perf_counter()
        function()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
