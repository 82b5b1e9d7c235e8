"""Functions of scores and masks in prefills over a cache by the Hopper forward: its source in the simulator and the
kernel on a GPU, against attention in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import strobe
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import decode as ops_decode
from strobe.ops import paged as ops_paged
from strobe.problem.paged import PagedCall, PagedProblem
from strobe.problem.target import FAKES
from strobe.selection.select import Choice, select
from strobe.testing.paged import PagedCase
from tests.kernels.hopper.decode_hook_cases import HookCase, judge
from tests.kernels.hopper.hopper_cases import NIGHTLY, SCHEDULES
from tests.kernels.hopper.prefill_cases import CASES as PREFILLS
from tests.kernels.hopper.prefill_cases import FP8_CASES

pytest.importorskip("triton")
H200 = FAKES["H200"]
DTYPES = (torch.bfloat16, torch.float16)
LAUNCHES = ["forward_kernel", "decode_kernel"]

CASES = {
    "mixed": HookCase(PREFILLS["mixed"], "every index"),
    "promised": HookCase(PREFILLS["promised"], "score"),
    "promised, hidden": HookCase(PREFILLS["promised"], "hidden by score"),
    "prefill": HookCase(PREFILLS["prefill"], "tree"),
    "more tokens than keys": HookCase(PREFILLS["more tokens than keys"], "every index"),
    "full": HookCase(PREFILLS["full"], "every index"),
    "full, more tokens than keys": HookCase(replace(PREFILLS["full"], news=(60, 19), lengths=(40, 9)), "score"),
    "window": HookCase(PREFILLS["window"], "every index"),
    "window of both sides": HookCase(PREFILLS["window of both sides"], "mask"),
    "window softcap sinks": HookCase(PREFILLS["window softcap sinks"], "every index"),
    "sinks without bound": HookCase(replace(PREFILLS["sinks without bound"], sinks=True), "hidden by score"),
    "pages of 32": HookCase(PREFILLS["pages of 32"], "tree and score"),
    "pages of 128": HookCase(PREFILLS["pages of 128"], "row alone"),
    "pages lost": HookCase(PREFILLS["pages lost"], "every index"),
    "pages lost first": HookCase(PREFILLS["pages lost first"], "key alone"),
    "pages lost first, hidden": HookCase(replace(PREFILLS["pages lost first"], room=300), "hidden by score"),
    "group of 3": HookCase(PREFILLS["group of 3"], "every index"),
    "37 sequences": HookCase(PREFILLS["37 sequences"], "score"),
    "rows": HookCase(PREFILLS["rows"], "outside"),
    "rows left padded, window": HookCase(PREFILLS["rows left padded, window"], "every index"),
    "d96": HookCase(PREFILLS["d96"], "every index"),
    "d128": HookCase(PREFILLS["d128"], "every index"),
    "d128, score": HookCase(PREFILLS["d128"], "score"),
    "d192/128": HookCase(PREFILLS["d192/128"], "constants"),
    "d256": HookCase(PREFILLS["d256"], "every index"),
    "8 bits": HookCase(FP8_CASES["mixed"], "every index"),
    "8 bits, pages of 13, window": HookCase(FP8_CASES["pages of 13, window"], "score"),
    "8 bits, softcap sinks": HookCase(FP8_CASES["softcap sinks"], "every index"),
    "8 bits, pages lost": HookCase(FP8_CASES["pages lost"], "mask"),
    "8 bits, d128": HookCase(FP8_CASES["d128"], "every index"),
}
EACH_COMMIT = (
    "pages lost first, hidden",
    "full, more tokens than keys",
    "window softcap sinks",
    "pages lost",
    "8 bits",
)
EARLY = ("promised", "promised, hidden", "pages lost first, hidden", "d128")
EACH = [
    pytest.param(n, name, marks=[pytest.mark.nightly] * (name not in EACH_COMMIT), id=name)
    for n, name in enumerate(CASES)
]


@pytest.fixture(name="counters")
def _counters(monkeypatch):
    """Counters of the two launches, which are 0 again behind each."""
    held = {name: torch.zeros(4096, dtype=torch.int32) for name in ("launch_decode", "launch_paged")}
    for name, zeros in held.items():
        monkeypatch.setattr(f"strobe.kernels.hopper.{name}.zeros_on", lambda device, count, zeros=zeros: zeros[:count])
    yield
    assert not any(zeros.any() for zeros in held.values())


def choice_of(call: PagedCall) -> Choice:
    return select(PagedProblem.from_call(call), H200)


def simulated(name: str, call: PagedCall, schedule: tuple[str, int]) -> None:
    """out and lse, held to the oracle's. The simulator reports nothing."""
    from strobe.sim import simulate  # a GPU's machine may lack what it needs
    from tests.kernels.portable.test_paged_interpreted import run_on
    from tools.proof.simulate import READ_FENCES

    with simulate("sm_90", *schedule, sms=2, check=False, checks=READ_FENCES) as run:
        out, lse, choice = run_on(H200, call)
    assert choice.forward.kernel.name == "hopper.paged"
    assert run.launches == (LAUNCHES if choice.forward.config.decode else LAUNCHES[:1])
    assert run.reports == []
    judge((out, lse), call, CASES[name].functions)


@pytest.mark.usefixtures("counters")
@pytest.mark.parametrize("n, name", EACH)
def test_as_good_as_the_oracle(n, name):
    simulated(name, CASES[name].build("cpu", DTYPES[n % 2], n), SCHEDULES[n % 3])
    assert bool(strobe.last_errors()) == bool(CASES[name].case.lost)


def test_a_score_keeps_optimistic_softmax_and_a_mask_does_not():
    early = [choice_of(CASES[name].build("cpu", torch.bfloat16, 0)).forward.config.traits.early for name in EARLY]
    assert early == [True, True, True, False]


