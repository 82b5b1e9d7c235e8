"""flash_attn_with_kvcache of FlashAttention-3 with what engines give together: pages, left padding, batch indices,
packed queries, rotary embeddings, and 8-bit keys with descales; against a loop in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import strobe
import strobe.flash_attn as fa2
import strobe.flash_attn_interface as fa3
from strobe.problem.cache import FP8
from tests.compat.test_kvcache import (
    DECODES,
    HEADS,
    HEADS_KV,
    PAGES,
    WIDTH,
    Held,
    _held,
    _ints,
    _near,
    _one,
    _random,
    _turn,
)

LENGTHS = [13, 2, 4, 7]
NEWS = [3, 0, 1, 5]


def padded(kind: str, library: str, device: str) -> tuple[Held, dict]:
    """A cache of pages or indexed rows whose first keys are padding of NaN, and the call's arguments."""
    held = _held(kind, LENGTHS, library, device=device)
    first = [3, 1, 0, 7]
    for b, count in enumerate(first):
        for j in range(count):
            held.k[held.place[b][j]] = torch.nan
            held.v[held.place[b][j]] = torch.nan
    return held._replace(first=first), held.arguments | {"cache_leftpad": _ints(first, device)}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_size": (2, -1)}], ids=str)
@pytest.mark.parametrize("kind", ["pages 1", "pages 3", "pages 16", "indexed"])
@pytest.mark.parametrize("library", DECODES)
def test_left_padding_beside_pages_and_indexed_rows(library, kind, options, device):
    held, arguments = padded(kind, library, device)
    q = _random(4, 2, HEADS, WIDTH, device=device)
    out, lse = DECODES[library](
        q, held.k, held.v, cache_seqlens=_ints(LENGTHS, device), return_softmax_lse=True, **arguments, **options
    )
    for b, length in enumerate(LENGTHS):
        wanted, wanted_lse = _one(q[b].cpu(), *held.keys(b, length), options)
        _near(out[b], wanted)
        _near(lse[b], wanted_lse)
    assert strobe.last_errors() == []


def test_new_keys_of_a_padded_sequence_go_behind_its_last(device):
    held, arguments = padded("pages 3", "fa3", device)
    k = _random(4, 2, HEADS_KV, WIDTH, device=device, seed=5)
    q = _random(4, 2, HEADS, WIDTH, device=device)
    out = fa3.flash_attn_with_kvcache(
        q, held.k, held.v, k, k, cache_seqlens=_ints(LENGTHS, device), causal=True, **arguments
    )
    for b, length in enumerate(LENGTHS):
        for t in range(2):
            assert torch.equal(held.k[held.place[b][length + t]], k[b, t])
        _near(out[b], _one(q[b].cpu(), *held.keys(b, length + 2), {"causal": True})[0])


def _slice(pool: Tensor) -> Tensor:
    """A copy that is a part of longer rows, whose other keys are NaN."""
    part = torch.nn.functional.pad(pool, (0, 0, 0, 0, 2, 3), value=torch.nan)[:, 2 : 2 + pool.shape[1]]
    assert torch.equal(part.nan_to_num(), pool.nan_to_num())
    return part


def _heads_first(pool: Tensor) -> Tensor:
    return pool.transpose(1, 2).contiguous().transpose(1, 2)


def _every_other_row(pool: Tensor) -> Tensor:
    return pool.repeat_interleave(2, 0)[::2]


