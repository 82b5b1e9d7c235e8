"""Functions of scores and masks in the Blackwell decode: its source in the simulator, against attention in float64. It
has not run on a Blackwell GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from strobe.kernels.hopper import decode_config
from strobe.kernels.runtime import error_flags
from strobe.problem.target import FAKES
from strobe.sim import simulate
from tests.decoding import on
from tests.kernels.hopper.decode_hook_cases import CASES, judge
from tests.kernels.hopper.hopper_cases import SCHEDULES
from tools.proof.simulate import READ_FENCES

B200 = FAKES["B200"]
DTYPES = (torch.bfloat16, torch.float16)
EACH_COMMIT = ("dense, tokens 5", "global memory"), ("8 bits", "cluster")
EACH = [
    pytest.param(n, name, shares, marks=[pytest.mark.nightly] * ((name, shares) not in EACH_COMMIT))
    for n, name in enumerate(CASES)
    for shares in ("cluster", "global memory")
    if not name.startswith(("packed", "prefill"))
    and (name, shares) != ("d160, tokens 8", "cluster")  # too much shared memory
]


@pytest.mark.parametrize("n, name, shares", EACH)
def test_as_good_as_the_oracle(n, name, shares, monkeypatch):
    held = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr("strobe.kernels.hopper.launch_decode.zeros_on", lambda device, count: held[:count])
    if shares == "global memory":
        monkeypatch.setattr(decode_config, "cluster_size", lambda *_: 0)
    call = CASES[name].build("cpu", DTYPES[n % 2], n, "blackwell")
    target = replace(B200, capability=(100, 103)[n % 2])
    with simulate(f"sm_{target.capability}", *SCHEDULES[n % 3], sms=3, check=False, checks=READ_FENCES) as run:
        found = on(target, call)
    assert run.launches == ["decode_kernel"] and run.reports == [] and not held.any()
    judge(found, call, CASES[name].functions)
    assert bool(error_flags.read_and_clear()) == bool(CASES[name].case.lost)
