"""Backwards of Hopper and Blackwell at the edges of the contract, in the simulator: offsets that fall, rows of NaN,
tensors of one column, and batches of other lengths.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import strobe
from strobe.kernels.device.backward_operands import batch_stride
from strobe.problem.call import Call
from strobe.problem.problem import Problem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from tools.proof.simulate import on

H200, B200 = FAKES["H200"], FAKES["B200"]
TARGETS = [pytest.param(target, id=target.name) for target in (H200, B200)]


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.nightly_cases("H200")
@pytest.mark.parametrize(
    "target, offsets_k, deterministic",
    [
        pytest.param(H200, (0, 260, 0, 260), False, id="H200"),
        pytest.param(H200, (0, 260, 260, 520), True, id="H200, in order"),
        pytest.param(B200, (0, 260, 260, 520), True, id="B200, in order"),
    ],
)
def test_no_program_waits_for_tiles_that_falling_offsets_hide(target, offsets_k, deterministic):
    """Sequences share tiles of dQ or hide some. Gradients may be anything, and the offsets are reported."""
    offsets = {"cu_seqlens_q": (0, 260, 0, 260), "cu_seqlens_k": offsets_k}
    keys = (offsets_k[-1], 1, 64)
    q, k, v = leaves((260, 1, 64), keys, keys)
    with on(target, check=False) as run:
        tensors = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in offsets.items()}
        out = strobe.attention_varlen(q, k, v, **tensors, causal=True, deterministic=deterministic)
        out.backward(torch.ones_like(out))
    assert not [report for report in run.reports if "deadlock" in str(report)]
    assert any("cu_seqlens_q" in error for error in strobe.last_errors())


@pytest.mark.parametrize(
    "target, softcap",
    [
        pytest.param(H200, None, id="H200"),
        pytest.param(H200, 5.0, id="H200, softcap"),
        pytest.param(B200, None, id="B200"),
    ],
)
def test_a_row_of_nan_gives_no_weight_to_keys_that_it_does_not_see(target, softcap):
    q, k, v = leaves(*[(1, 80, 1, 64)] * 3)
    with torch.no_grad():
        q[0, 3] = torch.nan
    with on(target):
        out = strobe.attention(q, k, v, causal=True, softcap=softcap)
        _, _, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert dv[0, :, 0].isnan().any(1).tolist() == [key <= 3 for key in range(80)]


@pytest.mark.parametrize("target", [*TARGETS, pytest.param(FAKES["A100"], id="A100")])
def test_with_a_softcap_a_row_of_nan_without_keys_has_a_gradient_of_0(target):
    q, k, v = leaves((1, 80, 1, 64), *[(1, 64, 1, 64)] * 2)
    with torch.no_grad():
        q[0, 3] = torch.nan
    with on(target):
        out = strobe.attention(q, k, v, causal=True, softcap=5.0)
        (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert not dq[0, 3].any() and not dq.isnan().any()


@pytest.mark.nightly_cases("B200")
@pytest.mark.parametrize("target", TARGETS)
def test_packed_gradients_that_are_batch_invariant_do_not_depend_on_other_sequences(target):
    tokens, upstream = 264, torch.randn(264, 8, 128, generator=torch.Generator().manual_seed(1)).half()
    found = []
    for offsets in ((0, 64), (0, 64, tokens)):
        q, k, v = (
            t.detach()[: offsets[-1]].requires_grad_()
            for t in leaves((tokens, 8, 128), *[(tokens, 1, 128)] * 2, dtype=torch.float16)
        )
        with on(target):
            out = strobe.attention_varlen(
                q, k, v, cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32), batch_invariant=True
            )
            found.append(torch.autograd.grad(out, (q, k, v), upstream[: offsets[-1]]))
    assert all(torch.equal(alone, together[:64]) for alone, together in zip(*found))


@pytest.mark.parametrize("target", TARGETS)
def test_columns_apart_in_tensors_of_one_column(target):
    """Their last stride says nothing about the bytes of a row, but TMA refuses it."""
    q, k = leaves(*[(1, 130, 2, 8)] * 2)
    apart = torch.randn(1, 130, 2, 8).bfloat16()[..., ::8]
    assert apart.stride(-1) == 8
    with on(target):
        assert strobe.explain(q, k, apart).forward.kernel.name.startswith("portable")
        v = torch.zeros(1, 130, 2, 8).bfloat16()[..., :1].requires_grad_()
        choice = select(Problem.from_call(Call(q, k, v, needs_grad=True)), target)
        out = strobe.attention(q, k, v)
        found = torch.autograd.grad(out, (q, k, v), apart, retain_graph=True)
        expected = torch.autograd.grad(out, (q, k, v), apart.contiguous())
    assert not choice.forward.kernel.name.startswith("portable")
    assert all(map(torch.equal, found, expected))


def test_entries_are_as_far_apart_as_selection_allows():
    """At most 2**30 rows from the first to the last; the last entry need not be followed by a gap."""
    apart = 6 * 2**30 // 10
    tensor = torch.empty_strided((2, 16, 1, 8), (8 * apart, 8, 8, 1), device="meta", dtype=torch.bfloat16)
    assert batch_stride(tensor) == apart
    farther = torch.empty_strided((2, 16, 1, 8), (8 * 2**30, 8, 8, 1), device="meta", dtype=torch.bfloat16)
    assert batch_stride(farther) is None