@pytest.mark.parametrize("layout", [_slice, _heads_first, _every_other_row])
@pytest.mark.parametrize("kind", ["pages 1", "pages 3", "indexed"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_left_padding_in_pools_with_gaps(packed, kind, layout, device):
    """New keys of the same call are written, too."""
    held, arguments = padded(kind, "fa3", device)
    held = held._replace(k=layout(held.k), v=layout(held.v))
    q, k = (_random(4, heads, WIDTH, device=device) for heads in (HEADS, HEADS_KV))
    offsets = torch.arange(5, dtype=torch.int32, device=device)
    if packed:
        arguments |= {"cu_seqlens_q": offsets, "cu_seqlens_k_new": offsets, "max_seqlen_q": 1}
    else:
        q, k = q[:, None], k[:, None]
    out = fa3.flash_attn_with_kvcache(q, held.k, held.v, k, k, cache_seqlens=_ints(LENGTHS, device), **arguments)
    for b, length in enumerate(LENGTHS):
        _near(out[b].view(1, HEADS, WIDTH), _one(q[b].view(1, HEADS, WIDTH).cpu(), *held.keys(b, length + 1), {})[0])
    assert strobe.last_errors() == []


def test_left_padding_in_slices_compiles_without_graph_breaks():
    held, arguments = padded("indexed", "fa3", "cpu")
    q, room, stop = _random(4, 1, HEADS, WIDTH), torch.stack([held.k, held.v]), max(LENGTHS)

    def step(q, room):
        k, v = room[0, :, :stop], room[1, :, :stop]
        return fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=_ints(LENGTHS), **arguments)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, room)
    assert torch.equal(found, step(q, room)) and found.isfinite().all()


def test_a_page_that_is_not_there_is_hidden_beside_left_padding(device):
    """Pages that share their memory, so that the place of one beyond the pool is in it."""
    k = _random(1, 4, HEADS_KV, WIDTH, device=device).expand(3, -1, -1, -1)
    q, table = _random(1, 1, HEADS, WIDTH, device=device), _ints([[2, 3]], device)
    lengths, padding = _ints([7], device), _ints([1], device)
    out = fa3.flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, cache_leftpad=padding, page_table=table)
    _near(out[0], _one(q[0].cpu(), *[k[2, 1:].double().cpu()] * 2, {})[0])
    assert any("page id" in error for error in strobe.last_errors())


def test_left_padding_needs_keys_at_one_distance():
    """Rows of k_cache begin every 8 keys, rows of v_cache every 9; or at no key at all."""
    held, arguments = padded("indexed", "fa3", "cpu")
    q, room = _random(4, 1, HEADS, WIDTH), held.k.shape[1]
    uneven = torch.zeros(len(held.k), room * HEADS_KV * WIDTH + 8)[:, :-8].view(held.k.shape)
    for k in (_slice(held.k), uneven):
        words = r"^cache_leftpad: got a tensor beside cache_batch_idx, .*k_cache.*v_cache"
        with pytest.raises(NotImplementedError, match=words):
            fa3.flash_attn_with_kvcache(q, k, held.v, cache_seqlens=_ints(LENGTHS), **arguments)


@pytest.mark.parametrize("library", DECODES)
def test_batch_indices_pick_rows_of_a_page_table(library, device):
    held = _held("pages 3", LENGTHS, library, device=device)
    picked = [2, 0, 2]
    q = _random(3, 1, HEADS, WIDTH, device=device)
    out = DECODES[library](
        q, held.k, held.v, cache_seqlens=_ints([LENGTHS[b] for b in picked], device),
        cache_batch_idx=_ints(picked, device), **held.arguments,
    )  # fmt: skip
    for n, b in enumerate(picked):
        _near(out[n], _one(q[n].cpu(), *held.keys(b, LENGTHS[b]), {})[0])


# ---------------------------------------------------------------- packed queries

OFFSETS = [0, 3, 3, 4, 9]


