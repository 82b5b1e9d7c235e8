"""The stand-ins for FlashAttention-2, 3 and 4: their signatures to the letter, their results, their returns, and what
is refused.
"""

from __future__ import annotations

import pytest
import torch

import strobe
import strobe.cute as fa4
import strobe.cute.interface as fa4_private
import strobe.flash_attn as fa2
import strobe.flash_attn_interface as fa3
from strobe.flash_attn import bert_padding
from strobe.flash_attn import flash_attn_interface as fa2_private


def _random(*shape, dtype=torch.float32, device="cpu", grad=False):
    seed = sum(size * 31**place for place, size in enumerate(shape))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype).requires_grad_(grad)


def _offsets(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


DTYPES = [torch.float32, torch.bfloat16]


def _eager(q, k, v, *, causal=False, window=(None, None), softcap=0.0, scale=None, sink=None):
    """out [B, S, H, D] and lse [B, H, S] in float64, written down with no thought of memory."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    beyond = (
        torch.arange(k.shape[1], device=q.device)
        - torch.arange(q.shape[1], device=q.device)[:, None]
        - (k.shape[1] - q.shape[1])
    )
    left, right = (bound if bound is not None and bound >= 0 else 10**6 for bound in window)
    hidden = (beyond < -left) | (beyond > (0 if causal else right))
    s = s.masked_fill(hidden, -torch.inf)
    whole = s if sink is None else torch.cat([s, sink.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    lse = whole.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", (s - lse[..., None]).exp().masked_fill(hidden, 0.0), v), lse


def _close(found, wanted, dtype):
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance, rtol=tolerance)


# ---------------------------------------------------------------- results

CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "left": {"causal": True, "window_size": (3, 0)},
    "right": {"window_size": (-1, 2)},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": 0.3},
}
PLAIN = {"fa2": lambda q, k, v, **o: fa2.flash_attn_func(q, k, v, **o, return_attn_probs=True)[:2]}
PLAIN["fa3"] = lambda q, k, v, **o: fa3.flash_attn_func(q, k, v, **o, return_attn_probs=True)
PLAIN["fa4"] = lambda q, k, v, **o: fa4.flash_attn_func(q, k, v, **o)


def _wanted(options):
    return {
        {"window_size": "window", "softmax_scale": "scale"}.get(name, name): value for name, value in options.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("library", PLAIN)
def test_dense(library, options, dtype, device):
    if library == "fa4" and options.get("window_size") == (-1, 2):
        options = {"window_size": (None, 2)}
    q, k, v = (
        _random(2, *sizes, dtype=dtype, device=device, grad=True) for sizes in ((5, 4, 16), (7, 2, 16), (7, 2, 16))
    )
    out, lse = PLAIN[library](q, k, v, **options)
    wanted, wanted_lse = _eager(q, k, v, **_wanted(options))
    assert out.dtype == dtype and lse.dtype == torch.float32 and lse.shape == (2, 4, 5)
    _close(out, wanted, dtype)
    _close(lse, wanted_lse, dtype)
    dout = _random(*out.shape, dtype=dtype, device=device)
    for found, gradient in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(wanted, (q, k, v), dout.double())
    ):
        _close(found, gradient, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_packed_sequences_give_what_each_gives_alone(options, dtype, device):
    q, k, v = (_random(12, heads, 16, dtype=dtype, device=device) for heads in (4, 2, 2))
    q_offsets, k_offsets = _offsets(0, 5, 12, device=device), _offsets(0, 7, 12, device=device)
    found = {
        "fa2": fa2.flash_attn_varlen_func(q, k, v, q_offsets, k_offsets, 7, 7, **options, return_attn_probs=True)[:2]
    }
    found["fa3"] = fa3.flash_attn_varlen_func(q, k, v, q_offsets, k_offsets, 7, 7, **options, return_attn_probs=True)
    if -1 not in options.get("window_size", ()):
        found["fa4"] = fa4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=q_offsets, cu_seqlens_k=k_offsets, **options)
    for out, lse in found.values():
        assert lse.shape == (4, 12)
        for rows, keys in ((slice(0, 5), slice(0, 7)), (slice(5, 12), slice(7, 12))):
            wanted, wanted_lse = _eager(q[None, rows], k[None, keys], v[None, keys], **_wanted(options))
            _close(out[rows], wanted[0], dtype)
            _close(lse[:, rows], wanted_lse[0], dtype)


def test_the_packed_forms_are_the_plain_ones(device):
    qkv, q, kv = (
        _random(2, 6, 3, 4, 16, device=device),
        _random(2, 5, 4, 16, device=device),
        _random(2, 6, 2, 2, 16, device=device),
    )
    options = {"causal": True, "softcap": 2.0, "softmax_scale": 0.3, "window_size": (3, 0), "deterministic": True}
    same = torch.equal
    assert same(fa2.flash_attn_qkvpacked_func(qkv, **options), fa2.flash_attn_func(*qkv.unbind(2), **options))
    assert same(fa3.flash_attn_qkvpacked_func(qkv, **options), fa2.flash_attn_func(*qkv.unbind(2), **options))
    heads_apart = qkv.transpose(2, 3).flatten(2, 3)[
        :, :, [*range(0, 12, 3), 1, 4, 2, 5]
    ]  # four of q, two of k, two of v
    grouped = fa2.flash_attn_func(qkv[:, :, 0], qkv[:, :, 1, :2], qkv[:, :, 2, :2], **options)
    assert same(fa3.flash_attn_qkvpacked_func(heads_apart, **options, num_heads_q=4), grouped)
    assert same(fa2.flash_attn_kvpacked_func(q, kv, **options), fa2.flash_attn_func(q, *kv.unbind(2), **options))
    a, b = _offsets(0, 5, 10, device=device), _offsets(0, 6, 12, device=device)
    whole = fa2.flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv.flatten(0, 1), a, b, 5, 6, **options)
    assert same(whole, fa2.flash_attn_varlen_func(q.flatten(0, 1), *kv.flatten(0, 1).unbind(1), a, b, 5, 6, **options))
    whole = fa2.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), b, 6, **options)
    assert same(whole, fa2.flash_attn_varlen_func(*qkv.flatten(0, 1).unbind(1), b, b, 6, 6, **options))
    whole = fa4.flash_attn_varlen_func(q, *kv.unbind(2), causal=True)[0]  # no offsets: padded tensors
    assert same(whole, fa4.flash_attn_func(q, *kv.unbind(2), causal=True)[0])


def test_a_sink_joins_the_denominator(device):
    q, sink = _random(1, 5, 4, 16, device=device), _random(4, device=device, grad=True)
    out, lse = fa4.flash_attn_func(q, q, q, causal=True, learnable_sink=sink)
    wanted, wanted_lse = _eager(q, q, q, causal=True, sink=sink)
    _close(out, wanted, torch.float32)
    _close(lse, wanted_lse, torch.float32)
    _close(*(torch.autograd.grad(one.sum(), sink)[0] for one in (out, wanted)), torch.float32)


# ---------------------------------------------------------------- what comes back


def test_returns_are_the_originals():
    q, offsets = _random(1, 5, 4, 16), _offsets(0, 5)
    out, lse, weights = fa2.flash_attn_func(q, q, q, return_attn_probs=True)
    assert (out.shape, lse.shape, weights.shape) == (q.shape, (1, 4, 5), (0,))
    out, lse, weights = fa2.flash_attn_varlen_func(q[0], q[0], q[0], offsets, offsets, 5, 5, return_attn_probs=True)
    assert (out.shape, lse.shape, weights.shape) == (q[0].shape, (4, 5), (0,))
    assert isinstance(fa2.flash_attn_func(q, q, q), torch.Tensor) and isinstance(
        fa3.flash_attn_func(q, q, q), torch.Tensor
    )
    assert len(fa3.flash_attn_func(q, q, q, return_attn_probs=True)) == 2 and len(fa4.flash_attn_func(q, q, q)) == 2
    assert len(fa2.flash_attn_with_kvcache(q, q, q, return_softmax_lse=True)) == 2
    found = fa2_private._flash_attn_forward(q.requires_grad_(), q, q, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    assert [list(t.shape) for t in found] == [[1, 5, 4, 16], [1, 4, 5], [0], [2]] and not found[0].requires_grad


def test_parts_combine_into_the_whole(device):
    q, k = _random(2, 5, 4, 16, device=device), _random(2, 12, 4, 16, device=device)
    parts = [fa3.flash_attn_func(q, part, part, return_attn_probs=True) for part in k.chunk(3, 1)]
    out, lse = fa3.flash_attn_combine(
        torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    )
    wanted, wanted_lse = _eager(q, k, k)
    _close(out, wanted, torch.float32)
    _close(lse.transpose(1, 2), wanted_lse, torch.float32)
    assert fa3.flash_attn_combine(out[None], lse[None], out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    room = torch.empty_like(out)
    assert fa3.flash_attn_combine(out[None], lse[None], out=room)[0] is room and torch.equal(room, out)


# ---------------------------------------------------------------- the private functions


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backward_uses_the_out_and_lse_it_is_given(dtype, device):
    """A ring's block: merged out and lse of all the keys, gradients of some of them, written where the caller says."""
    q, k, v, dout = (
        _random(2, *sizes, dtype=dtype, device=device) for sizes in ((6, 4, 16), (9, 2, 16), (9, 2, 16), (6, 4, 16))
    )
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wanted, lse = _eager(*leaves)
    gradients = torch.autograd.grad(wanted, leaves, dout.double())
    out, lse = (
        wanted.detach().to(dtype),
        lse.detach().float().transpose(1, 2).contiguous().transpose(1, 2),
    )  # strided, as a ring's is
    total = torch.zeros_like(q, dtype=torch.float32)
    for keys in (slice(0, 4), slice(4, 9)):
        dq, (dk, dv) = torch.empty_like(q), (torch.empty_like(t[:, keys]) for t in (k, v))
        options = (0.0, 0.25, False, -1, -1, 0.0, None, True)
        delta = fa2_private._flash_attn_backward(dout, q, k[:, keys], v[:, keys], out, lse, dq, dk, dv, *options)
        total += dq
        _close(dk, gradients[1][:, keys], dtype)
        _close(dv, gradients[2][:, keys], dtype)
    _close(total, gradients[0], dtype)
    assert delta.shape == (2, 4, 128) and not delta[..., 6:].any()
    _close(delta[..., :6], (dout.double() * out).sum(-1).transpose(1, 2), dtype)
    assert fa2_private._flash_attn_backward(
        dout, q, k, v, out, lse, None, None, dv.new_empty(v.shape), *options
    ).shape == (2, 4, 128)


def test_the_packed_backward_is_the_dense_one_of_each(device):
    q, k, dout, sizes = (
        *(_random(12, 2, 16, device=device) for _ in range(2)),
        _random(12, 2, 16, device=device) * 2,
        ((0, 5), (5, 12)),
    )
    offsets, options = _offsets(0, 5, 12, device=device), (0.0, 0.25, True, -1, -1, 0.0, None)
    out, lse, *_ = fa2_private._flash_attn_varlen_forward(q, k, k, offsets, offsets, 7, 7, *options, False)
    found = [torch.empty_like(q) for _ in range(3)]
    delta = fa2_private._flash_attn_varlen_backward(
        dout, q, k, k, out, lse, *found, offsets, offsets, 7, 7, *options, False
    )
    assert delta.shape == (2, 12 + 2 * 128)
    for number, (start, end) in enumerate(sizes):
        one = [t[None, start:end] for t in (dout, q, k, k, out)]
        alone = [torch.empty_like(one[1]) for _ in range(3)]
        rows = fa2_private._flash_attn_backward(*one, lse[None, :, start:end], *alone, *options, False)
        room = start + 128 * number
        _close(delta[:, room : room + end - start], rows[0, :, : end - start], torch.float32)
        for packed, dense in zip(found, alone):
            _close(packed[start:end], dense[0], torch.float32)


def test_a_backward_of_tensors_that_do_not_fit_says_so():
    q = _random(1, 5, 2, 16)
    out, lse, *_ = fa2_private._flash_attn_forward(q, q, q, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    fitting = {"dout": q, "out": out, "softmax_lse": lse, "dq": None, "dk": None, "dv": None}
    wrong = [
        ("dout", q[:, :4]),
        ("out", out[:, :4]),
        ("softmax_lse", lse.transpose(1, 2)),
        ("dout", q.double()),
        ("out", out.bfloat16()),
    ]
    wrong += [("dq", q.new_empty(2, 5, 2, 16)), ("dv", q.new_empty(1, 1, 2, 16))]
    for name, tensor in wrong:
        dout, *others = (fitting | {name: tensor}).values()
        with pytest.raises(ValueError, match=f"^{name}: "):
            fa2_private._flash_attn_backward(dout, q, q, q, *others, 0.0, 0.25, False, -1, -1, 0.0, None, False)


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("decode", [fa2.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache])
def test_new_keys_are_written_and_seen(decode, device):
    k_cache, v_cache = _random(2, 9, 2, 16, device=device), _random(2, 9, 2, 16, device=device) * 2
    q, new = _random(2, 1, 4, 16, device=device), _random(2, 1, 2, 16, device=device)
    for seqlens in (4, _offsets(4, 4, device=device)):
        k, v = k_cache.clone(), v_cache.clone()
        out, lse = decode(q, k, v, new, 2 * new, cache_seqlens=seqlens, causal=True, return_softmax_lse=True)
        assert torch.equal(k[:, 4:5], new) and torch.equal(v[:, 4:5], 2 * new) and torch.equal(k[:, 5:], k_cache[:, 5:])
        wanted, wanted_lse = _eager(q, k[:, :5], v[:, :5])
        _close(out, wanted, torch.float32)
        _close(lse, wanted_lse, torch.float32)


def test_a_cache_is_read_to_each_length(device):
    q, cache, several = (
        _random(2, 1, 4, 16, device=device),
        _random(2, 9, 2, 16, device=device),
        _random(2, 3, 4, 16, device=device),
    )
    lengths = _offsets(3, 8, device=device)
    out = fa2.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True)
    for entry, length in enumerate((3, 8)):
        _close(out[entry], _eager(q[entry, None], *[cache[entry, None, :length]] * 2)[0][0], torch.float32)
    out = fa2.flash_attn_with_kvcache(several, cache, cache, cache_seqlens=8, causal=True)
    _close(out, _eager(several, cache[:, :8], cache[:, :8], causal=True)[0], torch.float32)
    for options in ({"causal": True}, {"window_size": (2, 0)}):
        out = fa2.flash_attn_with_kvcache(several, cache, cache, cache_seqlens=lengths, **options)
        for entry, length in enumerate((3, 8)):
            _close(
                out[entry],
                _eager(several[entry, None], *[cache[entry, None, :length]] * 2, **_wanted(options))[0][0],
                torch.float32,
            )


TOO_MUCH = [
    ((1, None), 2, "v"),
    ((None, 1), 2, "k"),
    ((1, 1), None, "cache_seqlens"),
    ((1, 1), 9, "cache_seqlens"),
    ((None, None), 10, "cache_seqlens"),
]


@pytest.mark.parametrize("new, seqlens, name", TOO_MUCH)
def test_a_cache_that_cannot_hold_them_says_so(new, seqlens, name):
    q = _random(2, 1, 2, 16)
    k, v = (None if count is None else _random(2, count, 2, 16) for count in new)
    with pytest.raises(ValueError, match=f"^{name}: "):
        fa2.flash_attn_with_kvcache(q, _random(2, 9, 2, 16), _random(2, 9, 2, 16), k, v, cache_seqlens=seqlens)


# ---------------------------------------------------------------- padding


def test_unpad_and_pad_are_inverse_and_differentiable(device):
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]], device=device)
    padded = _random(2, 4, 3, 5, device=device, grad=True)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(padded, mask)
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, longest, used.tolist()) == ([0, 3, 4], torch.int32, 3, [3, 1])
    assert torch.equal(rows, padded[mask.bool()]) and torch.equal(
        bert_padding.unpad_input(padded, mask.bool())[0], rows
    )
    back = bert_padding.pad_input(rows, indices, 2, 4)
    assert torch.equal(back, padded * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(padded.grad, mask[..., None, None].expand_as(padded).float())
    kept = bert_padding.unpad_input(padded, mask, torch.tensor([[0, 0, 1, 0], [0, 0, 0, 1]], device=device))
    assert kept[2].tolist() == [0, 4, 6] and kept[3] == 4 and kept[4].tolist() == [3, 1]


def test_both_gradients_of_the_residual_meet():
    rows = _random(4, 3, grad=True)
    chosen, everything = bert_padding.index_first_axis_residual(rows, torch.tensor([2, 0]))
    (chosen.sum() + 10 * everything.sum()).backward()
    assert rows.grad[:, 0].tolist() == [11, 10, 11, 10]


# ---------------------------------------------------------------- what callers pass instead of Python numbers


def test_numbers_may_be_tensors():
    """transformers passes max_seqlen as `diff().max()`; others pass window_size and softmax_scale as tensors, and
    causal as 1.
    """
    q, offsets = _random(9, 2, 16), _offsets(0, 4, 9)
    longest = offsets.diff().max()
    want = fa2.flash_attn_varlen_func(
        q, q, q, offsets, offsets, 5, 5, softmax_scale=0.5, causal=True, window_size=(3, 0)
    )
    for library in (fa2, fa3):
        given = dict(softmax_scale=torch.tensor(0.5), causal=1, window_size=torch.tensor([3, 0]))
        assert torch.equal(library.flash_attn_varlen_func(q, q, q, offsets, offsets, longest, longest, **given), want)
    out, _ = fa4.flash_attn_varlen_func(
        q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=torch.tensor(0.5),
        causal=1, window_size=torch.tensor([3, 0]),
    )  # fmt: skip
    assert torch.equal(out, want)
    k_cache, v_cache = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 16)
    one = _random(1, 1, 2, 16)
    given = dict(cache_seqlens=0, softmax_scale=torch.tensor(0.5), causal=1, window_size=torch.tensor([3, 0]))
    assert fa2.flash_attn_with_kvcache(one, k_cache, v_cache, one, one, **given).allclose(one)


