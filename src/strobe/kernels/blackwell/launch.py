"""Arguments and launch of the Blackwell forward, from a Plan and a Call."""

from __future__ import annotations

from torch import Tensor

from ...problem.call import Call
from ..device import persistent_launch
from ..device.forward_arguments import LaunchParams, Pointers, ShapeParams, SoftmaxParams, WindowParams
from ..device.persistent_launch import Launch, LaunchTensors, work_of
from ..device.tma import describing, descriptor
from ..protocol import Forward, Plan
from . import forward
from .traits import REGISTERS, ROWS


def run_forward(plan: Plan, call: Call, tensors: Forward) -> None:
    traits = plan.config.traits
    persistent_launch.run(plan, call, tensors, forward_launch, traits.tuning.pack_gqa > 1)


def forward_launch(plan: Plan, call: Call, out: Tensor, rest: LaunchTensors) -> Launch:
    traits = plan.config.traits
    num_tiles, sizes, limits, softmax = work_of(plan, call)
    launch = LaunchParams(num_tiles, ShapeParams(*sizes), WindowParams(*limits), SoftmaxParams(*softmax))
    cu_seqlens_q, cu_seqlens_k = rest.ranges
    pointers = Pointers(rest.lse, rest.sinks, cu_seqlens_q, cu_seqlens_k, None, rest.errors, rest.tile_counter)
    queries = describing(traits.tuning)
    tiles = (
        (queries, call.q, ROWS, traits.block_d, traits.tail_d),
        (descriptor, call.k, traits.tuning.block_n, traits.block_d, traits.tail_d),
        (descriptor, call.v, traits.tuning.block_n, traits.block_dv, traits.tail_dv),
        (queries, out, ROWS, traits.block_dv, traits.tail_dv),
    )
    first = (view(tensor, rows, width - tail) for view, tensor, rows, width, tail in tiles)
    last = (view(tensor, rows, tail) if tail else None for view, tensor, rows, _, tail in tiles)
    arguments = (*first, *last, pointers, launch, traits)
    return Launch(
        forward.forward_kernel, min(plan.target.sm_count, num_tiles), arguments, {"num_warps": 4, "maxnreg": REGISTERS}
    )
