"""Parts of sequences through FlashAttention's functions: seqused_q and seqused_k, windows with one negative bound, and
room for new keys.
"""

from __future__ import annotations

import pytest
import torch

import strobe
import strobe.cute as fa4
import strobe.flash_attn as fa2
import strobe.flash_attn_interface as fa3
from strobe.compat import block_table
from strobe.compat.seqused import Used, backward_used, forward_used
from strobe.compat.signatures import Setting
from strobe.cute import interface as fa4_private
from strobe.flash_attn import flash_attn_interface as fa2_private
from strobe.flash_attn.layers.rotary import apply_rotary_emb

LENGTHS_Q, LENGTHS_K = (5, 0, 7, 3), (6, 4, 9, 0)
USED_Q, USED_K = (3, 0, 7, 0), (6, 2, 5, 0)


def _offsets(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def _random(*shape, device="cpu", grad=False):
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
        .to(device)
        .requires_grad_(grad)
    )


def _eager(q, k, v, left=None, right=None, sink=None):
    """out [S_q, H, D] and lse [H, S_q] of one sequence; bounds count from the diagonal at the bottom right, and may be
    negative.
    """
    s = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * q.shape[-1] ** -0.5
    beyond = torch.arange(len(k), device=q.device) - torch.arange(len(q), device=q.device)[:, None] - (len(k) - len(q))
    hidden = (beyond < (-(10**6) if left is None else -left)) | (beyond > (10**6 if right is None else right))
    s = s.masked_fill(hidden, -torch.inf)
    whole = s if sink is None else torch.cat([s, sink[:, None, None].expand(-1, len(q), 1)], -1)
    lse = whole.logsumexp(-1)
    weights = (s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(q.shape[1] // v.shape[1], 1)), lse


def _each(q, k, v, used_q, used_k, **mask):
    """The same of each sequence alone, rows that are not used as the contract has them."""
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), -torch.inf)
    starts_q, starts_k = (_offsets(lengths).tolist() for lengths in (LENGTHS_Q, LENGTHS_K))
    for start_q, start_k, rows, keys in zip(starts_q, starts_k, used_q, used_k):
        if rows:
            one = slice(start_q, start_q + rows), slice(start_k, start_k + keys)
            found, found_lse = _eager(q[one[0]], k[one[1]], v[one[1]], **mask)
            out, lse = out.clone(), lse.clone()
            out[one[0]], lse[:, one[0]] = found, found_lse
    return out, lse


def _packed(device="cpu", grad=False):
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    return [
        _random(total, heads, 8, device=device, grad=grad)
        for total, heads in ((total_q, 4), (total_k, 2), (total_k, 2))
    ]


def _setting(device="cpu", **more):
    return Setting(
        packing=(_offsets(LENGTHS_Q, device), _offsets(LENGTHS_K, device), max(LENGTHS_Q), max(LENGTHS_K)), **more
    )


# ---------------------------------------------------------------- lengths beside offsets


@pytest.mark.parametrize("sides", ["q", "k", "both"])
@pytest.mark.parametrize("causal", [False, True])
def test_only_what_is_used_counts(sides, causal, device):
    used_q, used_k = USED_Q if sides != "k" else LENGTHS_Q, USED_K if sides != "q" else LENGTHS_K
    q, k, v = _packed(device, grad=True)
    given = Used(_ints(used_q, device) if sides != "k" else None, _ints(used_k, device) if sides != "q" else None)
    out, lse = forward_used(q, k, v, _setting(device, causal=causal), given)
    wanted, wanted_lse = _each(q, k, v, used_q, used_k, right=0 if causal else None)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    found = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), (q, k, v))
    for one, other in zip(
        found, torch.autograd.grad(wanted.sum() + wanted_lse[wanted_lse.isfinite()].sum(), (q, k, v))
    ):
        torch.testing.assert_close(one, other)


