"""Custom scores, masks and dropout on the portable kernels by the public functions, in the simulator and on a GPU,
against the CPU's kernels.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import strobe
from strobe.ops import mods as ops_mods
from strobe.problem.call import Call
from strobe.problem.mods import Dropout
from strobe.problem.target import FAKES
from tools.proof.simulate import on

pytest.importorskip("triton")

HALF = torch.float16  # of the outputs; sums are float32 in both
A100, H200 = FAKES["A100"], FAKES["H200"]


def _draw(*shape: int, seed: int = 0, dtype=HALF) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _qkv(rows=70, keys=90, heads=(4, 2), batch=2):
    shapes = (batch, rows, heads[0], 16), (batch, keys, heads[1], 16), (batch, keys, heads[1], 16)
    return [_draw(*shape, seed=n) for n, shape in enumerate(shapes)]


def _run(function, tensors, options, up):
    """out and gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = function(*leaves, **options)
    return [out, *torch.autograd.grad(out, leaves, up)]


def _both(function, tensors, options, target, up=None):
    """(portable's, the CPU's) out and gradients, in float32."""
    up = _draw(*tensors[0].shape, seed=7) if up is None else up
    wide = [t.float() for t in tensors]
    exact = _run(function, wide, options, up.float())
    with on(target):
        found = _run(function, tensors, options | {"kernel": "portable"}, up)
    return zip([t.float() for t in found], exact)


def _agree(pairs) -> None:
    for n, (got, exact) in enumerate(pairs):
        error = ((got - exact).norm() / exact.norm()).item()
        assert error < 4e-3, f"result {n}: {error:.1e}"


@pytest.mark.parametrize(("target", "causal"), ((A100, True), (H200, False)))
def test_dropout_drops_the_weights_that_the_cpu_drops(target, causal):
    options = {"dropout_p": 0.4, "dropout_seed": -(2**40) - 3, "causal": causal}
    _agree(_both(strobe.attention, _qkv(), options, target))
    found = _both(strobe.attention, _qkv(), options | {"dropout_seed": 5}, target)
    other = _run(strobe.attention, [t.float() for t in _qkv()], options, _draw(2, 70, 4, 16, seed=7).float())
    with pytest.raises(AssertionError, match="result 0"):  # another seed drops others
        _agree((got, exact) for (got, _), exact in zip(found, other))


