"""flash_attn_with_kvcache of FlashAttention-2 and 3, and block_table, against a loop in float64: what is read, what is
written, what is not.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import strobe
import strobe.flash_attn as fa2
import strobe.flash_attn_interface as fa3
from strobe.compat import kvcache
from strobe.flash_attn import flash_attn_interface as fa2_private
from strobe.ops import decode as ops_decode

HEADS, HEADS_KV, WIDTH = 4, 2, 16
DECODES = {"fa2": fa2.flash_attn_with_kvcache, "fa3": fa3.flash_attn_with_kvcache}
PAGES = {"fa2": "block_table", "fa3": "page_table"}
NEVER = float("nan")


class Held(NamedTuple):
    """A cache full of NaN but for the keys that sequences hold, where those lie, and how the call says so."""

    k: Tensor
    v: Tensor
    lengths: list[int]
    first: list[int]  # of each sequence's keys
    place: list[list[tuple[int, int]]]  # of each sequence's positions: (row or page, place in it)
    arguments: dict

    def keys(self, b: int, stop: int) -> tuple[Tensor, Tensor]:
        rows, at = zip(*self.place[b][self.first[b] : stop]) if stop > self.first[b] else ((), ())
        return tuple(t.double().cpu()[list(rows), list(at)] for t in (self.k, self.v))  # type: ignore


def _random(*shape: int, dtype=torch.float32, device="cpu", seed=0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(
        device, dtype
    )


def _ints(values, device="cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _held(
    kind: str, lengths: list[int], library="fa2", *, room=5, dtype=torch.float32, device="cpu", heads_first=False
) -> Held:
    """kind: "rows", "indexed", "leftpad", or "pages SIZE"; each sequence has room for `room` more keys."""
    batch, longest, first = len(lengths), max(lengths, default=0) + room, [0] * len(lengths)
    shuffled = torch.Generator().manual_seed(7)
    if kind.startswith("pages"):
        size = int(kind.split()[1])
        columns = -(-longest // size)
        n_pages = batch * columns + 3
        table = torch.randperm(n_pages, generator=shuffled)[: batch * columns].view(batch, columns)
        shape, place = (
            (n_pages, size),
            [[(int(table[b, j // size]), j % size) for j in range(columns * size)] for b in range(batch)],
        )
        arguments = {PAGES[library]: table.to(device, torch.int32)}
    else:
        index = torch.randperm(batch + 2, generator=shuffled)[:batch] if kind == "indexed" else torch.arange(batch)
        shape, place = (
            (batch + 2 if kind == "indexed" else batch, longest),
            [[(int(i), j) for j in range(longest)] for i in index],
        )
        arguments = {"cache_batch_idx": index.to(device, torch.int32)} if kind == "indexed" else {}
        if kind == "leftpad":
            first = [min(length, 1 + b) for b, length in enumerate(lengths)]
            arguments = {"cache_leftpad": _ints(first, device)}
    order = (HEADS_KV, shape[1]) if heads_first else (shape[1], HEADS_KV)
    k, v = (torch.full((shape[0], *order, WIDTH), NEVER, dtype=dtype, device=device) for _ in range(2))
    k, v = (t.transpose(1, 2) if heads_first else t for t in (k, v))
    for b, length in enumerate(lengths):
        for j in range(first[b], length):
            k[place[b][j]] = _random(HEADS_KV, WIDTH, dtype=dtype, device=device, seed=1000 * b + j)
            v[place[b][j]] = _random(HEADS_KV, WIDTH, dtype=dtype, device=device, seed=1000 * b + j + 500)
    return Held(k, v, lengths, first, place, arguments)


def _one(q: Tensor, k: Tensor, v: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] of one sequence, a row and a head at a time."""
    rows, keys = len(q), len(k)
    out, lse = (
        torch.zeros(rows, HEADS, v.shape[-1], dtype=torch.float64),
        torch.full((HEADS, rows), -torch.inf, dtype=torch.float64),
    )
    left, right = (bound if bound >= 0 else keys + rows for bound in options.get("window_size", (-1, -1)))
    right = 0 if options.get("causal") else right
    cap = options.get("softcap", 0.0)
    for i in range(rows):
        at = keys - rows + i
        seen = [j for j in range(keys) if at - left <= j <= at + right]
        for h in range(HEADS if seen else 0):
            head = h // (HEADS // HEADS_KV)
            s = torch.stack([q[i, h].double() @ k[j, head] for j in seen]) * options.get("softmax_scale", WIDTH**-0.5)
            s = cap * torch.tanh(s / cap) if cap else s
            lse[h, i] = s.logsumexp(0)
            out[i, h] = (s - lse[h, i]).exp() @ v[seen, head]
    return out, lse