def test_nothing_that_is_not_used_reaches_the_result(device):
    q, k, v = _packed(device)
    given = Used(_ints(USED_Q, device), _ints(USED_K, device))
    clean = forward_used(q, k, v, _setting(device, causal=True), given)
    for tensor, lengths, used in ((q, LENGTHS_Q, USED_Q), (k, LENGTHS_K, USED_K), (v, LENGTHS_K, USED_K)):
        for start, length, count in zip(_offsets(lengths).tolist(), lengths, used):
            tensor[start + count : start + length] = torch.nan
    for one, other in zip(forward_used(q, k, v, _setting(device, causal=True), given), clean):
        assert torch.equal(one, other)


def test_the_public_functions_take_them(device):
    q, k, v = _packed(device)
    offsets, longest = (_offsets(LENGTHS_Q, device), _offsets(LENGTHS_K, device)), (max(LENGTHS_Q), max(LENGTHS_K))
    used = {"seqused_q": _ints(USED_Q, device), "seqused_k": _ints(USED_K, device)}
    wanted, wanted_lse = _each(q, k, v, USED_Q, USED_K, right=0)
    out, lse = fa3.flash_attn_varlen_func(q, k, v, *offsets, *longest, **used, causal=True, return_attn_probs=True)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    assert torch.equal(out, fa3.flash_attn_varlen_func(q, k, v, *offsets, *longest, **used, causal=True))
    assert torch.equal(
        out,
        fa3._flash_attn_forward(q, k, v, None, None, None, None, *offsets, None, *used.values(), *longest, causal=True)[
            0
        ],
    )
    given = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), (*offsets, *longest)))
    assert torch.equal(out, fa4.flash_attn_varlen_func(q, k, v, **given, **used, causal=True)[0])
    assert torch.equal(out, fa4_private._flash_attn_fwd(q, k, v, **given, **used, causal=True)[0])
    keys = fa2_private._flash_attn_varlen_forward(
        q, k, v, *offsets, *longest, 0.0, 8**-0.5, True, seqused_k=used["seqused_k"], num_splits=3
    )[0]  # fmt: skip
    torch.testing.assert_close(keys, _each(q, k, v, LENGTHS_Q, USED_K, right=0)[0])


def test_lengths_that_repeat_the_offsets_change_nothing(device):
    q, k, v = _packed(device)
    offsets = _offsets(LENGTHS_Q, device), _offsets(LENGTHS_K, device)
    given = dict(seqused_q=offsets[0].diff(), seqused_k=offsets[1].diff())
    plain = fa3.flash_attn_varlen_func(q, k, v, *offsets, 7, 9, causal=True)
    assert torch.equal(fa3.flash_attn_varlen_func(q, k, v, *offsets, 7, 9, **given, causal=True), plain)


def test_padded_tensors_have_lengths_too(device):
    q, k = _random(2, 5, 4, 8, device=device), _random(2, 6, 2, 8, device=device)
    out, lse = fa4.flash_attn_varlen_func(
        q, k, k, seqused_q=_ints([3, 5], device), seqused_k=_ints([6, 2], device), causal=True
    )
    assert out.shape == q.shape and lse.shape == (2, 4, 5) and not out[0, 3:].any()
    for row, (rows, keys) in enumerate(((3, 6), (5, 2))):
        wanted, wanted_lse = _eager(q[row, :rows], k[row, :keys], k[row, :keys], right=0)
        torch.testing.assert_close(out[row, :rows], wanted)
        torch.testing.assert_close(lse[row, :, :rows], wanted_lse)


SIZES = {
    "k of more entries": ((3, 4), (3, 4), "k: got batch 3, expected q's batch 2"),
    "k of one entry": ((1, 4), (1, 4), "k: got batch 1, expected q's batch 2"),
    "v of other entries and keys": ((2, 4), (4, 2), "v: got batch 4, expected q's batch 2"),
    "v of more keys": ((2, 4), (2, 5), "v: got 5 keys, expected k's 4 keys"),
}


@pytest.mark.parametrize("given", ["seqused_q", "seqused_k", "window_size"])
@pytest.mark.parametrize("case", SIZES)
def test_padded_tensors_that_do_not_belong_together_are_refused(case, given):
    k, v, message = SIZES[case]
    options = {given: (None, -1) if given == "window_size" else _ints([4, 4])}
    with pytest.raises(strobe.InvalidProblem, match=f"^{message}; "):
        fa4.flash_attn_varlen_func(_random(2, 4, 2, 8), _random(*k, 2, 8), _random(*v, 2, 8), **options)


