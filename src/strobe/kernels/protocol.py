"""What a kernel is: five answers. And what it needs beside its inputs: buffers it declares and never allocates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import BROKEN, KernelFault, describe
from ..problem.append import AppendProblem
from ..problem.decode import DecodeProblem
from ..problem.mask import MaskStructure
from ..problem.problem import Call, Problem
from ..problem.target import Target

MOST_AGAIN = 512  # launches a plan keeps: more than a model has layers
MOST_KEPT = 1 << 14  # of all plans together, up to 7 KB each: 115 MB where lengths change with each step

_keeping: dict[int, dict] = {}  # what plans keep since all was let go, by id
_kept = count()


class Buffer(NamedTuple):
    """Scratch a kernel asks for: allocated by `ops` from torch's allocator, filled inside the launch sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None = None  # None: left as it comes


class Cost(NamedTuple):
    flops: float
    moved_bytes: float  # each input read once, each output written once

    def ceiling_ms(self, target: Target) -> tuple[float, str]:
        """The least time on `target` and what sets it; (0, reason) where the target's peaks are unknown."""
        if not target.peak_tflops:
            return 0.0, "this target's peak rates are not known"
        compute_ms, memory_ms = self.flops / target.peak_tflops / 1e9, self.moved_bytes / target.peak_gbps / 1e6
        return max((compute_ms, "compute-bound"), (memory_ms, "memory-bound"))


class Forward(NamedTuple):
    """Where a forward kernel writes: out [B, S_q, H_q, D_v] or [T, H_q, D_v], any strides; lse [B, H_q, S_q] or [H_q,
    T].
    """

    out: Tensor
    lse: Tensor


