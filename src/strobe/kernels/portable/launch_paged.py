"""Arguments and launches of packed queries over a cache, from a Plan and a call."""

from __future__ import annotations

from torch import Tensor

from ...problem.paged import PagedCall
from ..device.forward_arguments import WindowParams
from ..protocol import Forward, Plan
from ..runtime import error_flags, launcher
from ..runtime.launch_cache import CACHE, decode_addresses
from ..runtime.mod_function import mod_aux
from ..runtime.workspace import pieces_of
from . import paged
from .arguments import (
    RECORD,
    ForwardStrides,
    HookParams,
    PagedShape,
    PagedTensors,
    PerKeyHead,
    SplitWorkspace,
    Strides,
    WorkList,
)
from .launch import Launch, softmax_params
from .launch_decode import pages_of, stored, strides_of


def run_paged(plan: Plan, call: PagedCall, t: Forward, workspace: dict[str, Tensor]) -> None:
    """Schedule, attend, and combine where tiles may be split."""
    word = error_flags.word(call.q.device)
    if call.mods is not None:  # what functions read is not among `moving`
        for launch in paged_launches(plan, call, t, workspace):
            launch.start()
        return
    launches: list[launcher.RecordedLaunch | None] = []
    lists = work_list(workspace["work"], plan.problem.layout.batch, plan.config.max_items)
    moving = (*call.about, *t, *lists, workspace.get("partials"), workspace.get("lse_partials"), word)
    for name in KERNELS:
        key = (name, t.out.stride())
        launches.append(launcher.start(plan, key, moving, lambda name=name: _launch(name, plan, call, t, workspace)))
    if t.out.is_contiguous():
        written = [tensor.data_ptr() for tensor in (*t, *pieces_of(workspace))]
        CACHE.insert_launch(plan, decode_addresses(call, *written), launcher.in_sequence(launches))


def _launch(name: str, plan: Plan, call: PagedCall, t: Forward, workspace: dict[str, Tensor]) -> Launch:
    return next(launch for launch in paged_launches(plan, call, t, workspace) if launch.kernel is KERNELS[name])


KERNELS = {"schedule": paged.schedule_kernel, "attend": paged.paged_kernel, "combine": paged.combine_kernel}


def paged_launches(plan: Plan, call: PagedCall, t: Forward, workspace: dict[str, Tensor]) -> list[Launch]:
    problem, config = plan.problem, plan.config
    traits, layout = config.traits, problem.layout
    k, v = (stored(pool, traits.storage == "bits") for pool in (call.k, call.v))
    tensors = PagedTensors(
        call.q, k, v, call.page_table, call.seqlens, call.k_start, call.cu_seqlens_q, t.out, t.lse, call.sinks
    )
    if call.mods is not None:
        score, mask, _ = mod_aux(problem, call)
        tensors = tensors._replace(hooks=HookParams(1.0, score or None, mask or None, None))
    work, word = work_list(workspace["work"], layout.batch, config.max_items), error_flags.word(call.q.device)
    partials = SplitWorkspace(workspace.get("partials"), workspace.get("lse_partials"), None)
    packed = lambda x: Strides(0, *x.stride()[:2])
    strides = ForwardStrides(packed(call.q), strides_of(k), strides_of(v), packed(t.out))
    shape = PagedShape(
        problem.total_q,
        layout.batch,
        problem.heads_kv,
        problem.capacity,
        *pages_of(layout),
        problem.page_size,
        config.max_items,
        config.max_partials,
        config.slots,
    )
    window = WindowParams(call.left, call.right, call.max_seqlen_q, None)
    options = {"num_warps": traits.warps, "num_stages": traits.stages}
    scales = PerKeyHead(call.k_scale, call.v_scale)
    attended = (tensors, scales, work, partials, word, strides, shape, window, softmax_params(problem), traits)
    launches = [
        Launch(paged.schedule_kernel, layout.batch + 2, (tensors, work, word, shape, window, traits), {"num_warps": 4}),
        Launch(paged.paged_kernel, config.max_items, attended, options),
    ]
    parts = traits.tile_rows // config.combine.block_m
    combined = (tensors, work, partials, strides, shape, window, config.combine)
    launches.append(Launch(paged.combine_kernel, config.max_partials // 2 * parts, combined, {"num_warps": 4}))
    return launches


def work_list(work: Tensor, batch: int, max_items: int) -> WorkList:
    """The parts of the buffer `work`."""
    records = RECORD * (batch + 2)
    totals, sequences, items, split_tiles = work.split((2, records, max_items, work.numel() - 2 - records - max_items))
    return WorkList(totals, sequences, items, split_tiles)
