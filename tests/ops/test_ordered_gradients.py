"""Gradients of captured tensors with `deterministic=True` on GPUs' kernels, in the simulator against the CPU's: exact
sums, and the second pass for tensors that are too large for them.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton")

import strobe
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import ordered_gradients
from strobe.ops.ordered_gradients import PackedRows
from strobe.problem import mods as problem_mods
from strobe.problem.call import Call
from strobe.problem.target import FAKES
from tests.mods import triton_examples
from tools.proof.simulate import on

A100, H200 = FAKES["A100"], FAKES["H200"]
ROWS, KEYS, HEADS = 70, 90, (4, 2)


@pytest.fixture
def second_pass(monkeypatch):
    """As for captured tensors that are too large for exact sums."""
    monkeypatch.setattr(problem_mods, "MOST_EXACT_SUMS", -1)
    with CACHE.emptied():
        yield monkeypatch


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CASES = {
    "per head": ((4,), lambda s, b, h, q, k, t: s * (1 + t[h]), {"causal": True}),
    "a scalar, softcap": ((), lambda s, b, h, q, k, t: s * t, {"softcap": 3.0}),
    "per row, window": ((ROWS,), lambda s, b, h, q, k, t: s + t[q] * torch.tanh(s), {"window": (30, 5)}),
    "per key, mask": (
        (KEYS,), lambda s, b, h, q, k, t: s + t[k],
        {"mask": strobe.mask_mod(lambda b, h, q, k: (q + k + h) % 3 != b) & strobe.causal()},
    ),
    "relative, hidden scores": (
        (4, 9), lambda s, b, h, q, k, t: torch.where(k % 7 == 3, -torch.inf, s + t[h, (q - k).clamp(-4, 4) + 4]), {},
    ),
    "sinks, key lengths": (
        (2, 4), lambda s, b, h, q, k, t: s * t[b, h],
        {"sinks": _draw(4, seed=9), "mask": strobe.key_lengths(torch.tensor([90, 33], dtype=torch.int32))},
    ),
}  # fmt: skip


def _gradients(name: str, target=None, seed: int = 0) -> list[torch.Tensor]:
    shape, function, options = CASES[name]
    captured = _draw(*shape, seed=5).requires_grad_()
    score = lambda s, b, h, q, k: function(s, b, h, q, k, captured)
    dtype = torch.float32 if target is None else torch.float16
    shapes = ((2, ROWS, HEADS[0], 16), (2, KEYS, HEADS[1], 16), (2, KEYS, HEADS[1], 16))
    leaves = [_draw(*one, seed=n).half().to(dtype).requires_grad_() for n, one in enumerate(shapes)]
    up = _draw(2, ROWS, HEADS[0], 16, seed=7).half().to(dtype)
    run = lambda: strobe.attention(*leaves, score_mod=score, deterministic=True, **options)
    if target is None:
        return list(torch.autograd.grad(run(), [*leaves, captured], up))
    with on(target, "random", seed):
        return list(torch.autograd.grad(run(), [*leaves, captured], up))


def _at_night(names, each_commit):
    return [pytest.param(one, marks=() if one in each_commit else pytest.mark.nightly) for one in names]


@pytest.mark.parametrize("name", CASES)
def test_exact_sums_agree_with_the_cpu(name):
    for got, exact in zip(_gradients(name, A100), _gradients(name)):
        assert ((got.float() - exact).norm() / exact.norm()).item() < 4e-3


@pytest.mark.parametrize("name", _at_night(CASES, ("per key, mask", "relative, hidden scores")))
def test_the_second_pass_agrees_with_the_cpu(name, second_pass):
    second_pass.setattr(ordered_gradients, "MOST_ELEMENTS", 32 * KEYS * HEADS[0])  # several blocks of rows
    for got, exact in zip(_gradients(name, A100), _gradients(name)):
        assert ((got.float() - exact).norm() / exact.norm()).item() < 4e-3


@pytest.mark.parametrize(("name", "target"), (
    ("per head", H200), ("per row, window", A100), pytest.param("per row, window", H200, marks=pytest.mark.nightly),
))  # fmt: skip
def test_equal_bits_in_any_order(name, target, monkeypatch):
    """Programs and warps run in another order with another seed. The second pass is not taken."""
    monkeypatch.delattr(ordered_gradients, "_add")
    first, second = (_gradients(name, target, seed) for seed in (1, 2))
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    for got, exact in zip(first, _gradients(name)):
        assert ((got.float() - exact).norm() / exact.norm()).item() < 4e-3


@pytest.mark.parametrize("target", (A100, pytest.param(H200, marks=pytest.mark.nightly)))
def test_elements_with_one_addition_need_no_sums(target, second_pass):
    """A bias for each score is as large as the scores, and has no second pass."""
    second_pass.delattr(ordered_gradients, "_add")

    def gradients(dtype, seed=0):
        bias = _draw(4, 40, 50, seed=5).requires_grad_()
        q, k = (_draw(1, n, 4, 16, seed=n).half().to(dtype).requires_grad_() for n in (40, 50))
        run = lambda: strobe.attention(q, k, k, score_mod=strobe.bias(bias), causal=True, deterministic=True)
        with on(target, "random", seed) if dtype == torch.float16 else nullcontext():
            out = run()
            return torch.autograd.grad(out, (q, k, bias), _draw(*out.shape, seed=7).half().to(dtype))

    found = gradients(torch.float16, 1)
    assert all(map(torch.equal, found, gradients(torch.float16, 2)))
    for got, exact in zip(found, gradients(torch.float32)):
        assert ((got.float() - exact).norm() / exact.norm()).item() < 4e-3


def test_repeated_calls_and_the_op_have_exact_sums(monkeypatch):
    """A repeated call takes another path through the host's code, as does a graph of torch.compile."""
    monkeypatch.delattr(ordered_gradients, "_add")
    captured = _draw(4, seed=5).requires_grad_()
    score = strobe.score_mod(lambda s, b, h, q, k: s * (1 + captured[h]))
    q = _draw(1, 40, 4, 16).half().requires_grad_()
    run = lambda q: strobe.attention(q, q, q, score_mod=score, deterministic=True)
    up = _draw(1, 40, 4, 16, seed=7).half()
    with on(A100):
        found = [torch.autograd.grad(run(q), (q, captured), up) for _ in range(3)]
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        found.append(torch.autograd.grad(compiled(q), (q, captured), up))
    assert all(torch.equal(one[1], found[0][1]) for one in found)


