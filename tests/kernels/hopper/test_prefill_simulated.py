"""Packed queries over a cache in the Hopper forward, in the simulator: keys in pages and in rows, sequences of few and
of many tokens in one call, and page tables with entries that are not in the pool.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import strobe
from strobe.kernels.hopper import launch_paged, prefill_config
from strobe.kernels.protocol import Forward
from strobe.ops import attention as ops
from strobe.problem.paged import PagedCall, PagedProblem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.sim import simulate
from strobe.testing import FAMILIES
from strobe.testing.paged import PAGED, PagedCase, assert_paged_as_good_as
from tests.kernels.hopper.hopper_cases import H200, NIGHTLY, SCHEDULES
from tests.kernels.hopper.prefill_cases import CASES, FP8_CASES
from tests.kernels.portable.test_paged_interpreted import run_on
from tools.proof.simulate import READ_FENCES

LAUNCHES = ["forward_kernel", "decode_kernel"]


@pytest.fixture(name="counters", autouse=True)
def _counters(monkeypatch):
    """Counters of the two launches, which are 0 again behind each."""
    held = {name: torch.zeros(4096, dtype=torch.int32) for name in ("launch_decode", "launch_paged")}
    for name, zeros in held.items():
        monkeypatch.setattr(f"strobe.kernels.hopper.{name}.zeros_on", lambda device, count, zeros=zeros: zeros[:count])
    yield
    assert not any(zeros.any() for zeros in held.values())


def simulated(call: PagedCall, schedule: tuple[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, held to the oracle's. The simulator reports nothing."""
    with simulate("sm_90", *schedule, sms=2, check=False, checks=READ_FENCES) as run:
        out, lse, choice = run_on(H200, call)
    assert choice.forward.kernel.name == "hopper.paged"
    assert run.launches == (LAUNCHES if choice.forward.config.decode else LAUNCHES[:1])
    assert run.reports == []
    assert_paged_as_good_as((out, lse), call)
    return out, lse


SLOW = ("promised", "pages of 32", "pages of 256", "window, pages of 256", "group of 3", "d192/128", "d256")  # nightly
EACH = [pytest.param(n, name, marks=[pytest.mark.nightly] * (name in SLOW), id=name) for n, name in enumerate(CASES)]


@pytest.mark.parts(4, seed=4)
@pytest.mark.parametrize("n, name", EACH)
def test_no_report_and_as_good_as_the_oracle(n, name):
    call = CASES[name].build("cpu", (torch.bfloat16, torch.float16)[n % 2], FAMILIES[n % 5], n, "hopper")
    simulated(call, SCHEDULES[n % 3])
    assert bool(strobe.last_errors()) == bool(CASES[name].lost)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mixed", "window", "pages lost first", "rows left padded, window", "d96"])
def test_under_every_schedule(name):
    for n, schedule in enumerate(NIGHTLY):
        simulated(CASES[name].build("cpu", torch.bfloat16, FAMILIES[n % 5], n, "hopper"), schedule)


def test_a_broken_promise_is_nan_and_reported():
    call = CASES["mixed"].build("cpu", torch.bfloat16, seed=1, kernel="hopper")._replace(max_seqlen_q=39)
    with simulate("sm_90", *SCHEDULES[0], sms=2, check=False) as run:
        out, lse, _ = run_on(H200, call)
    assert run.reports == [] and out[:40].isnan().all() and lse[:, :40].isnan().all()
    assert any("max_seqlen_q" in error for error in strobe.last_errors())
    exact, lse_exact = simulated(call._replace(max_seqlen_q=40), SCHEDULES[0])
    assert torch.equal(out[40:], exact[40:]) and torch.equal(lse[:, 40:], lse_exact[:, 40:])


def test_lengths_out_of_range_are_clamped_and_reported():
    call = CASES["rows left padded, window"].build("cpu", torch.bfloat16, seed=1, kernel="hopper")
    long = call._replace(seqlens=call.seqlens + torch.tensor([0, 10**6], dtype=torch.int32))
    late = call._replace(k_start=torch.tensor([0, 10**6], dtype=torch.int32))
    for broken, words in ((long, "cache.seqlens"), (late, "cache.k_start")):
        with simulate("sm_90", *SCHEDULES[0], sms=2, check=False) as run:
            run_on(H200, broken)
        assert run.reports == [] and any(words in error for error in strobe.last_errors())


def test_pages_that_were_freed_do_not_reach_a_result():
    """Pages before the first window have the id -1 in the case; here they are pages of NaN."""
    call = CASES["window"].build("cpu", torch.bfloat16, seed=1, kernel="hopper")
    table = call.page_table
    assert table is not None
    free = int((~torch.isin(torch.arange(len(call.k)), table)).nonzero()[0])
    call.k[free], call.v[free] = torch.nan, torch.nan
    stale = call._replace(page_table=torch.where(table == -1, free, table))
    assert (table == -1).any()
    assert all(map(torch.equal, simulated(call, SCHEDULES[0]), simulated(stale, SCHEDULES[0])))
    assert strobe.last_errors() == []


@pytest.mark.parametrize("page_size, left", [(64, 7), (64, 20), (256, 40), (0, 20)])
def test_nan_before_a_short_window_reaches_no_result(page_size, left):
    """A window's first key and the sequence's last one are in one tile of keys. Keys outside of windows are NaN."""
    case = PagedCase("short window", (60, 123), 0, (2, 1), 64, page_size=page_size, news=(18, 20), left=left)
    simulated(case.build("cpu", torch.bfloat16, "normal", 1, "hopper"), SCHEDULES[0])
    assert strobe.last_errors() == []


