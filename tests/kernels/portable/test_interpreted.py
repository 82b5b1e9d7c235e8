"""The portable kernels' own source, run by Triton's interpreter on a CPU. In a process of its own: TRITON_INTERPRET=1
pytest tests/kernels/portable.

Slow (a program instance at a time), so a light share of the table: each layout, mask, option and storage once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import strobe
from strobe.env import ENV
from strobe.testing import CASES, FAMILIES
from tests.kernels.empty_rows import UPSTREAM, assert_no_gradients_of_empty_rows
from tests.kernels.run_cases import RUN_CASES, assert_runs
from tests.kernels.small_scales import OPTIONS, assert_means_of_values

pytestmark = pytest.mark.skipif(not ENV.interpret, reason="TRITON_INTERPRET is not set")

LIGHT = (
    "length_1", "length_3", "length_65", "decode_64", "few_keys", "one_key", "no_keys_sinks", "head_dim_1",
    "head_dim_21", "head_dims_40_72",
    "grouped", "causal", "causal_more_keys", "causal_more_rows_sinks", "window_both", "window_left", "window_right",
    "window_diagonal",
    "window_beyond_the_keys", "prefix_33", "prefix_65", "prefix_129",
    "prefix_each", "prefix_window", "key_lengths_sinks", "key_lengths_window", "documents_causal", "documents_padded",
    "documents_shuffled", "documents_two_sides", "everything", "softcap_sinks_window", "scale_negative", "scale_zero",
    "partial_empty_rows",
    "stored_heads_first", "stored_odd_offset", "stored_mixed", "stored_expanded_heads", "stored_expanded_batch",
    "packed_two_sides", "packed_empty_first", "packed_no_keys_middle", "packed_no_rows_middle", "packed_outside_sinks",
    "packed_promised",
    "packed_promised_one", "packed_all_empty", "packed_lengths_1_2_3", "packed_gaps", "packed_partial",
)  # fmt: skip
DTYPES = (
    torch.float32,
    torch.float16,
)  # not bfloat16: the interpreter (Triton 3.6, create_dot) multiplies its bits as integers
SEED = 5


def _light(n: int, name: str):
    """One family and dtype a case, in turn; one batch entry less and narrow heads, because an instance costs
    milliseconds.
    """
    case, family, dtype = CASES[name], FAMILIES[n % len(FAMILIES)], DTYPES[n % len(DTYPES)]
    narrow = case.head_dim == 64 and case.head_dim_v is None
    case = replace(case, head_dim=16) if narrow else case
    case = (
        replace(case, seqlen_q=70) if "shuffled" in name else case
    )  # a tile is passed once for each run of a document
    return pytest.param(case, dtype, family, id=f"{name}-{str(dtype).removeprefix('torch.')}-{family}")


@pytest.mark.nightly_cases("causal_more_keys-*", "length_65-*", "window_right-*")
@pytest.mark.parts(3, seed=3679469222)
@pytest.mark.parametrize("case, dtype, family", [_light(n, name) for n, name in enumerate(LIGHT)])
def test_interpreted(case, dtype, family, judge):
    judge(case.build("cpu", dtype, family, SEED, requires_grad=True, kernel="portable"), family, SEED)


@pytest.mark.parts(3, seed=3679469222)
@pytest.mark.parametrize(
    "case, dtype, family", [_light(n + 1, name) for n, name in enumerate(LIGHT) if "documents" not in name]
)
def test_interpreted_with_the_bits_of_a_decode(case, dtype, family, judge):
    call = case.build("cpu", dtype, family, SEED, kernel="portable")._replace(batch_invariant=True)
    judge(call, family, SEED)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_interpreted_whole_table(name, family, judge):
    judge(CASES[name].build("cpu", torch.float32, family, SEED, requires_grad=True, kernel="portable"), family, SEED)


@pytest.mark.parametrize("which", [3, 4], ids=["out", "lse"])
def test_what_autograd_kept_may_come_back_in_another_layout(which):
    """As a hook on saved tensors may give it: the same numbers in memory of another order."""
    q, k, v = (torch.randn(2, 20, 2, 16, requires_grad=True) for _ in range(3))
    out = strobe.attention(q, k, v, causal=True, kernel="portable")
    dout = torch.randn_like(out)
    plain = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    turned = lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2)
    out.grad_fn._raw_saved_tensors[which].register_hooks(lambda t: t, turned)
    assert all(map(torch.equal, torch.autograd.grad(out, (q, k, v), dout), plain))


@pytest.mark.parametrize("gradients", [False, True])
def test_bfloat16_is_refused_by_name(gradients):
    """The interpreter multiplies its bits as integers: errors of 1e8, and nothing said."""
    q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16, requires_grad=gradients)
    with pytest.raises(strobe.UnsupportedProblem, match=r"TRITON_INTERPRET.*bfloat16"):
        strobe.attention(q, q, q, kernel="portable")
    assert strobe.explain(q, q, q).forward.kernel.name == "cpu.forward"


@pytest.mark.parametrize("name", RUN_CASES)
def test_interpreted_runs_over_shared_keys(name):
    assert_runs(RUN_CASES[name]._replace(head_dim=16).build("cpu", torch.float32, "portable"))


@pytest.mark.parametrize("name", [name for name, which in UPSTREAM if which == "dlse"])
def test_a_nan_gradient_of_the_lse_of_rows_without_keys_reaches_nothing(name):
    """NaN in dout does (docs/contract.md)."""
    assert_no_gradients_of_empty_rows(name, "dlse", "portable")


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_scale_below_float32_gives_means_of_values(options, dtype):
    assert_means_of_values(options, dtype, "portable")


def test_interpreted_dropout_drops_what_the_cpu_drops():
    q = torch.randn(1, 40, 2, 16, requires_grad=True)
    results = []
    for kernel in ("portable", "cpu"):
        out = strobe.attention(q, q, q, dropout_p=0.3, dropout_seed=5, kernel=kernel)
        results.append((out, *torch.autograd.grad(out.sum(), q)))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