# ---------------------------------------------------------------- packed and partial calls, and dropout

# four sequences; one has no query, and the first and last tokens are in none
OFFSETS_Q, OFFSETS_K = (2, 40, 40, 57, 68), (3, 20, 50, 78, 90)
BOUNDS = {"max_seqlen_q": 38, "max_seqlen_k": 30}


def _packed(q, k, v, options) -> list[torch.Tensor]:
    offsets = [torch.tensor(ends, dtype=torch.int32, device=q.device) for ends in (OFFSETS_Q, OFFSETS_K)]
    options = options | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets))
    return [strobe.attention_varlen(q[0], k[0], v[0], **options)]


def _both_partial(q, k, v, options) -> list[torch.Tensor]:
    offsets = [torch.tensor(ends, dtype=torch.int32, device=q.device) for ends in (OFFSETS_Q, OFFSETS_K)]
    dense = strobe.partial_attention(q, k, v, **options)
    options = options | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets))
    packed = strobe.partial_attention_varlen(q[0], k[0], v[0], **options)
    return [dense.out, dense.lse, packed.out, packed.lse.masked_fill(packed.lse == -torch.inf, 0.0)]


OTHERS = {
    "packed, lengths read": (_packed, {"window": (12, 20)}),
    "packed, bounds": (_packed, {"window": (12, 20), "softcap": 3.0} | BOUNDS),
    "packed, dropout": (_packed, {"dropout_p": 0.3, "dropout_seed": 5} | BOUNDS),
    "dropout": (lambda q, k, v, options: [strobe.attention(q, k, v, **options)], {"dropout_p": 0.3, "dropout_seed": 5}),
    "partial": (_both_partial, {"mask": strobe.mask_mod(lambda b, h, q, k: (q + 2 * k + h) % 3 != b % 3)}),
}  # fmt: skip