@pytest.mark.parametrize(
    "given, name",
    [
        (dict(softmax_scale=torch.tensor([0.5, 0.5])), "softmax_scale"),
        (dict(softmax_scale=torch.tensor(0.5, requires_grad=True)), "softmax_scale"),
        (dict(window_size=torch.tensor([1, 2, 3])), "window_size"),
        (dict(causal=torch.ones(2)), "causal"),
    ],
)
def test_tensors_that_are_no_number_are_named(given, name):
    q = _random(1, 4, 2, 16)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{name}: got"):
        fa2.flash_attn_func(q, q, q, **given)


def test_rows_are_numbered_by_int32_too():
    """transformers' generate hands pad_input int32 numbers."""
    rows, indices = _random(3, 4), torch.tensor([0, 1, 3], dtype=torch.int32)
    assert torch.equal(bert_padding.pad_input(rows, indices, 2, 3), bert_padding.pad_input(rows, indices.long(), 2, 3))
    assert torch.equal(bert_padding.index_first_axis(rows, indices[:2]), rows[:2])
    chosen, _ = bert_padding.index_first_axis_residual(rows.requires_grad_(), indices[:2])
    chosen.sum().backward()
    assert rows.grad.sum(1).tolist() == [4, 4, 0]


def test_fa4s_private_combine_counts_the_splits_of_each_entry():
    """Splits beyond the count hold whatever memory held: NaN must not reach the result."""
    parts, lses = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4)
    counts, semaphore = torch.tensor([3, 1], dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    parts[1:, 1], lses[1:, 1] = torch.nan, torch.nan
    out, lse = torch.empty(2, 5, 4, 8, dtype=torch.bfloat16), torch.empty(2, 4, 5).transpose(1, 2)
    fa4_private._flash_attn_fwd_combine(
        parts, lses, out, lse, num_splits_dynamic_ptr=counts, semaphore_to_reset=semaphore
    )
    whole, whole_lse = fa4_private.flash_attn_combine(parts[:, :1], lses[:, :1], out_dtype=torch.bfloat16)
    assert torch.equal(out[:1], whole) and torch.allclose(lse[:1], whole_lse, rtol=1e-6)
    assert (
        torch.equal(out[1], parts[0, 1].bfloat16())
        and torch.allclose(lse[1], lses[0, 1], rtol=1e-6)
        and not semaphore.any()
    )
    with pytest.raises(strobe.UnsupportedProblem, match="output_scale"):
        fa4_private._flash_attn_fwd_combine(parts, lses, out, output_scale=torch.ones(1))
    with pytest.raises(strobe.errors.InvalidProblem, match="out"):
        fa4_private._flash_attn_fwd_combine(parts, lses, out[:1])


def test_splits_without_a_key_combine_into_0():
    out, lse = fa3.flash_attn_combine(torch.full((2, 1, 3, 2, 8), 7.0), torch.full((2, 1, 3, 2), -torch.inf))
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    "hint",
    [dict(num_splits=7), dict(pack_gqa=True), dict(sm_margin=8), dict(scheduler_metadata=torch.zeros(4))],
    ids=str,
)
def test_hints_about_speed_change_nothing(hint):
    q, k = _random(1, 1, 2, 16), _random(1, 8, 2, 16)
    given = dict(cache_seqlens=torch.tensor([5], dtype=torch.int32))
    assert torch.equal(
        fa3.flash_attn_with_kvcache(q, k, k, **given, **hint), fa3.flash_attn_with_kvcache(q, k, k, **given)
    )


