"""The contract's golden cases and edges, literally, on every device: what a kernel may not get wrong in any
circumstances.
"""

from __future__ import annotations

import math

import pytest
import torch

import strobe
from strobe.ops import attention as ops
from strobe.problem.call import Call
from strobe.testing import CASES, Poison, assert_as_good_as
from tests.judging import judged_call

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HALF_ULP = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}  # the most, relative

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# name: (S_q, S_k, mask, the keys that each row sees)
GOLDEN = {
    "causal 2 x 5": (2, 5, strobe.causal(), [{0, 1, 2, 3}, {0, 1, 2, 3, 4}]),
    "causal 5 x 2": (5, 2, strobe.causal(), [set(), set(), set(), {0}, {0, 1}]),
    "window (1, 0) causal 4 x 4": (4, 4, strobe.causal() & strobe.window(1, 0), [{0}, {0, 1}, {1, 2}, {2, 3}]),
    "window (0, 0) 3 x 3": (3, 3, strobe.window(0, 0), [{0}, {1}, {2}]),
    "window (None, 1) 3 x 4": (3, 4, strobe.window(None, 1), [{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3}]),
    "window (1, -1) 3 x 3": (3, 3, strobe.window(1, -1), [{0, 1, 2}, {0, 1, 2}, {1, 2}]),
    "window (0, 0) 4 x 2": (4, 2, strobe.window(0, 0), [set(), set(), {0}, {1}]),
    "prefix 2 of 3 x 4": (3, 4, strobe.prefix_causal(2), [{0, 1}, {0, 1, 2}, {0, 1, 2, 3}]),
    "prefix 3 of 3 x 3": (3, 3, strobe.prefix_causal(3), [{0, 1, 2}] * 3),
    "key_lengths 0": (2, 3, strobe.key_lengths(int32(0)), [set(), set()]),
    "key_lengths 2 causal": (3, 3, strobe.causal() & strobe.key_lengths(int32(2)), [{0}, {0, 1}, {0, 1}]),
    "documents 0 0 1 -1": (4, 4, strobe.documents(int32([0, 0, 1, -1])), [{0, 1}, {0, 1}, {2}, set()]),
    "documents 0 1 0 causal": (3, 3, strobe.causal() & strobe.documents(int32([0, 1, 0])), [{0}, {1}, {0, 2}]),
    "documents of two sides": (2, 3, strobe.documents(int32([1, 2]), int32([2, 1, 1])), [{1, 2}, {0}]),
}


def to(mask: strobe.Mask, device: str) -> strobe.Mask:
    d = mask.documents
    moved = strobe.Mask() if d is None else strobe.documents(d.ids_q.to(device), d.ids_k.to(device))
    lengths = None if mask.key_lengths is None else mask.key_lengths.to(device)
    return strobe.Mask(mask.left, mask.right, mask.prefix, lengths, None) & moved


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_mask(name, device, kernel):
    """q = 0 and V the identity: a row's out is 1/n at each of the n keys it sees and 0 elsewhere."""
    rows, keys, mask, seen = GOLDEN[name]
    assert [set(row.nonzero().flatten().tolist()) for row in mask.dense(rows, keys)[0]] == seen
    q, k = torch.zeros(1, rows, 1, 16, device=device), torch.randn(1, keys, 1, 16, device=device)
    v = torch.eye(keys, 16, device=device)[None, :, None]
    out, lse = strobe.partial_attention(q, k, v, mask=to(mask, device), kernel=kernel)
    for i, admitted in enumerate(seen):
        wanted = [1 / len(admitted) if j in admitted else 0.0 for j in range(16)]
        assert out[0, i, 0].tolist() == pytest.approx(wanted, rel=4 * HALF_ULP[torch.float32], abs=0), f"row {i}"
        log_sum = math.log(len(admitted)) if admitted else -math.inf
        assert lse[0, 0, i].item() == pytest.approx(log_sum, abs=2e-6), f"row {i}"