def _other_gradients(name: str, target=None, seed: int = 0, device: str = "cpu") -> list[torch.Tensor]:
    """Of q, k, v, a table by sequence and head, and a table of relative positions. target: of the simulator."""
    run, options = OTHERS[name]
    captured = [_draw(*one, seed=5).to(device).requires_grad_() for one in ((4, 4), (9,))]
    score = lambda s, b, h, q, k: s * (1 + captured[0][b, h]) + captured[1][(q - k).clamp(-4, 4) + 4]
    dtype = torch.float32 if target is None and device == "cpu" else torch.float16
    shapes = ((1, ROWS, HEADS[0], 16), (1, KEYS, HEADS[1], 16), (1, KEYS, HEADS[1], 16))
    leaves = [_draw(*one, seed=n).half().to(device, dtype).requires_grad_() for n, one in enumerate(shapes)]

    def gradients() -> list[torch.Tensor]:
        found = run(*leaves, options | {"score_mod": score, "deterministic": True})
        ups = [_draw(*out.shape, seed=7 + n).half().to(device, out.dtype) for n, out in enumerate(found)]
        return list(torch.autograd.grad(found, [*leaves, *captured], ups))

    if target is None:
        return gradients()
    with on(target, "random", seed):
        return gradients()


SMALL, LARGE = 16 * 30 * HEADS[0], 2 * 38 * 30 * HEADS[0]
EACH_COMMIT = {("packed, bounds", LARGE), ("dropout", SMALL), ("partial", SMALL)}


@pytest.mark.parametrize("name", _at_night(OTHERS, ("packed, lengths read",)))
def test_exact_sums_of_packed_and_partial_calls_and_dropout(name, monkeypatch):
    monkeypatch.delattr(ordered_gradients, "_add")
    for got, exact in zip(_other_gradients(name, A100), _other_gradients(name)):
        assert ((got.float() - exact).norm() / exact.norm()).item() < 4e-3


@pytest.mark.parametrize(("name", "elements"), [
    pytest.param(name, size, marks=() if (name, size) in EACH_COMMIT else pytest.mark.nightly)
    for name in OTHERS for size in (SMALL, LARGE)
])  # fmt: skip
def test_packed_and_partial_calls_and_dropout(name, elements, second_pass):
    """In blocks of two sequences, and of some rows of one."""
    second_pass.setattr(ordered_gradients, "MOST_ELEMENTS", elements)
    for got, exact in zip(_other_gradients(name, A100), _other_gradients(name)):
        assert ((got.float() - exact).norm() / exact.norm()).item() < 4e-3


@pytest.mark.nightly
def test_equal_bits_of_packed_sequences_on_hopper():
    first, second = (_other_gradients("packed, bounds", H200, seed=seed) for seed in (1, 2))
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    for got, exact in zip(first, _other_gradients("packed, bounds")):
        assert ((got.float() - exact).norm() / exact.norm()).item() < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("is_exact", (True, False))
