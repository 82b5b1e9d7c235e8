"""The portable kernels' own source, through their own launch code, on the simulator: true bfloat16 and float16, as the
oracle judges them.

Outputs are NaN before the kernels write them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strobe.kernels.portable import launch
from strobe.problem.target import FAKES
from strobe.testing import CASES, FAMILIES
from tools.proof.simulate import on

TARGETS = {"sm_80": FAKES["A100"], "sm_90": FAKES["H200"]}
DTYPES = (torch.bfloat16, torch.float16)
LIGHT = (
    "length_1", "length_3", "length_65", "decode_64", "few_keys", "one_key", "head_dim_1", "head_dim_21",
    "head_dims_40_72", "grouped", "causal",
    "causal_more_keys", "causal_more_rows_sinks", "window_both", "window_left", "window_diagonal", "prefix_window",
    "key_lengths_sinks",
    "documents_causal", "documents_padded", "everything", "softcap_sinks_window", "scale_negative", "scale_zero",
    "partial_empty_rows",
    "stored_odd_offset", "stored_mixed", "stored_expanded_heads", "packed_two_sides", "packed_no_keys_middle",
    "packed_outside_sinks",
    "packed_promised", "packed_lengths_1_2_3", "packed_partial",
)  # fmt: skip
SEED = 5


def _light(n: int, name: str):
    """One target, dtype and family a case, in turn."""
    target, dtype, family = list(TARGETS)[n % 2], DTYPES[n // 2 % 2], FAMILIES[n % len(FAMILIES)]
    return pytest.param(
        CASES[name], target, dtype, family, id=f"{name}-{target}-{str(dtype).removeprefix('torch.')}-{family}"
    )


@pytest.mark.parts(3, seed=3445118481)
@pytest.mark.parametrize("case, target, dtype, family", [_light(n, name) for n, name in enumerate(LIGHT)])
def test_forward_and_backward(case, target, dtype, family, judge):
    with on(TARGETS[target], mode="eager") as run:
        judge(case.build("cpu", dtype, family, SEED, requires_grad=True, kernel="portable"), family, SEED)
    assert run.reports == [] and run.launches[:2] == ["forward_kernel"] * 2


@pytest.mark.parametrize("mode", ("lazy", "random", "pct"))
def test_ctas_in_any_order(mode, judge):
    """No CTA leans on another: the same answers whichever goes first, and no two of them touch one place."""
    case = replace(CASES["grouped"], batch=1)
    with on(TARGETS["sm_90"], mode=mode, seed=3, sms=8):
        judge(case.build("cpu", torch.bfloat16, "normal", SEED, requires_grad=True, kernel="portable"), "normal", SEED)


@pytest.mark.parametrize("aligned", (True, False))
def test_with_tma_and_without(aligned, judge, monkeypatch):
    """On sm_90 rows go through descriptors where TMA can address them, through pointers where it cannot."""
    kinds = []
    start = launch.start
    monkeypatch.setattr(launch, "start", lambda launches: (kinds.extend(one.tma for one in launches), start(launches)))
    case = replace(CASES["causal"], storage="contiguous" if aligned else "odd_offset", batch=1)
    with on(TARGETS["sm_90"], mode="eager"):
        judge(case.build("cpu", torch.bfloat16, "normal", SEED, kernel="portable"), "normal", SEED)
    assert kinds == [aligned] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name, family", [(name, FAMILIES[n % len(FAMILIES)]) for n, name in enumerate(CASES)])
def test_whole_table(name, family, target, judge):
    with on(TARGETS[target], mode="pct"):
        judge(
            CASES[name].build("cpu", torch.bfloat16, family, SEED, requires_grad=True, kernel="portable"), family, SEED
        )
