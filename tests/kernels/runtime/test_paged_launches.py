"""Launches of packed queries over a cache can be repeated: the launcher knows every address of their arguments."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from strobe.kernels.protocol import Forward
from strobe.kernels.runtime import launcher
from strobe.problem.paged import PagedProblem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.testing.paged import PAGED

LAUNCHES = {
    ("portable", "mixed"): ["schedule_kernel", "paged_kernel", "combine_kernel"],
    ("portable", "fp8"): ["schedule_kernel", "paged_kernel", "combine_kernel"],
    ("hopper", "speculated"): ["other_rows_kernel", "decode_kernel"],
    ("hopper", "window_softcap_sinks"): ["forward_kernel", "decode_kernel"],
    ("hopper", "rows_left_padded_window"): ["forward_kernel", "decode_kernel"],
}


@pytest.mark.parametrize("kernel, name", list(LAUNCHES))
def test_every_address_of_a_launch_is_known(kernel, name, monkeypatch):
    call = PAGED[name].build("cpu", torch.bfloat16, kernel=kernel)
    plan = select(PagedProblem.from_call(call), FAKES["H200"]).forward
    problem = plan.problem
    out, lse = (
        torch.empty(shape, dtype=dtype)
        for shape, dtype in zip(problem.out_shapes, (problem.out_dtype, problem.lse_dtype))
    )
    workspace = {buffer.name: torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in plan.buffers}
    started = []

    def start(plan, key, tensors, describe):
        known = {t.data_ptr(): launcher.Address(t.data_ptr()) for t in tensors if t is not None}
        launch = describe()
        launcher.with_addresses(launch.arguments, known)  # KeyError: an address that changes unnoticed
        started.append(launch.kernel.fn.__name__)

    monkeypatch.setattr(launcher, "start", start)
    plan.kernel.run(plan, call, Forward(out, lse), workspace)
    assert started == LAUNCHES[kernel, name]


def test_a_copy_of_queries_does_not_share_a_launch_with_other_strides(monkeypatch):
    """Queries at any address are copied for TMA, and the copy of queries with gaps has none. A recorded launch holds
    strides, so equal keys must mean equal strides.
    """
    call = PAGED["window_softcap_sinks"].build("cpu", torch.bfloat16, kernel="hopper")
    tokens, heads, width = call.q.shape
    room = torch.zeros(tokens * 2 * heads * width + 1, dtype=call.q.dtype)
    views = [room[n : n + room.numel() - 1].view(tokens, 2 * heads, width)[:, :heads] for n in (0, 1)]
    plan = select(PagedProblem.from_call(call._replace(q=views[0])), FAKES["H200"]).forward
    problem = plan.problem
    out, lse = (
        torch.empty(shape, dtype=dtype)
        for shape, dtype in zip(problem.out_shapes, (problem.out_dtype, problem.lse_dtype))
    )
    workspace = {buffer.name: torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in plan.buffers}
    strides: dict = {}

    def start(plan, key, tensors, describe):
        strides.setdefault((plan.number, key), set()).add(tensors[0].stride())

    monkeypatch.setattr(launcher, "start", start)
    for q in views:
        plan.kernel.run(plan, call._replace(q=q), Forward(out, lse), workspace)
    assert {key[0] for _, key in strides} == {"forward", "decode"}
    assert all(len(found) == 1 for found in strides.values()), strides
