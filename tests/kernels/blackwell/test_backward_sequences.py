"""The Blackwell backward with packed sequences, and with rows of a batch entry that see different ranges of keys.

It runs on the simulator and is held against the oracle. Its lse comes from the Blackwell forward, or from the portable
one where the Blackwell forward lacks the mask.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.blackwell.blackwell_scenes import B200
from tests.kernels.hopper.backward_cases import PACKED, SPANS
from tests.kernels.hopper.hopper_cases import DTYPES, SCHEDULES, runs

pytest.importorskip("triton")

from strobe import reference
from strobe.ops import attention as ops
from strobe.testing import FAMILIES, Case
from tools.proof.simulate import on

BACKWARD = ["preprocess_kernel", "backward_kernel", "postprocess_kernel"]

SEQUENCES = {case.name: case for case in (*PACKED, *SPANS) if max(case.head_dim, case.head_dim_v or 0) <= 192}
SEQUENCES = {name: case for name, case in SEQUENCES.items() if (case.head_dim_v or case.head_dim) <= 128}
SEQUENCES_ON_EACH_COMMIT = (
    "packed_causal_other_keys",
    "documents_scattered_causal",
    "documents_lengths",
    "prefix_left_bound_lengths_sinks",
)


def run_and_judge_sequences(judge, case: Case, dtype: torch.dtype, family: str, schedule: tuple[str, int]) -> None:
    call = case.build("cpu", dtype, family, seed=5, requires_grad=True, kernel="blackwell.backward")
    with on(B200, *schedule) as run:
        judge(call, family, 5)
    assert run.reports == [] and run.launches[-3:] == BACKWARD


@pytest.mark.parts(4)
@pytest.mark.parametrize("name", SEQUENCES_ON_EACH_COMMIT)
def test_packed_sequences_and_key_ranges(name, judge):
    n = SEQUENCES_ON_EACH_COMMIT.index(name)
    schedule, family = SCHEDULES[n % len(SCHEDULES)], FAMILIES[n % len(FAMILIES)]
    run_and_judge_sequences(judge, SEQUENCES[name], DTYPES[n % 2], family, schedule)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SEQUENCES)
def test_packed_sequences_and_key_ranges_with_every_schedule(name, judge):
    for n, schedule in enumerate(SCHEDULES):
        run_and_judge_sequences(judge, SEQUENCES[name], DTYPES[n % 2], FAMILIES[n % len(FAMILIES)], schedule)


@pytest.mark.parametrize("nan_in", ("q", "k", "v", "dout"))
def test_documents_do_not_see_what_others_hold(nan_in):
    """Rows of the second of two documents are NaN. Both have rows in the first tile, and 0 times NaN is NaN."""
    case = Case("nan", 200, None, head_dim=64, batch=1, heads=(2, 1), mask=runs((90, 110)))
    call = case.build("cpu", torch.bfloat16)._replace(needs_grad=True)
    out, lse = reference.forward(call)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    given = {"q": call.q, "k": call.k, "v": call.v, "dout": dout, "out": out.to(torch.bfloat16), "lse": lse.float()}
    spoilt = {name: t.clone() for name, t in given.items()}
    for name in (nan_in, "out"):
        spoilt[name][:, 90:] = torch.nan
    spoilt["lse"][..., 90:] = torch.nan

    def first_document(t: dict) -> list[torch.Tensor]:
        with on(B200) as run:
            operands = call._replace(**{name: t[name] for name in "qkv"}, kernel="blackwell.backward").arguments
            found = ops.BACKWARD(t["dout"], t["out"], t["lse"], None, *operands)
        assert run.reports == [] and run.launches == BACKWARD
        return [gradient[:, :90] for gradient in found[:3]]

    assert all(map(torch.equal, first_document(given), first_document(spoilt)))
