"""From a Plan and a call on a cache to the Hopper decode's arguments and its launch."""

from __future__ import annotations

from torch import Tensor

from ...call import Paged
from ...decode import DecodeCall, DecodeProblem
from .. import faults, relaunch
from ..counters import zeros_on
from ..decoding import keep
from ..device.persistent import LOG2_E, Launch
from ..kernel import Forward, Plan
from . import decode


def run_decode(plan: Plan, call: DecodeCall, t: Forward, workspace: dict[str, Tensor]) -> None:
    problem, form = plan.problem, plan.config.form
    tiles = problem.layout.batch * problem.heads_kv * row_tiles(plan)
    shares = (None, None) if form.single else (workspace["shares"], zeros_on(call.q.device, tiles))
    word = faults.word(call.q.device)
    tensors = (call.q, call.k, call.v, call.page_table, call.seqlens, call.k_start, t.out, t.lse, call.sinks)
    moving = (*tensors, call.k_scale, call.v_scale, *shares, word)
    again = relaunch.start(plan, t.out.stride(), moving, lambda: decode_launch(plan, call, tensors, shares, word))
    keep(plan, call, t, workspace, again)


def row_tiles(plan: Plan) -> int:
    return -(-plan.problem.layout.seqlen_q * plan.problem.group // plan.config.form.block_m)


def decode_launch(plan: Plan, call: DecodeCall, tensors: tuple, shares: tuple, word: Tensor) -> Launch:
    problem, config, n_tiles = plan.problem, plan.config, row_tiles(plan)
    layout = problem.layout
    pages = (layout.n_pages, layout.max_pages) if isinstance(layout, Paged) else (0, 0)
    sizes = (layout.seqlen_q, problem.heads_kv, problem.capacity, *pages, config.n_splits, config.split_size, n_tiles)
    strides = tuple(x.stride()[:3] for x in (call.q, call.k, call.v, tensors[6]))
    arguments = (tensors, (call.k_scale, call.v_scale), shares, word, strides, sizes, (call.left, call.right), numbers_of(problem), config.form)
    programs = layout.batch * problem.heads_kv * n_tiles * config.n_splits
    return Launch(decode.decode_kernel, programs, arguments, {"num_warps": 4, "launch_pdl": config.form.early})


def numbers_of(problem: DecodeProblem) -> tuple[float, float]:
    """(scale_log2, softcap), both at least 0: a raw score is q k^T, or tanh(softcap * q k^T) where there is a cap, worth scale_log2 in log2 units."""
    scale, cap = abs(problem.scale) or 1.0, problem.softcap
    return (cap * LOG2_E, scale / cap) if cap else (scale * LOG2_E, 0.0)
