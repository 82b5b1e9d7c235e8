"""Functions of scores and masks in the Hopper decode: its source in the simulator and the kernel on a GPU, against
attention in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import strobe
from strobe.kernels.hopper import decode_config
from strobe.kernels.runtime import error_flags
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import decode as ops_decode
from strobe.ops import paged as ops_paged
from strobe.problem.decode import DecodeProblem
from strobe.problem.paged import PagedCall, PagedProblem
from strobe.problem.target import FAKES
from strobe.selection.select import Choice, select
from tests.kernels.hopper.decode_hook_cases import CASES, AnyCall, judge
from tests.kernels.hopper.hopper_cases import NIGHTLY, SCHEDULES

pytest.importorskip("triton")
H200, B200 = FAKES["H200"], FAKES["B200"]
DTYPES = (torch.bfloat16, torch.float16)
EACH_COMMIT = ("scale negative, cluster", "packed, speculated, global memory", "pages lost, global memory")
# takes more shared memory than there is; tiles of 64 rows, which no cluster shares
NOT_IN_CLUSTERS = ("d160, tokens 8", "dense, tokens 40, group 3", "dense, tokens 16, group 8", "packed, up to 16")
EACH = [
    pytest.param(n, name, shares, marks=[pytest.mark.nightly] * (f"{name}, {shares}" not in EACH_COMMIT))
    for n, name in enumerate(CASES)
    for shares in ("cluster", "global memory")
    if shares == "global memory" or name not in NOT_IN_CLUSTERS
]


def choice_of(call: AnyCall, target=H200) -> Choice:
    kind: Any = PagedProblem if isinstance(call, PagedCall) else DecodeProblem
    return select(kind.from_call(call), target)


def simulated(name: str, call: AnyCall, schedule: tuple[str, int], monkeypatch) -> list:
    """What the simulator reports. out and lse are held to the oracle's, and counters are 0 again."""
    from strobe.sim import simulate  # a GPU's machine may lack what it needs
    from tests.decoding import on
    from tests.kernels.portable.test_paged_interpreted import run_on
    from tools.proof.simulate import READ_FENCES

    held = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr("strobe.kernels.hopper.launch_decode.zeros_on", lambda device, count: held[:count])
    with simulate("sm_90", *schedule, sms=3, check=False, checks=READ_FENCES) as run:
        found = run_on(H200, call)[:2] if isinstance(call, PagedCall) else on(H200, call)
    assert run.launches[-1] == "decode_kernel" and not held.any()
    judge(found, call, CASES[name].functions)
    return run.reports


@pytest.mark.parametrize("n, name, shares", EACH)
def test_as_good_as_the_oracle(n, name, shares, monkeypatch):
    chosen = decode_config.cluster_size
    size = lambda *given: 0 if shares == "global memory" else chosen(*given) or 2
    monkeypatch.setattr(decode_config, "cluster_size", size)
    call = CASES[name].build("cpu", DTYPES[n % 2], n)
    assert (choice_of(call).forward.config.traits.cluster > 1) == (shares == "cluster")
    assert simulated(name, call, SCHEDULES[n % 3], monkeypatch) == []
    assert bool(error_flags.read_and_clear()) == bool(CASES[name].case.lost)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dense, tokens 5", "packed, up to 16", "8 bits", "pages of 13"])
def test_under_every_schedule(name, monkeypatch):
    for n, schedule in enumerate(NIGHTLY):
        call = CASES[name].build("cpu", DTYPES[n % 2], n)
        assert simulated(name, call, schedule, monkeypatch) == []


def test_two_functions_over_8_bit_keys_have_eight_warps_in_the_tallest_tile():
    """Four warps are faster with one function, over 16-bit keys and in lower tiles."""

    def warps(name: str, **texts: str) -> int:
        call = CASES[name].build("cpu", torch.bfloat16, 0)
        mods = call.mods._replace(texts=call.mods.texts._replace(**texts))
        return choice_of(call._replace(mods=mods)).forward.config.traits.warps

    names = ("dense, tokens 5", "dense, tokens 16, group 8", "packed, up to 16", "d160, tokens 8", "packed, 8 bits")
    assert [warps(name) for name in names] == [4, 4, 4, 4, 4]
    assert [warps("packed, 8 bits, up to 16", **texts) for texts in ({}, {"mask": ""}, {"score": ""})] == [8, 4, 4]


def test_selection_and_reasons():
    call = CASES["dense, tokens 5"].build("cpu", torch.bfloat16, 0, "")
    assert choice_of(call).forward.kernel.name == "hopper.decode"
    assert choice_of(call, B200).forward.kernel.name == "blackwell.decode"
    few = CASES["packed, up to 16"].build("cpu", torch.bfloat16, 0, "")
    assert choice_of(few).forward.kernel.name == "hopper.paged"


# ---------------------------------------------------------------- on a GPU

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="made for sm_90"
    ),
]


def on_gpu(name: str, n: int) -> None:
    """Three calls at the same addresses: compiled, recorded and replayed."""
    CACHE.clear()
    call = CASES[name].build("cuda", DTYPES[n % 2], n)
    decide: Any = ops_paged.decide if isinstance(call, PagedCall) else ops_decode.decide
    choice = decide(call)
    assert choice.forward.kernel.name.startswith("hopper.")
    first: Any = ops_decode.attend(call, choice)
    judge(first, call, CASES[name].functions)
    for _ in range(3):
        again: Any = ops_decode.attend(call, choice)
        assert all(torch.equal(one, other) for one, other in zip(again, first))
    assert bool(strobe.last_errors()) == bool(CASES[name].case.lost)


@pytest.mark.parametrize(
    "n, name, shares",
    [
        pytest.param(n, name, shares, marks=ON_HOPPER)
        for n, name in enumerate(CASES)
        for shares in ("cluster", "global memory")
    ],
)
def test_on_a_gpu(n, name, shares, monkeypatch):
    if shares == "global memory":
        monkeypatch.setattr(decode_config, "cluster_size", lambda *_: 0)
    on_gpu(name, n)


@pytest.mark.gpu
def test_captured_values_may_change_from_call_to_call():
    """By a tensor of its own, in place, and as a number: each replay reads what there is."""
    q = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(2, 256, 2, 64, device="cuda", dtype=torch.bfloat16)
    cache = strobe.DenseCache(k, k, torch.tensor([250, 70], device="cuda", dtype=torch.int32))

    def run(slopes: torch.Tensor, factor: float, kernel: str = "") -> torch.Tensor:
        score = lambda s, b, h, i, j: s * factor - slopes[h] * (i - j)
        return strobe.attention_decode(q, cache, score_mod=score, kernel=kernel)

    slopes = torch.rand(8, device="cuda")
    for _ in range(3):
        for given in (slopes, slopes.clone()):
            for factor in (0.5, 0.75, 1.0):
                torch.testing.assert_close(run(given, factor), run(given, factor, "portable"), rtol=2e-2, atol=2e-2)
        slopes.mul_(3)