def test_dropout_of_packed_sequences_and_documents():
    offsets = torch.tensor([0, 40, 40, 70], dtype=torch.int32)
    options = {"cu_seqlens_q": offsets, "dropout_p": 0.3, "dropout_seed": 11, "causal": True}
    _agree(_both(strobe.attention_varlen, [t[0] for t in _qkv(70, 70)], options, A100))
    ids = (torch.arange(70)[None] // 30).expand(2, 70).to(torch.int32)
    options = {"mask": strobe.documents(ids), "dropout_p": 0.3, "dropout_seed": torch.tensor([12])}
    _agree(_both(strobe.attention, _qkv(70, 70), options, A100))


def _part(q, k, v, seed, target=None):
    """Attention with dropout of query heads from 2, rows from 30 and keys from 16 on, as a process of a plan computes
    it, and its gradients.
    """
    part = [t.detach().clone().requires_grad_() for t in (q[:, 30:, 2:], k[:, 16:, 1:], v[:, 16:, 1:])]
    call = ops_mods.bind(Call(*part), None, None, Dropout(0.4, torch.tensor([seed, 2, 30, 16])))
    mods = call.mods._replace(texts=call.mods.texts._replace(dropout_offsets=True))
    with nullcontext() if target is None else on(target):
        out = ops_mods.run(call._replace(mods=mods, kernel="cpu" if target is None else "portable"))[0]
        return out.detach(), *torch.autograd.grad(out, part, _draw(*out.shape, seed=9).to(out.dtype))


@pytest.mark.parametrize("target", (A100, H200))
def test_dropout_of_a_part_counts_from_its_first_head_row_and_key(target):
    tensors, seed = _qkv(), 2**40 + 3
    exact = _part(*(t.float() for t in tensors), seed)
    seen = strobe.mask_mod(lambda b, h, q, k: k >= 16)
    whole = strobe.attention(*(t.float() for t in tensors), mask=seen, dropout_p=0.4, dropout_seed=seed)
    torch.testing.assert_close(exact[0], whole[:, 30:, 2:])
    _agree(zip(_part(*tensors, seed, target), exact))


def _table_gradient(function, tensors, options, target=None):
    """The gradient of relative_bias' table, by the portable kernels or the CPU's."""
    table = _draw(4, 9, dtype=torch.float32).requires_grad_()
    options = options | {"score_mod": strobe.relative_bias(table)}
    if target is None:
        out = function(*tensors, **options)
        return torch.autograd.grad(out, table, _draw(*out.shape, seed=3))[0]
    with on(target):
        out = function(*tensors, **options, kernel="portable")
        return torch.autograd.grad(out, table, _draw(*out.shape, seed=3))[0]


def test_functions_that_count_from_the_diagonal_over_packed_sequences():
    offsets = [torch.tensor(one, dtype=torch.int32) for one in ([0, 30, 30, 70], [0, 50, 53, 90])]
    options = {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    options["mask"] = strobe.window(20, 3) | strobe.mask_mod(lambda b, h, q, k: k % 5 == 0)
    tensors, alibi = [t[0] for t in _qkv()], {"score_mod": strobe.alibi(torch.rand(4))}
    _agree(_both(strobe.attention_varlen, tensors, options | alibi, A100))
    exact, found = (_table_gradient(strobe.attention_varlen, tensors, options, target) for target in (None, A100))
    _agree([(found, exact)])


def test_keys_outside_a_tile_of_a_document_add_nothing_to_captured_gradients():
    """A tile that ends within a document, or at the last key, has further keys with weights of their own."""
    ids = (torch.arange(90)[None] // 50).expand(2, 90).to(torch.int32)
    tensors, options = _qkv(90, 90), {"mask": strobe.documents(ids)}
    exact, found = (_table_gradient(strobe.attention, tensors, options, target) for target in (None, A100))
    _agree([(found, exact)])


@pytest.mark.parametrize("paged", (False, True))
def test_decode_with_functions(paged):
    lengths, heads = torch.tensor([70, 2, 33], dtype=torch.int32), (4, 2)
    k, v = _draw(3, 96, 2, 16, seed=1), _draw(3, 96, 2, 16, seed=2)
    cache = strobe.DenseCache(k, v, seqlens=lengths)
    if paged:
        table = torch.randperm(18, generator=torch.Generator().manual_seed(1)).view(3, 6).to(torch.int32)
        pools = [torch.empty(18, 16, 2, 16, dtype=HALF) for _ in range(2)]
        for pool, rows in zip(pools, (k, v)):
            pool[table.flatten().long()] = rows.reshape(18, 16, 2, 16)
        cache = strobe.PagedCache(*pools, seqlens=lengths, page_table=table)
    slopes, by_head = torch.rand(heads[0]), torch.tensor([2, 3, 4, 5])
    score = strobe.alibi(slopes)
    mask = strobe.mask_mod(lambda b, h, q, k: ((q - k) % by_head[h] < 2) | (k == b)) | strobe.window(1, 0)
    q = _draw(3, 3, 4, 16)
    exact = strobe.attention_decode(q, cache, score_mod=score, mask=mask, softcap=5.0)
    for b, n in enumerate(lengths.tolist()):
        one = [t[b : b + 1, :n] for t in (k, v)]
        shifted = strobe.mask_mod(
            lambda _, h, i, j, b=b, n=n: ((i + n - 3 - j) % by_head[h] < 2) | (j == b)
        ) | strobe.window(1, 0)
        row = strobe.attention(q[b : b + 1], *one, causal=True, score_mod=score, mask=shifted, softcap=5.0)
        assert torch.allclose(exact[b], row[0], atol=1e-3)
    with on(A100):
        found = strobe.attention_decode(q, cache, score_mod=score, mask=mask, softcap=5.0, kernel="portable")
        part = strobe.partial_attention_decode(q, cache, score_mod=score, mask=mask, softcap=5.0, kernel="portable")
        out = torch.empty_like(q)
        strobe.attention_decode(q, cache, score_mod=score, mask=mask, softcap=5.0, kernel="portable", out=out)
    _agree(((found.float(), exact.float()),))
    assert torch.equal(out, found) and torch.allclose(part.out, exact.float(), atol=4e-3)
    assert strobe.explain_decode(q, cache, score_mod=score).problem.mods is not None


def test_the_greatest_score_of_a_row():
    q, k, v = _qkv()
    from strobe.problem.call import Call

    score = lambda s, b, h, i, j: torch.where(i == 3, -torch.inf, s * 2 - 0.1 * j)
    bound = ops_mods.bind(Call(q, k, v, left=20, right=5, partial=True), score, None, max_scores=True)
    exact = ops_mods.run(bound)[2]
    with on(A100):
        found = ops_mods.run(bound._replace(kernel="portable"))[2]
    assert torch.allclose(found, exact, atol=1e-4) and (exact[:, :, 3] == -torch.inf).all()
    dense = strobe.window(20, 5).dense(70, 90)
    s = torch.einsum("bihd,bjhd->bhij", q.float(), k.float().repeat_interleave(2, 2)) / 4
    s = torch.where(dense, s * 2 - 0.1 * torch.arange(90), -torch.inf)
    s[:, :, 3] = -torch.inf
    assert torch.allclose(s.amax(-1), exact, atol=1e-4)


# ---------------------------------------------------------------- on a GPU


def _on_gpu(function, tensors, options, dtype):
    """(the GPU's portable kernels, the CPU's in float32): out and gradients."""
    up = _draw(*tensors[0].shape, seed=7)
    moved = {name: one.cuda() if isinstance(one, torch.Tensor) else one for name, one in options.items()}
    found = _run(function, [t.cuda().to(dtype) for t in tensors], moved | {"kernel": "portable"}, up.cuda().to(dtype))
    return zip([t.float().cpu() for t in found], _run(function, [t.float() for t in tensors], options, up.float()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("packed", (False, True))
def test_dropout_on_a_gpu(dtype, packed):
    if dtype == torch.float32 and packed:
        pytest.skip("float32 differs in its tiles alone")
    options = {"dropout_p": 0.3, "dropout_seed": torch.tensor([2**40 + 5]), "causal": True}
    if packed:
        options["cu_seqlens_q"] = torch.tensor([0, 100, 100, 300], dtype=torch.int32)
        _agree(_on_gpu(strobe.attention_varlen, [t[0] for t in _qkv(300, 300)], options, dtype))
    else:
        _agree(_on_gpu(strobe.attention, _qkv(300, 333), options, dtype))


@pytest.mark.gpu
def test_dropout_has_the_same_bits_each_time_and_in_a_graph():
    q, k, v = (t.cuda() for t in _qkv(300, 333))
    seed = torch.tensor([3], device="cuda")
    run = lambda: strobe.attention(q, k, v, dropout_p=0.3, dropout_seed=seed, causal=True)
    first, second = run(), run()
    assert torch.equal(first, second)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    assert torch.equal(out, first)
    seed.fill_(4)
    graph.replay()
    assert torch.equal(out, run()) and not torch.equal(out, first)


@pytest.mark.gpu
def test_functions_over_packed_sequences_on_a_gpu():
    offsets = [torch.tensor(one, dtype=torch.int32) for one in ([0, 30, 30, 300], [0, 50, 53, 333])]
    tensors = [t[0] for t in _qkv(300, 333)]
    table, gradients = _draw(4, 9, dtype=torch.float32), []
    for device in ("cpu", "cuda"):
        leaf = table.to(device).requires_grad_()
        mask = strobe.window(20, 3) | strobe.mask_mod(lambda b, h, q, k: k % 5 == 0)
        options = {"score_mod": strobe.relative_bias(leaf), "mask": mask}
        options |= {"cu_seqlens_q": offsets[0].to(device), "cu_seqlens_k": offsets[1].to(device)}
        options["kernel"] = "portable" if device == "cuda" else None
        out = strobe.attention_varlen(*(t.to(device) for t in tensors), **options)
        gradients.append((out.float().cpu(), torch.autograd.grad(out, leaf, _draw(*out.shape).to(device))[0].cpu()))
    _agree(zip(gradients[1], gradients[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", (16, 128))
def test_decode_with_functions_on_a_gpu(page_size):
    lengths, pages = torch.tensor([900, 2, 333], dtype=torch.int32), 1024 // page_size
    pools = [_draw(3 * pages, page_size, 2, 64, seed=n) for n in (1, 2)]
    table, q = torch.randperm(3 * pages).view(3, pages).to(torch.int32), _draw(3, 3, 8, 64)
    slopes, found = torch.rand(8), []
    for device in ("cpu", "cuda"):
        cache = strobe.PagedCache(*(t.to(device) for t in pools), seqlens=lengths.to(device),
                                  page_table=table.to(device))  # fmt: skip
        mask = strobe.mask_mod(lambda b, h, q, k: ((q - k) % (h + 2) < 2) | (k == b))
        kernel = "portable" if device == "cuda" else None
        options = {"score_mod": strobe.alibi(slopes.to(device)), "mask": mask, "kernel": kernel}
        found.append(strobe.attention_decode(q.to(device), cache, **options).float().cpu())
    _agree([(found[1], found[0])])
