"""The Hopper decode on a Hopper GPU: the table, page tables, bits, graphs, streams. On CPUs its source runs in the
simulator (test_decode_simulated.py).
"""

from __future__ import annotations

import pytest
import torch

import strobe
from strobe.errors import UnsupportedProblem
from strobe.kernels.hopper import decode_config
from strobe.kernels.runtime.launch_cache import CACHE
from strobe.ops import decode as ops_decode
from strobe.problem.decode import DecodeCall
from strobe.testing import FAMILIES, assert_kernel
from strobe.testing.decode import DECODES
from tests.decoding import draw_table, expected, fill_unowned, judged
from tests.ops.test_decode_bits import alone_and_elsewhere

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="made for sm_90"
    ),
]
DTYPES = (torch.bfloat16, torch.float16)
REFUSED = {"dense_odd_widths", "dense_odd_offset"}  # whose rows are no whole 16 bytes


@pytest.mark.parametrize("invariant", [False, True], ids=["splits by size", "fixed splits"])
@pytest.mark.parametrize("n, name", list(enumerate(DECODES)), ids=list(DECODES))
def test_the_table(n, name, invariant):
    for turn, family in enumerate(FAMILIES):
        call = DECODES[name].build("cuda", DTYPES[(n + turn) % 2], family, turn, "hopper", invariant)
        if name in REFUSED:
            with pytest.raises(UnsupportedProblem, match="copies 16 bytes at a time"):
                ops_decode.run(call)
        else:
            judged(call)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_10000_page_tables(seed):
    """What nobody owns is NaN, then 0: the same bits, and those of a formula in float64 to what bfloat16 allows."""
    for turn in range(10):
        drawn = draw_table(10 * seed + turn, 50, "cuda", torch.bfloat16, "hopper")
        fill_unowned(drawn, float("nan"))
        out, lse = ops_decode.run(drawn.call)
        assert_kernel(ops_decode.decide(drawn.call), "hopper")
        assert bool(strobe.last_errors()) == drawn.lost
        fill_unowned(drawn, 0.0)
        again, lse_again = ops_decode.run(drawn.call)
        strobe.last_errors()
        assert torch.equal(out, again) and torch.equal(lse, lse_again)
        exact, lse_exact = expected(drawn.call, torch.float64)
        largest = drawn.call.v.double().abs().max().item()  # weights are rounded to 2^-9 of themselves, and so is out
        torch.testing.assert_close(out.double(), exact, rtol=2.0**-9, atol=2.0**-8 * largest)
        torch.testing.assert_close(lse.double(), lse_exact, rtol=2.0**-20, atol=2.0**-18)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_2000_sequences_have_the_same_bits_everywhere(seed):
    for turn in range(100):
        alone_and_elsewhere(100 * seed + turn, "cuda", "hopper", most=3000, dtypes=DTYPES)