def _turn(x: Tensor, cos: Tensor, sin: Tensor, position: int, interleaved: bool) -> Tensor:
    """x [H, D] at a position, a pair of dimensions at a time."""
    half, turned = cos.shape[1], x.double().clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i].double().cpu(), sin[position, i].double().cpu()
        turned[:, a], turned[:, b] = (
            x[:, a].double() * c - x[:, b].double() * s,
            x[:, a].double() * s + x[:, b].double() * c,
        )
    return turned


def _near(found: Tensor, wanted: Tensor, dtype=torch.float32):
    """float32: some 40 products of 16, each within 2**-24. bfloat16: weights and the result are rounded to 8 bits."""
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.double().cpu(), wanted, atol=bound, rtol=bound)


def _check(found: tuple[Tensor, Tensor], q: Tensor, held: Held, added: int, options: dict, dtype=torch.float32):
    out, lse = found
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.shape == q.shape and lse.shape == (q.shape[0], HEADS, q.shape[1]) and not out.requires_grad
    for b, length in enumerate(held.lengths):
        wanted, wanted_lse = _one(q[b].cpu(), *held.keys(b, length + added), options)
        _near(out[b], wanted, dtype)
        _near(lse[b], wanted_lse, torch.float64 if dtype == torch.float64 else torch.float32)


def _written(before: Held, after: Held, added: int) -> list[list[tuple[int, int]]]:
    """Where each sequence's new keys are to be; nothing else has changed by a bit."""
    places = [held[length : length + added] for held, length in zip(before.place, before.lengths)]
    for old, new in ((before.k, after.k), (before.v, after.v)):
        rest = torch.ones(old.shape[:2], dtype=torch.bool)
        for place in (one for some in places for one in some):
            rest[place] = False
        old, new = old.cpu()[rest], new.cpu()[rest]
        assert torch.equal(old.isnan(), new.isnan()) and torch.equal(old.nan_to_num(), new.nan_to_num())
    return places


def _copy(held: Held) -> Held:
    return held._replace(k=held.k.clone(), v=held.v.clone())


# ---------------------------------------------------------------- what is read and written

LENGTHS = [13, 0, 1, 7]
KINDS = ["rows", "indexed", "leftpad", "pages 1", "pages 3", "pages 16"]
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "left": {"causal": True, "window_size": (2, -1), "softcap": 1.5},
    "right": {"window_size": (-1, 0), "softmax_scale": 0.4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", DECODES)
def test_keys_are_read_where_they_lie(library, kind, options, device, kernel):
    held = _held(kind, LENGTHS, library, device=device)
    q, lengths = _random(4, 3, HEADS, WIDTH, device=device), _ints(LENGTHS, device)
    assert _ran(lambda: held.arguments | {"cache_seqlens": lengths}, library, q, held, options) == f"{kernel}.decode"
    found = DECODES[library](
        q, held.k, held.v, cache_seqlens=lengths, **held.arguments, **options, return_softmax_lse=True
    )
    _check(found, q, held, 0, options)


def _ran(arguments, library, q, held, options) -> str:
    """The kernel that a call ran."""
    calls, run = [], ops_decode.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcache.ops_decode, "run", lambda call: (calls.append(call), run(call))[1])
        DECODES[library](q, held.k, held.v, **arguments(), **options)
    (call,) = calls
    assert call.k.data_ptr() == held.k.data_ptr() and call.k.shape == held.k.shape  # no copy of the cache
    return ops_decode.decide(call).forward.kernel.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows, added", [(1, 1), (3, 3), (2, 4), (4, 1), (3, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_new_keys_are_there_and_nothing_else_has_changed(kind, rows, added, dtype, device):
    held = _held(kind, LENGTHS, dtype=dtype, device=device)
    before, q = _copy(held), _random(4, rows, HEADS, WIDTH, dtype=dtype, device=device)
    k, v = (_random(4, added, HEADS_KV, WIDTH, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    lengths, options = _ints(LENGTHS, device), {"causal": True}
    found = fa2.flash_attn_with_kvcache(
        q, held.k, held.v, k, v, cache_seqlens=lengths, **held.arguments, **options, return_softmax_lse=True
    )  # fmt: skip
    for b, places in enumerate(_written(before, held, added)):
        for t, place in enumerate(places):
            assert torch.equal(held.k[place], k[b, t]) and torch.equal(held.v[place], v[b, t])
    assert lengths.tolist() == LENGTHS
    _check(found, q, held, added, options, dtype)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, 4)}, {"window_size": (-1, 2)}], ids=str)