@pytest.mark.parametrize("name", OTHERS)
def test_packed_and_partial_calls_and_dropout_on_a_gpu(name, is_exact, request):
    if not is_exact:
        request.getfixturevalue("second_pass")
    first, second = (_other_gradients(name, device="cuda") for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    for got, exact in zip(first, _other_gradients(name)):
        assert ((got.cpu().float() - exact).norm() / exact.norm()).item() < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("is_exact", (True, False))
def test_packed_sequences_in_a_graph(is_exact, request):
    """With bounds, nothing is read on the host."""
    if not is_exact:
        request.getfixturevalue("second_pass")
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    q = _draw(300, 4, 64).cuda().half().requires_grad_()
    slopes = torch.rand(2, 4, device="cuda", requires_grad=True)
    score = lambda s, b, h, q, k: s * slopes[b, h]
    options = {
        "cu_seqlens_q": offsets,
        "max_seqlen_q": 200,
        "max_seqlen_k": 200,
        "score_mod": score,
        "deterministic": True,
    }

    def gradients() -> tuple[torch.Tensor, ...]:
        out = strobe.attention_varlen(q, q, q, causal=True, **options)
        return torch.autograd.grad(out, (q, slopes), torch.ones_like(out))

    eager = gradients()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gradients()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients()
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, eager))


def test_a_sequence_longer_than_promised_has_no_gradient(second_pass):
    """Its captured tensors have none either, because the ordered pass does not visit all rows of the sequence."""
    slopes = torch.rand(2, requires_grad=True)
    q = _draw(70, 2, 16).half().requires_grad_()
    offsets = torch.tensor([0, 10, 70], dtype=torch.int32)
    score = lambda s, b, h, q, k: s * slopes[h]
    with on(A100):
        out = strobe.attention_varlen(
            q, q, q, cu_seqlens_q=offsets, max_seqlen_q=40, max_seqlen_k=70, score_mod=score, deterministic=True
        )
        (found,) = torch.autograd.grad(out.nan_to_num().sum(), slopes)
    assert found.isnan().all()


def test_a_promise_beyond_the_rows_takes_no_more_steps(second_pass):
    """A tensor has no sequence longer than its rows, whatever was promised."""
    slopes = torch.rand(2, requires_grad=True)
    q = _draw(8, 2, 16).half().requires_grad_()
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)

    def gradient(promise):
        longest = {"max_seqlen_q": promise, "max_seqlen_k": promise}
        score = lambda s, b, h, q, k: s * slopes[h]
        out = strobe.attention_varlen(q, q, q, cu_seqlens_q=offsets, score_mod=score, deterministic=True, **longest)
        return torch.autograd.grad(out.float().sum(), slopes)[0]

    call = Call(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    rows = PackedRows.of(call, (offsets, offsets), (1 << 30, 1 << 30))
    assert (rows.longest_q, rows.longest_k) == (8, 8)
    with on(A100):
        assert torch.equal(gradient(10**12), gradient(8))


def test_a_triton_function_without_a_reference_is_refused(second_pass):
    """The second pass runs in torch operations."""
    bias = strobe.bias(torch.zeros(20, 20, requires_grad=True))
    q = _draw(1, 20, 4, 16).half()
    shown = strobe.mask_mod(triton_examples.striped, captures=(torch.full((4,), 3), 0))
    with on(A100):
        with pytest.raises(strobe.UnsupportedProblem, match=r"captured tensors: .* pass reference="):
            strobe.attention(q, q, q, score_mod=bias, mask=shown, deterministic=True)
        assert strobe.supports(q, q, q, score_mod=bias, mask=shown)
        second_pass.setattr(problem_mods, "MOST_EXACT_SUMS", 400)
        assert strobe.supports(q, q, q, score_mod=bias, mask=shown, deterministic=True)


def test_lengths_are_not_read_while_a_graph_is_captured(monkeypatch):
    q = _draw(8, 1, 16)
    call = Call(q, q, q)
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    monkeypatch.setattr(ordered_gradients.torch_private, "cuda_is_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(strobe.UnsupportedProblem, match="pass max_seqlen_q and max_seqlen_k"):
        PackedRows.of(call, (offsets, offsets), (None, 8))
    assert PackedRows.of(call, (offsets, offsets), (7, 8)).longest_q == 7