def test_the_pattern_of_dropout_is_not_returned():
    q, offsets = _random(1, 5, 4, 16), _offsets(0, 5)
    options = {"dropout_p": 0.1, "return_attn_probs": True}
    refused = pytest.raises(
        NotImplementedError, match=r"^return_attn_probs: got True beside dropout_p=0\.1, expected False"
    )
    qkv = torch.stack([q] * 3, 2)
    with refused:
        fa2.flash_attn_func(q, q, q, **options)
    with refused:
        fa2.flash_attn_qkvpacked_func(qkv, **options)
    with refused:
        fa2.flash_attn_varlen_qkvpacked_func(qkv[0], offsets, 5, **options)
    with pytest.raises(strobe.InvalidProblem, match=r"^dropout_p: got 2\.0"):
        fa2.flash_attn_func(q, q, q, dropout_p=2.0)


def test_alibi_slopes_and_dropout():
    """The bias is that of the original's formula, aligned at the bottom right; the mask of dropout is strobe's."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16, generator=generator).requires_grad_() for n, h in ((5, 4), (7, 2), (7, 2)))
    slopes = torch.rand(2, 4)
    distance = (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4 - slopes[:, :, None, None] * distance
    s = s.masked_fill(~strobe.causal().dense(5, 7)[:, None], -torch.inf)
    exact = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v.repeat_interleave(2, 2))
    out, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    assert torch.allclose(out, exact, atol=1e-5) and torch.allclose(lse, s.logsumexp(-1), atol=1e-5)
    up = torch.randn_like(exact)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), up), torch.autograd.grad(exact, (q, k, v), up)):
        assert torch.allclose(got, want, atol=1e-5)
    offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 7)]
    packed = fa2.flash_attn_varlen_func(
        *(t.flatten(0, 1) for t in (q, k, v)), *offsets, 5, 7, causal=True, alibi_slopes=slopes
    )
    assert torch.allclose(packed.view_as(exact), exact, atol=1e-5)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(fa2.flash_attn_func(q, k, v, 0.5))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
