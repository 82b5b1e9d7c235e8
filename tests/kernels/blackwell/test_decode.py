"""The Blackwell decode on a Blackwell GPU: the table, page tables, rows, graphs. It has not run there yet. On CPUs its
source runs in the simulator (test_decode_simulated.py).
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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() not in ((10, 0), (10, 3)),
        reason="made for sm_100 and sm_103",
    ),
]
DTYPES = (torch.bfloat16, torch.float16)
REFUSED = {"dense_odd_widths", "dense_odd_offset"}  # whose rows are no whole 16 bytes


@pytest.mark.parametrize("memory", [False, True], ids=["in clusters", "in global memory"])
@pytest.mark.parametrize("n, name", list(enumerate(DECODES)), ids=list(DECODES))
def test_the_table(n, name, memory, monkeypatch):
    if memory:
        CACHE.clear()
        monkeypatch.setattr(decode_config, "cluster_size", lambda *_: 0)
    for turn, family in enumerate(FAMILIES):
        call = DECODES[name].build("cuda", DTYPES[(n + turn) % 2], family, turn, "blackwell")
        if name in REFUSED:
            with pytest.raises(UnsupportedProblem, match="copies 16 bytes at a time"):
                ops_decode.run(call)
        else:
            judged(call)


@pytest.mark.parametrize("seed", range(20))
def test_page_tables(seed):
    """What nobody owns is NaN, then 0: the same bits, and those of a formula in float64 to what bfloat16 allows."""
    for turn in range(10):
        drawn = draw_table(10 * seed + turn, 50, "cuda", torch.bfloat16, "blackwell")
        fill_unowned(drawn, float("nan"))
        out, lse = ops_decode.run(drawn.call)
        assert_kernel(ops_decode.decide(drawn.call), "blackwell")
        assert bool(strobe.last_errors()) == drawn.lost
        fill_unowned(drawn, 0.0)
        again, lse_again = ops_decode.run(drawn.call)
        strobe.last_errors()
        assert torch.equal(out, again) and torch.equal(lse, lse_again)
        exact, lse_exact = expected(drawn.call, torch.float64)
        largest = drawn.call.v.double().abs().max().item()  # weights are rounded to 2^-9 of themselves, and so is out
        torch.testing.assert_close(out.double(), exact, rtol=2.0**-9, atol=2.0**-8 * largest)
        torch.testing.assert_close(lse.double(), lse_exact, rtol=2.0**-20, atol=2.0**-18)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("tokens", [1, 4, 8, 16], ids=["8 rows", "16 rows", "32 rows", "64 rows"])
@pytest.mark.parametrize("page_size", [0, 16, 128])
def test_rows_and_widths(head_dim, fp8, tokens, page_size):
    draw = torch.Generator("cuda").manual_seed(head_dim + tokens)
    batch, keys, heads_kv = 3, 1536, 2
    q = torch.randn(batch, tokens, 4 * heads_kv, head_dim, device="cuda", generator=draw).bfloat16()
    shape = (batch * keys // page_size, page_size) if page_size else (batch, keys)
    k, v = (torch.randn(*shape, heads_kv, head_dim, device="cuda", generator=draw).bfloat16() for _ in range(2))
    scales = (None, None)
    if fp8:
        k, v, *scales = strobe.quantize_kv(k, v)
    lengths, table = torch.tensor([keys, 700, 1], dtype=torch.int32, device="cuda"), None
    if page_size:
        table = torch.randperm(shape[0], device="cuda", generator=draw).int().view(batch, -1)
    judged(DecodeCall(q, k, v, lengths, table, None, *scales, right=0, kernel="blackwell"))


def test_a_graph_is_replayed_over_other_lengths():
    """Splits with counters in global memory, which each launch leaves at 0."""
    k, v = (torch.randn(4, 4096, 2, 128, device="cuda").bfloat16() for _ in range(2))
    q, lengths = torch.randn(4, 1, 16, 128, device="cuda").bfloat16(), torch.full((4,), 4096, device="cuda").int()
    call = DecodeCall(q, k, v, lengths, right=0, kernel="blackwell")
    out = torch.empty_like(q)
    ops_decode.run(call, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops_decode.run(call, out)
    for wanted in ([4096, 1, 0, 77], [3, 2000, 4000, 64]):
        lengths.copy_(torch.tensor(wanted))
        graph.replay()
        assert torch.equal(out, ops_decode.run(call)[0])