@pytest.mark.parametrize("kind", ["rows", "leftpad", "pages 3"])
@pytest.mark.parametrize("library", DECODES)
def test_rotary_turns_queries_and_new_keys(library, kind, options, interleaved, device):
    held = _held(kind, LENGTHS, library, device=device)
    before, angle = _copy(held), _random(20, 3, device=device)
    cos, sin = angle.cos(), angle.sin()  # 6 of 16 dimensions turn
    q, (k, v) = (
        _random(4, 3, HEADS, WIDTH, device=device),
        (_random(4, 2, HEADS_KV, WIDTH, device=device, seed=seed) for seed in (1, 2)),
    )
    given = (q.clone(), k.clone())
    found = DECODES[library](
        q, held.k, held.v, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=_ints(LENGTHS, device),
        rotary_interleaved=interleaved,
        return_softmax_lse=True, **held.arguments, **options,
    )  # fmt: skip
    assert torch.equal(q, given[0]) and torch.equal(k, given[1])
    for b, places in enumerate(_written(before, held, 2)):
        for t, place in enumerate(places):
            _near(held.k[place], _turn(k[b, t].cpu(), cos, sin, LENGTHS[b] + t, interleaved))
            assert torch.equal(held.v[place], v[b, t])
    turned = torch.stack(
        [
            torch.stack(
                [_turn(q[b, i].cpu(), cos, sin, LENGTHS[b] + (i if options else 0), interleaved) for i in range(3)]
            )
            for b in range(4)
        ]
    )
    _check(found, turned.to(device), held, 2, options)


def test_beyond_the_angles_is_nan(device):
    held, angle = _held("rows", [2, 6], device=device), _random(8, 4, device=device)
    q, k = _random(2, 3, HEADS, WIDTH, device=device), _random(2, 3, HEADS_KV, WIDTH, device=device)
    for added, lost in ((1, [2]), (3, [0, 1, 2])):  # the last row alone stands at 8; with a key there, all see it
        strobe.last_errors()
        cache, new = _copy(held), k[:, :added]
        out = fa2.flash_attn_with_kvcache(
            q, cache.k, cache.v, new, new, angle.cos(), angle.sin(), _ints([2, 6], device), window_size=(9, 9)
        )  # fmt: skip
        assert not out[0].isnan().any() and out[1].isnan().flatten(1).all(1).nonzero().flatten().tolist() == lost
        assert not out[1, [row for row in range(3) if row not in lost]].isnan().any()
        assert any("rotary" in said for said in strobe.last_errors()) == (
            added == 3
        )  # of keys; a query's is seen in its row


# ---------------------------------------------------------------- lengths as numbers, strides, nothing at all


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_may_be_a_number_or_left_out(kind, rows, device):
    held = _held(kind, [6, 6], room=0, device=device)
    q, options = _random(2, rows, HEADS, WIDTH, device=device), {"causal": True, "return_softmax_lse": True}
    tensor = fa2.flash_attn_with_kvcache(
        q, held.k, held.v, cache_seqlens=_ints([6, 6], device), **held.arguments, **options
    )
    number = fa2.flash_attn_with_kvcache(q, held.k, held.v, cache_seqlens=6, **held.arguments, **options)
    _check(tensor, q, held, 0, options)
    _check(number, q, held, 0, options)
    if kind != "pages 16":  # whose last page is not full
        _check(fa2.flash_attn_with_kvcache(q, held.k, held.v, **held.arguments, **options), q, held, 0, options)


