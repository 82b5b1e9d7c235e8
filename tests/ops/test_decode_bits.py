"""attention_decode has the same bits everywhere: alone and in a batch, in pages and rows, as a prefill's last rows."""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.ops import decode as ops_decode
from strobe.problem.decode import DecodeCall

INT = lambda *values, device="cpu": torch.tensor(values, dtype=torch.int32, device=device)
FP64 = 100 * 2.0**-53  # float64 against float64: as test_metamorphic.py


def draw(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


# ---------------------------------------------------------------- the same bits


EVERY_DTYPE = (torch.float32, torch.bfloat16, torch.float16)


def alone_and_elsewhere(
    seed: int,
    device: str,
    kernel: str,
    most: int = 300,
    dtypes=EVERY_DTYPE,
    tokens=(1, 2, 3, 4, 5),
    groups=(1, 2, 3, 4),
    widths=(8, 24),
) -> None:
    """A sequence alone, in a batch, left padded, in pages of two sizes, and as the last rows of its prefill, which may
    be packed: one set of bits.
    """
    g = torch.Generator().manual_seed(seed)
    roll = lambda low, high: int(torch.randint(low, high, (1,), generator=g))
    dtype = dtypes[seed % len(dtypes)]
    n, tokens, heads_kv, group, width = (
        roll(1, most),
        tokens[roll(0, len(tokens))],
        roll(1, 4),
        groups[roll(0, len(groups))],
        widths[seed % 2],
    )
    options = ({}, {"left": 20}, {"softcap": 3.0}, {"scale": 0.3}, {"right": -1})[seed % 5]
    call = lambda *fields: ops_decode.run(
        DecodeCall(*fields, **{"right": 0, "batch_invariant": True, "kernel": kernel, **options})
    )
    draw_one = lambda *shape: torch.randn(shape, generator=g).to(device, dtype)
    q, k, v = (
        draw_one(1, tokens, heads_kv * group, width),
        draw_one(1, n, heads_kv, width),
        draw_one(1, n, heads_kv, width),
    )
    alone = call(q, k, v, INT(n, device=device))
    batch, room, place = roll(2, 6), n + roll(0, 600), roll(0, 2)
    many = [draw_one(batch, *shape[1:]) for shape in (q.shape, (1, room, heads_kv, width), (1, room, heads_kv, width))]
    lengths = torch.randint(0, room + 1, (batch,), generator=g).to(device, torch.int32)
    many[0][place], many[1][place, :n], many[2][place, :n], lengths[place] = q[0], k[0], v[0], n
    found = [tuple(t[place : place + 1] for t in call(*many, lengths))]
    pad = roll(0, 40)
    padded = [
        torch.cat([torch.full((1, pad, heads_kv, width), torch.nan, dtype=dtype, device=device), t], 1) for t in (k, v)
    ]
    found.append(call(q, *padded, INT(pad + n, device=device), None, INT(pad, device=device)))
    for size in (1, 16) if seed % 2 else (7, 256):
        columns = -(-n // size)
        order = torch.randperm(columns + 2, generator=g)[:columns]
        pools = [
            torch.full((columns + 2, size, heads_kv, width), torch.nan, dtype=dtype, device=device) for _ in range(2)
        ]
        for pool, t in zip(pools, (k, v)):
            pool[order.to(device)] = torch.nn.functional.pad(
                t[0], (0, 0, 0, 0, 0, columns * size - n), value=torch.nan
            ).view(columns, size, heads_kv, width)
        table = torch.cat([order, torch.full((roll(0, 5),), -1)]).to(device, torch.int32)[None]
        found.append(call(q, *pools, INT(n, device=device), table))
    if tokens <= n:
        prefill = torch.cat([draw_one(1, n - tokens, heads_kv * group, width), q], 1)
        flat = {"causal": options.get("right") != -1, "window": (options["left"], 0) if "left" in options else None}
        flat |= {name: options[name] for name in ("softcap", "scale") if name in options}
        part = strobe.partial_attention(prefill, k, v, batch_invariant=True, kernel=kernel, **flat)
        found.append((part.out[:, -tokens:].to(dtype), part.lse[:, :, -tokens:]))
        before, after = roll(0, 90), roll(0, 90)
        beside = [
            torch.cat([draw_one(before, *t.shape[2:]), t[0], draw_one(after, *t.shape[2:])]) for t in (prefill, k, v)
        ]
        where = torch.tensor([0, before, before + n, before + n + after], device=device, dtype=torch.int32)
        part = strobe.partial_attention_varlen(
            *beside, cu_seqlens_q=where, cu_seqlens_k=where, batch_invariant=True, kernel=kernel, **flat
        )
        rows = slice(before + n - tokens, before + n)
        found.append((part.out[None, rows].to(dtype), part.lse[None, :, rows]))
    assert all(torch.equal(alone[0], out) and torch.equal(alone[1], lse) for out, lse in found), seed


@pytest.mark.nightly
def test_200_sequences_have_the_same_bits_everywhere():
    for seed in range(200):
        alone_and_elsewhere(seed, "cpu", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(16))
@pytest.mark.parametrize("kernel", ["hopper", "portable"])
def test_2000_sequences_have_the_same_bits_everywhere_on_a_gpu(kernel, part):
    few = {"tokens": (1, 4), "groups": (1, 4)}  # each is compiled anew
    for seed in range(125 * part, 125 * part + 125):
        alone_and_elsewhere(seed, "cuda", kernel, 5000, EVERY_DTYPE[kernel == "hopper" :], **few)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(64, 128), (192, 256)], ids=str)