def test_the_private_backward_is_autograds(device):
    q, k, v = _packed(device, grad=True)
    given = Used(_ints(USED_Q, device), _ints(USED_K, device))
    setting = _setting(device, causal=True)
    out, lse = forward_used(q, k, v, setting, given)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)
    wanted = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    for found, gradient in zip(backward_used(dout, (out, lse), (q, k, v), setting, given, dlse), wanted):
        torch.testing.assert_close(found, gradient)
    wanted = torch.autograd.grad(forward_used(q, k, v, setting, given)[0], (q, k, v), dout)
    found = [torch.empty_like(t) for t in (q, k, v)]
    offsets, longest = setting.packing[:2], setting.packing[2:]
    fa3._flash_attn_backward(dout, q, k, v, out, lse, *offsets, *given[:2], *longest, *found, is_causal=True)
    for one, gradient in zip(found, wanted):
        torch.testing.assert_close(one, gradient)
    theirs = fa4_private._flash_attn_bwd(
        q, k, v, out, dout, lse, causal=True, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], seqused_q=given[0],
        seqused_k=given[1],
        max_seqlen_q=longest[0], max_seqlen_k=longest[1],
    )  # fmt: skip
    assert all(map(torch.equal, theirs, found))


WRONG = {
    "too many": (_ints([9, 0, 7, 3]), "9 for sequence 0"),
    "below 0": (_ints([1, 0, -1, 3]), "-1 for sequence 2"),
    "of another batch": (_ints([1, 0]), r"\[2\]"),
    "floats": (torch.ones(4), "float32"),
}


@pytest.mark.parametrize("given, got", WRONG.values(), ids=WRONG)
def test_wrong_lengths_are_named(given, got):
    q, k, v = _packed()
    with pytest.raises(strobe.InvalidProblem, match=f"^seqused_q: got .*{got}.*, expected .+; .+"):
        fa3.flash_attn_varlen_func(q, k, v, _offsets(LENGTHS_Q), _offsets(LENGTHS_K), 7, 9, seqused_q=given)
    with pytest.raises(TypeError, match=r"^seqused_k: "):
        fa3.flash_attn_varlen_func(q, k, v, _offsets(LENGTHS_Q), _offsets(LENGTHS_K), 7, 9, seqused_k=[1, 2, 3, 4])


# ---------------------------------------------------------------- windows that do not contain the diagonal

BEYOND = [(None, -2), (4, -2), (1, -2), (0, -99), (None, -99), (-2, None), (-2, 4), (-2, 1), (-99, None), (-1, 0)]


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("window", BEYOND, ids=str)
def test_fa4_windows_with_one_negative_bound(window, with_sink, device):
    q, k, v = (_random(2, length, heads, 8, device=device, grad=True) for length, heads in ((5, 4), (7, 2), (7, 2)))
    sink = _random(4, device=device, grad=True) if with_sink else None
    out, lse = fa4.flash_attn_func(q, k, v, window_size=window, learnable_sink=sink)
    whole = [_eager(q[row], k[row], v[row], *window, sink) for row in range(2)]
    wanted, wanted_lse = (torch.stack(parts) for parts in zip(*whole))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    leaves = (q, k, v) if sink is None else (q, k, v, sink)
    loss = lambda out, lse: out.sum() + lse[lse.isfinite()].sum()
    found, gradients = (torch.autograd.grad(loss(*pair), leaves) for pair in ((out, lse), (wanted, wanted_lse)))
    for one, other in zip(found, gradients):
        torch.testing.assert_close(one, other.nan_to_num())  # eager's lse of an empty row