class Backward(NamedTuple):
    """What a backward kernel reads beside the call (dout, out, lse, dlse) and where it writes (dq, dk, dv, delta).

    delta [B, H_q, S_q] or [H_q, T] is rowsum(dout * out) - dlse in lse's dtype: written by every kernel, because the
    gradient of the sinks is made of it.
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
    """The five answers: its name, why it cannot run a problem, its config, its cost, and running it.

    A problem is a Problem (forward, backward), DecodeProblem or AppendProblem, and the call is of its kind.
    """

    name: str

    def why_not(self, problem: Any, target: Target) -> str | None:
        """None if it can run, else the reason, in words a user can act on."""
        ...

    def config(self, problem: Any, target: Target) -> Any:
        """The frozen config this kernel runs the problem with: looked up, never timed."""
        ...

    def cost(self, problem: Any) -> Cost: ...

    def workspace(self, problem: Any, config: Any) -> tuple[Buffer, ...]: ...

    def run(self, plan: Plan, call: Any, tensors: Any, workspace: dict[str, Tensor]) -> None: ...


class Plan(NamedTuple):
    """One kernel decided for one problem: what `run` is given."""

    kernel: Kernel
    problem: Any  # the Problem, DecodeProblem or AppendProblem
    target: Target
    config: Any  # of the kernel's own kind
    buffers: tuple[Buffer, ...]
    room: int = 0  # bytes of scratch that is left as it comes, in one piece
    filled: tuple[Buffer, ...] = ()  # the scratch that is not
    again: dict[tuple, Callable[[], bool]] | None = (
        None  # by `addresses`: launches the kernel as it was launched there, or refuses to
    )

    def __hash__(self) -> int:
        return hash(self[:-1])


def entries(problem: Problem) -> int:
    """Batch entries that a grid counts one by one; packed sequences are found by the programs themselves."""
    return 1 if problem.packed else problem.layout.batch


def strides_of(tensor: Tensor, problem: Problem) -> tuple[int, ...]:
    """(batch, row, head) in elements; a packed tensor is one batch entry."""
    return (0, *tensor.stride()[:2]) if problem.packed else tensor.stride()[:3]


def addresses(call: Call, out: Tensor, lse: Tensor) -> tuple[int, ...]:
    """All that tells apart two calls of a plan whose outputs `ops` allocates."""
    held = (call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr(), out.data_ptr(), lse.data_ptr())
    return held if call.plain else (*held, *(0 if t is None else t.data_ptr() for t in call.optionals))


def gradient_addresses(call: Call, t: Backward, scratch: Iterable[Tensor]) -> tuple:
    """The same of two calls whose gradients, delta and scratch `ops` allocates; dout and out come as they are."""
    held = (*call[:3], *t[:-1], *scratch, *(() if call.plain else call.optionals))
    return gradient_place(held, t.delta.data_ptr(), t.dout, t.out)


def gradient_place(held: Iterable[Tensor | None], delta: int, dout: Tensor, out: Tensor) -> tuple:
    """The same of delta's address and all else that such a call holds, in this order: q, k, v, the fields of Backward
    but delta, scratch, optional tensors.
    """
    return (
        *[0 if tensor is None else tensor.data_ptr() for tensor in held],
        delta,
        dout.stride(),
        dout.dtype,
        out.stride(),
    )


def keep(plan: Plan, place: tuple, again: Callable[[], bool] | None) -> None:
    """Let the plan's launch at these addresses be repeated without the kernel's own host code; None is not kept."""
    if again is None or plan.again is None:
        return
    if next(_kept) % MOST_KEPT == 0:
        for kept in list(_keeping.values()):
            kept.clear()
        _keeping.clear()
    if len(plan.again) >= MOST_AGAIN:
        plan.again.clear()
    plan.again[place] = again
    _keeping[id(plan.again)] = plan.again


@lru_cache
def no_triton() -> str | None:
    """Why kernels written in Triton or Gluon cannot run here; None where they can. KernelFault where Triton is
    installed but does not import.
    """
    if find_spec("triton") is None:
        remedy = "pip install triton" if sys.platform == "linux" else "it is published for Linux; on Windows use WSL"
        return f"needs Triton, which is not installed: {remedy}"
    try:
        version = import_module("triton").__version__
        parts = tuple(int(part) for part in version.split(".")[:2])
    except BROKEN as error:  # a library it needs is missing, it was built for another Python, or a folder has its name
        cause = f"{type(error).__name__}: {error}"
        raise KernelFault(
            describe("import triton", cause, "Triton 3.6 or later", "install the one this PyTorch was released with")
        ) from error
    return f"needs Triton 3.6 or later; this is {version}" if parts < (3, 6) else None


@lru_cache
def launches_clusters() -> bool:
    """Whether Triton is of a version whose launcher was read to run kernels in clusters as `launcher.in_clusters`
    asks."""
    return import_module("triton").__version__.startswith(("3.6", "3.7", "3.9"))


def visible_pairs(problem: Problem) -> float:
    """Query-key pairs the mask's band admits over the batch, exactly for dense layouts; an upper bound where lengths or
    ids live on the device.
    """
    batch, (rows, keys) = problem.layout.batch, problem.layout.tokens
    return (
        batch * _band_pairs(rows / batch, keys / batch, problem) if batch else 0.0
    )  # packed: as if all were of one length


def keys_a_row(problem: Problem) -> float:
    """Keys that a query sees, on average; of packed sequences as if all were of one length."""
    rows = problem.layout.tokens[0]
    return visible_pairs(problem) / rows if rows else 0.0


def _band_pairs(rows: float, keys: float, problem: Problem) -> float:
    mask: MaskStructure = problem.mask
    shift = keys - rows
    hidden = 0.0
    if mask.right and not mask.prefix:  # keys beyond d + right
        hidden += _ramp(rows, keys, keys - shift - problem.right - 1)
    if mask.left:  # keys before d - left: the same triangle seen from the other end
        hidden += _ramp(rows, keys, rows - 1 + shift - problem.left)
    return max(0.0, rows * keys - hidden)


def _ramp(rows: float, keys: float, first: float) -> float:
    """Sum over i in [0, rows) of clamp(first - i, 0, keys): what one edge of a band hides."""

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
    """As if every sequence were full: lengths are the device's. Its keys and values read once, each row of q and out
    once.
    """
    layout, width = problem.layout, problem.head_dim + problem.head_dim_v
    rows, keys = layout.batch * layout.seqlen_q * problem.heads_q, layout.batch * problem.capacity * problem.heads_kv
    moved = keys * width * problem.cache_dtype.itemsize + rows * (
        problem.head_dim * problem.dtype.itemsize + problem.head_dim_v * problem.out_dtype.itemsize
    )
    return Cost(2.0 * rows * problem.capacity * width, moved)


def append_cost(problem: AppendProblem) -> Cost:
    layout, width = problem.layout, problem.head_dim + problem.head_dim_v
    elements = layout.batch * layout.seqlen_q * problem.heads_kv * width
    return Cost(0.0, elements * (problem.dtype.itemsize + problem.cache_dtype.itemsize))