@pytest.mark.parametrize("kind", ["pages 3", "indexed", "leftpad", "pages 3 leftpad", "indexed leftpad"])
@pytest.mark.parametrize(
    "rotary, first",
    [(None, LENGTHS), (True, LENGTHS), (False, LENGTHS), (True, [6, 0, 9, 2])],
    ids=["plain", "interleaved", "halves", "rotary_seqlens"],
)
def test_packed_queries_with_everything_beside(kind, rotary, first, device):
    """The new keys of each sequence are written, rotated, and seen."""
    if kind.endswith(" leftpad"):
        held, arguments = padded(kind.rpartition(" ")[0], "fa3", device)
    else:
        held = _held(kind, LENGTHS, "fa3", device=device)
        arguments = held.arguments
    q, k = (_random(9, heads, WIDTH, device=device) for heads in (HEADS, HEADS_KV))
    offsets = _ints(OFFSETS, device)
    cos, sin = (_random(32, 4, seed=n, device=device) for n in (1, 2))
    angles = {} if rotary is None else {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary}
    if first != LENGTHS:
        angles["rotary_seqlens"] = _ints(first, device)
    out, lse = fa3.flash_attn_with_kvcache(
        q, held.k, held.v, k, k, cache_seqlens=_ints(LENGTHS, device), cu_seqlens_q=offsets, causal=True,
        cu_seqlens_k_new=offsets, max_seqlen_q=5, num_splits=3, pack_gqa=True, sm_margin=8, return_softmax_lse=True,
        **arguments, **angles,
    )  # fmt: skip
    for b, length in enumerate(LENGTHS):
        rows = slice(OFFSETS[b], OFFSETS[b + 1])
        turned = q[rows].double().cpu()
        if rotary is not None:
            turned = torch.stack(
                [_turn(one.cpu(), cos, sin, first[b] + t, rotary) for t, one in enumerate(q[rows])]
                or [turned.new_empty(0)]
            ).reshape(turned.shape)
            for t, one in enumerate(k[rows]):
                _near(held.k[held.place[b][length + t]], _turn(one.cpu(), cos, sin, first[b] + t, rotary))
        wanted, wanted_lse = _one(turned, *held.keys(b, length + NEWS[b]), {"causal": True})
        _near(out[rows], wanted)
        _near(lse[:, rows], wanted_lse)
    assert strobe.last_errors() == []


def test_packed_queries_have_one_rotary_position_a_sequence():
    held, offsets = _held("indexed", LENGTHS, "fa3"), _ints(OFFSETS)
    k, angles = _random(9, HEADS_KV, WIDTH), _random(32, 4)
    of_rows = _ints([1] * 9)
    with pytest.raises(ValueError, match=r"^rotary_seqlens: got torch\.int32 \[9\], expected an int32 tensor \[4\]"):
        fa3.flash_attn_with_kvcache(
            _random(9, HEADS, WIDTH), held.k, held.v, k, k, cache_seqlens=_ints(LENGTHS), cu_seqlens_q=offsets,
            cu_seqlens_k_new=offsets, rotary_cos=angles, rotary_sin=angles, rotary_seqlens=of_rows, **held.arguments,
        )  # fmt: skip


def test_a_packed_call_of_the_private_forward(device):
    """FlashAttention-3's _flash_attn_forward takes pages beside packed queries; a number of keys for all, too."""
    held = _held("pages 3", [4, 4], "fa3", device=device)
    q = _random(3, HEADS, WIDTH, device=device)
    out, *_ = fa3._flash_attn_forward(
        q, held.k, held.v, cu_seqlens_q=_ints([0, 1, 3], device), seqused_k=_ints([4, 4], device), max_seqlen_q=2,
        page_table=held.arguments["page_table"], causal=True,
    )  # fmt: skip
    for b, rows in enumerate((slice(0, 1), slice(1, 3))):
        _near(out[rows], _one(q[rows].cpu(), *held.keys(b, 4), {"causal": True})[0])
    number = fa3.flash_attn_with_kvcache(
        q, held.k, held.v, cu_seqlens_q=_ints([0, 1, 3], device), cache_seqlens=4, causal=True, **held.arguments
    )
    _near(number, out.double().cpu())


# ---------------------------------------------------------------- 8 bits


def _eight(*shape: int, seed: int, device: str) -> Tensor:
    return (_random(*shape, seed=seed) * 8).to(FP8).to(device)