@pytest.mark.parametrize("window", BEYOND, ids=str)
def test_fa4_packed_windows_with_one_negative_bound(window, device):
    q, k, v = _packed(device)
    offsets = {"cu_seqlens_q": _offsets(LENGTHS_Q, device), "cu_seqlens_k": _offsets(LENGTHS_K, device)}
    used = {"seqused_q": _ints(USED_Q, device), "seqused_k": _ints(USED_K, device)}
    for counts, given in (((LENGTHS_Q, LENGTHS_K), {}), ((USED_Q, USED_K), used)):
        out, lse = fa4.flash_attn_varlen_func(q, k, v, **offsets, **given, window_size=window)
        wanted, wanted_lse = _each(q, k, v, *counts, left=window[0], right=window[1])
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(lse, wanted_lse)


def test_fa4_causal_and_pairs_of_negative_bounds(device):
    q = _random(1, 5, 2, 8, device=device)
    same = lambda one, other: torch.equal(
        fa4.flash_attn_func(q, q, q, **one)[0], fa4.flash_attn_func(q, q, q, **other)[0]
    )
    assert same({"window_size": (-3, -1)}, {}) and same({"window_size": (-3, -1), "causal": True}, {"causal": True})
    assert same({"window_size": (2, -1), "causal": True}, {"window_size": (2, 0)})
    assert not fa4.flash_attn_func(q, q, q, window_size=(-1, 3), causal=True)[0].any()


@pytest.mark.parametrize("library", [fa2, fa3], ids=["fa2", "fa3"])
def test_any_negative_bound_of_fa2_and_fa3_is_none(library, device):
    q = _random(1, 6, 2, 8, device=device)
    for window, wanted in (((-5, 2), (-1, 2)), ((3, -7), (3, -1)), ((-2, -9), (-1, -1))):
        assert torch.equal(
            library.flash_attn_func(q, q, q, window_size=window), library.flash_attn_func(q, q, q, window_size=wanted)
        )


def test_the_backward_alone_of_such_a_window_is_refused():
    q = _random(1, 5, 2, 8)
    out, lse = fa4.flash_attn_func(q, q, q)
    with pytest.raises(NotImplementedError, match=r"^window_size: got \(None, -1\), expected .+; .+"):
        fa4_private._flash_attn_bwd(q, q, q, out, q, lse, window_size_right=-1)


# ---------------------------------------------------------------- caches


def _cache(batch=2, length=8):
    return [_random(batch, length, 2, 8), _random(batch, length, 2, 8) * 2]


def test_rotary_seqlens_that_repeat_cache_seqlens_change_nothing():
    q, new, angles = _random(2, 2, 4, 8), _random(2, 2, 2, 8), _random(12, 3)
    given = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), cache_seqlens=_ints([3, 5]), causal=True)
    plain, repeated, same = _cache(), _cache(), _cache()
    wanted = fa3.flash_attn_with_kvcache(q, *plain, new, new, **given)
    for cache, lengths in ((repeated, _ints([3, 5])), (same, given["cache_seqlens"])):
        torch.testing.assert_close(
            fa3.flash_attn_with_kvcache(q, *cache, new, new, **given, rotary_seqlens=lengths), wanted
        )
        torch.testing.assert_close(cache, plain)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_begin_at_rotary_seqlens(interleaved):
    q, new, angles = _random(2, 2, 4, 8), _random(2, 2, 2, 8), _random(12, 3)
    given = dict(causal=True, rotary_interleaved=interleaved)
    elsewhere = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_seqlens=_ints([6, 0]))
    found, wanted = _cache(), _cache()
    out = fa3.flash_attn_with_kvcache(q, *found, new, new, cache_seqlens=_ints([3, 5]), **given, **elsewhere)
    turn = lambda x: apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=_ints([6, 0]))
    whole = fa3.flash_attn_with_kvcache(turn(q), *wanted, turn(new), new, cache_seqlens=_ints([3, 5]), causal=True)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "given, error",
    [(_ints([3]), ValueError), (torch.ones(2), ValueError), (3, TypeError)],
    ids=["batch", "floats", "an int"],
)
def test_wrong_rotary_seqlens_are_named(given, error):
    q, new, angles = _random(2, 1, 4, 8), _random(2, 1, 2, 8), _random(12, 3)
    with pytest.raises(error, match=r"^rotary_seqlens: got .+, expected .+; .+"):
        fa3.flash_attn_with_kvcache(
            q,
            *_cache(),
            new,
            new,
            rotary_cos=angles,
            rotary_sin=angles,
            cache_seqlens=_ints([3, 5]),
            rotary_seqlens=given,
        )


