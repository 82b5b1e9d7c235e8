"""attention_decode and append on every kernel that runs here: the table, golden rows, page tables, bits, and what the
ops owe torch.
"""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

import strobe
from strobe.errors import UnsupportedProblem
from strobe.kernels.hopper.decode_config import DECODE as HOPPER
from strobe.kernels.runtime import error_flags
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import decode as ops_decode
from strobe.problem.append import AppendCall
from strobe.problem.cache import FP8
from strobe.problem.call import Dense
from strobe.problem.decode import DecodeCall, DecodeProblem
from strobe.problem.target import FAKES
from strobe.selection.select import select
from strobe.testing import FAMILIES, assert_kernel
from strobe.testing.decode import DECODES, assert_decode_as_good_as
from tests.decoding import draw_table, expected, fill_unowned, judged
from tests.reliability.test_reliability import sparse

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INT = lambda *values, device="cpu": torch.tensor(values, dtype=torch.int32, device=device)
FP64 = 100 * 2.0**-53  # float64 against float64: as test_metamorphic.py


def draw(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("n, name", list(enumerate(DECODES)), ids=list(DECODES))
def test_table(n, name, invariant, device, kernel):
    """Each case in one dtype and one family of inputs, in turn."""
    turn = n + 2 * invariant
    dtype = (
        torch.float32 if DECODES[name].fp8 and device == "cuda" else DTYPES[turn % 4]
    )  # no float64 over 8 bits there
    judged(DECODES[name].build(device, dtype, FAMILIES[turn % 5], turn, kernel, invariant))
    wanted = ["cache.page_table"] if DECODES[name].lost else []
    assert [word.split(": ")[1] for word in strobe.last_errors()] == wanted


def whole(name: str, device: str, kernel: str) -> None:
    for family in FAMILIES:
        for dtype in DTYPES[:3] if DECODES[name].fp8 and device == "cuda" else DTYPES:
            judged(DECODES[name].build(device, dtype, family, 7, kernel))


@pytest.mark.nightly
@pytest.mark.parametrize("name", DECODES)
def test_whole_table(name):
    whole(name, "cpu", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODES)
def test_whole_table_on_a_gpu(name):
    whole(name, "cuda", "portable")


# ---------------------------------------------------------------- golden rows


@pytest.mark.parametrize("page_size", [0, 1, 16, 13, 128])
@pytest.mark.parametrize("first", [1, 129])
def test_indicator_probe_at_every_residue(first, page_size, device, kernel):
    """q = 0: a row is the mean of the values it sees, so a key dropped, doubled or foreign changes a count among n."""
    lengths = torch.arange(first, first + 128)
    room = int(lengths[-1]) + 3
    values = torch.eye(16)[torch.arange(room) % 16].expand(128, room, 16)
    own = torch.arange(room)[None] < lengths[:, None]
    rows = torch.where(own[..., None], values, torch.nan)[:, :, None].to(device)
    q, table = torch.zeros(128, 1, 1, 16, device=device), None
    if page_size:
        columns = -(-room // page_size)
        order = torch.randperm(128 * columns, generator=torch.Generator().manual_seed(first))
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, columns * page_size - room), value=torch.nan).view(
            128 * columns, page_size, 1, 16
        )
        rows = rows[order.argsort().to(device)]
        table = order.view(128, columns).to(device, torch.int32)
    out, lse = ops_decode.run(DecodeCall(q, rows, rows, lengths.to(device, torch.int32), table, right=0, kernel=kernel))
    counts = torch.where(own[..., None], values, 0.0).sum(1).double() / lengths[:, None]
    torch.testing.assert_close(out[:, 0, 0].double().cpu(), counts, rtol=4 * 2.0**-24, atol=0)
    torch.testing.assert_close(lse[:, 0, 0].double().cpu(), lengths.double().log(), rtol=0, atol=2e-6 + 4 * 2.0**-21)