def test_pages_have_the_bits_of_rows():
    """The same keys in pages of 8, 16 and 64, and in rows, by the same tiles."""
    draw = torch.Generator().manual_seed(3)
    news = torch.tensor([0, 40, 64, 1], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([192, 64, 130], dtype=torch.int32)
    q = torch.randn(105, 4, 64, generator=draw).half()
    k, v = (torch.randn(3, 192, 2, 64, generator=draw).half() for _ in range(2))
    found = [simulated(PagedCall(q, k, v, lengths, news, right=0, kernel="hopper"), SCHEDULES[0])]
    for size in (8, 16, 64):
        order = torch.randperm(3 * 192 // size, generator=draw)
        k_pool, v_pool = (torch.empty(len(order), size, 2, 64).half() for _ in range(2))
        k_pool[order], v_pool[order] = k.view(-1, size, 2, 64), v.view(-1, size, 2, 64)
        call = PagedCall(q, k_pool, v_pool, lengths, news, order.view(3, -1).int(), right=0, kernel="hopper")
        found.append(simulated(call, SCHEDULES[0]))
    assert all(torch.equal(one, other) for results in found[1:] for one, other in zip(results, found[0]))


def test_launches_that_overwrite_q_are_not_replayed(monkeypatch):
    """A replay may fail after its first launch, and then all launches run."""
    kept = []
    monkeypatch.setattr(launch_paged.CACHE, "insert_launch", lambda *arguments: kept.append(arguments))
    for name, is_kept in (("full", False), ("one sequence", True)):
        call = CASES[name].build("cpu", torch.bfloat16, seed=1, kernel="hopper")
        choice = select(PagedProblem.from_call(call), H200)
        assert (choice.forward.config.decode is None) == is_kept
        for out, is_expected in (
            (torch.empty(choice.problem.out_shapes[0], dtype=call.q.dtype), True),
            (call.q, is_kept),
        ):
            kept.clear()
            with simulate("sm_90", *SCHEDULES[0], sms=2, check=False):
                ops._launch(choice.forward, call, Forward(out, torch.empty(choice.problem.out_shapes[1])))
            assert bool(kept) == is_expected


def test_what_the_forward_leaves_to_the_portable_kernel():
    cases = {
        "pages of 4": (
            replace(PAGED["window_both"], page_size=4),
            {},
            "pages of 8 keys or more that divide or hold 64",
        ),
        "scales of keys and heads": (PAGED["fp8_token_scales"], {}, "runs no scales of keys and heads"),
        "partial": (PAGED["partial"], {}, "writes out in q's dtype"),
        "scale": (replace(PAGED["scale_negative"], news=(50, 1)), {}, "needs a scale above 0"),
        "invariant": (PAGED["mixed"], {"batch_invariant": True}, "one kernel computes every mix"),
        "long keys": (replace(PAGED["mixed"], room=400), {}, "portable.paged splits keys"),
        "short window": (replace(PAGED["mixed"], left=6), {}, "at least 7 keys before a query; this one has 6"),
    }
    for case, options, words in cases.values():
        choice = select(PagedProblem.from_call(case.build("cpu", torch.bfloat16, **options)), FAKES["H200"])
        assert choice.forward.kernel.name == "portable.paged"
        assert words in dict(choice.rejections)["hopper.paged"]


def test_a_batch_without_sequences_runs_on_the_portable_kernel():
    """Its rows belong to no sequence. The forward would read the length of one."""
    q, pool = torch.zeros(20, 1, 64).half(), torch.zeros(4, 64, 1, 64).half()
    none = torch.zeros(0, dtype=torch.int32)
    call = PagedCall(q, pool, pool.clone(), none, torch.zeros(1, dtype=torch.int32), none.view(0, 3), right=0)
    choice = select(PagedProblem.from_call(call), FAKES["H200"])
    assert choice.forward.kernel.name == "portable.paged"
    assert "at least one sequence" in dict(choice.rejections)["hopper.paged"]


def test_strides_of_8_bit_caches_that_the_forward_cannot_address():
    call = FP8_CASES["mixed"].build("cpu", torch.bfloat16)
    problem = PagedProblem.from_call(call)
    assert select(problem, H200).forward.kernel.name == "hopper.paged"
    expanded = call._replace(q=call.q[:, :1].expand_as(call.q))
    far = replace(problem, strides=(problem.strides[0], (2**34, *problem.strides[1][1:]), problem.strides[2]))
    for other, words in ((PagedProblem.from_call(expanded), "q is expanded"), (far, "strides of 8-bit keys below")):
        choice = select(other, H200)
        assert choice.forward.kernel.name == "portable.paged"
        assert words in dict(choice.rejections)["hopper.paged"]


def test_out_may_be_q_where_tiles_are_redone(monkeypatch):
    """A row of NaN needs another attempt, which reads q again."""
    monkeypatch.setattr(prefill_config, "EARLY_KEYS", 0)
    case = PagedCase("long", (400,), 0, (1, 1), 64, page_size=16, news=(40,))
    call = case.build("cpu", torch.bfloat16, "normal", 1, "hopper")
    call.q[7] = torch.nan
    choice = select(PagedProblem.from_call(call), H200)
    assert choice.forward.config.traits.can_redo
    outs = [torch.full(choice.problem.out_shapes[0], torch.nan, dtype=call.q.dtype), call.q.clone()]
    for out, q in zip(outs, (call.q, outs[1])):
        with simulate("sm_90", *SCHEDULES[0], sms=2, check=False) as run:
            ops._launch(choice.forward, call._replace(q=q), Forward(out, torch.empty(choice.problem.out_shapes[1])))
        assert run.reports == []
    torch.testing.assert_close(*outs, rtol=0, atol=0, equal_nan=True)
    assert not outs[1][:7].isnan().any()