@pytest.mark.parametrize(
    "head_dim, head_dim_v", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (8, 264 - 8), (32, 8)]
)
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("page_size", [0, 1, 16, 48, 128])
@pytest.mark.parametrize("shares", ["in a cluster", "in global memory"])
def test_widths(head_dim, head_dim_v, fp8, page_size, shares, monkeypatch):
    """Long enough that rings wrap and splits are many; pages and rows give the same bits."""
    if fp8 and (head_dim % 16 or head_dim_v % 16):
        pytest.skip("rows of 8 bits in whole 16 bytes")
    draw = torch.Generator("cuda").manual_seed(head_dim + page_size)
    batch, keys, heads_kv, group = 3, 1536, 2, 4
    q = torch.randn(batch, 2, heads_kv * group, head_dim, device="cuda", generator=draw).bfloat16()
    k, v = (
        torch.randn(batch, keys, heads_kv, w, device="cuda", generator=draw).bfloat16() for w in (head_dim, head_dim_v)
    )
    scales = (None, None)
    if fp8:
        k, v, *scales = strobe.quantize_kv(k, v)
    lengths, table = torch.tensor([keys, 700, 1], dtype=torch.int32, device="cuda"), None
    if page_size:
        table = torch.randperm(batch * (keys // page_size), device="cuda", generator=draw).int()
        paged = lambda t: torch.empty_like(x := t.reshape(len(table), page_size, *t.shape[2:])).index_copy_(
            0, table.long(), x.view(x.dtype)
        )
        bits = lambda t: paged(t.view(torch.uint8)).view(t.dtype) if fp8 else paged(t)
        k, v, table = bits(k), bits(v), table.view(batch, -1)
    CACHE.clear()
    if shares == "in global memory":
        monkeypatch.setattr(decode_config, "cluster_size", lambda *_: 0)
    call = DecodeCall(q, k, v, lengths, table, None, *scales, right=0, kernel="hopper")
    assert (ops_decode.decide(call).forward.config.traits.cluster > 1) == (shares == "in a cluster")
    judged(call)


@pytest.mark.parametrize(
    "name", ["dense", "dense_tokens_5", "dense_softcap_sinks", "dense_window", "dense_left_padded", "dense_partial"]
)
def test_long_rows(name, monkeypatch):
    """Tiles of 128 keys, as rows have them of which SMs have many."""
    CACHE.clear()
    monkeypatch.setattr(decode_config, "cluster_size", lambda *_: 0)
    monkeypatch.setattr(decode_config, "streamed", lambda *_: True)
    for turn, family in enumerate(FAMILIES):
        call = DECODES[name].build("cuda", DTYPES[turn % 2], family, turn, "hopper", False)
        assert ops_decode.decide(call).forward.config.traits.block_n == 128
        judged(call)


@pytest.mark.parametrize(
    "tokens, group", [(1, 1), (1, 8), (4, 4), (8, 8)], ids=["1 row", "8 rows", "16 rows", "64 rows"]
)
@pytest.mark.parametrize("keys", [100, 500, 1000, 1500])
def test_clusters_of_any_size_and_any_rows(keys, tokens, group):
    """2 to 16 programs, of which some have no keys, thousands of launches one behind the other: each time the same
    bits. Tiles of more than 8 rows exchange partial results in global memory.
    """
    draw = torch.Generator("cuda").manual_seed(keys + tokens)
    k, v = (torch.randn(1, keys, 8, 128, device="cuda", generator=draw).bfloat16() for _ in range(2))
    q = torch.randn(1, tokens, 8 * group, 128, device="cuda", generator=draw).bfloat16()
    for length in (keys, keys // 3, 0):
        call = DecodeCall(q, k, v, torch.tensor([length], dtype=torch.int32, device="cuda"), right=0, kernel="hopper")
        programs = 1 << (-(-keys // 64) - 1).bit_length()
        expected_cluster = min(16, programs) if tokens * group <= 8 else 0
        assert ops_decode.decide(call).forward.config.traits.cluster == expected_cluster
        judged(call)
        first, wrong = ops_decode.run(call), torch.zeros((), dtype=torch.int32, device="cuda")
        for _ in range(1000):
            again = ops_decode.run(call)
            wrong += sum((one != other).any() for one, other in zip(again, first))
        assert not wrong


def test_replays_of_a_graph_with_other_lengths_and_pages():
    batch, size, columns = 4, 16, 40
    pool = [torch.randn(batch * columns, size, 2, 128, device="cuda").bfloat16() for _ in range(2)]
    q = torch.randn(batch, 1, 8, 128, device="cuda").bfloat16()
    lengths, table = (
        torch.zeros(batch, dtype=torch.int32, device="cuda"),
        torch.zeros(batch, columns, dtype=torch.int32, device="cuda"),
    )
    call = DecodeCall(q, *pool, lengths, table, right=0, kernel="hopper")
    ops_decode.run(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = ops_decode.run(call)
    for turn, each in enumerate(([0, 1, 16, 640], [640, 639, 300, 17], [5, 0, 0, 0])):
        lengths.copy_(torch.tensor(each))
        table.copy_(torch.randperm(batch * columns, generator=torch.Generator().manual_seed(turn)).view(batch, columns))
        graph.replay()
        expected_out, expected_lse = ops_decode.run(call)
        assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)
    judged(call)


@pytest.mark.parametrize("streams", [2])
def test_streams_have_counters_of_their_own(streams):
    calls = []
    for n in range(streams):
        k, v = (torch.randn(2, 4096, 2, 128, device="cuda").bfloat16() for _ in range(2))
        q = torch.randn(2, 1, 8, 128, device="cuda").bfloat16()
        calls.append(
            DecodeCall(
                q, k, v, torch.tensor([4096, 1000 + n], dtype=torch.int32, device="cuda"), right=0, kernel="hopper"
            )
        )
    first = [ops_decode.run(call) for call in calls]
    torch.cuda.synchronize()
    held = [torch.cuda.Stream() for _ in calls]
    results = []
    for _ in range(50):
        for stream, call in zip(held, calls):
            with torch.cuda.stream(stream):
                results.append(ops_decode.run(call))
    torch.cuda.synchronize()
    for n, (out, lse) in enumerate(results):
        assert torch.equal(out, first[n % streams][0]) and torch.equal(lse, first[n % streams][1])


def test_graphs_have_counters_of_their_own_and_clear_none():
    """Captured on one stream, replayed at once on two."""
    calls = []
    for _ in range(2):
        k, v = (torch.randn(2, 8192, 2, 128, device="cuda").bfloat16() for _ in range(2))
        calls.append(
            DecodeCall(
                torch.randn(2, 1, 8, 128, device="cuda").bfloat16(),
                k,
                v,
                torch.tensor([8192, 5000], device="cuda").int(),
                right=0,
                kernel="hopper",
            )
        )
    first = [ops_decode.run(call) for call in calls]
    side, graphs, results = torch.cuda.Stream(), [], []
    torch.cuda.synchronize()
    for call in calls:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=side):
            for _ in range(20):
                found = ops_decode.run(call)
        results.append(found)
    streams = [torch.cuda.Stream() for _ in calls]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(20):
            for graph, stream in zip(graphs, streams):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
    for (out, lse), expected_rows in zip(results, first):
        assert torch.equal(out, expected_rows[0]) and torch.equal(lse, expected_rows[1])
    assert {event.key for event in profile.key_averages()} & {"decode_kernel"}
    assert not [
        event.key for event in profile.key_averages() if "Memset" in event.key or "FillFunctor<int>" in event.key
    ]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("keys", [64, 8192], ids=["one split", "splits"])
def test_launched_again_at_the_same_addresses(keys, alone):
    """What is kept is used, sees new contents, and serves no other stream, whose counters are others."""
    k, v = (torch.randn(1, keys, 8, 128, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(1, 1, 32, 128, device="cuda").bfloat16()
    call = DecodeCall(q, k, v, torch.tensor([keys], dtype=torch.int32, device="cuda"), right=0, kernel="hopper")
    for _ in range(6):
        ops_decode.run(call, alone=alone)  # the allocator gives out the same addresses in turn
    assert CACHE.launches[ops_decode.decide(call).forward.number]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        for turn in range(6):
            q.normal_()
            k.normal_()
            call.seqlens.fill_(keys - turn)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                out, lse = ops_decode.run(call, alone=alone)
            torch.cuda.synchronize()
            fresh = ops_decode.run(call._replace(q=q.clone(), k=k.clone(), v=v.clone(), seqlens=call.seqlens.clone()))
            assert torch.equal(out, fresh[0]) and (alone or torch.equal(lse, fresh[1]))
            del out, lse, fresh
    judged(call)
