"""The interface of a kernel, and the buffers that it declares and `ops` allocates."""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import BROKEN, KernelFault, describe
from ..problem.append import AppendProblem
from ..problem.call import Dense, accumulator
from ..problem.decode import DecodeProblem
from ..problem.mask import MaskStructure
from ..problem.problem import Problem
from ..problem.target import Target

NUMBERS = count(1)  # of plans


class Buffer(NamedTuple):
    """Workspace that a kernel declares: `ops` allocates it from torch's allocator, and the launch sequence fills it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None = None  # None: uninitialised


class Cost(NamedTuple):
    flops: float
    moved_bytes: float  # each input read once, each output written once

    def ceiling_ms(self, target: Target) -> tuple[float, str]:
        """(least time on `target`, what limits it), or (0, reason) if the target's peak rates are unknown."""
        if not target.peak_tflops:
            return 0.0, "this target's peak rates are not known"
        compute_ms, memory_ms = self.flops / target.peak_tflops / 1e9, self.moved_bytes / target.peak_gbps / 1e6
        return max((compute_ms, "compute-bound"), (memory_ms, "memory-bound"))


class Forward(NamedTuple):
    """Outputs of a forward: out [B, S_q, H_q, D_v] or [T, H_q, D_v] with any strides; lse [B, H_q, S_q] or [H_q, T]."""

    out: Tensor
    lse: Tensor


class Backward(NamedTuple):
    """Inputs of a backward kernel beside the call (dout, out, lse, dlse), and its outputs (dq, dk, dv, delta).

    delta [B, H_q, S_q] or [H_q, T] is rowsum(dout * out) - dlse in lse's dtype. Every kernel writes it, because the
    gradient of the sinks is computed from it.
    """

    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor


class Kernel(Protocol):
    """A kernel: its name, why it cannot run a problem, its config, its cost, its workspace, and how to run it.

    The problem is a Problem (forward, backward), DecodeProblem or AppendProblem, and the call is of the same kind.
    """

    name: str

    def why_not(self, problem: Any, target: Target) -> str | None:
        """None if it can run the problem, else the reason in words that a user can act on."""
        ...

    def config(self, problem: Any, target: Target) -> Any:
        """The frozen config for the problem: looked up, never timed."""
        ...

    def cost(self, problem: Any) -> Cost: ...

    def workspace(self, problem: Any, config: Any) -> tuple[Buffer, ...]: ...

    def run(self, plan: Plan, call: Any, tensors: Any, workspace: dict[str, Tensor]) -> None: ...