def _scales(kind: str, batch: int, device: str) -> list[Tensor]:
    """q, k and v descales [B, H_kv]: equal for all sequences, as engines expand them, or each with its own."""
    g = torch.Generator().manual_seed(9)
    rows = 1 if kind == "expanded" else batch
    return [(torch.rand(rows, HEADS_KV, generator=g) / 4 + 0.01).to(device).expand(batch, -1) for _ in range(3)]


def _exact(x: Tensor, scale: Tensor) -> Tensor:
    """x [B, S, H, D] in float64, multiplied by [B, H_kv]."""
    return x.double().cpu() * scale.double().cpu().repeat_interleave(x.shape[2] // scale.shape[1], 1)[:, None, :, None]


def _bf16_near(found: Tensor, wanted: Tensor) -> None:
    """bfloat16 of q, P and out: three roundings of 2^-9, and as many of a scale that is multiplied afterwards."""
    assert found.dtype == torch.bfloat16
    error = (found.double().cpu() - wanted).abs().max() / wanted.abs().max()
    assert error < 6 * 2.0**-9, error


@pytest.mark.parametrize("kind", ["expanded", "by sequence"])
def test_descales_without_a_cache(kind, device):
    q, k, v = (_eight(2, 9, heads, WIDTH, seed=n, device=device) for n, heads in enumerate((HEADS, HEADS_KV, HEADS_KV)))
    given = _scales(kind, 2, device)
    wide = [_exact(x, scale) for x, scale in zip((q, k, v), given)]
    wanted = torch.stack([_one(*(t[b] for t in wide), {"causal": True})[0] for b in range(2)])
    names = dict(zip(("q_descale", "k_descale", "v_descale"), given))
    _bf16_near(fa3.flash_attn_func(q, k, v, causal=True, **names), wanted)
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    offsets = _ints([0, 9, 18], device)
    out = fa3.flash_attn_varlen_func(*packed, offsets, offsets, 9, 9, causal=True, **names)
    _bf16_near(out, wanted.flatten(0, 1))


@pytest.mark.parametrize("queries", ["8 bits", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", ["expanded", "by sequence"])
def test_descales_over_pages(kind, packed, queries, device):
    lengths, rows = [40, 17], 3
    k, v = (_eight(2, 48, HEADS_KV, WIDTH, seed=n, device=device) for n in (3, 4))
    q = _eight(2, rows, HEADS, WIDTH, seed=5, device=device)
    given = _scales(kind, 2, device)
    wide = [_exact(x, scale) for x, scale in zip((q, k, v), given)]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), given))
    if queries == "bfloat16":
        q = q.to(torch.bfloat16)
        names.pop("q_descale")
        wide[0] = q.double().cpu()
    wanted = torch.stack(
        [_one(wide[0][b], *(t[b, : lengths[b]] for t in wide[1:]), {"causal": True})[0] for b in range(2)]
    )
    table = torch.tensor([[4, 1, 0], [2, 3, 5]], device=device, dtype=torch.int32)
    pools = []
    for rows_of in (k, v):
        pool = torch.empty(6, 16, HEADS_KV, WIDTH, dtype=torch.uint8, device=device)
        pool[table.flatten().long()] = rows_of.view(torch.uint8).reshape(6, 16, HEADS_KV, WIDTH)
        pools.append(pool.view(FP8))
    more = {"cu_seqlens_q": _ints([0, rows, 2 * rows], device), "max_seqlen_q": rows} if packed else {}
    out = fa3.flash_attn_with_kvcache(
        q.flatten(0, 1) if packed else q, *pools, cache_seqlens=_ints(lengths, device), page_table=table, causal=True,
        **names, **more,
    )  # fmt: skip
    _bf16_near(out.view(wanted.shape), wanted)