def test_a_lone_max_seqlen_q_says_nothing():
    q, cache = _random(2, 3, 4, 8), _cache()
    assert torch.equal(fa3.flash_attn_with_kvcache(q, *cache, max_seqlen_q=3), fa3.flash_attn_with_kvcache(q, *cache))


def _beyond(kind):
    """A call whose new keys have no place: pages that end, ids that are none, rows that end, indexed rows that are
    none.
    """
    q, new, (k, v) = _random(2, 1, 4, 8), _random(2, 1, 2, 8), _cache(4, 4)
    table = _ints([[0, 1], [2, 3]])
    return {
        "beyond the table": (dict(cache_seqlens=_ints([3, 8]), block_table=table), "cache_seqlens", "8 for sequence 1"),
        "before the table": (
            dict(cache_seqlens=_ints([-1, 3]), block_table=table),
            "cache_seqlens",
            "-1 for sequence 0",
        ),
        "a page of no id": (
            dict(cache_seqlens=_ints([3, 4]), block_table=_ints([[0, 1], [2, -1]])),
            "block_table",
            "-1 where",
        ),
        "a page beyond the pool": (
            dict(cache_seqlens=_ints([3, 4]), block_table=_ints([[0, 1], [2, 4]])),
            "block_table",
            "4 where",
        ),
        "beyond the rows": (dict(cache_seqlens=_ints([4, 1])), "cache_seqlens", "4 for sequence 0"),
        "a row that is not there": (
            dict(cache_seqlens=_ints([1, 1]), cache_batch_idx=_ints([0, 4])),
            "cache_batch_idx",
            "4 where",
        ),
    }[kind], (q, *([k, v] if kind != "beyond the rows" else [k[:2], v[:2]]), new, new)


KINDS = (
    "beyond the table",
    "before the table",
    "a page of no id",
    "a page beyond the pool",
    "beyond the rows",
    "a row that is not there",
)


@pytest.mark.parametrize("kind", KINDS)
def test_new_keys_without_a_place_raise_on_a_cpu_and_nothing_is_written(kind):
    (given, name, got), (q, k, v, *new) = _beyond(kind)
    before = k.clone()
    with pytest.raises(strobe.InvalidProblem, match=rf"^{name}: got .*{got}.*, expected .+; .+") as raised:
        fa2.flash_attn_with_kvcache(q, k, v, *new, causal=True, **given)
    assert raised.value.argument == name and torch.equal(k, before)


def test_reading_beyond_a_table_is_told_as_before():
    (given, _, _), (q, k, v, *_) = _beyond("a page of no id")
    strobe.last_errors()
    fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=_ints([3, 8]), block_table=given["block_table"])
    assert strobe.last_errors()


def test_a_compiled_step_asks_nothing_of_lengths():
    (given, _, _), (q, k, v, *new) = _beyond("beyond the table")
    step = torch.compile(
        lambda lengths: fa2.flash_attn_with_kvcache(
            q, k, v, *new, cache_seqlens=lengths, block_table=given["block_table"]
        ),
        fullgraph=True,
        backend="eager",
    )
    assert step(_ints([3, 7])).isfinite().all()


def test_pages_hold_what_seqused_k_says():
    q, (k, v) = _random(5, 4, 8), _cache(4, 4)
    offsets, table, used = _ints([0, 2, 5]), _ints([[0, 1], [2, 3]]), _ints([5, 7])
    given = (0.0, 8**-0.5, True)
    found = fa2_private._flash_attn_varlen_forward(
        q, k, v, offsets, _ints([0, 8, 16]), 3, 8, *given, block_table=table, seqused_k=used
    )[0]
    wanted, _ = block_table.forward_paged(
        q, k, v, Setting(8**-0.5, True, packing=(offsets, _ints([0, 5, 12]), 3, 8)), table
    )
    torch.testing.assert_close(found, wanted)
