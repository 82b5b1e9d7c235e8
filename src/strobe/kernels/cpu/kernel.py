"""Attention on CPUs in torch ops: tiled, with every feature of the contract, never O(S_q * S_k) memory.

With `Config.path` "torch_flash", torch's CPU flash kernel computes the pieces it can express (documents, packed
sequences, whole batches; see flash.py), and tiles compute the rest. With "tiled", tiles compute all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...problem.append import AppendCall, AppendProblem
from ...problem.call import Call
from ...problem.decode import DecodeProblem
from ...problem.paged import PagedCall
from ...problem.problem import Dense, Problem
from ...problem.target import Target
from ..protocol import Backward, Buffer, Cost, Forward, Plan, append_cost, attention_cost, decode_cost
from . import append, backward, decode, flash, forward, paged
from .tiles import Config, wide

MOST_ELEMENTS = 1 << 19  # of a batched tile of scores: 2 MiB of float32, the L2 of one core
FIXED_TILE = (64, 256)  # batch_invariant: a constant, because it determines the bits


class _Cpu:
    name: str

    def why_not(self, problem: Problem | DecodeProblem | AppendProblem, target: Target) -> str | None:
        return None if target.kind == "cpu" else f"runs on CPUs; this target is {target.words}"


class CpuForward(_Cpu):
    name = "cpu.forward"

    def config(self, problem: Problem, target: Target) -> Config:
        # torch rounds out to q's dtype, which is too early for a sink or a partial result of 16-bit inputs
        return _config(
            problem, flash.why_not(problem) is None and not problem.sinks and problem.out_dtype == problem.dtype
        )

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem)

    def workspace(self, problem: Problem, config: Config) -> tuple[Buffer, ...]:
        return (_tile_buffer("scores", problem, config),)

    def run(self, plan: Plan, call: Call, tensors: Forward, workspace: dict[str, Tensor]) -> None:
        forward.run(plan, call, tensors, workspace)


class CpuBackward(_Cpu):
    name = "cpu.backward"

    def config(self, problem: Problem, target: Target) -> Config:
        return _config(problem, flash.why_not(problem) is None and problem.out_dtype == problem.dtype)

    def cost(self, problem: Problem) -> Cost:
        return attention_cost(problem, backward=True)

    def workspace(self, problem: Problem, config: Config) -> tuple[Buffer, ...]:
        return (_tile_buffer("tiles", problem, config, 2),)

    def run(self, plan: Plan, call: Call, tensors: Backward, workspace: dict[str, Tensor]) -> None:
        backward.run(plan, call, tensors, workspace)


class CpuDecode(_Cpu):
    name = "cpu.decode"

    def config(self, problem: DecodeProblem, target: Target) -> Config:
        if problem.batch_invariant:
            return Config("tiled", *FIXED_TILE, 1, fixed_tiles=True)
        block_m, block_n = max(1, min(64, problem.layout.seqlen_q)), max(1, min(1024, problem.capacity))
        return Config(
            "tiled",
            block_m,
            block_n,
            max(1, min(problem.heads_kv, MOST_ELEMENTS // (problem.group * block_m * block_n))),
        )

    def cost(self, problem: DecodeProblem) -> Cost:
        return decode_cost(problem)

    def workspace(self, problem: DecodeProblem, config: Config) -> tuple[Buffer, ...]:
        return (_tile_buffer("scores", problem, config),)

    def run(self, plan: Plan, call: Any, tensors: Forward, workspace: dict[str, Tensor]) -> None:
        decode.run(plan, call, tensors, workspace)


class CpuPaged(CpuDecode):
    name = "cpu.paged"

    def run(self, plan: Plan, call: PagedCall, tensors: Forward, workspace: dict[str, Tensor]) -> None:
        paged.run(plan, call, tensors, workspace)


class CpuAppend(_Cpu):
    name = "cpu.append"

    def config(self, problem: AppendProblem, target: Target) -> str:
        return "one indexed write"

    def cost(self, problem: AppendProblem) -> Cost:
        return append_cost(problem)

    def workspace(self, problem: AppendProblem, config: str) -> tuple[Buffer, ...]:
        return ()

    def run(self, plan: Plan, call: AppendCall, tensors: None, workspace: dict[str, Tensor]) -> None:
        append.run(plan, call, tensors, workspace)


def _config(problem: Problem, hand_off: bool) -> Config:
    """Tiles of 256 x 256, or 128 x 512 for windows of 256 keys, where each block of rows meets one tile. Query heads
    that share a key head share the rows.

    The window tile takes 53 ms, and 67 ms as 256 x 256 (float32, S = 4096, 8 heads, one AVX-512 thread, torch 2.13).
    """
    if problem.batch_invariant:
        return Config("tiled", *FIXED_TILE, 1, fixed_tiles=True)
    block_m, block_n = (128, 512) if problem.mask.left else (256, 256)
    block_m, batch = max(16, block_m // problem.group), 1
    if isinstance(problem.layout, Dense):
        batch, rows, keys = problem.layout
        block_m, block_n = max(1, min(block_m, rows)), max(1, min(block_n, keys))
    n_heads = max(1, min(batch * problem.heads_kv, MOST_ELEMENTS // (problem.group * block_m * block_n)))
    return Config("torch_flash" if hand_off else "tiled", block_m, block_n, n_heads)


def _tile_buffer(name: str, problem: Problem | DecodeProblem, config: Config, tiles: int = 1) -> Buffer:
    """Memory for tiles of scores, per worker. One worker with fixed tiles, whose bits must not depend on threads."""
    workers = 1 if config.fixed_tiles else torch.get_num_threads()
    return Buffer(name, (workers * tiles * config.tile_elements(problem.group),), wide(problem.dtype))


FORWARD, BACKWARD, DECODE, PAGED, APPEND = CpuForward(), CpuBackward(), CpuDecode(), CpuPaged(), CpuAppend()