class Plan(NamedTuple):
    """A kernel selected for a problem, with its config: what `run` gets."""

    kernel: Kernel
    problem: Any  # the Problem, DecodeProblem or AppendProblem
    target: Target
    config: Any  # the kernel's own type
    buffers: tuple[Buffer, ...]
    room: int = 0  # bytes of uninitialised workspace, allocated as one piece
    filled: tuple[Buffer, ...] = ()  # workspace that is filled
    replays: bool = True  # False: kernels get copies of the call's tensors, so its addresses do not identify a launch
    number: int = 0  # identifies the plan in the LaunchCache of this process

    def __hash__(self) -> int:
        return hash(self[:-1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self[:-1] == other[:-1]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def changed(self, **fields: Any) -> Plan:
        """A plan with other fields, whose launches are cached apart."""
        return self._replace(number=next(NUMBERS), **fields)


def against_mods(problem: Any) -> str | None:
    """Why a kernel without hooks for custom scores and masks cannot run a problem, or None."""
    return None if getattr(problem, "mods", None) is None else "runs no score_mod or mask_mod"


def entries(problem: Problem) -> int:
    """Batch entries that the grid enumerates. For packed sequences 1, since programs find their sequence themselves."""
    return 1 if problem.packed else problem.layout.batch


def fills_tiles(problem: Problem, block_n: int) -> bool:
    """Whether the keys of a dense problem fill whole tiles of block_n, so that no tile ends beyond them."""
    return isinstance(problem.layout, Dense) and problem.layout.seqlen_k % block_n == 0


def strides_of(tensor: Tensor, problem: Problem) -> tuple[int, ...]:
    """(batch, row, head) strides in elements. A packed tensor is one batch entry."""
    return (0, *tensor.stride()[:2]) if problem.packed else tensor.stride()[:3]


def away_from_0(value: float, dtype: torch.dtype) -> float:
    """A scale or cap, at least the smallest normal number of the dtype's accumulator unless it is 0. Rounded to 0, it
    would make NaN of a masked score of -inf.

    >>> away_from_0(-1e-60, torch.bfloat16) == -(2.0**-126), away_from_0(1e-60, torch.float64)
    (True, 1e-60)
    """
    least = torch.finfo(accumulator(dtype)).tiny
    return math.copysign(least, value) if 0 < abs(value) < least else value


@lru_cache
def no_triton() -> str | None:
    """Why Triton and Gluon kernels cannot run here, or None. Raises KernelFault if importing Triton fails."""
    if find_spec("triton") is None:
        remedy = "pip install triton" if sys.platform == "linux" else "it is published for Linux; on Windows use WSL"
        return f"needs Triton, which is not installed: {remedy}"
    try:
        version = import_module("triton").__version__
        parts = tuple(int(part) for part in version.split(".")[:2])
    except BROKEN as error:  # a missing library, a build for another Python, or another folder named triton
        cause = f"{type(error).__name__}: {error}"
        raise KernelFault(
            describe("import triton", cause, "Triton 3.6 or later", "install the one this PyTorch was released with")
        ) from error
    return f"needs Triton 3.6 or later; this is {version}" if parts < (3, 6) else None


@lru_cache
def launches_clusters() -> bool:
    """Whether this version of Triton supports `launcher.in_clusters`, which relies on its launcher's source."""
    return import_module("triton").__version__.startswith(("3.6", "3.7", "3.9"))


def visible_pairs(problem: Problem) -> float:
    """Query-key pairs that the mask's band admits over the batch. Exact for dense layouts; an upper bound if lengths or
    ids are on the device.
    """
    batch, (rows, keys) = problem.layout.batch, problem.layout.tokens
    # packed: as if all sequences had the same length
    return batch * _band_pairs(rows / batch, keys / batch, problem) if batch else 0.0


def keys_a_row(problem: Problem) -> float:
    """Average number of keys per query. Packed sequences count as equally long."""
    rows = problem.layout.tokens[0]
    return visible_pairs(problem) / rows if rows else 0.0


def _band_pairs(rows: float, keys: float, problem: Problem) -> float:
    mask: MaskStructure = problem.mask
    shift = keys - rows
    hidden = 0.0
    if mask.right and not mask.prefix:  # masked keys beyond d + right
        hidden += _ramp(rows, keys, keys - shift - problem.right - 1)
    if mask.left:  # masked keys before d - left: the same triangle from the other end
        hidden += _ramp(rows, keys, rows - 1 + shift - problem.left)
    return max(0.0, rows * keys - hidden)


def _ramp(rows: float, keys: float, first: float) -> float:
    """Sum over i in [0, rows) of clamp(first - i, 0, keys): the pairs masked by one limit of a band."""

    def triangle(n: float) -> float:
        return n * (n + 1) / 2 if n > 0 else 0.0

    return triangle(first) - triangle(first - rows) - triangle(first - keys) + triangle(first - keys - rows)


def attention_cost(problem: Problem, backward: bool = False) -> Cost:
    """FLOPs of the products over visible pairs (2 forward, 5 backward) and the bytes of inputs and outputs."""
    pairs = visible_pairs(problem) * problem.heads_q
    width, width_v = problem.head_dim, problem.head_dim_v
    rows, keys = problem.layout.tokens
    itemsize = problem.dtype.itemsize
    moved = (rows * problem.heads_q + keys * problem.heads_kv) * (
        width + width_v
    ) * itemsize + 4 * rows * problem.heads_q
    if backward:
        return Cost(2 * pairs * (3 * width + 2 * width_v), 2 * moved + rows * problem.heads_q * width_v * itemsize)
    return Cost(2 * pairs * (width + width_v), moved)


def decode_cost(problem: DecodeProblem) -> Cost:
    """Cost with all sequences full, since lengths are on the device: keys, values, q and out read or written once."""
    layout, width = problem.layout, problem.head_dim + problem.head_dim_v
    rows, keys = layout.batch * layout.seqlen_q * problem.heads_q, layout.batch * problem.capacity * problem.heads_kv
    moved = keys * width * problem.cache_dtype.itemsize + rows * (
        problem.head_dim * problem.dtype.itemsize + problem.head_dim_v * problem.out_dtype.itemsize
    )
    return Cost(2.0 * rows * problem.capacity * width, moved)


def append_cost(problem: AppendProblem) -> Cost:
    width = problem.head_dim + problem.head_dim_v
    elements = problem.tokens * problem.heads_kv * width
    return Cost(0.0, elements * (problem.dtype.itemsize + problem.cache_dtype.itemsize))
