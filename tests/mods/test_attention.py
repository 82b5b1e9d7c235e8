"""attention with custom scores and masks on a CPU, against dense attention in float64 that calls the functions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import strobe
from strobe.ops import mods as ops_mods
from strobe.problem.call import Call
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.testing.mods import MODS, Functions, dense


def _tensors(dtype, rows=64, keys=64, heads=(4, 2), batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return draw(batch, rows, heads[0], 16), draw(batch, keys, heads[1], 16), draw(batch, keys, heads[1], 8)


def _mask(functions: Functions, builtin=None):
    if functions.mask is None:
        return builtin
    return strobe.mask_mod(functions.mask) if builtin is None else builtin & strobe.mask_mod(functions.mask)


def _check(tensors, functions, builtin=None, bound=1e-12, **options):
    q, k, v = tensors
    part = strobe.partial_attention(q, k, v, score_mod=functions.score, mask=_mask(functions, builtin), **options)
    out, lse = dense(q, k, v, functions, builtin=builtin)
    assert torch.equal(part.lse == -torch.inf, lse == -torch.inf)
    finite = lse != -torch.inf
    assert (part.out - out).abs().max() < bound and (part.lse - lse)[finite].abs().max() < bound
    leaves = [t for t in (*tensors, *functions.leaves) if t.requires_grad]
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    up_lse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64) * finite
    found = torch.autograd.grad([part.out, part.lse], leaves, [up.to(part.out.dtype), up_lse.to(part.lse.dtype)])
    lse = torch.where(finite, lse, 0.0)
    for got, exact in zip(found, torch.autograd.grad([out, lse], leaves, [up, up_lse])):
        assert got.isfinite().all()
        assert (got - exact).abs().max() < bound * 30 * (1 + exact.abs().max())


# what attention-gym 0.0.17 has in attn_gym.masks and attn_gym.mods -> the case here
ATTENTION_GYM = {
    "causal": "causal", "sliding_window": "sliding_window", "prefix_lm": "prefix_lm",
    "document_mask, packed_causal_doc": "documents", "dilated_sliding_window": "dilated_window",
    "global and window": "global_and_window", "natten": "natten", "tiled natten": "tiled_natten",
    "morton natten": "morton_natten", "sliding tile attention 2d": "sliding_tile_2d",
    "sliding tile attention 3d": "sliding_tile_3d", "Sparse-VideoGen, spatial heads": "video_spatial",
    "Sparse-VideoGen, temporal heads": "video_temporal", "video sparse attention": "video_sparse",
    "flamingo": "flamingo", "block_diffusion": "block_diffusion", "jetspec tree": "speculation_tree",
    "shared_prefix": "shared_prefix", "batchify": "batchify", "alibi": "alibi", "softcapping": "softcap",
    "activation": "activation", "graphormer, spatial encoding": "graphormer_spatial",
    "graphormer, edge encoding": "graphormer_edges", "sandwich": "sandwich", "latent_attention, rope": "mla_rope",
}  # fmt: skip


def test_each_function_of_attention_gym_is_a_case():
    assert set(ATTENTION_GYM.values()) <= set(MODS) and len(set(ATTENTION_GYM.values())) == len(ATTENTION_GYM)


@pytest.mark.parametrize("name", MODS)
def test_a_named_function_is_that_of_the_oracle(name):
    _check(_tensors(torch.float64), MODS[name].make(torch.float64))


@pytest.mark.parametrize("name", ("alibi", "learned", "mla_rope", "batchify", "activation"))
def test_float32_is_as_precise_as_plain_attention(name):
    _check(_tensors(torch.float32), MODS[name].make(torch.float32), bound=4e-6)


@pytest.mark.parametrize("name", ("learned", "by_head", "hidden_by_score"))
@pytest.mark.parametrize("batch_invariant", (False, True))
def test_tiles_of_long_and_odd_sequences(name, batch_invariant):
    """More rows and keys than a tile has."""
    functions = MODS[name].make(torch.float64)
    if name == "learned":
        rows = torch.randn(301, dtype=torch.float64, requires_grad=True)
        functions = Functions(lambda s, b, h, q, k: s * 0.5 + rows[q], None, (rows,))
    tensors = _tensors(torch.float64, 301, 311)
    _check(tensors, functions, strobe.window(100, 30), batch_invariant=batch_invariant)


def test_built_in_masks_hold_beside_a_function():
    functions = MODS["by_head"].make(torch.float64)
    ids = (torch.arange(64)[None] // 23).expand(2, 64).to(torch.int32)
    lengths = torch.tensor([64, 30], dtype=torch.int32)
    for builtin in (strobe.causal(), strobe.documents(ids), strobe.key_lengths(lengths), strobe.prefix_causal(9)):
        _check(_tensors(torch.float64), functions, builtin)


def test_softcap_comes_before_the_function():
    q, k, v = _tensors(torch.float64)
    found = strobe.attention(q, k, v, softcap=2.0, score_mod=lambda s, b, h, q, k: s * s)
    exact, _ = dense(q, k, v, Functions(lambda s, b, h, q, k: (2.0 * torch.tanh(s / 2.0)) ** 2))
    assert (found - exact).abs().max() < 1e-12
    up = torch.randn_like(exact)
    for got, want in zip(torch.autograd.grad(found, [q, k, v], up), torch.autograd.grad(exact, [q, k, v], up)):
        assert (got - want).abs().max() < 1e-11


def test_packed_sequences_count_positions_and_sequences_from_their_start():
    offsets = torch.tensor([0, 20, 20, 64], dtype=torch.int32)
    table = torch.randn(3, 64, dtype=torch.float64, requires_grad=True)
    score = lambda s, b, h, q, k: s + table[b, q] - 0.1 * k * (h + 1)
    seen = lambda b, h, q, k: (q - k + b) % 3 != 0
    q, k, v = (t[0].detach().requires_grad_() for t in _tensors(torch.float64, batch=1))
    options = {"score_mod": score, "mask": strobe.mask_mod(seen), "cu_seqlens_q": offsets, "causal": True}
    found = strobe.attention_varlen(q, k, v, **options)
    parts = []
    for n, (start, stop) in enumerate(((0, 20), (20, 20), (20, 64))):
        own = Functions(lambda s, b, h, q, k, n=n: score(s, b + n, h, q, k), partial(_shifted, seen, n))
        if stop > start:
            parts.append(dense(*(t[None, start:stop] for t in (q, k, v)), own, builtin=strobe.causal())[0][0])
    exact = torch.cat(parts)
    assert (found - exact).abs().max() < 1e-12
    up = torch.randn_like(exact)
    leaves = [q, k, v, table]
    for got, want in zip(torch.autograd.grad(found, leaves, up), torch.autograd.grad(exact, leaves, up)):
        assert (got - want).abs().max() < 1e-11


def _shifted(seen, n, b, h, q, k):
    return seen(b + n, h, q, k)


@pytest.mark.parametrize("name", ("learned", "relative", "graphormer_edges", "activation"))
def test_gradients_are_finite_differences(name):
    functions = MODS[name].make(torch.float64)
    q, k, v = (t.detach()[:, :5].requires_grad_() for t in _tensors(torch.float64))
    leaves = (q, k, v, *functions.leaves)
    run = lambda *_: strobe.attention(q, k, v, score_mod=functions.score)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_a_sink_stays_the_sum_of_a_row_that_a_function_hides():
    q, k, v = (t.detach() for t in _tensors(torch.float32))
    hidden = strobe.mask_mod(lambda b, h, q, k: q < 0)
    sinks = torch.linspace(-1, 1, 4)
    assert strobe.attention(q, k, v, mask=hidden, sinks=sinks).abs().max() == 0
    assert strobe.partial_attention(q, k, v, mask=hidden).lse.max() == -torch.inf


def test_nan_of_a_row_stays_in_its_row():
    q, k, v = (t.detach() for t in _tensors(torch.float32))
    q[0, 7, 1] = torch.nan
    out = strobe.attention(q, k, v, score_mod=lambda s, b, h, q, k: s.clamp(-4, 4), causal=True)
    assert out[0, 7, 1].isnan().all() and out.isnan().sum() == out.shape[-1]


@pytest.mark.parametrize(
    ("make", "shape"),
    ((strobe.alibi, (4,)), (strobe.alibi, (2, 4)), (strobe.relative_bias, (4, 33)), (strobe.bias, (1, 4, 64, 70)),
     (strobe.bias, (64, 70)), (strobe.relative_bias, (9,))),
)  # fmt: skip
def test_ready_made_scores_equal_their_formula(make, shape):
    table = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    tensors = _tensors(torch.float64, 64, 70)
    d, half = 70 - 64, shape[-1] // 2

    def formula(s, b, h, q, k):
        if make is strobe.alibi:
            return s - (table[h] if table.dim() == 1 else table[b, h]) * (q + d - k).abs()
        if make is strobe.bias:
            return s + table
        at = (k - q - d).clamp(-half, half) + half
        return s + (table[at] if table.dim() == 1 else table[h, at])

    q, k, v = tensors
    found = strobe.attention(q, k, v, score_mod=make(table), causal=True)
    exact, _ = dense(q, k, v, Functions(formula), builtin=strobe.causal())
    assert (found - exact).abs().max() < 1e-12
    up, leaves = torch.randn_like(exact), [q, k, v, table]
    for got, want in zip(torch.autograd.grad(found, leaves, up), torch.autograd.grad(exact, leaves, up)):
        assert (got - want).abs().max() < 1e-10


def test_the_same_call_gives_the_same_bits_of_captured_gradients():
    functions = MODS["graphormer_edges"].make(torch.float32)
    q, k, v = _tensors(torch.float32)
    grads = [
        torch.autograd.grad(strobe.attention(q, k, v, score_mod=functions.score).sum(), functions.leaves)
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_flex_attention_has_torchs_signature_and_results():
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    q, k, v = (t.detach().transpose(1, 2) for t in _tensors(torch.float32))
    v = torch.cat([v, v], -1)
    blocks = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 40), 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    score = lambda s, b, h, q, k: s * 1.5 - 0.01 * (q - k)
    options = {"score_mod": score, "block_mask": blocks, "scale": 0.3, "enable_gqa": True}
    exact = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    found = strobe.flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    assert torch.allclose(found[0], exact[0], atol=2e-6) and torch.allclose(found[1].lse, exact[1].lse, atol=2e-6)
    assert torch.equal(strobe.flex_attention(q, k, v, **options), found[0])
    with pytest.raises(strobe.InvalidProblem, match="enable_gqa=True"):
        strobe.flex_attention(q, k, v)
    with pytest.raises(strobe.InvalidProblem, match="block_mask: got one of 64 x 64"):
        strobe.flex_attention(q[:, :, :32], k, v, block_mask=blocks, enable_gqa=True)
    from torch.nn.attention.flex_attention import _create_empty_block_mask

    anything = strobe.flex_attention(q, k, v, block_mask=_create_empty_block_mask(q, k), enable_gqa=True)
    assert torch.allclose(anything, strobe.flex_attention(q, k, v, enable_gqa=True), atol=2e-6)
    one = strobe.flex_attention(q, k[:1], v[:1], enable_gqa=True)
    assert torch.allclose(one[0], strobe.flex_attention(q, k, v, enable_gqa=True)[0], atol=2e-6)


def test_flex_attention_refuses_return_lse_beside_return_aux():
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = (t.detach().transpose(1, 2) for t in _tensors(torch.float32))
    for asked in (AuxRequest(max_scores=True), AuxRequest(lse=True)):
        with pytest.raises(strobe.InvalidProblem, match="return_lse: got True beside return_aux, expected False; "):
            strobe.flex_attention(q, k, v, enable_gqa=True, return_lse=True, return_aux=asked)


def test_flex_attention_under_autocast_has_one_dtype():
    from torch.nn.attention.flex_attention import AuxRequest

    q = torch.randn(1, 2, 16, 8)
    for dtype, expected in ((torch.float32, torch.bfloat16), (torch.float64, torch.float64)):
        x, wide = q.to(dtype), torch.promote_types(dtype, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            alone, (out, lse) = strobe.flex_attention(x, x, x), strobe.flex_attention(x, x, x, return_lse=True)
            beside, aux = strobe.flex_attention(x, x, x, return_aux=AuxRequest(lse=True, max_scores=True))
        assert {alone.dtype, out.dtype, beside.dtype} == {expected}
        assert (lse.dtype, aux.lse.dtype) == (wide, wide)
        assert torch.allclose(alone, out, atol=1e-2) and torch.equal(out, beside)


def test_a_block_mask_hides_what_its_lists_leave_out():
    from torch.nn.attention.flex_attention import BlockMask

    counts, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=4, mask_mod=lambda b, h, q, k: k % 2 == 0)
    seen = strobe.mask_mod(blocks).dense(8, 8)[0]
    assert seen[0].int().tolist() == [0, 0, 0, 0, 1, 0, 1, 0] and seen[5].int().tolist() == [1, 0] * 4


@pytest.mark.parametrize("shape", [(2, 4, 64, 64), (2, 1, 64, 64), (1, 4, 1, 64), (64, 64), (64,)])
def test_a_tensor_of_bools_is_a_mask(shape):
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.7
    whole = seen.expand(2, 4, 64, 64)
    formula = Functions(lambda s, *_: s, lambda b, h, q, k: whole[b, h, q, k])
    mask = strobe.mask_mod(seen)
    assert torch.equal(mask.dense(64, 64, batch=2, heads=4), whole)
    q, k, v = _tensors(torch.float64)
    found = strobe.attention(q, k, v, mask=mask, causal=True)
    assert (found - dense(q, k, v, formula, builtin=strobe.causal())[0]).abs().max() < 1e-12
    for wrong, words in ((seen.int(), r"mask_mod: got torch\.int32"), (whole[None], r"mask_mod: got shape \[1, 2, 4")):
        with pytest.raises(strobe.InvalidProblem, match=words):
            strobe.mask_mod(wrong)


def test_objects_that_were_made_before_are_compiled_into_one_graph():
    table = torch.randn(4, 33, dtype=torch.float64, requires_grad=True)
    score = strobe.score_mod(lambda s, b, h, q, k: s + table[h, (q - k).clamp(-16, 16) + 16])
    seen = strobe.mask_mod(lambda b, h, q, k: q - k < 9)
    q, k, v = _tensors(torch.float64)
    run = lambda q, k, v: strobe.attention(q, k, v, score_mod=score, mask=seen)
    torch.compiler.reset()
    found, exact = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v), run(q, k, v)
    up = torch.randn_like(exact)
    leaves = [q, k, v, table]
    assert torch.equal(found, exact)
    for got, want in zip(torch.autograd.grad(found, leaves, up), torch.autograd.grad(exact, leaves, up)):
        assert torch.equal(got, want)


def test_the_ops_pass_torchs_own_checks():
    functions = MODS["learned"].make(torch.float64)
    q, k, v = (t.detach()[:, :9] for t in _tensors(torch.float64))
    call = ops_mods.bind(
        Call(q.requires_grad_(), k, v), functions.score, strobe.mask_mod(MODS["by_head"].make(torch.float64).mask)
    )
    arguments = ops_mods.arguments(call)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops_mods.FORWARD, arguments, test_utils=checks)
    out, lse, greatest = ops_mods.FORWARD(*arguments)
    assert greatest.numel() == 0
    torch.library.opcheck(ops_mods.FORWARD_OUT, (torch.empty_like(out), *arguments), test_utils=checks)
    torch.library.opcheck(ops_mods.BACKWARD, (torch.ones_like(out), out, lse, None, *arguments), test_utils=checks)


def test_out_is_written_in_place():
    functions = MODS["by_head"].make(torch.float32)
    q, k, v = (t.detach() for t in _tensors(torch.float32))
    mask, out = strobe.mask_mod(functions.mask), torch.full((2, 64, 4, 8), torch.nan)
    assert strobe.attention(q, k, v, mask=mask, out=out) is out
    assert torch.equal(out, strobe.attention(q, k, v, mask=mask))
    offsets = torch.tensor([0, 64], dtype=torch.int32)
    packed = torch.empty(64, 4, 8)
    strobe.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=offsets, score_mod=functions.score, mask=mask, out=packed)
    assert torch.equal(packed, out[0])


@pytest.mark.parametrize("shape", [(0,), (0, 4), (64, 0)])
def test_a_captured_tensor_without_elements_is_refused(shape):
    """Indices are clamped, and here there is no element to clamp to. A call without rows reads none."""
    empty = torch.zeros(shape)
    read = lambda score, b, h, i, j: score + (empty[i] if empty.dim() == 1 else empty[i, h])
    q = torch.randn(1, 64, 2, 16)
    with pytest.raises(strobe.InvalidProblem, match="score_mod or mask: got a captured tensor of shape"):
        strobe.attention(q, q, q, score_mod=read)
    with pytest.raises(strobe.InvalidProblem, match="score_mod or mask: got a captured tensor of shape"):
        strobe.attention(q, q, q, mask=strobe.mask_mod(lambda b, h, i, j: read(0.0, b, h, i, j) > 0))
    assert strobe.attention(q[:, :0], q, q, score_mod=read).shape == (1, 0, 2, 16)


def test_what_is_not_supported_says_so():
    q, k, v = (t.detach() for t in _tensors(torch.float32))
    score = lambda s, b, h, q, k: s * 0.5
    with pytest.raises(strobe.UnsupportedProblem, match="out= with gradients"):
        strobe.attention(q.clone().requires_grad_(), k, v, score_mod=score, out=torch.empty(2, 64, 4, 8))
    learned = torch.ones(4, requires_grad=True)
    with pytest.raises(strobe.UnsupportedProblem, match="out= with gradients"):
        strobe.attention(q, k, v, score_mod=strobe.alibi(learned), out=torch.empty(2, 64, 4, 8))
    with pytest.raises(strobe.InvalidProblem, match="memory that tensor 0 of score_mod"):
        held = torch.zeros(2, 64, 4, 8)
        strobe.attention(q, k, v, score_mod=strobe.alibi(held[0, 0, :, 0]), out=held)
    with pytest.raises(strobe.UnsupportedProblem, match="outside the transform"):
        torch.func.grad(lambda q: strobe.attention(q, k, v, score_mod=score).sum())(q)
    wanted = q.clone().requires_grad_()
    out = strobe.attention(wanted, k, v, score_mod=score)
    (first,) = torch.autograd.grad(out.square().sum(), [wanted], create_graph=False)
    assert first.isfinite().all()
    out = strobe.attention(wanted, k, v, score_mod=score)
    (graph,) = torch.autograd.grad(out.square().sum(), [wanted], create_graph=True)
    assert torch.equal(graph, first)
    with pytest.raises(strobe.UnsupportedProblem, match="double backward"):
        graph.sum().backward()
    problem = strobe.explain(q.half(), k.half(), v.half(), score_mod=score).problem
    for device, forward, backward in (("H200", "hopper", "hopper"), ("B200", "blackwell", "portable")):
        choice = select(replace(problem, needs_grad=True), FAKES[device])
        named = choice.forward.kernel.name, choice.backward.kernel.name
        assert named == (f"{forward}.forward", f"{backward}.backward")
    assert dict(choice.rejections)["blackwell.backward"] == "runs no score_mod or mask_mod"
    with pytest.raises(strobe.InvalidProblem, match="captured tensor on meta"):
        strobe.attention(q, k, v, score_mod=strobe.alibi(torch.zeros(4, device="meta")))
    assert strobe.supports(q, k, v, score_mod=score) and not strobe.supports(q, k, v, score_mod=score, kernel="hopper")


@pytest.mark.parametrize("make", (strobe.alibi, strobe.bias, strobe.relative_bias))
def test_a_ready_made_score_gives_gradients_to_a_tensor_that_requires_them_now(make):
    """Whether it did when the score was made does not count, nor do calls before."""
    q, k, v = (t.detach() for t in _tensors(torch.float64, rows=8, keys=8))
    tensor = torch.rand(*{strobe.alibi: (4,), strobe.bias: (4, 1, 8), strobe.relative_bias: (4, 7)}[make]).double()
    score, weights = make(tensor), torch.rand(2, 8, 4, v.shape[-1], dtype=torch.float64)

    def gradient(score):
        out = strobe.attention(q, k, v, score_mod=score)
        return torch.autograd.grad((out * weights).sum(), tensor)[0] if out.requires_grad else None

    assert gradient(score) is None and gradient(score) is None
    tensor.requires_grad_()
    expected = gradient(make(tensor))
    for _ in range(3):
        assert torch.equal(gradient(score), expected) and expected.abs().max() > 0
    assert gradient(score.held()) is not None
    tensor.requires_grad_(False)
    assert gradient(score) is None