@pytest.mark.parametrize("kind", ["rows", "pages 16"])
def test_a_prefill_at_a_number(kind, device, monkeypatch):
    """Over rows it is one plain call, whose kernels are made for many queries; pages are read by a decode."""
    plain, forward = [], kvcache.forward
    monkeypatch.setattr(kvcache, "forward", lambda *call: (plain.append(call), forward(*call))[1])
    held = _held(kind, [3, 3], room=37, device=device)
    before, q = _copy(held), _random(2, 37, HEADS, WIDTH, device=device)
    k, v = (_random(2, 37, HEADS_KV, WIDTH, device=device, seed=seed) for seed in (1, 2))
    found = fa3.flash_attn_with_kvcache(
        q, held.k, held.v, k, v, cache_seqlens=3, causal=True, return_softmax_lse=True, **_fa3(held)
    )
    _written(before, held, 37)
    _check(found, q, held, 37, {"causal": True})
    assert len(plain) == (kind == "rows")


@pytest.mark.parametrize("rows", [2, 40])
def test_keys_in_8_bits_are_worth_what_is_stored(rows, device):
    held = _held("rows", [9, 9], room=0, device=device)
    small = held._replace(k=held.k.to(torch.float8_e4m3fn), v=held.v.to(torch.float8_e4m3fn))
    q = _random(2, rows, HEADS, WIDTH, device=device)
    found = fa3.flash_attn_with_kvcache(q, small.k, small.v, cache_seqlens=9, causal=True, return_softmax_lse=True)
    _check(found, q, small._replace(k=small.k.float(), v=small.v.float()), 0, {"causal": True})


def _fa3(held: Held) -> dict:
    return {PAGES["fa3"] if name == PAGES["fa2"] else name: value for name, value in held.arguments.items()}


@pytest.mark.parametrize("kind", ["rows", "indexed", "pages 3"])
def test_strides_of_every_kind(kind, device):
    held = _held(kind, LENGTHS, device=device, heads_first=True)
    q = _random(4, 3, WIDTH, HEADS, device=device).transpose(2, 3)  # strided in its last dimension, as are the new keys
    k, v = (_random(4, 3, WIDTH, HEADS_KV, device=device, seed=seed).transpose(2, 3) for seed in (1, 2))
    lengths = torch.stack([_ints(LENGTHS, device)] * 2, 1)[:, 0]
    found = fa2.flash_attn_with_kvcache(
        q, held.k, held.v, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True, **held.arguments
    )
    _check(found, q, held, 3, {"causal": True})


@pytest.mark.parametrize("kind", ["rows", "indexed", "leftpad", "pages 3"])
def test_nothing_at_all(kind, device):
    held = _held(kind, [], device=device)
    q = _random(0, 3, HEADS, WIDTH, device=device)
    out, lse = fa2.flash_attn_with_kvcache(
        q, held.k, held.v, cache_seqlens=_ints([], device), **held.arguments, return_softmax_lse=True
    )
    assert out.shape == q.shape and lse.shape == (0, HEADS, 3)
    held = _held(kind, [4, 2], device=device)
    q = _random(2, 0, HEADS, WIDTH, device=device)
    out, lse = fa2.flash_attn_with_kvcache(
        q, held.k, held.v, cache_seqlens=_ints([4, 2], device), **held.arguments, return_softmax_lse=True
    )
    assert out.shape == q.shape and lse.shape == (2, HEADS, 0)
    q = _random(2, 3, HEADS, WIDTH, device=device)
    out, lse = fa2.flash_attn_with_kvcache(
        q, held.k, held.v, cache_seqlens=0, return_softmax_lse=True, **held.arguments | _unpadded(kind, device)
    )
    assert not out.any() and (lse == -torch.inf).all()


