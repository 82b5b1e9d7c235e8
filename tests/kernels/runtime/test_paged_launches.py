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