def test_selection_and_reasons():
    def chosen(case: PagedCase, **options) -> tuple[str, str]:
        call = HookCase(case, "every index").build("cpu", torch.bfloat16, 0, "")._replace(**options)
        choice = choice_of(call)
        return choice.forward.kernel.name, dict(choice.rejections).get("hopper.paged", "")

    mixed = PREFILLS["mixed"]
    assert chosen(mixed) == ("hopper.paged", "")
    for case, options, words in (
        (replace(mixed, page_size=4), {}, "pages of 8 keys or more"),
        (mixed, {"partial": True}, "writes out in q's dtype"),
        (replace(mixed, room=400), {}, "portable.paged splits keys"),
    ):
        name, reason = chosen(case, **options)
        assert name == "portable.paged" and "more than 16 new tokens" in reason and words in reason
    with pytest.raises(strobe.UnsupportedProblem, match="batch_invariant=True has no functions of scores"):
        chosen(mixed, batch_invariant=True)


def test_explain_names_the_functions_and_both_launches():
    from tools.proof.simulate import posing

    call = PREFILLS["mixed"].build("cpu", torch.bfloat16, kernel="")
    cache = strobe.PagedCache(call.k, call.v, call.page_table, call.seqlens)  # type: ignore[arg-type]
    options = {"cu_seqlens_q": call.cu_seqlens_q, "score_mod": strobe.alibi(torch.rand(4))}
    with posing(H200):
        text = str(strobe.explain_paged(call.q, cache, **options, mask=strobe.mask_mod(lambda b, h, i, j: j != i - 1)))
    assert "score_mod" in text and "mask_mod" in text
    assert "chosen    hopper.paged       block_m=" in text and "; up to 16 tokens: block_m=" in text


@pytest.mark.nightly
@pytest.mark.usefixtures("counters")
@pytest.mark.parametrize("name", ["mixed", "pages lost", "d128", "8 bits"])
def test_under_every_schedule(name):
    for n, schedule in enumerate(NIGHTLY):
        simulated(name, CASES[name].build("cpu", DTYPES[n % 2], n), schedule)


# ---------------------------------------------------------------- on a GPU

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="made for sm_90"
    ),
]


@pytest.mark.parametrize("n, name", [pytest.param(n, name, marks=ON_HOPPER, id=name) for n, name in enumerate(CASES)])
def test_on_a_gpu(n, name):
    """Four calls at the same addresses: compiled, recorded and replayed."""
    CACHE.clear()
    call = CASES[name].build("cuda", DTYPES[n % 2], n)
    choice = ops_paged.decide(call)
    assert choice.forward.kernel.name == "hopper.paged"
    first: Any = ops_decode.attend(call, choice)
    judge(first, call, CASES[name].functions)
    for _ in range(3):
        again: Any = ops_decode.attend(call, choice)
        assert all(torch.equal(one, other) for one, other in zip(again, first))
    assert bool(strobe.last_errors()) == bool(CASES[name].case.lost)


def mix_on_gpu(heads: int = 8) -> tuple[torch.Tensor, strobe.PagedCache, torch.Tensor]:
    case = PagedCase("long", (1500, 1, 700, 333, 0, 64), 0, (heads, 2), 128, page_size=16, news=(700, 1, 16, 17, 0, 64))
    call = case.build("cuda", torch.bfloat16, "normal", 1)
    cache = strobe.PagedCache(call.k, call.v, call.page_table, call.seqlens)  # type: ignore[arg-type]
    return call.q, cache, call.cu_seqlens_q


@ON_HOPPER[0]
@ON_HOPPER[1]
def test_captured_values_may_change_from_call_to_call():
    """By a tensor of its own, in place, and as a number: each replay reads what there is."""
    q, cache, offsets = mix_on_gpu()

    def run(slopes: torch.Tensor, factor: float, kernel: str = "") -> torch.Tensor:
        score = lambda s, b, h, i, j: s * factor - slopes[h] * (i - j)
        return strobe.attention_paged(q, cache, cu_seqlens_q=offsets, score_mod=score, kernel=kernel)

    slopes = torch.rand(8, device="cuda")
    for _ in range(3):
        for given in (slopes, slopes.clone()):
            for factor in (0.5, 0.75, 1.0):
                torch.testing.assert_close(run(given, factor), run(given, factor, "portable"), rtol=2e-2, atol=2e-2)
        slopes.mul_(3)


@ON_HOPPER[0]
@ON_HOPPER[1]
def test_a_graph_replays_with_other_lengths_and_captured_values():
    q, cache, offsets = mix_on_gpu()
    slopes, shown = torch.rand(8, device="cuda"), torch.rand(6, 1600, device="cuda") < 0.5
    mask = strobe.mask_mod(lambda b, h, i, j: shown[b, j] | (i == j))
    score = strobe.score_mod(lambda s, b, h, i, j: s - slopes[h] * (i - j))
    call = lambda kernel="": strobe.attention_paged(
        q, cache, cu_seqlens_q=offsets, score_mod=score, mask=mask, kernel=kernel
    )
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for news in ((700, 1, 16, 17, 0, 64), (90, 1, 40, 3, 0, 5)):
        lengths = torch.tensor((1500, 1, 700, 333, 0, 64), dtype=torch.int32)
        offsets.copy_(torch.tensor((0, *news), dtype=torch.int32).cumsum(0))
        cache.seqlens.copy_(lengths)
        slopes.mul_(2), shown.copy_(torch.rand(6, 1600, device="cuda") < 0.3)
        graph.replay()
        torch.testing.assert_close(out, call("portable"), rtol=2e-2, atol=2e-2)
    assert strobe.last_errors() == []