def _unpadded(kind: str, device: str) -> dict:
    return {"cache_leftpad": _ints([0, 0], device)} if kind == "leftpad" else {}


def test_what_needs_gradients_gets_none_as_in_the_original(device):
    held = _held("rows", [4], device=device)
    q = _random(1, 1, HEADS, WIDTH, device=device).requires_grad_()
    k = _random(1, 1, HEADS_KV, WIDTH, device=device).requires_grad_()
    out = fa2.flash_attn_with_kvcache(q, held.k, held.v, k, k, cache_seqlens=4)
    assert not out.requires_grad and not held.k.requires_grad


def test_it_compiles_without_graph_breaks():
    held = _held("pages 3", [4, 2])
    q, k = _random(2, 1, HEADS, WIDTH), _random(2, 1, HEADS_KV, WIDTH)
    angle, lengths = _random(9, 4), _ints([4, 2])

    def step(q, k, v, k_new, lengths):
        return fa2.flash_attn_with_kvcache(
            q, k, v, k_new, k_new, angle.cos(), angle.sin(), lengths, causal=True, **held.arguments
        )

    twin = _copy(held)
    wanted = step(q, held.k, held.v, k, lengths)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, twin.k, twin.v, k, lengths)
    assert torch.equal(found, wanted) and torch.equal(twin.k.nan_to_num(), held.k.nan_to_num())


# ---------------------------------------------------------------- packed queries over pages

RAGGED = [(3, 13), (0, 4), (1, 1), (5, 2), (2, 0), (4, 9)]  # queries and keys of each


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_packed_queries_over_pages(size, options, device):
    counts, lengths = zip(*RAGGED)
    held = _held(f"pages {size}", list(lengths), device=device)
    q, table = _random(sum(counts), HEADS, WIDTH, device=device), held.arguments["block_table"]
    offsets = [_ints([0, *torch.tensor(some).cumsum(0).tolist()], device) for some in (counts, lengths)]
    out, lse, weights = fa2.flash_attn_varlen_func(
        q, held.k, held.v, *offsets, max(counts), max(lengths), **options, return_attn_probs=True, block_table=table
    )  # fmt: skip
    assert out.shape == q.shape and lse.shape == (HEADS, len(q)) and weights.shape == (0,)
    for b, (start, stop) in enumerate(zip(offsets[0].tolist(), offsets[0][1:].tolist())):
        wanted, wanted_lse = _one(q[start:stop].cpu(), *held.keys(b, lengths[b]), options)
        _near(out[start:stop], wanted)
        _near(lse[:, start:stop], wanted_lse)


def test_packed_queries_that_broke_their_promise(device):
    """A sequence longer than max_seqlen_q, and rows of no sequence: NaN where there is no answer, and the rest as it
    was.
    """
    held = _held("pages 3", [7, 5], device=device)
    q, table = _random(9, HEADS, WIDTH, device=device), held.arguments["block_table"]
    out, lse, _ = fa2.flash_attn_varlen_func(
        q, held.k, held.v, _ints([0, 2, 6], device), _ints([0, 7, 12], device), 3, 7, return_attn_probs=True,
        block_table=table
    )  # fmt: skip
    lost = [False, False, True, True, True, True, True, True, True]
    assert out.isnan().flatten(1).all(1).tolist() == lost and lse.isnan().all(0).tolist() == lost
    assert not out[:2].isnan().any()
    _near(out[:2], _one(q[:2].cpu(), *held.keys(0, 7), {})[0])


def test_packed_queries_over_pages_have_no_gradients():
    held, offsets = _held("pages 3", [4]), _ints([0, 4])
    q = _random(4, HEADS, WIDTH).requires_grad_()
    arguments = held.k, held.v, offsets, offsets, 4, 4
    found = fa2.flash_attn_varlen_func(q, *arguments, block_table=held.arguments["block_table"], causal=True)
    assert found.requires_grad  # as in the original, whose backward fails
    with pytest.raises(NotImplementedError, match="gradients through block_table"):
        found.sum().backward()
    _near(found.detach(), _one(q.detach(), *held.keys(0, 4), {"causal": True})[0])
    private = (0.0, 0.25, True, -1, -1, 0.0, None, False, held.arguments["block_table"])
    out, lse, *_ = fa2_private._flash_attn_varlen_forward(q, *arguments, *private)
    wanted, wanted_lse = _one(q.detach(), *held.keys(0, 4), {"causal": True})
    _near(out, wanted)
    _near(lse, wanted_lse)


