"""Arguments and launch of the Blackwell forward, from a Plan and a Call."""

from __future__ import annotations

from torch import Tensor

from ...problem.call import Call
from ..device import persistent_launch
from ..device.persistent_launch import Launch, work_of
from ..device.tma import describing, descriptor
from ..protocol import Forward, Plan
from . import forward
from .traits import REGISTERS, ROWS


def run_forward(plan: Plan, call: Call, tensors: Forward) -> None:
    form = plan.config.form
    persistent_launch.run(plan, call, tensors, forward_launch, form.tuning.joined > 1)


def forward_launch(plan: Plan, call: Call, out: Tensor, pointers: tuple[Tensor | None, ...]) -> Launch:
    form = plan.config.form
    work = work_of(plan, call)
    queries = describing(form.tuning)
    tiles = (
        (queries, call.q, ROWS, form.block_d, form.rest_d),
        (descriptor, call.k, form.tuning.block_n, form.block_d, form.rest_d),
        (descriptor, call.v, form.tuning.block_n, form.block_dv, form.rest_dv),
        (queries, out, ROWS, form.block_dv, form.rest_dv),
    )
    first = (view(tensor, rows, width - rest) for view, tensor, rows, width, rest in tiles)
    last = (view(tensor, rows, rest) if rest else None for view, tensor, rows, _, rest in tiles)
    arguments = (*first, *last, pointers, work, form)
    return Launch(
        forward.forward_kernel, min(plan.target.sm_count, work[0]), arguments, {"num_warps": 4, "maxnreg": REGISTERS}
    )
