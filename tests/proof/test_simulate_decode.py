"""The portable decode's own source in the simulator, several CTAs in flight: who joins the shares of a tile has seen them all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hopper_cases import NIGHTLY, SCHEDULES

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/, whose files are shared
from decoding import on as run_on

from strobe.decode import DecodeCall, DecodeProblem
from strobe.kernels import counters
from strobe.select import select
from strobe.sim import simulate
from strobe.target import FAKES
from strobe.testing import FAMILIES
from strobe.testing.decode import DECODES, assert_decode_as_good_as

H200 = FAKES["H200"]
NAMES = ("dense", "dense_tokens_5", "dense_softcap_sinks", "dense_left_padded", "pages_of_16", "pages_of_13", "pages_lost", "pages_fp8")


def simulated(call: DecodeCall, schedule: tuple[str, int], monkeypatch) -> list:
    """What the simulator objects to; out and lse are held to the oracle, and counters are 0 again."""
    held = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr("strobe.kernels.portable.launch_decode.zeros_on", lambda device, count: held[:count])
    with simulate("sm_90", *schedule, sms=3, check=False) as run:
        results = run_on(H200, call)
    assert_decode_as_good_as(results, call)
    assert run.launches == ["decode_kernel"] and not held.any()
    return run.reports


def built(name: str, n: int) -> DecodeCall:
    return DECODES[name].build("cpu", (torch.bfloat16, torch.float16)[n % 2], FAMILIES[n % 5], n, "portable")


@pytest.mark.parametrize("n, name", list(enumerate(NAMES)), ids=NAMES)
def test_the_last_to_finish_has_seen_all_shares(n, name, monkeypatch):
    call = built(name, n)
    assert select(DecodeProblem.from_call(call), H200).forward.config.n_splits > 1
    assert simulated(call, SCHEDULES[n % 3], monkeypatch) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_under_every_schedule(name, monkeypatch):
    for n, schedule in enumerate(NIGHTLY):
        assert simulated(built(name, n), schedule, monkeypatch) == []


def test_counters_are_kept_and_of_one_size_or_another():
    assert counters.zeros_on(torch.device("cpu"), 5).shape == (8,)
    assert counters.zeros_on(torch.device("cpu"), 1).shape == (1,)
