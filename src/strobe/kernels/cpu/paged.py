"""Packed queries over a cache on CPUs: each sequence as the decode computes it, with a number of rows of its own."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...problem.mask import NO_BOUND
from ...problem.paged import PagedCall, PagedProblem
from ..protocol import Forward, Plan
from ..runtime import error_flags
from . import parallel
from .decode import apart_from, clear, sequence_job, spans
from .forward import tile_memory
from .pieces import offsets_of


def run(plan: Plan, call: PagedCall, tensors: Forward, workspace: dict[str, Tensor]) -> None:
    problem: PagedProblem = plan.problem
    offsets = offsets_of("cu_seqlens_q", call.cu_seqlens_q, problem.total_q)
    call = call._replace(q=apart_from(tensors.out, call.q))
    out, lse = clear(call, tensors)
    rows = [slice(*pair) for pair in pairwise(offsets)]
    jobs = [
        sequence_job(b, span, call.q[None, own], plan, call, Forward(out[None, own], lse[None, :, own]))
        for b, (span, own) in enumerate(zip(spans(call, problem), rows))
        if own.start < own.stop
    ]
    parallel.run(jobs, tile_memory(plan, workspace["scores"]))
    longer = [own for own in rows if NO_BOUND < call.max_seqlen_q < own.stop - own.start]
    if longer:
        error_flags.report(call.q.device, error_flags.LONG_Q)
    for own in longer:
        out[own], lse[:, own] = torch.nan, torch.nan
