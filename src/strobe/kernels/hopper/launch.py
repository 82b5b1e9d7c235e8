"""From a Plan and a Call to the Hopper kernels' arguments and their launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import Call
from ...errors import KernelFault
from ...problem import ALIGNMENT
from ..device.dialect import TensorDescriptor, gl
from ..kernel import Forward, Plan
from . import forward, relaunch
from .config import ROWS

LOG2_E = 1.4426950408889634
L2_BYTES = 32 << 20  # of keys and values that stay while a section of heads is walked; an H200 has 50 MB
SHORT_TILES = 8  # row tiles a head, up to which sections pay: programs even out within one, and longer tiles leave them uneven at its end
MOST_TILES = 2**31  # a tile's number is an int32
DTYPES = {"torch.float16": gl.float16, "torch.bfloat16": gl.bfloat16}


class Launch(NamedTuple):
    kernel: Any
    programs: int
    arguments: tuple
    options: dict[str, int]

    def start(self) -> Any:
        """The compiled kernel; None where the launch is simulated or only noted."""
        return self.kernel[(self.programs,)](*self.arguments, **self.options)


def run_forward(plan: Plan, call: Call, tensors: Forward) -> None:
    out = addressable(tensors.out)
    key = (call.left, call.right, out.stride())
    relaunch.start(plan, key, (call.q, call.k, call.v, out), (tensors.lse, call.sinks), lambda: forward_launch(plan, call, tensors._replace(out=out)))
    if out is not tensors.out:
        tensors.out.copy_(out)


def forward_launch(plan: Plan, call: Call, tensors: Forward) -> Launch:
    form: Any = plan.config.form  # type: ignore[attr-defined]
    problem = plan.problem
    batch, seqlen_q, heads, _ = call.q.shape
    seqlen_k = call.k.shape[1]
    tuning = form.tuning
    block_m = ROWS * tuning.consumers
    tiles_m = -(-seqlen_q // block_m)
    section = batch * heads
    if tiles_m <= SHORT_TILES:
        a_head = seqlen_k * (form.block_d + form.block_dv) * call.k.element_size()
        section = min(section, max(1, L2_BYTES // max(1, a_head)) * problem.group)
    whole = -(-batch * heads // section) * section * tiles_m  # the last section may hold tiles that are none
    if whole >= MOST_TILES:
        raise KernelFault(f"{plan.kernel.name}: {whole} tiles of {block_m} queries are more than a launch can count; split the batch")
    programs = min(plan.target.sm_count, whole)
    cap = problem.softcap
    numbers = (cap * LOG2_E, problem.scale / cap) if cap else (problem.scale * LOG2_E, 0.0)
    views = (
        descriptor(call.q, ROWS, form.block_d), descriptor(call.k, tuning.block_n, form.block_d),
        descriptor(call.v, tuning.block_n, form.block_dv), descriptor(tensors.out, ROWS, form.block_dv),
    )  # fmt: skip
    sizes = (batch, heads, seqlen_q, seqlen_k, tiles_m, section)
    arguments = (*views, tensors.lse, call.sinks, -(-whole // programs), sizes, (call.left, call.right), numbers, form)
    registers = 168 if tuning.consumers == 2 else 128
    return Launch(forward.forward_kernel, programs, arguments, {"num_warps": 4, "maxnreg": registers})


def addressable(out: Tensor) -> Tensor:
    """`out` itself where TMA can write to it, else a tensor like it, whose rows begin at multiples of 16 bytes."""
    itemsize = out.element_size()
    if out.data_ptr() % ALIGNMENT == 0 and all(stride * itemsize % ALIGNMENT == 0 for stride in out.stride()[:-1]):
        return out
    whole = -(-out.shape[-1] * itemsize // ALIGNMENT) * ALIGNMENT // itemsize
    return torch.empty((*out.shape[:-1], whole), dtype=out.dtype, device=out.device)[..., : out.shape[-1]]


def descriptor(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    """TMA's view of [B, S, H, D] as [B, H, S, D], moved in tiles of one head's rows."""
    b, s, h, d = tensor.stride()
    batch, length, heads, size = tensor.shape
    layout: Any = gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], DTYPES[str(tensor.dtype)])
    return TensorDescriptor(tensor, [batch, heads, length, size], [b, h, s, d], [1, 1, rows, width], layout)