# ---------------------------------------------------------------- what cannot be


def _call(kind="rows", library="fa2", **changed):
    held = _held(kind, [4, 2], library)
    q, k = _random(2, 1, HEADS, WIDTH), _random(2, 1, HEADS_KV, WIDTH)
    given = {
        "q": q,
        "k_cache": held.k,
        "v_cache": held.v,
        "k": k,
        "v": k,
        "cache_seqlens": _ints([4, 2]),
        "causal": True,
    }
    given |= held.arguments | changed
    before = [given[name].clone() if isinstance(given[name], Tensor) else None for name in ("k_cache", "v_cache")]
    try:
        return DECODES[library](**given)
    finally:
        for name, old in zip(("k_cache", "v_cache"), before):  # an error leaves the cache as it was
            assert old is None or torch.equal(given[name].nan_to_num(), old.nan_to_num())


ANGLES = torch.ones(9, 4)
WRONG = [
    ("q", {"q": torch.ones(1, HEADS, WIDTH)}),
    ("q", {"q": torch.ones(2, 1, HEADS, WIDTH, dtype=torch.int32)}),
    ("k_cache", {"k_cache": torch.ones(2, 9, HEADS_KV, WIDTH, dtype=torch.float16)}),
    ("k_cache", {"k_cache": torch.ones(3, 9, HEADS_KV, WIDTH), "v_cache": torch.ones(3, 9, HEADS_KV, WIDTH)}),
    ("v_cache", {"v_cache": torch.ones(2, 7, HEADS_KV, WIDTH)}),
    ("k", {"k": torch.ones(2, 1, HEADS_KV + 1, WIDTH)}),
    ("v", {"v": torch.ones(2, 2, HEADS_KV, WIDTH)}),
    ("cache_seqlens", {"cache_seqlens": torch.tensor([4, 2], dtype=torch.int16)}),
    ("cache_seqlens", {"cache_seqlens": _ints([4, 2, 1])}),
    ("cache_seqlens", {"cache_seqlens": -1}),
    ("cache_seqlens", {"cache_seqlens": 9}),
    ("rotary_sin", {"rotary_cos": ANGLES}),
    ("rotary_cos", {"rotary_sin": ANGLES}),
    ("rotary_cos", {"rotary_cos": ANGLES, "rotary_sin": ANGLES, "k": None, "v": None}),
    ("rotary_cos", {"rotary_cos": ANGLES.repeat(1, 3), "rotary_sin": ANGLES.repeat(1, 3)}),
    ("rotary_sin", {"rotary_cos": ANGLES, "rotary_sin": ANGLES[:8]}),
    ("cache_leftpad", {"cache_leftpad": torch.ones(2)}),
    ("cache_leftpad", {"cache_leftpad": _ints([0])}),
    ("cache_batch_idx", {"cache_batch_idx": torch.tensor([0, 1], dtype=torch.int16)}),
    ("cache_batch_idx", {"cache_batch_idx": _ints([0])}),
    ("cache_batch_idx", {"cache_batch_idx": _ints([[0], [1]])}),
    ("block_table", {"block_table": _ints([0, 1])}),
    ("block_table", {"block_table": _ints([[0]])}),
    ("softcap", {"softcap": -1.0}),
]


@pytest.mark.parametrize("name, changed", WRONG, ids=[f"{name}{place}" for place, (name, _) in enumerate(WRONG)])
def test_what_is_wrong_is_called_by_the_callers_name(name, changed):
    with pytest.raises(ValueError, match=rf"^{name}: got .+, expected .+; .+"):
        _call(**changed)


