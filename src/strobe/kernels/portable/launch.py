"""From a Plan and a Call to the kernels' arguments and their launch."""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
from torch import Tensor

from ...errors import KernelFault
from ...problem import ALIGNMENT, Call, Packed, Problem
from .. import faults
from ..kernel import Backward, Forward, Plan
from . import backward, forward

LOG2E = 1.4426950408889634
DELTA_ROWS = 64


def numbers_of(problem: Problem) -> tuple[tuple[float, float, float], ...]:
    """(scale_log2, softcap, factor). The raw score is q k^T, or tanh(softcap * q k^T) where the call caps scores at c; it is worth
    scale_log2 in log2 units. The scale's sign is folded into q, so these are positive; a scale of 0 makes q itself 0."""
    scale = abs(problem.scale) or 1.0
    cap = problem.softcap
    return tuple(_parts(x) for x in ((cap * LOG2E, scale / cap, scale) if cap else (scale * LOG2E, 0.0, scale)))


def _parts(value: float) -> tuple[float, float, float]:
    """Three float32 whose sum is the float64 `value`."""
    first = _float32(value)
    second = _float32(value - first)
    return first, second, _float32(value - first - second)


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def launch_forward(plan: Plan, call: Call, tensors: Forward) -> None:
    form: Any = plan.config.form  # type: ignore[attr-defined]
    problem = plan.problem
    sizes = _sizes(problem, form.tuning.block_m)
    strides = tuple(_strides(t, problem) for t in (call.q, call.k, call.v, tensors.out))
    limits = (call.left, call.right, call.max_seqlen_q, call.max_seqlen_k)
    arguments = (
        (call.q, call.k, call.v, tensors.out, tensors.lse, call.sinks), _mask_tensors(call, call.spans_q), faults.word(call.q.device),
        strides, sizes, limits, numbers_of(problem)[:2], form,
    )  # fmt: skip
    _start(forward.forward_kernel, sizes[4] * problem.heads_q * _entries(problem), arguments, form.tuning)


def launch_backward(plan: Plan, call: Call, t: Backward) -> None:
    forms: Any = plan.config
    problem = plan.problem
    word = faults.word(call.q.device)
    rows = t.lse.shape[-1]
    form = forms.queries
    dout = _operand(t.dout, call)
    of = {name: _strides(x, problem) for name, x in t._asdict().items() if x is not None and name in ("dout", "out", "dq", "dk", "dv")}
    q, k, v = (_strides(x, problem) for x in call[:3])
    tiles = -(-rows // DELTA_ROWS)
    arguments = ((t.dout, t.out, t.dlse, t.delta), (of["dout"], of["out"]), (problem.heads_q, rows), form, DELTA_ROWS)
    _start(backward.delta_kernel, tiles * problem.heads_q * _entries(problem), arguments, None)
    limits, numbers = (call.left, call.right), numbers_of(problem)
    read = (call.q, call.k, call.v, dout, t.lse, t.delta)
    do = _strides(dout, problem)
    strides = (q, k, v, do, of["dk"], of["dv"])
    sizes = _sizes(problem, forms.keys.tuning.block_n, of_keys=True)
    arguments = ((*read, t.dk, t.dv), _mask_tensors(call, call.spans_k), word, strides, sizes, limits, numbers, forms.keys)
    _start(backward.keys_kernel, sizes[4] * problem.heads_kv * _entries(problem), arguments, forms.keys.tuning)
    sizes = _sizes(problem, form.tuning.block_m)
    arguments = ((*read, t.dq), _mask_tensors(call, call.spans_q), word, (q, k, v, do, of["dq"]), sizes, limits, numbers, form)
    _start(backward.queries_kernel, sizes[4] * problem.heads_q * _entries(problem), arguments, form.tuning)


def _operand(dout: Tensor, call: Call) -> Tensor:
    """dout as the products take it: in q's dtype and with rows that TMA can address; a copy where it is not so."""
    aligned = all(stride * dout.element_size() % ALIGNMENT == 0 and stride > 0 for stride in dout.stride()[:-1])
    if dout.dtype == call.q.dtype and aligned and dout.data_ptr() % ALIGNMENT == 0:
        return dout
    return torch.empty(dout.shape, dtype=call.q.dtype, device=dout.device).copy_(dout)


def _start(kernel: Any, programs: int, arguments: tuple, tuning: Any) -> None:
    options = {} if tuning is None else {"num_warps": tuning.warps, "num_stages": tuning.stages}
    if programs >= 2**31:
        raise KernelFault(f"{kernel.fn.__name__}: {programs} programs are more than one launch can hold; split the batch")
    if tuning is not None and tuning.tma:
        triton.set_allocator(_descriptor_memory)
    kernel[(programs,)](*arguments, **options)


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where programs write the TMA descriptors they make; torch's allocator, so that graphs capture it."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _entries(problem: Problem) -> int:
    """Batch entries that a grid counts one by one; packed sequences are found by the programs themselves."""
    return 1 if problem.packed else problem.layout.batch


def _strides(tensor: Tensor, problem: Problem) -> tuple[int, ...]:
    """(batch, row, head) in elements; a packed tensor is one batch entry."""
    return (0, *tensor.stride()[:2]) if problem.packed else tensor.stride()[:3]


def _sizes(problem: Problem, block: int, of_keys: bool = False) -> tuple[int, int, int, int, int]:
    """(heads_q, S_q or T_q, S_k or T_k, sequences, tiles of `block` rows, or keys, a head)."""
    layout: Any = problem.layout
    if isinstance(layout, Packed):
        total = layout.total_k if of_keys else layout.total_q
        return problem.heads_q, layout.total_q, layout.total_k, layout.batch, total // block + layout.batch + 2
    length = layout.seqlen_k if of_keys else layout.seqlen_q
    return problem.heads_q, layout.seqlen_q, layout.seqlen_k, layout.batch, -(-length // block)


def _mask_tensors(call: Call, spans: Tensor | None) -> tuple[Tensor | None, ...]:
    return (call.cu_seqlens_q, call.cu_seqlens_k, call.prefix, call.key_lengths, call.ids_k, call.ids_q, spans)
