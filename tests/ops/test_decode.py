"""attention_decode and append on every kernel that runs here: the table, golden rows, page tables, bits, and what the
ops owe torch.
"""

from __future__ import annotations

import mmap

import pytest
import torch

import strobe
from strobe.ops import decode as ops_decode
from strobe.problem.append import AppendCall
from strobe.problem.decode import DecodeCall
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