@pytest.mark.parametrize("kernel", ["hopper", "portable"])
def test_wide_sequences_have_the_same_bits_everywhere_on_a_gpu(kernel, widths):
    for seed in range(30):
        alone_and_elsewhere(seed, "cuda", kernel, 5000, (torch.bfloat16,), (1, 16), (3, 16), widths)


def windowed(
    left: int,
    right: int,
    tokens: int,
    lengths: tuple[int, ...],
    kernel: tuple[str, str],
    rows: int = 70,
    dtype=torch.float32,
) -> None:
    """Decodes over dense rows, left padded rows and pages, and the last rows of their prefills: one set of bits. Of
    decodes all that lies before the first row's window is NaN, or a page that is not there; of prefills it is other
    keys, which some of its rows see. kernel: (device, family).
    """
    device, family = kernel
    batch, most, size, pad = len(lengths), max(lengths), 16, 9
    q = draw(batch, rows, 4, 16, seed=left, dtype=dtype, device=device)
    k, v = (draw(batch, most, 2, 16, seed=left + n, dtype=dtype, device=device) for n in (1, 2))
    k, v = (
        torch.nn.functional.pad(t, (0, 0, 0, 0, 300, 300), value=torch.nan)[:, 300:-300] for t in (k, v)
    )  # around all that any row sees
    options = {"window": (left, right), "batch_invariant": True, "kernel": family}
    expected = []
    for b, n in enumerate(lengths):
        part = strobe.partial_attention(q[b : b + 1, -min(n, rows) :], k[b : b + 1, :n], v[b : b + 1, :n], **options)
        expected.append((part.out[0, -tokens:], part.lse[0, :, -tokens:]))
    counts = torch.tensor(lengths, device=device)
    position = torch.arange(most, device=device)[None]
    before = (counts - tokens - left).clamp(min=0)
    own = ((position >= before[:, None]) & (position < counts[:, None]))[..., None, None]
    k, v = (t.where(own, torch.nan) for t in (k, v))
    held = counts.int()
    padded = [torch.cat([torch.full_like(t[:, :pad], torch.nan), t], 1) for t in (k, v)]
    columns = -(-most // size)
    order = torch.randperm(batch * columns, generator=torch.Generator().manual_seed(left)).to(device)
    pools = [
        torch.nn.functional.pad(t, (0, 0, 0, 0, 0, columns * size - most), value=torch.nan).reshape(-1, size, 2, 16)
        for t in (k, v)
    ]
    pools = [pool[order.argsort()] for pool in pools]  # page n of all lies at order[n]
    column = torch.arange(columns, device=device)[None]
    table = order.argsort().argsort().view(batch, columns).where((column + 1) * size > before[:, None], -1).int()
    caches = {
        "rows": strobe.DenseCache(k, v, held),
        "left padded": strobe.DenseCache(*padded, held + pad, torch.full_like(held, pad)),
        "pages": strobe.PagedCache(*pools, table, held),
    }
    for name, cache in caches.items():
        got = strobe.partial_attention_decode(q[:, -tokens:].contiguous(), cache, causal=False, **options)
        for b, (out, lse) in enumerate(expected):
            assert torch.equal(got.out[b], out) and torch.equal(got.lse[b], lse), (name, lengths[b])
    assert strobe.last_errors() == []


WINDOWS = [
    (0, 0),
    (1, 0),
    (20, 0),
    (31, 2),
    (63, 0),
    (64, 0),
    (100, 7),
    (127, 0),
    (200, 0),
    (254, 0),
    (255, 1),
]  # of fewer keys than a tile of a CPU


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("left, right", WINDOWS)
def test_a_short_windows_rows_have_the_bits_of_their_prefill(left, right, tokens, device, kernel):
    for n, dtype in enumerate(EVERY_DTYPE):
        lengths = ((255, 256, 257), (300, 511, 3), (513, 70, 600))[(n + left) % 3]
        windowed(left, right, tokens, lengths, (device, kernel), dtype=dtype)


def test_pages_are_rows_to_the_bit(device, kernel):
    """Paged and dense, without batch_invariant too where their capacities are one."""
    k, v, q = (draw(2, 96, 2, 16, seed=n, device=device) for n in range(3))
    dense = strobe.DenseCache(k, v, INT(90, 17, device=device))
    table = INT([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], device=device)
    paged = strobe.PagedCache(k.view(12, 16, 2, 16), v.view(12, 16, 2, 16), table, dense.seqlens)
    rows = [strobe.partial_attention_decode(q[:, :3].contiguous(), cache, kernel=kernel) for cache in (dense, paged)]
    assert torch.equal(rows[0].out, rows[1].out) and torch.equal(rows[0].lse, rows[1].lse)


# ---------------------------------------------------------------- shared prefixes


def test_a_prefix_attended_once_for_all_sequences(device, kernel):
    """The batch is folded into the rows over the prefix, and merged with each one's own suffix."""
    prefix_k, prefix_v = (draw(1, 64, 2, 16, seed=n, dtype=torch.float64, device=device) for n in range(2))
    own_k, own_v = (draw(5, 20, 2, 16, seed=n, dtype=torch.float64, device=device) for n in (2, 3))
    q, lengths = draw(5, 1, 8, 16, seed=4, dtype=torch.float64, device=device), INT(20, 0, 7, 1, 19, device=device)
    folded = strobe.partial_attention(
        q.transpose(0, 1), prefix_k, prefix_v, kernel=kernel
    )  # [1, B, H, D]: B rows over one prefix
    prefix = strobe.Partial(folded.out.transpose(0, 1), folded.lse.permute(2, 1, 0))
    merged = strobe.merge(
        prefix, strobe.partial_attention_decode(q, strobe.DenseCache(own_k, own_v, lengths), kernel=kernel)
    )
    k, v = (torch.cat([shared.expand(5, -1, -1, -1), own], 1) for shared, own in ((prefix_k, own_k), (prefix_v, own_v)))
    whole = strobe.partial_attention_decode(q, strobe.DenseCache(k, v, lengths + 64), kernel=kernel)
    torch.testing.assert_close(merged.out, whole.out, rtol=0, atol=FP64)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=0, atol=FP64)