@pytest.mark.parametrize(
    "name", ["q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "rotary_cos", "cache_batch_idx", "cache_leftpad"]
)
def test_what_is_no_tensor_says_so(name):
    with pytest.raises(TypeError, match=rf"^{name}: got list, expected .+; .+"):
        _call(**{name: [1, 2]})


def test_rows_and_pages_that_are_not_there_are_hidden(device):
    for kind, name in (("indexed", "cache_batch_idx"), ("pages 3", "block_table")):
        held = _held(kind, [4, 2], device=device)
        q, lost = _random(2, 1, HEADS, WIDTH, device=device), held.arguments[name].clone()
        lost[1] = 99
        strobe.last_errors()
        out, lse = fa2.flash_attn_with_kvcache(
            q, held.k, held.v, cache_seqlens=_ints([4, 2], device), return_softmax_lse=True, **{name: lost}
        )  # fmt: skip
        assert not out[1].any() and (lse[1] == -torch.inf).all() and strobe.last_errors()
        _near(out[0], _one(q[0].cpu(), *held.keys(0, 4), {})[0])


PACKED_WRONG = [
    ("q", {"q": torch.ones(1, 4, HEADS, WIDTH)}),
    ("k", {"k": torch.ones(9, HEADS_KV, WIDTH)}),
    ("v", {"v": torch.ones(6, 3, HEADS_KV, WIDTH, dtype=torch.float16)}),
    ("block_table", {"block_table": torch.tensor([[0]], dtype=torch.int16)}),
    ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0, 4])}),
    ("cu_seqlens_k", {"cu_seqlens_k": _ints([0, 4, 4])}),
    ("max_seqlen_q", {"max_seqlen_q": -1}),
    ("max_seqlen_k", {"max_seqlen_k": None}),
]


@pytest.mark.parametrize(
    "name, changed", PACKED_WRONG, ids=[f"{name}{place}" for place, (name, _) in enumerate(PACKED_WRONG)]
)
def test_what_is_wrong_with_packed_queries(name, changed):
    held = _held("pages 3", [4], room=2)
    given = {
        "q": _random(4, HEADS, WIDTH),
        "k": held.k,
        "v": held.v,
        "cu_seqlens_q": _ints([0, 4]),
        "cu_seqlens_k": _ints([0, 4]),
    }
    given |= {"max_seqlen_q": 4, "max_seqlen_k": 4, "block_table": held.arguments["block_table"]}
    with pytest.raises(ValueError, match=rf"^{name}: got .+, expected .+; .+"):
        fa2.flash_attn_varlen_func(**given | changed)


@pytest.mark.parametrize("rows", [16, 17])
def test_autocast_follows_the_cache_whatever_the_rows(rows):
    q, cache = torch.randn(1, rows, 2, 16), torch.randn(1, 64, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert fa2.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=40, causal=True).dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 20])
def test_what_is_wrong_is_called_what_the_caller_calls_it(rows):
    """Of few rows, which a decode attends to, and of many."""
    q, k, v = torch.randn(2, rows, 2, 16), torch.randn(2, 32, 2, 16), torch.randn(2, 32, 2, 16)
    wrong = {
        "softmax_scale": {"softmax_scale": float("nan")}, "window_size": {"window_size": (1.5, 2)},
        "k_cache": {"k_cache": k[:, :, :, :8]},
        "v_cache": {"v_cache": v[:, :30]},
    }  # fmt: skip
    for name, changed in wrong.items():
        with pytest.raises((strobe.InvalidProblem, TypeError), match=f"^{name}: got"):
            fa2.flash_attn_with_kvcache(**{"q": q, "k_cache": k, "v_cache": v} | changed)


def test_rows_of_no_sequence_and_of_one_beyond_the_promise_are_nan():
    q, pages, table = torch.randn(6, 4, 8), torch.randn(4, 8, 2, 8), _ints([[0, 1]], "cpu")
    attend = lambda begin, keys, longest: fa2.flash_attn_varlen_func(
        q, pages, pages, _ints([begin, 6], "cpu"), _ints([0, keys], "cpu"), 6, longest, causal=True, block_table=table
    )
    assert attend(2, 9, 9).isnan().flatten(1).all(1).tolist() == [True] * 2 + [False] * 4
    assert attend(0, 15, 5).isnan().all() and not attend(0, 15, 15).isnan().any()
