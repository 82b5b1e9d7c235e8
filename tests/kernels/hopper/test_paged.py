"""Few packed queries over a cache on a Hopper GPU, by the Hopper decode. On CPUs its source runs in the simulator
(test_paged_simulated.py).
"""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.kernels.hopper import decode_config
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import paged as ops_paged
from strobe.testing import FAMILIES, assert_kernel
from strobe.testing.paged import assert_paged_as_good_as
from tests.kernels.hopper.paged_cases import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="made for sm_90"
    ),
]


@pytest.mark.parametrize("shares", ["cluster", "global memory"])
@pytest.mark.parametrize("n, name", list(enumerate(CASES)), ids=list(CASES))
def test_as_good_as_the_oracle(n, name, shares, monkeypatch):
    """Three calls at the same addresses: compiled, recorded and replayed."""
    CACHE.clear()
    if shares == "global memory":
        monkeypatch.setattr(decode_config, "cluster_size", lambda *_: 0)
    call = CASES[name].build("cuda", (torch.bfloat16, torch.float16)[n % 2], FAMILIES[n % 5], n, "hopper")
    assert_kernel(ops_paged.decide(call), "hopper")
    first = ops_paged.run(call)
    assert_paged_as_good_as(first, call)
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(ops_paged.run(call), first))
    assert bool(strobe.last_errors()) == bool(CASES[name].lost)
    CACHE.clear()
