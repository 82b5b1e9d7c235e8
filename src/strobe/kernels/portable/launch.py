"""Arguments and launches of the portable forward and backward, from a Plan and a Call."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...errors import KernelFault
from ...problem.call import Call
from ...problem.problem import ALIGNMENT, Packed, Problem
from ..protocol import Backward, Forward, Plan, entries, strides_of
from ..runtime import batch_invariant as shared
from ..runtime import error_flags
from ..runtime.compile_cache import hash_callees_first
from . import backward, batch_invariant, forward
from .heuristics import Tuning

LOG2E = 1.4426950408889634
DELTA_ROWS = 64
MOST_PROGRAMS = 2**31  # in the first grid dimension, the only one used here


def softmax_parameters(problem: Problem) -> tuple[tuple[float, float, float], ...]:
    """(scale_log2, softcap, factor), each as three float32.

    A raw score is q k^T, or tanh(softcap * q k^T) with a cap; times scale_log2 it is in log2 units. factor is |scale|.
    The scale's sign is folded into q, so all three are positive. A scale of 0 makes q itself 0.
    """
    scale = abs(problem.scale) or 1.0
    cap = problem.softcap
    return tuple(parts(x) for x in ((cap * LOG2E, scale / cap, scale) if cap else (scale * LOG2E, 0.0, scale)))


def parts(value: float) -> tuple[float, float, float]:
    """Three float32 whose sum is the float64 `value`."""
    first = _float32(value)
    second = _float32(value - first)
    return first, second, _float32(value - first - second)


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


class Launch(NamedTuple):
    """A kernel with its grid, arguments and Triton options."""

    kernel: Any
    programs: int
    arguments: tuple
    options: dict[str, int]
    tma: bool = False

    def start(self) -> Any:
        """Launch. Returns the compiled kernel, or None if the launch is interpreted, simulated or recorded."""
        if self.programs >= MOST_PROGRAMS:
            raise KernelFault(
                f"{self.kernel.fn.__name__}: {self.programs} programs are more than a launch can hold; split the batch"
            )
        if self.tma:
            triton.set_allocator(_descriptor_memory)
        hash_callees_first(self.kernel)
        return self.kernel[(self.programs,)](*self.arguments, **self.options)


def forward_launches(plan: Plan, call: Call, tensors: Forward) -> list[Launch]:
    form = plan.config.form
    problem = plan.problem
    sizes = _sizes(problem, form.tuning.block_m)
    strides = tuple(strides_of(t, problem) for t in (call.q, call.k, call.v, tensors.out))
    limits = (call.left, call.right, call.max_seqlen_q, call.max_seqlen_k)
    arguments = (
        (call.q, call.k, call.v, tensors.out, tensors.lse, call.sinks),
        _mask_tensors(call, call.spans_q),
        error_flags.word(call.q.device),
        strides,
        sizes,
        limits,
        softmax_parameters(problem)[:2],
        form,
    )
    return [_launch(forward.forward_kernel, sizes[4] * problem.heads_q * entries(problem), arguments, form.tuning)]


def invariant_launch(plan: Plan, call: Call, tensors: Forward) -> Launch:
    """A forward that gives each row the bits of its decode."""
    form = plan.config.form
    problem = plan.problem
    strides = tuple(strides_of(t, problem) for t in (call.q, call.k, call.v, tensors.out))
    limits = (call.left, call.right, call.max_seqlen_q, call.max_seqlen_k)
    arguments = (
        (call.q, call.k, call.v, tensors.out, tensors.lse, call.sinks),
        (call.cu_seqlens_q, call.cu_seqlens_k),
        error_flags.word(call.q.device),
        strides,
        shared.sizes_of(problem, form.block_m),
        limits,
        softmax_parameters(problem)[:2],
        form,
    )
    options = {"num_warps": form.warps, "num_stages": form.stages}
    return Launch(batch_invariant.invariant_kernel, shared.programs(problem, form.block_m), arguments, options)


def backward_launches(plan: Plan, call: Call, t: Backward) -> list[Launch]:
    """The launch of delta, then those of dk and dv, and of dq, which are independent of each other."""
    forms = plan.config
    problem = plan.problem
    dout = _operand(t.dout, call)
    strides = {
        name: strides_of(x, problem)
        for name, x in (("dout", t.dout), ("out", t.out), ("do", dout), ("dq", t.dq), ("dk", t.dk), ("dv", t.dv))
    }
    q, k, v = (strides_of(x, problem) for x in call[:3])
    limits, numbers, word = (call.left, call.right), softmax_parameters(problem), error_flags.word(call.q.device)
    read = (call.q, call.k, call.v, dout, t.lse, t.delta)
    rows = t.lse.shape[-1]
    delta = (
        (t.dout, t.out, t.dlse, t.delta),
        (strides["dout"], strides["out"]),
        (problem.heads_q, rows),
        forms.queries,
        DELTA_ROWS,
    )
    sizes_k = _sizes(problem, forms.keys.tuning.block_n, of_keys=True)
    sizes_q = _sizes(problem, forms.queries.tuning.block_m)
    keys = (
        (*read, t.dk, t.dv),
        _mask_tensors(call, call.spans_k),
        word,
        (q, k, v, strides["do"], strides["dk"], strides["dv"]),
        sizes_k,
        limits,
        numbers,
        forms.keys,
    )
    queries = (
        (*read, t.dq),
        _mask_tensors(call, call.spans_q),
        word,
        (q, k, v, strides["do"], strides["dq"]),
        sizes_q,
        limits,
        numbers,
        forms.queries,
    )
    batch = entries(problem)
    return [
        Launch(backward.delta_kernel, -(-rows // DELTA_ROWS) * problem.heads_q * batch, delta, {}),
        _launch(backward.keys_kernel, sizes_k[4] * problem.heads_kv * batch, keys, forms.keys.tuning),
        _launch(backward.queries_kernel, sizes_q[4] * problem.heads_q * batch, queries, forms.queries.tuning),
    ]


def start(launches: list[Launch]) -> None:
    for launch in launches:
        launch.start()


def _launch(kernel: Any, programs: int, arguments: tuple, tuning: Tuning) -> Launch:
    return Launch(kernel, programs, arguments, {"num_warps": tuning.warps, "num_stages": tuning.stages}, tuning.tma)


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for TMA descriptors that programs create, from torch's allocator, so that graphs capture it."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _operand(dout: Tensor, call: Call) -> Tensor:
    """dout in q's dtype with strides that TMA can address, copied only if necessary."""
    aligned = all(stride * dout.element_size() % ALIGNMENT == 0 and stride > 0 for stride in dout.stride()[:-1])
    if dout.dtype == call.q.dtype and aligned and dout.data_ptr() % ALIGNMENT == 0:
        return dout
    return torch.empty(dout.shape, dtype=call.q.dtype, device=dout.device).copy_(dout)


def _sizes(problem: Problem, block: int, of_keys: bool = False) -> tuple[int, int, int, int, int]:
    """(heads_q, S_q or T_q, S_k or T_k, sequences, tiles per head of `block` rows, or of keys)."""
    layout: Any = problem.layout
    if isinstance(layout, Packed):
        total = layout.total_k if of_keys else layout.total_q
        return problem.heads_q, layout.total_q, layout.total_k, layout.batch, total // block + layout.batch + 2
    length = layout.seqlen_k if of_keys else layout.seqlen_q
    return problem.heads_q, layout.seqlen_q, layout.seqlen_k, layout.batch, -(-length // block)


def _mask_tensors(call: Call, spans: Tensor | None) -> tuple[Tensor | None, ...]:
    return (call.cu_seqlens_q, call.cu_seqlens_k, call.prefix, call.key_lengths, call.ids_k, call.ids_q, spans)