@pytest.mark.parametrize("new", ["8 bits", "bfloat16"])
def test_new_keys_of_an_8_bit_cache(new, device):
    """8-bit keys keep their bits; others are divided by the descale and rounded."""
    k, v = (_eight(2, 16, HEADS_KV, WIDTH, seed=n, device=device) for n in (3, 4))
    added = _eight(2, 1, HEADS_KV, WIDTH, seed=6, device=device)
    given = _scales("expanded", 2, device)
    names = dict(zip(("k_descale", "v_descale"), given[1:]))
    q = _random(2, 1, HEADS, WIDTH, device=device).to(torch.bfloat16)
    wide = added if new == "8 bits" else (added.float() * given[1][:, None, :, None]).to(torch.bfloat16)
    values = added if new == "8 bits" else wide
    fa3.flash_attn_with_kvcache(q, k, v, wide, values, cache_seqlens=_ints([3, 7], device), **names)
    for b, place in enumerate((3, 7)):
        if new == "8 bits":
            assert torch.equal(k[b, place].view(torch.uint8), added[b, 0].view(torch.uint8))
        else:  # a rounding to bfloat16 before that to 8 bits may move a value by one step
            exact = wide[b, 0].float() / given[1][b][:, None]
            assert torch.equal(k[b, place].view(torch.uint8), exact.to(FP8).view(torch.uint8)) or device != "cpu"


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("expanded", [False, True])
def test_descales_of_no_sequence(expanded, packed, device):
    pages, table = torch.zeros(2, 4, 2, 16, device=device).to(FP8), torch.zeros(0, 1, dtype=torch.int32, device=device)
    scale = torch.ones(1, device=device).expand(0, 2) if expanded else torch.ones(0, 2, device=device)
    lengths = table[:, 0]
    q, more = torch.zeros(0, 1, 4, 16, device=device), {}
    if packed:  # the rows are padding
        q, more = torch.ones(3, 4, 16, device=device), {"cu_seqlens_q": _ints([0], device), "max_seqlen_q": 3}
    out = fa3.flash_attn_with_kvcache(
        q.to(FP8), pages, pages.clone(), cache_seqlens=lengths, page_table=table, q_descale=scale, k_descale=scale,
        v_descale=scale, **more,
    )  # fmt: skip
    assert out.shape == q.shape and out.dtype == torch.bfloat16 and not out.any()


def test_packed_queries_and_new_keys_of_no_sequence(device):
    offsets, cache, angles = (
        _ints([0], device),
        torch.zeros(0, 8, 2, 16, device=device),
        torch.ones(9, 8, device=device),
    )
    q, new = torch.ones(3, 4, 16, device=device), torch.zeros(0, 2, 16, device=device)
    for more in ({}, {"rotary_seqlens": offsets[:0]}):
        out, lse = fa3.flash_attn_with_kvcache(
            q, cache, cache.clone(), new, new, cache_seqlens=offsets[:0].clone(), cu_seqlens_q=offsets,
            cu_seqlens_k_new=offsets, max_seqlen_q=3, rotary_cos=angles, rotary_sin=angles, causal=True,
            return_softmax_lse=True, **more,
        )  # fmt: skip
        assert out.shape == q.shape and not out.any() and lse.shape == (4, 3) and (lse == -torch.inf).all()


def test_what_is_wrong_with_descales():
    x, q = _eight(2, 4, HEADS_KV, WIDTH, seed=1, device="cpu"), _random(2, 4, HEADS_KV, WIDTH)
    one = torch.ones(2, HEADS_KV)
    cases = {
        "q_descale: got a scale beside torch.float32": lambda: fa3.flash_attn_func(q, q, q, q_descale=one),
        "k_descale: got list": lambda: fa3.flash_attn_func(x, x, x, k_descale=[1.0]),
        r"v_descale: got torch.float32 \[2\]": lambda: fa3.flash_attn_func(x, x, x, v_descale=one[:, 0]),
        "k_descale: got a scale beside": lambda: fa3.flash_attn_with_kvcache(q, q, q, k_descale=one, cache_seqlens=2),
        "k: got torch.bfloat16 beside a k_descale": lambda: fa3.flash_attn_with_kvcache(
            q[:, :1].bfloat16(), x, x, q[:, :1].bfloat16(), q[:, :1].bfloat16(), k_descale=one.clone(), cache_seqlens=2
        ),
    }
    for words, call in cases.items():
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
            call()


