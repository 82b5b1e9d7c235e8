"""Laws between calls: what two different ways of saying the same attention must have in common. No oracle is asked.

Two results of one thing differ by at most the sum of their errors. Inputs are of order 1, so that sum is bounded by
TOLERANCE: a hundred roundings of the accumulator, and for bfloat16 a few of the output and of the weights.
"""

from __future__ import annotations

import pytest
import torch

import strobe

TOLERANCE = {torch.float64: 100 * 2.0**-53, torch.float32: 100 * 2.0**-24, torch.bfloat16: 6 * 2.0**-8}
MASKS = {
    "full": lambda b, m, n, device: strobe.Mask(),
    "causal": lambda b, m, n, device: strobe.causal(),
    "window": lambda b, m, n, device: strobe.window(20, 11),
    "prefix": lambda b, m, n, device: strobe.prefix_causal(torch.tensor([9, 60], dtype=torch.int32, device=device)[:b]),
    "lengths": lambda b, m, n, device: (
        strobe.causal() & strobe.key_lengths(torch.tensor([n, 31], dtype=torch.int32, device=device)[:b])
    ),
    "documents": lambda b, m, n, device: strobe.documents(ids(b, m, device), ids(b, n, device)),
}

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
masks = pytest.mark.parametrize("mask", MASKS)


