"""Forwards on Blackwell with the bits of a decode, from their own source on the simulator: as good as the oracle
allows, free of races, and the same bits.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.hopper.hopper_cases import DTYPES, NIGHTLY, two_of
from tests.kernels.hopper.test_batch_invariant import SEVERAL

pytest.importorskip("triton")

from strobe.kernels.runtime import batch_invariant, split_kv
from strobe.ops import attention as ops
from strobe.ops import decode as ops_decode
from strobe.problem.call import Call
from strobe.problem.decode import DecodeCall
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.sim import simulate
from strobe.testing import FAMILIES, Case, assert_as_good_as
from tools.proof.simulate import READ_FENCES, posing, simulated

B200 = FAKES["B200"]
ON_EACH_COMMIT = ("window", "d192_128", "packed_group_of_five")
BITS_ON_EACH_COMMIT = ("group_of_three", "d128")


@pytest.fixture(autouse=True)
def splits_of_128(monkeypatch):
    for module in (split_kv, batch_invariant):
        monkeypatch.setattr(module, "INVARIANT_SPLIT", 128)


def proven(name: str, schedules) -> None:
    n = list(SEVERAL).index(name)
    call = SEVERAL[name].build("cpu", DTYPES[n % 2], FAMILIES[n % 5], n, kernel="blackwell")
    call = call._replace(batch_invariant=True)
    for mode, seed in schedules:
        found, run = simulated(call, B200, mode, seed)
        assert run.launches == ["invariant_kernel"] and run.reports == [], (mode, seed, run.reports)
        assert_as_good_as(found, call)


@pytest.mark.parametrize("name", ON_EACH_COMMIT)
def test_a_forward_in_splits(name):
    n = list(SEVERAL).index(name)
    proven(name, two_of(n)[n % 2 :][:1])


@pytest.mark.nightly
@pytest.mark.parametrize("name", SEVERAL)
def test_a_forward_in_splits_under_every_schedule(name):
    proven(name, NIGHTLY)


def _invariant(case: Case) -> Call:
    return case.build("cpu", torch.bfloat16, "normal", 3, kernel="blackwell")._replace(batch_invariant=True)


def same_bits(call: Call, decoded: dict[str, torch.Tensor], rows: slice, length: int) -> None:
    """A forward's rows beside the decode of `decoded`, whose sequence holds so many keys."""
    with posing(B200), simulate("sm_100", sms=3, checks=READ_FENCES) as run:
        out, lse = ops.run(call)
        options = {name: getattr(call, name) for name in ("left", "right", "scale", "softcap", "sinks", "kernel")}
        held = torch.tensor([length], dtype=torch.int32)
        others = ops_decode.run(DecodeCall(**decoded, seqlens=held, batch_invariant=True, **options))
    assert run.launches == ["invariant_kernel", "decode_kernel"] and run.reports == []
    if call.packed:
        out, lse = out[None], lse[None]
    assert torch.equal(out[0, rows], others[0][0]) and torch.equal(lse[0, :, rows], others[1][0])


def rows_have_the_bits_of_a_decode(name: str, counts: tuple[int, ...]) -> None:
    call = _invariant(SEVERAL[name])
    rows, keys = call.q.shape[1], call.k.shape[1]
    for tokens in counts:
        decoded = {"q": call.q[:1, rows - tokens :], "k": call.k[:1], "v": call.v[:1]}
        same_bits(call, decoded, slice(rows - tokens, rows), keys)


@pytest.mark.parametrize("name", BITS_ON_EACH_COMMIT)
def test_a_row_has_the_bits_of_its_decode(name, wide_sums):
    rows_have_the_bits_of_a_decode(name, (1,))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name for name, case in SEVERAL.items() if not case.packed and "more_rows" not in name]
)
def test_rows_have_the_bits_of_a_decode(name, wide_sums):
    rows_have_the_bits_of_a_decode(name, (1, 3, 20))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, case in SEVERAL.items() if case.packed])
def test_packed_rows_have_the_bits_of_a_decode(name, wide_sums):
    call, case = _invariant(SEVERAL[name]), SEVERAL[name]
    begin = begin_k = 0
    for length, keys in zip(case.lengths_q, case.lengths_k, strict=True):
        tokens = min(2, length)
        end = begin + length
        held = slice(begin_k, begin_k + keys)
        decoded = {"q": call.q[None, end - tokens : end], "k": call.k[None, held], "v": call.v[None, held]}
        same_bits(call, decoded, slice(end - tokens, end), keys)
        begin, begin_k = end, begin_k + keys


def test_selection_takes_the_blackwell_kernels_for_both():
    config = select(Problem.from_call(_invariant(SEVERAL["causal"])), B200).forward.config
    assert str(config).startswith("as a decode: block_m=32") and str(config).endswith("has not run on a Blackwell GPU")
