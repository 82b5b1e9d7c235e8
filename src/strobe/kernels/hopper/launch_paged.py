"""Arguments and launches of packed queries over a cache, from a Plan and a call: the rows of no sequence, then the
decode.
"""

from __future__ import annotations

from torch import Tensor

from ...problem.paged import PagedCall
from ..device.persistent_launch import Launch
from ..protocol import Forward, Plan
from ..runtime import error_flags, launcher
from ..runtime.launch_cache import CACHE, Replay, decode_addresses
from ..runtime.workspace import pieces_of
from .decode_arguments import DecodeTensors
from .decode_config import padded
from .launch_decode import decode_launch, partials_of
from .paged_rows import other_rows_kernel


def run_paged(plan: Plan, call: PagedCall, t: Forward, workspace: dict[str, Tensor]) -> None:
    word = error_flags.word(call.q.device)
    partials = partials_of(plan, workspace, call.q.device)
    tensors = DecodeTensors(
        call.q, call.k, call.v, call.page_table, call.seqlens, call.k_start, t.out, t.lse, call.sinks, call.cu_seqlens_q
    )
    moving = (*tensors, call.k_scale, call.v_scale, *partials, word)
    decode = lambda: decode_launch(plan, call, tensors, partials, word)
    strides = t.out.stride()
    others = launcher.start(plan, ("others", strides), moving, lambda: other_rows_launch(plan, decode()))
    launch = launcher.start(plan, ("decode", strides), moving, decode)
    if launch is not None and partials.counters is not None:  # counters of the current stream
        launch = launch.on_this_stream()
    if t.out.is_contiguous():
        written = [tensor.data_ptr() for tensor in (*t, *pieces_of(workspace))]
        CACHE.insert_launch(plan, decode_addresses(call, *written), _both(others, launch))


def other_rows_launch(plan: Plan, decode: Launch) -> Launch:
    """The launch for rows that `decode` does not write."""
    problem = plan.problem
    tensors, _, _, word, strides, shape = decode.arguments[:6]
    unused = dict.fromkeys(("q", "k", "v", "page_table", "seqlens", "k_start"))
    arguments = (
        tensors._replace(**unused), word, strides.out, shape, problem.heads_q, problem.head_dim_v,
        padded(problem.head_dim_v, 1),
    )  # fmt: skip
    return Launch(other_rows_kernel, problem.total_q, arguments, {"num_warps": 1})


def _both(first: Replay | None, second: Replay | None) -> Replay | None:
    """A replay of two launches; None if one was not recorded. The first may run twice: it has no counters."""
    if first is None or second is None:
        return None
    return lambda: first() and second()