def test_pages_beside_what_requires_grad(device):
    """Parameters of a model that serves require grad; over pages nothing is refused before its backward."""
    held, offsets = _held("pages 3", [4], "fa2", device=device), _ints([0, 4], device)
    q = _random(4, HEADS, WIDTH, device=device).requires_grad_()
    out = fa2.flash_attn_varlen_func(
        q, held.k, held.v, offsets, offsets, 4, 4, block_table=held.arguments[PAGES["fa2"]]
    )
    with torch.no_grad():
        plain = fa2.flash_attn_varlen_func(
            q, held.k, held.v, offsets, offsets, 4, 4, block_table=held.arguments[PAGES["fa2"]]
        )
    assert torch.equal(out.detach(), plain) and not plain.requires_grad
    with pytest.raises(NotImplementedError, match="gradients through block_table"):
        out.sum().backward()


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_padding_and_indices_out_of_range(packed, device):
    """Negative left padding counts as 0. A sequence whose index has no row of the page table has no keys."""
    held = _held("pages 3", LENGTHS, "fa3", device=device)
    q = _random(4, 1, HEADS, WIDTH, device=device)
    more = {"cu_seqlens_q": torch.arange(5, dtype=torch.int32, device=device), "max_seqlen_q": 1} if packed else {}

    def run(**options):
        return fa3.flash_attn_with_kvcache(
            q[:, 0] if packed else q, held.k, held.v, cache_seqlens=_ints(LENGTHS, device), **held.arguments, **more,
            **options,
        )  # fmt: skip

    plain = run()
    assert torch.equal(run(cache_leftpad=_ints([0, -3, 0, -1], device)), run(cache_leftpad=_ints([0] * 4, device)))
    assert strobe.last_errors() == []
    out = run(cache_batch_idx=_ints([0, 4, 2, -1], device))
    assert torch.equal(out[::2], plain[::2]) and not out[1::2].any()
    assert any("page id" in error for error in strobe.last_errors())


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", ["cache_batch_idx", "cache_leftpad"])
def test_what_is_wrong_with_padding_and_indices(name, packed):
    held, q = _held("pages 3", LENGTHS, "fa3", device="cpu"), _random(4, 1, HEADS, WIDTH)
    more = {"cu_seqlens_q": torch.arange(5, dtype=torch.int32), "max_seqlen_q": 1} if packed else {}
    cases = {"list": [0, 1, 2, 3], "torch.float32": torch.zeros(4), r"(torch.int32|shape) \[1, 4\]": _ints([[0] * 4])}
    for words, wrong in cases.items():
        with pytest.raises((strobe.InvalidProblem, TypeError), match=f"^{name}: got {words}"):
            fa3.flash_attn_with_kvcache(
                q[:, 0] if packed else q, held.k, held.v, cache_seqlens=_ints(LENGTHS), **held.arguments, **more,
                **{name: wrong},
            )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_indices_into_a_page_table_without_rows(packed):
    held, q = _held("pages 3", LENGTHS, "fa3", device="cpu"), _random(4, 1, HEADS, WIDTH)
    more = {"cu_seqlens_q": torch.arange(5, dtype=torch.int32), "max_seqlen_q": 1} if packed else {}
    arguments = held.arguments | {"page_table": held.arguments["page_table"][:0]}
    with pytest.raises(strobe.InvalidProblem, match=r"^page_table: got shape \[0, \d+\], expected one row or more; .*"):
        fa3.flash_attn_with_kvcache(
            q[:, 0] if packed else q, held.k, held.v, cache_seqlens=_ints(LENGTHS), cache_batch_idx=_ints([0] * 4),
            **arguments, **more,
        )  # fmt: skip
