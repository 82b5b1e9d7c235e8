"""`@triton.jit` functions as scores and masks: the portable and Hopper kernels against their references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton

import strobe
from strobe.mods.mask import MaskMod
from strobe.mods.program import Program
from strobe.mods.triton_functions import expanded
from strobe.problem.target import FAKES
from tests.mods.test_portable import _agree, _both, _draw, _qkv
from tests.mods.triton_examples import (
    near,
    near_backward,
    near_reference,
    squared,
    squared_backward,
    striped,
    striped_reference,
)
from tools.proof.compile import compile_job, recording
from tools.proof.simulate import on, posing

A100, H200 = FAKES["A100"], FAKES["H200"]
HEADS = 4


def _near(slopes=None, **options):
    slopes = torch.rand(HEADS, generator=torch.Generator().manual_seed(3)) if slopes is None else slopes
    return strobe.score_mod(near, captures=(slopes, 9.5, 3), **options)


def _striped(**options):
    widths = torch.tensor([3, 4, 5, 3], dtype=torch.int32)
    return strobe.mask_mod(striped, captures=(widths, 1), **options)


OPTIONS = (
    {"score_mod": _near(backward=near_backward, reference=near_reference), "causal": True},
    {
        "score_mod": _near(reference=near_reference),
        "mask": _striped(reference=striped_reference) & strobe.window(40, 9),
    },
    {"mask": ~_striped(reference=striped_reference) | strobe.mask_mod(lambda b, h, q, k: k % 7 == b)},
)


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_portable_kernels_agree_with_the_reference_on_a_cpu(number):
    _agree(_both(strobe.attention, _qkv(), OPTIONS[number], A100))


def test_packed_sequences():
    offsets = [torch.tensor(one, dtype=torch.int32) for one in ([0, 30, 30, 70], [0, 50, 53, 90])]
    options = OPTIONS[1] | {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    _agree(_both(strobe.attention_varlen, [t[0] for t in _qkv()], options, A100))


def test_the_given_derivative_runs():
    """A derivative of another function is taken as it is, so it gives other gradients than the reference."""
    reference = lambda score, b, h, q_idx, kv_idx: score * score
    right = {"score_mod": strobe.score_mod(squared, backward=squared_backward, reference=reference)}
    _agree(_both(strobe.attention, _qkv(), right, A100))

    @triton.jit
    def wrong(dscore, score, b, h, q_idx, kv_idx):
        return dscore * score

    with pytest.raises(AssertionError, match="result 1"):
        _agree(
            _both(
                strobe.attention, _qkv(),
                {"score_mod": strobe.score_mod(squared, backward=wrong, reference=reference)}, A100,
            )
        )  # fmt: skip


def test_captured_gradients_come_from_the_reference():
    found = []
    for target in (None, A100):
        slopes = torch.rand(HEADS, generator=torch.Generator().manual_seed(3)).requires_grad_()
        options = {"score_mod": _near(slopes, reference=near_reference)}
        up = _draw(2, 70, 4, 16, seed=7)
        if target is None:
            out = strobe.attention(*(t.float() for t in _qkv()), **options)
            found.append(torch.autograd.grad(out, slopes, up.float())[0])
        else:
            with on(target):
                out = strobe.attention(*_qkv(), **options, kernel="portable")
                found.append(torch.autograd.grad(out, slopes, up)[0])
    assert torch.allclose(*found, rtol=5e-3, atol=1e-3) and found[0].abs().min() > 0


def test_hopper_kernels_in_the_simulator():
    q, k, v = (_draw(1, 150, heads, 64, seed=heads) for heads in (4, 2, 3))
    v = _draw(1, 150, 2, 64, seed=9)
    options = {"score_mod": _near(backward=near_backward, reference=near_reference), "causal": True}
    options["mask"] = _striped(reference=striped_reference)
    exact = [t.float().requires_grad_() for t in (q, k, v)]
    out, up = strobe.attention(*exact, **options), _draw(1, 150, 4, 64, seed=7)
    wanted = [out, *torch.autograd.grad(out, exact, up.float())]
    with on(H200):
        given = [t.requires_grad_() for t in (q, k, v)]
        choice = strobe.explain(*given, **options)
        assert choice.forward.kernel.name == "hopper.forward" and choice.backward.kernel.name == "hopper.backward"
        out = strobe.attention(*given, **options)
        found = [out, *torch.autograd.grad(out, given, up)]
    _agree([(got.float(), one) for got, one in zip(found, wanted)])


def test_decode_with_functions():
    cache = strobe.DenseCache(*(_draw(2, 40, 2, 16, seed=n) for n in (1, 2)), seqlens=torch.tensor([33, 40]).int())
    q, options = _draw(2, 1, 4, 16), OPTIONS[1] | {"mask": _striped(reference=striped_reference)}
    exact = strobe.attention_decode(q, cache, **options)
    with on(A100):
        _agree([(strobe.attention_decode(q, cache, **options, kernel="portable").float(), exact.float())])


@pytest.mark.parametrize("news", [pytest.param((40, 1, 0), marks=pytest.mark.nightly), (4, 1, 0)])
def test_packed_queries_over_pages_on_hopper(news):
    """The decode, and for 40 tokens the forward."""
    pools = [_draw(24, 16, 2, 64, seed=n) for n in (1, 2)]
    table = torch.randperm(24, generator=torch.Generator().manual_seed(1)).view(3, 8).int()
    cache = strobe.PagedCache(*pools, table, torch.tensor([90, 17, 20], dtype=torch.int32))
    offsets = torch.tensor([0, *news]).cumsum(0).int()
    options = OPTIONS[1] | {"mask": _striped(reference=striped_reference), "cu_seqlens_q": offsets}
    options["max_seqlen_q"] = max(news)
    q = _draw(sum(news), 4, 64)
    exact = strobe.attention_paged(q, cache, **options)
    with on(H200) as run:
        assert strobe.explain_paged(q, cache, **options).forward.kernel.name == "hopper.paged"
        _agree([(strobe.attention_paged(q, cache, **options).float(), exact.float())])
    assert ("forward_kernel" in run.launches) == (max(news) > 16) and "decode_kernel" in run.launches


def test_a_mask_that_has_a_reference_is_a_mask_like_others():
    mask = _striped(reference=striped_reference)
    widths, at = torch.tensor([3, 4, 5, 3]), torch.arange(9)
    seen = (at[:, None] + at + 1) % widths[:, None, None] < 2
    assert torch.equal(mask.dense(9, 9, heads=4)[0], seen)
    assert torch.equal((~mask & strobe.causal()).dense(9, 9, heads=4)[0], ~seen & (at[:, None] >= at))
    assert isinstance(mask, MaskMod)


def test_equal_functions_have_one_program():
    one, other = (_near(torch.rand(HEADS), reference=near_reference).bind(False).text for _ in range(2))
    assert one == other and "triton jit_" in one
    assert "tanh" not in expanded(Program.parse(one)).text and "load" in expanded(Program.parse(one)).text


# ---------------------------------------------------------------- refusals


def test_without_a_reference_a_cpu_refuses_by_name():
    q, k, v = (t.float() for t in _qkv())
    score = strobe.score_mod(squared)
    with pytest.raises(strobe.UnsupportedProblem, match=r"squared is a triton.jit function.*reference="):
        strobe.attention(q, k, v, score_mod=squared)
    with pytest.raises(strobe.UnsupportedProblem, match=r"striped is a triton.jit function.*reference="):
        strobe.attention(q, k, v, mask=_striped())
    with pytest.raises(strobe.UnsupportedProblem, match="reference="):
        _striped().dense(4, 4, heads=4)
    assert not strobe.supports(q, k, v, score_mod=score)
    with on(A100):
        assert strobe.supports(q, k, v, score_mod=score)


def test_without_a_derivative_gradients_are_refused():
    q = _qkv()[0].requires_grad_()
    with pytest.raises(strobe.UnsupportedProblem, match="without a derivative; pass backward="), on(A100):
        strobe.attention(q, q, q, score_mod=squared)
    with torch.no_grad(), on(A100):
        strobe.attention(q, q, q, score_mod=squared)


def test_captured_gradients_need_the_reference():
    slopes = torch.rand(HEADS, requires_grad=True)
    with pytest.raises(strobe.UnsupportedProblem, match="no gradients of captured tensors; detach them"):
        _near(slopes, backward=near_backward)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    (
        (lambda: strobe.score_mod(near), strobe.InvalidProblem, "a function of 8 arguments"),
        (lambda: strobe.score_mod(squared, captures=(1,)), strobe.InvalidProblem, "one for each of the 1 captures"),
        (lambda: strobe.score_mod(squared, captures=1), TypeError, "captures: got"),
        (lambda: strobe.score_mod(squared, captures=(True,)), TypeError, "tensors, ints and floats"),
        (lambda: strobe.score_mod(squared, backward=lambda *_: 0), TypeError, "decorate it with @triton.jit"),
        (lambda: strobe.score_mod(lambda s, b, h, q, k: s, captures=(1,)), strobe.InvalidProblem, "a closure holds"),
        (lambda: strobe.mask_mod(lambda b, h, q, k: q > k, reference=abs), strobe.InvalidProblem, "a closure holds"),
        (lambda: strobe.mask_mod(squared), strobe.InvalidProblem, "a function of 5 arguments"),
    ),
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_reference_reads_its_arguments_alone():
    hidden = torch.rand(3)
    with pytest.raises(strobe.InvalidProblem, match="captures other tensors"):
        strobe.score_mod(squared, reference=lambda s, b, h, q, k: s * hidden[h])


def test_torch_compile_takes_the_object():
    q, score = torch.randn(1, 20, 4, 16), _near(reference=near_reference)
    run = lambda q: strobe.attention(q, q, q, score_mod=score, mask=_MASK & strobe.causal())
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    grads = []
    for function in (run, compiled):
        leaf = q.clone().requires_grad_()
        function(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)  # the three gradients of q are added in another order


_MASK = _striped(reference=striped_reference)


@pytest.mark.nightly_cases("*-hopper")  # 8 s
@pytest.mark.parametrize(("target", "kernel"), ((A100, "portable"), (H200, "hopper")))
def test_kernels_compile_for_gpus(target, kernel):
    q, k, v = (_draw(1, 256, heads, 64).requires_grad_() for heads in (4, 2, 2))
    options = {"score_mod": _near(backward=near_backward), "mask": _striped() & strobe.causal(), "kernel": kernel}
    with posing(target), recording(target) as jobs:
        strobe.attention(q, k, v, **options).sum().backward()
    jobs = [job for job in jobs if job.name in ("forward_kernel", "keys_kernel", "backward_kernel")]
    assert len(jobs) == 2
    for job in jobs:
        assert compile_job(job).registers > 0