@dtypes
def test_indicator_probe_dense(dtype, device, kernel):
    """Twice round every residue of n mod 128: a dropped, doubled or foreign key changes 1/n."""
    k = torch.randn(1, 256, 1, 32, device=device, dtype=dtype)
    v = torch.eye(256, device=device, dtype=dtype)[None, :, None]
    q = torch.zeros(1, 3, 1, 32, device=device, dtype=dtype)
    for n in range(1, 257):
        out, lse = ops.run(Call(q, k[:, :n], v[:, :n], kernel=kernel))
        probe(out[0, :, 0], lse[0, 0], n, dtype)


@dtypes
def test_indicator_probe_packed(dtype, device, kernel):
    """The same lengths as 256 packed sequences, whose neighbours hold NaN's worth of other values."""
    lengths = torch.arange(1, 257)
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    total, one_row = int(lengths.sum()), torch.arange(257, dtype=torch.int32, device=device)
    k = torch.randn(total, 1, 32, device=device, dtype=dtype)
    v = torch.eye(256, device=device, dtype=dtype)[torch.cat([torch.arange(n) for n in lengths.tolist()])][:, None]
    q = torch.zeros(256, 1, 32, device=device, dtype=dtype)
    out, lse = ops.run(Call(q, k, v, cu_seqlens_q=one_row, cu_seqlens_k=offsets, kernel=kernel))
    for n in range(1, 257):
        probe(out[n - 1 : n, 0], lse[0, n - 1 : n], n, dtype)


def probe(out, lse, n, dtype):
    """out is 1/n at the first n keys and 0 beyond; one rounding to float32 and one to the output."""
    wanted = torch.zeros(256, dtype=torch.float64)
    wanted[:n] = 1 / n
    allowed = wanted * (
        1.01 * HALF_ULP[dtype] + 4 * HALF_ULP[torch.float64 if dtype == torch.float64 else torch.float32]
    )
    error = (out.double().cpu() - wanted).abs()
    assert bool((error <= allowed).all()), (
        f"n = {n}: keys {(error > allowed).any(0).nonzero().flatten().tolist()[:8]} do not weigh 1/n"
    )
    assert lse.double().cpu().tolist() == pytest.approx([math.log(n)] * len(lse), abs=2e-6 + 4 * 2.0**-23 * math.log(n))


