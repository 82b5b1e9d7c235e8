"""Time several functions in one process: interleaved rounds, medians, quartiles.

Clocks drift during a benchmark (power, temperature, other jobs). So each round times every function once, and drift
affects all of them. Each round has another order. A GPU at its power limit is slower after a function that draws much
power, so a fixed order would be unfair.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Function = Callable[[], object]

_WARM_UP_CALLS = 3  # the first compiles, the second may still build caches, the third is representative
_MOST_CALLS = 1000  # per sample
_FLUSH_BYTES = 256 * 2**20  # five times the L2 of an H200 (50 MB), twice that of a B200 (126 MB)


class Timing(NamedTuple):
    """Milliseconds per call: the median over rounds, and the lower and upper quartile."""

    median_ms: float
    low_ms: float
    high_ms: float

    @staticmethod
    def of(samples_ms: list[float]) -> Timing:
        """
        >>> Timing.of([3.0, 1.0, 2.0, 5.0, 4.0])
        Timing(median_ms=3.0, low_ms=2.0, high_ms=4.0)
        """
        if len(samples_ms) == 1:
            return Timing(*samples_ms * 3)
        low, median, high = statistics.quantiles(samples_ms, n=4, method="inclusive")
        return Timing(median, low, high)


def interleave(
    functions: Mapping[str, Function], device: torch.device | str, rounds: int = 10, sample_ms: float = 20.0,
    flush: bool = False,
    warm_up: int = _WARM_UP_CALLS, goes_on: Callable[[], bool] = lambda: True,
) -> dict[str, Timing]:  # fmt: skip
    """Time the functions in turn, `rounds` times, after a warm-up. Returns name -> Timing.

    >>> sorted(interleave({"a": lambda: None, "b": lambda: None}, "cpu", rounds=2, sample_ms=0))
    ['a', 'b']

    Each sample repeats its function for about `sample_ms`, so that launch gaps and the clock's resolution do not
    matter. flush: before each call, overwrite a buffer larger than a GPU's L2, so that inputs are not cached. warm_up:
    calls before the timing. The last one determines the number of calls in a sample; with 0, a sample is one call.
    goes_on: called after each sample; False ends the timing. The first round is always complete.
    """
    sampler = _Gpu(torch.device(device), flush) if torch.device(device).type == "cuda" else _Cpu()
    calls = {name: _warm_up(function, sampler, sample_ms, warm_up) for name, function in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    more = True
    for n in range(rounds):
        random.Random(n).shuffle(order)
        for name in order:
            if more or not n:
                samples[name].append(sampler.sample(functions[name], calls[name]))
                more = goes_on()
    return {name: Timing.of(times) for name, times in samples.items()}


def _warm_up(function: Function, sampler: _Cpu | _Gpu, sample_ms: float, count: int) -> int:
    """Warm up; returns the number of calls in a sample."""
    for _ in range(count - 1):
        function()
    if not count:
        return 1
    return calls_per_sample(sampler.sample(function, 1), sample_ms)


def calls_per_sample(once_ms: float, sample_ms: float) -> int:
    """
    >>> calls_per_sample(0.3, 1.0), calls_per_sample(50.0, 20.0), calls_per_sample(0.0, 20.0)
    (4, 1, 1000)
    """
    return min(_MOST_CALLS, max(1, math.ceil(sample_ms / max(once_ms, 1e-6))))


class _Cpu:
    def sample(self, function: Function, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) * 1e3 / calls


class _Gpu:
    """Time with CUDA events on the current stream of `device`."""

    def __init__(self, device: torch.device, flush: bool):
        self.device = device
        self.scratch = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if flush else None

    def sample(self, function: Function, calls: int) -> float:
        with torch.cuda.device(self.device):
            repeats, inner = (1, calls) if self.scratch is None else (calls, 1)
            if self.scratch is None:
                function()  # untimed: after a pause the first launch of a backward takes 0.5 to 0.7 ms on the host
            events = [self._one(function, inner) for _ in range(repeats)]
            torch.cuda.synchronize()
            return sum(start.elapsed_time(stop) for start, stop in events) / calls

    def _one(self, function: Function, calls: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.scratch is not None:
            self.scratch.zero_()
        start.record()
        for _ in range(calls):
            function()
        stop.record()
        return start, stop


def as_graph(function: Function) -> Function:
    """Capture `function` in a CUDA graph. Returns a function that replays it, so that timing excludes host time.

    Call this under `torch.cuda.stream(side_stream)`, with the stream on which the function's tensors were made:
    autograd runs a backward on the stream of its forward, and a graph captures one stream.
    """
    for _ in range(_WARM_UP_CALLS):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        function()

    def replay(kept: Function = function) -> None:  # keeps tensors alive that the graph reads
        graph.replay()

    return replay
