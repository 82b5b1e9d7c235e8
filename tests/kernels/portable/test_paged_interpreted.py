"""Packed queries over a cache in the portable kernel, run by Triton's interpreter on a CPU, with the splits that an
H200 would take.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import strobe
from strobe.env import ENV
from strobe.kernels.protocol import Forward
from strobe.ops import attention as ops
from strobe.ops import paged as ops_paged
from strobe.problem.append import AppendCall
from strobe.problem.paged import PagedCall, PagedProblem
from strobe.problem.target import FAKES, Target
from strobe.selection.select import Choice, select
from strobe.testing import FAMILIES
from strobe.testing.paged import PAGED, assert_paged_as_good_as
from tests.decoding import wide_sums
from tests.ops import test_append_packed, test_append_slots, test_paged

pytestmark = pytest.mark.skipif(not ENV.interpret, reason="TRITON_INTERPRET is not set")

DTYPES = (torch.float32, torch.float16, torch.float64)  # not bfloat16, as in test_decode_interpreted
HERE = {"device": "cpu", "kernel": "portable"}
SLOW = ("mixed_promised", "prefill", "pages_of_1024", "rows", "group_3")  # many programs: nightly


def run_on(target: Target, call: PagedCall) -> tuple[torch.Tensor, torch.Tensor, Choice]:
    """out and lse by the plan that `target` would have, and the Choice."""
    choice = select(PagedProblem.from_call(call), target)
    problem = choice.problem
    out, lse = (
        torch.full(shape, torch.nan, dtype=dtype)
        for shape, dtype in zip(problem.out_shapes, (problem.out_dtype, problem.lse_dtype))
    )
    ops._launch(choice.forward, call, Forward(out, lse))
    return out, lse, choice


@pytest.mark.parts(3, seed=105)
@pytest.mark.parametrize(
    "n, name",
    [pytest.param(n, name, marks=[pytest.mark.nightly] * (name in SLOW), id=name) for n, name in enumerate(PAGED)],
)
def test_in_splits(n, name):
    dtype = DTYPES[n % 2 if PAGED[name].fp8 else n % 3]  # no float64 over 8 bits on a GPU
    call = PAGED[name].build("cpu", dtype, FAMILIES[n % 5], n, "portable", batch_invariant=n % 4 == 3)
    out, lse, choice = run_on(FAKES["H200"], call)
    assert choice.forward.kernel.name == "portable.paged"
    assert_paged_as_good_as((out, lse), call)
    assert bool(strobe.last_errors()) == bool(PAGED[name].lost)


@pytest.fixture(name="wide_sums")
def _wide_sums():
    with wide_sums():
        yield


@pytest.mark.parametrize("name", ["mixed", "window"])
def test_the_same_bits_in_any_mix(name, wide_sums):
    test_paged.same_bits_in_any_mix(PAGED[name], **HERE, dtype=torch.float32)


def test_fixed_splits_have_equal_bits_in_parallel_and_one_after_the_other(wide_sums):
    """5,000 keys are three fixed splits: of one token in three programs, of 20 tokens in one program for each tile, and
    of one token where there is no memory for partial results.
    """
    case = replace(PAGED["one_token"], lengths=(5000, 40), news=(1, 1), heads=(2, 1), tokens=1)
    call = case.build("cpu", torch.float32, seed=1, kernel="portable", batch_invariant=True)
    out, lse, choice = run_on(FAKES["H200"], call)
    assert choice.forward.config.max_partials == 6
    small = replace(choice.forward.config, max_partials=2)
    plan = choice.forward.changed(config=small)
    again, lse_again = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    ops._launch(plan, call, Forward(again, lse_again))
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    more = call._replace(
        q=torch.cat([torch.zeros(19, 2, 16), call.q]), cu_seqlens_q=torch.tensor([0, 20, 21], dtype=torch.int32)
    )._replace(max_seqlen_q=20)
    longer = run_on(FAKES["H200"], more)
    assert torch.equal(longer[0][19:], out) and torch.equal(longer[1][:, 19:], lse)


def test_pages_have_the_bits_of_rows(wide_sums):
    test_paged.test_pages_have_the_bits_of_rows(**HERE)


def test_broken_metadata():
    test_paged.test_a_broken_promise_is_nan_and_reported(**HERE)
    test_paged.test_values_out_of_range_are_reported(**HERE)
    test_paged.test_pages_that_were_freed_do_not_reach_a_result(**HERE)


@pytest.mark.parametrize("offsets", [(0, 50, 40, 44, 44), (-5, 40, 41, 41, 44), (0, 40, 41, 41, 10**6)])
def test_offsets_that_fall_are_reported(offsets):
    call = PAGED["mixed"].build(seed=1, kernel="portable")
    ops_paged.run(call._replace(cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32)))
    assert any("cu_seqlens_q" in error for error in strobe.last_errors())


def test_a_batch_of_no_sequence():
    """Its rows are padding."""
    k = torch.randn(3, 4, 2, 8)
    cache = strobe.PagedCache(k, k, torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    out, lse = strobe.attention_paged(
        torch.randn(2, 4, 8), cache, cu_seqlens_q=torch.tensor([0]), kernel="portable", return_lse=True
    )
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("paged, fp8, rotary", [(True, False, False), (False, True, True), (True, True, False)])
def test_append_of_packed_tokens(paged, fp8, rotary, monkeypatch):
    monkeypatch.setattr(
        AppendCall, "of", staticmethod(lambda *given, of=AppendCall.of: of(*given)._replace(kernel="portable"))
    )
    test_append_packed.as_each_alone(paged, fp8, rotary, "cpu")


@pytest.mark.parametrize("n, layout", list(enumerate(("NHD", "HND", "together"))), ids=("NHD", "HND", "together"))
def test_append_to_slots(n, layout):
    index = (torch.int64, torch.int32)[n % 2]
    test_append_slots.written_to_slots("cpu", "portable", index, layout == "HND", layout == "together", n % 2 == 0)


def test_append_to_slots_beyond_the_pool():
    test_append_slots.beyond_the_pool("cpu", "portable")


@pytest.mark.parametrize("where", ["rows", "pages", "slots"])
def test_append_with_a_scale_for_each_key_and_head(where):
    test_append_slots.by_token("cpu", "portable", where == "pages", where == "slots")