@dtypes
def test_ones_come_out_as_ones(dtype, device, kernel):
    """V all ones: the weights are divided by their own sum, at every length."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 1, 24, generator=generator).to(device, dtype) for n in (3, 260))
    ones = torch.ones_like(k)
    for n in range(1, 261):
        call = Call(q, k[:, :n], ones[:, :n], kernel=kernel)
        out, lse = ops.run(call)
        # weights are rounded, their sum is not: 6u sqrt(sum P^2) about 1, u half of HALF_ULP, then the output's own
        # rounding
        assert (out - 1).abs().max() <= (2 if dtype.itemsize == 2 else 16) * HALF_ULP[dtype], f"n = {n}"
        if n % 37 == 0:
            assert_as_good_as((out, lse), call)


@dtypes
def test_one_admitted_key(dtype, device, kernel):
    """out is that V row, lse its score. On a GPU the weight is 1 within an ulp (one fused multiply-add and exp2), and
    is divided by itself.
    """
    q, k, v = (torch.randn(2, 70, 2, 40, device=device, dtype=dtype) for _ in range(3))
    out, _ = ops.run(Call(q, k, v, left=0, right=0, kernel=kernel))
    whole, lse = ops.run(Call(q, k, v, left=0, right=0, kernel=kernel, partial=True))
    wide = v.to(whole.dtype)
    roundings = 0 if device == "cpu" else 2
    assert ((whole - wide).abs() <= roundings * torch.finfo(whole.dtype).eps * wide.abs()).all()
    assert torch.equal(out, v) or (dtype.itemsize > 2 and torch.equal(out, whole))
    score = (q.double() * k.double()).sum(-1).transpose(1, 2) * 40**-0.5
    assert (lse - score).abs().max() <= 2e-6 + 4 * 2.0**-23 * score.abs().max()


@dtypes
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "name",
    ["causal_more_rows", "key_lengths", "window_beyond_the_keys", "packed_no_keys_middle", "packed_outside", "no_keys"],
)
def test_rows_without_keys(name, sinks, dtype, device, kernel):
    """out 0, lse -inf (or the sink), gradients 0: exactly."""
    call = CASES[name].build(device, dtype, requires_grad=True, kernel=kernel)
    call = call._replace(sinks=torch.tensor([0.5, -1.0], device=device, requires_grad=True) if sinks else None)
    out, lse = ops.run(call)
    empty = torch.tensor(rows_without_keys(call), device=device)
    assert empty.any()
    assert (out.transpose(-3, -2) if not call.packed else out.transpose(0, 1))[expand(empty, out, call)].eq(0).all()
    wanted = lse.new_tensor([0.5, -1.0]) if sinks else lse.new_full((2,), -torch.inf)
    per_head = wanted[:, None].expand(lse.shape[-2:])
    assert torch.equal(lse[expand(empty, lse, call)], per_head.expand_as(lse)[expand(empty, lse, call)])
    dq, dk, dv = torch.autograd.grad(out, (call.q, call.k, call.v), torch.randn_like(out))
    assert dq.transpose(-3, -2)[expand(empty, dq, call)].eq(0).all()
    assert all(grad.isfinite().all() for grad in (dq, dk, dv))


@dtypes
@pytest.mark.parametrize("large", (3e38, 1e10))
def test_a_sink_without_bound_takes_all_the_weight(dtype, device, kernel, large):
    """Heads with large sinks and +inf: out 0, lse the sink, and the sink's gradient that of lse. A sink of -inf has
    gradient 0, even on empty rows.
    """
    call = CASES["sinks_without_bound"].build(device, dtype, requires_grad=True, kernel=kernel)
    with torch.no_grad():
        call.sinks[0] = large
    out, lse = ops.run(call)
    assert out[:, :, :2].eq(0).all() and torch.equal(
        lse[:, :2], call.sinks[None, :2, None].to(lse.dtype).expand_as(lse[:, :2])
    )
    dlse = torch.ones_like(lse)
    grads = torch.autograd.grad((out, lse), (call.q, call.k, call.v, call.sinks), (torch.randn_like(out), dlse))
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][:, :, :2].eq(0).all() and grads[3][:3].tolist() == [lse[:, 0].numel(), lse[:, 1].numel(), 0]


def rows_without_keys(call):
    """[B, S_q] or [T_q] as nested lists, from the mask written out."""
    if not call.packed:
        seen = call.mask.dense(call.q.shape[1], call.k.shape[1], call.q.device).any(-1)
        return (~seen).expand(call.q.shape[:2]).tolist()
    empty = [True] * call.q.shape[0]
    for n in range(len(call.cu_seqlens_q) - 1):
        (first, stop), keys = call.cu_seqlens_q[n : n + 2].tolist(), call.cu_seqlens_k[n : n + 2].diff().item()
        empty[first:stop] = (~call.mask.dense(stop - first, int(keys)).any(-1))[0].tolist()
    return empty


def expand(empty, tensor, call):
    """The rows [B, S_q] or [T_q] beside every head: a bool index of [B, H, S_q] or [H, T_q]."""
    heads = call.q.shape[-2]
    return empty[:, None].expand(-1, heads, -1) if not call.packed else empty[None].expand(heads, -1)


def test_merge_with_nothing_is_the_other_to_the_bit():
    some = strobe.Partial(torch.randn(2, 5, 3, 8), torch.randn(2, 3, 5))
    none = strobe.Partial(torch.zeros(2, 5, 3, 8), torch.full((2, 3, 5), -torch.inf))
    for merged in (strobe.merge(none, some), strobe.merge(some, none)):
        assert torch.equal(merged.out, some.out) and torch.equal(merged.lse, some.lse)
    both = strobe.merge(none, none)
    assert torch.equal(both.out, none.out) and torch.equal(both.lse, none.lse)


@dtypes
@pytest.mark.parametrize("keys", [1, 3, 64, 70, 130])
def test_nan_in_a_query_stays_in_its_row(keys, dtype, device, kernel):
    q, k, v = (torch.randn(1, n, 2, 32, device=device, dtype=dtype) for n in (90, keys, keys))
    clean = ops.run(Call(q, k, v, right=0, kernel=kernel))
    q[0, 85, 1, 3] = torch.nan
    q[0, 0, 0, 0] = torch.nan  # sees no key where there are fewer keys than rows: not NaN but empty
    out, lse = ops.run(Call(q, k, v, right=0, kernel=kernel))
    sees = {(0, 0): keys >= 90, (85, 1): 85 + keys - 90 >= 0}
    for (row, head), alive in sees.items():
        for wrong in (out[0, row, head], lse[0, head, row]):
            assert bool(wrong.isnan().all()) == alive
        out[0, row, head], lse[0, head, row] = clean[0][0, row, head], clean[1][0, head, row]
    assert torch.equal(out, clean[0]) and torch.equal(lse, clean[1])


@dtypes
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 1e4])
@pytest.mark.parametrize(
    "name", ["key_lengths", "key_lengths_causal", "documents_padded", "packed_outside", "packed_no_rows_middle"]
)
def test_hidden_bytes_do_not_matter(name, junk, dtype, device, kernel):
    """Keys beyond a length, padding and tokens of no sequence may hold anything: same bits out, gradient 0 for them."""
    results = []
    for filler in (0.0, junk):
        call = CASES[name].build(device, dtype, requires_grad=True, kernel=kernel)
        hidden = ~keys_anyone_sees(call)
        assert hidden.any()
        with torch.no_grad():
            call.k[hidden], call.v[hidden] = filler, filler
        out, lse = ops.run(call)
        generator = torch.Generator().manual_seed(1)
        dout = torch.randn(out.shape, generator=generator).to(device, dtype)
        gradients = torch.autograd.grad(out, (call.q, call.k, call.v), dout)
        assert gradients[1][hidden].eq(0).all() and gradients[2][hidden].eq(0).all()
        results.append((out, lse, *gradients))
    for clean, dirty in zip(*results):
        assert torch.equal(clean, dirty)


@dtypes
@pytest.mark.parametrize("name", ["packed_outside", "documents_padded"])
def test_padding_rows_do_not_matter(name, dtype, device, kernel):
    """Rows of padding may hold NaN in q, and NaN may come back to them: dk and dv keep their bits, dq is 0 there."""
    results = []
    for filler in (0.0, torch.nan):
        call = CASES[name].build(device, dtype, requires_grad=True, kernel=kernel)
        padding = torch.tensor(rows_without_keys(call), device=device)
        with torch.no_grad():
            call.q[padding] = filler
        out, lse = ops.run(call)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        dout[padding] = filler
        results.append((out, lse, *torch.autograd.grad(out, (call.q, call.k, call.v), dout)))
        assert results[-1][2][padding].eq(0).all()
    for clean, dirty in zip(*results):
        assert torch.equal(clean, dirty)


@dtypes
@pytest.mark.parametrize("name", ["packed", "packed_two_sides", "documents", "causal"])
def test_a_neighbour_of_nan_does_not_matter(name, dtype, device, kernel):
    """One sequence, document or batch entry is all NaN, dO too: the others keep their bits in out, lse and every
    gradient.
    """
    results = []
    for filler in (0.0, torch.nan):
        call = CASES[name].build(device, dtype, requires_grad=True, kernel=kernel)
        mine, ours = neighbour(call)
        out_of_it = (~mine, ~ours, ~ours)
        with torch.no_grad():
            for tensor, inside in zip((call.q, call.k, call.v), (mine, ours, ours)):
                tensor[inside] = filler
        out, lse = ops.run(call)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        dout[mine] = filler
        gradients = torch.autograd.grad(out, (call.q, call.k, call.v), dout)
        results.append(
            (out[~mine], lse[expand(~mine, lse, call)], *(grad[outside] for grad, outside in zip(gradients, out_of_it)))
        )
    for clean, dirty in zip(*results):
        assert torch.equal(clean, dirty)


def neighbour(call):
    """Rows and keys of the second sequence, the second document or the second batch entry: bool [B, S] or [T]."""
    inside = [
        torch.zeros(t.shape[: 1 if call.packed else 2], dtype=torch.bool, device=t.device) for t in (call.q, call.k)
    ]
    for which, offsets, ids in zip(inside, (call.cu_seqlens_q, call.cu_seqlens_k), (call.ids_q, call.ids_k)):
        if call.packed:
            which[offsets[1] : offsets[2]] = True
        elif ids is not None:
            which |= ids == 1
        else:
            which[1] = True
    return inside


def keys_anyone_sees(call):
    if not call.packed:
        return call.mask.dense(call.q.shape[1], call.k.shape[1], call.q.device).any(1).expand(call.k.shape[:2])
    seen = torch.zeros(call.k.shape[0], dtype=torch.bool, device=call.q.device)
    for n in range(len(call.cu_seqlens_q) - 1):
        if call.cu_seqlens_q[n] < call.cu_seqlens_q[n + 1]:
            seen[call.cu_seqlens_k[n] : call.cu_seqlens_k[n + 1]] = True
    return seen


@dtypes
@pytest.mark.parametrize("prefix", [0, 1, 3, 40])
@pytest.mark.parametrize("rows", [2, 40])
def test_a_negative_scale_under_a_prefix(rows, prefix, dtype, device, kernel):
    """Which is causal where it is short: hidden scores stay hidden, whatever they are multiplied by."""
    q, k, v = (torch.randn(1, rows, 2, 16, device=device).to(dtype).requires_grad_() for _ in range(3))
    call = Call(q, k, v, scale=-0.25, kernel=kernel, needs_grad=True).with_mask(strobe.prefix_causal(min(prefix, rows)))
    judged_call(call, "normal", 0)


@dtypes
@pytest.mark.parametrize("rows", [20, 70])  # fewer than keys, or the square that torch's own kernel takes
@pytest.mark.parametrize("scale", [0.0, -0.3, -1e-3])
def test_scale_of_any_sign(scale, rows, dtype, device, kernel):
    """A maximum taken before a negative scale overflows; -inf times 0 is NaN."""
    q, k, v = (10 * torch.randn(1, n, 2, 32, device=device, dtype=dtype) for n in (rows, 70, 70))
    call = Call(q, k, v, scale=scale, right=0, kernel=kernel)
    assert_as_good_as(ops.run(call), call)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_of_minus_100000(dtype, device, kernel):
    """No finite number may stand for minus infinity."""
    q, k = (
        torch.full((1, 5, 1, 16), -80.0, device=device, dtype=dtype),
        torch.full((1, 70, 1, 16), 320.0, device=device, dtype=dtype),
    )
    k[0, :, 0, 0] += 16 * torch.arange(70, device=device) % 48
    v = torch.randn(1, 70, 1, 16, device=device, dtype=dtype)
    call = Call(q, k, v, kernel=kernel)
    out, lse = ops.run(call)
    assert lse.max() < -1e5
    assert_as_good_as((out, lse), call)


def test_a_longer_sequence_than_promised_is_reported(device, kernel):
    """Rows beyond max_seqlen_q are NaN, and so are all rows of a sequence with more keys than max_seqlen_k."""
    q = torch.randn(9, 1, 16, device=device)
    offsets = torch.tensor([0, 2, 9], dtype=torch.int32, device=device)
    strobe.last_errors()
    out = strobe.attention_varlen(q, q, q, cu_seqlens_q=offsets, max_seqlen_q=4, kernel=kernel)
    assert out.isnan().flatten(1).all(1).tolist() == [False] * 6 + [True] * 3
    assert ["max_seqlen_q" in error for error in strobe.last_errors(device)] == [True]
    out = strobe.attention_varlen(q, q, q, cu_seqlens_q=offsets, max_seqlen_k=4, kernel=kernel)
    assert out.isnan().flatten(1).all(1).tolist() == [False] * 2 + [True] * 7
    assert ["max_seqlen_k" in error for error in strobe.last_errors(device)] == [True]
    assert strobe.last_errors() == []


def test_key_lengths_out_of_range(device, kernel):
    """Clamped to [0, S_k], and told."""
    q, k, v = (torch.randn(3, n, 2, 16, device=device) for n in (5, 40, 40))
    lengths = lambda *values: strobe.key_lengths(torch.tensor(values, dtype=torch.int32, device=device))
    strobe.last_errors()
    out = strobe.attention(q, k, v, mask=lengths(-3, 2**31 - 1, 7), kernel=kernel)
    assert ["key_lengths" in error for error in strobe.last_errors(device)] == [True]
    assert torch.equal(out, strobe.attention(q, k, v, mask=lengths(0, 40, 7), kernel=kernel))
    assert strobe.last_errors() == []


@pytest.mark.parametrize("offsets", [[0, 5, 3, 9], [0, 4, 2**30], [-7, 4, 9], [0, 9, 2**31 - 1, 9]], ids=str)
def test_offsets_that_fall_or_overrun(offsets, device, kernel):
    """Nothing is read or written outside a tensor, whatever the offsets say: a host refuses them, a device clamps them
    and tells.
    """
    strobe.last_errors()
    with Poison() as poison:
        q = poison.enclose("q", torch.randn(9, 2, 16, device=device))
        given = poison.enclose("offsets", torch.tensor(offsets, dtype=torch.int32, device=device))
        if device == "cpu":
            with pytest.raises(strobe.InvalidProblem, match="cu_seqlens"):
                strobe.attention_varlen(q, q, q, cu_seqlens_q=given, kernel=kernel)
        else:
            strobe.attention_varlen(q, q, q, cu_seqlens_q=given, kernel=kernel)
            assert any("cu_seqlens" in error for error in strobe.last_errors())


def test_gradient_that_is_expanded(device, kernel):
    """out.sum().backward() sends a gradient of stride 0 in every dimension."""
    q, k, v = (torch.randn(1, 40, 2, 16, device=device, requires_grad=True) for _ in range(3))
    strobe.attention(q, k, v, causal=True, kernel=kernel).sum().backward()
    dv = torch.autograd.grad(
        strobe.attention(q, k, v, causal=True, kernel=kernel), v, torch.ones(1, 40, 2, 16, device=device)
    )[0]
    assert torch.equal(v.grad, dv)  # type: ignore[arg-type]


@dtypes
def test_a_stride_beyond_32_bits(dtype, device, kernel):
    """On an axis of size 1 a stride may be anything."""
    q, k, v = (torch.randn(1, n, 1, 16, device=device, dtype=dtype) for n in (5, 9, 9))
    huge = [t.as_strided(t.shape, (2**33, t.stride(1), 2**40, 1)) for t in (q, k, v)]
    assert torch.equal(strobe.attention(*huge, kernel=kernel), strobe.attention(q, k, v, kernel=kernel))


def test_every_spelling_of_unbounded(device, kernel):
    q, k, v = (torch.randn(1, n, 2, 16, device=device) for n in (9, 12, 12))
    whole = strobe.attention(q, k, v, kernel=kernel)
    for window in (None, (None, None), (-1, -1), (None, -5), (10**12, None), (12, 12)):
        assert torch.equal(strobe.attention(q, k, v, window=window, kernel=kernel), whole), window


def test_what_is_returned_never_depends_on_a_flag(device, kernel):
    q = torch.randn(1, 6, 2, 16, device=device)
    for options in (
        {},
        {"causal": True},
        {"deterministic": True},
        {"batch_invariant": True},
        {"out": torch.empty_like(q)},
    ):
        assert isinstance(strobe.attention(q, q, q, kernel=kernel, **options), torch.Tensor)
    assert isinstance(strobe.partial_attention(q, q, q, kernel=kernel), strobe.Partial)