@pytest.mark.parametrize(
    "tokens, length, options, seen",
    [
        (2, 5, {}, [{0, 1, 2, 3}, {0, 1, 2, 3, 4}]),
        (5, 2, {}, [set(), set(), set(), {0}, {0, 1}]),
        (4, 4, {"window": (1, 0)}, [{0}, {0, 1}, {1, 2}, {2, 3}]),
        (3, 3, {"window": (0, 0)}, [{0}, {1}, {2}]),
        (2, 5, {"causal": False}, [{0, 1, 2, 3, 4}] * 2),
        (3, 5, {"causal": False, "window": (1, 1)}, [{1, 2, 3}, {2, 3, 4}, {3, 4}]),
        (3, 0, {}, [set()] * 3),
        (1, 5, {"k_start": 3}, [{3, 4}]),
        (3, 5, {"k_start": 3}, [set(), {3}, {3, 4}]),
        (1, 5, {"k_start": 5}, [set()]),
        (2, 5, {"k_start": 1, "window": (2, 0)}, [{1, 2, 3}, {2, 3, 4}]),
    ],
)
def test_golden_rows(tokens, length, options, seen, device, kernel):
    """q = 0 and values that are powers of two: the sum says which keys a row saw."""
    k_start = options.get("k_start")
    options = {name: value for name, value in options.items() if name != "k_start"}
    v = torch.tensor([1.0, 2, 4, 8, 16, torch.nan, torch.nan], device=device).view(1, 7, 1, 1).contiguous()
    k = torch.zeros_like(v)
    cache = strobe.DenseCache(
        k, v, INT(length, device=device), None if k_start is None else INT(k_start, device=device)
    )
    part = strobe.partial_attention_decode(torch.zeros(1, tokens, 1, 1, device=device), cache, kernel=kernel, **options)
    for row, keys in enumerate(seen):
        assert part.out[0, row, 0, 0].item() == pytest.approx(sum(2**j for j in keys) / max(1, len(keys)), rel=1e-6)
        assert part.lse[0, 0, row].item() == (
            pytest.approx(torch.tensor(float(len(keys))).log().item(), abs=2e-6) if keys else -torch.inf
        )


def test_nan_in_a_row_of_q_stays_there(device, kernel):
    k = draw(2, 70, 2, 16, device=device)
    q = draw(2, 3, 4, 16, seed=1, device=device)
    clean = ops_decode.run(DecodeCall(q, k, k, INT(70, 1, device=device), right=0, kernel=kernel))
    q[0, 1, 2, 5] = q[1, 0, 0, 0] = torch.nan  # the second in a row that sees no key
    out, lse = ops_decode.run(DecodeCall(q, k, k, INT(70, 1, device=device), right=0, kernel=kernel))
    assert out[0, 1, 2].isnan().all() and lse[0, 2, 1].isnan()
    out[0, 1, 2], lse[0, 2, 1] = clean[0][0, 1, 2], clean[1][0, 2, 1]
    assert torch.equal(out, clean[0]) and torch.equal(lse, clean[1])


# ---------------------------------------------------------------- page tables


def fuzz(seed: int, batch: int, device: str, kernel: str) -> None:
    """One drawn batch of page tables: against the oracle, told of lost pages, and the same bits whatever lies where
    nobody looks.
    """
    drawn = draw_table(seed, batch, device, kernel=kernel)
    results = []
    for value in (torch.nan, torch.inf):
        fill_unowned(drawn, value)
        results.append(ops_decode.run(drawn.call))
        told = [word for word in strobe.last_errors() if "page_table" in word]
        assert bool(told) == drawn.lost, (seed, told)
    assert all(torch.equal(a, b) for a, b in zip(*results)), seed
    assert_kernel(ops_decode.decide(drawn.call), kernel)
    fill_unowned(drawn, 0.0)
    for got, wanted in zip(results[0], expected(drawn.call)):
        torch.testing.assert_close(got, wanted, rtol=FP64, atol=FP64)


