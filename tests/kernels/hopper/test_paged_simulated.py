"""Few packed queries over a cache in the Hopper decode, in the simulator: sequences of other numbers of tokens, rows of
no sequence, splits in clusters and in global memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import strobe
from strobe.kernels.hopper import decode_config, paged_config
from strobe.problem.paged import PagedCall, PagedProblem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.sim import simulate
from strobe.testing import FAMILIES
from strobe.testing.paged import PAGED, assert_paged_as_good_as
from tests.kernels.hopper.hopper_cases import NIGHTLY, SCHEDULES
from tests.kernels.hopper.paged_cases import CASES
from tests.kernels.portable.test_paged_interpreted import run_on
from tools.proof.simulate import READ_FENCES

H200 = FAKES["H200"]


def simulated(call: PagedCall, schedule: tuple[str, int], monkeypatch) -> list:
    """What the simulator reports. out and lse are held to the oracle's, and counters are 0 again."""
    held = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr("strobe.kernels.hopper.launch_decode.zeros_on", lambda device, count: held[:count])
    with simulate("sm_90", *schedule, sms=3, check=False, checks=READ_FENCES) as run:
        out, lse, choice = run_on(H200, call)
    assert choice.forward.kernel.name == "hopper.paged"
    assert_paged_as_good_as((out, lse), call)
    assert run.launches == ["other_rows_kernel", "decode_kernel"] and not held.any()
    return run.reports


EACH = [
    pytest.param(
        n, name, shares, marks=[pytest.mark.nightly] * (n % 2 == (shares == "cluster")), id=f"{name}, {shares}"
    )
    for n, name in enumerate(CASES)
    for shares in ("cluster", "global memory")
]


@pytest.mark.parts(4, seed=2)
@pytest.mark.parametrize("n, name, shares", EACH)
def test_no_report_and_as_good_as_the_oracle(n, name, shares, monkeypatch):
    if shares == "global memory":
        monkeypatch.setattr(decode_config, "cluster_size", lambda *_: 0)
    call = CASES[name].build("cpu", (torch.bfloat16, torch.float16)[n % 2], FAMILIES[n % 5], n, "hopper")
    assert simulated(call, SCHEDULES[n % 3], monkeypatch) == []
    assert bool(strobe.last_errors()) == bool(CASES[name].lost)


@pytest.mark.parametrize("heads, runs", [((16, 2), "forward_kernel"), ((8, 2), "decode_kernel")])
def test_rows_of_two_tiles_run_in_the_forward(heads, runs, monkeypatch):
    """Unless the decode splits the keys: each of its tiles would read all of them."""
    monkeypatch.setattr(paged_config, "LEAST_CAPACITY", 0)
    monkeypatch.setattr(decode_config, "splits", lambda capacity, *_: (1, capacity))
    monkeypatch.setattr(decode_config, "cluster_size", lambda *_: 0)
    call = replace(CASES["up to 16"], heads=heads).build("cpu", torch.bfloat16, seed=1, kernel="hopper")
    with simulate("sm_90", *SCHEDULES[0], sms=3, check=False, checks=READ_FENCES) as run:
        out, lse, _ = run_on(H200, call)
    assert_paged_as_good_as((out, lse), call)
    assert run.reports == [] and run.launches[-1] == runs


def test_the_forward_runs_few_tokens_only_where_its_tiles_are_fewer():
    def runs(heads=(64, 8), keys=8192, strided=False, tokens=16) -> str:
        width = 2 * heads[0] * 128 if strided else heads[0] * 128
        q = torch.empty(64 * tokens, width, dtype=torch.bfloat16, device="meta")[:, : heads[0] * 128]
        pool = torch.empty(64 * keys // 16, 16, heads[1], 128, dtype=torch.bfloat16, device="meta")
        ints = lambda *shape: torch.empty(*shape, dtype=torch.int32, device="meta")
        call = PagedCall(q.view(-1, heads[0], 128), pool, pool, ints(64), ints(65), ints(64, keys // 16))
        call = call._replace(max_seqlen_q=tokens, right=0, kernel="hopper")
        return type(select(PagedProblem.from_call(call), H200).forward.config).__name__

    assert [runs(), runs(tokens=4), runs(heads=(32, 8))] == ["MixedConfig", "DecodeConfig", "DecodeConfig"]
    assert runs(strided=True) == runs(keys=512) == "DecodeConfig"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["up to 16", "window", "pages of 13", "8 bits"])
def test_under_every_schedule(name, monkeypatch):
    for n, schedule in enumerate(NIGHTLY):
        call = CASES[name].build("cpu", torch.bfloat16, FAMILIES[n % 5], n, "hopper")
        assert simulated(call, schedule, monkeypatch) == []


def test_a_broken_promise_is_nan_and_reported(monkeypatch):
    call = CASES["speculated"].build("cpu", torch.bfloat16, seed=1, kernel="hopper")._replace(max_seqlen_q=3)
    with simulate("sm_90", *SCHEDULES[0], sms=3, check=False) as run:
        out, lse, _ = run_on(H200, call)
    assert run.reports == [] and out[:4].isnan().all() and lse[:, :4].isnan().all()
    assert any("max_seqlen_q" in error for error in strobe.last_errors())
    rest = call._replace(max_seqlen_q=4)
    with simulate("sm_90", *SCHEDULES[0], sms=3, check=False):
        exact, lse_exact, _ = run_on(H200, rest)
    torch.testing.assert_close(out[4:], exact[4:])
    torch.testing.assert_close(lse[:, 4:], lse_exact[:, 4:])


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_pages_of_a_sequence_without_new_tokens_are_not_read(heads, monkeypatch):
    """Its length is stale, and its pages are free."""
    q, pool = torch.randn(1, heads, 64).bfloat16(), torch.randn(4, 64, 1, 64).bfloat16()
    lengths, offsets = torch.tensor([70, 70], dtype=torch.int32), torch.tensor([0, 1, 1], dtype=torch.int32)
    pages = torch.tensor([[1, 2], [-5, 9]], dtype=torch.int32)
    call = PagedCall(q, pool, pool.clone(), lengths, offsets, pages, max_seqlen_q=1, right=0, kernel="hopper")
    assert simulated(call, SCHEDULES[0], monkeypatch) == []
    assert strobe.last_errors() == []


def test_what_the_decode_leaves_to_the_portable_kernel():
    cases = {
        "invariant": (CASES["speculated"], {"batch_invariant": True}, "one kernel computes every mix"),
        "scales": (replace(PAGED["fp8_token_scales"], tokens=16), {}, "runs no scales of keys and heads"),
    }
    for case, options, words in cases.values():
        choice = select(PagedProblem.from_call(case.build("cpu", torch.bfloat16, **options)), H200)
        assert choice.forward.kernel.name == "portable.paged"
        assert words in dict(choice.rejections)["hopper.paged"]
