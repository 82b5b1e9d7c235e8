"""From a Plan and a Call to the Blackwell forward's arguments and its launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...call import Call
from ..device import persistent
from ..device.persistent import Launch, work_of
from ..device.views import descriptor
from ..kernel import Forward, Plan
from . import forward
from .config import REGISTERS, ROWS


def run_forward(plan: Plan, call: Call, tensors: Forward) -> None:
    persistent.run(plan, call, tensors, forward_launch)


def forward_launch(plan: Plan, call: Call, out: Tensor, pointers: tuple[Tensor | None, ...]) -> Launch:
    form: Any = plan.config.form
    work = work_of(plan, call)
    tiles = ((call.q, ROWS, form.block_d, form.rest_d), (call.k, form.tuning.block_n, form.block_d, form.rest_d),
             (call.v, form.tuning.block_n, form.block_dv, form.rest_dv), (out, ROWS, form.block_dv, form.rest_dv))  # fmt: skip
    first = (descriptor(tensor, rows, width - rest) for tensor, rows, width, rest in tiles)
    last = (descriptor(tensor, rows, rest) if rest else None for tensor, rows, _, rest in tiles)
    arguments = (*first, *last, pointers, work, form)
    return Launch(forward.forward_kernel, min(plan.target.sm_count, work[0]), arguments, {"num_warps": 4, "maxnreg": REGISTERS})