@pytest.mark.nightly
def test_2000_page_tables():
    for seed in range(40):
        fuzz(seed, 50, "cpu", "cpu")


@pytest.mark.nightly
def test_100000_page_tables():
    for seed in range(1000, 3000):
        fuzz(seed, 50, "cpu", "cpu")


@pytest.mark.gpu
def test_10000_page_tables_on_a_gpu():
    for seed in range(200):
        fuzz(seed, 50, "cuda", "portable")


@pytest.mark.parametrize(
    "seqlens, error", [((-3, 4), "cache.seqlens"), ((4, 10**9), "cache.seqlens"), ((4, 2**31 - 1), "cache.seqlens")]
)
def test_lengths_out_of_range_are_clamped_and_told(seqlens, error, device, kernel):
    k = draw(2, 8, 1, 16, device=device)
    q = draw(2, 1, 1, 16, seed=1, device=device)
    out = strobe.attention_decode(q, strobe.DenseCache(k, k, INT(*seqlens, device=device)), kernel=kernel)
    assert [word.split(": ")[1] for word in strobe.last_errors()] == [error]
    clamped = strobe.DenseCache(k, k, INT(*(min(max(n, 0), 8) for n in seqlens), device=device))
    assert torch.equal(out, strobe.attention_decode(q, clamped, kernel=kernel)) and strobe.last_errors() == []


@pytest.mark.parametrize("options", ({}, {"causal": False}, {"window": (2, 0)}, {"window": (70, 3)}), ids=str)
@pytest.mark.parametrize("start, clamped", [(-2, 0), (-(2**31), 0), (6, 5), (2**30, 5), (2**31 - 1, 5)])
def test_a_start_out_of_range_is_clamped_and_told(start, clamped, options, device, kernel):
    """Each alone, beside starts that are none of it: before the first key is the first, and beyond the last key there
    is none to see.
    """
    k, q = draw(3, 8, 1, 16, device=device), draw(3, 2, 1, 16, seed=1, device=device)
    decode = lambda *starts: strobe.attention_decode(
        q, strobe.DenseCache(k, k, INT(5, 5, 8, device=device), INT(*starts, device=device)), kernel=kernel, **options
    )
    out = decode(5, start, 8)
    assert [word.split(": ")[1] for word in strobe.last_errors()] == ["cache.k_start"]
    assert torch.equal(out, decode(5, clamped, 8)) and strobe.last_errors() == []
    assert bool(out[1].any()) == (clamped == 0) and not out[0].any() and not out[2].any()


def test_an_empty_pool(device, kernel):
    """No page at all: every id is out of range, and every row sees nothing."""
    pool = torch.empty(0, 16, 1, 8, device=device)
    cache = strobe.PagedCache(pool, pool, INT([0, 1], device=device), INT(20, device=device))
    assert strobe.attention_decode(torch.ones(1, 2, 1, 8, device=device), cache, kernel=kernel).abs().max() == 0
    assert any("page_table" in word for word in strobe.last_errors())