def ids(batch, length, device):
    return (torch.arange(length, device=device).expand(batch, length) // 19).to(torch.int32)


def close(a, b, dtype, size=1.0):
    a, b = a.double(), b.double()
    assert torch.equal(a == -torch.inf, b == -torch.inf)
    finite = a > -torch.inf
    allowed = TOLERANCE[dtype] * (size + b[finite].abs())
    worst = ((a[finite] - b[finite]).abs() / allowed).max() if finite.any() else 0.0
    assert worst <= 1, f"{float(worst):.2f} times what two roundings explain"


def draw(dtype, device, batch=2, rows=70, keys=97, heads=(4, 2), head_dim=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    of_q, of_k = (batch, rows, heads[0], head_dim), (batch, keys, heads[1], head_dim)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in (of_q, of_k, of_k, of_q)]


def with_gradients(run, *leaves, dout):
    """run(*leaves) and the gradients of its inputs."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = run(*leaves)
    return (out, *torch.autograd.grad(out, leaves, dout))


@dtypes
def test_order_of_keys_does_not_matter(dtype, device, kernel):
    q, k, v, dout = draw(dtype, device)
    order = torch.randperm(k.shape[1], generator=torch.Generator().manual_seed(1)).to(device)
    run = lambda q, k, v: strobe.attention(q, k, v, kernel=kernel)
    straight = with_gradients(run, q, k, v, dout=dout)
    mixed = with_gradients(run, q, k[:, order], v[:, order], dout=dout)
    close(mixed[0], straight[0], dtype)
    close(mixed[1], straight[1], dtype)
    for got, wanted in zip(mixed[2:], straight[2:]):
        close(got, wanted[:, order], dtype)


@dtypes
@masks
def test_grouped_heads_are_repeated_heads(mask, dtype, device, kernel):
    q, k, v, dout = draw(dtype, device)
    options = dict(mask=MASKS[mask](2, 70, 97, device), kernel=kernel)
    grouped = with_gradients(lambda q, k, v: strobe.attention(q, k, v, **options), q, k, v, dout=dout)
    repeat = lambda t: t.repeat_interleave(2, 2)
    repeated = with_gradients(lambda q, k, v: strobe.attention(q, repeat(k), repeat(v), **options), q, k, v, dout=dout)
    for got, wanted in zip(grouped, repeated):
        close(got, wanted, dtype, 4.0)  # autograd adds the repeated heads' gradients after rounding each


@dtypes
@pytest.mark.parametrize("cut", [0, 1, 9, 33, 64, 97])
def test_halves_merge_into_the_whole(cut, dtype, device, kernel):
    """out, lse and all gradients, through merge."""
    q, k, v, _ = draw(dtype, device)
    wide = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(2)
    dout, dlse = (
        torch.randn(q.shape, generator=generator).to(device, wide),
        torch.randn(2, 4, 70, generator=generator).to(device, wide),
    )

    def split(q, k, v):
        parts = [
            strobe.partial_attention(q, k[:, keys], v[:, keys], kernel=kernel)
            for keys in (slice(cut), slice(cut, None))
        ]
        return strobe.merge(*parts)

    results = []
    for run in (split, lambda q, k, v: strobe.partial_attention(q, k, v, kernel=kernel)):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        part = run(*leaves)
        results.append((*part, *torch.autograd.grad(list(part), leaves, [dout, dlse])))
    for got, wanted in zip(*results):
        close(got, wanted, dtype, 2.0)


def test_merging_causal_halves(device, kernel):
    """The half of later keys is empty for early rows: their lse is -inf there, and the gradients stay finite."""
    q, k, v, dout = draw(torch.float64, device, rows=97)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    first = strobe.partial_attention(
        q, k[:, :50], v[:, :50], mask=strobe.window(None, 47), kernel=kernel
    )  # i + 50 - 97 + 47 = i
    second = strobe.partial_attention(
        q, k[:, 50:], v[:, 50:], causal=True, kernel=kernel
    )  # keys 50 + j, j <= i + 47 - 97
    assert second.lse[..., :50].eq(-torch.inf).all()
    merged = strobe.merge(first, second)
    whole = strobe.partial_attention(q, k, v, causal=True, kernel=kernel)
    close(merged.out, whole.out, torch.float64)
    close(merged.lse, whole.lse, torch.float64)
    for got, wanted in zip(torch.autograd.grad(merged.out, leaves, dout), torch.autograd.grad(whole.out, leaves, dout)):
        close(got, wanted, torch.float64)


@dtypes
@masks
def test_sinks_may_be_applied_afterwards(mask, dtype, device, kernel):
    q, k, v, dout = draw(dtype, device)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=device, dtype=torch.promote_types(dtype, torch.float32))
    given = MASKS[mask](2, 70, 97, device)
    inside = with_gradients(
        lambda q, k, v, s: strobe.attention(q, k, v, sinks=s, mask=given, kernel=kernel), q, k, v, sinks, dout=dout
    )

    def after(q, k, v, s):
        return strobe.with_sinks(strobe.partial_attention(q, k, v, mask=given, kernel=kernel), s).out.to(dtype)

    for got, wanted in zip(inside, with_gradients(after, q, k, v, sinks, dout=dout)):
        close(got, wanted, dtype, max(2.0, wanted.abs().max().item()))


@dtypes
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (20, 3)}, {"softcap": 3.0, "causal": True}], ids=str
)
def test_packed_is_dense_sequence_by_sequence(options, dtype, device, kernel):
    lengths_q, lengths_k = (5, 0, 64, 33), (7, 12, 64, 20)
    q, k, v, dout = (t[0] for t in draw(dtype, device, batch=1, rows=sum(lengths_q), keys=sum(lengths_k)))
    offsets = [
        torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k)
    ]
    said = dict(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], kernel=kernel, **options)
    packed = with_gradients(lambda q, k, v: strobe.attention_varlen(q, k, v, **said), q, k, v, dout=dout)

    def one_by_one(q, k, v):
        sequences = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
        return torch.cat(
            [strobe.attention(q[None], k[None], v[None], kernel=kernel, **options)[0] for q, k, v in sequences]
        )

    for got, wanted in zip(packed, with_gradients(one_by_one, q, k, v, dout=dout)):
        close(got, wanted, dtype, 2.0)


@dtypes
def test_packed_is_padded(dtype, device, kernel):
    """Padding keys are hidden by key_lengths, padding rows thrown away."""
    lengths = (40, 1, 97)
    q, k, v, _ = draw(dtype, device, batch=3, rows=97)
    inside = torch.arange(97, device=device) < torch.tensor(lengths, device=device)[:, None]
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    packed = strobe.attention_varlen(q[inside], k[inside], v[inside], cu_seqlens_q=offsets, kernel=kernel)
    padded = strobe.attention(
        q, k, v, mask=strobe.key_lengths(torch.tensor(lengths, dtype=torch.int32, device=device)), kernel=kernel
    )
    close(packed, padded[inside], dtype)


@dtypes
def test_documents_are_packed_sequences(dtype, device, kernel):
    lengths = (13, 64, 20)
    q, k, v, dout = draw(dtype, device, batch=1, rows=97)
    names = torch.repeat_interleave(torch.arange(3, device=device), torch.tensor(lengths, device=device))[None].to(
        torch.int32
    )
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    one = with_gradients(
        lambda q, k, v: strobe.attention(q, k, v, mask=strobe.documents(names), causal=True, kernel=kernel),
        q,
        k,
        v,
        dout=dout,
    )
    two = with_gradients(
        lambda q, k, v: strobe.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=offsets, causal=True, kernel=kernel)[
            None
        ],
        q,
        k,
        v,
        dout=dout,
    )
    for got, wanted in zip(one, two):
        close(got, wanted, dtype, 2.0)


@dtypes
def test_window_without_left_is_causal(dtype, device, kernel):
    q, k, v, _ = draw(dtype, device)
    assert torch.equal(
        strobe.attention(q, k, v, window=(None, 0), kernel=kernel),
        strobe.attention(q, k, v, causal=True, kernel=kernel),
    )


@dtypes
@masks
def test_ones_give_ones(mask, dtype, device, kernel):
    q, k, v, _ = draw(dtype, device)
    given = MASKS[mask](2, 70, 97, device)
    out = strobe.attention(q, k, torch.ones_like(v), mask=given, kernel=kernel)
    seen = given.dense(70, 97, device).any(-1)[:, :, None, None].expand_as(out)
    close(out, seen.to(dtype), dtype)


@dtypes
@masks
def test_hidden_keys_may_be_appended(mask, dtype, device, kernel):
    """40 more keys, hidden by key_lengths; the diagonal stays where it was because as many rows are appended."""
    q, k, v, _ = draw(dtype, device)
    longer = lambda t: torch.cat(
        [t, 30 * torch.randn(2, 40, *t.shape[2:], generator=torch.Generator().manual_seed(3)).to(device, dtype)], 1
    )
    given = strobe.key_lengths(torch.full((2,), 97, dtype=torch.int32, device=device))
    given = given & (
        strobe.documents(ids(2, 110, device), ids(2, 137, device))
        if mask == "documents"
        else MASKS[mask](2, 110, 97, device)
    )
    short = strobe.attention(q, k, v, mask=MASKS[mask](2, 70, 97, device), kernel=kernel)
    close(strobe.attention(longer(q), longer(k), longer(v), mask=given, kernel=kernel)[:, :70], short, dtype)


@dtypes
@masks
def test_values_scale_and_shift(mask, dtype, device, kernel):
    """V -> 2 V + 0.5: weights sum to 1 where a row sees a key."""
    q, k, v, _ = draw(dtype, device)
    given = MASKS[mask](2, 70, 97, device)
    seen = given.dense(70, 97, device).any(-1)[:, :, None, None]
    plain = strobe.attention(q, k, v, mask=given, kernel=kernel)
    close(strobe.attention(q, k, 2 * v + 0.5, mask=given, kernel=kernel), 2 * plain.double() + 0.5 * seen, dtype, 3.0)


@dtypes
def test_scores_may_be_shifted(dtype, device, kernel):
    """A vector added to every key adds q . c to all scores of a row: out stays, lse moves by it."""
    q, k, v, _ = draw(torch.float64, device)
    q, k = (torch.round(8 * t) / 8 for t in (q, k))  # exact sums in bfloat16
    c = torch.zeros(32, device=device, dtype=torch.float64)
    c[:4] = 2.0
    run = lambda k: strobe.partial_attention(q.to(dtype), k.to(dtype), v.to(dtype), kernel=kernel)
    plain, moved = run(k), run(k + c)
    close(moved.out, plain.out, dtype, 4.0)
    shift = (q @ c).transpose(1, 2) * 32**-0.5
    assert (moved.lse - plain.lse - shift).abs().max() <= 2 * (2e-6 + 4 * 2.0**-23 * moved.lse.abs().max())


@dtypes
@masks
def test_batch_entries_do_not_meet(mask, dtype, device, kernel):
    """Each entry alone gives what it gives in the batch, and the batch may be stored in any order."""
    q, k, v, _ = draw(dtype, device)
    if mask in ("prefix", "lengths", "documents"):
        given, alone = MASKS[mask](2, 70, 97, device), MASKS[mask](1, 70, 97, device)
    else:
        given = alone = MASKS[mask](2, 70, 97, device)
    both = strobe.attention(q, k, v, mask=given, kernel=kernel)
    close(strobe.attention(q[:1], k[:1], v[:1], mask=alone, kernel=kernel), both[:1], dtype)
    stored = [t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in (q, k, v)]
    close(strobe.attention(*stored, mask=given, kernel=kernel), both, dtype)


@dtypes
def test_heads_may_change_places(dtype, device, kernel):
    q, k, v, _ = draw(dtype, device, heads=(4, 4))
    order = [2, 0, 3, 1]
    mixed = strobe.attention(q[:, :, order], k[:, :, order], v[:, :, order], causal=True, kernel=kernel)
    close(mixed, strobe.attention(q, k, v, causal=True, kernel=kernel)[:, :, order], dtype)


@dtypes
def test_scale_belongs_to_the_queries(dtype, device, kernel):
    """scale = 1/4 on q is scale = 1/4 of the call, also with its sign."""
    q, k, v, _ = draw(dtype, device)
    for scale in (0.25, -0.25):
        inside = strobe.attention(scale * q, k, v, scale=1.0, kernel=kernel)
        close(strobe.attention(q, k, v, scale=scale, kernel=kernel), inside, dtype)


@dtypes
def test_a_wide_softcap_is_none(dtype, device, kernel):
    """c tanh(s / c) = s - s^3 / 3 c^2 ...: with c = 2^26 and |s| < 8 nothing is left of it in float32."""
    q, k, v, _ = draw(dtype, device)
    wide = strobe.attention(q, k, v, softcap=2.0**26, kernel=kernel)
    close(wide, strobe.attention(q, k, v, kernel=kernel), dtype, 4.0 if dtype != torch.float64 else 1e3)
