"""From a Plan and a Call to the Hopper kernels' arguments and their launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import Call
from ...errors import KernelFault
from ...problem import ALIGNMENT, Problem
from .. import faults, relaunch
from ..counters import zeros_on
from ..device.dialect import TensorDescriptor, gl
from ..kernel import Forward, Plan, addresses
from . import forward
from .config import MOST_ROWS, ROWS, query_tiles

LOG2_E = 1.4426950408889634
L2_BYTES = 32 << 20  # of keys and values that stay while a section of heads is walked; an H200 has 50 MB
SHORT_TILES = 8  # row tiles a head, up to which sections pay: causal d128 at 1k 423 TFLOP/s for 378 without, d192 at 8k 574 for 615 (H200)
MOST_TILES = 2**31  # a tile's number is an int32
WRAP = 2**34  # elements: MOST_ROWS steps of this come back to where they began, modulo 2**64 bytes
MOST_STEPS = 0x7FFF0000  # a dimension without an end of its own
MOST_AGAIN = 512  # launches a plan keeps: more than a model has layers
DTYPES = {"torch.float16": gl.float16, "torch.bfloat16": gl.bfloat16, "torch.float32": gl.float32}


class Launch(NamedTuple):
    kernel: Any
    programs: int
    arguments: tuple
    options: dict[str, int]

    def start(self) -> Any:
        """The compiled kernel; None where the launch is simulated or only noted."""
        return self.kernel[(self.programs,)](*self.arguments, **self.options)


def run_forward(plan: Plan, call: Call, tensors: Forward) -> None:
    form: Any = plan.config.form  # type: ignore[attr-defined]
    out = addressable(tensors.out)
    word = faults.word(call.q.device) if form.packed else None
    counter = zeros_on(call.q.device, 1) if form.counted else None
    pointers = (tensors.lse, call.sinks, call.cu_seqlens_q, call.cu_seqlens_k, word, counter)
    key = (call.left, call.right, out.stride())
    again = relaunch.start(plan, key, (call.q, call.k, call.v, out, *pointers), lambda: forward_launch(plan, call, out, pointers))
    if out is not tensors.out:
        tensors.out.copy_(out)
    elif again is not None and out.is_contiguous():
        _keep(plan, addresses(call, *tensors), again.here() if form.counted else again)


def _keep(plan: Plan, place: tuple[int, ...], again: relaunch.Noted | None) -> None:
    if again is None or plan.again is None:
        return
    if len(plan.again) >= MOST_AGAIN:
        plan.again.clear()
    plan.again[place] = again


def forward_launch(plan: Plan, call: Call, out: Tensor, pointers: tuple[Tensor | None, ...]) -> Launch:
    form: Any = plan.config.form  # type: ignore[attr-defined]
    problem = plan.problem
    layout: Any = problem.layout
    tuning, heads = form.tuning, problem.heads_q
    tiles_m = query_tiles(problem, tuning.block_m)
    section = batch_heads = layout.batch * heads
    if form.packed:
        lengths, whole = layout.tokens, heads * tiles_m
    else:
        lengths = layout[1:]
        if problem.mask.right and not problem.mask.left and tiles_m <= SHORT_TILES:
            a_head = layout.seqlen_k * (form.block_d + form.block_dv) * call.k.element_size()
            section = min(section, max(1, L2_BYTES // max(1, a_head)) * problem.group)
        whole = -(-batch_heads // section) * section * tiles_m  # the last section may hold tiles that are none
    if whole >= MOST_TILES:
        raise KernelFault(f"{plan.kernel.name}: {whole} tiles of {tuning.block_m} queries are more than a launch can count; split the batch")
    programs = min(plan.target.sm_count, whole)
    sizes = (layout.batch, heads, *lengths, tiles_m, section)
    limits = (call.left, call.right, call.max_seqlen_q, call.max_seqlen_k)
    work = (whole, sizes, limits, numbers_of(problem))
    registers = 168 if tuning.consumers == 2 else 128
    arguments = (*descriptors(call, out, form), pointers, work, form)
    return Launch(forward.forward_kernel, programs, arguments, {"num_warps": 4, "maxnreg": registers})


def numbers_of(problem: Problem) -> tuple[float, float]:
    """(scale_log2, softcap): the raw score is q k^T, or tanh(softcap * q k^T) where the call caps scores; it is worth scale_log2 in log2 units."""
    cap = problem.softcap
    return (cap * LOG2_E, problem.scale / cap) if cap else (problem.scale * LOG2_E, 0.0)


def descriptors(call: Call, out: Tensor, form: Any) -> tuple[TensorDescriptor | None, ...]:
    """q, k, v and out in tiles of their first columns, then in tiles of the rest."""
    tiles = ((call.q, ROWS, form.block_d, form.rest_d), (call.k, form.tuning.block_n, form.block_d, form.rest_d),
             (call.v, form.tuning.block_n, form.block_dv, form.rest_dv), (out, ROWS, form.block_dv, form.rest_dv))  # fmt: skip
    narrow = (1, 1, 1, 2 if form.tuning.half_staged else 1)
    first = (descriptor(tensor, rows, (width - rest) // n) for (tensor, rows, width, rest), n in zip(tiles, narrow))
    return *first, *(descriptor(tensor, rows, rest) if rest else None for tensor, rows, _, rest in tiles)


def addressable(out: Tensor) -> Tensor:
    """`out` itself where TMA can write to it, else a tensor like it, whose rows begin at multiples of 16 bytes."""
    itemsize, bits = out.element_size(), out.data_ptr()
    for stride in out.stride()[:-1]:
        bits |= stride * itemsize
    if bits % ALIGNMENT == 0:
        return out
    whole = -(-out.shape[-1] * itemsize // ALIGNMENT) * ALIGNMENT // itemsize
    return torch.empty((*out.shape[:-1], whole), dtype=out.dtype, device=out.device)[..., : out.shape[-1]]


def descriptor(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    """TMA's view of [B, S, H, D] as [B, H, S, D], or of packed [T, H, D] as forward.copy_in wants it, moved in tiles of one head's rows."""
    if tensor.dim() == 4:
        b, s, h, d = tensor.stride()
        batch, length, heads, size = tensor.shape
        shape, strides, ones = [batch, heads, length, size], [b, h, s, d], [1, 1]
    else:
        s, h, d = tensor.stride()
        _, heads, size = tensor.shape
        shape, strides, ones = [MOST_STEPS, MOST_STEPS, heads, MOST_ROWS, size], [WRAP - s, s, h, s, d], [1, 1, 1]
    layout: Any = gl.NVMMASharedLayout.get_default_for([*ones, rows, width], DTYPES[str(tensor.dtype)])
    return TensorDescriptor(tensor, shape, strides, [*ones, rows, width], layout)