@pytest.mark.parametrize(
    "batch, tokens, heads, columns", [(0, 1, 2, 3), (2, 0, 2, 3), (2, 1, 0, 3), (2, 3, 2, 0)], ids=str
)
def test_sizes_of_0(batch, tokens, heads, columns, device, kernel):
    """No sequence, no token, no head, no room: results have their shapes, and what they hold is 0 and -inf, or the
    sink.
    """
    pool = draw(4, 2, heads, 8, device=device)
    table, lengths = (
        torch.zeros(batch, columns, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
    )
    cache, q = strobe.PagedCache(pool, pool.clone(), table, lengths), torch.ones(batch, tokens, heads, 8, device=device)
    part = strobe.partial_attention_decode(q, cache, kernel=kernel)
    assert part.out.shape == (batch, tokens, heads, 8) and part.lse.shape == (batch, heads, tokens)
    assert not part.out.any() and (part.lse == -torch.inf).all()
    sinks = torch.arange(float(heads), device=device)
    out, lse = ops_decode.run(DecodeCall(q, pool, pool, lengths, table, sinks=sinks, right=0, kernel=kernel))
    assert not out.any() and (lse == sinks[None, :, None]).all()
    ops_decode.append(AppendCall(q, q, cache.k_pages, cache.v_pages, lengths, table, kernel=kernel))
    assert torch.equal(cache.v_pages, pool) or columns  # no room: nothing is written
    assert [word.split(": ")[1] for word in strobe.last_errors()] == ["append"] * (columns == 0)


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


# ---------------------------------------------------------------- selection, the ops and torch


def test_every_gpu_runs_the_portable_decode_but_hopper():
    k = torch.empty(2, 4096, 2, 64)
    problem = DecodeProblem.from_call(DecodeCall(torch.empty(2, 1, 8, 64), k, k, INT(1, 2), right=0))
    for name, target in FAKES.items():
        chosen = select(problem, target).forward.kernel.name
        assert chosen == ("cpu.decode" if name == "CPU" else "portable.decode")  # float32
    half = replace(problem, dtype=torch.float16, cache_dtype=torch.float16, out_dtype=torch.float16)
    for name, target in FAKES.items():
        chosen = select(half, target).forward.kernel.name
        assert chosen == (
            "cpu.decode" if name == "CPU" else "hopper.decode" if target.capability == 90 else "portable.decode"
        )
    text = str(select(half, FAKES["H200"]))
    assert "decode B=2 T=1 S_max=4096" in text and "splits" in text and "memory-bound" in text


REFUSED_ON_HOPPER = {
    "dtype": (
        dict(dtype=torch.float32, cache_dtype=torch.float32, out_dtype=torch.float32),
        "float16 and bfloat16 queries only; these are float32",
    ),
    "head_dim": (dict(head_dim=264, head_dim_v=264), "head dimensions up to 256; this is 264/264"),
    "rows": (dict(head_dim=20), "copies 16 bytes at a time"),
    "rows of 8 bits": (dict(cache_dtype=FP8, head_dim=72), "copies 16 bytes at a time"),
    "alignment": (dict(alignment=8), "addresses and strides are multiples of 8"),
    "keys": (dict(layout=Dense(1, 1, 2**30)), "sequences of fewer than 2^30 keys"),
}


@pytest.mark.parametrize("name", REFUSED_ON_HOPPER)
def test_each_reason_against_the_hopper_decode(name):
    k = torch.empty(2, 4096, 2, 64, dtype=torch.bfloat16, device="meta")
    call = DecodeCall(
        torch.empty(2, 1, 8, 64, dtype=torch.bfloat16, device="meta"),
        k,
        k,
        torch.empty(2, dtype=torch.int32, device="meta"),
        right=0,
    )
    problem = DecodeProblem.from_call(call)
    assert (
        HOPPER.why_not(problem, FAKES["H200"]) is None
        and HOPPER.why_not(problem, FAKES["B200"]) == "made for sm_90; this target is sm_100"
    )
    changes, words = REFUSED_ON_HOPPER[name]
    assert words in HOPPER.why_not(replace(problem, **changes), FAKES["H200"])


def test_float64_over_8_bits_is_refused_on_gpus():
    call = DECODES["pages_fp8"].build("cpu", torch.float64)
    assert select(DecodeProblem.from_call(call), FAKES["CPU"]).forward.kernel.name == "cpu.decode"
    with pytest.raises(strobe.UnsupportedProblem, match=r"portable\.decode +float64 over 8-bit keys"):
        select(DecodeProblem.from_call(call), FAKES["H200"])


def test_a_family_that_cannot_decode_here_says_so():
    k = torch.empty(2, 8, 2, 16)
    cache = strobe.DenseCache(k, k, INT(1, 2))
    with pytest.raises(strobe.UnsupportedProblem, match=r"hopper\.decode +made for sm_90; this target is a CPU\n"):
        strobe.attention_decode(torch.empty(2, 1, 2, 16), cache, kernel="hopper")
    with pytest.raises(
        strobe.InvalidProblem,
        match=(
            r"kernel: got 'cpu\.forward', expected one of blackwell, hopper, portable, cpu, hopper\.decode, "
            r"portable\.decode, cpu\.decode"
        ),
    ):
        strobe.attention_decode(torch.empty(2, 1, 2, 16), cache, kernel="cpu.forward")


def test_out_and_warmup(device, kernel):
    k, q = draw(2, 8, 2, 16, device=device), draw(2, 1, 4, 16, seed=1, device=device)
    cache = strobe.DenseCache(k, k, INT(3, 8, device=device))
    strobe.warmup([strobe.explain_decode(q, cache, sinks=torch.zeros(4, device=device)).problem], device)
    out = torch.empty_like(q)
    assert strobe.attention_decode(q, cache, out=out, kernel=kernel) is out
    assert torch.equal(out, strobe.attention_decode(q, cache, kernel=kernel))
    paged = strobe.PagedCache(k, k, INT([0], [1], device=device), cache.seqlens)
    strobe.warmup([strobe.explain_decode(q, paged).problem], device)


VARIATIONS = {
    "tokens": lambda c: c._replace(q=c.q[:, :1]),
    "seqlens": lambda c: c._replace(seqlens=c.seqlens - 1),
    "k_start": lambda c: c._replace(k_start=INT(2, 3)),
    "sinks": lambda c: c._replace(sinks=torch.zeros(4)),
    "left": lambda c: c._replace(left=3),
    "right": lambda c: c._replace(right=-1),
    "scale": lambda c: c._replace(scale=0.1),
    "softcap": lambda c: c._replace(softcap=1.0),
    "batch_invariant": lambda c: c._replace(batch_invariant=True),
    "kernel": lambda c: c._replace(kernel="cpu"),
    "partial": lambda c: c._replace(partial=True, q=c.q.bfloat16(), k=c.k.bfloat16(), v=c.v.bfloat16()),
    "dtype": lambda c: c._replace(q=c.q.bfloat16(), k=c.k.bfloat16(), v=c.v.bfloat16()),
    "pages": lambda c: c._replace(
        k=c.k.view(8, 4, 2, 8), v=c.v.view(8, 4, 2, 8), page_table=INT([3, 2, 1, 0], [4, 5, 6, 7])
    ),
    "narrow v": lambda c: c._replace(v=c.v[..., :5]),
    "fewer heads": lambda c: c._replace(k=c.k[:, :, :1], v=c.v[:, :, :1]),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_a_call_is_not_mistaken_for_another(name):
    """A, B, A against the same with nothing remembered."""
    k, v = draw(2, 16, 2, 8), draw(2, 16, 2, 8, seed=1)
    plain = DecodeCall(draw(2, 3, 4, 8, seed=2), k, v, INT(9, 16), right=0)
    other = VARIATIONS[name](plain)
    fresh = []
    for call in (plain, other):
        CACHE.clear()
        fresh.append(ops_decode.run(call))
    for call, (out, lse) in zip((plain, other, plain), (*fresh, fresh[0])):
        got = ops_decode.run(call)
        assert got[0].dtype == out.dtype and torch.equal(got[0], out) and torch.equal(got[1], lse)


def test_opcheck():
    k, v = draw(3, 16, 2, 8), draw(3, 16, 2, 8, seed=1)
    dense = DecodeCall(
        draw(3, 3, 4, 8, seed=2), k, v, INT(9, 16, 0), k_start=INT(1, 0, 0), sinks=torch.zeros(4), right=0
    )
    paged = DecodeCall(draw(3, 3, 4, 8, seed=2), k, v, INT(9, 16, 0), INT([0], [1], [2]), left=3, right=0, softcap=2.0)
    for call in (dense, paged):
        torch.library.opcheck(ops_decode.DECODE, tuple(call))
    torch.library.opcheck(ops_decode.DECODE_OUT, (torch.empty(3, 3, 4, 8), *dense))
    new = draw(3, 2, 2, 8, seed=3)
    for table in (None, INT([0], [1], [2])):
        torch.library.opcheck(
            ops_decode.APPEND, tuple(AppendCall(new, new, k.clone(), v.clone(), INT(9, 12, 0), table))
        )


def test_a_step_compiles_whole():
    """append and attention_decode in one graph without a break, over a cache that changes, for another length too."""

    def step(q, cache, k_new, rotary):
        strobe.append(cache, k_new, k_new, rotary=rotary)
        longer = cache._replace(seqlens=cache.seqlens + k_new.shape[1])
        return strobe.attention_decode(q, longer, window=(7, 0)), strobe.partial_attention_decode(q, longer).lse

    angle = torch.arange(16.0)[:, None] * torch.tensor([1.0, 0.1])
    rotary = strobe.Rotary(angle.cos(), angle.sin())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for tokens in (1, 2):
        q, new = draw(3, tokens, 4, 8, seed=tokens), draw(3, tokens, 2, 8, seed=9)
        pools = [(draw(6, 8, 2, 8, seed=1), draw(6, 8, 2, 8, seed=2)) for _ in range(2)]
        caches = [strobe.PagedCache(*pool, INT([0, 1], [4, 5], [2, 3]), INT(3, 9, 0)) for pool in pools]
        results = [run(q, cache, new, rotary) for run, cache in zip((step, compiled), caches)]
        assert all(torch.equal(a, b) for a, b in zip(*results)) and all(torch.equal(a, b) for a, b in zip(*pools))


def test_gradients_are_refused():
    k, q = draw(2, 8, 2, 16), draw(2, 1, 2, 16)
    cache = strobe.DenseCache(k, k, INT(3, 8))
    with pytest.raises(strobe.UnsupportedProblem, match="gradients through decode"):
        strobe.attention_decode(q.clone().requires_grad_(), cache)
    with pytest.raises(strobe.UnsupportedProblem, match="gradients through append"):
        strobe.append(cache, q.clone().requires_grad_(), q)
    with torch.no_grad():
        strobe.attention_decode(q.clone().requires_grad_(), cache)


def test_autocast_follows_the_cache():
    k, q = draw(2, 8, 2, 16), draw(2, 1, 2, 16)
    lengths = INT(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            strobe.attention_decode(q, strobe.DenseCache(k.bfloat16(), k.bfloat16(), lengths)).dtype == torch.bfloat16
        )
        assert strobe.attention_decode(q, strobe.DenseCache(k, k, lengths)).dtype == torch.float32


# ---------------------------------------------------------------- graphs


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [256, 20_000])
def test_a_graph_is_replayed_over_other_lengths_and_pages(capacity):
    """One step, append and decode, captured once; then other lengths, pages, queries and keys."""
    size, batch = 16, 4
    columns = capacity // size
    pool = [
        torch.full((batch * columns, size, 2, 64), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    ]
    lengths, table = (
        torch.zeros(batch, dtype=torch.int32, device="cuda"),
        torch.zeros(batch, columns, dtype=torch.int32, device="cuda"),
    )
    q, new = (
        draw(batch, 1, 8, 64, dtype=torch.bfloat16, device="cuda"),
        draw(batch, 1, 2, 64, seed=1, dtype=torch.bfloat16, device="cuda"),
    )
    cache = strobe.PagedCache(*pool, table, lengths)
    step = lambda: (
        strobe.append(cache, new, new),
        lengths.add_(1),
        strobe.attention_decode(q, cache, kernel="portable"),
    )[2]
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        table.copy_(torch.randperm(batch * columns, generator=g).view(batch, columns))
        lengths.copy_(torch.randint(0, capacity - 1, (batch,), generator=g))
        for tensor in (q, new, *pool):
            tensor.copy_(torch.randn(tensor.shape, generator=g))
        graph.replay()
        again = strobe.attention_decode(q, cache, kernel="portable")
        assert torch.equal(out, again) and strobe.last_errors() == []
        call = DecodeCall(q, *pool, lengths, table, right=0, kernel="portable")
        assert_decode_as_good_as((again, ops_decode.run(call)[1]), call)


@pytest.mark.gpu
def test_no_call_waits_for_the_device():
    k, q = draw(2, 64, 2, 64, device="cuda"), draw(2, 1, 8, 64, device="cuda")
    cache = strobe.DenseCache(k, k.clone(), INT(3, 60, device="cuda"))
    strobe.append(cache, q[:, :, :2], q[:, :, :2])
    strobe.attention_decode(q, cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        strobe.append(cache, q[:, :, :2], q[:, :, :2])
        strobe.attention_decode(q, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not hasattr(mmap, "MAP_NORESERVE"), reason="needs memory that exists when touched")
def test_pages_that_lie_2_to_the_31_apart(family: str = "cpu"):
    """Offsets into the pool are 64-bit products: the pages at its end are what they are close together; append finds
    them too.
    """
    near = [draw(3, 4, 1, 16, seed=n, dtype=torch.float16) for n in range(2)]
    q, new, table, length = (
        draw(1, 1, 1, 16, seed=2, dtype=torch.float16),
        draw(1, 1, 1, 16, seed=3, dtype=torch.float16),
        INT([2, 1]),
        INT(6),
    )
    far = [
        sparse(2**32 + 4096).as_strided((3, 4, 1, 16), (2**31 + 64, 16, 16, 1), 512 * n).copy_(t)
        for n, t in enumerate(near)
    ]
    results = []
    for pools in (near, far):
        ops_decode.append(AppendCall(new, new, *pools, length, table, kernel=family))
        results.append(ops_decode.run(DecodeCall(q, *pools, length + 1, table, right=0, kernel=family)))
    assert torch.equal(far[0], near[0]) and torch.equal(far[0][1, 2], new[0, 0])
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.gpu
def test_pages_beyond_2_to_the_31_elements():
    """The last page of a pool of more than 2^31 elements."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    n_pages = 2**31 // (16 * 2 * 128) + 5
    pools = [torch.zeros(n_pages, 16, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    last = draw(2, 16, 2, 128, dtype=torch.bfloat16, device="cuda")
    pools[0][-1], pools[1][-1] = last
    q, table, lengths = (
        draw(1, 1, 8, 128, seed=1, dtype=torch.bfloat16, device="cuda"),
        INT([n_pages - 1], device="cuda"),
        INT(13, device="cuda"),
    )
    far = ops_decode.run(DecodeCall(q, *pools, lengths, table, right=0, kernel="portable"))
    near = ops_decode.run(
        DecodeCall(q, last[:1], last[1:], lengths, INT([0], device="cuda"), right=0, kernel="portable")
    )
    assert torch.equal(far[0], near[0]) and torch.equal(far[1], near[1])


# ---------------------------------------------------------------- inside torch


def _cache(n: int = 16) -> strobe.DenseCache:
    return strobe.DenseCache(draw(2, 16, 2, 8), draw(2, 16, 2, 8), torch.tensor([n, 5], dtype=torch.int32))


def test_a_fault_met_in_inference_mode_is_told_outside(monkeypatch):
    """Also where it is the first of the process: the word that holds it must not be a tensor of inference mode."""
    monkeypatch.setattr(error_flags, "_words", {})
    with torch.inference_mode():
        strobe.attention_decode(torch.ones(2, 1, 4, 8), _cache(99))
    assert len(strobe.last_errors()) == 1
    strobe.attention_decode(torch.ones(2, 1, 4, 8), _cache(99))
    assert len(strobe.last_errors()) == 1


@pytest.mark.parametrize("tokens", [1, 3])
def test_out_may_be_q(tokens):
    q, cache = draw(2, tokens, 4, 8), _cache()
    expected = strobe.attention_decode(q, cache)
    assert strobe.attention_decode(q, cache, out=q) is q and torch.equal(q, expected)


def test_out_may_lie_in_q_as_nothing_but_q():
    """A row's program reads its own row of q before it writes, not others'."""
    rows, cache = draw(3, 1, 4, 8), _cache()
    turned = draw(2, 2, 4, 8)
    for q, out in ((rows[:2], rows[1:]), (turned, turned.transpose(0, 1))):
        with pytest.raises(strobe.InvalidProblem, match="out: got memory that q lies in"):
            strobe.attention_decode(q, cache, out=out)


def test_tangents_are_refused_too():
    cache = _cache()
    with pytest.raises(UnsupportedProblem, match="gradients through decode"):
        torch.func.jvp(
            lambda q: strobe.attention_decode(q, cache), (torch.ones(2, 1, 4, 8),), (torch.ones(2, 1, 4, 8),)
        )
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedProblem, match="gradients through decode"):
        strobe.attention_decode(
            torch.autograd.forward_ad.make_dual(torch.ones(2, 1, 4, 8), torch.ones(2, 1, 4, 8)), cache
        )


def test_no_query_head_over_two_of_keys():
    assert strobe.attention_decode(torch.ones(2, 1, 0, 8), _cache()).shape == (2, 1, 0, 8)
    assert strobe.attention(torch.ones(1, 3, 0, 8), torch.ones(1, 3, 2, 8), torch.ones(1, 3, 2, 8)).shape == (
        1,
        3,
        0,
        8,
    )


def test_inductor_writes_to_the_layer_it_is_told_though_sizes_change():
    """Where a cache, or out, is a part of a tensor: Inductor takes an offset that is symbolic for 0
    (pytorch/pytorch#198068).
    """

    def layers(keys, values, seqlens, k_new, v_new, q, outs):
        for layer in range(len(keys)):
            cache = strobe.DenseCache(keys[layer], values[layer], seqlens)
            strobe.append(cache, k_new[layer], v_new[layer])
            strobe.attention_decode(q, cache, out=outs[layer])
            strobe.attention(q, q, q, out=outs[2 + layer])
        return seqlens + 1

    with torch._inductor.config.patch(compile_threads=1, force_disable_caches=True):
        compiled = torch.compile(layers, fullgraph=True)
        for batch in (2, 3):
            new, q = draw(4, batch, 1, 2, 8), draw(batch, 1, 2, 8)
            made = []
            for run in (layers, compiled):
                pool, outs = torch.zeros(4, batch, 16, 2, 8), torch.zeros(4, batch, 1, 2, 8)
                run(pool[:2], pool[2:], INT(*[3] * batch), new[:2], new[2:], q, outs)
                made.append((pool, outs))
            assert all(map(torch.equal, *made))


def test_inductor_runs_it():
    def step(q, cache):
        strobe.append(cache, q[:, :, :2], q[:, :, :2])
        return strobe.attention_decode(q, cache)

    with torch._inductor.config.patch(compile_threads=1):
        found = torch.compile(step, fullgraph=True)(torch.ones(2, 1, 4, 8), _cache(3))
    assert torch.equal(found, step(torch.ones(2, 1, 4, 8), _cache(3)))


def test_no_launch_is_kept_for_copies():
    """Small tensors that are not contiguous are copied, each time to where the allocator likes."""
    k, q = torch.zeros(2, 8, 2, 16), torch.zeros(2, 1, 4, 16)
    whole = DecodeCall(q, k, k, INT(3, 8), right=0)
    scattered = whole._replace(seqlens=INT(3, 0, 8, 0)[::2])
    assert ops_decode.decide(whole).forward.replays and not ops_decode.decide(scattered).forward.replays
    assert torch.equal(ops_decode.run(whole)[0], ops_decode.run(scattered)[0])
